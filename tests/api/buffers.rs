//! Memory of this crate: allocated by NCCL, registered, dropped early, taken back.

use std::sync::Arc;
use std::time::{Duration, Instant};

use nccl::cudarc::driver::{CudaContext, sys};
use nccl::error::StreamRefusal;
use nccl::{Buffer, Communicator, ErrorKind, Library, ReduceOp, Request, World};
use nccl_emulator::faults;

use crate::support::gate::Gate;
use crate::support::{self, Ranks, ranks_as_processes, ranks_as_threads};

type Outcome = Result<(), Box<dyn std::error::Error>>;

const LATE: Duration = Duration::from_millis(30);
/// A delay after which a thread that does not wait is done long before.
const LONGER: Duration = Duration::from_millis(500);

fn start(world: &World) -> Result<(Arc<CudaContext>, Communicator), Box<dyn std::error::Error>> {
    let context = support::device(world)?;
    let stream = context.new_stream()?;
    let comm = world.communicator("test").stream(&stream).build()?;
    Ok((context, comm))
}

fn nothing_was_caught() {
    let violations = nccl_emulator::violations();
    assert!(violations.is_empty(), "{violations:#?}");
}

/// Waits for the request, and asserts that the NCCL call is not made before the request is complete.
fn done_before(done: &Request, call: &faults::FaultGuard) -> Outcome {
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        // In this order, so that a call before the completion is detected.
        let calls = call.hits();
        if done.is_complete()? {
            return Ok(());
        }
        assert_eq!(calls, 0, "NCCL was called under the operation");
        assert!(Instant::now() < deadline, "the operation is not done");
        std::thread::sleep(Duration::from_micros(100));
    }
}

/// Memory in use on the device.
fn used(context: &CudaContext) -> usize {
    let (free, total) = context.mem_get_info().expect("the device");
    total - free
}

fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !is_so() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn exchange(world: &World) -> Outcome {
    let (_context, comm) = start(world)?;
    let (stream, ranks) = (comm.stream().clone(), world.size());
    let n = 10_000;
    let mut x = comm.buffer::<u32>(n * ranks)?;
    let mut y = comm.register(comm.buffer::<u32>(n * ranks)?)?;
    assert!(y.is_effective());
    let mine: Vec<u32> = (0..n * ranks)
        .map(|i| (world.rank() * n * ranks + i) as u32)
        .collect();
    stream.memcpy_htod(&mine, &mut x.view_mut())?;
    comm.all_to_all(&x, &mut y)?.wait()?;
    let got = stream.clone_dtoh(&y.view())?;
    for from in 0..ranks {
        let first = (from * n * ranks + world.rank() * n) as u32;
        assert_eq!(got[from * n], first);
        assert_eq!(got[(from + 1) * n - 1], first + n as u32 - 1);
    }
    // Parts of a buffer, in both directions in one group.
    let peer = (world.rank() + 1) % ranks;
    let back = (world.rank() + ranks - 1) % ranks;
    let (low, _) = y_parts(&mut x, n);
    comm.group(|group| {
        group.isend(y.view().slice(..n), peer)?;
        group.irecv(low, back)
    })?
    .wait()?;
    let y = y.into_inner()?;
    assert_eq!(y.len(), n * ranks);
    comm.finalize()?;
    nothing_was_caught();
    Ok(())
}

fn y_parts(
    buffer: &mut Buffer<u32>,
    mid: usize,
) -> (
    nccl::cudarc::driver::CudaViewMut<'_, u32>,
    nccl::cudarc::driver::CudaViewMut<'_, u32>,
) {
    buffer.split_at_mut(mid)
}

#[test]
fn threads_exchange_buffers_of_nccl() {
    ranks_as_threads(3, |world| exchange(&world));
}

#[test]
fn processes_exchange_buffers_of_nccl() {
    ranks_as_processes(3, |world| exchange(&world));
}

/// The drop returns at once; the memory is freed when the operation is complete, not before, not never.
#[test]
fn a_dropped_buffer_is_freed_behind_the_operation_that_uses_it() {
    if !support::needs_emulator("work that runs late on purpose") {
        return;
    }
    ranks_as_processes(2, |world| -> Outcome {
        let (context, comm) = start(&world)?;
        let elsewhere = context.new_stream()?;
        // NCCL connects the ranks at the first message of a size.
        let (first, mut second) = (comm.buffer::<u8>(8 << 20)?, comm.buffer::<u8>(8 << 20)?);
        comm.all_to_all(&first, &mut second)?.wait()?;
        let before = used(&context);
        for on in [comm.stream().clone(), elsewhere] {
            let x = Buffer::<u8>::zeroed(comm.library(), &on, 8 << 20)?;
            let mut y = Buffer::<u8>::zeroed(comm.library(), &on, 8 << 20)?;
            let late = faults::late(LONGER);
            let freed = faults::at_call("ncclMemFree").delay(Duration::ZERO);
            let done = comm.all_to_all(&x, &mut y)?;
            let begun = Instant::now();
            drop((x, y));
            assert!(
                begun.elapsed() < LONGER,
                "a drop waited: {:?}",
                begun.elapsed()
            );
            done_before(&done, &freed)?;
            drop(late);
            wait_until("the memory is not freed", || used(&context) <= before);
        }
        nothing_was_caught();
        Ok(())
    });
}

