//! NCCL's pointer, and the polling of its state. All calls here are made under the communicator's lock.

use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use cudarc::driver::CudaEvent;
use nccl_sys as sys;

use crate::error::{Error, ErrorKind, ErrorProperty, NcclFailure, Result};
use crate::ffi;
use crate::forked;
use crate::library::Library;
use crate::operation::OperationKind;
use crate::recorder::Writer;
use crate::state::FreeMethod;
use crate::sync::{Mutex, MutexGuard};
use crate::time::deadline_after;
use nccl_base::fault::Cause;

/// NCCL's pointer to a communicator. Used by one thread at a time, under [`Handle`]'s lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RawComm(pub(crate) NonNull<sys::ncclComm>);

// SAFETY: NCCL lets any thread call on a communicator, as long as calls do not overlap; the lock around `Handle`
// ensures that.
unsafe impl Send for RawComm {}

impl RawComm {
    pub(crate) fn as_ptr(self) -> sys::ncclComm_t {
        self.0.as_ptr()
    }
}

/// The data that the lock of a communicator protects.
pub(crate) struct Handle {
    /// `None` after the communicator was given back to NCCL.
    pub(crate) raw: Option<RawComm>,
    /// The number of operations issued so far.
    pub(crate) sequence: u64,
    /// The event that orders two streams: a wait refers to what was recorded when the wait was issued, so one event serves all.
    pub(crate) ordering_event: CudaEvent,
    /// Records the issued operations.
    pub(crate) recorder: Writer,
}

/// The lock of a communicator, its contents and its last holder.
///
/// Waiting for the lock is not part of an operation: an operation that does not get the lock within its timeout was
/// never issued, and the communicator remains usable.
pub(crate) struct HandleLock {
    handle: Mutex<Handle>,
    /// The last holder of the lock: the number of the operation, and its kind in the low byte.
    holder: AtomicU64,
    /// A copy of `raw` that can be read without the lock.
    pointer: AtomicPtr<sys::ncclComm>,
}

/// The kind byte of a call that is no operation.
const NO_OPERATION: u64 = 0xff;

pub(crate) type HandleGuard<'h> = MutexGuard<'h, Handle>;

impl HandleLock {
    pub(crate) fn new(handle: Handle) -> Self {
        Self {
            handle: Mutex::new(handle),
            holder: AtomicU64::new(0),
            pointer: AtomicPtr::default(),
        }
    }

    /// Takes the lock for an operation, waiting at most `timeout`. Also returns whether it had to wait.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`] with the holder of the lock; [`ErrorKind::Forked`].
    #[inline]
    pub(crate) fn lock_within(
        &self,
        kind: Option<OperationKind>,
        timeout: Duration,
    ) -> Result<(HandleGuard<'_>, bool)> {
        forked::check()?;
        let (handle, waited) = match self.handle.try_lock() {
            Some(handle) => (handle, false),
            None => (self.wait(timeout)?, true),
        };
        let holder = (handle.sequence + 1) << 8 | kind.map_or(NO_OPERATION, |kind| kind as u64);
        self.holder.store(holder, Ordering::Relaxed);
        Ok((handle, waited))
    }

    /// Takes the lock without a timeout: to end the communicator, on a thread that can be given up, or for a step that takes
    /// almost no time.
    pub(crate) fn lock(&self) -> HandleGuard<'_> {
        self.handle.lock()
    }

    /// Takes the lock, waiting until `deadline`.
    pub(crate) fn lock_until(&self, deadline: Instant) -> Option<HandleGuard<'_>> {
        self.handle.try_lock_until(deadline)
    }

    /// Returns NCCL's pointer, even while a call is under way. The pointer is meaningless once the state is no longer
    /// `Ready`.
    pub(crate) fn pointer(&self) -> Option<sys::ncclComm_t> {
        let pointer = self.pointer.load(Ordering::Acquire);
        (!pointer.is_null()).then_some(pointer)
    }

    /// Calls `use_slot` with the slot of the pointer; the closure may empty or fill the slot.
    pub(crate) fn with_slot<R>(&self, use_slot: impl FnOnce(&mut Option<RawComm>) -> R) -> R {
        let mut handle = self.lock();
        let result = use_slot(&mut handle.raw);
        let pointer = handle.raw.map_or(ptr::null_mut(), RawComm::as_ptr);
        self.pointer.store(pointer, Ordering::Release);
        result
    }

    /// Takes the lock if it is free.
    pub(crate) fn try_lock(&self) -> Option<HandleGuard<'_>> {
        self.handle.try_lock()
    }

    pub(crate) fn get_mut(&mut self) -> &mut Handle {
        self.handle.get_mut()
    }

    /// Returns the last holder of the lock: its kind, if it was an operation, and its number.
    pub(crate) fn last_holder(&self) -> (Option<OperationKind>, u64) {
        let holder = self.holder.load(Ordering::Relaxed);
        let kind = OperationKind::ALL.get((holder & NO_OPERATION) as usize);
        (kind.copied(), holder >> 8)
    }

    #[cold]
    fn wait(&self, timeout: Duration) -> Result<HandleGuard<'_>> {
        let before = self.holder.load(Ordering::Relaxed);
        // A timeout that exceeds the range of the clock means none.
        if let Some(handle) = self.handle.try_lock_until(deadline_after(timeout)) {
            return Ok(handle);
        }
        let holder = self.holder.load(Ordering::Relaxed);
        let mut text = match OperationKind::ALL.get((holder & NO_OPERATION) as usize) {
            Some(kind) => format!("{kind} #{}", holder >> 8),
            None => String::from("a call that is no operation"),
        };
        if holder != before {
            text.push_str(", after others,");
        }
        Err(Error::new(ErrorKind::Busy {
            holder: text,
            waited: timeout,
        }))
    }
}

