//! The events of a world, in order, as an observer or a rank sees them.
//!
//! Writers never wait for readers: the log keeps a fixed number of events and drops the oldest, and each reader learns
//! how many events it has missed. A rank's world records nothing before its first reader exists. The writers are the
//! thread that reads the connections and the thread that ends a communicator, so recording delays no operation.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::future::poll_fn;
use std::panic::{RefUnwindSafe, UnwindSafe};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use super::straggler::StragglerReport;
use crate::departure::Departure;
use crate::fault::Fault;
use crate::forked;
use crate::operation::OperationKind;
use crate::sync::{Condvar, Mutex};
use crate::time::deadline_after;

/// How many events are kept for readers that have not read them yet.
pub(super) const KEPT: usize = 4096;

/// An event of a world, as an `Observer` or one of the ranks (`World::events`) has seen it.
///
/// ```
/// use nccl::control::WorldEvent;
///
/// fn is_bad(event: &WorldEvent) -> bool {
///     matches!(event, WorldEvent::Failed { .. } | WorldEvent::Gone { .. } | WorldEvent::Fault { .. })
/// }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum WorldEvent {
    /// A rank has joined.
    #[non_exhaustive]
    Joined {
        /// The rank.
        rank: usize,
        /// Its host's name.
        host: String,
        /// Its process id, as stated by the process.
        pid: u32,
    },
    /// A rank has changed its phase (`World::phase`).
    #[non_exhaustive]
    Phase {
        /// The rank.
        rank: usize,
        /// The name of the phase.
        name: String,
    },
    /// A rank has reported a failure, with its reason (`World::fail`, or a panic).
    #[non_exhaustive]
    Failed {
        /// The rank.
        rank: usize,
        /// Its error, with the chain of its sources.
        chain: String,
    },
    /// A rank was lost: it departed without a leave message or a reported error.
    #[non_exhaustive]
    Gone {
        /// The rank.
        rank: usize,
        /// How it ended, as far as known.
        how: String,
    },
    /// A rank has left.
    #[non_exhaustive]
    Left {
        /// The rank.
        rank: usize,
    },
    /// A rank has not entered an operation in which other ranks wait, or has entered it late
    /// (`Timeouts::straggler`).
    #[non_exhaustive]
    Straggler {
        /// The rank.
        rank: usize,
        /// The communicator's name.
        communicator: String,
        /// The operation in which the other ranks wait.
        operation: OperationKind,
        /// Its sequence number, as counted by the rank that queried first.
        sequence: u64,
        /// How far the rank is behind the first rank that entered.
        behind: Duration,
        /// Whether the rank has entered by now.
        has_entered: bool,
    },
    /// A rank's process does not answer, although its kernel does: the process is stopped, frozen, or starved. It may
    /// continue at any moment, and no communicator ends because of it. The event is repeated when more is known. Ranks
    /// see it, observers do not.
    #[non_exhaustive]
    Silent {
        /// The rank.
        rank: usize,
        /// For how long the rank has not answered.
        silent: Duration,
        /// The state of the process according to its kernel, if a process on the same host could read it.
        process: Option<String>,
    },
    /// A rank that was silent answers again. Ranks see it, observers do not.
    #[non_exhaustive]
    Answers {
        /// The rank.
        rank: usize,
    },
    /// Another rank has become the coordinator: the previous coordinator has departed or is unreachable. Ranks see it,
    /// observers do not.
    #[non_exhaustive]
    Coordinator {
        /// The new coordinator.
        rank: usize,
    },
    /// This rank and the ranks `from` cannot reach each other any more, and which side is at fault is unknown. Ranks
    /// see it, observers do not.
    #[non_exhaustive]
    CutOff {
        /// The unreachable ranks.
        from: Vec<usize>,
        /// The known reason.
        why: String,
    },
    /// A communicator of this rank was ended on all of its ranks. Ranks see it, observers do not.
    #[non_exhaustive]
    Fault {
        /// Why.
        fault: Arc<Fault>,
    },
    /// The ranks have formed another generation (`World::next_generation`); from now on, rank numbers are those of that
    /// generation. The ranks present in it follow as [`Joined`](Self::Joined).
    #[non_exhaustive]
    NextGeneration {
        /// The number of the generation.
        generation: u64,
    },
    /// An operator has decided which ranks of a split world continue (`World::decide_split`, `Observer::decide_split`).
    /// Observers see it, ranks do not.
    #[non_exhaustive]
    SplitDecided {
        /// The ranks that continue.
        ranks: Vec<usize>,
    },
    /// Events were dropped because this reader had not read them in time.
    #[non_exhaustive]
    Missed {
        /// How many.
        events: u64,
    },
    /// The world has ended, or cannot be observed any more. No event follows.
    #[non_exhaustive]
    Ended {
        /// Why.
        why: String,
    },
}

