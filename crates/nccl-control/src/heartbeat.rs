//! Suspects: processes that do not answer heartbeats, although their kernels do.
//!
//! The kernels report the end of a process or a host without CPU time of that process. A missing heartbeat (`proto`)
//! only shows that a process does not answer: it is stopped or frozen, or it gets no CPU time. Such a rank is a
//! *suspect*, which may continue at any moment: it does not count as dead, and no communicator ends because of it. When
//! an operation runs into its deadline, the suspects are the first ranks to check.

use std::fmt;
use std::time::{Duration, Instant};

use super::process_state::ProcessState;

/// How long the suspects of one coordinator stay valid after another takes over, which finds its own suspects.
const SUSPECTS_HELD: Duration = Duration::from_secs(3);

/// A rank that is alive, as far as its kernel reports, and does not answer heartbeats.
#[derive(Clone, Debug, PartialEq, Eq)]
#[doc(hidden)]
pub struct Suspect {
    pub rank: usize,
    /// For how long the rank has not answered.
    pub silence: Duration,
    /// The state of the process according to its kernel, if a process on the same host could read it.
    pub state: Option<ProcessState>,
}

impl fmt::Display for Suspect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { silence, state, .. } = self;
        write!(f, "alive, but silent for {:.1} s", silence.as_secs_f64())?;
        match state {
            Some(state) => write!(f, ": {state}"),
            None => Ok(()),
        }
    }
}

/// Whether a rank is a suspect or answers again; with the duration of its silence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Suspicion {
    Lasts(Duration),
    Ended(Duration),
}

impl Suspicion {
    /// Returns for how long the rank has not answered; `None` if it answers.
    pub(super) fn lasting(self) -> Option<Duration> {
        match self {
            Self::Lasts(silence) => Some(silence),
            Self::Ended(_) => None,
        }
    }
}

/// Changes to log, written while no lock is held: a log subscriber may query the world, or be slow.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum LivenessChange {
    /// A suspected rank, for how long it has not answered, and the state of its process.
    Suspected(usize, Duration, Option<ProcessState>),
    /// A rank that answers again, and for how long it did not answer.
    HeardAgain(usize, Duration),
    /// This rank has taken over as coordinator.
    Coordinates(usize),
}

impl LivenessChange {
    pub(super) fn of(rank: usize, suspicion: Suspicion, state: Option<ProcessState>) -> Self {
        match suspicion {
            Suspicion::Lasts(silence) => Self::Suspected(rank, silence, state),
            Suspicion::Ended(silence) => Self::HeardAgain(rank, silence),
        }
    }

    pub(super) fn log(self) {
        let millis = |silence: Duration| silence.as_millis() as u64;
        match self {
            Self::Suspected(rank, silence, state) => {
                let silent_ms = millis(silence);
                let state =
                    state.map_or_else(|| String::from("unknown"), |state| state.to_string());
                tracing::warn!(name: "nccl.rendezvous.silent", target: "nccl", rank, silent_ms, state, "a rank does not answer heartbeats, although its process is alive");
            }
            Self::HeardAgain(rank, silence) => {
                let silent_ms = millis(silence);
                tracing::info!(name: "nccl.rendezvous.heard_again", target: "nccl", rank, silent_ms, "a silent rank answers again");
            }
            Self::Coordinates(rank) => {
                tracing::warn!(name: "nccl.rendezvous.failover", target: "nccl", rank, "this rank coordinates from now on");
            }
        }
    }
}

/// The suspects known to a rank, reported by the coordinator or found by this rank.
#[derive(Debug, Default)]
pub(super) struct Suspects {
    known: Vec<SuspectEntry>,
    /// The suspects of the previous coordinator, until this one has had time to find its own.
    before: Vec<SuspectEntry>,
    until: Option<Instant>,
    /// The time at which the coordinator was last heard.
    coordinator: Option<Instant>,
}

