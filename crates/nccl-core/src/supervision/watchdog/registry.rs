//! What is watched, and how it gets here.
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
use super::threads;
use crate::communicator::{Inner, is_lost, same_stream};
use crate::driver;
use crate::error::{Error, Result};
use crate::events;
use crate::operation::OperationKind;
use crate::reaper;
use crate::recorder::{Track, TrackedCall, handle_of, limit_of_word, limit_word, origin};
use crate::standing::Standing;
use crate::supervision::stragglers::Inquired;
use crate::sync::Mutex;
use crate::threads::not_started;

/// How long a stream without pending calls stays in the registry.
pub(super) const LINGER: Duration = Duration::from_millis(60);

/// Marks of issuing threads, of one stream, are at least so far apart.
const SPACING: Duration = Duration::from_millis(10);

/// When no call has come for so long, a mark is put behind the last one, and the next one is marked again.
const QUIET: Duration = Duration::from_millis(1);

/// How many marks wait for the next look, at most.
const INCOMING: usize = 64;

/// So many marks that are not reached make issuing threads put half as many.
const CROWD: u32 = 16;

/// How soon the first look comes.
const FIRST: Duration = Duration::from_millis(1);

/// Events that a communicator has at hand from its first call on, and keeps at most.
const EVENTS: [usize; 2] = [32, 64];

