//! `launchers`: the programs of this workspace under real launchers, as Debian has them.
//!
//! ```text
//! cargo xtask launchers [--write] [--allow-missing] [--only WORD]
//! ```
//!
//! Every launcher runs on hosts that are namespaces ([`hosts`]): one host for the rows of one machine, three and a login host
//! for those of several. A trial with an unexpected outcome is a failure, reported with the output of its job. Needs root,
//! iproute2 and util-linux. A launcher that is not installed is an error, or with `--allow-missing` is reported as not tested.

mod hosts;
mod job;
mod page;
mod slurm;
mod trial;

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Instant;

use crate::arguments::{Arguments, Usage};
use crate::wheels::{self, Cuda};
use crate::{Result, workspace};
use hosts::{Hosts, Names};
use page::Row;
use trial::{Cause, Outcome, Trial, What};

/// A launcher.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tool {
    NcclRun,
    OpenMpi,
    Mpich,
    Slurm,
}

impl Tool {
    fn name(self) -> &'static str {
        match self {
            Self::NcclRun => "nccl-run",
            Self::OpenMpi => "Open MPI",
            Self::Mpich => "MPICH",
            Self::Slurm => "Slurm",
        }
    }

    /// Debian's packages.
    fn packages(self) -> &'static str {
        match self {
            Self::NcclRun => "",
            Self::OpenMpi => "openmpi-bin",
            Self::Mpich => "mpich",
            Self::Slurm => "slurmctld slurmd slurm-client munge",
        }
    }

    /// Its version, if it is installed.
    fn version(self) -> Option<String> {
        let words: &[&str] = match self {
            Self::NcclRun => return Some(String::new()),
            Self::OpenMpi => &["mpirun.openmpi", "--version"],
            Self::Mpich => &["mpirun.mpich", "--version"],
            Self::Slurm => &["slurmd", "-V"],
        };
        let needed: &[&str] = match self {
            Self::Slurm => &[
                "slurmctld",
                "munged",
                "srun",
                "salloc",
                "sbatch",
                "scontrol",
            ],
            _ => &[],
        };
        for program in needed {
            Command::new(program)
                .arg("--version")
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .status()
                .ok()?;
        }
        let output = Command::new(words[0]).args(&words[1..]).output().ok()?;
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        let number = |word: &&str| word.starts_with(|letter: char| letter.is_ascii_digit());
        said.split_whitespace().find(number).map(str::to_owned)
    }
}

/// The NCCL of a trial.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Library {
    Emulator,
    Nvidia,
}

/// Both, for ranks on one machine. The emulator's own NCCL does not connect network namespaces.
const BOTH: &[Library] = &[Library::Emulator, Library::Nvidia];
const ACROSS: &[Library] = &[Library::Nvidia];

impl Library {
    fn name(self) -> &'static str {
        match self {
            Self::Emulator => "emulator",
            Self::Nvidia => "NVIDIA's",
        }
    }
}

/// Hosts, and the trials on them.
struct Site {
    tools: Vec<Tool>,
    /// Text after the launcher's version.
    about: &'static str,
    hosts: &'static [&'static str],
    names: Names,
    /// The number of Slurm's nodes and the host of its controller.
    slurm: Option<(usize, usize)>,
    libraries: &'static [Library],
    trials: Vec<Trial>,
}

const ONE: &[&str] = &["node"];
const THREE: &[&str] = &["node1", "node2", "node3", "login"];
/// The index of the login host in [`THREE`].
const LOGIN: usize = 3;

const NO_FLAG: &str = "–";

