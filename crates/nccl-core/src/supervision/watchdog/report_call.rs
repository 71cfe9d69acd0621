//! The report of calls to the watchdog: a thread whose call is not covered by its communicator's `FastPathFilter`
//! reports it here.

use std::sync::Arc;
use std::time::{Duration, Instant};

use cudarc::driver::CudaStream;

use super::registry::{
    EVENTS, MANY_MARKS, Mark, MarkPosition, QuietPeriod, SPACING, STATE, WatchdogState,
    WatchedCommunicator, WatchedStream, keep_for_reuse, new_event, period, record,
};
use super::results::PollResults;
use super::threads;
use super::tracker::PendingMark;
use crate::communicator::{Inner, is_context_lost, is_same_stream};
use crate::drop_queue;
use crate::error::{Error, Result};
use crate::events;
use crate::operation::OperationKind;
use crate::pending_call::PendingCall;
use crate::recorder::{RecordedCall, handle_of, origin, timeout_code, timeout_of_code};
use crate::supervision::stragglers::OpenQuery;
use crate::threads::not_started;

/// The maximum number of marks of a stream that wait for the next poll.
const INCOMING: usize = 64;

/// The maximum time until the first poll.
const FIRST: Duration = Duration::from_millis(1);

/// A call, as the issuing thread reports it.
#[derive(Clone, Copy)]
pub(crate) struct ReportedCall<'i> {
    pub(crate) inner: &'i Arc<Inner>,
    pub(crate) on: &'i Arc<CudaStream>,
    pub(crate) sequence: u64,
    pub(crate) kind: OperationKind,
    pub(crate) timeout: Duration,
}

/// To be called before an uncovered call reaches NCCL, after all other checks. Returns whether [`report_after`] has to
/// be called as well. Allocates nothing while the communicator is watched.
///
/// # Errors
/// When no thread can be started to watch the call, and when the call's context is lost.
#[cold]
pub(crate) fn report_before(issue: ReportedCall<'_>) -> Result<bool> {
    let is_marked = add_call(issue)?;
    if is_marked {
        // Covers everything that was put on the stream earlier.
        put_mark(issue, issue.sequence - 1, false)?;
    }
    Ok(is_marked)
}

/// To be called when the call is on its stream.
#[cold]
pub(crate) fn report_after(issue: ReportedCall<'_>) {
    // If the device is lost by now, the next poll finds that.
    let _ = put_mark(issue, issue.sequence, true);
}

/// Like [`report_before`], for a stream on which no mark can be put.
///
/// # Errors
/// As [`report_before`].
#[cold]
pub(crate) fn report_unmarked(issue: ReportedCall<'_>) -> Result<()> {
    add_call(issue).map(drop)
}

/// Starts the watchdog, if it does not run.
///
/// # Errors
/// As [`report_before`].
pub(crate) fn ensure() -> Result<()> {
    start(&mut STATE.lock())
}

/// How many queries may be open at once; further ones get no answer.
const MAX_QUERIES: usize = 256;

/// Answers whether a rank of this process has entered an operation; if it has not, answers again when it has.
pub fn answer(asked: OpenQuery) {
    let next = asked.next;
    let mut state = STATE.lock();
    state.queries.retain(|known| !known.is_about(&asked));
    if state.queries.len() >= MAX_QUERIES || drop_queue::is_closed() {
        return;
    }
    state.queries.push(asked);
    match threads::start(&mut state.threads) {
        Ok(()) => state.threads.wake(next, false),
        Err(error) => events::no_thread("to answer other ranks", &error),
    }
}

fn start(state: &mut WatchdogState) -> Result<()> {
    threads::start(&mut state.threads).map_err(not_started("that watches operations"))
}

