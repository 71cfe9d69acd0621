//! The description of an operation in an error.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::data_type::DataType;
use crate::reduce_op::RecordedReduction;
use crate::roster::Roster;

/// The kind of an operation.
///
/// ```
/// assert_eq!(nccl::OperationKind::AllToAll.to_string(), "all_to_all");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum OperationKind {
    /// Creation of a communicator.
    Init,
    /// A reduction whose result all ranks receive.
    AllReduce,
    /// One rank's data, sent to all ranks.
    Broadcast,
    /// A reduction whose result one rank receives.
    Reduce,
    /// A block of every rank, sent to all ranks.
    AllGather,
    /// A reduction of which every rank receives one block.
    ReduceScatter,
    /// An exchange of one block with every rank.
    AllToAll,
    /// An exchange with every rank, with a length of its own for each.
    AllToAllV,
    /// A block of every rank, sent to one rank.
    Gather,
    /// A block for every rank, sent by one rank.
    Scatter,
    /// A message to one rank.
    Send,
    /// A message from one rank.
    Recv,
    /// Several messages issued together.
    Group,
    /// Creation of communicators of some of the ranks.
    Split,
    /// Creation of a communicator without some of the ranks.
    Shrink,
    /// The end of the operations under way on a communicator.
    Revoke,
    /// `Communicator::grow`.
    Grow,
    /// The orderly end of a communicator.
    Finalize,
    /// The abort of a communicator.
    Abort,
    /// The capture of a plan.
    Capture,
    /// A launch of a captured plan.
    Replay,
    /// `ExpertParallel::route`.
    Route,
    /// `ExpertParallel::dispatch`.
    Dispatch,
    /// `ExpertParallel::combine`.
    Combine,
    /// A write into a window of another rank.
    Put,
    /// A signal to another rank.
    Signal,
    /// A wait for signals of other ranks.
    WaitSignal,
}

impl OperationKind {
    /// All kinds; the index of each is its number.
    #[doc(hidden)]
    pub const ALL: [Self; 27] = [
        Self::Init,
        Self::AllReduce,
        Self::Broadcast,
        Self::Reduce,
        Self::AllGather,
        Self::ReduceScatter,
        Self::AllToAll,
        Self::AllToAllV,
        Self::Gather,
        Self::Scatter,
        Self::Send,
        Self::Recv,
        Self::Group,
        Self::Split,
        Self::Shrink,
        Self::Revoke,
        Self::Grow,
        Self::Finalize,
        Self::Abort,
        Self::Capture,
        Self::Replay,
        Self::Route,
        Self::Dispatch,
        Self::Combine,
        Self::Put,
        Self::Signal,
        Self::WaitSignal,
    ];

    /// Returns the kind with this number (its value `as u8`).
    #[doc(hidden)]
    pub fn from_code(code: u8) -> Self {
        match Self::ALL.get(usize::from(code)) {
            Some(&kind) => kind,
            None => unreachable!("no kind has the number {code}"),
        }
    }

    /// Returns the name that is used in messages, events and files.
    #[doc(hidden)]
    pub fn name(self) -> &'static str {
        match self {
            Self::Init => "init",
            Self::AllReduce => "all_reduce",
            Self::Broadcast => "broadcast",
            Self::Reduce => "reduce",
            Self::AllGather => "all_gather",
            Self::ReduceScatter => "reduce_scatter",
            Self::AllToAll => "all_to_all",
            Self::AllToAllV => "all_to_all_v",
            Self::Gather => "gather",
            Self::Scatter => "scatter",
            Self::Send => "send",
            Self::Recv => "recv",
            Self::Group => "group",
            Self::Split => "split",
            Self::Shrink => "shrink",
            Self::Revoke => "revoke",
            Self::Grow => "grow",
            Self::Finalize => "finalize",
            Self::Abort => "abort",
            Self::Capture => "capture",
            Self::Replay => "replay",
            Self::Route => "route",
            Self::Dispatch => "dispatch",
            Self::Combine => "combine",
            Self::Put => "put",
            Self::Signal => "signal",
            Self::WaitSignal => "wait_signal",
        }
    }

    /// Returns whether the operation concerns only two ranks, so that each rank numbers such operations independently.
    #[doc(hidden)]
    pub fn is_pairwise(self) -> bool {
        matches!(
            self,
            Self::Send | Self::Recv | Self::Put | Self::Signal | Self::WaitSignal
        )
    }

    fn counts_blocks(self) -> bool {
        matches!(
            self,
            Self::AllGather | Self::ReduceScatter | Self::AllToAll | Self::Gather | Self::Scatter
        )
    }
}

