//! How a rank leaves the others: with its world, with its communicators, or with its process.

use std::sync::{Arc, Weak};
use std::time::Duration;

use super::link::{Line, Link};
use crate::attached::Watcher;
use crate::departure::{Departure, Failure};
use crate::request::Request;
use crate::sync::{Condvar, Mutex};

/// How long a goodbye may take to be written.
const FAREWELL: Duration = Duration::from_secs(1);

/// The lines that have communicators.
static OPEN: Mutex<Vec<Weak<Line>>> = Mutex::new(Vec::new());

/// How many of these lines have not said goodbye yet.
static UNSAID: Mutex<usize> = Mutex::new(0);

static SAID: Condvar = Condvar::new();

/// Says goodbye for a process that exits with `status`, and with communicators that were not dropped. With a status other than 0,
/// the other ranks do not wait for it.
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
    // Dropping them would say goodbye a second time.
    open.into_iter().for_each(std::mem::forget);
    // Another thread may just have dropped a line, and is about to say its goodbye.
    let mut unsaid = UNSAID.lock();
    SAID.wait_while_for(&mut unsaid, |unsaid| *unsaid > 0, FAREWELL);
}

impl Line {
    /// Returns the watcher of this line's communicators, made by `start` for the first of them. From then on the line stays open
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

    /// Reports that this rank fails, whatever happens to this value.
    pub(crate) fn fail(&self, chain: String) {
        let why = Failure::Said(chain);
        if self.watcher.get().is_some() {
            // Its communicators still have to end, and the other ranks wait for that.
            return self.send(u64::MAX, Request::Stay { why: Some(why) });
        }
        match &self.link {
            Link::Node { node, .. } => node.fail(why),
            Link::Threads(threads) => threads.leave(self.rank, Departure::Failed(why)),
        }
    }

    /// Ends the world; `alone` if nothing else has the line.
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

    /// Ends the wait of [`say_goodbye`] for this line.
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
