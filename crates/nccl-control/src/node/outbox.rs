//! A member's requests to the coordinator until they are answered, and what is sent again to each new coordinator.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::driver_message::{NumberedRequest, RequestHead, with_head};
use crate::inbox::Inbox;
use crate::request::{NO_ANSWER, Request};

/// How many answered end reports are kept for the next coordinator; and how many end reports in all.
const MIN_KEPT_ENDS: usize = 128;
const MAX_KEPT_ENDS: usize = 1024;

/// How many messages to one rank alone are kept for the next coordinator, and for how long: the process that collects
/// them waits no longer for the decided fault.
const MAX_DIRECT: usize = 16;
const DIRECT_KEPT_FOR: Duration = Duration::from_secs(2);

/// The kept requests of one session; see the module.
#[derive(Default)]
pub(super) struct Outbox {
    /// The ends of communicators that this rank has reported.
    end_reports: VecDeque<(u64, Arc<[u8]>)>,
    phase: Option<Arc<[u8]>>,
    leave_world: Option<Arc<[u8]>>,
    /// Messages to one rank alone, and when they were sent. A rank may receive one twice.
    recent_direct: VecDeque<(Instant, usize, Vec<u8>)>,
    /// Requests made while there was no coordinator.
    deferred: Vec<(u64, Arc<[u8]>)>,
    /// Requests that are not answered yet.
    open: BTreeMap<u64, Arc<[u8]>>,
    /// Those of them that change the store.
    open_changes: BTreeSet<u64>,
}

impl Outbox {
    /// Keeps what is sent again to another coordinator, and returns the encoded request.
    pub(super) fn add(&mut self, numbered: &NumberedRequest, inbox: &Inbox) -> Arc<[u8]> {
        let is_awaited = numbered.id != NO_ANSWER && inbox.is_waited_for(numbered.id);
        let mut head = RequestHead::default();
        if is_awaited && numbered.request.changes_store() {
            self.open_changes.insert(numbered.id);
            head.settled = self.settled(inbox);
        }
        let bytes = numbered.encode(head);
        if is_awaited {
            self.open.insert(numbered.id, Arc::clone(&bytes));
        }
        match &numbered.request {
            Request::Exchange { round, .. } if round.is_of_ends() => {
                while self.end_reports.len() >= MIN_KEPT_ENDS
                    && (self.end_reports.len() >= MAX_KEPT_ENDS
                        || !inbox.is_waited_for(self.end_reports[0].0))
                {
                    self.end_reports.pop_front();
                }
                self.end_reports
                    .push_back((numbered.id, Arc::clone(&bytes)));
            }
            Request::Phase { .. } => self.phase = Some(Arc::clone(&bytes)),
            Request::LeaveWorld { .. } => self.leave_world = Some(Arc::clone(&bytes)),
            _ => {}
        }
        bytes
    }

    /// Keeps a request until there is a coordinator.
    pub(super) fn defer(&mut self, numbered: &NumberedRequest, bytes: Arc<[u8]>) {
        let is_kept = match &numbered.request {
            Request::Exchange { round, .. } => round.is_of_ends(),
            Request::Phase { .. } | Request::LeaveWorld { .. } => true,
            _ => false,
        };
        if !is_kept {
            self.deferred.push((numbered.id, bytes));
        }
    }

    pub(super) fn add_direct(&mut self, to: usize, bytes: Vec<u8>) {
        if self.recent_direct.len() == MAX_DIRECT {
            self.recent_direct.pop_front();
        }
        self.recent_direct.push_back((Instant::now(), to, bytes));
    }

    pub(super) fn answered(&mut self, id: u64) {
        self.open.remove(&id);
        self.open_changes.remove(&id);
    }

    /// Returns a number below which no answer to a change of the store is awaited.
    fn settled(&mut self, inbox: &Inbox) -> u64 {
        while let Some(&id) = self.open_changes.first() {
            if inbox.is_waited_for(id) {
                return id;
            }
            self.open_changes.pop_first();
        }
        0
    }

    /// Returns the requests to repeat to the same coordinator, which may have lost them.
    pub(super) fn requests_to_repeat(&mut self, inbox: &Inbox) -> Vec<Arc<[u8]>> {
        self.open.retain(|id, _| inbox.is_waited_for(*id));
        let head = RequestHead {
            is_repeated: true,
            settled: self.settled(inbox),
        };
        let open = self.open.values().map(|bytes| with_head(bytes, head));
        // Those that are awaited are open as well, and sent once.
        let deferred = std::mem::take(&mut self.deferred).into_iter();
        let deferred = deferred.filter(|(id, _)| !self.open.contains_key(id));
        // Their own heads are of the time before, when requests with lower numbers may not have been here.
        let now = RequestHead {
            is_repeated: false,
            ..head
        };
        let deferred = deferred.map(|(_, bytes)| with_head(&bytes, now));
        open.chain(deferred).collect()
    }

    /// Returns the requests to repeat to another coordinator.
    pub(super) fn requests_to_resend(&mut self) -> Vec<Arc<[u8]>> {
        let own = [&self.phase, &self.leave_world]
            .into_iter()
            .flatten()
            .cloned();
        let end_reports = self.end_reports.iter().map(|(_, bytes)| Arc::clone(bytes));
        let deferred = std::mem::take(&mut self.deferred).into_iter();
        own.chain(end_reports)
            .chain(deferred.map(|(_, bytes)| bytes))
            .collect()
    }

    /// Returns the messages to one rank alone that were sent within [`DIRECT_KEPT_FOR`].
    pub(super) fn recent_direct(&mut self) -> Vec<(usize, Vec<u8>)> {
        self.recent_direct
            .retain(|(at, ..)| at.elapsed() < DIRECT_KEPT_FOR);
        let recent_direct = self.recent_direct.iter();
        recent_direct
            .map(|(_, to, bytes)| (*to, bytes.clone()))
            .collect()
    }
}
