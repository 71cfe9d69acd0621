//! Communicators with a configuration, and those made of them.

use std::ptr::null_mut;
use std::sync::Arc;

use super::{Rank, last_error, nccl};
use nccl_sys::{
    NCCL_CONFIG_INITIALIZER, ncclComm_t, ncclConfig_t, ncclDataType_t as Kind, ncclRedOp_t as Op,
};

pub(crate) fn config(change: impl FnOnce(&mut ncclConfig_t)) -> ncclConfig_t {
    let mut config = NCCL_CONFIG_INITIALIZER;
    change(&mut config);
    config
}

/// Creates a parent communicator with this configuration, and waits for its init.
pub(crate) fn parent(
    id: nccl_sys::ncclUniqueId,
    ranks: i32,
    rank: i32,
    mut config: ncclConfig_t,
) -> Rank {
    let mut this = Rank::alone(ranks, rank);
    let code = nccl!(ncclCommInitRankConfig(
        &mut this.comm,
        ranks,
        id,
        rank,
        &mut config
    ));
    assert!(matches!(code, 0 | 7), "{}", last_error());
    assert_eq!(this.settle(), 0, "{}", last_error());
    this
}

/// A rank with the numbers that `comm` reports, on the same device and stream as `of`.
pub(crate) fn described(of: &Rank, comm: ncclComm_t) -> Rank {
    let (mut rank, mut ranks) = (-1, -1);
    assert_eq!(nccl!(ncclCommUserRank(comm, &mut rank)), 0);
    assert_eq!(nccl!(ncclCommCount(comm, &mut ranks)), 0);
    Rank {
        rank,
        ranks,
        comm,
        gpu: Arc::clone(&of.gpu),
        stream: Arc::clone(&of.stream),
    }
}

/// Splits off a child with the parent's configuration.
pub(crate) fn split(parent: &Rank, color: i32, key: i32) -> Rank {
    let mut comm = null_mut();
    let code = nccl!(ncclCommSplit(
        parent.comm,
        color,
        key,
        &mut comm,
        null_mut()
    ));
    assert_eq!(code, 0, "{}", last_error());
    assert_eq!(parent.settle(), 0, "{}", last_error());
    described(parent, comm)
}

/// The sum of `value` over all ranks.
pub(crate) fn sum(rank: &Rank, value: i32) -> i32 {
    let memory = rank.memory(&[value]);
    let code = rank.all_reduce(&memory, &memory, Kind::ncclInt32, Op::ncclSum);
    assert!(matches!(code, 0 | 7), "{}", last_error());
    assert_eq!(rank.settle(), 0, "{}", last_error());
    rank.sync();
    memory.read()[0]
}
