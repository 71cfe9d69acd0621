//! What the coordinator knows, and what follows from one request: the part of the [`Hub`](super::hub)
//! that is under its lock.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::channels::Channels;
use super::frame::LARGEST;
use super::going::Going;
use super::handover::{Doubt, Handover};
use super::heartbeat::{Beats, Pulse, Said};
use super::hub::{LONGEST_NAME, Outlet};
use super::incoming::{Answer, Known, Push};
use super::inquiries::Inquiries;
use super::message::{Incomplete, Missing, Parts, Round};
use super::phase::Phase;
use super::reporting::REPORT;
use crate::departure::Reason;
use crate::departure::{Departure, LastCall, Lost, ProcessEnd};

/// The most open rounds and waiting gets; a program that has more has lost count of its topics.
const MOST_OPEN: usize = 1 << 16;

pub(super) struct State {
    pub(super) members: Vec<Member>,
    pub(super) rounds: HashMap<Round, Open>,
    pub(super) keys: HashMap<String, Arc<[u8]>>,
    /// Bytes of all keys and values.
    pub(super) kept: usize,
    pub(super) gets: Vec<Get>,
    pub(super) remarks: VecDeque<String>,
    pub(super) remarked: usize,
    /// No deadline is earlier than this.
    pub(super) earliest: Option<Instant>,
    /// Who was sent something since the last flush.
    pub(super) dirty: Vec<Outlet>,
    /// By the number of their connection.
    pub(super) observers: HashMap<u64, Outlet>,
    pub(super) channels: Channels,
    pub(super) going: Going,
    /// Where another rank coordinated at first.
    pub(super) handover: Option<Handover>,
    pub(super) doubt: Doubt,
    pub(super) beats: Beats,
    pub(super) inquiries: Inquiries,
    /// For the log, which is written to outside of the lock.
    pub(super) said: Vec<Said>,
}

/// What is known of a rank. How it dies, when nobody has heard it say goodbye:
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
    pub(super) host: String,
    pub(super) pid: u64,
    /// Under which its number means something.
    pub(super) kernel: String,
    pub(super) at: String,
    pub(super) phase: Option<(Phase, Instant)>,
    /// When it was heard last; `None` for a thread of this process.
    pub(super) pulse: Option<Pulse>,
    /// Its last call, as it said with its last heartbeat.
    pub(super) last: Option<(String, Instant)>,
    /// Why it comes to no round any more. With an outlet it still comes to those of ends.
    pub(super) departure: Option<Departure>,
    /// The observer that has started it.
    pub(super) parent: Option<u64>,
    /// How its process ended, as its parent says.
    pub(super) word: Option<ProcessEnd>,
    /// How its connection ended.
    pub(super) closed: Option<Lost>,
    /// When one of these two has to do without the other.
    pub(super) until: Option<Instant>,
}

impl Member {
    pub(super) fn has_come(&self) -> bool {
        self.phase.is_some()
    }

    pub(super) fn known(&self, rank: usize, now: Instant) -> Known {
        let since = |at: Instant| now.saturating_duration_since(at);
        Known {
            rank,
            host: self.host.clone(),
            pid: self.pid,
            kernel: self.kernel.clone(),
            at: self.at.clone(),
            phase: self
                .phase
                .as_ref()
                .map(|(name, at)| (name.clone(), since(*at))),
            // One whose communicators outlive its world says goodbye later.
            departure: match &self.departure {
                Some(Departure::Left) if self.outlet.is_some() => None,
                departure => departure.clone(),
            },
        }
    }

    /// Nothing can come from it any more.
    pub(super) fn is_closed(&self) -> bool {
        self.departure.is_some() && self.outlet.is_none()
    }
}

pub(super) struct Open {
    pub(super) members: Option<Arc<[usize]>>,
    pub(super) begun: Instant,
    /// When to say that it is still waited for.
    pub(super) report: Instant,
    /// When the first of those who wait runs out of patience.
    pub(super) deadline: Instant,
    pub(super) parts: Vec<Option<Vec<u8>>>,
    pub(super) bytes: usize,
    /// Who has come, by place.
    pub(super) came: Vec<bool>,
    pub(super) waiting: Vec<(usize, u64)>,
    pub(super) verdict: Option<Answer>,
}

