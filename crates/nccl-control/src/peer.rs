//! Somebody at a [`Door`](super::door::Door): a guest until it has proved who it is, and then a rank or an
//! observer.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Weak};
use std::time::Instant;

use super::admission::Refusal;
use super::connection::{Connection, Received};
use super::door::{Door, PATIENCE};
use super::frame::{Decoder, Frame, LARGEST_FRAME, Outgoing};
use super::greeting::{Again, Greeting, Hello, OTHER_VERSION, Plain, Role, Unproved};
use super::hub::Outlet;
use super::incoming::Answer;
use super::noise::Responder;
use super::process::{self, Bereaved, Vigil};
use super::reactor::{EventFlags, Source};
use super::reader::loss_of;
use super::request::Request;
use super::succession::Loss;
use crate::departure::{Departure, How, Lost};
use crate::sync::Mutex;
use crate::visible;
use nccl_base::clock;

/// The largest message of an observer: it may have started many ranks.
const LARGEST_WORD: usize = 1 << 20;

/// Of who sent a first message and nothing under the keys of the handshake.
const UNSEEN: &str = "sent a greeting and did not show that it made it: it may be a recorded one";

/// Somebody who is connected.
pub(super) struct Peer {
    pub(super) this: Weak<Self>,
    pub(super) door: Weak<Door>,
    pub(super) number: u64,
    /// Where it is, for sentences.
    pub(super) from: String,
    /// What a greeting has to say in plain that is meant for this door.
    pub(super) plain: Plain,
    pub(super) connection: Arc<Connection>,
    /// Only the reactor's thread takes it.
    pub(super) talk: Mutex<Talk>,
}

pub(super) struct Talk {
    pub(super) decoder: Decoder,
    pub(super) stage: Stage,
}

pub(super) enum Stage {
    Hello,
    /// Its first message was made with the secret, but perhaps not by it.
    Opened {
        hello: Hello,
        process: Option<OwnedFd>,
    },
    Member {
        rank: usize,
        /// Nobody asks for it; its end is heard of as long as it is kept.
        _vigil: Option<Arc<Vigil>>,
    },
    /// It waits to be taken into the next epoch, at the coordinator's door.
    Newcomer,
    /// At the coordinator's door.
    Observer,
    /// An observer at the door of a rank that does not coordinate, or somebody who asks for recordings at
    /// any.
    Messenger,
    /// It was told why it may not come in, and may still read it.
    Dismissed,
}

/// Why a first message is not answered.
enum Unopened {
    Unproved(Unproved),
    Broken(String),
}

impl Source for Peer {
    fn ready(self: Arc<Self>, events: EventFlags) {
        let Some(door) = self.door.upgrade() else {
            return;
        };
        let talk = &mut *self.talk.lock();
        if events.contains(EventFlags::OUT) {
            self.connection.flush_quietly();
        }
        let received = self.connection.receive(&mut talk.decoder);
        let mut broken = None;
        loop {
            match talk.decoder.next() {
                Ok(Some(frame)) => {
                    if let Err(why) = self.take(&door, talk, frame) {
                        broken = Some(why);
                        break;
                    }
                }
                Ok(None) => break,
                Err(why) => {
                    broken = Some(Refusal::from(format!("it sent {}", why.0)));
                    break;
                }
            }
        }
        match (broken, received) {
            (Some(why), _) => self.turn_away(&door, talk, &why),
            (None, Ok(Received::Some)) => {}
            (None, Ok(Received::End)) => {
                self.lost(&door, talk, loss_of(&self.connection, None));
            }
            (None, Err(error)) => {
                self.lost(&door, talk, loss_of(&self.connection, Some(&error)));
            }
        }
        door.hub.flush();
        door.schedule();
    }

    fn due(self: Arc<Self>, _: Instant) {
        let Some(door) = self.door.upgrade() else {
            return;
        };
        let talk = &mut *self.talk.lock();
        match talk.stage {
            Stage::Member { .. } | Stage::Observer | Stage::Newcomer => {}
            Stage::Dismissed | Stage::Messenger => self.close(&door, None),
            Stage::Hello => {
                let limit = PATIENCE.as_secs();
                let why = format!("it did not say who it is within {limit} s");
                self.close(&door, Some(&why));
            }
            Stage::Opened { ref hello, .. } => {
                let why = format!("{}, {UNSEEN}", hello.claim());
                self.close(&door, Some(&why));
            }
        }
    }
}

impl Bereaved for Peer {
    fn process_ended(&self, pid: u64) {
        let Some(door) = self.door.upgrade() else {
            return;
        };
        let talk = &mut *self.talk.lock();
        if matches!(talk.stage, Stage::Member { .. }) {
            self.lost(&door, talk, Loss::Lost(How::Orphaned { pid }.into()));
        }
        door.hub.flush();
        door.schedule();
    }
}

