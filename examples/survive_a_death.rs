//! One of three ranks dies during the work; the other two learn which one, and continue.
//!
//! ```text
//! cargo run --release --example survive_a_death
//! ```

use std::error::Error;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use nccl::cudarc::driver::CudaStream;
use nccl::{Communicator, ReduceOp, Rendezvous, World};

fn main() -> ExitCode {
    let code = nccl::launch::local_ranks(3, rank);
    match Rendezvous::from_env() {
        Ok(_) => code,
        // This is the process that started the ranks, one of which died on purpose.
        Err(_) => ExitCode::SUCCESS,
    }
}

fn rank(world: &World) -> Result<(), Box<dyn Error>> {
    nccl_emulator::install_unless_gpu()?;
    let stream = nccl::device(world.local_rank())?.new_stream()?;
    let comm = world.communicator("work").stream(&stream).build()?;
    for step in 0.. {
        if (world.rank(), step) == (1, 100) {
            std::process::abort();
        }
        match sum(&comm, &stream) {
            Ok(sum) => assert_eq!(sum, world.size() as f32),
            Err(error) => {
                // The error is the same on all remaining ranks, and arrives within milliseconds.
                println!("step {step}: {error}");
                break;
            }
        }
    }
    // The processes, their devices and their memory stay; ranks and communicators are new.
    let world = world.next_generation(Duration::from_secs(20))?;
    let comm = world.communicator("work").stream(&stream).build()?;
    assert_eq!(sum(&comm, &stream)?, world.size() as f32);
    println!("goes on as rank {} of {}", world.rank(), world.size());
    Ok(())
}

fn sum(comm: &Communicator, stream: &Arc<CudaStream>) -> Result<f32, Box<dyn Error>> {
    let mut y = stream.clone_htod(&[1.0f32; 1000])?;
    comm.all_reduce_in_place(&mut y, ReduceOp::Sum)?.wait()?;
    Ok(stream.clone_dtoh(&y)?[999])
}
