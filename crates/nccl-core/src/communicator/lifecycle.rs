//! The requested end of a communicator: finalize and abort.
//!
//! `state` decides which thread has NCCL's pointer and frees it. This module adds the deadlines, the messages to
//! other ranks, and the caller's errors.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::context_lost::DetectionPhase;
use super::end_reason::EndReason;
use super::free::{call_on_thread, call_within, finalize_with};
use super::handle::NotIdle;
use super::{Inner, registry};
use crate::drop_queue;
use crate::error::{Error, ErrorKind, ErrorProperty, Result, StreamRefusal};
use crate::events;
use crate::forked;
use crate::operation::{OperationKind, Shape};
use crate::peers::{AbortHandle, PendingEnd};
use crate::state::{Retired, State};
use crate::threads;
use crate::time::deadline_after;
use nccl_base::fault::{Fault, short_key};

/// How much longer a wait that checks its timeout itself may take.
const LATE_CHECK: Duration = Duration::from_secs(1);

/// The outcome of an abort.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AbortOutcome {
    /// NCCL has freed everything.
    Freed,
    /// NCCL did not return in time.
    Leaked,
}

/// Waits until all issued operations are done on all ranks, and frees the communicator.
pub(super) fn finalize(inner: &Arc<Inner>) -> Result<()> {
    let started = Instant::now();
    let (rank, roster) = (inner.rank, inner.roster());
    let span = tracing::info_span!(
        target: "nccl",
        "nccl.comm.finalize",
        comm = &*inner.name,
        world_ranks = roster.world_ranks(),
        rank,
        world_rank = roster.world_rank(rank),
        launcher_rank = roster.launcher_rank(rank),
        nranks = inner.world_size
    );
    let _entered = span.enter();
    let ended = inner.finalize();
    // Adds the failure of an exchange whose request was dropped.
    let ended = ended.and_then(|()| inner.peer_kernels.failure().map_or(Ok(()), Err));
    ended.map_err(|error| {
        inner
            .final_error(error)
            .during(|| inner.operation(OperationKind::Finalize, Shape::default(), None, started))
    })
}

/// Aborts the communicator immediately, whatever its state.
pub(super) fn abort(inner: &Arc<Inner>, reason: &str) -> Result<()> {
    forked::check()?;
    let started = Instant::now();
    match inner.abort(reason) {
        AbortOutcome::Freed => Ok(()),
        AbortOutcome::Leaked => Err(Error::new(ErrorKind::TimedOut {
            what: inner.blocked_call_text(),
            timeout: inner.abort_timeout(),
        })
        .during(|| inner.operation(OperationKind::Abort, Shape::default(), None, started))),
    }
}

impl Inner {
    /// Returns the name of the call that did not return, and what it may be waiting for.
    fn blocked_call_text(&self) -> String {
        match self.plans.alive()[..] {
            // Graphs that the program captured itself are not in the list.
            [] => String::from(
                "ncclCommAbort, which waits for calls under way and for graphs captured elsewhere,",
            ),
            [plan] => format!("ncclCommAbort, which waits for the graph of plan {plan},"),
            ref plans => format!("ncclCommAbort, which waits for the graphs of plans {plans:?},"),
        }
    }

