//! Measures NVIDIA's own library on the emulator's driver, beside the emulator's own NCCL on the same driver.
//!
//! ```text
//! cargo xtask real-nccl run -- cargo bench -p nccl-benches --bench real_nccl        all of it; writes docs/results/real_nccl_figures.md
//! cargo xtask real-nccl run -- cargo bench -p nccl-benches --bench real_nccl -- --output DIRECTORY --rounds 7 --max 1M
//! ```
//!
//! Without `NCCL_EMULATOR_NCCL`, which that command sets, it reports that nothing was measured.
//!
//! For an init, the ranks of both are started alternately. For operations there are two teams of processes, rank i of
//! both bound to the same core; they sleep until they get the order to run an operation a number of times, and
//! alternate, in another order each round. A turn begins behind a barrier, and lasts from when its first rank begins
//! until its last is done. Every operation is checked, element by element, before it is timed.

#[path = "../against_mpi/by_crate.rs"]
mod by_crate;
#[path = "../against_mpi/operation.rs"]
mod operation;
mod page;
#[path = "../against_mpi/rank.rs"]
mod rank;
#[path = "../against_mpi/root.rs"]
mod root;
#[path = "../against_mpi/team.rs"]
mod team;

use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Instant;

use lexopt::Arg::Long;
use nccl_tools::machine;
use operation::Operation;
use root::root;
use team::Team;

type Outcome<T = ()> = Result<T, Box<dyn Error>>;

/// Marks a process as a rank: its number, the number of ranks, and the bytes of a buffer.
const RANK: &str = "NCCL_REAL_FIGURES_RANK";
/// The socket of its orders.
const SOCKET: &str = "NCCL_REAL_FIGURES_SOCKET";
/// The library for the emulator's driver.
const LIBRARY: &str = "NCCL_EMULATOR_NCCL";
/// Bytes of a buffer where only an init is measured.
const SMALL: usize = 4 << 10;
/// Numbers of ranks whose init is measured.
const INIT_RANKS: [usize; 2] = [2, 8];
/// Ranks of operations.
const RANKS: usize = 4;
const OPERATIONS: [Operation; 2] = [Operation::AllToAll, Operation::AllReduce];
/// The duration of a turn in seconds.
const TURN: f64 = 0.02;

const USAGE: &str = "\
cargo xtask real-nccl run -- cargo bench -p nccl-benches --bench real_nccl [-- OPTIONS]
    --output DIRECTORY   where real_nccl_figures.md goes (docs/results of this repository)
    --rounds N           turns of each (15; at least 3)
    --max BYTES          the largest size, in K or M (16M); from 1K, each four times the last";

/// See [`USAGE`].
struct Options {
    output: PathBuf,
    rounds: usize,
    max: usize,
    command: String,
}

impl Options {
    /// `None`: help was requested.
    fn parse() -> Outcome<Option<Self>> {
        let mut options = Self {
            output: root().join("docs/results"),
            rounds: 15,
            max: 16 << 20,
            command: String::from(
                "cargo xtask real-nccl run -- cargo bench -p nccl-benches --bench real_nccl",
            ),
        };
        let given = std::env::args().skip(1);
        let arguments: Vec<String> = given.filter(|argument| argument != "--bench").collect();
        if !arguments.is_empty() {
            options.command += &format!(" -- {}", arguments.join(" "));
        }
        let mut parser = lexopt::Parser::from_args(&arguments);
        while let Some(argument) = parser.next()? {
            match argument {
                Long("output") => options.output = root().join(parser.value()?),
                Long("rounds") => options.rounds = text(&mut parser)?.parse()?,
                Long("max") => options.max = bytes(&text(&mut parser)?)?,
                Long("help") => {
                    println!("{USAGE}");
                    return Ok(None);
                }
                other => return Err(format!("{}\n{USAGE}", other.unexpected()).into()),
            }
        }
        if options.rounds < 3 || options.max < 1 << 10 {
            return Err(format!("these options do not fit together\n{USAGE}").into());
        }
        Ok(Some(options))
    }

    fn sizes(&self) -> impl Iterator<Item = usize> + use<> {
        let max = self.max;
        std::iter::successors(Some(1 << 10), |size| Some(4 * size))
            .take_while(move |&size| size <= max)
    }
}

