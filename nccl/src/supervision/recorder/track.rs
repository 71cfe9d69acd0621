//! What one communicator recorded: two lanes, its marks, and who it is.
//!
//! An *issue* is one call of this crate that has a sequence number: a collective, a group, a replay of a
//! plan. Its *operations* are the C calls it is made of. Both lie in lanes of their own, because a group may
//! have hundreds; an issue names the first of its operations by number.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant, SystemTime};

use cudarc::driver::CudaStream;

use super::dump;
use super::home::Home;
use super::lane::{Lane, Slot};
use super::spans::{self, Mention};
use super::usual::Usual;
use crate::communicator::{Phase, lock};
use crate::operation::OperationKind;
use crate::stats::{self, Tally, Volume};

/// Issues and operations that are kept of each communicator.
pub(super) const ISSUES: usize = 512;
pub(crate) const OPERATIONS: usize = 2048;

/// Streams whose marks are kept where no lock is needed.
const STREAMS: usize = 8;

/// Further ones of which it is known how far they are: what was done first is forgotten first.
const MORE_STREAMS: usize = 1024;

/// Communicators that are kept after their end, for whoever asks what they did last.
const ENDED: usize = 16;

/// Which communicator it is.
pub(crate) struct Identity {
    pub(crate) name: Arc<str>,
    pub(crate) rank: usize,
    pub(crate) world_size: usize,
    /// The same on all of its ranks; `None` for one that was made elsewhere.
    pub(crate) key: Option<Arc<str>>,
    /// The rank of a world that made it.
    pub(crate) home: Option<Arc<Home>>,
    /// The ranks of that world that are its ranks, in order.
    pub(crate) members: Option<Arc<[usize]>>,
}

/// The record of one communicator.
pub(crate) struct Track {
    /// The how manieth communicator of this process, from 1.
    pub(crate) number: u64,
    pub(crate) identity: Identity,
    pub(crate) phase: Arc<Phase>,
    pub(super) issues: Lane<Issue>,
    pub(super) operations: Lane<Operation>,
    marks: [Mark; STREAMS],
    /// The same of further streams, by handle.
    more_marks: Mutex<BTreeMap<u64, u64>>,
    /// Replays that are being launched, which happens without the communicator's lock.
    launching: AtomicU64,
    pub(crate) usual: Usual,
    pub(super) tally: Arc<Tally>,
}

/// A limit in 48 bits, in steps of about a microsecond; longer limits are larger.
#[inline]
pub(crate) fn limit_word(limit: Duration) -> u64 {
    limit.as_secs().min(FOR_EVER) << 20 | u64::from(limit.subsec_nanos() >> 10)
}

/// The limit that a word stands for; `None` for one of more than eight years.
pub(crate) fn limit_of_word(word: u64) -> Option<Duration> {
    const ROUND: u32 = 10_000;
    let seconds = word >> 20;
    let nanos = (word as u32 & 0xf_ffff) << 10;
    // People give round numbers: what was cut off is added again.
    let round = nanos.next_multiple_of(ROUND);
    let nanos = if round - nanos < 1 << 10 {
        round
    } else {
        nanos
    };
    (seconds < FOR_EVER).then(|| Duration::new(seconds, nanos))
}

const FOR_EVER: u64 = (1 << 28) - 1;

/// Where an issue is written.
#[derive(Default)]
pub(super) struct Issue {
    number: AtomicU64,
    /// Nanoseconds since [`Origin`].
    time: AtomicU64,
    stream: AtomicU64,
    /// The number of its first operation.
    first: AtomicU64,
    /// How many it has in the lower half, and the place of its span's name in the upper.
    count: AtomicU64,
    /// The number of the span that it was called in.
    span: AtomicU64,
    /// Its [`Progress`] in the lowest byte, its kind in the next, and its limit above ([`limit_word`]).
    state: AtomicU64,
    /// When it was first known to be done, in nanoseconds since [`Origin`]; 0 while it is not, and for those
    /// of which only a later one on their stream was asked.
    done: AtomicU64,
}

/// A copy of it.
pub(super) struct IssueRecord {
    pub(super) number: u64,
    pub(super) time: u64,
    pub(super) stream: u64,
    pub(super) first: u64,
    pub(super) count: u64,
    pub(super) span: Mention,
    pub(super) state: u64,
    pub(super) done: u64,
}

impl Slot for Issue {
    type Record = IssueRecord;

