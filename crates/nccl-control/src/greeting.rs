//! How a rank and its coordinator make sure of each other before anything else is said.
//!
//! ```text
//! rank                                   coordinator
//!   in plain: version, whether it has
//!      a secret, and what it dialled
//!   first message of the handshake:
//!      job, epoch, size, role, rank,
//!      host, pid, kernel           ───▶
//!                                  ◀───  the answer of the handshake, or in plain
//!                                         what is wrong with the first message
//!   from here on under the seal of this connection:
//!   that it is there               ───▶
//!                                  ◀───  welcome, by whom and to which epoch,
//!                                         or a refusal that says why, and perhaps
//!                                         where the one is that coordinates
//! ```
//!
//! The handshake ([`noise`](super::noise)) is bound to all that goes in plain before it: both sides put together by themselves
//! what that has to be ([`Plain::prologue`]), the coordinator from its own address. What was changed on the way, and a
//! connection that was meant for another address, end there. The coordinator registers no rank before its second
//! message: the first one may be recorded and sent again. What comes in plain from the coordinator is not proved: it ends this
//! try, and sends the rank to no other address.
//!
//! Without a secret the key of the handshake is public: it shows mistakes, and keeps nobody out.

use super::endpoint::Endpoint;
use nccl_base::wire::{self, bytes, clean};
use serde::{Deserialize, Serialize};

use super::frame::{Broken, Frame, Outgoing};
use crate::visible;

/// Every greeting begins with this and the version, which other versions read.
pub(super) const MAGIC: [u8; 8] = *b"ncclmeet";
pub(super) const VERSION: u64 = 16;

/// What somebody wants to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Role {
    Rank,
    /// No rank: it sees what becomes of them, and may say how their processes ended.
    Observer,
    /// One that has not been there before, and wants to observe: the epoch that it says, or the later one in
    /// which the world is by now.
    Onlooker,
    /// No rank yet: it asks to be one of the next epoch.
    Newcomer,
    /// No rank either: it asks this process for what its recorder has, and goes.
    Asker,
    /// A process of the job that reaches another one.
    Member,
}

/// Who a rank says it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Hello {
    pub(super) job: String,
    pub(super) epoch: u64,
    /// An observer that does not know says 0.
    pub(super) world_size: usize,
    pub(super) role: Role,
    pub(super) rank: usize,
    pub(super) host: String,
    pub(super) pid: u64,
    /// Where `pid` means something: the running kernel and the namespace of process numbers.
    pub(super) kernel: String,
}

/// What a first message says in plain.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Plain {
    pub(super) has_secret: bool,
    /// Where the sender has connected to; `None` where addresses are declared to be translated on the way.
    pub(super) dialled: Option<Endpoint>,
}

/// The messages before two sides know each other.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Greeting {
    /// With a [`Hello`] in the first message of the handshake.
    Hello {
        plain: Plain,
        #[serde(with = "bytes")]
        first: Vec<u8>,
    },
    /// The answer of the handshake.
    Answer(#[serde(with = "bytes")] Vec<u8>),
    /// In plain: the first message cannot be opened.
    Unproved(Unproved),
    /// Under the seal: the sender of the first message is there.
    Present,
    /// Of the rank that answers.
    Welcome { by: usize, epoch: u64 },
    Refused {
        #[serde(deserialize_with = "clean")]
        why: String,
        again: Again,
    },
}

/// Why a first message does not open, as its receiver knows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Unproved {
    /// Its sender has no secret, and its receiver has.
    NoSecret,
    /// The other way round.
    NeedlessSecret,
    /// Its sender has another secret, or it was changed on the way.
    OtherSecret,
    /// Its sender was told that addresses are translated, and its receiver was not.
    Translated,
    /// The other way round.
    NotTranslated,
    /// Its sender has dialled another address than that of its receiver.
    OtherAddress { here: Endpoint },
}

/// Whether another try may end better.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Again {
    Never,
    /// At another port.
    Elsewhere,
    /// When who answers is gone.
    Later,
    /// At that rank: it coordinates, as far as who answers knows.
    At {
        rank: usize,
        /// Empty where that is not known.
        at: String,
    },
}

impl Plain {
    /// For sentences.
    fn dialled_address(&self) -> String {
        let any = || String::from("an address");
        self.dialled.as_ref().map_or_else(any, Endpoint::to_string)
    }

    /// To what a handshake is bound.
    pub(super) fn prologue(&self) -> Vec<u8> {
        marked(self)
    }

