//! The listening sockets of a process of a job. A connection whose peer proves that it belongs to the job is passed to
//! the driver, which is behind an [`Admission`].
//!
//! An unauthenticated connection is one whose peer has not proved that yet. The peer has [`HANDSHAKE_TIMEOUT`] to do
//! so, and may use the memory of one handshake message. The number of such connections is limited: beyond it, the
//! oldest is closed. Data of such a connection reaches a rank only as a note in an error.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::SocketFlags;

use super::admission::Admission;
use super::inbound_connection::InboundConnection;
use super::inbound_connections::InboundConnections;
use crate::address::Address;
use crate::connection::Connection;
use crate::error::{Error, Result};
use crate::handshake::Preamble;
use crate::job::Job;
use crate::reactor::{EventFlags, Reactor, Source};
use crate::refusal::HANDSHAKE_TIMEOUT;
use crate::socket::{self, Listener};
use crate::sync::{Condvar, Mutex};
use crate::tcp;

/// How long accepting pauses when the system has no room for another connection.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

pub(super) struct Acceptor {
    this: Weak<Self>,
    at: String,
    /// The addresses at which new processes look for the coordinator.
    addresses: Vec<Address>,
    has_secret: bool,
    translated: bool,
    listeners: Mutex<Vec<(Listener, u64)>>,
    /// How many listeners are being dropped. Locked after `listeners`.
    closing: Mutex<usize>,
    /// Signalled when listeners have been dropped.
    dropped: Condvar,
    closed: AtomicBool,
    inbound: Arc<InboundConnections>,
    /// Whether accepting is paused.
    paused: AtomicBool,
}

impl Acceptor {
    pub(super) fn open(
        admission: Weak<dyn Admission>,
        job: &Job,
        listener: Listener,
        addresses: Vec<Address>,
        size: usize,
    ) -> Result<Arc<Self>> {
        let this = Arc::new_cyclic(|this| Self {
            this: Weak::clone(this),
            at: listener.at.clone(),
            addresses,
            has_secret: job.secret.is_some(),
            translated: job.translated,
            listeners: Mutex::default(),
            closing: Mutex::default(),
            dropped: Condvar::new(),
            closed: AtomicBool::new(false),
            inbound: InboundConnections::new(admission, 2 * size + 64),
            paused: AtomicBool::new(false),
        });
        this.listen(listener)?;
        Ok(this)
    }

    /// Accepts the connections of `listener` from now on. If this acceptor is closed, or another thread has added a listener
    /// for the same address, closes it and returns false.
    fn listen(&self, listener: Listener) -> Result<bool> {
        let mut listeners = self.listeners.lock();
        let is_held = listeners.iter().any(|(own, _)| own.is_like(&listener));
        // `close` sets this before it takes the listeners.
        if is_held || self.closed.load(Ordering::Acquire) {
            return Ok(false);
        }
        let failed = |error| Error::io(format!("listening at {}", self.at))(error);
        let reactor = Reactor::get().map_err(failed)?;
        let Some(this) = self.this.upgrade() else {
            return Ok(false);
        };
        let token = reactor.add(&listener, EventFlags::IN, this as Arc<dyn Source>);
        let token = token.map_err(failed)?;
        // A waiting connection is not missed: readiness is reported repeatedly.
        listeners.push((listener, token));
        Ok(true)
    }

    /// Stops listening. A published address is withdrawn on a separate thread, because that may block and this may be the
    /// reactor's thread; [`wait_until_closed`](Self::wait_until_closed) waits for it.
    pub(super) fn close(self: &Arc<Self>) {
        self.closed.store(true, Ordering::Release);
        let listeners = {
            let mut listeners = self.listeners.lock();
            // Counted under this lock: another thread that closes finds no listeners only when it can wait for these.
            *self.closing.lock() += listeners.len();
            std::mem::take(&mut *listeners)
        };
        if let Ok(reactor) = Reactor::get() {
            for (listener, token) in &listeners {
                reactor.remove(listener, *token);
            }
        }
        self.inbound.close_all();
        let listeners = listeners.into_iter().map(|(listener, _)| listener);
        let (published, others) = listeners.partition(Listener::is_published);
        let [published, others] = [published, others].map(|listeners| ClosingListeners {
            acceptor: Arc::clone(self),
            listeners,
        });
        drop(others);
        if !published.listeners.is_empty() {
            // Without a thread, they are dropped here: an address that stays published misleads the next job.
            let _ = std::thread::Builder::new()
                .name(String::from("nccl-listen"))
                .spawn(move || drop(published));
        }
    }

