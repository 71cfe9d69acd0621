//! Every wait has a timeout: init, operations, waits, finalize, drop, abort.

use std::sync::Arc;
use std::time::{Duration, Instant};

use nccl::cudarc::driver::CudaStream;
use nccl::{
    AbortSignal, Communicator, CommunicatorBuilder, ErrorKind, OperationKind, ReduceOp, World,
};
use nccl_emulator::faults;

use crate::support::{self, Ranks, ranks_as_processes, ranks_as_threads};

type Outcome = Result<(), Box<dyn std::error::Error>>;

/// Long enough for a loaded machine, far below any of the timeouts.
const SOON: Duration = Duration::from_secs(15);

fn stream(world: &World) -> Result<Arc<CudaStream>, Box<dyn std::error::Error>> {
    Ok(support::device(world)?.new_stream()?)
}

/// This rank's stream, and a communicator of all ranks on it, with the timeouts that a test sets.
fn start(
    world: &World,
    timeouts: impl FnOnce(CommunicatorBuilder<'_>) -> CommunicatorBuilder<'_>,
) -> Result<(Arc<CudaStream>, Communicator), Box<dyn std::error::Error>> {
    let stream = stream(world)?;
    let comm = timeouts(world.communicator("test").stream(&stream)).build()?;
    Ok((stream, comm))
}

#[test]
fn a_communicator_whose_rank_never_comes_is_given_up_at_the_limit() {
    ranks_as_threads(1, |world| -> Outcome {
        let stream = stream(&world)?;
        let id = nccl::UniqueId::new(&nccl::Library::load()?)?;
        let begun = Instant::now();
        let error = Communicator::builder("alone", id, 0, 2)
            .stream(&stream)
            .with(|comm| comm.timeouts.init = Duration::from_millis(300))
            .build()
            .unwrap_err();
        assert!(error.is_timeout(), "{error:#}");
        assert!((Duration::from_millis(300)..SOON).contains(&begun.elapsed()));
        let operation = error.operation().unwrap();
        assert_eq!(operation.kind, OperationKind::Init);
        assert_eq!((operation.rank, operation.world_size), (0, 2));
        assert_eq!(&*operation.communicator, "alone");
        Ok(())
    });
}

#[test]
fn a_rank_that_cannot_take_part_is_the_reason_on_every_rank() {
    ranks_as_processes(3, |world| -> Outcome {
        let stream = stream(&world)?;
        let mut builder = world.communicator("picky").stream(&stream);
        if world.rank() == 1 {
            builder = builder.with(|comm| comm.config.min_ctas = Some(0));
        }
        let begun = Instant::now();
        let error = builder.build().unwrap_err();
        assert!(begun.elapsed() < SOON);
        let text = format!("{error:#}");
        assert!(text.contains("min_ctas"), "{text}");
        if world.rank() != 1 {
            assert!(text.contains("rank 1 ("), "{text}");
        }
        Ok(())
    });
}

#[test]
fn a_rank_that_left_before_init_is_named_on_the_others() {
    ranks_as_processes(2, |world| -> Outcome {
        let stream = stream(&world)?;
        if world.rank() == 1 {
            return Ok(());
        }
        let begun = Instant::now();
        let error = world
            .communicator("late")
            .stream(&stream)
            .build()
            .unwrap_err();
        assert!(begun.elapsed() < SOON);
        assert!(format!("{error:#}").contains("rank 1 ("), "{error:#}");
        Ok(())
    });
}

#[test]
fn an_init_that_reports_its_error_late_tells_nccls_own_code_on_all_ranks() {
    if !support::needs_emulator("an init that fails on purpose") {
        return;
    }
    ranks_as_processes(3, |world| -> Outcome {
        let stream = stream(&world)?;
        // The call itself has returned "in progress" by then.
        let _fault = (world.rank() == 1).then(|| {
            let system_error = 2;
            faults::at_call("ncclCommGetAsyncError").fail(system_error)
        });
        let begun = Instant::now();
        let text = match world.communicator("late").stream(&stream).build() {
            Err(error) => format!("{error:#}"),
            // Its own init succeeded, and it gets the others' failure a moment later.
            Ok(comm) => loop {
                assert!(
                    world.rank() != 1 && begun.elapsed() < SOON,
                    "{}",
                    comm.state()
                );
                if let Some(fault) = comm.fault() {
                    break fault.to_string();
                }
                std::thread::sleep(Duration::from_millis(1));
            },
        };
        assert!(begun.elapsed() < SOON);
        assert!(
            text.contains("rank 1 (") && text.contains("system error"),
            "{text}"
        );
        Ok(())
    });
}

/// Rank 0 posts a receive that rank 1 never matches.
fn unmatched(comm: &Communicator, stream: &Arc<CudaStream>) -> nccl::Result<nccl::Request> {
    let mut y = stream.alloc_zeros::<f32>(1024).expect("memory");
    let done = comm.group(|group| group.irecv(&mut y, 1))?;
    // The request keeps nothing alive: the order of the stream does.
    drop(y);
    Ok(done)
}

/// Lets both ranks use the connection once, so that later operations wait on the device, not in NCCL.
fn connect(comm: &Communicator, stream: &Arc<CudaStream>) -> Outcome {
    let peer = 1 - comm.rank();
    let x = stream.alloc_zeros::<f32>(16)?;
    let mut y = stream.alloc_zeros::<f32>(16)?;
    comm.group(|group| {
        group.isend(&x, peer)?;
        group.irecv(&mut y, peer)
    })?
    .wait()?;
    Ok(())
}

#[test]
fn a_wait_ends_at_its_limit_and_the_operation_goes_on() {
    ranks_as_threads(2, |world| -> Outcome {
        let (stream, comm) = start(&world, |builder| builder)?;
        connect(&comm, &stream)?;
        if world.rank() == 0 {
            let done = unmatched(&comm, &stream)?;
            let error = done.wait_timeout(Duration::from_millis(100)).unwrap_err();
            assert!(error.is_timeout(), "{error:#}");
            assert_eq!(error.operation().unwrap().sequence, Some(2));
            assert!(!done.is_complete()?);
            world.barrier("waited")?;
            done.wait()?;
        } else {
            world.barrier("waited")?;
            let x = stream.alloc_zeros::<f32>(1024)?;
            comm.group(|group| group.isend(&x, 0))?.wait()?;
        }
        comm.finalize()?;
        Ok(())
    });
}

#[test]
fn a_request_for_nothing_is_done_at_once_behind_an_operation_that_waits() {
    ranks_as_threads(2, |world| -> Outcome {
        let (stream, comm) = start(&world, |builder| builder)?;
        connect(&comm, &stream)?;
        if world.rank() == 0 {
            let waiting = unmatched(&comm, &stream)?;
            let mut empty = stream.alloc_zeros::<f32>(0)?;
            assert!(comm.group(|_| Ok(()))?.is_complete()?);
            assert!(
                comm.all_reduce_in_place(&mut empty, ReduceOp::Sum)?
                    .is_complete()?
            );
            let nothing = nccl::group(|group| group.on(&comm).map(drop))?;
            assert!(nothing.is_complete()?);
            assert!(!waiting.is_complete()?);
        }
        world.barrier("end")?;
        comm.abort("rank 1 never sends")?;
        Ok(())
    });
}

#[test]
fn an_operation_that_nobody_joins_aborts_its_communicator_at_the_limit() {
    ranks_as_threads(2, |world| -> Outcome {
        let timeout = Duration::from_millis(300);
        let (stream, comm) = start(&world, |builder| {
            builder.with(|comm| comm.timeouts.operation = timeout)
        })?;
        // Not connected yet: the launch itself waits for the peer.
        if world.rank() == 0 {
            let begun = Instant::now();
            let mut y = stream.alloc_zeros::<f32>(1024)?;
            let error = comm.group(|group| group.irecv(&mut y, 1)).unwrap_err();
            assert!(error.is_timeout(), "{error:#}");
            assert!(begun.elapsed() < SOON);
            let error = comm.all_reduce_in_place(&mut y, ReduceOp::Sum).unwrap_err();
            assert!(error.is_timeout(), "for the same reason: {error:#}");
        }
        world.barrier("end")?;
        comm.abort("the other rank did")?;
        Ok(())
    });
}

#[test]
fn waiting_for_a_turn_has_a_limit_of_its_own_and_harms_nobody() {
    ranks_as_threads(2, |world| -> Outcome {
        let (stream, comm) = start(&world, |builder| builder)?;
        let context = stream.context();
        let late = Duration::from_secs(2);
        if world.rank() == 1 {
            // The first connection waits for both ranks, inside NCCL; so does that of the collective.
            std::thread::sleep(late);
            let mut y = stream.alloc_zeros::<f32>(16)?;
            comm.group(|group| group.irecv(&mut y, 0))?.wait()?;
            std::thread::sleep(late);
            comm.all_reduce_in_place(&mut y, ReduceOp::Sum)?.wait()?;
            comm.finalize()?;
            return Ok(());
        }
        std::thread::scope(|scope| {
            let (first, holding) = std::sync::mpsc::channel();
            let sending = {
                let (comm, stream) = (&comm, &stream);
                scope.spawn(move || {
                    let x = stream.alloc_zeros::<f32>(16).expect("memory");
                    first.send(()).expect("somebody waits");
                    comm.group(|group| group.isend(&x, 1))?.wait()
                })
            };
            holding.recv()?;
            std::thread::sleep(Duration::from_millis(300));
            let other = context.new_stream()?;
            let mut y = other.alloc_zeros::<f32>(16)?;
            let begun = Instant::now();
            let hasty = comm.on(&other).within(Duration::from_millis(100));
            let error = hasty
                .all_reduce_in_place(&mut y, ReduceOp::Sum)
                .unwrap_err();
            assert!(begun.elapsed() < late, "{:?}", begun.elapsed());
            assert!(matches!(error.kind(), ErrorKind::Busy { .. }), "{error:#}");
            let text = format!("{error:#}");
            assert!(text.contains("in group #1"), "{text}");
            assert!(text.contains("100ms"), "{text}");
            // Its own timeout counts, however long other operations have taken before.
            let patient = comm.on(&other).within(late + Duration::from_secs(1));
            patient.all_reduce_in_place(&mut y, ReduceOp::Sum)?.wait()?;
            sending.join().expect("no panic")?;
            Ok::<(), Box<dyn std::error::Error>>(())
        })?;
        comm.finalize()?;
        Ok(())
    });
}

#[test]
fn an_abort_from_another_thread_ends_a_wait_and_is_no_success() {
    ranks_as_threads(2, |world| -> Outcome {
        let (stream, comm) = start(&world, |builder| builder)?;
        connect(&comm, &stream)?;
        if world.rank() == 0 {
            let done = unmatched(&comm, &stream)?;
            let begun = Instant::now();
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    std::thread::sleep(Duration::from_millis(100));
                    comm.abort("tired of waiting").unwrap();
                });
                let error = done.wait().unwrap_err();
                assert!(
                    format!("{error:#}").contains("tired of waiting"),
                    "{error:#}"
                );
            });
            assert!(begun.elapsed() < SOON);
            stream.synchronize()?;
            assert!(
                done.is_complete().is_err(),
                "an aborted operation never succeeds"
            );
            comm.abort("again")?;
        }
        world.barrier("end")?;
        comm.abort("the other rank did")?;
        Ok(())
    });
}

