//! Recorded operations, and the C calls that they become.
//!
//! An operation is recorded with the addresses of its buffers when it is called, and issued from here:
//! alone, or several between one group start and one group end. Nothing else in this crate puts work on
//! a stream through NCCL.

use std::ffi::{c_int, c_void};

use nccl_sys as sys;

use crate::communicator::Calls;
use crate::dtype::DataType;
use crate::error::NcclFailure;
use crate::ffi::{self, Progress};
use crate::library::Library;
use crate::operation::OperationKind;
use crate::reduce::ReduceOp;
use crate::stats::{Tally, Volume};
use crate::supervision::recorder::{Operation, RecordedReduction, Room, Writer};

/// Which C function.
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
}

impl Reduced {
    /// By their codes.
    pub(crate) const ALL: [Self; 7] = [
        Self::Not,
        Self::Sum,
        Self::Prod,
        Self::Max,
        Self::Min,
        Self::Avg,
        Self::Made,
    ];

    /// What an operation of `function` reduces with, if it is asked to with `op`.
    #[inline]
    pub(crate) fn of(function: Function, op: sys::ncclRedOp_t) -> Self {
        match (function, op) {
            (Function::AllReduce | Function::Reduce | Function::ReduceScatter, op) => match op {
                sys::ncclRedOp_t::ncclSum => Self::Sum,
                sys::ncclRedOp_t::ncclProd => Self::Prod,
                sys::ncclRedOp_t::ncclMax => Self::Max,
                sys::ncclRedOp_t::ncclMin => Self::Min,
                sys::ncclRedOp_t::ncclAvg => Self::Avg,
                _ => Self::Made,
            },
            _ => Self::Not,
        }
    }

    /// As recordings and errors name it.
    #[inline]
    pub(crate) fn recorded(self) -> Option<RecordedReduction> {
        Some(RecordedReduction::Op(match self {
            Self::Not => return None,
            Self::Made => return Some(RecordedReduction::Made),
            Self::Sum => ReduceOp::Sum,
            Self::Prod => ReduceOp::Prod,
            Self::Max => ReduceOp::Max,
            Self::Min => ReduceOp::Min,
            Self::Avg => ReduceOp::Avg,
        }))
    }
}

impl Function {
    /// By their codes.
    #[doc(hidden)]
    pub const ALL: [Self; 10] = [
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
    ];

    /// The operation that it does.
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
        }
    }

    fn name(self) -> &'static str {
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
        }
    }
}

/// One operation; all there is of a message. Its addresses are valid as long as the frame in which it
/// lies. Small, because groups hold hundreds of them.
#[derive(Clone, Copy, Debug)]
#[doc(hidden)]
pub struct Recorded {
    /// The address of a message; what a collective reads, null where the rank reads nothing.
    pub(crate) address: u64,
    /// Elements, as the C function counts them.
    pub(crate) count: usize,
    /// The peer or root.
    pub(crate) rank: i32,
    /// Function, type and operator, as the recorder keeps them; [`Kind`] says how.
    kind: u32,
}

/// An operator, as far as the recorder tells them apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Reduced {
    /// Nothing is reduced.
    Not,
    Sum,
    Prod,
    Max,
    Min,
    Avg,
    /// An operator that the program made.
    Made,
}

/// What a collective has besides.
#[derive(Clone, Copy, Debug)]
pub(crate) struct More {
    /// The address to write; null where the rank writes nothing.
    pub(crate) recv: u64,
    pub(crate) op: sys::ncclRedOp_t,
}

/// Operations that are issued together.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Batch<'f> {
    /// In the order in which they are issued.
    pub(crate) recorded: &'f [Recorded],
    /// For each of them that is a collective, in the same order.
    pub(crate) more: &'f [More],
    /// Whether a single operation has to be a group as well.
    pub(crate) grouped: bool,
}

