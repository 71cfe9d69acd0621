//! Calls of NCCL and CUDA that do not return: the rank inside one is named, and operations of the ranks that wait for
//! it end.

use std::sync::Arc;
use std::time::{Duration, Instant};

use nccl::cudarc::driver::CudaStream;
use nccl::fault::{Fault, FaultClass, RootCause};
use nccl::{Communicator, ReduceOp, World};
use nccl_emulator::faults;

use crate::support::{self, needs_emulator, ranks_as_processes};
use crate::unattended::{Outcome, SOON, TIMEOUT, fault, start, unattended};

/// Runs ranks, some of which have a hanging thread at the end; each has a timeout of its own.
fn ranks_that_hang(
    ranks: usize,
    timeout: impl Fn(usize) -> Duration,
    body: impl Fn(&World, &Arc<CudaStream>, &Communicator) -> Outcome,
) {
    if !needs_emulator("a call that hangs on purpose") {
        return;
    }
    ranks_as_processes(ranks, |world| -> Outcome {
        let operation = timeout(world.rank());
        let (stream, comm) = start(&world, |builder| {
            builder
                .with(|comm| (comm.timeouts.operation, comm.timeouts.abort) = (operation, TIMEOUT))
        })?;
        body(&world, &stream, &comm)?;
        world.barrier("end")?;
        // A hanging thread prevents an orderly end.
        std::process::exit(0);
    });
}

/// A thread of this rank enters a call that does not return.
fn go_in_for_ever(comm: &Communicator) {
    faults::at_call("ncclAllReduce").hang().keep();
    let comm = comm.clone();
    std::thread::spawn(move || {
        let _ = unattended(&comm);
    });
}

/// Asserts that this rank gets a fault that names `rank` in these words.
fn is_told(comm: &Communicator, rank: usize, words: &str) -> Outcome<Fault> {
    let fault = fault(comm)?;
    assert_eq!(
        (fault.culprit(), fault.class),
        (Some(rank), FaultClass::TimedOut),
        "{fault}"
    );
    assert!(fault.cause.contains(words), "{fault}");
    Ok(fault)
}

#[test]
fn the_one_rank_that_does_not_come_back_from_the_call_is_named_on_all() {
    // A timeout of rank 1 itself would pass as well, with other words.
    let patient = |rank| if rank == 1 { SOON } else { TIMEOUT };
    ranks_that_hang(3, patient, |world, _, comm| {
        if world.rank() == 1 {
            go_in_for_ever(comm);
        }
        // No rank waits before the call hangs.
        world.barrier("begin")?;
        if world.rank() != 1 {
            unattended(comm)?;
        }
        let fault = is_told(comm, 1, "inside the call of all_reduce #")?;
        let root = &fault.root;
        assert!(matches!(root, RootCause::StuckInside { .. }), "{fault}");
        // The rank itself has determined where its threads are.
        let seen = fault.host_evidence.join("; ");
        assert!(seen.contains("rank 1: thread "), "{}", fault.explain());
        let hint = fault.hint().unwrap_or_default();
        assert!(hint.contains("`hosts` has where the threads"), "{hint}");
        Ok(())
    });
}

#[test]
fn a_call_into_nccl_that_does_not_come_back_is_found() {
    ranks_that_hang(
        2,
        |_| TIMEOUT,
        |world, _, comm| {
            world.barrier("begin")?;
            if world.rank() == 0 {
                go_in_for_ever(comm);
            }
            is_told(comm, 0, "the call into NCCL, under way for").map(drop)
        },
    );
}

/// NCCL connects two ranks in the first message between them, and waits for the other one meanwhile.
fn in_the_first_message(rank_1: impl Fn(&Communicator) -> Outcome) {
    if !needs_emulator("a call that hangs on purpose") {
        return;
    }
    ranks_as_processes(2, |world| -> Outcome {
        let timeout = if world.rank() == 0 { TIMEOUT } else { SOON };
        let stream = support::device(&world)?.new_stream()?;
        let comm = world.communicator("test").stream(&stream);
        let comm = comm
            .with(|comm| {
                comm.timeouts.operation = timeout;
                comm.timeouts.abort = TIMEOUT;
            })
            .build()?;
        world.barrier("begin")?;
        if world.rank() == 0 {
            // So that the call does not return at its timeout.
            faults::at_call("ncclCommAbort").hang().keep();
            exchange_unattended(&comm);
        } else {
            rank_1(&comm)?;
        }
        is_told(&comm, 1, "for message #1")?;
        world.barrier("end")?;
        // A thread hangs.
        std::process::exit(0);
    });
}

/// Exchanges a message with the other rank, whatever the result.
fn exchange(comm: &Communicator) -> Outcome {
    let x = comm.stream().alloc_zeros::<u8>(8)?;
    let mut y = comm.stream().alloc_zeros::<u8>(8)?;
    comm.group(|group| {
        group.isend(&x, 1 - comm.rank())?;
        group.irecv(&mut y, 1 - comm.rank())
    })?;
    Ok(())
}

