//! One poll of one communicator: which marks are reached, which calls are not covered yet, and whether NCCL failed.
//! Calls CUDA and NCCL, and holds no lock of the watchdog meanwhile.

use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use cudarc::driver::{CudaEvent, CudaStream, result, sys};

use super::registry::{Mark, MarkPosition, keep_for_reuse, new_event, record};
use super::results::PollResults;
use super::tracker::{CallTracker, PendingMark, StreamState, depth};
use crate::communicator::{DetectionPhase, Inner, TemporaryHandle, is_context_lost};
use crate::cuda_driver;
use crate::error::{Error, NcclFailure};
use crate::operation::{OperationKind, Shape};
use crate::pending_call::{CallStage, Overdue, PendingCall};
use crate::recorder::{RecordedCall, Track, handle_of, is_collective, origin};
use crate::state::State;
use crate::stats;
use crate::supervision::stragglers::{self, SAMPLES};

/// The maximum number of marks of one stream that are not reached.
const MARKS: usize = 64;

/// How often NCCL is queried for errors of its background threads.
const NCCL_QUERY_INTERVAL: Duration = Duration::from_millis(250);

/// What to poll on one stream.
pub(super) struct StreamTask {
    pub(super) stream: Arc<CudaStream>,
    /// Its calls up to this one were done before it was watched.
    pub(super) floor: u64,
    /// The marks put on it since the last poll.
    pub(super) incoming: Vec<Mark>,
}

/// While anything is pending, the time between polls is shorter than this, unless this thread does not get CPU time.
const MAX_POLL_GAP: Duration = Duration::from_secs(2);

/// What to poll.
pub(super) struct PollTask {
    pub(super) track: Arc<Track>,
    pub(super) inner: Weak<Inner>,
    pub(super) streams: Vec<StreamTask>,
}

/// The polling thread's state for one communicator.
#[derive(Default)]
pub(super) struct CommunicatorPoller {
    tracker: CallTracker,
    streams: Vec<StreamPoller>,
    last_nccl_query: Option<Instant>,
    progress: Option<Instant>,
    /// The sequence number and shape of the first pending call, whose record may be overwritten before the call ends.
    first_shape: Option<(u64, Shape)>,
    /// The last call about which this rank has queried which ranks have not entered it.
    last_queried: Option<u64>,
    /// When to query how far apart the ranks arrive, since [`origin`].
    sample_at: Option<Duration>,
    /// Since [`origin`].
    polled: Option<Duration>,
}

struct StreamPoller {
    stream: Arc<CudaStream>,
    state: StreamState,
    marks: Vec<Mark>,
    /// The last call that a mark covers.
    marked: u64,
    /// The event of a reached mark directly before a call, and the sequence number of that call.
    front_event: Option<(u64, CudaEvent)>,
}

/// The result of a poll.
pub(super) struct PollReport {
    pub(super) results: PollResults,
    /// For each stream of the task: how many marks are not reached; `None` when nothing is pending.
    pub(super) streams: Vec<Option<u32>>,
    pub(super) found: Option<PollFinding>,
}

/// A finding of a poll because of which the communicator is ended.
pub(super) enum PollFinding {
    Overdue(Box<Overdue>),
    /// NCCL or CUDA reported an error; when it was detected.
    Failed(Error, DetectionPhase),
    Signalled,
}

/// The call in which the polling thread is, for the report if the call does not return.
static CURRENT_CALL: AtomicU8 = AtomicU8::new(0);
const CALLS: [&str; 4] = [
    "cuEventQuery",
    "cuEventRecord",
    "ncclCommGetAsyncError",
    "cuEventElapsedTime",
];

/// Returns the call in which the polling thread is.
pub(super) fn call() -> &'static str {
    CALLS[usize::from(CURRENT_CALL.load(Ordering::Relaxed)) % CALLS.len()]
}

fn set_current_call(call: u8) {
    CURRENT_CALL.store(call, Ordering::Relaxed);
}

