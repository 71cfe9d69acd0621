//! What happens in a world, in order, for those who read it: as an observer sees it, and as a rank does.
//!
//! Whoever tells of something waits for no reader: so much is kept, then the oldest is forgotten, and each reader is told
//! how many it has missed. Of a rank's world nothing is kept before somebody has asked. What tells is the thread that
//! reads the connections, and whoever ends a communicator: nothing of this is on the way of an operation.

use std::collections::VecDeque;
use std::fmt;
use std::future::poll_fn;
use std::panic::{RefUnwindSafe, UnwindSafe};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use super::inquiry::Lateness;
use crate::departure::Departure;
use crate::fault::Fault;
use crate::forked;
use crate::operation::OperationKind;
use crate::sync::{Condvar, Mutex};
use crate::time::deadline_after;

/// How many events are kept for those who have not read them yet.
pub(super) const KEPT: usize = 4096;

/// Something that happened in a world, as an `Observer` has seen it, or one of its ranks
/// (`World::events`).
///
/// ```
/// use nccl::WorldEvent;
///
/// fn is_bad(event: &WorldEvent) -> bool {
///     matches!(event, WorldEvent::Failed { .. } | WorldEvent::Gone { .. } | WorldEvent::Fault { .. })
/// }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum WorldEvent {
    /// A rank has come.
    #[non_exhaustive]
    Joined {
        /// Which.
        rank: usize,
        /// Its host's name.
        host: String,
        /// Its process, as it calls itself.
        pid: u32,
    },
    /// A rank says what it does now (`World::phase`).
    #[non_exhaustive]
    Phase {
        /// Which.
        rank: usize,
        /// What it does.
        name: String,
    },
    /// A rank has said that it fails, and why (`World::fail`, or a panic).
    #[non_exhaustive]
    Failed {
        /// Which.
        rank: usize,
        /// Its error, with the chain of its sources.
        chain: String,
    },
    /// A rank is gone without a goodbye.
    #[non_exhaustive]
    Gone {
        /// Which.
        rank: usize,
        /// How, as far as anybody knows.
        how: String,
    },
    /// A rank has said goodbye.
    #[non_exhaustive]
    Left {
        /// Which.
        rank: usize,
    },
    /// A rank has not entered an operation in which others wait, or has at last
    /// (`Timeouts::straggler`).
    #[non_exhaustive]
    Straggler {
        /// Which.
        rank: usize,
        /// The communicator's name.
        communicator: String,
        /// What the others wait in.
        operation: OperationKind,
        /// Its number, as the rank counts that asked first.
        sequence: u64,
        /// By how much it is behind the first that entered.
        behind: Duration,
        /// Whether it has entered by now.
        has_entered: bool,
    },
    /// A rank's process does not answer, although its kernel does: it is stopped, frozen, or starved. It may go on at
    /// any moment, and nothing ends by it. Comes again when more is known. Ranks see it, observers do not.
    #[non_exhaustive]
    Silent {
        /// Which.
        rank: usize,
        /// For how long.
        silent: Duration,
        /// What the kernel says of its process, where somebody on its host could look.
        process: Option<String>,
    },
    /// A rank that was silent answers again. Ranks see it, observers do not.
    #[non_exhaustive]
    Answers {
        /// Which.
        rank: usize,
    },
    /// Another rank coordinates from now on: the one before is gone. Ranks see it, observers do not.
    #[non_exhaustive]
    Coordinator {
        /// Which.
        rank: usize,
    },
    /// This rank and those cannot reach each other any more, and which side is at fault is not known. Ranks see it,
    /// observers do not.
    #[non_exhaustive]
    CutOff {
        /// Those out of reach.
        from: Vec<usize>,
        /// What is known of it.
        why: String,
    },
    /// A communicator of this rank was ended on all of its ranks, for this reason. Ranks see it, observers do not.
    #[non_exhaustive]
    Fault {
        /// Why.
        fault: Arc<Fault>,
    },
    /// The ranks have gone on to another epoch (`World::next_epoch`): from now on, ranks
    /// have the numbers that they have there. Those who are there come as [`Joined`](Self::Joined).
    #[non_exhaustive]
    WentOn {
        /// Its number.
        epoch: u64,
    },
    /// An operator has said which ranks of a world that was cut in two go on (`World::decide_split`, `Observer::decide_split`). Observers see it,
    /// ranks do not.
    #[non_exhaustive]
    SplitDecided {
        /// Those.
        ranks: Vec<usize>,
    },
    /// So many events are forgotten, because nobody has read them in time.
    #[non_exhaustive]
    Missed {
        /// How many.
        events: u64,
    },
    /// The world has ended, or cannot be observed any more. Nothing comes after this.
    #[non_exhaustive]
    Ended {
        /// Why.
        why: String,
    },
}

impl WorldEvent {
    /// A rank is there no more.
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

    /// Some ranks have not entered an operation, or have at last.
    pub(super) fn late(lateness: &Lateness) -> impl Iterator<Item = Self> + '_ {
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

/// The last events, numbered.
#[derive(Debug, Default)]
pub(super) struct Log {
    events: VecDeque<WorldEvent>,
    /// The number of the first of them.
    first: u64,
}

impl Log {
    pub(super) fn note(&mut self, event: WorldEvent) {
        if self.events.len() == KEPT {
            self.events.pop_front();
            self.first += 1;
        }
        self.events.push_back(event);
    }

