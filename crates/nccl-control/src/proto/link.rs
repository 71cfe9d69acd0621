//! Sessions: ordered messages between two processes that outlive the connections which carry them.
//!
//! ```text
//! Dialing ──connected──▶ Greeting ──welcome──▶ Ready ──connection ends──▶ Down ──connected──▶ Greeting …
//!    └──────────── not ready within `resume` ────────────────────────────────┴──▶ Lost
//! ```
//!
//! The side that connected first connects again; the other side waits for it. A session is lost when it is not ready within
//! [`Timing::resume`], or when the other side does not know it any more. Messages are numbered; those that the other side has not
//! acknowledged are sent again on the next connection, and one that arrives twice is handled once.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::id::{MemberId, Time};
use super::message::{Beat, Frame, Message, Pulse};
use super::mistake::{Mistake, Mistakes};
use super::timing::Timing;

/// A connection, numbered by the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Connection(pub u64);

/// A request of the sessions to the driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Wire {
    /// Connect to that address, and answer with [`Links::connected`] or [`Links::dial_failed`].
    Dial {
        /// The machine's id of the peer.
        peer: MemberId,
        /// Where the peer listens.
        at: String,
    },
    /// Send a frame.
    Transmit(Connection, Frame),
    /// Close a connection.
    HangUp(Connection),
}

/// A change of a session.
#[derive(Debug)]
pub(super) enum LinkEvent {
    /// The session is ready for the first time.
    Up,
    /// The session goes on after so many nanoseconds.
    Resumed(MemberId, u64),
    /// The peer has given the session up and begun another: it lives, and messages on their way are lost.
    Renewed(MemberId),
    /// The session is lost; whether the peer lives is not known.
    Lost(MemberId),
    /// A message.
    Received {
        /// The sender.
        from: MemberId,
        /// The sender's generation.
        generation: u64,
        /// The message.
        message: Message,
    },
    /// From a coordinator.
    Beat(MemberId, Beat),
    /// To a coordinator.
    Pulse(MemberId, Pulse),
}

#[derive(Debug)]
struct Link {
    at: String,
    session: u64,
    /// Sessions up to this number that the peer had begun are over.
    given_up: u64,
    /// Whether this side connects.
    dials: bool,
    dialing: bool,
    next_dial: Time,
    /// How many attempts failed since the session was last ready.
    failures: u32,
    connection: Option<Connection>,
    connected: Time,
    /// Whether this side's last attempt to connect has succeeded.
    reached: bool,
    ready: bool,
    /// Whether it has ever been ready.
    established: bool,
    down: Time,
    /// The number of the last message that the peer has.
    acknowledged: u64,
    /// Generation and message, numbered from `acknowledged + 1`.
    pending: VecDeque<(u64, Message)>,
    received: u64,
    /// How many of these the peer does not know to be received.
    owed: u32,
    /// Whether a session without anything to send is to be kept.
    kept: bool,
}

/// All sessions of one process.
#[derive(Debug)]
pub(super) struct Links {
    me: MemberId,
    timing: Timing,
    mistakes: Mistakes,
    links: BTreeMap<MemberId, Link>,
    connections: BTreeMap<Connection, MemberId>,
    /// The sessions that are not ready.
    down: BTreeSet<MemberId>,
    sessions: u64,
    wires: VecDeque<Wire>,
    events: VecDeque<LinkEvent>,
}

/// After how many messages an acknowledgement is sent by itself.
const OWED: u32 = 16;

/// The incarnation of a process that is not known yet.
const UNKNOWN: u64 = 0;

impl Links {
    /// Makes an empty set of sessions.
    #[must_use]
    pub(super) fn new(me: MemberId, timing: Timing, mistakes: Mistakes) -> Self {
        Self {
            me,
            timing,
            mistakes,
            links: BTreeMap::new(),
            connections: BTreeMap::new(),
            down: BTreeSet::new(),
            sessions: 0,
            wires: VecDeque::new(),
            events: VecDeque::new(),
        }
    }

    /// Returns the next request to the driver.
    pub(super) fn poll(&mut self) -> Option<Wire> {
        self.wires.pop_front()
    }

    /// Returns the next event.
    pub(super) fn next_event(&mut self) -> Option<LinkEvent> {
        self.events.pop_front()
    }

