//! One operation, from the checks to the request.
//!
//! The order of the steps makes it safe:
//! 1. everything that can fail without NCCL: lengths and buffers (by the caller, into a frame), state,
//!    streams, waits;
//! 2. the C calls, between group start and end when there are several, in one go;
//! 3. the poll until NCCL has put its work on the stream: before that nothing may be recorded behind
//!    it, and no borrow may end. In a blocking communicator that is true when its calls return; until they
//!    do, the guard enforces the deadline;
//! 4. the other half of the joins, and the end of cudarc's guards: on every path, also when a call
//!    failed, because part of the work may be on the stream.
//!
//! When the poll does not end in time, the communicator is aborted. NCCL joins its own
//! threads in that call, so nothing is put on a stream afterwards; but work may have been put
//! there since step 4, and the abort does not always wait for it: with several ranks in one process all
//! but the last abort only count. So the second half of the joins is done once more, and only then the guards
//! and the borrow end. When the abort does not return, or the streams cannot be joined, NCCL still
//! holds pointers into memory that is only borrowed, and this function must not return: it ends the
//! process.

use std::sync::Arc;
use std::time::{Duration, Instant};

use cudarc::driver::CudaEvent;

use super::check;
use super::frame::{Frame, Left};
use super::steps::launch_step;
use crate::communicator::handle::{Handle, RawComm, Unsettled, settle};
use crate::communicator::order::Capture;
use crate::communicator::{Backoff, Communicator, Inner, order};
use crate::error::{Error, ErrorKind, NcclFailure, Result};
use crate::fatal::{FatalCause, FatalReport, end_the_process};
use crate::ffi::Progress;
use crate::inside::Place;
use crate::operation::{Operation, OperationKind, Shape};
use crate::recorded;
use crate::request::Request;
use crate::supervision::watchdog;
use crate::time::{deadline_after, later};

/// Why an operation was not issued.
enum Refused {
    /// NCCL was not called; the communicator stays usable.
    Before(Error),
    /// NCCL was not called, because the abort signal was given.
    Signalled(Error),
    /// NCCL was called, and part of the work may be on its way; the communicator cannot be used again.
    Underway(Error),
    /// NCCL was called, and another thread's capture may have taken the work. Has the error of the calls, if they failed.
    InCapture(Option<Error>),
}

/// Issues what is recorded in `frame`.
#[doc(hidden)]
pub fn issue(
    comm: &Communicator,
    frame: &Frame<'_>,
    kind: OperationKind,
    shape: Shape,
) -> Result<Request> {
    let started = Instant::now();
    let inner = &comm.inner;
    match inner.issue_locked(frame, kind, started, comm.timeout) {
        Ok(sequence) => {
            let nothing = frame.batch().recorded.is_empty();
            Ok(Request::new(comm, kind, shape, sequence, started, nothing))
        }
        Err((refused, sequence)) => {
            let describe = || inner.operation(kind, shape, sequence, started);
            Err(not_issued(comm, refused, frame, &describe))
        }
    }
}

#[cold]
fn not_issued(
    comm: &Communicator,
    refused: Refused,
    frame: &Frame<'_>,
    describe: &dyn Fn() -> Operation,
) -> Error {
    let inner = &comm.inner;
    let error = match refused {
        Refused::Before(error) => {
            return inner.conclude_before(error.during(describe));
        }
        Refused::Signalled(error) => {
            let error = error.during(describe);
            // This operation has lent nothing to NCCL: the communicator may be leaked.
            inner.abort(&error);
            error
        }
        Refused::Underway(error) => {
            let error = error.during(describe);
            inner.abandon(&error, frame);
            error
        }
        Refused::InCapture(failed) => {
            let lent = Lent::of(inner);
            let has_ended = inner
                .outlast(frame, inner.patience_with_captures())
                .is_some();
            let is_settled = failed.is_none();
            let error = order::captured(Capture::Void, failed).during(describe);
            match is_settled && !has_ended {
                // The capture has all of the work, and NCCL waits for the capture.
                true => inner.abort_in_background(&error),
                // Work that has not settled may still get onto the stream.
                false => inner.abandon(&error, frame),
            }
            std::mem::forget(lent);
            error
        }
    };
    inner.conclude(error).during(describe)
}

impl Inner {
    fn issue_locked(
        self: &Arc<Self>,
        frame: &Frame<'_>,
        kind: OperationKind,
        started: Instant,
        timeout: Duration,
    ) -> Result<u64, (Refused, Option<u64>)> {
        let (mut handle, waited) = match self.handle.take(Some(kind), timeout) {
            Ok(turn) => turn,
            Err(error) => return Err((Refused::Before(error), None)),
        };
        // The wait for other calls does not count against this operation.
        let started = if waited { Instant::now() } else { started };
        let sequence = handle.sequence + 1;
        match self.issue_on(&mut handle, frame, kind, started, timeout) {
            Ok(()) => Ok(sequence),
            Err(refused) => Err((refused, Some(sequence))),
        }
    }

