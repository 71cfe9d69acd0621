//! One fault in force: whom it strikes, what hangs because of it, and how it is let go.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

use super::in_force::lock;
use super::{Action, Point};
use crate::nccl::Code;

/// How often a call that hangs looks whether it may go on.
const TICK: Duration = Duration::from_millis(5);

/// Whose calls it strikes.
#[derive(Clone, Copy, Debug)]
pub(super) enum Caller {
    Only(ThreadId),
    AnyBut(ThreadId),
}

/// A fault, and what came of it.
#[derive(Debug)]
pub(super) struct Rule {
    pub(super) point: Point,
    pub(super) rank: Option<i32>,
    pub(super) nth: Option<u64>,
    pub(super) thread: Option<Caller>,
    pub(super) action: Action,
    /// Times that point, rank and thread were right.
    pub(super) seen: AtomicU64,
    pub(super) state: Mutex<RuleState>,
    pub(super) changed: Condvar,
}

#[derive(Default)]
pub(super) struct RuleState {
    /// Times that it struck.
    pub(super) hits: u64,
    pub(super) released: bool,
    pub(super) wakers: Vec<Box<dyn FnOnce() + Send>>,
}

impl std::fmt::Debug for RuleState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RuleState")
            .field("hits", &self.hits)
            .field("released", &self.released)
            .finish_non_exhaustive()
    }
}

impl Rule {
    pub(super) fn new(point: Point, rank: Option<i32>, nth: Option<u64>, action: Action) -> Self {
        let (seen, state, changed) = (AtomicU64::new(0), Mutex::default(), Condvar::new());
        Self {
            point,
            rank,
            nth,
            thread: None,
            action,
            seen,
            state,
            changed,
        }
    }

    /// Whether it strikes now; counts this time.
    pub(super) fn strikes(&self, ranks: &[i32]) -> bool {
        if self.rank.is_some_and(|rank| !ranks.contains(&rank)) {
            return false;
        }
        let here = thread::current().id();
        let is_meant = match self.thread {
            None => true,
            Some(Caller::Only(thread)) => thread == here,
            Some(Caller::AnyBut(thread)) => thread != here,
        };
        if !is_meant {
            return false;
        }
        let time = self.seen.fetch_add(1, Ordering::Relaxed) + 1;
        if self.nth.is_some_and(|nth| nth != time) {
            return false;
        }
        lock(&self.state).hits += 1;
        self.changed.notify_all();
        true
    }

    pub(super) fn is_released(&self) -> bool {
        lock(&self.state).released
    }

    /// Hangs until released or, unless this is a hang that nothing ends, aborted.
    pub(super) fn hold(&self, aborted: &dyn Fn() -> bool) {
        let mut state = lock(&self.state);
        while !state.released {
            if self.action == Action::Stall && aborted() {
                return;
            }
            state = self
                .changed
                .wait_timeout(state, TICK)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }
}

/// What keeps an operation from beginning.
#[derive(Debug, Default)]
pub(crate) struct OperationFault {
    pub(super) until: Option<Instant>,
    pub(super) holding: Vec<Arc<Rule>>,
    pub(super) code: Option<Code>,
}

impl OperationFault {
    /// Both.
    pub(crate) fn and(mut self, mut other: Self) -> Self {
        self.until = self.until.max(other.until);
        self.holding.append(&mut other.holding);
        self.code = self.code.or(other.code);
        self
    }

    /// When its delay ends.
    pub(crate) fn until(&self) -> Option<Instant> {
        self.until
    }

    /// Whether the operation may not begin yet.
    pub(crate) fn holds(&self) -> bool {
        self.until.is_some_and(|until| Instant::now() < until)
            || self.holding.iter().any(|rule| !rule.is_released())
    }

    /// The code that the operation fails with.
    pub(crate) fn code(&self) -> Option<Code> {
        self.code
    }

    /// Calls `wake` when a hang is released.
    pub(crate) fn on_release(&self, wake: impl Fn() + Clone + Send + 'static) {
        for rule in &self.holding {
            let mut state = lock(&rule.state);
            if !state.released {
                state.wakers.push(Box::new(wake.clone()));
            }
        }
    }
}
