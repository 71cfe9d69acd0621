//! Effects of other parts of a program on the streams and contexts of operations: captures, and errors that cudarc
//! stores.

use std::sync::Arc;
use std::time::{Duration, Instant};

use nccl::all_to_all::{AllToAll, AllToAllAlgorithm, Parts};
use nccl::cudarc::driver::{CudaContext, CudaGraph, CudaSlice, CudaStream, DriverError, sys};
use nccl::error::StreamRefusal;
use nccl::launch::Fleet;
use nccl::moe::ExpertParallel;
use nccl::process::{FatalCause, FatalExit};
use nccl::{Communicator, CommunicatorState, DataType, Error, ErrorKind, ReduceOp, World};
use nccl_emulator::faults;
use nccl_tools::testing::{Role, again, name};

use crate::support::gate::Gate;
use crate::support::sums::{all_reduce, start, sum};
use crate::support::{self, ranks_as_processes, ranks_as_threads};

type Outcome = Result<(), Box<dyn std::error::Error>>;

const TIMEOUT: Duration = Duration::from_secs(30);
const RELAXED: sys::CUstreamCaptureMode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
const NO_FLAGS: sys::CUgraphInstantiate_flags = sys::CUgraphInstantiate_flags(0);

fn refusal(error: &Error) -> Option<StreamRefusal> {
    match error.local_kind().unwrap_or(error.kind()) {
        ErrorKind::Stream { reason, .. } => Some(*reason),
        _ => None,
    }
}

/// Ends a capture, which must not have become a graph.
fn ends_without_graph(stream: &Arc<CudaStream>) {
    let graph = stream.end_capture(NO_FLAGS);
    assert!(!matches!(graph, Ok(Some(_))), "there is a graph");
}

