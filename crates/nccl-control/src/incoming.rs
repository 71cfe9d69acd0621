//! What a coordinator says: answers to requests, and what nobody asked for.

use std::sync::Arc;
use std::time::Duration;

use super::frame::{Broken, Fields, Frame, Outgoing, put_bytes, put_index, put_number};
use super::going::Epoch;
use super::inquiry::{Lateness, nanos, put_nanos};
use super::mailbox::Notice;
use super::message::{Incomplete, Parts, duration, millis, put_phase, take_phase};
use super::phase::Phase;
use super::process_state::ProcessState;
use super::testimony::{notices, put_notices};
use crate::departure::{Departure, departure, put_departure};

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    Parts(Parts),
    Done,
    Value(Arc<[u8]>),
    Incomplete(Arc<Incomplete>),
    /// All that are left go on.
    Epoch(Arc<Epoch>),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Push {
    Notice {
        from: usize,
        topic: String,
        bytes: Arc<[u8]>,
    },
    /// From another rank, for this one alone.
    Told {
        from: usize,
        topic: String,
        bytes: Arc<[u8]>,
    },
    Gone {
        rank: usize,
        departure: Departure,
    },
    /// A message of a channel.
    Message {
        channel: String,
        from: usize,
        bytes: Arc<[u8]>,
    },
    /// Somebody has left, and no channel has all its ranks any more.
    Over {
        rank: usize,
        departure: Departure,
    },
    /// Whether somebody has said that it will tell how rank 0's process ends.
    Watched(bool),
    /// So many wait to be taken into the next epoch.
    Newcomers(usize),
    /// For one of them: it is this rank of that epoch.
    Invited {
        epoch: Arc<Epoch>,
        rank: usize,
    },
    /// From a successor: it coordinates, and these were told behind the first `start`.
    Succeeded {
        by: usize,
        start: usize,
        entries: Vec<Notice>,
    },
    /// Whoever hears this cannot reach those ranks, nor can the coordinator.
    CutOff {
        from: Vec<usize>,
        why: String,
    },
    /// Whether this rank has entered an operation of this communicator.
    Inquire {
        key: String,
        turn: u64,
        is_sample: bool,
    },
    /// Who has not entered an operation, or has at last.
    Lateness(Arc<Lateness>),
    /// How far apart the ranks entered an operation, and who was last.
    Skew {
        key: String,
        skew: Duration,
        last: usize,
    },
    /// Whether it is there; answered with the same number.
    Ping(u64),
    /// For one on the host of a rank that is silent: how does it stand with its process?
    Look {
        rank: usize,
        pid: u64,
    },
    /// A rank is alive, and has been silent for so long; `None` when it speaks again.
    Suspected {
        rank: usize,
        silent: Option<Duration>,
        state: Option<ProcessState>,
    },
    /// For observers, at first: how many ranks there are.
    Size(usize),
    /// To an observer: the ranks have agreed to go on to that epoch.
    GoesOn(u64),
    /// For observers: everything about a rank, at first and whenever it changes.
    Member(Known),
}

/// What the coordinator knows of a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Known {
    pub(super) rank: usize,
    pub(super) host: String,
    pub(super) pid: u64,
    /// Under which its number means something.
    pub(super) kernel: String,
    /// Where it listens, once it does.
    pub(super) at: String,
    /// What it does, and for how long; `None` when it never came.
    pub(super) phase: Option<(Phase, Duration)>,
    pub(super) departure: Option<Departure>,
}

mod kind {
    pub(super) const PARTS: u8 = 32;
    pub(super) const DONE: u8 = 33;
    pub(super) const VALUE: u8 = 34;
    pub(super) const INCOMPLETE: u8 = 35;
    pub(super) const NOTICE: u8 = 48;
    pub(super) const GONE: u8 = 49;
    pub(super) const WATCHED: u8 = 50;
    pub(super) const SIZE: u8 = 51;
    pub(super) const GOES_ON: u8 = 63;
    pub(super) const MEMBER: u8 = 52;
    pub(super) const MESSAGE: u8 = 53;
    pub(super) const OVER: u8 = 54;
    pub(super) const EPOCH: u8 = 65;
    pub(super) const NEWCOMERS: u8 = 66;
    pub(super) const INVITED: u8 = 67;
    pub(super) const SUCCEEDED: u8 = 55;
    pub(super) const CUT_OFF: u8 = 56;
    pub(super) const PING: u8 = 57;
    pub(super) const TOLD: u8 = 80;
    pub(super) const LOOK: u8 = 58;
    pub(super) const SUSPECTED: u8 = 59;
    pub(super) const INQUIRE: u8 = 60;
    pub(super) const LATENESS: u8 = 61;
    pub(super) const SKEW: u8 = 62;
}

