//! Messages from a coordinator: answers to requests, and unsolicited messages.

use std::sync::Arc;
use std::time::Duration;

use nccl_base::wire::{self, bytes, clean};
use serde::{Deserialize, Serialize};

use super::frame::{Broken, Frame, Outgoing};
use super::phase::Phase;
use super::process;
use super::process_state::ProcessState;
use super::proto::{Membership, ProcessInfo};
use super::round::{Parts, RequestError, Round};
use super::slot::Slot;
use super::straggler::StragglerReport;
use crate::departure::Departure;
use crate::sanitize;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Answer {
    Parts(#[serde(with = "parts")] Parts),
    Done,
    /// The key is not set.
    Absent,
    Sum(i64),
    Value(#[serde(with = "bytes")] Arc<[u8]>),
    Failed(Arc<RequestError>),
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Push {
    Announced {
        from: usize,
        topic: String,
        #[serde(with = "bytes")]
        bytes: Arc<[u8]>,
    },
    /// A message from another rank, for this rank alone.
    Direct {
        from: usize,
        topic: String,
        #[serde(with = "bytes")]
        bytes: Arc<[u8]>,
    },
    Departed {
        rank: usize,
        departure: Departure,
    },
    /// A message of a channel.
    Message {
        channel: String,
        from: usize,
        /// The messages of the channel to this rank are numbered from 1.
        number: u64,
        #[serde(with = "bytes")]
        bytes: Arc<[u8]>,
    },
    /// A rank has left, so channels no longer include all ranks and are closed.
    ChannelsClosed {
        rank: usize,
        departure: Departure,
    },
    /// This rank coordinated before, and messages that passed through it may be lost, so channels are closed.
    ChannelsLost {
        rank: usize,
    },
    /// This process does not serve the channels of the generation.
    NotServed,
    /// The messages of channels that this rank had not received have been sent. The number is that of its
    /// [`FollowedBefore::Same`](super::request::FollowedBefore::Same).
    Followed(u64),
    /// The number of processes that wait to be admitted to the next generation.
    Joiners(usize),
    /// Asks whether this rank has entered an operation of this communicator.
    StragglerQuery {
        key: String,
        collective_index: u64,
        is_sample: bool,
    },
    /// The ranks that have not entered an operation, or have entered it late.
    Stragglers(Arc<StragglerReport>),
    /// How far apart the ranks entered an operation, and which rank was last.
    Skewed {
        key: String,
        #[serde(deserialize_with = "clean")]
        skew: Duration,
        last: usize,
    },
    /// Asks for the outcome of an exchange, which an earlier coordinator sent to this rank but not to all others.
    WantOutcome(Round),
    /// To a process on the host of a suspect: asks for the state of the suspect's process.
    ProbeProcess {
        rank: usize,
        pid: u64,
    },
    /// A rank is alive, and has not answered for `silence`; `None` when it answers again.
    Suspected {
        rank: usize,
        #[serde(deserialize_with = "clean")]
        silence: Option<Duration>,
        state: Option<ProcessState>,
    },
    /// To observers, first: the number of ranks.
    WorldSize(usize),
    /// To observers: the state of a rank, initially and whenever it changes.
    Rank(RankRecord),
}

/// The state of a rank, as known to the coordinator.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct RankRecord {
    pub(super) rank: usize,
    /// `None` before the rank has joined.
    pub(super) slot: Option<Slot>,
    #[serde(deserialize_with = "clean")]
    pub(super) host: String,
    pub(super) pid: u64,
    /// The scope of `pid`.
    pub(super) kernel: String,
    /// The address at which the rank listens; empty before it is known.
    pub(super) at: String,
    /// Its phase, and for how long; `None` if it has never joined.
    #[serde(deserialize_with = "clean")]
    pub(super) phase: Option<(Phase, Duration)>,
    pub(super) departure: Option<Departure>,
}

impl RankRecord {
    /// Returns the state of a rank of the first generation before all ranks have joined: its slot is its rank.
    pub(super) fn forming(rank: usize, process: &ProcessInfo) -> Self {
        let slot = Slot {
            number: rank,
            incarnation: process.id.incarnation,
        };
        Self::of(rank, Some(slot), process)
    }

    /// Returns the states of the members of an active generation.
    pub(super) fn all_of(membership: &Membership) -> impl Iterator<Item = Self> {
        let members = membership.members.iter().enumerate();
        members.map(|(rank, process)| Self::of(rank, membership.slot(rank), process))
    }

    /// Returns the state of a member of an active generation.
    pub(super) fn of(rank: usize, slot: Option<Slot>, process: &ProcessInfo) -> Self {
        let is_here = process.kernel != 0 && process.kernel == process::kernel_sum();
        let kernel = match is_here {
            true => process::kernel().to_owned(),
            false => format!("{:x}", process.kernel),
        };
        Self {
            rank,
            slot,
            host: sanitize::name(&process.host),
            pid: process.pid.into(),
            kernel,
            at: process.at.clone(),
            phase: Some((Phase::Joined, Duration::ZERO)),
            departure: None,
        }
    }
}

/// A received message of a coordinator.
#[derive(Debug, PartialEq, Eq, Deserialize)]
pub(super) enum CoordinatorMessage {
    Answer(Answer),
    Push(Push),
}

/// A message of a coordinator to send.
#[derive(Serialize)]
enum OutgoingMessage<'s> {
    Answer(&'s Answer),
    Push(&'s Push),
}

impl Answer {
    /// Encodes the payload, which is the same for all ranks that get this answer.
    pub(super) fn encode(&self) -> Arc<[u8]> {
        wire::encode(&OutgoingMessage::Answer(self)).into()
    }
}

impl Push {
    pub(super) fn encode(&self) -> Outgoing {
        Outgoing::new(0, wire::encode(&OutgoingMessage::Push(self)).into())
    }
}

impl CoordinatorMessage {
    pub(super) fn decode(frame: &Frame) -> Result<Self, Broken> {
        wire::decode(&frame.payload)
    }
}

mod parts {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    use super::{Arc, Parts, bytes};

    #[derive(Serialize)]
    struct Part<'p>(#[serde(with = "bytes")] &'p [u8]);

    pub(super) fn serialize<S: Serializer>(parts: &Parts, to: S) -> Result<S::Ok, S::Error> {
        to.collect_seq(parts.iter().map(|part| Part(part)))
    }

    pub(super) fn deserialize<'d, D: Deserializer<'d>>(from: D) -> Result<Parts, D::Error> {
        let parts = Vec::<&[u8]>::deserialize(from)?;
        Ok(Arc::new(parts.into_iter().map(<[u8]>::to_vec).collect()))
    }
}