/// Waits until the capture of `stream` is invalidated.
fn becomes_void(stream: &CudaStream) {
    let begun = Instant::now();
    let void = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_INVALIDATED;
    while stream.capture_status().expect("a stream") != void {
        assert!(begun.elapsed() < TIMEOUT, "the capture goes on");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// An exchange with oneself.
fn to_oneself(comm: &Communicator) -> nccl::Result<()> {
    let mut y = comm.stream().alloc_zeros::<u8>(4).expect("memory");
    let x = comm.stream().clone_htod(&[1u8, 2, 3, 4]).expect("memory");
    let rank = comm.rank();
    comm.group(|group| {
        group.isend(&x, rank)?;
        group.irecv(&mut y, rank)
    })?
    .wait()
}

/// Connects each rank with itself and with the others, and waits for that.
fn connect(world: &World, comm: &Communicator) -> Outcome {
    to_oneself(comm)?;
    all_reduce(comm, comm.stream())?;
    Ok(world.barrier(&format!("{} is connected", comm.name()))?)
}

/// An error is returned before the abort has returned from NCCL.
fn becomes_aborted(comm: &Communicator) {
    let begun = Instant::now();
    while comm.state() != CommunicatorState::Aborted {
        assert!(begun.elapsed() < TIMEOUT, "it is {}", comm.state());
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_capture_that_a_groups_closure_begins_on_the_stream_of_a_buffer_is_refused() {
    ranks_as_threads(2, |world| -> Outcome {
        let (stream, comm) = start(&world, TIMEOUT)?;
        let home = stream.context().new_stream()?;
        let x = home.clone_htod(&[1u8, 2, 3, 4])?;
        let mut y = home.alloc_zeros::<u8>(4)?;
        home.synchronize()?;
        let rank = comm.rank();
        let error = comm
            .group(|group| {
                group.isend(&x, rank)?;
                group.irecv(&mut y, rank)?;
                home.begin_capture(RELAXED).expect("it begins");
                Ok(())
            })
            .unwrap_err();
        assert_eq!(refusal(&error), Some(StreamRefusal::Capturing), "{error:#}");
        // Neither the work nor the communicator's stream is in that graph.
        if let Some(graph) = home.end_capture(NO_FLAGS)? {
            drop((x, y));
            graph.launch()?;
            home.synchronize()?;
        }
        assert_eq!(sum(&comm, &stream)?, 11.0);
        Ok(())
    });
}

/// Rank 0 issues `work`; a fault delays it in `call` until another thread has begun a capture on `stream`. The capture
/// ends soon, or when the work has returned.
fn captured_meanwhile(
    stream: &Arc<CudaStream>,
    call: &str,
    ends_soon: bool,
    work: impl FnOnce() -> Error + Send,
) -> Error {
    // Gives pending work time to reach the device.
    let arrives = || std::thread::sleep(Duration::from_millis(100));
    captured_when(stream, call, ends_soon, arrives, work)
}

/// As [`captured_meanwhile`]; the capture begins when `arrives` has returned.
fn captured_when(
    stream: &Arc<CudaStream>,
    call: &str,
    ends_soon: bool,
    arrives: impl FnOnce(),
    work: impl FnOnce() -> Error + Send,
) -> Error {
    let held = faults::at_call(call).on_other_threads().hang();
    std::thread::scope(|scope| {
        let issues = scope.spawn(work);
        assert!(held.wait_for_hits(1, TIMEOUT));
        arrives();
        stream.begin_capture(RELAXED).expect("it begins");
        drop(held);
        if ends_soon {
            becomes_void(stream);
            ends_without_graph(stream);
        }
        let error = issues.join().expect("no panic");
        if !ends_soon {
            ends_without_graph(stream);
        }
        assert!(names_the_capture(&error), "{error:#}");
        assert!(error.fault().is_some(), "all ranks say why: {error:#}");
        error
    })
}

fn names_the_capture(error: &Error) -> bool {
    error
        .to_string()
        .contains(&StreamRefusal::CapturedMeanwhile.to_string())
}

/// Asserts that the other rank gets the fault.
fn is_told_of_rank_0(comm: &Communicator, stream: &Arc<CudaStream>) {
    let error = all_reduce(comm, stream).unwrap_err();
    assert_eq!(
        error.fault().expect("a cause").culprit(),
        Some(0),
        "{error:#}"
    );
}

#[test]
fn a_capture_that_another_thread_begins_under_an_operation_ends_without_a_graph() {
    if !support::needs_emulator("a call that hangs on purpose") {
        return;
    }
    ranks_as_processes(2, |world: World| -> Outcome {
        let (stream, comm) = start(&world, TIMEOUT)?;
        connect(&world, &comm)?;
        if world.rank() == 1 {
            is_told_of_rank_0(&comm, &stream);
            world.barrier("over")?;
            return Ok(());
        }
        // Of the operation's stream, and of another one.
        let away = stream.context().new_stream()?;
        let (x, mut y) = (stream.clone_htod(&[1u8; 4])?, away.alloc_zeros::<u8>(4)?);
        stream.context().synchronize()?;
        let work = || {
            let issued = comm.group(|group| {
                group.isend(&x, 0)?;
                group.irecv(&mut y, 0)
            });
            issued.map(drop).unwrap_err()
        };
        captured_meanwhile(&stream, "ncclSend", true, work);
        becomes_aborted(&comm);
        assert_eq!(away.clone_dtoh(&y)?, [0; 4]);
        world.barrier("over")?;
        Ok(())
    });
}

#[test]
fn a_capture_that_does_not_end_is_not_waited_for_and_the_communicator_is_leaked() {
    if !support::needs_emulator("a call that hangs on purpose") {
        return;
    }
    ranks_as_processes(2, |world: World| -> Outcome {
        let stream = support::device(&world)?.new_stream()?;
        let comm = world
            .communicator("all")
            .stream(&stream)
            .with(|comm| comm.timeouts.operation = TIMEOUT);
        let comm = comm
            .with(|comm| comm.timeouts.abort = Duration::from_millis(500))
            .build()?;
        connect(&world, &comm)?;
        if world.rank() == 1 {
            is_told_of_rank_0(&comm, &stream);
            world.barrier("over")?;
            return Ok(());
        }
        let leaked = nccl::stats().leaked_communicators;
        // SAFETY: the buffers are used on one stream, and by operations alone.
        unsafe { stream.context().disable_event_tracking() };
        let (x, mut y) = (stream.clone_htod(&[1u8; 4])?, stream.alloc_zeros::<u8>(4)?);
        stream.synchronize()?;
        let work = || {
            let issued = comm.group(|group| {
                group.isend(&x, 0)?;
                group.irecv(&mut y, 0)
            });
            let error = issued.map(drop).unwrap_err();
            // In the background.
            let deadline = Instant::now() + TIMEOUT;
            while comm.state() != CommunicatorState::Leaked && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(5));
            }
            error
        };
        captured_meanwhile(&stream, "ncclSend", false, work);
        assert_eq!(comm.state(), CommunicatorState::Leaked);
        assert_eq!(nccl::stats().leaked_communicators, leaked + 1);
        assert_eq!(stream.clone_dtoh(&y)?, [0; 4]);
        world.barrier("over")?;
        Ok(())
    });
}

/// An abort needs the lock, and the program's own next call may end the wait.
#[test]
fn a_communicator_is_not_locked_while_the_end_of_a_capture_is_waited_for() {
    if !support::needs_emulator("a call that hangs on purpose") {
        return;
    }
    ranks_as_processes(2, |world: World| -> Outcome {
        let stream = support::device(&world)?.new_stream()?;
        let comm = world
            .communicator("all")
            .stream(&stream)
            .with(|comm| comm.timeouts.operation = TIMEOUT);
        // The wait for the end of a capture takes at most half of the timeout of an abort.
        let comm = comm
            .with(|comm| comm.timeouts.abort = 2 * TIMEOUT)
            .build()?;
        connect(&world, &comm)?;
        if world.rank() == 1 {
            is_told_of_rank_0(&comm, &stream);
            world.barrier("over")?;
            return Ok(());
        }
        // SAFETY: the buffers are used on one stream, and by operations alone.
        unsafe { stream.context().disable_event_tracking() };
        let (x, mut y) = (stream.clone_htod(&[1u8; 4])?, stream.alloc_zeros::<u8>(4)?);
        let mut z = stream.alloc_zeros::<f32>(4)?;
        stream.synchronize()?;
        let held = faults::at_call("ncclSend").on_other_threads().hang();
        std::thread::scope(|scope| -> Outcome {
            let issues = scope.spawn(|| {
                let issued = comm.group(|group| {
                    group.isend(&x, 0)?;
                    group.irecv(&mut y, 0)
                });
                issued.map(drop).unwrap_err()
            });
            assert!(held.wait_for_hits(1, TIMEOUT));
            stream.begin_capture(RELAXED)?;
            drop(held);
            // Busy while the call is in progress.
            let begun = Instant::now();
            let refused = loop {
                let brief = comm.within(Duration::from_millis(50));
                let issued = brief.all_reduce_in_place(&mut z, ReduceOp::Sum);
                let error = issued.map(drop).unwrap_err();
                if !matches!(error.kind(), ErrorKind::Busy { .. }) {
                    break error;
                }
                assert!(begun.elapsed() < TIMEOUT / 3, "{error:#}");
            };
            assert_eq!(
                refusal(&refused),
                Some(StreamRefusal::Capturing),
                "{refused}"
            );
            assert!(!issues.is_finished());
            becomes_void(&stream);
            ends_without_graph(&stream);
            let error = issues.join().expect("no panic");
            let reason = refusal(&error);
            assert_eq!(reason, Some(StreamRefusal::CapturedMeanwhile), "{error:#}");
            Ok(())
        })?;
        becomes_aborted(&comm);
        world.barrier("over")?;
        Ok(())
    });
}

/// Waits until NCCL has enqueued its work on the device, for which it connects the ranks first.
fn has_launched(raw: nccl_sys::ncclComm_t) {
    // SAFETY: loads what is loaded already.
    let loaded = unsafe { nccl_sys::Loader::new().load() }.expect("a library");
    let ask = loaded.api.ncclCommGetAsyncError;
    let ask = ask.expect("every release has it");
    let begun = Instant::now();
    let mut state = nccl_sys::ncclResult_t::ncclInProgress;
    while state == nccl_sys::ncclResult_t::ncclInProgress {
        assert!(begun.elapsed() < TIMEOUT, "nothing is launched");
        // SAFETY: the communicator lives, no other thread queries it, and `state` is a valid place.
        unsafe { ask(raw, &mut state) };
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(state, nccl_sys::ncclResult_t::ncclSuccess);
}

/// NCCL has enqueued the operation on the device, and the capture begins while this crate queries the state.
#[test]
fn a_capture_behind_a_launch_lets_no_buffer_be_freed_too_early() {
    if !support::needs_emulator("work that runs late on purpose") {
        return;
    }
    ranks_as_processes(2, |world: World| -> Outcome {
        let world = world.with_launch_mode(nccl::LaunchMode::NonBlocking);
        let (stream, comm) = start(&world, TIMEOUT)?;
        let away = stream.context().new_stream()?;
        let mut y = away.clone_htod(&[1f32; 1000])?;
        stream.context().synchronize()?;
        world.barrier("both")?;
        if world.rank() == 1 {
            // Connects the ranks; the other rank's launch waits for that.
            let _ = comm
                .all_reduce_in_place(&mut y, ReduceOp::Sum)
                .map(|done| done.wait());
            world.barrier("over")?;
            return Ok(());
        }
        let raw = comm.as_raw().expect("it is ready");
        let late = faults::late(Duration::from_millis(400));
        let work = || {
            comm.all_reduce_in_place(&mut y, ReduceOp::Sum)
                .map(drop)
                .unwrap_err()
        };
        let arrives = || has_launched(raw);
        captured_when(&stream, "ncclCommGetAsyncError", true, arrives, work);
        drop(y);
        drop(late);
        stream.context().synchronize()?;
        let caught = nccl_emulator::violations();
        assert!(caught.is_empty(), "{caught:?}");
        world.barrier("over")?;
        Ok(())
    });
}

#[test]
fn of_a_group_of_several_communicators_all_are_aborted_once_the_capture_has_ended() {
    if !support::needs_emulator("a call that hangs on purpose") {
        return;
    }
    ranks_as_processes(2, |world: World| -> Outcome {
        let context = support::device(&world)?;
        let make = |name| -> Result<_, Box<dyn std::error::Error>> {
            let stream = context.new_stream()?;
            let comm = world
                .communicator(name)
                .stream(&stream)
                .with(|comm| comm.timeouts.operation = TIMEOUT);
            let comm = comm.build()?;
            connect(&world, &comm)?;
            Ok((stream, comm))
        };
        let [(s, a), (t, b)] = [make("a")?, make("b")?];
        if world.rank() == 1 {
            is_told_of_rank_0(&a, &s);
            is_told_of_rank_0(&b, &t);
            world.barrier("over")?;
            return Ok(());
        }
        let (x, mut y) = (s.clone_htod(&[1u8; 4])?, s.alloc_zeros::<u8>(4)?);
        let (v, mut w) = (t.clone_htod(&[1u8; 4])?, t.alloc_zeros::<u8>(4)?);
        context.synchronize()?;
        let work = || {
            let issued = nccl::group(|group| {
                group.on(&a)?.isend(&x, 0)?;
                group.on(&a)?.irecv(&mut y, 0)?;
                group.on(&b)?.isend(&v, 0)?;
                group.on(&b)?.irecv(&mut w, 0)
            });
            issued.map(drop).unwrap_err()
        };
        captured_meanwhile(&s, "ncclSend", true, work);
        becomes_aborted(&a);
        becomes_aborted(&b);
        world.barrier("over")?;
        Ok(())
    });
}

/// Rank 0 issues `work` while another thread's capture of `stream` begins in `call`, and ends before this crate
/// invalidates it.
fn becomes_a_graph<T: Send>(
    stream: &Arc<CudaStream>,
    call: &str,
    work: impl FnOnce() -> T + Send,
) -> (T, Option<CudaGraph>) {
    let held = faults::at_call(call).on_other_threads().hang();
    let asks = faults::at_call("cuStreamQuery").on_other_threads().hang();
    std::thread::scope(|scope| {
        let issues = scope.spawn(work);
        assert!(held.wait_for_hits(1, TIMEOUT));
        // The watchdog's mark behind earlier work would invalidate the capture; it is over by then.
        std::thread::sleep(Duration::from_millis(100));
        stream.begin_capture(RELAXED).expect("it begins");
        drop(held);
        assert!(asks.wait_for_hits(1, TIMEOUT));
        let graph = stream.end_capture(NO_FLAGS).expect("a graph");
        drop(asks);
        (issues.join().expect("no panic"), graph)
    })
}

/// The graph has the addresses of borrowed memory, and can be launched at any time.
#[test]
fn a_capture_that_ends_before_it_is_void_ends_the_process() {
    let test = name(&|| ());
    if let Role::Child(_) = Role::of(&test) {
        nccl::process::on_fatal(|report| match report.cause {
            FatalCause::CapturedInGraph => FatalExit::Code(75),
            _ => FatalExit::Abort,
        });
        nccl_tools::perf::install(2).expect("the emulator");
        let mut worlds = World::threads(2);
        let one = worlds.pop().expect("a world");
        let begun = |world: &World| {
            let (stream, comm) = start(world, TIMEOUT).expect("a communicator");
            connect(world, &comm).expect("it works");
            (stream, comm)
        };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let _comm = begun(&one);
                std::thread::sleep(TIMEOUT);
            });
            let (stream, comm) = begun(&worlds[0]);
            let x = stream.clone_htod(&[1u8; 4]).expect("memory");
            let mut y = stream.alloc_zeros::<u8>(4).expect("memory");
            let work = || {
                let issued = comm.group(|group| {
                    group.isend(&x, 0)?;
                    group.irecv(&mut y, 0)
                });
                issued.map(drop)
            };
            let (issued, _) = becomes_a_graph(&stream, "ncclSend", work);
            panic!("the call must not come back, and says {issued:?}");
        });
    }
    if !support::needs_emulator("calls that hang on purpose") {
        return;
    }
    let fleet = Fleet::builder(1).start(move |_| again(&test, "ends"));
    let report = fleet.expect("a process").wait_timeout(TIMEOUT * 2);
    let report = report.expect("it ends by itself");
    assert_eq!(report.exit_code(), 75, "{report}");
    let said = report.to_string();
    assert!(said.contains("captured a graph"), "{said}");
    assert!(!said.contains("void"), "{said}");
}