impl Recorded {
    /// A message to (`Function::Send`) or from (`Function::Recv`) the peer `rank`, or a collective with
    /// the root `rank`, which reads at `address`.
    #[inline]
    #[doc(hidden)]
    pub fn new(
        function: Function,
        address: u64,
        count: usize,
        data_type: DataType,
        rank: i32,
    ) -> Self {
        // The type's code fits for all whose size is known, and no others get here.
        let data_type = u32::from(data_type.as_raw() as u8);
        Self {
            address,
            count,
            rank,
            kind: (function as u32) << FUNCTION | data_type << DATA_TYPE,
        }
    }

    /// The same with an operator.
    pub(crate) fn reducing_with(self, op: sys::ncclRedOp_t) -> Self {
        let reduction = Reduced::of(self.function(), op);
        Self {
            kind: self.kind | (reduction as u32) << REDUCTION,
            ..self
        }
    }

    /// The word of which [`Kind`] is made.
    pub(crate) fn kind(&self) -> u32 {
        self.kind
    }

    #[inline]
    pub(crate) fn function(&self) -> Function {
        match Function::ALL.get(usize::from(byte(self.kind, FUNCTION))) {
            Some(&function) => function,
            None => unreachable!("it was made from one"),
        }
    }

    #[inline]
    pub(crate) fn data_type(&self) -> DataType {
        DataType::from_raw(byte(self.kind, DATA_TYPE).into())
    }

    /// Whether NCCL makes a message of rank `own` to itself for it.
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

    /// Counts a collective.
    #[inline]
    fn count_in(&self, tally: &Tally) {
        tally.operation(self.function(), byte(self.kind, DATA_TYPE), self.count);
    }

    /// Counts it for each launch of a plan.
    pub(crate) fn add_to(&self, volume: &mut Volume) {
        volume.add(self.function(), byte(self.kind, DATA_TYPE), self.count);
    }

    /// Makes the C call.
    fn call(&self, more: Option<&More>, calls: &Calls<'_>) -> Result<Progress, NcclFailure> {
        let api = calls.library.api();
        let (comm, stream) = (calls.comm, calls.stream);
        let recv = more.map_or(self.address, |more| more.recv);
        let op = more.map_or(sys::ncclRedOp_t::ncclSum, |more| more.op);
        let (send, recv) = (self.address as *const c_void, recv as *mut c_void);
        let (count, rank): (usize, c_int) = (self.count, self.rank);
        let data_type = self.data_type().raw();
        // SAFETY: for each: the function is NCCL's of that name; the addresses are valid for what it
        // reads and writes (the length rules, checked when the operation was recorded) until the work
        // is done on the stream, which the order of streams sees to, and nothing else accesses what is
        // written; communicator and stream are alive.
        let code = unsafe {
            match self.function() {
                Function::Send => api
                    .ncclSend
                    .map(|f| f(send, count, data_type, rank, comm, stream)),
                Function::Recv => api
                    .ncclRecv
                    .map(|f| f(recv, count, data_type, rank, comm, stream)),
                Function::AllReduce => api
                    .ncclAllReduce
                    .map(|f| f(send, recv, count, data_type, op, comm, stream)),
                Function::Broadcast => api
                    .ncclBroadcast
                    .map(|f| f(send, recv, count, data_type, rank, comm, stream)),
                Function::Reduce => api
                    .ncclReduce
                    .map(|f| f(send, recv, count, data_type, op, rank, comm, stream)),
                Function::AllGather => api
                    .ncclAllGather
                    .map(|f| f(send, recv, count, data_type, comm, stream)),
                Function::ReduceScatter => api
                    .ncclReduceScatter
                    .map(|f| f(send, recv, count, data_type, op, comm, stream)),
                Function::AllToAll => api
                    .ncclAlltoAll
                    .map(|f| f(send, recv, count, data_type, comm, stream)),
                Function::Gather => api
                    .ncclGather
                    .map(|f| f(send, recv, count, data_type, rank, comm, stream)),
                Function::Scatter => api
                    .ncclScatter
                    .map(|f| f(send, recv, count, data_type, rank, comm, stream)),
            }
        };
        match code {
            Some(code) => ffi::check(calls.library, self.function().name(), code),
            None => Err(ffi::missing(calls.library, self.function().name())),
        }
    }
}

/// The bits at which the parts of a kind begin. The function lies highest, so that one comparison tells it.
const FUNCTION: u32 = 24;
const DATA_TYPE: u32 = 0;
const REDUCTION: u32 = 8;