    /// Returns a placeholder id for the process at an address, as long as its id is not known.
    #[must_use]
    pub(super) fn stranger(number: u32) -> MemberId {
        MemberId {
            slot: u32::MAX - number,
            incarnation: UNKNOWN,
        }
    }

    /// Connects to a process, unless there is a session.
    pub(super) fn open(&mut self, now: Time, peer: MemberId, at: &str) {
        if self.links.contains_key(&peer) {
            return;
        }
        self.sessions += 1;
        let link = Link {
            at: at.to_owned(),
            session: self.sessions,
            given_up: 0,
            dials: true,
            dialing: true,
            next_dial: now,
            failures: 0,
            connection: None,
            connected: now,
            reached: false,
            ready: false,
            established: false,
            down: now,
            acknowledged: 0,
            pending: VecDeque::new(),
            received: 0,
            owed: 0,
            kept: false,
        };
        self.links.insert(peer, link);
        self.down.insert(peer);
        let at = at.to_owned();
        self.wires.push_back(Wire::Dial { peer, at });
    }

    /// Sets whether a session is kept while there is nothing to send.
    pub(super) fn keep(&mut self, peer: MemberId, kept: bool) {
        if let Some(link) = self.links.get_mut(&peer) {
            link.kept = kept;
        }
    }

    /// Whether a session is ready.
    #[must_use]
    pub(super) fn is_ready(&self, peer: MemberId) -> bool {
        self.links.get(&peer).is_some_and(|link| link.ready)
    }

    /// Returns the connection of a session.
    pub(super) fn connection_of(&self, peer: MemberId) -> Option<Connection> {
        self.links.get(&peer)?.connection
    }

    /// Returns the peer whose session a connection carries.
    pub(super) fn peer_of(&self, connection: Connection) -> Option<MemberId> {
        self.connections.get(&connection).copied()
    }

    /// Whether there is a session, ready or not.
    #[must_use]
    pub(super) fn is_there(&self, peer: MemberId) -> bool {
        self.links.contains_key(&peer)
    }

    /// Whether the last attempt to reach a process failed, or its session was lost.
    #[must_use]
    pub(super) fn is_hopeless(&self, peer: MemberId) -> bool {
        self.links
            .get(&peer)
            .is_none_or(|link| !link.ready && link.failures > 0)
    }

    /// Whether all messages to a process have arrived.
    #[must_use]
    pub(super) fn is_flushed(&self, peer: MemberId) -> bool {
        self.links
            .get(&peer)
            .is_none_or(|link| link.pending.is_empty())
    }

    /// Whether a large message is still on its way to a peer with a ready session.
    #[must_use]
    pub(super) fn sends_large(&self) -> bool {
        let is_large = |(_, message): &(u64, Message)| message.is_large();
        let mut ready = self.links.values().filter(|link| link.ready);
        ready.any(|link| link.pending.iter().any(is_large))
    }

    /// Whether all messages to all peers have arrived.
    #[must_use]
    pub(super) fn all_flushed(&self) -> bool {
        self.links.values().all(|link| link.pending.is_empty())
    }

    /// Whether any session is ready.
    #[must_use]
    pub(super) fn any_ready(&self) -> bool {
        self.links.values().any(|link| link.ready)
    }

    /// Acknowledges all messages from `peer` now.
    pub(super) fn acknowledge(&mut self, peer: MemberId) {
        let Some(link) = self.links.get_mut(&peer) else {
            return;
        };
        if let Some(connection) = link.connection.filter(|_| link.ready) {
            link.owed = 0;
            let acknowledge = Frame::Acknowledge(link.received);
            self.wires
                .push_back(Wire::Transmit(connection, acknowledge));
        }
    }

    /// Sends a message over the session with `peer`, if there is one.
    pub(super) fn send(&mut self, peer: MemberId, generation: u64, message: Message) {
        let Some(link) = self.links.get_mut(&peer) else {
            return;
        };
        link.pending.push_back((generation, message.clone()));
        if let Some(connection) = link.connection.filter(|_| link.ready) {
            let sequence = link.acknowledged + link.pending.len() as u64;
            link.owed = 0;
            let acknowledged = link.received;
            let frame = Frame::Data {
                sequence,
                acknowledged,
                generation,
                message,
            };
            self.wires.push_back(Wire::Transmit(connection, frame));
        }
    }