#[test]
fn a_dropped_registration_is_taken_back_behind_the_operation_that_uses_it() {
    if !support::needs_emulator("work that runs late on purpose") {
        return;
    }
    ranks_as_processes(2, |world| -> Outcome {
        let (context, comm) = start(&world)?;
        // NCCL connects the ranks at the first message of a size.
        let (first, mut second) = (comm.buffer::<u8>(8 << 20)?, comm.buffer::<u8>(8 << 20)?);
        comm.all_to_all(&first, &mut second)?.wait()?;
        comm.all_reduce_in_place(&mut second, ReduceOp::Max)?
            .wait()?;
        let before = used(&context);
        let mut y = comm.register(comm.buffer::<u8>(8 << 20)?)?;
        let late = faults::late(LONGER);
        let deregistered = faults::at_call("ncclCommDeregister").delay(Duration::ZERO);
        let done = comm.all_reduce_in_place(&mut y, ReduceOp::Max)?;
        let begun = Instant::now();
        drop(y);
        assert!(
            begun.elapsed() < LONGER,
            "a drop waited: {:?}",
            begun.elapsed()
        );
        done_before(&done, &deregistered)?;
        drop(late);
        wait_until("the memory is not freed", || used(&context) <= before);
        assert!(deregistered.hits() > 0, "freed while registered");
        comm.finalize()?;
        nothing_was_caught();
        Ok(())
    });
}

#[test]
fn a_buffer_comes_back_from_its_registration_when_the_work_is_over() {
    if !support::needs_emulator("work that runs late on purpose") {
        return;
    }
    ranks_as_threads(2, |world| -> Outcome {
        let (context, comm) = start(&world)?;
        let owner = context.new_stream()?;
        let mut y = comm.register(owner.clone_htod(&[1.0f32; 1000])?)?;
        let late = faults::late(LATE);
        comm.all_reduce_in_place(&mut y, ReduceOp::Sum)?;
        let y = y.into_inner()?;
        drop(late);
        assert_eq!(owner.clone_dtoh(&y)?, vec![2.0; 1000]);
        nothing_was_caught();
        Ok(())
    });
}

#[test]
fn a_registration_that_is_still_in_use_does_not_come_back() {
    ranks_as_threads(2, |world| -> Outcome {
        let (_context, comm) = start(&world)?;
        let comm = comm.within(Duration::from_secs(5));
        let mut warm = comm.buffer::<u8>(8)?;
        comm.all_reduce_in_place(&mut warm, ReduceOp::Max)?.wait()?;
        let impatient = comm.within(Duration::from_millis(50));
        let mut y = impatient.register(comm.buffer::<u8>(64)?)?;
        world.barrier("registered")?;
        if world.rank() == 0 {
            // Rank 1 never enters.
            drop(comm.all_reduce_in_place(&mut y, ReduceOp::Max)?);
            let error = y.into_inner().unwrap_err();
            assert!(error.is_timeout(), "{error:#}");
        }
        world.barrier("given up")?;
        comm.abort("over")?;
        nothing_was_caught();
        Ok(())
    });
}

#[test]
fn registrations_outlive_a_finalize_and_an_abort() {
    ranks_as_threads(2, |world| -> Outcome {
        for abort in [false, true] {
            let context = support::device(&world)?;
            let stream = context.new_stream()?;
            let name = format!("abort: {abort}");
            let comm = world.communicator(&name).stream(&stream).build()?;
            let kept = comm.register(stream.clone_htod(&[5u8; 16])?)?;
            let dropped = comm.register(comm.buffer::<u8>(16)?)?;
            if abort {
                world.barrier("made")?;
                comm.abort("on purpose")?;
            } else {
                comm.finalize()?;
            }
            drop(dropped);
            assert_eq!(stream.clone_dtoh(&kept.into_inner()?)?, [5; 16]);
            let late = stream.alloc_zeros::<u8>(4)?;
            let error = comm.register(late).unwrap_err();
            assert!(
                matches!(
                    error.kind(),
                    ErrorKind::Aborted { .. } | ErrorKind::Closed { .. }
                ),
                "{error:#}"
            );
        }
        nothing_was_caught();
        Ok(())
    });
}

#[test]
fn a_switched_off_registration_changes_nothing() {
    Ranks::new(2)
        .variable("NCCL_LOCAL_REGISTER", "0")
        .threads(|world| -> Outcome {
            let (_context, comm) = start(&world)?;
            let mut y = comm.register(comm.stream().clone_htod(&[1i32; 8])?)?;
            assert!(!y.is_effective());
            comm.all_reduce_in_place(&mut y, ReduceOp::Sum)?.wait()?;
            assert_eq!(comm.stream().clone_dtoh(&y.view())?, [2; 8]);
            Ok(())
        });
}

