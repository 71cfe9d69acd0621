//! One look at one communicator: which marks are reached, what is not covered yet, whether NCCL failed. Calls
//! CUDA and NCCL, and holds no lock of the watchdog meanwhile.

use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use cudarc::driver::{CudaEvent, CudaStream, result, sys};

use super::facts::Facts;
use super::judge::{Court, Queue, Unreached, depth};
use super::registry::{Put, Side, give_back, new_event, record};
use crate::communicator::{Inner, Noticed, Visit, is_lost};
use crate::driver;
use crate::error::{Error, NcclFailure};
use crate::operation::{OperationKind, Shape};
use crate::recorder::{Track, TrackedCall, handle_of, is_collective, origin};
use crate::standing::{Clock, Overdue, Standing};
use crate::state::State;
use crate::stats;
use crate::supervision::stragglers::{self, SAMPLES};

/// Marks of one stream that are not reached, at most.
const MARKS: usize = 64;

/// How often NCCL is asked for errors of its background threads.
const ASK: Duration = Duration::from_millis(250);

/// A stream, up to where its calls were done before it was watched, and what was put on it since the last
/// look.
type Share = (Arc<CudaStream>, u64, Vec<Put>);

/// Looks are never so far apart while anything is pending, if this thread runs when it wants to.
const GAP: Duration = Duration::from_secs(2);

/// What is to be looked at.
pub(super) struct Task {
    pub(super) track: Arc<Track>,
    pub(super) inner: Weak<Inner>,
    pub(super) streams: Vec<Share>,
}

/// What a thread that looks remembers of a communicator.
#[derive(Default)]
pub(super) struct Eye {
    court: Court,
    streams: Vec<Seen>,
    asked: Option<Instant>,
    progress: Option<Instant>,
    /// What the call is about that is in front, by its number: its record may be overwritten before it ends.
    front: Option<(u64, Shape)>,
    /// Of which call it was asked who has not entered it.
    wondered: Option<u64>,
    /// When to ask how far apart the ranks come, since the recorder's zero.
    sample_at: Option<Duration>,
    /// Since the recorder's zero.
    looked: Option<Duration>,
}

struct Seen {
    stream: Arc<CudaStream>,
    queue: Queue,
    marks: Vec<Put>,
    /// The last call that a mark covers.
    marked: u64,
    /// A mark right in front of a call that was reached, and whose call that is.
    front: Option<(u64, CudaEvent)>,
}

/// What a look came to.
pub(super) struct Report {
    pub(super) facts: Facts,
    /// For each stream of the task: how many marks are not reached; `None` when nothing is pending.
    pub(super) streams: Vec<Option<u32>>,
    pub(super) found: Option<Found>,
}

/// Why a communicator is to be ended.
pub(super) enum Found {
    Overdue(Box<Overdue>),
    /// NCCL or CUDA says so; whether anything of the communicator was under way.
    Failed(Error, Noticed),
    Signalled,
}

/// What the looking thread is doing, if it does not come back.
static DOING: AtomicU8 = AtomicU8::new(0);
const CALLS: [&str; 4] = [
    "cuEventQuery",
    "cuEventRecord",
    "ncclCommGetAsyncError",
    "cuEventElapsedTime",
];

/// The call in which the thread is that looks.
pub(super) fn call() -> &'static str {
    CALLS[usize::from(DOING.load(Ordering::Relaxed)) % CALLS.len()]
}

fn doing(call: u8) {
    DOING.store(call, Ordering::Relaxed);
}

