//! How long a job that polls memory is left alone.

use std::time::Duration;

use super::work::Pause;

/// Looks in vain before a job sleeps at all: it gives its core away meanwhile.
const YIELDS: u32 = 64;
const SHORTEST: Duration = Duration::from_micros(20);
const LONGEST: Duration = Duration::from_micros(500);

/// The pauses of a job whose conditions nothing rings for: none at first, then longer and longer, and none again as
/// soon as something moved.
#[derive(Debug, Clone, Copy, Default)]
pub struct Backoff {
    misses: u32,
}

impl Backoff {
    /// Nothing to do was found.
    pub fn missed(&mut self) {
        self.misses = self.misses.saturating_add(1);
    }

    /// Something moved.
    pub fn moved(&mut self) {
        self.misses = 0;
    }

    /// How long to leave the job alone now.
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
