//! Compares the emulator's speed between processes with Open MPI, and with copies of the same bytes.
//!
//! ```text
//! cargo bench -p nccl-benches --bench against_mpi                        all of it; writes docs/results/against-mpi.md and .svg
//! cargo bench -p nccl-benches --bench against_mpi -- --output DIRECTORY --rounds 7 --min 1K --max 64M --ranks 2,4
//! ```
//!
//! Needs Open MPI and its compiler: Debian's openmpi-bin and libopenmpi-dev. This program builds
//! `benches/mpi/all_to_all.c`, and mpirun starts it.
//!
//! For each number of ranks there are two teams of processes, ours and MPI's, and with 2 ranks a third one: MPI that
//! does not send eagerly. Rank i of all is bound to the same core. They connect to this program and sleep until they
//! get the order to run an operation a number of times. For each operation and size, the emulator, MPI (both, for short
//! messages) and memcpy (by MPI's ranks, all at once) alternate, in a random order each round. A turn begins behind a
//! barrier, and lasts from when its first rank begins until its last is done. With 2 ranks the example program
//! `all_to_all_perf` takes turns as well: it is built, and started for each turn, with buffers of the same size; it
//! is compared with cycles of the C functions that are measured in the same way.
//!
//! If a limit of the page is missed, the exit code is 1, and each such limit is named with the sizes. The decision uses
//! the median over the rounds, in which the competitors alternate; there is no interval around it. A busy machine
//! misses limits that a quiet one meets: the page has the load before and after.
//!
//! - `operation`: the operations; `team`: processes that obey orders; `rank`: our ranks, `by_crate`: through the safe
//!   crate; `example`: the example program; `options`: the command line;
//! - `compare`: the measurements; `page`, `chart`: their output.

mod by_crate;
mod chart;
mod compare;
mod example;
mod operation;
mod options;
mod page;
mod rank;
mod root;
mod team;

use std::error::Error;
use std::path::Path;
use std::process::{Command, ExitCode};

use compare::Teams;
use example::Example;
use nccl_tools::machine;
use options::Options;
use team::Team;

type Outcome<T = ()> = Result<T, Box<dyn Error>>;

/// Marks a process as a rank of ours: its number, the number of ranks, and the bytes of a buffer.
const RANK: &str = "NCCL_AGAINST_MPI_RANK";
/// The socket of its orders.
const SOCKET: &str = "NCCL_AGAINST_MPI_SOCKET";

fn main() -> ExitCode {
    let outcome = match std::env::var(RANK) {
        Ok(role) => be_a_rank(&role),
        Err(_) => drive(),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("against_mpi: {error}");
            ExitCode::FAILURE
        }
    }
}

fn be_a_rank(role: &str) -> Outcome {
    let numbers: Result<Vec<usize>, _> = role.split(' ').map(str::parse).collect();
    let [rank, ranks, room] = numbers?[..] else {
        return Err(format!("{RANK}={role}: three numbers are needed").into());
    };
    rank::run(rank, ranks, room, &std::env::var(SOCKET)?, true)
}

