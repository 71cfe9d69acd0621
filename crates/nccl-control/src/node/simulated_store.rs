//! The store, the exchanges and a channel of one process without threads and sockets, for the simulator and for tests.
//!
//! This runs the shipped code: the requests of the process until they are answered ([`Outbox`]), and its service while
//! it coordinates ([`Services`]). Only the connection between these and the machine is a second implementation of that
//! in `driver`.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::outbox::Outbox;
use super::services::{Output, Services};
use crate::coordinator_message::{Answer, CoordinatorMessage, Push};
use crate::departure::{Departure, LossKind, Lost};
use crate::driver_message::{NumberedRequest, decode_reply, encode_reply};
use crate::inbox::{AnswerSlot, Inbox, ReceiveOutcome};
use crate::proto::{Command, MemberId, Mistake, Mistakes, SharedMembership};
use crate::request::{ChannelPosition, FollowedBefore, NO_ANSWER, Request};
use crate::round::{RequestError, Round};

/// The store, from the side of one process.
pub struct SimulatedStore {
    me: MemberId,
    mistakes: Mistakes,
    services: Services,
    sessions: Vec<Session>,
    coordinator: Option<MemberId>,
    departed: Vec<(MemberId, Departure)>,
}

struct Session {
    membership: SharedMembership,
    inbox: Arc<Inbox>,
    outbox: Outbox,
    /// The number of exchanges of all ranks that this process has entered.
    exchanges: u64,
}

/// A request whose answer is awaited.
struct Pending {
    generation: u64,
    id: u64,
    inbox: Arc<Inbox>,
    slot: Arc<AnswerSlot>,
}

/// An addition whose result is awaited.
pub struct PendingAdd(Pending);

/// An exchange whose result is awaited.
pub struct PendingExchange {
    pending: Pending,
    number: u64,
}

/// A message to all other ranks whose place in the order is awaited.
pub struct PendingMessage(Pending);

/// What a process has received of the channel.
#[derive(Debug, Default)]
pub struct Received {
    /// The messages, each with the rank that sent it.
    pub messages: Vec<(usize, Arc<[u8]>)>,
    /// Whether the channel is closed.
    pub is_closed: bool,
    /// The commands for the machine.
    pub commands: Vec<Command>,
}

/// The name of the channel.
const CHANNEL: &str = "steps";

/// The result of an exchange.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ExchangeResult {
    /// The parts of all ranks.
    Parts(Arc<Vec<Vec<u8>>>),
    /// A rank has departed.
    Departed,
    /// The process no longer takes part.
    Ended,
    /// Another error.
    Failed(String),
}

/// The result of an addition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AddResult {
    /// The sum.
    Sum(i64),
    /// An error; whether the addition was made is unknown.
    Failed,
}

impl PendingAdd {
    /// Returns the generation whose store the addition changes.
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.0.generation
    }

    /// Returns the result, once.
    #[must_use]
    pub fn take(&self) -> Option<AddResult> {
        self.0.slot.take().map(|answer| match answer {
            Ok(Answer::Sum(sum)) => AddResult::Sum(sum),
            _ => AddResult::Failed,
        })
    }
}

impl PendingMessage {
    /// Returns whether the message has its place in the order, or an error; once.
    #[must_use]
    pub fn take(&self) -> Option<bool> {
        let answer = self.0.slot.take();
        answer.map(|answer| matches!(answer, Ok(Answer::Done)))
    }
}

impl PendingExchange {
    /// Returns the generation whose ranks take part, and the number of its earlier exchanges.
    #[must_use]
    pub fn round(&self) -> (u64, u64) {
        (self.pending.generation, self.number)
    }

    /// Returns the result, once.
    #[must_use]
    pub fn take(&self) -> Option<ExchangeResult> {
        self.pending.slot.take().map(|answer| match answer {
            Ok(Answer::Parts(parts)) => ExchangeResult::Parts(parts),
            Ok(Answer::Failed(why)) => match &*why {
                RequestError::Departed { .. } => ExchangeResult::Departed,
                why => ExchangeResult::Failed(format!("{why:?}")),
            },
            Ok(answer) => ExchangeResult::Failed(format!("{answer:?}")),
            Err(_) => ExchangeResult::Ended,
        })
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        self.inbox.forget_request(self.id);
    }
}

