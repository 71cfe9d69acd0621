//! Waits between ranks: messages, circles, several communicators.

use super::messages::{exchanging, message};
use super::*;
use crate::supervision::root_cause::find_root_cause;

/// Report of a rank that has put these groups on its stream, one after another, each with its number.
fn chained(rank: usize, size: usize, groups: Vec<Vec<RecordedOperation>>) -> RankReport {
    let all: Vec<_> = groups.iter().flatten().cloned().collect();
    let calls = (1..).zip(groups);
    let calls = calls.map(|(number, group)| call(number, group, EnteredCallState::Pending));
    RankReport {
        calls: calls.collect(),
        ..exchanging(rank, size, all)
    }
}

#[test]
fn a_circle_is_found_although_all_halves_of_its_messages_were_called() {
    use OperationKind::{Recv, Send};
    let ring = |rank: usize| {
        let (next, previous) = ((rank + 1) % 4, (rank + 3) % 4);
        let send = vec![message(Send, next, 1, 9)];
        chained(rank, 4, vec![send, vec![message(Recv, previous, 1, 9)]])
    };
    let diagnosis = Table::of((0..4).map(ring).collect()).find_root_cause();
    let root = RootCause::Cycle {
        ranks: vec![0, 1, 2, 3],
    };
    assert_eq!(diagnosis.cause.root, root);
    // On two streams no call is behind another, but the communicator runs them one after the other.
    let apart = |rank| {
        let mut report = ring(rank);
        report.calls[1].stream = 2;
        report
    };
    let diagnosis = Table::of((0..4).map(apart).collect()).find_root_cause();
    assert_eq!(diagnosis.cause.root, root);
    // Ranks that send and receive in one group do not wait in a cycle.
    let grouped = |rank: usize| {
        let (next, previous) = ((rank + 1) % 4, (rank + 3) % 4);
        let both = vec![message(Send, next, 1, 9), message(Recv, previous, 1, 9)];
        exchanging(rank, 4, both)
    };
    let diagnosis = Table::of((0..4).map(grouped).collect()).find_root_cause();
    assert_eq!(diagnosis.cause.root, RootCause::Unknown);
}

#[test]
fn of_several_circles_the_smallest_is_told_and_of_those_the_one_of_the_lowest_rank() {
    use OperationKind::Send;
    let send = |rank, to| exchanging(rank, 9, vec![message(Send, to, 1, 9)]);
    // 0 → 1 → 2 → 0, 3 ⇄ 8, 4 ⇄ 5, and 6 and 7 wait for those.
    let to = [1, 2, 0, 8, 5, 4, 0, 6, 3];
    let reports = to.iter().enumerate().map(|(rank, to)| send(rank, *to));
    let diagnosis = Table::of(reports.collect()).find_root_cause();
    let root = RootCause::Cycle { ranks: vec![3, 8] };
    assert_eq!((diagnosis.rank, diagnosis.cause.root), (3, root));
    assert_eq!(
        diagnosis.cause.evidence,
        [
            "rank 3 sends to rank 8 in send #1",
            "rank 8 sends to rank 3 in send #1"
        ]
    );
}

#[test]
fn a_circle_of_a_collective_and_a_message_is_told_and_not_who_is_absent() {
    use OperationKind::Recv;
    let mut receives = entered(1, 0, true);
    receives.received = RunLengthCounts::of(&[1, 0, 0]);
    receives.calls = vec![call(
        1,
        vec![message(Recv, 0, 1, 9)],
        EnteredCallState::Pending,
    )];
    receives.calls[0].collective_index = None;
    let mut waits = entered(0, 1, false);
    waits.sent = RunLengthCounts::of(&[0, 0, 0]);
    let table = Table::of(vec![waits, receives, entered(2, 1, false)]);
    let diagnosis = table.find_root_cause();
    let root = RootCause::Cycle { ranks: vec![0, 1] };
    assert_eq!((diagnosis.rank, diagnosis.cause.root), (0, root));
    let evidence = diagnosis.cause.evidence.join("; ");
    assert!(
        evidence.contains("rank 0 waits in all_reduce #1 for rank 1, which is in recv #1"),
        "{evidence}"
    );
}

