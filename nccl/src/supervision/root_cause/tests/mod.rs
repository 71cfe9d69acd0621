//! A table of cases. The order in which reports arrive plays no part.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use messages::message;

use super::*;
use crate::operation::OperationKind;
use crate::supervision::rank_report::EnteredCall;
use crate::supervision::rank_report::OtherCommunicator;
use crate::supervision::run_length_counts::RunLengthCounts;
use crate::{DataType, ReduceOp};
use nccl_base::fault::FaultSite;
use nccl_base::fault::cause::MismatchField;
use nccl_base::fault::{FaultOperation, Roster};
use nccl_core::recorder::{RecordedOperation, RecordedReduction};

mod host;
mod inside_nccl;
mod messages;
mod stuck_call;
mod wait_graph;

/// The reports and symptoms of a case.
struct Table {
    hosts: Vec<String>,
    symptoms: Vec<Fault>,
    reports: BTreeMap<usize, RankReport>,
    departed_in_order: BTreeSet<usize>,
    suspended: BTreeMap<usize, Option<String>>,
    slack: Duration,
}

fn operation(kind: OperationKind) -> RecordedOperation {
    RecordedOperation::new(kind, 1024, DataType::Float32)
}

fn but(
    mut operation: RecordedOperation,
    change: impl FnOnce(&mut RecordedOperation),
) -> RecordedOperation {
    change(&mut operation);
    operation
}

fn all_reduce() -> RecordedOperation {
    but(operation(OperationKind::AllReduce), |one| {
        one.reduction = Some(RecordedReduction::Op(ReduceOp::Sum))
    })
}

/// Call `number` in state `state`, with these operations.
fn call(number: u64, operations: Vec<RecordedOperation>, state: EnteredCallState) -> EnteredCall {
    let is_message = |one: &RecordedOperation| one.peer.is_some();
    let is_for_all = !operations.iter().all(is_message);
    let kind = match &operations[..] {
        [one] => one.kind.to_string(),
        _ => String::from("group"),
    };
    EnteredCall {
        number,
        is_for_all,
        collective_index: is_for_all.then_some(number),
        kind,
        stream: 1,
        since_ns: number * 1000,
        age_ms: 1000,
        done_ms: None,
        state,
        operations,
        omitted_operations: 0,
    }
}

/// Report of a rank that has entered `calls` calls, and waits in the last unless `idle`.
fn entered(rank: usize, calls: u64, idle: bool) -> RankReport {
    let state = |number| match number < calls || idle {
        true => EnteredCallState::Done,
        false => EnteredCallState::Pending,
    };
    RankReport {
        rank,
        exists: true,
        entered: Some(calls),
        calls: (1..=calls)
            .map(|number| call(number, vec![all_reduce()], state(number)))
            .collect(),
        ..RankReport::default()
    }
}

fn late(rank: usize) -> Fault {
    symptom(rank, RootCause::Unknown, "it did not finish within 2s")
}

fn symptom(rank: usize, root: RootCause, text: &str) -> Fault {
    let cause = Cause {
        class: FaultClass::TimedOut,
        role: FaultRole::Unknown,
        root,
        operation: FaultOperation {
            text: String::from("all_reduce #2"),
            kind: Some(OperationKind::AllReduce),
            sequence: Some(2),
        },
        text: text.to_owned(),
        ..Cause::asked("")
    };
    let site = FaultSite {
        communicator: "model/tp",
        roster: &Roster::default(),
        rank,
        host: "node-a",
        pid: 1,
        generation: 1,
    };
    Fault::new(cause, site)
}

impl Table {
    fn of(reports: Vec<RankReport>) -> Self {
        let size = reports.len();
        Self {
            hosts: (0..size)
                .map(|rank| String::from(if rank < size / 2 { "node-a" } else { "node-b" }))
                .collect(),
            symptoms: vec![late(0)],
            reports: reports.into_iter().map(|one| (one.rank, one)).collect(),
            departed_in_order: BTreeSet::new(),
            suspended: BTreeMap::new(),
            slack: Duration::from_millis(5),
        }
    }

