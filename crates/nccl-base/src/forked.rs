//! Processes that are forked from one that uses this crate.
//!
//! A forked child has a copy of every value and none of the threads: a lock that another thread held at the fork is held for
//! ever, sockets and shared memory are the parent's, and CUDA does not work. So a child uses and releases
//! nothing: calls fail with [`ErrorKind::Forked`], and drops leave everything as it is.
//!
//! A handler of `pthread_atfork` sets one word in the child before any code of the program runs there. The alternative, a page
//! with `MADV_WIPEONFORK`, would also detect children made with `_Fork` or a bare `clone`, but costs a second load per call and
//! does not exist in every sandbox; CUDA itself does not detect those either.
//!
//! The word is checked in:
//! - [`check`]: calls that enter a communicator (`Frame::admit`, `Turn::take`, `Request`), requests to the other ranks (`Line`),
//!   and lookups of functions in the library (`Library::function`);
//! - [`ForkGuarded`]: values that handles own;
//! - `drop_queue::is_closed`: deferred releases, and the exit of the process.

use std::fmt;
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use crate::error::{Error, ErrorKind, Result};

/// Set in a child, never reset.
static CHILD: AtomicBool = AtomicBool::new(false);

/// The first process that used this crate.
static MADE_BY: AtomicU32 = AtomicU32::new(0);

/// Returns whether this process was forked from one that used this crate.
#[inline]
#[doc(hidden)]
pub fn is_child() -> bool {
    CHILD.load(Ordering::Relaxed)
}

/// Refuses the use of this crate in a forked child.
#[inline]
#[doc(hidden)]
pub fn check() -> Result<()> {
    match is_child() {
        false => Ok(()),
        true => Err(error()),
    }
}

#[cold]
fn error() -> Error {
    Error::new(ErrorKind::Forked {
        made_by: MADE_BY.load(Ordering::Relaxed),
    })
}

/// Like [`check`], and installs the detection of forked children. To be called before anything is created.
#[doc(hidden)]
pub fn begin() -> Result<()> {
    check()?;
    watch();
    Ok(())
}

/// Installs the detection of children of this process.
#[doc(hidden)]
pub fn watch() {
    static WATCHED: AtomicBool = AtomicBool::new(false);
    // No `Once`: a child that is forked in the middle of one would wait for it for ever.
    if is_child() || WATCHED.swap(true, Ordering::Relaxed) {
        return;
    }
    MADE_BY.store(std::process::id(), Ordering::Relaxed);
    // If this fails (no memory), a forked child is not detected.
    // SAFETY: the handler is a plain function that stores one word, which a child may do at any time.
    unsafe { libc::pthread_atfork(None, None, Some(in_the_child)) };
}

extern "C" fn in_the_child() {
    CHILD.store(true, Ordering::Relaxed);
}

/// A value that belongs to the process that made it. A forked child that drops it leaves it unchanged.
#[doc(hidden)]
pub struct ForkGuarded<T>(ManuallyDrop<T>);

impl<T> ForkGuarded<T> {
    #[inline]
    #[doc(hidden)]
    pub fn new(value: T) -> Self {
        Self(ManuallyDrop::new(value))
    }
}

impl<T> Drop for ForkGuarded<T> {
    #[inline]
    fn drop(&mut self) {
        if !is_child() {
            // SAFETY: dropped once, here, and not used afterwards.
            unsafe { ManuallyDrop::drop(&mut self.0) };
        }
    }
}

impl<T> Deref for ForkGuarded<T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T> DerefMut for ForkGuarded<T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        &mut self.0
    }
}

impl<T: Clone> Clone for ForkGuarded<T> {
    #[inline]
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<T: fmt::Debug> fmt::Debug for ForkGuarded<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}