/// Does that on a thread of this rank.
fn exchange_unattended(comm: &Communicator) {
    let comm = comm.clone();
    std::thread::spawn(move || {
        let _ = exchange(&comm);
    });
}

#[test]
fn a_rank_whose_first_message_waits_for_a_rank_that_does_not_come_is_not_the_cause() {
    in_the_first_message(|_| Ok(()));
}

#[test]
fn a_rank_whose_first_message_waits_for_a_rank_inside_a_call_is_not_the_cause() {
    in_the_first_message(|comm| {
        faults::at_call("ncclSend").hang().keep();
        exchange_unattended(comm);
        Ok(())
    });
}

#[test]
fn a_watchdog_that_is_stuck_does_not_keep_an_operation_from_its_end() {
    ranks_that_hang(
        2,
        |_| TIMEOUT,
        |world, stream, comm| {
            let elsewhere = stream.context().new_stream()?;
            let other = world.communicator("other").stream(&elsewhere);
            let other = other
                .with(|comm| comm.timeouts.operation = TIMEOUT)
                .build()?;
            other.warm_up(SOON)?;
            world.barrier("begin")?;
            if world.rank() == 0 {
                unattended(comm)?;
                // The first query is the watchdog's.
                faults::at_call("ncclCommGetAsyncError")
                    .nth(1)
                    .hang()
                    .keep();
            }
            is_told(comm, 0, "ncclCommGetAsyncError has not returned")?;
            // Other communicators are still watched.
            if world.rank() == 0 {
                unattended(&other)?;
            }
            let late = fault(&other)?;
            assert!(late.cause.contains("the operation, running for"), "{late}");
            Ok(())
        },
    );
}

#[test]
fn a_driver_that_hangs_under_the_watchdog_does_not_keep_an_operation_from_its_end() {
    ranks_that_hang(
        2,
        |_| TIMEOUT,
        |world, _, comm| {
            world.barrier("begin")?;
            if world.rank() == 0 {
                // Only the watchdog queries.
                faults::at_call("cuEventQuery").hang().keep();
                unattended(comm)?;
            }
            is_told(comm, 0, "cuEventQuery has not returned").map(drop)
        },
    );
}

/// Each thread that replaces a stuck one would take a wake-up of the next one, if it stayed.
#[test]
fn a_thread_that_is_stuck_under_an_awaited_request_does_not_keep_others_from_being_woken() {
    ranks_that_hang(
        2,
        |_| TIMEOUT,
        |world, stream, comm| {
            let elsewhere = stream.context().new_stream()?;
            let other = world.communicator("other").stream(&elsewhere).build()?;
            other.warm_up(SOON)?;
            let rank = world.rank();
            let mut never = stream.alloc_zeros::<f32>(4)?;
            world.barrier("begin")?;
            if rank == 0 {
                let never = comm.group(|group| group.irecv(&mut never, 1))?;
                // The watchdog makes the same query, and may come first.
                faults::at_call("cuEventQuery")
                    .on_threads_named("nccl-poller")
                    .nth(1)
                    .hang()
                    .keep();
                block_on(never).unwrap_err();
            }
            fault(comm)?;
            // The stuck thread is replaced after 5 s, once.
            if rank == 0 {
                let pollers = || threads_named("nccl-poller");
                let deadline = Instant::now() + SOON;
                while pollers() < 2 && Instant::now() < deadline {
                    std::thread::sleep(Duration::from_millis(100));
                }
                std::thread::sleep(Duration::from_secs(8));
                assert_eq!(pollers(), 2, "the stuck one and another");
            }
            world.barrier("again")?;
            let x = elsewhere.clone_htod(&[1f32; 4])?;
            let mut y = elsewhere.alloc_zeros::<f32>(4)?;
            if rank == 1 {
                std::thread::sleep(Duration::from_millis(300));
            }
            let (woken, is_woken) = std::sync::mpsc::channel();
            std::thread::spawn(move || {
                let sum = other.all_reduce(&x, &mut y, ReduceOp::Sum);
                let _ = woken.send(sum.and_then(block_on).is_ok());
            });
            assert_eq!(is_woken.recv_timeout(SOON), Ok(true));
            Ok(())
        },
    );
}

fn threads_named(name: &str) -> usize {
    let threads = std::fs::read_dir("/proc/self/task").expect("procfs");
    let names =
        threads.filter_map(|thread| std::fs::read_to_string(thread.ok()?.path().join("comm")).ok());
    names.filter(|found| found.trim() == name).count()
}

fn block_on<T>(future: impl IntoFuture<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().build();
    runtime.expect("a runtime").block_on(future.into_future())
}
