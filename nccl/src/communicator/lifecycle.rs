//! The end of a communicator: finalized, aborted, or dropped.
//!
//! `ncclCommDestroy` and `ncclCommAbort` may block although they should not, so each runs on a thread
//! that can be given up. Whoever takes NCCL's pointer out of the handle frees it, and there is only one
//! who does.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use cudarc::driver::CudaStream;

use super::handle::{RawComm, Unsettled, settle};
use super::{Communicator, Inner, Pins, State, Timeouts};
use crate::abort::AbortSignal;
use crate::error::{Error, ErrorKind, NcclFailure, Result};
use crate::ffi;
use crate::library::Library;
use crate::operation::{OperationKind, Shape};
use crate::reaper;
use crate::supervision::{Abortable, Board, Cause, Fault};
use crate::time::deadline_after;

/// How an abort ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// NCCL has let go of everything.
    Freed,
    /// NCCL did not come back in time.
    Leaked,
}

impl Communicator {
    /// Waits until all issued operations are done on all ranks, and frees the communicator.
    ///
    /// Every rank has to call it (or drop its communicator). The other clones of this communicator are
    /// out of use from then on.
    ///
    /// # Errors
    /// [`ErrorKind::TimedOut`] when the ranks did not all get there within the communicator's finalize
    /// limit (30 s unless set); it is aborted then. [`ErrorKind::Closed`] and [`ErrorKind::Aborted`]
    /// when it had ended before.
    ///
    /// Wraps `ncclCommFinalize` and `ncclCommDestroy`.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
    /// comm.finalize()?;
    /// assert!(comm.finalize().is_err());
    /// # Ok(())
    /// # }
    /// ```
    pub fn finalize(&self) -> Result<()> {
        let started = Instant::now();
        self.inner.finalize().map_err(|error| {
            self.inner.conclude(error).during(|| {
                self.inner
                    .operation(OperationKind::Finalize, Shape::default(), None, started)
            })
        })
    }

    /// Ends the communicator now, whatever it is doing, from any thread.
    ///
    /// Operations under way end; their results are void, and every call and request on this rank
    /// returns [`ErrorKind::Aborted`]. The other ranks of a [`World`](crate::World)'s communicator are
    /// told, and abort theirs for the same reason; this returns when they have said so, or are gone, or
    /// their time is up (3 s unless set). Ranks that came together in another way each have to abort by
    /// themselves. A second abort does nothing.
    ///
    /// # Errors
    /// [`ErrorKind::TimedOut`] when NCCL did not come back within the abort limit (10 s unless set). The
    /// communicator is then leaked: nothing touches it any more, and memory that it was still using
    /// must stay where it is.
    ///
    /// Wraps `ncclCommAbort`.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
    /// comm.abort("the service is shutting down")?;
    /// let mut y = stream.alloc_zeros::<f32>(4)?;
    /// assert!(comm.all_reduce_in_place(&mut y, nccl::ReduceOp::Sum).is_err());
    /// # Ok(())
    /// # }
    /// ```
    pub fn abort(&self, reason: &str) -> Result<()> {
        let started = Instant::now();
        match self.inner.abort(reason) {
            Outcome::Freed => Ok(()),
            Outcome::Leaked => Err(Error::new(ErrorKind::TimedOut {
                what: self.inner.held_abort(),
                limit: self.inner.timeouts.abort,
            })
            .during(|| {
                self.inner
                    .operation(OperationKind::Abort, Shape::default(), None, started)
            })),
        }
    }
}

