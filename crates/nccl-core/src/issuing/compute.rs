//! Kernels and copies of this crate, ordered like an operation.
//!
//! Most run before or after the messages of one operation, on the same stream, and have no number of their own. A kernel that
//! is an operation by itself ([`Inner::operate`]) has a number and a record, and the watchdog monitors it. Their
//! buffers are borrowed, like those of any operation: on every path, before the borrow ends, the streams of the buffers
//! are made to wait for the work that is on the stream.

use std::cell::Cell;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cudarc::driver::{CudaSlice, DeviceRepr, DriverError};

use super::issue::EndProcessOnPanic;
use super::issue_buffers::IssueBuffers;
use crate::active_calls::CallKind;
use crate::communicator::handle::Handle;
use crate::communicator::stream_order::{self, ForeignCapture};
use crate::communicator::{Communicator, Inner};
use crate::cuda_driver;
use crate::error::{Error, Result};
use crate::operation::{Operation, OperationKind};
use crate::queued_op::QueuedOp;
use crate::supervision::watchdog;

/// Copies the result of a completed operation to the host. Uses a stream of its own, because later work on the
/// communicator's stream may wait for other ranks.
#[doc(hidden)]
pub fn read_back<T: DeviceRepr>(
    comm: &Communicator,
    from: &CudaSlice<T>,
) -> std::result::Result<Vec<T>, DriverError> {
    let _inside = comm.inner.enter(CallKind::Query, comm.timeout);
    let context = &comm.inner.context;
    let stream = cuda_driver::ignoring_stored_error(context, || context.new_stream())?;
    // Waits only for the copy.
    cuda_driver::ignoring_stored_error(context, || stream.clone_dtoh(from))
}

impl Inner {
    /// Orders the streams in `buffers` around `launch`, which puts work on their stream. Does not call NCCL.
    ///
    /// # Errors
    /// The errors of the stream checks; nothing was launched, and the communicator stays usable.
    /// The errors of `launch`: the communicator is aborted, because the other ranks continue with messages that this rank
    /// does not send.
    #[doc(hidden)]
    pub fn compute(
        self: &Arc<Self>,
        buffers: &IssueBuffers<'_>,
        kind: OperationKind,
        timeout: Duration,
        describe: impl Fn() -> Operation,
        launch: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        self.ordered(buffers, kind, timeout, describe, |_| launch())
    }

    /// As [`compute`](Self::compute), for a kernel that carries out an operation of all ranks without NCCL. Returns the
    /// operation's number. The watchdog expects the kernel to end by itself within `patience`.
    #[doc(hidden)]
    pub fn operate(
        self: &Arc<Self>,
        buffers: &IssueBuffers<'_>,
        operation: &QueuedOp,
        (timeout, patience): (Duration, Duration),
        describe: impl Fn(Option<u64>) -> Operation,
        launch: impl FnOnce() -> Result<()>,
    ) -> Result<u64> {
        let kind = operation.descriptor.function().kind();
        let number = Cell::new(None);
        let recorded = |handle: &mut Handle| {
            handle.sequence += 1;
            let sequence = handle.sequence;
            number.set(Some(sequence));
            let recorder = &mut handle.recorder;
            let started = Instant::now();
            let ticket = recorder.begin(sequence, kind, started, buffers.on, patience, 1);
            // Not counted among NCCL's operations, of which the first one connects the ranks.
            operation.record(recorder);
            if ticket.is_reach_due {
                recorder.note_reach(ticket);
            }
            let call = watchdog::ReportedCall {
                inner: self,
                on: buffers.on,
                sequence,
                kind,
                timeout: patience,
            };
            let is_marked = match ticket.needs_report {
                true => watchdog::report_before(call),
                false => Ok(false),
            };
            let launched = is_marked.and_then(|is_marked| launch().map(|()| is_marked));
            handle.recorder.end(ticket, launched.as_ref().err());
            if launched? {
                watchdog::report_after(call);
            }
            Ok(sequence)
        };
        self.ordered(buffers, kind, timeout, || describe(number.get()), recorded)
    }

    fn ordered<T>(
        self: &Arc<Self>,
        buffers: &IssueBuffers<'_>,
        kind: OperationKind,
        timeout: Duration,
        describe: impl Fn() -> Operation,
        launch: impl FnOnce(&mut Handle) -> Result<T>,
    ) -> Result<T> {
        let under_the_lock = || {
            let (mut handle, _) = self.handle.lock_within(Some(kind), timeout)?;
            self.ready(&handle)?;
            let _inside = self.enter(CallKind::Issue, timeout);
            self.prepare(&handle, buffers)?;
            let lent = EndProcessOnPanic::of(self);
            let launched = launch(&mut handle);
            let ordering_outcome = self.order_after(buffers, &handle.ordering_event);
            std::mem::forget(lent);
            Ok((launched, ordering_outcome))
        };
        // Done without the lock, for which an abort that has begun may wait.
        let (launched, ordering_outcome) = under_the_lock()
            .map_err(|error: Error| self.final_error_before_issue(error.during(&describe)))?;
        let put = match ordering_outcome {
            Some(ordered) => launched.and_then(|launched| ordered.map(|()| launched)),
            None => {
                let lent = EndProcessOnPanic::of(self);
                // NCCL is not involved in this work, and does not wait for the end of the capture.
                let _ = self.wait_for_capture(buffers, self.capture_deadline());
                std::mem::forget(lent);
                Err(stream_order::capture_error(
                    ForeignCapture::Void,
                    launched.err(),
                ))
            }
        };
        put.map_err(|error| {
            let error = error.during(&describe);
            self.abort_and_order(&error, buffers);
            self.final_error(error).during(describe)
        })
    }
}
