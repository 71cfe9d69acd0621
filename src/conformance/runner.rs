//! Runs programs, each in a process of its own, and collects their facts.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use nccl::launch;
use nccl_sys::Version;
use parking_lot::Mutex;
use serde_json::{Value, json};

use super::{FACT, Facts, Needs, PROGRAMS, Program};
use crate::failure::{Exit, Failure};
use crate::raw::{self, Way};
use crate::spawn::{Job, Outcome, Output, RankFailure};

/// How long a program with ranks may take.
const DEADLINE: Duration = Duration::from_secs(120);

/// How long a program may take that only uses the library.
const LIBRARY_DEADLINE: Duration = Duration::from_secs(20);

/// Programs that run at a time: they wait more than they compute.
const AT_A_TIME: usize = 3;

/// The subject of facts that the emulator's own NCCL gave.
pub(super) const EMULATOR: &str = "the emulator";

/// Which programs to run, and how.
#[derive(Clone, Copy, Debug)]
pub struct Selection<'a> {
    /// How ranks are arranged.
    pub way: Way,
    /// Whether to leave out the programs that need a device.
    pub library_only: bool,
    /// The only program to run.
    pub name: Option<&'a str>,
    /// The release that the emulator acts as; otherwise the environment decides.
    pub release: Option<Version>,
}

/// All programs.
pub fn programs() -> impl Iterator<Item = &'static Program> {
    PROGRAMS.iter().copied().flatten()
}

/// Runs this program in this process, and ends it.
///
/// # Errors
/// When there is no such program.
pub fn one(name: &str, way: Way) -> Result<(), Failure> {
    let Some(program) = programs().find(|program| program.name == name) else {
        return Err(Failure::usage(format!("there is no program `{name}`")));
    };
    let result = match program.needs {
        Needs::Library(body) => nccl_emulator::install_unless_gpu()
            .map_err(Into::into)
            .and_then(|_| body(&Facts { rank: None })),
        Needs::Ranks(ranks, body) => raw::run(way, ranks, DEADLINE, move |rank| {
            let facts = Facts {
                rank: (ranks > 1).then_some(rank.world.rank()),
            };
            body(rank, &facts)
        }),
    };
    if let Err(error) = &result {
        match error.downcast_ref::<RankFailure>() {
            // Without process and time: the text is compared with that of another run.
            Some(failure) => eprintln!("{failure:#}"),
            None => eprintln!("{error}"),
        }
    }
    raw::leave(i32::from(result.is_err()))
}

/// Runs the selected programs; returns the facts as JSON, and how many programs did not complete.
///
/// # Errors
/// When a process cannot be started.
pub fn all(selection: Selection<'_>) -> Result<(Value, usize), Failure> {
    let selected: Vec<_> = programs()
        .filter(|program| selection.name.is_none_or(|name| name == program.name))
        .filter(|program| !selection.library_only || matches!(program.needs, Needs::Library(_)))
        .collect();
    let next = AtomicUsize::new(0);
    let collected = Mutex::new((serde_json::Map::new(), 0));
    let work = || -> Result<(), Failure> {
        while let Some(program) = selected.get(next.fetch_add(1, Ordering::Relaxed)) {
            let (outcome, facts) = run(program, selection.way, selection.release)?;
            println!("{:<28} {outcome}, {} facts", program.name, facts.len());
            let mut collected = collected.lock();
            collected.1 += usize::from(outcome != Ending::Ended);
            collected.0.insert(
                program.name.to_owned(),
                json!({"about": program.about, "outcome": outcome.to_string(), "facts": facts}),
            );
        }
        Ok(())
    };
    thread::scope(|scope| {
        let workers: Vec<_> = (0..AT_A_TIME).map(|_| scope.spawn(work)).collect();
        let ended = workers.into_iter().map(|worker| {
            let panicked = |_| Failure::new(Exit::Failed, "a worker panicked".to_owned());
            worker.join().map_err(panicked).and_then(|done| done)
        });
        ended.collect::<Result<(), Failure>>()
    })?;
    let (found, unfinished) = collected.into_inner();
    let subject = format!("NCCL {}", std::env::var("NCCL_LIBRARY").unwrap_or_default());
    let emulated = std::env::var("NCCL_EMULATOR").is_ok_and(|value| value == "1");
    let carried = std::env::var("NCCL_EMULATOR_NCCL").unwrap_or_default();
    let subject = match (emulated, carried.is_empty()) {
        (true, true) => EMULATOR.to_owned(),
        (true, false) => format!("NCCL {carried} on the emulator's driver"),
        (false, _) => subject.trim().to_owned(),
    };
    let facts = json!({
        "subject": subject,
        "arrangement": selection.way.to_string(),
        "programs": found,
    });
    Ok((facts, unfinished))
}

