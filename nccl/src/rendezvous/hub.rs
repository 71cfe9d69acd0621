//! The coordinator's knowledge: who is there, which rounds are open, what was put into the store.
//!
//! Lives in rank 0's process, or in the one process when the ranks are its threads. Nothing here waits
//! or reads a socket: a request comes in, and answers and pushes go out to the [`Outlet`]s of the ranks
//! that they concern. Time passes by [`Hub::tick`].
//!
//! A round ends once, for all: when every part is there, when the first patience of a rank that waits
//! runs out, when a rank that it needs is gone, or when one gives it up. A rank that comes later gets
//! the same answer as those that waited.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::connection::Connection;
use super::frame::{LARGEST, Outgoing};
use super::mailbox::Mailbox;
use super::message::{Answer, Departure, Incomplete, Missing, Parts, Push, Request, Round};
use crate::communicator::lock;
use crate::time::later;

/// The most open rounds and waiting gets; a program that has more has lost count of its topics.
const MOST_OPEN: usize = 1 << 16;

/// The longest name of a topic, a key or a phase, in bytes.
const LONGEST_NAME: usize = 1024;

/// How many remarks are kept for those who wait in vain.
const REMARKS: usize = 8;

/// Where to reach a rank.
#[derive(Clone)]
pub(super) enum Outlet {
    /// In this process.
    Local(Arc<Mailbox>),
    Remote(Arc<Connection>),
}

pub(super) struct Hub {
    size: usize,
    state: Mutex<State>,
}

struct State {
    members: Vec<Member>,
    rounds: HashMap<Round, Open>,
    keys: HashMap<String, Arc<[u8]>>,
    /// Bytes of all keys and values.
    kept: usize,
    gets: Vec<Get>,
    remarks: VecDeque<String>,
    remarked: usize,
    /// No deadline is earlier than this.
    earliest: Option<Instant>,
    /// Who was sent something since the last flush.
    dirty: Vec<Outlet>,
}

#[derive(Default)]
struct Member {
    outlet: Option<Outlet>,
    who: String,
    phase: Option<(String, Instant)>,
    departure: Option<Departure>,
}

struct Open {
    members: Option<Arc<[usize]>>,
    begun: Instant,
    /// When the first of those who wait runs out of patience.
    deadline: Instant,
    parts: Vec<Option<Vec<u8>>>,
    bytes: usize,
    /// Who has come, by place.
    came: Vec<bool>,
    waiting: Vec<(usize, u64)>,
    verdict: Option<Answer>,
}

struct Get {
    key: String,
    rank: usize,
    id: u64,
    begun: Instant,
    deadline: Instant,
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

    fn absent(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.came.len())
            .filter(|&place| !self.came[place])
            .map(|place| self.rank_at(place))
    }
}

impl Hub {
    pub(super) fn new(size: usize) -> Self {
        let members = (0..size).map(|_| Member::default()).collect();
        let state = State {
            members,
            rounds: HashMap::new(),
            keys: HashMap::new(),
            kept: 0,
            gets: Vec::new(),
            remarks: VecDeque::new(),
            remarked: 0,
            earliest: None,
            dirty: Vec::new(),
        };
        Self {
            size,
            state: Mutex::new(state),
        }
    }

    pub(super) fn size(&self) -> usize {
        self.size
    }

    /// A rank has come. `who` is what to call it when another one says it is the same; `welcome` is
    /// the first that it is sent.
    ///
    /// # Errors
    /// Who is this rank already.
    pub(super) fn attach(
        &self,
        rank: usize,
        outlet: Outlet,
        who: String,
        welcome: Option<Outgoing>,
    ) -> Result<(), String> {
        let mut state = lock(&self.state);
        let member = &mut state.members[rank];
        if member.outlet.is_some() || member.departure.is_some() {
            let end = match &member.departure {
                Some(departure) => format!("; {departure}"),
                None => String::new(),
            };
            return Err(format!(
                "rank {rank} has joined already, as {}{end}: this one is {who}, and two processes \
                 cannot be one rank",
                member.who
            ));
        }
        if let (Outlet::Remote(connection), Some(welcome)) = (&outlet, welcome) {
            connection.enqueue(welcome);
        }
        member.outlet = Some(outlet.clone());
        member.who = who;
        member.phase = Some((String::from("joined"), Instant::now()));
        let gone: Vec<_> = state
            .members
            .iter()
            .enumerate()
            .filter_map(|(rank, member)| Some((rank, member.departure.clone()?)))
            .collect();
        for (rank, departure) in gone {
            outlet.push(&Push::Gone { rank, departure }, &mut None);
        }
        state.dirty.push(outlet);
        Ok(())
    }

    /// Somebody was turned away: told to those who wait in vain.
    pub(super) fn remark(&self, text: String) {
        let mut state = lock(&self.state);
        state.remarked += 1;
        if state.remarks.len() == REMARKS {
            state.remarks.pop_front();
        }
        state.remarks.push_back(text);
    }

    /// One request of `rank`; what follows from it waits for [`flush`](Self::flush).
    pub(super) fn handle(&self, rank: usize, id: u64, request: Request) {
        let now = Instant::now();
        let state = &mut *lock(&self.state);
        if state.members[rank].outlet.is_none() {
            return;
        }
        match request {
            Request::Collect {
                round,
                patience,
                part,
            } => state.collect(rank, id, round, later(now, patience), part, self.size),
            Request::Cancel { reason } => state.cancel(rank, id, reason),
            Request::Set { key, value } => state.set(rank, id, key, value.into()),
            Request::Get { key, patience } => {
                let deadline = later(now, patience);
                state.get(Get {
                    key,
                    rank,
                    id,
                    begun: now,
                    deadline,
                });
            }
            Request::Phase { mut name } => {
                cut(&mut name, LONGEST_NAME);
                state.members[rank].phase = Some((name, now));
            }
            Request::Announce { topic, bytes } => state.push(&Push::Notice {
                from: rank,
                topic,
                bytes: bytes.into(),
            }),
            Request::Fail { chain } => state.leave(rank, Departure::Failed(chain)),
            Request::Goodbye => state.leave(rank, Departure::Left),
        }
    }

