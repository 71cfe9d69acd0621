//! One rank's report on a communicator under diagnosis: what it entered, what it waits in, the phase of its program.
//!
//! Built from the recorder on a thread of its own, while the program's threads may hang: nothing here calls NCCL or
//! CUDA, or takes a lock that a thread holds during a call.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::inside_nccl::{self, InsideNccl};
use super::ras_evidence::{self, RasEvidence};
use super::run_length_counts::RunLengthCounts;
use crate::operation::OperationKind;
use nccl_base::fault::cause::PastEvent;
use nccl_base::roster::Roster;
use nccl_base::warning::FirstWarning;
use nccl_core::recorder::{self, Call, CallState, RecordedOperation, Track, WorldRank};
use nccl_diagnose::debug_log::{self, LogPosition};
use nccl_diagnose::host_evidence::{HostEvidence, ThreadsOfInterest};

/// See the module. Ranks are those of the communicator.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct RankReport {
    pub(super) rank: usize,
    /// Whether the rank has such a communicator, or had.
    pub(super) exists: bool,
    pub(super) phase: Option<PastEvent>,
    /// Number of calls entered that all ranks enter; `None` where the count was lost.
    pub(super) entered: Option<u64>,
    /// The last calls, oldest first.
    pub(super) calls: Vec<EnteredCall>,
    /// Number of messages sent to, and received from, each rank.
    pub(super) sent: RunLengthCounts,
    pub(super) received: RunLengthCounts,
    /// State on the other communicators of the process.
    pub(super) elsewhere: Vec<OtherCommunicator>,
    pub(super) warning: Option<FirstWarning>,
    /// Evidence from the rank's host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) host: Option<HostEvidence>,
    /// What NCCL reports of the calls that are not done.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) inside: Option<InsideNccl>,
    /// The answer of NCCL's RAS service, if this rank has queried it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) ras: Option<RasEvidence>,
}

/// A call that the rank has entered.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct EnteredCall {
    pub(super) number: u64,
    /// Whether all ranks enter it; `collective_index` is its number among those, from 1.
    pub(super) is_for_all: bool,
    #[serde(rename = "place")]
    pub(super) collective_index: Option<u64>,
    pub(super) kind: String,
    /// CUDA's handle of its stream, and the time of the call: comparable among the calls of one rank, across
    /// communicators.
    pub(super) stream: u64,
    pub(super) since_ns: u64,
    /// Time since the call.
    pub(super) age_ms: u64,
    /// Time since the call was found to be done.
    #[serde(skip)]
    pub(super) done_ms: Option<u64>,
    pub(super) state: EnteredCallState,
    pub(super) operations: Vec<RecordedOperation>,
    /// Number of operations left out.
    #[serde(rename = "missing")]
    pub(super) omitted_operations: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum EnteredCallState {
    /// The call into NCCL has not returned.
    Issuing,
    /// The call is queued behind work that is not the communicator's.
    Queued,
    Pending,
    Done,
}

/// The rank's state on another communicator.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct OtherCommunicator {
    pub(super) key: String,
    pub(super) name: String,
    #[serde(default)]
    pub(super) roster: Roster,
    /// This rank's number in that communicator.
    pub(super) rank: usize,
    pub(super) entered: Option<u64>,
    /// The calls that are not done, oldest first; `has_more_pending` is whether there are others.
    #[serde(rename = "waiting")]
    pub(super) pending_calls: Vec<EnteredCall>,
    #[serde(rename = "more")]
    pub(super) has_more_pending: bool,
    /// Calls that waited long and became done a moment ago: perhaps because a communicator was given up.
    #[serde(default, rename = "freed")]
    pub(super) recently_done: Vec<EnteredCall>,
    pub(super) sent: RunLengthCounts,
    pub(super) received: RunLengthCounts,
}

/// Limits of the calls in a report, and of their operations in all.
const CALLS: usize = 32;
const OPERATIONS: usize = 16 << 10;

/// Limits of the other communicators in a report, of the calls of each, and of the operations of those together.
const ELSEWHERE: usize = 16;
const WAITING: usize = 4;
const OPERATIONS_ELSEWHERE: usize = 64;

