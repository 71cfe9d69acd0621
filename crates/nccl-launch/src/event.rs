//! The events of a fleet, in order.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::output::Stream;
use super::report::RankEnd;
use crate::departure::Signal;
use crate::sync::{Condvar, Mutex, MutexGuard};

/// The number of events kept for readers that lag behind.
const KEPT: usize = 4096;

/// An event of a fleet.
///
/// ```
/// use nccl::launch::Event;
///
/// fn show(event: &Event) {
///     match event {
///         Event::Started { rank, pid, .. } => println!("rank {rank} is process {pid}"),
///         Event::Exited(end) => println!("{end}"),
///         _ => {}
///     }
/// }
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Event {
    /// A rank's process has been started.
    Started {
        /// The rank.
        rank: usize,
        /// Its process.
        pid: u32,
        /// The attempt that it belongs to.
        generation: u64,
    },
    /// A rank's process has ended. The event follows once the rank's last output has been read, or half a second after
    /// the end.
    Exited(Arc<RankEnd>),
    /// The file that [`log_dir`](super::FleetBuilder::log_dir) keeps of a stream could not be written, for example on a
    /// full disk, and ends there. The output of the rank still goes to the [`Output`](super::Output).
    LogCut {
        /// The rank.
        rank: usize,
        /// Which of its streams.
        stream: Stream,
        /// The system's error.
        error: Arc<io::Error>,
    },
    /// The ranks' output on this stream could not be written to the same stream of this process, for example on a full
    /// disk, or the function of [`Output::Lines`](super::Output::Lines) has panicked. The rest of it is lost, and the ranks
    /// continue.
    OutputCut {
        /// Which stream.
        stream: Stream,
        /// The system's error, or that the function has panicked.
        error: Arc<io::Error>,
    },
    /// The running ranks have been sent this signal, because a rank failed or because the caller asked.
    Ending(Signal),
    /// No rank runs any more.
    Finished,
}

/// The state that the thread of a fleet publishes.
#[derive(Default)]
pub(super) struct FleetState {
    inner: Mutex<Published>,
    changed: Condvar,
}

#[derive(Default)]
pub(super) struct Published {
    events: VecDeque<Event>,
    /// The number of the first kept event.
    first: u64,
    /// Process and generation of each rank that runs.
    pub(super) running: Vec<Option<(u32, u64)>>,
    /// How each rank ended last.
    pub(super) ends: Vec<Option<Arc<RankEnd>>>,
    /// Failures that the fleet had not asked for, in the order in which they happened.
    /// [`restart_all`](super::Fleet::restart_all) clears them, and the start of a rank removes those of that rank.
    pub(super) failures: Vec<Arc<RankEnd>>,
    /// The signal by which the fleet was asked to end.
    pub(super) interrupted: Option<Signal>,
    /// Whether `stop` or `kill` was called, and no caller has got a report since; until then ranks are not restarted.
    pub(super) unreported_stop: bool,
    /// Ranks whose processes could not be ended.
    pub(super) left: Vec<usize>,
    /// Whether output of the ranks is lost, because its reader does not read it.
    pub(super) unread: bool,
    pub(super) keeper: Option<u32>,
    /// The attempt that was started last.
    pub(super) generation: u64,
    /// Whether no rank runs, and all output has been read or abandoned.
    pub(super) finished: bool,
    /// Whether no more events will come.
    pub(super) closed: bool,
}

impl Published {
    /// Whether a report is due: a rank failed without being asked to end, or the fleet was told to end.
    pub(super) fn is_report_due(&self) -> bool {
        !self.failures.is_empty() || self.interrupted.is_some() || self.unreported_stop
    }
}

impl FleetState {
    pub(super) fn new(ranks: usize) -> Self {
        let fleet_state = Self::default();
        let mut inner = fleet_state.lock();
        inner.running = vec![None; ranks];
        inner.ends = vec![None; ranks];
        drop(inner);
        fleet_state
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Published> {
        self.inner.lock()
    }

    /// Changes the published state, adds `event`, and wakes all waiting threads.
    pub(super) fn post(
        &self,
        event: impl Into<Option<Event>>,
        change: impl FnOnce(&mut Published),
    ) {
        let mut inner = self.lock();
        change(&mut inner);
        if let Some(event) = event.into() {
            if inner.events.len() == KEPT {
                inner.events.pop_front();
                inner.first += 1;
            }
            inner.events.push_back(event);
        }
        drop(inner);
        self.changed.notify_all();
    }

    /// Waits until `done` returns a value, at most until `deadline`.
    pub(super) fn wait<T>(
        &self,
        deadline: Option<Instant>,
        mut done: impl FnMut(&mut Published) -> Option<T>,
    ) -> Option<T> {
        let mut inner = self.lock();
        loop {
            if let Some(found) = done(&mut inner) {
                return Some(found);
            }
            match deadline {
                None => self.changed.wait(&mut inner),
                Some(deadline) if deadline <= Instant::now() => return None,
                Some(deadline) => {
                    self.changed.wait_until(&mut inner, deadline);
                }
            }
        }
    }
}

/// The events of a fleet, from its start.
///
/// The iterator waits for the next event, and ends when the [`Fleet`](super::Fleet) ends. A reader that falls more than
/// 4096 events behind misses the oldest.
///
/// ```
/// use std::process::Command;
/// use nccl::launch::{Event, Fleet};
///
/// let fleet = Fleet::builder(2).start(|_| Command::new("true"))?;
/// let exits = fleet.events().take_while(|event| !matches!(event, Event::Finished));
/// let exits = exits.filter(|event| matches!(event, Event::Exited(end) if end.exit.is_success()));
/// assert_eq!(exits.count(), 2);
/// # Ok::<(), nccl::Error>(())
/// ```
pub struct Events {
    fleet_state: Arc<FleetState>,
    next: u64,
}

impl Events {
    pub(super) fn new(fleet_state: Arc<FleetState>) -> Self {
        Self {
            fleet_state,
            next: 0,
        }
    }

    /// Returns the next event, if one comes within `timeout`.
    ///
    /// ```
    /// use std::{process::Command, time::Duration};
    /// use nccl::launch::{Event, Fleet};
    ///
    /// let fleet = Fleet::builder(1).start(|_| Command::new("true"))?;
    /// let first = fleet.events().next_within(Duration::from_secs(5));
    /// assert!(matches!(first, Some(Event::Started { rank: 0, .. })));
    /// # Ok::<(), nccl::Error>(())
    /// ```
    pub fn next_within(&mut self, timeout: Duration) -> Option<Event> {
        self.next_until(Instant::now().checked_add(timeout))
    }

    fn next_until(&mut self, deadline: Option<Instant>) -> Option<Event> {
        let next = self.next;
        let found = self.fleet_state.wait(deadline, |inner| {
            let at = next.max(inner.first);
            let event = usize::try_from(at - inner.first)
                .ok()
                .and_then(|index| inner.events.get(index));
            match event {
                Some(event) => Some(Some((at + 1, event.clone()))),
                None => inner.closed.then_some(None),
            }
        });
        let (next, event) = found??;
        self.next = next;
        Some(event)
    }
}

impl Iterator for Events {
    type Item = Event;

    fn next(&mut self) -> Option<Event> {
        self.next_until(None)
    }
}

impl std::fmt::Debug for Events {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Events").field("next", &self.next).finish()
    }
}
