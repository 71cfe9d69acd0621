//! How calls are reported to the watchdog: a thread whose call is not covered by its communicator's `Usual`
//! comes here.

use std::sync::Arc;
use std::time::{Duration, Instant};

use cudarc::driver::CudaStream;

use super::facts::Facts;
use super::judge::Unreached;
use super::registry::{
    CROWD, EVENTS, Entry, Lull, Put, SPACING, STATE, Side, State, Watched, give_back, new_event,
    period, record,
};
use super::threads;
use crate::communicator::{Inner, is_lost, same_stream};
use crate::error::{Error, Result};
use crate::events;
use crate::operation::OperationKind;
use crate::reaper;
use crate::recorder::{TrackedCall, handle_of, limit_of_word, limit_word, origin};
use crate::standing::Standing;
use crate::supervision::stragglers::Inquired;
use crate::threads::not_started;

/// The most marks of a stream that wait for the next look.
const INCOMING: usize = 64;

/// The longest time until the first look.
const FIRST: Duration = Duration::from_millis(1);

/// An issue, as the issuing thread reports it.
#[derive(Clone, Copy)]
pub(crate) struct Issue<'i> {
    pub(crate) inner: &'i Arc<Inner>,
    pub(crate) on: &'i Arc<CudaStream>,
    pub(crate) number: u64,
    pub(crate) kind: OperationKind,
    pub(crate) timeout: Duration,
}

/// To be called before an unusual call reaches NCCL, when everything else is in order. Returns whether
/// [`after`] is to be called as well. Allocates nothing while the communicator is watched.
///
/// # Errors
/// When no thread can be started to watch the call, and when the call's context is lost.
#[cold]
pub(crate) fn before(issue: Issue<'_>) -> Result<bool> {
    let is_marked = enlist(issue)?;
    if is_marked {
        // Covers everything that was put on the stream before.
        put(issue, issue.number - 1, false)?;
    }
    Ok(is_marked)
}

/// To be called when the call is on its stream.
#[cold]
pub(crate) fn after(issue: Issue<'_>) {
    // If the device is lost by now, the next look finds that.
    let _ = put(issue, issue.number, true);
}

/// Like [`before`], for a stream on which no mark can be put.
///
/// # Errors
/// As [`before`].
#[cold]
pub(crate) fn attend(issue: Issue<'_>) -> Result<()> {
    enlist(issue).map(drop)
}

/// Starts the watchdog, if it does not run.
///
/// # Errors
/// As [`before`].
pub(crate) fn ensure() -> Result<()> {
    start(&mut STATE.lock())
}

/// How many inquiries may be open at once; further ones get no answer.
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

/// Puts the call on the watchdog's list. Returns whether a mark is due on the stream.
fn enlist(issue: Issue<'_>) -> Result<bool> {
    let Issue {
        inner, on, number, ..
    } = issue;
    if reaper::is_closed() {
        return Ok(false);
    }
    let track = inner.tracked.track();
    let usual = &track.usual;
    let timeout = limit_word(issue.timeout);
    if !usual.is_listed() {
        keep_events(inner);
    }
    let now = origin().monotonic.elapsed();
    let period = period(limit_of_word(timeout));
    let mut state = STATE.lock();
    start(&mut state)?;
    let at = state
        .entries
        .iter()
        .position(|entry| entry.track.number == track.number);
    let was_empty = state.entries.is_empty();
    let at = at.unwrap_or_else(|| {
        usual.start(timeout);
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
        timeout: limit_of_word(timeout),
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
    // Also after the watchdog has let go of the stream: an abort asks for the stream's end.
    let mut in_use = inner.in_use.lock();
    if !in_use.iter().any(|stream| same_stream(stream, on)) {
        in_use.push(Arc::clone(on));
    }
    drop(in_use);
    let watched = &mut entry.streams[watched];
    watched.idle_since = None;
    // The launch of another thread may have been recorded earlier, and come here later.
    watched.floor = watched.floor.min(number - 1);
    let again = (!Arc::ptr_eq(&watched.stream, on)).then(|| Arc::clone(on));
    let dropped = std::mem::replace(&mut watched.again, again);
    let is_due = now >= watched.due;
    if is_due {
        let apart = SPACING.min(period) * (1 << (watched.backlog / CROWD).min(6));
        watched.due = now + apart;
    }
    // Keeps events at hand for the next marks.
    let is_full = watched.incoming.len() >= EVENTS[0] / 2;
    let due = u64::try_from(watched.due.as_nanos()).unwrap_or(u64::MAX);
    usual.list(Arc::as_ptr(on).addr(), due, timeout);
    let soon = if is_full { Duration::ZERO } else { period };
    entry.next = entry.next.min(Instant::now() + soon);
    if is_due {
        entry.lull = Some(Lull::behind(track, entry.lull.take()));
    }
    let lull = entry.lull.as_ref().map_or(entry.next, |lull| lull.at);
    let next = entry.next.min(lull);
    state.threads.wake(next, was_empty);
    drop(state);
    // This may be the last reference to the stream.
    drop(dropped);
    Ok(is_due)
}

/// Puts a mark on the stream, unless no event is at hand or too many marks wait.
///
/// # Errors
/// When CUDA reports that the context is lost.
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

/// Keeps events at hand. Without them, only the watchdog's own marks are put.
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