fn text(parser: &mut lexopt::Parser) -> Outcome<String> {
    let text = parser.value()?.into_string();
    Ok(text.map_err(|_| "an option's value is no text")?)
}

fn bytes(text: &str) -> Outcome<usize> {
    let (digits, shift) = match text.split_at_checked(text.len().saturating_sub(1)) {
        Some((digits, "K")) => (digits, 10),
        Some((digits, "M")) => (digits, 20),
        _ => (text, 0),
    };
    Ok(digits.parse::<usize>()? << shift)
}

/// Which NCCL a team uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// NVIDIA's.
    Real,
    /// The emulator's.
    Own,
}

/// The seconds of both, round by round.
#[derive(Default)]
struct Times {
    real: Vec<f64>,
    own: Vec<f64>,
}

impl Times {
    fn of(&mut self, kind: Kind) -> &mut Vec<f64> {
        match kind {
            Kind::Real => &mut self.real,
            Kind::Own => &mut self.own,
        }
    }
}

/// An init of `ranks` ranks.
struct Init {
    ranks: usize,
    /// From the start of the processes until all have a communicator.
    all: Times,
    /// The longest `ncclCommInitRank`.
    call: Times,
}

/// One operation at one size.
struct Line {
    operation: Operation,
    bytes: usize,
    times: Times,
}

fn main() -> ExitCode {
    let outcome = match std::env::var(RANK) {
        Ok(role) => be_a_rank(&role),
        Err(_) => drive(),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("real_nccl: {error}");
            ExitCode::FAILURE
        }
    }
}

fn be_a_rank(role: &str) -> Outcome {
    let numbers: Result<Vec<usize>, _> = role.split(' ').map(str::parse).collect();
    let [rank, ranks, room] = numbers?[..] else {
        return Err(format!("{RANK}={role}: three numbers are needed").into());
    };
    // The timed init is the only one of the process.
    rank::run(rank, ranks, room, &std::env::var(SOCKET)?, false)
}

fn drive() -> Outcome {
    let Some(options) = Options::parse()? else {
        return Ok(());
    };
    let Some(library) = std::env::var_os(LIBRARY) else {
        println!(
            "NOT TESTED: the figures of NVIDIA's library: {LIBRARY} names none; {}",
            options.command
        );
        return Ok(());
    };
    let directory = tempfile::Builder::new().prefix("real-nccl-").tempdir()?;
    let start = Start {
        library: library.into(),
        directory: directory.path(),
    };
    let before = machine::load();
    let mut inits = Vec::new();
    for ranks in INIT_RANKS {
        inits.push(start.init(ranks, options.rounds)?);
    }
    let lines = start.operations(&options)?;
    let page = page::Page {
        options: &options,
        library: &start.library,
        transports: start.transports()?,
        loads: [before, machine::load()],
        inits: &inits,
        lines: &lines,
    };
    std::fs::create_dir_all(&options.output)?;
    let file = options.output.join("real_nccl_figures.md");
    std::fs::write(&file, page.write())?;
    eprintln!("wrote {}", file.display());
    Ok(())
}

/// The settings of the ranks.
struct Start<'a> {
    library: PathBuf,
    directory: &'a Path,
}

