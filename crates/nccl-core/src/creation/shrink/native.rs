//! The shrink with `ncclCommShrink`, and its failures. If calls block, the idle parent is shrunk, which makes the idle
//! parent of the new communicator.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use nccl_sys as sys;

use super::attempt::{self, Attempt, CommonOutcome, Refusal};
use crate::communicator::abort_flag_parent::LockedParent;
use crate::communicator::free::{call_within, discard};
use crate::communicator::handle::{NotIdle, RawComm, state, wait_until_idle};
use crate::communicator::lifecycle::AbortOutcome;
use crate::communicator::{Communicator, EndReason, Inner};
use crate::creation::async_out::AsyncOut;
use crate::creation::init::{Begin, PreparedInit};
use crate::creation::start::SendConfig;
use crate::cuda_driver;
use crate::error::{Error, NcclFailure, Result};
use crate::ffi;
use crate::library::Library;
use crate::peers::Supervisor;
use crate::state::{Lifecycle, PartialInit};
use crate::time::{deadline_after, later};
use crate::unique_id::UniqueId;
use nccl_base::fault::Cause;

/// Carries out the agreed shrink on this rank, and returns the outcome on all ranks.
pub(super) fn shrink_native(
    comm: &Communicator,
    prepared: PreparedInit,
    agreed: &NativeShrink<'_>,
    aborting: bool,
) -> Result<Attempt> {
    let parent = &comm.inner;
    let NativeShrink { id, places, .. } = agreed;
    // A revoked communicator has already been stopped.
    let is_revoked = parent.is_revoked();
    let aborting = aborting && !is_revoked;
    if aborting
        && !parent.begin_abort(EndReason::Unannounced(
            "it was shrunk, and what ran on it was ended",
        ))
    {
        return Err(parent.final_error(parent.out_of_use()));
    }
    let timeout = parent.timeouts.init;
    let deadline = deadline_after(timeout);
    let without: Vec<i32> = (0..comm.world_size())
        .filter(|rank| !places.contains(rank))
        .map(|rank| rank as i32)
        .collect();
    let made = Arc::new(AsyncOut::default());
    let refused = Arc::new(OnceLock::new());
    let begin: Begin = {
        let (parent, made, refused) = (Arc::clone(parent), Arc::clone(&made), Arc::clone(&refused));
        Box::new(move |child, config, _| {
            let config = SendConfig(*config);
            let lifecycle = Arc::clone(&child.lifecycle);
            let shrunk = call_within(
                timeout.saturating_add(CALL_SLACK),
                "nccl-shrink",
                move || {
                    shrink_raw(
                        &parent, &lifecycle, without, config, aborting, &made, timeout,
                    )
                },
            );
            match shrunk {
                Some(Ok(raw)) => Ok((raw, Ok(()))),
                Some(Err(not_idle)) => {
                    if let Some(refusal) = not_idle.refusal() {
                        let _ = refused.set(refusal);
                        // The other ranks wait inside NCCL's call. A refusal is not a failure of the new communicator for
                        // which the ranks would have to find the cause.
                        if let Some(supervisor) = &child.supervisor {
                            Arc::clone(supervisor).announce(Cause::asked(refusal.text()));
                        }
                    }
                    Err((
                        PartialInit::Nothing,
                        not_idle.into_error("shrinking", timeout),
                    ))
                }
                None => {
                    let error = NotIdle::TimedOut.into_error("ncclCommShrink", timeout);
                    Err((PartialInit::HeldByStuckCall, error))
                }
            }
        })
    };
    let outcome = prepared.begun_by(begin).join(id, deadline, || false);
    let refused = refused.get().copied();
    // A rank whose call checks the timeout itself arrives a little later.
    let heard = attempt::exchange_outcomes(
        &**agreed.supervisor,
        agreed.ranks,
        &outcome,
        refused,
        later(deadline, CALL_SLACK),
    );
    let (common, missed) = match heard {
        Ok(common) => (common, None),
        Err(error) => (CommonOutcome::Failed, Some(error)),
    };
    let error = match outcome {
        Ok(made) if common == CommonOutcome::Made => {
            if aborting {
                Arc::clone(agreed.supervisor).announce(Cause::asked(&ended_by(comm, places)));
                parent.carry_out_abort();
            }
            return Ok(Attempt::Made(made));
        }
        Ok(made) => attempt::abort_made(&made, missed),
        Err(error) => error,
    };
    wait_for_the_cause(parent, &error);
    let cause = match (common, aborting) {
        (CommonOutcome::Refused(_), true) => Cause::asked(&ended_by(comm, places)),
        (CommonOutcome::Refused(refusal), false) => {
            Cause::asked(&format!("it was to shrink, and {}", refusal.text()))
        }
        _ => Cause::from(&error),
    };
    end_shrunk(parent, cause, aborting, is_revoked, &made);
    match common {
        CommonOutcome::Refused(refusal) => Ok(Attempt::Refused(refusal)),
        // The parent's fault has more evidence than `error`, unless the parent had already ended.
        _ if refused.is_some() && !is_revoked => Err(parent.final_error(error)),
        _ => Err(error),
    }
}

