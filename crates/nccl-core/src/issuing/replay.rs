//! The launch of a captured plan, ordered like an operation.
//!
//! The communicator's lock is not held meanwhile: a launch may wait inside CUDA while too many launches are in flight,
//! and only an abort, which needs the lock, ends that wait.

use std::sync::Arc;
use std::time::{Duration, Instant};

use cudarc::driver::CudaEvent;

use super::issue_buffers::{IssueBuffers, OrderingOutcome};
use crate::active_calls::CallKind;
use crate::communicator::Inner;
use crate::communicator::stream_order::{self, ForeignCapture};
use crate::error::{Error, Result};
use crate::operation::{Operation, OperationKind, Shape};
use crate::stats::Volume;
use crate::supervision::watchdog;

/// What a launch replays.
pub(crate) struct Replayed<'p> {
    /// The number of the plan.
    pub(crate) plan: u64,
    /// What the launch adds to the statistics.
    pub(crate) volume: Option<&'p Volume>,
    /// Whether its operations reach all ranks.
    pub(crate) reaches_all: bool,
}

/// Why a replay was not launched.
pub(crate) enum NotLaunched {
    /// CUDA was not called.
    Refused(Error),
    /// CUDA was called, and this rank is out of step with the others.
    Failed(Error),
}

impl Inner {
    /// Orders the streams in `buffers` around `launch`, which puts work on their stream. Returns the operation's number.
    pub(crate) fn replay(
        self: &Arc<Self>,
        buffers: &IssueBuffers<'_>,
        ordering_event: &CudaEvent,
        replayed: &Replayed<'_>,
        timeout: Duration,
        launch: impl FnOnce(&Self) -> Result<(), NotLaunched>,
    ) -> Result<u64> {
        let (sequence, ticket) = {
            let (mut handle, _) = self
                .handle
                .lock_within(Some(OperationKind::Replay), timeout)?;
            let started = Instant::now();
            self.ready(&handle)?;
            handle.sequence += 1;
            let sequence = handle.sequence;
            self.plans.replays(sequence, replayed.plan);
            let recorder = &mut handle.recorder;
            let ticket = recorder.begin(
                sequence,
                OperationKind::Replay,
                started,
                buffers.on,
                timeout,
                0,
            );
            self.track_handle.track().begin_launch();
            if let Some(volume) = replayed.volume {
                recorder.count_replay(volume);
            }
            if replayed.reaches_all && ticket.is_reach_due {
                recorder.note_reach(ticket);
            }
            (sequence, ticket)
        };
        let inside = self.enter(CallKind::Replay, timeout);
        if let Err(error) = self.ordered_behind_buffers(buffers, ordering_event) {
            self.track_handle.end_launch(ticket, false);
            return Err(error);
        }
        let issue = watchdog::ReportedCall {
            inner: self,
            on: buffers.on,
            sequence,
            kind: OperationKind::Replay,
            timeout,
        };
        let mut is_marked = false;
        if ticket.needs_report {
            is_marked = watchdog::report_before(issue)
                .inspect_err(|_| self.track_handle.end_launch(ticket, false))?;
        }
        let launched = launch(self);
        self.track_handle.end_launch(ticket, launched.is_ok());
        if is_marked {
            watchdog::report_after(issue);
        }
        let ordering_outcome = buffers.order_after(self, ordering_event);
        drop(inside);
        // Whether the work is on the stream or will never get there.
        let (captured, is_apart) = match &ordering_outcome {
            OrderingOutcome::Ordered(_) => (None, true),
            OrderingOutcome::Captured(ForeignCapture::Void) => {
                let ended = self.wait_for_capture(buffers, self.capture_deadline());
                (Some(ForeignCapture::Void), ended.is_some())
            }
            OrderingOutcome::Captured(ForeignCapture::InGraph) => {
                // That capture is over. Earlier work is on the stream, and the buffers' streams have to wait for it.
                let _ = self.wait_for_capture(buffers, self.capture_deadline());
                (Some(ForeignCapture::InGraph), false)
            }
        };
        let (failed, is_launched) = match (launched, ordering_outcome) {
            (Err(NotLaunched::Refused(error)), _) => return Err(error),
            (Err(NotLaunched::Failed(error)), _) => (Some(error), false),
            (Ok(()), OrderingOutcome::Ordered(Err(error))) => (Some(error), true),
            (Ok(()), _) => (None, true),
        };
        let error = match (captured, failed) {
            (Some(capture), failed) => stream_order::capture_error(capture, failed),
            (None, Some(error)) => error,
            (None, None) => return Ok(sequence),
        };
        let (kind, now) = (OperationKind::Replay, Instant::now());
        let error = error.during(|| self.operation(kind, Shape::default(), Some(sequence), now));
        match is_launched && !is_apart {
            // The plan keeps its memory, and NCCL waits for the end of that capture and of its graph.
            true => self.abort_in_background(&error),
            false => self.abort_and_order(&error, buffers),
        }
        Err(error)
    }

    /// Describes a replay that has no number.
    pub(crate) fn replay_of(&self, plan: u64, started: Instant) -> Operation {
        let shape = Shape::default();
        Operation {
            plan: Some(plan),
            ..self.operation(OperationKind::Replay, shape, None, started)
        }
    }

    fn ordered_behind_buffers(
        &self,
        buffers: &IssueBuffers<'_>,
        ordering_event: &CudaEvent,
    ) -> Result<()> {
        stream_order::check_operation_stream(stream_order::OPERATION, buffers.on, &self.context)?;
        buffers.check_ordering()?;
        stream_order::order_before(buffers.on, buffers.foreign(), ordering_event)
    }
}