/// A rank, the time since which it has not answered, and the state of its process.
type SuspectEntry = (usize, Instant, Option<ProcessState>);

impl Suspects {
    /// Records that `rank` has not answered for `silence`, or answers again (`None`).
    pub(super) fn learn(
        &mut self,
        rank: usize,
        silence: Option<Duration>,
        state: Option<&ProcessState>,
    ) {
        self.forget(rank);
        if let Some(silence) = silence {
            let now = Instant::now();
            let since = now.checked_sub(silence).unwrap_or(now);
            self.known.push((rank, since, state.cloned()));
        }
    }

    pub(super) fn forget(&mut self, rank: usize) {
        for reported in [&mut self.known, &mut self.before] {
            reported.retain(|(known, ..)| *known != rank);
        }
    }

    /// Starts with the reports of another coordinator. The earlier suspects are kept until the new coordinator can know
    /// its own.
    pub(super) fn begin_anew(&mut self, now: Instant) {
        let mut before = self.all_known(now);
        before.sort_by_key(|(rank, ..)| *rank);
        *self = Self {
            before,
            until: Some(now + SUSPECTS_HELD),
            ..Self::default()
        };
    }

    fn all_known(&self, now: Instant) -> Vec<SuspectEntry> {
        let held = self.until.is_some_and(|until| now < until);
        let before = self.before.iter().filter(|_| held);
        self.known.iter().chain(before).cloned().collect()
    }

    pub(super) fn record_coordinator_heartbeat(&mut self, now: Instant) {
        self.coordinator = Some(now);
    }

    pub(super) fn coordinator_age(&self) -> Option<Duration> {
        Some(self.coordinator?.elapsed())
    }

    pub(super) fn all(&self) -> Vec<Suspect> {
        self.all_at(Instant::now())
    }

    fn all_at(&self, now: Instant) -> Vec<Suspect> {
        let suspect = |(rank, since, state): SuspectEntry| Suspect {
            rank,
            silence: now.saturating_duration_since(since),
            state,
        };
        let mut all: Vec<_> = self.all_known(now).into_iter().map(suspect).collect();
        all.sort_by_key(|suspect| suspect.rank);
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn suspects_of_the_former_coordinator_hold_until_the_next_can_know() {
        let ranks = |suspects: &Suspects, now| -> Vec<usize> {
            suspects.all_at(now).iter().map(|s| s.rank).collect()
        };
        let mut suspects = Suspects::default();
        for rank in [5, 2, 3] {
            suspects.learn(rank, Some(Duration::from_secs(4)), None);
        }
        let now = Instant::now();
        suspects.begin_anew(now);
        assert_eq!(ranks(&suspects, now), [2, 3, 5]);
        // The next coordinator reports one rank again, and that another answers.
        suspects.learn(3, Some(Duration::from_secs(2)), None);
        suspects.learn(2, None, None);
        assert_eq!(ranks(&suspects, now), [3, 5]);
        assert_eq!(ranks(&suspects, now + SUSPECTS_HELD), [3]);
    }

    #[test]
    fn a_rank_that_answers_again_is_logged_with_the_length_of_its_silence() {
        let silence = Duration::from_millis(2300);
        let change = |suspicion| LivenessChange::of(1, suspicion, None);
        assert_eq!(
            change(Suspicion::Ended(silence)),
            LivenessChange::HeardAgain(1, silence)
        );
        assert_eq!(
            change(Suspicion::Lasts(silence)),
            LivenessChange::Suspected(1, silence, None)
        );
    }

    #[test]
    fn a_suspect_is_described_as_alive_with_its_state() {
        let mut suspect = Suspect {
            rank: 3,
            silence: Duration::from_millis(3240),
            state: Some(ProcessState::stopped()),
        };
        let text = "alive, but silent for 3.2 s: process state T (stopped)";
        assert_eq!(suspect.to_string(), text);
        suspect.state = None;
        assert_eq!(suspect.to_string(), "alive, but silent for 3.2 s");
    }
}