    pub(crate) fn abort<'w>(self: &Arc<Self>, why: impl Into<EndReason<'w>>) -> AbortOutcome {
        if self.begin_abort(why.into()) {
            self.carry_out_abort()
        } else {
            self.wait_for_end()
        }
    }

    /// Aborts because of an error outside of NCCL's own operations, without waiting for the end.
    #[doc(hidden)]
    pub fn fail(self: &Arc<Self>, error: &Error) {
        self.abort_in_background(error);
    }

    /// Like [`fail`](Self::fail), for an error of this rank alone in a call that all ranks make: they would wait for this rank
    /// until their timeouts. Returns the error for the caller.
    #[cold]
    #[doc(hidden)]
    pub fn fail_alone(self: &Arc<Self>, error: Error) -> Error {
        self.fail(&error);
        self.final_error(error)
    }

    /// Begins an abort without waiting for its end.
    pub(crate) fn abort_in_background<'w>(self: &Arc<Self>, why: impl Into<EndReason<'w>>) {
        if self.begin_abort(why.into()) {
            self.carry_out_abort_in_background();
        }
    }

    /// Aborts, waits until NCCL has released borrowed memory, and returns whether it has.
    pub(crate) fn abort_until_released<'w>(
        self: &Arc<Self>,
        why: impl Into<EndReason<'w>>,
    ) -> bool {
        self.abort_in_background(why);
        self.wait_until_released()
    }

    /// Waits until NCCL has released borrowed memory, at most as long as an end may take. To be called after the end
    /// has begun.
    fn wait_until_released(&self) -> bool {
        let deadline = deadline_after(self.end_timeout());
        while !self.lifecycle.is_released() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
        self.lifecycle.is_released() && self.lifecycle.get() != State::Leaked
    }

    /// Starts [`carry_out_abort`](Self::carry_out_abort) in the background.
    pub(crate) fn carry_out_abort_in_background(self: &Arc<Self>) {
        let inner = Arc::clone(self);
        let spawned = threads::spawn("nccl-abort", move || inner.carry_out_abort());
        if let Err(error) = spawned {
            events::no_thread("for an abort", &error);
            let _ = self.finish_abort(false);
        }
    }

    /// Returns the error for the caller. If the communicator is being aborted, first waits until NCCL has released
    /// borrowed memory on all reachable ranks, because those may write into this rank's memory until then; the error
    /// then carries the fault that all ranks report. An error that means a lost device begins the abort.
    #[cold]
    #[doc(hidden)]
    pub fn final_error(self: &Arc<Self>, error: Error) -> Error {
        self.abort_if_context_lost(&error, DetectionPhase::AfterIssue);
        let may_follow_from_abort = matches!(
            error.kind(),
            ErrorKind::Aborted { .. }
                | ErrorKind::TimedOut { .. }
                | ErrorKind::Queued { .. }
                | ErrorKind::Nccl(_)
                | ErrorKind::Cuda { .. }
                | ErrorKind::Stream {
                    reason: StreamRefusal::CapturedMeanwhile | StreamRefusal::InGraph,
                    ..
                }
        ) || error.is(ErrorProperty::NoThread);
        if !may_follow_from_abort || !self.lifecycle.get().abort_has_begun() {
            return error;
        }
        self.wait_until_released();
        let Some(supervisor) = &self.supervisor else {
            return error;
        };
        match supervisor.fault() {
            Some(fault) => error.because_of(
                fault,
                supervisor.is_own(fault),
                supervisor.unconfirmed_text(),
            ),
            None => error,
        }
    }

    /// Registers the communicator: from now on faults of other ranks, and an abort of the whole process, end it.
    pub(crate) fn register(self: &Arc<Self>) {
        registry::register(self);
        let Some(supervisor) = &self.supervisor else {
            return;
        };
        // A fault may already have occurred.
        if let Some(fault) = supervisor.attach(AbortHandle::new(self)) {
            self.abort_in_background(&fault);
        }
    }

    /// Begins an abort because of the decided `fault`. Never waits. Returns whether this call began the
    /// abort.
    pub(crate) fn begin_end(&self, fault: &Arc<Fault>) -> bool {
        self.begin_abort(EndReason::ReportedFault(fault))
    }

    /// Begins an abort; returns true to the one caller that has to carry it out.
    pub(crate) fn begin_abort(&self, why: EndReason<'_>) -> bool {
        let reason = match &why {
            EndReason::OwnCause(cause) => cause.text().to_owned(),
            EndReason::ReportedFault(fault) => fault.to_string(),
            EndReason::Unannounced(reason) => (*reason).to_owned(),
        };
        if !self.lifecycle.begin_abort(&reason) {
            return false;
        }
        let _ = self
            .abort_started
            .set((Instant::now(), self.abort_timeout()));
        *self.exit_hold.lock() = Some(drop_queue::ExitHold::begin());
        self.peer_kernels.leave();
        let roster = self.roster();
        let world_ranks = roster.world_ranks();
        tracing::warn!(
            name: "nccl.comm.aborting",
            target: "nccl",
            comm = &*self.name,
            comm_key = self.track_handle.track().identity.key.as_deref().map(short_key),
            world_ranks,
            rank = self.rank,
            world_rank = roster.world_rank(self.rank),
            launcher_rank = roster.launcher_rank(self.rank),
            nranks = self.world_size,
            reason = &*reason,
            "aborting a communicator"
        );
        if !matches!(why, EndReason::Unannounced(_)) {
            self.track_handle.aborted(&reason);
        }
        if let EndReason::OwnCause(cause) = why {
            match &self.supervisor {
                // Announced before NCCL is called: this abort may return only after the other ranks abort.
                Some(supervisor) => Arc::clone(supervisor).announce(*cause),
                // Without a supervisor, no other code logs the fault.
                None => {
                    let place = (&*self.name, &**self.roster());
                    let cause = match self.world_size {
                        1 => cause.of_one_rank(),
                        _ => *cause,
                    };
                    let fault = Fault::here(cause, place, self.rank, self.generation(), |_| None);
                    let key = self.track_handle.track().identity.key.as_deref();
                    events::fault(&fault, key, self.rank, self.world_size);
                }
            }
        }
        true
    }

    /// Returns how long NCCL may take to free the communicator: the abort timeout, or, if NCCL first has to notice the abort
    /// inside its work, the time for that if it is longer.
    pub(crate) fn abort_timeout(&self) -> Duration {
        if let Some((_, timeout)) = self.abort_started.get() {
            return *timeout;
        }
        let timeout = self.timeouts.abort;
        // A thread that polls a launch, or makes the communicator, has the pointer or the lock.
        let is_held = || {
            self.handle
                .try_lock()
                .is_none_or(|handle| handle.raw.is_none())
        };
        match self.has_unfinished_launch.load(Ordering::Acquire) || is_held() {
            true => timeout.max(self.abort_notice_timeout),
            false => timeout,
        }
    }

    /// Returns how long another thread may take to end the communicator.
    pub(crate) fn end_timeout(&self) -> Duration {
        let more = self.abort_timeout().saturating_sub(self.timeouts.abort);
        self.timeouts.orderly_end().saturating_add(more)
    }

    pub(crate) fn carry_out_abort(self: &Arc<Self>) -> AbortOutcome {
        let span = events::abort_span(&self.track_handle.track().identity);
        let _entered = span.enter();
        let inner = Arc::clone(self);
        let timeout = self.abort_timeout();
        let freed = call_within(timeout, "nccl-abort", move || {
            inner.lifecycle.end(&inner, timeout)
        });
        self.finish_abort(freed == Some(true))
    }

    /// Destroys the graphs that captured operations, because NCCL waits for them before it frees the communicator. Runs on a
    /// thread of its own, because a launch may wait inside CUDA for something that only an abort ends.
    pub(super) fn destroy_plans(self: &Arc<Self>) {
        if self.plans.is_empty() {
            return;
        }
        let inner = Arc::clone(self);
        let spawned = threads::spawn("nccl-graphs", move || inner.plans.destroy_all());
        if let Err(error) = spawned {
            events::no_thread("to destroy the graphs of a communicator", &error);
            self.plans.destroy_all();
        }
    }

    /// Waits until another thread has ended the communicator, at most as long as an end may take.
    pub(crate) fn wait_for_end(&self) -> AbortOutcome {
        let deadline = deadline_after(self.end_timeout());
        while !self.lifecycle.get().is_final() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
        match self.lifecycle.get() {
            State::Finalized | State::Aborted => AbortOutcome::Freed,
            _ => AbortOutcome::Leaked,
        }
    }

    fn finalize(self: &Arc<Self>) -> Result<()> {
        forked::check()?;
        if !self.lifecycle.begin_finalize() {
            return Err(self.out_of_use());
        }
        let timeout = self.timeouts.finalize;
        let deadline = deadline_after(timeout);
        let abort_is_ours = Arc::new(AtomicBool::new(false));
        let retiring = {
            let (inner, abort_is_ours) = (Arc::clone(self), Arc::clone(&abort_is_ours));
            call_on_thread("nccl-finalize", move || {
                let interrupted = || {
                    inner.lifecycle.get() != State::Finalizing || inner.abort_signal.is_aborted()
                };
                let wait_until_idle = |raw| {
                    inner.destroy_plans();
                    if !inner.peer_kernels.wait(deadline, interrupted) {
                        return Err(match interrupted() {
                            true => NotIdle::Interrupted,
                            false => NotIdle::TimedOut,
                        });
                    }
                    let abort_flag_parent = inner.abort_flag_parent.as_ref();
                    finalize_with(
                        &inner.library,
                        raw,
                        abort_flag_parent,
                        deadline,
                        interrupted,
                    )
                };
                // Begins the abort before NCCL ends the operations under way, so that no request takes that end for
                // success.
                let aborting = |not_idle: &NotIdle| {
                    let cause = not_idle.cause("finalize", timeout);
                    if inner.begin_abort(EndReason::OwnCause(Box::new(cause))) {
                        abort_is_ours.store(true, Ordering::Release);
                    }
                };
                inner.lifecycle.retire(&inner, wait_until_idle, aborting)
            })
        };
        let retiring = match retiring {
            Ok(retiring) => retiring,
            Err(error) => {
                let error = threads::not_started("for a finalize")(error);
                self.abort(&error);
                return Err(error);
            }
        };
        // The thread checks the timeout itself, unless it is inside a call that does not return, or waits for such a
        // call.
        let wait = |timeout: Duration| retiring.recv_timeout(timeout).ok();
        let retired = wait(timeout.saturating_add(LATE_CHECK)).or_else(|| {
            let cause = NotIdle::TimedOut.cause("finalize", timeout);
            match self.begin_abort(EndReason::OwnCause(Box::new(cause))) {
                true => {
                    self.carry_out_abort();
                    None
                }
                // The thread has noticed the timeout, or another thread ends the communicator. Waits as long as an
                // abort may take.
                false => wait(self.abort_timeout().saturating_add(LATE_CHECK)),
            }
        });
        let end = |freed| {
            if abort_is_ours.load(Ordering::Acquire) {
                let _ = self.finish_abort(freed);
            } else {
                self.record_failed_finalize(freed, "its finalize failed");
            }
        };
        match retired {
            Some(Some(Retired { finalized, freed })) => match (finalized, freed) {
                (Ok(()), Ok(())) if self.lifecycle.set_finalized() => Ok(()),
                // Meanwhile another thread has begun an abort, which that thread completes.
                (Ok(()), Ok(())) => Err(self.out_of_use()),
                (Ok(()), Err(failure)) => {
                    end(false);
                    Err(failure.into())
                }
                (Err(not_idle), freed) => {
                    end(freed.is_ok());
                    Err(not_idle.into_error("finalize", timeout))
                }
            },
            // An abort has taken the pointer first.
            Some(None) => Err(self.out_of_use()),
            None => {
                end(false);
                Err(NotIdle::TimedOut.into_error("finalize", timeout))
            }
        }
    }

    /// Completes an abort that this process began.
    pub(crate) fn finish_abort(&self, freed: bool) -> AbortOutcome {
        if let Some(supervisor) = &self.supervisor
            && supervisor.has_fault()
        {
            supervisor.report_abort_returned(freed, self.needs_full_abort());
        }
        self.exit_hold.lock().take();
        let took = self.abort_started.get().map(|(since, _)| since.elapsed());
        let identity = &self.track_handle.track().identity;
        events::aborted(identity, freed, took.unwrap_or_default());
        if freed {
            self.lifecycle.set_aborted();
            AbortOutcome::Freed
        } else {
            if self.lifecycle.set_leaked() {
                self.report_leak();
            }
            AbortOutcome::Leaked
        }
    }

    /// Counts and logs that NCCL did not free the communicator.
    pub(super) fn report_leak(&self) {
        let roster = self.roster();
        let (held, timeout) = (self.blocked_call_text(), self.abort_timeout());
        let why = format!("{held} did not return within {timeout:?}");
        events::leaked_communicator((&self.name, roster), self.rank, &why);
    }

    /// Records the end after a finalize that failed and aborted, unless another abort had begun.
    fn record_failed_finalize(&self, freed: bool, reason: &str) {
        if self.begin_abort(EndReason::from(reason)) {
            let _ = self.finish_abort(freed);
        }
    }
}