impl CommunicatorPoller {
    /// Returns `None` when the communicator has ended, or is about to.
    pub(super) fn poll(&mut self, task: &mut PollTask) -> Option<PollReport> {
        let PollTask {
            track,
            inner,
            streams,
        } = task;
        if track.lifecycle.get() != State::Ready {
            return None;
        }
        let (queue_timeout, mut events, signalled) = {
            let inner = TemporaryHandle::of(inner)?;
            let mut events = inner.events.lock();
            let some = events.len().saturating_sub(2).min(streams.len());
            let at = events.len() - some;
            let signalled = inner.abort_signal.is_aborted();
            (
                inner.timeouts.queue_timeout(),
                events.split_off(at),
                signalled,
            )
        };
        // Read before any mark is put, because a mark covers the calls that are issued by now.
        let calls = track.calls();
        let now = origin().monotonic.elapsed();
        let mut failed = None;
        self.take_in(streams);
        // While the process was stopped or got no CPU time, its work may not have run either.
        if self
            .polled
            .is_some_and(|polled| now > polled + MAX_POLL_GAP)
        {
            self.tracker.restart(now);
        }
        self.polled = Some(now);
        for stream_poller in &mut self.streams {
            let handle = handle_of(&stream_poller.stream);
            // A mark that is reached after NCCL's abort flag was raised does not prove that the call was done.
            if !TemporaryHandle::of(inner)?.is_abort_flag_raised() {
                // Nor does one behind a kernel that has failed.
                let is_void = || {
                    let inner = TemporaryHandle::of(inner);
                    inner.is_none_or(|inner| inner.peer_kernels.failure().is_some())
                };
                let name = &track.identity.name;
                match stream_poller.query_marks(now, &mut events, name, is_void) {
                    Ok(false) => {}
                    Ok(true) => self.progress = Some(Instant::now()),
                    Err(error) => failed = failed.or(Some(error)),
                }
                if TemporaryHandle::of(inner)?.is_being_ended() {
                    return None;
                }
                if let Some(done) = stream_poller.state.done() {
                    track.done(&stream_poller.stream, done);
                }
            }
            stream_poller
                .state
                .update(&calls, track.done_on(handle), now);
            if let Err(error) = stream_poller.mark(&mut events) {
                failed = failed.or(Some(error));
            }
        }
        let stream_states = || {
            self.streams
                .iter()
                .map(|stream_poller| &stream_poller.state)
        };
        let depth = depth(stream_states());
        let pending_call = self
            .tracker
            .first_pending(stream_states(), queue_timeout, now);
        let shape = pending_call.map_or_else(Shape::default, |pending_call| {
            self.shape_of(&pending_call.call, track)
        });
        let results = PollResults {
            pending_call,
            shape,
            depth,
            progress: self.progress,
            polled: Some(Instant::now()),
        };
        let streams = streams.iter().map(|StreamTask { stream, .. }| {
            let mut stream_pollers = self.streams.iter();
            let stream_poller =
                stream_pollers.find(|stream_poller| Arc::ptr_eq(&stream_poller.stream, stream))?;
            let backlog = u32::try_from(stream_poller.marks.len()).unwrap_or(u32::MAX);
            (!stream_poller.state.is_idle()).then_some(backlog)
        });
        let streams = streams.collect();
        let nccl_failure = pending_call.and_then(|_| self.query_nccl(inner));
        let failed = failed.or_else(|| TemporaryHandle::of(inner)?.peer_kernels.failure());
        let found = match (nccl_failure, failed, pending_call) {
            (Some(failure), ..) => Some(PollFinding::Failed(
                failure.into(),
                DetectionPhase::AfterIssue,
            )),
            (None, Some(error), None) => {
                Some(PollFinding::Failed(error, DetectionPhase::BeforeIssue))
            }
            (None, Some(error), Some(_)) => {
                Some(PollFinding::Failed(error, DetectionPhase::AfterIssue))
            }
            (None, None, Some(_)) if signalled => Some(PollFinding::Signalled),
            (None, None, Some(pending_call)) => {
                let overdue = pending_call.overdue(now);
                overdue.map(|overdue| {
                    let may_connect = track.may_connect(overdue.sequence());
                    PollFinding::Overdue(Box::new(Overdue {
                        shape,
                        may_connect,
                        ..overdue
                    }))
                })
            }
            (None, None, None) => None,
        };
        if found.is_none() {
            self.query_stragglers(inner, track, pending_call, now);
        }
        keep_for_reuse(&*TemporaryHandle::of(inner)?, events);
        Some(PollReport {
            results,
            streams,
            found,
        })
    }

