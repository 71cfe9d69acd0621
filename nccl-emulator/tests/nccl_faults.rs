//! Faults on purpose: by the API and by the environment, at calls and at operations.

mod ranks;

use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use cudarc::driver::CudaContext;
use nccl_emulator::faults;
use nccl_sys::{ncclDataType_t as Kind, ncclRedOp_t as Op};
use ranks::{Rank, alone, api, last_error, nccl, processes_ending, threads, unique_id, wait_until};

const PATIENCE: Duration = Duration::from_secs(10);

#[test]
fn a_call_fails_on_the_chosen_rank_the_chosen_time() {
    alone(
        "a_call_fails_on_the_chosen_rank_the_chosen_time",
        &[],
        || {
            let guard = faults::at_call("ncclGroupEnd").rank(1).nth(2).fail(2);
            threads(2, |rank| {
                let peer = 1 - rank.rank;
                let (from, to) = (rank.memory(&[1u8]), rank.memory(&[0u8]));
                let exchange = || {
                    assert_eq!(nccl!(ncclGroupStart()), 0);
                    assert_eq!(rank.send(&from, Kind::ncclUint8, peer), 0);
                    assert_eq!(rank.receive(&to, Kind::ncclUint8, peer), 0);
                    nccl!(ncclGroupEnd())
                };
                assert_eq!(exchange(), 0);
                assert_eq!(exchange(), if rank.rank == 1 { 2 } else { 0 });
                // Rank 0 has launched: rank 1 catches up.
                if rank.rank == 1 {
                    assert_eq!(exchange(), 0);
                }
                rank.sync();
            });
            assert_eq!(guard.hits(), 1);
        },
    );
}

#[test]
fn an_operation_that_fails_makes_its_group_fail() {
    alone("an_operation_that_fails_makes_its_group_fail", &[], || {
        let rank = Rank::join(unique_id(), 1, 0);
        let (from, to) = (rank.memory(&[1u8]), rank.memory(&[0u8]));
        let exchange = || {
            // The receive is in an inner group, whose end does not end the outer one.
            let calls = [
                nccl!(ncclGroupStart()),
                rank.send(&from, Kind::ncclUint8, 0),
                nccl!(ncclGroupStart()),
                rank.receive(&to, Kind::ncclUint8, 0),
                nccl!(ncclGroupEnd()),
            ];
            (calls[3], nccl!(ncclGroupEnd()))
        };
        let guard = faults::at_call("ncclRecv").nth(1).fail(3);
        assert_eq!(exchange(), (3, 3));
        rank.sync();
        assert_eq!((guard.hits(), to.read()), (1, vec![0]));
        assert_eq!(exchange(), (0, 0));
        rank.sync();
        assert_eq!(to.read(), [1]);
        rank.destroy();
    });
}

#[test]
fn a_group_that_fails_is_the_state_of_its_communicators() {
    let test = "a_group_that_fails_is_the_state_of_its_communicators";
    alone(test, &[], || {
        let rank = Rank::join_nonblocking(unique_id(), 1, 0);
        let (from, to) = (rank.memory(&[1u8]), rank.memory(&[0u8]));
        let _guard = faults::at_call("ncclGroupEnd").fail(3);
        let calls = [
            nccl!(ncclGroupStart()),
            rank.send(&from, Kind::ncclUint8, 0),
            rank.receive(&to, Kind::ncclUint8, 0),
            nccl!(ncclGroupEnd()),
        ];
        assert_eq!(calls[3], 3, "{calls:?}");
        assert_eq!(rank.state(), 3);
        assert_eq!(rank.abort(), 0);
        assert_eq!(to.read(), [0]);
    });
}

#[test]
fn a_fault_of_one_rank_does_not_strike_another_one_whose_init_is_under_way() {
    let test = "a_fault_of_one_rank_does_not_strike_another_one_whose_init_is_under_way";
    alone(test, &[], || {
        let guard = faults::at_call("ncclCommGetAsyncError").rank(0).fail(3);
        let mut rank = Rank::alone(2, 1);
        let mut config = nccl_sys::NCCL_CONFIG_INITIALIZER;
        config.blocking = 0;
        let (comm, id) = (&mut rank.comm, unique_id());
        let init = nccl!(ncclCommInitRankConfig(comm, 2, id, 1, &mut config));
        assert_eq!(init, 7, "{}", last_error());
        for _ in 0..100 {
            assert_eq!(rank.state(), 7);
        }
        assert_eq!(guard.hits(), 0);
        assert_eq!(rank.abort(), 0);
    });
}

