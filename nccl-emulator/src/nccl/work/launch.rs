//! A launch: the operations of one group on one communicator, as a job of a stream.

use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::time::Instant;

use super::collective::Collective;
use super::connection::{Seen, Watch};
use super::lists::Lists;
use super::one_sided::{self, OneSided};
use super::point_to_point::PointToPoint;
use super::proxies;
use super::ring::{ring, ring_at};
use super::scope::{Outcome, Scope};
use crate::code::IN_PROGRESS;
use crate::faults::{self, OperationFault};
use crate::nccl::communicator::{Communicator, Session};
use crate::nccl::debug::{self, warn};
use crate::nccl::profiler::Tracker;
use crate::nccl::task::{self, MessageTask};
use crate::options::options;
use crate::transport::{Direction, busy};
use cuda_emulator::driver::context::Context;
use cuda_emulator::exec::{Bell, Step, Work};

/// See [`super`].
pub(crate) struct Launch {
    communicator: Arc<Communicator>,
    pub(super) session: Arc<Session>,
    /// The context of the stream that the launch runs on.
    context: Arc<Context>,
    pub(super) lists: Lists,
    /// The index of the current collective.
    pub(super) at: usize,
    /// The state of the current collective, once begun.
    pub(super) collective: Option<Collective>,
    pub(super) messages: PointToPoint,
    one_sided: OneSided,
    /// The earliest beginning.
    start: Option<Instant>,
    fault: Option<OperationFault>,
    /// Whether the faults of the next part were looked up.
    prepared: bool,
    stuck: bool,
    /// Whether nothing is left that a peer could complete.
    is_over: bool,
    connection: Watch,
    /// The profiler's view of the launch.
    tracker: Option<Arc<Tracker>>,
    /// Whether a profiler gets the progress of the launch.
    is_observed: bool,
    /// The time of the next check for a profiler.
    pub(super) look: Option<Instant>,
}

impl Launch {
    /// Creates a launch of the operations of one group.
    pub(crate) fn new(
        communicator: &Arc<Communicator>,
        session: &Arc<Session>,
        context: &Arc<Context>,
        mut lists: Lists,
        start: Option<Instant>,
        is_persistent: bool,
    ) -> Box<Self> {
        let (own, ranks) = (session.rank as u32, session.ranks() as u32);
        // All ranks sort in the same way.
        task::sort(&mut lists.collectives, u64::from(ranks));
        lists.messages.sort_unstable_by_key(|message| {
            let (from, to) = match message.direction {
                Direction::Send => (own, message.peer),
                Direction::Receive => (message.peer, own),
            };
            let distance = if to < from {
                to + ranks - from
            } else {
                to - from
            };
            (distance, message.direction, message.order)
        });
        let tracker = match lists.profiles.is_empty() {
            true => None,
            false => track(communicator, session, &lists, is_persistent),
        };
        let lanes = std::mem::take(&mut lists.lanes);
        if let Some(start) = start {
            ring_at(start, session);
        }
        Box::new(Self {
            communicator: Arc::clone(communicator),
            session: Arc::clone(session),
            context: Arc::clone(context),
            lists,
            at: 0,
            collective: None,
            messages: PointToPoint::new(lanes),
            one_sided: OneSided::default(),
            start,
            fault: None,
            prepared: false,
            stuck: false,
            is_over: false,
            connection: Watch::default(),
            is_observed: tracker
                .as_ref()
                .is_some_and(|tracker| tracker.has_proxies()),
            tracker,
            look: None,
        })
    }

    /// Returns the profiler's view of the launch, if a profiler wants events.
    pub(crate) fn tracker(&self) -> Option<&Arc<Tracker>> {
        self.tracker.as_ref()
    }

    /// Returns whether the current part of the launch has begun: neither lateness nor a fault holds it.
    pub(super) fn has_begun(&self) -> bool {
        self.prepared && self.start.is_none() && self.fault.is_none()
    }