impl SimulatedStore {
    /// Creates the store of a process that is in no generation.
    #[must_use]
    pub fn new(me: MemberId, mistakes: Mistakes) -> Self {
        Self {
            me,
            mistakes,
            services: Services::default(),
            sessions: Vec::new(),
            coordinator: None,
            departed: Vec::new(),
        }
    }

    /// Handles that the process belongs to a new generation.
    pub fn active(&mut self, membership: &SharedMembership) {
        self.departed.clear();
        self.coordinator = None;
        if let Some(rank) = membership.rank_of(self.me) {
            let mut outbox = Outbox::new(membership.generation.number, rank);
            if self.mistakes.makes(Mistake::OutcomesForgotten) {
                outbox.tell_no_outcomes();
            }
            self.sessions.push(Session {
                membership: Arc::clone(membership),
                inbox: Arc::default(),
                outbox,
                exchanges: 0,
            });
        }
    }

    /// Handles that a member is now the coordinator. Returns the commands for the machine.
    pub fn coordinator(&mut self, id: MemberId) -> Vec<Command> {
        let before = self.coordinator.replace(id);
        let is_other = before.is_some_and(|before| before != id);
        if is_other {
            let why = Lost::from(LossKind::Superseded);
            for session in &self.sessions {
                session.inbox.interrupt(&why);
            }
        }
        match self.sessions.last() {
            Some(session) if id == self.me => {
                let generation = session.generation();
                let (membership, departed) = (&session.membership, &self.departed);
                self.services.open(generation, membership, departed, before);
                if self.mistakes.makes(Mistake::ChannelsContinued) {
                    self.services.continue_channels();
                }
            }
            _ => self.services.close(),
        }
        let mut requests = Vec::new();
        for session in &mut self.sessions {
            requests.extend(match !is_other && before.is_some() {
                true => session.outbox.requests_to_repeat(&session.inbox),
                false => {
                    let before = before.and_then(|before| session.membership.rank_of(before));
                    let before = before.map_or(FollowedBefore::None, FollowedBefore::Other);
                    session.outbox.requests_to_resend(&session.inbox, before)
                }
            });
        }
        requests.into_iter().map(Command::Request).collect()
    }

    /// Handles that a member has departed. Returns the commands for the machine.
    pub fn departed(&mut self, member: MemberId, departure: &Departure) -> Vec<Command> {
        self.departed.push((member, departure.clone()));
        self.services.record_departure(member, departure, false);
        self.replies()
    }

    /// Handles that the process no longer takes part.
    pub fn end(&mut self) {
        for session in &self.sessions {
            session.inbox.end(&Lost::from(LossKind::Superseded));
        }
    }

    /// Adds 1 to the counter of the last generation, if the process is in one. Returns the command for the machine.
    pub fn add(&mut self, has_coordinator: bool) -> Option<(PendingAdd, Option<Command>)> {
        let (pending, command) = self.sessions.last_mut()?.ask(
            has_coordinator,
            Request::Add {
                key: String::from("counter"),
                amount: 1,
            },
        );
        Some((PendingAdd(pending), command))
    }

    /// Enters the next exchange of all ranks of the last generation, if the process is in one. Returns the command for
    /// the machine.
    pub fn exchange(
        &mut self,
        has_coordinator: bool,
        part: Vec<u8>,
    ) -> Option<(PendingExchange, Option<Command>)> {
        let session = self.sessions.last_mut()?;
        let number = session.exchanges;
        session.exchanges += 1;
        let (pending, command) = session.ask(
            has_coordinator,
            Request::Exchange {
                round: Round {
                    topic: String::from("all"),
                    number,
                    members: None,
                },
                waited: Duration::ZERO,
                timeout: Duration::MAX,
                part,
            },
        );
        Some((PendingExchange { pending, number }, command))
    }

