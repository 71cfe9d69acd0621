//! A rank's way to its coordinator: finding it, making sure of it, and reading what it sends.

use std::fmt;
use std::io;
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::{Duration, Instant};

use super::connection::{Connection, Received};
use super::environment::Rendezvous;
use super::frame::{Decoder, GREETING, LARGEST_FRAME};
use super::greeting::{Again, Greeting, Hello, Role, Side, is_proved, nonce, prove};
use super::heartbeat::{BEAT, Beats, Pulse, Turn};
use super::incoming::{Answer, Incoming, Push};
use super::mailbox::{ONE_WAY, SILENT};
use super::place::{self, Address};
use super::process::{self, Bereaved, Vigil};
use super::reactor::{EventFlags, Reactor, Source};
use super::reporting::REPORT;
use super::request::Request;
use super::server::Job;
use super::succession::Loss;
use super::watching::{WORD, word};
use crate::communicator::lock;
use crate::error::{Error, Result};
use crate::supervision::recorder;
use crate::time::deadline_after;

/// What is said of a rank whose connection ends before it says that it leaves.
pub(super) const LOST: &str = "its connection closed without goodbye: it died";

/// What the end of a connection, or how it failed, says of the process at its other end.
pub(super) fn loss_of(connection: &Connection, error: Option<&io::Error>) -> Loss {
    use io::ErrorKind::{BrokenPipe, ConnectionReset};
    let failed = error.filter(|error| !matches!(error.kind(), ConnectionReset | BrokenPipe));
    match (failed, connection.unacknowledged_for(Instant::now())) {
        (Some(error), _) => Loss::Silent(format!("{SILENT}: {error}")),
        // Its kernel says so.
        (None, None) => Loss::Closed(LOST.to_owned()),
        // The same, but of a host that does not hear this one: it gives up what works as far as it can see.
        (None, Some(missing)) => Loss::Silent(format!(
            "{SILENT}: {ONE_WAY}: its host gave it up, and had acknowledged nothing that was sent to it for {:.1} s",
            missing.as_secs_f64()
        )),
    }
}

/// What takes what a coordinator sends.
pub(super) trait Sink: Send + Sync {
    fn answer(&self, id: u64, answer: Answer);
    fn push(&self, push: Push);
    /// Some of this has come; nothing more for now.
    fn settle(&self) {}
    /// The coordinator has asked whether this process is there, which says that it is itself.
    fn coordinator_heard(&self, _: Instant) {}
    /// It has not for long, as a process in this state; or it is heard again.
    fn coordinator_turns(&self, _: Turn, _state: Option<String>) {}
    /// Whether the end of the connection should wait for the word of the one that started rank 0.
    fn waits_for_word(&self) -> bool;
    /// Nothing comes any more.
    fn close(&self, loss: Loss);
}

/// Reads what the coordinator sends, on the reactor's thread.
pub(super) struct Reader {
    this: Weak<Self>,
    pub(super) connection: Arc<Connection>,
    sink: Arc<dyn Sink>,
    reading: Mutex<Reading>,
    vigil: OnceLock<Arc<Vigil>>,
}

struct Reading {
    decoder: Decoder,
    /// How the connection ended, how rank 0's process ended, and when one has to do without the other.
    ended: Option<Loss>,
    word: Option<String>,
    until: Option<Instant>,
    closed: bool,
    /// The coordinator's, which a rank looks after.
    pulse: Option<Pulse>,
    beats: Beats,
    /// When to look whether the coordinator still asks, and whether its host hears this one.
    unasked: Option<Instant>,
    unheard: Option<Instant>,
}

/// A rank that was not asked for so long says something: who does not hear the answers may be kept from asking by that.
/// Of what is said, the kernel finds out whether it arrives.
const UNASKED: Duration = BEAT.saturating_add(Duration::from_millis(300));

/// As long as the kernel waits for a host that is silent: but that one waits anew whenever something comes again that
/// had come before.
const SILENCE: Duration = Duration::from_secs(3);