#[inline]
fn byte(kind: u32, at: u32) -> u8 {
    (kind >> at) as u8
}

/// What the recorder keeps in one word of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Kind {
    pub(crate) function: Function,
    pub(crate) data_type: DataType,
    pub(crate) reduction: Reduced,
}

impl Kind {
    /// `None` for a word that no operation has.
    pub(crate) fn of(word: u32) -> Option<Self> {
        Some(Self {
            function: *Function::ALL.get(usize::from(byte(word, FUNCTION)))?,
            data_type: DataType::from_raw(byte(word, DATA_TYPE).into()),
            reduction: *Reduced::ALL.get(usize::from(byte(word, REDUCTION)))?,
        })
    }
}

/// Makes the calls for `batch`: one alone, several between group start and group end.
#[inline]
pub(crate) fn call(
    batch: Batch<'_>,
    calls: &Calls<'_>,
    writer: &mut Writer,
) -> Result<Progress, NcclFailure> {
    match batch.recorded {
        [] => Ok(Progress::Done),
        [alone] if !batch.grouped => {
            let Room { slots, tally } = writer.room(1);
            if let [slot] = slots {
                slot.write(alone.count, alone.rank, alone.kind, 0);
            }
            alone.count_in(tally);
            writer.called(1);
            alone.call(batch.more.first(), calls)
        }
        _ => group(calls.library, || call_each(batch, calls, writer)),
    }
}

/// Makes the calls for `batch`, inside of a group.
pub(crate) fn call_each(
    batch: Batch<'_>,
    calls: &Calls<'_>,
    writer: &mut Writer,
) -> Result<(), NcclFailure> {
    let api = calls.library.api();
    // Looked up once: a group may hold hundreds of messages.
    let (Some(send), Some(recv)) = (api.ncclSend, api.ncclRecv) else {
        return Err(ffi::missing(calls.library, "ncclSend"));
    };
    let mut caller = Caller {
        calls,
        send,
        recv,
        more: batch.more.iter(),
    };
    let mut rest = batch.recorded;
    while !rest.is_empty() {
        let room = writer.room(rest.len());
        let (part, after) = rest.split_at(room.slots.len());
        match caller.call(part, room.slots, room.tally) {
            Ok(()) => writer.called(part.len()),
            Err((called, failure)) => {
                writer.called(called);
                return Err(failure);
            }
        }
        rest = after;
    }
    Ok(())
}

type Send = unsafe extern "C" fn(
    *const c_void,
    usize,
    sys::ncclDataType_t,
    c_int,
    sys::ncclComm_t,
    sys::cudaStream_t,
) -> sys::ncclResult_t;
type Recv = unsafe extern "C" fn(
    *mut c_void,
    usize,
    sys::ncclDataType_t,
    c_int,
    sys::ncclComm_t,
    sys::cudaStream_t,
) -> sys::ncclResult_t;

struct Caller<'c> {
    calls: &'c Calls<'c>,
    send: Send,
    recv: Recv,
    more: std::slice::Iter<'c, More>,
}

