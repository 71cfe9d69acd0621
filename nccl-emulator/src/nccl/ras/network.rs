//! The network between RAS threads: which processes are present, unresponsive, or considered dead.
//!
//! The processes form a ring by host and process. Each of them sends keep-alives to its neighbours and watches theirs; if a
//! neighbour does not respond, it also watches the next process in that direction. It reports its findings to all others.
//!
//! ```text
//! alive ──silent for 5 s, or a query not answered──▶ unresponsive ──silent for 60 s──▶ dead     for good
//!   ▲                                                     │
//!   └──────────────────any datagram────────────────────────┘
//! ```
//!
//! A value without sockets and clocks: [`Network::handle`], [`Network::tick`], [`Network::poll`].

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::SocketAddrV4;
use std::time::{Duration, Instant};

use super::peers::{Change, Peer, Peers, ProcessId};
use super::wire::{Content, Datagram, PEERS_PER_DATAGRAM};

/// The times of the network, in units of a second.
const WARN: u32 = 5;
const DEAD: u32 = 60;

/// A request to the driver.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Output {
    /// Send a datagram.
    Send(SocketAddrV4, Vec<u8>),
    /// Report an event to the clients that monitor.
    Event(Event),
}

/// Something that happened to a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Event {
    pub(super) kind: EventKind,
    pub(super) process: ProcessId,
    pub(super) details: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum EventKind {
    New,
    Dead,
    Unresponsive,
    Recovered,
}

impl EventKind {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::New => "PEER_NEW",
            Self::Dead => "PEER_DEAD",
            Self::Unresponsive => "PEER_UNRESPONSIVE",
            Self::Recovered => "PEER_RECOVERED",
        }
    }

    /// Whether the event belongs to the life of a process, not to the diagnostics of the network.
    pub(super) fn is_lifecycle(self) -> bool {
        matches!(self, Self::New | Self::Dead)
    }
}

/// A process that is watched.
#[derive(Debug)]
struct Link {
    heard: Instant,
    sent: Option<Instant>,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Network {
    own: ProcessId,
    /// The second of the network; tests have a shorter one.
    second: Duration,
    peers: Peers,
    suspects: BTreeSet<ProcessId>,
    links: BTreeMap<ProcessId, Link>,
    /// When each process last got all known data, or a keep-alive without being watched.
    told: BTreeMap<ProcessId, Instant>,
    outputs: VecDeque<Output>,
}

impl Network {
    pub(super) fn new(own: ProcessId, second: Duration) -> Self {
        Self {
            own,
            second,
            peers: Peers::default(),
            suspects: BTreeSet::new(),
            links: BTreeMap::new(),
            told: BTreeMap::new(),
            outputs: VecDeque::new(),
        }
    }

    /// Returns the known processes.
    pub(super) fn peers(&self) -> &Peers {
        &self.peers
    }

    /// Returns the processes to query: those that are expected to answer.
    pub(super) fn responsive(&self) -> Vec<Peer> {
        let is_asked = |peer: &&Peer| {
            let process = peer.process;
            process != self.own
                && !self.peers.dead.contains(&process)
                && !self.suspects.contains(&process)
        };
        self.peers.all.values().filter(is_asked).cloned().collect()
    }

    /// Adds processes that a new communicator has in this job.
    pub(super) fn add(&mut self, now: Instant, peers: impl IntoIterator<Item = Peer>) {
        if self.merge(peers) {
            self.watch(now);
            self.tell_neighbours(now);
        }
    }

    /// Records that a process has not answered a query.
    pub(super) fn suspect(&mut self, process: ProcessId, details: &str) {
        if self.note_suspect(process, details.to_owned()) {
            self.broadcast(Content::Suspect {
                process,
                is_suspect: true,
            });
        }
    }