    /// What is wrong with one that has come to a side that has to hear `self`.
    pub(super) fn refuse(&self, other: &Self) -> Result<(), Unproved> {
        match (other.has_secret, self.has_secret) {
            (false, true) => return Err(Unproved::NoSecret),
            (true, false) => return Err(Unproved::NeedlessSecret),
            _ => {}
        }
        match (&other.dialled, &self.dialled) {
            (None, Some(_)) => Err(Unproved::Translated),
            (Some(_), None) => Err(Unproved::NotTranslated),
            (Some(dialled), Some(here)) if dialled != here => {
                Err(Unproved::OtherAddress { here: here.clone() })
            }
            _ => Ok(()),
        }
    }
}

impl Unproved {
    /// What the receiver of the first message says of its sender, which has said `sent` in plain.
    pub(super) fn of_sender(&self, sent: &Plain) -> String {
        match self {
            Self::NoSecret => String::from("it has no secret, and this job has one"),
            Self::NeedlessSecret => String::from("it has a secret, and this job has none"),
            Self::OtherSecret => String::from(
                "it has another secret than this job, or its greeting was meant for another address and changed on the way",
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

    /// What the sender of the first message, which has said `sent` in plain, says of the answer.
    pub(super) fn of_receiver(&self, sent: &Plain) -> String {
        let why = match self {
            Self::NoSecret => "this rank has no secret, and who answers has one",
            Self::NeedlessSecret => "this rank has a secret, and who answers has none",
            Self::OtherSecret => {
                "who answers has another secret than this rank, or a relay between the two has changed the greeting"
            }
            Self::Translated => {
                return String::from(
                    "this rank was told that addresses are translated (NCCL_RUN_TRANSLATED), and who answers was not: tell \
                     all ranks the same",
                );
            }
            Self::NotTranslated => {
                return String::from(
                    "this rank was not told that addresses are translated (NCCL_RUN_TRANSLATED), and who answers was: tell \
                     all ranks the same",
                );
            }
            Self::OtherAddress { here } => {
                let dialled = sent.dialled_address();
                return format!(
                    "this rank dialled {dialled}, and who answers is {here}: {RELAYED}"
                );
            }
        };
        format!(
            "{why}: set NCCL_RUN_SECRET to the same on all ranks, and see that no other job is there"
        )
    }
}

/// The two causes of another address.
const RELAYED: &str = "another process there passes connections on (a relay), or addresses are translated between the two; \
     only where that is meant, set NCCL_RUN_TRANSLATED=1 on all ranks";

/// With what every version begins.
fn marked<T: Serialize>(value: &T) -> Vec<u8> {
    [&MAGIC[..], &VERSION.to_le_bytes(), &wire::encode(value)].concat()
}

impl Greeting {
    pub(super) fn encode(&self) -> Outgoing {
        Outgoing::new(0, marked(self).into())
    }

    pub(super) fn decode(frame: &Frame) -> Result<Self, Broken> {
        let rest = frame.payload.strip_prefix(&MAGIC).ok_or(STRANGE)?;
        let rest = rest.strip_prefix(&VERSION.to_le_bytes());
        wire::decode(rest.ok_or(OTHER_VERSION)?)
    }
}

const STRANGE: Broken = Broken("a greeting of something else than a rank");

/// The other side was built from another release of this crate.
pub(super) const OTHER_VERSION: Broken =
    Broken("a greeting of another protocol version: all ranks need the same release of this crate");

impl Hello {
    /// The payload of a first message.
    pub(super) fn encode(&self) -> Vec<u8> {
        wire::encode(self)
    }

    pub(super) fn decode(payload: &[u8]) -> Result<Self, Broken> {
        wire::decode(payload)
    }

    /// Host, process and claim, for sentences.
    pub(super) fn claim(&self) -> String {
        let Self {
            host, pid, rank, ..
        } = self;
        let host = visible::name(host);
        match self.role {
            Role::Rank => format!("{host}, pid {pid}, which says it is rank {rank}"),
            Role::Observer | Role::Onlooker => {
                format!("{host}, pid {pid}, which wants to observe")
            }
            Role::Newcomer => format!("{host}, pid {pid}, which asks to come in"),
            Role::Member => format!("{host}, pid {pid}, which says it is of the job"),
            Role::Asker => format!("{host}, pid {pid}, which asks for recordings"),
        }
    }
}
