//! One operation, from the checks to the request.
//!
//! The operation is safe because of the order of the steps:
//! 1. everything that can fail without NCCL: lengths and buffers (by the caller, into [`IssueBuffers`]), state,
//!    streams, waits;
//! 2. the C calls, between group start and end when there are several, in one go;
//! 3. the poll until NCCL has put its work on the stream: before that, nothing may be recorded behind it, and no borrow
//!    may end. In a blocking communicator, the work is on the stream when the calls return; until they do, the
//!    blocking-call monitor enforces the deadline;
//! 4. make the buffers' streams wait for the operation, and end cudarc's guards: on every path, also when a call
//!    failed, because part of the work may be on the stream.
//!
//! If the poll does not end in time, the communicator is aborted. The abort ends NCCL's own threads, so nothing is put
//! on a stream afterwards. But work may have been put there since step 4, and the abort does not always wait for it:
//! with several ranks in one process, NCCL waits for the work only in the last of their aborts. So step 4 is repeated,
//! and only then the guards and the borrow end. If the abort does not return, or the streams cannot be ordered, NCCL
//! still holds pointers into memory that is only borrowed. Then this function must not return: it ends the process.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use cudarc::driver::CudaEvent;

use super::check;
use super::issue_buffers::{IssueBuffers, OrderingOutcome};
use super::steps::launch_step;
use crate::active_calls::CallKind;
use crate::communicator::handle::{Handle, NotIdle, RawComm, wait_until_idle};
use crate::communicator::stream_order::ForeignCapture;
use crate::communicator::{Backoff, Communicator, Inner, stream_order};
use crate::error::{Error, ErrorKind, NcclFailure, Result};
use crate::fatal::{FatalCause, FatalReport, end_the_process};
use crate::ffi::Progress;
use crate::op::reach_all;
use crate::operation::{Operation, OperationKind, Shape};
use crate::queued_op;
use crate::request::Request;
use crate::supervision::watchdog;
use crate::time::{deadline_after, later};

/// Why an operation failed to be issued, and how far it got.
enum IssueFailure {
    /// NCCL was not called; the communicator stays usable.
    NotStarted(Error),
    /// NCCL was not called, because the abort signal was given.
    AbortSignalled(Error),
    /// NCCL was called, and part of the work may be on its way; the communicator cannot be used again.
    PartlyIssued(Error),
    /// NCCL was called, and another thread's capture may have taken the work. Holds the error of the calls, if they
    /// failed.
    Captured(Option<Error>),
}

/// Issues what is queued in `buffers`.
#[doc(hidden)]
pub fn issue(
    comm: &Communicator,
    buffers: &IssueBuffers<'_>,
    kind: OperationKind,
    shape: Shape,
) -> Result<Request> {
    let started = Instant::now();
    let inner = &comm.inner;
    match inner.issue_locked(buffers, kind, started, comm.timeout) {
        Ok(sequence) => {
            let is_empty = buffers.is_empty();
            Ok(Request::new(comm, kind, shape, sequence, started, is_empty))
        }
        Err((failure, sequence)) => {
            let describe = || inner.operation(kind, shape, sequence, started);
            Err(handle_issue_failure(comm, failure, buffers, &describe))
        }
    }
}