impl Eye {
    /// `None` when the communicator ended, or is about to.
    pub(super) fn look(&mut self, task: &mut Task) -> Option<Report> {
        let Task {
            track,
            inner,
            streams,
        } = task;
        if track.phase.get() != State::Ready {
            return None;
        }
        let (queue_limit, mut events, signalled) = {
            let inner = Visit::of(inner)?;
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
        // Before any mark is put: it covers what is issued by now.
        let calls = track.calls();
        let now = origin().monotonic.elapsed();
        let mut failed = None;
        self.take_in(streams);
        // Of a process that was stopped, or not let run, nothing ran either, for all that is known.
        if self.looked.is_some_and(|looked| now > looked + GAP) {
            self.court.restart(now);
        }
        self.looked = Some(now);
        for seen in &mut self.streams {
            let handle = handle_of(&seen.stream);
            // What is reached once NCCL's abort flag is up need not have been done.
            if !Visit::of(inner)?.is_flag_up() {
                match seen.ask(now, &mut events, &track.identity.name) {
                    Ok(false) => {}
                    Ok(true) => self.progress = Some(Instant::now()),
                    Err(error) => failed = failed.or(Some(error)),
                }
                if Visit::of(inner)?.is_being_ended() {
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
        let standing = self.court.judge(queues(), queue_limit, now);
        let shape = standing.map_or_else(Shape::default, |standing| {
            self.shape_of(&standing.call, track)
        });
        let facts = Facts {
            standing,
            shape,
            depth,
            progress: self.progress,
            looked: Some(Instant::now()),
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
        let asked = standing.and_then(|_| self.ask_nccl(inner));
        let found = match (asked, failed, standing) {
            (Some(failure), ..) => Some(Found::Failed(failure.into(), Noticed::Behind)),
            (None, Some(error), None) => Some(Found::Failed(error, Noticed::Before)),
            (None, Some(error), Some(_)) => Some(Found::Failed(error, Noticed::Behind)),
            (None, None, Some(_)) if signalled => Some(Found::Signalled),
            (None, None, Some(standing)) => {
                let overdue = standing.overdue(now);
                overdue.map(|overdue| {
                    let may_connect = track.may_connect(overdue.sequence());
                    Found::Overdue(Box::new(Overdue {
                        shape,
                        may_connect,
                        ..overdue
                    }))
                })
            }
            (None, None, None) => None,
        };
        if found.is_none() {
            self.wonder(inner, track, standing, now);
        }
        give_back(&*Visit::of(inner)?, events);
        Some(Report {
            facts,
            streams,
            found,
        })
    }

    /// Asks who has not entered what this rank waits in, and now and then how far apart the ranks come.
    fn wonder(
        &mut self,
        inner: &Weak<Inner>,
        track: &Track,
        standing: Option<Standing>,
        now: Duration,
    ) {
        let Some(inner) = Visit::of(inner) else {
            return;
        };
        let Some(board) = inner.board.as_ref().filter(|_| inner.world_size > 1) else {
            return;
        };
        if inner.rank == 0 {
            let due = *self.sample_at.get_or_insert(now + SAMPLES[0]);
            if now >= due && stragglers::sample(&**board, track) {
                self.sample_at = Some(now + SAMPLES[1]);
            }
        }
        let Some(standing) = standing else { return };
        let (number, kind) = (standing.call.number, standing.call.kind);
        if self.wondered == Some(number) || standing.clock == Clock::Queued || !is_collective(kind)
        {
            return;
        }
        let Some(patience) = inner.timeouts.straggler_after(standing.call.limit) else {
            return;
        };
        let ranks = u32::try_from(inner.world_size).unwrap_or(u32::MAX);
        let place = u32::try_from(inner.rank).unwrap_or(u32::MAX);
        let spread = (patience / 4).saturating_mul(place) / ranks;
        let waited = now.saturating_sub(standing.began);
        if waited >= patience.saturating_add(spread) && stragglers::ask(&**board, track, number) {
            self.wondered = Some(number);
        }
    }

    fn shape_of(&mut self, call: &TrackedCall, track: &Track) -> Shape {
        match self.front {
            Some((known, shape)) if known == call.number => shape,
            _ => {
                let shape = track.shape_of(call.number);
                // Until then, its operations may not be written down yet.
                if !call.issuing {
                    self.front = Some((call.number, shape));
                }
                shape
            }
        }
    }

    /// Takes over the marks that were put, and forgets streams that are not watched any more.
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
                self.streams.push(Seen {
                    stream: Arc::clone(stream),
                    queue: Queue::new(handle_of(stream)),
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
        doing(2);
        Visit::of(inner)?.background_failure()
    }
}

impl Seen {
    /// Asks the marks. Whether one more is reached.
    fn ask(
        &mut self,
        now: Duration,
        events: &mut Vec<CudaEvent>,
        name: &Arc<str>,
    ) -> Result<bool, Error> {
        doing(0);
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
                // A capture began just before it was put, so it went into a graph and proves nothing.
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

    /// A mark was reached; how long the call between it and the one before took, if they are right around one.
    fn reached(
        &mut self,
        put: Put,
        events: &mut Vec<CudaEvent>,
    ) -> Option<(OperationKind, Duration)> {
        match put.side {
            Side::Front(call) => {
                events.extend(
                    self.front
                        .replace((call, put.event))
                        .map(|(_, event)| event),
                );
                None
            }
            Side::Behind(call, kind) => {
                let front = self.front.take();
                let took = front
                    .as_ref()
                    .filter(|(number, _)| *number == call)
                    .and_then(|(_, front)| between(front, &put.event));
                events.extend(front.map(|(_, event)| event));
                events.push(put.event);
                Some((kind, took?))
            }
            Side::Other => {
                events.push(put.event);
                None
            }
        }
    }

    /// Puts a mark behind what is not covered. What is put now is asked at the next look.
    ///
    /// # Errors
    /// When CUDA says that the context is lost: no mark will ever be reached.
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
        doing(1);
        let event = match event.and_then(|event| record(&event, &self.stream).map(|()| event)) {
            Ok(event) => event,
            Err(error) if is_lost(error.0 as u32) => {
                return Err(Error::cuda(
                    "putting a mark behind issued operations (cuEventRecord)",
                )(error));
            }
            // As while a capture begins; the next look tries again.
            Err(_) => return Ok(()),
        };
        // A capture may have begun since: then the event is the graph's, and nothing may be asked of it.
        if driver::is_capturing(&self.stream) {
            return Ok(());
        }
        self.marked = covers;
        let mark = Unreached {
            covers,
            at: origin().monotonic.elapsed(),
            is_right_behind: false,
        };
        self.queue.unreached.push(mark);
        let side = Side::Other;
        self.marks.push(Put { event, mark, side });
        Ok(())
    }
}

/// How long it was from one event to the other; both were reached.
fn between(from: &CudaEvent, to: &CudaEvent) -> Option<Duration> {
    doing(3);
    // SAFETY: both live, and were recorded.
    let millis = unsafe { result::event::elapsed(from.cu_event(), to.cu_event()) }.ok()?;
    Duration::try_from_secs_f64(f64::from(millis) / 1e3).ok()
}