#[test]
fn a_replay_that_another_threads_capture_takes_ends_the_communicator() {
    if !support::needs_emulator("a call that hangs on purpose") {
        return;
    }
    ranks_as_processes(2, |world: World| -> Outcome {
        let (stream, comm) = start(&world, TIMEOUT)?;
        let y = comm.buffer::<f32>(1000)?;
        let mut plan = comm.capture(y, |capture, y| {
            capture.group(|group| group.all_reduce_in_place(y, ReduceOp::Sum))
        })?;
        plan.launch()?.wait()?;
        world.barrier("both have replayed it")?;
        if world.rank() == 1 {
            is_told_of_rank_0(&comm, &stream);
            world.barrier("over")?;
            return Ok(());
        }
        captured_meanwhile(&stream, "cuGraphLaunch", true, || {
            plan.launch().map(drop).unwrap_err()
        });
        becomes_aborted(&comm);
        drop(plan);
        world.barrier("over")?;
        Ok(())
    });
}

/// The plan owns its memory, which stays as long as the graph of the other thread may use it.
#[test]
fn a_replay_that_is_in_another_threads_graph_leaves_the_plans_memory_to_that() {
    if !support::needs_emulator("calls that hang on purpose") {
        return;
    }
    ranks_as_processes(2, |world: World| -> Outcome {
        let stream = support::device(&world)?.new_stream()?;
        let comm = world
            .communicator("all")
            .stream(&stream)
            .with(|comm| comm.timeouts.operation = TIMEOUT);
        let comm = comm
            .with(|comm| comm.timeouts.abort = Duration::from_millis(500))
            .build()?;
        let y = comm.buffer::<f32>(1000)?;
        let mut plan = comm.capture(y, |capture, y| {
            capture.group(|group| group.all_reduce_in_place(y, ReduceOp::Sum))
        })?;
        plan.launch()?.wait()?;
        world.barrier("both have replayed it")?;
        if world.rank() == 1 {
            is_told_of_rank_0(&comm, &stream);
            world.barrier("over")?;
            return Ok(());
        }
        let freed = faults::at_call("ncclMemFree").delay(Duration::ZERO);
        let work = || plan.launch().map(drop).unwrap_err();
        let (error, graph) = becomes_a_graph(&stream, "cuGraphLaunch", work);
        assert!(graph.is_some(), "it ended before it was void");
        assert_eq!(refusal(&error), Some(StreamRefusal::InGraph), "{error:#}");
        assert!(!format!("{error:#}").contains("void"), "{error:#}");
        let deadline = Instant::now() + TIMEOUT;
        while comm.state() != CommunicatorState::Leaked && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(5));
        }
        assert_eq!(comm.state(), CommunicatorState::Leaked);
        drop(plan);
        assert!(!freed.wait_for_hits(1, Duration::from_millis(300)));
        drop(graph);
        world.barrier("over")?;
        Ok(())
    });
}

