//! Messages that do not match: another length, no counterpart, a circle, opposite orders.

use super::*;

pub(super) fn message(
    kind: OperationKind,
    peer: usize,
    number: u32,
    count: u64,
) -> RecordedOperation {
    but(operation(kind), |one| {
        one.peer = Some(peer);
        one.message = Some(number);
        one.count = count;
    })
}

/// Report of a rank that waits in one group of these messages.
pub(super) fn exchanging(rank: usize, size: usize, messages: Vec<RecordedOperation>) -> Report {
    let ledger = |kind| {
        let mut ledger = vec![0; size];
        for one in messages.iter().filter(|one| one.kind == kind) {
            ledger[one.peer.unwrap()] = u64::from(one.message.unwrap());
        }
        ledger
    };
    Report {
        rank,
        exists: true,
        entered: Some(0),
        sent: Ledger::of(&ledger(OperationKind::Send)),
        received: Ledger::of(&ledger(OperationKind::Recv)),
        calls: match messages.is_empty() {
            true => Vec::new(),
            false => vec![call(1, messages, State::Pending)],
        },
        ..Report::default()
    }
}

#[test]
fn a_message_of_another_length_than_expected_is_told_with_both() {
    use OperationKind::{Recv, Send};
    let mut reports: Vec<_> = (0..6).map(|rank| exchanging(rank, 6, Vec::new())).collect();
    reports[2] = exchanging(2, 6, vec![message(Send, 5, 1, 300)]);
    reports[5] = exchanging(5, 6, vec![message(Recv, 2, 1, 200)]);
    let verdict = Table::of(reports).elect();
    assert_eq!(verdict.rank, 2);
    assert!(
        verdict
            .cause
            .text
            .starts_with("sends 300 to rank 5, which expects 200"),
        "{}",
        verdict.cause.text
    );
}

#[test]
fn a_message_without_a_counterpart_is_told_with_both_ledgers() {
    use OperationKind::Send;
    let mut idle = exchanging(1, 2, Vec::new());
    idle.received = Ledger::of(&[6, 0]);
    let table = Table::of(vec![exchanging(0, 2, vec![message(Send, 1, 7, 9)]), idle]);
    let verdict = table.elect();
    let root = RootCause::Unmatched {
        from: 0,
        to: 1,
        sent: 7,
        received: 6,
    };
    assert_eq!((verdict.rank, verdict.cause.root), (1, root));
    assert!(verdict.cause.text.contains("no receive for message #7"));
}

#[test]
fn a_circle_of_sends_outside_of_groups_is_printed() {
    let ring = |rank| {
        exchanging(
            rank,
            3,
            vec![message(OperationKind::Send, (rank + 1) % 3, 1, 9)],
        )
    };
    let verdict = Table::of((0..3).map(ring).collect()).elect();
    assert_eq!(
        verdict.cause.root,
        RootCause::Cycle {
            ranks: vec![0, 1, 2]
        }
    );
    assert!(
        verdict.cause.text.contains("(0 → 1 → 2 → 0)"),
        "{verdict:?}"
    );
}

#[test]
fn two_communicators_in_opposite_orders_are_told_and_not_who_is_absent() {
    let mut table = Table::of(vec![entered(0, 1, false), entered(1, 0, true)]);
    table.reports.get_mut(&0).unwrap().elsewhere = vec![elsewhere(0, 3, &[])];
    table.reports.get_mut(&1).unwrap().elsewhere = vec![elsewhere(1, 4, &[4])];
    let verdict = table.elect();
    let root = RootCause::InverseOrder {
        ranks: [0, 1],
        communicators: [String::from("model/tp"), String::from("model/pp")],
    };
    assert_eq!(verdict.cause.root, root);
    // A rank that has come to both is only late.
    table.reports.get_mut(&0).unwrap().elsewhere = vec![elsewhere(0, 4, &[])];
    let verdict = table.elect();
    assert!(matches!(verdict.cause.root, RootCause::NeverEntered { .. }));
}
