//! Restarts failed ranks: each alone while other ranks of the world run, or all of them when all have failed.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use nccl::launch::{Event, Fleet, Report, Signal};

use crate::say;

/// Within this time after the end of a rank, ends of other ranks have the same cause: a bug, or a `kill` of all.
const TOGETHER: Duration = Duration::from_millis(50);

/// After this time, a rank that was restarted alone counts as a member of the world, even without a report to the fleet.
const TAKEN_IN: Duration = Duration::from_secs(60);

/// The settings of restarts.
pub(crate) struct Restarts {
    /// The remaining restarts.
    pub(crate) left: u32,
    /// How long other ranks may continue when no restart is left.
    pub(crate) linger: Duration,
    /// Whether there are ranks on other machines, which this process does not see.
    pub(crate) has_others: bool,
}

/// Restarts each failed rank: alone while other ranks of the world run, and all ranks if all have failed. A failure ends all
/// ranks when no restart is left, or when a rank has ended successfully and no rank is left that a restarted one could join.
/// Returns when no rank runs any more.
pub(crate) fn one_by_one(
    fleet: &Fleet,
    restarts: Restarts,
    told_to_end: impl Fn() -> bool,
) -> Report {
    let Restarts {
        mut left,
        linger,
        has_others,
    } = restarts;
    let mut events = fleet.events();
    // The times at which ranks were restarted alone, for ranks that may still be looking for the others.
    let mut alone: HashMap<usize, Instant> = HashMap::new();
    // Ends before a restart of all ranks no longer count.
    let mut since = 0;
    let mut running = HashSet::new();
    let mut has_one_ended_well = false;
    while let Some(event) = events.next() {
        let mut heard = vec![event];
        if heard.iter().any(is_failure) {
            let until = Instant::now() + TOGETHER;
            let wait = || until.saturating_duration_since(Instant::now());
            heard.extend(std::iter::from_fn(|| events.next_within(wait())));
        }
        let mut finished = false;
        let mut ends = Vec::new();
        for event in heard {
            match event {
                Event::Started { rank, .. } => {
                    running.insert(rank);
                }
                Event::Exited(end) if end.generation >= since => {
                    running.remove(&end.rank);
                    has_one_ended_well |= end.exit.is_success();
                    if end.is_failure() && !told_to_end() {
                        alone.remove(&end.rank);
                        ends.push(end);
                    }
                }
                Event::Finished => finished = true,
                _ => {}
            }
        }
        let are_all_gone =
            !ends.is_empty() && !has_others && !is_any_left(fleet, &running, &mut alone);
        if left > 0 && are_all_gone && !has_one_ended_well {
            left -= 1;
            match fleet.restart_all() {
                Ok(generation) => {
                    let who: Vec<_> = ends.iter().map(ToString::to_string).collect();
                    say(&format!(
                        "{}; no other rank of the world is left: all ranks are started again, as generation {generation}; {left} \
                         restarts are left",
                        who.join("; ")
                    ));
                    since = generation;
                    has_one_ended_well = false;
                    alone.clear();
                    ends.clear();
                }
                // A signal has arrived meanwhile: the report follows.
                Err(_) if told_to_end() => ends.clear(),
                Err(error) => say(&error.to_string()),
            }
        }
        for end in ends {
            let cannot_come_in = are_all_gone && has_one_ended_well;
            if left == 0 || cannot_come_in {
                let why_not = match cannot_come_in {
                    true => "ranks have ended well, and none is left that could take it in",
                    false => "no restarts are left",
                };
                if fleet.pids().iter().any(Option::is_some) {
                    say(&format!("{end}; {why_not}; the others are to end"));
                    let _ = fleet.wait_timeout(linger);
                    fleet.stop(Signal::Term);
                } else if cannot_come_in {
                    say(&format!("{end}; {why_not}"));
                }
                continue;
            }
            left -= 1;
            match fleet.restart(end.rank) {
                Ok(generation) => {
                    alone.insert(end.rank, Instant::now());
                    say(&format!(
                        "{end}; it is started again alone, as generation {generation}; {left} restarts are left"
                    ));
                }
                Err(_) if told_to_end() => {}
                Err(error) => {
                    say(&format!("{end}; {error}"));
                    fleet.stop(Signal::Term);
                }
            }
        }
        // Not if a failed rank has been restarted meanwhile.
        if finished && let Some(report) = fleet.wait_timeout(Duration::ZERO) {
            return report;
        }
    }
    fleet.wait()
}

fn is_failure(event: &Event) -> bool {
    matches!(event, Event::Exited(end) if end.is_failure())
}

/// Whether a running rank could admit a restarted one: ranks that are still looking for the others cannot.
fn is_any_left(
    fleet: &Fleet,
    running: &HashSet<usize>,
    alone: &mut HashMap<usize, Instant>,
) -> bool {
    let joined = fleet.joined();
    alone.retain(|rank, at| !joined.contains(rank) && at.elapsed() < TAKEN_IN);
    running.iter().any(|rank| !alone.contains_key(rank))
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::process::Command;

    use nccl::launch::Output;

    use super::*;

    #[test]
    fn a_signal_that_arrives_right_before_a_restart_prevents_it() {
        // Both ranks fail, or one of two.
        for others in ["exit 3", "sleep 60"] {
            let builder = Fleet::builder(2).with(|fleet| {
                fleet.output = Output::Discard;
                fleet.keep_others = true;
                fleet.observe = false;
            });
            let fleet = builder.start(move |rank| {
                let mut command = Command::new("sh");
                command.args(["-c", ["exit 3", others][rank]]);
                command
            });
            let fleet = fleet.unwrap();
            // The signal arrives when the first check has been made.
            let told = Cell::new(false);
            let told_to_end = || {
                let before = told.replace(true);
                if !before {
                    fleet.stop(Signal::Term);
                }
                before
            };
            let restarts = Restarts {
                left: 5,
                linger: Duration::ZERO,
                has_others: false,
            };
            let report = one_by_one(&fleet, restarts, told_to_end);
            assert!(
                report.ranks.iter().all(|end| end.generation == 0),
                "{report}"
            );
            assert_eq!(report.exit_code(), 3, "{report}");
        }
    }
}