    fn find_root_cause(&self) -> Diagnosis {
        let done = completed_calls(&self.reports);
        let diagnosis = find_root_cause(&DiagnosisInput {
            name: "model/tp",
            key: "tp",
            roster: &Roster::default(),
            hosts: &self.hosts,
            symptoms: &self.symptoms,
            reports: &self.reports,
            departed_in_order: &self.departed_in_order,
            suspended: &self.suspended,
            done: &done,
            slack: self.slack,
        });
        let fault = diagnosis.cause.text.clone();
        assert!(!fault.is_empty() && !fault.contains('\n'), "{fault}");
        diagnosis
    }
}

#[test]
fn the_rank_that_is_furthest_behind_is_named_with_what_it_did_last() {
    let mut table = Table::of(vec![
        entered(0, 2, false),
        entered(1, 2, false),
        entered(2, 1, true),
        entered(3, 1, true),
    ]);
    table.reports.get_mut(&3).unwrap().calls.clear();
    table.reports.get_mut(&3).unwrap().entered = Some(0);
    table.reports.get_mut(&3).unwrap().phase = Some(PastEvent::new(
        String::from("load weights"),
        Duration::from_secs(12),
    ));
    let diagnosis = table.find_root_cause();
    assert_eq!(diagnosis.rank, 3);
    assert!(
        matches!(&diagnosis.cause.root, RootCause::NeverEntered { operation, last: None, .. }
            if operation == "all_reduce #2"),
        "{diagnosis:?}"
    );
    assert_eq!(
        diagnosis.cause.text,
        "has not entered all_reduce #2; rank 0 waited: it did not finish within 2s"
    );
    let evidence = diagnosis.cause.evidence.join("; ");
    assert!(
        evidence.contains("phase \"load weights\" for 12.0 s"),
        "{evidence}"
    );
    assert!(
        evidence.contains("rank 2 has not entered it either"),
        "{evidence}"
    );
    let also = &diagnosis.cause.also;
    assert_eq!(also.len(), 1);
    assert_eq!(
        also[0].to_string(),
        "ranks 0-1 were waiting in all_reduce #2"
    );
}

/// State of rank `rank` on another communicator: it has entered `entered` calls, and waits in those with the numbers
/// `pending_calls`, each called at the time that is its number.
fn elsewhere(rank: usize, entered: u64, pending_calls: &[u64]) -> OtherCommunicator {
    let pending_calls = pending_calls
        .iter()
        .map(|number| call(*number, vec![all_reduce()], EnteredCallState::Pending));
    OtherCommunicator {
        key: String::from("pp"),
        name: String::from("model/pp"),
        roster: Roster::default(),
        rank,
        entered: Some(entered),
        pending_calls: pending_calls.collect(),
        has_more_pending: false,
        recently_done: Vec::new(),
        sent: RunLengthCounts::of(&[0; 8]),
        received: RunLengthCounts::of(&[0; 8]),
    }
}

#[test]
fn of_two_that_are_absent_the_one_that_waits_for_nobody_is_the_cause() {
    let mut table = Table::of(vec![
        entered(0, 2, false),
        entered(1, 1, true),
        entered(2, 1, true),
    ]);
    table.reports.get_mut(&1).unwrap().elsewhere = vec![elsewhere(1, 4, &[4])];
    assert_eq!(table.find_root_cause().rank, 2);
}

/// On NVIDIA's library the rank with another operation can be through, with a wrong result, while the others wait.
#[test]
fn an_operation_that_is_done_on_the_rank_that_entered_another_one_is_still_compared() {
    let mut table = Table::of(vec![
        entered(0, 2, false),
        entered(1, 2, false),
        entered(2, 2, false),
    ]);
    table.reports.get_mut(&1).unwrap().calls[1] = call(
        2,
        vec![operation(OperationKind::AllGather)],
        EnteredCallState::Done,
    );
    let diagnosis = table.find_root_cause();
    assert_eq!(diagnosis.rank, 1, "{diagnosis:?}");
    assert!(
        matches!(
            &diagnosis.cause.root,
            RootCause::Mismatch {
                field: MismatchField::Operation,
                sequence: Some(2),
                ..
            }
        ),
        "{diagnosis:?}"
    );
}

