//! A program that is its own launcher on one host.

use std::error::Error as StdError;
use std::io::Write as _;
use std::process::{Command, ExitCode};

use nccl_base::error::{Error, Result};
use nccl_control::is_launched;

use crate::launch::{Fleet, Output};
use crate::{Rendezvous, World};

/// Runs `rank` as one of the ranks of a job, and returns the exit code for `main`.
///
/// Under a launcher (`nccl-run`, `srun`, `mpirun`, `torchrun`, …) this process is the rank that the launcher assigned,
/// and `ranks` is ignored. Without one, this process starts the program `ranks` times on this host, with the same
/// arguments, prefixes their output with the rank, and waits for all of them: for examples, and programs that run on
/// the GPUs of one host.
///
/// An error of `rank` is printed to standard error with its sources, and sent to the other ranks: their operations end
/// with an error that names it. Ranks that can continue without a failed rank are left running.
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
    // If the variables of a launcher cannot be read, that is an error, and starts no other ranks.
    if is_launched() {
        return run(rank);
    }
    start(ranks).unwrap_or_else(|error| {
        print(&error);
        ExitCode::FAILURE
    })
}

/// Prints an error with its sources. Standard error may be closed.
fn print(error: &(dyn StdError + 'static)) {
    let mut text = format!("{error:#}");
    // Errors of this crate have their sources in their text.
    if !error.is::<Error>() {
        let mut source = error.source();
        while let Some(error) = source {
            text.push_str(&format!(": {error}"));
            source = error.source();
        }
    }
    let _ = writeln!(std::io::stderr(), "{text}");
}

fn run(rank: impl FnOnce(&World) -> std::result::Result<(), Box<dyn StdError>>) -> ExitCode {
    let world = match Rendezvous::from_env().and_then(World::join) {
        Ok(world) => world,
        Err(error) => {
            print(&error);
            return ExitCode::FAILURE;
        }
    };
    match rank(&world) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Tells the other ranks first: printing may take long.
            world.fail(&*error);
            print(&*error);
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
            let _ = writeln!(std::io::stderr(), "{first}");
            ExitCode::FAILURE
        }
    })
}
