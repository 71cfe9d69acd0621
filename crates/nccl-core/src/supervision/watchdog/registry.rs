//! The registry of watched communicators and streams.
//!
//! A stream of a communicator is *listed* if its address is in the communicator's [`FastPathFilter`]; calls on it need
//! not be reported. When nothing is pending on the stream, the watchdog first takes it off that list, and releases the
//! stream only after no call was reported for a while ([`LINGER`]): a call is recorded before it reads the list, so a
//! call that found the old list has been seen by then. (A processor makes a store visible to others within nanoseconds;
//! to rely on that after milliseconds, no fence on the path of a call is needed.)
//!
//! [`FastPathFilter`]: crate::recorder

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use cudarc::driver::{CudaContext, CudaEvent, CudaStream, DriverError, sys};

use super::results::{PendingCommunicator, PollResults};
use super::tracker::PendingMark;
use crate::communicator::Inner;
use crate::cuda_driver;
use crate::monitor::WakeFlag;
use crate::operation::OperationKind;
use crate::pending_call::PendingCall;
use crate::recorder::{Track, origin};
use crate::supervision::stragglers::OpenQuery;
use crate::sync::{Condvar, Mutex};

/// How long a stream without pending calls stays in the registry.
pub(super) const LINGER: Duration = Duration::from_millis(60);

/// The shortest time between two marks of issuing threads on one stream.
pub(super) const SPACING: Duration = Duration::from_millis(10);

/// After this time without a call, a mark is put after the last call, and the next call is marked again.
const QUIET: Duration = Duration::from_millis(1);

/// From this number of unreached marks on, issuing threads put half as many.
pub(super) const MANY_MARKS: u32 = 16;

/// How many events a communicator creates at its first call, and how many it keeps at most.
pub(super) const EVENTS: [usize; 2] = [32, 64];

/// The state of the watchdog.
pub(super) struct WatchdogState {
    pub(super) entries: Vec<WatchedCommunicator>,
    /// Queries of other ranks about operations of this process.
    pub(super) queries: Vec<OpenQuery>,
    pub(super) threads: WatchdogThreads,
}

/// A communicator with calls that are not known to be done.
pub(super) struct WatchedCommunicator {
    pub(super) track: Arc<Track>,
    pub(super) inner: Weak<Inner>,
    pub(super) streams: Vec<WatchedStream>,
    pub(super) results: PollResults,
    /// The call with the earliest deadline of those reported since the last poll.
    pub(super) unseen: Option<PendingCall>,
    /// Set after a call that its thread has marked: once no more calls come, there may be calls without a mark.
    pub(super) quiet: Option<QuietPeriod>,
    /// When to poll again, and the time between polls.
    pub(super) next: Instant,
    pub(super) interval: Duration,
    /// The call in which a thread that polled the communicator is stuck, and since when.
    pub(super) stuck: Option<(&'static str, Instant)>,
}

/// The wait for a pause in the calls after a call that its thread has marked.
pub(super) struct QuietPeriod {
    /// When to check for the pause.
    pub(super) at: Instant,
    /// Grows while calls continue to be made.
    pause: Duration,
    /// How many calls there were, including the marked one.
    marked: u64,
}

impl QuietPeriod {
    /// `before` is the quiet period of the previously marked call, if calls have been made since.
    pub(super) fn behind(track: &Track, before: Option<Self>) -> Self {
        let pause = before.map_or(QUIET, |quiet| quiet.pause);
        Self {
            at: Instant::now() + pause,
            pause,
            marked: track.written(),
        }
    }

    /// Once no more calls are made, returns whether there are calls without a mark.
    fn begins(&mut self, track: &Track) -> Option<bool> {
        let longest = match track.last_call() {
            Some((_, true)) => period(None),
            Some((began, false)) if origin().monotonic.elapsed() >= began + QUIET => {
                return Some(track.written() != self.marked);
            }
            _ => SPACING,
        };
        self.pause = (self.pause * 2).min(longest);
        self.at = Instant::now() + self.pause;
        None
    }
}

impl WatchedCommunicator {
    /// Checks whether calls have stopped. If so, the next call is marked, and calls without a mark get one at once.
    pub(super) fn check_quiet(&mut self) {
        let Some(quiet) = &mut self.quiet else { return };
        let Some(is_uncovered) = quiet.begins(&self.track) else {
            return;
        };
        self.quiet = None;
        for watched_stream in &mut self.streams {
            if watched_stream.backlog < MANY_MARKS {
                watched_stream.due = Duration::ZERO;
            }
        }
        if self
            .streams
            .iter()
            .any(|watched_stream| watched_stream.due.is_zero())
        {
            self.track.fast_path.expire();
        }
        if is_uncovered {
            self.next = Instant::now();
        }
    }
}

/// A stream of a communicator. Kept alive while calls on it are not done.
pub(super) struct WatchedStream {
    pub(super) stream: Arc<CudaStream>,
    /// The same stream at the listed address, if that differs: cudarc makes a new value for the default stream each
    /// time.
    pub(super) again: Option<Arc<CudaStream>>,
    /// Its calls up to this one were done when it was added.
    pub(super) floor: u64,
    /// Before this time, issuing threads put no marks on it. Since [`origin`].
    pub(super) due: Duration,
    /// The marks that issuing threads put there since the last poll.
    pub(super) incoming: Vec<Mark>,
    /// How many marks were not reached at the last poll.
    pub(super) backlog: u32,
    /// Since when nothing is pending on it and it is not listed.
    pub(super) idle_since: Option<Instant>,
}

/// A mark and its event.
pub(super) struct Mark {
    pub(super) event: CudaEvent,
    pub(super) mark: PendingMark,
    pub(super) side: MarkPosition,
}

/// The position of a mark. Two marks around one call measure how long the call took on its stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MarkPosition {
    /// Directly before the call of that number.
    Front(u64),
    /// Directly after the call of that number.
    Behind(u64, OperationKind),
    /// Elsewhere.
    Other,
}

