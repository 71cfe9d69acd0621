//! Starting ranks that have failed again, each alone, while the others run.

use std::time::Duration;

use nccl::launch::{Event, Fleet, Report, Signal};

use crate::say;

/// Starts each rank that fails again, at most `left` times in all; then a failure ends all ranks, after `linger`, as
/// it does without restarts. Until none runs any more.
pub(crate) fn one_by_one(
    fleet: &Fleet,
    mut left: u32,
    linger: Duration,
    told_to_end: impl Fn() -> bool,
) -> Report {
    for event in fleet.events() {
        let end = match event {
            Event::Exited(end) if end.is_failure() && !told_to_end() => end,
            // One that has failed runs again by now.
            Event::Finished => match fleet.wait_timeout(Duration::ZERO) {
                Some(report) => return report,
                None => continue,
            },
            _ => continue,
        };
        if left == 0 {
            if fleet.pids().iter().any(Option::is_some) {
                say(&format!(
                    "{end}; no restarts are left, and the others are to end"
                ));
                let _ = fleet.wait_timeout(linger);
                fleet.stop(Signal::TERM);
            }
            continue;
        }
        left -= 1;
        match fleet.restart(end.rank()) {
            Ok(epoch) => say(&format!(
                "{end}; it is started again alone, as epoch {epoch}; {left} restarts are left"
            )),
            Err(error) => {
                say(&format!("{end}; {error}"));
                fleet.stop(Signal::TERM);
            }
        }
    }
    fleet.wait()
}