#[test]
fn a_group_that_ranks_join_has_their_faults() {
    alone("a_group_that_ranks_join_has_their_faults", &[], || {
        let guard = faults::at_call("ncclGroupEnd").rank(1).fail(3);
        let id = unique_id();
        let mut ranks = [Rank::alone(2, 0), Rank::alone(2, 1)];
        assert_eq!(nccl!(ncclGroupStart()), 0);
        for rank in &mut ranks {
            rank.gpu.bind_to_thread().unwrap();
            let comm = &mut rank.comm;
            assert_eq!(nccl!(ncclCommInitRank(comm, 2, id, rank.rank)), 0);
        }
        assert_eq!(nccl!(ncclGroupEnd()), 3);
        assert_eq!(guard.hits(), 1);
    });
}

#[test]
fn a_call_that_stalls_ends_with_its_abort() {
    alone("a_call_that_stalls_ends_with_its_abort", &[], || {
        let rank = Rank::join_nonblocking(unique_id(), 1, 0);
        let (from, to) = (rank.memory(&[1u8]), rank.memory(&[0u8]));
        let guard = faults::at_call("ncclGroupEnd").nth(1).stall();
        thread::scope(|scope| {
            let stalls = scope.spawn(|| {
                assert_eq!(nccl!(ncclGroupStart()), 0);
                assert_eq!(rank.send(&from, Kind::ncclUint8, 0), 0);
                assert_eq!(rank.receive(&to, Kind::ncclUint8, 0), 0);
                let end = nccl!(ncclGroupEnd());
                // The thread is not inside a group any more: this send fails at once.
                let next = Rank::join(unique_id(), 1, 0);
                assert_eq!(next.send(&from, Kind::ncclUint8, 0), 5);
                next.destroy();
                end
            });
            assert!(guard.wait_for_hits(1, PATIENCE));
            assert_eq!(rank.abort(), 0);
            assert_ne!(stalls.join().unwrap(), 0);
        });
    });
}

#[test]
fn a_group_that_stalls_ends_with_the_abort_of_any_of_its_communicators() {
    let test = "a_group_that_stalls_ends_with_the_abort_of_any_of_its_communicators";
    alone(test, &[], || {
        let [first, second] = [(); 2].map(|()| Rank::join_nonblocking(unique_id(), 1, 0));
        let (from, to) = (first.memory(&[1u8]), first.memory(&[0u8]));
        let guard = faults::at_call("ncclGroupEnd").nth(1).stall();
        thread::scope(|scope| {
            let stalls = scope.spawn(|| {
                assert_eq!(nccl!(ncclGroupStart()), 0);
                for rank in [&first, &second] {
                    assert_eq!(rank.send(&from, Kind::ncclUint8, 0), 0);
                    assert_eq!(rank.receive(&to, Kind::ncclUint8, 0), 0);
                }
                nccl!(ncclGroupEnd())
            });
            assert!(guard.wait_for_hits(1, PATIENCE));
            assert_eq!(second.abort(), 0);
            wait_until("the call comes back", || stalls.is_finished());
        });
        assert_eq!(first.abort(), 0);
    });
}

