//! Measures what observing costs NVIDIA's library: operations with each setting of `NCCL_RUN_PROFILER` beside the same without.
//!
//! ```text
//! cargo xtask real-nccl run -- cargo bench -p nccl-benches --bench profiler        all of it; writes docs/results/profiler.md
//! cargo xtask real-nccl run -- cargo bench -p nccl-benches --bench profiler -- DIRECTORY ROUNDS
//! ```
//!
//! For each transport there is a team of two processes per setting, rank i of all bound to the same core. They sleep until they
//! get the order to run an operation a number of times, and take turns, in another order each round. A turn begins behind a
//! barrier, and lasts from when its first rank begins until its last is done. A ratio is the median of those within a round.

#[path = "against_mpi/by_crate.rs"]
mod by_crate;
#[path = "against_mpi/operation.rs"]
mod operation;
#[path = "against_mpi/rank.rs"]
mod rank;
#[path = "against_mpi/root.rs"]
mod root;
#[path = "against_mpi/team.rs"]
mod team;

use std::error::Error;
use std::fmt::Write as _;
use std::path::Path;
use std::process::{Command, ExitCode};

use nccl_tools::build_info::BUILD;
use nccl_tools::machine;
use nccl_tools::statistics::median;
use operation::Operation;
use root::root;
use team::Team;

type Outcome<T = ()> = Result<T, Box<dyn Error>>;

/// Marks a process as a rank: its number.
const RANK: &str = "NCCL_PROFILER_FIGURES_RANK";
/// The socket of its orders.
const SOCKET: &str = "NCCL_PROFILER_FIGURES_SOCKET";
const LIBRARY: &str = "NCCL_EMULATOR_NCCL";
const RANKS: usize = 2;
const SIZES: [usize; 4] = [4 << 10, 64 << 10, 1 << 20, 4 << 20];
/// The duration of a turn in seconds.
const TURN: f64 = 0.05;
/// The others are compared with the first; the second is the same again, and shows how far a ratio can be trusted.
const SETTINGS: [&str; 6] = [
    "off",
    "off",
    "operations",
    "transfers",
    "steps",
    "steps,kernels",
];
/// Variables that choose a transport within a host.
const TRANSPORTS: [(&str, &[(&str, &str)]); 2] = [
    ("peer-to-peer", &[]),
    (
        "sockets",
        &[("NCCL_P2P_DISABLE", "1"), ("NCCL_SHM_DISABLE", "1")],
    ),
];

fn main() -> ExitCode {
    let outcome = match std::env::var(RANK) {
        Ok(rank) => be_a_rank(&rank),
        Err(_) => drive(),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("profiler: {error}");
            ExitCode::FAILURE
        }
    }
}

fn be_a_rank(rank: &str) -> Outcome {
    let room = SIZES.iter().copied().max().unwrap_or_default();
    // The crate offers NCCL the profiler.
    rank::run(rank.parse()?, RANKS, room, &std::env::var(SOCKET)?, true)
}

/// One operation at one size: the seconds of each setting, round by round.
struct Line {
    operation: Operation,
    bytes: usize,
    seconds: Vec<Vec<f64>>,
}

impl Line {
    /// Returns the median of the ratios to the first setting, within a round.
    fn ratio(&self, setting: usize) -> f64 {
        let pairs = self.seconds[setting].iter().zip(&self.seconds[0]);
        let ratios: Vec<f64> = pairs.map(|(one, first)| one / first).collect();
        median(&ratios).unwrap_or(f64::NAN)
    }
}

