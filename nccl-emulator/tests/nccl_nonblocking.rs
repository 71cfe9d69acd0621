//! Non-blocking communicators: which operations are in progress, when they run, and how they affect other
//! calls.

mod ranks;

use std::ptr::null_mut;
use std::sync::Barrier;
use std::thread;
use std::time::Duration;

use nccl_sys::{NCCL_CONFIG_INITIALIZER, ncclDataType_t as Kind, ncclRedOp_t as Op};
use ranks::{Rank, alone, last_error, nccl, unique_id, wait_until};

/// Runs `body` for each rank of a non-blocking communicator.
fn nonblocking(ranks: i32, body: impl Fn(&Rank) + Sync) {
    let id = unique_id();
    thread::scope(|scope| {
        for rank in 0..ranks {
            let body = &body;
            scope.spawn(move || {
                let rank = Rank::join_nonblocking(id, ranks, rank);
                body(&rank);
                assert_eq!(nccl!(ncclCommDestroy(rank.comm)), 0, "{}", last_error());
            });
        }
    });
}

#[test]
fn a_group_is_in_progress_until_it_is_polled_to_success() {
    alone(
        "a_group_is_in_progress_until_it_is_polled_to_success",
        &[],
        || {
            nonblocking(2, |rank| {
                let peer = 1 - rank.rank;
                let (from, to) = (rank.memory(&[rank.rank; 100]), rank.memory(&[9i32; 100]));
                for _ in 0..200 {
                    assert_eq!(nccl!(ncclGroupStart()), 0);
                    // Returns success: inside the group nothing has begun.
                    assert_eq!(rank.send(&from, Kind::ncclInt32, peer), 0);
                    assert_eq!(rank.receive(&to, Kind::ncclInt32, peer), 0);
                    assert_eq!(nccl!(ncclGroupEnd()), 7);
                    assert_eq!(rank.settle(), 0, "{}", last_error());
                }
                rank.sync();
                assert_eq!(to.read(), [peer; 100]);
                assert_eq!(rank.all_reduce(&from, &to, Kind::ncclInt32, Op::ncclSum), 7);
                assert_eq!(rank.settle(), 0);
                rank.sync();
                assert_eq!(to.read(), [1; 100]);
            });
        },
    );
}

#[test]
fn nothing_is_on_the_stream_before_the_poll() {
    alone("nothing_is_on_the_stream_before_the_poll", &[], || {
        nonblocking(1, |rank| {
            let (from, to) = (rank.memory(&[5u8; 100]), rank.memory(&[0u8; 100]));
            assert_eq!(nccl!(ncclGroupStart()), 0);
            assert_eq!(rank.send(&from, Kind::ncclUint8, 0), 0);
            assert_eq!(rank.receive(&to, Kind::ncclUint8, 0), 0);
            assert_eq!(nccl!(ncclGroupEnd()), 7);
            // The stream is still empty, so this wait returns at once.
            rank.sync();
            assert_eq!(to.read(), [0; 100]);
            assert_eq!(rank.settle(), 0);
            rank.sync();
            assert_eq!(to.read(), [5; 100]);
        });
    });
}

#[test]
fn what_nobody_polls_begins_a_little_later() {
    alone("what_nobody_polls_begins_a_little_later", &[], || {
        nonblocking(2, |rank| {
            let memory = rank.memory(&[1u64; 10]);
            for turn in 1..4 {
                assert_eq!(
                    rank.all_reduce(&memory, &memory, Kind::ncclUint64, Op::ncclSum),
                    7
                );
                wait_until("it has run by itself", || memory.read() == [1 << turn; 10]);
                assert_eq!(rank.settle(), 0);
                // Longer than the timer's patience.
                thread::sleep(Duration::from_millis(if turn == 2 { 100 } else { 0 }));
            }
        });
    });
}