#[test]
fn a_call_that_stalls_ends_with_the_abort_of_the_parent() {
    alone(
        "a_call_that_stalls_ends_with_the_abort_of_the_parent",
        &[("NCCL_COMM_SPLIT_SHARE_RESOURCES", "1")],
        || {
            let parent = Rank::join_nonblocking(unique_id(), 1, 0);
            let mut config = nccl_sys::NCCL_CONFIG_INITIALIZER;
            config.blocking = 1;
            let mut child = Rank::alone(1, 0);
            let split = nccl!(ncclCommSplit(
                parent.comm,
                0,
                0,
                &mut child.comm,
                &mut config
            ));
            assert!(matches!(split, 0 | 7), "{}", last_error());
            assert_eq!(parent.settle(), 0);
            let memory = child.memory(&[1u8]);
            // The abort of `parent` does not release the stalled call of this communicator.
            let other = Rank::join(unique_id(), 1, 0);
            let guard = faults::at_call("ncclAllReduce").stall();
            let call =
                |rank: &Rank| rank.all_reduce(&memory, &memory, Kind::ncclUint8, Op::ncclSum);
            let (call_child, call_other) = (|| call(&child), || call(&other));
            thread::scope(|scope| {
                let stalls = scope.spawn(call_child);
                let stalls_on = scope.spawn(call_other);
                assert!(guard.wait_for_hits(2, PATIENCE));
                assert!(!stalls.is_finished());
                assert_eq!(parent.abort(), 0);
                wait_until("the call comes back", || stalls.is_finished());
                thread::sleep(Duration::from_millis(30));
                assert!(!stalls_on.is_finished());
                drop(guard);
                assert_eq!(stalls_on.join().unwrap(), 0);
            });
            assert_eq!(child.abort(), 0);
            other.sync();
            other.destroy();
        },
    );
}

#[test]
fn a_call_hangs_until_the_guard_goes() {
    alone("a_call_hangs_until_the_guard_goes", &[], || {
        let guard = faults::at_call("ncclAllReduce").hang();
        let rank = Rank::join(unique_id(), 1, 0);
        let memory = rank.memory(&[1u8]);
        thread::scope(|scope| {
            let hung =
                scope.spawn(|| rank.all_reduce(&memory, &memory, Kind::ncclUint8, Op::ncclSum));
            assert!(guard.wait_for_hits(1, PATIENCE));
            thread::sleep(Duration::from_millis(30));
            assert!(!hung.is_finished());
            drop(guard);
            assert_eq!(hung.join().unwrap(), 0);
        });
        rank.destroy();
    });
}

#[test]
fn a_call_is_delayed() {
    alone("a_call_is_delayed", &[], || {
        let guard = faults::at_call("ncclGetUniqueId")
            .nth(1)
            .delay(Duration::from_millis(50));
        let start = Instant::now();
        unique_id();
        assert!(start.elapsed() >= Duration::from_millis(50));
        assert_eq!(guard.hits(), 1);
        // The next call is not delayed.
        unique_id();
        assert_eq!(guard.hits(), 1);
    });
}

#[test]
fn an_operation_hangs_on_its_stream_until_the_guard_goes() {
    alone(
        "an_operation_hangs_on_its_stream_until_the_guard_goes",
        &[],
        || {
            let guard = faults::at_operation("AllReduce").rank(1).nth(2).hang();
            let looked = Barrier::new(2);
            threads(2, |rank| {
                let memory = rank.memory(&[1u8]);
                let reduce = || rank.all_reduce(&memory, &memory, Kind::ncclUint8, Op::ncclSum);
                assert_eq!([reduce(), reduce(), reduce()], [0, 0, 0]);
                // The second of the three is held.
                assert!(guard.wait_for_hits(1, PATIENCE));
                wait_until("the first is done here too", || memory.read() == [2]);
                thread::sleep(Duration::from_millis(50));
                assert!(!rank.is_idle());
                assert_eq!(memory.read(), [2]);
                looked.wait();
                if rank.rank == 1 {
                    guard.release();
                }
            });
        },
    );
}

#[test]
fn an_operation_that_hangs_ends_with_an_abort() {
    alone("an_operation_that_hangs_ends_with_an_abort", &[], || {
        let guard = faults::at_operation("any").hang();
        let rank = Rank::join_nonblocking(unique_id(), 1, 0);
        let (from, to) = (rank.memory(&[1u8]), rank.memory(&[0u8]));
        assert_eq!(nccl!(ncclGroupStart()), 0);
        assert_eq!(rank.send(&from, Kind::ncclUint8, 0), 0);
        assert_eq!(rank.receive(&to, Kind::ncclUint8, 0), 0);
        assert_eq!(nccl!(ncclGroupEnd()), 7);
        assert_eq!(rank.settle(), 0);
        thread::scope(|scope| {
            scope.spawn(|| {
                rank.sync();
            });
            assert!(guard.wait_for_hits(1, PATIENCE));
            assert_eq!(nccl!(ncclCommAbort(rank.comm)), 0);
        });
        assert_eq!(to.read(), [0]);
    });
}

