//! The texts of a fault, and the fault after it was sent.

use std::sync::Arc;
use std::time::Duration;

use super::wire::MAX_TEXT_BYTES;
use super::{Cause, Fault, FaultClass, FaultOperation, FaultSite};
use super::{Ending, FaultRole, RootCause, Roster, Waiting};
use crate::departure::{Exit, Failure, LastCall, LossKind, Lost, ProcessEnd, UnreachableEvidence};
use crate::error::{Error, ErrorKind};
use crate::operation::OperationKind;

fn all_reduce() -> FaultOperation {
    FaultOperation {
        text: String::from("all_reduce #3"),
        kind: Some(OperationKind::AllReduce),
        sequence: Some(3),
    }
}

fn fault(cause: Cause) -> Fault {
    Fault::new(
        cause,
        FaultSite {
            communicator: "model/tp",
            roster: &Roster::default(),
            rank: 2,
            host: "node-b",
            pid: 977,
            generation: 0,
        },
    )
}

#[test]
fn what_another_process_says_of_a_fault_moves_no_cursor() {
    let mut fault = Fault::here(
        Cause::asked("x\r\u{1b}[2Jrank 0 failed"),
        ("tp", &Roster::default()),
        0,
        0,
        |_| None,
    );
    fault.evidence.push(String::from("\u{9b}1A"));
    let (come, _) = Fault::decode(&fault.encode(&[])).unwrap();
    assert_eq!(come.cause, "x\u{fffd}\u{fffd}[2Jrank 0 failed");
    assert_eq!(come.evidence, ["\u{fffd}1A"]);
}

#[test]
fn a_fault_names_rank_host_process_operation_and_cause() {
    let gone = fault(Cause::died(&LossKind::Unknown.into()));
    assert_eq!(
        gone.to_string(),
        "rank 2 (node-b, pid 977) is gone: it died"
    );
    let later = Fault {
        generation: 3,
        ..gone.clone()
    };
    assert_eq!(
        later.to_string(),
        "rank 2 (node-b, pid 977, generation 3) is gone: it died"
    );
    let asked = fault(Cause::asked("enough"));
    assert_eq!(
        asked.to_string(),
        "rank 2 (node-b, pid 977) asked for it: enough"
    );
    let late = Cause {
        class: FaultClass::TimedOut,
        role: FaultRole::Unknown,
        root: RootCause::Unknown,
        operation: all_reduce(),
        text: String::from("it did not finish within 2s"),
        ..Cause::asked("")
    };
    let late = fault(late);
    assert_eq!(late.operation(), Some("all_reduce #3"));
    let (come, _) = Fault::decode(&late.encode(&[])).unwrap();
    assert_eq!(come.operation_values(), &all_reduce());
    assert_eq!(gone.operation_values(), &FaultOperation::default());
    assert!(!late.is_certain() && gone.is_certain() && asked.is_certain());
}

#[test]
fn no_rank_is_the_culprit_of_what_was_not_found() {
    let told = |class, role| {
        fault(Cause {
            operation: all_reduce(),
            ..Cause::of(class, role, RootCause::Unknown, String::from("it failed"))
        })
    };
    let late = told(FaultClass::TimedOut, FaultRole::Unknown);
    let seen = "rank 2 (node-b, pid 977) in all_reduce #3: it failed";
    assert_eq!((late.culprit(), late.reported_by()), (None, Some(2)));
    assert_eq!(
        late.to_string(),
        format!("root cause not found (first to run out of time: {seen})")
    );
    assert_eq!(
        late.explain(),
        format!("  root cause: not found (first to run out of time: {seen})")
    );
    let json = serde_json::to_value(&late).unwrap();
    assert_eq!(json.get("culprit"), None);
    assert_eq!(json["reported_by"], 2);
    for role in [FaultRole::Cascade, FaultRole::Teardown] {
        let follows = told(FaultClass::Failed, role);
        assert_eq!(follows.culprit(), None);
        assert_eq!(
            follows.to_string(),
            format!("root cause not found (first to report a consequence: {seen})")
        );
    }
    let known = told(FaultClass::TimedOut, FaultRole::Initiating);
    assert_eq!((known.culprit(), known.reported_by()), (Some(2), None));
    assert_eq!(serde_json::to_value(&known).unwrap()["culprit"], 2);
    // What all ranks ask for is attributed to none of them.
    let over = told(FaultClass::Asked, FaultRole::Cascade);
    assert_eq!((over.culprit(), &over.to_string()[..]), (None, "it failed"));
    assert_eq!(over.reported_by(), None);
    // A rank that is cut off knows that of itself, and not that it is to blame.
    let apart = fault(Cause::cut_off(
        "cut off from ranks 0-1",
        &[0, 1],
        &Roster::default(),
    ));
    assert_eq!(apart.culprit(), None);
    assert_eq!(
        apart.to_string(),
        "rank 2 (node-b, pid 977) is cut off from ranks 0-1"
    );
}

