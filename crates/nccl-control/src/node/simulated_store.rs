//! The store of one process without threads and sockets, for the simulator and for tests.
//!
//! What is shipped is run: the requests of the process until they are answered ([`Outbox`]), and its service while it coordinates
//! ([`Services`]). Only what connects them to the machine is written here once more, from `driver`.

use std::sync::Arc;

use super::outbox::Outbox;
use super::services::{Output, Services};
use crate::coordinator_message::{Answer, CoordinatorMessage};
use crate::departure::{Departure, LossKind, Lost};
use crate::driver_message::{NumberedRequest, decode_reply, encode_reply};
use crate::inbox::{AnswerSlot, Inbox};
use crate::proto::{Command, MemberId, Mistake, Mistakes, SharedMembership};
use crate::request::Request;

/// The store, as one process has it.
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
}

/// An addition whose result is awaited.
pub struct PendingAdd {
    generation: u64,
    id: u64,
    inbox: Arc<Inbox>,
    slot: Arc<AnswerSlot>,
}

/// The result of an addition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AddResult {
    /// The sum.
    Sum(i64),
    /// An error: whether the addition was made is not known.
    Failed,
}

impl PendingAdd {
    /// Returns the generation to whose store it goes.
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// Returns the result, once.
    #[must_use]
    pub fn take(&self) -> Option<AddResult> {
        self.slot.take().map(|answer| match answer {
            Ok(Answer::Sum(sum)) => AddResult::Sum(sum),
            _ => AddResult::Failed,
        })
    }
}

impl Drop for PendingAdd {
    fn drop(&mut self) {
        self.inbox.forget_request(self.id);
    }
}

impl SimulatedStore {
    /// The store of a process that is in no generation.
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

    /// Handles that the process is in a new generation.
    pub fn active(&mut self, membership: &SharedMembership) {
        self.departed.clear();
        self.coordinator = None;
        if membership.rank_of(self.me).is_some() {
            self.sessions.push(Session {
                membership: Arc::clone(membership),
                inbox: Arc::default(),
                outbox: Outbox::default(),
            });
        }
    }

    /// Handles that a member coordinates from now on. Returns what the machine is to send.
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
                self.services
                    .open(generation, membership, departed, before.is_none());
            }
            _ => self.services.close(),
        }
        let mut requests = Vec::new();
        for session in &mut self.sessions {
            requests.extend(match !is_other && before.is_some() {
                true => session.outbox.requests_to_repeat(&session.inbox),
                false => session.outbox.requests_to_resend(),
            });
        }
        requests.into_iter().map(Command::Request).collect()
    }

    /// Handles that a member has departed.
    pub fn departed(&mut self, member: MemberId, departure: &Departure) {
        self.departed.push((member, departure.clone()));
        self.services.record_departure(member, departure, false);
    }

    /// Handles that the process takes part no more.
    pub fn end(&mut self) {
        for session in &self.sessions {
            session.inbox.end(&Lost::from(LossKind::Superseded));
        }
    }

    /// Adds 1 to the counter of the last generation, if the process is in one. Returns what the machine is to send.
    pub fn add(&mut self, has_coordinator: bool) -> Option<(PendingAdd, Option<Command>)> {
        let session = self.sessions.last_mut()?;
        let inbox = Arc::clone(&session.inbox);
        let (id, slot) = inbox.register_request();
        let generation = session.generation();
        let numbered = NumberedRequest {
            generation,
            id,
            request: Request::Add {
                key: String::from("counter"),
                amount: 1,
            },
        };
        let bytes = session.outbox.add(&numbered, &inbox);
        let command = match has_coordinator {
            true => Some(Command::Request(bytes)),
            false => {
                session.outbox.defer(&numbered, bytes);
                None
            }
        };
        let pending = PendingAdd {
            generation,
            id,
            inbox,
            slot,
        };
        Some((pending, command))
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
                request,
            } = numbered;
            self.services.handle(from, generation, id, request, head);
        }
        let mut replies = Vec::new();
        while let Some((generation, output)) = self.services.poll() {
            let Output::Answer { to, answer } = output else {
                continue;
            };
            let payload = answer.encode();
            for (to, id) in to {
                match to == self.me {
                    true => self.answered(generation, id, answer.clone()),
                    false => replies.push(Command::Reply {
                        to,
                        bytes: encode_reply(generation, id, &payload),
                    }),
                }
            }
        }
        replies
    }

    /// Handles a reply that has arrived at this process.
    pub fn reply(&mut self, bytes: &[u8]) {
        if let Ok((generation, id, CoordinatorMessage::Answer(answer))) = decode_reply(bytes) {
            self.answered(generation, id, answer);
        }
    }

    fn answered(&mut self, generation: u64, id: u64, answer: Answer) {
        let mut sessions = self.sessions.iter_mut();
        if let Some(session) = sessions.find(|session| session.generation() == generation) {
            session.outbox.answered(id);
            session.inbox.answer(id, answer);
        }
    }
}

impl Session {
    fn generation(&self) -> u64 {
        self.membership.generation.number
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
            assert_eq!(repeated.len(), 2);
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
        assert_eq!(stores[0].services.kept_changes(0, 1), 1);
        assert_eq!(stores[0].services.kept_changes(0, 2), 1);
    }

    #[test]
    fn an_addition_that_has_waited_for_the_coordinator_is_sent_once() {
        let mut stores = three();
        let (one, command) = stores[1].add(false).unwrap();
        assert!(command.is_none());
        let sent = stores[1].coordinator(id(0));
        assert_eq!(sent.len(), 1);
        deliver(&mut stores, 1, &sent[0], false);
        assert_eq!(one.take(), Some(AddResult::Sum(1)));
        assert!(stores[1].coordinator(id(0)).is_empty());
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
        let replies = stores[1].request(id(2), request(&command.unwrap()));
        let [Command::Reply { to, bytes }] = &replies[..] else {
            panic!("one reply: {replies:?}");
        };
        assert_eq!(*to, id(2));
        stores[2].reply(bytes);
        assert_eq!(one.take(), Some(AddResult::Failed));
    }
}
