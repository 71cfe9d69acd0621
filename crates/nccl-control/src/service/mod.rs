//! What a coordinator does for the ranks of one generation beside their membership: rounds, the store, channels, inquiries.
//!
//! A machine without clock, lock, thread, socket or log. Its driver passes on which ranks arrive and leave ([`Service::arrive`],
//! [`Service::leave`]), what they ask ([`Service::handle`]) and the time ([`Service::handle_timeout`], [`Service::reports`]). After
//! each of these calls it sends what [`Service::poll`] gives, in that order; what is for a rank that cannot be reached it drops.
//! Ranks are numbered `0..size`.
//!
//! What must stay true: a request that expects an answer gets exactly one, at its deadline at the latest, unless its rank leaves or
//! cancels it before. A round ends once, with one answer for all its ranks, also for those that come later.
//!
//! - `rounds`: one part of each rank, collected; `store`: keys and values; `channels`: messages in one order for all ranks;
//! - `inquiries`: which ranks have not entered an operation; `reporting`: what the log says while ranks wait.

mod channels;
mod inquiries;
mod reporting;
mod rounds;
mod store;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use self::channels::Channels;
pub(crate) use self::channels::{CAPACITY, LARGEST_MESSAGE};
use self::inquiries::Inquiry;
pub(crate) use self::reporting::REPORT;
use self::rounds::Open;
use self::store::Get;
use crate::departure::{Departure, cut};
use crate::incoming::{Answer, Push};
use crate::message::{Incomplete, Missing, Round};
use crate::phase::Phase;
use crate::request::Request;

/// The longest name of a topic, a key or a phase, in bytes.
pub(crate) const LONGEST_NAME: usize = 1024;

/// The most open rounds and waiting gets; a program that has more has lost count of its topics.
const MOST_OPEN: usize = 1 << 16;

/// How many remarks are kept for ranks that wait in vain.
const REMARKS: usize = 8;

/// What a coordinator does for the ranks of one generation beside their membership.
pub(crate) struct Service {
    ranks: Vec<Rank>,
    rounds: BTreeMap<Round, Open>,
    keys: HashMap<String, Arc<[u8]>>,
    /// Bytes of all keys and values.
    kept: usize,
    gets: Vec<Get>,
    channels: Channels,
    /// By the key of their communicator.
    inquiries: BTreeMap<String, Inquiry>,
    remarks: VecDeque<String>,
    remarked: usize,
    /// No deadline is earlier than this.
    earliest: Option<Instant>,
    outputs: VecDeque<Output>,
}

/// What the service knows of a rank.
#[derive(Default)]
pub(crate) struct Rank {
    pub(crate) host: String,
    pub(crate) pid: u64,
    /// What it does, and since when; `None` until it arrives.
    pub(crate) phase: Option<(Phase, Instant)>,
    /// Why it comes to no round any more. While it is connected, it still comes to those of ends.
    pub(crate) departure: Option<Departure>,
    is_connected: bool,
}

/// To which ranks or observers a push goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum To {
    All,
    Rank(usize),
    Ranks(Vec<usize>),
    Observers,
}

/// What the driver has to send.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Output {
    Answer {
        /// Ranks, and the numbers of their requests.
        to: Vec<(usize, u64)>,
        answer: Answer,
    },
    Push {
        to: To,
        push: Push,
    },
}

impl Rank {
    /// Whether nothing can come from it any more.
    pub(crate) fn is_closed(&self) -> bool {
        self.departure.is_some() && !self.is_connected
    }
}

/// What the driver tells, and asks for.
impl Service {
    pub(crate) fn new(size: usize) -> Self {
        Self {
            ranks: (0..size).map(|_| Rank::default()).collect(),
            rounds: BTreeMap::new(),
            keys: HashMap::new(),
            kept: 0,
            gets: Vec::new(),
            channels: Channels::default(),
            inquiries: BTreeMap::new(),
            remarks: VecDeque::new(),
            remarked: 0,
            earliest: None,
            outputs: VecDeque::new(),
        }
    }

    /// As which process `rank` is expected.
    pub(crate) fn expect(&mut self, rank: usize, host: &str, pid: u64) {
        let own = &mut self.ranks[rank];
        host.clone_into(&mut own.host);
        own.pid = pid;
    }

    /// `rank` is there, as this process.
    pub(crate) fn arrive(&mut self, now: Instant, rank: usize, host: &str, pid: u64) {
        self.expect(rank, host, pid);
        let own = &mut self.ranks[rank];
        own.is_connected = true;
        own.phase = Some((Phase::Joined, now));
    }

    /// The connection of `rank` is gone. A rank that has departed comes to no round of ends any more either.
    pub(crate) fn disconnect(&mut self, rank: usize) {
        self.ranks[rank].is_connected = false;
    }

    /// `rank` departed before this coordinator began: the ranks know.
    pub(crate) fn departed_before(&mut self, rank: usize, departure: Departure) {
        self.ranks[rank].departure = Some(departure.clone());
        self.channels.over.get_or_insert((rank, departure));
    }

