//! The requested end of a communicator: finalize and abort.
//!
//! `state` decides which thread has NCCL's pointer and frees it. This module adds the deadlines, the messages to
//! other ranks, and the caller's errors.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::free::{apart, finalize_with, within};
use super::handle::Unsettled;
use super::lost::Noticed;
use super::why::Why;
use super::{Inner, everybody};
use crate::error::{Error, ErrorKind, Mark, Result, StreamRefusal};
use crate::events;
use crate::forked;
use crate::operation::{OperationKind, Shape};
use crate::peers::{AbortHandle, Ending};
use crate::reaper;
use crate::state::{Retired, State};
use crate::threads;
use crate::time::deadline_after;
use nccl_base::fault::{Fault, short_key};

/// How long past its timeout a wait may go on that checks the timeout itself.
const LOOK: Duration = Duration::from_secs(1);

/// The outcome of an abort.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
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
    inner.finalize().map_err(|error| {
        inner
            .conclude(error)
            .during(|| inner.operation(OperationKind::Finalize, Shape::default(), None, started))
    })
}

/// Aborts the communicator now, whatever it is doing.
pub(super) fn abort(inner: &Arc<Inner>, reason: &str) -> Result<()> {
    forked::check()?;
    let started = Instant::now();
    match inner.abort(reason) {
        Outcome::Freed => Ok(()),
        Outcome::Leaked => Err(Error::new(ErrorKind::TimedOut {
            what: inner.held_abort(),
            timeout: inner.abort_limit(),
        })
        .during(|| inner.operation(OperationKind::Abort, Shape::default(), None, started))),
    }
}

impl Inner {
    /// Returns the name of the call that did not return, and what it may be waiting for.
    fn held_abort(&self) -> String {
        match self.plans.alive()[..] {
            // Graphs that the program captured by itself are not in the list.
            [] => String::from(
                "ncclCommAbort, which waits for calls under way and for graphs captured elsewhere,",
            ),
            [plan] => format!("ncclCommAbort, which waits for the graph of plan {plan},"),
            ref plans => format!("ncclCommAbort, which waits for the graphs of plans {plans:?},"),
        }
    }

