//! A block of data goes around a ring: each rank sends to the next and receives from the one before, at the same time.
//!
//! ```text
//! cargo run --release --example ring_sendrecv
//! ```

use std::error::Error;
use std::process::ExitCode;

use nccl::World;

fn main() -> ExitCode {
    nccl::launch::local_ranks(4, rank)
}

fn rank(world: &World) -> Result<(), Box<dyn Error>> {
    nccl_emulator::install_unless_gpu()?;
    let stream = nccl::device(world.local_rank())?.new_stream()?;
    let comm = world.communicator("ring").stream(&stream).build()?;
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let (next, previous) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);

    let mut block = stream.clone_htod(&[rank as u32; 1024])?;
    let mut received = stream.alloc_zeros::<u32>(1024)?;
    for _ in 0..ranks {
        // One group: both messages progress together. A send that had to finish before the receive begins would wait for ever,
        // because every rank would be in its send.
        comm.group(|group| {
            group.isend(&block, next)?;
            group.irecv(&mut received, previous)
        })?;
        // The next round is queued behind this one on the stream, so the host does not wait.
        std::mem::swap(&mut block, &mut received);
    }

    assert_eq!(stream.clone_dtoh(&block)?, [rank as u32; 1024]);
    println!("its block is back after {ranks} rounds");
    Ok(())
}