    /// Sends a message to all other ranks of the last generation, if the process is in one. Returns the command for the
    /// machine.
    pub fn send(
        &mut self,
        has_coordinator: bool,
        bytes: Vec<u8>,
    ) -> Option<(PendingMessage, Option<Command>)> {
        let request = Request::Send {
            channel: String::from(CHANNEL),
            to: None,
            timeout: Duration::MAX,
            bytes,
        };
        let (pending, command) = self.sessions.last_mut()?.ask(has_coordinator, request);
        Some((PendingMessage(pending), command))
    }

    /// Returns the messages of the last generation that have arrived.
    pub fn receive_messages(&mut self, has_coordinator: bool) -> Received {
        let mut received = Received::default();
        let Some(session) = self.sessions.last_mut() else {
            return received;
        };
        loop {
            match session.inbox.receive(CHANNEL, Instant::now()) {
                ReceiveOutcome::Message { from, bytes, took } => {
                    received.messages.push((from, bytes));
                    if let Some(taken) = took {
                        let channel = String::from(CHANNEL);
                        let request = Request::Consumed { channel, taken };
                        let command = session.request(has_coordinator, NO_ANSWER, request);
                        received.commands.extend(command);
                    }
                }
                outcome => {
                    received.is_closed = !matches!(outcome, ReceiveOutcome::Late);
                    return received;
                }
            }
        }
    }

    /// Whether this process coordinates, and the ranks wait for the end of the former coordinator. No timeout ends that
    /// here.
    #[must_use]
    pub fn awaits_former(&self) -> bool {
        self.services.awaits_former()
    }

    /// Handles a request that has arrived at this process. Returns the replies.
    pub fn request(&mut self, from: MemberId, bytes: &[u8]) -> Vec<Command> {
        if self.mistakes.makes(Mistake::ChangesForgotten) {
            self.services.forget_changes();
        }
        if let Ok((head, numbered)) = NumberedRequest::decode(bytes) {
            let NumberedRequest {
                generation,
                id,
                mut request,
            } = numbered;
            if self.mistakes.makes(Mistake::MessagesForgotten)
                && let Request::Follow {
                    before: FollowedBefore::Same { received, .. },
                    ..
                } = &mut request
            {
                *received = vec![ChannelPosition {
                    channel: String::from(CHANNEL),
                    received: u64::MAX,
                    taken: 0,
                }];
            }
            self.services.handle(from, generation, id, request, head);
        }
        self.replies()
    }

    fn replies(&mut self) -> Vec<Command> {
        let mut replies = Vec::new();
        while let Some((generation, output)) = self.services.poll() {
            let (to, message, payload) = match output {
                Output::Answer { to, answer } => {
                    let payload = answer.encode();
                    (to, CoordinatorMessage::Answer(answer), payload)
                }
                Output::Push { to, push } => {
                    let to = to.into_iter().map(|to| (to, NO_ANSWER)).collect();
                    let payload = push.encode().payload;
                    (to, CoordinatorMessage::Push(push), payload)
                }
                Output::Observe(_) => continue,
            };
            for (to, id) in to {
                match to == self.me {
                    true => replies.extend(self.receive(generation, id, &message)),
                    false => replies.push(Command::Reply {
                        to,
                        bytes: encode_reply(generation, id, &payload),
                    }),
                }
            }
        }
        replies
    }

    /// Handles a reply that has arrived at this process. Returns the command for the machine.
    pub fn reply(&mut self, bytes: &[u8]) -> Option<Command> {
        let (generation, id, message) = decode_reply(bytes).ok()?;
        self.receive(generation, id, &message)
    }