    fn issue_on(
        self: &Arc<Self>,
        handle: &mut Handle,
        frame: &Frame<'_>,
        kind: OperationKind,
        started: Instant,
        timeout: Duration,
    ) -> Result<(), Refused> {
        let Some(raw) = self.phase.usable(handle.raw) else {
            return Err(Refused::Before(self.out_of_use()));
        };
        if self.abort_signal.is_aborted() {
            return Err(Refused::Signalled(Error::new(ErrorKind::Aborted {
                reason: String::from("its abort signal was given"),
            })));
        }

        let _inside = self.enter(Place::Issue, timeout);
        if check::is_wanted() {
            check::compare_call(self, kind, frame.batch().recorded, later(started, timeout))
                .map_err(Refused::Before)?;
        }

        // 1. None of this calls NCCL.
        self.prepare(handle, frame).map_err(Refused::Before)?;

        // 2. and 3.
        let lent = Lent::of(self);
        handle.sequence += 1;
        let calls = recorded::Calls {
            library: &self.library,
            comm: raw.as_ptr(),
            stream: frame.on.cu_stream().cast(),
        };
        let (batch, writer) = (frame.batch(), &mut handle.recorder);
        let ticket = writer.begin(
            handle.sequence,
            kind,
            started,
            frame.on,
            timeout,
            batch.recorded.len(),
        );
        let issue = watchdog::Issue {
            inner: self,
            on: frame.on,
            number: handle.sequence,
            kind,
            timeout,
        };
        let mut is_marked = false;
        if ticket.is_unusual {
            match watchdog::before(issue) {
                Ok(marked) => is_marked = marked,
                Err(error) => {
                    std::mem::forget(lent);
                    handle.recorder.end(ticket, Some(&error));
                    return Err(Refused::Before(error));
                }
            }
        }
        // The clock is read again only where an earlier step may have taken long.
        let left = match check::is_wanted() || ticket.is_unusual {
            true => timeout.saturating_sub(started.elapsed()),
            false => timeout,
        };
        let launched = match frame.has_steps() {
            false => self.launch(raw, started, (timeout, left), || {
                recorded::call(batch, &calls, writer)
            }),
            true => frame.steps().try_for_each(|step| {
                launch_step(
                    self,
                    raw,
                    (started, timeout),
                    step,
                    frame.on,
                    &calls,
                    writer,
                )
            }),
        };

        handle.recorder.end(ticket, launched.as_ref().err());
        if is_marked {
            watchdog::after(issue);
        }

        // 4. On every path.
        let left = self.leave(frame, &handle.join);
        std::mem::forget(lent);
        match left {
            Some(ordered) => launched.and(ordered).map_err(Refused::Underway),
            None => Err(Refused::InCapture(launched.err())),
        }
    }

    /// Does the second half of the joins; returns `None` if a capture interfered, which is void now. Ends the process if the capture
    /// has become a graph, which may hold memory that was lent to the operation.
    #[inline]
    pub(crate) fn leave(&self, frame: &Frame<'_>, join: &CudaEvent) -> Option<Result<()>> {
        match frame.leave(self, join) {
            Left::Ordered(ordered) => Some(ordered),
            Left::Captured(Capture::Void) => None,
            Left::Captured(Capture::InGraph) => {
                end_the_process(FatalReport::new(self.identity(), FatalCause::InGraph))
            }
        }
    }

    /// Until when to wait for the end of another thread's capture.
    pub(crate) fn patience_with_captures(&self) -> Instant {
        deadline_after(self.timeouts.abort / 2)
    }

    /// Does the second half of the joins after the end of another thread's capture; returns `None` if the capture does not end and
    /// the joins are not needed. Ends the process if they are needed. To be called without the lock: an abort needs it.
    #[cold]
    pub(crate) fn outlast(&self, frame: &Frame<'_>, deadline: Instant) -> Option<Result<()>> {
        let cause = match frame.outlast(self, deadline) {
            Left::Ordered(ordered) => return Some(ordered),
            Left::Captured(Capture::Void) if frame.needs_no_order() => return None,
            Left::Captured(Capture::Void) => FatalCause::Captured {
                timeout: self.timeouts.abort,
            },
            Left::Captured(Capture::InGraph) => FatalCause::InGraph,
        };
        end_the_process(FatalReport::new(self.identity(), cause))
    }

    /// Checks the operation's stream, and makes it wait for the streams of the buffers.
    pub(crate) fn prepare(&self, handle: &Handle, frame: &Frame<'_>) -> Result<()> {
        order::admit(order::OPERATION, frame.on, &self.context)?;
        frame.is_ordered()?;
        order::enter(frame.on, frame.foreign(), &handle.join)
    }

