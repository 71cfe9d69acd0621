//! What is watched.
//!
//! A stream of a communicator is *listed*: its address is in the communicator's [`Usual`], so that calls on
//! it need not come here. When nothing is pending on it, the watchdog takes it off that list first, and lets
//! go of it only when nothing has come for a while ([`LINGER`]): a call is written down before it looks at
//! the list, so one that found the old list has been seen by then. (A processor makes a store visible to
//! others within nanoseconds; no fence on the way of a call is needed to be sure of that after
//! milliseconds.)
//!
//! [`Usual`]: crate::recorder

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use cudarc::driver::{CudaContext, CudaEvent, CudaStream, DriverError, sys};

use super::facts::{Facts, Pending};
use super::judge::Unreached;
use crate::communicator::Inner;
use crate::driver;
use crate::monitor::Bell;
use crate::operation::OperationKind;
use crate::recorder::{Track, origin};
use crate::standing::Standing;
use crate::supervision::stragglers::Inquired;
use crate::sync::{Condvar, Mutex};

/// How long a stream without pending calls stays in the registry.
pub(super) const LINGER: Duration = Duration::from_millis(60);

/// Marks of issuing threads, of one stream, are at least so far apart.
pub(super) const SPACING: Duration = Duration::from_millis(10);

/// When no call has come for so long, a mark is put behind the last one, and the next one is marked again.
const QUIET: Duration = Duration::from_millis(1);

/// So many marks that are not reached make issuing threads put half as many.
pub(super) const CROWD: u32 = 16;

/// Events that a communicator has at hand from its first call on, and keeps at most.
pub(super) const EVENTS: [usize; 2] = [32, 64];

/// See the module.
pub(super) struct State {
    pub(super) entries: Vec<Entry>,
    /// What other ranks want to know of this process's.
    pub(super) inquired: Vec<Inquired>,
    pub(super) threads: Running,
}

/// A communicator with calls that are not known to be done.
pub(super) struct Entry {
    pub(super) track: Arc<Track>,
    pub(super) inner: Weak<Inner>,
    pub(super) streams: Vec<Watched>,
    pub(super) facts: Facts,
    /// The call that is late first of those that came here since the last look.
    pub(super) unseen: Option<Standing>,
    /// After a call that its thread has marked: when no more came for a moment, there are calls without a mark.
    pub(super) lull: Option<Lull>,
    /// When to look again, and how far apart looks are.
    pub(super) next: Instant,
    pub(super) interval: Duration,
    /// In which call a thread that looked at it is stuck, and since when.
    pub(super) stuck: Option<(&'static str, Instant)>,
}

/// What is awaited from a call that its thread has marked until no more calls come.
pub(super) struct Lull {
    /// When to look whether that is so.
    pub(super) at: Instant,
    /// Longer while calls keep coming.
    pause: Duration,
    /// How many calls there were with the one that was marked.
    marked: u64,
}

impl Lull {
    /// `before` is that of the call that was marked before, if calls have come since.
    pub(super) fn behind(track: &Track, before: Option<Self>) -> Self {
        let pause = before.map_or(QUIET, |lull| lull.pause);
        Self {
            at: Instant::now() + pause,
            pause,
            marked: track.written(),
        }
    }