impl WorldEvent {
    /// Returns the event of a rank's departure.
    pub(super) fn departed(rank: usize, departure: Departure) -> Self {
        match departure {
            Departure::Left => Self::Left { rank },
            Departure::Failed(why) => Self::Failed {
                rank,
                chain: why.to_string(),
            },
            Departure::Lost(lost) => Self::Gone {
                rank,
                how: lost.to_string(),
            },
        }
    }

    /// Returns the events of ranks that have not entered an operation, or have entered it late.
    pub(super) fn late(lateness: &StragglerReport) -> impl Iterator<Item = Self> + '_ {
        lateness.late.iter().map(|one| Self::Straggler {
            rank: one.rank,
            communicator: lateness.subject.name.clone(),
            operation: lateness.subject.kind,
            sequence: lateness.subject.sequence,
            behind: one.behind,
            has_entered: one.has_entered,
        })
    }
}

/// The most recent events, numbered consecutively.
#[derive(Debug, Default)]
pub(super) struct EventLog {
    events: VecDeque<WorldEvent>,
    /// The number of the first kept event.
    first: u64,
}

impl EventLog {
    pub(super) fn note(&mut self, event: WorldEvent) {
        if self.events.len() == KEPT {
            self.events.pop_front();
            self.first += 1;
        }
        self.events.push_back(event);
    }

    /// Returns the event with the number `next`, or how many events were missed, and advances `next`.
    pub(super) fn read(&self, next: &mut u64) -> Option<WorldEvent> {
        if *next < self.first {
            let events = self.first - *next;
            *next = self.first;
            return Some(WorldEvent::Missed { events });
        }
        let event = self.events.get(usize::try_from(*next - self.first).ok()?)?;
        *next += 1;
        Some(event.clone())
    }
}

/// The tasks that await an event, by the number of their reader. Each reader has one at most, so that a reader that polls
/// often, or for many tasks, keeps no memory.
#[derive(Default)]
pub(super) struct Wakers(Mutex<BTreeMap<u64, Waker>>);

impl Wakers {
    fn set(&self, reader: u64, waker: Waker) {
        let replaced = self.0.lock().insert(reader, waker);
        // Not under the lock: that may drop a task, with a reader of its own.
        drop(replaced);
    }

    fn remove(&self, reader: u64) {
        let removed = self.0.lock().remove(&reader);
        // Not under the lock, as in `set`.
        drop(removed);
    }

    pub(super) fn wake(&self) {
        let wakers = std::mem::take(&mut *self.0.lock());
        wakers.into_values().for_each(Waker::wake);
    }
}

/// The events that a rank has seen since its first reader, across all generations of its world.
#[derive(Default)]
pub(crate) struct EventBus {
    state: Mutex<EventBusState>,
    changed: Condvar,
    wakers: Wakers,
}

#[derive(Default)]
struct EventBusState {
    log: EventLog,
    ended: bool,
}

impl EventBus {
    pub(super) fn note(&self, event: WorldEvent) {
        {
            let mut state = self.state.lock();
            if state.ended {
                return;
            }
            state.ended = matches!(event, WorldEvent::Ended { .. });
            state.log.note(event);
        }
        self.changed.notify_all();
        self.wakers.wake();
    }
}

