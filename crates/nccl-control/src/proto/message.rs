//! What machines tell each other.
//!
//! A [`Frame`] is what one connection carries. [`Frame::Data`] is numbered and repeated after a connection that was lost, so that
//! each [`Message`] is handled once and in order; beats are not.

use std::sync::Arc;

use nccl_base::wire::bytes;
use serde::{Deserialize, Serialize};

use super::id::{Generation, MemberId, Peer, SharedMembership, Term};
use super::log::{Entry, LogPart, OperatorWord, Said};
use crate::departure::{Departure, How, ProcessEnd};

/// How the end of a process is known for certain.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Proof {
    /// Its parent says so.
    Parent(Box<ProcessEnd>),
    /// A process of the same kernel holds a pidfd of it.
    Kernel,
    /// It said goodbye, or why it fails, and that was acknowledged.
    Goodbye(Departure),
}

impl Proof {
    /// What is said of a process of this number.
    pub(super) fn departure(&self, pid: u32) -> Departure {
        match self {
            Self::Parent(end) => Departure::Lost((**end).clone().into()),
            Self::Kernel => Departure::lost(How::Exited { pid: pid.into() }),
            Self::Goodbye(departure) => departure.clone(),
        }
    }
}

/// An end that is proven.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ended {
    /// Whose.
    pub member: MemberId,
    /// How it is known.
    pub proof: Proof,
    /// Whether it reduces the number of votes that a majority needs: the one that saw it was certain at the time that no
    /// generation existed without itself.
    pub counts: bool,
}

/// What one connection carries.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Frame {
    /// The first frame of the side that connected.
    Hello {
        /// Who connects.
        from: MemberId,
        /// Whom it expects.
        to: MemberId,
        /// The session, which outlives connections.
        session: u64,
        /// The number of the last message that arrived.
        received: u64,
    },
    /// The answer: the session goes on.
    Welcome {
        /// Who answers.
        from: MemberId,
        /// Sessions that it has begun itself up to this number are given up for this one.
        given_up: u64,
        /// The number of the last message that arrived.
        received: u64,
    },
    /// The answer: there is no such session, and what was sent before is lost.
    Unknown,
    /// A message.
    Data {
        /// Counts from 1.
        sequence: u64,
        /// The number of the last message that arrived.
        acknowledged: u64,
        /// The sender's generation.
        generation: u64,
        /// What it says.
        message: Message,
    },
    /// Nothing but an acknowledgement.
    Acknowledge(u64),
    /// From a coordinator: whether the receiver is there.
    Beat(Beat),
    /// The answer.
    Pulse(Pulse),
}

/// From a coordinator to each of its members, once in a while.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Beat {
    /// The generation.
    pub generation: u64,
    /// The leadership.
    pub term: Term,
    /// Counts from 1 in each term.
    pub number: u64,
    /// The last beat that the receiver answered, as far as the coordinator knows.
    pub answered: u64,
    /// The last beat that a majority answered.
    pub confirmed: u64,
}

/// The answer to a [`Beat`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pulse {
    /// The generation.
    pub generation: u64,
    /// The leadership.
    pub term: Term,
    /// The beat's.
    pub number: u64,
    /// Whether NCCL's operations have made progress since the last answer.
    pub progress: bool,
}

/// A member's wish to go on to the next generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Wish {
    /// Tells the member's wishes apart.
    pub number: u64,
    /// For so many nanoseconds more.
    pub patience: u64,
    /// Without the members that do not come in time.
    pub leaves_behind: bool,
}

impl Message {
    /// Whether its way may take long: it is acknowledged at once.
    pub(super) fn is_large(&self) -> bool {
        const LARGE: usize = 64 << 10;
        match self {
            Self::Ask(bytes) | Self::Reply(bytes) => bytes.len() > LARGE,
            Self::Tell { bytes, .. } => bytes.len() > LARGE,
            Self::Say(said) => said.bytes.len() > LARGE,
            _ => false,
        }
    }
}

/// What a candidate asks with.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Solicit {
    /// The term in which it would lead.
    pub term: Term,
    /// The ends that it knows.
    pub ended: Vec<Ended>,
    /// Whether the coordinator left requests unanswered.
    pub mute: bool,
    /// Whether it coordinates a majority already, in an earlier term or in this one.
    pub leads: bool,
}

/// What a voter reports with its vote.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// The term in which its log was the coordinator's.
    pub synced: Term,
    /// The latest term in which it has promised its vote.
    pub promised: Term,
    /// What it has heard.
    pub log: LogPart,
    /// What it has said and not heard back.
    pub unheard: Vec<Arc<Said>>,
    /// Whose ends it knows.
    pub ended: Vec<Ended>,
    /// The successor generation that it has accepted, in which term.
    pub accepted: Option<(Term, SharedMembership)>,
    /// Whether it goes on into no successor, and has given its lease up.
    pub abstains: bool,
    /// It has said goodbye: this is no vote.
    pub leaves: Option<Departure>,
}