impl Answer {
    /// The kind and the payload, which is the same for all ranks that get this answer.
    pub(super) fn encode(&self) -> (u8, Arc<[u8]>) {
        match self {
            Self::Parts(parts) => {
                let bytes: usize = parts.iter().map(|part| part.len() + 8).sum();
                let mut to = Vec::with_capacity(bytes + 8);
                put_index(&mut to, parts.len());
                parts.iter().for_each(|part| put_bytes(&mut to, part));
                (kind::PARTS, to.into())
            }
            Self::Done => (kind::DONE, Arc::default()),
            Self::Value(value) => (kind::VALUE, Arc::clone(value)),
            Self::Incomplete(incomplete) => {
                let mut to = Vec::new();
                incomplete.put(&mut to);
                (kind::INCOMPLETE, to.into())
            }
            Self::Epoch(epoch) => {
                let mut to = Vec::new();
                epoch.put(&mut to);
                (kind::EPOCH, to.into())
            }
        }
    }
}

impl Known {
    fn put(&self, to: &mut Vec<u8>) {
        put_index(to, self.rank);
        put_bytes(to, self.host.as_bytes());
        put_number(to, self.pid);
        put_bytes(to, self.kernel.as_bytes());
        put_bytes(to, self.at.as_bytes());
        put_phase(to, self.phase.as_ref());
        match &self.departure {
            Some(departure) => {
                put_number(to, 1);
                put_departure(to, departure);
            }
            None => put_number(to, 0),
        }
    }

    fn take(fields: &mut Fields<'_>) -> Result<Self, Broken> {
        let (rank, host, pid) = (fields.index()?, fields.said()?, fields.number()?);
        let (kernel, at) = (fields.text()?, fields.text()?);
        Ok(Self {
            rank,
            host,
            pid,
            kernel,
            at,
            phase: take_phase(fields)?,
            departure: match fields.number()? {
                0 => None,
                _ => Some(departure(fields)?),
            },
        })
    }
}

/// For how long a silence has lasted, written as one more; 0 for none.
fn silence(fields: &mut Fields<'_>) -> Result<Option<Duration>, Broken> {
    let after = duration(fields)?;
    Ok(after.checked_sub(Duration::from_millis(1)))
}

impl Push {
    pub(super) fn encode(&self) -> Outgoing {
        let mut to = Vec::new();
        let kind = match self {
            Self::Notice { from, topic, bytes } => {
                put_index(&mut to, *from);
                put_bytes(&mut to, topic.as_bytes());
                put_bytes(&mut to, bytes);
                kind::NOTICE
            }
            Self::Told { from, topic, bytes } => {
                put_index(&mut to, *from);
                put_bytes(&mut to, topic.as_bytes());
                put_bytes(&mut to, bytes);
                kind::TOLD
            }
            Self::Gone { rank, departure } => {
                put_index(&mut to, *rank);
                put_departure(&mut to, departure);
                kind::GONE
            }
            Self::Message {
                channel,
                from,
                bytes,
            } => {
                put_bytes(&mut to, channel.as_bytes());
                put_index(&mut to, *from);
                put_bytes(&mut to, bytes);
                kind::MESSAGE
            }
            Self::Over { rank, departure } => {
                put_index(&mut to, *rank);
                put_departure(&mut to, departure);
                kind::OVER
            }
            Self::Watched(watched) => {
                put_number(&mut to, (*watched).into());
                kind::WATCHED
            }
            Self::Newcomers(count) => {
                put_index(&mut to, *count);
                kind::NEWCOMERS
            }
            Self::Invited { epoch, rank } => {
                epoch.put(&mut to);
                put_index(&mut to, *rank);
                kind::INVITED
            }
            Self::Succeeded { by, start, entries } => {
                put_index(&mut to, *by);
                put_index(&mut to, *start);
                put_notices(&mut to, entries);
                kind::SUCCEEDED
            }
            Self::CutOff { from, why } => {
                put_index(&mut to, from.len());
                from.iter().for_each(|&rank| put_index(&mut to, rank));
                put_bytes(&mut to, why.as_bytes());
                kind::CUT_OFF
            }
            Self::Inquire {
                key,
                turn,
                is_sample,
            } => {
                put_bytes(&mut to, key.as_bytes());
                put_number(&mut to, *turn);
                put_number(&mut to, (*is_sample).into());
                kind::INQUIRE
            }
            Self::Lateness(lateness) => {
                lateness.put(&mut to);
                kind::LATENESS
            }
            Self::Skew { key, skew, last } => {
                put_bytes(&mut to, key.as_bytes());
                put_nanos(&mut to, *skew);
                put_index(&mut to, *last);
                kind::SKEW
            }
            Self::Ping(number) => {
                put_number(&mut to, *number);
                kind::PING
            }
            Self::Look { rank, pid } => {
                put_index(&mut to, *rank);
                put_number(&mut to, *pid);
                kind::LOOK
            }
            Self::Suspected {
                rank,
                silent,
                state,
            } => {
                put_index(&mut to, *rank);
                put_number(&mut to, silent.map_or(0, |silent| millis(silent) + 1));
                put_index(&mut to, state.is_some().into());
                if let Some(state) = state {
                    state.put(&mut to);
                }
                kind::SUSPECTED
            }
            Self::Size(size) => {
                put_index(&mut to, *size);
                kind::SIZE
            }
            Self::GoesOn(epoch) => {
                put_number(&mut to, *epoch);
                kind::GOES_ON
            }
            Self::Member(known) => {
                known.put(&mut to);
                kind::MEMBER
            }
        };
        Outgoing::new(kind, 0, to.into())
    }
}

