//! The smallest program: an all-reduce that sums a value of each rank.
//!
//! ```text
//! cargo run --release --example hello_all_reduce
//! ```

use std::error::Error;
use std::process::ExitCode;

use nccl::{ReduceOp, World};

fn main() -> ExitCode {
    // Two processes on this host; under nccl-run, srun or mpirun, as many as the launcher has started.
    nccl::launch::local_ranks(2, rank)
}

fn rank(world: &World) -> Result<(), Box<dyn Error>> {
    // Only for machines without a GPU: without this line NVIDIA's driver and libnccl are needed.
    nccl_emulator::install_unless_gpu()?;
    let stream = nccl::device(world.local_rank())?.new_stream()?;
    let comm = world.communicator("hello").stream(&stream).build()?;

    let mine = vec![world.rank() as f32 + 1.0; 4];
    let mut sum = stream.clone_htod(&mine)?;
    comm.all_reduce_in_place(&mut sum, ReduceOp::Sum)?.wait()?;

    println!("{mine:?} became {:?}", stream.clone_dtoh(&sum)?);
    Ok(())
}
