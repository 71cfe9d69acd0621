//! The messages of machines.
//!
//! A [`Frame`] is sent over one connection. [`Frame::Data`] is numbered and repeated after a connection is lost, so
//! that each [`Message`] is handled once and in order; heartbeats are not.

use std::sync::Arc;

use nccl_base::wire::bytes;
use serde::{Deserialize, Serialize};

use super::id::{Generation, MemberId, ProcessInfo, Term};
use super::log::{Broadcast, Entry, LogPart, OperatorDecision};
use super::membership::SharedMembership;
use crate::departure::{Departure, LossKind, ProcessEnd};

/// How the end of a process is known with certainty.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Proof {
    /// The process that started it has reported its end.
    Launcher(Box<ProcessEnd>),
    /// A process under the same kernel holds a pidfd of it.
    Kernel,
    /// The process has left or reported its failure, and that was acknowledged.
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
    /// The proof of the end.
    pub proof: Proof,
    /// Whether the end reduces the number of votes that a majority needs: the process that saw the end was certain at
    /// that time that no generation existed without itself.
    pub reduces_electorate: bool,
}

/// The content of one connection.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Frame {
    /// The first frame of the side that connected.
    Hello {
        /// The connecting process.
        from: MemberId,
        /// The process that it expects at the other end.
        to: MemberId,
        /// The link, which outlives its connections.
        link_id: u64,
        /// The number of the last message received.
        received: u64,
    },
    /// The answer to a hello: the link continues.
    Welcome {
        /// The answering process.
        from: MemberId,
        /// Links up to this number that the sender itself has begun are superseded by this link.
        superseded_up_to: u64,
        /// The number of the last message received.
        received: u64,
    },
    /// The answer to a hello: there is no such link, and earlier messages are lost.
    Unknown,
    /// A message.
    Data {
        /// Counts from 1.
        sequence: u64,
        /// The number of the last message received.
        acknowledged: u64,
        /// The sender's generation.
        generation: u64,
        /// Its content.
        message: Message,
    },
    /// An acknowledgement alone.
    Acknowledge(u64),
    /// From a coordinator: asks for a reply.
    Heartbeat(Heartbeat),
    /// The answer to a heartbeat.
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
    /// How long the request is valid, in nanoseconds from now.
    pub timeout: u64,
    /// Whether to form the next generation without the members that make no request in time.
    pub leaves_behind: bool,
}

impl Message {
    /// Whether the transfer may take long, so that the message is acknowledged at once.
    pub(super) fn is_large(&self) -> bool {
        self.large_bytes() > 0
    }

    /// Returns the number of bytes of a large message; 0 for others.
    pub(super) fn large_bytes(&self) -> usize {
        const LARGE: usize = 64 << 10;
        let bytes = match self {
            Self::Request(bytes) | Self::Reply(bytes) => bytes.len(),
            Self::Direct { bytes, .. } => bytes.len(),
            Self::Broadcast(broadcast) => broadcast.bytes.len(),
            Self::Append { entry, .. } => match &**entry {
                Entry::Broadcast(broadcast) => broadcast.bytes.len(),
                _ => 0,
            },
            _ => 0,
        };
        if bytes > LARGE { bytes } else { 0 }
    }
}

/// A candidate's request for a vote.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VoteRequest {
    /// The term in which the candidate would coordinate.
    pub term: Term,
    /// The ends that the candidate knows.
    pub ended: Vec<Ended>,
    /// Whether the coordinator left requests unanswered.
    pub unresponsive: bool,
    /// Whether the candidate already coordinates a majority, in an earlier term or in this one.
    pub already_coordinates: bool,
}

/// A voter's report with its vote.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VoteReport {
    /// The term in which the voter's log was the coordinator's.
    pub synced: Term,
    /// The latest term in which the voter has promised its vote.
    pub promised: Term,
    /// The part of the log that the voter has.
    pub log: LogPart,
    /// The voter's own messages that are not in the log yet.
    pub unlogged: Vec<Arc<Broadcast>>,
    /// The ends that the voter knows.
    pub ended: Vec<Ended>,
    /// The successor generation that the voter has accepted, and in which term.
    pub accepted: Option<(Term, SharedMembership)>,
    /// Whether the voter will take part in no later generation, and has given up its lease.
    pub abstains: bool,
    /// Set if the voter has left; then this is no vote.
    pub leaves: Option<Departure>,
}

