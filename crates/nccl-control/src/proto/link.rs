//! Links: ordered messages between two processes. A link outlives the connections that carry it.
//!
//! ```text
//! Dialing ──connected──▶ Greeting ──welcome──▶ Ready ──connection ends──▶ Down ──connected──▶ Greeting …
//!    └──────────── not ready within `resume` ────────────────────────────────┴──▶ Lost
//! ```
//!
//! The side that connected first also reconnects; the other side waits for it. A link is lost when it is not ready
//! within [`Timing::resume`], or when the other side no longer knows it. Messages are numbered; those that the other
//! side has not acknowledged are sent again on the next connection, and a message that arrives twice is handled once.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::id::{MemberId, Time};
use super::message::{Frame, Heartbeat, HeartbeatReply, Message};
use super::mistake::{Mistake, Mistakes};
use super::timing::Timing;

/// A connection, numbered by the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Connection(pub u64);

/// A request of the links to the driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ConnectionRequest {
    /// Connect to this address, and answer with `Input::Connected` or `Input::DialFailed`.
    Dial {
        /// The id by which the machine knows the peer.
        peer: MemberId,
        /// The address at which the peer listens.
        at: String,
    },
    /// Send a frame.
    Transmit(Connection, Frame),
    /// Close a connection.
    Close(Connection),
}

/// A change of a link.
#[derive(Debug)]
pub(super) enum LinkEvent {
    /// The link is ready for the first time.
    Up,
    /// The link is ready again, after this many nanoseconds.
    Resumed(MemberId, u64),
    /// The peer has given up the link and begun another one: the peer is alive, and messages on their way are lost.
    Renewed(MemberId),
    /// The link is lost; whether the peer is alive is not known.
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
    Heartbeat(MemberId, Heartbeat),
    /// To a coordinator.
    HeartbeatReply(MemberId, HeartbeatReply),
}

#[derive(Debug)]
struct Link {
    at: String,
    link_id: u64,
    /// Links up to this number that the peer began are superseded by this link.
    superseded_up_to: u64,
    /// Whether this side opens the connections.
    dials: bool,
    dialing: bool,
    next_dial: Time,
    /// The number of attempts that have failed since the link was last ready.
    failures: u32,
    connection: Option<Connection>,
    connected: Time,
    /// Whether this side's last attempt to connect has succeeded.
    last_dial_succeeded: bool,
    is_ready: bool,
    /// Whether the link has ever been ready.
    was_ready: bool,
    /// The time since which the link is not ready.
    down_since: Time,
    /// The number of the last message that the peer has acknowledged.
    acknowledged: u64,
    /// Generation and message, numbered from `acknowledged + 1`.
    pending: VecDeque<(u64, Message)>,
    /// The number of pending messages that were sent over the connection, and the bytes of the large ones among them.
    sent: usize,
    sent_large: usize,
    received: u64,
    /// The number of received messages that have not been acknowledged to the peer.
    unacknowledged_count: u32,
    /// Whether the link is kept while there is nothing to send.
    keep_when_idle: bool,
}

/// All links of one process.
#[derive(Debug)]
pub(super) struct Links {
    me: MemberId,
    timing: Timing,
    mistakes: Mistakes,
    links: BTreeMap<MemberId, Link>,
    connections: BTreeMap<Connection, MemberId>,
    /// The links that are not ready.
    down: BTreeSet<MemberId>,
    links_opened: u64,
    requests: VecDeque<ConnectionRequest>,
    events: VecDeque<LinkEvent>,
}

/// The number of messages after which a separate acknowledgement is sent.
const MAX_UNACKNOWLEDGED: u32 = 16;

/// The bytes of large messages that may be on their way to a peer at once. The others wait for acknowledgements: several large
/// answers at one moment must not overflow the queue of a connection, which would end the connection.
const LARGE_WINDOW: usize = 128 << 20;

/// The incarnation of a process that is not known yet.
const UNKNOWN: u64 = 0;

impl Links {
    /// Creates an empty set of links.
    #[must_use]
    pub(super) fn new(me: MemberId, timing: Timing, mistakes: Mistakes) -> Self {
        Self {
            me,
            timing,
            mistakes,
            links: BTreeMap::new(),
            connections: BTreeMap::new(),
            down: BTreeSet::new(),
            links_opened: 0,
            requests: VecDeque::new(),
            events: VecDeque::new(),
        }
    }

