//! The coordinator's door: lets ranks in, turns others away, and carries frames between the ranks and
//! the [`Hub`].
//!
//! Somebody who has not proved who it is (a guest) has [`PATIENCE`] to do so, a greeting's worth of
//! memory, and a place among a bounded number of guests: when there are too many, the oldest goes, and
//! a rank comes again. What a guest sends is never shown to a rank but as a remark.

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::SocketFlags;

use super::attached::{Attached, host};
use super::connection::Connection;
use super::frame::{Decoder, GREETING, Outgoing};
use super::greeting::Plain;
use super::hub::{Hub, cut};
use super::incoming::Answer;
use super::message::Incomplete;
use super::peer::{Peer, Stage, Talk};
use super::place::{self, Address, Listener};
use super::reactor::{EventFlags, Reactor, Source};
use super::server::Job;
use crate::departure::ProcessEnd;
use crate::departure::Reason;
use crate::error::{Error, Result};
use crate::sync::Mutex;

/// What to do when somebody tells how the coordinator's process ended.
pub(super) type OnWord = Box<dyn Fn(&ProcessEnd) + Send + Sync>;

/// How long a guest may take to prove who it is.
pub(super) const PATIENCE: Duration = Duration::from_secs(5);

/// How long no connection is accepted when the system has no room for one.
const PAUSE: Duration = Duration::from_millis(100);

pub(super) struct Door {
    this: Weak<Self>,
    /// Whose door it is.
    rank: usize,
    at: String,
    pub(super) hub: Arc<Hub>,
    pub(super) job: Job,
    on_word: Mutex<Option<Arc<OnWord>>>,
    /// With what the reactor calls them; gone as soon as the server is, though the reactor may still have a hand
    /// on the door.
    listeners: Mutex<Vec<(Listener, u64)>>,
    /// Where those look for the coordinator who are new.
    places: Vec<Address>,
    /// The next epoch has the listeners.
    handed_over: AtomicBool,
    pub(super) state: Mutex<State>,
    /// Under which this rank's communicators record what they do; there once its line is.
    attached: OnceLock<Arc<dyn Attached>>,
    /// Recordings that are being written for somebody.
    recording: AtomicUsize,
}

/// The longest recording that is sent.
pub(super) const LARGEST_ANSWER: usize = 8 << 20;

/// How many connections were turned away by all doors of this process.
static STRANGERS: AtomicU64 = AtomicU64::new(0);

/// How many connections were turned away by all doors of this process.
pub fn strangers() -> u64 {
    STRANGERS.load(Ordering::Relaxed)
}

/// A connection is turned away for the `count`-th time; one line for each of the first, then fewer: a stranger
/// cannot fill a disk.
pub(super) fn stranger(from: &str, why: &str, count: u64) {
    STRANGERS.fetch_add(1, Ordering::Relaxed);
    if count <= 16 || count.is_power_of_two() {
        tracing::warn!(
            name: "nccl.stranger",
            target: "nccl",
            from,
            why,
            count,
            "the rendezvous turned somebody away"
        );
    }
}

/// How many recordings a process writes at once; whoever asks besides comes again.
const RECORDINGS: usize = 4;

#[derive(Default)]
pub(super) struct State {
    next: u64,
    /// Everybody who is connected, in the order in which they came.
    pub(super) peers: BTreeMap<u64, Arc<Peer>>,
    pub(super) guests: BTreeMap<u64, Arc<Peer>>,
    scheduled: Option<Instant>,
    paused: bool,
    turned_away: u64,
    pub(super) closed: bool,
}