/// Who comes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Claim {
    pub(super) role: Role,
    pub(super) rank: usize,
    pub(super) size: usize,
}

impl Claim {
    pub(super) fn rank(rank: usize, size: usize) -> Self {
        Self {
            role: Role::Rank,
            rank,
            size,
        }
    }

    /// One who asks to be a rank of the next epoch.
    pub(super) fn newcomer() -> Self {
        Self {
            role: Role::Newcomer,
            rank: 0,
            size: 0,
        }
    }

    pub(super) fn observer(size: usize) -> Self {
        Self {
            role: Role::Observer,
            rank: 0,
            size,
        }
    }

    /// An observer that has not been there yet.
    pub(super) fn onlooker(size: usize) -> Self {
        Self {
            role: Role::Onlooker,
            ..Self::observer(size)
        }
    }
}

impl Claim {
    /// An observer that looks for the next coordinator.
    pub(super) fn follower(size: usize) -> Self {
        Self {
            role: Role::Follower,
            ..Self::observer(size)
        }
    }

    pub(super) fn asker(size: usize) -> Self {
        Self {
            role: Role::Asker,
            rank: 0,
            size,
        }
    }
}

impl fmt::Display for Claim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.role {
            Role::Rank => write!(f, "rank {}", self.rank),
            Role::Observer | Role::Follower | Role::Onlooker => f.write_str("an observer"),
            Role::Newcomer => f.write_str("a newcomer"),
            Role::Asker => f.write_str("who asks for recordings"),
        }
    }
}

/// Says why nobody will come to where this process tries to meet somebody, once that is known; none where nobody can know.
pub(super) type InVain<'a> = Option<&'a dyn Fn() -> Option<String>>;

/// How long somebody who may have come in vain waits for an answer before it looks: as long as the other side has patience.
const LOOK: Duration = Duration::from_secs(5);

/// Joins, unless it is found to be in vain; answers and notices come to `sink` from then on.
pub(super) fn join(
    address: &Address,
    job: &Job,
    claim: Claim,
    deadline: Instant,
    sink: Arc<dyn Sink>,
    in_vain: InVain<'_>,
) -> Result<Arc<Reader>> {
    let Met {
        connection,
        decoder,
        ..
    } = meet(address, job, claim, deadline, in_vain)?;
    read(connection, decoder, sink).map_err(Error::io(format!("joining at {address}")))
}

/// Has the reactor read what comes.
pub(super) fn read(
    connection: Arc<Connection>,
    decoder: Decoder,
    sink: Arc<dyn Sink>,
) -> io::Result<Arc<Reader>> {
    let reactor = Reactor::get()?;
    let reader = Arc::new_cyclic(|this| Reader {
        this: Weak::clone(this),
        connection,
        sink,
        reading: Mutex::new(Reading {
            decoder,
            ended: None,
            word: None,
            until: None,
            closed: false,
            pulse: None,
            beats: Beats::default(),
            unasked: None,
            unheard: None,
        }),
        vigil: OnceLock::new(),
    });
    // What came with the welcome waits in the decoder, and no event tells of it.
    reader.parse(&mut lock(&reader.reading));
    let events = EventFlags::IN | EventFlags::RDHUP;
    let source = Arc::clone(&reader) as Arc<dyn Source>;
    let token = reactor.add(reader.connection.fd(), events, source)?;
    reader.connection.set_token(token);
    reader.connection.flush_quietly();
    Ok(reader)
}

/// Joins only to say that it fails.
pub(super) fn fail(rendezvous: Rendezvous, chain: String) -> Result<()> {
    let Rendezvous {
        rank,
        world_size,
        address,
        timeout,
        job,
        ..
    } = rendezvous;
    let deadline = deadline_after(timeout);
    let Met { connection, .. } = meet(
        &address,
        &job,
        Claim::rank(rank, world_size),
        deadline,
        None,
    )?;
    connection.enqueue(Request::Fail { chain }.encode(0));
    connection
        .drain(deadline)
        .map_err(Error::io(format!("telling rank 0 at {address}")))?;
    connection.shut();
    Ok(())
}

