//! Stragglers: the ranks that have not entered an operation in which this rank waits. This is a rank's part: when to
//! ask, and what to answer.
//!
//! The watchdog does both; nothing is added to the path of an operation. The watchdog suspects a straggler when a
//! collective has run for a tenth of its timeout ([`Timeouts::straggler`](crate::Timeouts::straggler)), and reports
//! that to the coordinator (`inquiry`), which asks each rank once. A rank answers from what its communicator has
//! recorded and counted anyway. While a rank has not entered the operation, its watchdog checks again until it has.
//! Higher ranks wait up to a quarter longer before they suspect a straggler, so that mostly one rank asks, and a rank
//! that was asked about an operation does not ask about it.
//!
//! The first rank also asks every half minute about a completed collective, to measure how far apart the ranks arrive
//! (`CommunicatorStats::arrival_skew`).

use std::time::{Duration, Instant};

use crate::communicator::TemporaryHandle;
use crate::peers::{StragglerQuery, Supervisor};
use crate::recorder::{CollectiveIndex, Track, origin};
use crate::state::State;

/// How long the first rank of a communicator waits before it first measures how far apart the ranks arrive, and then
/// between two measurements.
pub(super) const SAMPLES: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(30)];

/// The shortest and the longest pause between two checks whether this rank has entered an operation.
const PAUSES: [Duration; 2] = [Duration::from_millis(1), Duration::from_millis(50)];

/// An operation that other ranks wait in, and about which this rank was asked whether it has entered it.
pub struct OpenQuery {
    asker: Box<dyn StragglerQuery>,
    key: String,
    collective: u64,
    is_sample: bool,
    has_answered: bool,
    /// When to look again.
    pub(super) next: Instant,
    pause: Duration,
}

impl OpenQuery {
    /// A query about the `collective`-th collective of the communicator that all ranks call `key`; answered once if it
    /// `is_sample`.
    #[must_use]
    pub fn new(
        asker: Box<dyn StragglerQuery>,
        key: &str,
        collective: u64,
        is_sample: bool,
    ) -> Self {
        Self {
            asker,
            key: key.to_owned(),
            collective,
            is_sample,
            has_answered: false,
            next: Instant::now(),
            pause: PAUSES[0],
        }
    }

    /// Whether both are about the same communicator of the same rank.
    pub(super) fn is_about(&self, other: &Self) -> bool {
        self.key == other.key && self.asker.connection() == other.asker.connection()
    }

    /// Answers what can be answered. Returns whether to look again.
    pub(super) fn poll(&mut self) -> bool {
        if !self.asker.is_there() {
            return false;
        }
        self.next = Instant::now() + self.pause;
        self.pause = (self.pause * 2).min(PAUSES[1]);
        // The communicator is gone, or was never here.
        let Some(supervisor) = self.asker.supervisor() else {
            self.answer_not_entered("it has no such communicator");
            return false;
        };
        let target = supervisor.target();
        let Some(inner) = target
            .as_ref()
            .and_then(|target| TemporaryHandle::of(&target.0))
        else {
            self.answer_not_entered("it is about to make the communicator");
            return !self.is_sample;
        };
        if inner.lifecycle.get() != State::Ready {
            return false;
        }
        let track = inner.tracked.track();
        let Some(index) = track.collective_index() else {
            return true;
        };
        if index.called < self.collective {
            self.answer_not_entered(&last(track, &index));
            return !self.is_sample;
        }
        let collective = index.get(self.collective);
        match (collective, self.is_sample) {
            // A collective that is no longer fully recorded is no sample.
            (None, true) => self.answer_not_entered(""),
            (collective, _) => {
                let since = collective.or(index
                    .newest_first()
                    .last()
                    .map(|(_, collective)| collective));
                let age = since.map_or(Duration::ZERO, |collective| age(collective.since));
                self.answer(Some(age), "");
            }
        }
        if !self.is_sample {
            supervisor.set_queried(self.collective);
        }
        false
    }

    /// Answers that the rank has not entered, once.
    fn answer_not_entered(&mut self, last: &str) {
        if !self.has_answered {
            self.answer(None, last);
        }
    }

    fn answer(&mut self, entered: Option<Duration>, last: &str) {
        self.has_answered = true;
        self.asker.answer(&self.key, self.collective, entered, last);
    }
}

fn age(since: Duration) -> Duration {
    origin().monotonic.elapsed().saturating_sub(since)
}

/// A description of the communicator's last call, for the ranks that wait for it.
fn last(track: &Track, index: &CollectiveIndex) -> String {
    let Some(last) = index.last else {
        return String::from("it has called nothing on the communicator");
    };
    let state = match track.done_on(last.stream) >= last.number {
        true => "which is done",
        false => "not known to be done",
    };
    format!(
        "its last call was {} #{}, {:.1} s ago, {state}",
        last.kind,
        last.number,
        age(last.since).as_secs_f64()
    )
}

/// Asks which ranks have not entered a call of this rank. Returns false if the calls could not be counted.
pub(super) fn ask(supervisor: &dyn Supervisor, track: &Track, number: u64) -> bool {
    let Some(index) = track.collective_index() else {
        return false;
    };
    let Some((collective, call)) = index.of(number).and_then(|collective| {
        let call = index.get(collective)?;
        Some((collective, *call))
    }) else {
        return true;
    };
    if !supervisor.is_queried(collective) {
        supervisor.suspect(collective, &call, age(call.since), false);
    }
    true
}

/// Asks how far apart the ranks entered the last collective that is done. Returns whether there was one.
pub(super) fn sample(supervisor: &dyn Supervisor, track: &Track) -> bool {
    let Some(index) = track.collective_index() else {
        return false;
    };
    let mut newest = index.newest_first();
    let done = newest.find(|(_, collective)| collective.number <= track.done_on(collective.stream));
    let Some((collective, call)) = done else {
        return false;
    };
    supervisor.suspect(collective, call, age(call.since), true);
    true
}
