//! A fault applies only to its targets, and ends on time.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::*;
use crate::code::Code;

// Functions that no other test of this crate calls: faults apply to the whole process.
const FUNCTION: &str = "ncclCommSuspend";

#[test]
fn a_fault_strikes_the_chosen_rank_the_chosen_time_only() {
    let guard = at_call("ncclCommResume").rank(1).nth(2).fail(6);
    let call = |rank| {
        check_call("ncclCommResume", &[Subject { rank, name: None }], &|| false)
            .map_err(Code::number)
    };
    assert_eq!(
        [call(1), call(0), call(1), call(1)],
        [Ok(()), Ok(()), Err(6), Ok(())]
    );
    assert_eq!(guard.hits(), 1);
    drop(guard);
    assert_eq!(call(1), Ok(()));
}

#[test]
fn a_hang_ends_with_its_guard_and_a_stall_with_an_abort() {
    let abort = AtomicBool::new(false);
    let aborted = || abort.load(Ordering::SeqCst);
    let has_asked = AtomicBool::new(false);
    let asks = || {
        std::thread::sleep(Duration::from_millis(20));
        has_asked.store(true, Ordering::SeqCst);
        aborted()
    };
    let patience = Duration::from_secs(5);
    std::thread::scope(|scope| {
        let guard = at_call(FUNCTION).hang();
        let hung = scope.spawn(|| check_call(FUNCTION, &[], &aborted).is_ok());
        assert!(guard.wait_for_hits(1, patience));
        std::thread::sleep(Duration::from_millis(20));
        assert!(!hung.is_finished());
        drop(guard);
        assert!(hung.join().unwrap());
        let guard = at_call(FUNCTION).stall();
        let stalled = scope.spawn(|| check_call(FUNCTION, &[], &asks).is_ok());
        assert!(guard.wait_for_hits(1, patience));
        // An abort waits for stalled calls that have asked for it.
        assert!(has_asked.load(Ordering::SeqCst));
        abort.store(true, Ordering::SeqCst);
        assert!(stalled.join().unwrap());
    });
}

#[test]
fn a_fault_strikes_the_threads_of_its_name_only() {
    let guard = at_call("ncclCommRevoke")
        .on_threads_named("a name that Linux cuts")
        .fail(6);
    let call = |name: &str| {
        let thread = std::thread::Builder::new().name(name.to_owned());
        let called =
            thread.spawn(|| check_call("ncclCommRevoke", &[], &|| false).map_err(Code::number));
        called.unwrap().join().unwrap()
    };
    assert_eq!(
        [call("a name"), call("a name that Linux cuts")],
        [Ok(()), Err(6)]
    );
    assert_eq!(guard.hits(), 1);
}

#[test]
fn a_fault_strikes_the_communicators_of_its_name_only() {
    let call = |rank, name| {
        let subject = Subject { rank, name };
        check_call("ncclCommMemStats", &[subject], &|| false).map_err(Code::number)
    };
    let guard = at_call("ncclCommMemStats")
        .communicator("tp")
        .rank(1)
        .fail(6);
    assert_eq!(call(1, Some("tp")), Err(6));
    for (rank, name) in [
        (0, Some("tp")),
        (1, Some("tp2")),
        (1, Some("dp")),
        (1, None),
    ] {
        assert_eq!(call(rank, name), Ok(()), "{rank} {name:?}");
    }
    // A single communicator of a group has to match both rank and name.
    let group = [
        Subject {
            rank: 0,
            name: Some("tp"),
        },
        Subject {
            rank: 1,
            name: Some("dp"),
        },
    ];
    assert!(check_call("ncclCommMemStats", &group, &|| false).is_ok());
    assert_eq!(guard.hits(), 1);
    drop(guard);
    let guards = specify("call=ncclCommMemStats,comm=test/*,action=fail=5").expect("a fault");
    assert_eq!(call(0, Some("test/tp")), Err(5));
    assert_eq!(call(0, Some("tests")), Ok(()));
    drop(guards);
}
