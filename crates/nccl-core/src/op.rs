//! The description of one operation: the same value in the call, in the recorder, and in comparisons of ranks.

use std::fmt;

use nccl_sys as sys;
use serde::{Deserialize, Serialize};

use crate::operation::OperationKind;
use nccl_base::data_type::DataType;
use nccl_base::reduce_op::RecordedReduction;
use nccl_base::reduce_op::ReduceOp;

/// A C function of NCCL.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
#[doc(hidden)]
pub enum Function {
    Send,
    Recv,
    AllReduce,
    Broadcast,
    Reduce,
    AllGather,
    ReduceScatter,
    AllToAll,
    Gather,
    Scatter,
    Put,
    Signal,
    WaitSignal,
}

impl Function {
    /// All functions, by their codes.
    #[doc(hidden)]
    pub const ALL: [Self; 13] = [
        Self::Send,
        Self::Recv,
        Self::AllReduce,
        Self::Broadcast,
        Self::Reduce,
        Self::AllGather,
        Self::ReduceScatter,
        Self::AllToAll,
        Self::Gather,
        Self::Scatter,
        Self::Put,
        Self::Signal,
        Self::WaitSignal,
    ];

    /// Returns the kind of operation that the function performs.
    #[doc(hidden)]
    pub fn kind(self) -> OperationKind {
        match self {
            Self::Send => OperationKind::Send,
            Self::Recv => OperationKind::Recv,
            Self::AllReduce => OperationKind::AllReduce,
            Self::Broadcast => OperationKind::Broadcast,
            Self::Reduce => OperationKind::Reduce,
            Self::AllGather => OperationKind::AllGather,
            Self::ReduceScatter => OperationKind::ReduceScatter,
            Self::AllToAll => OperationKind::AllToAll,
            Self::Gather => OperationKind::Gather,
            Self::Scatter => OperationKind::Scatter,
            Self::Put => OperationKind::Put,
            Self::Signal => OperationKind::Signal,
            Self::WaitSignal => OperationKind::WaitSignal,
        }
    }

    /// Returns NCCL's name of the function.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Send => "ncclSend",
            Self::Recv => "ncclRecv",
            Self::AllReduce => "ncclAllReduce",
            Self::Broadcast => "ncclBroadcast",
            Self::Reduce => "ncclReduce",
            Self::AllGather => "ncclAllGather",
            Self::ReduceScatter => "ncclReduceScatter",
            Self::AllToAll => "ncclAlltoAll",
            Self::Gather => "ncclGather",
            Self::Scatter => "ncclScatter",
            Self::Put => "ncclPutSignal",
            Self::Signal => "ncclSignal",
            Self::WaitSignal => "ncclWaitSignal",
        }
    }

    /// Returns the name of the variant that takes a configuration. Only collectives have one.
    pub(crate) fn name_with_config(self) -> &'static str {
        match self {
            Self::Send | Self::Recv | Self::Put | Self::Signal | Self::WaitSignal => self.name(),
            Self::AllReduce => "ncclAllReduceConfig",
            Self::Broadcast => "ncclBroadcastConfig",
            Self::Reduce => "ncclReduceConfig",
            Self::AllGather => "ncclAllGatherConfig",
            Self::ReduceScatter => "ncclReduceScatterConfig",
            Self::AllToAll => "ncclAlltoAllConfig",
            Self::Gather => "ncclGatherConfig",
            Self::Scatter => "ncclScatterConfig",
        }
    }

    fn has_root(self) -> bool {
        matches!(
            self,
            Self::Broadcast | Self::Reduce | Self::Gather | Self::Scatter
        )
    }
}

/// Returns the reduction of an operation of `function` that is called with `op`, if it reduces.
#[inline]
pub(crate) fn reduction(function: Function, op: sys::ncclRedOp_t) -> Option<RecordedReduction> {
    match function {
        Function::AllReduce | Function::Reduce | Function::ReduceScatter => {
            let own = ReduceOp::ALL.into_iter().find(|one| one.raw() == op);
            Some(own.map_or(RecordedReduction::Made, RecordedReduction::Op))
        }
        _ => None,
    }
}

/// An operation without its addresses. Two words, because groups hold hundreds of them, and the recorder thousands.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "(u64, i32, u32)", try_from = "(u64, i32, u32)")]
pub(crate) struct Descriptor {
    /// Elements, as the C function counts them.
    pub(crate) count: u64,
    /// The peer or root; 0 for operations without one.
    pub(crate) rank: i32,
    /// Function, type and operator, at [`FUNCTION`], [`DATA_TYPE`] and [`REDUCTION`].
    pub(crate) packed: u32,
}

/// The bit positions of the parts of [`Descriptor::packed`]. The function is highest, so that one comparison identifies it.
const FUNCTION: u32 = 24;
const DATA_TYPE: u32 = 0;
const REDUCTION: u32 = 8;

#[inline]
fn byte(packed: u32, at: u32) -> u8 {
    (packed >> at) as u8
}