impl Start<'_> {
    /// The transports of NVIDIA's ranks, from the logs of a team that is not measured.
    fn transports(&self) -> Outcome<Vec<String>> {
        let (mut team, _) = self.team(Kind::Real, RANKS, SMALL, true)?;
        // NCCL connects ranks in the first operation that needs it.
        for operation in OPERATIONS {
            team.check(operation, SMALL)?;
        }
        drop(team);
        let mut found = std::collections::BTreeSet::new();
        for rank in 0..RANKS {
            let log = std::fs::read_to_string(self.log(rank))?;
            let ways = log.lines().filter_map(|line| line.split_once(" via "));
            found.extend(ways.map(|(_, way)| way.trim().to_owned()));
        }
        Ok(found.into_iter().collect())
    }

    /// The processes of a team, and the longest `ncclCommInitRank` of them, in seconds.
    fn team(&self, kind: Kind, ranks: usize, room: usize, logs: bool) -> Outcome<(Team, f64)> {
        let program = std::env::current_exe()?;
        let name = match kind {
            Kind::Real => "NVIDIA's NCCL",
            Kind::Own => "the emulator's NCCL",
        };
        let socket = self.directory.join(format!("{name}-{ranks}"));
        // Left by the previous team.
        let _ = std::fs::remove_file(socket);
        let mut team = Team::start(name, ranks, self.directory, |socket| {
            let rank = |rank: usize| {
                let mut command = Command::new(&program);
                command
                    .env(RANK, format!("{rank} {ranks} {room}"))
                    .env(SOCKET, socket);
                match kind {
                    Kind::Real => command.env(LIBRARY, &self.library),
                    Kind::Own => command.env_remove(LIBRARY),
                };
                if logs {
                    command
                        .env("NCCL_DEBUG", "INFO")
                        .env("NCCL_DEBUG_FILE", self.log(rank));
                }
                command
            };
            (0..ranks).map(rank).collect()
        })?;
        let first = team.introductions().next().ok_or("no ranks")?;
        let id = first.rsplit(' ').next().ok_or("no id")?.to_owned();
        let mut longest = 0f64;
        for answer in team.tell(&id)? {
            let nanoseconds = answer.strip_prefix("ready ").ok_or("no time of an init")?;
            longest = longest.max(nanoseconds.parse::<f64>()? * 1e-9);
        }
        Ok((team, longest))
    }

    fn log(&self, rank: usize) -> PathBuf {
        self.directory.join(format!("log.{rank}"))
    }

    fn init(&self, ranks: usize, rounds: usize) -> Outcome<Init> {
        let (mut all, mut call) = (Times::default(), Times::default());
        // The first teams read files from disk that the others find in memory.
        for kind in [Kind::Real, Kind::Own] {
            self.team(kind, ranks, SMALL, false)?;
        }
        for round in 0..rounds {
            for kind in order(round) {
                let begun = Instant::now();
                let (team, longest) = self.team(kind, ranks, SMALL, false)?;
                all.of(kind).push(begun.elapsed().as_secs_f64());
                call.of(kind).push(longest);
                drop(team);
            }
        }
        eprintln!("init of {ranks} ranks: done");
        Ok(Init { ranks, all, call })
    }

    fn operations(&self, options: &Options) -> Outcome<Vec<Line>> {
        let mut teams = Teams {
            real: self.team(Kind::Real, RANKS, options.max, false)?.0,
            own: self.team(Kind::Own, RANKS, options.max, false)?.0,
        };
        let mut lines = Vec::new();
        for operation in OPERATIONS {
            for bytes in options.sizes() {
                let times = teams.compare(operation, bytes, options.rounds)?;
                eprintln!("{} of {bytes} B: done", operation.name());
                lines.push(Line {
                    operation,
                    bytes,
                    times,
                });
            }
        }
        Ok(lines)
    }
}

/// The teams that alternate.
struct Teams {
    real: Team,
    own: Team,
}

impl Teams {
    fn of(&mut self, kind: Kind) -> &mut Team {
        match kind {
            Kind::Real => &mut self.real,
            Kind::Own => &mut self.own,
        }
    }

    fn compare(&mut self, operation: Operation, bytes: usize, rounds: usize) -> Outcome<Times> {
        let mut counts = [0; 2];
        for (kind, count) in order(0).into_iter().zip(&mut counts) {
            let team = self.of(kind);
            team.check(operation, bytes)?;
            let once = team.time(operation, bytes, 3)?;
            *count = ((TURN / once) as usize).clamp(3, 2000);
        }
        let mut times = Times::default();
        for round in 0..rounds {
            for kind in order(round) {
                let count = counts[usize::from(kind == Kind::Own)];
                let seconds = self.of(kind).time(operation, bytes, count)?;
                times.of(kind).push(seconds);
            }
        }
        Ok(times)
    }
}

/// The order alternates by round.
fn order(round: usize) -> [Kind; 2] {
    match round % 2 {
        0 => [Kind::Real, Kind::Own],
        _ => [Kind::Own, Kind::Real],
    }
}