    /// Whether there are calls without a mark, once no more come.
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

impl Entry {
    /// Looks whether calls have ceased to come. Then the next one is marked, and those without a mark get one at once.
    pub(super) fn listen(&mut self) {
        let Some(lull) = &mut self.lull else { return };
        let Some(is_uncovered) = lull.begins(&self.track) else {
            return;
        };
        self.lull = None;
        for watched in &mut self.streams {
            if watched.backlog < CROWD {
                watched.due = Duration::ZERO;
            }
        }
        if self.streams.iter().any(|watched| watched.due.is_zero()) {
            self.track.usual.expire();
        }
        if is_uncovered {
            self.next = Instant::now();
        }
    }
}

/// One of its streams. It is kept alive while calls on it are not done.
pub(super) struct Watched {
    pub(super) stream: Arc<CudaStream>,
    /// The same stream at the address that is listed, if that is another one: cudarc makes a new value for
    /// the default stream each time.
    pub(super) again: Option<Arc<CudaStream>>,
    /// Its calls up to this one were done when it came here.
    pub(super) floor: u64,
    /// Before this, issuing threads put no marks on it. Since the recorder's zero.
    pub(super) due: Duration,
    /// What they put there since the last look.
    pub(super) incoming: Vec<Put>,
    /// How many marks were not reached at the last look.
    pub(super) backlog: u32,
    /// Since when nothing is pending and it is not listed.
    pub(super) idle_since: Option<Instant>,
}

/// A mark and its event.
pub(super) struct Put {
    pub(super) event: CudaEvent,
    pub(super) mark: Unreached,
    pub(super) side: Side,
}

/// Where a mark is: two around one call say how long that took on its stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    /// Right in front of the call of that number.
    Front(u64),
    /// Right behind it.
    Behind(u64, OperationKind),
    /// Elsewhere.
    Other,
}

/// The threads, and what the one that looks is at.
pub(super) struct Running {
    /// Counts the threads that look; all but the last one end when they come back from their call.
    pub(super) generation: u64,
    pub(super) looks: bool,
    /// When the thread that looks wakes by itself; `None` for never.
    pub(super) planned: Option<Instant>,
    pub(super) at_work: Option<AtWork>,
}

pub(super) struct AtWork {
    /// The number of the communicator.
    pub(super) number: u64,
    pub(super) since: Instant,
    /// How often the monitor has seen it.
    pub(super) ticks: u32,
}

pub(super) static LOOK: Condvar = Condvar::new();

/// There is something that the watchdog may be stuck at.
pub(super) static BELL: Bell = Bell::new();

impl Running {
    pub(super) const NOT: Self = Self {
        generation: 0,
        looks: false,
        planned: None,
        at_work: None,
    };

    /// There is something to look at, at that time.
    pub(super) fn wake(&mut self, next: Instant, is_first: bool) {
        if self.at_work.is_none() && self.planned.is_none_or(|planned| planned > next) {
            // So that one call is enough.
            self.planned = Some(next);
            LOOK.notify_one();
        }
        if is_first {
            BELL.ring();
        }
    }
}

pub(super) static STATE: Mutex<State> = Mutex::new(State {
    entries: Vec::new(),
    inquired: Vec::new(),
    threads: Running::NOT,
});

impl Watched {
    /// Takes it off the list, so that the next call comes here.
    pub(super) fn unlist(&self, track: &Track) {
        let listed = self.again.as_ref().unwrap_or(&self.stream);
        track.usual.unlist(Arc::as_ptr(listed).addr());
    }
}

/// How far apart looks at calls with such a limit are.
pub(super) fn period(limit: Option<Duration>) -> Duration {
    const LONGEST: Duration = Duration::from_millis(250);
    const SHORTEST: Duration = Duration::from_micros(500);
    limit.map_or(LONGEST, |limit| (limit / 8).clamp(SHORTEST, LONGEST))
}

/// An event that knows when it was reached: of two around a call the watchdog takes the difference.
pub(super) fn new_event(context: &Arc<CudaContext>) -> std::result::Result<CudaEvent, DriverError> {
    let flags = sys::CUevent_flags::CU_EVENT_DEFAULT;
    driver::new_event(context, Some(flags))
}

/// Records an event, on a stream that is not capturing.
pub(super) fn record(
    event: &CudaEvent,
    stream: &CudaStream,
) -> std::result::Result<(), DriverError> {
    driver::bind(stream.context())?;
    driver::record(event, stream)
}

/// Keeps events for later marks.
pub(super) fn give_back(inner: &Inner, given: impl IntoIterator<Item = CudaEvent>) {
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

/// Every communicator that the watchdog watches, as of its last look. Of those that are not in the list
/// everything is done. Asks neither CUDA nor NCCL, and waits for nobody who does.
#[doc(hidden)]
pub fn pending() -> Vec<Pending> {
    match crate::forked::is_child() {
        false => facts(),
        true => Vec::new(),
    }
}

pub(super) fn facts() -> Vec<Pending> {
    let state = STATE.lock();
    let entries = state.entries.iter();
    entries.map(|entry| entry.facts.of(&entry.track)).collect()
}