impl Door {
    /// Lets in who comes to `listeners`, and takes none of `places` yet.
    pub(super) fn open(
        listeners: Vec<Listener>,
        rank: usize,
        hub: Arc<Hub>,
        job: Job,
        places: Vec<Address>,
        on_word: Option<OnWord>,
    ) -> Result<Arc<Self>> {
        let at = listeners
            .first()
            .map_or_else(String::new, |listener| listener.at.clone());
        let door = Arc::new_cyclic(|this| Self {
            this: Weak::clone(this),
            rank,
            at,
            hub,
            job,
            on_word: Mutex::new(on_word.map(Arc::new)),
            listeners: Mutex::default(),
            places,
            handed_over: AtomicBool::new(false),
            state: Mutex::default(),
            attached: OnceLock::new(),
            recording: AtomicUsize::new(0),
        });
        door.take_back(listeners)?;
        Ok(door)
    }

    /// What to do from now on when somebody tells how the coordinator's process ended.
    pub(super) fn on_word(&self, on_word: OnWord) {
        *self.on_word.lock() = Some(Arc::new(on_word));
    }

    /// Where it is.
    pub(super) fn at(&self) -> &str {
        &self.at
    }

    /// Whose recordings it gives out.
    pub(super) fn attach(&self, attached: &Arc<dyn Attached>) {
        let _ = self.attached.set(Arc::clone(attached));
    }

    pub(super) fn is_closed(&self) -> bool {
        self.state.lock().closed
    }

    /// Whether somebody waits for an answer, or has not taken one.
    /// Bytes that wait to be written to those who have come in.
    pub(super) fn backlog(&self) -> usize {
        let state = self.state.lock();
        let peers = state.peers.values();
        peers.map(|peer| peer.connection.backlog()).sum()
    }

    /// Lets in who comes.
    fn listen(
        self: &Arc<Self>,
        listener: Listener,
        listeners: &mut Vec<(Listener, u64)>,
    ) -> Result<()> {
        let failed = |error| Error::io(format!("listening at {}", self.at))(error);
        let reactor = Reactor::get().map_err(failed)?;
        let source = Arc::clone(self) as Arc<dyn Source>;
        let token = reactor.add(&listener, EventFlags::IN, source);
        let token = token.map_err(failed)?;
        // Whoever came already still waits: readiness is not told only once.
        listeners.push((listener, token));
        Ok(())
    }

    /// Listens there: at first, or again after it was handed over in vain.
    pub(super) fn take_back(self: &Arc<Self>, listeners: Vec<Listener>) -> Result<()> {
        let mut own = self.listeners.lock();
        self.handed_over.store(false, Ordering::Release);
        for listener in listeners {
            self.listen(listener, &mut own)?;
        }
        Ok(())
    }

    pub(super) fn hand_over(&self) -> Vec<Listener> {
        let mut listeners = self.listeners.lock();
        self.handed_over.store(true, Ordering::Release);
        let taken = std::mem::take(&mut *listeners).into_iter();
        taken
            .map(|(listener, token)| {
                if let Ok(reactor) = Reactor::get() {
                    reactor.remove(&listener, token);
                }
                listener
            })
            .collect()
    }

    /// Lets go of the places that were taken.
    pub(super) fn leave_places(&self) {
        let mut listeners = self.listeners.lock();
        let is_place = |listener: &Listener| self.places.iter().any(|place| listener.is_at(place));
        let (left, kept) = std::mem::take(&mut *listeners)
            .into_iter()
            .partition::<Vec<_>, _>(|(listener, _)| is_place(listener));
        *listeners = kept;
        for (listener, token) in left {
            if let Ok(reactor) = Reactor::get() {
                reactor.remove(&listener, token);
            }
        }
    }

    /// Whether the places are another door's by now.
    pub(super) fn has_no_places(&self) -> bool {
        self.handed_over.load(Ordering::Acquire) || self.hub.is_past()
    }

