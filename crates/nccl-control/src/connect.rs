//! Joining: connecting to a coordinator, and authenticating it.

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
use super::refusal::Refusal;
use super::service::WAIT_LOG_INTERVAL;
use super::socket;
use super::tcp;
use crate::error::{Error, Result};

/// The role, the rank and the world size that a joining process states.
#[derive(Clone, Copy, Debug)]
pub(super) struct ClaimedRole {
    pub(super) role: PeerRole,
    pub(super) rank: usize,
    pub(super) size: usize,
}

impl ClaimedRole {
    pub(super) fn rank(rank: usize, size: usize) -> Self {
        Self {
            role: PeerRole::Rank,
            rank,
            size,
        }
    }

    /// A process of the job that was started as rank `slot`.
    pub(super) fn member(slot: usize) -> Self {
        Self {
            role: PeerRole::Member,
            rank: slot,
            size: 0,
        }
    }

    /// A process that asks to become a rank of the next generation.
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

impl ClaimedRole {
    pub(super) fn recording_reader(size: usize) -> Self {
        Self {
            role: PeerRole::RecordingReader,
            rank: 0,
            size,
        }
    }
}

impl fmt::Display for ClaimedRole {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.role {
            PeerRole::Rank => write!(f, "rank {}", self.rank),
            PeerRole::Observer | PeerRole::NewObserver => f.write_str("an observer"),
            PeerRole::Joiner => f.write_str("a joiner"),
            PeerRole::Member => f.write_str("a process of the job"),
            PeerRole::RecordingReader => f.write_str("a process that asks for recordings"),
        }
    }
}

/// An authenticated connection to another process of the job.
pub(super) struct AuthenticatedConnection {
    pub(super) connection: Arc<Connection>,
    pub(super) decoder: Decoder,
    /// The rank of the process that answered.
    pub(super) accepted_by_rank: usize,
}

/// The result of one attempt.
pub(super) enum AttemptOutcome {
    Connected(AuthenticatedConnection),
    /// The peer follows another rank, which coordinates at this address as far as the peer knows.
    Follows {
        at: String,
        why: String,
    },
    /// The refusal is final: another attempt would end in the same way.
    Refused(String),
    /// No peer answers yet, or the wrong peer does; in the latter case with its answer.
    NotYet(io::Error, Option<String>),
}

/// The error kind for a peer that accepts the connection and sends nothing.
pub(super) const UNRESPONSIVE: io::ErrorKind = io::ErrorKind::WouldBlock;

/// How long one attempt may take, at one of several addresses or ports.
pub(super) const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(2);

/// How long a name without an address is looked up again, if it is not expected to get an address while the job runs: a
/// name server may be slow or restarting.
const LOOK_UP_TIMEOUT: Duration = Duration::from_secs(10);

/// Makes one attempt to connect and authenticate; `attempt_number` counts the attempts.
pub(super) fn attempt(
    address: &Address,
    job: &Job,
    claimed_role: ClaimedRole,
    attempt_number: usize,
    deadline: Instant,
) -> AttemptOutcome {
    let has_several_ports = matches!(address, Address::Tcp(host_ports) if host_ports.is_range());
    let socket = match socket::dial(address, attempt_number, deadline) {
        Ok(socket) => socket,
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            return AttemptOutcome::Refused(format!("no rank 0 at {address}: {error}"));
        }
        Err(error) => return AttemptOutcome::NotYet(error, None),
    };
    let connection = Arc::new(Connection::new(socket));
    let mut decoder = Decoder::new(LARGEST_HANDSHAKE_MESSAGE);
    let attempt_deadline = match has_several_ports {
        true => deadline.min(Instant::now() + ATTEMPT_TIMEOUT),
        false => deadline,
    };
    let dialled = match Endpoint::dialled(address, connection.fd()) {
        Ok(dialled) => Some(dialled).filter(|_| !job.translated),
        Err(error) => return AttemptOutcome::NotYet(error, None),
    };
    let outcome = authenticate(
        &connection,
        &mut decoder,
        job,
        claimed_role,
        dialled,
        attempt_deadline,
    );
    match outcome {
        Ok(HandshakeOutcome::Welcome { accepted_by_rank }) => {
            AttemptOutcome::Connected(AuthenticatedConnection {
                connection,
                decoder,
                accepted_by_rank,
            })
        }
        Ok(HandshakeOutcome::Refused(Refusal { why, retry })) => match retry {
            Retry::At { at, .. } => AttemptOutcome::Follows { at, why },
            Retry::Later => AttemptOutcome::NotYet(io::Error::other(why.clone()), Some(why)),
            Retry::Elsewhere if has_several_ports => {
                AttemptOutcome::NotYet(io::Error::other(why.clone()), Some(why))
            }
            Retry::Elsewhere | Retry::Never => AttemptOutcome::Refused(format!(
                "{claimed_role} could not join at {address}: {why}"
            )),
        },
        Err(error) if error.kind() == io::ErrorKind::TimedOut => {
            let text = "a process accepted the connection and does not answer";
            AttemptOutcome::NotYet(io::Error::new(UNRESPONSIVE, text), None)
        }
        Err(error) => AttemptOutcome::NotYet(error, None),
    }
}

