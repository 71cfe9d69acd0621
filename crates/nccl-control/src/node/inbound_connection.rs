//! A connection to a listening socket, until the peer has proved its identity.

use std::io;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::inbound_connections::{self, InboundConnections};
use crate::connection::{Connection, Received};
use crate::frame::{Decoder, LARGEST_FRAME, LARGEST_HANDSHAKE_MESSAGE};
use crate::handshake::{
    HandshakeFailure, HandshakeMessage, Hello, OTHER_VERSION, PeerRole, Preamble, Retry,
};
use crate::noise::Responder;
use crate::reactor::{EventFlags, Reactor, Source};
use crate::refusal::{HANDSHAKE_TIMEOUT, Refusal};
use crate::sync::Mutex;
use crate::transport::PeerConnection;

/// The largest request of a process that asks for recordings.
const LARGEST_RECORDING_REQUEST: usize = 1 << 20;

/// Describes a peer that sent a first message, but nothing under the keys of the handshake.
const UNCONFIRMED: &str =
    "sent a first message and did not prove that it made it: it may be a recorded one";

pub(super) struct InboundConnection {
    this: Weak<Self>,
    inbound: Weak<InboundConnections>,
    number: u64,
    /// The address of the peer, for messages.
    pub(super) from: String,
    /// The expected plain part of a handshake message that is meant for this process.
    preamble: Preamble,
    pub(super) connection: Arc<Connection>,
    /// Locked only by the reactor's thread.
    handshake: Mutex<Handshake>,
}

struct Handshake {
    decoder: Decoder,
    state: HandshakeState,
}

enum HandshakeState {
    Hello,
    /// The first message was made with the secret, but may not originate from this peer.
    Opened {
        hello: Hello,
    },
    /// The peer was refused, and may still be reading the reason.
    Refused,
    /// The peer has joined.
    Joined(Arc<PeerConnection>),
    /// The peer asks for recordings.
    RecordingReader,
}

impl InboundConnection {
    pub(super) fn new(
        inbound: Weak<InboundConnections>,
        number: u64,
        from: String,
        preamble: Preamble,
        connection: Arc<Connection>,
    ) -> Arc<Self> {
        let handshake = Mutex::new(Handshake {
            decoder: Decoder::new(LARGEST_HANDSHAKE_MESSAGE),
            state: HandshakeState::Hello,
        });
        Arc::new_cyclic(|this| Self {
            this: Weak::clone(this),
            inbound,
            number,
            from,
            preamble,
            connection,
            handshake,
        })
    }

    pub(super) fn start(self: &Arc<Self>, timeout: Duration) -> io::Result<()> {
        let reactor = Reactor::get()?;
        let events = EventFlags::IN | EventFlags::RDHUP;
        let source = Arc::clone(self) as Arc<dyn Source>;
        let token = reactor.add(self.connection.fd(), events, source)?;
        self.connection.set_token(token);
        let this = Weak::clone(&self.this) as Weak<dyn Source>;
        reactor.wake_at(Instant::now() + timeout, this);
        Ok(())
    }

    fn close(&self) {
        inbound_connections::close(&self.connection);
    }

    /// Sends the refusal, and reads no further data.
    pub(super) fn refuse(&self, inbound: &InboundConnections, refusal: &Refusal) {
        if !matches!(refusal.retry, Retry::At { .. }) {
            inbound.log_refusal(&self.from, &refusal.why);
        }
        self.connection.send_handshake(&HandshakeMessage::Refused {
            why: refusal.why.clone(),
            retry: refusal.retry.clone(),
        });
        self.connection.flush_quietly();
    }