#[test]
fn an_operation_that_fails_is_an_async_error() {
    alone("an_operation_that_fails_is_an_async_error", &[], || {
        let _guard = faults::at_operation("AlltoAll").rank(0).fail(6);
        let id = unique_id();
        thread::scope(|scope| {
            for rank in 0..2 {
                scope.spawn(move || {
                    let rank = Rank::join(id, 2, rank);
                    let (from, to) = (rank.memory(&[1u8; 2]), rank.memory(&[0u8; 2]));
                    assert_eq!(rank.all_to_all(&from, &to, Kind::ncclUint8), 0);
                    if rank.rank == 0 {
                        wait_until("the error is there", || rank.state() == 6);
                    } else {
                        thread::sleep(Duration::from_millis(50));
                        assert_eq!(rank.state(), 0);
                    }
                    assert!(!rank.is_idle());
                    assert_eq!(nccl!(ncclCommAbort(rank.comm)), 0);
                    rank.sync();
                });
            }
        });
    });
}

#[test]
fn an_async_error_can_be_made_up() {
    alone("an_async_error_can_be_made_up", &[], || {
        let rank = Rank::join_nonblocking(unique_id(), 1, 0);
        let _guard = faults::at_call("ncclCommGetAsyncError").fail(3);
        assert_eq!(rank.state(), 3);
        assert_eq!(nccl!(ncclCommAbort(rank.comm)), 0);
    });
}

#[test]
fn late_operations_are_not_done_when_the_stream_could_do_them() {
    alone(
        "late_operations_are_not_done_when_the_stream_could_do_them",
        &[],
        || {
            let delay = Duration::from_millis(500);
            let late = faults::late(delay);
            let rank = Rank::join(unique_id(), 1, 0);
            let (from, to) = (rank.memory(&[1u8]), rank.memory(&[0u8]));
            let exchange = || {
                // Taken before the launch, at which the delay begins.
                let start = Instant::now();
                assert_eq!(nccl!(ncclGroupStart()), 0);
                assert_eq!(rank.send(&from, Kind::ncclUint8, 0), 0);
                assert_eq!(rank.receive(&to, Kind::ncclUint8, 0), 0);
                assert_eq!(nccl!(ncclGroupEnd()), 0);
                assert!(!rank.is_idle());
                rank.sync();
                start.elapsed()
            };
            assert!(exchange() >= delay);
            assert_eq!(to.read(), [1]);
            drop(late);
            rank.destroy();
        },
    );
}

#[test]
fn the_environment_names_faults_too() {
    let test = "the_environment_names_faults_too";
    let specification =
        "call=ncclAllReduce,rank=1,nth=2,action=kill; call=ncclGroupStart,action=fail=3";
    let environment = [("NCCL_EMULATOR_FAULTS", specification)];
    let ending = |rank, status: std::process::ExitStatus| {
        use std::os::unix::process::ExitStatusExt;
        if rank == 1 {
            status.signal() == Some(libc::SIGKILL)
        } else {
            status.success()
        }
    };
    processes_ending(test, 2, &environment, ending, |process| {
        assert_eq!(nccl!(ncclGroupStart()), 3);
        let rank = process.join();
        let memory = rank.memory(&[1u8]);
        assert_eq!(
            rank.all_reduce(&memory, &memory, Kind::ncclUint8, Op::ncclSum),
            0
        );
        rank.sync();
        assert_eq!(
            rank.all_reduce(&memory, &memory, Kind::ncclUint8, Op::ncclSum),
            0
        );
        thread::sleep(Duration::from_millis(100));
        assert_eq!(nccl!(ncclCommAbort(rank.comm)), 0);
    });
}

