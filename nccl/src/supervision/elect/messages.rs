//! Messages without a counterpart, or with one of another length.

use std::collections::{BTreeMap, HashMap};

use super::case::{Case, Finding};
use crate::operation::OperationKind;
use crate::supervision::report::{Entered, Report};
use nccl_base::fault::cause::{FaultRole, RootCause};
use nccl_core::recorder::RecordedOperation;

/// One side of a message: `rank` sends to, or receives from, `peer`.
#[derive(Clone, Copy)]
struct Half<'c> {
    rank: usize,
    peer: usize,
    /// Its number among the messages of this rank to, or from, that peer.
    number: u64,
    call: &'c Entered,
    operation: &'c RecordedOperation,
}

impl Half<'_> {
    fn sends(&self) -> bool {
        self.operation.kind == OperationKind::Send
    }

    /// Returns sender and receiver.
    fn ends(&self) -> (usize, usize) {
        match self.sends() {
            true => (self.rank, self.peer),
            false => (self.peer, self.rank),
        }
    }
}

fn halves(report: &Report) -> impl Iterator<Item = Half<'_>> {
    report.calls.iter().flat_map(move |call| {
        call.operations.iter().filter_map(move |operation| {
            Some(Half {
                rank: report.rank,
                peer: operation.peer?,
                number: u64::from(operation.message?),
                call,
                operation,
            })
        })
    })
}

/// Finds a message whose two halves differ in length.
pub(super) fn lengths(case: &Case<'_>) -> Option<Finding> {
    let receives: HashMap<(usize, usize, u64), Half<'_>> = case
        .reports
        .values()
        .flat_map(halves)
        .filter(|half| !half.sends())
        .map(|half| ((half.peer, half.rank, half.number), half))
        .collect();
    let pending = case.reports.values().flat_map(halves);
    for send in pending.filter(|half| half.sends() && half.call.is_pending()) {
        let Some(recv) = receives.get(&(send.rank, send.peer, send.number)) else {
            continue;
        };
        let (sends, expects) = (send.operation, recv.operation);
        if same_length(sends, expects) {
            continue;
        }
        let (from, to) = send.ends();
        let text = |one: &RecordedOperation| match sends.data_type == expects.data_type {
            true => one.count.to_string(),
            false => format!("{} × {}", one.data_type, one.count),
        };
        let (sends_text, expects_text) = (text(sends), text(expects));
        let who = |rank: usize| case.roster.who(&[rank]);
        return Some(Finding {
            rank: from,
            operation: None,
            role: FaultRole::Initiating,
            text: format!(
                "sends {sends_text} to {}, which expects {expects_text} (message #{}); {}",
                who(to),
                send.number,
                case.complaint()
            ),
            root: RootCause::UnequalCounts {
                from,
                to,
                sends: sends_text,
                expects: expects_text,
            },
            evidence: vec![format!(
                "{} on {}, {} on {}",
                send.call.name(),
                who(from),
                recv.call.name(),
                who(to)
            )],
            hint: String::from(
                "what rank i sends to rank j has to be as long, and of the same type, as what j receives from i: compare \
                 the counts of both",
            ),
        });
    }
    None
}

/// Returns whether both are as many elements of one type, or as many bytes.
fn same_length(one: &RecordedOperation, other: &RecordedOperation) -> bool {
    let bytes = |one: &RecordedOperation| {
        let size = one.data_type.size_in_bytes()? as u64;
        one.count.checked_mul(size)
    };
    match one.data_type == other.data_type {
        true => one.count == other.count,
        false => bytes(one).is_some_and(|length| bytes(other) == Some(length)),
    }
}

/// Follows the waits from rank to rank, up to a rank that waits for no message.
pub(super) fn alone(case: &Case<'_>) -> Option<Finding> {
    let waits: BTreeMap<usize, Half<'_>> = case
        .reports
        .values()
        .filter_map(|report| {
            let front = case.front(report)?.number;
            let mut waiting = halves(report).filter(|half| half.call.number == front);
            let without = waiting.find(|half| {
                half.peer != half.rank
                    && counted(case, half.peer, !half.sends(), half.rank)
                        .is_some_and(|count| count < half.number)
            })?;
            Some((report.rank, without))
        })
        .collect();
    let mut path = vec![*waits.keys().next()?];
    loop {
        let at = *path.last()?;
        let Some(half) = waits.get(&at) else { break };
        // Circles have been looked for before.
        if path.contains(&half.peer) {
            return None;
        }
        path.push(half.peer);
    }
    // The last rank waits for none: it has not come to the message of the rank before it.
    let &rank = path.last()?;
    let half = waits.get(path.get(path.len().checked_sub(2)?)?)?;
    let (from, to) = half.ends();
    let sent = counted(case, from, true, to).unwrap_or_default();
    let received = counted(case, to, false, from).unwrap_or_default();
    let what = match half.sends() {
        true => "receive",
        false => "send",
    };
    let last = case.reports.get(&rank).and_then(Report::last);
    let who = |rank: usize| case.roster.who(&[rank]);
    let (sender, receiver) = (who(from), who(to));
    let mut evidence = vec![format!(
        "ledgers: {sender} has sent {sent} to {receiver}, {receiver} has taken on {received} from {sender}"
    )];
    evidence.extend(last.map(|last| format!("the last call of {} was {last}", who(rank))));
    Some(Finding {
        rank,
        operation: None,
        role: FaultRole::Initiating,
        root: RootCause::Unmatched {
            from,
            to,
            sent,
            received,
        },
        text: format!(
            "has no {what} for message #{} from {sender} to {receiver} ({} × {}); {}",
            half.number,
            half.operation.data_type,
            half.operation.count,
            case.complaint()
        ),
        evidence,
        hint: String::from("every send needs a receive on the other rank, in the same order"),
    })
}

/// Returns how many messages a rank has sent to `peer`, or received from it, if the rank reported that.
fn counted(case: &Case<'_>, rank: usize, sent: bool, peer: usize) -> Option<u64> {
    let report = case.reports.get(&rank)?;
    match report.exists {
        true => if sent { &report.sent } else { &report.received }.get(peer),
        false => Some(0),
    }
}
