//! The snapshot: plain values, copied while the communicators continue.

pub use nccl_base::reduce_op::RecordedReduction;
use std::sync::OnceLock;
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

use super::collective_index::is_of_some_ranks;
use super::fields;
use super::notes::{self, Note};
use super::spans::{CallSpan, SpanReader};
use super::track::{self, CallProgress, RawCall, Track};
use crate::identity::{self, Clock, WorldRank};
use crate::op::Descriptor;
use crate::operation::OperationKind;
use nccl_base::data_type::DataType;
use nccl_base::fault::Roster;

/// The last calls of all communicators of this process, and the notes of the program.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # nccl_emulator::install_unless_gpu()?;
/// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
/// # let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
/// # let mut y = stream.clone_htod(&[1.0f32; 8])?;
/// comm.all_reduce_in_place(&mut y, nccl::ReduceOp::Sum)?.wait()?;
/// for communicator in nccl::recorder::snapshot().communicators {
///     println!("{} on rank {}:", communicator.name, communicator.rank);
///     for call in &communicator.calls {
///         println!("  {} #{} is {:?}", call.kind, call.sequence, call.state);
///     }
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Snapshot {
    /// The host, as its kernel names it.
    pub host: String,
    /// The identifier of that kernel's boot; processes with the same value share one clock. Empty if the system does
    /// not report it.
    #[serde(default)]
    pub boot: String,
    /// The process's PID.
    pub pid: u32,
    /// The process's world, and its rank in it; `None` if it has none, or several.
    #[serde(default)]
    pub place: Option<WorldRank>,
    /// The zero of the process's times, on the wall clock. All other times are this plus the time that a monotonic
    /// clock has counted since.
    #[serde(rename = "origin_unix_ns", with = "fields::unix_time")]
    pub origin: SystemTime,
    /// When the snapshot was taken.
    #[serde(rename = "taken_unix_ns", with = "fields::unix_time")]
    pub taken: SystemTime,
    /// The fault because of which this crate took the snapshot, if it did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// The offset from the process's clock to that of rank 0, if it was measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clock: Option<Clock>,
    /// The address (`HOST:PORT`) of NCCL's RAS service in the process, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ras_address: Option<String>,
    /// The live communicators and the last that ended, in the order in which they were made.
    pub communicators: Vec<Recording>,
    /// The last notes and phases of the program, oldest first.
    pub notes: Vec<Note>,
    /// How many older notes were left out for lack of space.
    #[serde(default)]
    pub notes_left_out: usize,
}

/// The last calls of one communicator.
///
/// ```
/// for recording in nccl::recorder::snapshot().communicators {
///     println!("{} (rank {}): {}", recording.name, recording.rank, recording.life);
/// }
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Recording {
    /// The communicator's name.
    pub name: String,
    /// An identifier that distinguishes it from all others of this name, the same on all of its ranks; `None` for a
    /// communicator that was made outside of this crate.
    #[serde(default)]
    pub key: Option<String>,
    /// The generation of the world that made it; 0 without a world.
    #[serde(default)]
    pub generation: u64,
    /// Its number among the communicators of this process, from 1.
    pub number: u64,
    /// This rank.
    pub rank: usize,
    /// The number of ranks.
    pub world_size: usize,
    /// The world ranks of its ranks, in rank order; `None` if they are all of the world's ranks in order, or if no
    /// world made it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub members: Option<Vec<usize>>,
    /// The launcher ranks of its ranks, in rank order; `None` if they equal the world ranks, or are not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub launcher_ranks: Option<Vec<usize>>,
    /// The state of the communicator: `ready`, `aborted`, …
    pub life: String,
    /// Why it was aborted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// How many of the calls before the first of `calls` were messages and groups of messages, which only some ranks make. All
    /// ranks make all other calls, in the same order. `None` if the number could not be determined.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub earlier_messages: Option<u64>,
    /// The last calls, oldest first.
    pub calls: Vec<Call>,
    /// How many earlier calls the recorder still had, left out for lack of space.
    #[serde(default)]
    pub left_out: usize,
}