#[test]
fn a_library_without_an_allocator_says_which_release_has_one() {
    if !support::needs_emulator("faults on purpose") {
        return;
    }
    Ranks::new(1)
        .variable("NCCL_EMULATOR_VERSION", "2.18.3")
        .threads(|world| -> Outcome {
            let (_context, comm) = start(&world)?;
            let error = comm.buffer::<f32>(8).unwrap_err();
            let ErrorKind::Unsupported { what, needs, .. } = error.kind() else {
                panic!("{error:#}")
            };
            assert_eq!(
                (&**what, needs.to_string()),
                ("ncclMemAlloc", "2.19.1".into())
            );
            let error = comm
                .register(comm.stream().alloc_zeros::<f32>(8)?)
                .unwrap_err();
            assert!(
                matches!(error.kind(), ErrorKind::Unsupported { .. }),
                "{error:#}"
            );
            Ok(())
        });
}

#[test]
fn buffers_of_strange_streams_and_sizes_are_refused() {
    ranks_as_threads(1, |world| -> Outcome {
        let (context, comm) = start(&world)?;
        let library = Library::load()?;
        let error = Buffer::<u8>::zeroed(&library, &context.per_thread_stream(), 8).unwrap_err();
        let ErrorKind::Stream { reason, .. } = error.kind() else {
            panic!("{error:#}")
        };
        assert_eq!(*reason, StreamRefusal::PerThread);
        let error = comm.buffer::<f64>(usize::MAX / 4).unwrap_err();
        assert!(
            matches!(error.kind(), ErrorKind::Length { .. }),
            "{error:#}"
        );
        let error = comm.buffer::<u8>(1 << 45).unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::Nccl(_)), "{error:#}");
        // Another context object for the same device has its own order.
        let twin = CudaContext::new(context.ordinal())?.new_stream()?;
        let error = comm.register(twin.alloc_zeros::<u8>(8)?).unwrap_err();
        assert!(
            matches!(error.kind(), ErrorKind::Stream { .. }),
            "{error:#}"
        );
        // An empty registration works.
        let mut none = comm.register(comm.buffer::<f32>(0)?)?;
        assert_eq!(none.view().len(), 0);
        comm.all_reduce_in_place(&mut none, ReduceOp::Sum)?.wait()?;
        nothing_was_caught();
        Ok(())
    });
}

/// Other streams that read or write the buffer are waited for, as with cudarc's own slices.
#[test]
fn a_reader_on_another_stream_keeps_a_dropped_buffer() {
    if !support::needs_emulator("a device that nobody else uses") {
        return;
    }
    ranks_as_threads(1, |world| -> Outcome {
        let (context, comm) = start(&world)?;
        let reader = context.new_stream()?;
        let x = comm.buffer::<u8>(1 << 20)?;
        let gate = Gate::closed_on(&reader)?;
        let copy = reader.clone_dtod(&x.view())?;
        let before = used(&context);
        drop(x);
        std::thread::sleep(LATE);
        assert!(used(&context) >= before, "freed under the reader");
        drop(gate);
        reader.synchronize()?;
        wait_until("the memory is not freed", || used(&context) < before);
        drop(copy);
        nothing_was_caught();
        Ok(())
    });
}

#[test]
fn a_reader_on_another_stream_waits_for_the_zeros_of_a_new_buffer() {
    if !support::needs_emulator("a device that nobody else uses") {
        return;
    }
    ranks_as_threads(1, |world| -> Outcome {
        let (context, comm) = start(&world)?;
        let reader = context.new_stream()?;
        let gate = Gate::closed_on(comm.stream())?;
        let x = comm.buffer::<u8>(1 << 20)?;
        let copy = reader.clone_dtod(&x.view())?;
        let read = reader.record_event(None)?;
        std::thread::sleep(LATE);
        assert!(!read.try_is_complete()?, "read before it was written");
        drop(gate);
        assert_eq!(reader.clone_dtoh(&copy)?, vec![0; 1 << 20]);
        nothing_was_caught();
        Ok(())
    });
}

/// A capture that a program has begun on the buffer's stream is not broken by the drop.
#[test]
fn a_buffer_dropped_during_a_capture_is_freed_after_it() {
    if !support::needs_emulator("a device that nobody else uses") {
        return;
    }
    ranks_as_threads(1, |world| -> Outcome {
        let (context, comm) = start(&world)?;
        let stream = comm.stream();
        let before = used(&context);
        let x = comm.buffer::<u8>(1 << 20)?;
        let registered = comm.register(comm.buffer::<u8>(1 << 20)?)?;
        stream.synchronize()?;
        stream.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)?;
        drop((x, registered));
        std::thread::sleep(LATE);
        assert!(
            used(&context) >= before + (2 << 20),
            "freed during the capture"
        );
        assert!(
            stream
                .end_capture(sys::CUgraphInstantiate_flags(0))?
                .is_some()
        );
        wait_until("the memory is not freed", || used(&context) <= before);
        nothing_was_caught();
        Ok(())
    });
}