#[test]
fn kernels_of_expert_parallelism_that_another_threads_capture_takes_end_the_communicator() {
    if !support::needs_emulator("a call that hangs on purpose") {
        return;
    }
    ranks_as_processes(2, |world: World| -> Outcome {
        let (stream, comm) = start(&world, TIMEOUT)?;
        let ep = ExpertParallel::builder(&comm).with(|ep| {
            ep.experts = 2;
            ep.top_k = 1;
            ep.max_tokens = 4;
            ep.max_row_bytes = 4;
        });
        let ep = ep.build()?;
        let mut routing = ep.routing()?;
        let topk = stream.clone_htod(&[0i32, 1])?;
        ep.route(&topk, &mut routing)?.wait()?;
        if world.rank() == 1 {
            is_told_of_rank_0(&comm, &stream);
            world.barrier("over")?;
            return Ok(());
        }
        captured_meanwhile(&stream, "cuLaunchKernel", true, || {
            ep.route(&topk, &mut routing).map(drop).unwrap_err()
        });
        becomes_aborted(&comm);
        world.barrier("over")?;
        Ok(())
    });
}

/// The operation itself is in no capture; but the stream on which its buffer is freed cannot wait for it.
#[test]
fn a_capture_that_begins_on_the_stream_of_a_buffer_lets_that_not_be_freed_too_early() {
    if !support::needs_emulator("a call that hangs on purpose") {
        return;
    }
    ranks_as_processes(2, |world: World| -> Outcome {
        let (stream, comm) = start(&world, TIMEOUT)?;
        connect(&world, &comm)?;
        if world.rank() == 1 {
            is_told_of_rank_0(&comm, &stream);
            world.barrier("over")?;
            return Ok(());
        }
        let away = stream.context().new_stream()?;
        let (x, mut y) = (stream.clone_htod(&[1u8; 4])?, away.alloc_zeros::<u8>(4)?);
        stream.context().synchronize()?;
        let late = faults::late(Duration::from_millis(400));
        captured_meanwhile(&away, "ncclSend", false, || {
            let issued = comm.group(|group| {
                group.isend(&x, 0)?;
                group.irecv(&mut y, 0)
            });
            issued.map(drop).unwrap_err()
        });
        drop(y);
        drop(late);
        becomes_aborted(&comm);
        let _ = stream.context().check_err();
        stream.context().synchronize()?;
        let caught = nccl_emulator::violations();
        assert!(caught.is_empty(), "{caught:?}");
        world.barrier("over")?;
        Ok(())
    });
}