    /// Looks up the faults of the part that is about to begin.
    fn prepare(&mut self) {
        self.prepared = true;
        if !faults::any() {
            return;
        }
        let subject = self.communicator.subject();
        self.fault = match self.lists.collectives.get(self.at) {
            Some(task) => faults::check_operation(task.function.name(), subject),
            None => {
                let calls = self
                    .lists
                    .messages
                    .iter()
                    .filter(|message: &&MessageTask| message.leads);
                calls
                    .filter_map(|message| faults::check_operation(message.function.name(), subject))
                    .reduce(OperationFault::and)
            }
        };
        if let Some(fault) = &self.fault {
            if let Some(until) = fault.until() {
                ring_at(until, &self.session);
            }
            let session = Arc::downgrade(&self.session);
            fault.on_release(move || ring(&session));
        }
    }

    /// Whether lateness or a fault keeps the next part from beginning.
    fn is_held(&mut self) -> bool {
        if self.start.is_some_and(|start| Instant::now() < start) {
            return true;
        }
        self.start = None;
        let Some(fault) = &self.fault else {
            return false;
        };
        if fault.holds() {
            return true;
        }
        if let Some(code) = fault.code() {
            let _device = debug::on_device(self.communicator.device);
            warn!(
                "{}: fails with code {}, as it was told to",
                self.communicator,
                code.number()
            );
            self.communicator.fail(code);
            self.stuck = true;
            return true;
        }
        self.fault = None;
        false
    }

    fn part(&mut self, budget: usize) -> Outcome {
        if !self.prepared {
            self.prepare();
        }
        if self.is_held() {
            return Outcome::Blocked;
        }
        let scope = Scope {
            communicator: &self.communicator,
            session: &self.session,
            context: &self.context,
        };
        let one_sided = &mut self.one_sided;
        if let Some(outcome) = one_sided.step(&scope, &self.lists.one_sided, budget) {
            return outcome;
        }
        let Some(task) = self.lists.collectives.get(self.at) else {
            return self.messages.step(&scope, &self.lists.messages, budget);
        };
        let collective = self
            .collective
            .get_or_insert_with(|| Collective::new(*task));
        match collective.step(&scope, budget) {
            Outcome::Done => {
                self.collective = None;
                self.at += 1;
                self.prepared = false;
                Outcome::Progress
            }
            other => other,
        }
    }

    /// Checks, if due, whether a peer that the launch waits for over the network is gone. Returns true if the
    /// launch must step again.
    fn look_at_connections(&mut self) -> bool {
        // Most launches have no such peers and need not read the clock.
        if !self.session.has_network_peers() {
            return false;
        }
        let now = Instant::now();
        if !self.connection.is_due(now) {
            return false;
        }
        let awaited = self.awaited();
        let watch = &mut self.connection;
        match watch.look(&self.communicator, &self.session, awaited, now) {
            Seen::Nothing => false,
            Seen::Suspicion => true,
            Seen::Gone => {
                self.stuck = true;
                false
            }
        }
    }

    /// Returns the peers that the launch waits for. For a collective, whose data goes around a ring, these are the
    /// neighbours.
    fn awaited(&self) -> Vec<usize> {
        let (own, ranks) = (self.session.rank, self.session.ranks());
        if self.collective.is_some() {
            let mut neighbours = vec![(own + 1) % ranks, (own + ranks - 1) % ranks];
            neighbours.retain(|&rank| rank != own);
            return neighbours;
        }
        let lanes = self.messages.lanes.iter();
        let waiting = lanes.filter(|lane| lane.awaits_peer(&self.session));
        waiting.map(|lane| lane.peer).collect()
    }

    /// Gives up what is not complete: no peer takes another part of it. This rank's memory is its own again once the peers
    /// have finished the parts that they hold, for which an abort waits.
    fn withdraw(&mut self) {
        if std::mem::replace(&mut self.is_over, true) || options().late_writes {
            return;
        }
        self.messages.withdraw(&self.session);
        if let Some(collective) = &mut self.collective {
            collective.withdraw(&self.session);
        }
        // Operations that it has not posted are missing as well.
        self.session.give_up();
        if self.prepared {
            // Also after a panic in the middle of a part.
            let segment = &self.session.segment;
            segment.set_busy(self.session.rank, busy::IDLE);
        }
    }
}

