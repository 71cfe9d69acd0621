//! A member's requests to the coordinator until they are answered, and what each new coordinator has to be told again.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::envelope::{Asking, again};
use crate::mailbox::Mailbox;
use crate::request::Request;

/// How many ends are kept for the next coordinator that all members have reported; and how many at all.
const ENDS: usize = 128;
const MOST_ENDS: usize = 1024;

/// How many messages to one rank alone are kept for the next coordinator, and for how long: the process that collects
/// them waits no longer for a verdict.
const TOLD: usize = 16;
const STALE: Duration = Duration::from_secs(2);

/// The kept requests of one line; see the module.
#[derive(Default)]
pub(super) struct Kept {
    /// The ends that this rank has reported.
    ends: VecDeque<(u64, Arc<[u8]>)>,
    phase: Option<Arc<[u8]>>,
    stay: Option<Arc<[u8]>>,
    /// Messages to one rank alone, and when they were sent. A rank may receive one twice.
    told: VecDeque<(Instant, usize, Vec<u8>)>,
    /// Requests made while there was no coordinator.
    later: Vec<(u64, Arc<[u8]>)>,
    /// Requests that are not answered yet.
    open: BTreeMap<u64, Arc<[u8]>>,
}

impl Kept {
    /// Keeps what another coordinator has to be told, and returns the encoded request.
    pub(super) fn keep(&mut self, asking: &Asking, mailbox: &Mailbox) -> Arc<[u8]> {
        let bytes = asking.encode();
        if asking.id != u64::MAX && mailbox.is_waited_for(asking.id) {
            self.open.insert(asking.id, Arc::clone(&bytes));
        }
        match &asking.request {
            Request::Collect { round, .. } if round.is_of_ends() => {
                while self.ends.len() >= ENDS
                    && (self.ends.len() >= MOST_ENDS || !mailbox.is_waited_for(self.ends[0].0))
                {
                    self.ends.pop_front();
                }
                self.ends.push_back((asking.id, Arc::clone(&bytes)));
            }
            Request::Phase { .. } => self.phase = Some(Arc::clone(&bytes)),
            Request::Stay { .. } => self.stay = Some(Arc::clone(&bytes)),
            _ => {}
        }
        bytes
    }

    /// Keeps a request until there is a coordinator.
    pub(super) fn later(&mut self, asking: &Asking, bytes: Arc<[u8]>) {
        let is_kept = match &asking.request {
            Request::Collect { round, .. } => round.is_of_ends(),
            Request::Phase { .. } | Request::Stay { .. } => true,
            _ => false,
        };
        if !is_kept {
            self.later.push((asking.id, bytes));
        }
    }

    pub(super) fn tell(&mut self, to: usize, bytes: Vec<u8>) {
        if self.told.len() == TOLD {
            self.told.pop_front();
        }
        self.told.push_back((Instant::now(), to, bytes));
    }

    pub(super) fn answered(&mut self, id: u64) {
        self.open.remove(&id);
    }

    /// Returns the requests to repeat to the same coordinator, which may have lost them.
    pub(super) fn asks_again(&mut self, mailbox: &Mailbox) -> Vec<Arc<[u8]>> {
        self.open.retain(|id, _| mailbox.is_waited_for(*id));
        let open = self.open.values().map(|bytes| again(bytes));
        let later = std::mem::take(&mut self.later).into_iter();
        open.chain(later.map(|(_, bytes)| bytes)).collect()
    }

    /// Returns the requests to repeat to another coordinator.
    pub(super) fn asks(&mut self) -> Vec<Arc<[u8]>> {
        let own = [&self.phase, &self.stay].into_iter().flatten().cloned();
        let ends = self.ends.iter().map(|(_, bytes)| Arc::clone(bytes));
        let later = std::mem::take(&mut self.later).into_iter();
        own.chain(ends)
            .chain(later.map(|(_, bytes)| bytes))
            .collect()
    }

    /// Returns the messages to one rank alone of the last moments.
    pub(super) fn told(&mut self) -> Vec<(usize, Vec<u8>)> {
        self.told.retain(|(at, ..)| at.elapsed() < STALE);
        let told = self.told.iter();
        told.map(|(_, to, bytes)| (*to, bytes.clone())).collect()
    }
}
