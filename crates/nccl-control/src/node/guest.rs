//! A connection to a listening socket, until the peer has proved its identity.

use std::io;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::guests::{self, Guests};
use crate::admission::{PATIENCE, Refusal};
use crate::connection::{Connection, Received};
use crate::frame::{Decoder, GREETING, LARGEST_FRAME};
use crate::greeting::{Again, Greeting, Hello, OTHER_VERSION, Plain, Role, Unproved};
use crate::noise::Responder;
use crate::reactor::{EventFlags, Reactor, Source};
use crate::sync::Mutex;
use crate::transport::Port;

/// The largest request of a process that asks for recordings.
const LARGEST_QUESTION: usize = 1 << 20;

/// About a guest that sent a first message and nothing under the keys of the handshake.
const UNSEEN: &str = "sent a greeting and did not show that it made it: it may be a recorded one";

pub(super) struct Guest {
    this: Weak<Self>,
    guests: Weak<Guests>,
    number: u64,
    /// The address of the peer, for messages.
    pub(super) from: String,
    /// The plain part of a greeting that is meant for this process.
    plain: Plain,
    pub(super) connection: Arc<Connection>,
    /// Locked only by the reactor's thread.
    talk: Mutex<Talk>,
}

struct Talk {
    decoder: Decoder,
    stage: Stage,
}

enum Stage {
    Hello,
    /// The first message was made with the secret, but perhaps not by this peer.
    Opened {
        hello: Hello,
    },
    /// The guest was refused, and may still read the reason.
    Dismissed,
    /// The peer has joined.
    In(Arc<Port>),
    /// The peer asks for recordings.
    Asks,
}

impl Guest {
    pub(super) fn new(
        guests: Weak<Guests>,
        number: u64,
        from: String,
        plain: Plain,
        connection: Arc<Connection>,
    ) -> Arc<Self> {
        let talk = Mutex::new(Talk {
            decoder: Decoder::new(GREETING),
            stage: Stage::Hello,
        });
        Arc::new_cyclic(|this| Self {
            this: Weak::clone(this),
            guests,
            number,
            from,
            plain,
            connection,
            talk,
        })
    }

    pub(super) fn start(self: &Arc<Self>, patience: Duration) -> io::Result<()> {
        let reactor = Reactor::get()?;
        let events = EventFlags::IN | EventFlags::RDHUP;
        let source = Arc::clone(self) as Arc<dyn Source>;
        let token = reactor.add(self.connection.fd(), events, source)?;
        self.connection.set_token(token);
        let this = Weak::clone(&self.this) as Weak<dyn Source>;
        reactor.wake_at(Instant::now() + patience, this);
        Ok(())
    }

    fn close(&self) {
        guests::close(&self.connection);
    }

    /// Sends the refusal, and reads no more.
    pub(super) fn refuse(&self, guests: &Guests, refusal: &Refusal) {
        if !matches!(refusal.again, Again::At { .. }) {
            guests.note(&self.from, &refusal.why);
        }
        self.connection.greet(&Greeting::Refused {
            why: refusal.why.clone(),
            again: refusal.again.clone(),
        });
        self.connection.flush_quietly();
    }

