//! Captured plans: what a launch replays and waits for, and how plans and communicators end.

use std::sync::Arc;
use std::time::{Duration, Instant};

use nccl::cudarc::driver::{
    CudaContext, CudaSlice, CudaStream, DevicePtr, DevicePtrMut, result, sys,
};
use nccl::fault::FaultClass;
use nccl::plan::CapturedPlan;
use nccl::{Communicator, ErrorKind, LaunchMode, OperationKind, ReduceOp, World};
use nccl_emulator::faults;

use crate::support::{self, Ranks, ranks_as_processes, ranks_as_threads};

type Outcome = Result<(), Box<dyn std::error::Error>>;

const LATE: Duration = Duration::from_millis(30);

fn start(world: &World) -> Result<(Arc<CudaContext>, Communicator), Box<dyn std::error::Error>> {
    let context = support::device(world)?;
    let stream = context.new_stream()?;
    let comm = world
        .communicator("test")
        .stream(&stream)
        .with(|comm| {
            comm.timeouts.operation = Duration::from_secs(20);
            comm.timeouts.finalize = Duration::from_secs(10);
        })
        .build()?;
    Ok((context, comm))
}

fn nothing_was_caught() {
    let violations = nccl_emulator::violations();
    assert!(violations.is_empty(), "{violations:#?}");
}

/// The sum of one buffer over all ranks.
fn sum_plan(
    comm: &Communicator,
    on: &Arc<CudaStream>,
    len: usize,
) -> Result<CapturedPlan<CudaSlice<f32>>, Box<dyn std::error::Error>> {
    let y = on.alloc_zeros::<f32>(len)?;
    Ok(comm.capture(y, |capture, y| {
        capture.group(|group| group.all_reduce_in_place(y, ReduceOp::Sum))
    })?)
}

/// A ring of messages, then a sum of the received data, replayed with other data each time.
fn replay_a_ring_and_a_sum(world: &World) -> Outcome {
    let (context, comm) = start(world)?;
    let (own, ranks) = (world.rank(), world.size());
    let (next, previous) = ((own + 1) % ranks, (own + ranks - 1) % ranks);
    let stream = comm.stream().clone();
    let elsewhere = context.new_stream()?;
    let n = 10_000;
    let buffers = (
        stream.alloc_zeros::<f32>(n)?,
        vec![comm.buffer::<f32>(n)?, comm.buffer::<f32>(n)?],
        elsewhere.alloc_zeros::<f32>(4)?,
    );
    let mut plan = comm.capture(buffers, |capture, (from, mut to, ones)| {
        capture.group(|group| {
            group.isend(&from, next)?;
            group.irecv(&mut to[0], previous)
        })?;
        let (received, sum) = to.split_at_mut(1);
        capture.group(|group| {
            group.all_reduce(&received[0], &mut sum[0], ReduceOp::Sum)?;
            group.all_reduce_in_place(ones, ReduceOp::Sum)
        })
    })?;
    assert_eq!(plan.operations(), 4);
    let (_, to, _) = plan.views();
    assert_eq!(
        stream.clone_dtoh(&to[0])?,
        vec![0.0; n],
        "nothing has run yet"
    );

    for round in 1..=5 {
        let value = |rank: usize| (rank + 1) as f32 * round as f32;
        let (mut from, _, mut ones) = plan.views_mut();
        stream.memcpy_htod(&vec![value(own); n], &mut from)?;
        elsewhere.memcpy_htod(&[1.0; 4], &mut ones)?;
        let done = plan.launch()?;
        done.wait()?;
        let (_, to, ones) = plan.views();
        assert_eq!(stream.clone_dtoh(&to[0])?, vec![value(previous); n]);
        let expected: f32 = (0..ranks).map(value).sum();
        assert_eq!(stream.clone_dtoh(&to[1])?, vec![expected; n]);
        assert_eq!(elsewhere.clone_dtoh(&ones)?, [ranks as f32; 4]);
        // Operations beside the plan, in between.
        let mut y = stream.clone_htod(&[own as i32])?;
        comm.all_reduce_in_place(&mut y, ReduceOp::Max)?.wait()?;
        assert_eq!(stream.clone_dtoh(&y)?, [ranks as i32 - 1]);
    }
    let (from, to, _) = plan.into_buffers()?;
    assert_eq!((from.len(), to.len()), (n, 2));
    comm.finalize()?;
    nothing_was_caught();
    Ok(())
}

#[test]
fn threads_replay_what_they_captured() {
    ranks_as_threads(3, |world| replay_a_ring_and_a_sum(&world));
}

#[test]
fn processes_replay_what_they_captured() {
    ranks_as_processes(3, |world| replay_a_ring_and_a_sum(&world));
}

