//! The locks of the emulators.

use std::ops::{Deref, DerefMut};
use std::panic::{RefUnwindSafe, UnwindSafe};

pub use parking_lot::{Condvar, MutexGuard, RwLockReadGuard, RwLockWriteGuard};

/// A lock that no panic poisons: its value stays consistent, because no panic interrupts a series of changes.
/// Therefore types that contain it are unwind-safe, unlike those with a bare `parking_lot::Mutex`.
///
/// ```
/// let lock = cuda_emulator::sync::Mutex::new(1);
/// assert!(std::panic::catch_unwind(|| {
///     *lock.lock() += 1;
///     panic!("with the lock");
/// }).is_err());
/// assert_eq!(*lock.lock(), 2);
/// ```
#[derive(Debug, Default)]
pub struct Mutex<T>(parking_lot::Mutex<T>);

impl<T> Mutex<T> {
    /// Creates an unlocked lock.
    ///
    /// ```
    /// static SEEN: cuda_emulator::sync::Mutex<u32> = cuda_emulator::sync::Mutex::new(0);
    /// *SEEN.lock() += 1;
    /// ```
    pub const fn new(value: T) -> Self {
        Self(parking_lot::Mutex::new(value))
    }

    /// Returns the value.
    ///
    /// ```
    /// assert_eq!(cuda_emulator::sync::Mutex::new(3).into_inner(), 3);
    /// ```
    pub fn into_inner(self) -> T {
        self.0.into_inner()
    }
}

impl<T> Deref for Mutex<T> {
    type Target = parking_lot::Mutex<T>;

    fn deref(&self) -> &parking_lot::Mutex<T> {
        &self.0
    }
}

impl<T> DerefMut for Mutex<T> {
    fn deref_mut(&mut self) -> &mut parking_lot::Mutex<T> {
        &mut self.0
    }
}

impl<T> UnwindSafe for Mutex<T> {}
impl<T> RefUnwindSafe for Mutex<T> {}

/// A [`Mutex`] for several readers or one writer.
///
/// ```
/// let lock = cuda_emulator::sync::RwLock::new(1);
/// let (one, other) = (lock.read(), lock.read());
/// assert_eq!(*one, *other);
/// ```
#[derive(Debug, Default)]
pub struct RwLock<T>(parking_lot::RwLock<T>);

impl<T> RwLock<T> {
    /// Creates an unlocked lock.
    ///
    /// ```
    /// static SEEN: cuda_emulator::sync::RwLock<u32> = cuda_emulator::sync::RwLock::new(0);
    /// *SEEN.write() += 1;
    /// ```
    pub const fn new(value: T) -> Self {
        Self(parking_lot::RwLock::new(value))
    }
}

impl<T> Deref for RwLock<T> {
    type Target = parking_lot::RwLock<T>;

    fn deref(&self) -> &parking_lot::RwLock<T> {
        &self.0
    }
}

impl<T> UnwindSafe for RwLock<T> {}
impl<T> RefUnwindSafe for RwLock<T> {}
