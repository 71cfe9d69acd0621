//! A fault strikes whom it was meant for, and ends when it should.

use std::time::Duration;

use super::*;
use crate::nccl::{AbortFlag, Code};

// Names of functions that no other test of this crate calls: the faults are the process's.
const FUNCTION: &str = "ncclCommSuspend";

#[test]
fn a_fault_strikes_the_chosen_rank_the_chosen_time_only() {
    let guard = at_call("ncclCommResume").rank(1).nth(2).fail(6);
    let call = |rank| check_call("ncclCommResume", &[rank], None).map_err(Code::number);
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
    let abort = AbortFlag::default();
    let patience = Duration::from_secs(5);
    std::thread::scope(|scope| {
        let guard = at_call(FUNCTION).hang();
        let hung = scope.spawn(|| check_call(FUNCTION, &[0], Some(&abort)).is_ok());
        assert!(guard.wait_for_hits(1, patience));
        std::thread::sleep(Duration::from_millis(20));
        assert!(!hung.is_finished());
        drop(guard);
        assert!(hung.join().unwrap());
        let guard = at_call(FUNCTION).stall();
        let stalled = scope.spawn(|| check_call(FUNCTION, &[0], Some(&abort)).is_ok());
        assert!(guard.wait_for_hits(1, patience));
        abort.raise();
        assert!(stalled.join().unwrap());
    });
}