/// A communicator that was aborted within this time is still reported: its calls may have been in front of what waits here.
const RECENT: Duration = Duration::from_secs(2);

impl EnteredCall {
    pub(super) fn name(&self) -> String {
        format!("{} #{}", self.kind, self.number)
    }

    /// Returns whether the call needs all ranks, so that it is done on all ranks once it is done on one.
    pub(super) fn is_symmetric(&self) -> bool {
        let kind = &self.kind[..];
        matches!(
            kind,
            "all_reduce" | "all_gather" | "reduce_scatter" | "all_to_all"
        )
    }

    /// Returns whether the call became done only lately, after a long wait. A rank whose operation timed out aborts
    /// before all ranks have reported, and so releases the calls behind its own.
    fn is_recently_done(&self) -> bool {
        const LATELY: u64 = 1000;
        const AT_LEAST: u64 = 50;
        self.done_ms
            .is_some_and(|done| done <= LATELY && self.age_ms >= 4 * done.max(AT_LEAST))
    }

    pub(super) fn is_pending(&self) -> bool {
        self.state != EnteredCallState::Done
    }
}

impl RankReport {
    pub(super) fn collective(&self, index: u64) -> Option<&EnteredCall> {
        self.calls
            .iter()
            .find(|call| call.collective_index == Some(index))
    }

    /// Returns the last call, and how long ago it was made.
    pub(super) fn last(&self) -> Option<PastEvent> {
        let last = self.calls.last()?;
        Some(PastEvent::new(
            last.name(),
            Duration::from_millis(last.age_ms),
        ))
    }

    /// Builds the report of rank `rank` of communicator `key`; `place` is that rank's place in its world.
    pub(super) fn of(key: &str, rank: usize, place: &WorldRank, phase: Option<PastEvent>) -> Self {
        let own = |track: &Track| {
            let scope = track.identity.scope.as_ref();
            scope.is_some_and(|scope| scope.place() == place)
        };
        let mut report = Self {
            rank,
            phase,
            ..Self::default()
        };
        for track in recorder::tracks().iter().filter(|track| own(track)) {
            match track.identity.key.as_deref() {
                Some(other) if other == key => report.add_calls(track),
                Some(_) => report.elsewhere.extend(OtherCommunicator::of(track)),
                None => {}
            }
        }
        // Communicators in which the rank waits come first; among them, the newest.
        report.elsewhere.reverse();
        report
            .elsewhere
            .sort_by_key(|there| there.pending_calls.is_empty());
        report.elsewhere.truncate(ELSEWHERE);
        report.inside = inside_nccl::of(key, rank);
        report.ras = ras_evidence::of(key);
        report
    }

    /// Adds the first warning in NCCL's log file since `from`.
    pub(super) fn with_nccl_warning(mut self, from: LogPosition) -> Self {
        self.warning = debug_log::first_warning(from);
        self
    }

    /// Adds evidence from the host, which takes up to `host_evidence::LIMIT`.
    pub(super) fn with_host(mut self) -> Self {
        let elsewhere = self.elsewhere.iter();
        let elsewhere = elsewhere.flat_map(|other| &other.pending_calls);
        let mut calls = self.calls.iter().chain(elsewhere);
        let of_interest = ThreadsOfInterest {
            in_calls: calls.any(|call| call.state == EnteredCallState::Issuing),
        };
        self.host = Some(HostEvidence::of_process(of_interest));
        self
    }

    fn add_calls(&mut self, track: &Track) {
        self.exists = true;
        let (mut calls, entered) = entered_calls(track);
        self.entered = entered;
        calls.drain(..calls.len().saturating_sub(CALLS));
        let room = (OPERATIONS / track.identity.world_size.max(1)).clamp(32, 1024);
        limit_operations(calls.iter_mut().rev(), room);
        self.calls = calls;
        (self.sent, self.received) = message_counts(track);
    }
}

/// Truncates the operations of `calls` to `room` in all, from the last calls on: the first calls show most.
fn limit_operations<'c>(calls: impl Iterator<Item = &'c mut EnteredCall>, mut room: usize) {
    for call in calls {
        let kept = call.operations.len().min(room);
        room -= kept;
        call.omitted_operations += call.operations.len() - kept;
        call.operations.truncate(kept);
    }
}

