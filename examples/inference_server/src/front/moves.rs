//! The schedule of experts that move between the ranks of a generation: part by part, between steps.

use std::time::{Duration, Instant};

use crate::rank::NUMBERS_PER_ROUND;
use crate::wire::Copies;

/// The next action.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Due {
    /// A round: every rank sends and receives a part.
    Round,
    /// All parts have arrived: the ranks put the experts in their places.
    Place,
}

/// The moves of experts that are in progress.
#[derive(Debug)]
pub(super) struct Moves {
    generation: u64,
    done: usize,
    rounds: usize,
    /// The earliest time of the next round.
    next: Instant,
    pause: Duration,
}

/// Returns the pause between two rounds with which a rank sends at most `rate` bytes per second.
pub(super) fn pause_at(rate: u64) -> Duration {
    let bytes = (NUMBERS_PER_ROUND * size_of::<f32>()) as f64;
    Duration::from_secs_f64(bytes / rate.max(1) as f64)
}

impl Moves {
    /// Starts the moves; returns `None` if `copies` has nothing to move.
    pub(super) fn begin(generation: u64, copies: Copies, pause: Duration) -> Option<Self> {
        Some(Self {
            generation,
            done: 0,
            rounds: copies.rounds?,
            next: Instant::now(),
            pause,
        })
    }

    /// Returns when the next action is due in this generation.
    pub(super) fn due_at(&self, generation: u64) -> Option<Instant> {
        (self.generation == generation).then_some(self.next)
    }

    /// Returns the action that is due now in this generation.
    pub(super) fn due(&self, generation: u64) -> Option<Due> {
        self.due_at(generation).filter(|at| *at <= Instant::now())?;
        Some(match self.done < self.rounds {
            true => Due::Round,
            false => Due::Place,
        })
    }

    /// Records that a round has begun.
    pub(super) fn begun(&mut self) {
        self.next = Instant::now() + self.pause;
    }

    /// Records that a round is over.
    pub(super) fn moved(&mut self) {
        self.done += 1;
    }

    /// Returns the number of finished rounds, and of all rounds.
    pub(super) fn progress(&self) -> (usize, usize) {
        (self.done, self.rounds)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_follow_each_other_at_the_rate_and_then_the_experts_are_placed() {
        let copies = |rounds| Copies {
            now: 1,
            planned: 2,
            rounds,
        };
        assert!(Moves::begin(3, copies(None), Duration::ZERO).is_none());
        let mut moves = Moves::begin(3, copies(Some(2)), pause_at(1 << 20)).unwrap();
        assert_eq!(moves.pause, Duration::from_millis(250));
        assert_eq!(moves.due(2), None);
        for _ in 0..2 {
            assert_eq!(moves.due(3), Some(Due::Round));
            moves.begun();
            assert_eq!(moves.due(3), None);
            moves.moved();
            moves.next -= moves.pause;
        }
        assert_eq!((moves.due(3), moves.progress()), (Some(Due::Place), (2, 2)));
    }
}
