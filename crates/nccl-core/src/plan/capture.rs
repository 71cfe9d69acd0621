//! The capture itself, which begins, is filled and ends within one call.
//!
//! It happens on the communicator's own stream, under its lock, after the user's closure has returned. So no other work
//! can get into the graph, and no other code encounters a capturing stream.
//!
//! If an operation fails during the capture, the communicator is aborted, because the other ranks have captured what
//! this rank has not. The abort begins before the capture ends: a thread of NCCL may still be adding to the graph, and
//! only the abort joins that thread. But the abort also waits for graphs that hold the communicator, possibly for the
//! one being captured. So the capture is ended after a moment even if the abort is still waiting.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use cudarc::driver::{CudaStream, result, sys};

use super::record::{Captured, CapturedGroup};
use crate::active_calls::CallKind;
use crate::communicator::Inner;
use crate::cuda_driver;
use crate::error::{Error, ErrorKind, Result};
use crate::graphs::GraphSlot;
use crate::issuing::launch_step;
use crate::operation::{OperationKind, Shape};
use crate::queued_op::CallContext;
use crate::supervision::watchdog;
use crate::threads;

/// Why a plan was not captured.
pub(super) struct CaptureFailure {
    pub(super) error: Error,
    /// A panic to be continued.
    pub(super) panic: Option<Box<dyn Any + Send>>,
}

impl From<Error> for CaptureFailure {
    fn from(error: Error) -> Self {
        Self { error, panic: None }
    }
}

/// How long an abort may take to join NCCL's threads before the capture is ended.
const MOMENT: Duration = Duration::from_secs(1);

impl Inner {
    /// Captures each of `parts` into a graph, until `timeout` after `started`.
    pub(super) fn capture(
        self: &Arc<Self>,
        number: u64,
        parts: &[Vec<Captured>],
        started: Instant,
        timeout: Duration,
    ) -> Result<Vec<Arc<GraphSlot>>, CaptureFailure> {
        let (mut handle, waited) = self
            .handle
            .lock_within(Some(OperationKind::Capture), timeout)?;
        // The wait for other calls does not count against this capture.
        let started = if waited { Instant::now() } else { started };
        let raw = self.ready(&handle)?;
        self.lends_beyond_kernels();
        let stream = self.capture_stream();
        let inside = self.enter(CallKind::Capture, timeout);
        let calls = CallContext {
            library: &self.library,
            comm: raw.as_ptr(),
            stream: stream.cu_stream().cast(),
        };
        let mut issue = |group: &CapturedGroup| {
            const KIND: OperationKind = OperationKind::Capture;
            let handle = &mut *handle;
            handle.sequence += 1;
            let writer = &mut handle.recorder;
            let count = group.batch().queued.len();
            let ticket = writer.begin(handle.sequence, KIND, started, stream, timeout, count);
            if ticket.needs_report {
                // None of it runs before the launch, but NCCL may not return from the call.
                let issue = watchdog::ReportedCall {
                    inner: self,
                    on: stream,
                    sequence: handle.sequence,
                    kind: KIND,
                    timeout,
                };
                watchdog::report_unmarked(issue)?;
            }
            // Until NCCL has settled, its work may not be in the graph yet.
            let timeouts = (started, timeout);
            let captured = launch_step(self, raw, timeouts, group.step(), stream, &calls, writer);
            writer.end(ticket, captured.as_ref().err());
            captured
        };
        let mut graphs = Vec::with_capacity(parts.len());
        let (mut failed, mut panic) = (None, None);
        for part in parts {
            let capturing = match Capturing::begin(stream) {
                Ok(capturing) => capturing,
                // Nothing has been captured yet: the communicator stays usable.
                Err(error) if graphs.is_empty() => return Err(error.into()),
                Err(error) => {
                    failed = Some((None, error));
                    break;
                }
            };
            let issued = part.iter().try_for_each(|captured| match captured {
                Captured::Group(group) => issue(group),
                Captured::Kernel(launch) => {
                    // A panic leaves the ranks out of step, as an error does.
                    let launched = catch_unwind(AssertUnwindSafe(|| launch(stream)));
                    launched.unwrap_or_else(|payload| {
                        panic = Some(payload);
                        let reason = String::from("work for a plan panicked (`Capture::launch`)");
                        Err(Error::new(ErrorKind::Aborted { reason }))
                    })
                }
            });
            match issued.and_then(|()| capturing.finish()) {
                Ok(graph) => graphs.push(graph),
                Err(error) => {
                    failed = Some((Some(capturing), error));
                    break;
                }
            }
        }
        drop(inside);
        let Some((capturing, error)) = failed else {
            // Done under the lock, so that the thread that ends the communicator finds the graphs in the list.
            let add = |graph| self.plans.add(number, graph, &self.context);
            return Ok(graphs.into_iter().map(add).collect());
        };
        // The abort would wait for these graphs.
        drop(graphs);
        drop(handle);
        let (kind, shape) = (OperationKind::Capture, Shape::default());
        let error = error.during(|| self.operation(kind, shape, None, started));
        self.give_up(capturing, &error);
        Err(CaptureFailure { error, panic })
    }

    fn give_up(self: &Arc<Self>, capturing: Option<Capturing<'_>>, error: &Error) {
        std::thread::scope(|scope| {
            let aborting = threads::scoped(scope, "nccl-abort", || self.abort(error));
            if let Ok(aborting) = &aborting {
                let deadline = Instant::now() + MOMENT.min(self.timeouts.abort / 2);
                while !aborting.is_finished() && Instant::now() < deadline {
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
            drop(capturing);
            if aborting.is_err() {
                self.abort(error);
            }
        });
    }
}

/// A stream that is capturing. Dropping this value ends the capture.
struct Capturing<'s> {
    stream: &'s Arc<CudaStream>,
    ended: std::cell::Cell<bool>,
}

impl<'s> Capturing<'s> {
    fn begin(stream: &'s Arc<CudaStream>) -> Result<Self> {
        // In this mode, the calls that would break the capture are forbidden only to this thread, not to the whole
        // process.
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        cuda_driver::ignoring_stored_error(stream.context(), || stream.begin_capture(mode))
            .map_err(Error::cuda("beginning a capture (cuStreamBeginCapture)"))?;
        Ok(Self {
            stream,
            ended: std::cell::Cell::new(false),
        })
    }

    fn finish(&self) -> Result<cudarc::driver::CudaGraph> {
        let end = || self.stream.end_capture(sys::CUgraphInstantiate_flags(0));
        let graph = cuda_driver::ignoring_stored_error(self.stream.context(), end);
        // The capture has not ended if cudarc only returned an error that was stored just now.
        self.ended.set(!cuda_driver::is_capturing(self.stream));
        let graph = graph.map_err(Error::cuda(
            "ending a capture (cuStreamEndCapture, cuGraphInstantiate)",
        ))?;
        graph.ok_or_else(|| {
            Error::new(ErrorKind::Cuda {
                what: "ending a capture (cuStreamEndCapture)",
                error: cudarc::driver::DriverError(
                    sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED,
                ),
            })
        })
    }
}

impl Drop for Capturing<'_> {
    fn drop(&mut self) {
        if self.ended.get() {
            return;
        }
        // SAFETY: the stream lives, and has been capturing since `begin`, on this thread.
        let graph = unsafe { result::stream::end_capture(self.stream.cu_stream()) };
        if let Ok(graph) = graph
            && !graph.is_null()
        {
            // SAFETY: only this function has the graph.
            let _ = unsafe { result::graph::destroy(graph) };
        }
    }
}