/// The watchdog's threads, and what the polling thread is doing.
pub(super) struct WatchdogThreads {
    /// The number of the current polling thread; earlier ones end when they return from their call.
    pub(super) generation: u64,
    /// Whether the polling thread runs.
    pub(super) has_poller: bool,
    /// When the polling thread wakes by itself; `None` for never.
    pub(super) planned: Option<Instant>,
    pub(super) current_poll: Option<CurrentPoll>,
}

pub(super) struct CurrentPoll {
    /// The number of the communicator.
    pub(super) communicator_number: u64,
    pub(super) since: Instant,
    /// The number of the monitor's checks that have seen this poll.
    pub(super) ticks: u32,
}

pub(super) static POLL_DUE: Condvar = Condvar::new();

/// Raised when there is a communicator to poll after there was none: the watchdog may get stuck in a poll.
pub(super) static WAKE_FLAG: WakeFlag = WakeFlag::new();

impl WatchdogThreads {
    pub(super) const NONE_RUNNING: Self = Self {
        generation: 0,
        has_poller: false,
        planned: None,
        current_poll: None,
    };

    /// Wakes the watchdog if there is something to poll earlier than planned.
    pub(super) fn wake(&mut self, next: Instant, is_first: bool) {
        if self.current_poll.is_none() && self.planned.is_none_or(|planned| planned > next) {
            // Set here, so that one wake-up is enough.
            self.planned = Some(next);
            POLL_DUE.notify_one();
        }
        if is_first {
            WAKE_FLAG.raise();
        }
    }
}

pub(super) static STATE: Mutex<WatchdogState> = Mutex::new(WatchdogState {
    entries: Vec::new(),
    queries: Vec::new(),
    threads: WatchdogThreads::NONE_RUNNING,
});

impl WatchedStream {
    /// Takes the stream off the list, so that the next call is reported.
    pub(super) fn unlist(&self, track: &Track) {
        let listed = self.again.as_ref().unwrap_or(&self.stream);
        track.fast_path.unlist(Arc::as_ptr(listed).addr());
    }
}

/// Returns the time between polls for calls with this timeout.
pub(super) fn period(timeout: Option<Duration>) -> Duration {
    const LONGEST: Duration = Duration::from_millis(250);
    const SHORTEST: Duration = Duration::from_micros(500);
    timeout.map_or(LONGEST, |timeout| (timeout / 8).clamp(SHORTEST, LONGEST))
}

/// Creates an event with timing, because the watchdog takes the difference of two events around a call.
pub(super) fn new_event(context: &Arc<CudaContext>) -> std::result::Result<CudaEvent, DriverError> {
    let flags = sys::CUevent_flags::CU_EVENT_DEFAULT;
    cuda_driver::new_event(context, Some(flags))
}

/// Records an event, on a stream that is not capturing.
pub(super) fn record(
    event: &CudaEvent,
    stream: &CudaStream,
) -> std::result::Result<(), DriverError> {
    cuda_driver::bind(stream.context())?;
    cuda_driver::record(event, stream)
}

/// Keeps events for later marks.
pub(super) fn keep_for_reuse(inner: &Inner, given: impl IntoIterator<Item = CudaEvent>) {
    let mut too_many = Vec::new();
    let mut events = inner.events.lock();
    for event in given {
        if events.len() < EVENTS[1] {
            events.push(event);
        } else {
            too_many.push(event);
        }
    }
    drop(events);
    drop(too_many);
}

/// Returns every communicator that the watchdog watches, as of its last poll. All calls of other communicators are
/// done. Queries neither CUDA nor NCCL, and does not wait for threads that do.
#[doc(hidden)]
pub fn pending() -> Vec<PendingCommunicator> {
    match crate::forked::is_child() {
        false => results(),
        true => Vec::new(),
    }
}

pub(super) fn results() -> Vec<PendingCommunicator> {
    let state = STATE.lock();
    let entries = state.entries.iter();
    entries
        .map(|entry| entry.results.of(&entry.track))
        .collect()
}