#[cold]
fn handle_issue_failure(
    comm: &Communicator,
    failure: IssueFailure,
    buffers: &IssueBuffers<'_>,
    describe: &dyn Fn() -> Operation,
) -> Error {
    let inner = &comm.inner;
    let error = match failure {
        IssueFailure::NotStarted(error) => {
            return inner.final_error_before_issue(error.during(describe));
        }
        IssueFailure::AbortSignalled(error) => {
            let error = error.during(describe);
            // This operation has not lent anything to NCCL, so the communicator may be leaked.
            inner.abort(&error);
            error
        }
        IssueFailure::PartlyIssued(error) => {
            let error = error.during(describe);
            inner.abort_and_order(&error, buffers);
            error
        }
        IssueFailure::Captured(failed) => {
            let lent = EndProcessOnPanic::of(inner);
            let has_ended = inner
                .wait_for_capture(buffers, inner.capture_deadline())
                .is_some();
            let is_settled = failed.is_none();
            let error = stream_order::capture_error(ForeignCapture::Void, failed).during(describe);
            match is_settled && !has_ended {
                // All of the work is in the capture, and NCCL waits for the capture.
                true => inner.abort_in_background(&error),
                // Work that has not settled may still get onto the stream.
                false => inner.abort_and_order(&error, buffers),
            }
            std::mem::forget(lent);
            error
        }
    };
    inner.final_error(error).during(describe)
}

impl Inner {
    fn issue_locked(
        self: &Arc<Self>,
        buffers: &IssueBuffers<'_>,
        kind: OperationKind,
        started: Instant,
        timeout: Duration,
    ) -> Result<u64, (IssueFailure, Option<u64>)> {
        let (mut handle, waited) = match self.handle.lock_within(Some(kind), timeout) {
            Ok(turn) => turn,
            Err(error) => return Err((IssueFailure::NotStarted(error), None)),
        };
        // The wait for other calls does not count against this operation.
        let started = if waited { Instant::now() } else { started };
        let sequence = handle.sequence + 1;
        match self.issue_on(&mut handle, buffers, kind, started, timeout) {
            Ok(()) => Ok(sequence),
            Err(failure) => Err((failure, Some(sequence))),
        }
    }

    fn issue_on(
        self: &Arc<Self>,
        handle: &mut Handle,
        buffers: &IssueBuffers<'_>,
        kind: OperationKind,
        started: Instant,
        timeout: Duration,
    ) -> Result<(), IssueFailure> {
        let Some(raw) = self.lifecycle.usable(handle.raw) else {
            return Err(IssueFailure::NotStarted(self.out_of_use()));
        };
        if self.is_suspended.load(Ordering::Relaxed) {
            return Err(IssueFailure::NotStarted(self.suspended()));
        }
        if self.abort_signal.is_aborted() {
            return Err(IssueFailure::AbortSignalled(Error::new(
                ErrorKind::Aborted {
                    reason: String::from("its abort signal was given"),
                },
            )));
        }

        let _inside = self.enter(CallKind::Issue, timeout);
        if check::is_enabled() {
            check::compare_call(self, kind, buffers.batch().queued, later(started, timeout))
                .map_err(IssueFailure::NotStarted)?;
        }

        // 1. None of this calls NCCL.
        self.prepare(handle, buffers)
            .map_err(IssueFailure::NotStarted)?;

        // Steps 2 and 3.
        let lent = EndProcessOnPanic::of(self);
        handle.sequence += 1;
        let calls = queued_op::CallContext {
            library: &self.library,
            comm: raw.as_ptr(),
            stream: buffers.on.cu_stream().cast(),
        };
        let (batch, writer) = (buffers.batch(), &mut handle.recorder);
        let ticket = writer.begin(
            handle.sequence,
            kind,
            started,
            buffers.on,
            timeout,
            batch.queued.len(),
        );
        if ticket.is_reach_due {
            let operations = batch.queued.iter().map(|one| &one.descriptor);
            if reach_all(operations, self.rank, self.world_size) {
                writer.note_reach(ticket);
            }
        }
        let issue = watchdog::ReportedCall {
            inner: self,
            on: buffers.on,
            sequence: handle.sequence,
            kind,
            timeout,
        };
        let mut is_marked = false;
        if ticket.needs_report {
            match watchdog::report_before(issue) {
                Ok(marked) => is_marked = marked,
                Err(error) => {
                    std::mem::forget(lent);
                    handle.recorder.end(ticket, Some(&error));
                    return Err(IssueFailure::NotStarted(error));
                }
            }
        }
        // Reads the clock again only if an earlier step may have taken long.
        let remaining = match check::is_enabled() || ticket.needs_report {
            true => timeout.saturating_sub(started.elapsed()),
            false => timeout,
        };
        let launched = match buffers.has_steps() {
            false => self.launch(raw, started, (timeout, remaining), || {
                queued_op::call(batch, &calls, writer)
            }),
            true => buffers.steps().try_for_each(|step| {
                launch_step(
                    self,
                    raw,
                    (started, timeout),
                    step,
                    buffers.on,
                    &calls,
                    writer,
                )
            }),
        };

        handle.recorder.end(ticket, launched.as_ref().err());
        if is_marked {
            watchdog::report_after(issue);
        }

        // Step 4, on every path.
        let ordering_outcome = self.order_after(buffers, &handle.ordering_event);
        std::mem::forget(lent);
        match ordering_outcome {
            Some(ordered) => launched.and(ordered).map_err(IssueFailure::PartlyIssued),
            None => Err(IssueFailure::Captured(launched.err())),
        }
    }