/// The role in which a process asks to join.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum JoinRole {
    /// A rank of the first generation, by its slot.
    Rank,
    /// A witness of the first generation. Its slot is not among those of the ranks.
    Witness,
    /// A rank of the next generation.
    Joiner,
    /// Has no role: reports why it will not join as a rank of the first generation.
    Absent,
}

/// Why a member no longer takes part.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Exclusion {
    /// No majority of the generation can be reached.
    NoMajority {
        /// The number of voters that can be reached, including this side.
        reached: u32,
        /// The number of voters.
        of: u32,
        /// The unreachable members.
        unreached: Vec<MemberId>,
    },
    /// The other members have formed this generation without this one.
    LeftBehind(Generation),
    /// Another member coordinates, and this member has received entries that the coordinator has not, or was given up
    /// before.
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
    /// From the coordinator of a generation that was not formed: there will be none, for the reason in these bytes.
    FormationAborted(#[serde(with = "bytes")] Arc<[u8]>),
    /// To a joiner or an observer: this process coordinates.
    Redirect(ProcessInfo),
    /// This generation is active, and the receiver is part of it.
    Activate {
        /// The generation.
        membership: SharedMembership,
        /// Whether the generation became active after the receiver had accepted it, or asked to join it.
        accepted: bool,
    },
    /// The receiver's generation has ended; this is the latest one.
    NewerGeneration(SharedMembership),
    /// The sender knows no generation as late as that of a message it has received.
    UnknownGeneration,
    /// For all members, in one order.
    Broadcast(Arc<Broadcast>),
    /// For one member alone, through the coordinator. Lost if the coordinator is lost.
    Direct {
        /// The sender.
        from: MemberId,
        /// The receiver.
        to: MemberId,
        /// The content.
        #[serde(with = "bytes")]
        bytes: Vec<u8>,
    },
    /// To the coordinator's driver. Lost if the coordinator is lost: the driver asks the next coordinator again.
    Request(#[serde(with = "bytes")] Arc<[u8]>),
    /// From the coordinator's driver.
    Reply(#[serde(with = "bytes")] Arc<[u8]>),
    /// An end that the sender knows with certainty.
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
    /// The sender will take part in no later generation, and has given up its lease.
    Abstain,
    /// To a member that answers heartbeats but made no request in time: the others form the next generation without it.
    LeaveBehind,
    /// The answer to [`LeaveBehind`](Self::LeaveBehind): the sender no longer takes part.
    Released,
    /// The sender leaves, or fails.
    Leave(Departure),
    /// From the coordinator: the next entry of the log.
    Append {
        /// The coordinator's term.
        term: Term,
        /// The index of the entry in the log.
        at: u64,
        /// The entry.
        entry: Arc<Entry>,
    },
    /// From the coordinator of this term: this side makes no more decisions.
    CutOff {
        /// The coordinator's term.
        term: Term,
        /// Why.
        why: Exclusion,
    },
    /// From a candidate: asks for a vote.
    RequestVote(VoteRequest),
    /// The vote for a candidate; or, if sent unasked, the request to follow a coordinator.
    Vote {
        /// The candidate's term.
        term: Term,
        /// The voter's report.
        report: Box<VoteReport>,
    },
    /// A refused vote: the sender follows this coordinator, or has promised its vote to this candidate.
    Follows {
        /// The term of that coordinator or candidate.
        term: Term,
        /// Whether that process already coordinates.
        already_coordinates: bool,
    },
    /// From a new coordinator: the receiver follows it, and lacks these entries.
    SyncLog {
        /// The coordinator's term.
        term: Term,
        /// The index of the first entry.
        start: u64,
        /// The entries that the receiver lacks.
        entries: Vec<Arc<Entry>>,
    },
    /// The receiver is not allowed to follow.
    Reject(Exclusion),
    /// From the coordinator: the proposed successor.
    Propose {
        /// The coordinator's term.
        term: Term,
        /// The next generation.
        membership: SharedMembership,
    },
    /// The sender is bound to the proposal.
    Accepted {
        /// The term of the proposal.
        term: Term,
        /// The name of the proposed generation.
        generation: Generation,
    },
    /// For observers: sent initially, and whenever the coordinator changes.
    Coordinating {
        /// The coordinator's term.
        term: Term,
        /// The generation.
        membership: SharedMembership,
    },
    /// To the coordinator: an observer introduces itself.
    Observe(ProcessInfo),
    /// To the coordinator, through any of its members or observers.
    OperatorDecision(OperatorDecision),
    /// To an observer: the sender is the initial coordinator of the first generation, which has this number. The sender
    /// reports when that generation is active.
    Forming(u64),
}
