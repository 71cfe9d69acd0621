//! What ranks and observers say to a coordinator.

use std::time::Duration;

use super::frame::{Broken, Fields, Frame, Outgoing, put_bytes, put_index, put_number};
use super::inquiry::{Attendance, Suspicion};
use super::mailbox::Notice;
use super::message::{Round, duration, millis};
use super::process_state::ProcessState;
use super::succession::Report;
use super::testimony::{put_report, report};
use crate::departure::Reason;
use crate::departure::{Failure, ProcessEnd, failure, process_end, put_failure, put_process_end};

/// The coordinator answers those that expect it with an [`Answer`](super::incoming::Answer) of the same
/// number, in any order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Request {
    /// A part of a round; answered when all ranks have given theirs.
    Collect {
        round: Round,
        patience: Duration,
        part: Vec<u8>,
    },
    /// Gives up the request of the same number, and with it the round for all.
    Cancel {
        reason: Reason,
    },
    Set {
        key: String,
        value: Vec<u8>,
    },
    /// Answered when the key is set.
    Get {
        key: String,
        patience: Duration,
    },
    /// What this rank does now.
    Phase {
        name: String,
    },
    /// For all ranks, the sender included.
    Announce {
        topic: String,
        bytes: Vec<u8>,
    },
    /// For one rank alone. Lost when the coordinator dies, and kept by nobody.
    Tell {
        to: usize,
        topic: String,
        bytes: Vec<u8>,
    },
    /// This rank ends with an error.
    Fail {
        why: Failure,
    },
    /// This rank comes to no round any more, but to those of ends: its world is gone, and it still has
    /// communicators. With a reason, it fails.
    Stay {
        why: Option<Failure>,
    },
    Goodbye,
    /// This rank wants to go on in the next epoch; answered when all that are left do.
    GoOn {
        patience: Duration,
        /// Without those who do not come in time.
        leaves_behind: bool,
    },
    /// A message of a channel, to one rank or to all others; answered when all of them have room for it.
    Send {
        channel: String,
        to: Option<usize>,
        patience: Duration,
        bytes: Vec<u8>,
    },
    /// This rank has taken so many messages.
    Took {
        channel: String,
        count: usize,
    },
    /// Where this rank listens.
    Listens {
        at: String,
    },
    /// What the clock of this process's recorder says; answered at once.
    Clock,
    /// What this rank's communicators did last, in no more than about so many bytes. Of those who ask for
    /// nothing else.
    Recording {
        bytes: usize,
    },
    /// This rank waits in an operation, and somebody may not have entered it.
    Suspect(Suspicion),
    /// Whether this rank has entered an operation: the answer to
    /// [`Push::Inquire`](super::incoming::Push::Inquire), and once more when it has.
    Attends(Attendance),
    /// To a successor, first: what this rank has heard so far.
    Report(Report<Notice>),
    /// The answer to a [`Push::Ping`](super::incoming::Push::Ping), with its number.
    Pong(u64),
    /// Beside it: the last call of this process, where there is one.
    Last {
        call: String,
    },
    /// The answer to a [`Push::Look`](super::incoming::Push::Look): how it stands with that rank's process.
    Saw {
        rank: usize,
        state: ProcessState,
    },
    /// An observer's: it has started these ranks, as these processes, and will say how they end.
    Watches {
        ranks: Vec<(usize, u64)>,
    },
    /// An observer's: how a process ended that it has started.
    Ended {
        rank: usize,
        pid: u64,
        end: ProcessEnd,
    },
}

