//! Decides whether this process starts ranks or is one, and starts them.

use std::ffi::OsString;
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use nccl::{Library, Rendezvous, World};

use super::binding;
use super::choice::choose;
use super::devices::{self, Emulation};
use super::operation::Operation;
use super::rank::{self, Common};
use crate::failure::{Exit, Failure};
use crate::json;
use crate::options::{self, BindTo, Options, Spawn};
use crate::plot;
use crate::progress;
use crate::spawn::{Job, Launcher, Outcome, threads};

/// The file that was reserved for the JSON output, for the ranks.
const JSON_VARIABLE: &str = "NCCL_TOOLS_JSON";

/// A benchmark program: reads the arguments, starts ranks or is one, measures the operation, and returns the exit code.
pub fn main<O: Operation + 'static>() -> ExitCode {
    let mut arguments = std::env::args_os();
    let program = program_name(arguments.next());
    let options = match options::parse(O::PROGRAM, arguments) {
        Ok(options::Command::Help) => {
            print!("{}", options::usage(&program, O::PROGRAM));
            return ExitCode::SUCCESS;
        }
        Ok(options::Command::Run(options)) => *options,
        Err(failure) => return end(&program, &failure),
    };
    match run::<O>(&program, options) {
        Ok(code) => code,
        Err(failure) => end(&program, &failure),
    }
}

/// Prints the failure and returns its exit code.
fn end(program: &str, failure: &Failure) -> ExitCode {
    match failure.exit() {
        Exit::OutputClosed => {}
        // One sentence, also where a list explains the failure best.
        Exit::Usage => {
            let text = failure.to_string();
            let lines: Vec<&str> = text
                .lines()
                .map(str::trim)
                .filter(|l| !l.is_empty())
                .collect();
            eprintln!("{program}: {}", lines.join("; "));
        }
        _ => eprintln!("{program}: {failure}"),
    }
    failure.exit().into()
}

fn program_name(argument: Option<OsString>) -> String {
    let path = PathBuf::from(argument.unwrap_or_default());
    path.file_name().map_or("perf".to_owned(), |name| {
        name.to_string_lossy().into_owned()
    })
}

fn lookup(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

fn run<O: Operation + 'static>(program: &str, options: Options) -> Result<ExitCode, Failure> {
    for name in ["NCCL_TESTS_SPLIT", "NCCL_TESTS_SPLIT_MASK"] {
        if lookup(name).is_some() {
            return Err(Failure::usage(format!(
                "{name} is set, and this program cannot split the ranks into groups"
            )));
        }
    }
    rank::needed_bus()?;
    match Launcher::detect(lookup) {
        Some(launcher) => one_rank::<O>(program, options, launcher),
        None => start::<O>(program, options),
    }
}

/// Runs this process as a rank.
fn one_rank<O: Operation>(
    program: &str,
    options: Options,
    launcher: Launcher,
) -> Result<ExitCode, Failure> {
    let launched = launcher != Launcher::Itself;
    if launched && (options.ranks.is_some() || options.spawn.is_some()) {
        return Err(Failure::usage(format!(
            "{} starts the ranks here: leave out --ranks, --spawn, -t and -g",
            launcher.name()
        )));
    }
    let local_ranks = launcher.local_world_size(lookup).unwrap_or(1);
    let emulation = devices::install(local_ranks + devices::first_device()?)?;
    // First, so that threads of the libraries run on the same core.
    let place = binding::Place {
        rank: launcher.local_rank(lookup),
        ranks: local_ranks,
        is_launched: launched,
    };
    let binding = binding::bind(options.bind_to, emulation, place)?;
    // Before other ranks wait for this one.
    Library::load()?;
    // Invalid variables are bad input; missing ranks are not.
    let rendezvous = Rendezvous::from_env().map_err(|error| Failure::usage(error.to_string()))?;
    let world = World::join(rendezvous)?;
    let json = match (lookup(JSON_VARIABLE), &options.output_file) {
        (Some(reserved), _) => Some(reserved.into()),
        (None, Some(path)) if world.rank() == 0 => Some(json::reserve(path)?),
        (None, _) => None,
    };
    if let (Some(path), 0) = (&options.plot, world.rank()) {
        plot::check(path)?;
    }
    let ranks = world.size();
    let common = Common {
        program: program.to_owned(),
        options,
        emulation,
        ranks_text: format!("{ranks} processes, started by {}", launcher.name()),
        binding,
        local_ranks,
        launched,
        json,
    };
    rank::run::<O>(&common, world)?;
    Ok(ExitCode::SUCCESS)
}

