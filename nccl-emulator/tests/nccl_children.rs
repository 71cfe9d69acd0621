//! Communicators made of others: split, shrink, revoke.

mod ranks;

use std::ptr::null_mut;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use nccl_sys::{
    NCCL_CONFIG_INITIALIZER, NCCL_SHRINK_ABORT, NCCL_SPLIT_NOCOLOR, NCCL_SUSPEND_MEM, ncclComm_t,
    ncclCommMemStat_t as Stat, ncclConfig_t, ncclDataType_t as Kind, ncclRedOp_t as Op,
};
use ranks::{Rank, alone, last_error, nccl, processes, processes_ending, threads, unique_id};

fn config(change: impl FnOnce(&mut ncclConfig_t)) -> ncclConfig_t {
    let mut config = NCCL_CONFIG_INITIALIZER;
    change(&mut config);
    config
}

/// A parent of this configuration; its init is over.
fn parent(id: nccl_sys::ncclUniqueId, ranks: i32, rank: i32, mut config: ncclConfig_t) -> Rank {
    let mut this = Rank::alone(ranks, rank);
    let code = nccl!(ncclCommInitRankConfig(
        &mut this.comm,
        ranks,
        id,
        rank,
        &mut config
    ));
    assert!(matches!(code, 0 | 7), "{}", last_error());
    assert_eq!(this.settle(), 0, "{}", last_error());
    this
}

/// What a rank of a communicator says of itself, on the same device and stream as `of`.
fn described(of: &Rank, comm: ncclComm_t) -> Rank {
    let (mut rank, mut ranks) = (-1, -1);
    assert_eq!(nccl!(ncclCommUserRank(comm, &mut rank)), 0);
    assert_eq!(nccl!(ncclCommCount(comm, &mut ranks)), 0);
    Rank {
        rank,
        ranks,
        comm,
        gpu: Arc::clone(&of.gpu),
        stream: Arc::clone(&of.stream),
    }
}

/// Splits off a child with the parent's configuration.
fn split(parent: &Rank, color: i32, key: i32) -> Rank {
    let mut comm = null_mut();
    let code = nccl!(ncclCommSplit(
        parent.comm,
        color,
        key,
        &mut comm,
        null_mut()
    ));
    assert_eq!(code, 0, "{}", last_error());
    assert_eq!(parent.settle(), 0, "{}", last_error());
    described(parent, comm)
}

/// The sum of what each rank gives.
fn sum(rank: &Rank, value: i32) -> i32 {
    let memory = rank.memory(&[value]);
    let code = rank.all_reduce(&memory, &memory, Kind::ncclInt32, Op::ncclSum);
    assert!(matches!(code, 0 | 7), "{}", last_error());
    assert_eq!(rank.settle(), 0, "{}", last_error());
    rank.sync();
    memory.read()[0]
}

/// Six ranks: the even ones in reverse order, the odd ones without the last.
fn split_six(rank: &Rank) {
    let odd = rank.rank % 2;
    if rank.rank == 5 {
        let mut comm = std::ptr::dangling_mut();
        let code = nccl!(ncclCommSplit(
            rank.comm,
            NCCL_SPLIT_NOCOLOR,
            0,
            &mut comm,
            null_mut()
        ));
        assert_eq!(code, 0, "{}", last_error());
        assert!(comm.is_null());
    } else {
        let key = if odd == 1 { 0 } else { -rank.rank };
        let child = split(rank, odd, key);
        let expected = match rank.rank {
            4 => (0, 3, 6),
            2 => (1, 3, 6),
            0 => (2, 3, 6),
            1 => (0, 2, 4),
            _ => (1, 2, 4),
        };
        assert_eq!((child.rank, child.ranks, sum(&child, rank.rank)), expected);
        child.destroy();
    }
    // The parent is as it was, also for the one without a child.
    assert_eq!(sum(rank, rank.rank), 15);
}

#[test]
fn a_split_orders_each_color_by_key_and_then_by_rank() {
    alone(
        "a_split_orders_each_color_by_key_and_then_by_rank",
        &[],
        || {
            threads(6, |rank| {
                for _ in 0..5 {
                    split_six(rank);
                }
            });
        },
    );
}

#[test]
fn processes_split() {
    processes("processes_split", 6, &[], |process| {
        let rank = process.join();
        for _ in 0..3 {
            split_six(&rank);
        }
        rank.destroy();
    });
}

