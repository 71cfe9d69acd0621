//! The values that programs read, copied while the communicators are used.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use super::worlds::{self, WorldStats};
use crate::Version;
use crate::library::Library;
use crate::op::Function;
use crate::operation::OperationKind;
use nccl_base::fault::FaultClass;
use nccl_core::state::{Lifecycle, State};
use nccl_core::stats::registry::{self, NameStats};
use nccl_core::stats::{Durations, process};
use nccl_core::supervision::watchdog::{self, PendingCommunicator};

/// How much this process has done with NCCL since it started, and its current state.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # nccl_emulator::install_unless_gpu()?;
/// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
/// let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
/// let mut y = stream.clone_htod(&[1.0f32; 8])?;
/// comm.all_reduce_in_place(&mut y, nccl::ReduceOp::Sum)?.wait()?;
///
/// let stats = nccl::stats();
/// let demo = stats.communicator("demo").expect("it was made");
/// assert_eq!(demo.operations[0].kind, nccl::OperationKind::AllReduce);
/// assert_eq!(demo.operations[0].bytes, 32);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// When the statistics were read.
    pub taken: SystemTime,
    /// The libnccl of this process, once one is loaded.
    pub library: Option<LibraryInfo>,
    /// What communicators have done, by name, in the order in which the names appeared. Up to 128 names are
    /// counted separately; all further ones are counted together as `(others)`.
    pub communicators: Vec<CommunicatorStats>,
    /// State of the worlds that this process is a member of; one for each of their ranks in this process.
    pub worlds: Vec<WorldStats>,
    /// Communicators that were ended by a fault, each counted once on each rank.
    pub faults: Faults,
    /// Aborts in which NCCL released the communicator.
    pub aborts_freed: u64,
    /// Aborts in which NCCL did not return in time.
    pub aborts_leaked: u64,
    /// Communicators that NCCL has not released, after an abort or any other end.
    pub leaked_communicators: u64,
    /// Ranks that had not entered an operation in which others waited, counted each time that a rank of this process received
    /// a report of one ([`Timeouts::straggler`](crate::Timeouts::straggler)).
    pub stragglers: u64,
    /// Refused connections to this process's rank 0, or to another rank's listener.
    pub strangers: u64,
    /// How long it took to make communicators, including those that failed.
    pub init: Durations,
    /// How long aborts took on this rank, including the wait for the other ranks.
    pub abort: Durations,
    /// Time to detect a fault: from the call of an operation that this rank gave up, because it failed or timed out,
    /// until this rank knew the cause that all ranks report. Measured only on the ranks that gave an operation up, not
    /// for a fault that another rank reports.
    pub detect: Durations,
    /// Time to continue after a fault: from the moment when this rank received it until this rank made a communicator
    /// of the same world, or of its next generation. Faults that a program requested do not count.
    pub recover: Durations,
    /// Time from a call until its work was on its stream, by kind. Sampled: of 64 calls on a communicator one is timed,
    /// starting with the second.
    pub enqueue: Vec<(OperationKind, Durations)>,
}

/// The libnccl of a process.
///
/// ```
/// # nccl_emulator::install_unless_gpu().expect("an emulator or a GPU");
/// let loaded = nccl::Library::load()?;
/// let library = nccl::stats().library.expect("it is loaded");
/// assert_eq!(library.version, loaded.version());
/// # Ok::<(), nccl::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LibraryInfo {
    /// The release of the library.
    pub version: Version,
    /// The file of the library.
    pub path: PathBuf,
    /// Whether it is the emulator, so that none of these values was measured on a GPU.
    pub is_emulated: bool,
}

/// What all communicators of one name have done, on all ranks that are in this process.
///
/// ```
/// for comm in nccl::stats().communicators {
///     println!("{}: {} groups", comm.name, comm.calls_of(nccl::OperationKind::Group));
/// }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CommunicatorStats {
    /// The name of the communicators.
    pub name: String,
    /// The number of communicators that can be used.
    pub ready: usize,
    /// The number that exist but cannot be used any more, because they were finalized or aborted.
    pub over: usize,
    /// The number that no longer exist. Their operations stay counted.
    pub ended: u64,
    /// Calls that were issued and are not known to be done, as of the watchdog's last check.
    pub queue_depth: u64,
    /// Time since the oldest of these calls was made; `None` when there are none.
    pub oldest_pending: Option<Duration>,
    /// Time that calls took on their stream, by kind, measured by CUDA events directly before and after a call. It
    /// includes the wait for the other ranks and, when the stream was idle, the time that the host took to issue the
    /// call. Sampled by the watchdog: at most one pair of events per stream every 10 ms.
    pub took: Vec<(OperationKind, Durations)>,
    /// Times between the first and the last rank's entry into a collective: sampled, on the first rank only.
    pub arrival_skew: ArrivalSkew,
    /// Calls that have a sequence number, by kind; kinds without calls are left out.
    pub calls: Vec<(OperationKind, u64)>,
    /// Operations that were handed to NCCL, by kind; kinds without operations are left out. A group, an `all_to_all_v` and
    /// a replay consist of several.
    pub operations: Vec<OperationStats>,
}

/// Time between the ranks' entries into a collective: from the first call to the last, on the hosts.
///
/// Sampled: while it has work, the first rank of a communicator asks all others about a collective that is done, first
/// after a second and then every half minute. No clocks are compared; the error is about the latency of a message.
///
/// ```
/// for comm in nccl::stats().communicators {
///     println!("{}: {:?} apart on average", comm.name, comm.arrival_skew.samples.mean());
/// }
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ArrivalSkew {
    /// The sampled times.
    pub samples: Durations,
    /// The ranks that entered last, and how often each did: up to 64 ranks of the communicator.
    pub last: Vec<(usize, u64)>,
}

