//! What ranks and their coordinator say to each other once they have met.
//!
//! A rank sends [`Request`]s. The coordinator answers those that expect it with an [`Answer`] of the
//! same number, in any order, and sends [`Push`]es unasked.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::frame::{Broken, Fields, Frame, Outgoing, put_bytes, put_index, put_number};

/// The parts of all ranks of a round, in order.
pub(super) type Parts = Arc<Vec<Vec<u8>>>;

/// The longest time that is sent: about 30 years, so that adding it to a clock cannot overflow.
const LONGEST: u64 = 1_000_000_000_000;

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).map_or(LONGEST, |millis| millis.min(LONGEST))
}

fn duration(fields: &mut Fields<'_>) -> Result<Duration, Broken> {
    Ok(Duration::from_millis(fields.number()?.min(LONGEST)))
}

/// Which ranks a round is for, under which name.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Round {
    pub(super) topic: String,
    /// The how-manieth use of the topic.
    pub(super) number: u64,
    /// All ranks, or some of them, in the order of their parts.
    pub(super) members: Option<Arc<[usize]>>,
}

/// How the topics begin of rounds in which ranks tell that they are done with something. Such a round
/// ends well without those that are gone: a process that ended is done with everything.
pub(super) const ENDS: &str = "end/";

impl Round {
    /// Whether it does without ranks that are gone.
    pub(super) fn is_of_ends(&self) -> bool {
        self.topic.starts_with(ENDS)
    }
}

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
        reason: String,
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
    /// This rank ends with an error.
    Fail {
        chain: String,
    },
    /// This rank comes to no round any more, but to those of ends: its world is gone, and it still has
    /// communicators. With the chain of an error, it fails.
    Stay {
        chain: Option<String>,
    },
    Goodbye,
}

/// How a rank left.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Departure {
    /// With a goodbye.
    Left,
    /// It said why, with the whole chain of its error.
    Failed(String),
    /// Its connection ended without a goodbye.
    Lost(String),
}

impl fmt::Display for Departure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Left => f.write_str("it left the world"),
            Self::Failed(chain) => write!(f, "it failed: {chain}"),
            Self::Lost(how) => f.write_str(how),
        }
    }
}

/// A rank that is waited for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Missing {
    pub(super) rank: usize,
    /// What it does, and for how long; `None` when it never came at all.
    pub(super) phase: Option<(String, Duration)>,
}

/// Why a request did not end well.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Incomplete {
    TimedOut {
        missing: Vec<Missing>,
        waited: Duration,
        /// What else the coordinator has seen: who was turned away.
        remarks: Vec<String>,
    },
    Gone {
        rank: usize,
        departure: Departure,
    },
    /// This rank gave a part of the round already.
    Twice,
    /// The parts or values have more than the limit together.
    TooLarge {
        bytes: usize,
    },
    /// Another rank gave the round up.
    GivenUp {
        rank: usize,
        reason: String,
    },
    /// The topic's round is of other ranks on another rank.
    OtherMembers,
    /// Nobody set the key in time.
    NoKey {
        waited: Duration,
    },
    /// This rank itself gave the request up.
    Interrupted,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    Parts(Parts),
    Done,
    Value(Arc<[u8]>),
    Incomplete(Arc<Incomplete>),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Push {
    Notice {
        from: usize,
        topic: String,
        bytes: Arc<[u8]>,
    },
    Gone {
        rank: usize,
        departure: Departure,
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
    pub(super) const PARTS: u8 = 32;
    pub(super) const DONE: u8 = 33;
    pub(super) const VALUE: u8 = 34;
    pub(super) const INCOMPLETE: u8 = 35;
    pub(super) const NOTICE: u8 = 48;
    pub(super) const GONE: u8 = 49;
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
                put_bytes(&mut to, reason.as_bytes());
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
            Self::Fail { chain } => {
                put_bytes(&mut to, chain.as_bytes());
                kind::FAIL
            }
            Self::Stay { chain } => {
                put_index(&mut to, chain.is_some().into());
                put_bytes(&mut to, chain.as_deref().unwrap_or_default().as_bytes());
                kind::STAY
            }
            Self::Goodbye => kind::GOODBYE,
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
                reason: fields.text()?,
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
                name: fields.text()?,
            },
            kind::ANNOUNCE => Self::Announce {
                topic: fields.text()?,
                bytes: fields.bytes()?.to_vec(),
            },
            kind::FAIL => Self::Fail {
                chain: fields.text()?,
            },
            kind::STAY => {
                let failed = fields.number()? != 0;
                let chain = fields.text()?;
                let chain = failed.then_some(chain);
                Self::Stay { chain }
            }
            kind::GOODBYE => Self::Goodbye,
            _ => return Err(Broken("a request of an unknown kind")),
        };
        fields.end()?;
        Ok(request)
    }
}

