//! The coordinator's part of going on: the ranks that are left agree on the next epoch, and take in those
//! who have asked to come.
//!
//! ```text
//! rank      ──go on──▶  an agreement is open: it waits for every rank that has not departed
//! newcomer  ──hello──▶  waits at the door
//!                       a rank dies: it is not waited for any more
//!                       the limit of one that came passes ──▶ those who are missing are named to all
//!                                   (all said so)         ──▶ they are left behind, and named
//!                       all are there: the epoch is made, and written once
//! rank      ◀──epoch──
//! newcomer  ◀─invited─  which rank of it it is
//! observer  ◀─goes on─  its number: it looks for it
//! ```
//!
//! The epoch has a [`Hub`] of its own from the moment on in which it is made. A rank that dies on its way
//! there is heard of here alone, so this hub tells that one; who has come there speaks for itself. An epoch
//! whose ranks do not all get there is given up, and the next one is agreed upon here.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::connection::Connection;
use super::frame::Outgoing;
use super::hub::{Hub, Outlet};
use super::incoming::{Answer, Push};
use super::message::Incomplete;
use super::state::State;
use crate::departure::{Departure, How, Lost};

/// An epoch that ranks have agreed upon.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Epoch {
    pub(super) number: u64,
    /// For each of its ranks, which one it was before; `None` for one that is new.
    pub(super) from: Vec<Option<usize>>,
}

impl Epoch {
    pub(super) fn rank_of(&self, before: usize) -> Option<usize> {
        self.from.iter().position(|&from| from == Some(before))
    }
}

#[derive(Default)]
pub(super) struct Going {
    /// The epoch of this hub.
    pub(super) number: u64,
    came: BTreeMap<usize, Coming>,
    newcomers: BTreeMap<u64, Outlet>,
    /// The last epoch that was agreed upon.
    next: Option<Next>,
    /// How many were, if they came to nothing.
    agreed: u64,
    /// This rank is in a later epoch, wherever that was agreed upon.
    gone_on: bool,
}

/// A rank that wants to go on.
struct Coming {
    id: u64,
    begun: Instant,
    deadline: Instant,
    leaves_behind: bool,
}

/// An epoch to which the ranks are on their way, or in which they are.
struct Next {
    epoch: Arc<Epoch>,
    hub: Arc<Hub>,
    /// Which rank of it who waited at the door is, by the number of its connection.
    invited: HashMap<u64, usize>,
}

impl Going {
    pub(super) fn of_epoch(number: u64) -> Self {
        Self {
            number,
            ..Self::default()
        }
    }

    pub(super) fn deadline(&self) -> Option<Instant> {
        self.came.values().map(|coming| coming.deadline).min()
    }

    /// For how long the first of those that wait has.
    fn waited(&self, now: Instant) -> Duration {
        let begun = self.came.values().map(|coming| coming.begun).min();
        begun.map_or(Duration::ZERO, |begun| now.saturating_duration_since(begun))
    }

    pub(super) fn newcomers(&self) -> usize {
        self.newcomers.len()
    }

    /// The last agreement came to nothing, and there is no other yet.
    pub(super) fn give_up_next(&mut self) {
        self.next = None;
    }

    /// Whether there is a later epoch, as far as this rank knows.
    pub(super) fn has_gone_on(&self) -> bool {
        self.gone_on || self.next.is_some()
    }

    /// Whether this rank is in a later epoch.
    pub(super) fn is_past(&self) -> bool {
        self.gone_on
    }

    /// The hub of the last epoch that was agreed upon.
    pub(super) fn next(&self) -> Option<&Arc<Hub>> {
        self.next.as_ref().map(|next| &next.hub)
    }
}

impl State {
    /// A rank wants to go on.
    pub(super) fn go_on(&mut self, rank: usize, id: u64, deadline: Instant, leaves_behind: bool) {
        if self.service.departure(rank).is_some() {
            let departure = Departure::Left;
            return self.refuse(rank, id, Incomplete::Gone { rank, departure });
        }
        if self.going.came.contains_key(&rank) {
            return self.refuse(rank, id, Incomplete::Twice);
        }
        let coming = Coming {
            id,
            begun: Instant::now(),
            deadline,
            leaves_behind,
        };
        self.going.came.insert(rank, coming);
        self.due(deadline);
        self.agree_if_all_are_there();
    }

    /// A rank gives its request up: it can come again.
    pub(super) fn cancel_going_on(&mut self, rank: usize, id: u64) {
        if self.going.came.get(&rank).is_some_and(|own| own.id == id) {
            self.going.came.remove(&rank);
        }
    }

    fn missing_from_going(&self) -> Vec<usize> {
        let is_missing = |rank: &usize| {
            self.service.departure(*rank).is_none() && !self.going.came.contains_key(rank)
        };
        (0..self.members.len()).filter(is_missing).collect()
    }

