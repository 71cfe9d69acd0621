//! Programs that add to a counter of the store, exchange parts and send messages. The checks verify that each addition is
//! made once and in one order, that all ranks get the same outcome of an exchange, and that each rank receives each message
//! once and in one order, unless it learns that the channel is closed.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use nccl_control::proto::{Command, Entry, Event, MemberId, Mistakes, SharedMembership};
use nccl_control::simulated_store::{
    AddResult, ExchangeResult, PendingAdd, PendingExchange, PendingMessage, SimulatedStore,
};

/// The number of additions of a thread.
const ADDITIONS: u32 = 8;

/// The store of a process, and the adding threads of its program.
pub(crate) struct StoreProgram {
    me: MemberId,
    store: SimulatedStore,
    threads: Vec<Thread>,
    generation: Option<SharedMembership>,
    /// The exchange in which the program waits.
    exchange: Option<PendingExchange>,
    /// The number of exchanges that it has entered in its generation; `None` after a failed exchange.
    exchanges: Option<u64>,
    messages: Messages,
    /// Whether a member of its generation has departed, and whether this process no longer takes part.
    has_departures: bool,
    has_ended: bool,
}

/// The messages of a program in its generation.
#[derive(Default)]
struct Messages {
    /// The number of messages to send, and of those that were sent, the last of which may still wait for its place.
    wanted: u64,
    sent: u64,
    sending: Option<PendingMessage>,
    /// The number of the last message received from each rank.
    received: BTreeMap<usize, u64>,
    /// Whether nothing more can be sent, or received.
    cannot_send: bool,
    is_closed: bool,
}

/// A message: the rank that sent it, and its number among the messages of that rank.
type Message = (usize, u64);

/// A thread that waits for the result of an addition.
struct Thread {
    pending: PendingAdd,
    /// The largest sum that was known when the addition began.
    before: i64,
    left: u32,
}

/// The counter of each generation, as its programs observe it.
#[derive(Default)]
pub(crate) struct Counters {
    of: BTreeMap<u64, Counter>,
    /// The number of additions that have returned a sum.
    pub(crate) sums: u64,
    /// The minimum number of exchanges that the programs enter in each generation.
    exchanges: u64,
    /// Which members have entered an exchange, by its generation and number.
    entered: BTreeMap<(u64, u64), BTreeSet<MemberId>>,
    /// Which members have an outcome of an exchange, and whether it has all parts.
    ended: BTreeMap<(u64, u64), BTreeMap<MemberId, bool>>,
    /// The number of exchanges that have returned all parts to a member.
    pub(crate) exchanged: u64,
    /// By generation and rank: the number of messages that have their place in the order, and the received messages.
    placed: BTreeMap<(u64, usize), u64>,
    received: BTreeMap<u64, BTreeMap<usize, Vec<Message>>>,
    /// The number of received messages.
    pub(crate) messages: u64,
}

impl Counters {
    /// Checks that members of a generation that still take part have the same outcomes.
    pub(crate) fn agree(
        &self,
        generation: u64,
        takes_part: impl Fn(MemberId) -> bool,
    ) -> Result<(), String> {
        let first = (generation, 0);
        for (round, ended) in self.ended.range(first..(generation + 1, 0)) {
            let mut all = ended.iter().filter(|(id, _)| takes_part(**id));
            if let Some((first, has_parts)) = all.next()
                && let Some((other, _)) = all.find(|(_, other)| *other != has_parts)
            {
                return Err(format!(
                    "{first:?} and {other:?} have other outcomes of exchange {round:?}"
                ));
            }
        }
        Ok(())
    }

    /// Checks that the ranks of a generation have received the messages of other ranks in one order.
    pub(crate) fn check_order(&self, generation: u64) -> Result<(), String> {
        let Some(received) = self.received.get(&generation) else {
            return Ok(());
        };
        for (a, of_a) in received {
            for (b, of_b) in received.range(a + 1..) {
                let is_common = |message: &&Message| message.0 != *a && message.0 != *b;
                let of_a = of_a.iter().filter(is_common);
                let mut both = of_a.zip(of_b.iter().filter(is_common));
                if let Some(differ) = both.find(|(of_a, of_b)| of_a != of_b) {
                    return Err(format!(
                        "ranks {a} and {b} received messages in other orders: {differ:?}"
                    ));
                }
            }
        }
        Ok(())
    }

    /// Makes the programs enter one more exchange.
    pub(crate) fn more_exchanges(&mut self) {
        self.exchanges += 1;
    }
}

#[derive(Default)]
struct Counter {
    /// The number of additions that have begun.
    begun: i64,
    /// The sums that were returned.
    sums: BTreeSet<i64>,
}

