//! The messages of machines.
//!
//! A [`Frame`] is sent over one connection. [`Frame::Data`] is numbered and repeated after a connection that was lost, so that
//! each [`Message`] is handled once and in order; heartbeats are not.

use std::sync::Arc;

use nccl_base::wire::bytes;
use serde::{Deserialize, Serialize};

use super::id::{Generation, MemberId, ProcessInfo, SharedMembership, Term};
use super::log::{Broadcast, Entry, LogPart, OperatorDecision};
use crate::departure::{Departure, LossKind, ProcessEnd};

/// How the end of a process is known for certain.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Proof {
    /// The process that started it has reported it.
    Launcher(Box<ProcessEnd>),
    /// A process of the same kernel holds a pidfd of it.
    Kernel,
    /// It has left, or reported its failure, and that was acknowledged.
    Leave(Departure),
}

impl Proof {
    /// Returns the departure of a process with this process id.
    pub(super) fn departure(&self, pid: u32) -> Departure {
        match self {
            Self::Launcher(end) => Departure::Lost((**end).clone().into()),
            Self::Kernel => Departure::lost(LossKind::Exited { pid: pid.into() }),
            Self::Leave(departure) => departure.clone(),
        }
    }
}

/// A proven end of a process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ended {
    /// The process.
    pub member: MemberId,
    /// How the end is known.
    pub proof: Proof,
    /// Whether it reduces the number of votes that a majority needs: the process that saw it was certain at the time that no
    /// generation existed without itself.
    pub reduces_electorate: bool,
}

/// The content of one connection.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Frame {
    /// The first frame of the side that connected.
    Hello {
        /// The process that connects.
        from: MemberId,
        /// The process that it expects.
        to: MemberId,
        /// The link, which outlives connections.
        link_id: u64,
        /// The number of the last message that arrived.
        received: u64,
    },
    /// The answer: the link is continued.
    Welcome {
        /// The process that answers.
        from: MemberId,
        /// Links that the sender itself has begun are superseded by this one, up to this number.
        superseded_up_to: u64,
        /// The number of the last message that arrived.
        received: u64,
    },
    /// The answer: there is no such link, and earlier messages are lost.
    Unknown,
    /// A message.
    Data {
        /// Counts from 1.
        sequence: u64,
        /// The number of the last message that arrived.
        acknowledged: u64,
        /// The sender's generation.
        generation: u64,
        /// Its content.
        message: Message,
    },
    /// Nothing but an acknowledgement.
    Acknowledge(u64),
    /// From a coordinator: asks for a reply.
    Heartbeat(Heartbeat),
    /// The answer.
    HeartbeatReply(HeartbeatReply),
}

/// From a coordinator to each of its members, at regular intervals.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Heartbeat {
    /// The generation.
    pub generation: u64,
    /// The coordinator's term.
    pub term: Term,
    /// Counts from 1 in each term.
    pub number: u64,
    /// The last heartbeat that the receiver answered, as far as the coordinator knows.
    pub answered: u64,
    /// The last heartbeat that a majority answered.
    pub confirmed: u64,
}

/// The answer to a [`Heartbeat`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeartbeatReply {
    /// The generation.
    pub generation: u64,
    /// The coordinator's term.
    pub term: Term,
    /// The number of the heartbeat.
    pub number: u64,
    /// Whether NCCL's operations have made progress since the last answer.
    pub progress: bool,
}

/// A member's request for the next generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReconfigureRequest {
    /// Distinguishes the member's requests for the next generation.
    pub number: u64,
    /// How long it is valid, in nanoseconds from now.
    pub timeout: u64,
    /// Whether to form it without the members that make no request in time.
    pub leaves_behind: bool,
}

impl Message {
    /// Whether its transfer may take long: it is acknowledged at once.
    pub(super) fn is_large(&self) -> bool {
        const LARGE: usize = 64 << 10;
        match self {
            Self::Request(bytes) | Self::Reply(bytes) => bytes.len() > LARGE,
            Self::Direct { bytes, .. } => bytes.len() > LARGE,
            Self::Broadcast(broadcast) => broadcast.bytes.len() > LARGE,
            _ => false,
        }
    }
}

/// A candidate's request for a vote.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VoteRequest {
    /// The term in which it would coordinate.
    pub term: Term,
    /// The ends that it knows.
    pub ended: Vec<Ended>,
    /// Whether the coordinator left requests unanswered.
    pub unresponsive: bool,
    /// Whether it coordinates a majority already, in an earlier term or in this one.
    pub already_coordinates: bool,
}

/// A voter's report with its vote.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VoteReport {
    /// The term in which its log was the coordinator's.
    pub synced: Term,
    /// The latest term in which it has promised its vote.
    pub promised: Term,
    /// The part of the log that it has.
    pub log: LogPart,
    /// Its own messages that are not in the log yet.
    pub unlogged: Vec<Arc<Broadcast>>,
    /// The ends that it knows.
    pub ended: Vec<Ended>,
    /// The successor generation that it has accepted, and in which term.
    pub accepted: Option<(Term, SharedMembership)>,
    /// Whether it takes part in no later generation, and has given its lease up.
    pub abstains: bool,
    /// Set if it has left: this is no vote.
    pub leaves: Option<Departure>,
}