#[test]
fn every_other_call_is_refused_while_in_progress() {
    alone("every_other_call_is_refused_while_in_progress", &[], || {
        let text = "Attempt to use communicator before the previous operation returned ncclSuccess";
        let id = unique_id();
        let refused = &Barrier::new(2);
        thread::scope(|scope| {
            for rank in 0..2 {
                scope.spawn(move || {
                    let rank = Rank::join_nonblocking(id, 2, rank);
                    if rank.rank == 1 {
                        // The other rank's receive is the first message between the two: it waits for this rank to connect.
                        refused.wait();
                        let from = rank.memory(&[1u8]);
                        assert_eq!(rank.send(&from, Kind::ncclUint8, 0), 7);
                        assert_eq!(rank.settle(), 0);
                        rank.sync();
                        rank.destroy();
                        return;
                    }
                    let to = rank.memory(&[0u8]);
                    assert_eq!(rank.receive(&to, Kind::ncclUint8, 1), 7);
                    let mut number = 0;
                    assert_eq!(nccl!(ncclCommCount(rank.comm, &mut number)), 4);
                    assert_eq!(last_error(), text);
                    assert_eq!(nccl!(ncclCommUserRank(rank.comm, &mut number)), 4);
                    assert_eq!(rank.state(), 7);
                    // NCCL lets this failure hide the state until the work is over.
                    assert_eq!(rank.receive(&to, Kind::ncclUint8, 1), 4);
                    assert_eq!(rank.state(), 4);
                    refused.wait();
                    wait_until("the receive is launched", || rank.state() == 0);
                    rank.sync();
                    assert_eq!(to.read(), [1]);
                    rank.destroy();
                });
            }
        });
    });
}

#[test]
fn an_error_stays_until_the_communicator_is_aborted() {
    alone(
        "an_error_stays_until_the_communicator_is_aborted",
        &[],
        || {
            let rank = Rank::join_nonblocking(unique_id(), 1, 0);
            let memory = rank.memory(&[0u8]);
            assert_eq!(rank.send(&memory, Kind::ncclUint8, 3), 4);
            assert_eq!(rank.state(), 4);
            assert_eq!(nccl!(ncclCommCount(rank.comm, &mut 0)), 4);
            // Destroying it fails as well, and leaves the thread inside a group.
            assert_eq!(nccl!(ncclCommDestroy(rank.comm)), 4);
            assert_eq!([nccl!(ncclGroupEnd()), nccl!(ncclGroupEnd())], [0, 5]);
            assert_eq!(nccl!(ncclCommAbort(rank.comm)), 0);
            assert_eq!(nccl!(ncclGroupEnd()), 5);
        },
    );
}

#[test]
fn a_first_message_without_its_peer_stays_in_progress_until_aborted() {
    alone(
        "a_first_message_without_its_peer_stays_in_progress_until_aborted",
        &[],
        || {
            let id = unique_id();
            thread::scope(|scope| {
                for rank in 0..2 {
                    scope.spawn(move || {
                        let rank = Rank::join_nonblocking(id, 2, rank);
                        let memory = rank.memory(&[0u8]);
                        if rank.rank == 0 {
                            assert_eq!(rank.send(&memory, Kind::ncclUint8, 1), 7);
                            thread::sleep(Duration::from_millis(50));
                            assert_eq!(rank.state(), 7);
                            assert!(rank.is_idle());
                        }
                        assert_eq!(nccl!(ncclCommAbort(rank.comm)), 0);
                        rank.sync();
                    });
                }
            });
            assert!(nccl_emulator::violations().is_empty());
        },
    );
}