/// The error of the failed call does not hide that there was a capture.
#[test]
fn an_operation_that_fails_under_another_threads_capture_names_both() {
    if !support::needs_emulator("calls that fail on purpose") {
        return;
    }
    ranks_as_processes(2, |world: World| -> Outcome {
        let context = support::device(&world)?;
        let mut made = Vec::new();
        for name in ["alone", "together", "replay", "kernels"] {
            let stream = context.new_stream()?;
            let comm = world
                .communicator(name)
                .stream(&stream)
                .with(|comm| comm.timeouts.operation = TIMEOUT);
            let comm = comm.build()?;
            connect(&world, &comm)?;
            made.push((stream, comm));
        }
        let [alone, together, replay, kernels] = &made[..] else {
            unreachable!("four")
        };
        let y = replay.1.buffer::<f32>(1000)?;
        let mut plan = replay.1.capture(y, |capture, y| {
            capture.group(|group| group.all_reduce_in_place(y, ReduceOp::Sum))
        })?;
        let ep = ExpertParallel::builder(&kernels.1).with(|ep| {
            ep.experts = 2;
            ep.top_k = 1;
            ep.max_tokens = 4;
            ep.max_row_bytes = 4;
        });
        let ep = ep.build()?;
        let mut routing = ep.routing()?;
        if world.rank() == 1 {
            for (stream, comm) in &made {
                is_told_of_rank_0(comm, stream);
            }
            world.barrier("over")?;
            return Ok(());
        }
        let fails = |stream, call, code, work: &mut (dyn FnMut() -> Error + Send)| {
            let fault = faults::at_call(call).on_other_threads().fail(code);
            let error = captured_meanwhile(stream, call, true, work);
            drop(fault);
            assert_eq!(refusal(&error), None, "{error:#}");
        };
        let (stream, comm) = alone;
        let (x, mut y) = (stream.clone_htod(&[1u8; 4])?, stream.alloc_zeros::<u8>(4)?);
        fails(stream, "ncclSend", 1, &mut || {
            let issued = comm.group(|group| {
                group.isend(&x, 0)?;
                group.irecv(&mut y, 0)
            });
            issued.map(drop).unwrap_err()
        });
        let (stream, comm) = together;
        let (x, mut y) = (stream.clone_htod(&[1u8; 4])?, stream.alloc_zeros::<u8>(4)?);
        fails(stream, "ncclSend", 1, &mut || {
            let issued = nccl::group(|group| {
                group.on(comm)?.isend(&x, 0)?;
                group.on(comm)?.irecv(&mut y, 0)
            });
            issued.map(drop).unwrap_err()
        });
        fails(&replay.0, "cuGraphLaunch", 1, &mut || {
            plan.launch().map(drop).unwrap_err()
        });
        let (stream, _) = kernels;
        let topk = stream.clone_htod(&[0i32, 1])?;
        fails(stream, "cuLaunchKernel", 1, &mut || {
            ep.route(&topk, &mut routing).map(drop).unwrap_err()
        });
        world.barrier("over")?;
        Ok(())
    });
}

