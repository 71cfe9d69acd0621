//! Communicators without some of their ranks: shrink and revoke.

mod ranks;

use std::ptr::null_mut;
use std::thread;
use std::time::Duration;

use nccl_emulator::faults;
use nccl_sys::{NCCL_SHRINK_ABORT, ncclDataType_t as Kind, ncclRedOp_t as Op};
use ranks::children::{described, split, sum};
use ranks::{Rank, alone, last_error, nccl, processes_ending, threads, unique_id};

/// A shrink without these ranks.
fn shrink(rank: &Rank, without: &mut [i32], flags: i32) -> Rank {
    let mut comm = null_mut();
    let code = nccl!(ncclCommShrink(
        rank.comm,
        without.as_mut_ptr(),
        without.len() as i32,
        &mut comm,
        null_mut(),
        flags
    ));
    assert_eq!(code, 0, "{}", last_error());
    assert_eq!(rank.settle(), 0, "{}", last_error());
    described(rank, comm)
}

#[test]
fn a_shrink_leaves_ranks_out_and_sorts_the_list_of_them() {
    alone(
        "a_shrink_leaves_ranks_out_and_sorts_the_list_of_them",
        &[],
        || {
            threads(5, |rank| {
                let mut list = [3, 0];
                if list.contains(&rank.rank) {
                    let mut comm = null_mut();
                    let mut shrink = |list: *mut i32, count| {
                        nccl!(ncclCommShrink(
                            rank.comm,
                            list,
                            count,
                            &mut comm,
                            null_mut(),
                            0
                        ))
                    };
                    assert_eq!(shrink(list.as_mut_ptr(), 2), 4);
                    assert_eq!(shrink(list.as_mut_ptr(), 0), 4);
                    assert_eq!(shrink(null_mut(), 1), 4);
                    return;
                }
                for _ in 0..2 {
                    let child = shrink(rank, &mut list, 0);
                    assert_eq!(list, [0, 3]);
                    let expected = match rank.rank {
                        1 => (0, 3),
                        2 => (1, 3),
                        _ => (2, 3),
                    };
                    assert_eq!((child.rank, child.ranks), expected);
                    assert_eq!(sum(&child, rank.rank), 7);
                    child.destroy();
                }
            });
        },
    );
}

#[test]
fn survivors_of_a_killed_process_shrink_and_go_on() {
    let name = "survivors_of_a_killed_process_shrink_and_go_on";
    let ending = |rank, status: std::process::ExitStatus| status.success() == (rank != 1);
    processes_ending(name, 3, &[], ending, |process| {
        let rank = process.join();
        assert_eq!(sum(&rank, 1), 3);
        // Before this point a rank may still need rank 1's part of the sum.
        process.mark(&format!("summed.{}", process.rank));
        (0..3).for_each(|rank| process.wait_for(&format!("summed.{rank}")));
        if process.rank == 1 {
            std::process::abort();
        }
        // This all-reduce waits for the dead rank.
        let memory = rank.memory(&[1i32; 10]);
        let code = rank.all_reduce(&memory, &memory, Kind::ncclInt32, Op::ncclSum);
        assert_eq!(code, 0);
        thread::sleep(Duration::from_millis(100));
        assert!(!rank.is_idle());
        let child = shrink(&rank, &mut [1], NCCL_SHRINK_ABORT);
        assert_eq!((child.rank, child.ranks), (process.rank / 2, 2));
        assert_eq!(rank.abort(), 0);
        assert_eq!(sum(&child, 4), 8);
        child.destroy();
    });
}

#[test]
fn a_revoked_communicator_can_only_be_split_and_shrunk() {
    alone(
        "a_revoked_communicator_can_only_be_split_and_shrunk",
        &[],
        || {
            threads(2, |rank| {
                let memory = rank.memory(&[1i32]);
                assert_eq!(sum(rank, 1), 2);
                if rank.rank == 0 {
                    let code = rank.all_reduce(&memory, &memory, Kind::ncclInt32, Op::ncclSum);
                    assert_eq!(code, 0);
                    thread::sleep(Duration::from_millis(50));
                    assert!(!rank.is_idle());
                }
                assert_eq!(nccl!(ncclCommRevoke(null_mut(), 9)), 0);
                assert_eq!(nccl!(ncclCommRevoke(rank.comm, 1)), 4);
                assert_eq!(nccl!(ncclCommRevoke(rank.comm, 0)), 0, "{}", last_error());
                // The operations that ran have ended.
                rank.sync();
                assert_eq!(nccl!(ncclCommRevoke(rank.comm, 0)), 4);
                let code = rank.all_reduce(&memory, &memory, Kind::ncclInt32, Op::ncclSum);
                assert_eq!(code, 5);
                assert_eq!(last_error(), "AllReduce: communicator was revoked");
                assert_eq!(nccl!(ncclCommFinalize(rank.comm)), 4);
                let mut count = 0;
                assert_eq!(nccl!(ncclCommCount(rank.comm, &mut count)), 0);
                let child = split(rank, 0, 0);
                assert_eq!(sum(&child, 3), 6);
                child.destroy();
                if rank.rank == 1 {
                    let child = shrink(rank, &mut [0], 0);
                    assert_eq!(sum(&child, 3), 3);
                    child.destroy();
                }
            });
        },
    );
}

#[test]
fn a_revoke_ends_a_group_in_the_background_and_a_call_that_waits() {
    alone(
        "a_revoke_ends_a_group_in_the_background_and_a_call_that_waits",
        &[],
        || {
            let id = unique_id();
            thread::scope(|scope| {
                for rank in 0..2 {
                    scope.spawn(move || {
                        let rank = Rank::join_nonblocking(id, 2, rank);
                        if rank.rank == 0 {
                            let memory = rank.memory(&[1i32]);
                            // The first message connects to rank 1, which never connects.
                            assert_eq!(rank.receive(&memory, Kind::ncclInt32, 1), 7);
                            thread::sleep(Duration::from_millis(50));
                            assert_eq!(rank.state(), 7);
                        }
                        let code = nccl!(ncclCommRevoke(rank.comm, 0));
                        assert!(matches!(code, 0 | 7), "{}", last_error());
                        assert_eq!(rank.settle(), 0);
                        let child = split(&rank, 0, 0);
                        assert_eq!(sum(&child, 3), 6);
                        assert_eq!(nccl!(ncclCommDestroy(child.comm)), 0);
                        assert_eq!(nccl!(ncclCommDestroy(rank.comm)), 0);
                    });
                }
            });
            let entered = &faults::at_call("ncclRecv").delay(Duration::ZERO);
            threads(2, |rank| {
                if rank.rank == 0 {
                    let handle = rank.comm.addr();
                    thread::scope(|inner| {
                        inner.spawn(move || {
                            assert!(entered.wait_for_hits(1, Duration::from_secs(20)));
                            thread::sleep(Duration::from_millis(100));
                            let comm = std::ptr::without_provenance_mut(handle);
                            assert_eq!(nccl!(ncclCommRevoke(comm, 0)), 0);
                        });
                        let memory = rank.memory(&[1i32]);
                        assert_eq!(rank.receive(&memory, Kind::ncclInt32, 1), 3);
                    });
                }
            });
        },
    );
}