#[test]
fn an_abort_of_one_communicator_ends_the_group_of_both() {
    let test = "an_abort_of_one_communicator_ends_the_group_of_both";
    alone(test, &[], || {
        // In both orders: the group waits for one of them before the other.
        for abort_second in [false, true] {
            let ids = [unique_id(), unique_id()];
            thread::scope(|scope| {
                for rank in 0..2 {
                    scope.spawn(move || {
                        let both = ids.map(|id| Rank::join_nonblocking(id, 2, rank));
                        let memory = both.each_ref().map(|rank| rank.memory(&[0u8]));
                        let order = [
                            &both[usize::from(abort_second)],
                            &both[usize::from(!abort_second)],
                        ];
                        if rank == 0 {
                            assert_eq!(nccl!(ncclGroupStart()), 0);
                            for (rank, memory) in both.iter().zip(&memory) {
                                assert_eq!(rank.send(memory, Kind::ncclUint8, 1), 0);
                            }
                            assert_eq!(nccl!(ncclGroupEnd()), 7);
                            assert_eq!(order[1].state(), 7);
                            thread::sleep(Duration::from_millis(50));
                            assert_eq!(order[0].abort(), 0);
                            // ncclInternalError, as in NCCL: its flag is up as well.
                            assert_eq!(order[1].settle(), 3, "{}", last_error());
                            assert_eq!(order[1].abort(), 0);
                        } else {
                            order.iter().for_each(|rank| assert_eq!(rank.abort(), 0));
                        }
                        both.iter().for_each(Rank::sync);
                    });
                }
            });
        }
        assert!(nccl_emulator::violations().is_empty());
    });
}

#[test]
fn an_abort_before_the_poll_drops_the_group() {
    alone("an_abort_before_the_poll_drops_the_group", &[], || {
        let rank = Rank::join_nonblocking(unique_id(), 1, 0);
        let (from, to) = (rank.memory(&[5u8; 100]), rank.memory(&[0u8; 100]));
        assert_eq!(nccl!(ncclGroupStart()), 0);
        assert_eq!(rank.send(&from, Kind::ncclUint8, 0), 0);
        assert_eq!(rank.receive(&to, Kind::ncclUint8, 0), 0);
        assert_eq!(nccl!(ncclGroupEnd()), 7);
        assert_eq!(nccl!(ncclCommAbort(rank.comm)), 0);
        rank.sync();
        assert_eq!(to.read(), [0; 100]);
    });
}

#[test]
fn blocking_and_nonblocking_communicators_do_not_mix_in_a_group_of_jobs() {
    let test = "blocking_and_nonblocking_communicators_do_not_mix_in_a_group_of_jobs";
    alone(test, &[], || {
        let mut config = NCCL_CONFIG_INITIALIZER;
        config.blocking = 0;
        let (mut first, mut second) = (null_mut(), null_mut());
        let ids = [unique_id(), unique_id()];
        assert_eq!(nccl!(ncclGroupStart()), 0);
        assert_eq!(nccl!(ncclCommInitRank(&mut first, 1, ids[0], 0)), 0);
        assert_eq!(
            nccl!(ncclCommInitRankConfig(
                &mut second,
                1,
                ids[1],
                0,
                &mut config
            )),
            4
        );
        let text = "Blocking and nonblocking communicators are not allowed in the same group.";
        assert_eq!(last_error(), text);
        assert_eq!(nccl!(ncclGroupEnd()), 4);
        assert_eq!(nccl!(ncclCommAbort(first)), 0);
    });
}

#[test]
fn a_nonblocking_finalize_and_destroy() {
    alone("a_nonblocking_finalize_and_destroy", &[], || {
        let id = unique_id();
        thread::scope(|scope| {
            for rank in 0..2 {
                scope.spawn(move || {
                    let rank = Rank::join_nonblocking(id, 2, rank);
                    let memory = rank.memory(&[1u8]);
                    assert_eq!(
                        rank.all_reduce(&memory, &memory, Kind::ncclUint8, Op::ncclSum),
                        7
                    );
                    assert_eq!(rank.settle(), 0);
                    let code = nccl!(ncclCommFinalize(rank.comm));
                    assert!(matches!(code, 0 | 7), "{code}");
                    assert_eq!(rank.settle(), 0);
                    // It was flushed.
                    assert!(rank.is_idle());
                    assert_eq!(nccl!(ncclCommFinalize(rank.comm)), 4);
                    assert_eq!(nccl!(ncclCommAbort(rank.comm)), 0);
                });
            }
        });
    });
}