    /// Queries which ranks have not entered the call in which this rank waits, and from time to time how far apart the
    /// ranks arrive.
    fn query_stragglers(
        &mut self,
        inner: &Weak<Inner>,
        track: &Track,
        pending_call: Option<PendingCall>,
        now: Duration,
    ) {
        let Some(inner) = TemporaryHandle::of(inner) else {
            return;
        };
        let Some(supervisor) = inner.supervisor.as_ref().filter(|_| inner.world_size > 1) else {
            return;
        };
        if inner.rank == 0 {
            let due = *self.sample_at.get_or_insert(now + SAMPLES[0]);
            if now >= due && stragglers::sample(&**supervisor, track) {
                self.sample_at = Some(now + SAMPLES[1]);
            }
        }
        let Some(pending_call) = pending_call else {
            return;
        };
        let (sequence, kind) = (pending_call.call.sequence, pending_call.call.kind);
        if self.last_queried == Some(sequence)
            || pending_call.stage == CallStage::Queued
            || !is_collective(kind)
        {
            return;
        }
        let Some(straggler_after) = inner.timeouts.straggler_after(pending_call.call.timeout)
        else {
            return;
        };
        let ranks = u32::try_from(inner.world_size).unwrap_or(u32::MAX);
        let rank = u32::try_from(inner.rank).unwrap_or(u32::MAX);
        let spread = (straggler_after / 4).saturating_mul(rank) / ranks;
        let waited = now.saturating_sub(pending_call.began);
        if waited >= straggler_after.saturating_add(spread)
            && stragglers::query(&**supervisor, track, sequence)
        {
            self.last_queried = Some(sequence);
        }
    }

    fn shape_of(&mut self, call: &RecordedCall, track: &Track) -> Shape {
        match self.first_shape {
            Some((known, shape)) if known == call.sequence => shape,
            _ => {
                let shape = track.shape_of(call.sequence);
                // While the call is being issued, its operations may not be recorded yet.
                if !call.issuing {
                    self.first_shape = Some((call.sequence, shape));
                }
                shape
            }
        }
    }

    /// Takes over the new marks, and removes streams that are not watched any more.
    fn take_in(&mut self, streams: &mut [StreamTask]) {
        self.streams.retain(|stream_poller| {
            let mut tasks = streams.iter();
            tasks.any(|task| Arc::ptr_eq(&task.stream, &stream_poller.stream))
        });
        for StreamTask {
            stream,
            floor,
            incoming,
        } in streams
        {
            let known = self
                .streams
                .iter()
                .position(|stream_poller| Arc::ptr_eq(&stream_poller.stream, stream));
            let known = known.unwrap_or_else(|| {
                self.streams.push(StreamPoller {
                    stream: Arc::clone(stream),
                    state: StreamState::new(handle_of(stream)),
                    marks: Vec::new(),
                    marked: 0,
                    front_event: None,
                });
                self.streams.len() - 1
            });
            let stream_poller = &mut self.streams[known];
            stream_poller.state.floor = *floor;
            for put in incoming.drain(..) {
                stream_poller.marked = stream_poller.marked.max(put.mark.covers);
                stream_poller.marks.push(put);
            }
        }
    }

    /// Returns an error that NCCL found in the background; skipped while another thread calls NCCL.
    fn query_nccl(&mut self, inner: &Weak<Inner>) -> Option<NcclFailure> {
        if self
            .last_nccl_query
            .is_some_and(|query| query.elapsed() < NCCL_QUERY_INTERVAL)
        {
            return None;
        }
        self.last_nccl_query = Some(Instant::now());
        set_current_call(2);
        TemporaryHandle::of(inner)?.background_failure()
    }
}