    fn copy(&self) -> IssueRecord {
        let count = self.count.load(Ordering::Relaxed);
        IssueRecord {
            number: self.number.load(Ordering::Relaxed),
            time: self.time.load(Ordering::Relaxed),
            stream: self.stream.load(Ordering::Relaxed),
            first: self.first.load(Ordering::Relaxed),
            count: count & u64::from(u32::MAX),
            span: Mention {
                id: self.span.load(Ordering::Relaxed),
                name: (count >> 32) as u32,
            },
            state: self.state.load(Ordering::Relaxed),
            done: self.done.load(Ordering::Relaxed),
        }
    }
}

/// Where an operation is written.
#[derive(Default)]
pub(crate) struct Operation {
    count: AtomicU64,
    rank: AtomicI32,
    kind: AtomicU32,
    number: AtomicU32,
}

/// A copy of it.
pub(crate) struct OperationRecord {
    pub(super) count: u64,
    /// Its peer or root.
    pub(super) rank: i32,
    pub(super) kind: u32,
    /// For a message: the how manieth of its side and peer, from 1.
    pub(super) number: u32,
}

impl Operation {
    #[inline]
    pub(crate) fn write(&self, count: usize, rank: i32, kind: u32, number: u32) {
        self.count.store(count as u64, Ordering::Relaxed);
        self.rank.store(rank, Ordering::Relaxed);
        self.kind.store(kind, Ordering::Relaxed);
        self.number.store(number, Ordering::Relaxed);
    }
}

impl Slot for Operation {
    type Record = OperationRecord;

    fn copy(&self) -> OperationRecord {
        OperationRecord {
            count: self.count.load(Ordering::Relaxed),
            rank: self.rank.load(Ordering::Relaxed),
            kind: self.kind.load(Ordering::Relaxed),
            number: self.number.load(Ordering::Relaxed),
        }
    }
}

/// Up to which number the operations of a stream are done.
#[derive(Default)]
struct Mark {
    /// 0 while nobody has it: the default stream is counted from 1 like all others.
    stream: AtomicU64,
    done: AtomicU64,
}

/// How far the calls of an issue have come, on this rank and without asking the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Progress {
    /// NCCL is being called, and has not come back.
    Issuing = 0,
    /// The work is on the stream.
    Issued = 1,
    /// A call failed, or did not launch in time.
    Failed = 2,
}

impl Progress {
    pub(super) fn from_word(word: u64) -> Self {
        match word & 0xff {
            0 => Self::Issuing,
            1 => Self::Issued,
            _ => Self::Failed,
        }
    }
}

/// The zero of all times: monotonic, and what the clock on the wall said then.
pub(crate) struct Origin {
    pub(crate) monotonic: Instant,
    pub(super) wall: SystemTime,
}

pub(crate) fn origin() -> &'static Origin {
    static ORIGIN: OnceLock<Origin> = OnceLock::new();
    ORIGIN.get_or_init(|| Origin {
        monotonic: Instant::now(),
        wall: SystemTime::now(),
    })
}

/// How much time has passed since then.
pub(super) fn now() -> std::time::Duration {
    origin().monotonic.elapsed()
}

/// What the clock of the recorder says: nanoseconds since 1970, counted by a clock that only goes forward.
pub(crate) fn clock() -> u64 {
    let at = origin().wall + now();
    let since = at.duration_since(SystemTime::UNIX_EPOCH);
    u64::try_from(since.unwrap_or_default().as_nanos()).unwrap_or(u64::MAX)
}

/// CUDA's handle of a stream.
pub(crate) fn handle_of(stream: &CudaStream) -> u64 {
    stream.cu_stream().addr() as u64
}

impl Track {
    /// Up to which number the operations on `stream` are done; 0 for none.
    pub(crate) fn done_on(&self, stream: u64) -> u64 {
        let mut is_full = true;
        for mark in &self.marks {
            match mark.stream.load(Ordering::Acquire) {
                taken if taken == stream.wrapping_add(1) => {
                    return mark.done.load(Ordering::Acquire);
                }
                taken => is_full &= taken != 0,
            }
        }
        match is_full {
            true => lock(&self.more_marks).get(&stream).copied().unwrap_or(0),
            false => 0,
        }
    }

    /// Notes that operation `number` on `stream` is done, and with it all that were put there before.
    pub(crate) fn done(&self, stream: &CudaStream, number: u64) {
        self.done_at(handle_of(stream), number);
    }

