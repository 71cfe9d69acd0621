//! A program that is its own launcher on one host.

use std::error::Error as StdError;
use std::process::{Command, ExitCode};

use nccl_base::error::{Error, Result};
use nccl_control::launched_rank;

use crate::launch::{Fleet, Output};
use crate::{Rendezvous, World};

/// Runs `rank` as one of the ranks of a job, and returns the exit code for `main`.
///
/// Under a launcher (`nccl-run`, `srun`, `mpirun`, `torchrun`, …) this process is the rank that the launcher says, and `ranks` is
/// ignored. Without one, this process starts the program `ranks` times on this host, with the same arguments, prefixes their output
/// with the rank, and waits for all of them: for examples, and programs that run on the GPUs of one host.
///
/// An error of `rank` goes to standard error, whole, and to the other ranks: their operations end, and name it. Ranks that can go on
/// without one that failed are left alone.
///
/// The exit code is 0 if all ranks succeed, and 1 otherwise.
///
/// ```no_run
/// use std::error::Error;
/// use std::process::ExitCode;
///
/// use nccl::{ReduceOp, World};
///
/// fn rank(world: &World) -> Result<(), Box<dyn Error>> {
///     let stream = nccl::device(world.local_rank())?.new_stream()?;
///     let comm = world.communicator("sum").stream(&stream).build()?;
///     let mut y = stream.clone_htod(&[1.0f32; 4])?;
///     comm.all_reduce_in_place(&mut y, ReduceOp::Sum)?.wait()?;
///     println!("{:?}", stream.clone_dtoh(&y)?);
///     Ok(())
/// }
///
/// fn main() -> ExitCode {
///     nccl::launch::local_ranks(4, rank)
/// }
/// ```
pub fn local_ranks<F>(ranks: usize, rank: F) -> ExitCode
where
    F: FnOnce(&World) -> std::result::Result<(), Box<dyn StdError>>,
{
    let outcome = match launched_rank() {
        Ok(None) => start(ranks),
        Ok(Some(_)) => return run(rank),
        Err(error) => Err(error),
    };
    outcome.unwrap_or_else(|error| {
        eprintln!("{error:#}");
        ExitCode::FAILURE
    })
}

fn run(rank: impl FnOnce(&World) -> std::result::Result<(), Box<dyn StdError>>) -> ExitCode {
    let world = match Rendezvous::from_env().and_then(World::join) {
        Ok(world) => world,
        Err(error) => {
            eprintln!("{error:#}");
            return ExitCode::FAILURE;
        }
    };
    match rank(&world) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error:#}");
            world.fail(&*error);
            ExitCode::FAILURE
        }
    }
}

fn start(ranks: usize) -> Result<ExitCode> {
    let program = std::env::current_exe().map_err(Error::io("finding this program's own file"))?;
    let arguments: Vec<_> = std::env::args_os().skip(1).collect();
    let fleet = Fleet::builder(ranks)
        .with(|fleet| {
            fleet.output = Output::Prefixed;
            fleet.keep_others = true;
        })
        .start(move |_| {
            let mut command = Command::new(&program);
            command.args(&arguments);
            command
        })?;
    let report = fleet.wait();
    Ok(match &report.first {
        None => ExitCode::SUCCESS,
        Some(first) => {
            eprintln!("{first}");
            ExitCode::FAILURE
        }
    })
}