/// How one program ended, and its observations until then.
fn run(
    program: &Program,
    way: Way,
    release: Option<Version>,
) -> Result<(Ending, BTreeMap<String, String>), Failure> {
    let failed = |error: &dyn std::fmt::Display| Failure::new(Exit::Failed, error.to_string());
    let this = std::env::current_exe().map_err(|error| failed(&error))?;
    let deadline = match program.needs {
        Needs::Library(_) => LIBRARY_DEADLINE,
        // A little longer than the program's own timeout for its ranks.
        Needs::Ranks(..) => DEADLINE + Duration::from_secs(10),
    };
    let job = Job::new(1).output(Output::Collect).deadline(deadline);
    let ended = job
        .run(|_| {
            let mut command = Command::new(&this);
            command
                .args(["one", program.name, "--arrangement", &way.to_string()])
                .envs(program.environment.iter().copied())
                .envs(release.map(|release| ("NCCL_EMULATOR_VERSION", release.to_string())));
            command
        })
        .map_err(|error| failed(&error))?;
    let rank = &ended.ranks[0];
    let mut facts = BTreeMap::new();
    for line in &rank.stdout {
        if let Some((what, value)) = line
            .strip_prefix(FACT)
            .and_then(|fact| fact.split_once('\t'))
        {
            // The same name again: all values, in order.
            facts
                .entry(what.to_owned())
                .and_modify(|before: &mut String| {
                    before.push_str("; ");
                    before.push_str(value);
                })
                .or_insert_with(|| value.to_owned());
        }
    }
    let outcome = match ended.outcome {
        Outcome::Succeeded => Ending::Ended,
        Outcome::TimedOut(_) => Ending::Hung,
        Outcome::Failed(_) | Outcome::OutputClosed => {
            let last = rank.stderr.last().map_or("no word", String::as_str);
            let how = match rank.exit {
                Some(launch::Exit::Code(code)) => format!("exit status: {code}"),
                Some(launch::Exit::Signal { signal, .. }) => {
                    format!("signal: {} ({signal})", signal.number())
                }
                _ => String::from("not ended"),
            };
            Ending::Failed(format!("{how}: {last}"))
        }
    };
    Ok((outcome, facts))
}

/// The end of a program.
#[derive(Debug, PartialEq, Eq)]
enum Ending {
    Ended,
    Hung,
    Failed(String),
}

impl fmt::Display for Ending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ended => "ended",
            Self::Hung => "hung",
            Self::Failed(how) => how,
        })
    }
}

/// The release of these facts, if the program that queries it ran.
#[must_use]
pub fn release(facts: &Value) -> Option<Version> {
    let code = facts["programs"]["version"]["facts"]["version"].as_str()?;
    Version::from_code(code.parse().ok()?)
}

/// Writes facts to a file.
///
/// # Errors
/// The file system's.
pub fn write(facts: &Value, path: &Path) -> Result<(), Failure> {
    std::fs::write(path, format!("{facts:#}\n"))
        .map_err(|error| Failure::usage(format!("{}: {error}", path.display())))
}
