//! `real-nccl valgrind`: runs tests of a few ranks on NVIDIA's library under valgrind's memory checker. NCCL, the
//! driver and this workspace must not access invalid memory.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use super::environment::Environment;
use super::{Asked, FEATURE, each};
use crate::Result;
use crate::workspace::{self, cargo};

/// Valgrind is some twenty times slower than native execution, and runs one thread at a time.
const LIMIT: Duration = Duration::from_secs(300);

/// The number of rounds of the test of plans; 8 by default. A round takes about a second, and the process 45 s in addition.
/// Memory does not grow with the rounds, so one process runs all of them.
const ROUNDS: &str = "NCCL_TEST_ROUNDS";

/// Added to the limit for each round: more than the test allows for it.
const ROUND: Duration = Duration::from_secs(5);

/// The tests, by binary: tests of about two ranks, each of which ends within its own limit even at this speed.
const TESTS: &[(&str, &[&str])] = &[
    (
        "api",
        &[
            "operations::a_failed_closure_issues_nothing_and_leaves_the_communicator_as_it_was",
            "operations::buffers_that_do_not_fit_are_refused_before_nccl_is_asked",
            "operations::messages_to_one_peer_arrive_in_the_order_they_were_recorded",
            "operations::nothing_to_send_is_no_operation_for_nccl_and_done_at_once",
            "operations::one_communicator_serves_several_threads",
            "plans::plans_that_come_and_go_with_their_communicators_leave_nothing_behind",
        ],
    ),
    (
        "profiler_storm",
        &["a_profiler_survives_whatever_ends_communicators_between_processes"],
    ),
];

/// Reports that are not errors, each with its reason.
const SUPPRESSIONS: &str = include_str!("valgrind.supp");

pub(super) fn run(asked: &Asked, behind: &[OsString]) -> Result {
    let version = workspace::output(Command::new("valgrind").arg("--version"))
        .map_err(|error| format!("valgrind is needed (apt-get install valgrind): {error}"))?;
    let release = asked.one()?;
    let environment = Environment::new(&release, None);
    eprintln!("{environment}");
    eprint!("real-nccl: {version}");
    let mut options = each::Options::parse(behind)?;
    options.only(TESTS.iter().flat_map(|(_, tests)| *tests));
    let mut command = cargo();
    command.args(["test", "--no-run", "--package", "nccl-tests"]);
    command.args([
        "--features",
        FEATURE,
        "--message-format=json-render-diagnostics",
    ]);
    for (binary, _) in TESTS {
        command.args(["--test", binary]);
    }
    let built = each::Built::of_messages(&workspace::output(&mut command)?);
    let logs = tempfile::tempdir()?;
    let suppressions = logs.path().join("suppressions");
    fs::write(&suppressions, SUPPRESSIONS)?;
    let mut under: Vec<OsString> = [
        "valgrind",
        "--trace-children=yes",
        // The loader patches calls in code that may have run, and waiting threads spin.
        "--smc-check=all",
        "--fair-sched=yes",
        "--num-callers=24",
    ]
    .map(OsString::from)
    .into();
    under.push(format!("--suppressions={}", suppressions.display()).into());
    under.push(format!("--log-file={}/%p.log", logs.path().display()).into());
    let rounds: u32 = match std::env::var(ROUNDS) {
        Ok(rounds) => rounds
            .parse()
            .map_err(|error| format!("{ROUNDS}: {error}"))?,
        Err(_) => 0,
    };
    let way = each::Way {
        limit: LIMIT + ROUND * rounds,
        under: &under,
        prepare: &|command| {
            environment.apply(command.env("NCCL_TEST_PATIENCE", "4"));
        },
    };
    let outcome = each::run(&built, &each::Exceptions::default(), &options, &way);
    let found = errors(logs.path())?;
    for text in &found {
        eprintln!("{text}");
    }
    outcome?;
    match found.len() {
        0 => Ok(()),
        processes => Err(format!("valgrind has found errors in {processes} processes").into()),
    }
}

/// The report of valgrind for each process with an error.
fn errors(logs: &Path) -> Result<Vec<String>> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(logs)? {
        let path = entry?.path();
        if path.extension().is_none_or(|extension| extension != "log") {
            continue;
        }
        let text = fs::read_to_string(&path)?;
        if has_errors(&text) {
            found.insert(path, text);
        }
    }
    Ok(found.into_values().collect())
}

/// A process that was killed has no summary.
fn has_errors(log: &str) -> bool {
    let kinds = [
        "Invalid ",
        "uninitialised",
        "unaddressable",
        "Jump to the invalid",
        "Mismatched ",
        "overlap",
        "Process terminating",
    ];
    kinds.iter().any(|kind| log.contains(kind))
}

#[cfg(test)]
mod tests {
    use super::has_errors;

    #[test]
    fn an_error_is_seen_also_where_the_process_was_killed() {
        let good = "==1== Memcheck, a memory error detector\n==1== ERROR SUMMARY: 0 errors from 0 contexts\n";
        assert!(!has_errors(good));
        assert!(has_errors(
            "==1== Thread 2:\n==1== Invalid read of size 8\n"
        ));
    }
}