#[test]
fn a_split_of_a_nonblocking_parent_is_polled_on_the_parent() {
    alone(
        "a_split_of_a_nonblocking_parent_is_polled_on_the_parent",
        &[],
        || {
            let id = unique_id();
            thread::scope(|scope| {
                for rank in 0..2 {
                    scope.spawn(move || {
                        let parent = Rank::join_nonblocking(id, 2, rank);
                        if rank == 1 {
                            thread::sleep(Duration::from_millis(100));
                        }
                        let mut own = config(|config| config.blocking = 1);
                        let mut comm = null_mut();
                        // Success: the state is where progress is to be seen.
                        assert_eq!(
                            nccl!(ncclCommSplit(parent.comm, 0, -rank, &mut comm, &mut own)),
                            0
                        );
                        if rank == 0 {
                            assert_eq!(parent.state(), 7);
                            let mut count = 0;
                            assert_eq!(nccl!(ncclCommCount(parent.comm, &mut count)), 4);
                        }
                        assert_eq!(parent.settle(), 0, "{}", last_error());
                        let child = described(&parent, comm);
                        assert_eq!((child.rank, child.ranks), (1 - rank, 2));
                        // A blocking communicator answers at once.
                        let memory = child.memory(&[1i32]);
                        let code = child.all_reduce(&memory, &memory, Kind::ncclInt32, Op::ncclSum);
                        assert_eq!(code, 0);
                        child.sync();
                        assert_eq!(memory.read(), [2]);
                        assert_eq!(nccl!(ncclCommDestroy(parent.comm)), 0);
                        // The child has all of its own.
                        assert_eq!(sum(&child, 5), 10);
                        child.destroy();
                    });
                }
            });
        },
    );
}

#[test]
fn an_abort_of_the_parent_ends_a_split_that_waits_for_a_rank() {
    alone(
        "an_abort_of_the_parent_ends_a_split_that_waits_for_a_rank",
        &[],
        || {
            let id = unique_id();
            thread::scope(|scope| {
                scope.spawn(move || {
                    let absent = Rank::join_nonblocking(id, 2, 1);
                    thread::sleep(Duration::from_millis(300));
                    assert_eq!(absent.abort(), 0);
                });
                scope.spawn(move || {
                    let parent = Rank::join_nonblocking(id, 2, 0);
                    let mut comm = null_mut();
                    assert_eq!(
                        nccl!(ncclCommSplit(parent.comm, 0, 0, &mut comm, null_mut())),
                        0
                    );
                    thread::sleep(Duration::from_millis(100));
                    assert_eq!(parent.state(), 7);
                    assert_eq!(parent.abort(), 0);
                    // What was not made is handed out all the same, to be aborted.
                    assert!(!comm.is_null());
                    assert_eq!(nccl!(ncclCommAbort(comm)), 0);
                });
            });
            assert!(nccl_emulator::violations().is_empty());
        },
    );
}

#[test]
fn an_abort_of_a_parent_that_shares_frees_a_thread_inside_its_child() {
    alone(
        "an_abort_of_a_parent_that_shares_frees_a_thread_inside_its_child",
        &[],
        || {
            let id = unique_id();
            thread::scope(|scope| {
                for rank in 0..2 {
                    scope.spawn(move || {
                        let sharing = config(|config| {
                            config.blocking = 0;
                            config.splitShare = 1;
                        });
                        let parent = parent(id, 2, rank, sharing);
                        let mut own = config(|config| config.blocking = 1);
                        let mut comm = null_mut();
                        assert_eq!(
                            nccl!(ncclCommSplit(parent.comm, 0, rank, &mut comm, &mut own)),
                            0
                        );
                        assert_eq!(parent.settle(), 0, "{}", last_error());
                        let child = described(&parent, comm);
                        if rank == 0 {
                            let handle = parent.comm.addr();
                            thread::scope(|inner| {
                                inner.spawn(move || {
                                    thread::sleep(Duration::from_millis(200));
                                    let parent = std::ptr::without_provenance_mut(handle);
                                    assert_eq!(nccl!(ncclCommAbort(parent)), 0);
                                });
                                // Connects for the first time, to a rank that never does.
                                let memory = child.memory(&[1i32]);
                                assert_eq!(child.receive(&memory, Kind::ncclInt32, 1), 3);
                            });
                        } else {
                            thread::sleep(Duration::from_millis(200));
                            assert_eq!(parent.abort(), 0);
                        }
                        // Nobody is inside any more.
                        assert_eq!(child.abort(), 0);
                    });
                }
            });
            assert!(
                nccl_emulator::violations().is_empty(),
                "{:?}",
                nccl_emulator::violations()
            );
        },
    );
}

#[test]
fn it_is_the_parents_config_that_decides_what_is_shared() {
    alone(
        "it_is_the_parents_config_that_decides_what_is_shared",
        &[],
        || {
            threads(1, |rank| {
                // The child's wish does not count, and the parent has none.
                let mut wish = config(|config| config.splitShare = 1);
                let mut comm = null_mut();
                assert_eq!(
                    nccl!(ncclCommSplit(rank.comm, 0, 0, &mut comm, &mut wish)),
                    0
                );
                let child = described(rank, comm);
                // But its own children share with it.
                let grandchild = split(&child, 0, 0);
                assert_eq!(child.abort(), 0);
                // A rank alone copies, unless it is aborted.
                for (of, copied) in [(rank, 1), (&grandchild, 0)] {
                    let (from, to) = (of.memory(&[1i32]), of.memory(&[0i32]));
                    let code = of.all_reduce(&from, &to, Kind::ncclInt32, Op::ncclSum);
                    assert_eq!(code, 0, "{}", last_error());
                    of.sync();
                    assert_eq!(to.read(), [copied]);
                }
                assert_eq!(grandchild.abort(), 0);
            });
        },
    );
}

