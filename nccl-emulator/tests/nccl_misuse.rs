//! Misuse: what the emulator detects, which rank gets the error, and what hangs as it hangs in NCCL.

mod ranks;

use std::ptr::null_mut;
use std::thread;
use std::time::Duration;

use cudarc::driver::sys;
use nccl_emulator::{ViolationKind, faults, violations};
use nccl_sys::{ncclDataType_t as Kind, ncclRedOp_t as Op};
use ranks::{
    Rank, alone, last_error, nccl, processes, processes_ending, threads, unique_id, wait_until,
};

const STRICT: [(&str, &str); 1] = [("NCCL_EMULATOR_STRICT", "1")];

#[test]
fn a_communicator_that_was_destroyed_is_recognised() {
    alone(
        "a_communicator_that_was_destroyed_is_recognised",
        &[],
        || {
            let rank = Rank::join(unique_id(), 1, 0);
            let memory = rank.memory(&[0u8]);
            assert_eq!(nccl!(ncclCommDestroy(rank.comm)), 0);
            assert_eq!(
                rank.all_reduce(&memory, &memory, Kind::ncclUint8, Op::ncclSum),
                4
            );
            assert_eq!(last_error(), "Error: corrupted comm object detected");
            assert_eq!(nccl!(ncclCommCount(rank.comm, &mut 0)), 4);
            assert_eq!(nccl!(ncclCommAbort(rank.comm)), 4);
            assert_eq!(nccl!(ncclCommDestroy(rank.comm)), 4);
            assert!(
                last_error().ends_with("has already been destroyed"),
                "{}",
                last_error()
            );
            let found = violations();
            assert_eq!(found.len(), 4);
            assert!(
                found
                    .iter()
                    .all(|violation| violation.kind() == ViolationKind::UseAfterDestroy)
            );
            // The second destroy leaves the thread inside a group, as NCCL's does.
            assert_eq!([nccl!(ncclGroupEnd()), nccl!(ncclGroupEnd())], [0, 5]);
        },
    );
}

#[test]
fn aborting_a_blocking_communicator_under_a_thread_is_a_violation() {
    let test = "aborting_a_blocking_communicator_under_a_thread_is_a_violation";
    alone(test, &[], || {
        let id = unique_id();
        let ranks = [0, 1].map(|rank| thread::spawn(move || Rank::join(id, 2, rank)));
        let [first, second] = ranks.map(|rank| rank.join().unwrap());
        let first = &first;
        let entered = faults::at_call("ncclSend").delay(Duration::ZERO);
        thread::scope(|scope| {
            // The first message to a peer waits on the host until the peer connects.
            let inside = scope.spawn(move || {
                let memory = first.memory(&[1u8]);
                first.send(&memory, Kind::ncclUint8, 1)
            });
            assert!(entered.wait_for_hits(1, Duration::from_secs(20)));
            thread::sleep(Duration::from_millis(50));
            assert!(!inside.is_finished());
            assert_eq!(nccl!(ncclCommAbort(first.comm)), 0);
            assert_eq!(inside.join().unwrap(), 3);
            let found = violations();
            assert_eq!(found.len(), 1);
            assert!(
                found[0]
                    .to_string()
                    .contains("NCCL frees it under that thread"),
                "{}",
                found[0]
            );
            assert_eq!(nccl!(ncclCommAbort(second.comm)), 0);
        });
    });
}

/// Waits for the error of a context, and returns the text of the violation.
fn failure(rank: &Rank) -> String {
    rank.gpu.bind_to_thread().unwrap();
    wait_until("the context has failed", || {
        rank.stream.synchronize().is_err()
    });
    violations()[0].to_string()
}