/// Why one try did not end well.
enum Refusal {
    /// The job's own rank 0 says so.
    Final(String),
    /// Whoever answers is not the job's rank 0; where there are several ports, it may be at another.
    Elsewhere(String),
    /// It is the job's rank 0 of an attempt that is about to end.
    Later(String),
    /// Another rank coordinates, says one of the job that does not, and where.
    Follows {
        rank: usize,
        at: String,
        why: String,
    },
}

/// Somebody has let this one in.
pub(super) struct Met {
    pub(super) connection: Arc<Connection>,
    pub(super) decoder: Decoder,
    /// The rank at whose door that was, and its epoch.
    pub(super) by: usize,
    pub(super) epoch: u64,
}

/// What one try came to.
pub(super) enum Tried {
    Met(Met),
    /// Another rank coordinates, says a rank that does not, and where, as far as it knows.
    Follows {
        rank: usize,
        at: String,
        why: String,
    },
    /// Another try would end alike.
    Refused(String),
    /// Nobody is there yet, or not the right one; in the latter case, who it is.
    NotYet(io::Error, Option<String>),
}

/// The kind of error of one who takes the connection and says nothing.
pub(super) const MUTE: io::ErrorKind = io::ErrorKind::WouldBlock;

/// How long one of several ports may take to prove that it is the right one.
const TRY: Duration = Duration::from_secs(2);

/// One try to join; `turn` counts them.
pub(super) fn attempt(
    address: &Address,
    job: &Job,
    claim: Claim,
    turn: usize,
    deadline: Instant,
) -> Tried {
    let several = matches!(address, Address::Tcp(place) if place.is_range());
    let socket = match place::dial(address, turn, deadline) {
        Ok(socket) => socket,
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            return Tried::Refused(format!("no rank 0 at {address}: {error}"));
        }
        Err(error) => return Tried::NotYet(error, None),
    };
    let connection = Arc::new(Connection::new(socket));
    let mut decoder = Decoder::new(GREETING);
    let patience = match several {
        true => deadline.min(Instant::now() + TRY),
        false => deadline,
    };
    match greet(&connection, &mut decoder, job, claim, patience) {
        Ok(Greeted::Welcome { by, epoch }) => {
            decoder.set_limit(LARGEST_FRAME);
            Tried::Met(Met {
                connection,
                decoder,
                by,
                epoch,
            })
        }
        Ok(Greeted::No(Refusal::Follows { rank, at, why })) => Tried::Follows { rank, at, why },
        Ok(Greeted::No(Refusal::Later(why))) => {
            Tried::NotYet(io::Error::other(why.clone()), Some(why))
        }
        Ok(Greeted::No(Refusal::Elsewhere(why))) if several => {
            Tried::NotYet(io::Error::other(why.clone()), Some(why))
        }
        Ok(Greeted::No(Refusal::Final(why) | Refusal::Elsewhere(why))) => {
            Tried::Refused(format!("{claim} could not join at {address}: {why}"))
        }
        Err(error) if error.kind() == io::ErrorKind::TimedOut => {
            let says = "somebody takes the connection and says nothing";
            Tried::NotYet(io::Error::new(MUTE, says), None)
        }
        Err(error) => Tried::NotYet(error, None),
    }
}

