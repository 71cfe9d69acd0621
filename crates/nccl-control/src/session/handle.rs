//! The session of a rank, and the backend that carries its requests to the coordinator.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use crate::application::{FaultListener, RankRecorder};
use crate::departure::Departure;
use crate::events::WorldEvent;
use crate::inbox::{Inbox, Notice};
use crate::node::Node;
use crate::rank_process::RankProcess;
use crate::sync::Mutex;
use crate::thread_world::ThreadWorld;

#[doc(hidden)]
pub struct RankSession {
    pub(crate) rank: usize,
    pub(crate) size: usize,
    pub(super) backend: SessionBackend,
    pub(crate) inbox: Arc<Inbox>,
    /// Set when the generation is formed.
    pub(super) members: Arc<OnceLock<Vec<RankProcess>>>,
    /// Created with the first communicator.
    pub(super) fault_listener: OnceLock<Arc<dyn FaultListener>>,
    /// The job's name and generation.
    pub(crate) job: (String, u64),
    /// How often each topic was used: the n-th use on one rank corresponds to the n-th use on every other rank.
    pub(super) rounds: Mutex<HashMap<String, u64>>,
    /// Whether the world was dropped while communicators still exist.
    pub(super) has_left_world: AtomicBool,
    /// The generation that followed this one; 0 if there is none yet.
    pub(super) reconfigured_to: AtomicU64,
    /// The recorder of the calls of this session's communicators.
    pub(super) recorder: Arc<dyn RankRecorder>,
    /// The phase, and the time since when.
    pub(super) phase: Mutex<Option<(String, Instant)>>,
    /// The departure that is reported when this value is dropped.
    pub(super) final_departure: Mutex<Departure>,
}

#[derive(Clone)]
pub(crate) enum SessionBackend {
    /// Through the driver of this process's machine.
    Node { node: Arc<Node>, generation: u64 },
    /// The ranks are threads of this process.
    Threads(Arc<ThreadWorld>),
}

impl RankSession {
    /// Stores the processes of all ranks.
    pub(crate) fn set_members(&self, members: Vec<RankProcess>) {
        let _ = self.members.set(members);
    }

    /// Returns the backend of this session's requests: the node of this process, or the world of threads.
    pub(crate) fn backend(&self) -> SessionBackend {
        self.backend.clone()
    }

    /// Simulates the death of this process after `sends` messages to ranks.
    #[cfg(test)]
    pub(crate) fn die_after_for_a_test(&self, sends: usize) {
        if let SessionBackend::Node { node, .. } = &self.backend {
            node.die_after_for_a_test(sends);
        }
    }

    /// Whether this rank coordinates.
    #[cfg(test)]
    pub(crate) fn is_coordinator_for_a_test(&self) -> bool {
        matches!(&self.backend, SessionBackend::Node { node, .. } if node.is_coordinator_for_a_test())
    }

    /// Simulates the death of this process.
    #[cfg(test)]
    pub(crate) fn cut_for_a_test(&self) {
        if let SessionBackend::Node { node, .. } = &self.backend {
            node.cut_for_a_test();
        }
    }

    /// Moves the readers of the events of `before` to this world, its next generation.
    pub(crate) fn continue_from(&self, before: &Self) {
        let members = self.members.get().map_or(&[][..], Vec::as_slice);
        let generation = WorldEvent::NextGeneration {
            generation: self.job.1,
        };
        let inbox = &self.inbox;
        inbox.continue_from(&before.inbox, members, generation);
    }

    /// Ends this world, whose next generation is `generation`, and its communicators except those with the keys `kept`.
    pub(crate) fn end_reconfigured(&self, generation: u64, kept: &[&str]) {
        self.reconfigured_to.store(generation, Ordering::Release);
        if let Some(fault_listener) = self.fault_listener.get() {
            fault_listener.end_all(
                &format!("the world is in generation {generation} now"),
                kept,
            );
        }
    }

    /// Calls `handler` with every announcement, and with every rank that leaves, fails or dies, in the order in which
    /// the coordinator saw them. The handler runs on the thread that received the notice, so it must not block.
    pub fn on_notice(&self, handler: impl Fn(&Notice) + Send + Sync + 'static) {
        self.inbox.on_notice(Box::new(handler));
    }

    /// Waits until the handlers have processed all earlier notices, for 500 ms at most.
    pub fn catch_up(&self) {
        let deadline = Instant::now() + Duration::from_millis(500);
        while !self.inbox.run_handlers() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_micros(100));
        }
    }
}

impl fmt::Debug for RankSession {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RankSession")
            .field("rank", &self.rank)
            .field("size", &self.size)
            .finish_non_exhaustive()
    }
}
