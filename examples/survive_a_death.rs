//! One of three ranks dies during the work; the other two learn which one, and continue.
//!
//! ```text
//! cargo run --release --example survive_a_death
//! ```

use std::error::Error;
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::time::Duration;

use nccl::cudarc::driver::CudaStream;
use nccl::launch::{Fleet, Output, Signal};
use nccl::{Communicator, ReduceOp, Rendezvous, World};

const RANKS: usize = 3;

fn main() -> ExitCode {
    // A rank, started below or by a launcher: `nccl-run -n 3 --keep-others -- survive_a_death`.
    if std::env::args().any(|word| word == "rank") || Rendezvous::from_env().is_ok() {
        return nccl::launch::local_ranks(RANKS, rank);
    }
    start().unwrap_or_else(|error| {
        eprintln!("{error}");
        ExitCode::FAILURE
    })
}

/// Starts the ranks, and checks that rank 1 alone has died.
fn start() -> Result<ExitCode, Box<dyn Error>> {
    let program = std::env::current_exe()?;
    let fleet = Fleet::builder(RANKS).with(|fleet| {
        fleet.output = Output::Prefixed;
        fleet.keep_others = true;
    });
    let fleet = fleet.start(move |_| {
        let mut command = Command::new(&program);
        command.arg("rank");
        command
    })?;
    let Some(report) = fleet.wait_timeout(Duration::from_secs(60)) else {
        fleet.kill();
        return Err("the ranks have not ended within a minute".into());
    };
    let as_planned = report.ranks.iter().all(|end| match end.rank {
        1 => end.exit.signal() == Some(Signal::Abrt),
        _ => end.exit.is_success(),
    });
    if !as_planned {
        return Err(report.to_string().into());
    }
    Ok(ExitCode::SUCCESS)
}

fn rank(world: &World) -> Result<(), Box<dyn Error>> {
    if world.size() < 2 {
        return Err("this needs at least two ranks: rank 1 dies".into());
    }
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