impl Inner {
    /// What did not come back, and what it may be waiting for.
    fn held_abort(&self) -> String {
        match self.plans.alive()[..] {
            [] => String::from("ncclCommAbort"),
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
        if !self.begin_abort(why.into()) {
            return;
        }
        let inner = Arc::clone(self);
        let spawned = std::thread::Builder::new()
            .name(String::from("nccl-abort"))
            .spawn(move || inner.carry_out_abort());
        if let Err(error) = spawned {
            tracing::error!(target: "nccl", %error, "no thread for an abort: leaked");
            self.phase.leaked();
        }
    }

    /// The error to hand out. When the communicator is being aborted, waits for the end of that, on all
    /// ranks that can be reached: before, they may still write into memory that was lent. Then it says
    /// what all of them say.
    #[cold]
    pub(crate) fn conclude(&self, error: Error) -> Error {
        let follows = matches!(
            error.kind(),
            ErrorKind::Aborted { .. }
                | ErrorKind::TimedOut { .. }
                | ErrorKind::Nccl(_)
                | ErrorKind::Cuda { .. }
        );
        if !follows || !self.phase.get().is_aborted() {
            return error;
        }
        self.wait_for_the_end();
        let Some(board) = &self.board else {
            return error;
        };
        match board.fault() {
            Some(fault) => error.because_of(fault, board.is_own(fault), board.conclusion()),
            None => error,
        }
    }

    /// From now on, what happens on other ranks ends this communicator.
    pub(super) fn come_under_protection(self: &Arc<Self>) {
        let Some(board) = &self.board else { return };
        let inner = Arc::downgrade(self);
        board.protects(inner);
        // It may have happened while it was being made.
        if let Some(fault) = board.fault() {
            self.abort_in_background(fault);
        }
    }

    /// True for the one caller that is to carry it out.
    fn begin_abort(&self, why: Why<'_>) -> bool {
        let reason = match &why {
            Why::Own(cause) => cause.text().to_owned(),
            Why::Told(fault) => fault.to_string(),
            Why::Quietly(reason) => (*reason).to_owned(),
        };
        if !self.phase.begin_abort(&reason) {
            return false;
        }
        tracing::warn!(
            target: "nccl",
            communicator = &*self.name,
            rank = self.rank,
            reason,
            "aborting a communicator"
        );
        // Before NCCL is asked: the others may have to abort for this abort to come back.
        if let (Why::Own(cause), Some(board)) = (why, &self.board) {
            board.announce(cause);
        }
        true
    }

    fn carry_out_abort(self: &Arc<Self>) -> Outcome {
        let inner = Arc::clone(self);
        let limit = self.timeouts.abort;
        let freed = within(limit, "nccl-abort", move || {
            // A thread inside a call on it notices the abort and lets go of the lock.
            let raw = inner.handle.wait_for_it().raw.take();
            inner.destroy_plans();
            match raw {
                Some(raw) => {
                    let freed = free(&inner.library, Free::Abort, raw).is_ok();
                    inner.phase.set_freed(freed);
                    freed
                }
                // A finalize has taken it, and frees it when it notices the abort.
                None => inner.phase.wait_freed(limit),
            }
        });
        self.conclude_end(freed == Some(true));
        match freed {
            Some(true) => Outcome::Freed,
            _ => Outcome::Leaked,
        }
    }

    /// Destroys the graphs that captured operations: NCCL waits for that before it lets go. Beside the
    /// end itself, because a launch may wait inside CUDA for what only an abort ends.
    fn destroy_plans(self: &Arc<Self>) {
        if self.plans.is_empty() {
            return;
        }
        let inner = Arc::clone(self);
        let destroy = move || {
            reaper::relax_capture_mode();
            inner.plans.destroy_all();
        };
        let spawned = std::thread::Builder::new()
            .name(String::from("nccl-graphs"))
            .spawn(destroy);
        if let Err(error) = spawned {
            tracing::error!(target: "nccl", %error, "no thread to destroy the graphs of a communicator");
            self.plans.destroy_all();
        }
    }

    /// Somebody else is ending it: waits for that, no longer than that may take.
    pub(crate) fn wait_for_the_end(&self) -> Outcome {
        let deadline = deadline_after(self.timeouts.orderly_end());
        while !self.phase.get().is_final() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
        match self.phase.get() {
            State::Finalized | State::Aborted => Outcome::Freed,
            _ => Outcome::Leaked,
        }
    }

    fn finalize(self: &Arc<Self>) -> Result<()> {
        if !self.phase.begin_finalize() {
            return Err(self.out_of_use());
        }
        let limit = self.timeouts.finalize;
        let ours = Arc::new(AtomicBool::new(false));
        let retired = {
            let (inner, ours) = (Arc::clone(self), Arc::clone(&ours));
            within(self.timeouts.orderly_end(), "nccl-finalize", move || {
                // Waits for an operation that is being issued: it is one of those to wait for.
                let raw = inner.handle.wait_for_it().raw.take()?;
                inner.destroy_plans();
                let interrupted =
                    || inner.phase.get() != State::Finalizing || inner.abort_signal.is_aborted();
                // Said before NCCL ends what is under way: no request must take that for success.
                let aborting = |cause: Cause| {
                    if inner.begin_abort(Why::Own(cause)) {
                        ours.store(true, Ordering::Release);
                    }
                };
                let retired = retire(&inner.library, raw, limit, interrupted, aborting);
                inner.phase.set_freed(retired.freed.is_ok());
                Some(retired)
            })
        };
        let end = |freed| {
            if ours.load(Ordering::Acquire) {
                self.conclude_end(freed);
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
                Err(Unsettled::TimedOut.into_error("finalize, and the abort after it,", limit))
            }
        }
    }

    /// The end of an abort that has begun.
    fn conclude_end(&self, freed: bool) {
        if let Some(board) = &self.board
            && board.is_at_fault()
        {
            board.conclude(freed);
        }
        if freed {
            self.phase.aborted();
        } else {
            self.phase.leaked();
        }
    }

    /// After a finalize that failed and aborted, unless an abort was on its way anyhow.
    fn end_as(&self, freed: bool, reason: &str) {
        if self.begin_abort(Why::from(reason)) {
            self.conclude_end(freed);
        }
    }
}

impl Abortable for Inner {
    fn begin_end(&self, fault: &Arc<Fault>) -> bool {
        self.begin_abort(Why::Told(fault))
    }

