//! How two processes of a job authenticate each other before any other message.
//!
//! ```text
//! dialing process                        accepting process
//!   in plain: version, whether it has
//!      a secret, and what it dialled
//!   first message of the handshake:
//!      job, generation, size, role, rank,
//!      host, pid, kernel           ───▶
//!                                  ◀───  the answer of the handshake, or in plain
//!                                         what is wrong with the first message
//!   encrypted from here on:
//!   that it received the answer    ───▶
//!                                  ◀───  welcome, with the rank that answers and its
//!                                         generation, or a refusal with its reason and
//!                                         perhaps the coordinator's address
//! ```
//!
//! The handshake ([`noise`](super::noise)) is bound to all plaintext that precedes it: each side computes the expected
//! plaintext itself ([`Preamble::prologue`]), the accepting process from its own address. A handshake fails if bytes
//! were changed on the way, or if the connection was meant for another address. The accepting process registers no rank
//! before the second message, because the first one may be a replay. A plaintext answer is not authenticated: it ends
//! this attempt, and never redirects the rank to another address.
//!
//! Without a secret, the key of the handshake is public: it detects mistakes, but excludes no process.

use super::endpoint::Endpoint;
use nccl_base::wire::{self, bytes, clean};
use serde::{Deserialize, Serialize};

use super::frame::{Broken, Frame, Outgoing};
use crate::sanitize;

/// The beginning of every handshake message, followed by the version; readable by all versions.
pub(super) const MAGIC: [u8; 8] = *b"ncclmeet";
pub(super) const VERSION: u64 = 25;

/// The role in which a process connects.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum PeerRole {
    Rank,
    /// Has no rank: watches the ranks, and may report how their processes ended.
    Observer,
    /// An observer that has not been connected before: it accepts the generation that it states, or the later
    /// generation in which the world is by now.
    NewObserver,
    /// Has no rank yet: asks to become a rank of the next generation.
    Joiner,
    /// Has no rank: asks this process for the contents of its recorder, and leaves.
    RecordingReader,
    /// A process of the job that connects to another process of the job.
    Member,
}

/// The identity that a process claims.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Hello {
    pub(super) job: String,
    pub(super) generation: u64,
    /// 0 from an observer that does not know the size.
    pub(super) world_size: usize,
    pub(super) role: PeerRole,
    pub(super) rank: usize,
    pub(super) host: String,
    pub(super) pid: u64,
    /// The scope of `pid`: the running kernel and the PID namespace.
    pub(super) kernel: String,
}

/// The plain part of a first message.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Preamble {
    pub(super) has_secret: bool,
    /// The address that the sender dialled; `None` where addresses are declared to be translated on the way.
    pub(super) dialled: Option<Endpoint>,
}

/// The messages of the handshake, until both sides are authenticated.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum HandshakeMessage {
    /// Contains a [`Hello`] in the first message of the handshake.
    Hello {
        preamble: Preamble,
        #[serde(with = "bytes")]
        first: Vec<u8>,
    },
    /// The answer of the handshake.
    Answer(#[serde(with = "bytes")] Vec<u8>),
    /// In plaintext: the first message cannot be decrypted.
    Failed(HandshakeFailure),
    /// Encrypted: the sender of the first message has received the answer.
    Confirm,
    /// From the accepting rank.
    Welcome { by: usize, generation: u64 },
    Refused {
        #[serde(deserialize_with = "clean")]
        why: String,
        retry: Retry,
    },
}

/// Why a first message cannot be decrypted, as far as its receiver can tell.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum HandshakeFailure {
    /// The sender has no secret, but the receiver has one.
    NoSecret,
    /// The sender has a secret, but the receiver has none.
    UnexpectedSecret,
    /// The sender has a different secret, or the message was changed on the way.
    OtherSecret,
    /// The sender is configured for translated addresses, but the receiver is not.
    Translated,
    /// The receiver is configured for translated addresses, but the sender is not.
    NotTranslated,
    /// The sender dialled an address other than the receiver's.
    OtherAddress { here: Endpoint },
}

/// Whether another attempt may succeed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Retry {
    Never,
    /// At another port.
    Elsewhere,
    /// After the answering peer has ended.
    Later,
    /// At that rank, which coordinates as far as the answering peer knows.
    At {
        rank: usize,
        /// Empty if not known.
        at: String,
    },
}

impl Preamble {
    /// Returns the dialled address, for messages.
    fn dialled_address(&self) -> String {
        let any = || String::from("an address");
        self.dialled.as_ref().map_or_else(any, Endpoint::to_string)
    }

    /// Returns the bytes to which the handshake is bound.
    pub(super) fn prologue(&self) -> Vec<u8> {
        marked(self)
    }

