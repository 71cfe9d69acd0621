//! Who has not entered an operation in which others wait: what ranks and coordinator say about that.
//!
//! ```text
//! a rank that waits          coordinator                        every other member
//!   suspects somebody ────▶    opens an inquiry ───inquires──▶
//!                              (once for an operation)            answers at once, and once more when it enters,
//!                              ◀───────────────────────────────   if it has not
//!                 all have answered, or its patience is over
//!          ◀────────────────── tells all members, and observers ──▶ who is late, by how much, in which phase
//! ```
//!
//! What travels are ages, never times of a clock: each rank says how long ago it entered, and the coordinator
//! takes that from the moment at which it hears it, less half of the time that the answer took. So clocks may
//! differ as they like, and what is said is right to about the time of a message.
//!
//! `inquiries` is the coordinator's part, `supervision/stragglers.rs` that of a rank.

use std::sync::Arc;
use std::time::Duration;

use super::frame::{Broken, Fields, put_bytes, put_index, put_number};
use super::message::{duration, millis};
use crate::operation::OperationKind;

/// Which operation is meant, as who asked first calls it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[doc(hidden)]
pub struct Subject {
    /// What all ranks call the communicator.
    pub key: String,
    /// Its name.
    pub name: String,
    /// Its number among the collectives of the communicator, from 1: the same on all ranks, whatever messages
    /// they have exchanged besides.
    pub turn: u64,
    pub kind: OperationKind,
    pub sequence: u64,
}

/// Somebody waits.
#[derive(Clone, Debug, PartialEq, Eq)]
#[doc(hidden)]
pub struct Suspicion {
    pub subject: Subject,
    /// The ranks of the communicator in the world; all in order, if there are none.
    pub members: Vec<usize>,
    /// How long ago it entered.
    pub since: Duration,
    /// Nobody is suspected: only how far apart the ranks came is asked for.
    pub is_sample: bool,
}

/// How it stands with a rank and an operation.
#[derive(Clone, Debug, PartialEq, Eq)]
#[doc(hidden)]
pub struct Attendance {
    pub key: String,
    pub turn: u64,
    /// How long ago it entered.
    pub entered: Option<Duration>,
    /// What it did last, if it has not.
    pub last: String,
}

/// Those who have not entered an operation, or have at last.
#[derive(Clone, Debug, PartialEq, Eq)]
#[doc(hidden)]
pub struct Lateness {
    pub subject: Subject,
    /// Of the communicator.
    pub ranks: usize,
    pub late: Vec<Latecomer>,
    /// How many more there are, that are not listed.
    pub more: usize,
    /// The rank of the world that warns of it, for all: one that waits, and so is known to go on.
    pub teller: usize,
}

/// One of them.
#[derive(Clone, Debug, PartialEq, Eq)]
#[doc(hidden)]
pub struct Latecomer {
    /// In the world.
    pub rank: usize,
    /// In the communicator.
    pub place: usize,
    pub host: String,
    pub pid: u32,
    /// Behind the first that entered.
    pub behind: Duration,
    /// Whether it has entered by now.
    pub has_entered: bool,
    /// Whether its process answers.
    pub answers: bool,
    /// What it said that it does; empty for nothing.
    pub phase: String,
    /// What it did last on the communicator, or that there is none; empty where it has not said.
    pub last: String,
}

impl Subject {
    fn put(&self, to: &mut Vec<u8>) {
        put_bytes(to, self.key.as_bytes());
        put_bytes(to, self.name.as_bytes());
        put_number(to, self.turn);
        put_number(to, self.kind as u64);
        put_number(to, self.sequence);
    }

    fn take(fields: &mut Fields<'_>) -> Result<Self, Broken> {
        Ok(Self {
            key: fields.text()?,
            name: fields.text()?,
            turn: fields.number()?,
            kind: usize::try_from(fields.number()?)
                .ok()
                .and_then(|code| OperationKind::ALL.get(code).copied())
                .ok_or(Broken("an operation of an unknown kind"))?,
            sequence: fields.number()?,
        })
    }
}

impl Suspicion {
    pub(super) fn put(&self, to: &mut Vec<u8>) {
        self.subject.put(to);
        put_index(to, self.members.len());
        self.members.iter().for_each(|&rank| put_index(to, rank));
        put_nanos(to, self.since);
        put_number(to, self.is_sample.into());
    }

    pub(super) fn take(fields: &mut Fields<'_>) -> Result<Self, Broken> {
        Ok(Self {
            subject: Subject::take(fields)?,
            members: (0..fields.count(8)?)
                .map(|_| fields.index())
                .collect::<Result<_, _>>()?,
            since: nanos(fields)?,
            is_sample: fields.number()? != 0,
        })
    }
}

impl Attendance {
    pub(super) fn put(&self, to: &mut Vec<u8>) {
        put_bytes(to, self.key.as_bytes());
        put_number(to, self.turn);
        put_number(to, self.entered.is_some().into());
        put_nanos(to, self.entered.unwrap_or_default());
        put_bytes(to, self.last.as_bytes());
    }

    pub(super) fn take(fields: &mut Fields<'_>) -> Result<Self, Broken> {
        let (key, turn) = (fields.text()?, fields.number()?);
        let has_entered = fields.number()? != 0;
        let since = nanos(fields)?;
        Ok(Self {
            key,
            turn,
            entered: has_entered.then_some(since),
            last: fields.said()?,
        })
    }
}

impl Lateness {
    pub(super) fn put(&self, to: &mut Vec<u8>) {
        self.subject.put(to);
        put_index(to, self.ranks);
        put_index(to, self.late.len());
        for one in &self.late {
            put_index(to, one.rank);
            put_index(to, one.place);
            put_bytes(to, one.host.as_bytes());
            put_number(to, one.pid.into());
            put_number(to, millis(one.behind));
            put_number(to, one.has_entered.into());
            put_number(to, one.answers.into());
            put_bytes(to, one.phase.as_bytes());
            put_bytes(to, one.last.as_bytes());
        }
        put_index(to, self.more);
        put_index(to, self.teller);
    }

    pub(super) fn take(fields: &mut Fields<'_>) -> Result<Arc<Self>, Broken> {
        let (subject, ranks) = (Subject::take(fields)?, fields.index()?);
        let late = (0..fields.count(72)?)
            .map(|_| {
                Ok(Latecomer {
                    rank: fields.index()?,
                    place: fields.index()?,
                    host: fields.said()?,
                    pid: u32::try_from(fields.number()?).map_err(|_| Broken("no process"))?,
                    behind: duration(fields)?,
                    has_entered: fields.number()? != 0,
                    answers: fields.number()? != 0,
                    phase: fields.said()?,
                    last: fields.said()?,
                })
            })
            .collect::<Result<_, Broken>>()?;
        Ok(Arc::new(Self {
            subject,
            ranks,
            late,
            more: fields.index()?,
            teller: fields.index()?,
        }))
    }
}

/// The longest age that is sent: about 31 years, so that taking it from a clock is all that can fail.
const LONGEST: u64 = 1_000_000_000_000_000_000;

pub(super) fn put_nanos(to: &mut Vec<u8>, age: Duration) {
    put_number(
        to,
        u64::try_from(age.as_nanos()).map_or(LONGEST, |n| n.min(LONGEST)),
    );
}

pub(super) fn nanos(fields: &mut Fields<'_>) -> Result<Duration, Broken> {
    Ok(Duration::from_nanos(fields.number()?.min(LONGEST)))
}