impl fmt::Display for OperationKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// An operation on a communicator, as an error describes it.
///
/// ```
/// use nccl::OperationKind;
/// # fn show(error: nccl::Error) {
/// if let Some(operation) = error.operation() {
///     assert_eq!(operation.kind, OperationKind::AllToAll);
///     println!("rank {} of {}", operation.rank, operation.world_size);
/// }
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Operation {
    /// The kind of the operation.
    pub kind: OperationKind,
    /// The name of the communicator.
    pub communicator: Arc<str>,
    /// The reporting rank, in the communicator.
    pub rank: usize,
    /// The number of ranks of the communicator.
    pub world_size: usize,
    /// The reporting host.
    pub host: Arc<str>,
    /// The reporting process.
    pub pid: u32,
    /// The generation of the world that made the communicator. It increases when the job is started again, and, by at
    /// least one, when the world continues with other ranks. 0 in the first generation, and without a world.
    pub generation: u64,
    #[doc(hidden)]
    pub roster: Arc<Roster>,
    /// The number of the operation on its communicator, from 1; `None` outside the data path.
    pub sequence: Option<u64>,
    /// The number of the replayed plan on its communicator, from 1; `None` for other operations.
    pub plan: Option<u64>,
    /// The rank at the other end, for messages.
    pub peer: Option<usize>,
    /// The root, for operations that have one.
    pub root: Option<usize>,
    /// The number of elements in NCCL's count: the elements of one block if every rank has a block.
    pub count: Option<usize>,
    /// The type of the elements.
    pub data_type: Option<DataType>,
    /// The operator of a reduction.
    pub reduction: Option<RecordedReduction>,
    /// The time from the call to the error.
    pub elapsed: Duration,
}

/// The part of an operation that differs between kinds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[doc(hidden)]
pub struct Shape {
    pub peer: Option<usize>,
    pub root: Option<usize>,
    pub count: Option<usize>,
    pub data_type: Option<DataType>,
    pub reduction: Option<RecordedReduction>,
}

impl Operation {
    /// Returns the reporting rank, in the world of the [`generation`](Self::generation); the same as [`rank`](Self::rank) where the
    /// communicator was made without a world.
    ///
    /// ```
    /// # fn example(error: &nccl::Error) {
    /// # let Some(operation) = error.operation() else { return };
    /// eprintln!("rank {} of the world", operation.world_rank());
    /// # }
    /// ```
    #[must_use]
    pub fn world_rank(&self) -> usize {
        self.roster.world_rank(self.rank)
    }

    /// Returns the number under which the launcher started the reporting process, where that is not its
    /// [`world_rank`](Self::world_rank), as after a recovery; `None` where both are the same, or no launcher started it.
    ///
    /// ```
    /// # fn example(error: &nccl::Error) {
    /// # let Some(operation) = error.operation() else { return };
    /// let printed = operation.launcher_rank().unwrap_or(operation.world_rank());
    /// eprintln!("in the lines that begin with [{printed}]");
    /// # }
    /// ```
    #[must_use]
    pub fn launcher_rank(&self) -> Option<usize> {
        self.roster.launcher_rank(self.rank)
    }

    /// Returns the world ranks of the communicator in short form; `None` if they are all ranks of the world in order.
    #[doc(hidden)]
    pub fn world_ranks(&self) -> Option<String> {
        self.roster.world_ranks()
    }
}