/// What comes from a coordinator.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Incoming {
    Answer(u64, Answer),
    Push(Push),
}

impl Incoming {
    pub(super) fn decode(frame: Frame) -> Result<Self, Broken> {
        let mut fields = Fields(&frame.payload);
        let incoming = match frame.kind {
            kind::PARTS => {
                let parts = (0..fields.count(8)?)
                    .map(|_| fields.bytes().map(<[u8]>::to_vec))
                    .collect::<Result<Vec<_>, _>>()?;
                Self::Answer(frame.id, Answer::Parts(Arc::new(parts)))
            }
            kind::DONE => Self::Answer(frame.id, Answer::Done),
            kind::VALUE => {
                let value = Arc::from(frame.payload);
                return Ok(Self::Answer(frame.id, Answer::Value(value)));
            }
            kind::INCOMPLETE => {
                let incomplete = Incomplete::take(&mut fields)?;
                Self::Answer(frame.id, Answer::Incomplete(Arc::new(incomplete)))
            }
            kind::NOTICE => Self::Push(Push::Notice {
                from: fields.index()?,
                topic: fields.text()?,
                bytes: fields.bytes()?.into(),
            }),
            kind::TOLD => Self::Push(Push::Told {
                from: fields.index()?,
                topic: fields.text()?,
                bytes: fields.bytes()?.into(),
            }),
            kind::GONE => Self::Push(Push::Gone {
                rank: fields.index()?,
                departure: departure(&mut fields)?,
            }),
            kind::MESSAGE => Self::Push(Push::Message {
                channel: fields.text()?,
                from: fields.index()?,
                bytes: fields.bytes()?.into(),
            }),
            kind::OVER => Self::Push(Push::Over {
                rank: fields.index()?,
                departure: departure(&mut fields)?,
            }),
            kind::WATCHED => Self::Push(Push::Watched(fields.number()? != 0)),
            kind::EPOCH => {
                let epoch = Arc::new(Epoch::take(&mut fields)?);
                Self::Answer(frame.id, Answer::Epoch(epoch))
            }
            kind::NEWCOMERS => Self::Push(Push::Newcomers(fields.index()?)),
            kind::INVITED => Self::Push(Push::Invited {
                epoch: Arc::new(Epoch::take(&mut fields)?),
                rank: fields.index()?,
            }),
            kind::SUCCEEDED => Self::Push(Push::Succeeded {
                by: fields.index()?,
                start: fields.index()?,
                entries: notices(&mut fields)?,
            }),
            kind::CUT_OFF => {
                let from = (0..fields.count(8)?).map(|_| fields.index());
                Self::Push(Push::CutOff {
                    from: from.collect::<Result<_, _>>()?,
                    why: fields.said()?,
                })
            }
            kind::INQUIRE => Self::Push(Push::Inquire {
                key: fields.text()?,
                turn: fields.number()?,
                is_sample: fields.number()? != 0,
            }),
            kind::LATENESS => Self::Push(Push::Lateness(Lateness::take(&mut fields)?)),
            kind::SKEW => Self::Push(Push::Skew {
                key: fields.text()?,
                skew: nanos(&mut fields)?,
                last: fields.index()?,
            }),
            kind::PING => Self::Push(Push::Ping(fields.number()?)),
            kind::LOOK => Self::Push(Push::Look {
                rank: fields.index()?,
                pid: fields.number()?,
            }),
            kind::SUSPECTED => {
                let rank = fields.index()?;
                let silent = silence(&mut fields)?;
                let seen = fields.number()? != 0;
                let state = seen.then(|| ProcessState::take(&mut fields)).transpose()?;
                Self::Push(Push::Suspected {
                    rank,
                    silent,
                    state,
                })
            }
            kind::SIZE => Self::Push(Push::Size(fields.index()?)),
            kind::GOES_ON => Self::Push(Push::GoesOn(fields.number()?)),
            kind::MEMBER => Self::Push(Push::Member(Known::take(&mut fields)?)),
            _ => return Err(Broken("an answer of an unknown kind")),
        };
        fields.end()?;
        Ok(incoming)
    }
}
