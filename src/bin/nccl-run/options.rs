//! The command line.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;
use std::time::Duration;

use lexopt::{Arg, Parser};
use nccl::launch::{Fleet, FleetBuilder, find_wrong_address};

/// The text of `--help`.
const HELP: &str = "\
Starts a program once for each rank, passes on what the ranks print and the signals nccl-run gets, and
says which rank died first. No rank outlives nccl-run.

usage: nccl-run -n RANKS [OPTIONS] [--] PROGRAM [ARGUMENTS]

  nccl-run -n 4 -- target/release/server         four ranks on this machine
  nccl-run -- target/release/server              one for each GPU
  nccl-run -n 2 --tag-time -- sh -c 'echo $NCCL_RUN_RANK of $NCCL_RUN_WORLD_SIZE'
  nccl-run -n 8 --nodes 2 --node-rank 0 --rendezvous tcp:node-a:29400 --interface eth0 -- ./server
                                                 eight of sixteen; on the other machine --node-rank 1

A program finds its place with nccl::Rendezvous::from_env(), or by these variables:
  NCCL_RUN_RANK, NCCL_RUN_WORLD_SIZE             which rank of how many it is
  NCCL_RUN_LOCAL_RANK, NCCL_RUN_LOCAL_WORLD_SIZE the same among the ranks of its machine
  RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE the same four, as torchrun calls them
  NCCL_RUN_RENDEZVOUS, NCCL_RUN_SECRET_FILE      where the ranks meet, and what they prove to know
  NCCL_RUN_JOB, NCCL_RUN_GENERATION              the name of the job, and the number of the attempt, from 0

Ranks:
  -n, --ranks N          ranks on this machine; one for each GPU unless given (also -np N, --np N)
      --nodes N          machines, each with as many ranks (1)
      --node-rank I      which of them this is, from 0
      --rendezvous ADDR  where rank 0 listens: tcp:HOST:PORT, tcp:HOST:FIRST-LAST; a private socket unless
                         there are several machines. Behind a comma, where to look for a rank on
                         another machine that has taken over: tcp:node-a:29400,tcp:node-b:29400
      --secret-file FILE the job's secret, the same on all machines; a fresh one unless there are several
      --job NAME         what to call the job
      --interface IF     network interface for the rendezvous (NCCL_RUN_INTERFACE) and NCCL
                         (NCCL_SOCKET_IFNAME): a name, a subnet or an address
      --one-gpu-each     rank I of a machine sees its Ith GPU only, as device 0
Output:
      --no-prefix        lines as they are, without the rank before them
      --tag-time         with the seconds since the start behind the rank
      --log-dir DIR      also into DIR/rank-I.stdout and DIR/rank-I.stderr
      --nccl-debug DIR   what NCCL says into DIR/nccl.rank-I.log (how much: NCCL_DEBUG, INFO unless set)
      --record DIR       what each rank's flight recorder has, when a communicator is aborted; merged at the
                         end into DIR/timeline.html and DIR/trace.json (NCCL_RUN_RECORD_DIR)
      --tail N           lines of the failed rank's standard error to repeat at the end (12)
The end:
      --linger TIME      how long others may go on after a rank failed (1s)
      --keep-others      others go on however long they like after a rank died; the exit code is theirs
      --grace TIME       how long ranks may take to end before they are killed (5s)
      --restarts N       start ranks again after a failure, at most so often (0)
      --restart WHICH    which of them: all, as the next generation (the default), or failed: that rank
                         alone, while the others run, for programs that go on and take it in
                         (World::next_generation, World::join_running; NCCL_RUN_RESTARTED=1 tells it);
                         all when all have failed
  -h, --help             this
  -V, --version          the version

TIME is 500ms, 5s, 2m, or a number of seconds. Rank 0 reads nccl-run's standard input unless that is a
terminal; the others read nothing. Ctrl-C is passed on to the ranks, a second one kills them (within
300 ms of the first it counts as the same).