#[test]
fn a_world_of_one_rank_replays_without_nccl() {
    ranks_as_threads(1, |_| -> Outcome {
        let world = World::single();
        let (_context, comm) = start(&world)?;
        let stream = comm.stream().clone();
        let (x, y) = (stream.clone_htod(&[7u8; 64])?, comm.buffer::<u8>(64)?);
        let mut plan = comm.capture((x, y), |capture, (x, y)| {
            capture.group(|group| {
                group.isend(&x, 0)?;
                group.irecv(y, 0)
            })
        })?;
        plan.launch()?.wait()?;
        assert_eq!(stream.clone_dtoh(&plan.views().1)?, [7; 64]);
        drop(plan);
        comm.finalize()?;
        Ok(())
    });
}

#[test]
fn the_default_stream_can_launch_a_plan() {
    // The default stream of a device that both shared would make each wait for the other.
    if !support::needs_devices(2) {
        return;
    }
    ranks_as_threads(2, |world| -> Outcome {
        let context = support::device(&world)?;
        let stream = context.default_stream();
        let comm = world.communicator("test").stream(&stream).build()?;
        let mut plan = sum_plan(&comm, &stream, 8)?;
        stream.memcpy_htod(&[1.0; 8], &mut plan.views_mut())?;
        plan.launch()?.wait()?;
        assert_eq!(stream.clone_dtoh(&plan.views())?, [2.0; 8]);
        nothing_was_caught();
        Ok(())
    });
}

/// The plan is dropped at once; the memory of the replay is not freed.
#[test]
fn a_plan_dropped_under_its_replay_keeps_its_memory() {
    if !support::needs_emulator("work that runs late on purpose") {
        return;
    }
    ranks_as_threads(2, |world| -> Outcome {
        let (context, comm) = start(&world)?;
        let elsewhere = context.new_stream()?;
        for on in [comm.stream().clone(), elsewhere] {
            let mut plan = sum_plan(&comm, &on, 100_000)?;
            let late = faults::late(Duration::from_millis(500));
            let done = plan.launch()?;
            drop(plan);
            assert!(!done.is_complete()?, "it runs late");
            done.wait()?;
            drop(late);
        }
        comm.finalize()?;
        nothing_was_caught();
        Ok(())
    });
}

/// The buffers are returned while the replay runs; their streams wait for it.
#[test]
fn buffers_that_come_back_under_a_replay_are_ordered_behind_it() {
    if !support::needs_emulator("work that runs late on purpose") {
        return;
    }
    ranks_as_threads(2, |world| -> Outcome {
        let (context, comm) = start(&world)?;
        let elsewhere = context.new_stream()?;
        let mut plan = sum_plan(&comm, &elsewhere, 1000)?;
        elsewhere.memcpy_htod(&vec![1.0; 1000], &mut plan.views_mut())?;
        let late = faults::late(LATE);
        plan.launch()?;
        let y = plan.into_buffers()?;
        assert_eq!(elsewhere.clone_dtoh(&y)?, vec![2.0; 1000]);
        drop(y);
        drop(late);
        comm.finalize()?;
        nothing_was_caught();
        Ok(())
    });
}

#[test]
fn a_replay_waits_for_the_streams_of_its_buffers_and_they_for_it() {
    if !support::needs_emulator("work that runs late on purpose") {
        return;
    }
    ranks_as_threads(2, |world| -> Outcome {
        let (context, comm) = start(&world)?;
        for tracking in [true, false] {
            if !tracking {
                // SAFETY: the buffer is used on its stream and by the plan only.
                unsafe { context.disable_event_tracking() };
            }
            let owner = context.new_stream()?;
            let mut plan = sum_plan(&comm, &owner, 50_000)?;
            let late = faults::late(LATE);
            for _ in 0..3 {
                owner.memcpy_htod(&vec![1.0; 50_000], &mut plan.views_mut())?;
                plan.launch()?;
                // On the owner's stream, which waits for the replay.
                assert_eq!(owner.clone_dtoh(&plan.views())?, vec![2.0; 50_000]);
            }
            drop(late);
        }
        nothing_was_caught();
        Ok(())
    });
}

#[test]
fn a_buffer_of_somebody_else_is_refused() {
    ranks_as_threads(1, |world| -> Outcome {
        let (_context, comm) = start(&world)?;
        let stream = comm.stream().clone();
        let foreign = stream.alloc_zeros::<f32>(8)?;
        let own = stream.alloc_zeros::<f32>(8)?;
        let error = comm
            .capture(own, |capture, y| {
                capture.group(|group| group.all_reduce(&foreign, y, ReduceOp::Sum))
            })
            .unwrap_err();
        assert!(
            matches!(error.kind(), ErrorKind::NotInPlan { bytes: 32, .. }),
            "{error:#}"
        );
        assert_eq!(
            error.operation().map(|o| o.kind),
            Some(OperationKind::Capture)
        );
        // The communicator still works.
        let mut y = stream.clone_htod(&[3.0f32])?;
        comm.all_reduce_in_place(&mut y, ReduceOp::Sum)?.wait()?;
        Ok(())
    });
}

