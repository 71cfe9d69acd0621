//! What this crate attaches to the lines of the control plane: the recorder's home of a rank, and the watch over its
//! communicators.

use std::any::Any;
use std::sync::{Arc, Once};
use std::time::Duration;

use super::records::{Records, home_of, written};
use super::watch::Watch;
use crate::forked;
use crate::reaper;
use crate::recorder::{MissingRank, RankRecording, Timeline};
use crate::rendezvous::{
    Asked, Attached, ClockReading, Host, Line, Watcher, say_goodbye, set_host,
};
use nccl_base::fault::Fault;
use nccl_core::recorder::{self, Clock, Home, Snapshot};

/// Registers this crate with the control plane, before the first line is opened.
pub(crate) fn introduce() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        set_host(&Program);
        reaper::at_exit_say(say_goodbye);
    });
}

struct Program;

impl Host for Program {
    fn opens(
        &self,
        job: &str,
        generation: u64,
        rank: usize,
        world_size: usize,
    ) -> Arc<dyn Attached> {
        Arc::new(Records(Home::new(job, generation, rank, world_size)))
    }

    fn recording(&self, most: usize) -> Vec<u8> {
        written(recorder::snapshot(), most)
    }

    fn last_call(&self) -> Option<String> {
        recorder::last_call()
    }
}

impl Watcher for Watch {
    fn latest(&self) -> Option<Arc<Fault>> {
        Watch::latest(self)
    }

    fn end_all(&self, reason: &str, kept: &[&str]) {
        Watch::end_all(self, reason, kept);
    }
}

/// What is attached to a line.
pub(crate) trait OfLine {
    /// Returns the home under which its communicators record their calls.
    fn home(&self) -> Arc<Home>;

    /// Returns the watch over its communicators.
    fn watch(&self) -> Arc<Watch>;
}

impl OfLine for Arc<Line> {
    fn home(&self) -> Arc<Home> {
        home_of(self)
    }

    fn watch(&self) -> Arc<Watch> {
        let watcher = self.watcher(|line| {
            reaper::register_exit();
            Watch::start(line)
        });
        let watcher: Arc<dyn Any + Send + Sync> = watcher as _;
        match watcher.downcast() {
            Ok(watch) => watch,
            Err(_) => unreachable!("nobody else looks after communicators"),
        }
    }
}

/// Returns what all ranks of a line did last.
pub(crate) fn recordings(line: &Arc<Line>, timeout: Duration) -> Timeline {
    if forked::is_child() {
        return Timeline::default();
    }
    let home = line.home();
    let own = |rank| {
        let snapshot = recorder::of_place(&home.place().of_rank(rank));
        RankRecording::new(rank, Clock::REFERENCE, snapshot)
    };
    let reference = line.describe(line.rank());
    // Copies the own recording before asking the others, which may take long: it must not be overwritten meanwhile.
    let mine = own(line.rank());
    match line.ask_for_recordings(timeout, &decode) {
        Some(asked) => timeline(reference, vec![mine], asked),
        // All ranks are threads of this process.
        None => {
            let (job, generation) = line.job();
            let asked = Asked {
                job: job.to_owned(),
                generation,
                answers: Vec::new(),
                missing: Vec::new(),
            };
            timeline(reference, (0..line.size()).map(own).collect(), asked)
        }
    }
}

pub(crate) fn decode(
    rank: usize,
    reading: ClockReading,
    bytes: &[u8],
) -> Result<RankRecording, String> {
    if bytes.is_empty() {
        return Err(String::from("its program records nothing"));
    }
    let text = std::str::from_utf8(bytes).map_err(|error| error.to_string())?;
    let snapshot = Snapshot::from_json(text).map_err(|error| error.to_string())?;
    let clock = Clock::measured(reading.ahead, reading.round_trip);
    Ok(RankRecording::new(rank, clock, snapshot))
}

pub(crate) fn timeline(
    reference: String,
    mut ranks: Vec<RankRecording>,
    asked: Asked<RankRecording>,
) -> Timeline {
    ranks.extend(asked.answers);
    ranks.sort_by_key(|one| one.rank);
    let missing = asked.missing.into_iter();
    let missing = missing
        .map(|one| MissingRank::new(one.rank, one.host, one.pid, one.why))
        .collect();
    Timeline::new((asked.job, asked.generation), reference, ranks, missing)
}