#[test]
fn what_a_parent_tells_is_the_cause_and_what_the_process_said_last_is_evidence() {
    let told = ProcessEnd::in_words("killed by SIGKILL (out of memory: 1 process)", "layer 7");
    let died = fault(Cause::died(&told.into()));
    let died = died.with_also(vec![Waiting {
        ranks: vec![0, 1, 3],
        operation: String::from("all_to_all #42"),
    }]);
    let root = RootCause::Died {
        ending: Some(Ending::Signal(9)),
        out_of_memory: true,
    };
    assert_eq!(died.root, root);
    let text = died.explain();
    let lines: Vec<_> = text.lines().collect();
    assert_eq!(lines.len(), 4, "{text}");
    assert_eq!(
        lines[0],
        "  root cause: rank 2 (node-b, pid 977) died: killed by SIGKILL (out of memory: 1 process)"
    );
    assert!(lines[1].starts_with("  evidence:   ") && lines[1].ends_with("with: layer 7"));
    assert_eq!(
        lines[2],
        "  also:       ranks 0-1,3 were waiting in all_to_all #42"
    );
    assert!(lines[3].starts_with("  hint:       give that rank's control group"));
}

#[test]
fn a_rank_that_fails_or_exits_is_told_apart_from_one_that_dies() {
    let exits = Cause::failed(&Failure::Exits(7));
    let root = RootCause::Died {
        ending: Some(Ending::Code(7)),
        out_of_memory: false,
    };
    assert_eq!(exits.root, root);
    let fails = Cause::failed(&Failure::Error(String::from("no such file: model.bin")));
    assert!(matches!(fails.root, RootCause::ProgramFailed { .. }));
}

#[test]
fn what_follows_from_another_rank_or_from_an_end_is_no_beginning() {
    use nccl_sys::ncclResult_t;
    let role = |code, said: &str| {
        let text = String::from("a text of NCCL's");
        let failure = crate::error::NcclFailure::new("ncclSend", code, text, said.to_owned());
        fault(Cause::from(&Error::new(failure)))
    };
    let noise = "[Service thread] Accept failed Resource temporarily unavailable";
    let closed = "[Service thread] Could not receive type from localRank 0, res=3, closed=0";
    for code in [
        ncclResult_t::ncclSystemError,
        ncclResult_t::ncclInternalError,
    ] {
        let ended = role(code, noise);
        assert_eq!(
            (ended.role, ended.is_certain()),
            (FaultRole::Teardown, false)
        );
        assert_eq!(role(code, closed).role, FaultRole::Cascade);
        assert_eq!(role(code, "").role, FaultRole::Initiating);
        assert!(role(code, "a text of a release to come").is_certain());
    }
    assert_eq!(
        role(ncclResult_t::ncclRemoteError, noise).role,
        FaultRole::Cascade
    );
    // NCCL's last error is of the whole process: this call was wrong whatever that text is.
    assert!(role(ncclResult_t::ncclInvalidArgument, noise).is_certain());
}

#[test]
fn what_nccl_said_tells_what_there_is_no_more_of_and_that_a_kernel_failed_before() {
    use nccl_sys::ncclResult_t;
    let failed = |said: &str| {
        let failure = crate::error::NcclFailure::new(
            "ncclAllReduce",
            ncclResult_t::ncclUnhandledCudaError,
            String::from("unhandled cuda error"),
            said.to_owned(),
        );
        Cause::from(&Error::new(failure))
    };
    let full = failed("Error: failed to extend /dev/shm/nccl-1: No space left on device (28)");
    assert!(
        matches!(full.root, RootCause::ResourceExhausted { .. }),
        "{full:?}"
    );
    assert!(full.hint.contains("shm-size"), "{full:?}");
    let earlier = failed("Cuda failure 700 'an illegal memory access was encountered'");
    let RootCause::CallFailed {
        nccl,
        failed_before,
        ..
    } = earlier.root
    else {
        panic!("{earlier:?}");
    };
    assert_eq!((nccl, failed_before), (Some(1), true));
    assert!(
        earlier.evidence[0].contains("had failed before"),
        "{:?}",
        earlier.evidence
    );
    let noise = failed("[Service thread] Accept failed Resource temporarily unavailable");
    assert!(matches!(
        noise.root,
        RootCause::CallFailed {
            failed_before: false,
            ..
        }
    ));
    assert!(noise.evidence.is_empty());
}