    /// Handles a datagram.
    pub(super) fn handle(&mut self, now: Instant, datagram: Datagram) {
        let Datagram { from, content } = datagram;
        if from == self.own || self.peers.dead.contains(&from) {
            return;
        }
        self.hear(now, from);
        match content {
            Content::KeepAlive { hash } => {
                if hash != self.peers.hash() {
                    self.tell(now, from);
                } else if !self.links.contains_key(&from) && self.may_tell(now, from) {
                    self.send(from, self.keep_alive());
                }
            }
            Content::Peers { hash, peers, dead } => {
                let mut has_changed = self.merge(peers);
                for process in dead {
                    has_changed |= self.note_dead(process);
                }
                self.watch(now);
                if has_changed {
                    self.tell_neighbours(now);
                }
                if hash != self.peers.hash() {
                    self.tell(now, from);
                }
            }
            Content::Suspect {
                process,
                is_suspect: true,
            } => {
                self.note_suspect(process, "peer not responding to another process".to_owned());
                self.watch(now);
            }
            Content::Suspect { process, .. } => {
                self.recover(process);
                self.watch(now);
            }
            Content::Dead { process } => {
                self.note_dead(process);
                self.watch(now);
            }
        }
    }

    /// Does the work that is due.
    pub(super) fn tick(&mut self, now: Instant) {
        self.watch(now);
        let silences: Vec<_> = self
            .links
            .iter()
            .map(|(&process, link)| (process, now.saturating_duration_since(link.heard)))
            .collect();
        for (process, silence) in silences {
            if silence >= self.second * DEAD {
                if self.note_dead(process) {
                    self.broadcast(Content::Dead { process });
                }
            } else if silence >= self.second * WARN {
                let seconds = silence.as_secs();
                let details = format!("peer not responding for {seconds}s (keepalive warning)");
                self.suspect(process, &details);
            }
        }
        self.watch(now);
        let keep_alive = self.keep_alive();
        let is_due = |link: &Link| link.sent.is_none_or(|sent| now >= sent + self.second);
        let due: Vec<_> = self
            .links
            .iter()
            .filter(|(_, link)| is_due(link))
            .map(|(&process, _)| process)
            .collect();
        for process in due {
            self.send(process, keep_alive.clone());
            if let Some(link) = self.links.get_mut(&process) {
                link.sent = Some(now);
            }
        }
    }

    /// Returns the latest time at which [`Network::tick`] is due.
    pub(super) fn next_timeout(&self, now: Instant) -> Option<Instant> {
        (!self.links.is_empty()).then(|| now + self.second / 4)
    }