impl StreamPoller {
    /// Queries the marks. Returns whether another mark is reached. One that is reached while `is_void` proves nothing.
    fn query_marks(
        &mut self,
        now: Duration,
        events: &mut Vec<CudaEvent>,
        name: &Arc<str>,
        is_void: impl Fn() -> bool,
    ) -> Result<bool, Error> {
        set_current_call(0);
        let _ = cuda_driver::bind(self.stream.context());
        let (mut any, mut failed) = (false, None);
        for put in std::mem::take(&mut self.marks) {
            match put.event.try_is_complete() {
                // Asked only now: a kernel says that it has failed before it ends.
                Ok(true) if is_void() => self.marks.push(put),
                Ok(true) => {
                    any = true;
                    self.state.reached(put.mark.covers, now);
                    if let Some((kind, took)) = self.reached(put, events) {
                        stats::took(name, kind, took);
                    }
                }
                Ok(false) => self.marks.push(put),
                // A capture began just before the mark was put, so the mark is part of a graph and proves nothing.
                Err(error) if error.0 == sys::CUresult::CUDA_ERROR_CAPTURED_EVENT => {
                    self.marked = 0;
                }
                Err(error) => {
                    failed = Some(Error::cuda(
                        "asking whether issued operations are done (cuEventQuery)",
                    )(error));
                    self.marks.push(put);
                }
            }
        }
        self.state.unreached = self.marks.iter().map(|put| put.mark).collect();
        failed.map_or(Ok(any), Err)
    }

    /// Handles a mark that was reached. Returns how long a call took, if this mark and the previous one directly
    /// enclose it.
    fn reached(
        &mut self,
        put: Mark,
        events: &mut Vec<CudaEvent>,
    ) -> Option<(OperationKind, Duration)> {
        match put.side {
            MarkPosition::Front(call) => {
                events.extend(
                    self.front_event
                        .replace((call, put.event))
                        .map(|(_, event)| event),
                );
                None
            }
            MarkPosition::Behind(call, kind) => {
                let front = self.front_event.take();
                let took = front
                    .as_ref()
                    .filter(|(sequence, _)| *sequence == call)
                    .and_then(|(_, front)| between(front, &put.event));
                events.extend(front.map(|(_, event)| event));
                events.push(put.event);
                Some((kind, took?))
            }
            MarkPosition::Other => {
                events.push(put.event);
                None
            }
        }
    }

    /// Puts a mark after calls that no mark covers. The next poll queries it.
    ///
    /// # Errors
    /// When CUDA reports that the context is lost, so that no mark will ever be reached.
    fn mark(&mut self, events: &mut Vec<CudaEvent>) -> Result<(), Error> {
        let covers = self.state.issued;
        if !self.state.is_uncovered(self.marked)
            || self.marks.len() >= MARKS
            || cuda_driver::is_capturing(&self.stream)
        {
            return Ok(());
        }
        let event = match events.pop() {
            Some(event) => Ok(event),
            None => new_event(self.stream.context()),
        };
        set_current_call(1);
        let event = match event.and_then(|event| record(&event, &self.stream).map(|()| event)) {
            Ok(event) => event,
            Err(error) if is_context_lost(error.0 as u32) => {
                return Err(Error::cuda(
                    "putting a mark behind issued operations (cuEventRecord)",
                )(error));
            }
            // For instance while a capture begins; the next poll tries again.
            Err(_) => return Ok(()),
        };
        // A capture may have begun meanwhile. Then the event belongs to the graph, and must not be queried.
        if cuda_driver::is_capturing(&self.stream) {
            return Ok(());
        }
        self.marked = covers;
        let mark = PendingMark {
            covers,
            at: origin().monotonic.elapsed(),
            is_right_behind: false,
        };
        self.state.unreached.push(mark);
        let side = MarkPosition::Other;
        self.marks.push(Mark { event, mark, side });
        Ok(())
    }
}

/// Returns the time between two events, both of which must have been reached.
fn between(from: &CudaEvent, to: &CudaEvent) -> Option<Duration> {
    set_current_call(3);
    // SAFETY: both events live, and were recorded.
    let millis = unsafe { result::event::elapsed(from.cu_event(), to.cu_event()) }.ok()?;
    Duration::try_from_secs_f64(f64::from(millis) / 1e3).ok()
}
