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

/// The number of a request to which its sender wants no answer.
pub(super) const NO_ANSWER: u64 = u64::MAX;

/// The coordinator answers those that need one with an [`Answer`](super::coordinator_message::Answer) of the same
/// number, in any order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Request {
    /// A part of an exchange; answered when all ranks have given theirs.
    Exchange {
        round: Round,
        /// For how long it was made of earlier coordinators.
        #[serde(deserialize_with = "clean")]
        waited: Duration,
        /// How long it may take from now on.
        #[serde(deserialize_with = "clean")]
        timeout: Duration,
        #[serde(with = "bytes")]
        part: Vec<u8>,
    },
    /// Gives up the request of the same number, and with it the exchange for all.
    Cancel {
        reason: Reason,
    },
    /// To a coordinator that this rank begins to follow, or follows again: the exchanges whose outcome it has, and whether they failed.
    Outcomes(Vec<(Round, bool)>),
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
    /// Asks for the value that is there now; answered at once.
    TryGet {
        key: String,
    },
    /// Answered when all keys are set at one time.
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
    /// Sets the key if its value is the expected one; with `None`, if it is not set.
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
    /// For all ranks, the sender included.
    Announce {
        topic: String,
        #[serde(with = "bytes")]
        bytes: Vec<u8>,
    },
    /// For one rank alone. Sent again to a new coordinator, so it may arrive twice.
    Direct {
        to: usize,
        topic: String,
        #[serde(with = "bytes")]
        bytes: Vec<u8>,
    },
    /// This rank has dropped its world and still has communicators: it takes part only in the ends of these. With a reason, it
    /// fails.
    LeaveWorld {
        why: Option<Failure>,
    },
    /// A message of a channel, to one rank or to all others; answered when all of them have room for it.
    Send {
        channel: String,
        to: Option<usize>,
        #[serde(deserialize_with = "clean")]
        timeout: Duration,
        #[serde(with = "bytes")]
        bytes: Vec<u8>,
    },
    /// This rank has received this many messages.
    Consumed {
        channel: String,
        count: usize,
    },
    /// Asks for the clock of the receiver's recorder; answered at once.
    Clock,
    /// Asks for the last operations of the receiver's communicators, in about `bytes` bytes at most. Sent only by
    /// [`PeerRole::RecordingReader`](super::handshake::PeerRole::RecordingReader).
    Recording {
        bytes: usize,
    },
    /// This rank waits in an operation that another rank may not have entered: asks for a straggler query about it.
    QueryStragglers(StragglerQueryRequest),
    /// Whether this rank has entered an operation: the answer to
    /// [`Push::StragglerQuery`](super::coordinator_message::Push::StragglerQuery), and once more when it has.
    EntryReport(EntryReport),
    /// The last call of this process, if there is one.
    LastCall {
        #[serde(deserialize_with = "clean")]
        call: String,
    },
    /// The answer to a [`Push::ProbeProcess`](super::coordinator_message::Push::ProbeProcess): the state of that rank's process.
    ProcessProbed {
        rank: usize,
        state: ProcessState,
    },
    /// From an observer: it has started these ranks, as these processes, and will report how they end.
    WatchRanks {
        ranks: Vec<(usize, u64)>,
    },
    /// From an observer: how a process that it has started ended.
    ExitReport {
        rank: usize,
        pid: u64,
        end: ProcessEnd,
    },
    /// Asks for the phases of these ranks, which a request has awaited for so long: answered like a request that timed out.
    Missing {
        ranks: Vec<usize>,
        #[serde(deserialize_with = "clean")]
        waited: Duration,
    },
}

/// A value with which that of a key is compared.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ExpectedValue(#[serde(with = "bytes")] pub(super) Vec<u8>);

impl Request {
    /// Whether this is about keys and values.
    pub(super) fn uses_store(&self) -> bool {
        let reads = matches!(
            self,
            Self::Get { .. } | Self::TryGet { .. } | Self::AwaitKeys { .. }
        );
        reads || self.changes_store()
    }

    /// Whether this changes keys and values, so that it has to be carried out once although it may arrive twice. Such a request
    /// is answered at once.
    pub(super) fn changes_store(&self) -> bool {
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