    /// Sends a frame that is not repeated, if the session is ready.
    pub(super) fn send_now(&mut self, peer: MemberId, frame: Frame) {
        let Some(link) = self.links.get_mut(&peer) else {
            return;
        };
        if let Some(connection) = link.connection.filter(|_| link.ready) {
            if std::mem::take(&mut link.owed) > 0 {
                let acknowledge = Frame::Acknowledge(link.received);
                self.wires
                    .push_back(Wire::Transmit(connection, acknowledge));
            }
            self.wires.push_back(Wire::Transmit(connection, frame));
        }
    }

    /// Ends a session without notice.
    pub(super) fn close(&mut self, peer: MemberId) {
        if let Some(link) = self.links.remove(&peer) {
            self.down.remove(&peer);
            self.drop_connection(link.connection);
        }
    }

    /// Sends to all peers with a ready session.
    pub(super) fn send_all(&mut self, generation: u64, message: &Message) {
        let ready = self.links.iter().filter(|(_, link)| link.ready);
        let ready: Vec<_> = ready.map(|(id, _)| *id).collect();
        for id in ready {
            self.send(id, generation, message.clone());
        }
    }

    /// About how many bytes it has beside itself.
    pub(super) fn size(&self) -> usize {
        let pending = self.links.values().map(|link| link.pending.capacity());
        self.links.len() * size_of::<(MemberId, Link)>()
            + pending.sum::<usize>() * size_of::<(u64, Message)>()
    }

    /// Ends all sessions but one.
    pub(super) fn close_others(&mut self, kept: MemberId) {
        let others = self.links.keys().copied().filter(|id| *id != kept);
        for id in others.collect::<Vec<_>>() {
            self.close(id);
        }
    }

    /// Ends all sessions.
    pub(super) fn close_all(&mut self) {
        while let Some((peer, _)) = self.links.first_key_value() {
            let peer = *peer;
            self.close(peer);
        }
    }

    fn drop_connection(&mut self, connection: Option<Connection>) {
        if let Some(connection) = connection {
            self.connections.remove(&connection);
            self.wires.push_back(Wire::HangUp(connection));
        }
    }

    /// Handles that the driver has connected.
    pub(super) fn connected(&mut self, now: Time, peer: MemberId, connection: Connection) {
        let Some(link) = self
            .links
            .get_mut(&peer)
            .filter(|link| link.dials && link.connection.is_none())
        else {
            self.wires.push_back(Wire::HangUp(connection));
            return;
        };
        link.dialing = false;
        link.connection = Some(connection);
        (link.connected, link.reached) = (now, true);
        let hello = Frame::Hello {
            from: self.me,
            to: peer,
            session: link.session,
            received: link.received,
        };
        self.connections.insert(connection, peer);
        self.wires.push_back(Wire::Transmit(connection, hello));
    }

    /// Handles that the driver could not connect.
    pub(super) fn dial_failed(&mut self, now: Time, peer: MemberId) {
        if let Some(link) = self.links.get_mut(&peer) {
            (link.dialing, link.reached) = (false, false);
            link.failures += 1;
            link.next_dial = now.after(self.timing.redial);
        }
    }

    /// Handles the end of a connection.
    pub(super) fn closed(&mut self, now: Time, connection: Connection) {
        let Some(peer) = self.connections.remove(&connection) else {
            return;
        };
        let Some(link) = self.links.get_mut(&peer) else {
            return;
        };
        if link.connection != Some(connection) {
            return;
        }
        link.connection = None;
        if link.ready {
            link.down = now;
            // At once, except to a peer that ends every connection.
            link.next_dial = now.max(link.connected.after(self.timing.redial));
        } else {
            // Until now the kernel of the silent process was there.
            if now.since(link.connected) >= self.timing.resume {
                link.down = now;
            }
            link.failures += 1;
            link.next_dial = now.after(self.timing.redial);
        }
        link.ready = false;
        if !link.kept && link.pending.is_empty() {
            self.links.remove(&peer);
            self.down.remove(&peer);
            return;
        }
        self.down.insert(peer);
        if self.mistakes.makes(Mistake::ClosedIsDead) {
            self.lose(peer);
        }
    }