impl Counter {
    /// Checks a sum: sums are distinct and not larger than the number of additions, and a later addition returns a
    /// larger sum.
    fn check(&mut self, sum: i64, before: i64) -> Result<(), String> {
        let (begun, is_new) = (self.begun, self.sums.insert(sum));
        match () {
            () if !is_new => Err(format!("two additions of 1 have returned {sum}")),
            () if sum > begun => Err(format!("the sum is {sum} after {begun} additions of 1")),
            () if sum <= before => Err(format!("the sum is {sum}, and was {before} before")),
            () => Ok(()),
        }
    }
}

impl StoreProgram {
    pub(crate) fn new(me: MemberId, mistakes: Mistakes) -> Self {
        Self {
            me,
            store: SimulatedStore::new(me, mistakes),
            threads: Vec::new(),
            generation: None,
            exchange: None,
            exchanges: None,
            messages: Messages::default(),
            has_departures: false,
            has_ended: false,
        }
    }

    /// Handles an event of the machine. Returns the commands for the machine.
    pub(crate) fn handle(&mut self, event: &Event) -> Vec<Command> {
        match event {
            Event::Active(membership) => {
                self.store.active(membership);
                self.exchanges = membership.rank_of(self.me).map(|_| 0);
                self.generation = Some(Arc::clone(membership));
                self.exchange = None;
                self.messages = Messages::default();
                self.has_departures = false;
            }
            Event::Coordinator(id) => return self.store.coordinator(*id),
            Event::Entry(entry) => {
                if let Entry::Departed {
                    member, departure, ..
                } = &**entry
                {
                    self.has_departures = true;
                    return self.store.departed(*member, departure);
                }
            }
            Event::Request(from, bytes) => return self.store.request(*from, bytes),
            Event::Reply(bytes) => return self.store.reply(bytes).into_iter().collect(),
            Event::Excluded(_) | Event::Left => {
                self.has_ended = true;
                self.store.end();
            }
            _ => {}
        }
        Vec::new()
    }

    /// Starts a thread. Returns the commands for the machine.
    pub(crate) fn begin(
        &mut self,
        has_coordinator: bool,
        counters: &mut Counters,
    ) -> Option<Command> {
        let (thread, command) = self.add(ADDITIONS, has_coordinator, counters)?;
        self.threads.push(thread);
        command
    }

    fn add(
        &mut self,
        left: u32,
        has_coordinator: bool,
        counters: &mut Counters,
    ) -> Option<(Thread, Option<Command>)> {
        let (pending, command) = self.store.add(has_coordinator)?;
        let counter = counters.of.entry(pending.generation()).or_default();
        counter.begun += 1;
        let before = counter.sums.last().copied().unwrap_or_default();
        let left = left - 1;
        let thread = Thread {
            pending,
            before,
            left,
        };
        Some((thread, command))
    }

    /// Checks the results that have arrived; threads that got a result add again. Returns the commands for the machine.
    pub(crate) fn go_on(
        &mut self,
        has_coordinator: bool,
        counters: &mut Counters,
    ) -> Result<Vec<Command>, String> {
        let mut commands = Vec::new();
        let mut checked = Ok(());
        let mut threads = std::mem::take(&mut self.threads);
        threads.retain_mut(|thread| match thread.pending.take() {
            None => true,
            Some(AddResult::Failed) => false,
            Some(AddResult::Sum(sum)) => {
                let counter = counters.of.entry(thread.pending.generation()).or_default();
                if let Err(how) = counter.check(sum, thread.before) {
                    checked = Err(how);
                }
                counters.sums += 1;
                // Each message costs as much as several additions.
                self.messages.wanted += u64::from(thread.left % 4 == 0);
                let left = thread.left;
                let again = (left > 0).then(|| self.add(left, has_coordinator, counters));
                let Some((next, command)) = again.flatten() else {
                    return false;
                };
                *thread = next;
                commands.extend(command);
                true
            }
        });
        self.threads = threads;
        checked?;
        self.exchange(has_coordinator, counters, &mut commands)?;
        self.message(has_coordinator, counters, &mut commands)?;
        Ok(commands)
    }