fn put_departure(to: &mut Vec<u8>, departure: &Departure) {
    let (number, text) = match departure {
        Departure::Left => (0, ""),
        Departure::Failed(chain) => (1, &chain[..]),
        Departure::Lost(how) => (2, &how[..]),
    };
    put_number(to, number);
    put_bytes(to, text.as_bytes());
}

fn departure(fields: &mut Fields<'_>) -> Result<Departure, Broken> {
    let number = fields.number()?;
    let text = fields.text()?;
    match number {
        0 => Ok(Departure::Left),
        1 => Ok(Departure::Failed(text)),
        2 => Ok(Departure::Lost(text)),
        _ => Err(Broken("a departure of an unknown kind")),
    }
}

impl Incomplete {
    fn put(&self, to: &mut Vec<u8>) {
        match self {
            Self::TimedOut {
                missing,
                waited,
                remarks,
            } => {
                put_number(to, 0);
                put_number(to, millis(*waited));
                put_index(to, missing.len());
                for Missing { rank, phase } in missing {
                    put_index(to, *rank);
                    let (name, since) = match phase {
                        Some((name, since)) => (&name[..], millis(*since) + 1),
                        None => ("", 0),
                    };
                    put_number(to, since);
                    put_bytes(to, name.as_bytes());
                }
                put_index(to, remarks.len());
                remarks
                    .iter()
                    .for_each(|text| put_bytes(to, text.as_bytes()));
            }
            Self::Gone { rank, departure } => {
                put_number(to, 1);
                put_index(to, *rank);
                put_departure(to, departure);
            }
            Self::Twice => put_number(to, 2),
            Self::TooLarge { bytes } => {
                put_number(to, 3);
                put_index(to, *bytes);
            }
            Self::GivenUp { rank, reason } => {
                put_number(to, 4);
                put_index(to, *rank);
                put_bytes(to, reason.as_bytes());
            }
            Self::OtherMembers => put_number(to, 5),
            Self::NoKey { waited } => {
                put_number(to, 6);
                put_number(to, millis(*waited));
            }
            Self::Interrupted => put_number(to, 7),
        }
    }

    fn take(fields: &mut Fields<'_>) -> Result<Self, Broken> {
        Ok(match fields.number()? {
            0 => {
                let waited = duration(fields)?;
                let missing = (0..fields.count(24)?)
                    .map(|_| {
                        let rank = fields.index()?;
                        let since = fields.number()?;
                        let name = fields.text()?;
                        let phase = since
                            .checked_sub(1)
                            .map(|since| (name, Duration::from_millis(since.min(LONGEST))));
                        Ok(Missing { rank, phase })
                    })
                    .collect::<Result<_, Broken>>()?;
                let remarks = (0..fields.count(8)?)
                    .map(|_| fields.text())
                    .collect::<Result<_, _>>()?;
                Self::TimedOut {
                    missing,
                    waited,
                    remarks,
                }
            }
            1 => Self::Gone {
                rank: fields.index()?,
                departure: departure(fields)?,
            },
            2 => Self::Twice,
            3 => Self::TooLarge {
                bytes: fields.index()?,
            },
            4 => Self::GivenUp {
                rank: fields.index()?,
                reason: fields.text()?,
            },
            5 => Self::OtherMembers,
            6 => Self::NoKey {
                waited: duration(fields)?,
            },
            7 => Self::Interrupted,
            _ => return Err(Broken("a reason of an unknown kind")),
        })
    }
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
        }
    }
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
            Self::Gone { rank, departure } => {
                put_index(&mut to, *rank);
                put_departure(&mut to, departure);
                kind::GONE
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
            kind::GONE => Self::Push(Push::Gone {
                rank: fields.index()?,
                departure: departure(&mut fields)?,
            }),
            _ => return Err(Broken("an answer of an unknown kind")),
        };
        fields.end()?;
        Ok(incoming)
    }
}