#[test]
fn a_plan_keeps_its_operators_until_it_is_captured() {
    ranks_as_threads(2, |world| -> Outcome {
        let (_context, comm) = start(&world)?;
        let y = comm.stream().clone_htod(&[1.0f32, 10.0])?;
        let mut plan = comm.capture(y, |capture, y| {
            capture.group(|group| {
                let twice = comm.pre_mul_sum(2.0f32)?;
                group.all_reduce_in_place(y, &twice)
            })
        })?;
        plan.launch()?.wait()?;
        assert_eq!(comm.stream().clone_dtoh(&plan.views())?, [4.0, 40.0]);
        Ok(())
    });
}

/// The checks of one group do not apply to the other.
#[test]
fn a_group_of_a_plan_cannot_trade_places_with_one_that_is_issued_at_once() {
    ranks_as_threads(2, |world| -> Outcome {
        let (_context, comm) = start(&world)?;
        let y = comm.stream().clone_htod(&[1.0f32, 10.0])?;
        let mut borrowed = comm.stream().clone_htod(&[3.0f32, 5.0])?;
        let plan = comm.capture(y, |capture, mut y| {
            capture.group(|of_plan| {
                of_plan.all_reduce_in_place(&mut y, ReduceOp::Sum)?;
                let inner = comm.group(|group| {
                    group.all_reduce_in_place(&mut borrowed, ReduceOp::Sum)?;
                    std::mem::swap(of_plan, group);
                    Ok(())
                });
                assert!(inner.unwrap_err().to_string().contains("swapped"));
                Ok(())
            })
        });
        let error = plan.unwrap_err();
        assert!(format!("{error:#}").contains("swapped"), "{error:#}");
        assert_eq!(comm.stream().clone_dtoh(&borrowed)?, [3.0, 5.0]);
        comm.finalize()?;
        Ok(())
    });
}

#[test]
fn what_the_closure_returns_comes_out_and_nothing_is_captured() {
    ranks_as_threads(1, |world| -> Outcome {
        let (_context, comm) = start(&world)?;
        let y = comm.stream().alloc_zeros::<f32>(8)?;
        let error = comm
            .capture(y, |capture, y| capture.group(|group| group.irecv(y, 9)))
            .unwrap_err();
        assert!(
            matches!(error.kind(), ErrorKind::NoSuchRank { .. }),
            "{error:#}"
        );
        // A panic in it leaves no stream capturing either.
        let y = comm.stream().alloc_zeros::<f32>(8)?;
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            comm.capture(y, |_, _| panic!("on purpose"))
        }));
        assert!(panicked.is_err());
        let mut plan = sum_plan(&comm, comm.stream(), 8)?;
        plan.launch()?.wait()?;
        comm.finalize()?;
        nothing_was_caught();
        Ok(())
    });
}

/// NCCL would wait for the graphs; so they are destroyed, and the plans can only return buffers.
#[test]
fn a_finalize_destroys_the_graphs_of_live_plans() {
    if !support::needs_emulator("work that runs late on purpose") {
        return;
    }
    ranks_as_threads(2, |world| -> Outcome {
        let (_context, comm) = start(&world)?;
        let stream = comm.stream().clone();
        let mut plan = sum_plan(&comm, &stream, 1000)?;
        let mut other = sum_plan(&comm, &stream, 10)?;
        stream.memcpy_htod(&vec![1.0; 1000], &mut plan.views_mut())?;
        let late = faults::late(LATE);
        plan.launch()?;
        // The replay is in progress: the finalize waits for it.
        let begun = Instant::now();
        comm.finalize()?;
        assert!(
            begun.elapsed() < Duration::from_secs(5),
            "{:?}",
            begun.elapsed()
        );
        drop(late);
        for plan in [&mut plan, &mut other] {
            let error = plan.launch().unwrap_err();
            assert!(
                matches!(error.kind(), ErrorKind::Closed { .. }),
                "{error:#}"
            );
            assert_eq!(
                error.operation().map(|o| o.kind),
                Some(OperationKind::Replay)
            );
        }
        let y = plan.into_buffers()?;
        assert_eq!(stream.clone_dtoh(&y)?, vec![2.0; 1000]);
        drop(other);
        nothing_was_caught();
        Ok(())
    });
}

/// Rank 1 launches nothing, so the replay of rank 0 waits until it is aborted.
#[test]
fn an_abort_ends_a_replay_that_waits_and_the_plan_with_it() {
    ranks_as_threads(2, |world| -> Outcome {
        let (context, comm) = start(&world)?;
        let elsewhere = context.new_stream()?;
        let mut plan = sum_plan(&comm, &elsewhere, 1000)?;
        world.barrier("captured")?;
        if world.rank() == 0 {
            let done = plan.launch()?;
            let error = done.wait_timeout(Duration::from_millis(100)).unwrap_err();
            assert!(error.is_timeout(), "{error:#}");
        }
        world.barrier("waited")?;
        let begun = Instant::now();
        comm.abort("rank 1 does not come")?;
        assert!(
            begun.elapsed() < Duration::from_secs(5),
            "{:?}",
            begun.elapsed()
        );
        let error = plan.launch().unwrap_err();
        assert!(
            format!("{error:#}").contains("rank 1 does not come"),
            "{error:#}"
        );
        let y = plan.into_buffers()?;
        // Not the result, but memory that no operation uses any more.
        assert_eq!(elsewhere.clone_dtoh(&y)?.len(), 1000);
        world.barrier("end")?;
        nothing_was_caught();
        Ok(())
    });
}