#[test]
fn an_abort_signal_ends_an_init_that_waits() {
    ranks_as_threads(1, |world| -> Outcome {
        let stream = stream(&world)?;
        let id = nccl::UniqueId::new(&nccl::Library::load()?)?;
        let stop = AbortSignal::new();
        let begun = Instant::now();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(100));
                stop.abort();
            });
            let error = Communicator::builder("alone", id, 0, 2)
                .stream(&stream)
                .with(|comm| comm.abort_signals.push(stop.clone()))
                .build()
                .unwrap_err();
            assert!(
                matches!(error.kind(), ErrorKind::Aborted { .. }),
                "{error:#}"
            );
        });
        assert!(begun.elapsed() < SOON);
        Ok(())
    });
}

#[test]
fn an_abort_during_a_finalize_that_waits_ends_both() {
    ranks_as_threads(2, |world| -> Outcome {
        let (stream, comm) = start(&world, |builder| builder)?;
        connect(&comm, &stream)?;
        if world.rank() == 0 {
            let begun = Instant::now();
            std::thread::scope(|scope| {
                let finalizing = scope.spawn(|| comm.finalize());
                std::thread::sleep(Duration::from_millis(200));
                comm.abort("rank 1 does not come").unwrap();
                assert!(finalizing.join().unwrap().is_err());
            });
            assert!(begun.elapsed() < SOON);
        }
        world.barrier("end")?;
        comm.abort("the other rank did")?;
        Ok(())
    });
}