    fn take(&self, guests: &Guests, talk: &mut Talk, greeting: Greeting) -> Result<(), Refusal> {
        match (std::mem::replace(&mut talk.stage, Stage::Hello), greeting) {
            (Stage::Hello, Greeting::Hello { plain, first }) => {
                let secret = guests.gate.upgrade().and_then(|gate| gate.secret());
                let opened = self.plain.refuse(&plain).and_then(|()| {
                    Responder::open(secret.as_ref(), &self.plain.prologue(), &first)
                        .ok_or(Unproved::OtherSecret)
                });
                let (responder, hello) = match opened {
                    Ok(opened) => opened,
                    Err(unproved) => {
                        // Sent instead of the refusal, which says no more.
                        guests.note(&self.from, &unproved.of_sender(&plain));
                        self.connection.greet(&Greeting::Unproved(unproved));
                        self.connection.flush_quietly();
                        talk.stage = Stage::Dismissed;
                        return Ok(());
                    }
                };
                let hello = Hello::decode(&hello);
                let hello = hello.map_err(|broken| format!("it sent {}", broken.0))?;
                let (answer, seal) = responder
                    .answer()
                    .map_err(|error| format!("there is no answer to it: {error}"))?;
                self.connection.greet(&Greeting::Answer(answer));
                self.connection.seal(Arc::clone(&seal));
                talk.decoder.seal(seal);
                self.connection.flush_quietly();
                talk.stage = Stage::Opened { hello };
                Ok(())
            }
            (Stage::Opened { hello }, Greeting::Present) => {
                let Some(gate) = guests.gate.upgrade() else {
                    return Err(Refusal::from(String::from("this rank has left")));
                };
                let welcome = gate.admit(&hello)?;
                self.connection.greet(&welcome);
                guests.forget(self.number);
                let mut decoder = std::mem::replace(&mut talk.decoder, Decoder::new(0));
                decoder.set_limit(LARGEST_FRAME);
                let connection = Arc::clone(&self.connection);
                talk.stage = match hello.role {
                    Role::Asker => {
                        decoder.set_limit(LARGEST_QUESTION);
                        talk.decoder = decoder;
                        Stage::Asks
                    }
                    _ => Stage::In(gate.let_in(connection, decoder)),
                };
                self.connection.flush_quietly();
                Ok(())
            }
            (_, Greeting::Refused { why, .. }) => Err(format!("it hung up: {why}").into()),
            _ => Err(String::from("it greeted out of turn").into()),
        }
    }

    /// Ends the guest; `why` is noted.
    fn end(&self, guests: &Guests, why: Option<&str>) {
        if let Some(why) = why {
            guests.note(&self.from, why);
        }
        guests.forget(self.number);
        self.close();
    }
}

impl Source for Guest {
    fn ready(self: Arc<Self>, events: EventFlags) {
        let Some(guests) = self.guests.upgrade() else {
            return self.close();
        };
        let talk = &mut *self.talk.lock();
        if let Stage::In(port) = &talk.stage {
            return port.ready(events);
        }
        if events.contains(EventFlags::OUT) {
            self.connection.flush_quietly();
        }
        let received = self.connection.receive(&mut talk.decoder);
        // A dismissed guest was answered, whatever it sends now.
        while !matches!(talk.stage, Stage::Dismissed) {
            let taken = match talk.decoder.next() {
                Ok(None) => break,
                Ok(Some(frame)) if matches!(talk.stage, Stage::Asks) => {
                    let gate = guests.gate.upgrade();
                    let stays = gate.map(|gate| gate.answer_asker(&self.connection, &frame));
                    match stays {
                        Some(Ok(true)) => continue,
                        Some(Err(why)) => guests.note(&self.from, &why),
                        Some(Ok(false)) | None => {}
                    }
                    return self.close();
                }
                Ok(Some(frame)) => match Greeting::decode(&frame) {
                    Ok(greeting) => self.take(&guests, talk, greeting),
                    Err(OTHER_VERSION) => Err(OTHER_VERSION.0.to_owned().into()),
                    Err(broken) => Err(format!("it sent {}", broken.0).into()),
                },
                Err(broken) => Err(format!("it sent {}", broken.0).into()),
            };
            if let Err(refusal) = taken {
                self.refuse(&guests, &refusal);
                talk.stage = Stage::Dismissed;
                break;
            }
            if let Stage::In(port) = &talk.stage {
                // Data that came after the greeting is in its decoder.
                return port.read();
            }
        }
        if received.is_ok_and(|got| got == Received::Some) {
            return;
        }
        match &talk.stage {
            Stage::Hello => {
                self.end(&guests, Some("it hung up before it had said who it is"));
            }
            Stage::Opened { hello } => {
                let why = format!("{}, {UNSEEN}", hello.claim());
                self.end(&guests, Some(&why));
            }
            Stage::Dismissed | Stage::In(_) | Stage::Asks => self.end(&guests, None),
        }
    }

    fn due(self: Arc<Self>, _: Instant) {
        let Some(guests) = self.guests.upgrade() else {
            return;
        };
        let talk = &*self.talk.lock();
        match &talk.stage {
            Stage::In(_) => {}
            Stage::Asks | Stage::Dismissed => self.end(&guests, None),
            Stage::Hello => {
                let limit = PATIENCE.as_secs();
                let why = format!("it did not say who it is within {limit} s");
                self.end(&guests, Some(&why));
            }
            Stage::Opened { hello } => {
                let why = format!("{}, {UNSEEN}", hello.claim());
                self.end(&guests, Some(&why));
            }
        }
    }
}