    /// Returns the next request to the driver.
    pub(super) fn poll(&mut self) -> Option<ConnectionRequest> {
        self.requests.pop_front()
    }

    /// Returns the next event.
    pub(super) fn next_event(&mut self) -> Option<LinkEvent> {
        self.events.pop_front()
    }

    /// Returns a placeholder id for the process at an address, until its id is known.
    #[must_use]
    pub(super) fn placeholder_id(number: u32) -> MemberId {
        MemberId {
            slot: u32::MAX - number,
            incarnation: UNKNOWN,
        }
    }

    /// Connects to a process, unless there already is a link.
    pub(super) fn open(&mut self, now: Time, peer: MemberId, at: &str) {
        if self.links.contains_key(&peer) {
            return;
        }
        self.links_opened += 1;
        let link = Link {
            at: at.to_owned(),
            link_id: self.links_opened,
            superseded_up_to: 0,
            dials: true,
            dialing: true,
            next_dial: now,
            failures: 0,
            connection: None,
            connected: now,
            last_dial_succeeded: false,
            is_ready: false,
            was_ready: false,
            down_since: now,
            acknowledged: 0,
            pending: VecDeque::new(),
            sent: 0,
            sent_large: 0,
            received: 0,
            unacknowledged_count: 0,
            keep_when_idle: false,
        };
        self.links.insert(peer, link);
        self.down.insert(peer);
        let at = at.to_owned();
        self.requests
            .push_back(ConnectionRequest::Dial { peer, at });
    }

    /// Sets whether a link is kept while there is nothing to send.
    pub(super) fn keep(&mut self, peer: MemberId, keep_when_idle: bool) {
        if let Some(link) = self.links.get_mut(&peer) {
            link.keep_when_idle = keep_when_idle;
        }
    }

    /// Whether a link is ready.
    #[must_use]
    pub(super) fn is_ready(&self, peer: MemberId) -> bool {
        self.links.get(&peer).is_some_and(|link| link.is_ready)
    }

    /// Returns the connection of a link.
    pub(super) fn connection_of(&self, peer: MemberId) -> Option<Connection> {
        self.links.get(&peer)?.connection
    }

    /// Returns the peer whose link a connection carries.
    pub(super) fn peer_of(&self, connection: Connection) -> Option<MemberId> {
        self.connections.get(&connection).copied()
    }

    /// Whether there is a link, ready or not.
    #[must_use]
    pub(super) fn has_link(&self, peer: MemberId) -> bool {
        self.links.contains_key(&peer)
    }

    /// Whether the last attempt to reach a process failed, or its link was lost.
    #[must_use]
    pub(super) fn is_unreachable(&self, peer: MemberId) -> bool {
        self.links
            .get(&peer)
            .is_none_or(|link| !link.is_ready && link.failures > 0)
    }

    /// Whether all messages to a process have arrived.
    #[must_use]
    pub(super) fn is_flushed(&self, peer: MemberId) -> bool {
        self.links
            .get(&peer)
            .is_none_or(|link| link.pending.is_empty())
    }

    /// Returns the number of messages to a process that have not arrived.
    #[cfg(test)]
    pub(super) fn pending(&self, peer: MemberId) -> usize {
        self.links.get(&peer).map_or(0, |link| link.pending.len())
    }

    /// Returns the bytes of the large messages that peers with a ready link have not acknowledged.
    #[must_use]
    pub(super) fn unacknowledged_large_bytes(&self) -> usize {
        let ready = self.links.values().filter(|link| link.is_ready);
        ready
            .flat_map(|link| &link.pending)
            .map(|(_, message)| message.large_bytes())
            .sum()
    }

    /// Whether all messages to all peers have arrived.
    #[must_use]
    pub(super) fn all_flushed(&self) -> bool {
        self.links.values().all(|link| link.pending.is_empty())
    }

    /// Whether any link is ready.
    #[must_use]
    pub(super) fn any_ready(&self) -> bool {
        self.links.values().any(|link| link.is_ready)
    }

    /// Acknowledges all messages from `peer` now.
    pub(super) fn acknowledge(&mut self, peer: MemberId) {
        let Some(link) = self.links.get_mut(&peer) else {
            return;
        };
        if let Some(connection) = link.connection.filter(|_| link.is_ready) {
            link.unacknowledged_count = 0;
            let acknowledge = Frame::Acknowledge(link.received);
            self.requests
                .push_back(ConnectionRequest::Transmit(connection, acknowledge));
        }
    }