    /// Asks NCCL how long the operations in `buffers` would take.
    pub(crate) fn estimate(
        self: &Arc<Self>,
        buffers: &IssueBuffers<'_>,
        timeout: Duration,
    ) -> Result<Option<Duration>> {
        // For a single rank, NCCL runs the operations at once. An empty group has no estimate either.
        if self.world_size == 1 || buffers.batch().queued.is_empty() {
            return Ok(None);
        }
        let (handle, _) = self.handle.lock_within(None, timeout)?;
        let started = Instant::now();
        let raw = self.ready(&handle)?;
        let _inside = self.enter(CallKind::Issue, timeout);
        self.prepare(&handle, buffers)?;
        let calls = queued_op::CallContext {
            library: &self.library,
            comm: raw.as_ptr(),
            stream: buffers.on.cu_stream().cast(),
        };
        let mut micros = 0.0;
        let asked = self.launch(raw, started, (timeout, timeout), || {
            micros = queued_op::simulate(buffers.batch(), &calls)?;
            Ok(Progress::Done)
        });
        drop(handle);
        match asked {
            Ok(()) if micros > 0.0 => Ok(Some(Duration::from_secs_f64(f64::from(micros) / 1e6))),
            Ok(()) => Ok(None),
            Err(error) => {
                // Nothing was launched, but NCCL may have failed partway on some ranks.
                self.abort(&error);
                Err(error)
            }
        }
    }

    /// Makes the buffers' streams wait for the operation. Returns `None` if a capture interfered; that capture is then void.
    /// Ends the process if the capture has become a graph, which may hold memory that was lent to the operation.
    #[inline]
    pub(crate) fn order_after(
        &self,
        buffers: &IssueBuffers<'_>,
        ordering_event: &CudaEvent,
    ) -> Option<Result<()>> {
        match buffers.order_after(self, ordering_event) {
            OrderingOutcome::Ordered(ordered) => Some(ordered),
            OrderingOutcome::Captured(ForeignCapture::Void) => None,
            OrderingOutcome::Captured(ForeignCapture::InGraph) => end_the_process(
                FatalReport::new(self.identity(), FatalCause::CapturedInGraph),
            ),
        }
    }

    /// Returns until when to wait for the end of another thread's capture.
    pub(crate) fn capture_deadline(&self) -> Instant {
        deadline_after(self.timeouts.abort / 2)
    }