pub(super) struct Get {
    pub(super) key: String,
    pub(super) rank: usize,
    pub(super) id: u64,
    pub(super) begun: Instant,
    pub(super) report: Instant,
    pub(super) deadline: Instant,
}

impl Open {
    fn rank_at(&self, place: usize) -> usize {
        self.members
            .as_ref()
            .map_or(place, |members| members[place])
    }

    fn place_of(&self, rank: usize) -> Option<usize> {
        match &self.members {
            None => (rank < self.came.len()).then_some(rank),
            Some(members) => members.iter().position(|&member| member == rank),
        }
    }

    pub(super) fn absent(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.came.len())
            .filter(|&place| !self.came[place])
            .map(|place| self.rank_at(place))
    }

    /// For a round of ends: a rank from which nothing can come any more gave an empty part.
    fn end_without_the_closed(&mut self, members: &[Member]) {
        if self.absent().all(|rank| members[rank].is_closed()) {
            let parts = self
                .parts
                .iter_mut()
                .map(|part| part.take().unwrap_or_default());
            self.verdict = Some(Answer::Parts(Parts::new(parts.collect())));
        }
    }
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
        let mut encoded = None;
        for member in &self.members {
            if let Some(outlet) = &member.outlet {
                outlet.push(push, &mut encoded);
                self.dirty.push(outlet.clone());
            }
        }
    }

    /// For one rank, if it is there.
    pub(super) fn push_to(&mut self, rank: usize, push: &Push) {
        let outlet = self.members.get(rank);
        if let Some(outlet) = outlet.and_then(|member| member.outlet.clone()) {
            outlet.push(push, &mut None);
            self.dirty.push(outlet);
        }
    }

    pub(super) fn due(&mut self, deadline: Instant) {
        self.earliest = Some(self.earliest.map_or(deadline, |at| at.min(deadline)));
    }

    pub(super) fn collect(
        &mut self,
        rank: usize,
        id: u64,
        round: Round,
        deadline: Instant,
        part: Vec<u8>,
        size: usize,
    ) {
        let mut ranks = round.members.iter().flat_map(|members| members.iter());
        if ranks.any(|&member| member >= size) {
            return self.refuse(rank, id, Incomplete::OtherMembers);
        }
        if !self.rounds.contains_key(&round) {
            if self.rounds.len() >= MOST_OPEN || round.topic.len() > LONGEST_NAME {
                let bytes = round.topic.len();
                return self.refuse(rank, id, Incomplete::TooLarge { bytes });
            }
            // Groups of one name may be open at once, as long as they have no rank in common.
            let disputed = round.members.is_some()
                && self.rounds.iter().any(|(other, open)| {
                    (&other.topic, other.number) == (&round.topic, round.number)
                        && open.place_of(rank).is_some()
                });
            if disputed {
                return self.refuse(rank, id, Incomplete::OtherMembers);
            }
        }
        let open = self.rounds.entry(round.clone()).or_insert_with(|| {
            let count = round.members.as_ref().map_or(size, |members| members.len());
            let now = Instant::now();
            Open {
                members: round.members.clone(),
                begun: now,
                report: now + REPORT,
                deadline,
                parts: vec![None; count],
                bytes: 0,
                came: vec![false; count],
                waiting: Vec::new(),
                verdict: None,
            }
        });
        let Some(place) = open.place_of(rank) else {
            return self.refuse(rank, id, Incomplete::OtherMembers);
        };
        if open.came[place] {
            return self.refuse(rank, id, Incomplete::Twice);
        }
        open.came[place] = true;
        open.waiting.push((rank, id));
        open.deadline = open.deadline.min(deadline);
        let deadline = open.deadline;
        if open.verdict.is_none() {
            open.bytes += part.len();
            open.parts[place] = Some(part);
            if open.bytes > LARGEST {
                let bytes = open.bytes;
                open.verdict = Some(Answer::Incomplete(Arc::new(Incomplete::TooLarge { bytes })));
            } else if open.came.iter().all(|&came| came) {
                let parts = open.parts.iter_mut().filter_map(Option::take).collect();
                open.verdict = Some(Answer::Parts(Parts::new(parts)));
            } else if round.is_of_ends() {
                open.end_without_the_closed(&self.members);
            } else {
                let gone = open.absent().find_map(|rank| {
                    let departure = self.members[rank].departure.clone()?;
                    Some(Incomplete::Gone { rank, departure })
                });
                open.verdict = gone.map(|gone| Answer::Incomplete(Arc::new(gone)));
            }
        }
        self.due(deadline);
        self.settle(&round);
    }

    /// Tells a round's verdict to those who wait for it, and forgets the round when nobody else can
    /// come.
    fn settle(&mut self, key: &Round) {
        let Some(open) = self.rounds.get_mut(key) else {
            return;
        };
        let Some(verdict) = open.verdict.clone() else {
            return;
        };
        open.parts.clear();
        let waiting = std::mem::take(&mut open.waiting);
        let members = &self.members;
        let stays_away = |rank: usize| match key.is_of_ends() {
            true => members[rank].is_closed(),
            false => members[rank].departure.is_some(),
        };
        if open.absent().all(stays_away) {
            self.rounds.remove(key);
        }
        self.answer_all(&waiting, &verdict);
    }

    /// Ends a round before all are there.
    fn end(&mut self, key: &Round, why: Incomplete) {
        if let Some(open) = self.rounds.get_mut(key) {
            open.verdict
                .get_or_insert_with(|| Answer::Incomplete(Arc::new(why)));
            self.settle(key);
        }
    }

    pub(super) fn cancel(&mut self, rank: usize, id: u64, reason: Reason) {
        self.gets.retain(|get| (get.rank, get.id) != (rank, id));
        self.cancel_going_on(rank, id);
        let key = self
            .rounds
            .iter()
            .find_map(|(key, open)| open.waiting.contains(&(rank, id)).then(|| key.clone()));
        if let Some(key) = key {
            self.end(&key, Incomplete::GivenUp { rank, reason });
        }
    }

    pub(super) fn set(&mut self, rank: usize, id: u64, key: String, value: Arc<[u8]>) {
        let before = self.keys.get(&key).map_or(0, |old| old.len() + key.len());
        let kept = self.kept - before + value.len() + key.len();
        if kept > LARGEST || key.len() > LONGEST_NAME {
            return self.refuse(rank, id, Incomplete::TooLarge { bytes: kept });
        }
        self.kept = kept;
        self.keys.insert(key.clone(), Arc::clone(&value));
        self.answer_all(&[(rank, id)], &Answer::Done);
        let waiting: Vec<_> = self
            .gets
            .extract_if(.., |get| get.key == key)
            .map(|get| (get.rank, get.id))
            .collect();
        self.answer_all(&waiting, &Answer::Value(value));
    }

    pub(super) fn get(&mut self, get: Get) {
        if let Some(value) = self.keys.get(&get.key) {
            let value = Answer::Value(Arc::clone(value));
            return self.answer_all(&[(get.rank, get.id)], &value);
        }
        if self.gets.len() >= MOST_OPEN {
            let bytes = get.key.len();
            return self.refuse(get.rank, get.id, Incomplete::TooLarge { bytes });
        }
        self.due(get.deadline);
        self.gets.push(get);
    }

    /// A rank that `stays` comes to no round any more, but to those of ends, and leaves a second time
    /// when it is through with them.
    pub(super) fn leave(&mut self, rank: usize, mut departure: Departure, stays: bool) {
        let member = &mut self.members[rank];
        if member.is_closed() || (stays && member.departure.is_some()) {
            return;
        }
        if let Departure::Lost(lost) = &mut departure
            && let Some((call, at)) = member.last.take()
        {
            let before = at.elapsed();
            lost.last_call = Some(LastCall { call, before });
        }
        member.until = None;
        if !stays {
            // Where it waited, nobody reads an answer; its own process may still hold the connection.
            member.outlet = None;
        }
        // One that failed has said so. One that left without a word is heard of when it is gone.
        let told = matches!(member.departure, Some(Departure::Failed(_)));
        let silent = stays && departure == Departure::Left;
        let tell = !told && !silent;
        if !told {
            member.departure = Some(departure.clone());
        }
        self.gets.retain(|get| get.rank != rank);
        let keys: Vec<_> = self
            .rounds
            .iter_mut()
            .filter_map(|(key, open)| {
                if stays && key.is_of_ends() {
                    return None;
                }
                open.waiting.retain(|&(waiting, _)| waiting != rank);
                open.place_of(rank).map(|_| key.clone())
            })
            .collect();
        for key in keys {
            if key.is_of_ends() {
                if let Some(open) = self.rounds.get_mut(&key)
                    && open.verdict.is_none()
                {
                    open.end_without_the_closed(&self.members);
                }
                self.settle(&key);
                continue;
            }
            let came = self
                .rounds
                .get(&key)
                .is_none_or(|open| open.place_of(rank).is_none_or(|place| open.came[place]));
            if came {
                self.settle(&key);
            } else {
                let departure = departure.clone();
                self.end(&key, Incomplete::Gone { rank, departure });
            }
        }
        // Whoever died or failed may be the one that would have set the key.
        if departure != Departure::Left {
            let waiting: Vec<_> = self.gets.drain(..).map(|get| (get.rank, get.id)).collect();
            let departure = departure.clone();
            let why = Answer::Incomplete(Arc::new(Incomplete::Gone { rank, departure }));
            self.answer_all(&waiting, &why);
        }
        self.end_channels(rank, &departure);
        if tell {
            let departure = departure.clone();
            self.push(&Push::Gone { rank, departure });
        }
        self.show(rank);
        // Behind the news of it, so that whoever goes on knows why the rank does not.
        self.departed_before_going(rank, &departure);
    }

    pub(super) fn tick(&mut self, now: Instant) {
        if self.earliest.is_none_or(|earliest| earliest > now) {
            return;
        }
        let late: Vec<_> = self
            .rounds
            .iter()
            .filter(|(_, open)| open.verdict.is_none() && open.deadline <= now)
            .map(|(key, _)| key.clone())
            .collect();
        for key in late {
            let why = self.late(&key, now);
            self.end(&key, why);
        }
        let gets: Vec<_> = self
            .gets
            .extract_if(.., |get| get.deadline <= now)
            .collect();
        for get in gets {
            let waited = now.saturating_duration_since(get.begun);
            self.refuse(get.rank, get.id, Incomplete::NoKey { waited });
        }
        self.give_up_waiting(now);
        self.weigh(now);
        self.beat(now);
        self.give_up_sending(now);
        self.tick_going(now);
        self.tick_inquiries(now);
        let rounds = self.rounds.values().filter(|open| open.verdict.is_none());
        self.earliest = rounds
            .map(|open| open.deadline)
            .chain(self.gets.iter().map(|get| get.deadline))
            .chain(self.members.iter().filter_map(|member| member.until))
            .chain(self.doubt.until)
            .chain(self.beats.next)
            .chain(self.next_send_deadline())
            .chain(self.going.deadline())
            .chain(self.next_inquiry_deadline())
            .min();
    }

    fn late(&self, key: &Round, now: Instant) -> Incomplete {
        let Some(open) = self.rounds.get(key) else {
            return Incomplete::Interrupted;
        };
        let since = |at: Instant| now.saturating_duration_since(at);
        let waited_for = |rank: &usize| !(key.is_of_ends() && self.members[*rank].is_closed());
        let missing = open.absent().filter(waited_for).map(|rank| {
            let phase = self.members[rank].phase.as_ref();
            Missing {
                rank,
                phase: phase.map(|(name, at)| (name.clone(), since(*at))),
            }
        });
        let missing: Vec<_> = missing.collect();
        // Who was turned away matters where somebody never came.
        let mut remarks = Vec::new();
        if missing.iter().any(|missing| missing.phase.is_none()) {
            remarks.extend(self.remarks.iter().cloned());
            if self.remarked > self.remarks.len() {
                let more = self.remarked - self.remarks.len();
                remarks.push(format!("and {more} more before these"));
            }
        }
        Incomplete::TimedOut {
            missing,
            waited: open
                .deadline
                .saturating_duration_since(open.begun)
                .max(Duration::ZERO),
            remarks,
        }
    }
}
