//! The coordinator's door: lets ranks in, turns others away, and carries frames between the ranks and
//! the [`Hub`].
//!
//! Somebody who has not proved who it is (a guest) has [`PATIENCE`] to do so, a greeting's worth of
//! memory, and a place among a bounded number of guests: when there are too many, the oldest goes, and
//! a rank comes again. What a guest sends is never shown to a rank but as a remark.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::SocketFlags;

use super::connection::Connection;
use super::frame::{Decoder, GREETING, Outgoing};
use super::greeting::{Hello, Role};
use super::hub::{Hub, cut};
use super::incoming::Answer;
use super::message::Incomplete;
use super::peer::{Peer, Stage, Talk};
use super::place::{self, Address, Listener};
use super::reactor::{EventFlags, Reactor, Source};
use super::recordings::LARGEST_ANSWER;
use super::secret::Secret;
use crate::communicator::lock;
use crate::error::{Error, Result};
use crate::events;
use crate::supervision::recorder::{self, Home};

/// How long a guest may take to prove who it is.
pub(super) const PATIENCE: Duration = Duration::from_secs(5);

/// How long no connection is accepted when the system has no room for one.
const PAUSE: Duration = Duration::from_millis(100);

pub(super) const OTHER_JOB: &str = "it belongs to job";

/// How the refusal of one begins that has come before this attempt is over.
pub(super) const LATER_EPOCH: &str = "it is already of epoch";

/// How the refusal of one begins that is to come again when the next epoch has begun.
pub(super) const GOES_ON: &str = "the world just goes on";

/// How the refusal of a rank begins that does not coordinate.
pub(super) const FOLLOWS: &str = "this is rank";

/// What all ranks of one launch have in common.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Job {
    pub(super) name: String,
    pub(super) epoch: u64,
    pub(super) secret: Option<Secret>,
}

/// What to do when somebody tells how the coordinator's process ended.
type OnWord = Box<dyn Fn(&str) + Send + Sync>;

/// Rank 0's side. Dropped, it lets what is answerable be answered, within bounds, and closes.
pub(super) struct Server {
    door: Arc<Door>,
}

pub(super) struct Door {
    this: Weak<Self>,
    /// Whose door it is.
    rank: usize,
    at: String,
    pub(super) hub: Arc<Hub>,
    pub(super) job: Job,
    on_word: Mutex<Option<Arc<OnWord>>>,
    /// Gone as soon as the server is, though the reactor may still have a hand on the door.
    listener: Mutex<Option<Listener>>,
    pub(super) state: Mutex<State>,
    /// Under which this rank's communicators record what they do; there once its line is.
    home: OnceLock<Arc<Home>>,
    /// Recordings that are being written for somebody.
    recording: AtomicUsize,
}

/// How many recordings a process writes at once; whoever asks besides comes again.
const RECORDINGS: usize = 4;

#[derive(Default)]
pub(super) struct State {
    token: Option<u64>,
    next: u64,
    /// Everybody who is connected, in the order in which they came.
    pub(super) peers: BTreeMap<u64, Arc<Peer>>,
    pub(super) guests: BTreeMap<u64, Arc<Peer>>,
    scheduled: Option<Instant>,
    paused: bool,
    turned_away: u64,
    pub(super) closed: bool,
}

impl Server {
    /// Rank 0's, which coordinates.
    pub(super) fn start(address: &Address, hub: Arc<Hub>, job: Job) -> Result<Self> {
        let listener = place::listen(address)?;
        if let Some(why) = place::unreachable(address, &listener) {
            hub.remark(why);
        }
        tracing::info!(name: "nccl.rendezvous.listening", target: "nccl", at = listener.at, "rank 0 listens");
        if let (Address::Tcp(_), None) = (address, &job.secret) {
            tracing::warn!(
                name: "nccl.rendezvous.open_door",
                target: "nccl",
                at = listener.at,
                "anybody who reaches this address may join the job: set NCCL_RUN_SECRET"
            );
        }
        Self::open(listener, 0, hub, job, None)
    }

    /// Rank 0's of the next epoch, at the same address.
    pub(super) fn of_next(listener: Listener, hub: Arc<Hub>, job: Job) -> Result<Self> {
        Self::open(listener, 0, hub, job, None)
    }

    /// The listener, for the next epoch: who is here stays here, who comes from now on comes there.
    pub(super) fn hand_over(&self) -> Option<Listener> {
        self.door.hand_over()
    }

    /// What was handed over comes back: there was no next epoch.
    pub(super) fn take_back(&self, listener: Listener) -> Result<()> {
        self.door.listen(listener)
    }

    /// Another rank's, whose `hub` is dormant: those who can prove that they belong to the job learn who
    /// coordinates, and an observer may say there that rank 0 is dead.
    pub(super) fn beside(
        listener: Listener,
        rank: usize,
        hub: Hub,
        job: Job,
        on_word: impl Fn(&str) + Send + Sync + 'static,
    ) -> Result<Self> {
        let hub = Arc::new(hub);
        Self::open(listener, rank, hub, job, Some(Box::new(on_word)))
    }