/// How many operations of a kind were handed to NCCL, and how large they were.
///
/// Operations of a captured plan count when they are captured, in place of its first launch, and with each later launch.
///
/// ```
/// for comm in nccl::stats().communicators {
///     for operations in comm.operations {
///         println!("{}: {} B by {}", comm.name, operations.bytes, operations.kind);
///     }
/// }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct OperationStats {
    /// The function of NCCL.
    pub kind: OperationKind,
    /// The number of operations.
    pub count: u64,
    /// Bytes of the data: of a message, an all-reduce, broadcast or reduce; where every rank has a block, of all blocks
    /// together.
    pub bytes: u64,
}

/// How many communicators were ended by faults of each [`FaultClass`].
///
/// ```
/// println!("{} because a rank was gone", nccl::stats().faults.gone);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Faults {
    /// NCCL or CUDA failed on a rank.
    pub failed: u64,
    /// An operation of a rank ran into its timeout.
    pub timed_out: u64,
    /// A rank's program ended the communicator.
    pub asked: u64,
    /// A rank's process was gone, or reported that it fails.
    pub gone: u64,
    /// A rank's program revoked the communicator, to continue without some ranks.
    pub revoked: u64,
    /// This rank could not reach the others any more.
    pub cut_off: u64,
}

/// Returns how much this process has done with NCCL since it started, and its current state.
///
/// May be called from any thread at any time, while communicators are in use. The numbers of a communicator in use may
/// be from slightly different moments.
///
/// ```
/// let stats = nccl::stats();
/// println!("{} communicators leaked", stats.leaked_communicators);
/// ```
#[must_use]
pub fn stats() -> Stats {
    Stats {
        taken: SystemTime::now(),
        library: Library::loaded().map(|library| LibraryInfo {
            version: library.version(),
            path: library.path().to_owned(),
            is_emulated: library.is_emulated(),
        }),
        communicators: {
            let pending = watchdog::pending();
            let counted = registry::read().into_iter();
            counted.map(|one| communicator(one, &pending)).collect()
        },
        worlds: worlds::all(),
        faults: Faults {
            failed: process::faults(FaultClass::Failed).get(),
            timed_out: process::faults(FaultClass::TimedOut).get(),
            asked: process::faults(FaultClass::Asked).get(),
            gone: process::faults(FaultClass::Gone).get(),
            revoked: process::faults(FaultClass::Revoked).get(),
            cut_off: process::faults(FaultClass::CutOff).get(),
        },
        aborts_freed: process::FREED.get(),
        aborts_leaked: process::LEAKED.get(),
        leaked_communicators: process::LEAKED_COMMUNICATORS.get(),
        stragglers: process::STRAGGLERS.get(),
        strangers: worlds::refused_connections(),
        init: process::INIT.read(),
        abort: process::ABORT.read(),
        detect: process::DETECT.read(),
        recover: process::RECOVER.read(),
        enqueue: OperationKind::ALL
            .into_iter()
            .map(|kind| (kind, process::enqueue(kind).read()))
            .filter(|(_, durations)| durations.count > 0)
            .collect(),
    }
}

fn communicator(counted: NameStats, pending: &[PendingCommunicator]) -> CommunicatorStats {
    let NameStats {
        name,
        sums,
        ended,
        took,
        skew: (samples, last),
        live,
    } = counted;
    let is_over = |phase: &&Arc<Lifecycle>| phase.get() != State::Ready;
    let over = live.iter().filter(is_over).count();
    let own = || pending.iter().filter(|one| one.communicator == name);
    let calls = OperationKind::ALL
        .into_iter()
        .map(|kind| (kind, sums.calls[kind as usize]));
    let operations = Function::ALL.into_iter().map(|function| {
        let total = sums.totals[function as usize];
        OperationStats {
            kind: function.kind(),
            count: total.operations,
            bytes: total.bytes,
        }
    });
    CommunicatorStats {
        name: name.to_string(),
        took,
        ready: live.len() - over,
        over,
        ended,
        queue_depth: own().map(|one| one.depth).sum(),
        oldest_pending: own()
            .filter_map(|one| one.oldest)
            .map(|oldest| oldest.since.elapsed())
            .max(),
        arrival_skew: ArrivalSkew { samples, last },
        calls: calls.filter(|(_, count)| *count > 0).collect(),
        operations: operations.filter(|one| one.count > 0).collect(),
    }
}

impl Stats {
    /// Returns the statistics of the communicators with this name.
    ///
    /// ```
    /// assert!(nccl::stats().communicator("nobody made this").is_none());
    /// ```
    #[must_use]
    pub fn communicator(&self, name: &str) -> Option<&CommunicatorStats> {
        self.communicators.iter().find(|comm| comm.name == name)
    }
}

impl CommunicatorStats {
    /// Returns how many calls of a kind there were.
    ///
    /// ```
    /// for comm in nccl::stats().communicators {
    ///     println!("{} captures", comm.calls_of(nccl::OperationKind::Capture));
    /// }
    /// ```
    #[must_use]
    pub fn calls_of(&self, kind: OperationKind) -> u64 {
        let calls = self.calls.iter().find(|(of, _)| *of == kind);
        calls.map_or(0, |(_, count)| *count)
    }

    /// Returns the number of bytes of all operations together.
    ///
    /// ```
    /// let bytes: u64 = nccl::stats().communicators.iter().map(|comm| comm.bytes()).sum();
    /// ```
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.operations.iter().map(|one| one.bytes).sum()
    }
}