/// A call that has a sequence number: a collective, a group, a capture, or a replay.
///
/// ```
/// use nccl::recorder::{Call, Recording};
///
/// /// The call that the device is still at, or was never asked about.
/// fn pending(recording: &Recording) -> Option<&Call> {
///     recording.calls.iter().find(|call| call.done.is_none())
/// }
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Call {
    /// The call's number on the communicator, from 1; [`Request::sequence`](crate::Request::sequence).
    pub sequence: u64,
    /// The kind of operation.
    #[serde(with = "fields::operation_kind")]
    pub kind: OperationKind,
    /// When it was called, since the origin of the process's times ([`Snapshot::origin`]). From a monotonic
    /// clock.
    #[serde(rename = "since_ns", with = "fields::nanoseconds")]
    pub since: Duration,
    /// When it was called, by the wall clock of the origin.
    #[serde(rename = "unix_ns", with = "fields::unix_time")]
    pub at: SystemTime,
    /// CUDA's handle of the stream.
    #[serde(with = "fields::handle")]
    pub stream: u64,
    /// How far the call has come.
    pub state: CallState,
    /// When the call was known to be done, since the origin: it ended at that time or before. `None` while that is not
    /// known.
    #[serde(
        rename = "done_ns",
        default,
        skip_serializing_if = "Option::is_none",
        with = "fields::nanoseconds_if_any"
    )]
    pub done: Option<Duration>,
    /// The span of `tracing` in which it was called; `None` outside of any span, and without a subscriber.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub span: Option<CallSpan>,
    /// What NCCL has reported of the call, if reports are collected and the call is not done: its algorithm and protocol, the
    /// channels on which its kernel runs, and the ranks for which its transfers wait.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub inside_nccl: Option<String>,
    /// Its operations, in the order of the calls into NCCL. Empty for a replay.
    pub operations: Vec<RecordedOperation>,
    /// How many operations are not listed: they were overwritten, or are not called yet.
    #[serde(default, skip_serializing_if = "fields::is_zero")]
    pub missing: usize,
}

/// How far a call has come, as far as this rank knows without asking the device.
///
/// ```
/// use nccl::recorder::{CallState, Recording};
///
/// /// Whether a thread is inside NCCL at this moment.
/// fn is_inside(recording: &Recording) -> bool {
///     recording.calls.iter().any(|call| call.state == CallState::Issuing)
/// }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum CallState {
    /// NCCL was called, and has not returned.
    Issuing,
    /// The work is on the stream. No later query has shown whether it is done.
    Issued,
    /// The work is done, as the [`Request`](crate::Request) of this call, or of a later call on its stream, has shown.
    Done,
    /// The call failed.
    Failed,
    /// The communicator was aborted before the call was known to be done.
    Aborted,
}

/// One call into NCCL.
///
/// ```
/// use nccl::recorder::Call;
///
/// /// The bytes of all operations of a call, where all types are known.
/// fn bytes(call: &Call) -> Option<u64> {
///     let size = |data_type: nccl::DataType| data_type.size_in_bytes().map(|size| size as u64);
///     call.operations.iter().map(|one| Some(one.count * size(one.data_type)?)).sum()
/// }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct RecordedOperation {
    /// The kind of operation.
    #[serde(with = "fields::operation_kind")]
    pub kind: OperationKind,
    /// The number of elements, as NCCL's function counts them.
    pub count: u64,
    /// The elements' type.
    #[serde(rename = "type", with = "fields::data_type")]
    pub data_type: DataType,
    /// The other rank of a message.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peer: Option<usize>,
    /// For a message: its number, from 1, among those to, or from, its peer. The n-th message sent to a rank is the
    /// n-th that the rank receives from here. Messages of replays are not counted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<u32>,
    /// The root of a collective that has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub root: Option<usize>,
    /// The reduction's operation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reduction: Option<RecordedReduction>,
}