/// Records communicators as leaked if no thread could be started to run [`end_failed`]; only those whose abort began
/// with the fault.
pub fn leak_failed(failed: Vec<PendingEnd>) {
    for PendingEnd { inner, .. } in failed.into_iter().filter(|one| one.begun) {
        let _ = inner.finish_abort(false);
    }
}

/// Ends communicators that failed because of a fault: carries out together the aborts that began with the fault, and waits for
/// the ends that other threads carry out. Then reports the outcome to the other ranks.
pub fn end_failed(failed: Vec<PendingEnd>) {
    match &failed[..] {
        [PendingEnd { inner, begun: true }] => drop(inner.carry_out_abort()),
        [
            PendingEnd {
                inner,
                begun: false,
            },
        ] => drop(inner.wait_for_end()),
        _ => registry::end_together(
            failed
                .iter()
                .map(|one| (Arc::clone(&one.inner), one.begun))
                .collect(),
        ),
    }
    for PendingEnd { inner, .. } in failed {
        let freed = matches!(inner.lifecycle.get(), State::Finalized | State::Aborted);
        // A communicator that was finalized before has nothing left to end.
        if let Some(supervisor) = &inner.supervisor {
            supervisor.report_abort_returned(freed, inner.needs_full_abort());
        }
    }
}