    fn agree_if_all_are_there(&mut self) {
        if self.going.came.is_empty() || !self.missing_from_going().is_empty() {
            return;
        }
        // Of a side that may not decide, nobody goes on.
        if self.doubt.is_apart {
            return;
        }
        let came = std::mem::take(&mut self.going.came);
        let newcomers = std::mem::take(&mut self.going.newcomers);
        self.going.agreed += 1;
        let number = self.going.number + self.going.agreed;
        let mut from: Vec<_> = came.keys().copied().map(Some).collect();
        // Rank 0 is where the others come, also when one was passed over, and is there again.
        let me = from.iter().position(|&rank| rank == Some(self.me()));
        from[..=me.unwrap_or(0)].rotate_right(1);
        let first_new = from.len();
        from.extend(newcomers.iter().map(|_| None));
        let epoch = Arc::new(Epoch { number, from });
        let none_is_left = newcomers.is_empty();
        let hub = Arc::new(Hub::of_epoch(epoch.from.len(), number));
        let invited = newcomers.keys().copied().zip(first_new..).collect();
        self.going.next = Some(Next {
            epoch: Arc::clone(&epoch),
            hub,
            invited,
        });
        for (outlet, rank) in newcomers.into_values().zip(first_new..) {
            let epoch = Arc::clone(&epoch);
            outlet.push(&Push::Invited { epoch, rank }, &mut None);
            self.dirty.push(outlet);
        }
        let to: Vec<_> = came.iter().map(|(&rank, own)| (rank, own.id)).collect();
        self.answer_all(&to, &Answer::Epoch(epoch));
        self.show_all(&Push::GoesOn(number));
        if !none_is_left {
            self.tell_newcomers();
        }
    }

    /// A rank has departed: whoever waits for it here, or where it was to go, does so no more.
    pub(super) fn departed_before_going(&mut self, rank: usize, departure: &Departure) {
        self.going.came.remove(&rank);
        self.agree_if_all_are_there();
        if let Some(next) = &self.going.next
            && let Some(there) = next.epoch.rank_of(rank)
        {
            next.hub.never_comes(there, departure.clone());
        }
    }

    /// Ends an agreement that has run out of time.
    pub(super) fn tick_going(&mut self, now: Instant) {
        if self.going.deadline().is_none_or(|deadline| deadline > now) {
            return;
        }
        let waited = self.going.waited(now);
        let missing = self.missing_from_going();
        if self.going.came.values().all(|coming| coming.leaves_behind) {
            for rank in missing {
                let departure = Departure::lost(How::LeftBehind { after: waited });
                // So that it knows, should it ever look.
                let gone = Push::Gone {
                    rank,
                    departure: departure.clone(),
                };
                self.push_to([rank], &gone);
                // The last of them makes the epoch.
                self.leave(rank, departure, false);
            }
            return;
        }
        let missing = missing.into_iter();
        let missing = missing.map(|rank| self.service.missing(rank, now));
        let came = std::mem::take(&mut self.going.came);
        let to: Vec<_> = came.iter().map(|(&rank, own)| (rank, own.id)).collect();
        let why = Incomplete::TimedOut {
            missing: missing.collect(),
            waited,
            remarks: Vec::new(),
        };
        self.answer_all(&to, &Answer::Incomplete(Arc::new(why)));
    }

    /// Somebody asks to come in.
    ///
    /// # Errors
    /// There are too many.
    pub(super) fn receive_newcomer(
        &mut self,
        number: u64,
        connection: Arc<Connection>,
        welcome: Outgoing,
    ) -> Result<(), String> {
        let most = 64 + self.members.len();
        if self.going.newcomers.len() >= most {
            return Err(format!("{most} newcomers wait already"));
        }
        connection.enqueue(welcome);
        if self.going.gone_on {
            // Since it was looked whether anybody may come in here.
            connection.shut();
            return Ok(());
        }
        let outlet = Outlet::Remote(connection);
        self.going.newcomers.insert(number, outlet.clone());
        self.dirty.push(outlet);
        self.tell_newcomers();
        Ok(())
    }

    /// One who asked to come in is gone, or has come.
    pub(super) fn newcomer_gone(&mut self, number: u64, lost: Lost) {
        if self.going.newcomers.remove(&number).is_some() {
            return self.tell_newcomers();
        }
        if let Some(next) = &self.going.next
            && let Some(&rank) = next.invited.get(&number)
        {
            next.hub.never_comes(rank, Departure::Lost(lost));
        }
    }

    /// This rank is in a later epoch: nobody comes in here any more.
    pub(super) fn has_gone_on(&mut self) {
        self.going.gone_on = true;
        self.dismiss_newcomers();
    }

    /// Those who have asked to come in have to look elsewhere.
    pub(super) fn dismiss_newcomers(&mut self) {
        for outlet in std::mem::take(&mut self.going.newcomers).into_values() {
            if let Outlet::Remote(connection) = outlet {
                connection.shut();
            }
        }
    }

    fn tell_newcomers(&mut self) {
        let count = self.going.newcomers();
        self.push(&Push::Newcomers(count));
    }
}
