//! The calls that free a communicator in NCCL.
//!
//! `ncclCommDestroy` and `ncclCommAbort` may block although they should not, so each runs on a thread that
//! can be given up.

use std::io;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use nccl_sys as sys;

use super::handle::{NotIdle, RawComm, free, revoke_raw, wait_until_idle};
use super::{AbortFlagParent, Inner, SharedLaunch};
use crate::error::NcclFailure;
use crate::events;
use crate::ffi;
use crate::library::Library;
use crate::state::{FreeMethod, NcclSide};
use crate::threads;
use crate::time::deadline_after;

/// Why NCCL is not called: it would unmap the windows that this kernel uses.
pub(super) const KERNEL: &str = "a kernel that reaches the memory of other ranks, and is not over,";

impl NcclSide for Arc<Inner> {
    type Raw = RawComm;
    type Failure = NcclFailure;

    fn interrupt_calls(&self) {
        if let Some(abort_flag_parent) = &self.abort_flag_parent {
            abort_flag_parent.raise();
        }
    }

    fn slot<R>(&self, use_slot: impl FnOnce(&mut Option<RawComm>) -> R) -> R {
        self.handle.with_slot(use_slot)
    }

    fn free(&self, method: FreeMethod, raw: RawComm) -> Result<(), NcclFailure> {
        // The rest of the time is for NCCL. Divided first: without a timeout, a multiplication would overflow.
        let deadline = deadline_after(self.timeouts.abort / 4 * 3);
        let mut is_revoked = false;
        if method == FreeMethod::Abort {
            // A kernel may be queued behind an operation of NCCL's that hangs, and then ends only after that operation.
            self.interrupt_calls();
            is_revoked = self.revoke_before_peer_kernels(raw);
        }
        if !self.end_peer_kernels(deadline) {
            let code = sys::ncclResult_t::ncclInProgress;
            return Err(ffi::failure(&self.library, KERNEL, code))
                .inspect_err(|failure| self.log_not_freed(failure));
        }
        // NCCL waits for graphs that hold the communicator. Every graph is in the list by now, because a capture holds
        // the lock.
        self.destroy_plans();
        if method == FreeMethod::Abort {
            self.watch_for_release();
        }
        let launch = self.shared_launch();
        let _first = launch.as_ref().map(|launch| launch.0.lock());
        if method == FreeMethod::Abort && self.revoke_instead(raw, is_revoked) {
            // NCCL has released all borrowed memory, and keeps the communicator.
            return Ok(());
        }
        let freed = free_with(
            &self.library,
            method,
            raw,
            self.abort_flag_parent.as_deref(),
        );
        freed.inspect_err(|failure| self.log_not_freed(failure))
    }
}

impl Inner {
    /// Logs that NCCL refused to free the communicator.
    pub(super) fn log_not_freed(&self, failure: &NcclFailure) {
        events::not_freed(Some((&self.name, self.roster(), self.rank)), failure);
    }

    /// Ends the operations of NCCL behind which kernels are queued, if the communicator has no abort-flag parent for that: a
    /// revoke ends them and keeps the windows. Returns whether NCCL has revoked the communicator. If it has no revoke, or
    /// refuses, kernels that are queued behind such an operation do not end, and the communicator is leaked.
    fn revoke_before_peer_kernels(&self, raw: RawComm) -> bool {
        if self.has_blocking_calls || self.peer_kernels.are_over() {
            return false;
        }
        self.peer_kernels.leave();
        let launch = self.shared_launch();
        let _first = launch.as_ref().map(|launch| launch.0.lock());
        let deadline = deadline_after(self.timeouts.abort / 4);
        revoke_raw(&self.library, raw, deadline).is_ok()
    }

    /// Returns the launch, under way or unfinished, that the communicator shares with others; to be locked while the
    /// communicator is freed.
    pub(super) fn shared_launch(&self) -> Option<Arc<SharedLaunch>> {
        self.shared_launch.lock().clone()
    }
}

/// Frees a communicator together with its abort-flag parent: an abort frees the parent first, a destroy frees it
/// last. See [`free`].
pub(crate) fn free_with(
    library: &Library,
    method: FreeMethod,
    raw: RawComm,
    abort_flag_parent: Option<&AbortFlagParent>,
) -> Result<(), NcclFailure> {
    let Some(abort_flag_parent) = abort_flag_parent else {
        return free(library, method, raw);
    };
    match method {
        FreeMethod::Destroy => {
            free(library, method, raw)?;
            abort_flag_parent.destroy_parent(|parent| free(library, method, parent))
        }
        FreeMethod::Abort => {
            let parent_freed = abort_flag_parent.raise();
            abort_flag_parent.wait_for_finalize();
            let freed = free(library, method, raw);
            if freed.is_err() {
                abort_flag_parent.leak_child_out_pointer();
            }
            // If `raw` is an unfinished parent, the split may have written a child by then.
            let child = abort_flag_parent.take_child();
            let child = child.map_or(Ok(()), |child| free(library, method, child));
            let parent = match parent_freed {
                true => Ok(()),
                false => Err(ffi::missing(library, "ncclCommAbort")),
            };
            freed.and(child).and(parent)
        }
    }
}

/// Aborts a communicator that was made too late, or incompletely, so that no [`Communicator`](crate::Communicator) exists for
/// it. Blocks for as long as NCCL does.
pub(crate) fn discard(
    library: &Library,
    raw: RawComm,
    abort_flag_parent: Option<&AbortFlagParent>,
) {
    if let Err(failure) = free_with(library, FreeMethod::Abort, raw, abort_flag_parent) {
        events::not_freed(None, &failure);
    }
}

