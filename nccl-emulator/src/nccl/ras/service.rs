//! The RAS thread: sockets and clock around [`Network`], [`Conversation`] and [`Query`].

use std::io::ErrorKind;
use std::net::{Ipv4Addr, TcpListener, UdpSocket};
use std::os::fd::{AsRawFd as _, RawFd};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use cuda_emulator::sync::Mutex;

use super::client::{Action, Conversation};
use super::network::{Event, Network, Output};
use super::peers::{Peer, ProcessId};
use super::place::{Place, host, timestamp};
use super::query::{Answering, Progress, Query};
use super::socket::{Stream, accept, listen_for_clients, say};
use super::wire::{Datagram, LARGEST_DATAGRAM};
use super::{json, report, text};
use crate::nccl::communicator::process;
use crate::nccl::environment;
use crate::options::options;

/// The most clients, and the most queries of other processes, at a time.
const MOST_CLIENTS: usize = 64;
const MOST_QUERIES: usize = 1024;
/// The most bytes that wait for a client.
const MOST_OUTPUT: usize = 64 << 20;
/// The longest sleep of the thread.
const LONGEST_SLEEP: Duration = Duration::from_secs(3600);

/// Processes that the thread will add.
static NEW: Mutex<Vec<Peer>> = Mutex::new(Vec::new());
/// The thread, if it could be started: its address, and the socket that wakes it.
static SERVICE: OnceLock<Option<(Place, Arc<UdpSocket>)>> = OnceLock::new();

/// Returns the address of this process's thread. Starts the thread once.
pub(super) fn place() -> Option<Place> {
    let service = SERVICE.get_or_init(|| {
        let started = start();
        if let Err(error) = &started {
            say(&format!("continues without its thread: {error}"));
        }
        started.ok()
    });
    service.as_ref().map(|(place, _)| *place)
}

/// Adds processes to the thread's list.
pub(super) fn add(peers: impl Iterator<Item = Peer>) {
    let Some(Some((place, wake))) = SERVICE.get() else {
        return;
    };
    NEW.lock().extend(peers);
    // An empty datagram wakes the thread. If it is lost, the thread wakes by itself a little later.
    let address = Ipv4Addr::from_bits(place.address);
    let _ = wake.send_to(&[], (address, place.gossip));
}

fn start() -> std::io::Result<(Place, Arc<UdpSocket>)> {
    let address = host();
    let gossip = Arc::new(UdpSocket::bind((address, 0))?);
    let queries = TcpListener::bind((address, 0))?;
    gossip.set_nonblocking(true)?;
    queries.set_nonblocking(true)?;
    let place = Place {
        address: address.to_bits(),
        gossip: gossip.local_addr()?.port(),
        query: queries.local_addr()?.port(),
    };
    let wake = Arc::clone(&gossip);
    let at = environment::text("NCCL_RAS_ADDR").filter(|at| !at.is_empty());
    let clients = listen_for_clients(at.as_deref().unwrap_or("localhost:28028"));
    let factor = environment::integer("NCCL_RAS_TIMEOUT_FACTOR").map_or(1, |factor| factor.max(1));
    let second = options().ras_second;
    let service = Service {
        own: process(),
        second,
        factor: factor.unsigned_abs(),
        network: Network::new(process(), second * factor.unsigned_abs()),
        gossip,
        query_listener: queries,
        client_listener: clients,
        clients: Vec::new(),
        next_client: 0,
        queries: Vec::new(),
        answering: Vec::new(),
    };
    thread::Builder::new()
        .name("nccl-ras".to_owned())
        .spawn(move || service.run())?;
    Ok((place, wake))
}

/// A client.
struct Client {
    id: u64,
    stream: Stream,
    conversation: Conversation,
    /// Whether the connection ends once all is sent.
    is_closing: bool,
    /// Whether to drop the connection without waiting for its pending output.
    is_gone: bool,
}

