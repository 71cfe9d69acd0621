//! The machine of a process that is not a member and does not vote: it receives the log, reports the ends that it
//! knows, sends requests to the coordinator's driver, and forwards the operator's decision.
//!
//! ```text
//! looking ──a member reports that it coordinates──▶ watching ──lost, unresponsive, departed, redirected──▶ looking ──no answer──▶ over
//! ```
//!
//! The observer asks the initial coordinator repeatedly until the first generation is active; it can already send
//! requests to that coordinator's driver. While looking, the observer asks one address or member after the other, and
//! sends to each what all members must know. A member that follows a coordinator names it. An observer may receive an
//! entry that no member has, if the coordinator ended after sending it: then other entries with the same indices
//! follow.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use super::core::Event;
use super::id::{MemberId, ProcessInfo, Term, Time};
use super::link::{LinkEvent, Links};
use super::log::{Entry, Log, OperatorDecision};
use super::member::{Command, Input, Output};
use super::membership::SharedMembership;
use super::message::{Ended, Message, Proof};
use super::mistake::Mistakes;
use super::timing::Timing;

/// The state of an observer; see the module.
#[derive(Debug)]
pub struct ObserverMachine {
    me: ProcessInfo,
    timing: Timing,
    now: Time,
    links: Links,
    events: VecDeque<Event>,
    at: Vec<String>,
    membership: Option<SharedMembership>,
    term: Option<Term>,
    log: Log,
    /// The coordinator that is being watched.
    coordinator: Option<MemberId>,
    /// While no generation is known: the initial coordinator, and the number of the first generation.
    forming: Option<(MemberId, u64)>,
    /// The time at which the coordinator, or while looking any member, was last heard.
    heard: Time,
    /// The time since which it has been looking for a coordinator.
    since: Time,
    tries: usize,
    redirects: u32,
    /// The process that was asked last, and when to ask the next one.
    asked: MemberId,
    next: Time,
    ended: BTreeMap<MemberId, Proof>,
    /// Members that do not take part any more.
    out: BTreeSet<MemberId>,
    decision: Option<OperatorDecision>,
    over: bool,
}

/// The maximum number of members in a row that may refer to another coordinator before the next one is asked.
const MAX_REDIRECTS: u32 = 4;

impl ObserverMachine {
    /// Creates an observer that looks for the coordinator at the addresses `at`, of which there must be at least one.
    #[must_use]
    pub fn new(
        me: ProcessInfo,
        at: Vec<String>,
        timing: Timing,
        mistakes: Mistakes,
        now: Time,
    ) -> Self {
        let mut this = Self {
            links: Links::new(me.id, timing, mistakes),
            me,
            timing,
            now,
            events: VecDeque::new(),
            at,
            membership: None,
            term: None,
            log: Log::default(),
            coordinator: None,
            forming: None,
            heard: now,
            since: now,
            tries: 0,
            redirects: 0,
            asked: Links::placeholder_id(0),
            next: now,
            ended: BTreeMap::new(),
            out: BTreeSet::new(),
            decision: None,
            over: false,
        };
        this.ask_next();
        this
    }

    /// Returns the next output.
    pub fn poll(&mut self) -> Option<Output> {
        let event = self.events.pop_front().map(Output::Event);
        event.or_else(|| self.links.poll().map(Output::Connection))
    }

    /// Returns the latest known generation.
    #[must_use]
    pub fn membership(&self) -> Option<&SharedMembership> {
        self.membership.as_ref()
    }

    /// Returns the coordinator that is being watched, if the observer is not looking for one.
    #[must_use]
    pub fn coordinator(&self) -> Option<MemberId> {
        self.coordinator
    }

