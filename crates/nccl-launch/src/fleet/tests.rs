//! Restarts, and what prevents them.

use std::process::Command;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver};
use std::time::Duration;

use crate::fleet::Fleet;
use crate::output::Output;
use crate::watcher::{FleetCommand, RestartReply};
use crate::{FleetBuilder, Signal};
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
