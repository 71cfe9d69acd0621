//! Requests of ranks and observers to a coordinator.

use std::time::Duration;

use nccl_base::wire::{self, bytes, clean};
use serde::{Deserialize, Serialize};

use super::coordinator_message::Answer;
use super::frame::{Broken, Frame, Outgoing};
use super::process_state::ProcessState;
use super::round::Round;
use super::straggler::{EntryReport, StragglerQueryRequest};
use crate::departure::{Failure, ProcessEnd, Reason};

/// The number of a request that needs no answer.
pub(super) const NO_ANSWER: u64 = u64::MAX;

/// A request to the coordinator. The coordinator answers requests that need an answer with an
/// [`Answer`](super::coordinator_message::Answer) of the same number, in any order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Request {
    /// A part of an exchange; answered when all ranks have contributed theirs.
    Exchange {
        round: Round,
        /// How long the sender has waited since it made this request to earlier coordinators.
        #[serde(deserialize_with = "clean")]
        waited: Duration,
        /// The remaining timeout of the request.
        #[serde(deserialize_with = "clean")]
        timeout: Duration,
        #[serde(with = "bytes")]
        part: Vec<u8>,
    },
    /// Cancels the request of the same number, and with it the exchange for all ranks.
    Cancel {
        reason: Reason,
    },
    /// Sent to a coordinator that this rank begins to follow, or follows again: what the coordinator must know because
    /// messages may have been lost.
    Follow {
        /// The exchanges whose outcome this rank has, and whether each failed.
        outcomes: Vec<(Round, bool)>,
        before: FollowedBefore,
    },
    /// The answer to a [`Push::WantOutcome`](super::coordinator_message::Push::WantOutcome).
    Outcome {
        round: Round,
        answer: Answer,
    },
    Set {
        key: String,
        #[serde(with = "bytes")]
        value: Vec<u8>,
    },
    /// Answered when the key is set.
    Get {
        key: String,
        #[serde(deserialize_with = "clean")]
        timeout: Duration,
    },
    /// Asks for the current value; answered at once.
    TryGet {
        key: String,
    },
    /// Answered when all keys are set at the same time.
    AwaitKeys {
        keys: Vec<String>,
        #[serde(deserialize_with = "clean")]
        timeout: Duration,
    },
    /// Adds to a decimal number; answered with the sum.
    Add {
        key: String,
        amount: i64,
    },
    /// Sets the key if its current value is the expected one; with `None`, if the key is not set.
    CompareSet {
        key: String,
        expected: Option<ExpectedValue>,
        #[serde(with = "bytes")]
        value: Vec<u8>,
    },
    Delete {
        key: String,
    },
    /// The phase of this rank.
    Phase {
        #[serde(deserialize_with = "clean")]
        name: String,
    },
    /// Sends a message to all ranks, including the sender.
    Announce {
        topic: String,
        #[serde(with = "bytes")]
        bytes: Vec<u8>,
    },
    /// Sends a message to one rank alone. It is sent again to a new coordinator, so it may arrive twice.
    Direct {
        to: usize,
        topic: String,
        #[serde(with = "bytes")]
        bytes: Vec<u8>,
    },
    /// This rank has dropped its world but still has communicators: it takes part only in their ends. With a reason,
    /// the rank has failed.
    LeaveWorld {
        why: Option<Failure>,
    },
    /// A message of a channel, to one rank or to all others; answered when all receivers have room for it.
    Send {
        channel: String,
        to: Option<usize>,
        #[serde(deserialize_with = "clean")]
        timeout: Duration,
        #[serde(with = "bytes")]
        bytes: Vec<u8>,
    },
    /// How many messages this rank has taken from the channel in all.
    Consumed {
        channel: String,
        taken: u64,
    },
    /// Asks for the clock of the receiver's recorder; answered at once.
    Clock,
    /// Asks for the last operations of the receiver's communicators, in at most about `bytes` bytes. Sent only by
    /// [`PeerRole::RecordingReader`](super::handshake::PeerRole::RecordingReader).
    Recording {
        bytes: usize,
    },
    /// Asks for a straggler query: this rank waits in an operation that another rank may not have entered.
    QueryStragglers(StragglerQueryRequest),
    /// Whether this rank has entered an operation: the answer to
    /// [`Push::StragglerQuery`](super::coordinator_message::Push::StragglerQuery). Sent again when the rank has
    /// entered.
    EntryReport(EntryReport),
    /// The last call of this process.
    LastCall {
        #[serde(deserialize_with = "clean")]
        call: String,
    },
    /// The answer to a [`Push::ProbeProcess`](super::coordinator_message::Push::ProbeProcess): the state of that rank's process.
    ProcessProbed {
        rank: usize,
        state: ProcessState,
    },
    /// From an observer: it has started these ranks as these processes, and will report how they end.
    WatchRanks {
        ranks: Vec<(usize, u64)>,
    },
    /// From an observer: how a process that it has started ended.
    ExitReport {
        rank: usize,
        pid: u64,
        end: ProcessEnd,
    },
    /// Asks for the phases of these ranks, for which a request has waited for `waited`; answered like a request that
    /// timed out.
    Missing {
        ranks: Vec<usize>,
        #[serde(deserialize_with = "clean")]
        waited: Duration,
    },
}