/// In a group, the first communicator's streams are joined while the context of the last one is current.
#[test]
fn default_streams_of_several_devices_are_joined_with_their_own_operations() {
    if !support::needs_emulator("work that runs late on purpose") || !support::needs_devices(2) {
        return;
    }
    ranks_as_processes(1, |_: World| -> Outcome {
        let contexts = [CudaContext::new(0)?, CudaContext::new(1)?];
        let streams = [contexts[0].new_stream()?, contexts[1].new_stream()?];
        let comms = Communicator::init_all("all", &streams)?;
        let home = contexts[0].default_stream();
        let mut all = [
            home.clone_htod(&[1f32; 1000])?,
            streams[1].clone_htod(&[2f32; 1000])?,
        ];
        contexts
            .iter()
            .try_for_each(|context| context.synchronize())?;
        for _ in 0..2 {
            // SAFETY: each buffer is used on one stream, and by operations alone.
            unsafe { contexts[0].disable_event_tracking() };
            let late = faults::late(Duration::from_millis(100));
            let [x, y] = &mut all;
            let done = nccl::group(|group| {
                group.on(&comms[0])?.all_reduce_in_place(x, ReduceOp::Max)?;
                group.on(&comms[1])?.all_reduce_in_place(y, ReduceOp::Max)
            })?;
            // The default stream waits for the operation.
            assert_eq!(home.clone_dtoh(&all[0])?, [2.0; 1000]);
            drop(late);
            done.wait()?;
            home.memcpy_htod(&[1f32; 1000], &mut all[0])?;
            home.synchronize()?;
        }
        Ok(())
    });
}