    fn handle_message(
        &self,
        inbound: &InboundConnections,
        handshake: &mut Handshake,
        message: HandshakeMessage,
    ) -> Result<(), Refusal> {
        match (
            std::mem::replace(&mut handshake.state, HandshakeState::Hello),
            message,
        ) {
            (HandshakeState::Hello, HandshakeMessage::Hello { preamble, first }) => {
                let secret = inbound
                    .admission
                    .upgrade()
                    .and_then(|admission| admission.secret());
                let opened = self.preamble.refuse(&preamble).and_then(|()| {
                    Responder::open(secret.as_ref(), &self.preamble.prologue(), &first)
                        .ok_or(HandshakeFailure::OtherSecret)
                });
                let (responder, hello) = match opened {
                    Ok(opened) => opened,
                    Err(failure) => {
                        // Sent instead of the refusal, which contains no further information.
                        inbound.log_refusal(&self.from, &failure.of_sender(&preamble));
                        self.connection
                            .send_handshake(&HandshakeMessage::Failed(failure));
                        self.connection.flush_quietly();
                        handshake.state = HandshakeState::Refused;
                        return Ok(());
                    }
                };
                let hello = Hello::decode(&hello);
                let hello = hello.map_err(|broken| format!("it sent {}", broken.0))?;
                let (answer, seal) = responder
                    .answer()
                    .map_err(|error| format!("there is no answer to it: {error}"))?;
                self.connection
                    .send_handshake(&HandshakeMessage::Answer(answer));
                self.connection.seal(Arc::clone(&seal));
                handshake.decoder.seal(seal);
                self.connection.flush_quietly();
                handshake.state = HandshakeState::Opened { hello };
                Ok(())
            }
            (HandshakeState::Opened { hello }, HandshakeMessage::Confirm) => {
                let Some(admission) = inbound.admission.upgrade() else {
                    return Err(Refusal::from(String::from("this rank has left")));
                };
                let welcome = admission.admit(&hello)?;
                self.connection.send_handshake(&welcome);
                inbound.remove(self.number);
                let mut decoder = std::mem::replace(&mut handshake.decoder, Decoder::new(0));
                decoder.set_limit(LARGEST_FRAME);
                let connection = Arc::clone(&self.connection);
                handshake.state = match hello.role {
                    PeerRole::RecordingReader => {
                        decoder.set_limit(LARGEST_RECORDING_REQUEST);
                        handshake.decoder = decoder;
                        HandshakeState::RecordingReader
                    }
                    _ => HandshakeState::Joined(admission.accept_peer(connection, decoder)),
                };
                self.connection.flush_quietly();
                Ok(())
            }
            (_, HandshakeMessage::Refused { why, .. }) => {
                Err(format!("it closed the connection: {why}").into())
            }
            _ => Err(String::from("it sent a handshake message out of order").into()),
        }
    }

    /// Ends the connection; `why` is recorded as a refusal.
    fn end(&self, inbound: &InboundConnections, why: Option<&str>) {
        if let Some(why) = why {
            inbound.log_refusal(&self.from, why);
        }
        inbound.remove(self.number);
        self.close();
    }
}

impl Source for InboundConnection {
    fn ready(self: Arc<Self>, events: EventFlags) {
        let Some(inbound) = self.inbound.upgrade() else {
            return self.close();
        };
        let handshake = &mut *self.handshake.lock();
        if let HandshakeState::Joined(peer_connection) = &handshake.state {
            return peer_connection.ready(events);
        }
        if events.contains(EventFlags::OUT) {
            self.connection.flush_quietly();
        }
        let received = self.connection.receive(&mut handshake.decoder);
        // A refused peer has been answered, whatever it sends afterwards.
        while !matches!(handshake.state, HandshakeState::Refused) {
            let result = match handshake.decoder.next() {
                Ok(None) => break,
                Ok(Some(frame)) if matches!(handshake.state, HandshakeState::RecordingReader) => {
                    let admission = inbound.admission.upgrade();
                    let answered = admission.map(|admission| {
                        admission.answer_recording_request(&self.connection, &frame)
                    });
                    match answered {
                        Some(Ok(())) => continue,
                        Some(Err(why)) => inbound.log_refusal(&self.from, &why),
                        None => {}
                    }
                    return self.close();
                }
                Ok(Some(frame)) => match HandshakeMessage::decode(&frame) {
                    Ok(message) => self.handle_message(&inbound, handshake, message),
                    Err(OTHER_VERSION) => Err(OTHER_VERSION.0.to_owned().into()),
                    Err(broken) => Err(format!("it sent {}", broken.0).into()),
                },
                Err(broken) => Err(format!("it sent {}", broken.0).into()),
            };
            if let Err(refusal) = result {
                self.refuse(&inbound, &refusal);
                handshake.state = HandshakeState::Refused;
                break;
            }
            if let HandshakeState::Joined(peer_connection) = &handshake.state {
                // Data that arrived after the handshake is in its decoder.
                return peer_connection.read();
            }
        }
        if received.is_ok_and(|got| got == Received::Some) {
            return;
        }
        match &handshake.state {
            HandshakeState::Hello => {
                self.end(
                    &inbound,
                    Some("it closed the connection before its handshake"),
                );
            }
            HandshakeState::Opened { hello } => {
                let why = format!("{}, {UNCONFIRMED}", hello.describe());
                self.end(&inbound, Some(&why));
            }
            HandshakeState::Refused
            | HandshakeState::Joined(_)
            | HandshakeState::RecordingReader => self.end(&inbound, None),
        }
    }

    fn due(self: Arc<Self>, _: Instant) {
        let Some(inbound) = self.inbound.upgrade() else {
            return;
        };
        let handshake = &*self.handshake.lock();
        match &handshake.state {
            HandshakeState::Joined(_) => {}
            HandshakeState::RecordingReader | HandshakeState::Refused => self.end(&inbound, None),
            HandshakeState::Hello => {
                let timeout = HANDSHAKE_TIMEOUT.as_secs();
                let why = format!("it did not complete its handshake within {timeout} s");
                self.end(&inbound, Some(&why));
            }
            HandshakeState::Opened { hello } => {
                let why = format!("{}, {UNCONFIRMED}", hello.describe());
                self.end(&inbound, Some(&why));
            }
        }
    }
}
