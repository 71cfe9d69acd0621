//! One fault in force: whom it strikes, what hangs because of it, and how it is let go.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

use cuda_emulator::sync::{Condvar, Mutex};
use nccl_sys::Version;

use super::point::{Action, Point};
use crate::code::Code;
use crate::options::Options;

/// The first release that knows names of communicators.
const NAMES: Version = Version::new(2, 27, 3);

/// How often a call that hangs looks whether it may go on.
const TICK: Duration = Duration::from_millis(5);

/// The faults in force, and by how much operations are late.
#[derive(Debug, Default)]
pub(super) struct Faults {
    pub(super) rules: Vec<Arc<Rule>>,
    pub(super) late: Duration,
}

/// Whose calls it strikes.
#[derive(Clone, Copy, Debug)]
pub(super) enum Caller {
    Only(ThreadId),
    AnyBut(ThreadId),
}

/// A rank of a communicator that a call or an operation concerns.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Subject<'c> {
    pub(crate) rank: i32,
    /// The communicator's (`commName`), where it has one.
    pub(crate) name: Option<&'c str>,
}

/// Names of communicators: one, or all that begin alike.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Name {
    Is(String),
    BeginsWith(String),
}

impl Name {
    /// `tp`, or `model/*`.
    pub(super) fn new(text: &str) -> Self {
        match text.strip_suffix('*') {
            Some(prefix) => Self::BeginsWith(prefix.to_owned()),
            None => Self::Is(text.to_owned()),
        }
    }

    fn is_of(&self, subject: &Subject<'_>) -> bool {
        subject.name.is_some_and(|name| match self {
            Self::Is(own) => name == own,
            Self::BeginsWith(prefix) => name.starts_with(prefix),
        })
    }
}

/// A fault, and what came of it.
#[derive(Debug)]
pub(super) struct Rule {
    pub(super) point: Point,
    pub(super) rank: Option<i32>,
    pub(super) communicator: Option<Name>,
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
            communicator: None,
            nth,
            thread: None,
            action,
            seen,
            state,
            changed,
        }
    }

    /// Whether it is on this rank of this communicator.
    fn is_on(&self, subject: &Subject<'_>) -> bool {
        self.rank.is_none_or(|rank| rank == subject.rank)
            && self
                .communicator
                .as_ref()
                .is_none_or(|name| name.is_of(subject))
    }

    /// Whether it strikes now; counts this time.
    pub(super) fn strikes(&self, subjects: &[Subject<'_>]) -> bool {
        let is_limited = self.rank.is_some() || self.communicator.is_some();
        if is_limited && !subjects.iter().any(|subject| self.is_on(subject)) {
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
        self.state.lock().hits += 1;
        self.changed.notify_all();
        true
    }

    /// Why it would never strike with these options.
    pub(super) fn is_useless(&self, options: &Options) -> Option<String> {
        let (point, is_named) = (&self.point, self.communicator.is_some());
        let of_a_name = format!("a fault at {point} of a named communicator strikes nothing");
        match (point, options.nccl.is_some()) {
            (Point::Operation(_), true) => Some(format!(
                "a fault at {point} strikes nothing: on NVIDIA's own library only calls can be struck"
            )),
            (Point::Call(_), true) if is_named => Some(format!(
                "{of_a_name}: on NVIDIA's own library names are not known"
            )),
            (_, false) if is_named && options.version < NAMES => Some(format!(
                "{of_a_name}: names are known from {NAMES} on, and the emulator is NCCL {}",
                options.version
            )),
            _ => None,
        }
    }

    pub(super) fn is_released(&self) -> bool {
        self.state.lock().released
    }

    /// Hangs until released or, unless this is a hang that nothing ends, aborted.
    pub(super) fn hold(&self, aborted: &dyn Fn() -> bool) {
        let mut state = self.state.lock();
        while !state.released {
            if self.action == Action::Stall && aborted() {
                return;
            }
            self.changed.wait_for(&mut state, TICK);
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
            let mut state = rule.state.lock();
            if !state.released {
                state.wakers.push(Box::new(wake.clone()));
            }
        }
    }
}
