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
}

impl OperationKind {
    /// All kinds; the index of each is its number.
    #[doc(hidden)]
    pub const ALL: [Self; 24] = [
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
    ];

    /// Returns the kind with this number (`as u8`).
    #[doc(hidden)]
    pub fn from_code(code: u8) -> Self {
        match Self::ALL.get(usize::from(code)) {
            Some(&kind) => kind,
            None => unreachable!("no kind has the number {code}"),
        }
    }

    /// Returns the name that is used everywhere.
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
        }
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
///     assert_eq!(operation.kind(), OperationKind::AllToAll);
///     println!("rank {} of {}", operation.rank(), operation.world_size());
/// }
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Operation {
    #[doc(hidden)]
    pub kind: OperationKind,
    #[doc(hidden)]
    pub communicator: Arc<str>,
    #[doc(hidden)]
    pub rank: usize,
    #[doc(hidden)]
    pub world_size: usize,
    #[doc(hidden)]
    pub host: Arc<str>,
    #[doc(hidden)]
    pub pid: u32,
    /// The generation of the world that made the communicator; 0 where there is none.
    #[doc(hidden)]
    pub generation: u64,
    #[doc(hidden)]
    pub roster: Arc<Roster>,
    #[doc(hidden)]
    pub sequence: Option<u64>,
    /// Which plan of the communicator a replay launched, if that is known.
    #[doc(hidden)]
    pub plan: Option<u64>,
    #[doc(hidden)]
    pub shape: Shape,
    #[doc(hidden)]
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
    /// Returns the kind of the operation.
    ///
    /// ```
    /// # fn example(error: &nccl::Error) {
    /// # let Some(operation) = error.operation() else { return };
    /// if operation.kind() == nccl::OperationKind::Init {
    ///     eprintln!("the ranks did not come together");
    /// }
    /// # }
    /// ```
    #[must_use]
    pub fn kind(&self) -> OperationKind {
        self.kind
    }

    /// Returns the name of the communicator.
    ///
    /// ```
    /// # fn example(error: &nccl::Error) {
    /// # let Some(operation) = error.operation() else { return };
    /// eprintln!("on {}", operation.communicator());
    /// # }
    /// ```
    #[must_use]
    pub fn communicator(&self) -> &str {
        &self.communicator
    }

    /// Returns the reporting rank, in the communicator.
    ///
    /// ```
    /// # fn example(error: &nccl::Error) {
    /// # let Some(operation) = error.operation() else { return };
    /// eprintln!("rank {} of {}", operation.rank(), operation.world_size());
    /// # }
    /// ```
    #[must_use]
    pub fn rank(&self) -> usize {
        self.rank
    }

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

    /// Returns the communicator's ranks of the world, where these are not all of them in order.
    #[doc(hidden)]
    pub fn world_ranks(&self) -> Option<String> {
        self.roster.world_ranks()
    }

    /// Returns the number of ranks of the communicator.
    ///
    /// ```
    /// # fn example(error: &nccl::Error) {
    /// # let Some(operation) = error.operation() else { return };
    /// assert!(operation.rank() < operation.world_size());
    /// # }
    /// ```
    #[must_use]
    pub fn world_size(&self) -> usize {
        self.world_size
    }

    /// Returns the reporting host.
    ///
    /// ```
    /// # fn example(error: &nccl::Error) {
    /// # let Some(operation) = error.operation() else { return };
    /// eprintln!("on host {}", operation.host());
    /// # }
    /// ```
    #[must_use]
    pub fn host(&self) -> &str {
        &self.host
    }

    /// Returns the reporting process.
    ///
    /// ```
    /// # fn example(error: &nccl::Error) {
    /// # let Some(operation) = error.operation() else { return };
    /// if operation.pid() == std::process::id() {
    ///     eprintln!("it was this process");
    /// }
    /// # }
    /// ```
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Returns the generation of the world that made the communicator: one more each time that the job was started again, or
    /// the world went on without some of its ranks. 0 in the first, and without a world.
    ///
    /// ```
    /// # fn example(error: &nccl::Error, world: &nccl::World) {
    /// # let Some(operation) = error.operation() else { return };
    /// if operation.generation() < world.generation() {
    ///     eprintln!("of a communicator that is to be made anew");
    /// }
    /// # }
    /// ```
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// Returns the number of the operation on its communicator, from 1; `None` outside the data path.
    ///
    /// ```
    /// # fn example(error: &nccl::Error) {
    /// # let Some(operation) = error.operation() else { return };
    /// if let Some(sequence) = operation.sequence() {
    ///     eprintln!("compare #{sequence} with the other ranks");
    /// }
    /// # }
    /// ```
    #[must_use]
    pub fn sequence(&self) -> Option<u64> {
        self.sequence
    }

    /// Returns the rank at the other end, for messages.
    ///
    /// ```
    /// # fn example(error: &nccl::Error) {
    /// # let Some(operation) = error.operation() else { return };
    /// if let Some(peer) = operation.peer() {
    ///     eprintln!("look at rank {peer}");
    /// }
    /// # }
    /// ```
    #[must_use]
    pub fn peer(&self) -> Option<usize> {
        self.shape.peer
    }

    /// Returns the root, for operations that have one.
    ///
    /// ```
    /// # fn example(error: &nccl::Error) {
    /// # let Some(operation) = error.operation() else { return };
    /// if let Some(root) = operation.root() {
    ///     eprintln!("look at rank {root} first");
    /// }
    /// # }
    /// ```
    #[must_use]
    pub fn root(&self) -> Option<usize> {
        self.shape.root
    }

    /// Returns the number of elements, as NCCL counts them: those of one block where every rank has one.
    ///
    /// ```
    /// # fn example(error: &nccl::Error) {
    /// # let Some(operation) = error.operation() else { return };
    /// if let Some(count) = operation.count() {
    ///     eprintln!("{count} elements");
    /// }
    /// # }
    /// ```
    #[must_use]
    pub fn count(&self) -> Option<usize> {
        self.shape.count
    }

    /// Returns the type of the elements.
    ///
    /// ```
    /// # fn example(error: &nccl::Error) {
    /// # let Some(operation) = error.operation() else { return };
    /// if let Some(data_type) = operation.data_type() {
    ///     eprintln!("elements of {data_type}");
    /// }
    /// # }
    /// ```
    #[must_use]
    pub fn data_type(&self) -> Option<DataType> {
        self.shape.data_type
    }

    /// Returns the operator of a reduction.
    ///
    /// ```
    /// # fn example(error: &nccl::Error) {
    /// # let Some(operation) = error.operation() else { return };
    /// if let Some(reduction) = operation.reduction() {
    ///     eprintln!("reduced with {reduction}");
    /// }
    /// # }
    /// ```
    #[must_use]
    pub fn reduction(&self) -> Option<RecordedReduction> {
        self.shape.reduction
    }

    /// Returns the time from the call to the error.
    ///
    /// ```
    /// # fn example(error: &nccl::Error) {
    /// # let Some(operation) = error.operation() else { return };
    /// if operation.elapsed().as_secs() > 10 {
    ///     eprintln!("it waited for long");
    /// }
    /// # }
    /// ```
    #[must_use]
    pub fn elapsed(&self) -> Duration {
        self.elapsed
    }
}