#[test]
fn an_operation_that_a_finalize_in_vain_ends_is_no_success() {
    ranks_as_threads(2, |world| -> Outcome {
        let (stream, comm) = start(&world, |builder| {
            builder.with(|comm| comm.timeouts.finalize = Duration::from_millis(200))
        })?;
        connect(&comm, &stream)?;
        if world.rank() == 0 {
            let done = unmatched(&comm, &stream)?;
            std::thread::scope(|scope| {
                // Polls all the time, so that it polls when the abort ends the operation.
                let watching = scope.spawn(|| {
                    loop {
                        match done.is_complete() {
                            Ok(false) => {}
                            ended => break ended,
                        }
                    }
                });
                assert!(comm.finalize().unwrap_err().is_timeout());
                let ended = watching.join().unwrap();
                assert!(ended.is_err(), "an aborted operation succeeded");
            });
            assert!(done.is_complete().is_err());
        }
        world.barrier("end")?;
        comm.abort("the other rank did")?;
        Ok(())
    });
}

#[test]
fn an_abort_signal_ends_a_wait_and_a_limit_without_end_is_none() {
    ranks_as_threads(2, |world| -> Outcome {
        let stop = AbortSignal::new();
        let (stream, comm) = start(&world, |builder| {
            builder.with(|comm| {
                comm.timeouts.operation = Duration::MAX;
                comm.timeouts.finalize = Duration::MAX;
                comm.abort_signals.push(stop.clone());
            })
        })?;
        connect(&comm, &stream)?;
        if world.rank() == 0 {
            let done = unmatched(&comm, &stream)?;
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    std::thread::sleep(Duration::from_millis(100));
                    stop.abort();
                });
                let error = done.wait().unwrap_err();
                assert!(
                    matches!(error.kind(), ErrorKind::Aborted { .. }),
                    "{error:#}"
                );
            });
        }
        world.barrier("end")?;
        comm.abort("the other rank did")?;
        Ok(())
    });
}