/// Whether completed `operations` of `rank` show that NCCL reaches all `world_size` ranks of the communicator: one of them
/// needs data of every rank, or together they have received a message from every other rank.
///
/// Allocates nothing. Messages from ranks above 65535 are not tracked, and the result is then false.
pub(crate) fn reach_all<'a>(
    operations: impl Iterator<Item = &'a Descriptor> + Clone,
    rank: usize,
    world_size: usize,
) -> bool {
    use Function::{AllGather, AllReduce, AllToAll, Gather, Recv, ReduceScatter};
    let mut received = 0;
    for operation in operations.clone().filter(|one| one.count > 0) {
        match operation.function() {
            AllReduce | AllGather | ReduceScatter | AllToAll => return true,
            Gather if operation.root() == Some(rank) => return true,
            Recv => received += 1,
            _ => {}
        }
    }
    // Most groups end here.
    if received + 1 < world_size || world_size < 2 {
        return false;
    }
    let mut senders = [0u64; 1 << 10];
    let mut missing = world_size - 1;
    let messages = operations.filter(|one| one.count > 0 && one.function() == Recv);
    for peer in messages
        .filter_map(Descriptor::peer)
        .filter(|peer| *peer != rank)
    {
        let Some(word) = senders.get_mut(peer / 64) else {
            return false;
        };
        missing -= usize::from(*word >> (peer % 64) & 1 == 0);
        *word |= 1 << (peer % 64);
    }
    missing == 0
}

impl Descriptor {
    /// A `packed` below this value is that of a message to a peer.
    pub(crate) const AFTER_SEND: u32 = (Function::Send as u32 + 1) << FUNCTION;
    /// A `packed` below this value is that of a message to or from a peer.
    pub(crate) const AFTER_RECV: u32 = (Function::Recv as u32 + 1) << FUNCTION;

    /// Describes a message to (`Function::Send`) or from (`Function::Recv`) the peer `rank`, or a collective with the
    /// root `rank`.
    #[inline]
    pub(crate) fn new(function: Function, count: usize, data_type: DataType, rank: i32) -> Self {
        // The code fits for all types whose size is known; other types were refused before.
        let data_type = u32::from(data_type.as_raw() as u8);
        Self {
            count: count as u64,
            rank,
            packed: (function as u32) << FUNCTION | data_type << DATA_TYPE,
        }
    }

    /// Returns the same operation with the operator `op`.
    #[inline]
    pub(crate) fn reducing_with(self, op: sys::ncclRedOp_t) -> Self {
        self.reducing(reduction(self.function(), op))
    }

    fn reducing(self, reduction: Option<RecordedReduction>) -> Self {
        let code = match reduction {
            None => 0,
            Some(RecordedReduction::Op(op)) => 1 + op as u32,
            // An operator that the program made.
            Some(_) => 1 + ReduceOp::ALL.len() as u32,
        };
        Self {
            packed: self.packed | code << REDUCTION,
            ..self
        }
    }

    /// Returns the descriptor with copied or received fields; `None` if they are invalid.
    pub(crate) fn of(count: u64, rank: i32, packed: u32) -> Option<Self> {
        let is_known = usize::from(byte(packed, FUNCTION)) < Function::ALL.len()
            && usize::from(byte(packed, REDUCTION)) <= 1 + ReduceOp::ALL.len();
        is_known.then_some(Self {
            count,
            rank,
            packed,
        })
    }

    #[inline]
    pub(crate) fn function(&self) -> Function {
        match Function::ALL.get(usize::from(byte(self.packed, FUNCTION))) {
            Some(&function) => function,
            None => unreachable!("it was made from one"),
        }
    }

    #[inline]
    pub(crate) fn type_code(&self) -> u8 {
        byte(self.packed, DATA_TYPE)
    }

    #[inline]
    pub(crate) fn data_type(&self) -> DataType {
        DataType::from_raw(self.type_code().into())
    }

    pub(crate) fn reduction(&self) -> Option<RecordedReduction> {
        let code = usize::from(byte(self.packed, REDUCTION)).checked_sub(1)?;
        let own = ReduceOp::ALL.get(code).copied();
        Some(own.map_or(RecordedReduction::Made, RecordedReduction::Op))
    }

    pub(crate) fn is_message(&self) -> bool {
        self.packed < Self::AFTER_RECV
    }

    /// Whether all ranks call the operation, in the same order.
    pub(crate) fn is_collective(&self) -> bool {
        !self.is_message() && !self.is_one_sided()
    }

    fn is_one_sided(&self) -> bool {
        matches!(
            self.function(),
            Function::Put | Function::Signal | Function::WaitSignal
        )
    }

    /// Returns the other rank of a message or a one-sided operation; for a wait, the first rank that it waits for.
    pub(crate) fn peer(&self) -> Option<usize> {
        let rank = usize::try_from(self.rank).ok();
        rank.filter(|_| !self.is_collective())
    }

