//! How a rank takes its leave of the others: with its world, with its communicators, or with its process.

use std::sync::{Arc, Weak};
use std::time::Duration;

use super::link::{Line, Link};
use crate::attached::Watcher;
use crate::departure::{Departure, Failure};
use crate::request::Request;
use crate::sync::{Condvar, Mutex};

/// How long a goodbye may take to be written.
const FAREWELL: Duration = Duration::from_secs(1);

/// The lines that communicators have.
static OPEN: Mutex<Vec<Weak<Line>>> = Mutex::new(Vec::new());

/// How many of them have not said goodbye yet, and who waits for that.
static UNSAID: Mutex<usize> = Mutex::new(0);

static SAID: Condvar = Condvar::new();

/// The process exits with this status, and with communicators that were not dropped. When it is not 0,
/// the other ranks are not to wait for it.
pub fn say_goodbye(status: i32) {
    let open: Vec<_> = OPEN.lock().iter().filter_map(Weak::upgrade).collect();
    for line in &open {
        if matches!(line.link(), Link::Threads(_)) {
            // The other ranks are threads that end as well.
            line.has_left();
            continue;
        }
        if status != 0 {
            *line.farewell.lock() = Departure::Failed(Failure::Exits(status));
        }
        line.leave();
    }
    // Their own goodbye would be the second.
    open.into_iter().for_each(std::mem::forget);
    // Another thread has dropped one just now, and is about to say it.
    let mut unsaid = UNSAID.lock();
    SAID.wait_while_for(&mut unsaid, |unsaid| *unsaid > 0, FAREWELL);
}

impl Line {
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

    /// Says that this rank fails, whatever becomes of this value.
    pub(crate) fn fail(&self, chain: String) {
        let why = Failure::Said(chain);
        if self.watcher.get().is_some() {
            // Its communicators still have to end, and the others wait for that.
            return self.send(u64::MAX, Request::Stay { why: Some(why) });
        }
        match &self.link {
            Link::Node { node, .. } => node.fail(why),
            Link::Threads(threads) => threads.leave(self.rank, Departure::Failed(why)),
        }
    }

    /// The world is gone; `alone` if nothing else has the line.
    pub(crate) fn world_ends(&self, farewell: Departure, alone: bool) {
        if alone {
            *self.farewell.lock() = farewell;
            return;
        }
        let why = match farewell {
            Departure::Failed(why) => Some(why),
            Departure::Left | Departure::Lost(_) => None,
        };
        self.send(u64::MAX, Request::Stay { why });
    }

    /// Says goodbye, for good.
    fn leave(&self) {
        let farewell = std::mem::replace(&mut *self.farewell.lock(), Departure::Left);
        match &self.link {
            Link::Node { node, generation } => node.leave(*generation, farewell),
            Link::Threads(threads) => threads.leave(self.rank, farewell),
        }
        self.has_left();
    }

    /// Whoever ends the process need not wait for it any more.
    fn has_left(&self) {
        if self.watcher.get().is_some() {
            *UNSAID.lock() -= 1;
            SAID.notify_all();
        }
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        self.leave();
    }
}