struct Service {
    own: ProcessId,
    /// The length of a second for clients, and the factor by which the network's second is longer.
    second: Duration,
    factor: u32,
    network: Network,
    gossip: Arc<UdpSocket>,
    query_listener: TcpListener,
    client_listener: Option<TcpListener>,
    clients: Vec<Client>,
    next_client: u64,
    queries: Vec<Query>,
    answering: Vec<Answering>,
}

impl Service {
    fn run(mut self) {
        loop {
            self.sleep();
            let now = Instant::now();
            let new = std::mem::take(&mut *NEW.lock());
            if !new.is_empty() {
                self.network.add(now, new);
            }
            self.receive(now);
            self.network.tick(now);
            self.accept(now);
            self.serve_clients();
            self.answer(now);
            self.gather(now);
            self.carry_out();
            for client in &mut self.clients {
                client.is_gone |= client.stream.flush().is_err();
            }
            self.clients
                .retain(|client| !client.is_gone && !client.is_over());
            let clients = &self.clients;
            self.queries
                .retain(|query| clients.iter().any(|client| client.id == query.client));
        }
    }

    /// Sleeps until an event arrives or a timeout is due.
    fn sleep(&self) {
        let now = Instant::now();
        let deadlines = self.queries.iter().map(Query::deadline);
        let deadlines = deadlines.chain(self.answering.iter().map(Answering::deadline));
        let next = deadlines.chain(self.network.next_timeout(now)).min();
        let limit = next.map_or(LONGEST_SLEEP, |next| next.saturating_duration_since(now));
        let mut fds: Vec<libc::pollfd> = Vec::new();
        let mut wait_for = |fd: RawFd, events: libc::c_short| {
            fds.push(libc::pollfd {
                fd,
                events,
                revents: 0,
            });
        };
        let both = |has_output: bool| match has_output {
            true => libc::POLLIN | libc::POLLOUT,
            false => libc::POLLIN,
        };
        wait_for(self.gossip.as_raw_fd(), libc::POLLIN);
        if self.answering.len() < MOST_QUERIES {
            wait_for(self.query_listener.as_raw_fd(), libc::POLLIN);
        }
        if let Some(listener) = &self.client_listener
            && self.clients.len() < MOST_CLIENTS
        {
            wait_for(listener.as_raw_fd(), libc::POLLIN);
        }
        for client in &self.clients {
            let has_output = client.stream.waiting() > 0;
            match client.conversation.is_over {
                false => wait_for(client.stream.fd(), both(has_output)),
                true if has_output => wait_for(client.stream.fd(), libc::POLLOUT),
                // A client that disconnects would wake the thread again and again.
                true => {}
            }
        }
        let asked = self.queries.iter().flat_map(Query::fds);
        for (fd, has_output) in asked.chain(self.answering.iter().map(Answering::fd)) {
            wait_for(fd, both(has_output));
        }
        // Rounded up: a deadline has passed afterwards.
        let millis = limit.min(LONGEST_SLEEP).as_millis() as libc::c_int + 1;
        // SAFETY: the descriptors are open, and the array is as long as it says.
        let ready = unsafe { libc::poll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, millis) };
        if ready < 0 && std::io::Error::last_os_error().kind() != ErrorKind::Interrupted {
            // Out of memory: no reason to spin.
            thread::sleep(Duration::from_millis(100));
        }
    }

    fn receive(&mut self, now: Instant) {
        let mut bytes = vec![0; LARGEST_DATAGRAM];
        // Limits the number of datagrams, so that a flood does not block other work.
        for _ in 0..4096 {
            match self.gossip.recv_from(&mut bytes) {
                Ok((size, _)) => {
                    if let Some(datagram) = Datagram::decode(&bytes[..size]) {
                        self.network.handle(now, datagram);
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                // A datagram to a process that is gone.
                Err(_) => {}
            }
        }
    }

    fn accept(&mut self, now: Instant) {
        let limit = now + self.second * self.factor * 20;
        while self.answering.len() < MOST_QUERIES
            && let Some(stream) = accept(&self.query_listener)
        {
            self.answering.push(Answering::new(stream, limit));
        }
        while self.clients.len() < MOST_CLIENTS
            && let Some(stream) = self.client_listener.as_ref().and_then(accept)
        {
            self.next_client += 1;
            self.clients.push(Client {
                id: self.next_client,
                stream,
                conversation: Conversation::new(),
                is_closing: false,
                is_gone: false,
            });
        }
    }

    fn serve_clients(&mut self) {
        let listening = self
            .clients
            .iter_mut()
            .filter(|client| !client.conversation.is_over);
        for client in listening {
            let Ok(Some(bytes)) = client.stream.read() else {
                client.is_gone = true;
                continue;
            };
            let actions = client.conversation.take(&bytes);
            for action in actions {
                match action {
                    Action::Reply(text) => client.say(&text),
                    Action::Close => client.is_gone = true,
                    Action::Status(format, seconds) => {
                        if !format.is_json {
                            client.say(&text::opening(self.network.peers()));
                        }
                        let timeout = match seconds {
                            None => self.second * self.factor * 5,
                            // Without a limit NCCL waits until it considers the process dead.
                            Some(0) => self.second * self.factor * 60,
                            Some(seconds) => self.second * seconds.min(3600),
                        };
                        let (own, peers) = (report::own(self.own), self.network.responsive());
                        self.queries
                            .push(Query::new(client.id, format, own, peers, timeout));
                    }
                }
            }
        }
    }

    fn answer(&mut self, now: Instant) {
        let own = self.own;
        self.answering
            .retain_mut(|one| one.advance(now, || report::own(own)) == Progress::Open);
    }

    fn gather(&mut self, now: Instant) {
        let (over, going): (Vec<_>, Vec<_>) = std::mem::take(&mut self.queries)
            .into_iter()
            .map(|mut query| {
                let (is_over, late) = query.advance(now);
                for process in late {
                    let details = "peer not answering a query";
                    self.network.suspect(process, details);
                }
                (query, is_over)
            })
            .partition(|(_, is_over)| *is_over);
        self.queries = going.into_iter().map(|(query, _)| query).collect();
        for (query, _) in over {
            let (id, format) = (query.client, query.format);
            let gathered = query.finish(self.network.peers().clone());
            let answer = match format.is_json {
                true => json::answer(&gathered),
                false => text::answer(&gathered, format.is_verbose),
            };
            if let Some(client) = self.clients.iter_mut().find(|client| client.id == id) {
                client.say(&answer);
                client.is_closing = true;
            }
        }
    }

    fn carry_out(&mut self) {
        while let Some(output) = self.network.poll() {
            match output {
                Output::Send(to, bytes) => {
                    // A lost datagram is sent again, or the silence is detected.
                    let _ = self.gossip.send_to(&bytes, to);
                }
                Output::Event(event) => self.tell_of(&event),
            }
        }
    }

    fn tell_of(&mut self, event: &Event) {
        let Some(peer) = self.network.peers().all.get(&event.process) else {
            return;
        };
        let (name, is_lifecycle) = (event.kind.name(), event.kind.is_lifecycle());
        say(&format!("{name}: {peer} {}", event.details));
        for client in &mut self.clients {
            let wanted = client.conversation.monitor;
            if !(is_lifecycle && wanted.lifecycle || !is_lifecycle && wanted.trace) {
                continue;
            }
            let group = if is_lifecycle { "LIFECYCLE" } else { "TRACE" };
            let text = match client.conversation.is_json() {
                true => json::event(group, name, peer, &event.details),
                false => format!("[{}] {name}: {peer} {}\n", timestamp(), event.details),
            };
            client.say(&text);
        }
    }
}

impl Client {
    /// Sends a text. Drops a client that does not read.
    fn say(&mut self, text: &str) {
        self.is_gone |= !self.stream.queue(text.as_bytes(), MOST_OUTPUT);
    }

    fn is_over(&self) -> bool {
        self.is_closing && self.stream.waiting() == 0
    }
}