    /// Who wants to know from now on how the coordinator's process ended.
    pub(super) fn on_word(&self, on_word: impl Fn(&str) + Send + Sync + 'static) {
        *lock(&self.door.on_word) = Some(Arc::new(Box::new(on_word)));
    }

    /// Wakes up when the hub needs it.
    pub(super) fn schedule(&self) {
        self.door.schedule();
    }

    pub(super) fn hub(&self) -> &Arc<Hub> {
        &self.door.hub
    }

    /// Where it listens.
    pub(super) fn at(&self) -> &str {
        &self.door.at
    }

    /// As if this process died.
    /// Whose recordings this door gives out.
    pub(super) fn set_home(&self, home: &Arc<Home>) {
        let _ = self.door.home.set(Arc::clone(home));
    }

    pub(super) fn job(&self) -> &Job {
        &self.door.job
    }

    #[cfg(test)]
    pub(super) fn cut_for_a_test(&self) {
        self.door.close();
    }

    fn open(
        listener: Listener,
        rank: usize,
        hub: Arc<Hub>,
        job: Job,
        on_word: Option<OnWord>,
    ) -> Result<Self> {
        let at = listener.at.clone();
        let door = Arc::new_cyclic(|this| Door {
            this: Weak::clone(this),
            rank,
            at,
            hub,
            job,
            on_word: Mutex::new(on_word.map(Arc::new)),
            listener: Mutex::default(),
            state: Mutex::default(),
            home: OnceLock::new(),
            recording: AtomicUsize::new(0),
        });
        door.listen(listener)?;
        Ok(Self { door })
    }
}

impl Server {
    /// Lets what is answerable be answered, and closes.
    pub(super) fn finish(&self) {
        let deadline = Instant::now() + PATIENCE;
        while self.door.is_busy() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
        self.door.close();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.finish();
    }
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Server").finish_non_exhaustive()
    }
}

impl Door {
    /// Whether somebody waits for an answer, or has not taken one.
    fn is_busy(&self) -> bool {
        let state = lock(&self.state);
        self.hub.is_waited_for()
            || state
                .peers
                .values()
                .any(|peer| peer.connection.has_backlog())
    }

    /// Lets in who comes.
    fn listen(self: &Arc<Self>, listener: Listener) -> Result<()> {
        let failed = |error| Error::io(format!("listening at {}", self.at))(error);
        let reactor = Reactor::get().map_err(failed)?;
        let source = Arc::clone(self) as Arc<dyn Source>;
        let token = reactor.add(&listener, EventFlags::IN, source);
        lock(&self.state).token = Some(token.map_err(failed)?);
        // Whoever came already still waits: readiness is not told only once.
        *lock(&self.listener) = Some(listener);
        Ok(())
    }

    fn hand_over(&self) -> Option<Listener> {
        let listener = lock(&self.listener).take()?;
        let token = lock(&self.state).token.take();
        if let (Some(token), Ok(reactor)) = (token, Reactor::get()) {
            reactor.remove(&listener, token);
        }
        Some(listener)
    }

    fn close(&self) {
        let mut state = lock(&self.state);
        state.closed = true;
        let peers = std::mem::take(&mut state.peers);
        state.guests.clear();
        let token = state.token.take();
        drop(state);
        let listener = lock(&self.listener).take();
        if let (Some(listener), Some(token), Ok(reactor)) = (&listener, token, Reactor::get()) {
            reactor.remove(listener, token);
        }
        drop(listener);
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
                reason: reason.to_owned(),
            };
            let (kind, payload) = Answer::Incomplete(Arc::new(why)).encode();
            connection.enqueue(Outgoing::new(kind, id, payload));
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
            let mut snapshot = match door.home.get() {
                Some(home) => recorder::of_place(home.place()),
                None => recorder::snapshot(),
            };
            snapshot.limit_to(bytes.min(LARGEST_ANSWER));
            let json = snapshot.to_json().into_bytes();
            let (kind, payload) = Answer::Value(json.into()).encode();
            door.recording.fetch_sub(1, Ordering::AcqRel);
            to.enqueue(Outgoing::new(kind, id, payload));
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

    pub(super) fn coordinator_ended(&self, how: &str) {
        let on_word = lock(&self.on_word).clone();
        if let Some(on_word) = on_word {
            on_word(how);
        }
    }

    /// Guests at once: all ranks may come together, and strangers with them.
    fn most_guests(&self) -> usize {
        2 * self.hub.size() + 64
    }

    fn accept(&self) {
        let listener = lock(&self.listener);
        let Some(listener) = &*listener else { return };
        // Not for ever: others wait for the reactor, too.
        for _ in 0..64 {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            match rustix::net::accept_with(listener, flags) {
                Ok(socket) => self.welcome_guest(socket),
                Err(Errno::AGAIN) => return,
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(error) => return self.pause(listener, error),
            }
        }
    }