fn drive() -> Outcome {
    let given = std::env::args().skip(1).filter(|one| one != "--bench");
    let given: Vec<String> = given.collect();
    let output = root().join(given.first().map_or("docs/results", String::as_str));
    let rounds: usize = given.get(1).map_or(Ok(15), |rounds| rounds.parse())?;
    if rounds == 0 {
        return Err("ROUNDS: at least 1 is needed".into());
    }
    let mut command =
        String::from("cargo xtask real-nccl run -- cargo bench -p nccl-benches --bench profiler");
    if !given.is_empty() {
        let _ = write!(command, " -- {}", given.join(" "));
    }
    let Some(library) = std::env::var_os(LIBRARY) else {
        println!("NOT TESTED: what observing costs NVIDIA's library: {command}");
        return Ok(());
    };
    let directory = tempfile::Builder::new().prefix("profiler-").tempdir()?;
    let before = machine::load();
    let mut page = String::from(
        "# What observing costs NVIDIA's NCCL\n\n\
         **Kernels are interpreted, on CPUs.** What is compared is the host's side: NCCL's calls of the profiler, its proxy thread, and \
         what it adds to a kernel. On a GPU a kernel is a thousand times faster, and the host's part is hidden behind it.\n\n",
    );
    let library = Path::new(&library);
    let release = library.parent().and_then(Path::file_name);
    let _ = writeln!(
        page,
        "- command: `{command}`, {}\n- library: {}\n- {}\n- {}\n- load (1, 5 and 15 minutes) before: {before}\n\n\
         {RANKS} processes, rank i bound to core i, {rounds} rounds. A ratio is the median, over the rounds, of the time with a setting of \
         `NCCL_RUN_PROFILER` over the time with `off` in the same round. The column `off` is a second team without a profiler: it shows \
         how far the others can be trusted.\n",
        nccl_tools::clock::now(),
        release.unwrap_or(library.as_os_str()).to_string_lossy(),
        BUILD.line(),
        machine::line(),
    );
    for (transport, variables) in TRANSPORTS {
        let lines = measure(transport, variables, directory.path(), rounds)?;
        write_table(&mut page, transport, &lines);
    }
    std::fs::create_dir_all(&output)?;
    let file = output.join("profiler.md");
    std::fs::write(&file, page)?;
    eprintln!("wrote {}", file.display());
    Ok(())
}

fn measure(
    transport: &str,
    variables: &[(&str, &str)],
    directory: &Path,
    rounds: usize,
) -> Outcome<Vec<Line>> {
    let program = std::env::current_exe()?;
    let mut teams = Vec::new();
    for (place, setting) in SETTINGS.into_iter().enumerate() {
        // Sockets have the team's name in their path.
        let directory = directory.join(format!("{transport}-{place}"));
        std::fs::create_dir(&directory)?;
        let mut team = Team::start("ranks", RANKS, &directory, |socket| {
            let rank = |rank: usize| {
                let mut command = Command::new(&program);
                command
                    .env(RANK, rank.to_string())
                    .env(SOCKET, socket)
                    .env("NCCL_RUN_PROFILER", setting)
                    .envs(variables.iter().copied());
                command
            };
            (0..RANKS).map(rank).collect()
        })?;
        let first = team.introductions().next().ok_or("no ranks")?;
        let id = first.rsplit(' ').next().ok_or("no id")?.to_owned();
        team.tell(&id)?;
        teams.push(team);
    }
    let mut lines = Vec::new();
    for operation in [Operation::AllReduce, Operation::AllToAll] {
        for bytes in SIZES {
            let mut counts = Vec::new();
            for team in &mut teams {
                team.check(operation, bytes)?;
                let once = team.time(operation, bytes, 3)?;
                counts.push(((TURN / once) as usize).clamp(3, 2000));
            }
            let mut seconds = vec![Vec::new(); teams.len()];
            for round in 0..rounds {
                for turn in 0..teams.len() {
                    let at = (turn + round) % teams.len();
                    seconds[at].push(teams[at].time(operation, bytes, counts[at])?);
                }
            }
            eprintln!("{transport}: {} of {bytes} B: done", operation.name());
            lines.push(Line {
                operation,
                bytes,
                seconds,
            });
        }
    }
    Ok(lines)
}

fn write_table(page: &mut String, transport: &str, lines: &[Line]) {
    let names = SETTINGS[1..].join(" | ");
    let _ = write!(
        page,
        "\n## Over {transport}\n\n| operation | bytes of a rank | off (µs) | {names} |\n|---|--:|--:|{}\n",
        "--:|".repeat(SETTINGS.len() - 1)
    );
    for line in lines {
        let base = median(&line.seconds[0]).unwrap_or(f64::NAN) * 1e6;
        let _ = write!(
            page,
            "| {} | {} | {base:.0} |",
            line.operation.name(),
            line.bytes
        );
        for setting in 1..SETTINGS.len() {
            let _ = write!(page, " {:.2} |", line.ratio(setting));
        }
        page.push('\n');
    }
    let _ = write!(page, "| geometric mean | | |");
    for setting in 1..SETTINGS.len() {
        let logs = lines.iter().map(|line| line.ratio(setting).ln());
        let mean = (logs.sum::<f64>() / lines.len() as f64).exp();
        let _ = write!(page, " {mean:.2} |");
    }
    page.push('\n');
}