/// Creates the profiler's view of a launch.
#[cold]
fn track(
    communicator: &Arc<Communicator>,
    session: &Arc<Session>,
    lists: &Lists,
    is_persistent: bool,
) -> Option<Arc<Tracker>> {
    Tracker::new(
        communicator,
        is_persistent,
        (&lists.profiles, &lists.collectives, &lists.messages),
        |task| proxies::proxies_of_collective(session, task),
        |task| proxies::proxies_of_message(session, task),
    )
}

impl Work for Launch {
    fn step(&mut self, budget: usize) -> Step {
        let seen = self.session.own().bell.value();
        if self.communicator.abort.is_raised() {
            let one_sided = self.one_sided.current(&self.lists.one_sided);
            if one_sided.is_some() {
                self.session.lose_waits();
            }
            self.withdraw();
            return Step::Done;
        }
        if !self.prepared && !self.stuck && self.session.has_given_up() {
            if let Err(code) = self.communicator.state()
                && code != IN_PROGRESS
            {
                // Under STRICT nothing hangs.
                return Step::Done;
            }
            // It would be paired with what the peers have begun before.
            eprintln!(
                "nccl-emulator: {} waits for ever: the rank has given up earlier operations",
                self.describe()
            );
            self.stuck = true;
        }
        if self.stuck {
            return Step::Blocked { seen };
        }
        let outcome = self.part(budget);
        if self.is_observed
            && let Some(tracker) = self.tracker.clone()
        {
            self.observe(&tracker, &outcome);
        }
        match outcome {
            Outcome::Done | Outcome::Failed => {
                // Only under STRICT does an operation end that leaves something. A later group may be in progress meanwhile.
                let is_whole = || {
                    matches!(self.communicator.state(), Ok(()) | Err(IN_PROGRESS))
                        || self.messages.are_complete(&self.session)
                };
                self.is_over |= matches!(outcome, Outcome::Done) && is_whole();
                self.withdraw();
                Step::Done
            }
            Outcome::Progress => Step::Progress,
            Outcome::Blocked if self.start.is_none() && self.fault.is_none() => {
                match self.look_at_connections() {
                    true => Step::Progress,
                    false => Step::Blocked { seen },
                }
            }
            Outcome::Blocked => Step::Blocked { seen },
            Outcome::Stuck => {
                self.stuck = true;
                Step::Blocked { seen }
            }
        }
    }

    fn bell(&self) -> &Bell {
        &self.session.own().bell
    }

    fn describe(&self) -> String {
        if let Some(task) = self.one_sided.current(&self.lists.one_sided) {
            return format!("{} on {}", one_sided::describe(task), self.communicator);
        }
        let operations = match (
            self.lists.collectives.get(self.at),
            self.lists.messages.as_slice(),
        ) {
            (Some(task), _) => {
                format!("{} of {} {}", task.function.name(), task.count, task.unit())
            }
            (None, [message]) => format!(
                "{} of {} bytes, peer {}",
                message.function.name(),
                message.bytes,
                message.peer
            ),
            (None, messages) => format!("{} sends and receives", messages.len()),
        };
        format!("{operations} on {}", self.communicator)
    }

    fn spinners(&self) -> &AtomicU32 {
        &self.session.segment.header().spinners.0
    }
}

impl Drop for Launch {
    fn drop(&mut self) {
        // A launch ends without another step if its context fails, or after a panic. One that is only made for a profiler
        // takes no step at all.
        if self.prepared {
            self.withdraw();
        }
        let mut lists = std::mem::take(&mut self.lists);
        lists.lanes = self.messages.take_lanes();
        self.communicator.give_back(lists);
    }
}
