//! One active fault: the calls that it applies to, the threads that it holds, and its release.

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

/// The interval at which a hanging call checks whether it may continue.
const TICK: Duration = Duration::from_millis(5);

/// The active faults, and the delay of operations.
#[derive(Debug, Default)]
pub(super) struct Faults {
    pub(super) rules: Vec<Arc<Rule>>,
    pub(super) late: Duration,
}

/// The threads whose calls the fault applies to.
#[derive(Clone, Debug)]
pub(super) enum Caller {
    Only(ThreadId),
    AnyBut(ThreadId),
    /// The threads of this name, as Linux keeps it: at most 15 bytes.
    Named(Vec<u8>),
}

impl Caller {
    /// The threads that were given this name.
    pub(super) fn named(name: &str) -> Self {
        const KEPT: usize = 15;
        let kept = name.len().min(KEPT);
        Self::Named(name.as_bytes()[..kept].to_vec())
    }

    fn is_this_thread(&self) -> bool {
        match self {
            Self::Only(thread) => *thread == thread::current().id(),
            Self::AnyBut(thread) => *thread != thread::current().id(),
            // A thread of the program has no name in the standard library of `libnccl-emulator.so`.
            Self::Named(name) => std::fs::read("/proc/thread-self/comm")
                .is_ok_and(|found| found.trim_ascii_end() == name.trim_ascii_end()),
        }
    }
}

/// A rank of a communicator that a call or an operation belongs to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Subject<'c> {
    pub(crate) rank: i32,
    /// The name of the communicator (`commName`), if it has one.
    pub(crate) name: Option<&'c str>,
}

/// A pattern for communicator names: one name, or a prefix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Name {
    Is(String),
    BeginsWith(String),
}

impl Name {
    /// Parses `tp` or `model/*`.
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

/// An active fault and its history.
#[derive(Debug)]
pub(super) struct Rule {
    pub(super) point: Point,
    pub(super) rank: Option<i32>,
    pub(super) communicator: Option<Name>,
    pub(super) nth: Option<u64>,
    pub(super) thread: Option<Caller>,
    pub(super) action: Action,
    /// The number of matches of point, rank, communicator and thread.
    pub(super) seen: AtomicU64,
    pub(super) state: Mutex<RuleState>,
    pub(super) changed: Condvar,
}

#[derive(Default)]
pub(super) struct RuleState {
    /// The number of times that the fault has struck.
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

    /// Whether the fault applies to this rank of this communicator.
    fn is_on(&self, subject: &Subject<'_>) -> bool {
        self.rank.is_none_or(|rank| rank == subject.rank)
            && self
                .communicator
                .as_ref()
                .is_none_or(|name| name.is_of(subject))
    }

    /// Whether the fault strikes now; counts a match.
    pub(super) fn strikes(&self, subjects: &[Subject<'_>]) -> bool {
        let is_limited = self.rank.is_some() || self.communicator.is_some();
        if is_limited && !subjects.iter().any(|subject| self.is_on(subject)) {
            return false;
        }
        if self
            .thread
            .as_ref()
            .is_some_and(|threads| !threads.is_this_thread())
        {
            return false;
        }
        let time = self.seen.fetch_add(1, Ordering::Relaxed) + 1;
        if self.nth.is_some_and(|nth| nth != time) {
            return false;
        }
        if !self.is_counted_when_held() {
            self.count(&mut self.state.lock());
        }
        true
    }

    /// Whether [`hold`](Self::hold) counts the hit.
    fn is_counted_when_held(&self) -> bool {
        matches!(self.point, Point::Call(_)) && matches!(self.action, Action::Hang | Action::Stall)
    }

    fn count(&self, state: &mut RuleState) {
        state.hits += 1;
        self.changed.notify_all();
    }

    /// Returns the reason why the fault can never strike with these options, if there is one.
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

    /// Blocks until released; a stall also ends when the communicator is aborted.
    pub(super) fn hold(&self, aborted: &dyn Fn() -> bool) {
        let mut state = self.state.lock();
        // Before the hit is counted: a test that waits for the hit may abort at once, and the abort waits only for calls that
        // have asked whether it has begun.
        let mut is_over = self.is_over(&state, aborted);
        self.count(&mut state);
        while !is_over {
            self.changed.wait_for(&mut state, TICK);
            is_over = self.is_over(&state, aborted);
        }
    }

    fn is_over(&self, state: &RuleState, aborted: &dyn Fn() -> bool) -> bool {
        state.released || (self.action == Action::Stall && aborted())
    }
}

/// The faults that hold or fail an operation before it begins.
#[derive(Debug, Default)]
pub(crate) struct OperationFault {
    pub(super) until: Option<Instant>,
    pub(super) holding: Vec<Arc<Rule>>,
    pub(super) code: Option<Code>,
}

impl OperationFault {
    /// Combines both.
    pub(crate) fn and(mut self, mut other: Self) -> Self {
        self.until = self.until.max(other.until);
        self.holding.append(&mut other.holding);
        self.code = self.code.or(other.code);
        self
    }

    /// Returns the end of the delay.
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
