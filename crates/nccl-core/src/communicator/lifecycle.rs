//! The end of a communicator that somebody asks for: finalize and abort.
//!
//! `state` says who has NCCL's pointer and frees it. Here is what surrounds that: the deadlines, what other
//! ranks are told, and what the caller is.

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

/// How much later than its limit a wait is given up that looks at its limit itself.
const LOOK: Duration = Duration::from_secs(1);

/// How an abort ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// NCCL has let go of everything.
    Freed,
    /// NCCL did not come back in time.
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

/// Ends the communicator now, whatever it is doing.
pub(super) fn abort(inner: &Arc<Inner>, reason: &str) -> Result<()> {
    forked::check()?;
    let started = Instant::now();
    match inner.abort(reason) {
        Outcome::Freed => Ok(()),
        Outcome::Leaked => Err(Error::new(ErrorKind::TimedOut {
            what: inner.held_abort(),
            limit: inner.abort_limit(),
        })
        .during(|| inner.operation(OperationKind::Abort, Shape::default(), None, started))),
    }
}

impl Inner {
    /// What did not come back, and what it may be waiting for.
    fn held_abort(&self) -> String {
        match self.plans.alive()[..] {
            // Of those that somebody captured elsewhere nothing is known.
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

    /// Aborts without waiting for the end of it.
    pub(crate) fn abort_in_background<'w>(self: &Arc<Self>, why: impl Into<Why<'w>>) {
        if self.begin_abort(why.into()) {
            self.carry_out_in_background();
        }
    }

    /// Aborts, and waits until NCCL has let go of what it was lent; whether it has.
    pub(crate) fn end_for<'w>(self: &Arc<Self>, why: impl Into<Why<'w>>) -> bool {
        self.abort_in_background(why);
        self.wait_until_let_go()
    }

    /// It is being ended: waits until NCCL has let go of what it was lent, no longer than an end may take.
    fn wait_until_let_go(&self) -> bool {
        let deadline = deadline_after(self.end_limit());
        while !self.phase.has_let_go() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
        self.phase.has_let_go() && self.phase.get() != State::Leaked
    }

    /// As [`carry_out_abort`](Self::carry_out_abort), without waiting for the end of it.
    pub(crate) fn carry_out_in_background(self: &Arc<Self>) {
        let inner = Arc::clone(self);
        let spawned = threads::spawn("nccl-abort", move || inner.carry_out_abort());
        if let Err(error) = spawned {
            events::no_thread("for an abort", &error);
            let _ = self.conclude_end(false);
        }
    }

    /// The error to hand out. When the communicator is being aborted, waits until NCCL has let go of lent memory, on all
    /// ranks that can be reached: before, they may still write into it. Then it says
    /// what all of them say. An error by which the device is lost begins that.
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

    /// From now on, what happens on other ranks ends this communicator, and what ends all of this process.
    pub(crate) fn come_under_protection(self: &Arc<Self>) {
        everybody::lives(self);
        let Some(board) = &self.board else { return };
        // It may have happened before.
        if let Some(fault) = board.protects(AbortHandle::new(self)) {
            self.abort_in_background(&fault);
        }
    }

    /// From now on it counts as ended because of `fault`, of which another rank told. Never waits. Whether it did
    /// not before.
    pub(crate) fn begin_end(&self, fault: &Arc<Fault>) -> bool {
        self.begin_abort(Why::Told(fault))
    }

