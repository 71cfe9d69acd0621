//! Revokes a communicator: ends all operations on all ranks, and keeps NCCL's communicator for a shrink.
//!
//! To its users, a revoked communicator behaves like an aborted one: its operations end without a result, on every
//! rank, for the same reason, and an error is returned only when no rank writes into this rank's memory any more. So
//! the code path is the same; but instead of freeing the pointer, the abort calls `ncclCommRevoke` and keeps the
//! pointer. NCCL then still allows a shrink and an abort. The abort happens when the last handle is dropped, because a
//! destroy could wait for ranks that are gone.
//!
//! If calls block, only the abort of the idle parent makes a thread leave the child. NCCL could revoke the child afterwards and
//! shrink it, but that shrink would be a blocking call that cannot be ended if a rank dies meanwhile: the flag of the child
//! cannot be raised without freeing the child under the thread (`nccl-emulator/tests/real_modes.rs`). So here the revoke aborts
//! parent and child, which ends and releases the same things, and a shrink makes a new communicator.
//!
//! A rank that cannot revoke aborts instead; then the other ranks cannot use NCCL's own shrink.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use nccl_sys as sys;

use super::Inner;
use super::end_reason::EndReason;
use super::free::call_within;
use super::handle::{RawComm, free, revoke_raw};
use super::lifecycle::AbortOutcome;
use crate::drop_queue;
use crate::error::{Error, ErrorKind, Result};
use crate::events;
use crate::forked;
use crate::operation::{OperationKind, Shape};
use crate::state::{FreeMethod, State};
use crate::time::deadline_after;
use nccl_base::fault::{Cause, FaultClass};

/// Ends the current and all further operations on all ranks, except a shrink.
pub(super) fn revoke(inner: &Arc<Inner>, reason: &str) -> Result<()> {
    let started = Instant::now();
    inner.revoke(reason).map_err(|error| {
        let fault = inner
            .supervisor
            .as_ref()
            .and_then(|supervisor| supervisor.fault());
        let error = match fault {
            // The other ranks end because of this call; this call fails because it took too long.
            Some(fault) if error.is_timeout() && fault.is_on_purpose() => error.with_fault(fault),
            _ => inner.final_error(error),
        };
        error.during(|| inner.operation(OperationKind::Revoke, Shape::default(), None, started))
    })
}

impl Inner {
    fn revoke(self: &Arc<Self>, reason: &str) -> Result<()> {
        forked::check()?;
        if !self.has_blocking_calls {
            self.library.function(sys::Api::ncclCommRevoke)?;
        }
        if self.has_blocking_calls && self.abort_flag_parent.is_none() {
            return Err(Error::new(ErrorKind::InvalidConfig {
                field: "blocking",
                reason: String::from(
                    "a communicator that was made elsewhere and whose calls block cannot be revoked: abort it",
                ),
            }));
        }
        self.revocation.wanted.store(true, Ordering::Release);
        if !self.begin_abort(EndReason::own(Cause::revoked(reason))) {
            return Err(self.out_of_use());
        }
        match self.carry_out_abort() {
            AbortOutcome::Freed if self.ended_by_revoke() => Ok(()),
            // Another fault has ended the communicator on all ranks, or NCCL refused.
            AbortOutcome::Freed => Err(self.out_of_use()),
            AbortOutcome::Leaked => Err(Error::new(ErrorKind::TimedOut {
                what: String::from(match self.has_blocking_calls {
                    true => "ncclCommAbort",
                    false => "ncclCommRevoke",
                }),
                timeout: self.abort_timeout(),
            })),
        }
    }

    /// Waits until a revoke under way is over, which may be later than its errors; a shrink needs that.
    pub(crate) fn wait_until_revoked(&self) {
        if !self.has_blocking_calls
            && self.lifecycle.get() == State::Aborting
            && self.is_to_be_revoked()
        {
            self.wait_for_end();
        }
    }

