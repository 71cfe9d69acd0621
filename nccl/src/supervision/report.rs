//! What one rank says of a communicator that is on trial: what it entered, what it waits in, what its program does.
//!
//! Made from the recorder on a thread of its own, while the program's threads may hang: nothing here asks NCCL or
//! CUDA, or takes a lock that anybody holds during a call.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::cause::Earlier;
use super::recorder::{self, Call, CallState, Place, RecordedOperation, Track};
use super::watchdog;
use crate::debug_log::FirstWarning;
use crate::operation::OperationKind;

/// See the module. Ranks are those of the communicator.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Report {
    pub(super) rank: usize,
    /// Whether the rank has such a communicator, or had.
    pub(super) exists: bool,
    pub(super) phase: Option<Earlier>,
    /// How many calls it has entered to which all ranks come; `None` where that was lost count of.
    pub(super) entered: Option<u64>,
    /// The last calls, oldest first.
    pub(super) calls: Vec<Entered>,
    /// How many messages were sent to, and received from, each rank; empty for none.
    pub(super) sent: Vec<u64>,
    pub(super) received: Vec<u64>,
    /// How it stands on the other communicators of the process.
    pub(super) elsewhere: Vec<Elsewhere>,
    pub(super) warning: Option<FirstWarning>,
}

/// A call.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Entered {
    pub(super) number: u64,
    /// Whether all ranks come to it, and which of those it is, from 1.
    pub(super) is_for_all: bool,
    pub(super) place: Option<u64>,
    pub(super) kind: String,
    /// How long ago it was called.
    pub(super) age_ms: u64,
    pub(super) state: State,
    pub(super) operations: Vec<RecordedOperation>,
    /// How many more there are.
    pub(super) missing: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum State {
    /// NCCL has not come back.
    Issuing,
    /// Work that is not the communicator's is in front of it.
    Queued,
    Pending,
    Done,
}

/// Another communicator.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Elsewhere {
    pub(super) key: String,
    pub(super) name: String,
    pub(super) entered: Option<u64>,
    /// Where the first call stands that is not done, and how long ago it was called.
    pub(super) waiting: Option<(u64, u64)>,
}

/// So many calls are told, and of so many operations in all.
const CALLS: usize = 32;
const OPERATIONS: usize = 16 << 10;

/// To so many communicators a rank may belong that are told of.
const ELSEWHERE: usize = 16;

/// Larger ones do not tell their ledgers.
const LEDGERS: usize = 512;

impl Entered {
    pub(super) fn name(&self) -> String {
        format!("{} #{}", self.kind, self.number)
    }

    pub(super) fn is_pending(&self) -> bool {
        self.state != State::Done
    }
}

impl Report {
    pub(super) fn at(&self, place: u64) -> Option<&Entered> {
        self.calls.iter().find(|call| call.place == Some(place))
    }

    /// What it called last, and how long ago.
    pub(super) fn last(&self) -> Option<Earlier> {
        let last = self.calls.last()?;
        Some(Earlier {
            what: last.name(),
            ago: Duration::from_millis(last.age_ms),
        })
    }

    /// Of rank `rank` of the communicator `key`, which is this rank of its world.
    pub(super) fn of(key: &str, rank: usize, place: &Place, phase: Option<Earlier>) -> Self {
        let own = |track: &Track| {
            let home = track.identity.home.as_ref();
            home.is_some_and(|home| home.place() == place)
        };
        let tracks = recorder::tracks();
        let mut report = Self {
            rank,
            phase,
            warning: crate::debug_log::first_warning(),
            ..Self::default()
        };
        for track in tracks.iter().filter(|track| own(track)) {
            match track.identity.key.as_deref() {
                Some(other) if other == key => report.tell(track),
                Some(_) if report.elsewhere.len() < ELSEWHERE => {
                    report.elsewhere.extend(elsewhere(track));
                }
                _ => {}
            }
        }
        report
    }

    fn tell(&mut self, track: &Track) {
        self.exists = true;
        let (mut calls, entered) = counted(track);
        self.entered = entered;
        calls.drain(..calls.len().saturating_sub(CALLS));
        let mut room = (OPERATIONS / track.identity.world_size.max(1)).clamp(32, 1024);
        // The newest say most.
        for call in calls.iter_mut().rev() {
            let kept = call.operations.len().min(room);
            room -= kept;
            call.missing += call.operations.len() - kept;
            call.operations.truncate(kept);
        }
        self.calls = calls;
        if track.identity.world_size <= LEDGERS {
            let (sent, received) = track.ledgers();
            let any = |ledger: &[u64]| ledger.iter().any(|count| *count > 0);
            if any(&sent) || any(&received) {
                (self.sent, self.received) = (sent, received);
            }
        }
    }
}

fn elsewhere(track: &Track) -> Option<Elsewhere> {
    let (calls, entered) = counted(track);
    let front = calls.iter().find(|call| call.is_pending());
    Some(Elsewhere {
        key: track.identity.key.as_deref()?.to_owned(),
        name: track.identity.name.to_string(),
        entered,
        waiting: front.and_then(|front| Some((front.place?, front.age_ms))),
    })
}

/// The calls that are kept, and how many there were to which all ranks come.
fn counted(track: &Track) -> (Vec<Entered>, Option<u64>) {
    let recording = recorder::read_one(track);
    let now = recorder::origin().monotonic.elapsed();
    let issuing = track.calls();
    let front = watchdog::pending()
        .into_iter()
        .find(|pending| pending.number == track.number)
        .and_then(|pending| pending.oldest);
    let kept = recording.calls.iter();
    let kept = kept.filter(|call| call.state != CallState::Failed);
    let mut calls: Vec<Entered> = kept
        .map(|call| {
            let is_issuing = issuing
                .iter()
                .any(|one| one.number == call.sequence && one.issuing);
            let is_queued = front.as_ref().is_some_and(|front| {
                front.sequence == call.sequence && front.clock == watchdog::Clock::Queued
            });
            let state = match call.state {
                CallState::Done => State::Done,
                _ if call.kind == OperationKind::Capture => State::Done,
                _ if is_issuing => State::Issuing,
                _ if is_queued => State::Queued,
                _ => State::Pending,
            };
            Entered {
                number: call.sequence,
                is_for_all: is_for_all(call),
                place: None,
                kind: call.kind.to_string(),
                age_ms: u64::try_from(now.saturating_sub(call.since).as_millis())
                    .unwrap_or(u64::MAX),
                state,
                operations: call.operations.clone(),
                missing: call.missing,
            }
        })
        .collect();
    let first = calls.first().map_or(1, |call| call.number);
    let before = match first {
        1 => Some(0),
        // Where every call is for all, they have the numbers of the calls.
        first if track.only_calls_for_all() => Some(first - 1),
        _ => None,
    };
    let mut entered = before;
    for call in calls.iter_mut().filter(|call| call.is_for_all) {
        entered = entered.map(|entered| entered + 1);
        call.place = entered;
    }
    (calls, entered)
}

/// Whether all ranks come to it: not so messages.
fn is_for_all(call: &Call) -> bool {
    let is_message =
        |kind: OperationKind| matches!(kind, OperationKind::Send | OperationKind::Recv);
    match call.kind {
        OperationKind::Send | OperationKind::Recv => false,
        OperationKind::Group => call.operations.iter().any(|one| !is_message(one.kind)),
        _ => true,
    }
}
