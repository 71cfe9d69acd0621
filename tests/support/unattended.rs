//! Operations that nobody waits for, and what ends them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use nccl::cudarc::driver::CudaStream;
use nccl::{Communicator, CommunicatorBuilder, ReduceOp, World};

use crate::support;

pub(crate) type Outcome<T = ()> = Result<T, Box<dyn std::error::Error>>;

/// Long enough for a loaded machine, far below any of the limits that would be waited for otherwise.
pub(crate) const SOON: Duration = Duration::from_secs(15);

/// Of an operation.
pub(crate) const LIMIT: Duration = Duration::from_millis(400);

/// This rank's stream, and a communicator of all ranks on it that are connected to each other.
pub(crate) fn start(
    world: &World,
    limits: impl FnOnce(CommunicatorBuilder<'_>) -> CommunicatorBuilder<'_>,
) -> Result<(Arc<CudaStream>, Communicator), Box<dyn std::error::Error>> {
    let stream = support::device(world)?.new_stream()?;
    let comm = limits(world.communicator("test").stream(&stream)).build()?;
    comm.warm_up(SOON)?;
    Ok((stream, comm))
}

/// An operation whose request is dropped at once.
pub(crate) fn unattended(comm: &Communicator) -> Outcome {
    let mut y = comm.stream().alloc_zeros::<f32>(64)?;
    comm.all_reduce_in_place(&mut y, ReduceOp::Sum)?;
    Ok(())
}

/// Waits until the communicator is ended, without asking it for anything. What it was ended for.
pub(crate) fn fault(comm: &Communicator) -> Result<nccl::Fault, Box<dyn std::error::Error>> {
    let begun = Instant::now();
    loop {
        if let Some(fault) = comm.fault() {
            return Ok(fault);
        }
        if begun.elapsed() > SOON {
            return Err("nothing ended the communicator".into());
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}