    /// Makes `calls`, and returns when the work is on the stream, or cannot get there any more: at the latest `timeout` after
    /// `started`, of which `left` remains.
    #[inline]
    pub(crate) fn launch(
        &self,
        raw: RawComm,
        started: Instant,
        (timeout, left): (Duration, Duration),
        calls: impl FnOnce() -> Result<Progress, NcclFailure>,
    ) -> Result<()> {
        let called = match &self.switch {
            None => calls(),
            Some(switch) => {
                let inside = switch.enter(left);
                let called = calls();
                if let Some(ended) = inside.leave() {
                    return Err(not_put(ended, timeout));
                }
                called
            }
        };
        match called {
            Ok(Progress::Done) => Ok(()),
            Ok(Progress::Pending) => self.settled(raw, started, timeout, || self.interrupted()),
            Err(failure) => Err(self.failed_inside(failure, timeout)),
        }
    }

    /// The error for a call that failed. A call that was inside NCCL while the communicator was aborted is reported as
    /// interrupted.
    #[cold]
    pub(crate) fn failed_inside(&self, failure: NcclFailure, timeout: Duration) -> Error {
        match self.switch.is_some() && self.phase.get().is_aborted() {
            true => not_put(Unsettled::Interrupted, timeout),
            false => failure.into(),
        }
    }

    /// Polls until the work is on the stream.
    pub(crate) fn settled(
        &self,
        raw: RawComm,
        started: Instant,
        timeout: Duration,
        interrupted: impl Fn() -> bool,
    ) -> Result<()> {
        let deadline = later(started, timeout);
        settle(&self.library, raw, "launch", deadline, interrupted).map_err(|unsettled| {
            self.left_unsettled();
            not_put(unsettled, timeout)
        })
    }

    pub(crate) fn interrupted(&self) -> bool {
        // A finalize does not interrupt: it waits for this operation.
        self.abort_signal.is_aborted() || self.phase.get().is_aborted()
    }

    /// Aborts a communicator that cannot be used again, and makes the buffers' streams wait for
    /// the work that is still on the operation's stream. Ends the process when NCCL keeps pointers into memory
    /// that it was only lent.
    pub(crate) fn abandon(self: &Arc<Self>, reason: &Error, frame: &Frame<'_>) {
        let lent = Lent::of(self);
        let timeout = self.abort_limit();
        if !self.end_for(reason) {
            end_the_process(FatalReport::new(
                self.identity(),
                FatalCause::NotFreed { timeout },
            ));
        }
        if !self.left_again(frame) && !self.is_over(frame) {
            end_the_process(FatalReport::new(
                self.identity(),
                FatalCause::NotEnded { timeout },
            ));
        }
        std::mem::forget(lent);
    }

    /// Does the second half of the joins once more, if the lock becomes free within the abort timeout. Returns whether that succeeded.
    fn left_again(&self, frame: &Frame<'_>) -> bool {
        let deadline = deadline_after(self.timeouts.abort);
        let Some(handle) = self.handle.take_until(deadline) else {
            return false;
        };
        let inside = self.enter(Place::Look, self.timeouts.abort);
        let left = self.leave(frame, &handle.join);
        drop((inside, handle));
        let left = left.or_else(|| self.outlast(frame, self.patience_with_captures()));
        left.is_none_or(|ordered| ordered.is_ok())
    }

    /// Waits until nothing runs on the operation's stream any more, for the abort timeout at most; returns whether that is so. A
    /// failed device runs nothing.
    fn is_over(&self, frame: &Frame<'_>) -> bool {
        let deadline = deadline_after(self.timeouts.abort);
        let mut backoff = Backoff::new();
        // Enters for each query, so that the sentinel does not mistake the wait for a call that does not return.
        let is_busy = || {
            let _inside = self.enter(Place::Look, self.timeouts.abort);
            order::is_busy(frame.on)
        };
        while is_busy() {
            if Instant::now() >= deadline {
                return false;
            }
            backoff.pause();
        }
        true
    }
}

/// Adds the operation in which a check failed to its error.
#[cold]
#[doc(hidden)]
pub fn failed_check(comm: &Communicator, kind: OperationKind, shape: Shape, error: Error) -> Error {
    comm.inner
        .conclude_before(error.during(|| comm.inner.operation(kind, shape, None, Instant::now())))
}

/// The error for an operation that did not get onto its stream.
#[cold]
pub(crate) fn not_put(unsettled: Unsettled, timeout: Duration) -> Error {
    unsettled.into_error("putting the operation on its stream", timeout)
}

/// Marks that memory is lent to NCCL: a panic must not give it back to the caller, and ends the process.
pub(crate) struct Lent<'i>(&'i Inner);

impl<'i> Lent<'i> {
    pub(crate) fn of(inner: &'i Inner) -> Self {
        Self(inner)
    }
}

impl Drop for Lent<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            end_the_process(FatalReport::new(self.0.identity(), FatalCause::Panicked));
        }
    }
}
