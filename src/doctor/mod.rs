//! `nccl-doctor`: checks whether NCCL can work here, and reads its logs after a failure.
//!
//! - `options`: the command line; `local`: libnccl, the driver and the device of one rank;
//! - `job`: a running job; `timeline`: the flight recorders of all its ranks; `decide`: the operator's decision for it;
//! - `check`: one host, or all ranks of a launcher; `host`: the evidence of a host's kernel; `log`: NCCL's debug logs; `ras`:
//!   NCCL's RAS service.
//!
//! The checks themselves are in `nccl::preflight` and `nccl::debug_log`.

mod check;
mod decide;
mod host;
mod job;
mod local;
mod log;
mod options;
mod ras;
mod timeline;

use std::io::Write as _;
use std::process::ExitCode;

use nccl::preflight::{Finding, Severity};
use serde_json::Value;

use crate::report::{self, Style};
use options::Command;
pub use timeline::{clean, summary, write_beside};

/// The exit code when nothing could be checked: wrong arguments, or no input.
const COULD_NOT_CHECK: u8 = 3;

/// The program.
#[must_use]
pub fn main() -> ExitCode {
    let command = match options::parse(std::env::args_os().skip(1)) {
        Ok(command) => command,
        Err(why) => return could_not(&why),
    };
    match command {
        Command::Help => print(options::HELP),
        Command::Version => print(&format!("nccl-doctor {}\n", env!("CARGO_PKG_VERSION"))),
        Command::Check(options) => check::run(&options),
        Command::Log(options) => log::run(&options),
        Command::Timeline(options) => timeline::run(&options),
        Command::Decide(options) => decide::run(&options),
        Command::Ras(options) => ras::run(&options),
    }
}

fn could_not(why: &str) -> ExitCode {
    complain(&clean(why));
    ExitCode::from(COULD_NOT_CHECK)
}

/// Prints to standard error, which may have no reader.
fn complain(text: &str) {
    let _ = writeln!(std::io::stderr().lock(), "nccl-doctor: {text}");
}

/// Prints to standard output. A failure is reported by the exit code alone: the reader has closed the pipe.
fn print(text: &str) -> ExitCode {
    let mut out = std::io::stdout().lock();
    let written = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    ExitCode::from(if written.is_ok() { 0 } else { COULD_NOT_CHECK })
}

/// The exit code: 0 for `Ok`, 1 for warnings, 2 for errors.
fn code(worst: Severity) -> u8 {
    match worst {
        Severity::Ok => 0,
        Severity::Warning => 1,
        _ => 2,
    }
}

/// The form of a report.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Form {
    json: bool,
    quiet: bool,
}

/// Prints a report: `head` before the lines, or `facts` beside the findings of the JSON.
fn show(form: Form, head: &str, facts: impl FnOnce() -> Value, entries: &[Finding]) -> ExitCode {
    let code = code(report::worst(entries));
    let text = if form.json {
        let mut facts = facts();
        facts["findings"] = entries.iter().map(report::json).collect();
        facts["worst"] = report::worst(entries).to_string().into();
        facts["exit_code"] = code.into();
        format!("{facts:#}\n")
    } else {
        let lines = report::text(entries, Style::of(&std::io::stdout()), form.quiet);
        format!("{head}{lines}")
    };
    if print(&text) == ExitCode::SUCCESS {
        ExitCode::from(code)
    } else {
        ExitCode::from(COULD_NOT_CHECK)
    }
}