/// Tries until somebody answers as the job's rank 0, or says why this one may not come in.
fn meet(
    address: &Address,
    job: &Job,
    claim: Claim,
    deadline: Instant,
    in_vain: InVain<'_>,
) -> Result<Met> {
    let mut pause = Duration::from_millis(2);
    let mut refused = None;
    // Routers that refuse do so now and then only, and are silent in between.
    let mut spoken: Option<String> = None;
    let mut report = Instant::now() + REPORT;
    for turn in 0.. {
        if let Some(why) = in_vain.and_then(|in_vain| in_vain()) {
            let why = format!("{claim} meets nobody at {address}: {why}");
            return Err(Error::rendezvous(why));
        }
        let limit = match in_vain {
            Some(_) => deadline.min(Instant::now() + LOOK),
            None => deadline,
        };
        let error = match attempt(address, job, claim, turn, limit) {
            Tried::Met(met) => return Ok(met),
            Tried::Refused(why) => return Err(Error::rendezvous(why)),
            Tried::Follows { why, .. } => {
                let why = format!("{claim} could not join at {address}: {why}");
                return Err(Error::rendezvous(why));
            }
            Tried::NotYet(error, why) => {
                refused = why.or(refused);
                if error.kind() == io::ErrorKind::TimedOut {
                    match &spoken {
                        Some(before) => {
                            io::Error::other(format!("{before}; at last, no answer at all"))
                        }
                        None => error,
                    }
                } else {
                    spoken = Some(error.to_string());
                    error
                }
            }
        };
        if Instant::now() >= deadline {
            let refused =
                refused.map_or_else(String::new, |why| format!("; what did answer: {why}"));
            return Err(Error::rendezvous(format!(
                "rank 0 does not answer at {address} ({error}): has it been started?{refused}"
            )));
        }
        // The coordinator, which speaks for all who wait, does not know of this one.
        if Instant::now() >= report {
            report += REPORT;
            tracing::info!(name: "nccl.rendezvous.waiting", target: "nccl", "still waiting: {claim} does not reach rank 0 at {address}: {error}");
        }
        let left = deadline.saturating_duration_since(Instant::now());
        std::thread::sleep(pause.min(left));
        pause = (pause * 2).min(Duration::from_millis(50));
    }
    unreachable!("the loop ends at the deadline")
}

/// What a greeting came to.
enum Greeted {
    Welcome { by: usize, epoch: u64 },
    No(Refusal),
}

fn greet(
    connection: &Connection,
    decoder: &mut Decoder,
    job: &Job,
    claim: Claim,
    deadline: Instant,
) -> io::Result<Greeted> {
    let secret = job.secret.as_ref();
    let hello = Hello {
        nonce: nonce()?,
        has_secret: secret.is_some(),
        job: job.name.clone(),
        epoch: job.epoch,
        world_size: claim.size,
        role: claim.role,
        rank: claim.rank,
        host: crate::host::name().to_string(),
        pid: std::process::id().into(),
        kernel: process::kernel().to_owned(),
    };
    let mut hear = || {
        let frame = connection.expect(decoder, deadline)?;
        Greeting::decode(&frame)
            .map_err(|broken| io::Error::new(io::ErrorKind::InvalidData, broken.0))
    };
    connection.enqueue(Greeting::Hello(hello.clone()).encode());
    connection.drain(deadline)?;
    let (nonce, theirs, proof) = match hear() {
        Ok(Greeting::Challenge {
            nonce,
            has_secret,
            proof,
        }) => (nonce, has_secret, proof),
        Ok(Greeting::Refused { why, .. }) => {
            let why = format!("who answers turned it away: {why}");
            return Ok(Greeted::No(Refusal::Elsewhere(why)));
        }
        Ok(_) => return Ok(Greeted::No(no_rank_0())),
        Err(error) if error.kind() == io::ErrorKind::InvalidData => {
            let why = format!("who answers is no rank 0: it sent {error}");
            return Ok(Greeted::No(Refusal::Elsewhere(why)));
        }
        Err(error) => return Err(error),
    };
    if !is_proved(secret, Side::Coordinator, &hello, &nonce, &proof) {
        let why = match (hello.has_secret, theirs) {
            (true, false) => "this rank has a secret, and who answers has none",
            (false, true) => "this rank has no secret, and who answers has one",
            _ => "who answers has another secret than this rank",
        };
        let refusal = Greeting::Refused {
            why: why.to_owned(),
            again: Again::Elsewhere,
        };
        connection.enqueue(refusal.encode());
        let _ = connection.drain(deadline);
        return Ok(Greeted::No(Refusal::Elsewhere(format!(
            "{why}: set NCCL_RUN_SECRET to the same on all ranks, and see that no other job is there"
        ))));
    }
    let own = prove(secret, Side::Rank, &hello, &nonce);
    connection.enqueue(Greeting::Proof(own).encode());
    connection.drain(deadline)?;
    match hear()? {
        Greeting::Welcome { by, epoch } => Ok(Greeted::Welcome { by, epoch }),
        Greeting::Refused { why, again } => {
            let why = format!("rank 0 turned it away: {why}");
            Ok(Greeted::No(match again {
                Again::Elsewhere => Refusal::Elsewhere(why),
                Again::Later => Refusal::Later(why),
                Again::At { rank, at } => Refusal::Follows { rank, at, why },
                Again::Never => Refusal::Final(why),
            }))
        }
        _ => Ok(Greeted::No(no_rank_0())),
    }
}

