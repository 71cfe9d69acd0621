//! Restarts, and what prevents them.

use std::process::Command;
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use crate::fleet::Fleet;
use crate::output::Output;
use crate::watcher::{FleetCommand, RestartReply};
use crate::{Event, FleetBuilder, Signal, Stream};
use nccl_base::error::Result;

/// Limit of everything here.
const LONG: Duration = Duration::from_secs(20);

/// Ends only by SIGUSR1 and SIGKILL, so that a restart is pending until a test ends the rank.
const STUBBORN: &str = "trap '' TERM; trap 'exit 0' USR1; echo ready; while :; do sleep 0.02; done";

/// The ends of a fleet that a caller may ask for.
const ENDS: [fn(&Fleet); 2] = [|fleet| fleet.stop(Signal::Usr1), Fleet::kill];

/// Two ranks, and their lines of output.
fn two_ranks(script: &str, set: impl FnOnce(&mut FleetBuilder)) -> (Fleet, Receiver<usize>) {
    let (says, lines) = mpsc::channel();
    let builder = Fleet::builder(2).with(|fleet| {
        fleet.observe = false;
        fleet.grace = Duration::from_secs(60);
        fleet.output = Output::Lines(Arc::new(move |line| {
            let _ = says.send(line.rank);
        }));
    });
    let script = script.to_owned();
    let fleet = builder.with(set).start(move |_| {
        let mut command = Command::new("sh");
        command.args(["-c", &script]);
        command
    });
    (fleet.unwrap(), lines)
}

fn stubborn(set: impl FnOnce(&mut FleetBuilder)) -> (Fleet, Receiver<usize>) {
    let (fleet, lines) = two_ranks(STUBBORN, set);
    all_are_ready(&lines);
    (fleet, lines)
}

fn all_are_ready(lines: &Receiver<usize>) {
    for _ in 0..2 {
        lines.recv_timeout(LONG).expect("a rank is ready");
    }
}

/// A restart that another thread asks for: its commands precede those that follow here.
fn request(
    fleet: &Fleet,
    order: impl FnOnce(RestartReply) -> FleetCommand,
) -> Receiver<Result<u64>> {
    let (reply, outcome) = mpsc::channel();
    fleet.send_command(order(reply));
    outcome
}

fn outcome(reply: &Receiver<Result<u64>>) -> std::result::Result<u64, String> {
    let outcome = reply.recv_timeout(LONG).expect("there is an outcome");
    outcome.map_err(|error| error.to_string())
}

fn is_refused(outcome: std::result::Result<u64, String>, words: &str) {
    let error = outcome.expect_err("the ranks were started again");
    assert!(error.contains(words), "{error}");
}

/// Waits for the end, and checks that no rank was started again.
fn ends_in_its_first_generation(fleet: &Fleet) {
    let report = fleet.wait_timeout(LONG).expect("they end");
    assert!(report.left_behind.is_empty(), "{report}");
    assert_eq!(report.ranks.len(), 2);
    assert!(report.ranks.iter().all(|end| end.generation == 0));
}

#[test]
fn a_fleet_that_is_told_to_end_after_its_ranks_ended_is_not_restarted_before_the_next_report() {
    for end in ENDS {
        let (fleet, _) = two_ranks("exit 3", |_| ());
        let report = fleet.wait_timeout(LONG).expect("they end");
        assert_eq!(report.exit_code(), 3);
        end(&fleet);
        for restart in [fleet.restart_all(), fleet.restart(1)] {
            is_refused(restart.map_err(|error| error.to_string()), "told to end");
        }
        ends_in_its_first_generation(&fleet);
        assert_eq!(fleet.restart_all().unwrap(), 1);
        fleet.wait_timeout(LONG).expect("they end");
        end(&fleet);
        fleet.wait_timeout(LONG).expect("they have ended");
        assert_eq!(fleet.restart_all().unwrap(), 2);
    }
}