    /// Returns why a side that expects `self` refuses a first message with `other`.
    pub(super) fn refuse(&self, other: &Self) -> Result<(), HandshakeFailure> {
        match (other.has_secret, self.has_secret) {
            (false, true) => return Err(HandshakeFailure::NoSecret),
            (true, false) => return Err(HandshakeFailure::UnexpectedSecret),
            _ => {}
        }
        match (&other.dialled, &self.dialled) {
            (None, Some(_)) => Err(HandshakeFailure::Translated),
            (Some(_), None) => Err(HandshakeFailure::NotTranslated),
            (Some(dialled), Some(here)) if dialled != here => {
                Err(HandshakeFailure::OtherAddress { here: here.clone() })
            }
            _ => Ok(()),
        }
    }
}

impl HandshakeFailure {
    /// Describes the sender, whose plain part is `sent`, from the receiver's side.
    pub(super) fn of_sender(&self, sent: &Preamble) -> String {
        match self {
            Self::NoSecret => String::from("it has no secret, and this job has one"),
            Self::UnexpectedSecret => String::from("it has a secret, and this job has none"),
            Self::OtherSecret => String::from(
                "it has another secret than this job, or its handshake was meant for another address and changed on the way",
            ),
            Self::Translated => String::from(
                "it was told that addresses are translated (NCCL_RUN_TRANSLATED), and this rank was not: tell all ranks \
                 the same",
            ),
            Self::NotTranslated => String::from(
                "it was not told that addresses are translated (NCCL_RUN_TRANSLATED), and this rank was: tell all ranks \
                 the same",
            ),
            Self::OtherAddress { here } => {
                let dialled = sent.dialled_address();
                format!("it dialled {dialled}, and this is {here}: {RELAYED}")
            }
        }
    }

    /// Describes the receiver to the sender of the first message, whose plain part is `sent`.
    pub(super) fn of_receiver(&self, sent: &Preamble) -> String {
        let why = match self {
            Self::NoSecret => "this rank has no secret, and the process at this address has one",
            Self::UnexpectedSecret => {
                "this rank has a secret, and the process at this address has none"
            }
            Self::OtherSecret => {
                "the process at this address has another secret than this rank, or a relay between the two has changed the \
                 handshake"
            }
            Self::Translated => {
                return String::from(
                    "this rank was told that addresses are translated (NCCL_RUN_TRANSLATED), and the process at this address \
                     was not: tell all ranks the same",
                );
            }
            Self::NotTranslated => {
                return String::from(
                    "this rank was not told that addresses are translated (NCCL_RUN_TRANSLATED), and the process at this \
                     address was: tell all ranks the same",
                );
            }
            Self::OtherAddress { here } => {
                let dialled = sent.dialled_address();
                return format!(
                    "this rank dialled {dialled}, and the process that answers is {here}: {RELAYED}"
                );
            }
        };
        format!(
            "{why}: set NCCL_RUN_SECRET to the same on all ranks, and check that no other job uses the address"
        )
    }
}

/// The two possible causes of a wrong address.
const RELAYED: &str = "another process there passes connections on (a relay), or addresses are translated between the two; \
     only where that is meant, set NCCL_RUN_TRANSLATED=1 on all ranks";

/// Prepends the magic and the version to `value`.
fn marked<T: Serialize>(value: &T) -> Vec<u8> {
    [&MAGIC[..], &VERSION.to_le_bytes(), &wire::encode(value)].concat()
}

impl HandshakeMessage {
    pub(super) fn encode(&self) -> Outgoing {
        Outgoing::new(0, marked(self).into())
    }

    pub(super) fn decode(frame: &Frame) -> Result<Self, Broken> {
        let rest = frame.payload.strip_prefix(&MAGIC).ok_or(STRANGE)?;
        let rest = rest.strip_prefix(&VERSION.to_le_bytes());
        wire::decode(rest.ok_or(OTHER_VERSION)?)
    }
}

const STRANGE: Broken = Broken("something else than a handshake message");

/// The peer was built from another release of this crate.
pub(super) const OTHER_VERSION: Broken = Broken(
    "a handshake of another protocol version: all ranks need the same release of this crate",
);

impl Hello {
    /// Encodes the payload of a first message.
    pub(super) fn encode(&self) -> Vec<u8> {
        wire::encode(self)
    }

    pub(super) fn decode(payload: &[u8]) -> Result<Self, Broken> {
        wire::decode(payload)
    }

    /// Describes the host, the process and the claimed role, for messages.
    pub(super) fn describe(&self) -> String {
        let Self {
            host, pid, rank, ..
        } = self;
        let host = sanitize::name(host);
        match self.role {
            PeerRole::Rank => format!("{host}, pid {pid}, which states that it is rank {rank}"),
            PeerRole::Observer | PeerRole::NewObserver => {
                format!("{host}, pid {pid}, which wants to observe")
            }
            PeerRole::Joiner => format!("{host}, pid {pid}, which asks to join"),
            PeerRole::Member => {
                format!("{host}, pid {pid}, which states that it belongs to the job")
            }
            PeerRole::RecordingReader => format!("{host}, pid {pid}, which asks for recordings"),
        }
    }
}