The exit code is that of the rank that died first, 128 and the number for a signal; 2 for a wrong command
line; 127 for a program that cannot be started; 0 when every rank returned 0. With --keep-others: of the
ranks that outlived the first death and were not killed by a signal from elsewhere, the first code that is
not 0, else 0; as without it when no rank died.
";

/// The result of parsing.
#[derive(Debug)]
pub(crate) enum Asked {
    Run(Box<Options>),
    /// A text to print.
    Print(String),
}

/// The ranks that are restarted after a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Restart {
    All,
    /// The failed rank alone, while the others run.
    Failed,
}

/// A valid command line.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Options {
    pub(crate) ranks: usize,
    pub(crate) nodes: usize,
    node_rank: usize,
    rendezvous: Option<String>,
    secret: Option<Vec<u8>>,
    secret_file: Option<PathBuf>,
    job: Option<String>,
    interface: Option<String>,
    devices: Option<Vec<String>>,
    pub(crate) prefix: bool,
    pub(crate) tag_time: bool,
    pub(crate) log_dir: Option<PathBuf>,
    pub(crate) nccl_debug: Option<PathBuf>,
    pub(crate) record: Option<PathBuf>,
    tail: usize,
    pub(crate) linger: Duration,
    pub(crate) grace: Duration,
    pub(crate) restarts: u32,
    pub(crate) restart: Restart,
    pub(crate) keep_others: bool,
    pub(crate) program: OsString,
    pub(crate) arguments: Vec<OsString>,
}

impl Options {
    /// The number of ranks on this machine, the first of them, and the number of all.
    pub(crate) fn place(&self) -> (usize, usize, usize) {
        let first = self.ranks * self.node_rank;
        (self.ranks, first, self.ranks * self.nodes)
    }

    /// The settings of the fleet; not those of this process's own output.
    pub(crate) fn builder(&self) -> FleetBuilder {
        let (here, first, world_size) = self.place();
        let mut builder = Fleet::builder(here);
        builder.world_size = Some(world_size);
        builder.first_rank = first;
        builder.rendezvous.clone_from(&self.rendezvous);
        builder.secret = self.secret.clone().map(Into::into);
        builder.secret_file.clone_from(&self.secret_file);
        builder.job.clone_from(&self.job);
        builder.interface.clone_from(&self.interface);
        builder.one_device_each.clone_from(&self.devices);
        builder.log_dir.clone_from(&self.log_dir);
        builder.nccl_debug.clone_from(&self.nccl_debug);
        builder.record_dir.clone_from(&self.record);
        builder.stderr_tail = self.tail;
        builder.linger = self.linger;
        builder.grace = self.grace;
        builder.keep_others = self.keep_others || self.restart == Restart::Failed;
        builder
    }
}

