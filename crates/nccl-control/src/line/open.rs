//! Opening a line, and all lines of this process.

use std::sync::atomic::AtomicU64;
use std::sync::{Arc, OnceLock, Weak};

use super::link::{Line, Link};
use crate::attached::host;
use crate::departure::Departure;
use crate::forked;
use crate::mailbox::Mailbox;
use crate::node::Entered;
use crate::sync::Mutex;

static LINES: Mutex<Vec<Weak<Line>>> = Mutex::new(Vec::new());

/// Returns all lines of this process to other ranks.
pub fn lines() -> Vec<Arc<Line>> {
    if forked::is_child() {
        return Vec::new();
    }
    LINES.lock().iter().filter_map(Weak::upgrade).collect()
}

/// Registers an open line.
fn remember(line: Weak<Line>) {
    if forked::is_child() {
        return;
    }
    let mut lines = LINES.lock();
    lines.retain(|line| line.strong_count() > 0);
    lines.push(line);
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
        remember(Arc::downgrade(&line));
        line
    }

    /// The line of a generation that this process has joined, or has gone on to.
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
}