    /// True for the one caller that is to carry it out.
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
                // Before NCCL is asked: the others may have to abort for this abort to come back.
                Some(board) => Arc::clone(board).announce(*cause),
                // Nobody else tells of it.
                None => {
                    let place = (&*self.name, &**self.roster());
                    let cause = match self.world_size {
                        1 => cause.of_one_rank(),
                        _ => *cause,
                    };
                    let fault = Fault::here(cause, place, self.rank, self.epoch(), |_| None);
                    let key = self.tracked.track().identity.key.as_deref();
                    events::fault(&fault, key, self.rank, self.world_size);
                }
            }
        }
        true
    }

    /// How long NCCL may take to give it back: the limit, and where NCCL is at something that has to notice the abort as this
    /// begins, as long as that may take.
    pub(crate) fn abort_limit(&self) -> Duration {
        if let Some((_, limit)) = self.aborting.get() {
            return *limit;
        }
        let limit = self.timeouts.abort;
        // A thread that polls a launch, or makes the communicator, has the pointer or the lock.
        let is_held = || {
            self.handle
                .try_take()
                .is_none_or(|handle| handle.raw.is_none())
        };
        match self.is_unsettled.load(Ordering::Acquire) || is_held() {
            true => limit.max(self.notice),
            false => limit,
        }
    }

    /// How long another thread may take to end it.
    pub(crate) fn end_limit(&self) -> Duration {
        let more = self.abort_limit().saturating_sub(self.timeouts.abort);
        self.timeouts.orderly_end().saturating_add(more)
    }

    pub(crate) fn carry_out_abort(self: &Arc<Self>) -> Outcome {
        let span = events::abort_span(&self.tracked.track().identity);
        let _entered = span.enter();
        let inner = Arc::clone(self);
        let limit = self.abort_limit();
        let freed = within(limit, "nccl-abort", move || inner.phase.end(&inner, limit));
        self.conclude_end(freed == Some(true))
    }

    /// Destroys the graphs that captured operations: NCCL waits for that before it lets go. Beside the
    /// end itself, because a launch may wait inside CUDA for what only an abort ends.
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

    /// Somebody else is ending it: waits for that, no longer than that may take.
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
        let limit = self.timeouts.finalize;
        let deadline = deadline_after(limit);
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
                // Said before NCCL ends what is under way: no request must take that for success.
                let aborting = |unsettled: &Unsettled| {
                    let cause = unsettled.cause("finalize", limit);
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
        // It looks at the time itself, unless it is in a call that does not come back, or behind one.
        let wait = |limit: Duration| retiring.recv_timeout(limit).ok();
        let retired = wait(limit.saturating_add(LOOK)).or_else(|| {
            let cause = Unsettled::TimedOut.cause("finalize", limit);
            match self.begin_abort(Why::Own(Box::new(cause))) {
                true => {
                    self.carry_out_abort();
                    None
                }
                // It has noticed by now, or somebody else ends the communicator: as long as an abort may take.
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
                // Somebody aborted it meanwhile, and sees to the rest.
                (Ok(()), Ok(())) => Err(self.out_of_use()),
                (Ok(()), Err(failure)) => {
                    end(false);
                    Err(failure.into())
                }
                (Err(unsettled), freed) => {
                    end(freed.is_ok());
                    Err(unsettled.into_error("finalize", limit))
                }
            },
            // An abort was there first.
            Some(None) => Err(self.out_of_use()),
            None => {
                end(false);
                Err(Unsettled::TimedOut.into_error("finalize", limit))
            }
        }
    }

    /// The end of an abort that began here.
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

    /// NCCL did not give it back.
    pub(super) fn tell_of_the_leak(&self) {
        everybody::leaks();
        let roster = self.roster();
        let (held, limit) = (self.held_abort(), self.abort_limit());
        let why = format!("{held} did not come back within {limit:?}");
        events::leaked_communicator((&self.name, roster), self.rank, &why);
    }

    /// After a finalize that failed and aborted, unless an abort was on its way anyhow.
    fn end_as(&self, freed: bool, reason: &str) {
        if self.begin_abort(Why::from(reason)) {
            let _ = self.conclude_end(freed);
        }
    }
}

/// As [`end_struck`], where there is no thread to end them on: nobody waits for what NCCL has of them any more, and it is
/// leaked.
pub fn leave_struck(struck: Vec<Ending>) {
    for Ending { inner, .. } in struck.into_iter().filter(|one| one.begun) {
        let _ = inner.conclude_end(false);
    }
}

/// Ends communicators whose boards were struck: those whose abort has begun with that, together; and waits for
/// whoever is at the others. Then says so to the other ranks.
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
        // One that was finalized before has nothing left to end.
        if let Some(board) = &inner.board {
            board.conclude(freed, inner.needs_the_whole_end());
        }
    }
}