#[test]
fn a_pending_restart_of_all_ranks_fails_when_the_fleet_is_told_to_end() {
    for end in ENDS {
        let (fleet, _lines) = stubborn(|_| ());
        let restart = request(&fleet, FleetCommand::RestartAll);
        end(&fleet);
        is_refused(outcome(&restart), "told to end");
        ends_in_its_first_generation(&fleet);
    }
}

#[test]
fn a_pending_restart_of_one_rank_fails_when_the_fleet_is_told_to_end() {
    for end in ENDS {
        let (fleet, _lines) = stubborn(|fleet| fleet.keep_others = true);
        let restart = request(&fleet, |reply| FleetCommand::Restart(1, reply));
        end(&fleet);
        is_refused(outcome(&restart), "while the fleet is being ended");
        ends_in_its_first_generation(&fleet);
    }
}

#[test]
fn a_pending_restart_of_one_rank_fails_when_a_failure_ends_all() {
    let (fleet, _lines) = stubborn(|fleet| fleet.linger = Duration::from_secs(60));
    let restart = request(&fleet, |reply| FleetCommand::Restart(1, reply));
    fleet.signal(0, Signal::Kill);
    is_refused(outcome(&restart), "while the fleet is being ended");
    fleet.kill();
    ends_in_its_first_generation(&fleet);
}

#[test]
fn of_restarts_at_once_one_is_done_and_each_caller_is_told() {
    let (fleet, lines) = stubborn(|fleet| fleet.keep_others = true);
    let restart = || request(&fleet, |reply| FleetCommand::Restart(1, reply));
    let restart_all = || request(&fleet, FleetCommand::RestartAll);
    let same = [restart(), restart()];
    fleet.signal(1, Signal::Usr1);
    assert_eq!(same.each_ref().map(outcome), [Ok(1), Ok(1)]);
    lines.recv_timeout(LONG).expect("rank 1 is ready");

    let (before, all, after) = (restart(), [restart_all(), restart_all()], restart());
    fleet.signal_all(Signal::Usr1);
    assert_eq!(all.each_ref().map(outcome), [Ok(2), Ok(2)]);
    is_refused(outcome(&before), "all ranks are being restarted");
    is_refused(outcome(&after), "all ranks are being restarted");
    all_are_ready(&lines);
}

#[test]
fn a_stop_that_arrives_while_a_failed_restart_is_undone_is_handled() {
    let itself: Arc<OnceLock<Weak<Fleet>>> = Arc::default();
    let its = Arc::clone(&itself);
    let mut starts = 0;
    let builder = Fleet::builder(2).with(|fleet| {
        fleet.observe = false;
        fleet.output = Output::Discard;
    });
    let fleet = builder.start(move |_| {
        starts += 1;
        if starts <= 3 {
            let mut command = Command::new("sleep");
            command.arg("60");
            return command;
        }
        // Rank 1 of the second generation cannot be started, and rank 0 has to be ended.
        if let Some(fleet) = its.get().and_then(Weak::upgrade) {
            fleet.stop(Signal::Term);
        }
        Command::new("no-such-program")
    });
    let fleet = Arc::new(fleet.unwrap());
    itself.set(Arc::downgrade(&fleet)).unwrap();
    fleet.restart_all().unwrap_err();
    let report = fleet.wait_timeout(LONG).expect("the stop is handled");
    assert_eq!(report.interrupted, Some(Signal::Term));
}

#[test]
fn times_without_end_are_no_limits() {
    let (fleet, _lines) =
        stubborn(|fleet| (fleet.linger, fleet.grace) = (Duration::MAX, Duration::MAX));
    fleet.signal(0, Signal::Kill);
    let died = |event| matches!(event, Event::Exited(_));
    assert!(fleet.events().any(died));
    fleet.stop(Signal::Term);
    assert!(fleet.wait_timeout(Duration::ZERO).is_none());
    fleet.kill();
    ends_in_its_first_generation(&fleet);
}

