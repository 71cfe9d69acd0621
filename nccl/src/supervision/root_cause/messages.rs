//! Messages without a counterpart, or with one of another length.

use std::collections::{BTreeMap, HashMap};

use super::input::{Candidate, DiagnosisInput};
use crate::operation::OperationKind;
use crate::supervision::rank_report::{EnteredCall, RankReport};
use nccl_base::fault::cause::{FaultRole, RootCause};
use nccl_core::recorder::RecordedOperation;

/// One side of a message: `rank` sends to, or receives from, `peer`.
#[derive(Clone, Copy)]
struct MessageHalf<'c> {
    rank: usize,
    peer: usize,
    /// Its number among the messages of this rank to, or from, that peer.
    number: u64,
    call: &'c EnteredCall,
    operation: &'c RecordedOperation,
}

impl MessageHalf<'_> {
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

fn message_halves(report: &RankReport) -> impl Iterator<Item = MessageHalf<'_>> {
    report.calls.iter().flat_map(move |call| {
        call.operations.iter().filter_map(move |operation| {
            Some(MessageHalf {
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
pub(super) fn length_mismatch(input: &DiagnosisInput<'_>) -> Option<Candidate> {
    let receives: HashMap<(usize, usize, u64), MessageHalf<'_>> = input
        .reports
        .values()
        .flat_map(message_halves)
        .filter(|half| !half.sends())
        .map(|half| ((half.peer, half.rank, half.number), half))
        .collect();
    let pending = input.reports.values().flat_map(message_halves);
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
        let who = |rank: usize| input.roster.who(&[rank]);
        return Some(Candidate {
            rank: from,
            operation: None,
            role: FaultRole::Initiating,
            text: format!(
                "sends {sends_text} to {}, which expects {expects_text} (message #{}); {}",
                who(to),
                send.number,
                input.symptom_text()
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
pub(super) fn unmatched(input: &DiagnosisInput<'_>) -> Option<Candidate> {
    let waits: BTreeMap<usize, MessageHalf<'_>> = input
        .reports
        .values()
        .filter_map(|report| {
            let front = input.front(report)?.number;
            let mut waiting = message_halves(report).filter(|half| half.call.number == front);
            let without = waiting.find(|half| {
                half.peer != half.rank
                    && count_of(input, half.peer, !half.sends(), half.rank)
                        .is_some_and(|count| count < half.number)
            })?;
            Some((report.rank, without))
        })
        .collect();
    let mut path = vec![*waits.keys().next()?];
    loop {
        let at = *path.last()?;
        let Some(half) = waits.get(&at) else { break };
        // Cycles were searched for before.
        if path.contains(&half.peer) {
            return None;
        }
        path.push(half.peer);
    }
    // The last rank waits for no message: it has not reached the message of the rank before it.
    let &rank = path.last()?;
    let half = waits.get(path.get(path.len().checked_sub(2)?)?)?;
    let (from, to) = half.ends();
    let sent = count_of(input, from, true, to).unwrap_or_default();
    let received = count_of(input, to, false, from).unwrap_or_default();
    let what = match half.sends() {
        true => "receive",
        false => "send",
    };
    let last = input.reports.get(&rank).and_then(RankReport::last);
    let who = |rank: usize| input.roster.who(&[rank]);
    let (sender, receiver) = (who(from), who(to));
    let mut evidence = vec![format!(
        "ledgers: {sender} has sent {sent} to {receiver}, {receiver} has taken on {received} from {sender}"
    )];
    evidence.extend(last.map(|last| format!("the last call of {} was {last}", who(rank))));
    Some(Candidate {
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
            input.symptom_text()
        ),
        evidence,
        hint: String::from("every send needs a receive on the other rank, in the same order"),
    })
}

/// Returns how many messages a rank has sent to `peer`, or received from it, if the rank reported that.
fn count_of(input: &DiagnosisInput<'_>, rank: usize, sent: bool, peer: usize) -> Option<u64> {
    let report = input.reports.get(&rank)?;
    match report.exists {
        true => if sent { &report.sent } else { &report.received }.get(peer),
        false => Some(0),
    }
}