#[test]
fn bad_memory_fails_the_context_of_the_stream_that_uses_it() {
    let test = "bad_memory_fails_the_context_of_the_stream_that_uses_it";
    alone(test, &[], || {
        let rank = Rank::join(unique_id(), 1, 0);
        let (from, to) = (rank.memory(&[0u8; 100]), rank.memory(&[0u8; 100]));
        from.free();
        for in_group in [false, true] {
            let (mut context, mut stream) = (null_mut(), null_mut());
            // SAFETY: places for a context, which becomes current, and for a stream of it.
            let made = unsafe {
                [
                    sys::cuCtxCreate_v4(&mut context, null_mut(), 0, 0),
                    sys::cuStreamCreate(&mut stream, 1),
                ]
            };
            assert_eq!(made, [sys::CUresult::CUDA_SUCCESS; 2]);
            let (kind, cuda_stream) = (Kind::ncclUint8, stream.cast());
            let (send, receive) = (from.ptr(), to.ptr());
            match in_group {
                false => {
                    let sum = Op::ncclSum;
                    assert_eq!(
                        nccl!(ncclAllReduce(
                            send,
                            receive,
                            100,
                            kind,
                            sum,
                            rank.comm,
                            cuda_stream
                        )),
                        0
                    );
                }
                true => {
                    assert_eq!(nccl!(ncclGroupStart()), 0);
                    assert_eq!(
                        nccl!(ncclSend(send, 100, kind, 0, rank.comm, cuda_stream)),
                        0
                    );
                    assert_eq!(
                        nccl!(ncclRecv(receive, 100, kind, 0, rank.comm, cuda_stream)),
                        0
                    );
                    assert_eq!(nccl!(ncclGroupEnd()), 0);
                }
            }
            // SAFETY: the stream lives.
            let ended = unsafe { sys::cuStreamSynchronize(stream) };
            assert_eq!(ended, sys::CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
            rank.gpu.bind_to_thread().unwrap();
            rank.stream
                .synchronize()
                .expect("the primary context has no part in it");
        }
        rank.destroy();
    });
}

#[test]
fn a_host_pointer_is_an_illegal_address() {
    alone("a_host_pointer_is_an_illegal_address", &[], || {
        let rank = Rank::join(unique_id(), 1, 0);
        let host = [0u8; 100];
        let to = rank.memory(&[0u8; 100]);
        let (from, stream) = (host.as_ptr().cast(), rank.cuda_stream());
        let (kind, sum) = (Kind::ncclUint8, Op::ncclSum);
        // The call itself does not check the address.
        assert_eq!(
            nccl!(ncclAllReduce(
                from,
                to.ptr(),
                100,
                kind,
                sum,
                rank.comm,
                stream
            )),
            0
        );
        let text = failure(&rank);
        assert!(text.starts_with("AllReduce on comm 0x"), "{text}");
        let error = rank.stream.synchronize().unwrap_err();
        assert!(
            format!("{error:?}").contains("ILLEGAL_ADDRESS"),
            "{error:?}"
        );
    });
}

#[test]
fn memory_of_another_device_is_an_illegal_address() {
    alone(
        "memory_of_another_device_is_an_illegal_address",
        &[],
        || {
            let rank = Rank::join(unique_id(), 1, 0);
            let other = Rank::alone(2, 1);
            let (from, to) = (other.memory(&[0u8; 100]), rank.memory(&[0u8; 100]));
            assert_eq!(rank.all_reduce(&from, &to, Kind::ncclUint8, Op::ncclSum), 0);
            let text = failure(&rank);
            assert!(
                text.contains("is memory of device 1, the communicator's is 0"),
                "{text}"
            );
        },
    );
}

#[test]
fn a_count_beyond_the_allocation_is_an_illegal_address() {
    alone(
        "a_count_beyond_the_allocation_is_an_illegal_address",
        &[],
        || {
            let rank = Rank::join(unique_id(), 1, 0);
            let (from, to) = (rank.memory(&[0u8; 100]), rank.memory(&[0u8; 101]));
            let (kind, stream) = (Kind::ncclUint8, rank.cuda_stream());
            assert_eq!(nccl!(ncclGroupStart()), 0);
            assert_eq!(
                nccl!(ncclSend(from.ptr(), 101, kind, 0, rank.comm, stream)),
                0
            );
            assert_eq!(
                nccl!(ncclRecv(to.ptr(), 101, kind, 0, rank.comm, stream)),
                0
            );
            assert_eq!(nccl!(ncclGroupEnd()), 0);
            let text = failure(&rank);
            assert!(text.contains("101 bytes at offset 0"), "{text}");
        },
    );
}

#[test]
fn memory_that_is_freed_while_a_peer_is_awaited_fails_its_own_rank_only() {
    let test = "memory_that_is_freed_while_a_peer_is_awaited_fails_its_own_rank_only";
    processes(test, 2, &[], |process| {
        let rank = process.join();
        // Connect first: the exchange below has to wait on the streams, not on the host.
        let warm = rank.memory(&[0u8; 2]);
        let warm_to = rank.memory(&[0u8; 2]);
        assert_eq!(rank.all_to_all(&warm, &warm_to, Kind::ncclUint8), 0);
        rank.sync();
        let memory = rank.memory(&[1u8; 100_000]);
        if rank.rank == 0 {
            assert_eq!(rank.receive(&memory, Kind::ncclUint8, 1), 0);
            // By now the receive is posted.
            thread::sleep(Duration::from_millis(50));
            memory.free_under_work();
            process.mark("freed");
            let text = failure(&rank);
            assert!(text.contains("allocation #"), "{text}");
            assert!(text.contains("freed"), "{text}");
            process.mark("failed");
        } else {
            process.wait_for("freed");
            assert_eq!(rank.send(&memory, Kind::ncclUint8, 0), 0);
            process.wait_for("failed");
            // The sender's kernel waits for a receiver that is dead.
            thread::sleep(Duration::from_millis(50));
            assert!(!rank.is_idle());
            assert!(violations().is_empty());
            assert_eq!(nccl!(ncclCommAbort(rank.comm)), 0);
            rank.sync();
        }
    });
}

#[test]
fn memory_that_a_peer_freed_under_a_collective_fails_the_peer() {
    let test = "memory_that_a_peer_freed_under_a_collective_fails_the_peer";
    processes(test, 2, &[], |process| {
        let rank = process.join();
        let memory = rank.memory(&[1u32; 1000]);
        assert_eq!(
            rank.all_reduce(&memory, &memory, Kind::ncclUint32, Op::ncclSum),
            0
        );
        rank.sync();
        if rank.rank == 0 {
            assert_eq!(
                rank.all_reduce(&memory, &memory, Kind::ncclUint32, Op::ncclSum),
                0
            );
            thread::sleep(Duration::from_millis(50));
            memory.free_under_work();
            process.mark("freed");
            let text = failure(&rank);
            assert!(text.starts_with("AllReduce on comm 0x"), "{text}");
        } else {
            process.wait_for("freed");
            assert_eq!(
                rank.all_reduce(&memory, &memory, Kind::ncclUint32, Op::ncclSum),
                0
            );
            thread::sleep(Duration::from_millis(100));
            assert!(!rank.is_idle());
            assert_eq!(nccl!(ncclCommAbort(rank.comm)), 0);
            rank.sync();
        }
    });
}

/// Connects the two ranks.
fn warm_up(rank: &Rank) {
    let (from, to) = (rank.memory(&[0u8; 2]), rank.memory(&[0u8; 2]));
    assert_eq!(rank.all_to_all(&from, &to, Kind::ncclUint8), 0);
    rank.sync();
}

/// Rank 0 sends more than rank 1 receives.
fn unequal(rank: &Rank) {
    warm_up(rank);
    if rank.rank == 0 {
        let from = rank.memory(&[1u32; 1000]);
        assert_eq!(rank.send(&from, Kind::ncclUint32, 1), 0);
    } else {
        let to = rank.memory(&[0u32; 999]);
        assert_eq!(rank.receive(&to, Kind::ncclUint32, 0), 0);
    }
}

#[test]
fn sizes_that_differ_hang_with_one_line() {
    alone("sizes_that_differ_hang_with_one_line", &[], || {
        let id = unique_id();
        thread::scope(|scope| {
            for rank in 0..2 {
                scope.spawn(move || {
                    let rank = Rank::join(id, 2, rank);
                    unequal(&rank);
                    wait_until("somebody noticed", || !violations().is_empty());
                    thread::sleep(Duration::from_millis(50));
                    assert!(!rank.is_idle());
                    assert_eq!(rank.state(), 0);
                    assert_eq!(nccl!(ncclCommAbort(rank.comm)), 0);
                    rank.sync();
                });
            }
        });
        let found = violations();
        assert_eq!(found.len(), 1, "{found:?}");
        let text = found[0].to_string();
        assert!(text.contains("4000") && text.contains("3996"), "{text}");
    });
}

#[test]
fn under_strict_sizes_that_differ_are_an_error_on_both_ends() {
    processes(
        "under_strict_sizes_that_differ_are_an_error_on_both_ends",
        2,
        &STRICT,
        |process| {
            let rank = process.join();
            unequal(&rank);
            wait_until("the communicator has failed", || rank.state() == 5);
            rank.sync();
            let text = last_error();
            assert!(text.contains("4000") && text.contains("3996"), "{text}");
            let memory = rank.memory(&[0u8]);
            assert_eq!(
                rank.all_reduce(&memory, &memory, Kind::ncclUint8, Op::ncclSum),
                5
            );
            assert_eq!(nccl!(ncclCommAbort(rank.comm)), 0);
        },
    );
}

#[test]
fn under_strict_operations_behind_one_that_fails_end_as_well() {
    let test = "under_strict_operations_behind_one_that_fails_end_as_well";
    processes(test, 2, &STRICT, |process| {
        let rank = process.join();
        warm_up(&rank);
        let memory = rank.memory(&[0u8; 8]);
        let reduce = || rank.all_reduce(&memory, &memory, Kind::ncclUint8, Op::ncclSum);
        assert_eq!(reduce(), 0);
        rank.sync();
        if rank.rank == 1 {
            process.wait_for("queued");
            assert_eq!(rank.receive(&memory, Kind::ncclUint8, 0), 0);
        } else {
            let half = rank.memory(&[0u8; 4]);
            assert_eq!(rank.send(&half, Kind::ncclUint8, 1), 0);
            assert_eq!(reduce(), 0);
            process.mark("queued");
        }
        wait_until("the communicator has failed", || rank.state() == 5);
        rank.sync();
        assert_eq!(nccl!(ncclCommAbort(rank.comm)), 0);
    });
}

#[test]
fn under_strict_collectives_that_differ_are_an_error_on_all_ranks() {
    let test = "under_strict_collectives_that_differ_are_an_error_on_all_ranks";
    processes(test, 3, &STRICT, |process| {
        let rank = process.join();
        let memory = rank.memory(&[1u32; 100]);
        let op = if rank.rank == 1 {
            Op::ncclMax
        } else {
            Op::ncclSum
        };
        assert_eq!(rank.all_reduce(&memory, &memory, Kind::ncclUint32, op), 0);
        wait_until("the communicator has failed", || rank.state() == 5);
        assert!(
            last_error().contains("different collectives"),
            "{}",
            last_error()
        );
        assert_eq!(nccl!(ncclCommAbort(rank.comm)), 0);
    });
}

#[test]
fn an_unmatched_receive_hangs_until_another_thread_aborts() {
    alone(
        "an_unmatched_receive_hangs_until_another_thread_aborts",
        &[],
        || {
            threads_that_abort(|rank| {
                let memory = rank.memory(&[0u8; 100]);
                if rank.rank == 0 {
                    assert_eq!(rank.receive(&memory, Kind::ncclUint8, 1), 0);
                    rank.gpu.bind_to_thread().unwrap();
                    let waiting = std::sync::atomic::AtomicBool::new(true);
                    thread::scope(|scope| {
                        scope.spawn(|| {
                            rank.sync();
                            waiting.store(false, std::sync::atomic::Ordering::SeqCst);
                        });
                        thread::sleep(Duration::from_millis(100));
                        assert!(waiting.load(std::sync::atomic::Ordering::SeqCst));
                        assert_eq!(nccl!(ncclCommAbort(rank.comm)), 0);
                    });
                    // The stream ends well; the data is garbage.
                } else {
                    thread::sleep(Duration::from_millis(200));
                    assert_eq!(nccl!(ncclCommAbort(rank.comm)), 0);
                }
            });
            assert!(violations().is_empty(), "nobody was inside a call of NCCL");
        },
    );
}

/// Two ranks that are connected; `body` aborts their communicators.
fn threads_that_abort(body: impl Fn(&Rank) + Sync) {
    let id = unique_id();
    thread::scope(|scope| {
        for rank in 0..2 {
            let body = &body;
            scope.spawn(move || {
                let rank = Rank::join(id, 2, rank);
                let (from, to) = (rank.memory(&[0u8; 2]), rank.memory(&[0u8; 2]));
                assert_eq!(rank.all_to_all(&from, &to, Kind::ncclUint8), 0);
                rank.sync();
                body(&rank);
            });
        }
    });
}

#[test]
fn a_killed_peer_leaves_the_others_waiting_until_they_abort() {
    let test = "a_killed_peer_leaves_the_others_waiting_until_they_abort";
    let ending = |rank, status: std::process::ExitStatus| status.success() == (rank != 2);
    processes_ending(test, 3, &[], ending, |process| {
        let rank = process.join();
        let memory = rank.memory(&[1u32; 100_000]);
        assert_eq!(
            rank.all_reduce(&memory, &memory, Kind::ncclUint32, Op::ncclSum),
            0
        );
        rank.sync();
        if rank.rank == 2 {
            process.wait_for("issued-0");
            process.wait_for("issued-1");
            process.mark("killed");
            // SAFETY: ends this process.
            unsafe { libc::raise(libc::SIGKILL) };
        }
        assert_eq!(
            rank.all_reduce(&memory, &memory, Kind::ncclUint32, Op::ncclSum),
            0
        );
        process.mark(&format!("issued-{}", rank.rank));
        process.wait_for("killed");
        thread::sleep(Duration::from_millis(200));
        assert!(!rank.is_idle());
        assert_eq!(rank.state(), 0);
        let start = std::time::Instant::now();
        assert_eq!(nccl!(ncclCommAbort(rank.comm)), 0);
        assert!(start.elapsed() < Duration::from_secs(1));
        rank.sync();
    });
}

#[test]
fn a_destroy_waits_for_the_other_processes() {
    processes(
        "a_destroy_waits_for_the_other_processes",
        2,
        &[],
        |process| {
            let rank = process.join();
            if rank.rank == 0 {
                rank.destroy();
                assert!(process.is_marked("going"));
            } else {
                thread::sleep(Duration::from_millis(100));
                process.mark("going");
                rank.destroy();
            }
        },
    );
}

#[test]
fn the_ranks_of_a_process_are_freed_with_the_last_of_them() {
    alone(
        "the_ranks_of_a_process_are_freed_with_the_last_of_them",
        &[],
        || {
            threads(2, |rank| {
                // A destroy of one rank returns although the other is still at work.
                let memory = rank.memory(&[1u8]);
                assert_eq!(
                    rank.all_reduce(&memory, &memory, Kind::ncclUint8, Op::ncclSum),
                    0
                );
                if rank.rank == 1 {
                    thread::sleep(Duration::from_millis(50));
                }
            });
        },
    );
}

#[test]
fn an_abort_waits_for_what_lies_before_its_launch_on_the_stream() {
    alone(
        "an_abort_waits_for_what_lies_before_its_launch_on_the_stream",
        &[],
        || {
            let rank = Rank::join(unique_id(), 1, 0);
            let (from, to) = (rank.memory(&[1u8]), rank.memory(&[0u8]));
            let gate = ranks::Gate::on(&rank);
            assert_eq!(nccl!(ncclGroupStart()), 0);
            assert_eq!(rank.send(&from, Kind::ncclUint8, 0), 0);
            assert_eq!(rank.receive(&to, Kind::ncclUint8, 0), 0);
            assert_eq!(nccl!(ncclGroupEnd()), 0);
            thread::scope(|scope| {
                let abort = scope.spawn(|| rank.abort());
                thread::sleep(Duration::from_millis(50));
                assert!(!abort.is_finished());
                gate.open();
                assert_eq!(abort.join().unwrap(), 0);
            });
            rank.sync();
            assert_eq!(to.read(), [0]);
        },
    );
}