fn no_rank_0() -> Refusal {
    Refusal::Elsewhere(String::from("who answers is no rank 0"))
}

impl Reader {
    /// Whether all was understood.
    fn parse(&self, reading: &mut Reading) -> bool {
        let understood = loop {
            match reading
                .decoder
                .next()
                .map(|frame| frame.map(Incoming::decode))
            {
                Ok(Some(Ok(Incoming::Answer(id, answer)))) => self.sink.answer(id, answer),
                Ok(Some(Ok(Incoming::Push(Push::Ping(number))))) => {
                    if let Some(call) = recorder::last_call() {
                        self.connection
                            .enqueue(Request::Last { call }.encode(u64::MAX));
                    }
                    self.is_there(number);
                    self.feel(reading);
                }
                Ok(Some(Ok(Incoming::Push(Push::Look { rank, pid })))) => {
                    if let Some(state) = process::state_of(pid) {
                        self.send(Request::Saw { rank, state });
                    }
                }
                Ok(Some(Ok(Incoming::Push(push)))) => self.sink.push(push),
                Ok(None) => break true,
                Ok(Some(Err(broken))) | Err(broken) => {
                    reading.ended = Some(Loss::Closed(format!("it sent {}", broken.0)));
                    break false;
                }
            }
        };
        self.sink.settle();
        understood
    }

    fn send(&self, request: Request) {
        self.connection.enqueue(request.encode(u64::MAX));
        self.connection.flush_quietly();
    }

    /// The coordinator is there.
    fn feel(&self, reading: &mut Reading) {
        let now = Instant::now();
        self.sink.coordinator_heard(now);
        reading.unasked = Some(now + UNASKED);
        reading.unheard = Some(now + SILENCE);
        self.wake_at(now + UNASKED);
        let Some(pulse) = &mut reading.pulse else {
            reading.pulse = Some(Pulse::new(now));
            return self.beat_at(now + BEAT, reading);
        };
        let turn = pulse.hear(now);
        if turn != Turn::Same {
            self.sink.coordinator_turns(turn, None);
        }
    }

    fn beat_at(&self, next: Instant, reading: &mut Reading) {
        reading.beats.next = Some(next);
        self.wake_at(next);
    }

    fn wake_at(&self, next: Instant) {
        if let Ok(reactor) = Reactor::get() {
            reactor.wake_at(next, Weak::clone(&self.this) as Weak<dyn Source>);
        }
    }

    /// That this rank is there, as the answer to the question of this number.
    fn is_there(&self, question: u64) {
        let pong = Request::Pong(question).encode(u64::MAX);
        self.connection.enqueue(pong);
        self.connection.flush_and_mark(Instant::now());
    }

    /// Whether the coordinator has asked within the last moments.
    fn beat(&self, now: Instant, reading: &mut Reading) {
        let (Some(late), Some(pulse)) = (reading.beats.fall_due(now), &mut reading.pulse) else {
            return;
        };
        let turn = pulse.beat(now, late);
        if turn != Turn::Same {
            let state = self.vigil.get().and_then(|vigil| vigil.state());
            self.sink.coordinator_turns(turn, state);
        }
        self.beat_at(now + BEAT, reading);
    }