#[test]
fn what_does_not_fit_together_comes_before_who_is_absent() {
    for (field, change) in [
        (
            MismatchField::Operation,
            operation(OperationKind::AllGather),
        ),
        (MismatchField::Count, but(all_reduce(), |one| one.count = 7)),
        (
            MismatchField::DataType,
            but(all_reduce(), |one| one.data_type = DataType::BFloat16),
        ),
        (
            MismatchField::Reduction,
            but(all_reduce(), |one| {
                one.reduction = Some(RecordedReduction::Op(ReduceOp::Max))
            }),
        ),
    ] {
        let mut table = Table::of(vec![
            entered(0, 2, false),
            entered(1, 2, false),
            entered(2, 2, false),
            entered(3, 1, true),
        ]);
        table.reports.get_mut(&1).unwrap().calls[1] =
            call(2, vec![change], EnteredCallState::Pending);
        let diagnosis = table.find_root_cause();
        assert_eq!(diagnosis.rank, 1, "{diagnosis:?}");
        let RootCause::Mismatch {
            field: found,
            sequence,
            sides,
        } = &diagnosis.cause.root
        else {
            panic!("{diagnosis:?}");
        };
        assert_eq!((*found, *sequence), (field, Some(2)));
        assert_eq!(sides[0].ranks, [0, 2]);
        assert_eq!(sides[1].ranks, [1]);
    }
    let root = |root| {
        but(operation(OperationKind::Broadcast), |one| {
            one.root = Some(root)
        })
    };
    let mut table = Table::of(vec![entered(0, 1, false), entered(1, 1, false)]);
    for rank in 0..2 {
        let broadcast = call(1, vec![root(rank)], EnteredCallState::Pending);
        table.reports.get_mut(&rank).unwrap().calls[0] = broadcast;
    }
    let diagnosis = table.find_root_cause();
    assert!(
        diagnosis
            .cause
            .text
            .contains("rank 0 has root 0, rank 1 has root 1")
    );
    assert!(
        diagnosis
            .cause
            .evidence
            .join(" ")
            .contains("either may be the intended one")
    );
}

/// Returns the fault that is found for ranks that differ.
fn mismatch(table: &Table) -> Fault {
    let diagnosis = table.find_root_cause();
    let site = FaultSite {
        communicator: "model/tp",
        roster: &Roster::default(),
        rank: diagnosis.rank,
        host: "node-a",
        pid: 1,
        generation: 0,
    };
    Fault::new(diagnosis.cause, site)
}

#[test]
fn no_rank_is_the_culprit_where_as_many_have_the_one_as_the_other() {
    let mut table = Table::of((0..4).map(|rank| entered(rank, 1, false)).collect());
    let broadcast = |table: &mut Table, rank: usize| {
        let other = vec![operation(OperationKind::Broadcast)];
        let other = call(1, other, EnteredCallState::Pending);
        table.reports.get_mut(&rank).unwrap().calls[0] = other;
    };
    broadcast(&mut table, 1);
    let odd = mismatch(&table);
    assert_eq!(odd.culprit(), Some(1), "{odd}");
    broadcast(&mut table, 2);
    let tied = mismatch(&table);
    assert_eq!((tied.culprit(), tied.reported_by()), (None, None));
    assert_eq!((&*tied.host, tied.pid), ("", 0));
    assert!(
        tied.to_string().starts_with(
            "ranks differ in operation #1: ranks 0,3 entered all_reduce, ranks 1-2 entered broadcast; rank 0 waited: "
        ),
        "{tied}"
    );
    let also: Vec<_> = tied.also.iter().flat_map(|one| &one.ranks).collect();
    assert_eq!(also.len(), 4, "{also:?}");
    // Two ranks differ from the rest, and from each other.
    let other = vec![operation(OperationKind::AllGather)];
    table.reports.get_mut(&1).unwrap().calls[0] = call(1, other, EnteredCallState::Pending);
    let partly = mismatch(&table);
    assert_eq!(partly.culprit(), None, "{partly}");
}

/// The recorder has lost a part of the call of a rank that is through.
#[test]
fn a_call_of_which_a_part_is_lost_is_done_for_all_that_called_the_same_function() {
    let mut table = Table::of((0..3).map(|rank| entered(rank, 2, false)).collect());
    let done = &mut table.reports.get_mut(&1).unwrap().calls[1];
    (done.state, done.omitted_operations) = (EnteredCallState::Done, 1);
    assert!(matches!(
        table.find_root_cause().cause.root,
        RootCause::Unknown
    ));
}

