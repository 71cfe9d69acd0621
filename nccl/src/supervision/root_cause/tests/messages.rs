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
pub(super) fn exchanging(rank: usize, size: usize, messages: Vec<RecordedOperation>) -> RankReport {
    let run_length_counts = |kind| {
        let mut run_length_counts = vec![0; size];
        for one in messages.iter().filter(|one| one.kind == kind) {
            run_length_counts[one.peer.unwrap()] = u64::from(one.message.unwrap());
        }
        run_length_counts
    };
    RankReport {
        rank,
        exists: true,
        entered: Some(0),
        sent: RunLengthCounts::of(&run_length_counts(OperationKind::Send)),
        received: RunLengthCounts::of(&run_length_counts(OperationKind::Recv)),
        calls: match messages.is_empty() {
            true => Vec::new(),
            false => vec![call(1, messages, EnteredCallState::Pending)],
        },
        ..RankReport::default()
    }
}

#[test]
fn a_message_of_another_length_than_expected_is_told_with_both() {
    use OperationKind::{Recv, Send};
    let mut reports: Vec<_> = (0..6).map(|rank| exchanging(rank, 6, Vec::new())).collect();
    reports[2] = exchanging(2, 6, vec![message(Send, 5, 1, 300)]);
    reports[5] = exchanging(5, 6, vec![message(Recv, 2, 1, 200)]);
    let diagnosis = Table::of(reports).find_root_cause();
    assert_eq!(diagnosis.rank, 2);
    assert!(
        diagnosis
            .cause
            .text
            .starts_with("sends 300 to rank 5, which expects 200"),
        "{}",
        diagnosis.cause.text
    );
}

#[test]
fn a_message_without_a_counterpart_is_told_with_both_ledgers() {
    use OperationKind::Send;
    let mut idle = exchanging(1, 2, Vec::new());
    idle.received = RunLengthCounts::of(&[6, 0]);
    let table = Table::of(vec![exchanging(0, 2, vec![message(Send, 1, 7, 9)]), idle]);
    let diagnosis = table.find_root_cause();
    let root = RootCause::Unmatched {
        from: 0,
        to: 1,
        sent: 7,
        received: 6,
    };
    assert_eq!((diagnosis.rank, diagnosis.cause.root), (1, root));
    assert!(diagnosis.cause.text.contains("no receive for message #7"));
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
    let diagnosis = Table::of((0..3).map(ring).collect()).find_root_cause();
    assert_eq!(
        diagnosis.cause.root,
        RootCause::Cycle {
            ranks: vec![0, 1, 2]
        }
    );
    assert!(
        diagnosis.cause.text.contains("(0 → 1 → 2 → 0)"),
        "{diagnosis:?}"
    );
}

#[test]
fn two_communicators_in_opposite_orders_are_told_and_not_who_is_absent() {
    let mut table = Table::of(vec![entered(0, 1, false), entered(1, 0, true)]);
    table.reports.get_mut(&0).unwrap().elsewhere = vec![elsewhere(0, 3, &[])];
    table.reports.get_mut(&1).unwrap().elsewhere = vec![elsewhere(1, 4, &[4])];
    let diagnosis = table.find_root_cause();
    let root = RootCause::InverseOrder {
        ranks: [0, 1],
        communicators: [String::from("model/tp"), String::from("model/pp")],
    };
    assert_eq!(diagnosis.cause.root, root);
    // A rank that has reached both is only late.
    table.reports.get_mut(&0).unwrap().elsewhere = vec![elsewhere(0, 4, &[])];
    let diagnosis = table.find_root_cause();
    assert!(matches!(
        diagnosis.cause.root,
        RootCause::NeverEntered { .. }
    ));
}