    /// Waits until all listeners that were closed have been dropped, or until the deadline.
    pub(super) fn wait_until_closed(&self, deadline: Instant) {
        let mut closing = self.closing.lock();
        while *closing > 0 && Instant::now() < deadline {
            self.dropped.wait_until(&mut closing, deadline);
        }
    }

    fn accept(&self) {
        let listeners = self.listeners.lock();
        for (listener, _) in &*listeners {
            // Bounded, because the reactor also serves other sources.
            for _ in 0..64 {
                let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
                match rustix::net::accept_with(listener, flags) {
                    Ok(socket) => self.receive(socket, listener),
                    Err(Errno::AGAIN) => break,
                    Err(Errno::INTR | Errno::CONNABORTED) => {}
                    Err(error) => return self.pause(&listeners, error),
                }
            }
        }
    }

    /// Pauses accepting when there are no descriptors or memory, instead of retrying continuously.
    fn pause(&self, listeners: &[(Listener, u64)], error: Errno) {
        if let Ok(reactor) = Reactor::get() {
            let error = io::Error::from(error);
            tracing::warn!(name: "nccl.rendezvous.trouble", target: "nccl", what = "accept", why = %error, "the rendezvous cannot accept a connection");
            self.paused.store(true, Ordering::Release);
            for (listener, token) in listeners {
                reactor.modify(listener, *token, EventFlags::empty());
            }
            let this = Weak::clone(&self.this) as Weak<dyn Source>;
            reactor.wake_at(Instant::now() + ACCEPT_PAUSE, this);
        }
    }

    fn receive(&self, socket: OwnedFd, listener: &Listener) {
        if self.closed.load(Ordering::Acquire) {
            return;
        }
        let from = socket::describe_peer(&socket);
        // The address for which a handshake message must be meant.
        let at = listener.end_of(&socket).map_err(|error| error.to_string());
        let (at, refusal) = match socket::admit(&socket).and(at) {
            Ok(at) => (Some(at).filter(|_| !self.translated), None),
            Err(why) => (None, Some(why)),
        };
        let preamble = Preamble {
            has_secret: self.has_secret,
            dialled: at,
        };
        let connection = Arc::new(Connection::new(socket));
        let number = self.inbound.next_number();
        let inbound = Arc::downgrade(&self.inbound);
        let inbound_connection =
            InboundConnection::new(inbound, number, from, preamble, connection);
        if let Some(refusal) = refusal {
            return inbound_connection.refuse(&self.inbound, &refusal.into());
        }
        self.inbound.add(
            number,
            &inbound_connection.connection,
            &inbound_connection.from,
        );
        if let Err(error) = inbound_connection.start(HANDSHAKE_TIMEOUT) {
            self.inbound.remove(number);
            self.inbound
                .log_refusal(&inbound_connection.from, &error.to_string());
        }
    }

    /// Also listens at the free addresses of this host at which new processes look for the coordinator, because this
    /// process is now the coordinator. This happens on a separate thread: names are looked up, and a discovery may wait
    /// for another host. An address that is still in use is retried for [`RETRY_LISTENING_FOR`].
    pub(super) fn listen_at_job_addresses(&self) {
        let this = Weak::clone(&self.this);
        let spawned = std::thread::Builder::new()
            .name(String::from("nccl-listen"))
            .spawn(move || listen_at_job_addresses(&this));
        if let Err(error) = spawned {
            tracing::warn!(name: "nccl.rendezvous.trouble", target: "nccl", what = "address", %error, "new processes cannot join at the address of the previous coordinator: no thread that listens there can be had");
        }
    }

    fn listen_at_free_addresses(&self) -> Vec<(Address, Error)> {
        let addresses = self.addresses.iter();
        let failed = addresses.filter_map(|address| {
            let listening = self.listen_at_job_address(address);
            listening.err().map(|error| (address.clone(), error))
        });
        failed.collect()
    }