fn message_counts(track: &Track) -> (RunLengthCounts, RunLengthCounts) {
    let (sent, received) = track.message_counts();
    (RunLengthCounts::of(&sent), RunLengthCounts::of(&received))
}

impl OtherCommunicator {
    fn of(track: &Track) -> Option<Self> {
        let is_over = match track.lifecycle.aborted_for() {
            Some(since) => since > RECENT,
            None => track.lifecycle.get().is_final(),
        };
        if is_over {
            return None;
        }
        let (mut pending_calls, entered) = entered_calls(track);
        let mut recently_done: Vec<_> = pending_calls
            .extract_if(.., |call| !call.is_pending())
            .filter(EnteredCall::is_recently_done)
            .collect();
        recently_done.truncate(WAITING);
        limit_operations(recently_done.iter_mut(), OPERATIONS_ELSEWHERE);
        let has_more_pending = pending_calls.len() > WAITING;
        pending_calls.truncate(WAITING);
        limit_operations(pending_calls.iter_mut(), OPERATIONS_ELSEWHERE);
        let (sent, received) = message_counts(track);
        Some(Self {
            key: track.identity.key.as_deref()?.to_owned(),
            name: track.identity.name.to_string(),
            roster: Roster::clone(&track.identity.roster),
            rank: track.identity.rank,
            entered,
            pending_calls,
            has_more_pending,
            recently_done,
            sent,
            received,
        })
    }
}

/// Returns the kept calls, and the number of calls that all ranks enter.
fn entered_calls(track: &Track) -> (Vec<EnteredCall>, Option<u64>) {
    let recording = recorder::read_one(track);
    let now = recorder::origin().monotonic.elapsed();
    let issuing = track.calls();
    let given_up = track.given_up();
    let queued_call = track.queued_call();
    let kept = recording.calls.iter();
    // A call that was given up while it waited had been entered.
    let is_entered =
        |call: &&Call| call.state != CallState::Failed || given_up.contains(&call.sequence);
    let kept = kept.filter(is_entered);
    let mut calls: Vec<EnteredCall> = kept
        .map(|call| {
            let is_issuing = issuing
                .iter()
                .any(|one| one.sequence == call.sequence && one.issuing);
            let state = match call.state {
                CallState::Done => EnteredCallState::Done,
                _ if call.kind == OperationKind::Capture => EnteredCallState::Done,
                _ if is_issuing || call.state == CallState::Failed => EnteredCallState::Issuing,
                _ if queued_call == Some(call.sequence) => EnteredCallState::Queued,
                _ => EnteredCallState::Pending,
            };
            EnteredCall {
                number: call.sequence,
                is_for_all: is_for_all(call),
                collective_index: None,
                kind: call.kind.to_string(),
                stream: call.stream,
                since_ns: u64::try_from(call.since.as_nanos()).unwrap_or(u64::MAX),
                age_ms: u64::try_from(now.saturating_sub(call.since).as_millis())
                    .unwrap_or(u64::MAX),
                done_ms: call
                    .done
                    .and_then(|done| u64::try_from(now.saturating_sub(done).as_millis()).ok()),
                state,
                operations: call.operations.clone(),
                omitted_operations: call.missing,
            }
        })
        .collect();
    let first = calls.first().map_or(1, |call| call.number);
    let before = match first {
        1 => Some(0),
        // Where all ranks enter every call, the indices equal the sequence numbers.
        first if track.only_calls_for_all() => Some(first - 1),
        _ => None,
    };
    let mut entered = before;
    for call in calls.iter_mut().filter(|call| call.is_for_all) {
        entered = entered.map(|entered| entered + 1);
        call.collective_index = entered;
    }
    (calls, entered)
}

/// Returns whether all ranks enter the call: all calls but messages and one-sided operations.
fn is_for_all(call: &Call) -> bool {
    match call.kind {
        OperationKind::Group => call.operations.iter().any(|one| !one.kind.is_pairwise()),
        kind => !kind.is_pairwise(),
    }
}
