//! What the recorder shows to whoever asks: plain values, copied while the communicators go on.

use std::time::{Duration, SystemTime};

use super::notes::{self, Note};
use super::track::{self, IssueRecord, OperationRecord, Progress, Track};
use crate::communicator::Communicator;
use crate::dtype::DataType;
use crate::operation::OperationKind;
use crate::recorded::{Function, Kind, Reduced};
use crate::reduce::ReduceOp;

/// What all communicators of this process did last, and what the program noted.
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
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Snapshot {
    /// The host, as its kernel names it.
    pub host: String,
    /// The process.
    pub pid: u32,
    /// When the snapshot was taken.
    pub taken: SystemTime,
    /// Those that live and the last that ended, in the order in which they were made.
    pub communicators: Vec<Recording>,
    /// The last notes and phases of the program, oldest first.
    pub notes: Vec<Note>,
}

/// What one communicator did last.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Recording {
    /// Its name.
    pub name: String,
    /// The how manieth communicator of this process it is, from 1.
    pub number: u64,
    /// This rank.
    pub rank: usize,
    /// The number of ranks.
    pub world_size: usize,
    /// Where it is in its life: `ready`, `aborted`, …
    pub life: &'static str,
    /// Why it was aborted.
    pub reason: Option<String>,
    /// The last calls, oldest first.
    pub calls: Vec<Call>,
}

/// A call that has a sequence number: a collective, a group, a capture, or a replay.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Call {
    /// Its number on the communicator, from 1; [`Request::sequence`](crate::Request::sequence).
    pub sequence: u64,
    /// What was called.
    pub kind: OperationKind,
    /// When, since the first communicator of this process was made. From a clock that only goes forward.
    pub since: Duration,
    /// When, by the clock on the wall of that moment.
    pub at: SystemTime,
    /// CUDA's handle of the stream.
    pub stream: u64,
    /// How far it has come.
    pub state: CallState,
    /// What it is made of, in the order of the calls into NCCL. Nothing for a replay.
    pub operations: Vec<RecordedOperation>,
    /// How many operations are not listed: they were overwritten, or are not called yet.
    pub missing: usize,
}

/// How far a call has come, as this rank knows it without asking the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CallState {
    /// NCCL was called, and has not come back.
    Issuing,
    /// The work is on the stream. Whether it is done, nobody has asked since.
    Issued,
    /// It is done, as a [`Request`](crate::Request) on its stream has found: its own, or a later one.
    Done,
    /// The call failed.
    Failed,
    /// The communicator was aborted before anybody saw it done.
    Aborted,
}

/// One call into NCCL.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RecordedOperation {
    /// Which.
    pub kind: OperationKind,
    /// Elements, as NCCL's function counts them.
    pub count: u64,
    /// Their type.
    pub data_type: DataType,
    /// The other rank of a message.
    pub peer: Option<usize>,
    /// For a message: the how manieth this is to, or from, its peer. The n-th message to a rank is the n-th
    /// that it receives from here. Messages of replays are not counted.
    pub message: Option<u32>,
    /// The root of a collective that has one.
    pub root: Option<usize>,
    /// What a reduction reduces with.
    pub reduction: Option<RecordedReduction>,
}

/// An operator, as far as the recorder tells them apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RecordedReduction {
    /// One of NCCL's own.
    Op(ReduceOp),
    /// One that the program made, like [`PreMulSum`](crate::PreMulSum).
    Made,
}

/// What all communicators of this process did last.
///
/// Any thread may ask at any time: communicators go on meanwhile, and neither waits for the other. A call
/// that is overwritten while it is read is left out.
///
/// ```
/// assert_eq!(nccl::recorder::snapshot().pid, std::process::id());
/// ```
#[must_use]
pub fn snapshot() -> Snapshot {
    Snapshot {
        host: crate::host::name().to_string(),
        pid: std::process::id(),
        taken: SystemTime::now(),
        communicators: track::tracks().iter().map(|track| read(track)).collect(),
        notes: notes::all(),
    }
}

impl Communicator {
    /// What it did last.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// # let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
    /// # let x = stream.clone_htod(&[1.0f32; 8])?;
    /// # let mut y = stream.clone_htod(&[1.0f32; 8])?;
    /// comm.group(|group| {
    ///     group.isend(&x, 0)?;
    ///     group.irecv(&mut y, 0)
    /// })?;
    /// let recording = comm.recording();
    /// let [group] = &recording.calls[..] else { panic!("one call") };
    /// assert_eq!(group.operations[0].peer, Some(0));
    /// assert_eq!(group.operations[0].count, 8);
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn recording(&self) -> Recording {
        read(self.inner.tracked.track())
    }
}

fn read(track: &Track) -> Recording {
    let issues = track.issues.read();
    // After the issues: whatever they name that is not here is too old, or not called yet.
    let operations = track.operations.read();
    let calls = issues.records.iter().enumerate().map(|(at, issue)| {
        // One that failed has fewer than it announced.
        let next = issues.records.get(at + 1).map(|next| next.first);
        let end = issue.first.saturating_add(issue.count);
        let end = next.map_or(end, |next| end.min(next));
        let listed: Vec<_> = (issue.first..end)
            .filter_map(|number| operation(operations.get(number)?))
            .collect();
        call(track, issue, listed)
    });
    let calls = calls.collect();
    let life = track.phase.get();
    Recording {
        name: track.name.to_string(),
        number: track.number,
        rank: track.rank,
        world_size: track.world_size,
        life: life.text(),
        reason: life.is_aborted().then(|| track.phase.reason()).flatten(),
        calls,
    }
}

fn call(track: &Track, issue: &IssueRecord, operations: Vec<RecordedOperation>) -> Call {
    let since = Duration::from_nanos(issue.time);
    let state = match Progress::from_word(issue.state) {
        _ if issue.number <= track.done_on(issue.stream) => CallState::Done,
        Progress::Failed => CallState::Failed,
        _ if track.phase.get().is_aborted() => CallState::Aborted,
        Progress::Issued => CallState::Issued,
        Progress::Issuing => CallState::Issuing,
    };
    Call {
        sequence: issue.number,
        kind: OperationKind::from_code((issue.state >> 8) as u8),
        since,
        at: track::origin().wall + since,
        stream: issue.stream,
        state,
        missing: usize::try_from(issue.count)
            .unwrap_or(usize::MAX)
            .saturating_sub(operations.len()),
        operations,
    }
}

fn operation(record: &OperationRecord) -> Option<RecordedOperation> {
    let Kind {
        function,
        data_type,
        reduction,
    } = Kind::of(record.kind)?;
    let rank = usize::try_from(record.rank).ok();
    let is_message = matches!(function, Function::Send | Function::Recv);
    let has_root = matches!(
        function,
        Function::Broadcast | Function::Reduce | Function::Gather | Function::Scatter
    );
    Some(RecordedOperation {
        kind: function.kind(),
        count: record.count,
        data_type,
        peer: rank.filter(|_| is_message),
        message: is_message.then_some(record.number),
        root: rank.filter(|_| has_root),
        reduction: match reduction {
            Reduced::Not => None,
            Reduced::Sum => Some(RecordedReduction::Op(ReduceOp::Sum)),
            Reduced::Prod => Some(RecordedReduction::Op(ReduceOp::Prod)),
            Reduced::Max => Some(RecordedReduction::Op(ReduceOp::Max)),
            Reduced::Min => Some(RecordedReduction::Op(ReduceOp::Min)),
            Reduced::Avg => Some(RecordedReduction::Op(ReduceOp::Avg)),
            Reduced::Made => Some(RecordedReduction::Made),
        },
    })
}
