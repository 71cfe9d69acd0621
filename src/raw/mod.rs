//! Calls NCCL's functions directly, for programs that observe NCCL's behaviour.
//!
//! The safe crate forbids most of the calls of those programs: to issue a message without its partner, to abort a
//! communicator in use, to call functions in forbidden states. What keeps them sound:
//!
//! - every such program is a process of its own, with a deadline, and ends without cleaning up;
//! - device memory ([`Memory`]) is never freed, and a communicator is only destroyed on purpose;
//! - NCCL's functions are called through [`nccl_call!`](crate::nccl_call), which takes only numbers, handles and
//!   pointers that stay valid beyond the call.

mod communicator;
pub mod operations;
mod ranks;

use std::ffi::{CStr, c_void};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use nccl_sys::{Api, Loaded};

pub use communicator::{Comm, config, last_error, settle};
pub use ranks::{HOSTS, Memory, Rank, Way, leave, run, stream_ends_within};

/// The result of code that can fail outside of NCCL.
pub type Result<T = ()> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// Stands for the result of a function that the library does not have.
pub const MISSING: u32 = u32::MAX;

/// `ncclInProgress`.
pub const IN_PROGRESS: u32 = 7;

/// The library of this process, loaded at the first call; a driver, or the emulator, is installed already.
///
/// # Panics
/// When there is none.
pub fn library() -> &'static Loaded {
    static LOADED: OnceLock<Loaded> = OnceLock::new();
    LOADED.get_or_init(|| {
        // SAFETY: on the machine of a check, a library with NCCL's name is NCCL, or the emulator.
        match unsafe { nccl_sys::Loader::new().load() } {
            Ok(loaded) => loaded,
            Err(error) => panic!("{error}"),
        }
    })
}

/// Its functions.
pub fn api() -> &'static Api {
    &library().api
}

/// Calls a function of NCCL by its name; returns its code, or [`MISSING`].
///
/// To be used only as [`raw`](crate::raw) says: pointers are null, or valid for as long as the function uses them,
/// unless the program tests that the function does not use them.
#[macro_export]
macro_rules! nccl_call {
    ($function:ident($($argument:expr),* $(,)?)) => {
        match $crate::raw::api().$function {
            // SAFETY: the prototype is that of nccl.h; arguments stay valid beyond the call, and beyond the operation
            // that it begins, because these programs free nothing (see `raw`).
            Some(function) => unsafe { function($($argument),*) }.0,
            None => $crate::raw::MISSING,
        }
    };
}

/// A C string owned by the library.
///
/// # Safety
/// `pointer` is null, or a C string in memory that is never freed.
#[must_use]
pub unsafe fn text(pointer: *const std::ffi::c_char) -> String {
    if pointer.is_null() {
        return "(null)".into();
    }
    // SAFETY: not null, so a C string by the caller's promise.
    unsafe { CStr::from_ptr(pointer) }
        .to_string_lossy()
        .into_owned()
}

/// The result of `work`, unless it takes longer than `timeout`: then `work` is left running on its thread.
pub fn bounded<T: Send + 'static>(
    timeout: Duration,
    work: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        // The receiver is gone once the timeout has passed.
        let _ = sender.send(work());
    });
    receiver.recv_timeout(timeout).ok()
}

/// Waits until `condition` holds, at most for `timeout`.
pub fn wait_until(timeout: Duration, mut condition: impl FnMut() -> bool) -> bool {
    let begun = Instant::now();
    loop {
        if condition() {
            return true;
        }
        if begun.elapsed() >= timeout {
            return false;
        }
        std::thread::yield_now();
    }
}

/// An address that threads may share.
#[derive(Clone, Copy, Debug)]
pub struct Address(pub *mut c_void);

// SAFETY: a number; the code that dereferences it is responsible for its target.
unsafe impl Send for Address {}
// SAFETY: as above.
unsafe impl Sync for Address {}