#[test]
fn asking_again_does_not_extend_the_grace_period() {
    let (fleet, _lines) = stubborn(|fleet| fleet.grace = Duration::from_millis(500));
    let begun = Instant::now();
    while begun.elapsed() < LONG {
        fleet.stop(Signal::Term);
        if fleet.wait_timeout(Duration::from_millis(50)).is_some() {
            return;
        }
    }
    panic!("the ranks were never killed");
}

#[test]
fn a_command_whose_function_panics_is_a_rank_that_cannot_be_started() {
    let mut starts = 0;
    let builder = Fleet::builder(1).with(|fleet| {
        fleet.observe = false;
        fleet.keep_others = true;
        fleet.output = Output::Discard;
    });
    let fleet = builder.start(move |_| {
        starts += 1;
        assert_eq!(starts, 1, "there is no second command");
        Command::new("true")
    });
    let fleet = fleet.unwrap();
    fleet.wait_timeout(LONG).expect("it ends");
    let restart = fleet.restart(0).map_err(|error| error.to_string());
    is_refused(restart, "has panicked");
    fleet.wait_timeout(LONG).expect("none runs");
}

#[test]
fn a_function_that_panics_is_given_no_more_of_that_stream() {
    let (says, lines) = mpsc::channel();
    let output = Output::Lines(Arc::new(move |line| {
        says.send((line.stream, line.bytes.to_vec())).unwrap();
        assert_eq!(line.stream, Stream::Stderr, "this test is about panics");
    }));
    let builder = Fleet::builder(1).with(|fleet| {
        fleet.observe = false;
        fleet.output = output;
    });
    let fleet = builder.start(|_| {
        let mut command = Command::new("sh");
        command.args(["-c", "echo one; echo two; echo err >&2"]);
        command
    });
    let fleet = fleet.unwrap();
    let report = fleet.wait_timeout(LONG).expect("it ends");
    assert!(report.is_success(), "{report}");
    let events = fleet.events();
    drop(fleet);
    let cut = events.filter(|event| matches!(event, Event::OutputCut { .. }));
    assert_eq!(cut.count(), 1);
    let mut lines: Vec<_> = lines.iter().collect();
    lines.sort_by_key(|(stream, _)| *stream as usize);
    let expected = [(Stream::Stdout, "one"), (Stream::Stderr, "err")];
    assert_eq!(lines, expected.map(|(stream, text)| (stream, text.into())));
}

#[test]
fn a_process_that_has_left_its_rank_and_goes_on_printing_is_not_waited_for() {
    let directory = tempfile::tempdir().unwrap();
    let there = directory.path().join("there");
    // Long lines, because the function is called for each.
    let script = format!(
        "echo of the rank
         setsid sh -c ': > {0}; exec yes {1}' & while ! [ -e {0} ]; do sleep 0.01; done; printf rest >&2; exit 3",
        there.display(),
        "x".repeat(4000)
    );
    let (says, lines) = mpsc::channel();
    let builder = Fleet::builder(1).with(|fleet| {
        fleet.observe = false;
        fleet.output = Output::Lines(Arc::new(move |line| {
            // Also where its line was cut.
            if line.bytes.iter().any(|&byte| byte != b'x') {
                let _ = says.send(line.bytes.to_vec());
            }
            // Slower than the process prints.
            std::thread::sleep(Duration::from_millis(5));
        }));
    });
    let fleet = builder.start(move |_| {
        let mut command = Command::new("sh");
        command.args(["-c", &script]);
        command
    });
    let fleet = fleet.unwrap();
    let report = fleet.wait_timeout(LONG).expect("the rank has ended");
    assert_eq!(report.exit_code(), 3);
    let mut lines: Vec<_> = lines.try_iter().collect();
    lines.sort();
    assert_eq!(lines, [b"of the rank".to_vec(), b"rest".to_vec()]);
}