    /// Whether NCCL still has the revoked communicator, so that it can be shrunk.
    pub(crate) fn is_revoked(&self) -> bool {
        self.revocation.kept.lock().is_some()
    }

    /// Returns NCCL's pointer to a revoked communicator.
    pub(crate) fn revoked(&self) -> Option<RawComm> {
        *self.revocation.kept.lock()
    }

    /// Revokes `raw` instead of aborting it, unless it is revoked already, if all ranks only want a revoke; returns whether that
    /// was done. Runs on a thread that may be given up.
    pub(super) fn revoke_instead(&self, raw: RawComm, is_revoked: bool) -> bool {
        if self.has_blocking_calls || !self.is_to_be_revoked() {
            return false;
        }
        // NCCL refuses a second revoke.
        let revoked = match is_revoked {
            true => Ok(()),
            false => revoke_raw(&self.library, raw, deadline_after(self.timeouts.abort)),
        };
        match revoked {
            Ok(()) => {
                *self.revocation.kept.lock() = Some(raw);
                true
            }
            Err(not_idle) => {
                let (rank, roster) = (self.rank, self.roster());
                let (world_rank, launcher_rank) =
                    (roster.world_rank(rank), roster.launcher_rank(rank));
                tracing::warn!(name: "nccl.comm.not_revoked", target: "nccl", comm = &*self.name, world_ranks = roster.world_ranks(), rank, world_rank, launcher_rank, unsettled=?not_idle, "not revoked but aborted");
                false
            }
        }
    }

    fn is_to_be_revoked(&self) -> bool {
        // The fault on which all ranks agreed decides; before it is known, this rank's own call decides.
        let fault = self
            .supervisor
            .as_ref()
            .and_then(|supervisor| supervisor.fault());
        match fault {
            Some(fault) => fault.class == FaultClass::Revoked,
            None => self.revocation.wanted.load(Ordering::Acquire),
        }
    }

    /// Whether the communicator has ended because of a revoke.
    fn ended_by_revoke(&self) -> bool {
        match self.has_blocking_calls {
            true => self.is_to_be_revoked(),
            false => self.is_revoked(),
        }
    }

    /// Aborts a revoked communicator that NCCL does not shrink any more.
    pub(crate) fn abort_revoked(self: &Arc<Self>) -> AbortOutcome {
        let inner = Arc::clone(self);
        let freed = call_within(self.timeouts.abort, "nccl-abort", move || {
            // Waits for a call that is under way.
            let _handle = inner.handle.lock();
            let raw = inner.revocation.kept.lock().take();
            let freed = match raw {
                Some(raw) => {
                    let freed = free(&inner.library, FreeMethod::Abort, raw);
                    freed
                        .inspect_err(|failure| inner.log_not_freed(failure))
                        .is_ok()
                }
                None => true,
            };
            if !freed {
                // NCCL may still use borrowed memory.
                std::mem::forget(Arc::clone(&inner));
            }
            freed
        });
        if freed == Some(true) {
            return AbortOutcome::Freed;
        }
        // Memory that is registered with the communicator or owned by its plans must not be freed.
        if self.lifecycle.set_leaked_after_revoke() {
            self.report_leak();
        }
        AbortOutcome::Leaked
    }

    /// Aborts a revoked communicator whose last handle is dropped.
    pub(super) fn end_revoked(&mut self) {
        let Some(raw) = self.revocation.kept.lock().take() else {
            return;
        };
        let of = (Arc::clone(&self.name), Arc::clone(self.roster()), self.rank);
        let raw = (self.library.clone(), raw, self.capture_stream.take());
        let end = move |(library, raw, capture_stream): (_, RawComm, _)| {
            if let Err(failure) = free(&library, FreeMethod::Abort, raw) {
                let (name, roster, rank) = &of;
                events::not_freed(Some((name, roster, *rank)), &failure);
                std::mem::forget(capture_stream);
            }
        };
        if let Err(raw) = drop_queue::run_on_thread(raw, end) {
            std::mem::forget(raw);
        }
    }
}
