//! Joining: finding the coordinator, and verifying it.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::address::Address;
use super::connection::Connection;
use super::endpoint::Endpoint;
use super::frame::{Decoder, LARGEST_FRAME, LARGEST_HANDSHAKE_MESSAGE};
use super::handshake::{HandshakeFailure, HandshakeMessage, Hello, PeerRole, Preamble, Retry};
use super::job::Job;
use super::noise::Initiator;
use super::process;
use super::service::REPORT;
use super::socket;
use crate::error::{Error, Result};

/// The role, the rank and the world size that a joining process states.
#[derive(Clone, Copy, Debug)]
pub(super) struct Identity {
    pub(super) role: PeerRole,
    pub(super) rank: usize,
    pub(super) size: usize,
}

impl Identity {
    pub(super) fn rank(rank: usize, size: usize) -> Self {
        Self {
            role: PeerRole::Rank,
            rank,
            size,
        }
    }

    /// A process of the job, which was started as rank `slot`.
    pub(super) fn member(slot: usize) -> Self {
        Self {
            role: PeerRole::Member,
            rank: slot,
            size: 0,
        }
    }

    /// A process that asks to be a rank of the next generation.
    pub(super) fn joiner() -> Self {
        Self {
            role: PeerRole::Joiner,
            rank: 0,
            size: 0,
        }
    }

    pub(super) fn observer(size: usize) -> Self {
        Self {
            role: PeerRole::Observer,
            rank: 0,
            size,
        }
    }

    /// An observer that has not been connected before.
    pub(super) fn new_observer(size: usize) -> Self {
        Self {
            role: PeerRole::NewObserver,
            ..Self::observer(size)
        }
    }
}

impl Identity {
    pub(super) fn recording_reader(size: usize) -> Self {
        Self {
            role: PeerRole::RecordingReader,
            rank: 0,
            size,
        }
    }
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.role {
            PeerRole::Rank => write!(f, "rank {}", self.rank),
            PeerRole::Observer | PeerRole::NewObserver => f.write_str("an observer"),
            PeerRole::Joiner => f.write_str("a newcomer"),
            PeerRole::Member => f.write_str("a process of the job"),
            PeerRole::RecordingReader => f.write_str("who asks for recordings"),
        }
    }
}

/// Why an attempt was refused.
enum PeerRefusal {
    /// The coordinator itself refuses.
    Final(String),
    /// The peer is not the job's rank 0; where there are several ports, rank 0 may be at another.
    Elsewhere(String),
    /// The peer coordinates an attempt of the job that is about to end.
    Later(String),
    /// The peer follows another rank, which coordinates at this address.
    Follows { at: String, why: String },
}

/// The connection to the coordinator that has let this process in.
pub(super) struct AuthenticatedConnection {
    pub(super) connection: Arc<Connection>,
    pub(super) decoder: Decoder,
    /// The rank of that coordinator.
    pub(super) by: usize,
}

/// The result of one attempt.
pub(super) enum AttemptOutcome {
    Connected(AuthenticatedConnection),
    /// The peer follows another rank, which coordinates at this address as far as the peer knows.
    Follows {
        at: String,
        why: String,
    },
    /// Another attempt would end alike.
    Refused(String),
    /// No peer is there yet, or not the right one; in the latter case, its answer.
    NotYet(io::Error, Option<String>),
}

/// The kind of the error of a peer that accepts the connection and sends nothing.
pub(super) const UNRESPONSIVE: io::ErrorKind = io::ErrorKind::WouldBlock;

/// How long the peer at one of several ports may take to prove that it is the right one.
const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(2);

/// Makes one attempt to join; `turn` counts the attempts.
pub(super) fn attempt(
    address: &Address,
    job: &Job,
    identity: Identity,
    turn: usize,
    deadline: Instant,
) -> AttemptOutcome {
    let several = matches!(address, Address::Tcp(place) if place.is_range());
    let socket = match socket::dial(address, turn, deadline) {
        Ok(socket) => socket,
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            return AttemptOutcome::Refused(format!("no rank 0 at {address}: {error}"));
        }
        Err(error) => return AttemptOutcome::NotYet(error, None),
    };
    let connection = Arc::new(Connection::new(socket));
    let mut decoder = Decoder::new(LARGEST_HANDSHAKE_MESSAGE);
    let timeout = match several {
        true => deadline.min(Instant::now() + ATTEMPT_TIMEOUT),
        false => deadline,
    };
    let dialled = match Endpoint::dialled(address, connection.fd()) {
        Ok(dialled) => Some(dialled).filter(|_| !job.translated),
        Err(error) => return AttemptOutcome::NotYet(error, None),
    };
    match authenticate(&connection, &mut decoder, job, identity, dialled, timeout) {
        Ok(HandshakeOutcome::Welcome { by }) => {
            AttemptOutcome::Connected(AuthenticatedConnection {
                connection,
                decoder,
                by,
            })
        }
        Ok(HandshakeOutcome::No(PeerRefusal::Follows { at, why })) => {
            AttemptOutcome::Follows { at, why }
        }
        Ok(HandshakeOutcome::No(PeerRefusal::Later(why))) => {
            AttemptOutcome::NotYet(io::Error::other(why.clone()), Some(why))
        }
        Ok(HandshakeOutcome::No(PeerRefusal::Elsewhere(why))) if several => {
            AttemptOutcome::NotYet(io::Error::other(why.clone()), Some(why))
        }
        Ok(HandshakeOutcome::No(PeerRefusal::Final(why) | PeerRefusal::Elsewhere(why))) => {
            AttemptOutcome::Refused(format!("{identity} could not join at {address}: {why}"))
        }
        Err(error) if error.kind() == io::ErrorKind::TimedOut => {
            let says = "a process accepts the connection and does not answer";
            AttemptOutcome::NotYet(io::Error::new(UNRESPONSIVE, says), None)
        }
        Err(error) => AttemptOutcome::NotYet(error, None),
    }
}

