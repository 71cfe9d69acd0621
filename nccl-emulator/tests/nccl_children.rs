//! Child communicators: splits, and the resources that they share with their parent.

mod ranks;

use std::ptr::null_mut;
use std::sync::Barrier;
use std::thread;
use std::time::Duration;

use nccl_sys::{
    NCCL_CONFIG_INITIALIZER, NCCL_SPLIT_NOCOLOR, ncclDataType_t as Kind, ncclRedOp_t as Op,
};
use ranks::children::{config, described, parent, split, sum};
use ranks::{Rank, alone, last_error, nccl, processes, threads, unique_id};

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
    // The parent still works, also for the rank without a child.
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
            let looked = &Barrier::new(2);
            thread::scope(|scope| {
                for rank in 0..2 {
                    scope.spawn(move || {
                        let parent = Rank::join_nonblocking(id, 2, rank);
                        if rank == 1 {
                            looked.wait();
                        }
                        let mut own = config(|config| config.blocking = 1);
                        let mut comm = null_mut();
                        // The call returns success: only the state shows that the split is in progress.
                        assert_eq!(
                            nccl!(ncclCommSplit(parent.comm, 0, -rank, &mut comm, &mut own)),
                            0
                        );
                        if rank == 0 {
                            assert_eq!(parent.state(), 7);
                            let mut count = 0;
                            assert_eq!(nccl!(ncclCommCount(parent.comm, &mut count)), 4);
                            looked.wait();
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
                        // The child does not depend on the destroyed parent.
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
                    // The handle of the incomplete child is written all the same, and has to be aborted.
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
                                // The first message connects to rank 1, which never connects.
                                let memory = child.memory(&[1i32]);
                                assert_eq!(child.receive(&memory, Kind::ncclInt32, 1), 3);
                            });
                        } else {
                            thread::sleep(Duration::from_millis(200));
                            assert_eq!(parent.abort(), 0);
                        }
                        // No thread is inside a call any more.
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
                // The child's own `splitShare` has no effect, and the parent's is not set.
                let mut wish = config(|config| config.splitShare = 1);
                let mut comm = null_mut();
                assert_eq!(
                    nccl!(ncclCommSplit(rank.comm, 0, 0, &mut comm, &mut wish)),
                    0
                );
                let child = described(rank, comm);
                // The child's children do share with it.
                let grandchild = split(&child, 0, 0);
                assert_eq!(child.abort(), 0);
                // A single rank copies its data, unless its communicator is aborted.
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
            // In a group, the child's handle is written at the end of the group, not before.
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
