//! Growing a communicator: the old ranks, the new ranks, and the unique id that connects them.

mod ranks;

use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use nccl_sys::{ncclComm_t, ncclDataType_t as Kind, ncclRedOp_t as Op, ncclUniqueId};
use ranks::{Rank, alone, last_error, nccl, processes, threads, unique_id, wait_until};

fn sum(rank: &Rank, value: i32) -> i32 {
    let memory = rank.memory(&[value]);
    let code = rank.all_reduce(&memory, &memory, Kind::ncclInt32, Op::ncclSum);
    assert_eq!(code, 0, "{}", last_error());
    rank.sync();
    memory.read()[0]
}

/// Creates the grown communicator on an old rank.
fn grown(old: &Rank, ranks: i32, id: *const ncclUniqueId) -> Rank {
    let mut comm = null_mut();
    let config = null_mut();
    let code = nccl!(ncclCommGrow(old.comm, ranks, id, -1, &mut comm, config));
    assert_eq!(code, 0, "{}", last_error());
    Rank {
        rank: old.rank,
        ranks,
        comm,
        gpu: Arc::clone(&old.gpu),
        stream: Arc::clone(&old.stream),
    }
}

/// Creates the grown communicator on a new rank.
fn new(ranks: i32, rank: i32, id: &ncclUniqueId) -> Rank {
    let mut this = Rank::alone(ranks, rank);
    this.gpu.bind_to_thread().unwrap();
    let (comm, config) = (null_mut(), null_mut());
    let code = nccl!(ncclCommGrow(comm, ranks, id, rank, &mut this.comm, config));
    assert_eq!(code, 0, "{}", last_error());
    this
}

fn id_of(comm: ncclComm_t) -> ncclUniqueId {
    let mut id = ncclUniqueId::default();
    let code = nccl!(ncclCommGetUniqueId(comm, &mut id));
    assert_eq!(code, 0, "{}", last_error());
    id
}

#[test]
fn old_ranks_keep_their_numbers_and_new_ones_come_behind() {
    alone(
        "old_ranks_keep_their_numbers_and_new_ones_come_behind",
        &[],
        || {
            for (coordinator, old) in [(0, 1), (1, 3), (2, 3), (0, 4)] {
                let (first, total) = (unique_id(), old + 2);
                let handle: Mutex<Option<ncclUniqueId>> = Mutex::new(None);
                thread::scope(|scope| {
                    for rank in 0..total {
                        let handle = &handle;
                        scope.spawn(move || {
                            let grown = if rank < old {
                                let parent = Rank::join(first, old, rank);
                                let mut id = null();
                                let own;
                                if rank == coordinator {
                                    own = id_of(parent.comm);
                                    *handle.lock().unwrap() = Some(own);
                                    id = &own;
                                }
                                let grown = grown(&parent, total, id);
                                assert_eq!(sum(&parent, 1), old);
                                parent.destroy();
                                grown
                            } else {
                                wait_until("the id", || handle.lock().unwrap().is_some());
                                let id = handle.lock().unwrap().unwrap();
                                new(total, rank, &id)
                            };
                            let (mut own, mut count) = (0, 0);
                            assert_eq!(nccl!(ncclCommUserRank(grown.comm, &mut own)), 0);
                            assert_eq!(nccl!(ncclCommCount(grown.comm, &mut count)), 0);
                            assert_eq!((own, count), (rank, total));
                            assert_eq!(sum(&grown, rank), total * (total - 1) / 2);
                            grown.destroy();
                        });
                    }
                });
            }
        },
    );
}

#[test]
fn processes_grow_twice() {
    processes("processes_grow_twice", 4, &[], |process| {
        let mut parts = vec![(2, "first"), (3, "second"), (4, "third")].into_iter();
        let (ranks, name) = parts.next().unwrap();
        let mut current =
            (process.rank < ranks).then(|| Rank::join(process.id(name), ranks, process.rank));
        for (ranks, name) in parts {
            let next = match &current {
                Some(old) => {
                    // Rank 0 is the coordinator; `Process::id` would make an ordinary id.
                    if process.rank == 0 {
                        process.put_id(name, &id_of(old.comm));
                    }
                    grown(old, ranks, null())
                }
                None if process.rank < ranks => new(ranks, process.rank, &process.get_id(name)),
                None => continue,
            };
            if let Some(old) = current.replace(next) {
                old.destroy();
            }
            let current = current.as_ref().unwrap();
            assert_eq!(sum(current, 1), ranks);
        }
        current.unwrap().destroy();
    });
}