    /// Handles a received frame.
    pub(super) fn received(&mut self, now: Time, connection: Connection, frame: Frame) {
        if let Frame::Hello {
            from,
            to,
            session,
            received,
        } = frame
        {
            return self.greeted(now, connection, from, to, session, received);
        }
        let Some(&peer) = self.connections.get(&connection) else {
            return;
        };
        let Some(link) = self
            .links
            .get_mut(&peer)
            .filter(|link| link.connection == Some(connection))
        else {
            return;
        };
        match frame {
            Frame::Welcome {
                from,
                given_up,
                received,
            } if !link.ready => {
                link.given_up = given_up;
                if peer.incarnation == UNKNOWN {
                    self.rename(peer, from);
                }
                self.welcomed(now, from, received);
            }
            Frame::Unknown if !link.ready => self.lose(peer),
            Frame::Data {
                sequence,
                acknowledged,
                generation,
                message,
            } if link.ready => {
                acknowledge(link, acknowledged);
                let is_next = sequence == link.received + 1;
                let is_repeated =
                    sequence <= link.received && self.mistakes.makes(Mistake::HandledTwice);
                if !is_next && !is_repeated {
                    // The message came before; or one is missing, which no order of events of a connection explains.
                    if sequence > link.received {
                        self.drop_connection(Some(connection));
                        self.connections.insert(connection, peer);
                        self.closed(now, connection);
                    }
                    return;
                }
                if is_next {
                    link.received = sequence;
                }
                link.owed += 1;
                if link.owed >= OWED || message.is_large() {
                    link.owed = 0;
                    let acknowledge = Frame::Acknowledge(link.received);
                    self.wires
                        .push_back(Wire::Transmit(connection, acknowledge));
                }
                let from = peer;
                self.events.push_back(LinkEvent::Received {
                    from,
                    generation,
                    message,
                });
            }
            Frame::Acknowledge(number) if link.ready => acknowledge(link, number),
            Frame::Beat(beat) if link.ready => self.events.push_back(LinkEvent::Beat(peer, beat)),
            Frame::Pulse(pulse) if link.ready => {
                self.events.push_back(LinkEvent::Pulse(peer, pulse))
            }
            _ => {}
        }
    }

    /// Handles a connection of the other side.
    fn greeted(
        &mut self,
        now: Time,
        connection: Connection,
        from: MemberId,
        to: MemberId,
        session: u64,
        received: u64,
    ) {
        let is_for_me = to == self.me
            || to.incarnation == UNKNOWN
            || (to.slot == self.me.slot && self.mistakes.makes(Mistake::StaleIncarnation));
        if !is_for_me {
            // It is for an earlier incarnation of this process, or for another process that listened here before.
            self.wires
                .push_back(Wire::Transmit(connection, Frame::Unknown));
            self.wires.push_back(Wire::HangUp(connection));
            return;
        }
        // Both connect at the same moment: the session of the lower one is used. Its welcome may have come before this; or its
        // connection has ended, and the other side has accepted that session.
        let fresh = |link: &Link| !link.ready || now.since(link.connected) < self.timing.resume;
        let crosses = |link: &Link| {
            let began = match link.connection {
                Some(_) => fresh(link),
                None => link.reached && !link.established,
            };
            link.dials && began && self.me < from && received == 0
        };
        // It was sent before the other side accepted this one's session.
        let is_stale = |link: &Link| link.dials && session <= link.given_up;
        if (self.links.get(&from)).is_some_and(|link| crosses(link) || is_stale(link)) {
            self.wires.push_back(Wire::HangUp(connection));
            return;
        }
        let goes_on = |link: &Link| !link.dials && link.session == session && link.established;
        if !self.links.get(&from).is_some_and(goes_on) {
            if received > 0 {
                // This side has forgotten the session.
                self.wires
                    .push_back(Wire::Transmit(connection, Frame::Unknown));
                self.wires.push_back(Wire::HangUp(connection));
                return;
            }
            // The other side has given the last session up; messages queued for the first one go over this one.
            if self.links.get(&from).is_some_and(|link| link.established) {
                self.close(from);
                self.events.push_back(LinkEvent::Renewed(from));
            }
        }
        let before = self
            .links
            .get_mut(&from)
            .and_then(|link| link.connection.take());
        self.drop_connection(before);
        let link = self.links.entry(from).or_insert_with(|| Link {
            at: String::new(),
            session,
            given_up: 0,
            dials: false,
            dialing: false,
            next_dial: Time::NEVER,
            failures: 0,
            connection: None,
            connected: now,
            reached: false,
            ready: false,
            established: false,
            down: now,
            acknowledged: 0,
            pending: VecDeque::new(),
            received: 0,
            owed: 0,
            kept: false,
        });
        (link.dials, link.dialing, link.session) = (false, false, session);
        link.connection = Some(connection);
        self.connections.insert(connection, from);
        let welcome = Frame::Welcome {
            from: self.me,
            given_up: self.sessions,
            received: link.received,
        };
        self.wires.push_back(Wire::Transmit(connection, welcome));
        self.welcomed(now, from, received);
    }