impl EventSource for EventBus {
    fn wait_for_event(&self, next: &mut u64, deadline: Instant) -> Option<Option<WorldEvent>> {
        let mut state = self.state.lock();
        loop {
            if let Some(event) = state.log.read(next) {
                return Some(Some(event));
            }
            if state.ended {
                return Some(None);
            }
            let remaining = deadline.saturating_duration_since(Instant::now());
            if remaining.is_zero() {
                return None;
            }
            self.changed.wait_for(&mut state, remaining);
        }
    }

    fn wakers(&self) -> &Wakers {
        &self.wakers
    }
}

/// A reader of events, from `World::events` or `Observer::events`, with its own position. Each thread or task needs a
/// reader of its own, or shares one and takes turns.
///
/// The iterator waits for the next event, and ends with the world. [`next_within`](Self::next_within) waits with a
/// timeout; [`next_event`](Self::next_event) is for async code, with any executor.
///
/// ```
/// fn wait_for_the_end(mut events: nccl::control::Events) {
///     while events.next_within(std::time::Duration::from_secs(60)).is_some() {}
/// }
/// ```
pub struct Events {
    source: Arc<dyn EventSource>,
    /// Distinguishes the readers of this process.
    reader: u64,
    next: u64,
}

/// A source of events: a rank's event bus, or an observer.
pub(super) trait EventSource: Send + Sync + UnwindSafe + RefUnwindSafe {
    /// Returns the event at `next`, or `Some(None)` when no more events will follow; `None` at the deadline.
    fn wait_for_event(&self, next: &mut u64, deadline: Instant) -> Option<Option<WorldEvent>>;

    /// The tasks that wait for an event.
    fn wakers(&self) -> &Wakers;
}

impl Events {
    pub(super) fn of(source: Arc<dyn EventSource>) -> Self {
        static NEXT_READER: AtomicU64 = AtomicU64::new(0);
        Self {
            source,
            reader: NEXT_READER.fetch_add(1, Ordering::Relaxed),
            next: 0,
        }
    }

    /// Returns the next event. Returns `None` when no event arrives within `timeout`, or at once when no event will
    /// follow, after [`WorldEvent::Ended`].
    ///
    /// ```
    /// # use std::time::Duration;
    /// # fn show(mut events: nccl::control::Events) {
    /// while let Some(event) = events.next_within(Duration::from_secs(10)) {
    ///     println!("{event:?}");
    /// }
    /// # }
    /// ```
    pub fn next_within(&mut self, timeout: Duration) -> Option<WorldEvent> {
        self.wait(deadline_after(timeout)).unwrap_or_default()
    }

    /// Awaits the next event; `None` when no event will follow. Dropping the future loses no event.
    ///
    /// ```
    /// # async fn show(world: &nccl::World) {
    /// let mut events = world.events();
    /// while let Some(event) = events.next_event().await {
    ///     println!("{event:?}");
    /// }
    /// # }
    /// ```
    pub async fn next_event(&mut self) -> Option<WorldEvent> {
        poll_fn(|context| self.poll_next(context)).await
    }

    /// As [`next_event`](Self::next_event), for implementing a stream.
    ///
    /// ```
    /// # use std::task::{Context, Poll};
    /// # fn poll(events: &mut nccl::control::Events, context: &mut Context<'_>) -> Poll<Option<nccl::control::WorldEvent>> {
    /// events.poll_next(context)
    /// # }
    /// ```
    pub fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<WorldEvent>> {
        // In a forked child, another thread of the parent may hold the lock for ever.
        if !forked::is_child() {
            // The waker is registered before the check, so that no event is missed in between.
            let waker = context.waker().clone();
            self.source.wakers().set(self.reader, waker);
        }
        match self.wait(Instant::now()) {
            Some(event) => Poll::Ready(event),
            None => Poll::Pending,
        }
    }