/// Starts the ranks.
fn start<O: Operation + 'static>(program: &str, options: Options) -> Result<ExitCode, Failure> {
    let first = devices::first_device()?;
    let wanted = options.ranks.unwrap_or(devices::EMULATED_RANKS);
    let emulation = devices::install(first + wanted)?;
    let library = Library::load()?;
    let devices = devices::count()?;
    let ranks = match (options.ranks, emulation) {
        (Some(ranks), _) => ranks,
        (None, Emulation::Emulated | Emulation::Interpreted) => {
            devices::EMULATED_RANKS.min(devices)
        }
        (None, Emulation::None) => devices.saturating_sub(first).max(1),
    };
    devices::check_fit(ranks, first, devices)?;
    devices::check_sizes(&options, devices::total_memory(first)?)?;
    devices::elements(&options, &library, u32::MAX)?;
    choose(O::PROGRAM, &options, &library, ranks, 1)?;
    O::new(&options)?.check(&options, ranks)?;
    options.plot.as_deref().map(plot::check).transpose()?;
    let json = options
        .output_file
        .as_deref()
        .map(json::reserve)
        .transpose()?;
    match options.spawn.unwrap_or(Spawn::Processes) {
        Spawn::Processes => start_processes(program, ranks, emulation, json.as_deref()),
        Spawn::Threads if options.bind_to == Some(BindTo::Core) => Err(Failure::usage(
            "--bind_to core binds processes, and the ranks are threads: leave out one of the two",
        )),
        Spawn::Threads => {
            let common = Common {
                program: program.to_owned(),
                options,
                emulation,
                ranks_text: format!("{ranks} threads of one process"),
                binding: String::from("none: the ranks are threads"),
                local_ranks: ranks,
                launched: false,
                json,
            };
            start_threads::<O>(common, ranks)
        }
    }
}

fn start_threads<O: Operation + 'static>(
    common: Common,
    ranks: usize,
) -> Result<ExitCode, Failure> {
    let (program, json) = (common.program.clone(), common.json.clone());
    let worlds = World::threads(ranks);
    let ended = threads::run(worlds, None, move |_, world| rank::run::<O>(&common, world));
    let Err(failure) = ended else {
        return Ok(ExitCode::SUCCESS);
    };
    let (exit, text) = match &failure.cause {
        threads::Cause::Error(rank, failure) => (failure.exit(), format!("rank {rank}: {failure}")),
        _ => (Exit::Failed, failure.to_string()),
    };
    if exit != Exit::OutputClosed {
        eprintln!("{program}: {text}");
    }
    if let Some(path) = json {
        json::complete(&path, &text);
    }
    if failure.running.is_empty() {
        return Ok(exit.into());
    }
    // Threads that still wait for a missing rank cannot be ended; the process can.
    // SAFETY: ends the process at once; nothing is left to be written.
    unsafe { libc::_exit(exit as i32) }
}

fn start_processes(
    program: &str,
    ranks: usize,
    emulation: Emulation,
    json: Option<&Path>,
) -> Result<ExitCode, Failure> {
    let executable = std::env::current_exe().map_err(|error| {
        Failure::new(
            Exit::Failed,
            format!("this program does not find itself: {error}"),
        )
    })?;
    let arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
    let ended = Job::new(ranks).run(|_| {
        let mut command = Command::new(&executable);
        command.args(&arguments);
        // The ranks use this result: another search for a GPU would cost each of them a second.
        command.env(
            "NCCL_EMULATOR",
            if emulation.is_emulated() { "1" } else { "0" },
        );
        if std::io::stderr().is_terminal() {
            command.env(progress::VARIABLE, "1");
        }
        if let Some(path) = json {
            command.env(JSON_VARIABLE, path);
        }
        command
    });
    let ended = ended.map_err(|error| Failure::new(Exit::Failed, error.to_string()))?;
    match ended.outcome {
        Outcome::Succeeded => Ok(ExitCode::SUCCESS),
        Outcome::Failed(failure) => {
            eprintln!("{program}: {failure}");
            if let Some(path) = json {
                json::complete(path, &failure.to_string());
            }
            Ok(failure.code().into())
        }
        Outcome::TimedOut(states) => Err(Failure::new(Exit::TimedOut, states)),
        Outcome::OutputClosed => Err(Failure::new(Exit::OutputClosed, "")),
    }
}
