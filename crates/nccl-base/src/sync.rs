//! The crate's locks, for files that `tests/loom` also checks; there, the locks are loom's.

#[cfg(not(loom))]
#[doc(hidden)]
pub use outside_loom::Mutex;
#[cfg(not(loom))]
#[doc(hidden)]
pub use parking_lot::{Condvar, MutexGuard};
#[cfg(loom)]
#[doc(hidden)]
pub use under_loom::{Condvar, Mutex, MutexGuard};

#[cfg(not(loom))]
mod outside_loom {
    use std::ops::{Deref, DerefMut};
    use std::panic::{RefUnwindSafe, UnwindSafe};

    /// A lock that a panic does not poison. The value stays consistent, because no panic can occur between two of its
    /// changes. Therefore a value that contains one may be used after a panic, unlike a value with a bare
    /// `parking_lot::Mutex`.
    #[derive(Debug, Default)]
    #[doc(hidden)]
    pub struct Mutex<T>(parking_lot::Mutex<T>);

    impl<T> Mutex<T> {
        #[doc(hidden)]
        pub const fn new(value: T) -> Self {
            Self(parking_lot::Mutex::new(value))
        }

        #[doc(hidden)]
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
}

/// The same interface with loom's types, as far as the tested files need it.
#[cfg(loom)]
mod under_loom {
    use std::ops::{Deref, DerefMut};
    use std::time::Duration;

    #[derive(Debug)]
    #[doc(hidden)]
    pub struct Mutex<T>(loom::sync::Mutex<T>);

    impl<T> Mutex<T> {
        #[doc(hidden)]
        pub fn new(value: T) -> Self {
            Self(loom::sync::Mutex::new(value))
        }

        #[doc(hidden)]
        pub fn lock(&self) -> MutexGuard<'_, T> {
            // A model ends with the first panic.
            MutexGuard(Some(self.0.lock().expect("no panic with the lock")))
        }
    }

    /// Empty while a [`Condvar`] has it.
    #[doc(hidden)]
    pub struct MutexGuard<'m, T>(Option<loom::sync::MutexGuard<'m, T>>);

    impl<T> Deref for MutexGuard<'_, T> {
        type Target = T;

        fn deref(&self) -> &T {
            self.0.as_ref().expect("no thread waits with it")
        }
    }

    impl<T> DerefMut for MutexGuard<'_, T> {
        fn deref_mut(&mut self) -> &mut T {
            self.0.as_mut().expect("no thread waits with it")
        }
    }

    #[derive(Debug)]
    #[doc(hidden)]
    pub struct Condvar(loom::sync::Condvar);

    impl Condvar {
        #[doc(hidden)]
        pub fn new() -> Self {
            Self(loom::sync::Condvar::new())
        }

        #[doc(hidden)]
        pub fn notify_all(&self) {
            self.0.notify_all();
        }

        /// Waits without a timeout: loom has no clock.
        #[doc(hidden)]
        pub fn wait_for<T>(&self, guard: &mut MutexGuard<'_, T>, timeout: Duration) {
            let waited = self
                .0
                .wait_timeout(guard.0.take().expect("one wait"), timeout);
            guard.0 = Some(waited.expect("no panic with the lock").0);
        }
    }
}