/// Returns the reason for the end of the parent, to be announced to the other ranks.
pub(super) fn ended_by(comm: &Communicator, places: &[usize]) -> String {
    let out: Vec<_> = (0..comm.world_size())
        .filter(|rank| !places.contains(rank))
        .collect();
    let are = if out.len() == 1 { "is" } else { "are" };
    format!(
        "it was shrunk, and {} {are} left out",
        comm.inner.roster().who(&out)
    )
}

/// The agreement to carry out, and the supervisor through which it was made.
pub(super) struct NativeShrink<'a> {
    pub(super) supervisor: &'a Arc<dyn Supervisor>,
    pub(super) id: &'a UniqueId,
    /// The remaining ranks, as ranks of the parent, and of the peers.
    pub(super) places: &'a [usize],
    pub(super) ranks: &'a Arc<[usize]>,
}

impl NotIdle {
    /// Returns the refusal, if the error is one: NCCL does not shrink a communicator with an asynchronous error, and must not
    /// shrink one with a launch under way.
    fn refusal(&self) -> Option<Refusal> {
        let Self::Failed(failure) = self else {
            return None;
        };
        let is = |code| failure.is(code);
        if is(sys::ncclResult_t::ncclRemoteError) {
            Some(Refusal::RemoteError)
        } else if is(sys::ncclResult_t::ncclInProgress) {
            Some(Refusal::Launching)
        } else {
            None
        }
    }
}

/// How much longer than its timeout a call may take that checks the timeout itself.
const CALL_SLACK: Duration = Duration::from_secs(2);

/// How long another thread may hold the lock for a call that is not a launch.
const BRIEF: Duration = Duration::from_millis(100);

/// Whether NCCL has unfinished work on `raw`.
fn is_in_progress(library: &Library, raw: RawComm) -> bool {
    matches!(state(library, raw), Ok(sys::ncclResult_t::ncclInProgress))
}

/// How long the rank at which a shrink failed may take to announce why the parent ends.
const CAUSE: Duration = Duration::from_secs(1);