mod kind {
    pub(super) const COLLECT: u8 = 16;
    pub(super) const CANCEL: u8 = 17;
    pub(super) const SET: u8 = 18;
    pub(super) const GET: u8 = 19;
    pub(super) const PHASE: u8 = 20;
    pub(super) const ANNOUNCE: u8 = 21;
    pub(super) const FAIL: u8 = 22;
    pub(super) const GOODBYE: u8 = 23;
    pub(super) const STAY: u8 = 24;
    pub(super) const LISTENS: u8 = 25;
    pub(super) const WATCHES: u8 = 26;
    pub(super) const ENDED: u8 = 27;
    pub(super) const SEND: u8 = 28;
    pub(super) const TOOK: u8 = 29;
    pub(super) const GO_ON: u8 = 64;
    pub(super) const CLOCK: u8 = 30;
    pub(super) const RECORDING: u8 = 31;
    pub(super) const REPORT: u8 = 70;
    pub(super) const PONG: u8 = 71;
    pub(super) const TELL: u8 = 80;
    pub(super) const SAW: u8 = 72;
    pub(super) const SUSPECT: u8 = 73;
    pub(super) const ATTENDS: u8 = 74;
    pub(super) const LAST: u8 = 75;
}

impl Request {
    pub(super) fn encode(&self, id: u64) -> Outgoing {
        let mut to = Vec::new();
        let kind = match self {
            Self::Collect {
                round,
                patience,
                part,
            } => {
                put_bytes(&mut to, round.topic.as_bytes());
                put_number(&mut to, round.number);
                match &round.members {
                    None => put_number(&mut to, 0),
                    Some(members) => {
                        put_index(&mut to, members.len());
                        members.iter().for_each(|&rank| put_index(&mut to, rank));
                    }
                }
                put_number(&mut to, millis(*patience));
                put_bytes(&mut to, part);
                kind::COLLECT
            }
            Self::Cancel { reason } => {
                reason.put(&mut to);
                kind::CANCEL
            }
            Self::Set { key, value } => {
                put_bytes(&mut to, key.as_bytes());
                put_bytes(&mut to, value);
                kind::SET
            }
            Self::Get { key, patience } => {
                put_bytes(&mut to, key.as_bytes());
                put_number(&mut to, millis(*patience));
                kind::GET
            }
            Self::Phase { name } => {
                put_bytes(&mut to, name.as_bytes());
                kind::PHASE
            }
            Self::Announce { topic, bytes } => {
                put_bytes(&mut to, topic.as_bytes());
                put_bytes(&mut to, bytes);
                kind::ANNOUNCE
            }
            Self::Tell {
                to: rank,
                topic,
                bytes,
            } => {
                put_index(&mut to, *rank);
                put_bytes(&mut to, topic.as_bytes());
                put_bytes(&mut to, bytes);
                kind::TELL
            }
            Self::Fail { why } => {
                put_failure(&mut to, why);
                kind::FAIL
            }
            Self::Stay { why } => {
                put_index(&mut to, why.is_some().into());
                if let Some(why) = why {
                    put_failure(&mut to, why);
                }
                kind::STAY
            }
            Self::Goodbye => kind::GOODBYE,
            Self::GoOn {
                patience,
                leaves_behind,
            } => {
                put_number(&mut to, millis(*patience));
                put_number(&mut to, (*leaves_behind).into());
                kind::GO_ON
            }
            Self::Send {
                channel,
                to: target,
                patience,
                bytes,
            } => {
                put_bytes(&mut to, channel.as_bytes());
                put_number(&mut to, target.map_or(0, |rank| rank as u64 + 1));
                put_number(&mut to, millis(*patience));
                put_bytes(&mut to, bytes);
                kind::SEND
            }
            Self::Took { channel, count } => {
                put_bytes(&mut to, channel.as_bytes());
                put_index(&mut to, *count);
                kind::TOOK
            }
            Self::Listens { at } => {
                put_bytes(&mut to, at.as_bytes());
                kind::LISTENS
            }
            Self::Clock => kind::CLOCK,
            Self::Recording { bytes } => {
                put_index(&mut to, *bytes);
                kind::RECORDING
            }
            Self::Report(report) => {
                put_report(&mut to, report);
                kind::REPORT
            }
            Self::Suspect(suspicion) => {
                suspicion.put(&mut to);
                kind::SUSPECT
            }
            Self::Attends(attendance) => {
                attendance.put(&mut to);
                kind::ATTENDS
            }
            Self::Pong(number) => {
                put_number(&mut to, *number);
                kind::PONG
            }
            Self::Last { call } => {
                put_bytes(&mut to, call.as_bytes());
                kind::LAST
            }
            Self::Saw { rank, state } => {
                put_index(&mut to, *rank);
                state.put(&mut to);
                kind::SAW
            }
            Self::Watches { ranks } => {
                put_index(&mut to, ranks.len());
                for &(rank, pid) in ranks {
                    put_index(&mut to, rank);
                    put_number(&mut to, pid);
                }
                kind::WATCHES
            }
            Self::Ended { rank, pid, end } => {
                put_index(&mut to, *rank);
                put_number(&mut to, *pid);
                put_process_end(&mut to, end);
                kind::ENDED
            }
        };
        Outgoing::new(kind, id, to.into())
    }

