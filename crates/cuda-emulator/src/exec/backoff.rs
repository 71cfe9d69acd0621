//! The pauses of a job that polls memory.

use std::time::Duration;

use super::work::Pause;

/// Unsuccessful polls before a job sleeps; until then it only yields its core.
const YIELDS: u32 = 64;
const SHORTEST: Duration = Duration::from_micros(20);
const LONGEST: Duration = Duration::from_micros(500);

/// The pauses of a job whose condition rings no bell: zero at first, then growing, and zero again after a move.
#[derive(Debug, Clone, Copy, Default)]
pub struct Backoff {
    misses: u32,
}

impl Backoff {
    /// Records a poll without progress.
    pub fn missed(&mut self) {
        self.misses = self.misses.saturating_add(1);
    }

    /// Records that the job moved.
    pub fn moved(&mut self) {
        self.misses = 0;
    }

    /// Returns the pause before the next look.
    pub fn pause(&self) -> Pause {
        let sleeps = self.misses.saturating_sub(YIELDS);
        Pause::For(match sleeps {
            0 => Duration::ZERO,
            _ => LONGEST.min(SHORTEST.saturating_mul(1 << (sleeps - 1).min(10))),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_a_limit_and_end_when_something_moves() {
        let mut backoff = Backoff::default();
        let mut before = Duration::ZERO;
        for _ in 0..2 * YIELDS {
            let Pause::For(pause) = backoff.pause() else {
                panic!("nothing rings")
            };
            assert!(pause >= before && pause <= LONGEST);
            before = pause;
            backoff.missed();
        }
        assert_eq!(before, LONGEST);
        backoff.moved();
        assert_eq!(backoff.pause(), Pause::For(Duration::ZERO));
    }
}