/// Once its queue is full, CUDA would let a launch wait without a timeout.
#[test]
fn launches_that_nobody_answers_run_into_their_limit() {
    ranks_as_threads(2, |world| -> Outcome {
        let (_context, comm) = start(&world)?;
        let impatient = comm.within(Duration::from_secs(2));
        let mut plan = sum_plan(&impatient, comm.stream(), 10)?;
        world.barrier("captured")?;
        if world.rank() == 0 {
            let mut launches = 0;
            let error = loop {
                match plan.launch() {
                    Ok(_) => launches += 1,
                    Err(error) => break error,
                }
                assert!(launches < 1000, "no end");
            };
            // The launch that waits for room reports the fault, or earlier the watchdog does, for the first launch.
            let fault = error.fault().expect("a cause that all know");
            assert_eq!(
                (fault.culprit(), fault.class),
                (Some(1), FaultClass::TimedOut),
                "{error:#}"
            );
            let operation = fault.operation().unwrap_or_default();
            // The launch that waits for room does not know which of the earlier ones is late.
            assert!(operation.starts_with("replay of plan 1"), "{operation}");
            assert!(fault.cause.ends_with("within 2s"), "{fault}");
            assert_eq!(
                error.is_timeout(),
                !matches!(error.kind(), ErrorKind::Aborted { .. }),
                "{error:#}"
            );
            assert!(launches >= 100, "{launches}");
        }
        world.barrier("given up")?;
        let _ = comm.abort("the other rank gave up");
        nothing_was_caught();
        Ok(())
    });
}

#[test]
fn a_thousand_launches_in_a_row_are_right() {
    ranks_as_threads(2, |world| -> Outcome {
        let (_context, comm) = start(&world)?;
        let stream = comm.stream().clone();
        let y = stream.clone_htod(&[1i32; 16])?;
        let mut plan = comm.capture(y, |capture, y| {
            capture.group(|group| group.all_reduce_in_place(y, ReduceOp::Max))
        })?;
        for _ in 0..1000 {
            plan.launch()?;
        }
        assert_eq!(stream.clone_dtoh(&plan.views())?, [1; 16]);
        nothing_was_caught();
        Ok(())
    });
}

/// Rank 1 captures nothing: the connection inside the capture is never made.
#[test]
fn a_capture_that_the_others_do_not_join_ends_at_its_limit() {
    ranks_as_threads(2, |world| -> Outcome {
        let (context, comm) = start(&world)?;
        if world.rank() == 0 {
            let begun = Instant::now();
            let comm = comm.within(Duration::from_millis(300));
            let y = comm.stream().alloc_zeros::<f32>(8)?;
            let error = comm
                .capture(y, |capture, y| {
                    capture.group(|group| group.all_reduce_in_place(y, ReduceOp::Sum))
                })
                .unwrap_err();
            assert!(error.is_timeout(), "{error:#}");
            assert!(
                begun.elapsed() < Duration::from_secs(8),
                "{:?}",
                begun.elapsed()
            );
            // No stream is left capturing: the context accepts calls that a capture would forbid.
            context.synchronize()?;
        }
        world.barrier("given up")?;
        let _ = comm.abort("the other rank gave up");
        nothing_was_caught();
        Ok(())
    });
}

/// The first group is in the graph, which holds the communicator, when the second one fails.
#[test]
fn a_capture_that_fails_half_way_lets_go_of_the_communicator() {
    if !support::needs_emulator("faults on purpose") {
        return;
    }
    ranks_as_threads(1, |world| -> Outcome {
        let (context, comm) = start(&world)?;
        let y = comm.stream().alloc_zeros::<f32>(8)?;
        let fault = faults::at_call("ncclReduceScatter").fail(3);
        let begun = Instant::now();
        let error = comm
            .capture(y, |capture, mut y| {
                capture.group(|group| group.all_reduce_in_place(&mut y, ReduceOp::Sum))?;
                capture.group(|group| group.reduce_scatter_in_place(y, ReduceOp::Sum))
            })
            .unwrap_err();
        drop(fault);
        assert!(matches!(error.kind(), ErrorKind::Nccl(_)), "{error:#}");
        assert!(
            begun.elapsed() < Duration::from_secs(8),
            "{:?}",
            begun.elapsed()
        );
        context.synchronize()?;
        let mut y = comm.stream().alloc_zeros::<f32>(8)?;
        let error = comm.all_reduce_in_place(&mut y, ReduceOp::Sum).unwrap_err();
        assert!(
            matches!(error.kind(), ErrorKind::Aborted { .. }),
            "{error:#}"
        );
        comm.abort("again")?;
        nothing_was_caught();
        Ok(())
    });
}