impl Peer {
    fn take(&self, door: &Door, talk: &mut Talk, frame: Frame) -> Result<(), Refusal> {
        if let Stage::Member { rank, .. } = talk.stage {
            let request = Request::decode(&frame).map_err(|broken| broken.0.to_owned())?;
            let leaves = matches!(request, Request::Goodbye | Request::Fail { .. });
            door.hub.handle(rank, frame.id, request);
            if leaves {
                talk.stage = Stage::Dismissed;
            }
            return Ok(());
        }
        match talk.stage {
            Stage::Dismissed => return Ok(()),
            // All that it can say is that it has come, or gives up.
            Stage::Newcomer => {
                door.hub
                    .newcomer_gone(self.number, Lost::said("it gave up"));
                talk.stage = Stage::Dismissed;
                return Ok(());
            }
            Stage::Observer | Stage::Messenger => {
                return Ok(self.take_from_observer(door, talk, &frame)?);
            }
            _ => {}
        }
        let greeting = match Greeting::decode(&frame) {
            Ok(greeting) => greeting,
            Err(OTHER_VERSION) => return Err(OTHER_VERSION.0.to_owned().into()),
            Err(broken) => return Err(format!("it sent {}", broken.0).into()),
        };
        match (std::mem::replace(&mut talk.stage, Stage::Hello), greeting) {
            (Stage::Hello, Greeting::Hello { plain, first }) => {
                let (answer, hello) = match self.open(door, &plain, &first) {
                    Ok(opened) => opened,
                    Err(Unopened::Unproved(unproved)) => {
                        // Instead of the refusal, which says no more.
                        door.note(&self.from, &unproved.of_sender(&plain));
                        self.connection.greet(&Greeting::Unproved(unproved));
                        self.connection.flush_quietly();
                        talk.stage = Stage::Dismissed;
                        return Ok(());
                    }
                    Err(Unopened::Broken(why)) => return Err(why.into()),
                };
                let (answer, seal) = answer
                    .answer()
                    .map_err(|error| format!("there is no answer to it: {error}"))?;
                self.connection.greet(&Greeting::Answer(answer));
                self.connection.seal(Arc::clone(&seal));
                talk.decoder.seal(seal);
                self.connection.flush_quietly();
                // Before it is known to be there: then it is alive, and the number is still its own.
                let process = process::of_peer(self.connection.fd(), hello.pid, &hello.kernel);
                talk.stage = Stage::Opened { hello, process };
                Ok(())
            }
            (Stage::Opened { hello, process }, Greeting::Present) => {
                door.check(&hello)?;
                let (by, epoch) = (door.rank(), door.job.epoch);
                let welcome = Greeting::Welcome { by, epoch }.encode();
                let connection = Arc::clone(&self.connection);
                match hello.role {
                    Role::Rank => {
                        let rank = hello.rank;
                        let host = visible::name(&hello.host);
                        let who = (&host[..], hello.pid, &hello.kernel[..]);
                        let outlet = Outlet::Remote(connection);
                        door.hub.attach(rank, outlet, who, Some(welcome))?;
                        let bereaved = Weak::clone(&self.this) as Weak<dyn Bereaved>;
                        let vigil =
                            process.and_then(|process| Vigil::keep(hello.pid, process, bereaved));
                        talk.stage = Stage::Member {
                            rank,
                            _vigil: vigil,
                        };
                        talk.decoder.set_limit(LARGEST_FRAME);
                    }
                    Role::Newcomer => {
                        door.hub
                            .receive_newcomer(self.number, connection, welcome)?;
                        talk.stage = Stage::Newcomer;
                    }
                    Role::Observer | Role::Follower | Role::Onlooker if door.coordinates() => {
                        door.hub.observe(self.number, connection, welcome)?;
                        talk.stage = Stage::Observer;
                        talk.decoder.set_limit(LARGEST_WORD);
                    }
                    // The coordinator of a moment ago.
                    Role::Follower | Role::Onlooker => return Err(door.refer()),
                    Role::Member => {
                        let why = String::from("this process does not speak with others so");
                        return Err(why.into());
                    }
                    Role::Observer | Role::Asker => {
                        connection.enqueue(welcome);
                        connection.flush_quietly();
                        talk.stage = Stage::Messenger;
                        talk.decoder.set_limit(LARGEST_WORD);
                    }
                }
                door.state.lock().guests.remove(&self.number);
                Ok(())
            }
            (_, Greeting::Refused { why, .. }) => Err(format!("it hung up: {why}").into()),
            _ => Err(String::from("it greeted out of turn").into()),
        }
    }