    fn end(self: Arc<Self>, begun: bool) {
        let outcome = match begun {
            true => self.carry_out_abort(),
            false => self.wait_for_the_end(),
        };
        // One that was finalized before has nothing left to end.
        if let Some(board) = &self.board {
            board.conclude(outcome == Outcome::Freed);
        }
    }
}

/// Why a communicator is ended before its time.
#[derive(Debug)]
pub(crate) enum Why<'w> {
    /// For a reason of this rank, which the others are told.
    Own(Cause),
    /// Because of what another rank told, or because it is gone.
    Told(&'w Arc<Fault>),
    /// Because this rank is done with it: what the others do goes on without it, or not.
    Quietly(&'static str),
}

impl From<&str> for Why<'_> {
    fn from(reason: &str) -> Self {
        Self::Own(Cause::asked(reason))
    }
}

impl From<&Error> for Why<'_> {
    fn from(error: &Error) -> Self {
        Self::Own(error.into())
    }
}

impl<'w> From<&'w Arc<Fault>> for Why<'w> {
    fn from(fault: &'w Arc<Fault>) -> Self {
        Self::Told(fault)
    }
}

/// Runs `work` on a thread of its own, and waits for it no longer than `limit`.
fn within<T: Send + 'static>(
    limit: Duration,
    name: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    let (sender, receiver) = mpsc::sync_channel(1);
    std::thread::Builder::new()
        .name(name.to_owned())
        .spawn(move || {
            // Nobody listens any more if the deadline has passed.
            let _ = sender.send(work());
        })
        .ok()?;
    receiver.recv_timeout(limit).ok()
}

/// Which way a communicator is given back.
#[derive(Clone, Copy)]
enum Free {
    Destroy,
    Abort,
}

/// Gives the communicator back to NCCL. May block for as long as NCCL likes. When it fails, NCCL may
/// still use what it was lent.
fn free(library: &Library, way: Free, raw: RawComm) -> Result<(), NcclFailure> {
    let (call, function) = match way {
        Free::Destroy => ("ncclCommDestroy", library.api().ncclCommDestroy),
        Free::Abort => ("ncclCommAbort", library.api().ncclCommAbort),
    };
    let Some(function) = function else {
        return Err(ffi::missing(library, call));
    };
    // SAFETY: `raw` was taken out of its handle by the one caller that is to free it, so nothing else
    // reaches it.
    let code = unsafe { function(raw.as_ptr()) };
    ffi::check(library, call, code).map(drop)
}

/// How a communicator ended that was to be finalized.
struct Retired {
    /// Whether the ranks got to the end together.
    settled: Result<(), Unsettled>,
    freed: Result<(), NcclFailure>,
}

