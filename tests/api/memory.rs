//! Memory under operations: misuse that types cannot forbid, shown on the emulator with work that runs late.
//!
//! Each test does in safe code what frees, reads or overwrites memory too early elsewhere; the emulator records every
//! access to freed memory, and there must be none.

use std::sync::Arc;
use std::time::Duration;

use nccl::cudarc::driver::{CudaContext, CudaStream, sys};
use nccl::error::StreamRefusal;
use nccl::{Communicator, ErrorKind, ReduceOp, World};
use nccl_emulator::faults;

use crate::support;
use crate::support::gate::Gate;
use crate::support::ranks_as_threads;

type Outcome = Result<(), Box<dyn std::error::Error>>;

/// The delay of operations: longer than a test takes after issuing them.
const LATE: Duration = Duration::from_millis(30);

fn start(world: &World) -> Result<(Arc<CudaContext>, Communicator), Box<dyn std::error::Error>> {
    let context = support::device(world)?;
    let stream = context.new_stream()?;
    let comm = world.communicator("test").stream(&stream).build()?;
    Ok((context, comm))
}

/// One exchange, so that later ones do not wait inside NCCL for the first connection.
fn connect(comm: &Communicator) -> Outcome {
    let x = comm.stream().alloc_zeros::<u8>(comm.world_size())?;
    let mut y = comm.stream().alloc_zeros::<u8>(comm.world_size())?;
    comm.all_to_all(&x, &mut y)?.wait()?;
    Ok(())
}

fn nothing_was_caught() {
    let violations = nccl_emulator::violations();
    assert!(violations.is_empty(), "{violations:#?}");
}

/// Issues an all-to-all with buffers of `on`, drops them at once, and lets it run late.
fn drop_early(comm: &Communicator, on: &Arc<CudaStream>) -> Outcome {
    let late = faults::late(LATE);
    let n = 64 * 1024;
    for _ in 0..3 {
        let x = on.clone_htod(&vec![comm.rank() as u8; n * comm.world_size()])?;
        let mut y = on.alloc_zeros::<u8>(n * comm.world_size())?;
        let done = comm.all_to_all(&x, &mut y)?;
        drop((x, y));
        done.wait()?;
    }
    drop(late);
    Ok(())
}

#[test]
fn buffers_dropped_right_after_the_call_outlive_the_operation() {
    if !support::needs_emulator("work that runs late on purpose") {
        return;
    }
    ranks_as_threads(2, |world| -> Outcome {
        let (_context, comm) = start(&world)?;
        connect(&comm)?;
        drop_early(&comm, &comm.stream().clone())?;
        nothing_was_caught();
        Ok(())
    });
}

#[test]
fn buffers_of_another_stream_outlive_the_operation_too() {
    // The default stream of a device that both shared would make each wait for the other.
    if !support::needs_emulator("work that runs late on purpose") || !support::needs_devices(2) {
        return;
    }
    ranks_as_threads(2, |world| -> Outcome {
        let (context, comm) = start(&world)?;
        connect(&comm)?;
        drop_early(&comm, &context.new_stream()?)?;
        drop_early(&comm, &context.default_stream())?;
        nothing_was_caught();
        Ok(())
    });
}

#[test]
fn buffers_outlive_the_operation_with_event_tracking_off() {
    if !support::needs_emulator("work that runs late on purpose") {
        return;
    }
    ranks_as_threads(2, |world| -> Outcome {
        let (context, comm) = start(&world)?;
        connect(&comm)?;
        // SAFETY: this test uses each buffer on one stream and through operations only.
        unsafe { context.disable_event_tracking() };
        drop_early(&comm, &comm.stream().clone())?;
        drop_early(&comm, &context.new_stream()?)?;
        nothing_was_caught();
        Ok(())
    });
}

/// cudarc has one event for the readers of a buffer: the second reader replaces the first.
#[test]
fn a_second_reader_on_another_stream_does_not_free_the_buffer_under_the_first() {
    if !support::needs_emulator("work that runs late on purpose") {
        return;
    }
    ranks_as_threads(2, |world| -> Outcome {
        let (context, comm) = start(&world)?;
        connect(&comm)?;
        let (owner, reader) = (context.new_stream()?, context.new_stream()?);
        let n = 64 * 1024;
        let late = faults::late(LATE);
        let x = owner.clone_htod(&vec![1u8; 2 * n])?;
        let mut y = comm.stream().alloc_zeros::<u8>(2 * n)?;
        let done = comm.all_to_all(&x, &mut y)?;
        // Done long before the operation begins.
        let copy = reader.clone_dtod(&x)?;
        reader.synchronize()?;
        drop((x, copy));
        owner.synchronize()?;
        done.wait()?;
        drop(late);
        nothing_was_caught();
        Ok(())
    });
}