impl Operation {
    /// Returns which plan of its communicator was replayed, from 1; `None` for everything else.
    ///
    /// ```
    /// # fn example(error: &nccl::Error) {
    /// if let Some(plan) = error.operation().and_then(nccl::Operation::plan) {
    ///     eprintln!("in a replay of plan {plan}");
    /// }
    /// # }
    /// ```
    #[must_use]
    pub fn plan(&self) -> Option<u64> {
        self.plan
    }

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
        if let (Some(data_type), Some(count)) = (operation.shape.data_type, operation.shape.count) {
            write!(f, " of {data_type} × {count}")?;
        }
        let Shape {
            reduction,
            peer,
            root,
            ..
        } = operation.shape;
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
        if let (Some(data_type), Some(count)) = (self.shape.data_type, self.shape.count) {
            write!(f, "{data_type} × {count}")?;
            if self.kind.counts_blocks() {
                f.write_str(" per rank")?;
            }
            f.write_str(", ")?;
        }
        if let Some(reduction) = self.shape.reduction {
            write!(f, "{reduction}, ")?;
        }
        if let Some(peer) = self.shape.peer {
            write!(f, "peer {peer}, ")?;
        }
        if let Some(root) = self.shape.root {
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
            shape: Shape {
                count: Some(4096),
                data_type: Some(DataType::BFLOAT16),
                ..Shape::default()
            },
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
        operation.shape.root = Some(3);
        operation.shape.reduction = Some(RecordedReduction::Op(ReduceOp::Sum));
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