#[test]
fn who_waits_for_a_circle_is_not_taken_for_absent_nor_who_waits_for_an_absent_one_for_a_circle() {
    use OperationKind::{Recv, Send};
    // 0 waits for 1, which waits for 2, which does nothing.
    let reports = vec![
        exchanging(0, 3, vec![message(Recv, 1, 1, 9)]),
        exchanging(1, 3, vec![message(Recv, 2, 1, 9)]),
        exchanging(2, 3, Vec::new()),
    ];
    let diagnosis = Table::of(reports).find_root_cause();
    assert_eq!(diagnosis.rank, 2);
    assert!(matches!(
        diagnosis.cause.root,
        RootCause::Unmatched { from: 2, to: 1, .. }
    ));
    // Of the ranks that miss a collective, rank 0 is further behind, but waits for rank 1, which is idle.
    let mut behind = entered(0, 1, true);
    behind.calls.push(call(
        2,
        vec![message(Send, 1, 1, 9)],
        EnteredCallState::Pending,
    ));
    behind.sent = RunLengthCounts::of(&[0, 1, 0]);
    let mut idle = entered(1, 2, true);
    idle.received = RunLengthCounts::of(&[0, 0, 0]);
    let mut waits = entered(2, 3, false);
    waits.calls[1].state = EnteredCallState::Done;
    let diagnosis = Table::of(vec![behind, idle, waits]).find_root_cause();
    assert_eq!(diagnosis.rank, 1, "{diagnosis:?}");
}

#[test]
fn ledgers_that_were_not_told_are_not_taken_for_empty() {
    use OperationKind::Send;
    let mut silent = exchanging(1, 2, Vec::new());
    silent.received = RunLengthCounts::default();
    let table = Table::of(vec![exchanging(0, 2, vec![message(Send, 1, 7, 9)]), silent]);
    assert_eq!(table.find_root_cause().cause.root, RootCause::Unknown);
}

#[test]
fn halves_of_other_types_and_as_many_bytes_are_one_message() {
    use OperationKind::{Recv, Send};
    let mut reports = vec![
        exchanging(0, 2, vec![message(Send, 1, 1, 3)]),
        exchanging(1, 2, vec![message(Recv, 0, 1, 12)]),
    ];
    reports[1].calls[0].operations[0].data_type = DataType::UInt8;
    let table = Table::of(reports.clone());
    assert_eq!(table.find_root_cause().cause.root, RootCause::Unknown);
    reports[1].calls[0].operations[0].count = 11;
    let root = Table::of(reports).find_root_cause().cause.root;
    assert!(matches!(root, RootCause::UnequalCounts { .. }), "{root:?}");
}

/// Report of a rank that has called both of two communicators; the table's first, unless `inverse`.
fn on_two(rank: usize, inverse: bool) -> RankReport {
    let mut report = entered(rank, 1, false);
    report.calls[0].since_ns = 500;
    let mut there = elsewhere(rank, 1, &[1]);
    there.pending_calls[0].since_ns = if inverse { 400 } else { 600 };
    report.elsewhere = vec![there];
    report
}

#[test]
fn two_communicators_in_opposite_orders_on_one_stream_are_told_whichever_is_on_trial() {
    let table = Table::of(vec![on_two(0, false), on_two(1, true), on_two(2, false)]);
    let diagnosis = table.find_root_cause();
    let root = RootCause::InverseOrder {
        ranks: [0, 1],
        communicators: [String::from("model/tp"), String::from("model/pp")],
    };
    assert_eq!(diagnosis.cause.root, root);
    assert_eq!(diagnosis.cause.operation, FaultOperation::default());
    // The same, with the other communicator under diagnosis.
    let turn = |report: &RankReport| {
        let there = report.elsewhere[0].clone();
        RankReport {
            calls: there.pending_calls.clone(),
            elsewhere: vec![OtherCommunicator {
                key: String::from("tp"),
                name: String::from("model/tp"),
                pending_calls: report.calls.clone(),
                ..there
            }],
            ..report.clone()
        }
    };
    let reports: BTreeMap<usize, RankReport> = table
        .reports
        .iter()
        .map(|(r, one)| (*r, turn(one)))
        .collect();
    let other = find_root_cause(&DiagnosisInput {
        name: "model/pp",
        key: "pp",
        roster: &Roster::default(),
        hosts: &table.hosts,
        symptoms: &[symptom(1, RootCause::Unknown, "another complaint")],
        reports: &reports,
        departed_in_order: &table.departed_in_order,
        suspended: &table.suspended,
        done: &completed_calls(&reports),
        slack: table.slack,
    });
    let local_evidence =
        |one: &Diagnosis| (one.rank, one.cause.text.clone(), one.cause.evidence.clone());
    assert_eq!(local_evidence(&other), local_evidence(&diagnosis));
    assert_eq!(other.cause.root, root);
    // The other communicator continued when this one was given up.
    let mut freed = table.reports.clone();
    for report in freed.values_mut() {
        let there = &mut report.elsewhere[0];
        there.recently_done = std::mem::take(&mut there.pending_calls);
        there.recently_done[0].state = EnteredCallState::Done;
    }
    let late = Table::of(freed.into_values().collect()).find_root_cause();
    assert_eq!(local_evidence(&late), local_evidence(&diagnosis));
    // On streams of their own, neither waits for the other.
    let mut table = table;
    for report in table.reports.values_mut() {
        report.elsewhere[0].pending_calls[0].stream = 2;
    }
    assert_eq!(table.find_root_cause().cause.root, RootCause::Unknown);
}