/// Stores an error, as a failed drop does on another thread.
fn keep_an_error(context: &CudaContext) {
    let error = DriverError(sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    context.record_err::<()>(Err(error));
}

#[test]
fn an_error_that_cudarc_keeps_for_others_fails_no_operation_and_stays_where_it_is() {
    // Ranks that share a device share the error that cudarc stores.
    if !support::needs_devices(2) {
        return;
    }
    ranks_as_threads(2, |world| -> Outcome {
        let (stream, comm) = start(&world, TIMEOUT)?;
        // A context of its own for each rank: `support::device` gives each a device.
        let context = Arc::clone(stream.context());
        let foreign = context.new_stream()?;
        assert!(context.is_managing_stream_synchronization());
        let mut home = stream.clone_htod(&[1f32; 100])?;
        let mut away = foreign.clone_htod(&[1f32; 100])?;
        let mut plan = {
            let y = comm.buffer::<f32>(8)?;
            comm.capture(y, |capture, y| {
                capture.group(|group| group.all_reduce_in_place(y, ReduceOp::Sum))
            })?
        };
        context.synchronize()?;
        for _ in 0..3 {
            let mut steps: Vec<&mut dyn FnMut() -> nccl::Result<()>> = Vec::new();
            let mut of_home = || {
                let done = comm.all_reduce_in_place(&mut home, ReduceOp::Max)?;
                keep_an_error(&context);
                while !done.is_complete()? {
                    std::thread::yield_now();
                }
                keep_an_error(&context);
                done.wait()
            };
            let mut of_away = || comm.all_reduce_in_place(&mut away, ReduceOp::Max)?.wait();
            let mut of_plan = || plan.launch()?.wait();
            steps.push(&mut of_home);
            steps.push(&mut of_away);
            steps.push(&mut of_plan);
            for step in steps {
                keep_an_error(&context);
                step()?;
                assert!(context.check_err().is_err(), "it was taken for ours");
            }
        }
        assert_eq!(comm.state(), CommunicatorState::Ready);
        assert_eq!(foreign.clone_dtoh(&away)?, [1.0; 100]);
        Ok(())
    });
}

/// Objects that a communicator creates: streams, memory, and data that the ranks exchange through the device.
#[test]
fn an_error_that_cudarc_keeps_for_others_hinders_nothing_that_is_made() {
    ranks_as_threads(4, |world| -> Outcome {
        let (stream, comm) = start(&world, TIMEOUT)?;
        // A context of its own for each rank: `support::device` gives each a device.
        let context = Arc::clone(stream.context());
        let topk = stream.clone_htod(&[0i32, 3])?;
        let [x, mut y] = [stream.alloc_zeros::<u8>(16)?, stream.alloc_zeros::<u8>(16)?];
        context.synchronize()?;
        let kept = |what: &str| {
            assert!(context.check_err().is_err(), "{what} took it for its own");
            keep_an_error(&context);
        };
        keep_an_error(&context);
        let other = world
            .communicator("other")
            .stream(&stream)
            .with(|comm| comm.timeouts.operation = TIMEOUT);
        drop(other.build()?);
        kept("build");
        comm.warm_up(TIMEOUT)?;
        kept("warm_up");
        let half = comm.split("half", Some(comm.rank() as u32 / 2), 0)?;
        kept("split");
        drop(half);
        let ep = ExpertParallel::builder(&comm).with(|ep| {
            ep.experts = 4;
            ep.top_k = 1;
            ep.max_tokens = 4;
            ep.max_row_bytes = 4;
        });
        let ep = ep.build()?;
        kept("the builder of ExpertParallel");
        let mut routing = ep.routing()?;
        kept("routing");
        ep.route(&topk, &mut routing)?;
        kept("route");
        assert_eq!(routing.counts()?.sent, [1, 0, 0, 1]);
        kept("counts");
        // The ranks of a node tell each other their parts.
        let parts = || Parts::from(&[4; 4]);
        let plan = AllToAll::plan(&comm).parts(DataType::UInt8, parts(), parts());
        let plan = plan.with(|plan| {
            plan.ranks_per_node = Some(2);
            plan.algorithm = AllToAllAlgorithm::TwoLevel;
        });
        let mut plan = plan.build()?;
        kept("the builder of a plan");
        plan.enqueue(&x, &mut y)?.wait()?;
        kept("a plan");
        let _ = context.check_err();
        Ok(())
    });
}

/// cudarc waits for the other users of a buffer that is freed, unless it has an error stored.
#[test]
fn an_error_that_cudarc_keeps_lets_no_buffer_be_freed_under_another_stream() {
    if !support::needs_emulator("a call that is counted") {
        return;
    }
    ranks_as_processes(1, |world: World| -> Outcome {
        let (stream, comm) = start(&world, TIMEOUT)?;
        let context = Arc::clone(stream.context());
        let (reads, blocks) = (context.new_stream()?, context.new_stream()?);
        let buffer = comm.buffer::<u8>(1 << 16)?;
        let mut copy = reads.alloc_zeros::<u8>(1 << 16)?;
        context.synchronize()?;
        let gate = Gate::closed_on(&blocks)?;
        reads.wait(&blocks.record_event(None)?)?;
        reads.memcpy_dtod(&buffer.view(), &mut copy)?;
        let freed = faults::at_call("ncclMemFree").delay(Duration::ZERO);
        keep_an_error(&context);
        drop(buffer);
        assert!(
            !freed.wait_for_hits(1, Duration::from_millis(300)),
            "freed while it is read"
        );
        gate.open();
        assert!(freed.wait_for_hits(1, TIMEOUT));
        let _ = context.check_err();
        Ok(())
    });
}

/// A refused operation leaves the events of its buffers unchanged.
#[test]
fn a_refused_operation_makes_no_buffer_forget_who_writes_it() {
    if !support::needs_emulator("work that is held back") {
        return;
    }
    ranks_as_processes(1, |world: World| -> Outcome {
        let (stream, comm) = start(&world, TIMEOUT)?;
        let context = Arc::clone(stream.context());
        let (home, writes) = (context.new_stream()?, context.new_stream()?);
        let from = writes.clone_htod(&[7u8; 1 << 16])?;
        let x = stream.clone_htod(&[1u8; 1 << 16])?;
        let mut y = home.alloc_zeros::<u8>(1 << 16)?;
        context.synchronize()?;
        let gate = Gate::closed_on(&writes)?;
        writes.memcpy_dtod(&from, &mut y)?;
        let refused = comm.group(|group| {
            group.isend(&x, 0)?;
            group.irecv(&mut y, 0)?;
            stream.begin_capture(RELAXED).expect("it begins");
            Ok(())
        });
        assert_eq!(
            refusal(&refused.map(drop).unwrap_err()),
            Some(StreamRefusal::Capturing)
        );
        let _ = stream.end_capture(NO_FLAGS);
        // cudarc frees it behind the copy.
        drop(y);
        gate.open();
        let _ = context.check_err();
        context.synchronize()?;
        let caught = nccl_emulator::violations();
        assert!(caught.is_empty(), "{caught:?}");
        Ok(())
    });
}

/// When communicators share a launch, NCCL lets only the first abort wait for it.
#[test]
fn communicators_that_share_a_launch_are_aborted_one_after_another() {
    if !support::needs_emulator("a call that hangs on purpose") {
        return;
    }
    ranks_as_processes(2, |world: World| -> Outcome {
        let world = world.with_launch_mode(nccl::LaunchMode::NonBlocking);
        let context = support::device(&world)?;
        let make = |name| -> Result<_, Box<dyn std::error::Error>> {
            let stream = context.new_stream()?;
            let comm = world
                .communicator(name)
                .stream(&stream)
                .with(|comm| comm.timeouts.operation = TIMEOUT);
            Ok((stream, comm.build()?))
        };
        let [(s, x), (t, y)] = [make("x")?, make("y")?];
        if world.rank() == 1 {
            // This rank does not enter the first message, for which the launch of the other rank waits.
            world.barrier("aborted")?;
            return Ok(());
        }
        let (a, b) = (s.alloc_zeros::<u8>(64)?, t.alloc_zeros::<u8>(64)?);
        let aborts = faults::at_call("ncclCommAbort").hang();
        let launched = faults::at_call("ncclCommGetAsyncError").delay(Duration::ZERO);
        std::thread::scope(|scope| {
            let group = scope.spawn(|| {
                let issued = nccl::group(|group| {
                    group.on(&x)?.isend(&a, 1)?;
                    group.on(&y)?.isend(&b, 1)
                });
                issued.map(drop).unwrap_err()
            });
            assert!(launched.wait_for_hits(1, TIMEOUT));
            std::thread::sleep(Duration::from_millis(100));
            assert!(!group.is_finished());
            let abort = scope.spawn(|| x.abort("stop"));
            assert!(aborts.wait_for_hits(1, TIMEOUT));
            assert!(
                !aborts.wait_for_hits(2, Duration::from_secs(2)),
                "both at once"
            );
            drop(aborts);
            let _ = abort.join().expect("no panic");
            let error = group.join().expect("no panic");
            assert!(format!("{error:#}").contains("stop"), "{error:#}");
        });
        becomes_aborted(&x);
        becomes_aborted(&y);
        world.barrier("aborted")?;
        Ok(())
    });
}

#[test]
fn a_communicator_with_a_launch_under_way_is_aborted_where_it_was_to_be_revoked() {
    if !support::needs_emulator("calls that are counted") {
        return;
    }
    ranks_as_processes(2, |world: World| -> Outcome {
        let world = world.with_launch_mode(nccl::LaunchMode::NonBlocking);
        let (stream, comm) = start(&world, TIMEOUT)?;
        if world.rank() == 1 {
            world.barrier("revoked")?;
            return Ok(());
        }
        let revokes = faults::at_call("ncclCommRevoke").delay(Duration::ZERO);
        let aborts = faults::at_call("ncclCommAbort").delay(Duration::ZERO);
        let launched = faults::at_call("ncclCommGetAsyncError").delay(Duration::ZERO);
        let x = stream.alloc_zeros::<u8>(64)?;
        std::thread::scope(|scope| {
            let issues = scope.spawn(|| comm.group(|group| group.isend(&x, 1)).map(drop));
            assert!(launched.wait_for_hits(1, TIMEOUT));
            std::thread::sleep(Duration::from_millis(100));
            assert!(!issues.is_finished());
            assert!(comm.revoke("another plan").is_err());
            let error = issues.join().expect("no panic").unwrap_err();
            assert!(format!("{error:#}").contains("another plan"), "{error:#}");
        });
        assert_eq!((revokes.hits(), aborts.hits()), (0, 1));
        world.barrier("revoked")?;
        Ok(())
    });
}

#[test]
fn the_pointer_is_there_at_once_while_a_call_is_under_way() {
    if !support::needs_emulator("a call that hangs on purpose") {
        return;
    }
    ranks_as_processes(2, |world: World| -> Outcome {
        let (stream, comm) = start(&world, TIMEOUT)?;
        all_reduce(&comm, &stream)?;
        let raw = comm.as_raw();
        assert!(raw.is_some_and(|raw| !raw.is_null()));
        let held = faults::at_call("ncclAllReduce").hang();
        std::thread::scope(|scope| -> Outcome {
            let issues = scope.spawn(|| all_reduce(&comm, &stream));
            assert!(held.wait_for_hits(1, TIMEOUT));
            let asked = comm.as_raw();
            assert!(!issues.is_finished());
            assert_eq!(asked, raw);
            drop(held);
            issues.join().expect("no panic")?;
            Ok(())
        })?;
        world.barrier("asked")?;
        comm.abort("over")?;
        assert!(comm.as_raw().is_none());
        Ok(())
    });
}

/// Each of two ranks begins a capture in CUDA's global mode on a stream that no communicator uses, runs `meanwhile`
/// with a communicator, and ends the capture, which must still be valid.
fn outlives(
    meanwhile: impl Fn(&World, &Communicator, &mut CudaSlice<f32>) -> Outcome + Send + Sync + 'static,
) {
    ranks_as_threads(2, move |world| -> Outcome {
        let (stream, comm) = start(&world, TIMEOUT)?;
        let mut y = stream.clone_htod(&[10f32.powi(comm.rank() as i32); 100])?;
        let captured = stream.context().new_stream()?;
        // Connected, so that NCCL allocates nothing more.
        sum(&comm, &stream)?;
        world.barrier("ready")?;
        let (over, wait) = std::sync::mpsc::channel::<()>();
        let (begun, begins) = std::sync::mpsc::channel();
        std::thread::scope(|scope| -> Outcome {
            let captured = &captured;
            let captures = scope.spawn(move || {
                let global = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
                captured.begin_capture(global)?;
                let _ = begun.send(());
                // Both ranks, or the one that failed.
                let _ = wait.recv();
                captured.end_capture(NO_FLAGS).map(drop)
            });
            begins.recv()?;
            world.barrier("captures")?;
            meanwhile(&world, &comm, &mut y)?;
            world.barrier("done meanwhile")?;
            drop(over);
            Ok(captures.join().expect("no panic")?)
        })?;
        // A copy to the host would end the capture of the other rank, which is a thread of this process.
        world.barrier("no capture is left")?;
        assert_eq!(stream.clone_dtoh(&y)?, [11.0; 100]);
        Ok(())
    });
}

fn reduce_twice(comm: &Communicator, y: &mut CudaSlice<f32>) -> Outcome {
    comm.all_reduce_in_place(&mut *y, ReduceOp::Sum)?.wait()?;
    let request = comm.all_reduce_in_place(y, ReduceOp::Max)?;
    while !request.is_complete()? {
        std::thread::yield_now();
    }
    Ok(())
}

/// In global mode a capture forbids all threads of the process to query whether work is complete, unless they have
/// exempted themselves.
#[test]
fn a_global_capture_outlives_operations() {
    outlives(|_, comm, y| reduce_twice(comm, y));
}

#[test]
fn a_global_capture_outlives_the_ends_of_communicators() {
    outlives(|world, comm, y| {
        reduce_twice(comm, y)?;
        comm.finalize()?;
        world.barrier("finalized")?;
        Ok(())
    });
    outlives(|world, comm, y| {
        reduce_twice(comm, y)?;
        world.barrier("reduced")?;
        comm.abort("not needed")?;
        world.barrier("aborted")?;
        Ok(())
    });
}