/// Retries until a peer answers as the job's rank 0, or refuses this process.
pub(super) fn connect_to_rank_0(
    address: &Address,
    job: &Job,
    claimed_role: ClaimedRole,
    deadline: Instant,
) -> Result<AuthenticatedConnection> {
    let mut pause = Duration::from_millis(2);
    let mut last_refusal = None;
    // A router that rejects packets reports so only now and then, and is silent in between.
    let mut last_error: Option<String> = None;
    let mut report = Instant::now() + WAIT_LOG_INTERVAL;
    let mut unresolved_since = None;
    for attempt_number in 0.. {
        let error = match attempt(address, job, claimed_role, attempt_number, deadline) {
            AttemptOutcome::Connected(connection) => return Ok(connection),
            AttemptOutcome::Refused(why) => return Err(Error::rendezvous(why)),
            AttemptOutcome::Follows { why, .. } => {
                let why = format!("{claimed_role} could not join at {address}: {why}");
                return Err(Error::rendezvous(why));
            }
            AttemptOutcome::NotYet(error, why) => {
                last_refusal = why.or(last_refusal);
                if error.kind() == io::ErrorKind::TimedOut {
                    match &last_error {
                        Some(previous) => {
                            io::Error::other(format!("{previous}; at last, no answer at all"))
                        }
                        None => error,
                    }
                } else {
                    last_error = Some(error.to_string());
                    error
                }
            }
        };
        let now = Instant::now();
        match tcp::is_unresolved_for_good(&error) {
            true => {
                unresolved_since.get_or_insert(now);
            }
            false => unresolved_since = None,
        }
        let has_no_address = unresolved_since.is_some_and(|since| now >= since + LOOK_UP_TIMEOUT);
        if has_no_address || now >= deadline && tcp::is_unresolved(&error) {
            return Err(Error::rendezvous(format!(
                "rank 0 cannot be reached at {address}: {error}"
            )));
        }
        if now >= deadline {
            let last_answer =
                last_refusal.map_or_else(String::new, |why| format!("; last answer: {why}"));
            return Err(Error::rendezvous(format!(
                "rank 0 does not answer at {address} ({error}): is it running?{last_answer}"
            )));
        }
        // The coordinator logs for all waiting ranks that it knows, but does not know this process.
        if Instant::now() >= report {
            report += WAIT_LOG_INTERVAL;
            tracing::info!(name: "nccl.rendezvous.waiting", target: "nccl", "still waiting: {claimed_role} does not reach rank 0 at {address}: {error}");
        }
        let remaining = deadline.saturating_duration_since(Instant::now());
        std::thread::sleep(pause.min(remaining));
        pause = (pause * 2).min(Duration::from_millis(50));
    }
    unreachable!("the loop ends at the deadline")
}

/// The result of a handshake message.
enum HandshakeOutcome {
    Welcome { accepted_by_rank: usize },
    Refused(Refusal),
}

fn authenticate(
    connection: &Connection,
    decoder: &mut Decoder,
    job: &Job,
    claimed_role: ClaimedRole,
    dialled: Option<Endpoint>,
    deadline: Instant,
) -> io::Result<HandshakeOutcome> {
    let secret = job.secret.as_ref();
    let hello = Hello {
        job: job.name.clone(),
        generation: job.generation,
        world_size: claimed_role.size,
        role: claimed_role.role,
        rank: claimed_role.rank,
        host: crate::host::name().to_string(),
        pid: std::process::id().into(),
        kernel: process::kernel().to_owned(),
    };
    let preamble = Preamble {
        has_secret: secret.is_some(),
        dialled,
    };
    let (initiator, first) = Initiator::begin(secret, &preamble.prologue(), &hello.encode())?;
    let hello = HandshakeMessage::Hello {
        preamble: preamble.clone(),
        first,
    };
    connection.send_handshake(&hello);
    connection.drain(deadline)?;
    let elsewhere = |why| Ok(HandshakeOutcome::Refused(Refusal::elsewhere(why)));
    let answer = match receive(connection, decoder, deadline) {
        Ok(HandshakeMessage::Answer(answer)) => answer,
        Ok(HandshakeMessage::Failed(failure)) => return elsewhere(failure.of_receiver(&preamble)),
        Ok(HandshakeMessage::Refused { why, .. }) => {
            return elsewhere(format!("the process at this address refused it: {why}"));
        }
        Ok(_) => return elsewhere(String::from(NOT_OF_THE_JOB)),
        Err(error) if error.kind() == io::ErrorKind::InvalidData => {
            return elsewhere(format!("{NOT_OF_THE_JOB}: it sent {error}"));
        }
        Err(error) => return Err(error),
    };
    let Some(seal) = initiator.finish(&answer) else {
        return elsewhere(HandshakeFailure::OtherSecret.of_receiver(&preamble));
    };
    connection.seal(Arc::clone(&seal));
    // The peer has proved that it knows the secret, so its frames may be as large as a coordinator's.
    decoder.seal(seal);
    decoder.set_limit(LARGEST_FRAME);
    connection.send_handshake(&HandshakeMessage::Confirm);
    connection.drain(deadline)?;
    match receive(connection, decoder, deadline) {
        Ok(HandshakeMessage::Welcome { by, .. }) => Ok(HandshakeOutcome::Welcome {
            accepted_by_rank: by,
        }),
        Ok(HandshakeMessage::Refused { why, retry }) => {
            let why = format!("the process at this address refused it: {why}");
            Ok(HandshakeOutcome::Refused(Refusal { why, retry }))
        }
        Ok(_) => elsewhere(String::from(NOT_OF_THE_JOB)),
        Err(error) if error.kind() == io::ErrorKind::InvalidData => {
            elsewhere(format!("the process at this address sent {error}"))
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

/// The reason when a peer sends something other than a handshake message.
const NOT_OF_THE_JOB: &str = "the process at this address is not a rank of this job";