/// The role in which a process asks to join.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum JoinRole {
    /// A rank of the first generation, by its slot.
    Rank,
    /// A witness of the first generation. Its slot is not one of the ranks'.
    Witness,
    /// A rank of the next generation.
    Joiner,
    /// None: it reports why it will not join as a rank of the first generation.
    Absent,
}

/// Why a member takes part no more.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Exclusion {
    /// No majority of the generation can be reached.
    NoMajority {
        /// How many voters can be reached, this side included.
        reached: u32,
        /// The number of voters.
        of: u32,
        /// The members out of reach.
        unreached: Vec<MemberId>,
    },
    /// The others have formed this generation without it.
    LeftBehind(Generation),
    /// Another member coordinates, and this one has received entries that the other has not, or was given up before.
    Superseded(MemberId),
}

/// A message of one machine to another.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Message {
    /// To the coordinator: a process asks to become a member.
    Join {
        /// The process.
        process: ProcessInfo,
        /// Its role.
        role: JoinRole,
    },
    /// From the coordinator of a generation that is not formed: there will be none, for the reason in these bytes.
    FormationAborted(#[serde(with = "bytes")] Arc<[u8]>),
    /// To a joiner or an observer: this process coordinates.
    Redirect(ProcessInfo),
    /// This generation is active, and the receiver is part of it.
    Activate {
        /// The generation.
        membership: SharedMembership,
        /// Whether that was decided after the receiver had accepted it, or asked to join it.
        accepted: bool,
    },
    /// The receiver's generation is over: this is the latest.
    NewerGeneration(SharedMembership),
    /// The sender knows no generation as late as that of a message that it has received.
    UnknownGeneration,
    /// For all members, in one order.
    Broadcast(Arc<Broadcast>),
    /// For one member alone, through the coordinator. Lost when the coordinator is.
    Direct {
        /// The sender.
        from: MemberId,
        /// The receiver.
        to: MemberId,
        /// The content.
        #[serde(with = "bytes")]
        bytes: Vec<u8>,
    },
    /// To the coordinator's driver. Lost with the coordinator: the driver asks the next one again.
    Request(#[serde(with = "bytes")] Arc<[u8]>),
    /// From the coordinator's driver.
    Reply(#[serde(with = "bytes")] Arc<[u8]>),
    /// An end that the sender knows for certain.
    ReportEnd(Ended),
    /// The sender requests the next generation.
    Reconfigure(ReconfigureRequest),
    /// The sender withdraws its request for the next generation.
    CancelReconfigure(u64),
    /// To a member: its request for the next generation has failed.
    ReconfigureFailed {
        /// The number of the request.
        reconfigure_request: u64,
        /// The members that made no request.
        missing: Vec<MemberId>,
    },
    /// The sender takes part in no later generation, and has given its lease up.
    Abstain,
    /// To a member that answers and made no request in time: the others form the next generation without it.
    LeaveBehind,
    /// The answer: the sender takes part no more.
    Released,
    /// The sender leaves, or fails.
    Leave(Departure),
    /// From the coordinator: the next entry of the log.
    Append {
        /// The coordinator's term.
        term: Term,
        /// Its index in the log.
        at: u64,
        /// The entry.
        entry: Arc<Entry>,
    },
    /// From the coordinator of this term: this side decides nothing any more.
    CutOff {
        /// The coordinator's term.
        term: Term,
        /// Why.
        why: Exclusion,
    },
    /// From a candidate: asks for a vote.
    RequestVote(VoteRequest),
    /// The vote for a candidate, or, unasked, the request to follow a coordinator.
    Vote {
        /// The candidate's term.
        term: Term,
        /// The voter's report.
        report: Box<VoteReport>,
    },
    /// No vote: the sender follows this coordinator, or has promised its vote to this candidate.
    Follows {
        /// The term of that coordinator or candidate.
        term: Term,
        /// Whether it coordinates already.
        already_coordinates: bool,
    },
    /// From a new coordinator: the receiver follows it, and lacks these entries.
    SyncLog {
        /// The coordinator's term.
        term: Term,
        /// The index of the first.
        start: u64,
        /// The entries that the receiver lacks.
        entries: Vec<Arc<Entry>>,
    },
    /// The receiver may not follow.
    Reject(Exclusion),
    /// From the coordinator: the successor that it proposes.
    Propose {
        /// The coordinator's term.
        term: Term,
        /// The next generation.
        membership: SharedMembership,
    },
    /// The sender is bound to that proposal.
    Accepted {
        /// The term of the proposal.
        term: Term,
        /// Its name.
        generation: Generation,
    },
    /// For the observers, at first and whenever the coordinator changes.
    Coordinating {
        /// The coordinator's term.
        term: Term,
        /// The generation.
        membership: SharedMembership,
    },
    /// To the coordinator, from an observer.
    Observe(ProcessInfo),
    /// To the coordinator, through any of its members or observers.
    OperatorDecision(OperatorDecision),
    /// To an observer: the sender is the initial coordinator of the first generation, which has this number. It reports when
    /// that is active.
    Forming(u64),
}