#[test]
fn three_communicators_in_a_round_are_a_circle() {
    // Rank 0 calls a before b, rank 1 b before c, rank 2 c before a; each communicator has two of the ranks.
    let there = |key: &str, rank, since_ns| {
        let mut one = elsewhere(rank, 1, &[1]);
        (one.key, one.name) = (key.to_owned(), key.to_owned());
        one.pending_calls[0].since_ns = since_ns;
        one
    };
    let mut zero = entered(0, 1, false);
    zero.elsewhere = vec![there("b", 0, 2000)];
    let mut one = RankReport {
        exists: false,
        entered: None,
        ..entered(1, 0, true)
    };
    one.elsewhere = vec![there("b", 1, 100), there("c", 0, 200)];
    let mut two = entered(2, 1, false);
    two.elsewhere = vec![there("c", 1, 900)];
    // Rank 1 has called a on a stream of its own, so that only 0 and 2 wait there.
    one.exists = true;
    one.entered = Some(1);
    one.calls = vec![call(1, vec![all_reduce()], EnteredCallState::Pending)];
    one.calls[0].since_ns = 50;
    one.calls[0].stream = 9;
    // b of 1 is in front of its c; c of 2 is in front of its a; a of 0 is in front of its b.
    let diagnosis = Table::of(vec![zero, one, two]).find_root_cause();
    let RootCause::Cycle { mut ranks } = diagnosis.cause.root else {
        panic!("{diagnosis:?}");
    };
    ranks.sort_unstable();
    assert_eq!(ranks, [0, 1, 2]);
}

#[test]
fn random_waits_in_any_order_of_reports_give_one_verdict_also_at_a_thousand_ranks() {
    use OperationKind::{Recv, Send};
    let mut random = fastrand::Rng::with_seed(11);
    for round in 0..200 {
        let size = if round == 0 { 1024 } else { random.usize(2..9) };
        let groups = |random: &mut fastrand::Rng, rank: usize| {
            let mut sent = [vec![0u32; size], vec![0; size]];
            let mut one = |random: &mut fastrand::Rng| {
                let sends = random.bool();
                let peer = (rank + random.usize(1..size)) % size;
                let number = &mut sent[usize::from(sends)][peer];
                *number += 1;
                message(if sends { Send } else { Recv }, peer, *number, 9)
            };
            let mut some = Vec::new();
            for _ in 0..random.usize(..4) {
                some.push((0..random.usize(1..3)).map(|_| one(random)).collect());
            }
            some
        };
        let mut reports: Vec<RankReport> = (0..size)
            .map(|rank| {
                let mut report = chained(rank, size, groups(&mut random, rank));
                for call in &mut report.calls {
                    call.stream = random.u64(..2);
                }
                if random.u8(..4) == 0 {
                    report.entered = Some(1);
                    let number = report.calls.len() as u64 + 1;
                    let mut all = call(number, vec![all_reduce()], EnteredCallState::Pending);
                    all.collective_index = Some(1);
                    report.calls.push(all);
                }
                if random.u8(..3) == 0 {
                    report.elsewhere = vec![elsewhere(rank, 1, &[1])];
                    report.elsewhere[0].pending_calls[0].since_ns = random.u64(..4000);
                }
                report
            })
            .collect();
        let one = Table::of(reports.clone()).find_root_cause();
        random.shuffle(&mut reports);
        let other = Table::of(reports).find_root_cause();
        assert_eq!(format!("{one:?}"), format!("{other:?}"), "{round}");
    }
}

/// Every rank but one waits in as many calls as a report holds, on this communicator and on others.
#[test]
fn an_absent_rank_of_a_thousand_is_found_soon_however_many_calls_wait_for_it() {
    let pending = |rank: usize, stream: u64| {
        let mut report = entered(rank, 32, false);
        for call in &mut report.calls {
            call.state = EnteredCallState::Pending;
            call.stream = stream;
        }
        report
    };
    let reports = (0..1024).map(|rank| match rank {
        700 => entered(rank, 0, true),
        _ => pending(rank, 1 + rank as u64 % 3),
    });
    let table = Table::of(reports.collect());
    let diagnosis = table.find_root_cause();
    assert_eq!(diagnosis.rank, 700);
    assert!(
        matches!(diagnosis.cause.root, RootCause::NeverEntered { .. }),
        "{diagnosis:?}"
    );
}
