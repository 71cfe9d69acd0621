//! Messages that have no counterpart, or another one than was meant.

use std::collections::{BTreeMap, HashMap};

use super::{Case, Finding};
use crate::operation::OperationKind;
use crate::supervision::cause::{FaultRole, RootCause, who};
use crate::supervision::recorder::RecordedOperation;
use crate::supervision::report::{Entered, Report};

/// One side of a message that is not done: `rank` sends to, or receives from, `peer`.
#[derive(Clone, Copy)]
struct Half<'c> {
    rank: usize,
    peer: usize,
    /// The how manieth of this rank to, or from, that peer.
    number: u64,
    call: &'c Entered,
    operation: &'c RecordedOperation,
}

impl Half<'_> {
    fn sends(&self) -> bool {
        self.operation.kind == OperationKind::Send
    }

    /// Sender and receiver.
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

/// Lengths that differ first, then a circle, then what has no counterpart.
pub(super) fn unmatched(case: &Case<'_>) -> Option<Finding> {
    lengths(case).or_else(|| alone(case))
}

fn lengths(case: &Case<'_>) -> Option<Finding> {
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
        if (sends.count, sends.data_type) == (expects.count, expects.data_type) {
            continue;
        }
        let (from, to) = send.ends();
        let text = |one: &RecordedOperation| match sends.data_type == expects.data_type {
            true => one.count.to_string(),
            false => format!("{} × {}", one.data_type, one.count),
        };
        let (sends_text, expects_text) = (text(sends), text(expects));
        return Some(Finding {
            rank: from,
            role: FaultRole::Initiating,
            text: format!(
                "sends {sends_text} to rank {to}, which expects {expects_text} (message #{}); {}",
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
                "{} on rank {from}, {} on rank {to}",
                send.call.name(),
                recv.call.name()
            )],
            hint: String::from(
                "what rank i sends to rank j has to be as long, and of the same type, as what j receives from i: compare \
                 the counts of both",
            ),
        });
    }
    None
}

/// Follows who waits for whom.
fn alone(case: &Case<'_>) -> Option<Finding> {
    let waits: BTreeMap<usize, Half<'_>> = case
        .reports
        .values()
        .filter_map(|report| {
            let front = case.front(report)?.number;
            let mut waiting = halves(report).filter(|half| half.call.number == front);
            let without = waiting.find(|half| {
                let peer = case.reports.get(&half.peer);
                let ledger = |ledger: &Vec<u64>| ledger.get(half.rank).copied().unwrap_or(0);
                half.peer != half.rank
                    && peer.is_some_and(|peer| match half.sends() {
                        true => ledger(&peer.received) < half.number,
                        false => ledger(&peer.sent) < half.number,
                    })
            })?;
            Some((report.rank, without))
        })
        .collect();
    let mut path = vec![*waits.keys().next()?];
    loop {
        let at = *path.last()?;
        let Some(half) = waits.get(&at) else { break };
        if let Some(start) = path.iter().position(|rank| *rank == half.peer) {
            let circle = &path[start..];
            return Some(circled(case, circle, &waits));
        }
        path.push(half.peer);
    }
    // The last waits for nobody: it has not come to the message of the one before.
    let &rank = path.last()?;
    let half = waits.get(path.get(path.len().checked_sub(2)?)?)?;
    let (from, to) = half.ends();
    let count = |rank: usize, sent: bool, peer: usize| {
        let report = case.reports.get(&rank);
        let ledger = report.map(|report| if sent { &report.sent } else { &report.received });
        ledger
            .and_then(|ledger| ledger.get(peer).copied())
            .unwrap_or(0)
    };
    let (sent, received) = (count(from, true, to), count(to, false, from));
    let what = match half.sends() {
        true => "receive",
        false => "send",
    };
    let last = case.reports.get(&rank).and_then(Report::last);
    let mut evidence = vec![format!(
        "ledgers: rank {from} has sent {sent} to rank {to}, rank {to} has taken on {received} from rank {from}"
    )];
    evidence.extend(last.map(|last| format!("the last call of rank {rank} was {last}")));
    Some(Finding {
        rank,
        role: FaultRole::Initiating,
        root: RootCause::Unmatched {
            from,
            to,
            sent,
            received,
        },
        text: format!(
            "has no {what} for message #{} from rank {from} to rank {to} ({} × {}); {}",
            half.number,
            half.operation.data_type,
            half.operation.count,
            case.complaint()
        ),
        evidence,
        hint: String::from("every send needs a receive on the other rank, in the same order"),
    })
}

fn circled(case: &Case<'_>, circle: &[usize], waits: &BTreeMap<usize, Half<'_>>) -> Finding {
    // From its lowest rank on.
    let low = (0..circle.len()).min_by_key(|at| circle[*at]).unwrap_or(0);
    let ranks: Vec<usize> = [&circle[low..], &circle[..low]].concat();
    let mut way: Vec<_> = ranks.iter().map(ToString::to_string).collect();
    way.push(ranks[0].to_string());
    let evidence = ranks.iter().filter_map(|rank| {
        let half = waits.get(rank)?;
        let word = if half.sends() {
            "sends to"
        } else {
            "receives from"
        };
        Some(format!(
            "rank {rank} {word} rank {} in {}",
            half.peer,
            half.call.name()
        ))
    });
    Finding {
        rank: ranks[0],
        role: FaultRole::Initiating,
        text: format!(
            "waits in a circle ({}): each of {} waits for the next one's call before it makes its own; {}",
            way.join(" → "),
            who(&ranks),
            case.complaint()
        ),
        evidence: evidence.take(8).collect(),
        root: RootCause::Cycle { ranks },
        hint: String::from("put sends and receives that need each other into one group"),
    }
}