fn words(line: &'static str) -> Vec<&'static str> {
    line.split(' ').collect()
}

/// Returns a trial of `ranks` ranks, by one command on `host`.
fn trial(
    what: What,
    host: usize,
    line: &'static str,
    ranks: usize,
    expected: Outcome,
    flag: &'static str,
) -> Trial {
    Trial {
        what,
        commands: vec![(host, words(line))],
        variables: Vec::new(),
        flag,
        expected,
        ranks,
        report: "illed",
    }
}

fn benchmark(host: usize, line: &'static str, ranks: usize) -> Trial {
    trial(
        What::Benchmark,
        host,
        line,
        ranks,
        Outcome::Right { ranks },
        NO_FLAG,
    )
}

fn doctor(host: usize, line: &'static str, ranks: usize, one_kernel: bool) -> Trial {
    let expected = Outcome::Communicates { ranks, one_kernel };
    trial(What::Doctor, host, line, ranks, expected, NO_FLAG)
}

fn dies(host: usize, line: &'static str, ranks: usize, flag: &'static str) -> Trial {
    trial(What::Death, host, line, ranks, Outcome::Ended, flag)
}

fn goes_on(
    host: usize,
    line: &'static str,
    ranks: usize,
    cause: Cause,
    flag: &'static str,
) -> Trial {
    let survivors = ranks - 1;
    let expected = Outcome::GoOn { survivors, cause };
    trial(What::Death, host, line, ranks, expected, flag)
}

fn sites() -> Vec<Site> {
    let one = |tool: Tool, about: &'static str, trials: Vec<Trial>| Site {
        tools: vec![tool],
        about,
        hosts: ONE,
        names: Names::Known,
        slurm: (tool == Tool::Slurm).then_some((1, 0)),
        libraries: BOTH,
        trials,
    };
    vec![
        one(
            Tool::NcclRun,
            "",
            vec![
                benchmark(0, "nccl-run -n 4 -- ./server", 4),
                dies(0, "nccl-run -n 4 -- ./server", 4, "not this"),
                goes_on(
                    0,
                    "nccl-run -n 4 --keep-others -- ./server",
                    4,
                    Cause::Signal,
                    "`--keep-others`",
                ),
                doctor(0, "nccl-run -n 4 -- ./server", 4, false),
            ],
        ),
        one(
            Tool::OpenMpi,
            "",
            vec![
                benchmark(0, "mpirun.openmpi -n 4 ./server", 4),
                dies(0, "mpirun.openmpi -n 4 ./server", 4, "not this"),
                goes_on(
                    0,
                    "mpirun.openmpi -n 4 --enable-recovery ./server",
                    4,
                    Cause::Ended,
                    "`--enable-recovery`",
                ),
                doctor(0, "mpirun.openmpi -n 4 ./server", 4, false),
            ],
        ),
        one(
            Tool::Mpich,
            "",
            vec![
                benchmark(0, "mpirun.mpich -n 4 ./server", 4),
                dies(0, "mpirun.mpich -n 4 ./server", 4, "not this"),
                dies(
                    0,
                    "mpirun.mpich -disable-auto-cleanup -n 4 ./server",
                    4,
                    "not this",
                ),
                goes_on(
                    0,
                    "mpirun.mpich -n 1 nccl-run -n 4 --keep-others -- ./server",
                    4,
                    Cause::Signal,
                    "`nccl-run --keep-others` beneath",
                ),
                doctor(0, "mpirun.mpich -n 4 ./server", 4, false),
            ],
        ),
        one(
            Tool::Slurm,
            "one node",
            vec![
                benchmark(0, "srun -n 4 ./server", 4),
                goes_on(0, "srun -n 4 ./server", 4, Cause::Ended, "none is needed"),
                dies(0, "srun -n 4 --kill-on-bad-exit=1 ./server", 4, "not this"),
                goes_on(
                    0,
                    "srun -n 4 --kill-on-bad-exit=0 ./server",
                    4,
                    Cause::Ended,
                    "`--kill-on-bad-exit=0`, where `slurm.conf` has `KillOnBadExit=1`",
                ),
                doctor(0, "srun -n 4 ./server", 4, false),
            ],
        ),
        Site {
            tools: vec![Tool::NcclRun],
            about: "three hosts",
            hosts: THREE,
            names: Names::Known,
            slurm: None,
            libraries: ACROSS,
            trials: vec![
                on_each(benchmark(0, NCCL_RUN_ON_EACH[0], 3)),
                on_each(goes_on(
                    0,
                    NCCL_RUN_ON_EACH[0],
                    3,
                    Cause::Signal,
                    "`--keep-others`",
                )),
                on_each(doctor(0, NCCL_RUN_ON_EACH[0], 3, true)),
            ],
        },
        Site {
            tools: vec![Tool::Slurm],
            about: "three nodes",
            hosts: THREE,
            names: Names::Known,
            slurm: Some((3, LOGIN)),
            libraries: ACROSS,
            trials: vec![
                benchmark(LOGIN, "srun -N 3 ./server", 3),
                goes_on(
                    LOGIN,
                    "srun -N 3 ./server",
                    3,
                    Cause::Refused,
                    "none is needed",
                ),
                doctor(LOGIN, "srun -N 3 ./server", 3, true),
                Trial {
                    commands: vec![(LOGIN, vec!["srun", "-N", "3", "sh", "-c", RECIPE])],
                    ..benchmark(LOGIN, "", 3)
                },
            ],
        },
        lost_node("srun -N 3 ./server", Outcome::EndedLater, "not this"),
        lost_node(
            "srun -N 3 --no-kill ./server",
            Outcome::GoOn {
                survivors: 2,
                cause: Cause::Unreachable,
            },
            "`--no-kill`, for lost nodes",
        ),
        Site {
            tools: vec![Tool::Slurm],
            about: "three nodes whose names do not resolve",
            hosts: THREE,
            names: Names::Unknown,
            slurm: Some((3, LOGIN)),
            libraries: ACROSS,
            trials: vec![
                Trial {
                    expected: Outcome::NoAddress,
                    ..benchmark(LOGIN, "srun -N 3 ./server", 3)
                },
                Trial {
                    commands: vec![(LOGIN, vec!["srun", "-N", "3", "sh", "-c", BY_ADDRESS])],
                    ..benchmark(LOGIN, "", 3)
                },
            ],
        },
        Site {
            tools: vec![Tool::OpenMpi, Tool::Slurm],
            about: "three nodes",
            hosts: THREE,
            names: Names::Known,
            slurm: Some((3, LOGIN)),
            libraries: ACROSS,
            trials: vec![
                benchmark(LOGIN, "salloc -N 3 mpirun.openmpi -n 3 ./server", 3),
                // mpirun runs on the first node, whose ranks have no variables of a step.
                Trial {
                    commands: vec![(LOGIN, vec!["sh", "-c", BATCH])],
                    ..benchmark(LOGIN, "", 3)
                },
            ],
        },
        Site {
            tools: vec![Tool::Mpich, Tool::Slurm],
            about: "three nodes",
            hosts: THREE,
            names: Names::Known,
            slurm: Some((3, LOGIN)),
            libraries: ACROSS,
            trials: vec![benchmark(
                LOGIN,
                "salloc -N 3 mpirun.mpich -launcher slurm -n 3 ./server",
                3,
            )],
        },
    ]
}

