//! Operations that no thread waits for, and what ends them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use nccl::cudarc::driver::CudaStream;
use nccl::{Communicator, CommunicatorBuilder, ReduceOp, World};

use crate::support;

pub(crate) type Outcome<T = ()> = Result<T, Box<dyn std::error::Error>>;

/// Long enough for a loaded machine, far below any of the timeouts.
pub(crate) const SOON: Duration = Duration::from_secs(15);

/// The timeout of an operation.
pub(crate) const TIMEOUT: Duration = Duration::from_millis(400);

/// This rank's stream, and a communicator of all ranks on it, connected.
pub(crate) fn start(
    world: &World,
    timeouts: impl FnOnce(CommunicatorBuilder<'_>) -> CommunicatorBuilder<'_>,
) -> Result<(Arc<CudaStream>, Communicator), Box<dyn std::error::Error>> {
    let stream = support::device(world)?.new_stream()?;
    let comm = timeouts(world.communicator("test").stream(&stream)).build()?;
    comm.warm_up(SOON)?;
    Ok((stream, comm))
}

/// An operation whose request is dropped at once.
pub(crate) fn unattended(comm: &Communicator) -> Outcome {
    let mut y = comm.stream().alloc_zeros::<f32>(64)?;
    comm.all_reduce_in_place(&mut y, ReduceOp::Sum)?;
    Ok(())
}

/// Waits until the communicator has ended, without a call on it; returns the fault.
pub(crate) fn fault(comm: &Communicator) -> Result<nccl::fault::Fault, Box<dyn std::error::Error>> {
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