    fn receive(
        &mut self,
        generation: u64,
        id: u64,
        message: &CoordinatorMessage,
    ) -> Option<Command> {
        let mut sessions = self.sessions.iter_mut();
        let session = sessions.find(|session| session.generation() == generation)?;
        match message {
            CoordinatorMessage::Answer(answer) => {
                session.outbox.answered(id, answer);
                session.inbox.answer(id, answer.clone());
                None
            }
            CoordinatorMessage::Push(Push::WantOutcome(round)) => {
                let outcome = session.outbox.outcome(round.clone())?;
                Some(Command::Request(outcome))
            }
            CoordinatorMessage::Push(push) => {
                session.inbox.push(push.clone());
                None
            }
        }
    }
}

impl Session {
    fn generation(&self) -> u64 {
        self.membership.generation.number
    }

    fn ask(&mut self, has_coordinator: bool, request: Request) -> (Pending, Option<Command>) {
        let inbox = Arc::clone(&self.inbox);
        let (id, slot) = match request {
            Request::Exchange { .. } => inbox.register_repeatable_request(),
            _ => inbox.register_request(),
        };
        let generation = self.generation();
        let command = self.request(has_coordinator, id, request);
        let pending = Pending {
            generation,
            id,
            inbox,
            slot,
        };
        (pending, command)
    }