/// Parses a command line; `variable` reads the environment, `gpus` names the visible GPUs.
pub(crate) fn parse(
    arguments: impl IntoIterator<Item = OsString>,
    variable: impl Fn(&str) -> Option<OsString>,
    gpus: impl Fn() -> Result<Vec<String>, String>,
) -> Result<Asked, String> {
    let hint = |sentence: String| format!("{sentence} (nccl-run --help lists the options)");
    let mut parser = Parser::from_args(arguments);
    let mut ranks = None;
    let mut one_gpu_each = false;
    let mut node_rank = None;
    let mut restart_is_said = false;
    let mut options = Options {
        ranks: 0,
        nodes: 1,
        node_rank: 0,
        rendezvous: None,
        secret: variable("NCCL_RUN_SECRET").map(OsStringExt::into_vec),
        secret_file: variable("NCCL_RUN_SECRET_FILE").map(PathBuf::from),
        job: None,
        interface: None,
        devices: None,
        prefix: true,
        tag_time: false,
        log_dir: None,
        nccl_debug: None,
        record: None,
        tail: 12,
        linger: Duration::from_secs(1),
        grace: Duration::from_secs(5),
        restarts: 0,
        restart: Restart::All,
        keep_others: false,
        program: OsString::new(),
        arguments: Vec::new(),
    };
    loop {
        let argument = parser.next().map_err(|error| hint(error.to_string()))?;
        let name = match argument {
            None => break,
            Some(Arg::Short(letter)) => format!("-{letter}"),
            Some(Arg::Long(name)) => format!("--{name}"),
            Some(Arg::Value(program)) => {
                options.program = program;
                let rest = parser.raw_args().map_err(|error| hint(error.to_string()))?;
                options.arguments = rest.collect();
                break;
            }
        };
        let name = name.as_str();
        // A value attached to -n: -n4, or the second letter of -np.
        let attached = (name == "-n")
            .then(|| parser.optional_value())
            .flatten()
            .map(|value| value.to_string_lossy().into_owned());
        let mut text = || {
            let value = parser
                .value()
                .map_err(|_| hint(format!("{name} needs a value")))?;
            let value = value.into_string();
            value.map_err(|value| format!("{name} {}: not readable text", value.display()))
        };
        match name {
            "-h" | "--help" => return Ok(Asked::Print(HELP.to_owned())),
            "-V" | "--version" => {
                let version = env!("CARGO_PKG_VERSION");
                return Ok(Asked::Print(format!("nccl-run {version}\n")));
            }
            "-n" => {
                ranks = Some(match attached.as_deref() {
                    None => count("-n", &text()?, 1)?,
                    Some("p") => count("-np", &text()?, 1)?,
                    Some(other) if other.starts_with('p') => {
                        return Err(hint(format!(
                            "-n{other} is not an option: write -np N, or -n N"
                        )));
                    }
                    Some(number) => count("-n", number, 1)?,
                });
            }
            "--ranks" | "--np" => ranks = Some(count(name, &text()?, 1)?),
            "--nodes" => options.nodes = count(name, &text()?, 1)?,
            "--node-rank" => node_rank = Some(count(name, &text()?, 0)?),
            "--rendezvous" => {
                let address = text()?;
                check_address(&address)?;
                options.rendezvous = Some(address);
            }
            "--secret-file" => {
                options.secret_file = Some(text()?.into());
                options.secret = None;
            }
            "--job" => options.job = Some(text()?),
            "--interface" => options.interface = Some(text()?),
            "--one-gpu-each" => one_gpu_each = true,
            "--keep-others" => options.keep_others = true,
            "--no-prefix" => options.prefix = false,
            "--tag-time" => options.tag_time = true,
            "--log-dir" => options.log_dir = Some(text()?.into()),
            "--record" => options.record = Some(text()?.into()),
            "--nccl-debug" => options.nccl_debug = Some(text()?.into()),
            "--tail" => options.tail = count(name, &text()?, 0)?,
            "--linger" => options.linger = time(name, &text()?)?,
            "--grace" => options.grace = time(name, &text()?)?,
            "--restarts" => {
                let restarts = count(name, &text()?, 0)?;
                options.restarts = u32::try_from(restarts).unwrap_or(u32::MAX);
            }
            "--restart" => {
                options.restart = match text()?.as_str() {
                    "all" => Restart::All,
                    "failed" => Restart::Failed,
                    other => {
                        return Err(format!(
                            "--restart {other}: all ranks, or failed, for that rank alone"
                        ));
                    }
                };
                restart_is_said = true;
            }
            _ => return Err(hint(format!("{name} is not an option"))),
        }
    }
    if options.program.is_empty() {
        return Err(hint(String::from(
            "which program? Write it behind --, as in: nccl-run -n 4 -- ./server",
        )));
    }
    if let (Some(_), Some(path)) = (&options.secret, &options.secret_file) {
        return Err(format!(
            "both NCCL_RUN_SECRET and NCCL_RUN_SECRET_FILE={} are set: leave one",
            path.display()
        ));
    }
    if restart_is_said && options.restarts == 0 {
        return Err(String::from(
            "--restart says which ranks are started again, and --restarts N how often at most: say both",
        ));
    }
    if options.keep_others && options.restarts > 0 {
        return Err(String::from(
            "--keep-others and --restarts exclude each other: --restart failed keeps the others as well",
        ));
    }
    if !options.prefix && options.tag_time {
        return Err(String::from(
            "--tag-time and --no-prefix exclude each other",
        ));
    }
    let found = gpus()?;
    options.ranks = match ranks {
        Some(ranks) => ranks,
        None if found.is_empty() => {
            return Err(String::from(
                "how many ranks? No GPU is visible here to count them by: say -n RANKS",
            ));
        }
        None => found.len(),
    };
    if one_gpu_each {
        if found.len() < options.ranks {
            return Err(format!(
                "--one-gpu-each: {} ranks, and {} GPUs are visible",
                options.ranks,
                found.len()
            ));
        }
        options.devices = Some(found);
    }
    place(&mut options, node_rank)?;
    Ok(Asked::Run(Box::new(options)))
}

