//! A rank's line to the others: what its world and its communicators share.
//!
//! A program may drop its `World` and go on with its communicators, and these still have
//! to hear of a rank that died. So the connection is theirs together: it stays open until the last of
//! them is gone, and only then says goodbye. Of a world that is gone while communicators live, the
//! others learn at once that this rank comes to no exchange any more ([`Request::Stay`]); should its
//! process die after that, they hear of it like of any other death.
//!
//! [`Request::Stay`]: super::request::Request::Stay
//!
//! The value itself, the way to the coordinator, and how both come to be are here.
//!
//! - `facts`: what this rank knows of itself and of the others;
//! - `asking`: requests and their answers; `explain`: the errors of those that fail; `ends`: the end of a communicator, waited for together;
//! - `recordings`: what other processes have recorded, and how their clocks stand to this one's;
//! - `farewell`: how the line says goodbye; `registry`: all lines of the process.

mod asking;
mod ends;
mod explain;
mod facts;
mod farewell;
mod recordings;
mod registry;

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use self::farewell::{OPEN, UNSAID};
use super::attached::{Attached, Watcher, host};
use super::events::WorldEvent;
use super::mailbox::{Mailbox, Notice};
use super::node::{Entered, Node};
use super::threads::Threads;
use crate::departure::Departure;
use crate::forked;
use crate::member::Member;
use crate::sync::Mutex;

pub use self::farewell::say_goodbye;
pub use self::registry::lines;

#[doc(hidden)]
pub struct Line {
    pub(crate) rank: usize,
    pub(crate) size: usize,
    link: Link,
    pub(crate) mailbox: Arc<Mailbox>,
    /// Known when all have met.
    members: Arc<OnceLock<Vec<Member>>>,
    /// Made with the first communicator.
    watcher: OnceLock<Arc<dyn Watcher>>,
    /// The job's name and epoch.
    pub(crate) job: (String, u64),
    /// How often each topic was used: the n-th use on one rank meets the n-th use on every other.
    rounds: Mutex<HashMap<String, u64>>,
    /// The epoch to which the world has gone on; 0 before.
    gone_on: AtomicU64,
    /// Under which its communicators record what they do.
    attached: Arc<dyn Attached>,
    /// What the program does, as it says, and since when.
    phase: Mutex<Option<(String, Instant)>>,
    /// What the others are told when this value goes.
    farewell: Mutex<Departure>,
}

#[derive(Clone)]
pub(crate) enum Link {
    /// The driver of this process's machine knows.
    Node { node: Arc<Node>, generation: u64 },
    /// The ranks are threads of this process.
    Threads(Arc<Threads>),
}

impl Line {
    pub(crate) fn open(
        rank: usize,
        size: usize,
        job: (String, u64),
        link: Link,
        mailbox: Arc<Mailbox>,
    ) -> Arc<Self> {
        let attached = host().opens(&job.0, job.1, rank, size);
        let line = Arc::new(Self {
            rank,
            size,
            link,
            mailbox,
            members: Arc::default(),
            watcher: OnceLock::new(),
            job,
            rounds: Mutex::default(),
            gone_on: AtomicU64::new(0),
            attached,
            phase: Mutex::default(),
            farewell: Mutex::new(Departure::Left),
        });
        if let Link::Node { node, .. } = line.link() {
            node.attach(&line.attached);
        }
        forked::watch();
        registry::remember(Arc::downgrade(&line));
        line
    }

    /// The line of a generation that this process has come into, or has gone on to.
    pub(crate) fn of(entered: &Entered) -> Arc<Self> {
        let link = Link::Node {
            node: Arc::clone(&entered.node),
            generation: entered.generation,
        };
        let line = Self::open(
            entered.rank,
            entered.membership.members.len(),
            (entered.node.job_name().to_owned(), entered.generation),
            link,
            Arc::clone(&entered.mailbox),
        );
        line.meet(entered.members());
        line
    }

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

    /// Those who read what happens in the world `before` read on in this one, its next epoch.
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

    /// What looks after the communicators of this line; made by `start` for the first of them. From then on the line stays open
    /// until it has said goodbye, also when the process exits.
    pub fn watcher(
        self: &Arc<Self>,
        start: impl FnOnce(&Arc<Self>) -> Arc<dyn Watcher>,
    ) -> Arc<dyn Watcher> {
        Arc::clone(self.watcher.get_or_init(|| {
            let mut open = OPEN.lock();
            open.retain(|line| line.strong_count() > 0);
            open.push(Arc::downgrade(self));
            *UNSAID.lock() += 1;
            start(self)
        }))
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