/// Finalizes and destroys; aborts what cannot be finalized in time.
fn retire(
    library: &Library,
    raw: RawComm,
    limit: Duration,
    interrupted: impl Fn() -> bool,
    aborting: impl FnOnce(Cause),
) -> Retired {
    let settled = finalize_raw(library, raw, deadline_after(limit), interrupted);
    let way = match &settled {
        Ok(()) => Free::Destroy,
        Err(unsettled) => {
            aborting(unsettled.cause("finalize", limit));
            Free::Abort
        }
    };
    let freed = free(library, way, raw);
    if let Err(failure) = &freed {
        tracing::warn!(target: "nccl", %failure, "a communicator could not be freed");
    }
    Retired { settled, freed }
}

fn finalize_raw(
    library: &Library,
    raw: RawComm,
    deadline: Instant,
    interrupted: impl Fn() -> bool,
) -> Result<(), Unsettled> {
    const CALL: &str = "ncclCommFinalize";
    let Some(finalize) = library.api().ncclCommFinalize else {
        return Ok(());
    };
    // SAFETY: the caller owns `raw`, so no other call on it is under way.
    let code = unsafe { finalize(raw.as_ptr()) };
    ffi::check(library, CALL, code).map_err(Unsettled::Failed)?;
    settle(library, raw, CALL, deadline, interrupted)
}

/// What is left of a communicator that was dropped.
struct Remains {
    library: Library,
    raw: RawComm,
    name: Arc<str>,
    rank: usize,
    timeouts: Timeouts,
    pins: Option<Pins>,
    stream: Arc<CudaStream>,
    board: Option<Arc<Board>>,
    abort_signal: AbortSignal,
}

impl Drop for Inner {
    /// Never blocks: a thread finalizes the communicator, and releases what it used only afterwards.
    fn drop(&mut self) {
        let handle = self.handle.get_mut();
        if self.phase.get() == State::Leaked {
            // NCCL may still use what it was given.
            std::mem::forget((
                self.pins.take(),
                Arc::clone(&self.context),
                Arc::clone(&self.stream),
            ));
            return;
        }
        let Some(raw) = handle.raw.take() else {
            if self.phase.get() == State::Leaked {
                // NCCL may still be at work in the context.
                std::mem::forget((self.pins.take(), Arc::clone(&self.stream)));
            }
            return;
        };
        let remains = Remains {
            library: self.library.clone(),
            raw,
            name: Arc::clone(&self.name),
            rank: self.rank,
            timeouts: self.timeouts,
            pins: self.pins.take(),
            stream: Arc::clone(&self.stream),
            board: self.board.take(),
            abort_signal: self.abort_signal.clone(),
        };
        if let Err(remains) = reaper::on_a_thread(remains, reap) {
            std::mem::forget(remains);
        }
    }
}

fn reap(remains: Remains) {
    let limit = remains.timeouts.finalize;
    let (board, signal) = (remains.board, remains.abort_signal);
    let at_fault = || board.as_ref().is_some_and(|board| board.is_at_fault());
    let retired = retire(
        &remains.library,
        remains.raw,
        limit,
        || reaper::is_in_a_hurry() || at_fault() || signal.is_aborted(),
        |_| {
            // The others may be waiting in an operation to which nobody comes from here.
            if let (true, Some(board)) = (signal.is_aborted(), &board) {
                board.announce(Cause::asked("its abort signal was given"));
            }
        },
    );
    if let Err(unsettled) = retired.settled {
        tracing::warn!(
            target: "nccl",
            communicator = &*remains.name,
            rank = remains.rank,
            ?unsettled,
            "a dropped communicator could not be finalized and was aborted"
        );
    }
    if retired.freed.is_err() {
        if let (true, Some(board)) = (at_fault(), &board) {
            board.conclude(false);
        }
        std::mem::forget((remains.pins, remains.stream));
    }
    // Only now: what other ranks wait for is over here, and the line may say goodbye.
    drop(board);
}

/// Frees a communicator that failed to come up, on a thread that can be given up.
pub(super) fn discard(library: &Library, raw: RawComm, limit: Duration) -> Outcome {
    let library = library.clone();
    match within(limit, "nccl-abort", move || {
        free(&library, Free::Abort, raw)
    }) {
        Some(Ok(())) => Outcome::Freed,
        _ => Outcome::Leaked,
    }
}