    fn done_at(&self, stream: u64, number: u64) {
        self.stamp(number);
        let name = stream.wrapping_add(1);
        for mark in &self.marks {
            let taken = mark
                .stream
                .compare_exchange(0, name, Ordering::AcqRel, Ordering::Acquire);
            if taken.is_ok() || taken == Err(name) {
                mark.done.fetch_max(number, Ordering::AcqRel);
                return;
            }
        }
        let mut more = lock(&self.more_marks);
        if more.len() >= MORE_STREAMS && !more.contains_key(&stream) {
            let oldest = more.iter().min_by_key(|(_, done)| **done);
            if let Some(oldest) = oldest.map(|(&stream, _)| stream) {
                more.remove(&oldest);
            }
        }
        let done = more.entry(stream).or_default();
        *done = number.max(*done);
    }

    /// A replay is about to be launched, without the communicator's lock, which is held now.
    pub(crate) fn launches(&self) {
        self.launching.fetch_add(1, Ordering::AcqRel);
    }

    /// The calls that are kept and have not failed, oldest first. What is put on a stream after this was
    /// called comes behind those that are issued.
    pub(crate) fn calls(&self) -> Vec<TrackedCall> {
        let records = self.issues.read().records;
        let calls = records.iter().map(|issue| TrackedCall {
            number: issue.number,
            kind: OperationKind::from_code((issue.state >> 8) as u8),
            since: Duration::from_nanos(issue.time),
            limit: limit_of_word(issue.state >> 16),
            stream: issue.stream,
            issuing: Progress::from_word(issue.state) == Progress::Issuing,
        });
        let failed = records
            .iter()
            .map(|issue| Progress::from_word(issue.state) == Progress::Failed);
        calls
            .zip(failed)
            .filter_map(|(call, failed)| (!failed).then_some(call))
            .collect()
    }

    /// How many messages were sent to each rank, and received from it.
    pub(crate) fn ledgers(&self) -> (Vec<u64>, Vec<u64>) {
        self.tally.messages.by_peer()
    }

    /// Whether there was no call to which only some ranks come.
    pub(crate) fn only_calls_for_all(&self) -> bool {
        use OperationKind::{Group, Recv, Send};
        [Group, Send, Recv]
            .into_iter()
            .all(|kind| self.tally.calls(kind) == 0)
    }

    /// What it was waiting in, as far as anybody has asked: a call that NCCL has not come back from, or what is
    /// not known to be done.
    pub(crate) fn standing(&self) -> Option<String> {
        let calls = self.calls();
        let pending = |call: &&TrackedCall| {
            call.issuing
                || (call.kind != OperationKind::Capture && call.number > self.done_on(call.stream))
        };
        let first = calls.iter().find(pending)?;
        let last = calls.iter().rfind(pending)?;
        let name = format!("{} #{}", last.kind, last.number);
        Some(match last.number - first.number {
            0 => name,
            _ => format!("{name}, or one of those from #{} on", first.number),
        })
    }

    /// Up to which number, below `number`, no call on `stream` is still being made. Allocates nothing, and looks at
    /// the records only while a replay is being launched: all other calls are made one after another.
    pub(crate) fn issued_below(&self, stream: u64, number: u64) -> u64 {
        if self.launching.load(Ordering::Acquire) == 0 {
            return number - 1;
        }
        let calls = (0..ISSUES as u64).map(|index| self.issues.slot(index));
        let issuing = calls.filter_map(|slot| {
            let issue = slot.copy();
            let is_one = issue.stream == stream
                && (1..number).contains(&issue.number)
                && Progress::from_word(issue.state) == Progress::Issuing;
            is_one.then_some(issue.number)
        });
        issuing.min().unwrap_or(number) - 1
    }

    /// Notes that issue `number` is known to be done from now on.
    fn stamp(&self, number: u64) {
        // Each number is one record, from 1 on.
        let slot = self.issues.slot(number.wrapping_sub(1));
        if slot.number.load(Ordering::Relaxed) == number && slot.done.load(Ordering::Relaxed) == 0 {
            let now = u64::try_from(now().as_nanos()).unwrap_or(u64::MAX);
            // Should the slot become another's just now, that one seems done before it began, and nobody
            // believes it.
            slot.done.store(now, Ordering::Relaxed);
        }
    }

    /// Notes how the calls of an issue ended.
    fn progressed(&self, ticket: Ticket, progress: Progress) {
        let slot = self.issues.slot(ticket.index);
        // Others may have come meanwhile, when the calls were made without the lock.
        if slot.number.load(Ordering::Relaxed) == ticket.number {
            let kind = slot.state.load(Ordering::Relaxed) & !0xff;
            slot.state.store(kind | progress as u64, Ordering::Release);
            if ticket.index % TIMED == 1 {
                time(slot, kind);
            }
        }
    }
}