/// Which coordinator of the generation a rank has followed before, and what that means for channels.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum FollowedBefore {
    None,
    /// The same one. The rank disregards the end of channels until it is told [`Push::Followed`] with this number, after
    /// the messages that it has not received.
    ///
    /// [`Push::Followed`]: super::coordinator_message::Push::Followed
    Same {
        number: u64,
        received: Vec<ChannelPosition>,
    },
    /// Another one, which has this rank.
    Other(usize),
}

/// What a rank has received of a channel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ChannelPosition {
    pub(super) channel: String,
    /// The number of the last message that was received, and of the last one that the program has taken.
    pub(super) received: u64,
    pub(super) taken: u64,
}

/// The value with which the current value of a key is compared.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ExpectedValue(#[serde(with = "bytes")] pub(super) Vec<u8>);

/// The kinds of requests that must be carried out only once although they may arrive twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum OnceKind {
    /// A change of the store; answered at once.
    StoreChange,
    /// A part of an exchange other than of ends: its round may be forgotten, and the part would begin another round.
    Exchange,
    /// A part of an exchange of ends. A rank repeats it to each new coordinator, even after the answer.
    End,
    /// A message of a channel.
    Message,
}

impl OnceKind {
    pub(super) const COUNT: usize = Self::Message as usize + 1;
}

impl Request {
    /// Returns the kind of this request if it must be carried out only once although it may arrive twice.
    pub(super) fn once(&self) -> Option<OnceKind> {
        match self {
            Self::Exchange { round, .. } if round.is_of_ends() => Some(OnceKind::End),
            Self::Exchange { .. } => Some(OnceKind::Exchange),
            Self::Send { .. } => Some(OnceKind::Message),
            request => request.changes_store().then_some(OnceKind::StoreChange),
        }
    }

    /// Whether this request uses the store.
    pub(super) fn uses_store(&self) -> bool {
        let reads = matches!(
            self,
            Self::Get { .. } | Self::TryGet { .. } | Self::AwaitKeys { .. }
        );
        reads || self.changes_store()
    }

    fn changes_store(&self) -> bool {
        matches!(
            self,
            Self::Set { .. } | Self::Add { .. } | Self::CompareSet { .. } | Self::Delete { .. }
        )
    }

    pub(super) fn encode(&self, id: u64) -> Outgoing {
        Outgoing::new(id, wire::encode(self).into())
    }

    pub(super) fn decode(frame: &Frame) -> Result<Self, Broken> {
        wire::decode(&frame.payload)
    }
}