impl RecordedOperation {
    /// An operation without peer, root and reduction.
    #[doc(hidden)]
    #[must_use]
    pub fn new(kind: OperationKind, count: u64, data_type: DataType) -> Self {
        Self {
            kind,
            count,
            data_type,
            peer: None,
            message: None,
            root: None,
            reduction: None,
        }
    }
}

/// Returns the last calls of all communicators of this process.
///
/// May be called by any thread at any time: communicators continue meanwhile, and neither side waits for the other. A
/// call whose record is overwritten while it is read is left out.
///
/// ```
/// assert_eq!(nccl::recorder::snapshot().pid, std::process::id());
/// ```
#[must_use]
pub fn snapshot() -> Snapshot {
    take(identity::single_place(), |_| true)
}

/// Returns the last calls of the communicators of one rank, and of those that no world made; for a process in which
/// several ranks are threads.
#[doc(hidden)]
pub fn of_place(place: &WorldRank) -> Snapshot {
    let belongs = |track: &Track| {
        let other = track.identity.scope.as_ref();
        other.is_none_or(|other| other.place == *place)
    };
    take(Some(place.clone()), belongs)
}

static RAS_ADDRESS: OnceLock<fn() -> Option<String>> = OnceLock::new();

/// Sets the function that returns the address of NCCL's RAS service in this process. Only the first call has an effect.
#[doc(hidden)]
pub fn set_ras_address(address: fn() -> Option<String>) {
    let _ = RAS_ADDRESS.set(address);
}

/// Returns the address of NCCL's RAS service in this process, if known.
pub fn ras_address() -> Option<String> {
    RAS_ADDRESS.get().and_then(|address| address())
}

/// A function that returns NCCL's reports on the unfinished calls of a communicator, by their sequence numbers.
type InsideNccl = fn(&Track) -> Vec<(u64, String)>;

static INSIDE_NCCL: OnceLock<InsideNccl> = OnceLock::new();

/// Sets the function that returns NCCL's reports on calls. Only the first call has an effect.
#[doc(hidden)]
pub fn set_inside_nccl(inside: InsideNccl) {
    let _ = INSIDE_NCCL.set(inside);
}

/// Like [`read`], with NCCL's reports.
fn read_with_inside(track: &Track, spans: &mut SpanReader) -> Recording {
    let mut recording = read(track, spans);
    for (sequence, text) in INSIDE_NCCL
        .get()
        .map_or_else(Vec::new, |inside| inside(track))
    {
        let mut calls = recording.calls.iter_mut();
        if let Some(call) = calls.find(|call| call.sequence == sequence) {
            call.inside_nccl = Some(text);
        }
    }
    recording
}

fn take(place: Option<WorldRank>, belongs: impl Fn(&Track) -> bool) -> Snapshot {
    let tracks = track::tracks();
    let tracks = tracks.iter().filter(|track| belongs(track));
    let origin = track::origin().wall;
    let mut spans = SpanReader::default();
    Snapshot {
        host: crate::host::name().to_string(),
        boot: crate::host::boot().to_owned(),
        pid: std::process::id(),
        place,
        origin,
        ras_address: ras_address(),
        communicators: tracks
            .map(|track| read_with_inside(track, &mut spans))
            .collect(),
        notes: notes::all(),
        notes_left_out: 0,
        // Read last, so that no time in the snapshot is later.
        taken: origin + track::now(),
        reason: None,
        clock: None,
    }
}

