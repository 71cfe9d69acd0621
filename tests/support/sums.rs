//! All-reduces whose result shows which ranks took part.

use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use nccl::cudarc::driver::CudaStream;
use nccl::fault::FaultClass;
use nccl::{Communicator, ReduceOp, World};

/// A communicator of all ranks, on a stream of its own.
pub fn start(
    world: &World,
    timeout: Duration,
) -> Result<(Arc<CudaStream>, Communicator), Box<dyn Error>> {
    let stream = super::device(world)?.new_stream()?;
    let comm = world
        .communicator("all")
        .stream(&stream)
        .with(|comm| comm.timeouts.operation = timeout);
    Ok((Arc::clone(&stream), comm.build()?))
}

/// The sum of 10 to the power of each rank.
pub fn sum(comm: &Communicator, stream: &Arc<CudaStream>) -> Result<f32, Box<dyn Error>> {
    let mut y = stream.clone_htod(&[10f32.powi(comm.rank() as i32); 100])?;
    comm.all_reduce_in_place(&mut y, ReduceOp::Sum)?.wait()?;
    Ok(stream.clone_dtoh(&y)?[99])
}

pub fn all_reduce(comm: &Communicator, stream: &Arc<CudaStream>) -> nccl::Result<()> {
    let mut y = stream.alloc_zeros::<f32>(1 << 12).expect("memory");
    comm.all_reduce_in_place(&mut y, ReduceOp::Sum)?.wait()
}

/// All-reduces until one fails; prints when it has begun, and how it ended.
pub fn work_until_the_end(comm: &Communicator, stream: &Arc<CudaStream>) {
    for turn in 0.. {
        if turn == 10 {
            println!("working");
        }
        if let Err(error) = all_reduce(comm, stream) {
            let fault = error.fault().expect("a cause that all ranks know");
            let text = format!("{error:#}");
            let is_gone = fault.class == FaultClass::Gone;
            assert!(
                !is_gone || !text.contains("left open"),
                "the dead write no more: {text}"
            );
            println!("ended: {:?} {fault}", fault.class);
            println!("error: {}", format!("{error:#}").replace('\n', " "));
            return;
        }
    }
}