/// A call, as the watchdog looks at it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TrackedCall {
    pub(crate) number: u64,
    pub(crate) kind: OperationKind,
    /// Since [`origin`].
    pub(crate) since: Duration,
    /// How long it may run; `None` for ever.
    pub(crate) limit: Option<Duration>,
    /// CUDA's handle.
    pub(crate) stream: u64,
    /// Whether NCCL, or the launch of a graph, has not come back.
    pub(crate) issuing: bool,
}

/// Of so many issues of a communicator one is timed, because a clock costs as much as a message. Not the first,
/// in which NCCL may connect the ranks.
const TIMED: u64 = 64;

#[cold]
fn time(slot: &Issue, kind: u64) {
    let now = origin().monotonic.elapsed();
    let began = Duration::from_nanos(slot.time.load(Ordering::Relaxed));
    let kind = OperationKind::from_code((kind >> 8) as u8);
    stats::enqueue(kind).add(now.saturating_sub(began));
}

/// The right to write the record, which whoever holds the communicator's lock has.
pub(crate) struct Writer {
    track: Arc<Track>,
    origin: Instant,
    /// Written so far, whether or not they are still there.
    issues: u64,
    operations: u64,
    tally: Arc<Tally>,
}

/// An issue that is being called.
#[derive(Clone, Copy)]
pub(crate) struct Ticket {
    index: u64,
    number: u64,
    /// Whether the watchdog wants to be told of it.
    pub(crate) is_unusual: bool,
}

/// Where the next operations are written.
pub(crate) struct Room<'w> {
    /// As many as lie in a row.
    pub(crate) slots: &'w [Operation],
    pub(crate) tally: &'w Tally,
}

impl Writer {
    /// Records the issue `number` of `operations` operations, which is about to be called.
    #[inline]
    pub(crate) fn begin(
        &mut self,
        number: u64,
        kind: OperationKind,
        started: Instant,
        stream: &CudaStream,
        limit: Duration,
        operations: usize,
    ) -> Ticket {
        let track = &*self.track;
        let since = started.saturating_duration_since(self.origin);
        let time = since.as_secs() * 1_000_000_000 + u64::from(since.subsec_nanos());
        let index = self.issues;
        let mention = spans::current();
        self.tally.call(kind);
        track.operations.begin(self.operations, operations);
        track.issues.begin(index, 1);
        let Issue {
            number: slot,
            time: at,
            stream: on,
            first,
            count,
            span,
            state,
            done,
        } = track.issues.slot(index);
        slot.store(number, Ordering::Relaxed);
        at.store(time, Ordering::Relaxed);
        on.store(handle_of(stream), Ordering::Relaxed);
        first.store(self.operations, Ordering::Relaxed);
        let named = u64::from(mention.name) << 32 | u64::from(operations as u32);
        count.store(named, Ordering::Relaxed);
        span.store(mention.id, Ordering::Relaxed);
        done.store(0, Ordering::Relaxed);
        let limit = limit_word(limit);
        let word = limit << 16 | (kind as u64) << 8 | Progress::Issuing as u64;
        state.store(word, Ordering::Relaxed);
        self.issues += 1;
        track.issues.publish(self.issues);
        // After it was written: a watchdog that takes its name off the list finds the call.
        let is_usual = track
            .usual
            .covers(std::ptr::from_ref(stream).addr(), time, limit);
        Ticket {
            index,
            number,
            is_unusual: !is_usual,
        }
    }

    /// Where the next `operations` of the issue that was begun last are written.
    #[inline]
    pub(crate) fn room(&self, operations: usize) -> Room<'_> {
        Room {
            slots: self.track.operations.slots(self.operations, operations),
            tally: &self.tally,
        }
    }

    /// Hands out the operations that were called.
    #[inline]
    pub(crate) fn called(&mut self, operations: usize) {
        self.operations += operations as u64;
        self.track.operations.publish(self.operations);
    }

    /// Counts what a launch replays.
    pub(crate) fn replays(&self, volume: &Volume) {
        self.tally.replay(volume);
    }

    /// Notes how the calls ended.
    #[inline]
    pub(crate) fn end(&self, ticket: Ticket, issued: bool) {
        let progress = if issued {
            Progress::Issued
        } else {
            Progress::Failed
        };
        self.track.progressed(ticket, progress);
    }
}