/// Rank 1 finalizes alone, which fails, and rank 0 times out in an operation that rank 1 has not entered.
#[test]
fn where_ranks_wait_it_is_a_matter_of_time_whichever_of_them_told_first() {
    let mut table = Table::of(vec![entered(0, 2, false), entered(1, 1, true)]);
    let failed = Cause {
        class: FaultClass::Failed,
        role: FaultRole::Cascade,
        ..Cause::asked("finalize failed")
    };
    let site = FaultSite {
        communicator: "model/tp",
        roster: &Roster::default(),
        rank: 1,
        host: "node-a",
        pid: 2,
        generation: 1,
    };
    let failed = Fault::new(failed, site);
    for symptoms in [vec![late(0), failed.clone()], vec![failed.clone(), late(0)]] {
        table.symptoms = symptoms;
        let cause = table.find_root_cause().cause;
        assert!(
            matches!(cause.root, RootCause::NeverEntered { .. }),
            "{cause:?}"
        );
        assert_eq!(cause.class, FaultClass::TimedOut);
    }
    table.symptoms = vec![failed];
    assert_eq!(table.find_root_cause().cause.class, FaultClass::Failed);
}

#[test]
fn a_difference_in_what_is_done_is_not_taken_for_the_cause() {
    let mut table = Table::of(vec![entered(0, 2, false), entered(1, 1, true)]);
    let other = operation(OperationKind::AllGather);
    table.reports.get_mut(&1).unwrap().calls[0] = call(1, vec![other], EnteredCallState::Done);
    let diagnosis = table.find_root_cause();
    assert!(matches!(
        diagnosis.cause.root,
        RootCause::NeverEntered { .. }
    ));
}

#[test]
fn what_is_done_on_one_rank_stands_still_on_none_although_nobody_has_looked() {
    let mut table = Table::of(vec![
        entered(0, 2, false),
        entered(1, 2, false),
        entered(2, 1, false),
    ]);
    let diagnosis = table.find_root_cause();
    assert_eq!(
        diagnosis.rank, 2,
        "its first is done elsewhere: {diagnosis:?}"
    );
    assert!(matches!(
        diagnosis.cause.root,
        RootCause::NeverEntered { .. }
    ));
    // Where the call is done on no rank, all wait in it, although some have put another call behind it.
    for rank in 0..2 {
        table.reports.get_mut(&rank).unwrap().calls[0].state = EnteredCallState::Pending;
    }
    assert_eq!(table.find_root_cause().cause.root, RootCause::Unknown);
}

/// A busy machine may delay a rank's report; another rank has not entered the operation, and reports that.
#[test]
fn a_rank_that_nothing_is_known_of_is_named_only_where_nothing_else_explains_it() {
    let mut table = Table::of(vec![
        entered(0, 2, false),
        entered(1, 2, false),
        entered(2, 1, true),
        entered(3, 2, false),
    ]);
    table.reports.remove(&1);
    let diagnosis = table.find_root_cause();
    assert_eq!(diagnosis.rank, 2);
    assert!(matches!(
        diagnosis.cause.root,
        RootCause::NeverEntered { .. }
    ));
    // Rank 1 does not answer, as far as is known.
    table.suspended.insert(1, None);
    let root = RootCause::NotAnswering {
        ranks: vec![1],
        state: None,
    };
    assert_eq!(table.find_root_cause().cause.root, root);
    // All ranks that answer have entered the operation.
    table.suspended.clear();
    table.reports.insert(2, entered(2, 2, false));
    assert_eq!(table.find_root_cause().cause.root, root);
}

#[test]
fn ranks_that_do_not_answer_are_named_together_with_their_host_and_state() {
    let mut table = Table::of((0..4).map(|rank| entered(rank, 2, false)).collect());
    table.reports.remove(&2);
    table.reports.remove(&3);
    table
        .suspended
        .insert(2, Some(String::from("process state T (stopped)")));
    let diagnosis = table.find_root_cause();
    assert_eq!(diagnosis.rank, 2);
    let root = RootCause::NotAnswering {
        ranks: vec![2, 3],
        state: Some(String::from("process state T (stopped)")),
    };
    assert_eq!(diagnosis.cause.root, root);
    assert!(
        diagnosis
            .cause
            .evidence
            .join("; ")
            .contains("all of them run on node-b")
    );
}