    pub(crate) fn abort<'w>(self: &Arc<Self>, why: impl Into<Why<'w>>) -> Outcome {
        if self.begin_abort(why.into()) {
            self.carry_out_abort()
        } else {
            self.wait_for_the_end()
        }
    }

    /// Begins an abort without waiting for its end.
    pub(crate) fn abort_in_background<'w>(self: &Arc<Self>, why: impl Into<Why<'w>>) {
        if self.begin_abort(why.into()) {
            self.carry_out_in_background();
        }
    }

    /// Aborts, waits until NCCL has let go of borrowed memory, and returns whether it has.
    pub(crate) fn end_for<'w>(self: &Arc<Self>, why: impl Into<Why<'w>>) -> bool {
        self.abort_in_background(why);
        self.wait_until_let_go()
    }

    /// Waits until NCCL has let go of borrowed memory, at most as long as an end may take; for an end that has begun.
    fn wait_until_let_go(&self) -> bool {
        let deadline = deadline_after(self.end_limit());
        while !self.phase.has_let_go() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
        self.phase.has_let_go() && self.phase.get() != State::Leaked
    }

    /// Does the work of [`carry_out_abort`](Self::carry_out_abort) without waiting for it.
    pub(crate) fn carry_out_in_background(self: &Arc<Self>) {
        let inner = Arc::clone(self);
        let spawned = threads::spawn("nccl-abort", move || inner.carry_out_abort());
        if let Err(error) = spawned {
            events::no_thread("for an abort", &error);
            let _ = self.conclude_end(false);
        }
    }

    /// Returns the error to hand out. If the communicator is being aborted, first waits until NCCL has let go of borrowed
    /// memory on all reachable ranks, which may write into it until then; the error then carries
    /// the fault that all ranks report. An error that means a lost device begins the abort.
    #[cold]
    pub(crate) fn conclude(self: &Arc<Self>, error: Error) -> Error {
        self.ends_if_lost(&error, Noticed::Behind);
        let follows = matches!(
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
        ) || error.is(Mark::NoThread);
        if !follows || !self.phase.get().is_aborted() {
            return error;
        }
        self.wait_until_let_go();
        let Some(board) = &self.board else {
            return error;
        };
        match board.fault() {
            Some(fault) => error.because_of(fault, board.is_own(fault), board.conclusion()),
            None => error,
        }
    }

    /// Registers the communicator: from now on faults of other ranks, and an abort of the whole process, end it.
    pub(crate) fn come_under_protection(self: &Arc<Self>) {
        everybody::lives(self);
        let Some(board) = &self.board else { return };
        // A fault may have happened before.
        if let Some(fault) = board.protects(AbortHandle::new(self)) {
            self.abort_in_background(&fault);
        }
    }

    /// Counts the communicator as ended because of `fault`, which another rank reported. Never waits. Returns whether this
    /// call began the end.
    pub(crate) fn begin_end(&self, fault: &Arc<Fault>) -> bool {
        self.begin_abort(Why::Told(fault))
    }

    /// Begins an abort; true for the one caller that has to carry it out.
    pub(crate) fn begin_abort(&self, why: Why<'_>) -> bool {
        let reason = match &why {
            Why::Own(cause) => cause.text().to_owned(),
            Why::Told(fault) => fault.to_string(),
            Why::Quietly(reason) => (*reason).to_owned(),
        };
        if !self.phase.begin_abort(&reason) {
            return false;
        }
        let _ = self.aborting.set((Instant::now(), self.abort_limit()));
        *self.ending.lock() = Some(reaper::Pending::begin());
        let roster = self.roster();
        let world_ranks = roster.world_ranks();
        tracing::warn!(
            name: "nccl.comm.aborting",
            target: "nccl",
            comm = &*self.name,
            comm_key = self.tracked.track().identity.key.as_deref().map(short_key),
            world_ranks,
            rank = self.rank,
            world_rank = roster.world_rank(self.rank),
            launcher_rank = roster.launcher_rank(self.rank),
            nranks = self.world_size,
            reason = &*reason,
            "aborting a communicator"
        );
        if !matches!(why, Why::Quietly(_)) {
            self.tracked.aborted(&reason);
        }
        if let Why::Own(cause) = why {
            match &self.board {
                // Before NCCL is called: this abort may return only after the others abort.
                Some(board) => Arc::clone(board).announce(*cause),
                // Without a board no other code logs the fault.
                None => {
                    let place = (&*self.name, &**self.roster());
                    let cause = match self.world_size {
                        1 => cause.of_one_rank(),
                        _ => *cause,
                    };
                    let fault = Fault::here(cause, place, self.rank, self.generation(), |_| None);
                    let key = self.tracked.track().identity.key.as_deref();
                    events::fault(&fault, key, self.rank, self.world_size);
                }
            }
        }
        true
    }

    /// Returns how long NCCL may take to free the communicator: the abort timeout, or, if NCCL is inside work that has to notice
    /// the abort first, the time for noticing if that is longer.
    pub(crate) fn abort_limit(&self) -> Duration {
        if let Some((_, timeout)) = self.aborting.get() {
            return *timeout;
        }
        let timeout = self.timeouts.abort;
        // A thread that polls a launch, or makes the communicator, has the pointer or the lock.
        let is_held = || {
            self.handle
                .try_take()
                .is_none_or(|handle| handle.raw.is_none())
        };
        match self.is_unsettled.load(Ordering::Acquire) || is_held() {
            true => timeout.max(self.notice),
            false => timeout,
        }
    }

    /// Returns how long another thread may take to end the communicator.
    pub(crate) fn end_limit(&self) -> Duration {
        let more = self.abort_limit().saturating_sub(self.timeouts.abort);
        self.timeouts.orderly_end().saturating_add(more)
    }

    pub(crate) fn carry_out_abort(self: &Arc<Self>) -> Outcome {
        let span = events::abort_span(&self.tracked.track().identity);
        let _entered = span.enter();
        let inner = Arc::clone(self);
        let timeout = self.abort_limit();
        let freed = within(timeout, "nccl-abort", move || {
            inner.phase.end(&inner, timeout)
        });
        self.conclude_end(freed == Some(true))
    }

    /// Destroys the graphs that captured operations, for which NCCL waits before it frees the communicator. On a thread of its
    /// own, because a launch may wait inside CUDA for something that only an abort ends.
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
    pub(crate) fn wait_for_the_end(&self) -> Outcome {
        let deadline = deadline_after(self.end_limit());
        while !self.phase.get().is_final() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
        match self.phase.get() {
            State::Finalized | State::Aborted => Outcome::Freed,
            _ => Outcome::Leaked,
        }
    }

    fn finalize(self: &Arc<Self>) -> Result<()> {
        forked::check()?;
        if !self.phase.begin_finalize() {
            return Err(self.out_of_use());
        }
        let timeout = self.timeouts.finalize;
        let deadline = deadline_after(timeout);
        let ours = Arc::new(AtomicBool::new(false));
        let retiring = {
            let (inner, ours) = (Arc::clone(self), Arc::clone(&ours));
            apart("nccl-finalize", move || {
                let interrupted =
                    || inner.phase.get() != State::Finalizing || inner.abort_signal.is_aborted();
                let settle = |raw| {
                    inner.destroy_plans();
                    let switch = inner.switch.as_ref();
                    finalize_with(&inner.library, raw, switch, deadline, interrupted)
                };
                // Before NCCL ends the operations under way: no request may take that for success.
                let aborting = |unsettled: &Unsettled| {
                    let cause = unsettled.cause("finalize", timeout);
                    if inner.begin_abort(Why::Own(Box::new(cause))) {
                        ours.store(true, Ordering::Release);
                    }
                };
                inner.phase.retire(&inner, settle, aborting)
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
        // The thread checks the time itself, unless it is inside a call that does not return, or waits behind one.
        let wait = |timeout: Duration| retiring.recv_timeout(timeout).ok();
        let retired = wait(timeout.saturating_add(LOOK)).or_else(|| {
            let cause = Unsettled::TimedOut.cause("finalize", timeout);
            match self.begin_abort(Why::Own(Box::new(cause))) {
                true => {
                    self.carry_out_abort();
                    None
                }
                // The thread has noticed, or another thread ends the communicator: waits as long as an abort may take.
                false => wait(self.abort_limit().saturating_add(LOOK)),
            }
        });
        let end = |freed| {
            if ours.load(Ordering::Acquire) {
                let _ = self.conclude_end(freed);
            } else {
                self.end_as(freed, "its finalize failed");
            }
        };
        match retired {
            Some(Some(Retired { settled, freed })) => match (settled, freed) {
                (Ok(()), Ok(())) if self.phase.finalized() => Ok(()),
                // Another thread began an abort meanwhile, and completes it.
                (Ok(()), Ok(())) => Err(self.out_of_use()),
                (Ok(()), Err(failure)) => {
                    end(false);
                    Err(failure.into())
                }
                (Err(unsettled), freed) => {
                    end(freed.is_ok());
                    Err(unsettled.into_error("finalize", timeout))
                }
            },
            // An abort took the pointer first.
            Some(None) => Err(self.out_of_use()),
            None => {
                end(false);
                Err(Unsettled::TimedOut.into_error("finalize", timeout))
            }
        }
    }

    /// Completes an abort that this process began.
    pub(crate) fn conclude_end(&self, freed: bool) -> Outcome {
        if let Some(board) = &self.board
            && board.is_at_fault()
        {
            board.conclude(freed, self.needs_the_whole_end());
        }
        self.ending.lock().take();
        let took = self.aborting.get().map(|(since, _)| since.elapsed());
        let identity = &self.tracked.track().identity;
        events::aborted(identity, freed, took.unwrap_or_default());
        if freed {
            self.phase.aborted();
            Outcome::Freed
        } else {
            if self.phase.leaked() {
                self.tell_of_the_leak();
            }
            Outcome::Leaked
        }
    }

    /// Counts and logs that NCCL did not free the communicator.
    pub(super) fn tell_of_the_leak(&self) {
        everybody::leaks();
        let roster = self.roster();
        let (held, timeout) = (self.held_abort(), self.abort_limit());
        let why = format!("{held} did not come back within {timeout:?}");
        events::leaked_communicator((&self.name, roster), self.rank, &why);
    }

    /// Records the end after a finalize that failed and aborted, unless another abort had begun.
    fn end_as(&self, freed: bool, reason: &str) {
        if self.begin_abort(Why::from(reason)) {
            let _ = self.conclude_end(freed);
        }
    }
}

/// Records communicators as leaked, where no thread could be started to run [`end_struck`]: only those whose abort began
/// with the fault.
pub fn leave_struck(struck: Vec<Ending>) {
    for Ending { inner, .. } in struck.into_iter().filter(|one| one.begun) {
        let _ = inner.conclude_end(false);
    }
}

/// Ends communicators that a fault struck: carries out together the aborts that began with the fault, and waits for
/// the ends that other threads carry out. Then reports the outcome to the other ranks.
pub fn end_struck(struck: Vec<Ending>) {
    match &struck[..] {
        [Ending { inner, begun: true }] => drop(inner.carry_out_abort()),
        [
            Ending {
                inner,
                begun: false,
            },
        ] => drop(inner.wait_for_the_end()),
        _ => everybody::end_together(
            struck
                .iter()
                .map(|one| (Arc::clone(&one.inner), one.begun))
                .collect(),
        ),
    }
    for Ending { inner, .. } in struck {
        let freed = matches!(inner.phase.get(), State::Finalized | State::Aborted);
        // A communicator that was finalized before has nothing left to end.
        if let Some(board) = &inner.board {
            board.conclude(freed, inner.needs_the_whole_end());
        }
    }
}
