//! The operations that most programs use, on memory that is never freed.

use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::CudaStream;
use nccl_sys::{cudaStream_t, ncclDataType_t, ncclRedOp_t};

use super::{Address, Comm, Memory, Rank, Result, settle};
use crate::nccl_call;

/// A stream that is never destroyed, for any thread.
#[derive(Clone, Copy, Debug)]
pub struct Stream(Address);

impl Stream {
    /// Keeps the stream alive for good.
    #[must_use]
    pub fn of(stream: &Arc<CudaStream>) -> Self {
        std::mem::forget(Arc::clone(stream));
        Self(Address(stream.cu_stream().cast()))
    }

    /// For NCCL.
    #[must_use]
    pub fn raw(self) -> cudaStream_t {
        self.0.0.cast()
    }
}

/// `ncclAllReduce`.
pub fn all_reduce(
    comm: Comm,
    [x, y]: [Memory; 2],
    count: usize,
    (kind, op): (ncclDataType_t, ncclRedOp_t),
    stream: Stream,
) -> u32 {
    let (x, y) = (x.pointer(), y.pointer());
    nccl_call!(ncclAllReduce(x, y, count, kind, op, comm.0, stream.raw()))
}

/// `ncclSend` of the first `bytes`.
pub fn send(comm: Comm, memory: Memory, bytes: usize, peer: usize, stream: Stream) -> u32 {
    let (from, kind, peer) = (memory.pointer(), ncclDataType_t::ncclInt8, peer as i32);
    nccl_call!(ncclSend(from, bytes, kind, peer, comm.0, stream.raw()))
}

/// `ncclRecv` into the first `bytes`.
pub fn recv(comm: Comm, memory: Memory, bytes: usize, peer: usize, stream: Stream) -> u32 {
    let (to, kind, peer) = (memory.pointer(), ncclDataType_t::ncclInt8, peer as i32);
    nccl_call!(ncclRecv(to, bytes, kind, peer, comm.0, stream.raw()))
}

/// `ncclGroupStart`.
pub fn group_start() -> u32 {
    nccl_call!(ncclGroupStart())
}

/// `ncclGroupEnd`.
pub fn group_end() -> u32 {
    nccl_call!(ncclGroupEnd())
}

/// One send to and one receive from `peer` in a group; returns the code of the group's end.
pub fn exchange(comm: Comm, [x, y]: [Memory; 2], bytes: usize, peer: usize, stream: Stream) -> u32 {
    group_start();
    send(comm, x, bytes, peer, stream);
    recv(comm, y, bytes, peer, stream);
    group_end()
}

/// An exchange and an all-reduce between two ranks, waited for: they establish the connections for later operations.
///
/// # Errors
/// When they fail.
pub fn connect(rank: &Rank, comm: Comm) -> Result {
    let stream = Stream::of(&rank.stream);
    let memory = [rank.memory(&[1; 64])?, rank.memory(&[0; 64])?];
    let timeout = Duration::from_secs(60);
    let peer = (rank.world.rank() + 1) % rank.world.size();
    let sum = (ncclDataType_t::ncclInt32, ncclRedOp_t::ncclSum);
    for messages in [true, false] {
        let code = if messages {
            exchange(comm, memory, 64, peer, stream)
        } else {
            all_reduce(comm, memory, 16, sum, stream)
        };
        let code = settle(comm, code, timeout);
        if code != 0 {
            return Err(format!("the first exchange returned {code}").into());
        }
        if rank.ends_within(timeout) != Ok(true) {
            return Err("the first exchange does not end".into());
        }
    }
    Ok(())
}