    /// Waits for the end of another thread's capture, and then makes the buffers' streams wait for the operation. Returns
    /// `None` if the capture does not end and no stream has to wait; ends the process if a stream has to wait. To be called
    /// without the lock, because an abort needs it.
    #[cold]
    pub(crate) fn wait_for_capture(
        &self,
        buffers: &IssueBuffers<'_>,
        deadline: Instant,
    ) -> Option<Result<()>> {
        let cause = match buffers.wait_for_capture(self, deadline) {
            OrderingOutcome::Ordered(ordered) => return Some(ordered),
            OrderingOutcome::Captured(ForeignCapture::Void) if buffers.needs_no_order() => {
                return None;
            }
            OrderingOutcome::Captured(ForeignCapture::Void) => FatalCause::Captured {
                timeout: self.timeouts.abort,
            },
            OrderingOutcome::Captured(ForeignCapture::InGraph) => FatalCause::CapturedInGraph,
        };
        end_the_process(FatalReport::new(self.identity(), cause))
    }

    /// Checks the operation's stream, and makes it wait for the streams of the buffers.
    pub(crate) fn prepare(&self, handle: &Handle, buffers: &IssueBuffers<'_>) -> Result<()> {
        stream_order::check_operation_stream(stream_order::OPERATION, buffers.on, &self.context)?;
        buffers.check_ordering()?;
        stream_order::order_before(buffers.on, buffers.foreign(), &handle.ordering_event)
    }

    /// Makes `calls`, and returns when the work is on the stream or can no longer get there; at the latest `timeout` after
    /// `started`, of which `remaining` is left.
    #[inline]
    pub(crate) fn launch(
        &self,
        raw: RawComm,
        started: Instant,
        (timeout, remaining): (Duration, Duration),
        calls: impl FnOnce() -> Result<Progress, NcclFailure>,
    ) -> Result<()> {
        let called = match &self.abort_flag_parent {
            None => calls(),
            Some(abort_flag_parent) => {
                let inside = abort_flag_parent.enter(remaining);
                let called = calls();
                if let Some(ended) = inside.leave() {
                    return Err(not_issued_in_time(ended, timeout));
                }
                called
            }
        };
        match called {
            Ok(Progress::Done) => Ok(()),
            Ok(Progress::Pending) => {
                self.wait_until_on_stream(raw, started, timeout, || self.interrupted())
            }
            Err(failure) => Err(self.error_of_failed_call(failure, timeout)),
        }
    }

    /// Returns the error for a call that failed. If the communicator was aborted while the call was inside NCCL, the
    /// error reports the call as interrupted.
    #[cold]
    pub(crate) fn error_of_failed_call(&self, failure: NcclFailure, timeout: Duration) -> Error {
        match self.abort_flag_parent.is_some() && self.lifecycle.get().abort_has_begun() {
            true => not_issued_in_time(NotIdle::Interrupted, timeout),
            false => failure.into(),
        }
    }

    /// Polls until the work is on the stream.
    pub(crate) fn wait_until_on_stream(
        &self,
        raw: RawComm,
        started: Instant,
        timeout: Duration,
        interrupted: impl Fn() -> bool,
    ) -> Result<()> {
        let deadline = later(started, timeout);
        wait_until_idle(&self.library, raw, "launch", deadline, interrupted).map_err(|not_idle| {
            self.record_unfinished_launch();
            not_issued_in_time(not_idle, timeout)
        })
    }

    pub(crate) fn interrupted(&self) -> bool {
        // A finalize does not interrupt: it waits for this operation.
        self.abort_signal.is_aborted() || self.lifecycle.get().abort_has_begun()
    }

    /// Aborts a communicator that cannot be used again, and makes the buffers' streams wait for the work that is still
    /// on the operation's stream. Ends the process if NCCL keeps pointers into memory that was only lent to it.
    pub(crate) fn abort_and_order(self: &Arc<Self>, reason: &Error, buffers: &IssueBuffers<'_>) {
        let lent = EndProcessOnPanic::of(self);
        let timeout = self.abort_timeout();
        if !self.abort_until_released(reason) {
            end_the_process(FatalReport::new(
                self.identity(),
                FatalCause::AbortTimedOut { timeout },
            ));
        }
        if !self.retry_order_after(buffers) && !self.wait_until_stream_idle(buffers) {
            end_the_process(FatalReport::new(
                self.identity(),
                FatalCause::WorkTimedOut { timeout },
            ));
        }
        std::mem::forget(lent);
    }