#[test]
fn a_fault_comes_through_whole_or_not_at_all() {
    let fault = fault(Cause::died(
        &ProcessEnd::seen(Exit::Code(3), None, None, "").into(),
    ));
    let bytes = fault.encode(&[4, 7]);
    let (come, members) = Fault::decode(&bytes).unwrap();
    assert_eq!((&come, &members[..]), (&fault, &[4, 7][..]));
    assert_eq!(come.explain(), fault.explain());
    for end in 0..bytes.len() {
        assert!(Fault::decode(&bytes[..end]).is_err(), "{end}");
    }
}

#[test]
fn a_long_cause_is_cut_at_a_character() {
    let long = fault(Cause::asked(&"ä".repeat(MAX_TEXT_BYTES)));
    let (cut, _) = Fault::decode(&long.encode(&[])).unwrap();
    assert_eq!(cut.cause, "ä".repeat(MAX_TEXT_BYTES / 2));
}

#[test]
fn what_a_last_heartbeat_told_is_evidence_and_no_part_of_the_cause() {
    let heartbeat = "its last heartbeat, 0.3 s before, told of all_reduce #4 on \"tp\", called 0.1 s before that";
    let lost = |lost: Lost| Lost {
        last_call: Some(LastCall {
            call: String::from("all_reduce #4 on \"tp\", called 0.1 s before that"),
            before: Duration::from_millis(300),
        }),
        ..lost
    };
    let unreachable = UnreachableEvidence::Error(String::from("timed out"));
    let causes = [
        Cause::died(&lost(LossKind::Closed.into())),
        Cause::died(&lost(
            ProcessEnd::in_words("killed by SIGKILL", "oh").into(),
        )),
        Cause::host_lost("h2", vec![3], &Roster::default(), &lost(unreachable.into())),
    ];
    for cause in causes {
        assert!(!cause.text.contains("heartbeat"), "{}", cause.text);
        let evidence = cause.evidence.join("; ");
        assert!(evidence.contains(heartbeat), "{evidence}");
    }
}

#[test]
fn a_rank_whose_host_refuses_connections_is_out_of_reach_and_its_host_is_not_gone() {
    for sign in [UnreachableEvidence::Refused, UnreachableEvidence::Closed] {
        let cause = Cause::host_lost("h2", vec![3], &Roster::default(), &sign.into());
        let evidence = cause.evidence.join("; ");
        let told = format!("{}; {evidence}; {}", cause.text, cause.hint);
        assert!(
            told.starts_with("cannot be reached on its host h2"),
            "{told}"
        );
        for untrue in ["it died", "is gone with", "acknowledges nothing"] {
            assert!(!told.contains(untrue), "{told}");
        }
    }
}

/// Returns a roster of these ranks of a world, in which the launcher's numbers are higher by `shift`.
fn roster(members: &[usize], shift: usize) -> Roster {
    let people: Vec<_> = (0..8).map(|rank| Some(rank + shift)).collect();
    Roster::new(members, &people)
}

/// Returns the fault that ends communicator "b" of the ranks `members` of a world in generation 2 together with "a" of ranks 2
/// and 3, which ended because of `cause` on its rank `rank`, in generation `generation`.
fn passed_on(cause: Cause, rank: usize, generation: u64, members: &[usize]) -> Fault {
    let place = FaultSite {
        communicator: "a",
        roster: &roster(&[2, 3], 4),
        rank,
        host: "node-b",
        pid: 977,
        generation,
    };
    let told = Arc::new(Fault::new(cause, place));
    let aborted = Error::new(ErrorKind::Aborted {
        reason: String::new(),
    });
    let cause = Cause::from(&aborted.because_of(&told, false, None));
    let place_of = |world_rank| members.iter().position(|member| *member == world_rank);
    Fault::here(cause, ("b", &roster(members, 4)), 0, 2, place_of)
}

