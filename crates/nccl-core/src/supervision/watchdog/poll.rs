//! One poll at one communicator: which marks are reached, which calls are not covered yet, whether NCCL
//! failed. Calls CUDA and NCCL, and holds no lock of the watchdog meanwhile.

use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use cudarc::driver::{CudaEvent, CudaStream, result, sys};

use super::registry::{Mark, MarkPosition, keep_for_reuse, new_event, record};
use super::results::PollResults;
use super::tracker::{CallTracker, PendingMark, StreamState, depth};
use crate::communicator::{DetectionPhase, Inner, TemporaryHandle, is_context_lost};
use crate::driver;
use crate::error::{Error, NcclFailure};
use crate::operation::{OperationKind, Shape};
use crate::pending_call::{CallStage, Overdue, PendingCall};
use crate::recorder::{Track, TrackedCall, handle_of, is_collective, origin};
use crate::state::State;
use crate::stats;
use crate::supervision::stragglers::{self, SAMPLES};

/// The most marks of one stream that are not reached.
const MARKS: usize = 64;

/// How often NCCL is asked for errors of its background threads.
const ASK: Duration = Duration::from_millis(250);

/// A stream, the call up to which it was done before it was watched, and the marks put on it since the last
/// poll.
type Share = (Arc<CudaStream>, u64, Vec<Mark>);

/// Polls are closer together than this while anything is pending, unless this thread is kept from running.
const GAP: Duration = Duration::from_secs(2);

/// What to look at.
pub(super) struct PollTask {
    pub(super) track: Arc<Track>,
    pub(super) inner: Weak<Inner>,
    pub(super) streams: Vec<Share>,
}

/// What the polling thread remembers of a communicator.
#[derive(Default)]
pub(super) struct CommunicatorPoller {
    tracker: CallTracker,
    streams: Vec<StreamPoller>,
    asked: Option<Instant>,
    progress: Option<Instant>,
    /// The number and shape of the call in front: its record may be overwritten before it ends.
    front: Option<(u64, Shape)>,
    /// The last call about which this rank asked who has not entered it.
    last_queried: Option<u64>,
    /// When to ask how far apart the ranks arrive, since the recorder's zero.
    sample_at: Option<Duration>,
    /// Since the recorder's zero.
    polled: Option<Duration>,
}

struct StreamPoller {
    stream: Arc<CudaStream>,
    queue: StreamState,
    marks: Vec<Mark>,
    /// The last call that a mark covers.
    marked: u64,
    /// The event of a reached mark right in front of a call, and the number of that call.
    front: Option<(u64, CudaEvent)>,
}

/// The result of a poll.
pub(super) struct PollReport {
    pub(super) results: PollResults,
    /// For each stream of the task: how many marks are not reached; `None` when nothing is pending.
    pub(super) streams: Vec<Option<u32>>,
    pub(super) found: Option<EndCause>,
}

/// Why a communicator is to be ended.
pub(super) enum EndCause {
    Overdue(Box<Overdue>),
    /// NCCL or CUDA reported an error; whether anything of the communicator was pending.
    Failed(Error, DetectionPhase),
    Signalled,
}

/// The call that the polling thread is in, for the report if it does not return.
static CURRENT_CALL: AtomicU8 = AtomicU8::new(0);
const CALLS: [&str; 4] = [
    "cuEventQuery",
    "cuEventRecord",
    "ncclCommGetAsyncError",
    "cuEventElapsedTime",
];