    /// Returns the command for a request, unless it is kept until there is a coordinator.
    fn request(&mut self, has_coordinator: bool, id: u64, request: Request) -> Option<Command> {
        let numbered = NumberedRequest {
            generation: self.generation(),
            id,
            request,
        };
        let bytes = self.outbox.add(&numbered, &self.inbox);
        match has_coordinator {
            true => Some(Command::Request(bytes)),
            false => {
                self.outbox.defer(&numbered, bytes);
                None
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::*;
    use crate::request::OnceKind;

    fn id(slot: u32) -> MemberId {
        MemberId {
            slot,
            incarnation: 1,
        }
    }

    /// The stores of ranks 0 to 2, of which rank 0 coordinates.
    fn three() -> Vec<SimulatedStore> {
        let membership = super::super::services::tests::membership(0, 3);
        let all = (0..3).map(|slot| {
            let mut store = SimulatedStore::new(id(slot), Mistakes::default());
            store.active(&membership);
            assert!(store.coordinator(id(0)).is_empty());
            store
        });
        all.collect()
    }

    fn request(command: &Command) -> &[u8] {
        let Command::Request(bytes) = command else {
            panic!("a request: {command:?}");
        };
        bytes
    }

    /// Delivers a request of `from` to rank 0, and the replies if the connection carries them.
    fn deliver(stores: &mut [SimulatedStore], from: usize, command: &Command, is_lost: bool) {
        for reply in stores[0].request(id(from as u32), request(command)) {
            if let Command::Reply { to, bytes } = reply
                && !is_lost
            {
                stores[to.slot as usize].reply(&bytes);
            }
        }
    }

    #[test]
    fn an_addition_whose_reply_is_lost_is_made_once_however_many_follow() {
        let mut stores = three();
        let (one, command) = stores[1].add(true).unwrap();
        deliver(&mut stores, 1, &command.unwrap(), true);
        for sum in 2..1000 {
            let (other, command) = stores[2].add(true).unwrap();
            deliver(&mut stores, 2, &command.unwrap(), false);
            assert_eq!(other.take(), Some(AddResult::Sum(sum)));
        }
        assert_eq!(one.take(), None);
        // The reply is lost again, and then a later addition of the same rank is repeated with it.
        let (two, command) = stores[1].add(true).unwrap();
        deliver(&mut stores, 1, &command.unwrap(), true);
        for is_lost in [true, false] {
            let repeated = stores[1].coordinator(id(0));
            // Which outcomes of exchanges it has, too.
            assert_eq!(repeated.len(), 3);
            for command in repeated {
                deliver(&mut stores, 1, &command, is_lost);
            }
        }
        assert_eq!(one.take(), Some(AddResult::Sum(1)));
        assert_eq!(two.take(), Some(AddResult::Sum(1000)));
        // What is settled is forgotten.
        let (three, command) = stores[1].add(true).unwrap();
        deliver(&mut stores, 1, &command.unwrap(), false);
        assert_eq!(three.take(), Some(AddResult::Sum(1001)));
        assert_eq!(
            stores[0]
                .services
                .kept_requests(0, 1, OnceKind::StoreChange),
            1
        );
        assert_eq!(
            stores[0]
                .services
                .kept_requests(0, 2, OnceKind::StoreChange),
            1
        );
    }

    #[test]
    fn exchanges_are_kept_until_their_rank_states_that_it_waits_for_none_of_them() {
        let mut stores = three();
        for number in 0..50 {
            let mut pending = Vec::new();
            for from in [1, 2, 0] {
                let (exchange, command) = stores[from].exchange(true, vec![number]).unwrap();
                // The connection of rank 2 is lost, and it repeats its requests.
                deliver(&mut stores, from, &command.unwrap(), false);
                if from == 2 {
                    for command in stores[2].coordinator(id(0)) {
                        deliver(&mut stores, 2, &command, false);
                    }
                }
                pending.push(exchange);
            }
            for exchange in pending {
                let parts = Arc::new(vec![vec![number]; 3]);
                assert_eq!(exchange.take(), Some(ExchangeResult::Parts(parts)));
            }
        }
        for rank in 0..3 {
            let kept = stores[0]
                .services
                .kept_requests(0, rank, OnceKind::Exchange);
            assert_eq!(kept, 1);
        }
        // A long exchange keeps later ones, and no changes of the store.
        let (_exchange, command) = stores[1].exchange(true, Vec::new()).unwrap();
        deliver(&mut stores, 1, &command.unwrap(), false);
        for sum in 1..50 {
            let (add, command) = stores[1].add(true).unwrap();
            deliver(&mut stores, 1, &command.unwrap(), false);
            assert_eq!(add.take(), Some(AddResult::Sum(sum)));
        }
        let changes = stores[0]
            .services
            .kept_requests(0, 1, OnceKind::StoreChange);
        assert_eq!(changes, 1);
    }

    #[test]
    fn an_addition_that_has_waited_for_the_coordinator_is_sent_once() {
        let mut stores = three();
        let (one, command) = stores[1].add(false).unwrap();
        assert!(command.is_none());
        let sent = stores[1].coordinator(id(0));
        assert_eq!(sent.len(), 2);
        for command in &sent {
            deliver(&mut stores, 1, command, false);
        }
        assert_eq!(one.take(), Some(AddResult::Sum(1)));
        assert_eq!(stores[1].coordinator(id(0)).len(), 1);
    }

    /// Lets rank 1 take over: delivers to it what all ask of it, in an order by `turn`, and its replies.
    fn rank_1_takes_over(stores: &mut [SimulatedStore], turn: usize) {
        let mut requests: VecDeque<_> = VecDeque::new();
        for from in [1, 0, 2] {
            let own = stores[from].coordinator(id(1)).into_iter();
            requests.extend(own.map(|command| (from, command)));
        }
        let middle = turn % requests.len();
        requests.rotate_left(middle);
        while let Some((from, command)) = requests.pop_front() {
            let Command::Request(bytes) = command else {
                panic!("a request: {command:?}");
            };
            for command in stores[1].request(id(from as u32), &bytes) {
                let again = match command {
                    Command::Reply { to, bytes } => {
                        let to = to.slot as usize;
                        stores[to].reply(&bytes).map(|command| (to, command))
                    }
                    command => Some((1, command)),
                };
                requests.extend(again);
            }
        }
    }

    /// Enters the next exchange on all ranks, and delivers the requests of some to rank 0, and its replies to some; sets of ranks are
    /// bits of a number.
    fn exchange_at_rank_0(
        stores: &mut [SimulatedStore],
        part: &dyn Fn(usize) -> Vec<u8>,
        entered: usize,
        heard: usize,
    ) -> Vec<PendingExchange> {
        let mut all = Vec::new();
        for from in 0..3 {
            let (pending, command) = stores[from].exchange(true, part(from)).unwrap();
            all.push(pending);
            if entered >> from & 1 == 0 {
                continue;
            }
            for reply in stores[0].request(id(from as u32), request(&command.unwrap())) {
                let Command::Reply { to, bytes } = reply else {
                    panic!("a reply");
                };
                if heard >> to.slot & 1 == 1 {
                    stores[to.slot as usize].reply(&bytes);
                }
            }
        }
        all
    }

    #[test]
    fn an_exchange_outlives_its_coordinator_whatever_the_ranks_have_been_answered() {
        // Ranks whose requests have arrived at rank 0, and those whose replies have; which rank asks rank 1 first.
        for case in 0..8 * 8 * 5 {
            let (entered, heard, turn) = (case % 8, case / 8 % 8, case / 64);
            let mut stores = three();
            for round in 0..3 {
                let part = move |rank: usize| vec![rank as u8, round];
                let parts = Arc::new((0..3).map(part).collect());
                let parts = Some(ExchangeResult::Parts(parts));
                let is_last = round == 2;
                let (to, from) = if is_last { (entered, heard) } else { (7, 7) };
                let pending = exchange_at_rank_0(&mut stores, &part, to, from);
                let mut results: Vec<_> = pending.iter().map(PendingExchange::take).collect();
                if is_last {
                    // Rank 0 has its own.
                    for (rank, result) in results.iter().enumerate() {
                        let has_heard = entered == 7 && (heard | 1) >> rank & 1 == 1;
                        assert_eq!(result.is_some(), has_heard);
                    }
                    rank_1_takes_over(&mut stores, turn);
                    for (pending, result) in pending.iter().zip(&mut results) {
                        *result = result.take().or_else(|| pending.take());
                    }
                }
                assert!(
                    results.iter().all(|result| *result == parts),
                    "{case}: {results:?}"
                );
            }
        }
    }

    #[test]
    fn what_an_ended_coordinator_has_answered_to_one_rank_the_other_gets() {
        for turn in 0..5 {
            for heard in 0..8 {
                let mut stores = three();
                let part = |rank: usize| vec![rank as u8];
                let pending = exchange_at_rank_0(&mut stores, &part, 7, heard);
                for store in &mut stores[1..] {
                    store.departed(id(0), &Departure::lost(LossKind::Closed));
                }
                let mut results: Vec<_> = pending.iter().map(PendingExchange::take).collect();
                // Rank 0 is silent.
                let mut others = stores.split_off(1);
                let silent = SimulatedStore::new(id(0), Mistakes::default());
                others.insert(0, silent);
                rank_1_takes_over(&mut others, turn);
                for (pending, result) in pending.iter().zip(&mut results).skip(1) {
                    *result = result.take().or_else(|| pending.take());
                }
                let expected = match heard & 6 {
                    0 => ExchangeResult::Departed,
                    _ => ExchangeResult::Parts(Arc::new((0..3).map(part).collect())),
                };
                for result in &results[1..] {
                    assert_eq!(result.as_ref(), Some(&expected), "{turn} {heard}");
                }
            }
        }
    }

    #[test]
    fn the_next_coordinator_has_no_store_also_while_the_last_one_is_not_known_to_be_gone() {
        let mut stores = three();
        let (lost, command) = stores[2].add(true).unwrap();
        deliver(&mut stores, 2, &command.unwrap(), true);
        for store in &mut stores[1..] {
            store.coordinator(id(1));
        }
        assert_eq!(lost.take(), Some(AddResult::Failed));
        let (one, command) = stores[2].add(true).unwrap();
        for reply in stores[1].request(id(2), request(&command.unwrap())) {
            if let Command::Reply { to, bytes } = reply
                && to == id(2)
            {
                stores[2].reply(&bytes);
            }
        }
        assert_eq!(one.take(), Some(AddResult::Failed));
        assert!(!stores[2].receive_messages(true).is_closed);
        // The former coordinator has not ended.
        let follow = stores[0].coordinator(id(1));
        for reply in stores[1].request(id(0), request(&follow[0])) {
            if let Command::Reply { to, bytes } = reply
                && to == id(2)
            {
                stores[2].reply(&bytes);
            }
        }
        assert!(stores[2].receive_messages(true).is_closed);
    }
}