impl Caller<'_> {
    /// Writes each operation into its slot and makes its call. A failure comes with the number of calls
    /// that were made, it included.
    // Never: with what its caller keeps besides there are too few registers.
    #[inline(never)]
    fn call(
        &mut self,
        recorded: &[Recorded],
        slots: &[Operation],
        tally: &Tally,
    ) -> Result<(), (usize, NcclFailure)> {
        // Below which a kind is a message to a peer, or at least one from it.
        const SEND: u32 = (Function::Send as u32 + 1) << FUNCTION;
        const RECV: u32 = (Function::Recv as u32 + 1) << FUNCTION;
        let calls = self.calls;
        let (comm, stream) = (calls.comm, calls.stream);
        let failed = |one: &Recorded, failure| (position(recorded, one) + 1, failure);
        let mut slots = slots.iter();
        for one in recorded {
            let Some(slot) = slots.next() else { break };
            let &Recorded {
                address,
                count,
                rank,
                kind,
            } = one;
            let type_code = byte(kind, DATA_TYPE);
            let data_type = sys::ncclDataType_t(type_code.into());
            let code = if kind < SEND {
                let number = tally.messages.next_sent(rank, type_code, count);
                slot.write(count, rank, kind, number);
                let address = address as *const c_void;
                // SAFETY: as in `Recorded::call`.
                unsafe { (self.send)(address, count, data_type, rank, comm, stream) }
            } else if kind < RECV {
                let number = tally.messages.next_received(rank, type_code, count);
                slot.write(count, rank, kind, number);
                let address = address as *mut c_void;
                // SAFETY: as in `Recorded::call`.
                unsafe { (self.recv)(address, count, data_type, rank, comm, stream) }
            } else {
                slot.write(count, rank, kind, 0);
                one.count_in(tally);
                one.call(self.more.next(), calls)
                    .map_err(|failure| failed(one, failure))?;
                continue;
            };
            if code != sys::ncclResult_t::ncclSuccess {
                looked_up(calls, one, code).map_err(|failure| failed(one, failure))?;
            }
        }
        Ok(())
    }
}

/// Where `one` lies in `recorded`. Not counted along, because it is asked only when a call failed.
#[cold]
fn position(recorded: &[Recorded], one: &Recorded) -> usize {
    (std::ptr::from_ref(one).addr() - recorded.as_ptr().addr()) / size_of::<Recorded>()
}

/// What a code that is no success means.
#[cold]
fn looked_up(
    calls: &Calls<'_>,
    one: &Recorded,
    code: sys::ncclResult_t,
) -> Result<Progress, NcclFailure> {
    ffi::check(calls.library, one.function().name(), code)
}

/// Makes `calls` between group start and group end. When one of them fails, the group is ended without
/// launching what was queued before it.
pub(crate) fn group(
    library: &Library,
    calls: impl FnOnce() -> Result<(), NcclFailure>,
) -> Result<Progress, NcclFailure> {
    let api = library.api();
    let (Some(start), Some(end)) = (api.ncclGroupStart, api.ncclGroupEnd) else {
        return Err(ffi::missing(library, "ncclGroupStart"));
    };
    // SAFETY: takes no arguments. A thread that is in a group already, which the program has opened with cudarc's `group_start`, is
    // one level deeper then, as NCCL allows; what that queues until the program closes its group is said in
    // docs/streams-and-memory.md.
    let code = unsafe { start() };
    ffi::check(library, "ncclGroupStart", code)?;
    let called = calls();
    if called.is_err() {
        poison(library);
    }
    // SAFETY: takes no arguments; closes the group opened above.
    let code = unsafe { end() };
    let ended = ffi::check(library, "ncclGroupEnd", code);
    called.and(ended)
}

/// A failed call does not always make the end of its group drop what was queued; a call on no
/// communicator does, and is refused by every release.
#[cold]
fn poison(library: &Library) {
    let Some(send) = library.api().ncclSend else {
        return;
    };
    // SAFETY: a null communicator is refused before any other argument is looked at.
    let _ = unsafe {
        send(
            std::ptr::null(),
            0,
            sys::ncclDataType_t::ncclInt8,
            0,
            std::ptr::null_mut(),
            std::ptr::null_mut(),
        )
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kind_survives_the_way_through_its_word() {
        for (code, function) in Function::ALL.into_iter().enumerate() {
            assert_eq!(function as usize, code);
            let one = Recorded::new(function, 0, 1, DataType::BFLOAT16, 3);
            let one = one.reducing_with(sys::ncclRedOp_t::ncclAvg);
            let kind = Kind::of(one.kind).unwrap();
            assert_eq!(
                (kind.function, kind.data_type),
                (function, DataType::BFLOAT16)
            );
            let reduces = function.name().contains("Reduce");
            let reduction = if reduces { Reduced::Avg } else { Reduced::Not };
            assert_eq!(kind.reduction, reduction);
        }
        for (code, reduced) in Reduced::ALL.into_iter().enumerate() {
            assert_eq!(reduced as usize, code);
        }
        assert_eq!(Kind::of(u32::MAX), None);
    }
}