/// A batch job, whose output is in a file.
const BATCH: &str = "sbatch --wait -N 3 -o batch.out --wrap \"mpirun.openmpi -n 3 ./server\"; code=$?; cat batch.out; \
     exit $code";

/// The command on each of three hosts.
const NCCL_RUN_ON_EACH: [&str; 3] = [
    "nccl-run -n 1 --nodes 3 --node-rank 0 --rendezvous tcp:node1:29400 --interface eth0 --secret-file job.secret \
     --keep-others -- ./server",
    "nccl-run -n 1 --nodes 3 --node-rank 1 --rendezvous tcp:node1:29400 --interface eth0 --secret-file job.secret \
     --keep-others -- ./server",
    "nccl-run -n 1 --nodes 3 --node-rank 2 --rendezvous tcp:node1:29400 --interface eth0 --secret-file job.secret \
     --keep-others -- ./server",
];

/// The recipe of the page for `nccl-run` beneath `srun`.
const RECIPE: &str = "nccl-run -n 1 --nodes 3 --node-rank $SLURM_NODEID --rendezvous \
                      tcp:$(scontrol show hostnames | head -1):29400 --secret-file job.secret -- ./server";

/// The recipe of the page for names that do not resolve.
const BY_ADDRESS: &str = "NCCL_RUN_RENDEZVOUS=tcp:$(scontrol -o show node $(scontrol show hostnames | head -1) | \
                          sed \"s/.*NodeAddr=\\([^ ]*\\).*/\\1/\"):29400 ./server";

fn on_each(trial: Trial) -> Trial {
    let commands = NCCL_RUN_ON_EACH.iter().enumerate();
    Trial {
        commands: commands.map(|(host, line)| (host, words(line))).collect(),
        ..trial
    }
}

/// A separate site, because the lost node does not return.
fn lost_node(line: &'static str, expected: Outcome, flag: &'static str) -> Site {
    Site {
        tools: vec![Tool::Slurm],
        about: "three nodes",
        hosts: THREE,
        names: Names::Known,
        slurm: Some((3, LOGIN)),
        libraries: ACROSS,
        trials: vec![trial(What::LostHost, LOGIN, line, 3, expected, flag)],
    }
}