#[test]
fn a_specification_that_cannot_be_read_fails_every_init() {
    let environment = [("NCCL_EMULATOR_FAULTS", "call=ncclSends,action=hang")];
    alone(
        "a_specification_that_cannot_be_read_fails_every_init",
        &environment,
        || {
            let mut id = nccl_sys::ncclUniqueId::default();
            assert_eq!(nccl!(ncclGetUniqueId(&mut id)), 4);
            let text = "NCCL_EMULATOR_FAULTS: in \"call=ncclSends,action=hang\": neither NCCL nor the \
                    driver has a function \"ncclSends\"";
            assert_eq!(last_error(), text);
        },
    );
}

#[test]
fn a_fault_that_an_old_release_cannot_place_is_an_error() {
    let environment = [("NCCL_EMULATOR_VERSION", "2.26.2")];
    alone(
        "a_fault_that_an_old_release_cannot_place_is_an_error",
        &environment,
        || {
            api();
            let named = faults::specify("run=AllReduce,comm=tp,action=stall").unwrap_err();
            let reason = "names are known from 2.27.3 on, and the emulator is NCCL 2.26.2";
            assert!(named.to_string().contains(reason), "{named}");
            let place = || faults::at_call("ncclGroupEnd").communicator("tp").hang();
            assert!(std::panic::catch_unwind(place).is_err());
        },
    );
}

#[test]
fn an_init_that_cannot_ask_for_the_device_leaves_the_thread_inside_a_group() {
    let test = "an_init_that_cannot_ask_for_the_device_leaves_the_thread_inside_a_group";
    alone(test, &[], || {
        let (mut comm, id) = (std::ptr::null_mut(), unique_id());
        let mut init = || {
            nccl!(ncclCommInitRankConfig(
                &mut comm,
                1,
                id,
                0,
                std::ptr::null_mut()
            ))
        };
        let guard = faults::at_call("ncclCommInitRankConfig").fail(1);
        assert_eq!(init(), 1);
        assert_eq!([nccl!(ncclGroupEnd()), nccl!(ncclGroupEnd())], [0, 5]);
        drop(guard);
        let _guard = faults::at_call("ncclCommInitRankConfig").fail(2);
        assert_eq!(init(), 2);
        assert_eq!(nccl!(ncclGroupEnd()), 5);
    });
}

#[test]
fn aborting_a_blocking_communicator_whose_call_hangs_is_a_violation() {
    let test = "aborting_a_blocking_communicator_whose_call_hangs_is_a_violation";
    alone(test, &[], || {
        let guard = faults::at_call("ncclGroupEnd").stall();
        let rank = Rank::join(unique_id(), 1, 0);
        let memory = rank.memory(&[1u8]);
        thread::scope(|scope| {
            let hung = scope.spawn(|| {
                assert_eq!(nccl!(ncclGroupStart()), 0);
                assert_eq!(rank.send(&memory, Kind::ncclUint8, 0), 0);
                nccl!(ncclGroupEnd())
            });
            assert!(guard.wait_for_hits(1, PATIENCE));
            assert_eq!(rank.abort(), 0);
            hung.join().unwrap();
        });
        let found = nccl_emulator::violations();
        assert!(
            found[0].to_string().contains("inside a call on it"),
            "{found:?}"
        );
    });
}

#[test]
fn a_call_of_the_driver_hangs_and_fails_as_well() {
    alone("a_call_of_the_driver_hangs_and_fails_as_well", &[], || {
        nccl_emulator::install().unwrap();
        let stream = CudaContext::new(0).unwrap().new_stream().unwrap();
        let event = stream.record_event(None).unwrap();
        let guard = faults::at_call("cuEventQuery").nth(1).hang();
        thread::scope(|scope| {
            let hung = scope.spawn(|| event.is_complete());
            assert!(guard.wait_for_hits(1, PATIENCE));
            thread::sleep(Duration::from_millis(30));
            assert!(!hung.is_finished());
            drop(guard);
            assert!(hung.join().unwrap());
        });
        let launch_failure = 719;
        let guard = faults::at_call("cuStreamQuery").fail(launch_failure);
        // SAFETY: the stream lives.
        let code = unsafe { cudarc::driver::sys::cuStreamQuery(stream.cu_stream()) };
        assert_eq!(code as u32, launch_failure);
        assert_eq!(guard.hits(), 1);
    });
}