    /// From now on, expects the coordinator's questions, and hears of the end of its process as well, which calls
    /// itself `pid` under `kernel`. That it has ended and its number is another's already would show at the
    /// connection.
    pub(super) fn watch_rank_0(&self, pid: u64, kernel: &str) {
        self.feel(&mut lock(&self.reading));
        let bereaved = Weak::clone(&self.this) as Weak<dyn Bereaved>;
        let vigil = process::of_peer(self.connection.fd(), pid, kernel)
            .and_then(|process| Vigil::keep(pid, process, bereaved));
        if let Some(vigil) = vigil {
            let _ = self.vigil.set(vigil);
        }
    }

    /// How rank 0's process ended, as somebody says who knows. What it has said before counts.
    pub(super) fn rank_0_ended(&self, how: &str) {
        let mut reading = lock(&self.reading);
        reading.word.get_or_insert_with(|| word(how));
        self.conclude(&mut reading, false);
    }

    /// Closes when enough is known about why.
    fn conclude(&self, reading: &mut Reading, late: bool) {
        if reading.closed {
            return;
        }
        let loss = match (&reading.word, &reading.ended) {
            (Some(word), Some(_)) => Loss::Told(word.clone()),
            (Some(word), None) if late => Loss::Told(word.clone()),
            (None, Some(ended)) if late || !self.sink.waits_for_word() => ended.clone(),
            (None, None) => return,
            // One waits for the other.
            _ => {
                if reading.until.is_none() && Reactor::get().is_ok() {
                    let until = Instant::now() + WORD;
                    reading.until = Some(until);
                    self.wake_at(until);
                }
                return;
            }
        };
        reading.closed = true;
        self.connection.forget();
        self.connection.shut();
        self.sink.close(loss);
    }
}

impl Bereaved for Reader {
    fn process_ended(&self, pid: u64) {
        let mut reading = lock(&self.reading);
        let ended = || Loss::Closed(process::ended(pid));
        reading.ended.get_or_insert_with(ended);
        self.conclude(&mut reading, false);
    }
}

impl Source for Reader {
    fn ready(self: Arc<Self>, events: EventFlags) {
        if events.contains(EventFlags::OUT) {
            self.connection.flush_quietly();
        }
        let mut reading = lock(&self.reading);
        if reading.ended.is_some() || reading.closed {
            return;
        }
        let received = self.connection.receive(&mut reading.decoder);
        let understood = self.parse(&mut reading);
        match received {
            Ok(Received::Some) if understood => return,
            Ok(Received::Some) => {}
            Ok(Received::End) => {
                reading
                    .ended
                    .get_or_insert_with(|| loss_of(&self.connection, None));
            }
            Err(error) => {
                let loss = || loss_of(&self.connection, Some(&error));
                reading.ended.get_or_insert_with(loss);
            }
        }
        self.connection.forget();
        self.connection.shut();
        self.conclude(&mut reading, false);
    }

    fn due(self: Arc<Self>, now: Instant) {
        let mut reading = lock(&self.reading);
        if reading.until.is_some_and(|until| until <= now) {
            self.conclude(&mut reading, true);
        }
        if !reading.closed && reading.ended.is_none() {
            if reading.unasked.take_if(|unasked| *unasked <= now).is_some() {
                self.is_there(0);
                if let Some(unheard) = reading.unheard {
                    self.wake_at(unheard);
                }
            }
            if reading.unheard.take_if(|unheard| *unheard <= now).is_some()
                && let Some(missing) = self.connection.unacknowledged_for(now)
            {
                let how = format!(
                    "{SILENT}: it was not heard for {:.1} s, and its host has acknowledged nothing that was sent to it \
                     for {:.1} s",
                    SILENCE.as_secs_f64(),
                    missing.as_secs_f64()
                );
                reading.ended = Some(Loss::Silent(how));
                self.connection.forget();
                self.connection.shut();
                return self.conclude(&mut reading, false);
            }
            self.beat(now, &mut reading);
        }
    }
}