pub(crate) fn run(arguments: &mut Arguments) -> Result {
    let write = arguments.flag("--write");
    let may_lack = arguments.flag("--allow-missing");
    let only = arguments.value("--only")?;
    arguments.finish()?;
    if write && (only.is_some() || may_lack) {
        return Err(Usage("--write takes a whole run".into()).into());
    }
    let begun = Instant::now();
    workspace::run(workspace::cargo().args([
        "build",
        "--package",
        "nccl-tools",
        "--features",
        "real-nccl",
        "--bin",
        "nccl-run",
        "--bin",
        "nccl-doctor",
        "--example",
        "all_to_all_perf",
        "--example",
        "going_on",
    ]))?;
    let library = wheels::fetch(&workspace::nccl_release()?, Cuda::Thirteen)?.library;
    let mut rows = Vec::new();
    let mut lacking = Vec::new();
    let mut failed = Vec::new();
    for site in sites() {
        let mut versions = Vec::new();
        let mut lacks = Vec::new();
        for tool in &site.tools {
            match tool.version() {
                Some(version) => versions.push(format!("{} {version}", tool.name())),
                None => lacks.push(format!("{} ({})", tool.name(), tool.packages())),
            }
        }
        let mut launcher = versions.join(" in ").trim().to_owned();
        if !site.about.is_empty() {
            launcher += &format!(", {}", site.about);
        }
        if !lacks.is_empty() {
            lacking.push(lacks.join(", "));
            continue;
        }
        if only.as_ref().is_some_and(|word| !launcher.contains(word)) {
            continue;
        }
        for &which in site.libraries {
            let environment = environment(which, &library);
            if let Err(error) = try_all(&site, &launcher, which, &environment, &mut rows) {
                eprintln!("launchers: {launcher}: FAILED: {error}");
                failed.push(launcher.clone());
            }
        }
    }
    rows.push(torchrun());
    for what in &lacking {
        eprintln!(
            "launchers: NOT TESTED: {what} is not installed: apt-get install --no-install-recommends, with the packages in brackets"
        );
    }
    let table = page::table(&rows);
    eprint!("{table}");
    eprintln!("launchers: {} s", begun.elapsed().as_secs());
    if !failed.is_empty() {
        return Err(format!("failed under {}", failed.join("; ")).into());
    }
    match () {
        () if !lacking.is_empty() && !may_lack => {
            Err("--allow-missing goes on without these launchers".into())
        }
        () if !lacking.is_empty() || only.is_some() => Ok(()),
        () if write => page::write(&table),
        () => page::check(&table),
    }
}

/// The row of a launcher that is not run: torchrun needs PyTorch.
fn torchrun() -> Row {
    eprintln!(
        "launchers: NOT TESTED: torchrun: PyTorch's wheel for Linux brings CUDA along and is not fetched; its variables are \
         (tests/tools/perf/launchers.rs, under_torchrun_it_is_one_rank)"
    );
    Row {
        launcher: "torchrun".into(),
        command: "torchrun --no-python --nproc-per-node 4 ./server".into(),
        library: NO_FLAG.into(),
        what: "not tested; its variables are".into(),
        result: NO_FLAG.into(),
        flag: "not known".into(),
    }
}

/// Returns the environment of the ranks, for any launcher. One part is for Open MPI, which otherwise refuses to run as root, or
/// with more ranks than cores.
fn environment(which: Library, library: &std::path::Path) -> Vec<(String, String)> {
    let mut pairs = vec![
        ("NCCL_EMULATOR", "1"),
        // Open MPI gives its ranks a terminal.
        ("NO_COLOR", "1"),
        ("OMPI_ALLOW_RUN_AS_ROOT", "1"),
        ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"),
        ("OMPI_MCA_rmaps_base_oversubscribe", "1"),
    ];
    let library = library.to_string_lossy();
    if which == Library::Nvidia {
        pairs.push(("NCCL_EMULATOR_NCCL", &library));
        pairs.push(("NCCL_NET", "Socket"));
        pairs.push(("NCCL_IB_DISABLE", "1"));
    }
    let owned = |(name, value): (&str, &str)| (name.to_owned(), value.to_owned());
    pairs.into_iter().map(owned).collect()
}

/// Runs the trials of a site with one library; returns rows of the trials with the expected outcome.
fn try_all(
    site: &Site,
    launcher: &str,
    which: Library,
    environment: &[(String, String)],
    rows: &mut Vec<Row>,
) -> Result {
    let hosts = Hosts::new(site.hosts, site.names)?;
    secret(&hosts)?;
    let mut environment = environment.to_vec();
    if let Some((nodes, controller)) = site.slurm {
        let configuration: PathBuf = slurm::start(&hosts, nodes, controller)?;
        let configuration = configuration.display().to_string();
        environment.push(("SLURM_CONF".into(), configuration));
    }
    for trial in &site.trials {
        let begun = Instant::now();
        let command = trial.command_line();
        let about = format!("{launcher}, {}: {command}: {}", which.name(), trial.what);
        let outcome = trial
            .run(&hosts, &environment)
            .map_err(|error| format!("{about}: {error}"))?;
        eprintln!(
            "launchers: {about}: {outcome} ({:.1} s)",
            begun.elapsed().as_secs_f64()
        );
        rows.push(Row {
            launcher: launcher.to_owned(),
            command,
            library: which.name().to_owned(),
            what: trial.what.to_string(),
            result: outcome.to_string(),
            flag: trial.flag.to_owned(),
        });
    }
    Ok(())
}

/// Creates the secret of the jobs on these hosts, readable by this user only.
fn secret(hosts: &Hosts) -> Result {
    let path = hosts.directory().join(trial::SECRET);
    workspace::run(
        Command::new("sh")
            .args([
                "-c",
                "umask 077; od -An -N32 -tx1 /dev/urandom | tr -d ' \\n' >\"$1\"",
                "sh",
            ])
            .arg(path),
    )
}