    /// The root of a collective that has one.
    pub(crate) fn root(&self) -> Option<usize> {
        let rank = usize::try_from(self.rank).ok();
        rank.filter(|_| self.function().has_root())
    }

    /// Whether NCCL implements the operation with a message of rank `own` to itself.
    #[inline]
    pub(crate) fn has_message_to(&self, own: usize) -> bool {
        match self.function() {
            Function::Send | Function::Recv | Function::Gather | Function::Scatter => {
                self.rank as usize == own
            }
            Function::AllToAll => true,
            _ => false,
        }
    }

    /// Returns the size of the elements in bytes; 0 for a type of unknown size.
    pub(crate) fn bytes(&self) -> u64 {
        let size = self.data_type().size_in_bytes().unwrap_or_default() as u64;
        self.count.saturating_mul(size)
    }
}

/// The form in which descriptors are sent to other ranks.
impl From<Descriptor> for (u64, i32, u32) {
    fn from(descriptor: Descriptor) -> Self {
        (descriptor.count, descriptor.rank, descriptor.packed)
    }
}

impl TryFrom<(u64, i32, u32)> for Descriptor {
    type Error = &'static str;

    fn try_from((count, rank, kind): (u64, i32, u32)) -> Result<Self, Self::Error> {
        Self::of(count, rank, kind).ok_or("an unknown operation")
    }
}

impl fmt::Display for Descriptor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = self.function().kind();
        match self.function() {
            Function::Signal => write!(f, "{kind}")?,
            Function::WaitSignal => write!(f, "{kind} for {}", self.count)?,
            _ => write!(f, "{kind} of {} {}", self.count, self.data_type())?,
        }
        match self.reduction() {
            None => {}
            Some(RecordedReduction::Op(op)) => write!(f, " ({op})")?,
            Some(_) => f.write_str(" with an operator of its own")?,
        }
        match self.root() {
            Some(root) => write!(f, " with root {root}"),
            None => Ok(()),
        }
    }
}

impl fmt::Debug for Descriptor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.peer() {
            Some(peer) => write!(f, "{self} with rank {peer}"),
            None => fmt::Display::fmt(self, f),
        }
    }
}

#[cfg(test)]
mod tests {
    use nccl_base::wire;

    use super::*;

    #[test]
    fn a_collective_or_messages_of_all_other_ranks_show_that_these_are_reached() {
        let recv = |peer, count| Descriptor::new(Function::Recv, count, DataType::Int8, peer);
        let one = |function| Descriptor::new(function, 1, DataType::Int8, 0);
        let reach = |operations: &[Descriptor]| reach_all(operations.iter(), 1, 4);
        for function in [
            Function::AllReduce,
            Function::AllGather,
            Function::ReduceScatter,
            Function::AllToAll,
        ] {
            assert!(reach(&[one(function)]));
        }
        assert!(!reach(&[one(Function::Broadcast), one(Function::Reduce)]));
        let gather = |root| Descriptor::new(Function::Gather, 1, DataType::Int8, root);
        assert!(reach(&[gather(1)]) && !reach(&[gather(0)]));
        assert!(reach(&[recv(0, 1), recv(2, 1), recv(3, 1)]));
        assert!(!reach(&[recv(0, 1), recv(1, 1), recv(2, 1), recv(2, 1)]));
        assert!(!reach(&[recv(0, 1), recv(2, 0), recv(3, 1)]));
        assert!(!reach(&[Descriptor::new(
            Function::AllReduce,
            0,
            DataType::Int8,
            0
        )]));
    }

    #[test]
    fn a_descriptor_tells_what_it_was_made_of() {
        for (code, function) in Function::ALL.into_iter().enumerate() {
            assert_eq!(function as usize, code);
            let one = Descriptor::new(function, 1, DataType::BFloat16, 3);
            let one = one.reducing_with(sys::ncclRedOp_t::ncclAvg);
            assert_eq!(
                (one.function(), one.data_type()),
                (function, DataType::BFloat16)
            );
            let reduces = function.name().contains("Reduce");
            let average = RecordedReduction::Op(ReduceOp::Avg);
            assert_eq!(one.reduction(), reduces.then_some(average));
            assert_eq!(
                one.is_message(),
                matches!(function, Function::Send | Function::Recv)
            );
            assert_eq!(wire::decode(&wire::encode(&one)), Ok(one));
        }
        for (code, op) in ReduceOp::ALL.into_iter().enumerate() {
            assert_eq!(op as usize, code);
        }
        let made = sys::ncclRedOp_t(99);
        let one = Descriptor::new(Function::Reduce, 1, DataType::Int8, 0).reducing_with(made);
        assert_eq!(one.reduction(), Some(RecordedReduction::Made));
        assert!(wire::decode::<Descriptor>(&wire::encode(&(1u64, 0i32, u32::MAX))).is_err());
        assert_eq!(size_of::<Descriptor>(), 16);
    }
}