    /// Sends a message over the link with `peer`, if there is one.
    pub(super) fn send(&mut self, peer: MemberId, generation: u64, message: Message) {
        let Some(link) = self.links.get_mut(&peer) else {
            return;
        };
        link.pending.push_back((generation, message));
        link.transmit(&mut self.requests);
    }

    /// Sends a frame that is not repeated, if the link is ready.
    pub(super) fn send_now(&mut self, peer: MemberId, frame: Frame) {
        let Some(link) = self.links.get_mut(&peer) else {
            return;
        };
        if let Some(connection) = link.connection.filter(|_| link.is_ready) {
            if std::mem::take(&mut link.unacknowledged_count) > 0 {
                let acknowledge = Frame::Acknowledge(link.received);
                self.requests
                    .push_back(ConnectionRequest::Transmit(connection, acknowledge));
            }
            self.requests
                .push_back(ConnectionRequest::Transmit(connection, frame));
        }
    }

    /// Ends a link without notifying the peer.
    pub(super) fn close(&mut self, peer: MemberId) {
        if let Some(link) = self.links.remove(&peer) {
            self.down.remove(&peer);
            self.drop_connection(link.connection);
        }
    }

    /// Sends to all peers with a ready link.
    pub(super) fn send_all(&mut self, generation: u64, message: &Message) {
        let ready = self.links.iter().filter(|(_, link)| link.is_ready);
        let ready: Vec<_> = ready.map(|(id, _)| *id).collect();
        for id in ready {
            self.send(id, generation, message.clone());
        }
    }

    /// Returns approximately how many bytes this value occupies on the heap.
    pub(super) fn size(&self) -> usize {
        let pending = self.links.values().map(|link| link.pending.capacity());
        self.links.len() * size_of::<(MemberId, Link)>()
            + pending.sum::<usize>() * size_of::<(u64, Message)>()
    }

    /// Ends all links except one.
    pub(super) fn close_others(&mut self, kept: MemberId) {
        let others = self.links.keys().copied().filter(|id| *id != kept);
        for id in others.collect::<Vec<_>>() {
            self.close(id);
        }
    }

    /// Ends all links.
    pub(super) fn close_all(&mut self) {
        while let Some((peer, _)) = self.links.first_key_value() {
            let peer = *peer;
            self.close(peer);
        }
    }

    fn drop_connection(&mut self, connection: Option<Connection>) {
        if let Some(connection) = connection {
            self.connections.remove(&connection);
            self.requests
                .push_back(ConnectionRequest::Close(connection));
        }
    }

    /// Handles a connection that the driver has opened.
    pub(super) fn connected(&mut self, now: Time, peer: MemberId, connection: Connection) {
        let Some(link) = self
            .links
            .get_mut(&peer)
            .filter(|link| link.dials && link.connection.is_none())
        else {
            self.requests
                .push_back(ConnectionRequest::Close(connection));
            return;
        };
        link.dialing = false;
        link.connection = Some(connection);
        (link.connected, link.last_dial_succeeded) = (now, true);
        let hello = Frame::Hello {
            from: self.me,
            to: peer,
            link_id: link.link_id,
            received: link.received,
        };
        self.connections.insert(connection, peer);
        self.requests
            .push_back(ConnectionRequest::Transmit(connection, hello));
    }

