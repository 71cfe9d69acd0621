//! Connects all pairs of ranks at a time that the program chooses.

use std::time::{Duration, Instant};

use super::algorithm::Algorithm;
use crate::communicator::Communicator;
use crate::cuda_driver;
use crate::error::{Error, Result};
use crate::forked;
use nccl_base::env_timeouts;
use nccl_base::reduce_op::ReduceOp;

/// Connects this rank with all others, and waits for that, at most for `timeout`.
pub(super) fn warm_up(comm: &Communicator, timeout: Duration) -> Result<()> {
    forked::check()?;
    let started = Instant::now();
    let timeout = env_timeouts::operation(timeout);
    let left = || match timeout {
        Duration::MAX => timeout,
        _ => timeout.saturating_sub(started.elapsed()),
    };
    // Uses a stream of its own, so that this neither waits for work on the program's stream nor includes it in the
    // time.
    let context = &comm.inner.context;
    let stream = cuda_driver::ignoring_stored_error(context, || context.new_stream())
        .map_err(Error::cuda("creating a stream (cuStreamCreate)"))?;
    let comm = comm.on(&stream).within(timeout);
    let zeros = |n| {
        cuda_driver::ignoring_stored_error(context, || stream.alloc_zeros::<u8>(n))
            .map_err(Error::cuda("allocating memory for the first messages"))
    };
    let x = zeros(comm.world_size())?;
    let mut y = zeros(comm.world_size())?;
    // The messages connect all pairs; collectives have connections of their own.
    comm.all_to_all_with(&x, &mut y, Algorithm::Grouped)?;
    let comm = Communicator {
        timeout: left(),
        ..comm
    };
    let done = comm.all_reduce_in_place(&mut y, ReduceOp::Max)?;
    done.with_timeout(left()).wait()
}