/// The call that the polling thread is in.
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
        let (queue_limit, mut events, signalled) = {
            let inner = TemporaryHandle::of(inner)?;
            let mut events = inner.events.lock();
            let some = events.len().saturating_sub(2).min(streams.len());
            let at = events.len() - some;
            let signalled = inner.abort_signal.is_aborted();
            (
                inner.timeouts.queue_limit(),
                events.split_off(at),
                signalled,
            )
        };
        // Before any mark is put: a mark covers what is issued by now.
        let calls = track.calls();
        let now = origin().monotonic.elapsed();
        let mut failed = None;
        self.take_in(streams);
        // While the process was stopped or got no CPU time, its work may not have run either.
        if self.polled.is_some_and(|polled| now > polled + GAP) {
            self.tracker.restart(now);
        }
        self.polled = Some(now);
        for seen in &mut self.streams {
            let handle = handle_of(&seen.stream);
            // A mark that is reached after NCCL's abort flag is up does not prove that the call was done.
            if !TemporaryHandle::of(inner)?.is_flag_up() {
                match seen.ask(now, &mut events, &track.identity.name) {
                    Ok(false) => {}
                    Ok(true) => self.progress = Some(Instant::now()),
                    Err(error) => failed = failed.or(Some(error)),
                }
                if TemporaryHandle::of(inner)?.is_being_ended() {
                    return None;
                }
                if let Some(done) = seen.queue.done() {
                    track.done(&seen.stream, done);
                }
            }
            seen.queue.update(&calls, track.done_on(handle), now);
            if let Err(error) = seen.mark(&mut events) {
                failed = failed.or(Some(error));
            }
        }
        let queues = || self.streams.iter().map(|seen| &seen.queue);
        let depth = depth(queues());
        let pending_call = self.tracker.first_pending(queues(), queue_limit, now);
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
        let streams = streams.iter().map(|(stream, ..)| {
            let seen = self.streams.iter();
            let seen = seen
                .clone()
                .find(|seen| Arc::ptr_eq(&seen.stream, stream))?;
            let backlog = u32::try_from(seen.marks.len()).unwrap_or(u32::MAX);
            (!seen.queue.is_idle()).then_some(backlog)
        });
        let streams = streams.collect();
        let asked = pending_call.and_then(|_| self.ask_nccl(inner));
        let found = match (asked, failed, pending_call) {
            (Some(failure), ..) => {
                Some(EndCause::Failed(failure.into(), DetectionPhase::AfterIssue))
            }
            (None, Some(error), None) => Some(EndCause::Failed(error, DetectionPhase::BeforeIssue)),
            (None, Some(error), Some(_)) => {
                Some(EndCause::Failed(error, DetectionPhase::AfterIssue))
            }
            (None, None, Some(_)) if signalled => Some(EndCause::Signalled),
            (None, None, Some(pending_call)) => {
                let overdue = pending_call.overdue(now);
                overdue.map(|overdue| {
                    let may_connect = track.may_connect(overdue.sequence());
                    EndCause::Overdue(Box::new(Overdue {
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

    /// Asks which ranks have not entered the call this rank waits in, and now and then how far apart the ranks
    /// arrive.
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
        let (number, kind) = (pending_call.call.number, pending_call.call.kind);
        if self.last_queried == Some(number)
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
        let place = u32::try_from(inner.rank).unwrap_or(u32::MAX);
        let spread = (straggler_after / 4).saturating_mul(place) / ranks;
        let waited = now.saturating_sub(pending_call.began);
        if waited >= straggler_after.saturating_add(spread)
            && stragglers::ask(&**supervisor, track, number)
        {
            self.last_queried = Some(number);
        }
    }

    fn shape_of(&mut self, call: &TrackedCall, track: &Track) -> Shape {
        match self.front {
            Some((known, shape)) if known == call.number => shape,
            _ => {
                let shape = track.shape_of(call.number);
                // While the call is being issued, its operations may not be recorded yet.
                if !call.issuing {
                    self.front = Some((call.number, shape));
                }
                shape
            }
        }
    }

    /// Takes over the new marks, and forgets streams that are not watched any more.
    fn take_in(&mut self, streams: &mut [Share]) {
        self.streams.retain(|seen| {
            let mut watched = streams.iter();
            watched.any(|(stream, ..)| Arc::ptr_eq(stream, &seen.stream))
        });
        for (stream, floor, incoming) in streams {
            let known = self
                .streams
                .iter()
                .position(|seen| Arc::ptr_eq(&seen.stream, stream));
            let known = known.unwrap_or_else(|| {
                self.streams.push(StreamPoller {
                    stream: Arc::clone(stream),
                    queue: StreamState::new(handle_of(stream)),
                    marks: Vec::new(),
                    marked: 0,
                    front: None,
                });
                self.streams.len() - 1
            });
            let seen = &mut self.streams[known];
            seen.queue.floor = *floor;
            for put in incoming.drain(..) {
                seen.marked = seen.marked.max(put.mark.covers);
                seen.marks.push(put);
            }
        }
    }

    /// An error that NCCL found in the background; skipped while another thread calls NCCL.
    fn ask_nccl(&mut self, inner: &Weak<Inner>) -> Option<NcclFailure> {
        if self.asked.is_some_and(|asked| asked.elapsed() < ASK) {
            return None;
        }
        self.asked = Some(Instant::now());
        set_current_call(2);
        TemporaryHandle::of(inner)?.background_failure()
    }
}

impl StreamPoller {
    /// Queries the marks. Returns whether one more is reached.
    fn ask(
        &mut self,
        now: Duration,
        events: &mut Vec<CudaEvent>,
        name: &Arc<str>,
    ) -> Result<bool, Error> {
        set_current_call(0);
        let _ = driver::bind(self.stream.context());
        let (mut any, mut failed) = (false, None);
        for put in std::mem::take(&mut self.marks) {
            match put.event.try_is_complete() {
                Ok(true) => {
                    any = true;
                    self.queue.reached(put.mark.covers, now);
                    if let Some((kind, took)) = self.reached(put, events) {
                        stats::took(name, kind, took);
                    }
                }
                Ok(false) => self.marks.push(put),
                // A capture began just before the mark was put: the mark went into a graph and proves nothing.
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
        self.queue.unreached = self.marks.iter().map(|put| put.mark).collect();
        failed.map_or(Ok(any), Err)
    }

    /// Takes a mark that was reached. Returns how long a call took, if this mark and the one before are right
    /// around it.
    fn reached(
        &mut self,
        put: Mark,
        events: &mut Vec<CudaEvent>,
    ) -> Option<(OperationKind, Duration)> {
        match put.side {
            MarkPosition::Front(call) => {
                events.extend(
                    self.front
                        .replace((call, put.event))
                        .map(|(_, event)| event),
                );
                None
            }
            MarkPosition::Behind(call, kind) => {
                let front = self.front.take();
                let took = front
                    .as_ref()
                    .filter(|(number, _)| *number == call)
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

    /// Puts a mark behind calls that no mark covers. The next poll queries it.
    ///
    /// # Errors
    /// When CUDA reports that the context is lost: no mark will ever be reached.
    fn mark(&mut self, events: &mut Vec<CudaEvent>) -> Result<(), Error> {
        let covers = self.queue.issued;
        if !self.queue.is_uncovered(self.marked)
            || self.marks.len() >= MARKS
            || driver::is_capturing(&self.stream)
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
            // As while a capture begins; the next poll tries again.
            Err(_) => return Ok(()),
        };
        // A capture may have begun meanwhile: then the event belongs to the graph, and must not be queried.
        if driver::is_capturing(&self.stream) {
            return Ok(());
        }
        self.marked = covers;
        let mark = PendingMark {
            covers,
            at: origin().monotonic.elapsed(),
            is_right_behind: false,
        };
        self.queue.unreached.push(mark);
        let side = MarkPosition::Other;
        self.marks.push(Mark { event, mark, side });
        Ok(())
    }
}

/// The time between two events; both were reached.
fn between(from: &CudaEvent, to: &CudaEvent) -> Option<Duration> {
    set_current_call(3);
    // SAFETY: both events live, and were recorded.
    let millis = unsafe { result::event::elapsed(from.cu_event(), to.cu_event()) }.ok()?;
    Duration::try_from_secs_f64(f64::from(millis) / 1e3).ok()
}