    pub(super) fn decode(frame: &Frame) -> Result<Self, Broken> {
        let mut fields = Fields(&frame.payload);
        let request = match frame.kind {
            kind::COLLECT => {
                let topic = fields.text()?;
                let number = fields.number()?;
                let members = match fields.count(8)? {
                    0 => None,
                    count => Some(
                        (0..count)
                            .map(|_| fields.index())
                            .collect::<Result<_, _>>()?,
                    ),
                };
                Self::Collect {
                    round: Round {
                        topic,
                        number,
                        members,
                    },
                    patience: duration(&mut fields)?,
                    part: fields.bytes()?.to_vec(),
                }
            }
            kind::CANCEL => Self::Cancel {
                reason: Reason::take(&mut fields)?,
            },
            kind::SET => Self::Set {
                key: fields.text()?,
                value: fields.bytes()?.to_vec(),
            },
            kind::GET => Self::Get {
                key: fields.text()?,
                patience: duration(&mut fields)?,
            },
            kind::PHASE => Self::Phase {
                name: fields.said()?,
            },
            kind::ANNOUNCE => Self::Announce {
                topic: fields.text()?,
                bytes: fields.bytes()?.to_vec(),
            },
            kind::TELL => Self::Tell {
                to: fields.index()?,
                topic: fields.text()?,
                bytes: fields.bytes()?.to_vec(),
            },
            kind::FAIL => Self::Fail {
                why: failure(&mut fields)?,
            },
            kind::STAY => {
                let fails = fields.number()? != 0;
                let why = fails.then(|| failure(&mut fields)).transpose()?;
                Self::Stay { why }
            }
            kind::GOODBYE => Self::Goodbye,
            kind::GO_ON => Self::GoOn {
                patience: duration(&mut fields)?,
                leaves_behind: fields.number()? != 0,
            },
            kind::SEND => Self::Send {
                channel: fields.text()?,
                to: fields.index()?.checked_sub(1),
                patience: duration(&mut fields)?,
                bytes: fields.bytes()?.to_vec(),
            },
            kind::TOOK => Self::Took {
                channel: fields.text()?,
                count: fields.index()?,
            },
            kind::LISTENS => Self::Listens { at: fields.text()? },
            kind::CLOCK => Self::Clock,
            kind::RECORDING => Self::Recording {
                bytes: fields.index()?,
            },
            kind::REPORT => Self::Report(report(&mut fields)?),
            kind::SUSPECT => Self::Suspect(Suspicion::take(&mut fields)?),
            kind::ATTENDS => Self::Attends(Attendance::take(&mut fields)?),
            kind::PONG => Self::Pong(fields.number()?),
            kind::LAST => Self::Last {
                call: fields.said()?,
            },
            kind::SAW => Self::Saw {
                rank: fields.index()?,
                state: ProcessState::take(&mut fields)?,
            },
            kind::WATCHES => {
                let ranks = (0..fields.count(16)?)
                    .map(|_| Ok((fields.index()?, fields.number()?)))
                    .collect::<Result<_, Broken>>()?;
                Self::Watches { ranks }
            }
            kind::ENDED => Self::Ended {
                rank: fields.index()?,
                pid: fields.number()?,
                end: process_end(&mut fields)?,
            },
            _ => return Err(Broken("a request of an unknown kind")),
        };
        fields.end()?;
        Ok(request)
    }
}