/// A plan with a sum in its first part and a maximum in its second.
fn two_parts(
    comm: &Communicator,
    len: usize,
) -> nccl::Result<CapturedPlan<(nccl::Buffer<f32>, nccl::Buffer<f32>)>> {
    let buffers = (comm.buffer::<f32>(len)?, comm.buffer::<f32>(len)?);
    comm.capture(buffers, |capture, (mut x, mut y)| {
        capture.group(|group| group.all_reduce_in_place(&mut x, ReduceOp::Sum))?;
        capture.next_part();
        capture.group(|group| group.all_reduce(&x, &mut y, ReduceOp::Max))
    })
}

fn replay_parts(world: &World) -> Outcome {
    let (_context, comm) = start(world)?;
    let stream = comm.stream().clone();
    let (rank, ranks) = (world.rank() as f32, world.size() as f32);
    let mut plan = two_parts(&comm, 100)?;
    assert_eq!((plan.parts(), plan.operations()), (2, 2));
    for round in 1..=4 {
        // What the program does between the parts is seen by the next one.
        stream.memcpy_htod(&[rank; 100], &mut plan.views_mut().0)?;
        plan.launch_part(0)?;
        let sum = stream.clone_dtoh(&plan.views().0)?;
        assert_eq!(sum, [ranks * (ranks - 1.0) / 2.0; 100]);
        stream.memcpy_htod(&[rank + round as f32; 100], &mut plan.views_mut().0)?;
        plan.launch_part(1)?.wait()?;
        let most = stream.clone_dtoh(&plan.views().1)?;
        assert_eq!(most, [ranks - 1.0 + round as f32; 100]);
    }
    // In another order, and all at once.
    stream.memcpy_htod(&[rank; 100], &mut plan.views_mut().0)?;
    plan.launch_part(1)?;
    plan.launch_part(0)?.wait()?;
    assert_eq!(stream.clone_dtoh(&plan.views().1)?, [ranks - 1.0; 100]);
    plan.launch()?.wait()?;
    let twice = ranks * ranks * (ranks - 1.0) / 2.0;
    assert_eq!(stream.clone_dtoh(&plan.views().1)?, [twice; 100]);

    // More than are in flight at once.
    for launch in 0..300 {
        plan.launch_part(launch % 2)?;
    }
    let error = plan.launch_part(2).unwrap_err();
    assert!(
        error.to_string().contains("part 2 of a plan with 2"),
        "{error}"
    );
    plan.launch()?.wait()?;
    comm.finalize()?;
    for part in 0..2 {
        let error = plan.launch_part(part).unwrap_err();
        assert!(
            matches!(error.kind(), ErrorKind::Closed { .. }),
            "{error:#}"
        );
    }
    nothing_was_caught();
    Ok(())
}

#[test]
fn parts_of_a_plan_are_launched_one_by_one() {
    ranks_as_threads(3, |world| replay_parts(&world));
    ranks_as_processes(2, |world| replay_parts(&world));
}

/// The first part is a graph by then, for which an abort would wait.
#[test]
fn a_part_that_cannot_be_captured_ends_the_communicator_and_the_parts_before_it() {
    ranks_as_threads(2, |world| -> Outcome {
        let (context, comm) = start(&world)?;
        let y = comm.stream().alloc_zeros::<f32>(8)?;
        let error = comm
            .capture(y, |capture, mut y| {
                capture.group(|group| group.all_reduce_in_place(&mut y, ReduceOp::Sum))?;
                capture.next_part();
                // SAFETY: it uses nothing.
                unsafe {
                    capture.launch(|_| {
                        Err(nccl::cudarc::driver::DriverError(
                            sys::CUresult::CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES,
                        ))
                    });
                }
                Ok(())
            })
            .unwrap_err();
        assert!(error.to_string().contains("`Capture::launch`"), "{error:#}");
        context.synchronize()?;
        comm.abort("again")?;
        assert_eq!(comm.state(), nccl::CommunicatorState::Aborted);
        nothing_was_caught();
        Ok(())
    });
}

#[test]
fn work_that_panics_while_it_is_captured_ends_the_communicator() {
    ranks_as_threads(2, |world| -> Outcome {
        let (context, comm) = start(&world)?;
        let y = comm.stream().alloc_zeros::<f32>(8)?;
        let captured = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            comm.capture(y, |capture, y| {
                capture.group(|group| group.all_reduce_in_place(y, ReduceOp::Sum))?;
                let is_second = world.rank() == 1;
                // SAFETY: it uses nothing.
                unsafe {
                    capture.launch(move |_| {
                        assert!(!is_second, "on purpose");
                        Ok(())
                    });
                }
                Ok(())
            })
            .map(drop)
        }));
        match captured {
            Err(payload) => {
                assert_eq!(world.rank(), 1);
                assert_eq!(payload.downcast_ref::<&str>(), Some(&"on purpose"));
            }
            // The capture was over when the other rank panicked.
            Ok(Ok(())) => assert_eq!(world.rank(), 0),
            Ok(Err(error)) => {
                assert!(error.to_string().contains("panicked"), "{error}");
                assert_eq!(world.rank(), 0);
            }
        }
        let begun = Instant::now();
        while comm.state() != nccl::CommunicatorState::Aborted {
            assert!(
                begun.elapsed() < Duration::from_secs(10),
                "{:?}",
                comm.state()
            );
            std::thread::sleep(Duration::from_millis(1));
        }
        context.synchronize()?;
        nothing_was_caught();
        Ok(())
    });
}

