//! Communicators that release their memory for a while: suspend and resume.

mod ranks;

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use nccl_sys::{NCCL_SUSPEND_MEM, ncclCommMemStat_t as Stat};
use ranks::children::{split, sum};
use ranks::{Rank, alone, last_error, nccl, threads, unique_id};

fn is_suspended(rank: &Rank) -> bool {
    let mut value = 9;
    let stat = Stat::ncclStatGpuMemSuspended;
    let code = nccl!(ncclCommMemStats(rank.comm, stat, &mut value));
    assert_eq!(code, 0, "{}", last_error());
    value == 1
}

#[test]
fn memory_is_suspended_and_resumed_by_all_ranks_together() {
    alone(
        "memory_is_suspended_and_resumed_by_all_ranks_together",
        &[],
        || {
            let came = AtomicBool::new(false);
            threads(2, |rank| {
                assert_eq!(nccl!(ncclCommResume(rank.comm)), 5);
                assert_eq!(last_error(), "MemManager: Not in suspended state");
                // With flags of 0 the call suspends nothing, and does not wait.
                assert_eq!(nccl!(ncclCommSuspend(rank.comm, 0)), 0);
                assert!(!is_suspended(rank));
                if rank.rank == 1 {
                    thread::sleep(Duration::from_millis(100));
                    came.store(true, Ordering::SeqCst);
                }
                assert_eq!(nccl!(ncclCommSuspend(rank.comm, NCCL_SUSPEND_MEM)), 0);
                assert!(came.load(Ordering::SeqCst));
                assert!(is_suspended(rank));
                assert_eq!(nccl!(ncclCommSuspend(rank.comm, NCCL_SUSPEND_MEM)), 5);
                assert_eq!(nccl!(ncclCommResume(rank.comm)), 0);
                assert!(!is_suspended(rank));
                assert_eq!(sum(rank, 1), 2);
                let mut value = 0;
                assert_eq!(nccl!(ncclCommMemStats(rank.comm, Stat(9), &mut value)), 4);
            });
            assert!(nccl_emulator::violations().is_empty());
        },
    );
}

#[test]
fn shared_memory_cannot_be_suspended() {
    let share = [("NCCL_COMM_SPLIT_SHARE_RESOURCES", "1")];
    alone("shared_memory_cannot_be_suspended", &share, || {
        threads(1, |rank| {
            let child = split(rank, 0, 0);
            for of in [rank, &child] {
                assert_eq!(nccl!(ncclCommSuspend(of.comm, NCCL_SUSPEND_MEM)), 5);
                let text =
                    "Memory suspend not supported with split_share communicators (refCount=2)";
                assert_eq!(last_error(), text);
            }
            child.destroy();
            assert_eq!(nccl!(ncclCommSuspend(rank.comm, NCCL_SUSPEND_MEM)), 0);
            sum(rank, 1);
            assert_eq!(nccl_emulator::violations().len(), 1);
        });
    });
}

#[test]
fn an_abort_ends_a_suspend_that_waits_for_a_rank() {
    alone("an_abort_ends_a_suspend_that_waits_for_a_rank", &[], || {
        let id = unique_id();
        thread::scope(|scope| {
            for rank in 0..2 {
                scope.spawn(move || {
                    let rank = Rank::join_nonblocking(id, 2, rank);
                    if rank.rank == 0 {
                        assert_eq!(nccl!(ncclCommSuspend(rank.comm, NCCL_SUSPEND_MEM)), 7);
                        thread::sleep(Duration::from_millis(50));
                        assert_eq!(rank.state(), 7);
                    } else {
                        thread::sleep(Duration::from_millis(100));
                    }
                    assert_eq!(rank.abort(), 0);
                });
            }
        });
    });
}
