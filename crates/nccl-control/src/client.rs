//! Joining: finding the coordinator, and verifying it.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::address::Address;
use super::connection::Connection;
use super::endpoint::Endpoint;
use super::frame::{Decoder, GREETING, LARGEST_FRAME};
use super::greeting::{Again, Greeting, Hello, Plain, Role, Unproved};
use super::job::Job;
use super::noise::Initiator;
use super::place;
use super::process;
use super::service::REPORT;
use crate::error::{Error, Result};

/// The role, the rank and the world size that a joining process states.
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

    /// A process of the job, which was started as rank `slot`.
    pub(super) fn member(slot: usize) -> Self {
        Self {
            role: Role::Member,
            rank: slot,
            size: 0,
        }
    }

    /// A process that asks to be a rank of the next generation.
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

    /// An observer that has not been connected before.
    pub(super) fn onlooker(size: usize) -> Self {
        Self {
            role: Role::Onlooker,
            ..Self::observer(size)
        }
    }
}

impl Claim {
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
            Role::Observer | Role::Onlooker => f.write_str("an observer"),
            Role::Newcomer => f.write_str("a newcomer"),
            Role::Member => f.write_str("a process of the job"),
            Role::Asker => f.write_str("who asks for recordings"),
        }
    }
}

/// Why an attempt was refused.
enum Refusal {
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
pub(super) struct Met {
    pub(super) connection: Arc<Connection>,
    pub(super) decoder: Decoder,
    /// The rank of that coordinator.
    pub(super) by: usize,
}

/// The result of one attempt.
pub(super) enum Tried {
    Met(Met),
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
pub(super) const MUTE: io::ErrorKind = io::ErrorKind::WouldBlock;

/// How long the peer at one of several ports may take to prove that it is the right one.
const TRY: Duration = Duration::from_secs(2);

/// Makes one attempt to join; `turn` counts the attempts.
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
    let dialled = match Endpoint::dialled(address, connection.fd()) {
        Ok(dialled) => Some(dialled).filter(|_| !job.translated),
        Err(error) => return Tried::NotYet(error, None),
    };
    match greet(&connection, &mut decoder, job, claim, dialled, patience) {
        Ok(Greeted::Welcome { by }) => Tried::Met(Met {
            connection,
            decoder,
            by,
        }),
        Ok(Greeted::No(Refusal::Follows { at, why })) => Tried::Follows { at, why },
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

/// Tries until a peer answers as the job's rank 0, or refuses this process.
pub(super) fn meet(address: &Address, job: &Job, claim: Claim, deadline: Instant) -> Result<Met> {
    let mut pause = Duration::from_millis(2);
    let mut refused = None;
    // A router that rejects packets reports that only now and then, and is silent in between.
    let mut spoken: Option<String> = None;
    let mut report = Instant::now() + REPORT;
    for turn in 0.. {
        let error = match attempt(address, job, claim, turn, deadline) {
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
        // The coordinator, which logs for all ranks that wait, does not know of this process.
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

/// The result of a greeting.
enum Greeted {
    Welcome { by: usize },
    No(Refusal),
}

fn greet(
    connection: &Connection,
    decoder: &mut Decoder,
    job: &Job,
    claim: Claim,
    dialled: Option<Endpoint>,
    deadline: Instant,
) -> io::Result<Greeted> {
    let secret = job.secret.as_ref();
    let hello = Hello {
        job: job.name.clone(),
        generation: job.generation,
        world_size: claim.size,
        role: claim.role,
        rank: claim.rank,
        host: crate::host::name().to_string(),
        pid: std::process::id().into(),
        kernel: process::kernel().to_owned(),
    };
    let plain = Plain {
        has_secret: secret.is_some(),
        dialled,
    };
    let (initiator, first) = Initiator::begin(secret, &plain.prologue(), &hello.encode())?;
    let greeting = Greeting::Hello {
        plain: plain.clone(),
        first,
    };
    connection.greet(&greeting);
    connection.drain(deadline)?;
    let elsewhere = |why| Ok(Greeted::No(Refusal::Elsewhere(why)));
    let answer = match hear(connection, decoder, deadline) {
        Ok(Greeting::Answer(answer)) => answer,
        Ok(Greeting::Unproved(unproved)) => return elsewhere(unproved.of_receiver(&plain)),
        Ok(Greeting::Refused { why, .. }) => {
            return elsewhere(format!("who answers turned it away: {why}"));
        }
        Ok(_) => return Ok(Greeted::No(no_rank_0())),
        Err(error) if error.kind() == io::ErrorKind::InvalidData => {
            return elsewhere(format!("who answers is no rank 0: it sent {error}"));
        }
        Err(error) => return Err(error),
    };
    let Some(seal) = initiator.finish(&answer) else {
        return elsewhere(Unproved::OtherSecret.of_receiver(&plain));
    };
    connection.seal(Arc::clone(&seal));
    // The peer has proved that it knows the secret: its frames may be as large as those of a coordinator.
    decoder.seal(seal);
    decoder.set_limit(LARGEST_FRAME);
    connection.greet(&Greeting::Present);
    connection.drain(deadline)?;
    match hear(connection, decoder, deadline) {
        Ok(Greeting::Welcome { by, .. }) => Ok(Greeted::Welcome { by }),
        Ok(Greeting::Refused { why, again }) => {
            let why = format!("rank 0 turned it away: {why}");
            Ok(Greeted::No(match again {
                Again::Elsewhere => Refusal::Elsewhere(why),
                Again::Later => Refusal::Later(why),
                Again::At { at, .. } => Refusal::Follows { at, why },
                Again::Never => Refusal::Final(why),
            }))
        }
        Ok(_) => Ok(Greeted::No(no_rank_0())),
        Err(error) if error.kind() == io::ErrorKind::InvalidData => {
            elsewhere(format!("who answers sent {error}"))
        }
        Err(error) => Err(error),
    }
}

fn hear(connection: &Connection, decoder: &mut Decoder, deadline: Instant) -> io::Result<Greeting> {
    let frame = connection.expect(decoder, deadline)?;
    Greeting::decode(&frame).map_err(|broken| io::Error::new(io::ErrorKind::InvalidData, broken.0))
}

fn no_rank_0() -> Refusal {
    Refusal::Elsewhere(String::from("who answers is no rank 0"))
}