    /// No descriptors or memory: looks again later, instead of all the time.
    fn pause(&self, listener: &Listener, error: Errno) {
        let mut state = lock(&self.state);
        let Some(token) = state.token else { return };
        if let Ok(reactor) = Reactor::get() {
            let error = io::Error::from(error);
            tracing::warn!(name: "nccl.rendezvous.trouble", target: "nccl", what = "accept", why = %error, "the rendezvous cannot accept a connection");
            state.paused = true;
            reactor.modify(listener, token, EventFlags::empty());
            let this = Weak::clone(&self.this) as Weak<dyn Source>;
            reactor.wake_at(Instant::now() + PAUSE, this);
        }
    }

    fn welcome_guest(&self, socket: std::os::fd::OwnedFd) {
        let from = place::describe_peer(&socket);
        let stranger = place::admit(&socket).err();
        let connection = Arc::new(Connection::new(socket));
        let mut state = lock(&self.state);
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
            connection,
            talk: Mutex::new(Talk {
                decoder: Decoder::new(GREETING),
                stage: Stage::Hello,
            }),
        });
        if let Some(stranger) = stranger {
            drop(state);
            return peer.turn_away(self, &mut lock(&peer.talk), &stranger);
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
            let mut state = lock(&self.state);
            state.turned_away += 1;
            state.turned_away
        };
        events::stranger(from, why, count);
        let mut text = format!("{from} was turned away: {why}");
        cut(&mut text, 300);
        self.hub.remark(text);
    }

    /// Wakes up when the hub needs it.
    pub(super) fn schedule(&self) {
        let Some(at) = self.hub.next_deadline() else {
            return;
        };
        let mut state = lock(&self.state);
        if state.scheduled.is_some_and(|scheduled| scheduled <= at) {
            return;
        }
        if let Ok(reactor) = Reactor::get() {
            state.scheduled = Some(at);
            reactor.wake_at(at, Weak::clone(&self.this) as Weak<dyn Source>);
        }
    }

    /// Whether the one who said hello may be the rank that it says.
    pub(super) fn check(&self, hello: &Hello) -> Result<(), String> {
        let Hello {
            job,
            epoch,
            world_size,
            role,
            rank,
            ..
        } = hello;
        if *job != self.job.name {
            return Err(format!(
                "{OTHER_JOB} {job:?}, and rank 0 here to job {:?}: one of them is left over, or \
                 two jobs were given one address",
                self.job.name
            ));
        }
        if *role == Role::Newcomer {
            // Of whatever attempt it was started for.
            return match (self.rank, self.hub.next()) {
                (0, None) => Ok(()),
                (0, Some(_)) => Err(format!(
                    "{GOES_ON}, and this was the door of its last epoch"
                )),
                (rank, _) => Err(format!(
                    "this is rank {rank}, and rank 0 coordinates the job"
                )),
            };
        }
        if *epoch > self.job.epoch {
            return Err(format!(
                "{LATER_EPOCH} {epoch} of the job, and rank 0 still of epoch {}, which is to end",
                self.job.epoch
            ));
        }
        if *epoch != self.job.epoch {
            return Err(format!(
                "it is of epoch {epoch} of the job, and rank 0 of epoch {}: a process of another \
                 attempt is left over",
                self.job.epoch
            ));
        }
        if matches!(role, Role::Observer | Role::Follower) && self.coordinates() {
            let size = self.hub.size();
            return match [0, size].contains(world_size) {
                true => Ok(()),
                false => Err(format!(
                    "an observer expects {world_size} ranks, rank 0 expects {size}"
                )),
            };
        }
        if matches!(role, Role::Observer | Role::Asker) {
            return Ok(());
        }
        if !self.coordinates() {
            return Err(format!(
                "{FOLLOWS} {}, and rank {} coordinates the job",
                self.rank,
                self.hub.coordinator()
            ));
        }
        let size = self.hub.size();
        if *world_size != size {
            return Err(format!(
                "rank {rank} expects {world_size} ranks, rank 0 expects {size}"
            ));
        }
        if *rank == self.rank || *rank >= size {
            return Err(format!("there is no rank {rank} to join"));
        }
        Ok(())
    }
}

impl Source for Door {
    fn ready(self: Arc<Self>, _: EventFlags) {
        self.accept();
    }

    fn due(self: Arc<Self>, now: Instant) {
        {
            let listener = lock(&self.listener);
            let mut state = lock(&self.state);
            if state.scheduled.is_some_and(|scheduled| scheduled <= now) {
                state.scheduled = None;
            }
            if let (true, Some(listener), Some(token), Ok(reactor)) =
                (state.paused, &*listener, state.token, Reactor::get())
            {
                state.paused = false;
                reactor.modify(listener, token, EventFlags::IN);
            }
        }
        self.hub.tick(now);
        self.schedule();
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
