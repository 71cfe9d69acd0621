//! Starts the ranks of a program on this machine, passes on their output and the signals of this process, and reports
//! which rank died first.
//!
//! ```text
//! nccl-run -n 4 -- target/release/server --model weights
//! ```
//!
//! `nccl-run --help` has the options and examples. The work is done by [`nccl::launch`].

mod gpus;
mod logs;
mod options;
mod orphans;
mod record;
mod restarts;
mod signals;

use std::io::{IsTerminal, Write};
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::time::Duration;

use nccl::launch::{Output, RankEnd, Report};
use options::{Asked, Options, Restart};
use restarts::Restarts;
use signals::Signals;

fn main() -> ExitCode {
    let arguments = std::env::args_os().skip(1);
    let options = match options::parse(arguments, |name| std::env::var_os(name), gpus::visible) {
        Ok(Asked::Run(options)) => options,
        Ok(Asked::Print(text)) => {
            // A closed pipe, as in `nccl-run --help | head -1`, is no failure.
            let _ = std::io::stdout().lock().write_all(text.as_bytes());
            return ExitCode::SUCCESS;
        }
        Err(sentence) => {
            say(&sentence);
            return ExitCode::from(2);
        }
    };
    match run(*options) {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            say(&error.to_string());
            ExitCode::from(error.code())
        }
    }
}

/// How long standard error may block before a message is dropped.
const PATIENCE: Duration = Duration::from_secs(3);

/// Prints a message on standard error, at most [`PATIENCE`] long.
fn say(text: &str) {
    nccl::launch::write_within(std::io::stderr(), &format!("nccl-run: {text}\n"), PATIENCE);
}

/// Why no ranks were started.
enum Failed {
    Start(nccl::Error),
    Signals(std::io::Error),
}

impl Failed {
    /// The code that a shell returns for a command that it cannot run.
    fn code(&self) -> u8 {
        match self {
            Self::Start(_) => 127,
            Self::Signals(_) => 1,
        }
    }
}

impl std::fmt::Display for Failed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Start(error) => error.fmt(f),
            Self::Signals(error) => write!(f, "signals cannot be received: {error}"),
        }
    }
}

/// Returns the exit code of the surviving ranks: those that outlived the first death and were not killed by a signal of their
/// own. Without a death, returns the report's code.
fn code_of_those_left(report: &Report) -> u8 {
    let Some(first) = report.first.as_ref().map(|end| end.rank) else {
        return report.exit_code();
    };
    // A signal that nccl-run had sent is no death of the rank's own: it counts.
    let was_killed = |end: &RankEnd| end.exit.signal().is_some() && end.asked_by.is_none();
    let left = |end: &&Arc<RankEnd>| end.rank != first && !was_killed(end);
    let mut left: Vec<_> = report.ranks.iter().filter(left).collect();
    left.sort_by_key(|end| end.at);
    let failed = left.iter().find(|end| !end.exit.is_success());
    match failed {
        Some(end) => end.exit.code(),
        None if left.is_empty() || !report.left_behind.is_empty() => report.exit_code(),
        None => 0,
    }
}

fn run(options: Options) -> Result<u8, Failed> {
    // First, so that no signal arrives while ranks run and cannot be passed on.
    let signals = Signals::take().map_err(Failed::Signals)?;
    let Options {
        program,
        arguments,
        restarts,
        ..
    } = &options;
    let (program, arguments) = (program.clone(), arguments.clone());
    let talks = options.nccl_debug.is_some() && std::env::var_os("NCCL_DEBUG").is_none();
    let mut left = *restarts;
    let record = options.record.as_deref().map(record::Directory::new);
    let (here, first, world_size) = options.place();
    let mut builder = options.builder();
    builder.first_reads_stdin = !std::io::stdin().is_terminal();
    builder.output = match (options.prefix, options.tag_time) {
        (false, _) => Output::Plain,
        (true, true) => Output::Timed,
        (true, false) => Output::Prefixed,
    };
    let fleet = builder.start(move |rank| {
        let mut command = Command::new(&program);
        command.args(&arguments);
        // For programs that only know other launchers. Values from the user's shell would not describe these ranks.
        for (name, number) in [
            ("RANK", rank),
            ("WORLD_SIZE", world_size),
            ("LOCAL_RANK", rank - first),
            ("LOCAL_WORLD_SIZE", here),
        ] {
            command.env(name, number.to_string());
        }
        if talks {
            command.env("NCCL_DEBUG", "INFO");
        }
        command
    });
    let fleet = Arc::new(fleet.map_err(Failed::Start)?);
    let logs = logs::watch(fleet.events(), options.log_dir.clone());
    let signals = signals
        .pass_on_to(Arc::clone(&fleet), options.grace)
        .map_err(Failed::Signals)?;
    let exit_code = |report: &Report| match options.keep_others {
        true => code_of_those_left(report),
        false => report.exit_code(),
    };
    let code = loop {
        let report = match options.restart {
            Restart::All => fleet.wait(),
            Restart::Failed => {
                let told_to_end = || signals.told_to_end();
                let restarts = Restarts {
                    left: std::mem::take(&mut left),
                    linger: options.linger,
                    has_others: options.nodes > 1,
                };
                restarts::one_by_one(&fleet, restarts, told_to_end)
            }
        };
        signals.finish_messages();
        if !report.is_success() {
            say(&report.to_string());
        }
        if let Some(said) = record.as_ref().and_then(|record| record.merge(&report)) {
            say(&said);
        }
        if report.first.is_none() || left == 0 || signals.told_to_end() {
            break exit_code(&report);
        }
        left -= 1;
        let generation = match fleet.restart_all() {
            Ok(generation) => generation,
            // A signal has arrived since the report.
            Err(_) if signals.told_to_end() => break exit_code(&report),
            Err(error) => return Err(Failed::Start(error)),
        };
        say(&format!(
            "all ranks are started again, as generation {generation}; {left} restarts are left"
        ));
    };
    signals.end();
    // Ends the fleet's events.
    drop(fleet);
    if let Ok(logs) = logs {
        let _ = logs.join();
    }
    Ok(code)
}