/// Checks that the node, their number and the rendezvous address fit together.
fn place(options: &mut Options, node_rank: Option<usize>) -> Result<(), String> {
    let nodes = options.nodes;
    options.node_rank = match node_rank {
        Some(node_rank) if node_rank >= nodes => {
            return Err(format!(
                "--node-rank {node_rank}: of {nodes} nodes (--nodes) the last is {}",
                nodes - 1
            ));
        }
        Some(node_rank) => node_rank,
        None if nodes > 1 => {
            return Err(format!(
                "--nodes {nodes}: say which of them this is, --node-rank 0 to {}",
                nodes - 1
            ));
        }
        None => 0,
    };
    let address = options.rendezvous.as_deref();
    if nodes > 1 && !address.is_some_and(|address| address.starts_with("tcp:")) {
        return Err(format!(
            "--nodes {nodes}: say where they meet, --rendezvous tcp:HOST:PORT, where HOST is node 0's address \
             and PORT one that is free there"
        ));
    }
    if options.ranks.checked_mul(nodes).is_none() {
        return Err(format!(
            "{} ranks on {nodes} nodes are too many",
            options.ranks
        ));
    }
    Ok(())
}

fn count(name: &str, text: &str, least: usize) -> Result<usize, String> {
    match text.trim().parse() {
        Ok(number) if number >= least => Ok(number),
        Ok(number) => Err(format!("{name} {number}: {least} is the least")),
        Err(_) => Err(format!("{name} {text}: not a number")),
    }
}

/// `500ms`, `5s`, `2m`, `1.5`
fn time(name: &str, text: &str) -> Result<Duration, String> {
    let text = text.trim();
    let digits = text.trim_end_matches(char::is_alphabetic);
    let factor = match &text[digits.len()..] {
        "ms" => 0.001,
        "" | "s" => 1.0,
        "m" | "min" => 60.0,
        "h" => 3600.0,
        _ => f64::NAN,
    };
    let number: f64 = digits.trim().parse().unwrap_or(f64::NAN);
    Duration::try_from_secs_f64(number * factor)
        .map_err(|_| format!("{name} {text}: not a time; write 500ms, 5s or 2m"))
}

/// Checks that ranks can parse the address. Only the ranks find out whether they can reach it.
fn check_address(address: &str) -> Result<(), String> {
    match find_wrong_address(address) {
        None => Ok(()),
        Some(wrong) => Err(format!(
            "--rendezvous {wrong}: write tcp:HOST:PORT, tcp:HOST:FIRST-LAST, tcp:[IPV6]:PORT or unix:PATH"
        )),
    }
}

#[cfg(test)]
mod tests;
