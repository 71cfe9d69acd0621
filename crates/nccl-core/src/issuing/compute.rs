//! Kernels and copies of this crate, ordered like an operation.
//!
//! They run before or after the messages of one operation, on the same stream, and have no number of their own. Their
//! buffers are borrowed, like those of any operation: on every path, before the borrow ends, the streams of the buffers
//! are made to wait for the work that is on the stream.

use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::{CudaSlice, DeviceRepr, DriverError};

use super::issue::EndProcessOnPanic;
use super::issue_buffers::IssueBuffers;
use crate::active_calls::CallKind;
use crate::communicator::stream_order::{self, ForeignCapture};
use crate::communicator::{Communicator, Inner};
use crate::cuda_driver;
use crate::error::{Error, Result};
use crate::operation::{Operation, OperationKind};

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
        let under_the_lock = || {
            let (handle, _) = self.handle.lock_within(Some(kind), timeout)?;
            self.ready(&handle)?;
            let _inside = self.enter(CallKind::Issue, timeout);
            self.prepare(&handle, buffers)?;
            let lent = EndProcessOnPanic::of(self);
            let launched = launch();
            let ordering_outcome = self.order_after(buffers, &handle.ordering_event);
            std::mem::forget(lent);
            Ok((launched, ordering_outcome))
        };
        // Done without the lock, for which an abort that has begun may wait.
        let (launched, ordering_outcome) = under_the_lock()
            .map_err(|error: Error| self.final_error_before_issue(error.during(&describe)))?;
        let put = match ordering_outcome {
            Some(ordered) => launched.and(ordered),
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