    /// The event with the number `next`, or how many were missed; `next` is then the one after.
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

/// Who awaits an event.
#[derive(Default)]
pub(super) struct Wakers(Mutex<Vec<Waker>>);

impl Wakers {
    fn add(&self, waker: &Waker) {
        let mut wakers = self.0.lock();
        if !wakers.iter().any(|known| known.will_wake(waker)) {
            wakers.push(waker.clone());
        }
    }

    pub(super) fn wake(&self) {
        let wakers = std::mem::take(&mut *self.0.lock());
        wakers.into_iter().for_each(Waker::wake);
    }
}

/// What a rank has seen happen since somebody asked, over all epochs of its world.
#[derive(Default)]
pub(crate) struct Happenings {
    state: Mutex<Seen>,
    changed: Condvar,
    wakers: Wakers,
}

#[derive(Default)]
struct Seen {
    log: Log,
    ended: bool,
}

impl Happenings {
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

impl Recorder for Happenings {
    fn wait_for_event(&self, next: &mut u64, deadline: Instant) -> Option<Option<WorldEvent>> {
        let mut state = self.state.lock();
        loop {
            if let Some(event) = state.log.read(next) {
                return Some(Some(event));
            }
            if state.ended {
                return Some(None);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            self.changed.wait_for(&mut state, left);
        }
    }

    fn wakers(&self) -> &Wakers {
        &self.wakers
    }
}

/// A reader of events, from `World::events` or `Observer::events`, with a
/// place of its own. Each thread or task makes its own, or takes turns with one.
///
/// As an iterator it waits for the next event, and ends with the world. [`next_within`](Self::next_within) waits for a
/// while; [`next_event`](Self::next_event) is for async code, with any executor.
///
/// ```
/// fn wait_for_the_end(mut events: nccl::Events) {
///     while events.next_within(std::time::Duration::from_secs(60)).is_some() {}
/// }
/// ```
pub struct Events {
    recorder: Arc<dyn Recorder>,
    next: u64,
}

/// What records events: a rank's mailbox, or an observer.
pub(super) trait Recorder: Send + Sync + UnwindSafe + RefUnwindSafe {
    /// The event at `next`, or that there will be none; `None` when there is none before the deadline.
    fn wait_for_event(&self, next: &mut u64, deadline: Instant) -> Option<Option<WorldEvent>>;

    /// The tasks that wait for an event.
    fn wakers(&self) -> &Wakers;
}

impl Events {
    pub(super) fn of(recorder: Arc<dyn Recorder>) -> Self {
        Self { recorder, next: 0 }
    }

    /// The next event; `None` when nothing has happened within `limit`, or at once when nothing will any
    /// more, after [`WorldEvent::Ended`].
    ///
    /// ```
    /// # use std::time::Duration;
    /// # fn show(mut events: nccl::Events) {
    /// while let Some(event) = events.next_within(Duration::from_secs(10)) {
    ///     println!("{event:?}");
    /// }
    /// # }
    /// ```
    pub fn next_within(&mut self, limit: Duration) -> Option<WorldEvent> {
        self.wait(deadline_after(limit)).unwrap_or_default()
    }

    /// The next event, awaited; `None` when there will be none any more. Nothing is lost when it is dropped before that.
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

    /// As [`next_event`](Self::next_event), for whoever makes a stream of it.
    ///
    /// ```
    /// # use std::task::{Context, Poll};
    /// # fn poll(events: &mut nccl::Events, context: &mut Context<'_>) -> Poll<Option<nccl::WorldEvent>> {
    /// events.poll_next(context)
    /// # }
    /// ```
    pub fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<WorldEvent>> {
        // Before the look, so that nothing comes in between.
        self.recorder.wakers().add(context.waker());
        match self.wait(Instant::now()) {
            Some(event) => Poll::Ready(event),
            None => Poll::Pending,
        }
    }

    /// The next event, or that there will be none; `None` when there is none before the deadline.
    fn wait(&mut self, deadline: Instant) -> Option<Option<WorldEvent>> {
        // Nothing happens in a forked child.
        if forked::is_child() {
            return Some(None);
        }
        self.recorder.wait_for_event(&mut self.next, deadline)
    }
}

/// Waits for each event, as long as it takes, and ends with the world.
///
/// ```
/// use nccl::WorldEvent;
///
/// let mut worlds = nccl::World::threads(2);
/// let mut events = worlds[0].events();
/// // Rank 1 says goodbye.
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
        let seen = Arc::new(Happenings::default());
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
        let seen = Arc::new(Happenings::default());
        let mut events = Events::of(seen.clone());
        assert!(events.poll_next(&mut context).is_pending());
        assert!(events.poll_next(&mut context).is_pending());
        seen.note(WorldEvent::Left { rank: 3 });
        assert_eq!(count.0.load(std::sync::atomic::Ordering::Relaxed), 1);
        let left = Some(WorldEvent::Left { rank: 3 });
        assert_eq!(events.poll_next(&mut context), Poll::Ready(left));
    }
}