/// A communicator's part: keeps its record among those that can be read.
pub(crate) struct Tracked(Arc<Track>);

impl Tracked {
    /// Begins the record of a communicator.
    pub(crate) fn new(
        identity: Identity,
        phase: &Arc<Phase>,
        tally: &Arc<Tally>,
    ) -> (Self, Writer) {
        let origin = origin().monotonic;
        let mut all = all();
        all.made += 1;
        let track = Arc::new(Track {
            number: all.made,
            identity,
            phase: Arc::clone(phase),
            issues: Lane::new(ISSUES),
            operations: Lane::new(OPERATIONS),
            marks: Default::default(),
            more_marks: Mutex::default(),
            launching: AtomicU64::new(0),
            usual: Usual::default(),
            tally: Arc::clone(tally),
        });
        all.live.retain(|track| track.strong_count() > 0);
        all.live.push(Arc::downgrade(&track));
        let writer = Writer {
            track: Arc::clone(&track),
            origin,
            issues: 0,
            operations: 0,
            tally: Arc::clone(tally),
        };
        (Self(track), writer)
    }

    pub(crate) fn track(&self) -> &Arc<Track> {
        &self.0
    }

    /// The communicator is being aborted: writes what led to it where that is wanted, and waits for nothing.
    pub(crate) fn aborted(&self, reason: &str) {
        let identity = &self.0.identity;
        dump::aborted(identity.home.as_ref(), identity.rank, reason);
    }

    /// Notes how the launch of `ticket` ended, without the communicator's lock.
    pub(crate) fn launched(&self, ticket: Ticket, issued: bool) {
        let progress = if issued {
            Progress::Issued
        } else {
            Progress::Failed
        };
        self.0.progressed(ticket, progress);
        self.0.launching.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Drop for Tracked {
    /// What it recorded can be read for a while.
    fn drop(&mut self) {
        let mut all = all();
        if all.ended.len() == ENDED {
            all.ended.pop_front();
        }
        all.ended.push_back(Arc::clone(&self.0));
    }
}

struct All {
    made: u64,
    live: Vec<Weak<Track>>,
    ended: VecDeque<Arc<Track>>,
}

/// Not on the way of an operation: communicators come and go here, and are read.
fn all() -> MutexGuard<'static, All> {
    static ALL: Mutex<All> = Mutex::new(All {
        made: 0,
        live: Vec::new(),
        ended: VecDeque::new(),
    });
    ALL.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Every communicator that has a record, oldest first.
pub(crate) fn tracks() -> Vec<Arc<Track>> {
    // Those that ended are in both lists.
    all().live.iter().filter_map(Weak::upgrade).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn track() -> (Tracked, Writer) {
        let identity = Identity {
            name: "unit".into(),
            rank: 0,
            world_size: 1,
            key: None,
            home: None,
            members: None,
        };
        Tracked::new(identity, &Arc::new(Phase::new()), &Arc::new(Tally::new(1)))
    }

    #[test]
    fn more_streams_than_there_are_places_are_known_to_be_done_up_to_a_bound() {
        let (tracked, _writer) = track();
        let track = tracked.track();
        let streams = (STREAMS + MORE_STREAMS) as u64;
        for stream in 0..streams {
            track.done_at(stream, stream + 1);
        }
        for stream in 0..streams {
            assert_eq!(track.done_on(stream), stream + 1);
        }
        track.done_at(9, 5);
        assert_eq!(track.done_on(9), 10, "it goes on only");
        track.done_at(streams, streams + 1);
        assert_eq!(track.done_on(streams), streams + 1);
        assert_eq!(track.done_on(STREAMS as u64), 0, "the oldest is forgotten");
    }

    #[test]
    fn a_limit_is_kept_in_48_bits_to_a_microsecond_and_round_ones_exactly() {
        let round = [1, 10, 100, 300, 999, 5000, 30_000, 86_400_000];
        let round = round.map(Duration::from_millis);
        for limit in round {
            assert_eq!(limit_of_word(limit_word(limit)), Some(limit));
        }
        let odd = Duration::from_nanos(1_999_999_999);
        let kept = limit_of_word(limit_word(odd)).expect("not for ever");
        assert!(kept.abs_diff(odd) < Duration::from_micros(2), "{kept:?}");
        for pair in round.windows(2) {
            assert!(limit_word(pair[0]) < limit_word(pair[1]));
        }
        assert!(limit_word(Duration::MAX) < 1 << 48);
        assert_eq!(limit_of_word(limit_word(Duration::MAX)), None);
    }
}