    /// A rank takes part in nothing any more; the first reason stays.
    pub(super) fn leave(&self, rank: usize, departure: Departure) {
        lock(&self.state).leave(rank, departure);
        self.flush();
    }

    /// Ends what has run out of time.
    pub(super) fn tick(&self, now: Instant) {
        lock(&self.state).tick(now);
        self.flush();
    }

    /// When to call [`tick`](Self::tick) next.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        lock(&self.state).earliest
    }

    /// Whether somebody waits for something.
    pub(super) fn is_waited_for(&self) -> bool {
        let state = lock(&self.state);
        !state.gets.is_empty() || state.rounds.values().any(|open| !open.waiting.is_empty())
    }

    /// Sends what was queued. Outside of the lock, because it runs the handlers of notices.
    pub(super) fn flush(&self) {
        let dirty = std::mem::take(&mut lock(&self.state).dirty);
        for outlet in dirty {
            match outlet {
                Outlet::Local(mailbox) => mailbox.run_handlers(),
                Outlet::Remote(connection) => connection.flush_quietly(),
            }
        }
    }
}

impl Outlet {
    fn answer(&self, id: u64, answer: &Answer, encoded: &mut Option<(u8, Arc<[u8]>)>) {
        match self {
            Self::Local(mailbox) => mailbox.answer(id, answer.clone()),
            Self::Remote(connection) => {
                let (kind, payload) = encoded.get_or_insert_with(|| answer.encode());
                connection.enqueue(Outgoing::new(*kind, id, Arc::clone(payload)));
            }
        }
    }

    fn push(&self, push: &Push, encoded: &mut Option<Outgoing>) {
        match self {
            Self::Local(mailbox) => mailbox.push(push.clone()),
            Self::Remote(connection) => {
                connection.enqueue(encoded.get_or_insert_with(|| push.encode()).clone());
            }
        }
    }
}

/// Cuts a text at a character.
pub(super) fn cut(text: &mut String, longest: usize) {
    let mut end = longest.min(text.len());
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text.truncate(end);
}

impl State {
    fn answer_all(&mut self, to: &[(usize, u64)], answer: &Answer) {
        let mut encoded = None;
        for &(rank, id) in to {
            if let Some(outlet) = &self.members[rank].outlet {
                outlet.answer(id, answer, &mut encoded);
                self.dirty.push(outlet.clone());
            }
        }
    }

    fn refuse(&mut self, rank: usize, id: u64, why: Incomplete) {
        self.answer_all(&[(rank, id)], &Answer::Incomplete(Arc::new(why)));
    }

    fn push(&mut self, push: &Push) {
        let mut encoded = None;
        for member in &self.members {
            if let Some(outlet) = &member.outlet {
                outlet.push(push, &mut encoded);
                self.dirty.push(outlet.clone());
            }
        }
    }

    fn due(&mut self, deadline: Instant) {
        self.earliest = Some(self.earliest.map_or(deadline, |at| at.min(deadline)));
    }

    fn collect(
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
            Open {
                members: round.members.clone(),
                begun: Instant::now(),
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
        if open.absent().all(|rank| members[rank].departure.is_some()) {
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

    fn cancel(&mut self, rank: usize, id: u64, reason: String) {
        self.gets.retain(|get| (get.rank, get.id) != (rank, id));
        let key = self
            .rounds
            .iter()
            .find_map(|(key, open)| open.waiting.contains(&(rank, id)).then(|| key.clone()));
        if let Some(key) = key {
            self.end(&key, Incomplete::GivenUp { rank, reason });
        }
    }

    fn set(&mut self, rank: usize, id: u64, key: String, value: Arc<[u8]>) {
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

    fn get(&mut self, get: Get) {
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

    fn leave(&mut self, rank: usize, departure: Departure) {
        let member = &mut self.members[rank];
        if member.departure.is_some() {
            return;
        }
        member.departure = Some(departure.clone());
        // Where it waited, nobody reads an answer; its own process may still hold the connection.
        member.outlet = None;
        self.gets.retain(|get| get.rank != rank);
        let keys: Vec<_> = self
            .rounds
            .iter_mut()
            .filter_map(|(key, open)| {
                open.waiting.retain(|&(waiting, _)| waiting != rank);
                open.place_of(rank).map(|_| key.clone())
            })
            .collect();
        for key in keys {
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
        self.push(&Push::Gone { rank, departure });
    }

    fn tick(&mut self, now: Instant) {
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
        let rounds = self.rounds.values().filter(|open| open.verdict.is_none());
        self.earliest = rounds
            .map(|open| open.deadline)
            .chain(self.gets.iter().map(|get| get.deadline))
            .min();
    }

    fn late(&self, key: &Round, now: Instant) -> Incomplete {
        let Some(open) = self.rounds.get(key) else {
            return Incomplete::Interrupted;
        };
        let since = |at: Instant| now.saturating_duration_since(at);
        let missing = open.absent().map(|rank| {
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

impl fmt::Debug for Hub {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hub")
            .field("size", &self.size)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for Outlet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Local(_) => "Local",
            Self::Remote(_) => "Remote",
        })
    }
}