/// Tries until a peer answers as the job's rank 0, or refuses this process.
pub(super) fn connect_to_rank_0(
    address: &Address,
    job: &Job,
    identity: Identity,
    deadline: Instant,
) -> Result<AuthenticatedConnection> {
    let mut pause = Duration::from_millis(2);
    let mut refused = None;
    // A router that rejects packets reports that only now and then, and is silent in between.
    let mut spoken: Option<String> = None;
    let mut report = Instant::now() + REPORT;
    for turn in 0.. {
        let error = match attempt(address, job, identity, turn, deadline) {
            AttemptOutcome::Connected(established) => return Ok(established),
            AttemptOutcome::Refused(why) => return Err(Error::rendezvous(why)),
            AttemptOutcome::Follows { why, .. } => {
                let why = format!("{identity} could not join at {address}: {why}");
                return Err(Error::rendezvous(why));
            }
            AttemptOutcome::NotYet(error, why) => {
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
        // The coordinator, which logs for all ranks that wait, does not know of this process.
        if Instant::now() >= report {
            report += REPORT;
            tracing::info!(name: "nccl.rendezvous.waiting", target: "nccl", "still waiting: {identity} does not reach rank 0 at {address}: {error}");
        }
        let left = deadline.saturating_duration_since(Instant::now());
        std::thread::sleep(pause.min(left));
        pause = (pause * 2).min(Duration::from_millis(50));
    }
    unreachable!("the loop ends at the deadline")
}

/// The result of a handshake message.
enum HandshakeOutcome {
    Welcome { by: usize },
    No(PeerRefusal),
}

fn authenticate(
    connection: &Connection,
    decoder: &mut Decoder,
    job: &Job,
    identity: Identity,
    dialled: Option<Endpoint>,
    deadline: Instant,
) -> io::Result<HandshakeOutcome> {
    let secret = job.secret.as_ref();
    let hello = Hello {
        job: job.name.clone(),
        generation: job.generation,
        world_size: identity.size,
        role: identity.role,
        rank: identity.rank,
        host: crate::host::name().to_string(),
        pid: std::process::id().into(),
        kernel: process::kernel().to_owned(),
    };
    let preamble = Preamble {
        has_secret: secret.is_some(),
        dialled,
    };
    let (initiator, first) = Initiator::begin(secret, &preamble.prologue(), &hello.encode())?;
    let greeting = HandshakeMessage::Hello {
        preamble: preamble.clone(),
        first,
    };
    connection.send_handshake(&greeting);
    connection.drain(deadline)?;
    let elsewhere = |why| Ok(HandshakeOutcome::No(PeerRefusal::Elsewhere(why)));
    let answer = match receive(connection, decoder, deadline) {
        Ok(HandshakeMessage::Answer(answer)) => answer,
        Ok(HandshakeMessage::Failed(failure)) => return elsewhere(failure.of_receiver(&preamble)),
        Ok(HandshakeMessage::Refused { why, .. }) => {
            return elsewhere(format!("who answers turned it away: {why}"));
        }
        Ok(_) => return Ok(HandshakeOutcome::No(no_rank_0())),
        Err(error) if error.kind() == io::ErrorKind::InvalidData => {
            return elsewhere(format!("who answers is no rank 0: it sent {error}"));
        }
        Err(error) => return Err(error),
    };
    let Some(seal) = initiator.finish(&answer) else {
        return elsewhere(HandshakeFailure::OtherSecret.of_receiver(&preamble));
    };
    connection.seal(Arc::clone(&seal));
    // The peer has proved that it knows the secret: its frames may be as large as those of a coordinator.
    decoder.seal(seal);
    decoder.set_limit(LARGEST_FRAME);
    connection.send_handshake(&HandshakeMessage::Confirm);
    connection.drain(deadline)?;
    match receive(connection, decoder, deadline) {
        Ok(HandshakeMessage::Welcome { by, .. }) => Ok(HandshakeOutcome::Welcome { by }),
        Ok(HandshakeMessage::Refused { why, retry }) => {
            let why = format!("rank 0 turned it away: {why}");
            Ok(HandshakeOutcome::No(match retry {
                Retry::Elsewhere => PeerRefusal::Elsewhere(why),
                Retry::Later => PeerRefusal::Later(why),
                Retry::At { at, .. } => PeerRefusal::Follows { at, why },
                Retry::Never => PeerRefusal::Final(why),
            }))
        }
        Ok(_) => Ok(HandshakeOutcome::No(no_rank_0())),
        Err(error) if error.kind() == io::ErrorKind::InvalidData => {
            elsewhere(format!("who answers sent {error}"))
        }
        Err(error) => Err(error),
    }
}

fn receive(
    connection: &Connection,
    decoder: &mut Decoder,
    deadline: Instant,
) -> io::Result<HandshakeMessage> {
    let frame = connection.expect(decoder, deadline)?;
    HandshakeMessage::decode(&frame)
        .map_err(|broken| io::Error::new(io::ErrorKind::InvalidData, broken.0))
}

fn no_rank_0() -> PeerRefusal {
    PeerRefusal::Elsewhere(String::from("who answers is no rank 0"))
}
