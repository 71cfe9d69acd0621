//! The listening sockets of a process of a job. Connections whose other end proves that it belongs to the job go to its driver,
//! behind a [`Gate`].
//!
//! A guest is a connection whose peer has not proved that yet. It has [`PATIENCE`] to do so and the memory of a greeting. The
//! number of guests is bounded: beyond it, the oldest is closed. Data of a guest reaches a rank only as a remark in an error.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::SocketFlags;

use super::guest::Guest;
use super::guests::{Gate, Guests};
use crate::address::Address;
use crate::admission::PATIENCE;
use crate::connection::Connection;
use crate::error::{Error, Result};
use crate::greeting::Plain;
use crate::job::Job;
use crate::place::{self, Listener};
use crate::reactor::{EventFlags, Reactor, Source};
use crate::sync::Mutex;

/// How long no connection is accepted when the system has no room for one.
const PAUSE: Duration = Duration::from_millis(100);

pub(super) struct Acceptor {
    this: Weak<Self>,
    at: String,
    /// The addresses at which new processes look for the coordinator.
    places: Vec<Address>,
    has_secret: bool,
    translated: bool,
    listeners: Mutex<Vec<(Listener, u64)>>,
    closed: AtomicBool,
    guests: Arc<Guests>,
    /// Whether accepting is paused.
    paused: AtomicBool,
}

impl Acceptor {
    pub(super) fn open(
        gate: Weak<dyn Gate>,
        job: &Job,
        listener: Listener,
        places: Vec<Address>,
        size: usize,
    ) -> Result<Arc<Self>> {
        let this = Arc::new_cyclic(|this| Self {
            this: Weak::clone(this),
            at: listener.at.clone(),
            places,
            has_secret: job.secret.is_some(),
            translated: job.translated,
            listeners: Mutex::default(),
            closed: AtomicBool::new(false),
            guests: Guests::new(gate, 2 * size + 64),
            paused: AtomicBool::new(false),
        });
        this.listen(listener, &mut this.listeners.lock())?;
        Ok(this)
    }

    fn listen(&self, listener: Listener, listeners: &mut Vec<(Listener, u64)>) -> Result<()> {
        let failed = |error| Error::io(format!("listening at {}", self.at))(error);
        let reactor = Reactor::get().map_err(failed)?;
        let Some(this) = self.this.upgrade() else {
            return Ok(());
        };
        let token = reactor.add(&listener, EventFlags::IN, this as Arc<dyn Source>);
        let token = token.map_err(failed)?;
        // A waiting connection is not missed: readiness is reported repeatedly.
        listeners.push((listener, token));
        Ok(())
    }

    pub(super) fn close(&self) {
        self.closed.store(true, Ordering::Release);
        let listeners = std::mem::take(&mut *self.listeners.lock());
        if let Ok(reactor) = Reactor::get() {
            for (listener, token) in &listeners {
                reactor.remove(listener, *token);
            }
        }
        self.guests.close_all();
    }

    fn accept(&self) {
        let listeners = self.listeners.lock();
        for (listener, _) in &*listeners {
            // Bounded, because the reactor has other sources, too.
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

    /// Pauses accepting when there are no descriptors or memory, instead of retrying all the time.
    fn pause(&self, listeners: &[(Listener, u64)], error: Errno) {
        if let Ok(reactor) = Reactor::get() {
            let error = io::Error::from(error);
            tracing::warn!(name: "nccl.rendezvous.trouble", target: "nccl", what = "accept", why = %error, "the rendezvous cannot accept a connection");
            self.paused.store(true, Ordering::Release);
            for (listener, token) in listeners {
                reactor.modify(listener, *token, EventFlags::empty());
            }
            let this = Weak::clone(&self.this) as Weak<dyn Source>;
            reactor.wake_at(Instant::now() + PAUSE, this);
        }
    }

    fn receive(&self, socket: OwnedFd, listener: &Listener) {
        if self.closed.load(Ordering::Acquire) {
            return;
        }
        let from = place::describe_peer(&socket);
        // The address for which a greeting has to be meant.
        let at = listener.end_of(&socket).map_err(|error| error.to_string());
        let (at, stranger) = match place::admit(&socket).and(at) {
            Ok(at) => (Some(at).filter(|_| !self.translated), None),
            Err(why) => (None, Some(why)),
        };
        let plain = Plain {
            has_secret: self.has_secret,
            dialled: at,
        };
        let connection = Arc::new(Connection::new(socket));
        let number = self.guests.number();
        let guests = Arc::downgrade(&self.guests);
        let guest = Guest::new(guests, number, from, plain, connection);
        if let Some(stranger) = stranger {
            return guest.refuse(&self.guests, &stranger.into());
        }
        self.guests.keep(number, &guest.connection, &guest.from);
        if let Err(error) = guest.start(PATIENCE) {
            self.guests.forget(number);
            self.guests.note(&guest.from, &error.to_string());
        }
    }

    /// Listens also at the free addresses of this host where new processes look for the coordinator, because this process is the
    /// coordinator now. An address that is still in use is tried again for [`INSISTENCE`], on a thread of its own.
    pub(super) fn take_places(&self) {
        let left = self.take_free_places();
        if left.is_empty() {
            return;
        }
        let this = Weak::clone(&self.this);
        let spawned = std::thread::Builder::new()
            .name(String::from("nccl-places"))
            .spawn(move || insist(&this));
        if let Err(error) = spawned {
            untaken(&left, &error.to_string());
        }
    }

    fn take_free_places(&self) -> Vec<(Address, Error)> {
        let mut left = Vec::new();
        for place in &self.places {
            let mut listeners = self.listeners.lock();
            let is_held = listeners.iter().any(|(own, _)| own.is_at(place));
            if is_held || self.closed.load(Ordering::Acquire) {
                continue;
            }
            match listeners.first_mut().map(|(own, _)| own.publish(place)) {
                Some(Ok(true)) => continue,
                Some(Err(error)) => {
                    left.push((place.clone(), error));
                    continue;
                }
                Some(Ok(false)) | None => {}
            }
            if !place.is_here() {
                continue;
            }
            drop(listeners);
            let taken = match place::listen(place) {
                Ok(listener) => listener,
                Err(error) => {
                    left.push((place.clone(), error));
                    continue;
                }
            };
            let at = taken.at.clone();
            match self.listen(taken, &mut self.listeners.lock()) {
                Ok(()) => {
                    tracing::info!(name: "nccl.rendezvous.listening", target: "nccl", at, "a coordinator that is gone was to be found there, and this process is now");
                }
                Err(error) => left.push((place.clone(), error)),
            }
        }
        left
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

/// How long an address in use is tried again: a rank that is gone may have left a process running, say.
const INSISTENCE: Duration = Duration::from_secs(30);

fn insist(acceptor: &Weak<Acceptor>) {
    let until = Instant::now() + INSISTENCE;
    let mut pause = Duration::from_millis(10);
    loop {
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(500));
        let Some(acceptor) = acceptor.upgrade() else {
            return;
        };
        if acceptor.closed.load(Ordering::Acquire) {
            return;
        }
        let left = acceptor.take_free_places();
        if left.is_empty() {
            return;
        }
        if Instant::now() >= until {
            return untaken(&left, "it is still taken");
        }
    }
}

fn untaken(left: &[(Address, Error)], why: &str) {
    for (place, error) in left {
        tracing::warn!(name: "nccl.rendezvous.trouble", target: "nccl", what = "place", %place, %error, why, "new processes cannot come in by this address");
    }
}
