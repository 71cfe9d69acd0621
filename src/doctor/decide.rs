//! Applies the operator's decision after a network was cut: which ranks go on.

use std::process::ExitCode;
use std::time::Instant;

use nccl::control::WorldEvent;

use super::job::observe;
use super::options::DecideOptions;
use super::{could_not, print};

pub(super) fn run(options: &DecideOptions) -> ExitCode {
    match decide(options) {
        Ok(text) => print(&text),
        Err(why) => could_not(&why),
    }
}

fn decide(options: &DecideOptions) -> Result<String, String> {
    let deadline = Instant::now() + options.timeout;
    let observer = observe(&options.job, options.timeout)?;
    let mut events = observer.events();
    let decided = observer.decide_split(&options.ranks);
    decided.map_err(|error| error.to_string())?;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        match events.next_within(left) {
            Some(WorldEvent::SplitDecided { ranks, .. }) => {
                return Ok(format!(
                    "nccl-doctor: the ranks have heard it: {ranks:?} may go on by World::next_generation\n"
                ));
            }
            Some(WorldEvent::Ended { why, .. }) => {
                return Err(format!("the ranks have not heard it: {why}"));
            }
            Some(_) => {}
            None => {
                return Err(format!(
                    "the ranks have not heard it within {:?}: those that are reached are too few even with this word, or none \
                     of them wants to go on",
                    options.timeout
                ));
            }
        }
    }
}