    /// Opens a first message.
    fn open(
        &self,
        door: &Door,
        plain: &Plain,
        first: &[u8],
    ) -> Result<(Responder, Hello), Unopened> {
        self.plain.refuse(plain).map_err(Unopened::Unproved)?;
        let secret = door.job.secret.as_ref();
        let opened = Responder::open(secret, &self.plain.prologue(), first);
        let (responder, hello) = opened.ok_or(Unopened::Unproved(Unproved::OtherSecret))?;
        let hello = Hello::decode(&hello);
        let hello = hello.map_err(|broken| Unopened::Broken(format!("it sent {}", broken.0)))?;
        Ok((responder, hello))
    }

    /// What an observer says.
    fn take_from_observer(
        &self,
        door: &Door,
        talk: &mut Talk,
        frame: &Frame,
    ) -> Result<(), String> {
        let request = Request::decode(frame).map_err(|broken| broken.0.to_owned())?;
        match (&talk.stage, request) {
            (_, Request::Goodbye) => {
                if matches!(talk.stage, Stage::Observer) {
                    door.hub.unobserve(self.number);
                }
                talk.stage = Stage::Dismissed;
            }
            (_, Request::Clock) => {
                let now = Answer::Value(clock::clock().to_le_bytes().as_slice().into());
                self.answer(frame.id, &now);
            }
            (_, Request::Recording { bytes }) => door.record_for(&self.connection, frame.id, bytes),
            (Stage::Observer, request) => {
                let handled = door.hub.handle_observer(self.number, frame.id, request);
                handled.map_err(str::to_owned)?;
            }
            (_, Request::Ended { rank, end, .. }) => {
                // Another may have said so before, and who waits for an answer gets one all the same.
                if rank == door.hub.coordinator() {
                    door.coordinator_ended(&end);
                }
                self.answer(frame.id, &Answer::Done);
            }
            // All else is for the coordinator, which lives.
            (_, request) => {
                tracing::debug!(name: "nccl.rendezvous.ignored", target: "nccl", ?request, "not for this rank")
            }
        }
        Ok(())
    }

    fn answer(&self, id: u64, answer: &Answer) {
        self.connection.enqueue(Outgoing::new(id, answer.encode()));
        self.connection.flush_quietly();
    }

    /// Says why, and hears no more.
    pub(super) fn turn_away(&self, door: &Door, talk: &mut Talk, refusal: &Refusal) {
        let why = refusal.why.as_str();
        match talk.stage {
            Stage::Member { rank, .. } => {
                let sent = How::Sent(format!("a broken request: {why}"));
                door.hub.leave(rank, Departure::lost(sent));
                self.close(door, None);
            }
            Stage::Dismissed => self.close(door, None),
            Stage::Newcomer => {
                door.hub.newcomer_gone(self.number, Lost::said(why));
                self.close(door, None);
            }
            Stage::Observer | Stage::Messenger => {
                door.note(&self.from, why);
                door.hub.unobserve(self.number);
                self.close(door, None);
            }
            Stage::Hello | Stage::Opened { .. } => {
                if !matches!(refusal.again, Again::At { .. }) {
                    door.note(&self.from, why);
                }
                let refusal = Greeting::Refused {
                    why: why.to_owned(),
                    again: refusal.again.clone(),
                };
                self.connection.greet(&refusal);
                self.connection.flush_quietly();
                talk.stage = Stage::Dismissed;
            }
        }
    }

    fn lost(&self, door: &Door, talk: &mut Talk, loss: Loss) {
        match talk.stage {
            // It was the door that closed, and nobody died.
            _ if door.state.lock().closed => {}
            Stage::Member { rank, .. } => {
                door.hub.lost(rank, loss);
                self.close(door, None);
            }
            Stage::Dismissed | Stage::Messenger => self.close(door, None),
            Stage::Newcomer => {
                door.hub.newcomer_gone(self.number, loss.into_lost());
                self.close(door, None);
            }
            Stage::Observer => {
                door.hub.unobserve(self.number);
                self.close(door, None);
            }
            Stage::Hello => self.close(door, Some("it hung up before it had said who it is")),
            Stage::Opened { ref hello, .. } => {
                let why = format!("{}, {UNSEEN}", hello.claim());
                self.close(door, Some(&why));
            }
        }
    }

    pub(super) fn close(&self, door: &Door, why: Option<&str>) {
        if let Some(why) = why {
            door.note(&self.from, why);
        }
        self.connection.forget();
        self.connection.shut();
        let mut state = door.state.lock();
        state.guests.remove(&self.number);
        let gone = state.peers.remove(&self.number);
        drop(state);
        drop(gone);
    }
}