    /// Handles that the driver could not connect.
    pub(super) fn dial_failed(&mut self, now: Time, peer: MemberId) {
        if let Some(link) = self.links.get_mut(&peer) {
            (link.dialing, link.last_dial_succeeded) = (false, false);
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
        if link.is_ready {
            link.down_since = now;
            // Reconnect at once, except to a peer that ends every connection.
            link.next_dial = now.max(link.connected.after(self.timing.redial));
        } else {
            // Until now, the kernel of the suspect has answered.
            if now.since(link.connected) >= self.timing.resume {
                link.down_since = now;
            }
            link.failures += 1;
            link.next_dial = now.after(self.timing.redial);
        }
        link.is_ready = false;
        if !link.keep_when_idle && link.pending.is_empty() {
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
            link_id,
            received,
        } = frame
        {
            return self.handle_hello(now, connection, from, to, link_id, received);
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
                superseded_up_to,
                received,
            } if !link.is_ready => {
                link.superseded_up_to = superseded_up_to;
                if peer.incarnation == UNKNOWN {
                    self.rename(peer, from);
                }
                self.handle_welcome(now, from, received);
            }
            Frame::Unknown if !link.is_ready => self.lose(peer),
            Frame::Data {
                sequence,
                acknowledged,
                generation,
                message,
            } if link.is_ready => {
                link.acknowledge(acknowledged);
                link.transmit(&mut self.requests);
                let is_next = sequence == link.received + 1;
                let is_repeated =
                    sequence <= link.received && self.mistakes.makes(Mistake::HandledTwice);
                if !is_next && !is_repeated {
                    // Either the message has arrived before, or one is missing, which no sequence of events on a
                    // connection explains.
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
                link.unacknowledged_count += 1;
                if link.unacknowledged_count >= MAX_UNACKNOWLEDGED || message.is_large() {
                    link.unacknowledged_count = 0;
                    let acknowledge = Frame::Acknowledge(link.received);
                    self.requests
                        .push_back(ConnectionRequest::Transmit(connection, acknowledge));
                }
                let from = peer;
                self.events.push_back(LinkEvent::Received {
                    from,
                    generation,
                    message,
                });
            }
            Frame::Acknowledge(number) if link.is_ready => {
                link.acknowledge(number);
                link.transmit(&mut self.requests);
            }
            Frame::Heartbeat(heartbeat) if link.is_ready => {
                self.events.push_back(LinkEvent::Heartbeat(peer, heartbeat))
            }
            Frame::HeartbeatReply(heartbeat_reply) if link.is_ready => self
                .events
                .push_back(LinkEvent::HeartbeatReply(peer, heartbeat_reply)),
            _ => {}
        }
    }

    /// Handles a connection that the other side has opened.
    fn handle_hello(
        &mut self,
        now: Time,
        connection: Connection,
        from: MemberId,
        to: MemberId,
        link_id: u64,
        received: u64,
    ) {
        let is_for_me = to == self.me
            || to.incarnation == UNKNOWN
            || (to.slot == self.me.slot && self.mistakes.makes(Mistake::StaleIncarnation));
        if !is_for_me {
            // The hello is meant for an earlier incarnation of this process, or for another process that listened here
            // before.
            self.requests
                .push_back(ConnectionRequest::Transmit(connection, Frame::Unknown));
            self.requests
                .push_back(ConnectionRequest::Close(connection));
            return;
        }
        // If both sides dial at the same moment, the link dialled by the lower id is used. That link may already be ready, or its
        // connection may have ended after the other side accepted it.
        let is_recent =
            |link: &Link| !link.is_ready || now.since(link.connected) < self.timing.resume;
        let is_simultaneous_dial = |link: &Link| {
            let has_begun = match link.connection {
                Some(_) => is_recent(link),
                None => link.last_dial_succeeded && !link.was_ready,
            };
            link.dials && has_begun && self.me < from && received == 0
        };
        // The hello was sent before the other side accepted this side's link.
        let is_superseded = |link: &Link| link.dials && link_id <= link.superseded_up_to;
        if (self.links.get(&from))
            .is_some_and(|link| is_simultaneous_dial(link) || is_superseded(link))
        {
            self.requests
                .push_back(ConnectionRequest::Close(connection));
            return;
        }
        let resumes = |link: &Link| !link.dials && link.link_id == link_id && link.was_ready;
        if !self.links.get(&from).is_some_and(resumes) {
            if received > 0 {
                // This side no longer knows the link.
                self.requests
                    .push_back(ConnectionRequest::Transmit(connection, Frame::Unknown));
                self.requests
                    .push_back(ConnectionRequest::Close(connection));
                return;
            }
            // The other side has given up the last link; messages queued for the first one go over this one.
            if self.links.get(&from).is_some_and(|link| link.was_ready) {
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
            link_id,
            superseded_up_to: 0,
            dials: false,
            dialing: false,
            next_dial: Time::NEVER,
            failures: 0,
            connection: None,
            connected: now,
            last_dial_succeeded: false,
            is_ready: false,
            was_ready: false,
            down_since: now,
            acknowledged: 0,
            pending: VecDeque::new(),
            sent: 0,
            sent_large: 0,
            received: 0,
            unacknowledged_count: 0,
            keep_when_idle: false,
        });
        (link.dials, link.dialing, link.link_id) = (false, false, link_id);
        link.connection = Some(connection);
        self.connections.insert(connection, from);
        let welcome = Frame::Welcome {
            from: self.me,
            superseded_up_to: self.links_opened,
            received: link.received,
        };
        self.requests
            .push_back(ConnectionRequest::Transmit(connection, welcome));
        self.handle_welcome(now, from, received);
    }

    /// Handles that both sides know which messages have arrived.
    fn handle_welcome(&mut self, now: Time, peer: MemberId, received: u64) {
        let Some(link) = self.links.get_mut(&peer) else {
            return;
        };
        if received < link.acknowledged || received > link.acknowledged + link.pending.len() as u64
        {
            return self.lose(peer);
        }
        (link.sent, link.sent_large) = (0, 0);
        if !self.mistakes.makes(Mistake::HandledTwice) {
            link.acknowledge(received);
        }
        link.is_ready = true;
        link.failures = 0;
        self.down.remove(&peer);
        if self.mistakes.makes(Mistake::NotRepeated) && link.was_ready {
            link.acknowledged += link.pending.len() as u64;
            link.pending.clear();
        }
        if link.connection.is_none() {
            return;
        }
        link.transmit(&mut self.requests);
        let event = match std::mem::replace(&mut link.was_ready, true) {
            false => LinkEvent::Up,
            true => LinkEvent::Resumed(peer, now.since(link.down_since)),
        };
        self.events.push_back(event);
    }

    fn lose(&mut self, peer: MemberId) {
        self.close(peer);
        self.events.push_back(LinkEvent::Lost(peer));
    }

    /// Returns when to call [`handle_timeout`](Self::handle_timeout) next.
    #[must_use]
    pub(super) fn next_timeout(&self) -> Time {
        let due = |peer: &MemberId| {
            let link = &self.links[peer];
            let lost = link.down_since.after(self.timing.resume);
            match (link.connection, link.dials && !link.dialing) {
                // The peer is unresponsive, which is not a loss.
                (Some(_), _) => Time::NEVER,
                (None, true) => lost.min(link.next_dial),
                (None, false) => lost,
            }
        };
        self.down.iter().map(due).min().unwrap_or(Time::NEVER)
    }

    /// Reconnects, and gives up links that are lost.
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
            if link.down_since.after(self.timing.resume) <= now {
                self.lose(peer);
            } else if link.dials && !link.dialing && link.next_dial <= now {
                link.dialing = true;
                let at = link.at.clone();
                self.requests
                    .push_back(ConnectionRequest::Dial { peer, at });
            }
        }
    }

    /// Renames a link after its peer has stated its id.
    fn rename(&mut self, placeholder_id: MemberId, id: MemberId) {
        if self.links.contains_key(&id) {
            return self.close(placeholder_id);
        }
        if let Some(link) = self.links.remove(&placeholder_id) {
            if let Some(connection) = link.connection {
                self.connections.insert(connection, id);
            }
            if self.down.remove(&placeholder_id) {
                self.down.insert(id);
            }
            self.links.insert(id, link);
        }
    }
}

impl Link {
    /// Sends the messages that were not sent over this connection, as far as the window allows.
    fn transmit(&mut self, requests: &mut VecDeque<ConnectionRequest>) {
        let Some(connection) = self.connection.filter(|_| self.is_ready) else {
            return;
        };
        while let Some((generation, message)) = self.pending.get(self.sent) {
            let large = message.large_bytes();
            if self.sent_large > 0 && self.sent_large + large > LARGE_WINDOW {
                break;
            }
            self.sent += 1;
            self.sent_large += large;
            self.unacknowledged_count = 0;
            let frame = Frame::Data {
                sequence: self.acknowledged + self.sent as u64,
                acknowledged: self.received,
                generation: *generation,
                message: message.clone(),
            };
            requests.push_back(ConnectionRequest::Transmit(connection, frame));
        }
    }

    /// Forgets the messages up to this number: the peer has them.
    fn acknowledge(&mut self, number: u64) {
        while self.acknowledged < number
            && let Some((_, message)) = self.pending.pop_front()
        {
            self.acknowledged += 1;
            if self.sent > 0 {
                self.sent -= 1;
                self.sent_large -= message.large_bytes();
            }
        }
    }
}
