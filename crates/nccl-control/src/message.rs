//! What requests and answers are made of: rounds, and why something did not end well.

use crate::departure::{Departure, Reason, Unfinished, departure, put_departure};
use std::sync::Arc;
use std::time::Duration;

use super::frame::{Broken, Fields, put_bytes, put_index, put_number};
use super::phase::Phase;

/// The parts of all ranks of a round, in order.
pub(super) type Parts = Arc<Vec<Vec<u8>>>;

/// The longest time that is sent: about 30 years, so that adding it to a clock cannot overflow.
const LONGEST: u64 = 1_000_000_000_000;

pub(super) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).map_or(LONGEST, |millis| millis.min(LONGEST))
}

pub(super) fn duration(fields: &mut Fields<'_>) -> Result<Duration, Broken> {
    Ok(Duration::from_millis(fields.number()?.min(LONGEST)))
}

/// Writes a phase and its age; `None` is that of a rank that never came.
pub(super) fn put_phase(to: &mut Vec<u8>, phase: Option<&(Phase, Duration)>) {
    let Some((phase, age)) = phase else {
        return put_number(to, 0);
    };
    match phase {
        Phase::Joined => put_number(to, 1),
        Phase::Said(name) => {
            put_number(to, 2);
            put_bytes(to, name.as_bytes());
        }
    }
    put_number(to, millis(*age));
}

/// As [`put_phase`] has written it.
pub(super) fn take_phase(fields: &mut Fields<'_>) -> Result<Option<(Phase, Duration)>, Broken> {
    let phase = match fields.number()? {
        0 => return Ok(None),
        1 => Phase::Joined,
        2 => Phase::Said(fields.said()?),
        _ => return Err(Broken("a phase of an unknown kind")),
    };
    Ok(Some((phase, duration(fields)?)))
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

/// A rank that is waited for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Missing {
    pub(super) rank: usize,
    /// What it does, and for how long; `None` when it never came at all.
    pub(super) phase: Option<(Phase, Duration)>,
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
        reason: Reason,
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

impl Incomplete {
    /// What an error says of it that others act on.
    pub(super) fn unfinished(&self) -> Option<Unfinished> {
        match self {
            Self::Gone { rank, departure } => Some(Unfinished::Gone {
                rank: *rank,
                departure: departure.clone(),
            }),
            Self::GivenUp { rank, reason } => Some(Unfinished::GivenUp {
                rank: *rank,
                reason: reason.clone(),
            }),
            Self::TimedOut {
                missing, waited, ..
            } => Some(Unfinished::Late {
                missing: missing.iter().map(|missing| missing.rank).collect(),
                phase: missing.first().and_then(|missing| {
                    let (phase, age) = missing.phase.as_ref()?;
                    Some((phase.name().to_owned(), *age))
                }),
                waited: *waited,
            }),
            Self::Twice
            | Self::TooLarge { .. }
            | Self::OtherMembers
            | Self::NoKey { .. }
            | Self::Interrupted => None,
        }
    }
}

impl Incomplete {
    pub(super) fn put(&self, to: &mut Vec<u8>) {
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
                    put_phase(to, phase.as_ref());
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
                reason.put(to);
            }
            Self::OtherMembers => put_number(to, 5),
            Self::NoKey { waited } => {
                put_number(to, 6);
                put_number(to, millis(*waited));
            }
            Self::Interrupted => put_number(to, 7),
        }
    }

    pub(super) fn take(fields: &mut Fields<'_>) -> Result<Self, Broken> {
        Ok(match fields.number()? {
            0 => {
                let waited = duration(fields)?;
                let missing = (0..fields.count(16)?)
                    .map(|_| {
                        let rank = fields.index()?;
                        let phase = take_phase(fields)?;
                        Ok(Missing { rank, phase })
                    })
                    .collect::<Result<_, Broken>>()?;
                let remarks = (0..fields.count(8)?)
                    .map(|_| fields.said())
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
                reason: Reason::take(fields)?,
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