#[test]
fn parts_may_be_empty() {
    ranks_as_threads(2, |world| -> Outcome {
        let (_context, comm) = start(&world)?;
        let y = comm.stream().clone_htod(&[1.0f32; 8])?;
        let mut plan = comm.capture(y, |capture, y| {
            capture.next_part();
            capture.group(|group| group.all_reduce_in_place(y, ReduceOp::Sum))?;
            capture.next_part();
            capture.next_part();
            Ok(())
        })?;
        assert_eq!((plan.parts(), plan.operations()), (4, 1));
        plan.launch()?.wait()?;
        plan.launch_part(0)?.wait()?;
        plan.launch_part(3)?.wait()?;
        assert_eq!(comm.stream().clone_dtoh(&plan.views())?, [2.0; 8]);
        comm.finalize()?;
        nothing_was_caught();
        Ok(())
    });
}

/// What the work uses is owned by the function that was captured.
#[test]
fn work_of_the_program_keeps_its_memory() {
    ranks_as_threads(1, |world| -> Outcome {
        let (_context, comm) = start(&world)?;
        let stream = comm.stream().clone();
        let mut y = comm.buffer::<u32>(8)?;
        let to = y.view_mut().device_ptr_mut(&stream).0;
        let secret = Arc::new(stream.clone_htod(&[5u32; 8])?);
        let kept = Arc::downgrade(&secret);
        let from = secret.device_ptr(&stream).0;
        let mut plan = comm.capture(y, |capture, _| {
            // SAFETY: both are 32 bytes, of the plan and of the function.
            unsafe {
                capture.launch(move |on| {
                    let _owned = &secret;
                    result::memcpy_dtod_async(to, from, 32, on.cu_stream())
                });
            }
            Ok(())
        })?;
        plan.launch()?.wait()?;
        assert_eq!(stream.clone_dtoh(&plan.views())?, [5; 8]);
        assert!(kept.upgrade().is_some());
        drop(plan.into_buffers()?);
        // Released in the background, when the replay is over.
        let begun = Instant::now();
        while kept.upgrade().is_some() {
            assert!(
                begun.elapsed() < Duration::from_secs(10),
                "it is kept for ever"
            );
            std::thread::sleep(Duration::from_millis(1));
        }
        comm.finalize()?;
        nothing_was_caught();
        Ok(())
    });
}

/// The memory belongs to another stream, which would free it at once.
#[test]
fn what_work_of_the_program_owns_outlives_a_replay_under_which_the_buffers_come_back() {
    if !support::needs_emulator("work that runs late on purpose") {
        return;
    }
    ranks_as_threads(2, |world| -> Outcome {
        let (context, comm) = start(&world)?;
        let stream = comm.stream().clone();
        let mut y = comm.buffer::<u32>(8)?;
        let to = y.view_mut().device_ptr_mut(&stream).0;
        let elsewhere = context.new_stream()?;
        let own = elsewhere.clone_htod(&[5u32; 8])?;
        elsewhere.synchronize()?;
        let from = own.device_ptr(&elsewhere).0;
        let mut plan = comm.capture(y, |capture, y| {
            // It runs late, and the work behind it.
            capture.group(|group| group.all_reduce_in_place(y, ReduceOp::Sum))?;
            // SAFETY: both are 32 bytes, of the plan and of the function.
            unsafe {
                capture.launch(move |on| {
                    let _owned = &own;
                    result::memcpy_dtod_async(to, from, 32, on.cu_stream())
                });
            }
            Ok(())
        })?;
        let late = faults::late(LATE);
        plan.launch()?;
        let y = plan.into_buffers()?;
        assert_eq!(stream.clone_dtoh(&y.view())?, [5; 8]);
        drop(late);
        comm.finalize()?;
        nothing_was_caught();
        Ok(())
    });
}

/// A drop that panics does not keep later memory from being freed.
#[test]
fn work_of_the_program_whose_drop_panics_is_dropped_all_the_same() {
    struct Panics(Arc<()>);
    impl Drop for Panics {
        fn drop(&mut self) {
            assert!(Arc::strong_count(&self.0) == 0, "on purpose");
        }
    }
    ranks_as_threads(1, |world| -> Outcome {
        let (_context, comm) = start(&world)?;
        let counted = [Arc::new(()), Arc::new(())];
        for counted in &counted {
            let panics = Panics(Arc::clone(counted));
            let y = comm.buffer::<u32>(8)?;
            let plan = comm.capture(y, |capture, _| {
                // SAFETY: it uses nothing.
                unsafe {
                    capture.launch(move |_| {
                        let _owned = &panics;
                        Ok(())
                    });
                }
                Ok(())
            })?;
            drop(plan);
        }
        let begun = Instant::now();
        while counted.iter().any(|counted| Arc::strong_count(counted) > 1) {
            assert!(
                begun.elapsed() < Duration::from_secs(5),
                "the second one waits for the first"
            );
            std::thread::sleep(Duration::from_millis(1));
        }
        comm.finalize()?;
        Ok(())
    });
}