#[test]
fn a_communicator_that_ends_with_another_one_names_the_same_process_by_its_own_numbers() {
    let died = || Cause::died(&ProcessEnd::in_words("killed by SIGKILL", "").into());
    let same = passed_on(died(), 1, 2, &[0, 2, 3]);
    assert_eq!(
        same.to_string(),
        "rank 2 of \"b\" (world rank 3, launcher rank 7, node-b, pid 977, generation 2) died: killed by SIGKILL"
    );
    assert_eq!((same.class, same.culprit()), (FaultClass::Gone, Some(2)));
    assert_eq!((&*same.host, same.pid), ("node-b", 977));
    assert_eq!(same.root, fault(died()).root);
    let evidence = same.evidence.join("; ");
    assert!(
        evidence.starts_with(
            "it ended \"a\" (world ranks 2-3), and rank 0 (launcher rank 4) ended this one with it; \
             on \"a\" (world ranks 2-3): the process that started it told"
        ),
        "{evidence}"
    );
    // A rank that the communicator does not have is named by its number in the world, also where that is another world's.
    for (generation, members) in [(2, &[0, 1][..]), (1, &[0, 2, 3])] {
        let outside = passed_on(died(), 1, generation, members);
        assert_eq!((outside.culprit(), outside.reported_by()), (None, None));
        assert_eq!(
            (outside.world_rank(), outside.launcher_rank()),
            (Some(3), Some(7))
        );
        assert_eq!(
            outside.to_string(),
            format!(
                "world rank 3 (launcher rank 7, node-b, pid 977, generation {generation}) died: killed by SIGKILL"
            )
        );
        let (back, _) = Fault::decode(&outside.encode(members)).unwrap();
        assert_eq!(back, outside);
    }
    let asked = passed_on(Cause::asked("enough"), 0, 2, &[0, 2]);
    assert!(
        asked
            .to_string()
            .ends_with(" asked for it: to end \"a\" (world ranks 2-3): enough"),
        "{asked}"
    );
    assert_eq!(asked.culprit(), Some(1));
    let revoked = passed_on(Cause::revoked("enough"), 0, 2, &[0, 2]);
    assert_eq!(revoked.class, FaultClass::Asked);
}

#[test]
fn ranks_in_a_root_get_the_numbers_that_they_have_in_a_communicator_that_ends_with_it() {
    let cycle = || {
        let root = RootCause::Cycle { ranks: vec![0, 1] };
        let text = String::from("waits for rank 1, and rank 1 for rank 0");
        Cause::of(FaultClass::TimedOut, FaultRole::Initiating, root, text)
    };
    let same = passed_on(cycle(), 0, 2, &[0, 2, 3]);
    assert_eq!(same.root, RootCause::Cycle { ranks: vec![1, 2] });
    let named = "rank 1 of \"b\" (world rank 2, launcher rank 6, node-b, pid 977, generation 2)";
    assert_eq!(
        same.to_string(),
        format!("{named} on \"a\" (world ranks 2-3): waits for rank 1, and rank 1 for rank 0")
    );
    // The communicator does not have both ranks.
    let one = passed_on(cycle(), 0, 2, &[0, 2]);
    assert_eq!((one.culprit(), &one.root), (Some(1), &RootCause::Unknown));
    let late = Cause::of(
        FaultClass::TimedOut,
        FaultRole::Unknown,
        RootCause::Unknown,
        String::from("it did not finish"),
    );
    let late = passed_on(late, 1, 2, &[0, 1]);
    assert_eq!((late.culprit(), late.world_rank()), (None, None));
    assert_eq!(
        late.to_string(),
        "root cause not found (first to run out of time: world rank 3 (launcher rank 7, node-b, pid 977, generation 2): \
         on \"a\" (world ranks 2-3): it did not finish)"
    );
}

#[test]
fn what_to_do_is_no_other_ranks_matter_where_there_is_none_or_what_they_do_is_not_known() {
    let late = || {
        Error::new(ErrorKind::TimedOut {
            what: String::from("the operation"),
            timeout: Duration::from_secs(2),
        })
    };
    let hint = |fault: &Fault| fault.hint().unwrap_or_default().to_owned();
    let others = fault(Cause::from(&late()));
    assert!(hint(&others).contains("the ranks that print nothing"));
    assert!(
        hint(&others.without_others()).starts_with("what the other ranks were at could not be")
    );
    let alone = fault(Cause::from(&late()).of_one_rank());
    assert!(hint(&alone).starts_with("the communicator has no other rank"));
    // A fault that shows its own cause keeps its hint.
    let died = fault(Cause::died(&LossKind::Unknown.into()));
    assert_eq!(hint(&died.without_others()), hint(&died));
    let died = fault(Cause::died(&LossKind::Unknown.into()).of_one_rank());
    assert!(!hint(&died).starts_with("the communicator has no other rank"));
}