/// Aborts several communicators in one group, so that no abort waits for a later one; returns for each whether
/// NCCL freed it. May block for as long as NCCL does.
pub(super) fn abort_in_a_group(
    library: &Library,
    raws: &[RawComm],
) -> Vec<Result<(), NcclFailure>> {
    let group = |call: &'static str, function: Option<unsafe extern "C" fn() -> _>| {
        let function = function.ok_or_else(|| ffi::missing(library, call))?;
        // SAFETY: takes no arguments. This thread is in no group before the first call; the second one closes it.
        ffi::check(library, call, unsafe { function() }).map(drop)
    };
    let none = |failure: NcclFailure| raws.iter().map(|_| Err(failure.clone())).collect();
    let api = library.api();
    if let Err(failure) = group("ncclGroupStart", api.ncclGroupStart) {
        return none(failure);
    }
    let abort = |&raw: &RawComm| free(library, FreeMethod::Abort, raw);
    let called = raws.iter().map(abort).collect();
    match group("ncclGroupEnd", api.ncclGroupEnd) {
        Ok(()) => called,
        Err(failure) => none(failure),
    }
}

/// Finalizes a communicator, and then its abort-flag parent.
pub(super) fn finalize_with(
    library: &Library,
    raw: RawComm,
    abort_flag_parent: Option<&Arc<AbortFlagParent>>,
    deadline: Instant,
    interrupted: impl Fn() -> bool,
) -> Result<(), NotIdle> {
    let Some(abort_flag_parent) = abort_flag_parent else {
        return finalize_raw(library, raw, deadline, interrupted);
    };
    finalize_blocking(library, raw, abort_flag_parent, deadline, &interrupted)?;
    // The parent has nothing to flush, but its end completes together with the parents of the other ranks.
    let ended = abort_flag_parent
        .with_parent(|parent| finalize_raw(library, parent, deadline, &interrupted));
    ended.unwrap_or(Ok(()))
}

/// Finalizes a communicator whose calls block, on a thread of its own. If the deadline passes, that thread is
/// still inside when this returns, until the abort-flag parent is raised.
fn finalize_blocking(
    library: &Library,
    raw: RawComm,
    abort_flag_parent: &Arc<AbortFlagParent>,
    deadline: Instant,
    interrupted: impl Fn() -> bool,
) -> Result<(), NotIdle> {
    const LOOK: Duration = Duration::from_millis(1);
    let (entered, inside) = mpsc::sync_channel(1);
    let (sender, receiver) = mpsc::sync_channel(1);
    let (library, abort_flag_parent) = (library.clone(), Arc::clone(abort_flag_parent));
    let spawned = threads::spawn("nccl-finalize", move || {
        let finalizing = abort_flag_parent.lock_finalize();
        let _ = entered.send(());
        let finalized = call_finalize(&library, raw);
        drop(finalizing);
        let _ = sender.send(finalized);
    });
    // Without a thread, the caller aborts. With a thread, waits for the finalize to begin, so that `wait_for_finalize`
    // cannot succeed too early.
    if spawned.is_err() || inside.recv().is_err() {
        return Err(NotIdle::Interrupted);
    }
    loop {
        match receiver.recv_timeout(LOOK) {
            Ok(Ok(())) => return Ok(()),
            // The abort-flag parent ended the finalize.
            Ok(Err(_)) if interrupted() => return Err(NotIdle::Interrupted),
            Ok(Err(failure)) => return Err(NotIdle::Failed(failure)),
            Err(mpsc::RecvTimeoutError::Disconnected) => return Err(NotIdle::Interrupted),
            Err(mpsc::RecvTimeoutError::Timeout) => {}
        }
        if interrupted() {
            return Err(NotIdle::Interrupted);
        }
        if Instant::now() >= deadline {
            return Err(NotIdle::TimedOut);
        }
    }
}

const FINALIZE: &str = "ncclCommFinalize";

fn finalize_raw(
    library: &Library,
    raw: RawComm,
    deadline: Instant,
    interrupted: impl Fn() -> bool,
) -> Result<(), NotIdle> {
    call_finalize(library, raw).map_err(NotIdle::Failed)?;
    wait_until_idle(library, raw, FINALIZE, deadline, interrupted)
}

/// Calls `ncclCommFinalize`. The caller owns `raw`, and no other call on it is under way.
fn call_finalize(library: &Library, raw: RawComm) -> Result<(), NcclFailure> {
    let Some(finalize) = library.api().ncclCommFinalize else {
        return Ok(());
    };
    // SAFETY: guaranteed by the caller.
    let code = unsafe { finalize(raw.as_ptr()) };
    ffi::check(library, FINALIZE, code).map(drop)
}

/// Runs `work` on a thread of its own, and waits for the result for at most `timeout`.
pub(crate) fn call_within<T: Send + 'static>(
    timeout: Duration,
    name: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    match call_on_thread(name, work) {
        Ok(receiver) => receiver.recv_timeout(timeout).ok(),
        Err(error) => {
            events::no_thread("to end a communicator", &error);
            None
        }
    }
}

/// Runs `work` on a thread of its own, which sends the result; an error if there is no thread.
pub(super) fn call_on_thread<T: Send + 'static>(
    name: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<mpsc::Receiver<T>> {
    let (sender, receiver) = mpsc::sync_channel(1);
    threads::spawn(name, move || {
        // The receiver is gone if the deadline has passed.
        let _ = sender.send(work());
    })?;
    Ok(receiver)
}