#[test]
fn a_call_that_hangs_comes_before_those_who_have_not_come() {
    let mut table = Table::of(vec![entered(0, 2, false), entered(1, 1, true)]);
    let root = RootCause::StuckInside {
        operation: String::from("the call into NCCL"),
    };
    table.symptoms = vec![
        late(1),
        symptom(0, root.clone(), "the call into NCCL hangs"),
    ];
    let diagnosis = table.find_root_cause();
    assert_eq!((diagnosis.rank, diagnosis.cause.root), (0, root));
}

#[test]
fn work_of_others_in_front_of_an_operation_is_named_when_all_have_come() {
    let mut table = Table::of(vec![entered(0, 2, false), entered(1, 2, false)]);
    table.reports.get_mut(&1).unwrap().calls[1].state = EnteredCallState::Queued;
    let diagnosis = table.find_root_cause();
    assert_eq!(diagnosis.rank, 1);
    assert!(matches!(
        diagnosis.cause.root,
        RootCause::StuckOutside { .. }
    ));
    // A rank is absent: the work in front may wait for it.
    table.reports.insert(2, entered(2, 1, true));
    table.hosts.push(String::from("node-c"));
    assert_eq!(table.find_root_cause().rank, 2);
}

#[test]
fn a_warning_of_nccl_is_the_cause_only_where_nothing_else_is() {
    let mut table = Table::of(vec![entered(0, 1, false), entered(1, 1, false)]);
    table.reports.get_mut(&1).unwrap().warning = Some(nccl_base::warning::FirstWarning {
        text: String::from("Call to socket failed: Too many open files"),
        check: Some(String::from("log-open-files")),
    });
    let diagnosis = table.find_root_cause();
    assert_eq!(diagnosis.rank, 1);
    assert!(matches!(&diagnosis.cause.root,
        RootCause::ResourceExhausted { resource } if resource == "open files"));
    assert!(diagnosis.cause.hint.contains("ulimit -n"), "{diagnosis:?}");
    table.reports.insert(0, entered(0, 0, true));
    let diagnosis = table.find_root_cause();
    assert_eq!(diagnosis.rank, 0);
    let evidence = diagnosis.cause.evidence.join("; ");
    assert!(
        evidence.contains("first warning on rank 1: Call to socket"),
        "{evidence}"
    );
}

#[test]
fn a_failure_that_follows_says_more_than_time_that_ran_out_and_the_noise_of_an_end_says_less() {
    let failed = |rank, role, text: &str| {
        let root = RootCause::CallFailed {
            call: Some(String::from("ncclCommGetAsyncError")),
            nccl: Some(2),
            cuda: None,
            failed_before: false,
        };
        let cause = Cause {
            class: FaultClass::Failed,
            role,
            root,
            text: text.to_owned(),
            ..Cause::asked("")
        };
        let site = FaultSite {
            communicator: "model/tp",
            roster: &Roster::default(),
            rank,
            host: "node-a",
            pid: 1,
            generation: 1,
        };
        Fault::new(cause, site)
    };
    let mut table = Table::of(vec![
        entered(0, 1, false),
        entered(1, 1, false),
        entered(2, 1, false),
    ]);
    let noise = failed(0, FaultRole::Teardown, "a thread of NCCL's was cut off");
    let follows = failed(2, FaultRole::Cascade, "a connection was closed");
    let elected = |table: &Table| {
        let diagnosis = table.find_root_cause();
        (diagnosis.rank, diagnosis.cause.role, diagnosis.cause.class)
    };
    table.symptoms = vec![noise.clone(), late(1), follows];
    let cascade = (2, FaultRole::Cascade, FaultClass::Failed);
    assert_eq!(elected(&table), cascade);
    // All ranks answer, so that no process is gone.
    let hint = table.find_root_cause().cause.hint;
    assert!(
        hint.starts_with("no rank is known to have failed first"),
        "{hint}"
    );
    table.symptoms.pop();
    let unknown = (1, FaultRole::Unknown, FaultClass::TimedOut);
    assert_eq!(elected(&table), unknown);
    table.symptoms = vec![noise];
    let teardown = (0, FaultRole::Teardown, FaultClass::Failed);
    assert_eq!(elected(&table), teardown);
}