    /// As [`EventSource::wait_for_event`], at this reader's position.
    fn wait(&mut self, deadline: Instant) -> Option<Option<WorldEvent>> {
        // No events occur in a forked child.
        if forked::is_child() {
            return Some(None);
        }
        self.source.wait_for_event(&mut self.next, deadline)
    }
}

/// Waits for each event without a timeout, and ends with the world.
///
/// ```
/// use nccl::control::WorldEvent;
///
/// let mut worlds = nccl::World::threads(2);
/// let mut events = worlds[0].events();
/// // Rank 1 leaves.
/// drop(worlds.pop());
/// assert!(events.any(|event| matches!(event, WorldEvent::Left { rank: 1, .. })));
/// drop(worlds);
/// assert!(matches!(events.last(), Some(WorldEvent::Ended { .. })));
/// ```
impl Iterator for Events {
    type Item = WorldEvent;

    fn next(&mut self) -> Option<WorldEvent> {
        loop {
            if let Some(next) = self.wait(deadline_after(Duration::from_secs(3600))) {
                return next;
            }
        }
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        if !forked::is_child() {
            self.source.wakers().remove(self.reader);
        }
    }
}

impl fmt::Debug for Events {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Events")
            .field("next", &self.next)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_reads_too_late_is_told_how_much_it_missed_and_nobody_waits_for_it() {
        let seen = Arc::new(EventBus::default());
        let mut slow = Events::of(seen.clone());
        for rank in 0..KEPT + 10 {
            seen.note(WorldEvent::Answers { rank });
        }
        seen.note(WorldEvent::Ended {
            why: String::from("over"),
        });
        seen.note(WorldEvent::Answers { rank: 0 });
        let missed = slow.next();
        assert_eq!(missed, Some(WorldEvent::Missed { events: 11 }));
        assert_eq!(slow.next(), Some(WorldEvent::Answers { rank: 11 }));
        let last = WorldEvent::Ended {
            why: String::from("over"),
        };
        assert_eq!(slow.last(), Some(last));
    }

    #[test]
    fn a_task_that_awaits_an_event_is_woken_by_it() {
        struct Count(std::sync::atomic::AtomicUsize);
        impl std::task::Wake for Count {
            fn wake(self: Arc<Self>) {
                self.0.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            }
        }
        let count = Arc::new(Count(0.into()));
        let waker = Waker::from(Arc::clone(&count));
        let mut context = Context::from_waker(&waker);
        let seen = Arc::new(EventBus::default());
        let mut events = Events::of(seen.clone());
        assert!(events.poll_next(&mut context).is_pending());
        assert!(events.poll_next(&mut context).is_pending());
        seen.note(WorldEvent::Left { rank: 3 });
        assert_eq!(count.0.load(std::sync::atomic::Ordering::Relaxed), 1);
        let left = Some(WorldEvent::Left { rank: 3 });
        assert_eq!(events.poll_next(&mut context), Poll::Ready(left));
    }

    #[test]
    fn a_reader_that_is_dropped_leaves_no_task_behind_and_one_that_polls_again_only_the_last() {
        struct Idle;
        impl std::task::Wake for Idle {
            fn wake(self: Arc<Self>) {}
        }
        let seen = Arc::new(EventBus::default());
        let tasks: Vec<_> = (0..10_000).map(|_| Arc::new(Idle)).collect();
        let mut lasting = Events::of(seen.clone());
        for task in &tasks {
            let waker = Waker::from(Arc::clone(task));
            let mut context = Context::from_waker(&waker);
            let mut brief = Events::of(seen.clone());
            assert!(brief.poll_next(&mut context).is_pending());
            assert!(lasting.poll_next(&mut context).is_pending());
        }
        let (last, others) = tasks.split_last().unwrap();
        assert!(others.iter().all(|task| Arc::strong_count(task) == 1));
        assert_eq!(Arc::strong_count(last), 2);
        drop(lasting);
        assert_eq!(Arc::strong_count(last), 1);
    }
}