#[test]
fn work_of_the_program_is_replayed_in_its_place() {
    ranks_as_threads(2, |world| -> Outcome {
        let (_context, comm) = start(&world)?;
        let stream = comm.stream().clone();
        let mut x = comm.buffer::<u32>(8)?;
        let address = x.view_mut().device_ptr_mut(&stream).0;
        let mut plan = comm.capture(x, |capture, mut x| {
            let set = |value| {
                move |on: &Arc<CudaStream>| {
                    // SAFETY: 32 bytes of the plan's buffer.
                    unsafe { result::memset_d8_async(address, value, 32, on.cu_stream()) }
                }
            };
            // SAFETY: see there.
            unsafe { capture.launch(set(1)) };
            capture.group(|group| group.all_reduce_in_place(&mut x, ReduceOp::Sum))?;
            capture.next_part();
            // SAFETY: see there.
            unsafe { capture.launch(set(3)) };
            Ok(())
        })?;
        assert_eq!((plan.parts(), plan.operations()), (2, 1));
        for _ in 0..3 {
            plan.launch_part(0)?.wait()?;
            assert_eq!(stream.clone_dtoh(&plan.views())?, [0x0202_0202; 8]);
            // A part without operations of NCCL is a replay as well.
            plan.launch_part(1)?.wait()?;
            assert_eq!(stream.clone_dtoh(&plan.views())?, [0x0303_0303; 8]);
        }
        comm.finalize()?;
        nothing_was_caught();
        Ok(())
    });
}

/// Threads use the communicator's stream while another thread captures.
#[test]
fn other_threads_go_on_during_a_capture() {
    ranks_as_threads(1, |world| -> Outcome {
        let (_context, comm) = start(&world)?;
        std::thread::scope(|scope| -> Outcome {
            let using = scope.spawn(|| -> Result<(), nccl::Error> {
                for _ in 0..200 {
                    let mut y = comm.stream().clone_htod(&[1.0f32; 8]).expect("memory");
                    comm.all_reduce_in_place(&mut y, ReduceOp::Sum)?.wait()?;
                }
                Ok(())
            });
            for _ in 0..20 {
                let mut plan = sum_plan(&comm, comm.stream(), 8)?;
                plan.launch()?.wait()?;
            }
            using.join().expect("no panic")?;
            Ok(())
        })?;
        nothing_was_caught();
        Ok(())
    });
}

#[test]
fn a_plan_is_not_launched_on_a_capturing_stream() {
    ranks_as_threads(1, |world| -> Outcome {
        let (_context, comm) = start(&world)?;
        let mut plan = sum_plan(&comm, comm.stream(), 8)?;
        let stream = comm.stream();
        stream.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED)?;
        let error = plan.launch().unwrap_err();
        assert!(
            matches!(error.kind(), ErrorKind::Stream { .. }),
            "{error:#}"
        );
        let _ = stream.end_capture(sys::CUgraphInstantiate_flags(0));
        plan.launch()?.wait()?;
        Ok(())
    });
}

/// Every order in which a program may drop related objects.
#[test]
fn plans_buffers_streams_and_communicators_may_go_in_any_order() {
    if !support::needs_emulator("work that runs late on purpose") {
        return;
    }
    ranks_as_threads(2, |world| -> Outcome {
        for order in 0..6 {
            let context = support::device(&world)?;
            let stream = context.new_stream()?;
            let comm = world
                .communicator(&format!("round {order}"))
                .stream(&stream)
                .build()?;
            let registered = comm.register(comm.buffer::<f32>(1000)?)?;
            let mut plan = comm.capture(
                (registered, stream.alloc_zeros::<f32>(100)?),
                |capture, (x, y)| {
                    capture.group(|group| {
                        group.all_reduce_in_place(x, ReduceOp::Sum)?;
                        group.all_reduce_in_place(y, ReduceOp::Sum)
                    })
                },
            )?;
            let beside = comm.buffer::<u8>(64)?;
            let late = faults::late(Duration::from_millis(5));
            let done = plan.launch()?;
            let mut parts: Vec<Box<dyn std::any::Any>> = vec![
                Box::new(plan),
                Box::new(comm),
                Box::new((stream, context)),
                Box::new(beside),
            ];
            parts.rotate_left(order % 4);
            if order >= 4 {
                parts.reverse();
            }
            drop(parts);
            done.wait()?;
            drop((done, late));
        }
        nothing_was_caught();
        Ok(())
    });
}