#[test]
fn what_nothing_explains_is_said_to_be_unknown() {
    let mut table = Table::of(vec![entered(0, 1, false), entered(1, 1, false)]);
    table.symptoms = vec![late(1), late(0)];
    let diagnosis = table.find_root_cause();
    assert_eq!(
        (diagnosis.rank, diagnosis.cause.role),
        (1, FaultRole::Unknown)
    );
    assert_eq!(diagnosis.cause.root, RootCause::Unknown);
    let evidence = diagnosis.cause.evidence.join("; ");
    assert!(
        evidence.contains("none of their processes is gone"),
        "{evidence}"
    );
    assert!(
        evidence.contains("in this order: rank 1, rank 0"),
        "{evidence}"
    );
    // All ranks have called the operation: the hint names what that leaves, and not a rank that has not called.
    let hint = diagnosis.cause.hint;
    assert!(hint.contains("a device that hangs, a link"), "{hint}");
    assert!(!hint.contains("did not call"), "{hint}");
}

#[test]
fn a_rank_that_left_in_order_is_named_when_others_wait_for_it() {
    let mut table = Table::of(vec![entered(0, 2, false), entered(1, 2, false)]);
    table.reports.remove(&1);
    table.departed_in_order.insert(1);
    let diagnosis = table.find_root_cause();
    assert_eq!(diagnosis.rank, 1);
    assert!(diagnosis.cause.evidence[0].contains("has left the world"));
}

#[test]
fn who_had_come_last_for_long_is_evidence_unless_the_reports_are_further_apart() {
    let late = |by: u64, times: u64, slack| {
        let mut reports: Vec<_> = (0..3).map(|rank| entered(rank, 20, false)).collect();
        for (rank, report) in reports.iter_mut().enumerate() {
            for call in &mut report.calls {
                call.age_ms = 10_000 - 100 * call.number - rank as u64;
                if rank == 1 && call.number > 20 - times {
                    call.age_ms -= by;
                }
            }
        }
        // The last operation stalls, and rank 1 has not entered it.
        reports[1].calls.pop();
        reports[1].entered = Some(19);
        let mut table = Table::of(reports);
        table.slack = Duration::from_millis(slack);
        let diagnosis = table.find_root_cause();
        assert_eq!(diagnosis.rank, 1);
        diagnosis.cause.evidence.join("; ")
    };
    let evidence = late(81, 15, 5);
    let local_evidence = "rank 1 had been the last to arrive in 14 of the last 16 operations of all ranks, by 80ms (median)";
    assert!(evidence.contains(local_evidence), "{evidence}");
    for (by, times, slack) in [(81, 15, 80), (9, 15, 1), (81, 11, 5)] {
        let evidence = late(by, times, slack);
        assert!(!evidence.contains("last to arrive"), "{evidence}");
    }
}

#[test]
fn random_reports_in_any_order_give_one_verdict_and_no_panic() {
    let mut random = fastrand::Rng::with_seed(7);
    for round in 0..500 {
        let size = random.usize(1..6);
        let mut reports: Vec<RankReport> = (0..size)
            .filter(|_| round % 7 != 0 || random.u8(..4) > 0)
            .collect::<Vec<_>>()
            .into_iter()
            .map(|rank| {
                let mut report = entered(rank, random.u64(0..4), random.bool());
                for call in &mut report.calls {
                    if random.u8(..8) == 0 {
                        call.operations[0].count = random.u64(..3);
                    }
                    if random.u8(..8) == 0 {
                        call.operations.push(message(
                            if random.bool() {
                                OperationKind::Send
                            } else {
                                OperationKind::Recv
                            },
                            random.usize(..size),
                            random.u32(1..3),
                            random.u64(..3),
                        ));
                    }
                    call.omitted_operations = usize::from(random.u8(..16) == 0);
                }
                if random.u8(..6) == 0 {
                    report.entered = None;
                    report
                        .calls
                        .iter_mut()
                        .for_each(|call| call.collective_index = None);
                }
                report
            })
            .collect();
        let one = Table {
            hosts: vec![String::from("h"); size],
            ..Table::of(reports.clone())
        };
        random.shuffle(&mut reports);
        let other = Table {
            hosts: vec![String::from("h"); size],
            symptoms: one.symptoms.clone(),
            ..Table::of(reports)
        };
        let (one, other) = (one.find_root_cause(), other.find_root_cause());
        assert_eq!(format!("{one:?}"), format!("{other:?}"), "{round}");
        assert!(one.rank < size);
    }
}