#[test]
fn what_a_grow_is_given_is_checked() {
    alone("what_a_grow_is_given_is_checked", &[], || {
        threads(1, |rank| {
            let id = unique_id();
            let mut comm: ncclComm_t = null_mut();
            let mut grow = |parent: ncclComm_t, ranks, id: *const ncclUniqueId, rank| {
                let code = nccl!(ncclCommGrow(parent, ranks, id, rank, &mut comm, null_mut()));
                assert!(comm.is_null());
                (code, last_error())
            };
            let error = |text: &str| (4, format!("ncclCommGrow: {text}"));
            assert_eq!(
                grow(rank.comm, 0, &id, -1),
                error("total ranks must be positive, got 0")
            );
            assert_eq!(
                grow(rank.comm, 1, &id, -1),
                error("total ranks 1 is less than current ranks 1")
            );
            assert_eq!(
                grow(rank.comm, 2, &id, 0),
                error("existing ranks must pass rank=-1, got 0")
            );
            assert_eq!(
                grow(null_mut(), 2, &id, -1),
                error("new ranks must pass valid rank >= 0, got -1")
            );
            assert_eq!(
                grow(null_mut(), 2, null(), 1),
                error("new ranks must pass non-NULL uniqueId")
            );
            assert_eq!(
                grow(null_mut(), 2, &id, 2),
                error("new rank 2 exceeds total ranks 2")
            );
            let code = nccl!(ncclCommGrow(rank.comm, 2, &id, -1, null_mut(), null_mut()));
            assert_eq!(code, 4);
            assert_eq!(nccl!(ncclCommGetUniqueId(rank.comm, null_mut())), 4);
        });
    });
}

#[test]
fn a_grow_without_its_coordinator_waits_until_an_abort() {
    alone(
        "a_grow_without_its_coordinator_waits_until_an_abort",
        &[],
        || {
            let id = unique_id();
            thread::scope(|scope| {
                for rank in 0..3 {
                    scope.spawn(move || {
                        let parent = Rank::join_nonblocking(id, 3, rank);
                        let handle = parent.comm.addr();
                        let mut comm = null_mut();
                        let aborted = AtomicBool::new(false);
                        thread::scope(|inner| {
                            let aborted = &aborted;
                            inner.spawn(move || {
                                thread::sleep(Duration::from_millis(500));
                                aborted.store(true, Ordering::SeqCst);
                                let parent = std::ptr::without_provenance_mut(handle);
                                assert_eq!(nccl!(ncclCommAbort(parent)), 0);
                            });
                            let code = nccl!(ncclCommGrow(
                                parent.comm,
                                4,
                                null(),
                                -1,
                                &mut comm,
                                null_mut()
                            ));
                            let late = aborted.load(Ordering::SeqCst);
                            // The first and the last rank wait in the call itself.
                            let waits = rank != 1;
                            assert_eq!(code, if waits { 3 } else { 0 }, "{}", last_error());
                            assert_eq!(late, waits);
                        });
                        if rank == 1 {
                            assert!(!comm.is_null());
                            assert_eq!(nccl!(ncclCommAbort(comm)), 0);
                        }
                    });
                }
            });
        },
    );
}

#[test]
fn an_abort_of_the_grown_communicator_ends_its_grow() {
    alone(
        "an_abort_of_the_grown_communicator_ends_its_grow",
        &[],
        || {
            let id = unique_id();
            let parent = Rank::join_nonblocking(id, 1, 0);
            let handle = id_of(parent.comm);
            let mut comm = null_mut();
            let code = nccl!(ncclCommGrow(
                parent.comm,
                2,
                &handle,
                -1,
                &mut comm,
                null_mut()
            ));
            assert_eq!(code, 0, "{}", last_error());
            assert!(!comm.is_null());
            let grown = Rank { comm, ..parent };
            thread::sleep(Duration::from_millis(50));
            assert_eq!(grown.state(), 7);
            assert_eq!(grown.abort(), 0);
        },
    );
}