    /// Checks the parts that have arrived, and enters the next exchange.
    fn exchange(
        &mut self,
        has_coordinator: bool,
        counters: &mut Counters,
        commands: &mut Vec<Command>,
    ) -> Result<(), String> {
        loop {
            let (Some(membership), Some(entered)) = (&self.generation, self.exchanges) else {
                return Ok(());
            };
            let part = |id: MemberId, number: u64| [id.slot as u8, number as u8];
            if let Some(pending) = &self.exchange {
                let (_, number) = pending.round();
                let mut expected = membership.members.iter();
                let mut expected = || Some(part(expected.next()?.id, number));
                match pending.take() {
                    None => return Ok(()),
                    Some(ExchangeResult::Parts(parts))
                        if parts
                            .iter()
                            .all(|part| expected().is_some_and(|own| *part == own))
                            && expected().is_none() =>
                    {
                        counters.exchanged += 1;
                        let ended = counters.ended.entry(pending.round()).or_default();
                        ended.insert(self.me, true);
                    }
                    Some(ExchangeResult::Departed) if self.has_departures => {
                        let ended = counters.ended.entry(pending.round()).or_default();
                        ended.insert(self.me, false);
                        self.exchanges = None;
                    }
                    Some(ExchangeResult::Ended) if self.has_ended => self.exchanges = None,
                    Some(other) => {
                        return Err(format!("exchange {number} has {other:?} in {membership:?}"));
                    }
                }
                self.exchange = None;
                continue;
            }
            if entered >= counters.exchanges {
                return Ok(());
            }
            let own = part(self.me, entered);
            let Some((pending, command)) = self.store.exchange(has_coordinator, own.to_vec())
            else {
                return Ok(());
            };
            counters
                .entered
                .entry(pending.round())
                .or_default()
                .insert(self.me);
            self.exchanges = Some(entered + 1);
            self.exchange = Some(pending);
            commands.extend(command);
        }
    }

    /// Checks the messages that have arrived, and sends the next one.
    fn message(
        &mut self,
        has_coordinator: bool,
        counters: &mut Counters,
        commands: &mut Vec<Command>,
    ) -> Result<(), String> {
        let Some(membership) = &self.generation else {
            return Ok(());
        };
        let Some(rank) = membership.rank_of(self.me) else {
            return Ok(());
        };
        let generation = membership.generation.number;
        let own = &mut self.messages;
        let received = self.store.receive_messages(has_coordinator);
        own.is_closed |= received.is_closed;
        commands.extend(received.commands);
        for (from, bytes) in received.messages {
            let number = bytes.first_chunk().map(|bytes| u64::from_le_bytes(*bytes));
            let number = number.unwrap_or_default();
            let last = own.received.insert(from, number).unwrap_or_default();
            if number != last + 1 {
                return Err(format!(
                    "message {number} of rank {from} came after message {last}"
                ));
            }
            let all = counters.received.entry(generation).or_default();
            all.entry(rank).or_default().push((from, number));
            counters.messages += 1;
        }
        loop {
            match own.sending.as_ref().map(PendingMessage::take) {
                Some(None) => return Ok(()),
                Some(Some(true)) => {
                    counters.placed.insert((generation, rank), own.sent);
                }
                Some(Some(false)) => own.cannot_send = true,
                None => {}
            }
            own.sending = None;
            if own.cannot_send || own.sent >= own.wanted {
                return Ok(());
            }
            own.sent += 1;
            let bytes = own.sent.to_le_bytes().to_vec();
            if let Some((pending, command)) = self.store.send(has_coordinator, bytes) {
                own.sending = Some(pending);
                commands.extend(command);
            }
        }
    }

    /// Whether the process coordinates, and the ranks wait for the end of the former coordinator.
    pub(crate) fn awaits_former(&self) -> bool {
        self.store.awaits_former()
    }

    /// Returns the rank of which a message with a place in the order has not been received although the channel is not
    /// closed.
    pub(crate) fn misses_message_of(&self, counters: &Counters) -> Option<usize> {
        let generation = self.generation.as_ref()?;
        let own = generation.rank_of(self.me)?;
        let number = generation.generation.number;
        let mut ranks = (0..generation.members.len()).filter(|rank| *rank != own);
        ranks.find(|rank| {
            let placed = counters.placed.get(&(number, *rank));
            let received = self.messages.received.get(rank);
            !self.messages.is_closed && placed > received
        })
    }

    /// Whether the program waits in an exchange that all members have entered, except those that cannot answer any
    /// more.
    pub(crate) fn waits_in_vain(
        &self,
        counters: &Counters,
        answers: impl Fn(MemberId) -> bool,
    ) -> bool {
        let (Some(pending), Some(membership)) = (&self.exchange, &self.generation) else {
            return false;
        };
        let entered = counters.entered.get(&pending.round());
        let has_entered = |id: MemberId| entered.is_some_and(|entered| entered.contains(&id));
        let mut members = membership.members.iter();
        members.all(|process| has_entered(process.id) && answers(process.id))
    }

    /// Whether a thread waits for the store of a generation.
    pub(crate) fn waits_for(&self, generation: u64) -> bool {
        let mut threads = self.threads.iter();
        threads.any(|thread| thread.pending.generation() == generation)
    }
}