    /// Listens at this address unless that is done already, or it belongs to another host.
    fn listen_at_job_address(&self, address: &Address) -> Result<()> {
        let listeners = self.listeners.lock();
        let is_held = listeners.iter().any(|(own, _)| own.is_at(address));
        if is_held || self.closed.load(Ordering::Acquire) {
            return Ok(());
        }
        let to_publish = listeners
            .first()
            .and_then(|(own, _)| own.to_publish(address));
        drop(listeners);
        if let Some((discovery, at)) = to_publish {
            tcp::publish(&discovery, at)?;
            match self.listeners.lock().first_mut() {
                Some((own, _)) => own.set_published(discovery),
                None => discovery.0.withdraw(at),
            }
            return Ok(());
        }
        if !address.is_here() {
            return Ok(());
        }
        let listening = socket::listen_and(address, |listener| {
            let at = listener.at.clone();
            self.listen(listener).map(|listens| listens.then_some(at))
        });
        if let Some(at) = listening?? {
            tracing::info!(name: "nccl.rendezvous.listening", target: "nccl", at, "now listening at the address of the previous coordinator");
        }
        Ok(())
    }
}

/// Listeners that an acceptor has given up, and that have not been dropped.
struct ClosingListeners {
    acceptor: Arc<Acceptor>,
    listeners: Vec<Listener>,
}

impl Drop for ClosingListeners {
    fn drop(&mut self) {
        let count = self.listeners.len();
        self.listeners.clear();
        *self.acceptor.closing.lock() -= count;
        self.acceptor.dropped.notify_all();
    }
}

impl Source for Acceptor {
    fn ready(self: Arc<Self>, _: EventFlags) {
        self.accept();
    }

    fn due(self: Arc<Self>, _: Instant) {
        if let (true, Ok(reactor)) = (self.paused.swap(false, Ordering::AcqRel), Reactor::get()) {
            for (listener, token) in &*self.listeners.lock() {
                reactor.modify(listener, *token, EventFlags::IN);
            }
        }
    }
}

/// How long an address in use is retried: for example, a rank that has ended may have left a process running.
const RETRY_LISTENING_FOR: Duration = Duration::from_secs(30);

fn listen_at_job_addresses(acceptor: &Weak<Acceptor>) {
    let until = Instant::now() + RETRY_LISTENING_FOR;
    let mut pause = Duration::from_millis(10);
    loop {
        let Some(acceptor) = acceptor.upgrade() else {
            return;
        };
        if acceptor.closed.load(Ordering::Acquire) {
            return;
        }
        let failed = acceptor.listen_at_free_addresses();
        if failed.is_empty() {
            return;
        }
        if Instant::now() >= until {
            return warn_not_listening(&failed);
        }
        drop(acceptor);
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(500));
    }
}

fn warn_not_listening(failed: &[(Address, Error)]) {
    for (address, error) in failed {
        tracing::warn!(name: "nccl.rendezvous.trouble", target: "nccl", what = "address", place = %address, %error, "new processes cannot join at this address");
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::node::Node;
    use crate::tcp::HostPorts;

    #[test]
    fn an_acceptor_keeps_no_second_listener_of_an_address_and_none_when_it_is_closed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let address = Address::Path(path.clone());
        let job = Job {
            name: String::from("closed"),
            generation: 0,
            secret: None,
            translated: false,
        };
        let first = socket::listen(&address).unwrap();
        let admission: Weak<Node> = Weak::new();
        let acceptor = Acceptor::open(admission, &job, first, Vec::new(), 1).unwrap();
        UnixStream::connect(&path).unwrap();

        // Two threads that find a free port for the same address.
        let range = || {
            HostPorts::parse("127.0.0.1:20000-60000")
                .map(Address::Tcp)
                .unwrap()
        };
        let listen = || socket::listen_and(&range(), |listener| acceptor.listen(listener));
        let added = [listen(), listen()].map(|added| added.unwrap().unwrap());
        assert_eq!(added, [true, false]);

        acceptor.close();
        UnixStream::connect(&path).unwrap_err();

        let late = socket::listen_and(&address, |listener| acceptor.listen(listener));
        assert!(!late.unwrap().unwrap());
        UnixStream::connect(&path).unwrap_err();
        socket::listen(&address).unwrap();
    }
}
