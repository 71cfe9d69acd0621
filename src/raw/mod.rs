//! NCCL's functions called directly, for programs that find out how NCCL behaves.
//!
//! The safe crate forbids most of what those programs have to do: to leave a message without its
//! partner, to abort under somebody's feet, to call what is not to be called. What keeps them sound:
//!
//! - every such program is a process of its own, with a deadline, and ends without cleaning up;
//! - device memory ([`Memory`]) is never freed, and a communicator is only given back on purpose;
//! - NCCL's functions are called through [`nccl_call!`](crate::nccl_call), which takes nothing but
//!   numbers, handles and pointers to what outlives the call.

mod communicator;
pub mod operations;
mod ranks;

use std::ffi::{CStr, c_void};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use nccl_sys::{Api, Loaded};

pub use communicator::{Comm, config, last_error, settle};
pub use ranks::{HOSTS, Memory, Rank, Way, leave, run, stream_ends_within};

/// What can go wrong outside of NCCL.
pub type Result<T = ()> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// Stands for the result of a function that the library does not have.
pub const MISSING: u32 = u32::MAX;

/// `ncclInProgress`.
pub const IN_PROGRESS: u32 = 7;

/// The library of this process, loaded at the first call; a driver, or the emulator, is in place.
///
/// # Panics
/// When there is none.
pub fn library() -> &'static Loaded {
    static LOADED: OnceLock<Loaded> = OnceLock::new();
    LOADED.get_or_init(|| {
        // SAFETY: what answers to NCCL's name on the machine of a check is NCCL, or the emulator.
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

/// Calls a function of NCCL by its name; its code, or [`MISSING`].
///
/// To be used only as [`raw`](crate::raw) says: pointers are null, or valid for as long as the function
/// uses them, unless it is to be seen that it does not use them.
#[macro_export]
macro_rules! nccl_call {
    ($function:ident($($argument:expr),* $(,)?)) => {
        match $crate::raw::api().$function {
            // SAFETY: the prototype is that of nccl.h; what is passed outlives the call, and the
            // operation that it begins, because these programs free nothing (see `raw`).
            Some(function) => unsafe { function($($argument),*) }.0,
            None => $crate::raw::MISSING,
        }
    };
}

/// A C string that the library keeps.
///
/// # Safety
/// `pointer` is null, or a C string in memory that stays.
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

/// What `work` returns, unless it takes longer than `limit`: then it is left to itself on its thread.
pub fn bounded<T: Send + 'static>(
    limit: Duration,
    work: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        // Nobody listens any more once the limit has passed.
        let _ = sender.send(work());
    });
    receiver.recv_timeout(limit).ok()
}

/// Asks until the answer is yes, at most for `limit`.
pub fn wait_until(limit: Duration, mut condition: impl FnMut() -> bool) -> bool {
    let begun = Instant::now();
    loop {
        if condition() {
            return true;
        }
        if begun.elapsed() >= limit {
            return false;
        }
        std::thread::yield_now();
    }
}

/// An address that a thread may take along.
#[derive(Clone, Copy, Debug)]
pub struct Address(pub *mut c_void);

// SAFETY: a number; whoever uses it answers for what it points to.
unsafe impl Send for Address {}
// SAFETY: as above.
unsafe impl Sync for Address {}