fn drive() -> Outcome {
    let Some(options) = Options::parse()? else {
        return Ok(());
    };
    let (mpirun, mpicc) = (
        version("mpirun", "--version"),
        version("mpicc", "--version"),
    );
    let (Some(mpi), Some(compiler)) = (mpirun, mpicc) else {
        return Err(
            "mpirun or mpicc is missing, or does not run; both come with Open MPI. On Debian and Ubuntu:\n    \
             apt-get install openmpi-bin libopenmpi-dev"
                .into(),
        );
    };
    if !mpi.contains("Open MPI") {
        return Err(format!("mpirun is not that of Open MPI, but says {mpi:?}").into());
    }
    let directory = tempfile::Builder::new().prefix("against-mpi-").tempdir()?;
    let program = build(directory.path())?;
    let before = machine::load();
    let mut results = Vec::new();
    for &ranks in &options.ranks {
        let mpi = |name, more: &[&str]| {
            start_mpi(name, ranks, &options, directory.path(), &program, more)
        };
        let mut teams = Teams {
            ours: start_ours(ranks, &options, directory.path())?,
            theirs: mpi("Open MPI", &[])?,
            meeting: match ranks {
                2 => Some(mpi("Open MPI, not eager", &options::NOT_EAGER)?),
                _ => None,
            },
            example: match ranks {
                2 => Some(Example::build(ranks, &options, directory.path())?),
                _ => None,
            },
        };
        check_cores(ranks, &teams)?;
        results.extend(compare::all(ranks, &options, &mut teams)?);
    }
    let machine = page::Machine {
        mpi,
        compiler,
        before,
        after: machine::load(),
    };
    std::fs::create_dir_all(&options.output)?;
    let (text, picture) = (
        options.output.join("against-mpi.md"),
        options.output.join("against-mpi.svg"),
    );
    std::fs::write(&text, page::write(&options, &machine, &results))?;
    std::fs::write(&picture, chart::draw(&results))?;
    eprintln!("wrote {} and {}", text.display(), picture.display());
    match page::missed(&results)[..] {
        [] => Ok(()),
        ref missed => Err(format!("limits were missed:\n{}", missed.join("\n")).into()),
    }
}

/// The first line of a program's version output.
fn version(program: &str, option: &str) -> Option<String> {
    let output = Command::new(program).arg(option).output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout);
    output
        .status
        .success()
        .then(|| text.lines().next().unwrap_or("").to_owned())
}

/// Compiles the program for MPI.
fn build(directory: &Path) -> Outcome<std::path::PathBuf> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("mpi/all_to_all.c");
    let program = directory.join("all_to_all");
    let status = Command::new("mpicc")
        .args(["-O3", "-o"])
        .arg(&program)
        .arg(&source)
        .status()?;
    match status.success() {
        true => Ok(program),
        false => Err(format!("mpicc could not compile {}: {status}", source.display()).into()),
    }
}

fn start_ours(ranks: usize, options: &Options, directory: &Path) -> Outcome<Team> {
    let program = std::env::current_exe()?;
    let mut team = Team::start("emulator", ranks, directory, |socket| {
        let rank = |rank: usize| {
            let mut command = Command::new(&program);
            command
                .env(RANK, format!("{rank} {ranks} {}", options.max))
                .env(SOCKET, socket);
            command
        };
        (0..ranks).map(rank).collect()
    })?;
    let first = team.introductions().next().ok_or("no ranks")?;
    let id = first.rsplit(' ').next().ok_or("no id")?.to_owned();
    team.tell(&id)?;
    Ok(team)
}

fn start_mpi(
    name: &'static str,
    ranks: usize,
    options: &Options,
    directory: &Path,
    program: &Path,
    more: &[&str],
) -> Outcome<Team> {
    let cores = machine::cores()?.len();
    Team::start(name, ranks, directory, |socket| {
        let mut command = Command::new("mpirun");
        command
            .args(options::mpirun(ranks, cores))
            .args(more)
            .arg(program)
            .arg(socket)
            .arg(options.max.to_string());
        command.stdin(std::process::Stdio::null());
        vec![command]
    })
}

/// Checks that rank i of all teams is on the same core, and on that alone.
fn check_cores(ranks: usize, teams: &Teams) -> Outcome {
    let cores = machine::cores()?;
    let all = [("emulator", &teams.ours), ("Open MPI", &teams.theirs)].into_iter();
    for (name, team) in all.chain(teams.meeting.iter().map(|team| ("Open MPI", team))) {
        for (rank, introduction) in team.introductions().enumerate() {
            let bound = introduction.split(' ').next().unwrap_or("none");
            let expected = machine::core_of(rank, &cores).to_string();
            if bound != expected {
                return Err(format!(
                    "rank {rank} of {ranks} of {name} is bound to cores {bound}, not to {expected} alone: the two \
                     programs are not bound alike, and cannot be compared"
                )
                .into());
            }
        }
    }
    Ok(())
}
