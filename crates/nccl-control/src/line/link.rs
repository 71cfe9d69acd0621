//! A line, and its way to the coordinator.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use crate::attached::{Attached, Watcher};
use crate::departure::Departure;
use crate::events::WorldEvent;
use crate::mailbox::{Mailbox, Notice};
use crate::member::Member;
use crate::node::Node;
use crate::sync::Mutex;
use crate::threads::Threads;

#[doc(hidden)]
pub struct Line {
    pub(crate) rank: usize,
    pub(crate) size: usize,
    pub(super) link: Link,
    pub(crate) mailbox: Arc<Mailbox>,
    /// Known when all have met.
    pub(super) members: Arc<OnceLock<Vec<Member>>>,
    /// Made with the first communicator.
    pub(super) watcher: OnceLock<Arc<dyn Watcher>>,
    /// The job's name and epoch.
    pub(crate) job: (String, u64),
    /// How often each topic was used: the n-th use on one rank meets the n-th use on every other.
    pub(super) rounds: Mutex<HashMap<String, u64>>,
    /// The epoch to which the world has gone on; 0 before.
    pub(super) gone_on: AtomicU64,
    /// Under which its communicators record what they do.
    pub(super) attached: Arc<dyn Attached>,
    /// What the program does, as it says, and since when.
    pub(super) phase: Mutex<Option<(String, Instant)>>,
    /// What the others are told when this value goes.
    pub(super) farewell: Mutex<Departure>,
}

#[derive(Clone)]
pub(crate) enum Link {
    /// The driver of this process's machine knows.
    Node { node: Arc<Node>, generation: u64 },
    /// The ranks are threads of this process.
    Threads(Arc<Threads>),
}

impl Line {
    /// All have said who they are.
    pub(crate) fn meet(&self, members: Vec<Member>) {
        let _ = self.members.set(members);
    }

    /// The way to the coordinator, as it is now.
    pub(crate) fn link(&self) -> Link {
        self.link.clone()
    }

    /// As if this process died after so many sends to ranks.
    #[cfg(test)]
    pub(crate) fn die_after_for_a_test(&self, sends: usize) {
        if let Link::Node { node, .. } = &self.link {
            node.die_after_for_a_test(sends);
        }
    }

    /// Whether this rank coordinates.
    #[cfg(test)]
    pub(crate) fn leads_for_a_test(&self) -> bool {
        matches!(&self.link, Link::Node { node, .. } if node.leads_for_a_test())
    }

    /// As if this process died.
    #[cfg(test)]
    pub(crate) fn cut_for_a_test(&self) {
        if let Link::Node { node, .. } = &self.link {
            node.cut_for_a_test();
        }
    }

    /// Readers of the events of the world `before` read on in this one, its next epoch.
    pub(crate) fn goes_on_from(&self, before: &Self) {
        let members = self.members.get().map_or(&[][..], Vec::as_slice);
        let epoch = WorldEvent::WentOn { epoch: self.job.1 };
        let mailbox = &self.mailbox;
        mailbox.goes_on_from(&before.mailbox, members, epoch);
    }

    /// The world has gone on to `epoch`: what is left of this one ends, but communicators with the keys `kept`.
    pub(crate) fn has_gone_on(&self, epoch: u64, kept: &[&str]) {
        self.gone_on.store(epoch, Ordering::Release);
        if let Some(watcher) = self.watcher.get() {
            watcher.end_all(&format!("the world has gone on to epoch {epoch}"), kept);
        }
    }

    /// Calls `handler` with everything that is announced, and with every rank that leaves, fails or
    /// dies, in the order in which the coordinator saw it; on the thread that received it, so it must
    /// not wait.
    pub fn on_notice(&self, handler: impl Fn(&Notice) + Send + Sync + 'static) {
        self.mailbox.on_notice(Box::new(handler));
    }

    /// Waits until the handlers have heard what came before now.
    pub fn catch_up(&self) {
        let deadline = Instant::now() + Duration::from_millis(500);
        while !self.mailbox.run_handlers() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_micros(100));
        }
    }
}

impl fmt::Debug for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Line")
            .field("rank", &self.rank)
            .field("size", &self.size)
            .finish_non_exhaustive()
    }
}