    /// One request of a rank that is connected: [`Collect`](Request::Collect), [`Cancel`](Request::Cancel), [`Set`](Request::Set),
    /// [`Get`](Request::Get), [`Phase`](Request::Phase), [`Send`](Request::Send), [`Took`](Request::Took),
    /// [`Suspect`](Request::Suspect) or [`Attends`](Request::Attends). Others are about membership, and nothing follows from them.
    pub(crate) fn handle(&mut self, now: Instant, rank: usize, id: u64, request: Request) {
        match request {
            Request::Collect {
                round,
                patience,
                part,
            } => self.collect(now, (rank, id), round, patience, part),
            Request::Cancel { reason } => {
                self.cancel_get(rank, id);
                self.cancel_round(rank, id, reason);
            }
            Request::Set { key, value } => self.set(rank, id, key, value.into()),
            Request::Get { key, patience } => self.get(now, (rank, id), key, patience),
            Request::Phase { mut name } => {
                cut(&mut name, LONGEST_NAME);
                self.ranks[rank].phase = Some((Phase::Said(name), now));
            }
            Request::Send {
                channel,
                to,
                patience,
                bytes,
            } => self.send(now, (rank, id), channel, to, patience, bytes.into()),
            Request::Took { channel, count } => self.took(rank, &channel, count),
            Request::Suspect(suspicion) => self.inquire(rank, suspicion, now),
            Request::Attends(attendance) => self.attends(rank, attendance, now),
            _ => {}
        }
    }

    /// `rank` comes to no round any more; one that `stays` comes to those of ends, and leaves a second time when it is through with
    /// them. Returns whether that is news.
    pub(crate) fn leave(&mut self, rank: usize, departure: Departure, stays: bool) -> bool {
        let own = &mut self.ranks[rank];
        if own.is_closed() || (stays && own.departure.is_some()) {
            return false;
        }
        own.is_connected &= stays;
        // A rank that has failed has said why it goes.
        if !matches!(own.departure, Some(Departure::Failed(_))) {
            own.departure = Some(departure.clone());
        }
        self.leave_rounds(rank, &departure, stays);
        self.leave_store(rank, &departure);
        self.end_channels(rank, departure);
        true
    }

    /// Ends what has run out of time.
    pub(crate) fn handle_timeout(&mut self, now: Instant) {
        if self.earliest.is_none_or(|earliest| earliest > now) {
            return;
        }
        self.end_late_rounds(now);
        self.give_up_gets(now);
        self.give_up_sending(now);
        self.end_asking(now);
        let deadlines = [
            self.next_round_deadline(),
            self.gets.iter().map(|get| get.deadline).min(),
            self.next_send_deadline(),
            self.next_inquiry_deadline(),
        ];
        self.earliest = deadlines.into_iter().flatten().min();
    }

    /// When to call [`handle_timeout`](Self::handle_timeout) and [`reports`](Self::reports) next.
    pub(crate) fn next_timeout(&self) -> Option<Instant> {
        self.earliest.into_iter().chain(self.next_report()).min()
    }

    /// The next to be sent.
    pub(crate) fn poll(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    /// A process was turned away: ranks that wait in vain are told.
    pub(crate) fn remark(&mut self, text: String) {
        self.remarked += 1;
        if self.remarks.len() == REMARKS {
            self.remarks.pop_front();
        }
        self.remarks.push_back(text);
    }

    /// Whether this request of `rank` waits for its answer.
    pub(crate) fn expects(&self, rank: usize, id: u64) -> bool {
        let own = (rank, id);
        let mut rounds = self.rounds.values();
        rounds.any(|open| open.waiting.contains(&own))
            || self.gets.iter().any(|get| (get.rank, get.id) == own)
            || self.channels.holds(rank, id)
    }

    pub(crate) fn rank(&self, rank: usize) -> &Rank {
        &self.ranks[rank]
    }

    pub(crate) fn departure(&self, rank: usize) -> Option<&Departure> {
        self.ranks[rank].departure.as_ref()
    }

    /// The rank that left first, since when no channel has all its ranks.
    pub(crate) fn over(&self) -> Option<&(usize, Departure)> {
        self.channels.over.as_ref()
    }

    /// What a rank that waits for `rank` is told of it.
    pub(crate) fn missing(&self, rank: usize, now: Instant) -> Missing {
        let phase = self.ranks[rank].phase.as_ref();
        Missing {
            rank,
            phase: phase.map(|(name, at)| (name.clone(), now.saturating_duration_since(*at))),
        }
    }
}

/// What the parts have in common.
impl Service {
    fn answer(&mut self, to: Vec<(usize, u64)>, answer: Answer) {
        if !to.is_empty() {
            self.outputs.push_back(Output::Answer { to, answer });
        }
    }

    fn refuse(&mut self, rank: usize, id: u64, why: Incomplete) {
        self.answer(vec![(rank, id)], Answer::Incomplete(Arc::new(why)));
    }

    fn push(&mut self, to: To, push: Push) {
        self.outputs.push_back(Output::Push { to, push });
    }

    fn due(&mut self, deadline: Instant) {
        self.earliest = Some(self.earliest.map_or(deadline, |at| at.min(deadline)));
    }
}

/// Why a request ends without a rank that has departed.
fn gone(rank: usize, departure: &Departure) -> Incomplete {
    Incomplete::Gone {
        rank,
        departure: departure.clone(),
    }
}