/// Why a communicator did not complete a call.
#[derive(Debug)]
pub(crate) enum NotIdle {
    Failed(NcclFailure),
    TimedOut,
    Interrupted,
    /// The query of the communicator's state does not return.
    Unresponsive,
}

/// Waits a little longer each time: a few spins cost nothing, and a long wait must not take a core from the rank that
/// this rank waits for.
pub(crate) struct Backoff {
    turns: u32,
}

impl Backoff {
    pub(crate) fn new() -> Self {
        Self { turns: 0 }
    }

    pub(crate) fn pause(&mut self) {
        self.turns = self.turns.saturating_add(1);
        match self.turns {
            0..64 => std::hint::spin_loop(),
            64..256 => std::thread::yield_now(),
            256..512 => std::thread::sleep(Duration::from_micros(50)),
            _ => std::thread::sleep(Duration::from_millis(1)),
        }
    }
}

/// Queries NCCL's state of the communicator: idle, busy, or failed.
pub(crate) fn state(library: &Library, raw: RawComm) -> Result<sys::ncclResult_t, NcclFailure> {
    const CALL: &str = "ncclCommGetAsyncError";
    let mut state = sys::ncclResult_t::ncclSuccess;
    let code = match library.api().ncclCommGetAsyncError {
        // SAFETY: `raw` has not been given back (the caller holds the lock) and `state` outlives the
        // call.
        Some(get) => unsafe { get(raw.as_ptr(), &mut state) },
        None => sys::ncclResult_t::ncclInternalError,
    };
    ffi::check(library, CALL, code)?;
    Ok(state)
}

/// Polls until the communicator is idle.
pub(crate) fn wait_until_idle(
    library: &Library,
    raw: RawComm,
    call: &'static str,
    deadline: Instant,
    interrupted: impl Fn() -> bool,
) -> Result<(), NotIdle> {
    let mut backoff = Backoff::new();
    loop {
        match state(library, raw).map_err(NotIdle::Failed)? {
            sys::ncclResult_t::ncclSuccess => return Ok(()),
            sys::ncclResult_t::ncclInProgress => {}
            code => return Err(NotIdle::Failed(ffi::failure(library, call, code))),
        }
        if interrupted() {
            return Err(NotIdle::Interrupted);
        }
        if Instant::now() >= deadline {
            return Err(NotIdle::TimedOut);
        }
        backoff.pause();
    }
}

/// Frees the communicator in NCCL. May block for as long as NCCL does. If it fails, NCCL may
/// still use borrowed memory.
pub(crate) fn free(library: &Library, method: FreeMethod, raw: RawComm) -> Result<(), NcclFailure> {
    let (call, function) = match method {
        FreeMethod::Destroy => ("ncclCommDestroy", library.api().ncclCommDestroy),
        FreeMethod::Abort => ("ncclCommAbort", library.api().ncclCommAbort),
    };
    let Some(function) = function else {
        return Err(ffi::missing(library, call));
    };
    // SAFETY: `raw` was taken out of its slot by the only caller that frees it, so no other code can reach it.
    let code = unsafe { function(raw.as_ptr()) };
    ffi::check(library, call, code).map(drop)
}

impl NotIdle {
    /// Returns the cause to announce to the other ranks.
    pub(crate) fn cause(&self, what: &str, timeout: Duration) -> Cause {
        let error = match self {
            Self::Failed(failure) => Self::Failed(failure.clone()),
            Self::TimedOut => Self::TimedOut,
            Self::Interrupted => Self::Interrupted,
            Self::Unresponsive => Self::Unresponsive,
        };
        Cause::from(&error.into_error(what, timeout))
    }

    /// Returns the error for the caller.
    pub(crate) fn into_error(self, what: &str, timeout: Duration) -> Error {
        match self {
            Self::Failed(failure) => Error::new(failure),
            Self::TimedOut => Error::new(ErrorKind::TimedOut {
                what: what.to_owned(),
                timeout,
            }),
            Self::Unresponsive => Error::new(ErrorKind::TimedOut {
                what: format!(
                    "{what}, in ncclCommGetAsyncError, which should not block and has not returned,"
                ),
                timeout,
            })
            .with_property(ErrorProperty::Inside),
            Self::Interrupted => Error::new(ErrorKind::Aborted {
                reason: format!("it was ended during {what}"),
            }),
        }
    }
}

/// Revokes a communicator whose calls do not block, until `deadline`. The caller owns `raw`: it was taken out of its handle, so
/// that no other call uses it.
pub(super) fn revoke_raw(
    library: &Library,
    raw: RawComm,
    deadline: Instant,
) -> Result<(), NotIdle> {
    const CALL: &str = "ncclCommRevoke";
    let Some(revoke) = library.api().ncclCommRevoke else {
        return Err(NotIdle::Failed(ffi::missing(library, CALL)));
    };
    // With a launch under way, NCCL would continue to use what the revoke has freed (`ncclGroupJobAbort`, group.cc).
    if state(library, raw).map_err(NotIdle::Failed)? != sys::ncclResult_t::ncclSuccess {
        return Err(NotIdle::Interrupted);
    }
    // SAFETY: the caller owns `raw`.
    let code = unsafe { revoke(raw.as_ptr(), sys::NCCL_REVOKE_DEFAULT) };
    ffi::check(library, CALL, code).map_err(NotIdle::Failed)?;
    wait_until_idle(library, raw, CALL, deadline, || false)
}