/// Adds the call to the watchdog's list. Returns whether a mark is due on the stream.
fn add_call(issue: ReportedCall<'_>) -> Result<bool> {
    let ReportedCall {
        inner,
        on,
        sequence,
        ..
    } = issue;
    if drop_queue::is_closed() {
        return Ok(false);
    }
    let track = inner.track_handle.track();
    let fast_path = &track.fast_path;
    let timeout = timeout_code(issue.timeout);
    if !fast_path.is_listed() {
        refill_events(inner);
    }
    let now = origin().monotonic.elapsed();
    let period = period(timeout_of_code(timeout));
    let mut state = STATE.lock();
    start(&mut state)?;
    let at = state
        .entries
        .iter()
        .position(|entry| entry.track.communicator_number == track.communicator_number);
    let was_empty = state.entries.is_empty();
    let at = at.unwrap_or_else(|| {
        fast_path.reset_timeout(timeout);
        state.entries.push(WatchedCommunicator {
            track: Arc::clone(track),
            inner: Arc::downgrade(inner),
            streams: Vec::new(),
            results: PollResults::default(),
            unseen: None,
            quiet: None,
            next: Instant::now() + FIRST.min(period),
            interval: FIRST.min(period),
            stuck: None,
        });
        state.entries.len() - 1
    });
    let entry = &mut state.entries[at];
    let new = PendingCall::of_new(RecordedCall {
        sequence,
        kind: issue.kind,
        since: now,
        timeout: timeout_of_code(timeout),
        stream: handle_of(on),
        issuing: true,
    });
    if entry.unseen.is_none_or(|unseen| new.ends_before(&unseen)) {
        entry.unseen = Some(new);
    }
    entry.results.pending_call.get_or_insert(new);
    let stream_index = entry
        .streams
        .iter()
        .position(|watched_stream| is_same_stream(&watched_stream.stream, on));
    let stream_index = stream_index.unwrap_or_else(|| {
        entry.streams.push(WatchedStream {
            stream: Arc::clone(on),
            again: None,
            floor: sequence - 1,
            due: Duration::ZERO,
            incoming: Vec::with_capacity(INCOMING),
            backlog: 0,
            idle_since: None,
        });
        entry.streams.len() - 1
    });
    // Kept even after the watchdog has released the stream, because an abort waits for the end of the stream's work.
    let mut in_use = inner.in_use.lock();
    if !in_use.iter().any(|stream| is_same_stream(stream, on)) {
        in_use.push(Arc::clone(on));
    }
    drop(in_use);
    let watched_stream = &mut entry.streams[stream_index];
    watched_stream.idle_since = None;
    // The launch of another thread may have been recorded earlier and reported later.
    watched_stream.floor = watched_stream.floor.min(sequence - 1);
    let again = (!Arc::ptr_eq(&watched_stream.stream, on)).then(|| Arc::clone(on));
    let dropped = std::mem::replace(&mut watched_stream.again, again);
    let is_due = now >= watched_stream.due;
    if is_due {
        let apart = SPACING.min(period) * (1 << (watched_stream.backlog / MANY_MARKS).min(6));
        watched_stream.due = now + apart;
    }
    // Keeps events at hand for the next marks.
    let is_full = watched_stream.incoming.len() >= EVENTS[0] / 2;
    let due = u64::try_from(watched_stream.due.as_nanos()).unwrap_or(u64::MAX);
    fast_path.list(Arc::as_ptr(on).addr(), due, timeout);
    let soon = if is_full { Duration::ZERO } else { period };
    entry.next = entry.next.min(Instant::now() + soon);
    if is_due {
        entry.quiet = Some(QuietPeriod::behind(track, entry.quiet.take()));
    }
    let quiet = entry.quiet.as_ref().map_or(entry.next, |quiet| quiet.at);
    let next = entry.next.min(quiet);
    state.threads.wake(next, was_empty);
    drop(state);
    // This may be the last reference to the stream.
    drop(dropped);
    Ok(is_due)
}

/// Puts a mark on the stream, unless no event is available or too many marks are waiting.
///
/// # Errors
/// When CUDA reports that the context is lost.
fn put_mark(issue: ReportedCall<'_>, covers: u64, is_right_behind: bool) -> Result<()> {
    let ReportedCall { inner, on, .. } = issue;
    let Some(event) = inner.events.lock().pop() else {
        return Ok(());
    };
    let track = inner.track_handle.track();
    // Replays are launched without a lock, so an earlier one may not be on the stream yet.
    let issued = track.issued_below(handle_of(on), covers + 1);
    let mark = PendingMark {
        covers: issued,
        at: origin().monotonic.elapsed(),
        is_right_behind: is_right_behind && issued == covers,
    };
    let side = match (issued == covers, is_right_behind) {
        (true, true) => MarkPosition::Behind(issue.sequence, issue.kind),
        (true, false) => MarkPosition::Front(issue.sequence),
        (false, _) => MarkPosition::Other,
    };
    if let Err(error) = record(&event, on) {
        keep_for_reuse(inner, [event]);
        return match is_context_lost(error.0 as u32) {
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
        .find(|entry| entry.track.communicator_number == track.communicator_number);
    let watched_stream = entry.and_then(|entry| {
        let mut streams = entry.streams.iter_mut();
        streams.find(|watched_stream| is_same_stream(&watched_stream.stream, on))
    });
    match watched_stream {
        Some(watched_stream) if watched_stream.incoming.len() < INCOMING => {
            watched_stream.incoming.push(Mark { event, mark, side });
        }
        _ => {
            drop(state);
            keep_for_reuse(inner, [event]);
        }
    }
    Ok(())
}

/// Keeps events available. Without them, only the watchdog itself puts marks.
fn refill_events(inner: &Inner) {
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