/// cudarc waits for nothing once the last stream of a context is gone; the communicator keeps one.
#[test]
fn dropping_the_last_stream_does_not_free_the_buffer_under_the_operation() {
    // The default stream of a device that both shared would make each wait for the other.
    if !support::needs_emulator("work that runs late on purpose") || !support::needs_devices(2) {
        return;
    }
    ranks_as_threads(2, |world| -> Outcome {
        let context = support::device(&world)?;
        let comm = world
            .communicator("test")
            .stream(&context.default_stream())
            .build()?;
        connect(&comm)?;
        let n = 64 * 1024;
        let late = faults::late(LATE);
        let x = context.default_stream().clone_htod(&vec![1u8; 2 * n])?;
        let side = context.new_stream()?;
        let mut y = side.alloc_zeros::<u8>(2 * n)?;
        let done = comm.all_to_all(&x, &mut y)?;
        drop(side);
        drop((x, y));
        done.wait()?;
        drop(late);
        assert!(context.is_managing_stream_synchronization());
        nothing_was_caught();
        Ok(())
    });
}

/// Two context objects for one device compare equal and track their events apart.
#[test]
fn a_buffer_of_another_context_object_is_refused() {
    ranks_as_threads(1, |world| -> Outcome {
        let (context, comm) = start(&world)?;
        let twin = CudaContext::new(context.ordinal())?;
        assert_eq!(context, twin);
        let stream = twin.new_stream()?;
        let mut y = stream.alloc_zeros::<f32>(8)?;
        let error = comm.all_reduce_in_place(&mut y, ReduceOp::Sum).unwrap_err();
        let ErrorKind::Stream { reason, .. } = error.kind() else {
            panic!("{error:#}")
        };
        assert_eq!(*reason, StreamRefusal::ForeignContext);
        Ok(())
    });
}

#[test]
fn the_per_thread_stream_is_refused_for_operations_and_for_buffers() {
    ranks_as_threads(1, |world| -> Outcome {
        let (context, comm) = start(&world)?;
        let per_thread = context.per_thread_stream();
        let is_refused = |error: nccl::Error| {
            let ErrorKind::Stream { reason, .. } = error.kind() else {
                panic!("{error:#}")
            };
            assert_eq!(*reason, StreamRefusal::PerThread);
        };
        is_refused(
            world
                .communicator("other")
                .stream(&per_thread)
                .build()
                .unwrap_err(),
        );
        let mut y = per_thread.alloc_zeros::<f32>(8)?;
        is_refused(comm.all_reduce_in_place(&mut y, ReduceOp::Sum).unwrap_err());
        Ok(())
    });
}

#[test]
fn a_capturing_stream_is_refused() {
    ranks_as_threads(1, |world| -> Outcome {
        let (context, comm) = start(&world)?;
        let mut y = comm.stream().alloc_zeros::<f32>(8)?;
        let other = context.new_stream()?;
        let mut elsewhere = other.alloc_zeros::<f32>(8)?;
        for (stream, buffer) in [(comm.stream(), &mut y), (&other, &mut elsewhere)] {
            stream.synchronize()?;
            stream.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED)?;
            let error = comm.all_reduce_in_place(buffer, ReduceOp::Sum).unwrap_err();
            let ErrorKind::Stream { reason, .. } = error.kind() else {
                panic!("{error:#}")
            };
            assert_eq!(*reason, StreamRefusal::Capturing);
            let _ = stream.end_capture(sys::CUgraphInstantiate_flags(0));
        }
        Ok(())
    });
}

/// A communicator lands on the device of its stream, whatever device the thread used last.
#[test]
fn a_communicator_is_made_on_the_device_of_its_stream() {
    ranks_as_threads(2, |world| -> Outcome {
        let context = support::device(&world)?;
        let stream = context.new_stream()?;
        let devices = CudaContext::device_count()? as usize;
        let _other = CudaContext::new((world.local_rank() + 1) % devices)?;
        let comm = world.communicator("test").stream(&stream).build()?;
        let mut y = stream.clone_htod(&[1.0f32; 64])?;
        comm.all_reduce_in_place(&mut y, ReduceOp::Sum)?.wait()?;
        assert_eq!(stream.clone_dtoh(&y)?, [2.0; 64]);
        nothing_was_caught();
        Ok(())
    });
}

/// The group ends inside the call: a program cannot leave its thread inside a group.
#[test]
fn operations_after_a_group_are_not_part_of_it() {
    ranks_as_threads(2, |world| -> Outcome {
        let (_context, comm) = start(&world)?;
        let peer = 1 - world.rank();
        let x = comm.stream().clone_htod(&[5u8; 32])?;
        let mut y = comm.stream().alloc_zeros::<u8>(32)?;
        std::mem::forget(comm.group(|group| {
            group.isend(&x, peer)?;
            group.irecv(&mut y, peer)
        })?);
        // Inside an open group this would be queued, and never run.
        let mut z = comm.stream().clone_htod(&[1i32; 8])?;
        comm.all_reduce_in_place(&mut z, ReduceOp::Sum)?.wait()?;
        assert_eq!(comm.stream().clone_dtoh(&z)?, [2; 8]);
        assert_eq!(comm.stream().clone_dtoh(&y)?, [5; 32]);
        Ok(())
    });
}