#[test]
fn dropping_a_communicator_never_blocks_even_when_its_peer_stays_away() {
    ranks_as_threads(2, |world| -> Outcome {
        let (stream, comm) = start(&world, |builder| {
            builder.with(|comm| comm.timeouts.finalize = Duration::from_secs(2))
        })?;
        connect(&comm, &stream)?;
        if world.rank() == 0 {
            let begun = Instant::now();
            drop(comm);
            assert!(
                begun.elapsed() < Duration::from_secs(1),
                "{:?}",
                begun.elapsed()
            );
            world.barrier("end")?;
        } else {
            world.barrier("end")?;
            comm.abort("not interested in an orderly end")?;
        }
        Ok(())
    });
}

#[test]
fn an_abort_that_hangs_is_reported_as_a_leak_and_not_waited_for() {
    if !support::needs_emulator("an abort that hangs on purpose") {
        return;
    }
    ranks_as_threads(1, |world| -> Outcome {
        let timeout = Duration::from_millis(200);
        let (_stream, comm) = start(&world, |builder| {
            builder.with(|comm| comm.timeouts.abort = timeout)
        })?;
        let hang = faults::at_call("ncclCommAbort").hang();
        let begun = Instant::now();
        let error = comm.abort("to see it hang").unwrap_err();
        assert!(error.is_timeout() && begun.elapsed() < SOON, "{error:#}");
        assert_eq!(error.operation().unwrap().kind, OperationKind::Abort);
        let error = comm.abort("again").unwrap_err();
        assert!(error.is_timeout(), "{error:#}");
        drop(hang);
        Ok(())
    });
}

/// NCCL still has the address of a buffer that the caller is about to get back.
#[test]
fn a_launch_that_cannot_be_aborted_ends_the_process_instead_of_returning() {
    if !support::needs_emulator("an abort that hangs on purpose") {
        return;
    }
    let ended = Ranks::new(2).outcome(|world| {
        let stream = stream(&world).unwrap();
        let timeout = Duration::from_millis(200);
        let comm = world
            .communicator("test")
            .stream(&stream)
            .with(|comm| {
                comm.timeouts.operation = timeout;
                comm.timeouts.abort = timeout;
            })
            .build()
            .unwrap();
        if world.rank() == 0 {
            faults::at_call("ncclCommAbort").hang().keep();
            let mut y = stream.alloc_zeros::<f32>(1024).unwrap();
            let _ = comm.group(|group| group.irecv(&mut y, 1));
            println!("it came back");
        }
        std::thread::sleep(SOON);
    });
    let report = format!("{ended:?}");
    assert!(report.contains("ending the process"), "{report}");
    assert!(!report.contains("it came back"), "{report}");
}

#[test]
fn an_awaited_request_wakes_its_task_and_can_be_dropped() {
    use std::future::Future;
    use std::task::{Context, Poll, Wake};

    struct Unpark(std::thread::Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    ranks_as_threads(2, |world| -> Outcome {
        let (stream, comm) = start(&world, |builder| builder)?;
        connect(&comm, &stream)?;
        if world.rank() == 1 {
            world.barrier("pending")?;
            for _ in 0..2 {
                let x = stream.alloc_zeros::<f32>(1024)?;
                comm.group(|group| group.isend(&x, 0))?.wait()?;
            }
        } else {
            let waker = Arc::new(Unpark(std::thread::current())).into();
            let mut context = Context::from_waker(&waker);
            let mut dropped = Box::pin(unmatched(&comm, &stream)?);
            assert!(dropped.as_mut().poll(&mut context).is_pending());
            drop(dropped);
            let mut kept = Box::pin(unmatched(&comm, &stream)?);
            assert!(kept.as_mut().poll(&mut context).is_pending());
            world.barrier("pending")?;
            let deadline = Instant::now() + SOON;
            loop {
                match kept.as_mut().poll(&mut context) {
                    Poll::Ready(done) => break done?,
                    Poll::Pending => std::thread::park_timeout(Duration::from_secs(5)),
                }
                assert!(Instant::now() < deadline);
            }
        }
        comm.finalize()?;
        Ok(())
    });
}