/// As what a process asks to come in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Place {
    /// A rank of the first generation, by its slot.
    Rank,
    /// A witness of the first generation. Its slot is not one of the ranks'.
    Witness,
    /// A rank of the next generation.
    Joiner,
    /// None: it says why it will not come as a rank of the first generation.
    Absent,
}

/// Why a member takes part no more.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Exclusion {
    /// No majority of the generation can be reached.
    NoMajority {
        /// How many voters can be reached, this side included.
        reached: u32,
        /// Of how many.
        of: u32,
        /// The members out of reach.
        unreached: Vec<MemberId>,
    },
    /// The others have gone on to this generation without it.
    LeftBehind(Generation),
    /// Another member coordinates, and this one has heard what that one has not, or was given up before.
    PassedOver(MemberId),
}

/// What one machine says to another.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Message {
    /// To the coordinator: a process asks to become a member.
    Join {
        /// Who.
        peer: Peer,
        /// As what.
        seat: Place,
    },
    /// From the coordinator of a generation that is not formed: there will be none, for the reason in these bytes.
    Dismissed(#[serde(with = "bytes")] Arc<[u8]>),
    /// To a joiner or an observer: this one coordinates.
    Redirect(Peer),
    /// This generation is active, and the receiver is part of it.
    Activate {
        /// What it is.
        membership: SharedMembership,
        /// Whether that was decided after the receiver had accepted it, or asked to join it.
        accepted: bool,
    },
    /// The receiver's generation is over: this is the latest.
    Ahead(SharedMembership),
    /// The sender knows no generation as late as that of a message that it got.
    Behind,
    /// For all members, in one order.
    Say(Arc<Said>),
    /// For one member alone, through the coordinator. Lost when that one is.
    Tell {
        /// Who says it.
        from: MemberId,
        /// To whom.
        to: MemberId,
        /// The words.
        #[serde(with = "bytes")]
        bytes: Vec<u8>,
    },
    /// To the coordinator's program. Lost with the coordinator: the program asks the next one again.
    Ask(#[serde(with = "bytes")] Arc<[u8]>),
    /// From the coordinator's program.
    Reply(#[serde(with = "bytes")] Arc<[u8]>),
    /// An end that the sender knows for certain.
    Testify(Ended),
    /// The sender wants to go on to the next generation.
    GoOn(Wish),
    /// The sender takes its wish back.
    StayHere(u64),
    /// To a member: its wish came to nothing.
    NoSuccessor {
        /// The wish.
        wish: u64,
        /// The members that did not come.
        missing: Vec<MemberId>,
    },
    /// The sender goes on into no successor, and has given its lease up.
    Abstain,
    /// To a member that answers and did not come in time: the others go on without it.
    LeaveBehind,
    /// The answer: the sender takes part no more.
    Released,
    /// The sender leaves, or fails.
    Leave(Departure),
    /// From the coordinator: the next entry of the log.
    Append {
        /// In which term.
        term: Term,
        /// Its place.
        at: u64,
        /// What all hear.
        entry: Arc<Entry>,
    },
    /// From the coordinator of this term: nothing is decided on this side any more.
    CutOff {
        /// In which term.
        term: Term,
        /// Why.
        why: Exclusion,
    },
    /// From a candidate: asks for a vote.
    Solicit(Solicit),
    /// The vote for a candidate, or, unasked, the wish to follow a coordinator.
    Vote {
        /// In which term.
        term: Term,
        /// What the voter knows.
        report: Box<Report>,
    },
    /// No vote: the sender follows this coordinator, or has promised its vote to this candidate.
    Follows {
        /// In which term.
        term: Term,
        /// Whether that one coordinates already.
        leads: bool,
    },
    /// From a new coordinator: the receiver follows it, and lacks these entries.
    Lead {
        /// In which term.
        term: Term,
        /// The place of the first.
        start: u64,
        /// What the receiver has not heard.
        entries: Vec<Arc<Entry>>,
    },
    /// The receiver may not follow.
    TurnAway(Exclusion),
    /// From the coordinator: the successor that it proposes.
    Propose {
        /// In which term.
        term: Term,
        /// The next generation.
        membership: SharedMembership,
    },
    /// The sender is bound to that proposal.
    Accepted {
        /// In which term.
        term: Term,
        /// Its name.
        generation: Generation,
    },
    /// For the observers, at first and whenever the coordinator changes.
    Leads {
        /// In which term.
        term: Term,
        /// The generation.
        membership: SharedMembership,
    },
    /// To the coordinator, from an observer.
    Observe(Peer),
    /// To the coordinator, through any of its members or observers.
    Operator(OperatorWord),
    /// To an observer: the sender forms the first generation, which has this number. When that is active, it says so.
    Forms(u64),
}
