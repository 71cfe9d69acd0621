//! What the coordinator knows, and what follows from one request: the part of the [`Hub`](super::hub)
//! that is under its lock. It drives the [`Service`] for the ranks that it reaches.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use super::going::Going;
use super::handover::{Doubt, Handover};
use super::heartbeat::{Beats, Pulse, Said};
use super::hub::Outlet;
use super::incoming::{Answer, Known, Push};
use super::message::Incomplete;
use super::request::Request;
use super::service::{Output, Service, To};
use crate::departure::{Departure, LastCall, Lost, ProcessEnd};

pub(super) struct State {
    pub(super) members: Vec<Member>,
    /// What it does for the ranks, and what it knows of them for that.
    pub(super) service: Service,
    /// No deadline of what is not the service's is earlier than this.
    pub(super) earliest: Option<Instant>,
    /// Who was sent something since the last flush.
    pub(super) dirty: Vec<Outlet>,
    /// By the number of their connection.
    pub(super) observers: HashMap<u64, Outlet>,
    pub(super) going: Going,
    /// Where another rank coordinated at first.
    pub(super) handover: Option<Handover>,
    pub(super) doubt: Doubt,
    pub(super) beats: Beats,
    /// For the log, which is written to outside of the lock.
    pub(super) said: Vec<Said>,
}

/// How a rank is reached, and whether its process lives. How it dies, when nobody has heard it say goodbye:
///
/// ```text
/// its connection ends ──▶ closed ──its parent's word, or WORD later──▶ departure
/// its parent's word   ──▶ word   ──its connection ends, or WORD later──▶ departure
/// ```
///
/// Both come at the same moment and by different ways: the kernel closes the connection, and its parent
/// hears of it and tells. Without a parent that has said that it will, there is no waiting.
#[derive(Default)]
pub(super) struct Member {
    pub(super) outlet: Option<Outlet>,
    /// Under which the number of its process means something.
    pub(super) kernel: String,
    pub(super) at: String,
    /// When it was heard last; `None` for a thread of this process.
    pub(super) pulse: Option<Pulse>,
    /// Its last call, as it said with its last heartbeat.
    pub(super) last: Option<(String, Instant)>,
    /// The observer that has started it.
    pub(super) parent: Option<u64>,
    /// How its process ended, as its parent says.
    pub(super) word: Option<ProcessEnd>,
    /// How its connection ended.
    pub(super) closed: Option<Lost>,
    /// When one of these two has to do without the other.
    pub(super) until: Option<Instant>,
}

impl State {
    pub(super) fn answer_all(&mut self, to: &[(usize, u64)], answer: &Answer) {
        let mut encoded = None;
        for &(rank, id) in to {
            if let Some(outlet) = &self.members[rank].outlet {
                outlet.answer(id, answer, &mut encoded);
                self.dirty.push(outlet.clone());
            }
        }
    }

    pub(super) fn refuse(&mut self, rank: usize, id: u64, why: Incomplete) {
        self.answer_all(&[(rank, id)], &Answer::Incomplete(Arc::new(why)));
    }

    pub(super) fn push(&mut self, push: &Push) {
        self.push_to(0..self.members.len(), push);
    }

    /// For some ranks, as far as they are there.
    pub(super) fn push_to(&mut self, ranks: impl IntoIterator<Item = usize>, push: &Push) {
        let mut encoded = None;
        for rank in ranks {
            let outlet = self.members.get(rank).and_then(|to| to.outlet.as_ref());
            if let Some(outlet) = outlet {
                outlet.push(push, &mut encoded);
                self.dirty.push(outlet.clone());
            }
        }
    }

    pub(super) fn due(&mut self, deadline: Instant) {
        self.earliest = Some(self.earliest.map_or(deadline, |at| at.min(deadline)));
    }

    /// One request that is the service's.
    pub(super) fn serve(&mut self, now: Instant, rank: usize, id: u64, request: Request) {
        self.service.handle(now, rank, id, request);
        self.send_served();
    }

    fn send_served(&mut self) {
        while let Some(output) = self.service.poll() {
            match output {
                Output::Answer { to, answer } => self.answer_all(&to, &answer),
                Output::Push { to, push } => match to {
                    To::All => self.push(&push),
                    To::Rank(rank) => self.push_to([rank], &push),
                    To::Ranks(ranks) => self.push_to(ranks, &push),
                    To::Observers => self.show_all(&push),
                },
            }
        }
    }

    /// A rank that `stays` comes to no round any more, but to those of ends, and leaves a second time
    /// when it is through with them.
    pub(super) fn leave(&mut self, rank: usize, mut departure: Departure, stays: bool) {
        // One that failed has said so. One that left without a word is heard of when it is gone.
        let told = matches!(self.service.departure(rank), Some(Departure::Failed(_)));
        let silent = stays && departure == Departure::Left;
        let member = &mut self.members[rank];
        if let Departure::Lost(lost) = &mut departure
            && let Some((call, at)) = member.last.take()
        {
            let before = at.elapsed();
            lost.last_call = Some(LastCall { call, before });
        }
        if !self.service.leave(rank, departure.clone(), stays) {
            return;
        }
        member.until = None;
        if !stays {
            // Where it waited, nobody reads an answer; its own process may still hold the connection.
            member.outlet = None;
        }
        self.send_served();
        if !told && !silent {
            let departure = departure.clone();
            self.push(&Push::Gone { rank, departure });
        }
        self.show(rank);
        // Behind the news of it, so that whoever goes on knows why the rank does not.
        self.departed_before_going(rank, &departure);
    }

    /// The rank has no connection any more; whether it is gone is decided later.
    pub(super) fn disconnect(&mut self, rank: usize) {
        self.members[rank].outlet = None;
        self.service.disconnect(rank);
    }

    /// What observers are told of a rank.
    pub(super) fn known(&self, rank: usize, now: Instant) -> Known {
        let (member, own) = (&self.members[rank], self.service.rank(rank));
        Known {
            rank,
            host: own.host.clone(),
            pid: own.pid,
            kernel: member.kernel.clone(),
            at: member.at.clone(),
            phase: self.service.missing(rank, now).phase,
            // One whose communicators outlive its world says goodbye later.
            departure: match &own.departure {
                Some(Departure::Left) if member.outlet.is_some() => None,
                departure => departure.clone(),
            },
        }
    }

    pub(super) fn tick(&mut self, now: Instant) {
        self.service.handle_timeout(now);
        self.send_served();
        if self.earliest.is_none_or(|earliest| earliest > now) {
            return;
        }
        self.give_up_waiting(now);
        self.weigh(now);
        self.beat(now);
        self.tick_going(now);
        let deadlines = self.members.iter().filter_map(|member| member.until);
        self.earliest = deadlines
            .chain(self.doubt.until)
            .chain(self.beats.next)
            .chain(self.going.deadline())
            .min();
    }
}