#[test]
fn a_shared_flag_stops_the_launches_of_the_family_and_an_own_one_does_not() {
    for share in [0, 1] {
        let name = "a_shared_flag_stops_the_launches_of_the_family_and_an_own_one_does_not";
        let value = share.to_string();
        alone(
            name,
            &[("NCCL_COMM_SPLIT_SHARE_RESOURCES", value.as_str())],
            || {
                let id = unique_id();
                let share = std::env::var("NCCL_COMM_SPLIT_SHARE_RESOURCES").unwrap() == "1";
                thread::scope(|scope| {
                    for rank in 0..2 {
                        scope.spawn(move || {
                            let parent = parent(id, 2, rank, NCCL_CONFIG_INITIALIZER);
                            let child = split(&parent, 0, 0);
                            assert_eq!(sum(&child, 1), 2);
                            if rank == 0 {
                                let memory = child.memory(&[1i32]);
                                let code = child.all_reduce(
                                    &memory,
                                    &memory,
                                    Kind::ncclInt32,
                                    Op::ncclSum,
                                );
                                assert_eq!(code, 0);
                                thread::sleep(Duration::from_millis(50));
                                assert!(!child.is_idle());
                                assert_eq!(parent.abort(), 0);
                                if share {
                                    child.sync();
                                } else {
                                    thread::sleep(Duration::from_millis(100));
                                    assert!(!child.is_idle());
                                }
                                assert_eq!(child.abort(), 0);
                            } else {
                                thread::sleep(Duration::from_millis(300));
                                assert_eq!(parent.abort(), 0);
                                assert_eq!(child.abort(), 0);
                            }
                        });
                    }
                });
            },
        );
    }
}

#[test]
fn a_failed_split_in_a_group_is_told_at_its_end() {
    alone("a_failed_split_in_a_group_is_told_at_its_end", &[], || {
        threads(1, |rank| {
            let mut comm = null_mut();
            assert_eq!(nccl!(ncclGroupStart()), 0);
            let code = nccl!(ncclCommSplit(null_mut(), 0, 0, &mut comm, null_mut()));
            assert_eq!(code, 4);
            assert_eq!(last_error(), "ncclCommSplit : comm argument is NULL");
            assert_eq!(nccl!(ncclGroupEnd()), 4);
            let code = nccl!(ncclCommSplit(rank.comm, 0, 0, null_mut(), null_mut()));
            assert_eq!(code, 4);
            let mut bad = config(|config| config.magic = 1);
            assert_eq!(
                nccl!(ncclCommSplit(rank.comm, 0, 0, &mut comm, &mut bad)),
                4
            );
            // In a group the child is there at its end, not before.
            assert_eq!(nccl!(ncclGroupStart()), 0);
            let code = nccl!(ncclCommSplit(rank.comm, 7, 0, &mut comm, null_mut()));
            assert_eq!(code, 0);
            assert!(comm.is_null());
            assert_eq!(nccl!(ncclGroupEnd()), 0, "{}", last_error());
            described(rank, comm).destroy();
            let code = nccl!(ncclCommSplit(comm, 0, 0, &mut comm, null_mut()));
            assert_eq!(code, 4);
            assert_eq!(nccl_emulator::violations().len(), 1);
        });
    });
}

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
        if process.rank == 1 {
            std::process::abort();
        }
        // Waits for the rank that is gone.
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
                // What ran is over.
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
                            // Connects for the first time, to a rank that never does.
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
            threads(2, |rank| {
                if rank.rank == 0 {
                    let handle = rank.comm.addr();
                    thread::scope(|inner| {
                        inner.spawn(move || {
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
            threads(2, |rank| {
                assert_eq!(nccl!(ncclCommResume(rank.comm)), 5);
                assert_eq!(last_error(), "MemManager: Not in suspended state");
                // Nothing to suspend is nothing to wait for.
                assert_eq!(nccl!(ncclCommSuspend(rank.comm, 0)), 0);
                assert!(!is_suspended(rank));
                if rank.rank == 1 {
                    thread::sleep(Duration::from_millis(100));
                }
                let start = std::time::Instant::now();
                assert_eq!(nccl!(ncclCommSuspend(rank.comm, NCCL_SUSPEND_MEM)), 0);
                assert!(rank.rank == 1 || start.elapsed() > Duration::from_millis(50));
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