    /// Whether the observer has stopped looking for a coordinator.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.over
    }

    /// Returns how many entries of this generation's log have been received.
    #[must_use]
    pub fn log_end(&self) -> u64 {
        self.log.end()
    }

    /// Whether all messages to other processes have arrived.
    #[must_use]
    pub fn is_flushed(&self) -> bool {
        self.links.all_flushed()
    }

    /// Handles one input. The only supported commands are `Request`, `OperatorDecision` and `Leave`.
    pub fn handle(&mut self, now: Time, input: Input) {
        self.now = now;
        match input {
            _ if self.over => {}
            Input::Connected(peer, connection) => self.links.connected(now, peer, connection),
            Input::DialFailed(peer) => {
                self.links.dial_failed(now, peer);
                // The link with the initial coordinator is kept as long as any other link.
                let forms = self.forming.is_some_and(|(id, _)| id == peer);
                if self.coordinator.is_none() && peer == self.asked && !forms {
                    self.links.close(peer);
                    self.next = now.after(self.timing.redial);
                }
            }
            Input::Frame(connection, frame) => self.links.received(now, connection, frame),
            Input::Closed(connection) => self.links.closed(now, connection),
            Input::Ended(member, proof) => self.ended(member, proof),
            // [`Input::Ended`] follows.
            Input::Exited(_) => {}
            Input::Evidence(..) | Input::Progress => {}
            Input::Command(Command::Request(bytes)) => {
                self.send_to_coordinator(Message::Request(bytes))
            }
            Input::Command(Command::OperatorDecision(decision)) => {
                self.decision = Some(decision.clone());
                self.send_to_coordinator(Message::OperatorDecision(decision));
            }
            Input::Command(Command::Leave(_)) => self.end(Event::Left),
            Input::Command(_) => {}
        }
        self.drain();
    }

    /// Returns when to call [`handle_timeout`](Self::handle_timeout) at the latest.
    #[must_use]
    pub fn next_timeout(&self) -> Time {
        let own = match self.coordinator {
            _ if self.over => return Time::NEVER,
            Some(_) => self.heard.after(self.timing.unresponsive),
            None => self.next,
        };
        own.min(self.links.next_timeout())
    }

    /// Handles the timeouts that are due.
    pub fn handle_timeout(&mut self, now: Time) {
        self.now = now;
        self.links.handle_timeout(now);
        self.drain();
        let unresponsive = self.heard.after(self.timing.unresponsive);
        match self.coordinator {
            _ if self.over => {}
            // This process itself was delayed.
            Some(_) if now.since(unresponsive) > self.timing.heartbeat_interval => self.heard = now,
            Some(_) if now >= unresponsive => self.search(),
            None if now >= self.next => {
                if now.since(self.next) > self.timing.heartbeat_interval {
                    self.heard = now;
                }
                let silence = now.since(self.heard);
                let was_there = self.membership.is_some() || self.forming.is_some();
                if was_there && silence >= self.timing.majority_timeout {
                    let membership = self.membership.iter();
                    let all = membership.flat_map(|membership| &membership.members);
                    let open = all
                        .map(|process| process.id)
                        .filter(|id| !self.is_departed(*id));
                    self.end(Event::JobUnreachable(open.collect()));
                } else if silence < self.timing.unresponsive && self.is_forming(self.asked) {
                    self.send(self.asked, Message::Observe(self.me.clone()));
                    self.next = now.after(self.timing.unresponsive / 2);
                } else {
                    self.ask_next();
                }
            }
            _ => {}
        }
        self.drain();
    }

    fn drain(&mut self) {
        while let Some(event) = self.links.next_event() {
            match event {
                LinkEvent::Received { from, message, .. } => self.message(from, message),
                LinkEvent::Heartbeat(from, heartbeat)
                    if self.coordinator == Some(from) && self.term == Some(heartbeat.term) =>
                {
                    self.heard = self.now;
                }
                LinkEvent::Lost(peer) | LinkEvent::Renewed(peer)
                    if self.coordinator == Some(peer) =>
                {
                    self.search();
                }
                // The link can be lost at once if another process listens at that address.
                LinkEvent::Lost(peer) if self.coordinator.is_none() && peer == self.asked => {
                    self.next = self.now.after(self.timing.redial);
                }
                _ => {}
            }
        }
    }

    /// Whether that process is the initial coordinator, and is reachable.
    fn is_forming(&self, id: MemberId) -> bool {
        self.forming.is_some_and(|(forms, _)| forms == id) && self.links.is_ready(id)
    }

    fn is_departed(&self, id: MemberId) -> bool {
        self.ended.contains_key(&id) || self.out.contains(&id)
    }

    fn end(&mut self, event: Event) {
        self.over = true;
        self.links.close_all();
        self.events.push_back(event);
    }

    // --- looking ---

    /// Starts to look for a coordinator, because there is none any more.
    fn search(&mut self) {
        if let Some(coordinator) = self.coordinator.take() {
            self.links.keep(coordinator, false);
            (self.heard, self.since) = (self.now, self.now);
            self.ask_next();
        }
    }

    /// Asks the next address or member.
    fn ask_next(&mut self) {
        self.redirects = 0;
        // The operator may have permitted another side to continue.
        self.term
            .take_if(|_| self.now.since(self.since) >= self.timing.unresponsive);
        let Some(membership) = &self.membership else {
            let at = self.at[self.tries % self.at.len()].clone();
            self.tries += 1;
            return self.contact(Links::placeholder_id(self.tries as u32), &at);
        };
        let size = membership.members.len();
        let members =
            (self.tries..self.tries + size).map(|index| &membership.members[index % size]);
        let next = members
            .zip(1..)
            .find(|(process, _)| !self.is_departed(process.id));
        match next.map(|(process, skipped)| (process.clone(), skipped)) {
            Some((process, skipped)) => {
                self.tries += skipped;
                self.contact(process.id, &process.at);
            }
            None => self.end(Event::JobUnreachable(Vec::new())),
        }
    }

    fn contact(&mut self, id: MemberId, at: &str) {
        if self.asked != id && !self.links.is_ready(self.asked) {
            self.links.close(self.asked);
        }
        self.asked = id;
        self.next = self.now.after(2 * self.timing.heartbeat_interval);
        self.links.open(self.now, id, at);
        self.links.keep(id, true);
        let observe = Message::Observe(self.me.clone());
        self.send(id, observe);
        self.inform(id);
    }

    /// Sends to a member what it must know, whether it coordinates or not.
    fn inform(&mut self, to: MemberId) {
        let Some(membership) = self.membership.clone() else {
            return;
        };
        if !membership.votes(to) {
            return;
        }
        let ended = self.ended.iter().filter(|(id, _)| membership.votes(**id));
        let ended: Vec<_> = ended.map(|(id, proof)| end_report(*id, proof)).collect();
        for end_report in ended {
            self.send(to, end_report);
        }
        if let Some(decision) = self.decision.clone() {
            self.send(to, Message::OperatorDecision(decision));
        }
    }

    fn send(&mut self, to: MemberId, message: Message) {
        let known = self.membership.as_ref();
        let known = known.map(|membership| membership.generation.number);
        let forming = self.forming.map(|(_, number)| number);
        let generation = known.or(forming).unwrap_or(0);
        self.links.send(to, generation, message);
    }

    /// Sends to the coordinator or the initial coordinator, if there is one.
    fn send_to_coordinator(&mut self, message: Message) {
        if let Some(to) = self.coordinator.or(self.forming.map(|(id, _)| id)) {
            self.send(to, message);
        }
    }

    fn ended(&mut self, member: MemberId, proof: Proof) {
        let known = self.ended.get(&member);
        if known.is_some_and(|known| *known <= proof) {
            return;
        }
        let end_report = end_report(member, &proof);
        self.ended.insert(member, proof);
        if self.coordinator == Some(member) {
            self.search();
        } else if self.coordinator.is_some() {
            self.send_to_coordinator(end_report);
        } else if self.asked == member {
            self.ask_next();
        }
    }

    // --- received messages ---

    fn message(&mut self, from: MemberId, message: Message) {
        let watched = self.coordinator == Some(from);
        if watched || self.coordinator.is_none() {
            self.heard = self.now;
        }
        match message {
            Message::Coordinating { term, membership } => self.watch(from, term, membership),
            Message::SyncLog {
                term,
                start,
                entries,
            } if watched && self.term == Some(term) => {
                let end = start.saturating_add(entries.len() as u64);
                self.append_entries(start, entries);
                self.log.cut(end);
            }
            Message::Append { term, at, entry } if watched && self.term == Some(term) => {
                match at > self.log.end() {
                    true => self.send(from, Message::Observe(self.me.clone())),
                    false => self.append_entries(at, vec![entry]),
                }
            }
            Message::Redirect(process) if watched || self.coordinator.is_none() => {
                self.redirects += 1;
                let is_new = process.id != from && !self.is_departed(process.id);
                if self.redirects <= MAX_REDIRECTS && is_new {
                    if self.coordinator.take().is_some() {
                        self.since = self.now;
                    }
                    self.contact(process.id, &process.at);
                }
            }
            Message::NewerGeneration(membership) if self.is_later(&membership) => {
                self.enter(membership);
                self.search();
            }
            Message::UnknownGeneration => {
                if let Some(membership) = self.membership.clone() {
                    self.send(from, Message::NewerGeneration(membership));
                }
            }
            Message::Leave(_) | Message::CutOff { .. } => {
                self.out.insert(from);
                if watched {
                    self.search();
                } else if self.coordinator.is_none() && self.asked == from {
                    self.ask_next();
                }
            }
            Message::Reply(bytes) if watched || self.is_forming(from) => {
                self.events.push_back(Event::Reply(bytes));
            }
            Message::Forming(number) if self.membership.is_none() => {
                let is_new = self.asked != from || self.forming != Some((from, number));
                (self.asked, self.forming) = (from, Some((from, number)));
                self.next = self.now.after(self.timing.unresponsive / 2);
                if is_new {
                    self.links.close_others(from);
                    self.links.keep(from, true);
                    self.events.push_back(Event::Forming(number));
                }
            }
            Message::FormationAborted(bytes) if self.membership.is_none() => {
                self.links.acknowledge(from);
                self.end(Event::FormationAborted(bytes));
            }
            _ => {}
        }
    }

    fn is_later(&self, membership: &SharedMembership) -> bool {
        let own = self.membership.as_ref();
        own.is_none_or(|own| own.generation.number < membership.generation.number)
    }

    fn enter(&mut self, membership: SharedMembership) {
        self.log = Log::new(membership.members.len());
        (self.term, self.forming) = (None, None);
        self.out.clear();
        let generation = membership.generation.number;
        self.decision
            .take_if(|decision| decision.generation < generation);
        self.events
            .push_back(Event::Active(Arc::clone(&membership)));
        self.membership = Some(membership);
    }

    /// Watches a coordinating member, unless its term is earlier than the known one.
    fn watch(&mut self, from: MemberId, term: Term, membership: SharedMembership) {
        if self.is_later(&membership) {
            self.enter(membership);
        } else if self.membership.as_ref() != Some(&membership)
            || self.term.is_some_and(|own| term < own)
            || self.ended.contains_key(&from)
        {
            return;
        }
        if self.coordinator == Some(from) && self.term == Some(term) {
            return;
        }
        (self.term, self.coordinator, self.heard) = (Some(term), Some(from), self.now);
        self.out.remove(&from);
        self.asked = from;
        self.links.close_others(from);
        self.links.keep(from, true);
        self.events.push_back(Event::Coordinator(from));
        self.inform(from);
    }

    /// Processes entries of the log, some of which may already be known.
    fn append_entries(&mut self, start: u64, entries: Vec<Arc<Entry>>) {
        self.log.skip_to(start);
        for (at, entry) in (start..).zip(entries) {
            if at < self.log.first() || self.log.at(at) == Some(&entry) {
                continue;
            }
            self.log.cut(at);
            if let Entry::Departed {
                member,
                proven: true,
                ..
            } = &*entry
            {
                self.out.insert(*member);
            }
            self.log.push(Arc::clone(&entry));
            self.events.push_back(Event::Entry(entry));
        }
        if self
            .coordinator
            .is_some_and(|coordinator| self.is_departed(coordinator))
        {
            self.search();
        }
    }
}

/// The coordinator decides whether this report counts: this process has no lease.
fn end_report(member: MemberId, proof: &Proof) -> Message {
    let (proof, reduces_electorate) = (proof.clone(), false);
    Message::ReportEnd(Ended {
        member,
        proof,
        reduces_electorate,
    })
}