impl Operation {
    /// Formats the operation alone, without the reporting process.
    #[doc(hidden)]
    pub fn what(&self) -> impl fmt::Display + '_ {
        What(self)
    }
}

struct What<'o>(&'o Operation);

impl Operation {
    fn name(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.kind)?;
        if let Some(plan) = self.plan {
            write!(f, " of plan {plan}")?;
        }
        if let Some(sequence) = self.sequence {
            write!(f, " #{sequence}")?;
        }
        Ok(())
    }
}

impl fmt::Display for What<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let operation = self.0;
        operation.name(f)?;
        if let (Some(data_type), Some(count)) = (operation.data_type, operation.count) {
            write!(f, " of {data_type} × {count}")?;
        }
        let Operation {
            reduction,
            peer,
            root,
            ..
        } = *operation;
        if let Some(reduction) = reduction {
            write!(f, ", {reduction}")?;
        }
        if let Some(peer) = peer {
            write!(f, ", peer {peer}")?;
        }
        if let Some(root) = root {
            write!(f, ", root {root}")?;
        }
        Ok(())
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.name(f)?;
        write!(f, " on {} (", self.roster.named(&self.communicator))?;
        if let (Some(data_type), Some(count)) = (self.data_type, self.count) {
            write!(f, "{data_type} × {count}")?;
            if self.kind.counts_blocks() {
                f.write_str(" per rank")?;
            }
            f.write_str(", ")?;
        }
        if let Some(reduction) = self.reduction {
            write!(f, "{reduction}, ")?;
        }
        if let Some(peer) = self.peer {
            write!(f, "peer {peer}, ")?;
        }
        if let Some(root) = self.root {
            write!(f, "root {root}, ")?;
        }
        let ranks = if self.world_size == 1 {
            "rank"
        } else {
            "ranks"
        };
        write!(f, "{} {ranks}", self.world_size)?;
        if self.generation > 0 {
            write!(f, ", generation {}", self.generation)?;
        }
        write!(
            f,
            ") failed on rank {} ({}{}, pid {}) after {:.1} s",
            self.rank,
            self.roster.others(self.rank),
            self.host,
            self.pid,
            self.elapsed.as_secs_f64()
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reduce_op::ReduceOp;

    #[test]
    fn every_kind_is_found_by_its_number() {
        for (number, kind) in OperationKind::ALL.into_iter().enumerate() {
            assert_eq!(kind as usize, number);
        }
    }

    #[test]
    fn an_operation_names_communicator_shape_rank_host_and_time() {
        let mut operation = Operation {
            plan: None,
            kind: OperationKind::AllToAll,
            communicator: "model/tp".into(),
            rank: 2,
            world_size: 8,
            host: "node-a".into(),
            pid: 4021,
            generation: 0,
            roster: Arc::default(),
            sequence: Some(42),
            peer: None,
            root: None,
            count: Some(4096),
            data_type: Some(DataType::BFloat16),
            reduction: None,
            elapsed: Duration::from_millis(300),
        };
        assert_eq!(
            operation.to_string(),
            "all_to_all #42 on \"model/tp\" (bf16 × 4096 per rank, 8 ranks) failed on rank 2 \
             (node-a, pid 4021) after 0.3 s"
        );
        operation.kind = OperationKind::Replay;
        operation.plan = Some(2);
        assert_eq!(
            operation.what().to_string(),
            "replay of plan 2 #42 of bf16 × 4096"
        );
        (operation.kind, operation.plan) = (OperationKind::Reduce, None);
        operation.root = Some(3);
        operation.reduction = Some(RecordedReduction::Op(ReduceOp::Sum));
        assert_eq!(
            operation.what().to_string(),
            "reduce #42 of bf16 × 4096, sum, root 3"
        );
        let text = operation.to_string();
        assert!(
            text.contains("(bf16 × 4096, sum, root 3, 8 ranks) failed"),
            "{text}"
        );
        operation.generation = 2;
        let text = operation.to_string();
        assert!(text.contains(", 8 ranks, generation 2) failed"), "{text}");
    }
}
