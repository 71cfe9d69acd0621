//! Reads what a coordinator sends, and notices when nothing comes any more: by the end of the connection or of the
//! process, by what somebody says who knows, or by silence.

use std::io;
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use super::attached::host;
use super::connection::{Connection, Received};
use super::frame::Decoder;
use super::heartbeat::{BEAT, Beats, Pulse, Turn};
use super::incoming::{Answer, Incoming, Push};
use super::process::{self, Bereaved, Vigil};
use super::process_state::ProcessState;
use super::reactor::{EventFlags, Reactor, Source};
use super::request::Request;
use super::succession::Loss;
use super::watching::WORD;
use crate::departure::{How, Lost, ProcessEnd, Sign};
use crate::sync::Mutex;

/// What the end of a connection, or how it failed, says of the process at its other end.
pub(super) fn loss_of(connection: &Connection, error: Option<&io::Error>) -> Loss {
    use io::ErrorKind::{BrokenPipe, ConnectionReset};
    let failed = error.filter(|error| !matches!(error.kind(), ConnectionReset | BrokenPipe));
    let lost = match (failed, connection.unacknowledged_for(Instant::now())) {
        (Some(error), _) => Lost::from(Sign::Error(error.to_string())),
        // Its kernel says so.
        (None, None) => Lost::from(How::Closed),
        // The same, but of a host that does not hear this one: it gives up what works as far as it can see.
        (None, Some(unacknowledged)) => Lost::from(Sign::GaveUp { unacknowledged }),
    };
    Loss::Lost(lost)
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
    fn coordinator_turns(&self, _: Turn, _state: Option<ProcessState>) {}
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
    word: Option<ProcessEnd>,
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

impl Reader {
    /// Has the reactor read what comes, from now on.
    pub(super) fn start(
        connection: Arc<Connection>,
        decoder: Decoder,
        sink: Arc<dyn Sink>,
    ) -> io::Result<Arc<Self>> {
        let reactor = Reactor::get()?;
        let reader = Arc::new_cyclic(|this| Self {
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
        reader.parse(&mut reader.reading.lock());
        let events = EventFlags::IN | EventFlags::RDHUP;
        let source = Arc::clone(&reader) as Arc<dyn Source>;
        let token = reactor.add(reader.connection.fd(), events, source)?;
        reader.connection.set_token(token);
        reader.connection.flush_quietly();
        Ok(reader)
    }

    /// Whether all was understood.
    fn parse(&self, reading: &mut Reading) -> bool {
        let understood = loop {
            let Some(frame) = reading.decoder.next().transpose() else {
                break true;
            };
            let incoming = frame.and_then(|frame| Ok((frame.id, Incoming::decode(&frame)?)));
            match incoming {
                Ok((id, Incoming::Answer(answer))) => self.sink.answer(id, answer),
                Ok((_, Incoming::Push(Push::Ping(number)))) => {
                    if let Some(call) = host().last_call() {
                        self.connection
                            .enqueue(Request::Last { call }.encode(u64::MAX));
                    }
                    self.is_there(number);
                    self.feel(reading);
                }
                Ok((_, Incoming::Push(Push::Look { rank, pid }))) => {
                    if let Some(state) = process::state_of(pid) {
                        self.send(Request::Saw { rank, state });
                    }
                }
                Ok((_, Incoming::Push(push))) => self.sink.push(push),
                Err(broken) => {
                    let sent = How::Sent(broken.0.to_owned());
                    reading.ended = Some(Loss::Lost(sent.into()));
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
        self.feel(&mut self.reading.lock());
        let bereaved = Weak::clone(&self.this) as Weak<dyn Bereaved>;
        let vigil = process::of_peer(self.connection.fd(), pid, kernel)
            .and_then(|process| Vigil::keep(pid, process, bereaved));
        if let Some(vigil) = vigil {
            let _ = self.vigil.set(vigil);
        }
    }

    /// How rank 0's process ended, as somebody says who knows. What it has said before counts.
    pub(super) fn rank_0_ended(&self, end: &ProcessEnd) {
        let mut reading = self.reading.lock();
        reading.word.get_or_insert_with(|| end.clone());
        self.conclude(&mut reading, false);
    }

    /// Closes when enough is known about why.
    fn conclude(&self, reading: &mut Reading, late: bool) {
        if reading.closed {
            return;
        }
        let loss = match (&reading.word, &reading.ended) {
            (Some(word), Some(_)) => Loss::Lost(word.clone().into()),
            (Some(word), None) if late => Loss::Lost(word.clone().into()),
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
        let mut reading = self.reading.lock();
        let ended = || Loss::Lost(How::Orphaned { pid }.into());
        reading.ended.get_or_insert_with(ended);
        self.conclude(&mut reading, false);
    }
}

impl Source for Reader {
    fn ready(self: Arc<Self>, events: EventFlags) {
        if events.contains(EventFlags::OUT) {
            self.connection.flush_quietly();
        }
        let mut reading = self.reading.lock();
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
        let mut reading = self.reading.lock();
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
                let sign = Sign::Unheard {
                    unheard: SILENCE,
                    unacknowledged: missing,
                };
                reading.ended = Some(Loss::Lost(sign.into()));
                self.connection.forget();
                self.connection.shut();
                return self.conclude(&mut reading, false);
            }
            self.beat(now, &mut reading);
        }
    }
}