/// A group inside the closure of another is issued on its own, before it; neither frees early.
#[test]
fn a_group_inside_a_group_is_issued_by_itself() {
    if !support::needs_emulator("work that runs late on purpose") {
        return;
    }
    ranks_as_threads(2, |world| -> Outcome {
        let (context, comm) = start(&world)?;
        connect(&comm)?;
        let other = context.new_stream()?;
        let peer = 1 - world.rank();
        let n = 64 * 1024;
        let late = faults::late(LATE);
        let x = other.clone_htod(&vec![3u8; n])?;
        let mut y = other.alloc_zeros::<u8>(n)?;
        let mut z = comm.stream().alloc_zeros::<u8>(n)?;
        let done = comm.group(|outer| {
            outer.isend(&x, peer)?;
            comm.group(|inner| {
                inner.isend(&x, peer)?;
                inner.irecv(&mut y, peer)
            })?;
            outer.irecv(&mut z, peer)
        })?;
        drop(x);
        done.wait()?;
        drop(late);
        assert_eq!(other.clone_dtoh(&y)?, vec![3; n]);
        assert_eq!(comm.stream().clone_dtoh(&z)?, vec![3; n]);
        nothing_was_caught();
        Ok(())
    });
}

#[test]
fn codes_of_a_newer_library_are_kept_as_numbers() {
    if !support::needs_emulator("a call that fails on purpose") {
        return;
    }
    let later = nccl::DataType::from_raw(77);
    assert_eq!(later.to_string(), "ncclDataType_t(77)");
    ranks_as_threads(1, |world| -> Outcome {
        let (_context, comm) = start(&world)?;
        let fault = faults::at_call("ncclAllReduce").fail(4711);
        let mut y = comm.stream().alloc_zeros::<f32>(8)?;
        let error = comm.all_reduce_in_place(&mut y, ReduceOp::Sum).unwrap_err();
        drop(fault);
        let ErrorKind::Nccl(failure) = error.kind() else {
            panic!("{error:#}")
        };
        assert_eq!(failure.code, 4711);
        assert!(format!("{error:#}").contains("4711"), "{error:#}");
        Ok(())
    });
}

/// NCCL aborts all but the last rank of a process by counting them: the abort waits for nothing, and work that was put
/// on the stream between the timeout and the abort still runs.
#[test]
fn a_launch_that_came_between_limit_and_abort_keeps_its_memory() {
    if !support::needs_emulator("a call that fails on purpose") {
        return;
    }
    ranks_as_threads(2, |world| -> Outcome {
        let context = support::device(&world)?;
        let stream = context.new_stream()?;
        let timeouts = [Duration::from_millis(200), Duration::from_secs(30)];
        // Rank 1 gets no report that rank 0 gives up.
        let comm = support::strangers(&world, "test")?
            .stream(&stream)
            .with(|comm| comm.timeouts.operation = timeouts[world.rank()])
            .build()?;
        let owner = context.new_stream()?;
        if world.rank() == 0 {
            let late_abort = faults::at_call("ncclCommAbort")
                .rank(0)
                .delay(Duration::from_secs(3));
            let mut y = owner.alloc_zeros::<u8>(1 << 20)?;
            owner.synchronize()?;
            let gate = std::thread::scope(|scope| {
                let gate = scope.spawn(|| {
                    while late_abort.hits() == 0 {
                        std::thread::sleep(Duration::from_millis(1));
                    }
                    // The timeout has passed; now comes the launch.
                    let gate = Gate::closed_on(&stream).expect("a gate");
                    world.barrier("gated").expect("rank 1");
                    gate
                });
                let error = comm.group(|group| group.irecv(&mut y, 1)).unwrap_err();
                assert!(error.is_timeout(), "{error:#}");
                gate.join().expect("a gate")
            });
            // Work on the owner's stream now waits for the operation's stream.
            let done = context.new_event(None)?;
            done.record(&owner)?;
            assert!(!done.try_is_complete()?, "the buffer could be freed now");
            drop(y);
            gate.open();
            done.synchronize()?;
            owner.synchronize()?;
        } else {
            world.barrier("gated")?;
            let x = stream.alloc_zeros::<u8>(1 << 20)?;
            // Not waited for: rank 0 gives up before it receives anything.
            drop(comm.group(|group| group.isend(&x, 0))?);
        }
        world.barrier("end")?;
        let _ = comm.abort("the other rank did");
        nothing_was_caught();
        Ok(())
    });
}