    /// Returns the next request to the driver.
    pub(super) fn poll(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    /// Watches the nearest responsive process in each direction, and the processes before it.
    fn watch(&mut self, now: Instant) {
        let ring = self.peers.ring();
        let Some(own) = ring.iter().position(|&process| process == self.own) else {
            return;
        };
        let others = ring.len() - 1;
        let next = (1..=others).map(|hops| ring[(own + hops) % ring.len()]);
        let previous = (1..=others).map(|hops| ring[(own + ring.len() - hops) % ring.len()]);
        let mut watched = BTreeSet::new();
        for process in next {
            watched.insert(process);
            if !self.suspects.contains(&process) {
                break;
            }
        }
        for process in previous {
            watched.insert(process);
            if !self.suspects.contains(&process) {
                break;
            }
        }
        self.links.retain(|process, _| watched.contains(process));
        for process in watched {
            self.links.entry(process).or_insert(Link {
                heard: now,
                sent: None,
            });
        }
    }

    fn hear(&mut self, now: Instant, process: ProcessId) {
        if let Some(link) = self.links.get_mut(&process) {
            link.heard = now;
        }
        if self.recover(process) {
            self.broadcast(Content::Suspect {
                process,
                is_suspect: false,
            });
        }
    }

    /// Returns whether the process was unresponsive.
    fn recover(&mut self, process: ProcessId) -> bool {
        let was_suspect = self.suspects.remove(&process);
        if was_suspect {
            self.event(
                EventKind::Recovered,
                process,
                "peer responding again".to_owned(),
            );
        }
        was_suspect
    }

    /// Returns whether this is new.
    fn note_suspect(&mut self, process: ProcessId, details: String) -> bool {
        let is_known = self.peers.all.contains_key(&process) && process != self.own;
        let is_news =
            is_known && !self.peers.dead.contains(&process) && self.suspects.insert(process);
        if is_news {
            self.event(EventKind::Unresponsive, process, details);
        }
        is_news
    }

    /// Returns whether this is new.
    fn note_dead(&mut self, process: ProcessId) -> bool {
        let is_known = self.peers.all.contains_key(&process) && process != self.own;
        let is_news = is_known && self.peers.dead.insert(process);
        if is_news {
            self.suspects.remove(&process);
            self.links.remove(&process);
            self.event(EventKind::Dead, process, String::new());
        }
        is_news
    }

    /// Returns whether anything is new.
    fn merge(&mut self, peers: impl IntoIterator<Item = Peer>) -> bool {
        let mut has_changed = false;
        for peer in peers {
            let process = peer.process;
            let change = self.peers.add(peer);
            has_changed |= change != Change::None;
            if change == Change::New && process != self.own {
                self.event(EventKind::New, process, String::new());
            }
        }
        has_changed
    }

    fn event(&mut self, kind: EventKind, process: ProcessId, details: String) {
        self.outputs.push_back(Output::Event(Event {
            kind,
            process,
            details,
        }));
    }

    fn keep_alive(&self) -> Content {
        Content::KeepAlive {
            hash: self.peers.hash(),
        }
    }

    /// Returns whether a process may get an unscheduled report: at most once in a while.
    fn may_tell(&mut self, now: Instant, process: ProcessId) -> bool {
        let is_early = |told: &Instant| now < *told + self.second / 2;
        if !self.peers.all.contains_key(&process) || self.told.get(&process).is_some_and(is_early) {
            return false;
        }
        self.told.insert(process, now);
        true
    }

    /// Sends a process all known processes.
    fn tell(&mut self, now: Instant, process: ProcessId) {
        if self.may_tell(now, process) {
            self.send_peers(process);
        }
    }

    fn tell_neighbours(&mut self, now: Instant) {
        let neighbours: Vec<_> = self.links.keys().copied().collect();
        for process in neighbours {
            self.told.insert(process, now);
            self.send_peers(process);
        }
    }

    fn send_peers(&mut self, to: ProcessId) {
        let all: Vec<Peer> = self.peers.all.values().cloned().collect();
        let dead: Vec<ProcessId> = self.peers.dead.iter().copied().collect();
        let hash = self.peers.hash();
        let parts = all.len().max(dead.len()).div_ceil(PEERS_PER_DATAGRAM);
        for part in 0..parts {
            let skipped = part * PEERS_PER_DATAGRAM;
            self.send(
                to,
                Content::Peers {
                    hash,
                    peers: all
                        .iter()
                        .skip(skipped)
                        .take(PEERS_PER_DATAGRAM)
                        .cloned()
                        .collect(),
                    dead: dead
                        .iter()
                        .skip(skipped)
                        .take(PEERS_PER_DATAGRAM)
                        .copied()
                        .collect(),
                },
            );
        }
    }

    fn broadcast(&mut self, content: Content) {
        for process in self.peers.ring() {
            self.send(process, content.clone());
        }
    }

    fn send(&mut self, to: ProcessId, content: Content) {
        if let Some(peer) = self.peers.all.get(&to)
            && to != self.own
        {
            let from = self.own;
            let bytes = Datagram { from, content }.encode();
            self.outputs
                .push_back(Output::Send(peer.gossip_address(), bytes));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nccl::ras::peers::Devices;
    use std::net::Ipv4Addr;

    const SECOND: Duration = Duration::from_secs(1);

    fn peer(process: ProcessId) -> Peer {
        Peer {
            process,
            address: Ipv4Addr::LOCALHOST,
            gossip: process as u16,
            query: 0,
            pid: process as u32,
            cuda: Devices::default(),
            nvml: Devices::default(),
        }
    }

    /// Networks in virtual time; datagrams to those that are `stopped` wait.
    struct World {
        networks: BTreeMap<ProcessId, Network>,
        stopped: BTreeSet<ProcessId>,
        events: Vec<(ProcessId, Event)>,
        now: Instant,
    }

    impl World {
        /// Processes 1 to `count`, of which each knows only its neighbours.
        fn new(count: u64) -> Self {
            let now = Instant::now();
            let mut networks = BTreeMap::new();
            for process in 1..=count {
                let mut network = Network::new(process, SECOND);
                let known = (process.saturating_sub(1).max(1))..=(process + 1).min(count);
                network.add(now, known.map(peer));
                networks.insert(process, network);
            }
            Self {
                networks,
                stopped: BTreeSet::new(),
                events: Vec::new(),
                now,
            }
        }

        fn run(&mut self, duration: Duration) {
            let end = self.now + duration;
            while self.now < end {
                self.now += SECOND / 4;
                let mut datagrams = Vec::new();
                for (&process, network) in &mut self.networks {
                    if self.stopped.contains(&process) {
                        continue;
                    }
                    network.tick(self.now);
                    while let Some(output) = network.poll() {
                        match output {
                            Output::Send(to, bytes) => datagrams.push((to.port(), bytes)),
                            Output::Event(event) => self.events.push((process, event)),
                        }
                    }
                }
                assert!(datagrams.len() < 100 * self.networks.len());
                for (to, bytes) in datagrams {
                    let to = ProcessId::from(to);
                    if let (false, Some(network)) =
                        (self.stopped.contains(&to), self.networks.get_mut(&to))
                    {
                        network.handle(self.now, Datagram::decode(&bytes).unwrap());
                    }
                }
            }
        }

        fn events_of(&self, kind: EventKind) -> BTreeSet<(ProcessId, ProcessId)> {
            let of_kind = self.events.iter().filter(|(_, event)| event.kind == kind);
            of_kind.map(|(of, event)| (*of, event.process)).collect()
        }
    }

    #[test]
    fn processes_that_know_their_neighbours_come_to_know_all() {
        let mut world = World::new(9);
        world.run(SECOND * 12);
        for network in world.networks.values() {
            assert_eq!(network.peers.all.len(), 9);
            assert_eq!(network.responsive().len(), 8);
        }
        assert!(world.events_of(EventKind::Unresponsive).is_empty());
        assert!(world.events_of(EventKind::New).contains(&(1, 9)));
        // Keep-alives, and no more.
        for network in world.networks.values_mut() {
            network.tick(world.now);
            assert!(network.links.len() == 2 && network.outputs.len() <= 2);
        }
    }

    #[test]
    fn a_stopped_process_is_unresponsive_for_all_and_recovers() {
        let mut world = World::new(5);
        world.run(SECOND * 8);
        world.stopped.insert(3);
        world.run(SECOND * 4);
        assert_eq!(world.networks[&1].responsive().len(), 4);
        world.run(SECOND * 3);
        for process in [1, 2, 4, 5] {
            assert_eq!(world.networks[&process].responsive().len(), 3);
            assert!(world.networks[&process].peers.dead.is_empty());
        }
        world.stopped.remove(&3);
        world.run(SECOND * 4);
        for process in 1..=5 {
            assert_eq!(world.networks[&process].responsive().len(), 4, "{process}");
        }
        assert!(world.events_of(EventKind::Recovered).contains(&(1, 3)));
        assert!(world.events_of(EventKind::Dead).is_empty());
    }

    #[test]
    fn a_process_that_is_silent_for_a_minute_is_dead_for_all_and_for_good() {
        let mut world = World::new(4);
        world.run(SECOND * 8);
        world.stopped.extend([2, 3]);
        world.run(SECOND * 64);
        for process in [1, 4] {
            let network = &world.networks[&process];
            assert_eq!(network.peers.dead, [2, 3].into());
            assert_eq!(network.peers.ring(), [1, 4]);
        }
        world.stopped.clear();
        world.run(SECOND * 10);
        assert_eq!(world.networks[&1].peers.dead, [2, 3].into());
        let dead = world.events_of(EventKind::Dead);
        assert!(dead.is_superset(&[(1, 2), (1, 3), (4, 2), (4, 3)].into()));
    }
}
