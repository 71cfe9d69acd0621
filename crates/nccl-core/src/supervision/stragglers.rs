//! Stragglers: the ranks that have not entered an operation in which this rank waits. This module is one rank's part:
//! when to ask, and what to answer.
//!
//! The watchdog does both; nothing is added to the path of an operation. When a collective has run for a tenth of its
//! timeout ([`Timeouts::straggler`](crate::Timeouts::straggler)), the watchdog requests a straggler query from the
//! coordinator (`straggler_queries`), which asks each rank once. A rank answers from what its communicator has recorded
//! and counted anyway. While a rank has not entered the operation, its watchdog checks again until it has. Higher ranks
//! wait up to a quarter longer before they request a query, so that usually only one rank does, and a rank that was
//! asked about an operation does not request a query about it.
//!
//! The first rank also requests a query every half minute about a completed collective, to measure how far apart the
//! ranks arrive (`CommunicatorStats::arrival_skew`).

use std::time::{Duration, Instant};

use crate::communicator::TemporaryHandle;
use crate::peers::{StragglerQuery, Supervisor};
use crate::recorder::{RecordedCollectives, Track, origin};
use crate::state::State;

/// How long the first rank of a communicator waits before its first measurement of how far apart the ranks arrive, and
/// then between two measurements.
pub(super) const SAMPLES: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(30)];

/// The shortest and the longest pause between two checks whether this rank has entered an operation.
const PAUSES: [Duration; 2] = [Duration::from_millis(1), Duration::from_millis(50)];

/// An operation in which other ranks wait, and about which this rank was asked whether it has entered.
pub struct OpenQuery {
    asker: Box<dyn StragglerQuery>,
    key: String,
    collective_index: u64,
    is_sample: bool,
    has_answered: bool,
    /// When to check again.
    pub(super) next: Instant,
    pause: Duration,
}

impl OpenQuery {
    /// Returns a query about the `collective_index`-th collective of the communicator with the key `key`. It is answered
    /// only once if it `is_sample`.
    #[must_use]
    pub fn new(
        asker: Box<dyn StragglerQuery>,
        key: &str,
        collective_index: u64,
        is_sample: bool,
    ) -> Self {
        Self {
            asker,
            key: key.to_owned(),
            collective_index,
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

    /// Sends the answers that are possible now. Returns whether to check again.
    pub(super) fn poll(&mut self) -> bool {
        if !self.asker.is_there() {
            return false;
        }
        self.next = Instant::now() + self.pause;
        self.pause = (self.pause * 2).min(PAUSES[1]);
        // The communicator has ended, or was never made here.
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
        let track = inner.track_handle.track();
        let Some(collectives) = track.recorded_collectives() else {
            return true;
        };
        if collectives.called < self.collective_index {
            self.answer_not_entered(&last(track, &collectives));
            return !self.is_sample;
        }
        let collective = collectives.get(self.collective_index);
        match (collective, self.is_sample) {
            // A collective that is no longer fully recorded cannot be a sample.
            (None, true) => self.answer_not_entered(""),
            (collective, _) => {
                let since = collective.or(collectives
                    .newest_first()
                    .last()
                    .map(|(_, collective)| collective));
                let age = since.map_or(Duration::ZERO, |collective| age(collective.since));
                self.answer(Some(age), "");
            }
        }
        if !self.is_sample {
            supervisor.set_queried(self.collective_index);
        }
        false
    }

    /// Answers, once, that this rank has not entered.
    fn answer_not_entered(&mut self, last: &str) {
        if !self.has_answered {
            self.answer(None, last);
        }
    }

    fn answer(&mut self, entered: Option<Duration>, last: &str) {
        self.has_answered = true;
        self.asker
            .answer(&self.key, self.collective_index, entered, last);
    }
}

fn age(since: Duration) -> Duration {
    origin().monotonic.elapsed().saturating_sub(since)
}

/// Describes the communicator's last call, for the ranks that wait for this one.
fn last(track: &Track, collectives: &RecordedCollectives) -> String {
    let Some(last) = collectives.last else {
        return String::from("it has called nothing on the communicator");
    };
    let state = match track.done_on(last.stream) >= last.sequence {
        true => "which is done",
        false => "not known to be done",
    };
    format!(
        "its last call was {} #{}, {:.1} s ago, {state}",
        last.kind,
        last.sequence,
        age(last.since).as_secs_f64()
    )
}

/// Queries which ranks have not entered a call that this rank has entered. Returns false if the calls could not be
/// counted.
pub(super) fn query(supervisor: &dyn Supervisor, track: &Track, sequence: u64) -> bool {
    let Some(collectives) = track.recorded_collectives() else {
        return false;
    };
    let Some((collective_index, call)) =
        collectives.index_of(sequence).and_then(|collective_index| {
            let call = collectives.get(collective_index)?;
            Some((collective_index, *call))
        })
    else {
        return true;
    };
    if !supervisor.is_queried(collective_index) {
        supervisor.query_stragglers(collective_index, &call, age(call.since), false);
    }
    true
}

/// Queries how far apart the ranks entered the last collective that is done. Returns whether there was one.
pub(super) fn sample(supervisor: &dyn Supervisor, track: &Track) -> bool {
    let Some(collectives) = track.recorded_collectives() else {
        return false;
    };
    let mut newest = collectives.newest_first();
    let done =
        newest.find(|(_, collective)| collective.sequence <= track.done_on(collective.stream));
    let Some((collective_index, call)) = done else {
        return false;
    };
    supervisor.query_stragglers(collective_index, call, age(call.since), true);
    true
}
