//! The guarantees of a step of the GPU check: it ends at its deadline, and leaves no process behind.

use std::path::Path;
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nccl_tools::gpu_check::processes::Token;
use nccl_tools::gpu_check::step::{Outcome, Record, Step};

/// A step collects all ended children of its process, so one runs at a time.
static ALONE: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs a shell script as a step, and checks that no process is left.
fn run(script: &str, deadline: Duration) -> Record {
    let logs = tempfile::tempdir().expect("a directory");
    let token = Token::new().expect("the kernel lets orphans be adopted");
    let mut command = Command::new("sh");
    command.args(["-c", script]);
    let step = Step {
        name: "a step".to_owned(),
        command,
        deadline,
        counts: true,
    };
    let record = step.run(logs.path(), &token).expect("a log");
    let left = token.processes();
    assert!(left.is_empty(), "{left:?}");
    assert!(Path::new(&record.log).exists());
    record
}

const LONG: Duration = Duration::from_secs(60);

#[test]
fn a_step_that_hangs_ends_at_its_deadline_with_all_it_started() {
    let _alone = alone();
    let begun = Instant::now();
    // One child in the group, one in a session of its own.
    let record = run(
        "sleep 600 & setsid sleep 600 & sleep 600",
        Duration::from_millis(300),
    );
    assert_eq!(
        record.outcome,
        Outcome::TimedOut(Duration::from_millis(300))
    );
    assert!(begun.elapsed() < Duration::from_secs(20));
}

#[test]
fn a_step_that_does_not_listen_is_killed() {
    let _alone = alone();
    let record = run(
        "trap '' TERM; while true; do sleep 1; done",
        Duration::from_millis(300),
    );
    assert!(matches!(record.outcome, Outcome::TimedOut(_)));
}

#[test]
fn a_step_that_leaves_a_process_behind_has_failed_and_names_it() {
    let _alone = alone();
    // The shell has ended; its child has left its group.
    let record = run("setsid sleep 611 & sleep 0.2", LONG);
    match &record.outcome {
        Outcome::Failed(text) => {
            assert!(text.contains("left a process behind"), "{text}");
            assert!(text.contains("sleep 611"), "{text}");
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_step_says_how_it_ended_and_what_it_said_last() {
    let _alone = alone();
    let passed = run("echo fine", LONG);
    assert_eq!(passed.outcome, Outcome::Passed);
    assert_eq!(passed.tail, ["fine"]);
    let failed = run("echo not so fine; exit 3", LONG);
    assert_eq!(failed.outcome, Outcome::Failed("exit code 3".to_owned()));
    assert_eq!(failed.tail, ["not so fine"]);
    let killed = run("kill -KILL $$", LONG);
    assert_eq!(
        killed.outcome,
        Outcome::Failed("killed by signal 9".to_owned())
    );
    let leave = |verdict: &str| format!("echo '{verdict}' >> $NCCL_TOOLS_VERDICTS");
    let none = leave(r#"{"not_tested":"there is no second device"}"#);
    let skipped = run(&none, LONG);
    assert_eq!(
        skipped.outcome,
        Outcome::Skipped("there is no second device".to_owned())
    );
    // A failed step does not count as left out, whatever it reports.
    let both = run(&format!("{none}; exit 1"), LONG);
    assert_eq!(both.outcome, Outcome::Failed("exit code 1".to_owned()));
    // Nor does a step that tried a part.
    let part = format!("{none}; {}", leave(r#"{"tested":"2 ranks as threads"}"#));
    assert_eq!(run(&part, LONG).outcome, Outcome::Passed);
    // Printed text alone has no effect.
    let said = run("echo 'NOT TESTED: this'", LONG);
    assert_eq!(said.outcome, Outcome::Passed);
}