impl Snapshot {
    /// Leaves out the oldest calls and notes until the JSON has at most about `bytes` bytes.
    #[doc(hidden)]
    pub fn limit_to(&mut self, bytes: usize) {
        // Notes are short, and more informative than the oldest calls.
        let mut room = bytes / 8;
        let mut cut = self.notes.len();
        while cut > 0
            && let Some(rest) = room.checked_sub(fields::length(&self.notes[cut - 1]) + 1)
        {
            room = rest;
            cut -= 1;
        }
        self.notes.drain(..cut);
        self.notes_left_out += cut;
        let mut left = bytes - bytes / 8;
        let mut spend = |cost: usize| {
            let rest = left.checked_sub(cost);
            left = rest.unwrap_or(0);
            rest.is_some()
        };
        for recording in &mut self.communicators {
            let calls = std::mem::take(&mut recording.calls);
            spend(fields::length(recording));
            recording.calls = calls;
        }
        let mut newest: Vec<_> = self
            .communicators
            .iter()
            .enumerate()
            .flat_map(|(at, recording)| recording.calls.iter().map(move |call| (call.since, at)))
            .collect();
        newest.sort_unstable();
        // The calls of a communicator are in order, so counting from the last one is enough.
        let mut kept = vec![0; self.communicators.len()];
        for &(_, at) in newest.iter().rev() {
            let calls = &self.communicators[at].calls;
            if !spend(fields::length(&calls[calls.len() - 1 - kept[at]]) + 1) {
                break;
            }
            kept[at] += 1;
        }
        for (recording, kept) in self.communicators.iter_mut().zip(kept) {
            let over = recording.calls.len() - kept;
            let dropped = recording.calls.drain(..over);
            let messages = dropped.filter(|call| is_of_some_ranks(call.kind)).count();
            if let Some(earlier) = &mut recording.earlier_messages {
                *earlier += messages as u64;
            }
            recording.left_out += over;
        }
    }
}

impl Snapshot {
    /// Returns the process's launcher rank, if it differs from its world rank.
    #[doc(hidden)]
    pub fn launcher_rank(&self) -> Option<usize> {
        let generation = self.place.as_ref().map(|place| place.generation);
        let mut own = self.communicators.iter();
        own.find_map(|one| {
            let launched = one.roster().launcher_rank(one.rank);
            launched.filter(|_| Some(one.generation) == generation)
        })
    }
}

impl Recording {
    /// Returns the world ranks and launcher ranks of its ranks.
    #[doc(hidden)]
    pub fn roster(&self) -> Roster {
        Roster::recorded(self.members.as_deref(), self.launcher_ranks.as_deref())
    }
}

/// Returns the last calls of one communicator.
#[doc(hidden)]
pub fn read_one(track: &Track) -> Recording {
    read(track, &mut SpanReader::default())
}

fn read(track: &Track, spans: &mut SpanReader) -> Recording {
    let (raw_calls, earlier_messages) = track.recorded_calls();
    // Read after the calls: an operation that a call names and that is missing here was overwritten, or is not called
    // yet.
    let operations = track.operation_ring.read();
    let calls = raw_calls.records.iter().enumerate().map(|(at, raw)| {
        // A failed call may have fewer operations than it announced.
        let next = raw_calls.records.get(at + 1).map(|next| next.first);
        let end = raw.first.saturating_add(raw.count);
        let end = next.map_or(end, |next| end.min(next));
        let listed: Vec<_> = (raw.first..end)
            .filter_map(|index| operation(*operations.get(index)?))
            .collect();
        call(track, raw, listed, spans)
    });
    let mut calls: Vec<_> = calls.collect();
    // A stream runs its calls in order, so each call was done no later than the calls after it.
    let mut known: Vec<(u64, Duration)> = Vec::new();
    for call in calls.iter_mut().rev() {
        let later = known.iter_mut().find(|(stream, _)| *stream == call.stream);
        call.done = call.done.filter(|done| *done >= call.since);
        match (call.done, later) {
            (Some(done), Some((_, known))) => *known = done.min(*known),
            (Some(done), None) => known.push((call.stream, done)),
            (None, Some((_, known))) if call.state == CallState::Done => call.done = Some(*known),
            (None, _) => {}
        }
        // The stream went past it all the same, which dates the calls before it.
        if call.state == CallState::Failed {
            call.done = None;
        }
    }
    let life = track.lifecycle.get();
    let identity = &track.identity;
    let members = identity.members.as_deref().filter(|members| {
        let scope = identity.scope.as_ref();
        let is_whole_world = scope.is_some_and(|scope| scope.place.world_size == members.len());
        !is_whole_world || !members.iter().copied().eq(0..members.len())
    });
    Recording {
        name: identity.name.to_string(),
        key: identity.key.as_deref().map(str::to_owned),
        generation: identity
            .scope
            .as_ref()
            .map_or(0, |scope| scope.place.generation),
        number: track.communicator_number,
        rank: identity.rank,
        world_size: identity.world_size,
        members: members.map(<[usize]>::to_vec),
        launcher_ranks: identity.roster.launcher_ranks().map(<[usize]>::to_vec),
        life: life.text().to_owned(),
        reason: life
            .abort_has_begun()
            .then(|| track.lifecycle.reason())
            .flatten(),
        earlier_messages,
        calls,
        left_out: 0,
    }
}