/// See the module.
pub(super) struct State {
    pub(super) entries: Vec<Entry>,
    /// What other ranks want to know of this process's.
    pub(super) inquired: Vec<Inquired>,
    pub(super) threads: threads::Running,
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
    fn behind(track: &Track, before: Option<Self>) -> Self {
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
    again: Option<Arc<CudaStream>>,
    /// Its calls up to this one were done when it came here.
    pub(super) floor: u64,
    /// Before this, issuing threads put no marks on it. Since the recorder's zero.
    due: Duration,
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

pub(super) static STATE: Mutex<State> = Mutex::new(State {
    entries: Vec::new(),
    inquired: Vec::new(),
    threads: threads::Running::NOT,
});

/// What the threads of an issue know of it.
#[derive(Clone, Copy)]
pub(crate) struct Issue<'i> {
    pub(crate) inner: &'i Arc<Inner>,
    pub(crate) on: &'i Arc<CudaStream>,
    pub(crate) number: u64,
    pub(crate) kind: OperationKind,
    pub(crate) limit: Duration,
}

/// To be called before a call that is unusual reaches NCCL, when everything else is in order. Whether
/// [`after`] is to be called as well. Allocates nothing while the communicator is watched.
///
/// # Errors
/// When there is no thread to watch over it, and when its context is lost.
#[cold]
pub(crate) fn before(issue: Issue<'_>) -> Result<bool> {
    let is_marked = enlist(issue)?;
    if is_marked {
        // Everything that was put on the stream before.
        put(issue, issue.number - 1, false)?;
    }
    Ok(is_marked)
}

/// To be called when the call is on its stream.
#[cold]
pub(crate) fn after(issue: Issue<'_>) {
    // If the device is lost by now, whoever looks next finds it.
    let _ = put(issue, issue.number, true);
}

/// As [`before`], for a stream on which nothing can be marked.
///
/// # Errors
/// As [`before`].
#[cold]
pub(crate) fn attend(issue: Issue<'_>) -> Result<()> {
    enlist(issue).map(drop)
}

/// Sees to it that there is somebody who watches.
///
/// # Errors
/// As [`before`].
pub(crate) fn ensure() -> Result<()> {
    start(&mut STATE.lock())
}

/// How many questions are open at once; of the others nobody gets an answer.
const INQUIRIES: usize = 256;

/// Answers whether a rank of this process has entered an operation, now and when it has.
pub fn answer(asked: Inquired) {
    let next = asked.next;
    let mut state = STATE.lock();
    state.inquired.retain(|known| !known.is_about(&asked));
    if state.inquired.len() >= INQUIRIES || reaper::is_closed() {
        return;
    }
    state.inquired.push(asked);
    match threads::start(&mut state.threads) {
        Ok(()) => state.threads.wake(next, false),
        Err(error) => events::no_thread("to answer other ranks", &error),
    }
}

fn start(state: &mut State) -> Result<()> {
    threads::start(&mut state.threads).map_err(not_started("that watches over operations"))
}

/// Whether a mark is due on the stream.
fn enlist(issue: Issue<'_>) -> Result<bool> {
    let Issue {
        inner, on, number, ..
    } = issue;
    if reaper::is_closed() {
        return Ok(false);
    }
    let track = inner.tracked.track();
    let usual = &track.usual;
    let limit = limit_word(issue.limit);
    if !usual.is_listed() {
        keep_events(inner);
    }
    let now = origin().monotonic.elapsed();
    let period = period(limit_of_word(limit));
    let mut state = STATE.lock();
    start(&mut state)?;
    let at = state
        .entries
        .iter()
        .position(|entry| entry.track.number == track.number);
    let was_empty = state.entries.is_empty();
    let at = at.unwrap_or_else(|| {
        usual.start(limit);
        state.entries.push(Entry {
            track: Arc::clone(track),
            inner: Arc::downgrade(inner),
            streams: Vec::new(),
            facts: Facts::default(),
            unseen: None,
            lull: None,
            next: Instant::now() + FIRST.min(period),
            interval: FIRST.min(period),
            stuck: None,
        });
        state.entries.len() - 1
    });
    let entry = &mut state.entries[at];
    let new = Standing::of_new(TrackedCall {
        number,
        kind: issue.kind,
        since: now,
        limit: limit_of_word(limit),
        stream: handle_of(on),
        issuing: true,
    });
    if entry.unseen.is_none_or(|unseen| new.ends_before(&unseen)) {
        entry.unseen = Some(new);
    }
    entry.facts.standing.get_or_insert(new);
    let watched = entry
        .streams
        .iter()
        .position(|watched| same_stream(&watched.stream, on));
    let watched = watched.unwrap_or_else(|| {
        entry.streams.push(Watched {
            stream: Arc::clone(on),
            again: None,
            floor: number - 1,
            due: Duration::ZERO,
            incoming: Vec::with_capacity(INCOMING),
            backlog: 0,
            idle_since: None,
        });
        entry.streams.len() - 1
    });
    // Not only while it is watched: its end is asked for when the communicator is aborted.
    let mut in_use = inner.in_use.lock();
    if !in_use.iter().any(|stream| same_stream(stream, on)) {
        in_use.push(Arc::clone(on));
    }
    drop(in_use);
    let watched = &mut entry.streams[watched];
    watched.idle_since = None;
    // Another thread's launch may have been recorded before, and come here later.
    watched.floor = watched.floor.min(number - 1);
    let again = (!Arc::ptr_eq(&watched.stream, on)).then(|| Arc::clone(on));
    let dropped = std::mem::replace(&mut watched.again, again);
    let is_due = now >= watched.due;
    if is_due {
        let apart = SPACING.min(period) * (1 << (watched.backlog / CROWD).min(6));
        watched.due = now + apart;
    }
    // So that there are events for the next marks.
    let is_full = watched.incoming.len() >= EVENTS[0] / 2;
    let due = u64::try_from(watched.due.as_nanos()).unwrap_or(u64::MAX);
    usual.list(Arc::as_ptr(on).addr(), due, limit);
    let soon = if is_full { Duration::ZERO } else { period };
    entry.next = entry.next.min(Instant::now() + soon);
    if is_due {
        entry.lull = Some(Lull::behind(track, entry.lull.take()));
    }
    let lull = entry.lull.as_ref().map_or(entry.next, |lull| lull.at);
    let next = entry.next.min(lull);
    state.threads.wake(next, was_empty);
    drop(state);
    // This may be the last who has it.
    drop(dropped);
    Ok(is_due)
}

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

/// Puts a mark on the stream, unless there is none at hand or too many wait already.
///
/// # Errors
/// When that says that the context is lost.
fn put(issue: Issue<'_>, covers: u64, is_right_behind: bool) -> Result<()> {
    let Issue { inner, on, .. } = issue;
    let Some(event) = inner.events.lock().pop() else {
        return Ok(());
    };
    let track = inner.tracked.track();
    // Replays are launched without a lock: another one may not be on the stream yet.
    let issued = track.issued_below(handle_of(on), covers + 1);
    let mark = Unreached {
        covers: issued,
        at: origin().monotonic.elapsed(),
        is_right_behind: is_right_behind && issued == covers,
    };
    let side = match (issued == covers, is_right_behind) {
        (true, true) => Side::Behind(issue.number, issue.kind),
        (true, false) => Side::Front(issue.number),
        (false, _) => Side::Other,
    };
    if let Err(error) = record(&event, on) {
        give_back(inner, [event]);
        return match is_lost(error.0 as u32) {
            true => Err(Error::cuda(
                "recording an event in front of the operation (cuEventRecord)",
            )(error)),
            false => Ok(()),
        };
    }
    let mut state = STATE.lock();
    let entry = state
        .entries
        .iter_mut()
        .find(|entry| entry.track.number == track.number);
    let watched = entry.and_then(|entry| {
        let mut streams = entry.streams.iter_mut();
        streams.find(|watched| same_stream(&watched.stream, on))
    });
    match watched {
        Some(watched) if watched.incoming.len() < INCOMING => {
            watched.incoming.push(Put { event, mark, side });
        }
        _ => {
            drop(state);
            give_back(inner, [event]);
        }
    }
    Ok(())
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

/// Sees to it that there are events at hand. Without, the watchdog's own marks have to do.
fn keep_events(inner: &Inner) {
    if !inner.events.lock().is_empty() {
        return;
    }
    let [at_hand, most] = EVENTS;
    let new: Vec<_> = (0..at_hand)
        .map_while(|_| new_event(&inner.context).ok())
        .collect();
    let mut events = inner.events.lock();
    events.reserve(most);
    events.extend(new);
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
