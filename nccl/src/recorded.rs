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

/// Which C function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Function {
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

impl Function {
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
pub(crate) struct Recorded {
    /// The address of a message; what a collective reads, null where the rank reads nothing.
    pub(crate) address: u64,
    /// Elements, as the C function counts them.
    pub(crate) count: usize,
    /// The peer or root.
    pub(crate) rank: i32,
    pub(crate) function: Function,
    /// The type's code, which fits for all whose size is known, and no others get here.
    data_type: u8,
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
    pub(crate) fn new(
        function: Function,
        address: u64,
        count: usize,
        data_type: DataType,
        rank: i32,
    ) -> Self {
        Self {
            address,
            count,
            rank,
            function,
            data_type: data_type.as_raw() as u8,
        }
    }

    pub(crate) fn data_type(&self) -> DataType {
        DataType::from_raw(self.data_type.into())
    }

    /// Whether NCCL makes a message of rank `own` to itself for it.
    #[inline]
    pub(crate) fn has_message_to(&self, own: usize) -> bool {
        match self.function {
            Function::Send | Function::Recv | Function::Gather | Function::Scatter => {
                self.rank as usize == own
            }
            Function::AllToAll => true,
            _ => false,
        }
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
            match self.function {
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
            Some(code) => ffi::check(calls.library, self.function.name(), code),
            None => Err(ffi::missing(calls.library, self.function.name())),
        }
    }
}

/// Makes the calls for `batch`: one alone, several between group start and group end.
pub(crate) fn call(batch: Batch<'_>, calls: &Calls<'_>) -> Result<Progress, NcclFailure> {
    match batch.recorded {
        [] => Ok(Progress::Done),
        [alone] if !batch.grouped => alone.call(batch.more.first(), calls),
        _ => group(calls.library, || call_each(batch, calls)),
    }
}

/// Makes the calls for `batch`, inside of a group.
pub(crate) fn call_each(batch: Batch<'_>, calls: &Calls<'_>) -> Result<(), NcclFailure> {
    let api = calls.library.api();
    // Looked up once: a group may hold hundreds of messages.
    let (Some(send), Some(recv)) = (api.ncclSend, api.ncclRecv) else {
        return Err(ffi::missing(calls.library, "ncclSend"));
    };
    let (comm, stream) = (calls.comm, calls.stream);
    let mut more = batch.more.iter();
    for one in batch.recorded {
        let (count, peer) = (one.count, one.rank);
        let data_type = sys::ncclDataType_t(one.data_type.into());
        let code = match one.function {
            // SAFETY: as in `Recorded::call`.
            Function::Send => unsafe {
                let address = one.address as *const c_void;
                send(address, count, data_type, peer, comm, stream)
            },
            // SAFETY: as in `Recorded::call`.
            Function::Recv => unsafe {
                let address = one.address as *mut c_void;
                recv(address, count, data_type, peer, comm, stream)
            },
            _ => {
                one.call(more.next(), calls)?;
                continue;
            }
        };
        if code != sys::ncclResult_t::ncclSuccess {
            looked_up(calls, one, code)?;
        }
    }
    Ok(())
}

/// What a code that is no success means.
#[cold]
fn looked_up(
    calls: &Calls<'_>,
    one: &Recorded,
    code: sys::ncclResult_t,
) -> Result<Progress, NcclFailure> {
    ffi::check(calls.library, one.function.name(), code)
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
    // SAFETY: takes no arguments; this thread is in no group, because groups are opened only here.
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