fn call(
    track: &Track,
    raw: &RawCall,
    operations: Vec<RecordedOperation>,
    spans: &mut SpanReader,
) -> Call {
    let since = Duration::from_nanos(raw.time);
    let state = match CallProgress::from_word(raw.state) {
        // First: what the stream has done since then includes nothing of a call that failed.
        CallProgress::Failed | CallProgress::GivenUp => CallState::Failed,
        _ if raw.sequence <= track.done_on(raw.stream) => CallState::Done,
        _ if track.lifecycle.get().abort_has_begun() => CallState::Aborted,
        CallProgress::Issued => CallState::Issued,
        CallProgress::Issuing => CallState::Issuing,
    };
    Call {
        sequence: raw.sequence,
        kind: OperationKind::from_code((raw.state >> 8) as u8),
        since,
        at: track::origin().wall + since,
        stream: raw.stream,
        state,
        done: (raw.done > 0).then(|| Duration::from_nanos(raw.done)),
        span: spans.read(raw.span),
        inside_nccl: None,
        missing: usize::try_from(raw.count)
            .unwrap_or(usize::MAX)
            .saturating_sub(operations.len()),
        operations,
    }
}

pub(super) fn operation(record: Option<(Descriptor, u32)>) -> Option<RecordedOperation> {
    let (descriptor, message_number) = record?;
    Some(RecordedOperation {
        kind: descriptor.function().kind(),
        count: descriptor.count,
        data_type: descriptor.data_type(),
        peer: descriptor.peer(),
        message: descriptor.is_message().then_some(message_number),
        root: descriptor.root(),
        reduction: descriptor.reduction(),
    })
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;
    use crate::error::{Error, ErrorKind};
    use crate::single_rank;

    #[test]
    fn a_call_that_failed_is_not_done_when_a_later_call_on_its_stream_is() {
        use CallState::{Done, Failed};
        nccl_emulator::install_unless_gpu().expect("an emulator or a GPU");
        let device = crate::device(0).expect("a device");
        let comm = single_rank::communicator(&device.new_stream().expect("a stream"));
        let failed = Error::new(ErrorKind::InvalidConfig {
            field: "field",
            reason: String::from("it is refused"),
        });
        let given_up = Error::new(ErrorKind::Aborted {
            reason: String::from("it is given up"),
        });
        let turn = comm.inner.handle.lock_within(None, comm.timeout);
        let (mut handle, _) = turn.expect("no other call");
        for failure in [None, Some(failed), Some(given_up), None] {
            handle.sequence += 1;
            let number = handle.sequence;
            let (kind, now) = (OperationKind::AllReduce, Instant::now());
            let writer = &mut handle.recorder;
            let ticket = writer.begin(number, kind, now, comm.stream(), comm.timeout, 0);
            writer.end(ticket, failure.as_ref());
        }
        drop(handle);
        let track = comm.inner.track_handle.track();
        for number in [2, 4] {
            track.done(comm.stream(), number);
        }
        let calls = read_one(track).calls;
        let seen = calls.iter().map(|call| (call.state, call.done.is_some()));
        assert_eq!(
            seen.collect::<Vec<_>>(),
            [(Done, true), (Failed, false), (Failed, false), (Done, true)]
        );
    }
}
