//! What the ranks put together: rounds, each of which ends when every rank has given its part.
//!
//! Kept by the process of rank 0, or by the one process when the ranks are its threads. A round that
//! waits for a rank that is gone ends at once, with the reason; one that waits too long names who is
//! missing.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::communicator::lock;

/// The most bytes of all parts of a round together. Bounds what a stranger can make us keep.
pub(super) const LARGEST: usize = 64 << 20;

/// The parts of all ranks, by rank.
pub(super) type Parts = Arc<Vec<Vec<u8>>>;

/// Why a round did not end well.
#[derive(Debug)]
pub(super) enum Incomplete {
    TimedOut {
        missing: Vec<usize>,
    },
    Gone {
        rank: usize,
        reason: String,
    },
    Twice {
        rank: usize,
    },
    /// The parts have more than [`LARGEST`] bytes together.
    TooLarge {
        bytes: usize,
    },
    /// Another thread of this rank talks to rank 0 all the time.
    Busy,
    Interrupted,
}

pub(super) struct Store {
    size: usize,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    rounds: HashMap<(String, u64), Round>,
    gone: HashMap<usize, String>,
}

struct Round {
    parts: Vec<Option<Vec<u8>>>,
    /// The parts when all are there, or the number of their bytes if that is too large.
    whole: Option<Result<Parts, usize>>,
    /// Ranks that have not been answered yet.
    waiting: usize,
}

impl Store {
    pub(super) fn new(size: usize) -> Self {
        Self {
            size,
            state: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    /// This rank takes part in no further round.
    pub(super) fn leave(&self, rank: usize, reason: impl Into<String>) {
        lock(&self.state)
            .gone
            .entry(rank)
            .or_insert_with(|| reason.into());
        self.changed.notify_all();
    }

    /// Gives the part of `rank`, and waits for the others'.
    pub(super) fn collect(
        &self,
        topic: &str,
        round: u64,
        rank: usize,
        part: Vec<u8>,
        deadline: Instant,
        interrupted: impl Fn() -> bool,
    ) -> Result<Parts, Incomplete> {
        let key = (topic.to_owned(), round);
        let mut state = lock(&self.state);
        let size = self.size;
        let entry = state.rounds.entry(key.clone()).or_insert_with(|| Round {
            parts: vec![None; size],
            whole: None,
            waiting: size,
        });
        if entry.parts[rank].is_some() || entry.whole.is_some() {
            return Err(Incomplete::Twice { rank });
        }
        entry.parts[rank] = Some(part);
        if entry.parts.iter().all(Option::is_some) {
            let parts: Vec<_> = entry.parts.iter_mut().filter_map(Option::take).collect();
            let bytes = parts.iter().map(Vec::len).sum();
            entry.whole = Some(if bytes <= LARGEST {
                Ok(Arc::new(parts))
            } else {
                Err(bytes)
            });
            self.changed.notify_all();
        }
        loop {
            let State { rounds, gone } = &mut *state;
            let Some(entry) = rounds.get_mut(&key) else {
                return Err(Incomplete::Interrupted);
            };
            if let Some(whole) = entry.whole.clone() {
                entry.waiting -= 1;
                if entry.waiting == 0 {
                    rounds.remove(&key);
                }
                return whole.map_err(|bytes| Incomplete::TooLarge { bytes });
            }
            let missing = || (0..size).filter(|&rank| entry.parts[rank].is_none());
            if let Some((rank, reason)) =
                missing().find_map(|rank| Some((rank, gone.get(&rank)?.clone())))
            {
                return Err(Incomplete::Gone { rank, reason });
            }
            let now = Instant::now();
            if now >= deadline {
                return Err(Incomplete::TimedOut {
                    missing: missing().collect(),
                });
            }
            if interrupted() {
                return Err(Incomplete::Interrupted);
            }
            // An interruption rings no bell here.
            let pause = (deadline - now).min(Duration::from_millis(20));
            state = self
                .changed
                .wait_timeout(state, pause)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Store")
            .field("size", &self.size)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(10)
    }

    #[test]
    fn every_rank_gets_the_parts_of_all() {
        let store = Store::new(3);
        std::thread::scope(|scope| {
            for rank in 0..3u8 {
                let store = &store;
                scope.spawn(move || {
                    for round in 0..20 {
                        let part = vec![rank; round];
                        let parts = store
                            .collect("x", round as u64, rank.into(), part, soon(), || false)
                            .unwrap();
                        let expected: Vec<_> = (0..3u8).map(|rank| vec![rank; round]).collect();
                        assert_eq!(*parts, expected);
                    }
                });
            }
        });
        assert!(
            lock(&store.state).rounds.is_empty(),
            "a round that is over takes no room"
        );
    }

    #[test]
    fn a_rank_that_left_ends_the_rounds_that_wait_for_it() {
        let store = Store::new(2);
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| store.collect("x", 0, 0, vec![], soon(), || false));
            store.leave(1, "it left");
            match waiting.join().unwrap() {
                Err(Incomplete::Gone { rank: 1, reason }) => assert_eq!(reason, "it left"),
                other => panic!("{other:?}"),
            }
        });
    }

    #[test]
    fn who_is_missing_at_the_deadline_is_named() {
        let store = Store::new(4);
        let deadline = Instant::now() + Duration::from_millis(50);
        match store.collect("x", 0, 2, vec![], deadline, || false) {
            Err(Incomplete::TimedOut { missing }) => assert_eq!(missing, [0, 1, 3]),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_second_part_of_one_rank_is_refused() {
        let store = Store::new(2);
        let deadline = Instant::now() + Duration::from_millis(10);
        assert!(
            store
                .collect("x", 0, 0, vec![], deadline, || false)
                .is_err()
        );
        let again = store.collect("x", 0, 0, vec![], deadline, || false);
        assert!(
            matches!(again, Err(Incomplete::Twice { rank: 0 })),
            "{again:?}"
        );
    }
}