    /// Takes the places that can be had; those that cannot yet, and why.
    pub(super) fn take_places(self: &Arc<Self>) -> Vec<(Address, Error)> {
        let mut left = Vec::new();
        for place in &self.places {
            {
                let mut listeners = self.listeners.lock();
                let is_held = listeners.iter().any(|(own, _)| own.is_at(place));
                if is_held || self.has_no_places() {
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
            }
            if !place.is_here() {
                continue;
            }
            let taken = match place::listen(place) {
                Ok(listener) => listener,
                Err(error) => {
                    left.push((place.clone(), error));
                    continue;
                }
            };
            let at = taken.at.clone();
            let mut listeners = self.listeners.lock();
            // Not after the next epoch has taken what there is, or the end.
            if self.has_no_places() {
                continue;
            }
            match self.listen(taken, &mut listeners) {
                Ok(()) => {
                    tracing::info!(name: "nccl.rendezvous.listening", target: "nccl", at, rank = self.rank, "a coordinator that is gone was to be found there, and this rank is now")
                }
                Err(error) => left.push((place.clone(), error)),
            }
        }
        left
    }

    pub(super) fn close(&self) {
        let mut state = self.state.lock();
        state.closed = true;
        let peers = std::mem::take(&mut state.peers);
        state.guests.clear();
        drop(state);
        drop(self.hand_over());
        for peer in peers.into_values() {
            peer.connection.forget();
            peer.connection.shut();
        }
    }

    /// Answers with what this rank's communicators did last. Copying and writing takes milliseconds, in which
    /// the reading thread would be missing elsewhere.
    pub(super) fn record_for(&self, connection: &Arc<Connection>, id: u64, bytes: usize) {
        let refuse = |reason: &str| {
            let why = Incomplete::GivenUp {
                rank: self.rank,
                reason: Reason::Said(reason.to_owned()),
            };
            let answer = Answer::Incomplete(Arc::new(why));
            connection.enqueue(Outgoing::new(id, answer.encode()));
            connection.flush_quietly();
        };
        let Some(door) = self.this.upgrade() else {
            return;
        };
        if self.recording.fetch_add(1, Ordering::AcqRel) >= RECORDINGS {
            self.recording.fetch_sub(1, Ordering::AcqRel);
            return refuse("others ask already");
        }
        let to = Arc::clone(connection);
        let write = move || {
            let most = bytes.min(LARGEST_ANSWER);
            let recording = match door.attached.get() {
                Some(attached) => attached.recording(most),
                None => host().recording(most),
            };
            let answer = Answer::Value(recording.into()).encode();
            door.recording.fetch_sub(1, Ordering::AcqRel);
            to.enqueue(Outgoing::new(id, answer));
            to.flush_quietly();
        };
        let spawned = std::thread::Builder::new()
            .name(String::from("nccl-recording"))
            .spawn(write);
        if spawned.is_err() {
            self.recording.fetch_sub(1, Ordering::AcqRel);
            refuse("there is no thread for it");
        }
    }

    /// Whether this is the coordinator's own.
    pub(super) fn coordinates(&self) -> bool {
        self.hub.coordinates()
    }

    pub(super) fn coordinator_ended(&self, end: &ProcessEnd) {
        let on_word = self.on_word.lock().clone();
        if let Some(on_word) = on_word {
            on_word(end);
        }
    }

    /// Guests at once: all ranks may come together, and strangers with them.
    fn most_guests(&self) -> usize {
        2 * self.hub.size() + 64
    }

    fn accept(&self) {
        let listeners = self.listeners.lock();
        for (listener, _) in &*listeners {
            // Not for ever: others wait for the reactor, too.
            for _ in 0..64 {
                let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
                match rustix::net::accept_with(listener, flags) {
                    Ok(socket) => self.welcome_guest(socket, listener),
                    Err(Errno::AGAIN) => break,
                    Err(Errno::INTR | Errno::CONNABORTED) => {}
                    Err(error) => return self.pause(&listeners, error),
                }
            }
        }
    }

    /// No descriptors or memory: looks again later, instead of all the time.
    fn pause(&self, listeners: &[(Listener, u64)], error: Errno) {
        let mut state = self.state.lock();
        if let Ok(reactor) = Reactor::get() {
            let error = io::Error::from(error);
            tracing::warn!(name: "nccl.rendezvous.trouble", target: "nccl", what = "accept", why = %error, "the rendezvous cannot accept a connection");
            state.paused = true;
            for (listener, token) in listeners {
                reactor.modify(listener, *token, EventFlags::empty());
            }
            let this = Weak::clone(&self.this) as Weak<dyn Source>;
            reactor.wake_at(Instant::now() + PAUSE, this);
        }
    }

    fn welcome_guest(&self, socket: std::os::fd::OwnedFd, listener: &Listener) {
        let from = place::describe_peer(&socket);
        // As a greeting has to be meant.
        let at = listener.end_of(&socket).map_err(|error| error.to_string());
        let admitted = place::admit(&socket).and(at);
        let (at, stranger) = match admitted {
            Ok(at) => (Some(at).filter(|_| !self.job.translated), None),
            Err(why) => (None, Some(why)),
        };
        let connection = Arc::new(Connection::new(socket));
        let mut state = self.state.lock();
        if state.closed {
            return;
        }
        let number = state.next;
        state.next += 1;
        let peer = Arc::new_cyclic(|this| Peer {
            this: Weak::clone(this),
            door: Weak::clone(&self.this),
            number,
            from,
            plain: Plain {
                has_secret: self.job.secret.is_some(),
                dialled: at,
            },
            connection,
            talk: Mutex::new(Talk {
                decoder: Decoder::new(GREETING),
                stage: Stage::Hello,
            }),
        });
        if let Some(stranger) = stranger {
            drop(state);
            return peer.turn_away(self, &mut peer.talk.lock(), &stranger.into());
        }
        state.guests.insert(number, Arc::clone(&peer));
        state.peers.insert(number, Arc::clone(&peer));
        let too_many = state.guests.len() > self.most_guests();
        let oldest = too_many.then(|| state.guests.pop_first()).flatten();
        drop(state);
        if let Some((_, oldest)) = oldest {
            oldest.close(self, Some("there were too many who had not greeted"));
        }
        let Ok(reactor) = Reactor::get() else { return };
        let events = EventFlags::IN | EventFlags::RDHUP;
        let source = Arc::clone(&peer) as Arc<dyn Source>;
        match reactor.add(peer.connection.fd(), events, source) {
            Ok(token) => {
                peer.connection.set_token(token);
                let peer = Arc::downgrade(&peer) as Weak<dyn Source>;
                reactor.wake_at(Instant::now() + PATIENCE, peer);
            }
            Err(error) => peer.close(self, Some(&error.to_string())),
        }
    }

    /// Notes that somebody was turned away.
    pub(super) fn note(&self, from: &str, why: &str) {
        let count = {
            let mut state = self.state.lock();
            state.turned_away += 1;
            state.turned_away
        };
        stranger(from, why, count);
        let mut text = format!("{from} was turned away: {why}");
        cut(&mut text, 300);
        self.hub.remark(text);
    }

    /// Wakes up when the hub needs it.
    pub(super) fn schedule(&self) {
        let Some(at) = self.hub.next_deadline() else {
            return;
        };
        let mut state = self.state.lock();
        if state.scheduled.is_some_and(|scheduled| scheduled <= at) {
            return;
        }
        if let Ok(reactor) = Reactor::get() {
            state.scheduled = Some(at);
            reactor.wake_at(at, Weak::clone(&self.this) as Weak<dyn Source>);
        }
    }

    /// Whose door it is.
    pub(super) fn rank(&self) -> usize {
        self.rank
    }
}

impl Source for Door {
    fn ready(self: Arc<Self>, _: EventFlags) {
        self.accept();
    }

    fn due(self: Arc<Self>, now: Instant) {
        {
            let listeners = self.listeners.lock();
            let mut state = self.state.lock();
            if state.scheduled.is_some_and(|scheduled| scheduled <= now) {
                state.scheduled = None;
            }
            if let (true, Ok(reactor)) = (state.paused, Reactor::get()) {
                state.paused = false;
                for (listener, token) in &*listeners {
                    reactor.modify(listener, *token, EventFlags::IN);
                }
            }
        }
        self.hub.tick(now);
        self.schedule();
    }
}