    /// Handles that both sides know which messages have arrived.
    fn welcomed(&mut self, now: Time, peer: MemberId, received: u64) {
        let Some(link) = self.links.get_mut(&peer) else {
            return;
        };
        if received < link.acknowledged || received > link.acknowledged + link.pending.len() as u64
        {
            return self.lose(peer);
        }
        if !self.mistakes.makes(Mistake::HandledTwice) {
            acknowledge(link, received);
        }
        link.ready = true;
        link.failures = 0;
        self.down.remove(&peer);
        if self.mistakes.makes(Mistake::NotRepeated) && link.established {
            link.acknowledged += link.pending.len() as u64;
            link.pending.clear();
        }
        let Some(connection) = link.connection else {
            return;
        };
        for (sequence, (generation, message)) in (link.acknowledged + 1..).zip(&link.pending) {
            let (generation, message) = (*generation, message.clone());
            let acknowledged = link.received;
            let frame = Frame::Data {
                sequence,
                acknowledged,
                generation,
                message,
            };
            self.wires.push_back(Wire::Transmit(connection, frame));
        }
        let event = match std::mem::replace(&mut link.established, true) {
            false => LinkEvent::Up,
            true => LinkEvent::Resumed(peer, now.since(link.down)),
        };
        self.events.push_back(event);
    }

    fn lose(&mut self, peer: MemberId) {
        self.close(peer);
        self.events.push_back(LinkEvent::Lost(peer));
    }

    /// Returns when [`handle_timeout`](Self::handle_timeout) has something to do.
    #[must_use]
    pub(super) fn next_timeout(&self) -> Time {
        let due = |peer: &MemberId| {
            let link = &self.links[peer];
            let lost = link.down.after(self.timing.resume);
            match (link.connection, link.dials && !link.dialing) {
                // The peer is mute: that is no loss.
                (Some(_), _) => Time::NEVER,
                (None, true) => lost.min(link.next_dial),
                (None, false) => lost,
            }
        };
        self.down.iter().map(due).min().unwrap_or(Time::NEVER)
    }

    /// Reconnects, and gives sessions up.
    pub(super) fn handle_timeout(&mut self, now: Time) {
        if self.down.is_empty() || self.next_timeout() > now {
            return;
        }
        let down: Vec<_> = self.down.iter().copied().collect();
        for peer in down {
            let Some(link) = self.links.get_mut(&peer) else {
                continue;
            };
            if link.connection.is_some() {
                continue;
            }
            if link.down.after(self.timing.resume) <= now {
                self.lose(peer);
            } else if link.dials && !link.dialing && link.next_dial <= now {
                link.dialing = true;
                let at = link.at.clone();
                self.wires.push_back(Wire::Dial { peer, at });
            }
        }
    }

    /// Renames a session whose peer has stated its id.
    fn rename(&mut self, stranger: MemberId, id: MemberId) {
        if self.links.contains_key(&id) {
            return self.close(stranger);
        }
        if let Some(link) = self.links.remove(&stranger) {
            if let Some(connection) = link.connection {
                self.connections.insert(connection, id);
            }
            if self.down.remove(&stranger) {
                self.down.insert(id);
            }
            self.links.insert(id, link);
        }
    }
}

fn acknowledge(link: &mut Link, number: u64) {
    while link.acknowledged < number && link.pending.pop_front().is_some() {
        link.acknowledged += 1;
    }
}