/// If another rank ended the new communicator, waits until that rank has announced why the parent ends.
fn wait_for_the_cause(inner: &Inner, error: &Error) {
    let deadline = deadline_after(CAUSE);
    while let Some(supervisor) = &inner.supervisor
        && error.kind_is_of_fault()
        && supervisor.fault().is_none()
        && Instant::now() < deadline
    {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Ends a parent whose shrink failed, because NCCL allows no further child after one that was not made. The abort also
/// ends NCCL's work on that child.
fn end_shrunk(inner: &Arc<Inner>, cause: Cause, aborting: bool, is_revoked: bool, made: &AsyncOut) {
    let outcome = if is_revoked {
        inner.abort_revoked()
    } else if aborting {
        // The ranks that are left out wait only for this announcement.
        if let Some(supervisor) = &inner.supervisor {
            Arc::clone(supervisor).announce(cause);
        }
        inner.carry_out_abort()
    } else {
        inner.abort(EndReason::own(cause))
    };
    if outcome == AbortOutcome::Freed
        && let Some(ruin) = made.take()
    {
        let library = inner.library.clone();
        call_within(inner.timeouts.abort, "nccl-abort", move || {
            discard(&library, ruin, None);
        });
    }
}

/// Whether no launch is under way. Otherwise NCCL would continue to use what an aborting shrink has freed
/// (`ncclGroupJobAbort`, group.cc). A call that holds the lock for long counts as a launch.
pub(super) fn is_not_launching(inner: &Inner) -> bool {
    let Some(handle) = inner.handle.lock_until(deadline_after(BRIEF)) else {
        return false;
    };
    handle
        .raw
        .is_none_or(|raw| !is_in_progress(&inner.library, raw))
}

/// Calls `ncclCommShrink`, and waits until the parent is idle, or until the new communicator, `child`, is aborted. Runs
/// on a thread that may be given up.
fn shrink_raw(
    inner: &Inner,
    child: &Lifecycle,
    mut without: Vec<i32>,
    mut config: SendConfig,
    aborting: bool,
    made: &Arc<AsyncOut>,
    timeout: Duration,
) -> Result<RawComm, NotIdle> {
    const CALL: &str = "ncclCommShrink";
    let failed = NotIdle::Failed;
    let library = &inner.library;
    let handle = inner.handle.lock();
    let held = inner
        .abort_flag_parent
        .as_ref()
        .map(|idle| idle.hold_parent(deadline_after(timeout)));
    let raw = match &held {
        None => handle.raw.or_else(|| inner.revoked()),
        Some(held) => held.as_ref().and_then(LockedParent::raw),
    };
    let (Some(raw), Some(shrink)) = (raw, library.api().ncclCommShrink) else {
        return Err(failed(ffi::missing(library, CALL)));
    };
    let bound = cuda_driver::bind(&inner.context);
    if bound.is_err() {
        return Err(NotIdle::Interrupted);
    }
    let flags = match aborting {
        true => sys::NCCL_SHRINK_ABORT,
        false => sys::NCCL_SHRINK_DEFAULT,
    };
    // The parent may be ended by an abort of another rank, or by a rank that died. With `aborting`, this rank's own abort
    // has already begun.
    let is_revoked = inner.is_revoked();
    let interrupted = || match aborting {
        // A rank at which NCCL refused does not arrive.
        _ if child.get().abort_has_begun() => true,
        _ if is_revoked => inner.abort_signal.is_aborted(),
        true => inner
            .supervisor
            .as_ref()
            .is_some_and(|supervisor| supervisor.fault().is_some()),
        false => inner.interrupted(),
    };
    // Whether a launch began after the ranks had agreed; see `is_not_launching`.
    let is_launching = || aborting && !is_revoked && is_in_progress(library, raw);
    if interrupted() {
        return Err(NotIdle::Interrupted);
    }
    if is_launching() {
        let code = sys::ncclResult_t::ncclInProgress;
        let text = String::from(Refusal::Launching.text());
        return Err(failed(NcclFailure::new(CALL, code, text, String::new())));
    }
    // NCCL writes there when the parent becomes idle, possibly after this thread has been given up.
    std::mem::forget(Arc::clone(made));
    let count = without.len() as i32;
    // SAFETY: the lock is held, so no other thread calls on `raw`; the list and the config are valid for the
    // call, and the slot for as long as the process lives.
    let code = unsafe {
        shrink(
            raw.as_ptr(),
            without.as_mut_ptr(),
            count,
            made.as_out_pointer(),
            &mut config.0,
            flags,
        )
    };
    ffi::check(library, CALL, code).map_err(failed)?;
    wait_until_idle(library, raw, CALL, deadline_after(timeout), interrupted)?;
    // SAFETY: the parent is idle, so that NCCL does not write there any more.
    unsafe { Arc::decrement_strong_count(Arc::as_ptr(made)) };
    made.take()
        .ok_or_else(|| failed(ffi::missing(library, CALL)))
}