/// NCCL's resources of a plan are destroyed before the communicator, and that before the parent that shares its abort
/// flag. Runs as many times as `NCCL_TEST_ROUNDS` sets; a few under a sanitizer or valgrind.
#[test]
fn plans_that_come_and_go_with_their_communicators_leave_nothing_behind() {
    let asked = std::env::var("NCCL_TEST_ROUNDS").map(|rounds| rounds.parse());
    let rounds = match (asked, std::env::var_os("NCCL_TEST_PATIENCE")) {
        (Ok(rounds), _) => rounds.expect("a number of rounds"),
        (Err(_), None) => 24,
        (Err(_), Some(_)) => 8,
    };
    Ranks::new(2)
        .deadline(4 * support::DEADLINE + Duration::from_secs(rounds as u64))
        .threads(move |world| -> Outcome {
            let context = support::device(&world)?;
            let stream = context.new_stream()?;
            let round = |number: usize| -> Outcome {
                let comm = world
                    .communicator(&format!("round {number}"))
                    .stream(&stream)
                    .build()?;
                let mut plan = sum_plan(&comm, &stream, 100)?;
                plan.launch()?.wait()?;
                let mut parts: Vec<Box<dyn std::any::Any>> = vec![Box::new(plan), Box::new(comm)];
                if number % 2 == 1 {
                    parts.reverse();
                }
                parts.into_iter().for_each(drop);
                Ok(())
            };
            // The permanent resources of a process exist after the first rounds.
            (0..4).try_for_each(round)?;
            // One rank counts: a directory that another rank reads meanwhile is a descriptor of the process as well.
            let count = || (world.rank() == 0).then(left);
            world.barrier("begun")?;
            let before = count();
            world.barrier("counted")?;
            (4..rounds).try_for_each(round)?;
            world.barrier("over")?;
            let now = count();
            if let (Some(before), Some(now)) = (before, now) {
                assert!(
                    now.0 <= before.0 && now.1 <= before.1,
                    "descriptors and threads: {before:?} at first, {now:?} after {rounds} rounds"
                );
            }
            world.barrier("counted")?;
            assert_eq!(nccl::stats().leaked_communicators, 0);
            nothing_was_caught();
            Ok(())
        });
}

/// The descriptors and threads of the process, once these numbers are stable for a while: dropped objects end in the
/// background.
fn left() -> (usize, usize) {
    let count = |of: &str| {
        let entries = std::fs::read_dir(format!("/proc/self/{of}")).expect("a directory");
        entries.count()
    };
    let (mut known, mut since) = ((count("fd"), count("task")), Instant::now());
    while since.elapsed() < Duration::from_millis(2500) {
        std::thread::sleep(Duration::from_millis(20));
        let now = (count("fd"), count("task"));
        if now != known {
            (known, since) = (now, Instant::now());
        }
    }
    known
}

/// No thread is left that could wait for the replay or abort it: the communicator ends as a dropped one does.
#[test]
fn a_dropped_communicator_is_aborted_when_a_replay_does_not_let_it_end() {
    if !support::needs_emulator("faults on purpose") {
        return;
    }
    // The test reads the free memory of its device.
    if !support::needs_devices(2) {
        return;
    }
    ranks_as_threads(2, |world| -> Outcome {
        let context = support::device(&world)?;
        let stream = context.new_stream()?;
        let timeout = Duration::from_secs(2);
        let comm = world
            .communicator("test")
            .stream(&stream)
            .with(|comm| comm.timeouts.finalize = timeout)
            .build()?;
        // NCCL connects the ranks at the first operation.
        let mut first = comm.buffer::<f32>(1 << 20)?;
        comm.all_reduce_in_place(&mut first, ReduceOp::Sum)?
            .wait()?;
        let before = context.mem_get_info()?.0;
        let registered = comm.register(comm.buffer::<f32>(1 << 20)?)?;
        let mut plan = comm.capture(registered, |capture, y| {
            capture.group(|group| group.all_reduce_in_place(y, ReduceOp::Sum))
        })?;
        let beside = comm.register(comm.buffer::<u8>(64)?)?;
        world.barrier("captured")?;
        if world.rank() == 0 {
            let aborts = faults::at_call("ncclCommAbort")
                .rank(0)
                .delay(Duration::ZERO);
            drop(plan.launch()?);
            let begun = Instant::now();
            drop((beside, comm, plan));
            assert!(begun.elapsed() < timeout, "a drop waited");
            while context.mem_get_info()?.0 < before {
                assert!(
                    begun.elapsed() < Duration::from_secs(20),
                    "nothing was freed"
                );
                std::thread::sleep(Duration::from_millis(1));
            }
            assert!(begun.elapsed() >= timeout, "{:?}", begun.elapsed());
            // The aborts of the communicator, and of its parent, which is its abort switch.
            let switched = support::launch_mode() == LaunchMode::BlockingChild;
            assert_eq!(aborts.hits(), 1 + u64::from(switched));
            stream.synchronize()?;
        }
        world.barrier("over")?;
        nothing_was_caught();
        Ok(())
    });
}