    /// Tries once more to make the buffers' streams wait, if the lock becomes free within the abort timeout. Returns
    /// whether that succeeded.
    fn retry_order_after(&self, buffers: &IssueBuffers<'_>) -> bool {
        let deadline = deadline_after(self.timeouts.abort);
        let Some(handle) = self.handle.lock_until(deadline) else {
            return false;
        };
        let inside = self.enter(CallKind::Query, self.timeouts.abort);
        let ordered = self.order_after(buffers, &handle.ordering_event);
        drop((inside, handle));
        let ordered = ordered.or_else(|| self.wait_for_capture(buffers, self.capture_deadline()));
        ordered.is_none_or(|ordered| ordered.is_ok())
    }

    /// Waits until nothing runs on the operation's stream any more, at most for the abort timeout; returns whether the stream
    /// is idle. A failed device runs nothing.
    fn wait_until_stream_idle(&self, buffers: &IssueBuffers<'_>) -> bool {
        let deadline = deadline_after(self.timeouts.abort);
        let mut backoff = Backoff::new();
        // Enters once per query, so that the stuck-call monitor does not mistake the wait for a call that does not return.
        let is_busy = || {
            let _inside = self.enter(CallKind::Query, self.timeouts.abort);
            stream_order::is_busy(buffers.on)
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

/// Adds the operation to the error of a failed check.
#[cold]
#[doc(hidden)]
pub fn failed_check(comm: &Communicator, kind: OperationKind, shape: Shape, error: Error) -> Error {
    comm.inner.final_error_before_issue(
        error.during(|| comm.inner.operation(kind, shape, None, Instant::now())),
    )
}

/// Returns the error for an operation that did not get onto its stream.
#[cold]
pub(crate) fn not_issued_in_time(not_idle: NotIdle, timeout: Duration) -> Error {
    not_idle.into_error("putting the operation on its stream", timeout)
}

/// Marks that memory is lent to NCCL. A panic meanwhile must not give the memory back to the caller, so it ends the
/// process.
pub(crate) struct EndProcessOnPanic<'i>(&'i Inner);

impl<'i> EndProcessOnPanic<'i> {
    pub(crate) fn of(inner: &'i Inner) -> Self {
        Self(inner)
    }
}

impl Drop for EndProcessOnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            end_the_process(FatalReport::new(self.0.identity(), FatalCause::Panicked));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gate::Gate;
    use crate::issuing::DeviceCopy;
    use crate::single_rank;

    #[test]
    fn an_operation_of_nothing_but_copies_is_complete_when_they_are() {
        nccl_emulator::install_unless_gpu().expect("an emulator or a GPU");
        let device = crate::device(0).expect("a device");
        let comm = single_rank::communicator(&device.new_stream().expect("a stream"));
        let stream = comm.stream();
        let x = stream.clone_htod(&[1u8, 2, 3, 4]).expect("memory");
        let mut y = stream.alloc_zeros::<u8>(4).expect("memory");
        let work = Gate::closed_on(stream).expect("work");
        let request = {
            let mut buffers = IssueBuffers::new(&comm.stream).expect("a stream");
            let from = buffers.read(&x).expect("a buffer");
            let to = buffers.write(&mut y).expect("a buffer");
            buffers.copy(DeviceCopy {
                to,
                from,
                width: 4,
                rows: 1,
                to_pitch: 4,
                from_pitch: 4,
            });
            buffers.next_step();
            issue(&comm, &buffers, OperationKind::Group, Shape::default()).expect("a request")
        };
        assert!(!request.is_complete().expect("no error"));
        work.open();
        request.wait().expect("no error");
        assert_eq!(stream.clone_dtoh(&y).expect("a copy"), [1, 2, 3, 4]);
    }
}
