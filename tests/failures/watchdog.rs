//! Operations that no thread waits for are ended by the watchdog, and running operations are not.

use std::sync::Arc;
use std::time::{Duration, Instant};

use nccl::cudarc::driver::{CudaStream, sys};
use nccl::fault::FaultClass;
use nccl::fault::RootCause;
use nccl::{Communicator, ErrorKind, LaunchMode, ReduceOp, recorder};
use nccl_emulator::faults;

use crate::cgroup::Group;
use crate::support::gate::Gate;
use crate::support::{self, needs_emulator, ranks_as_processes, ranks_as_threads};
use crate::unattended::{Outcome, SOON, TIMEOUT, fault, start, unattended};

#[test]
fn an_operation_that_nobody_waits_for_ends_at_its_limit_with_one_cause_on_every_rank() {
    if !needs_emulator("an operation that hangs on purpose") {
        return;
    }
    ranks_as_processes(3, |world| -> Outcome {
        let (stream, comm) = start(&world, |builder| {
            builder.with(|comm| comm.timeouts.operation = TIMEOUT)
        })?;
        world.barrier("begin")?;
        // Rank 1 never enters.
        if world.rank() != 1 {
            let begun = Instant::now();
            unattended(&comm)?;
            // As a program that waits for its stream and not for the operation.
            stream.synchronize()?;
            let took = begun.elapsed();
            assert!((TIMEOUT..SOON).contains(&took), "{took:?}");
        }
        let fault = fault(&comm)?;
        assert_eq!(fault.class, FaultClass::TimedOut);
        assert_eq!(fault.culprit(), Some(1));
        let operation = fault.operation().ok_or("it was in an operation")?;
        assert!(operation.starts_with("all_reduce #"), "{operation}");
        assert!(operation.ends_with(" of f32 × 64, sum"), "{operation}");
        let cause = &fault.cause;
        assert!(cause.contains("the operation, running for 4"), "{cause}");
        assert!(cause.contains("within 400ms"), "{cause}");
        let causes = world.all_gather("cause", fault.to_string().as_bytes())?;
        assert!(causes.iter().all(|other| *other == causes[0]), "{causes:?}");
        // And every later call reports it.
        let mut y = stream.alloc_zeros::<f32>(64)?;
        let error = comm.all_reduce_in_place(&mut y, ReduceOp::Sum).unwrap_err();
        assert!(format!("{error:#}").contains(cause), "{error:#}");
        Ok(())
    });
}

/// A waiting thread reports the shape of an operation; so does the watchdog.
#[test]
fn the_shape_of_an_operation_that_nobody_waits_for_is_told() {
    if !needs_emulator("operations that hang on purpose") {
        return;
    }
    type Issue = fn(&Communicator, &Arc<CudaStream>) -> Result<nccl::Request, nccl::Error>;
    let issues: [(&str, Issue); 4] = [
        ("broadcast #S of u8 × 3, root 1", |comm, stream| {
            let mut y = stream.alloc_zeros::<u8>(3).expect("memory");
            comm.broadcast_in_place(&mut y, 1)
        }),
        ("reduce #S of i32 × 4, prod, root 0", |comm, stream| {
            let mut y = stream.alloc_zeros::<i32>(4).expect("memory");
            comm.reduce_in_place(&mut y, ReduceOp::Prod, 0)
        }),
        ("all_to_all #S of u64 × 5", |comm, stream| {
            let x = stream.alloc_zeros::<u64>(10).expect("memory");
            let mut y = stream.alloc_zeros::<u64>(10).expect("memory");
            comm.all_to_all(&x, &mut y)
        }),
        // More than NCCL buffers: a smaller send ends before its receive.
        ("gather #S of i8 × 16777216, root 1", |comm, stream| {
            let x = stream.alloc_zeros::<i8>(1 << 24).expect("memory");
            let mut y = stream.alloc_zeros::<i8>(1 << 25).expect("memory");
            comm.gather(&x, Some(&mut y), 1)
        }),
    ];
    for (expected, issue) in issues {
        ranks_as_threads(2, move |world| -> Outcome {
            let (stream, comm) = start(&world, |builder| {
                builder.with(|comm| comm.timeouts.operation = TIMEOUT)
            })?;
            world.barrier("begin")?;
            if world.rank() == 0 {
                let number = issue(&comm, &stream)?.sequence();
                let fault = fault(&comm)?;
                let expected = expected.replace("#S", &format!("#{number}"));
                assert_eq!(fault.operation(), Some(&*expected));
            } else {
                fault(&comm)?;
            }
            Ok(())
        });
    }
}

#[test]
fn a_request_that_was_kept_says_that_its_operation_was_late() {
    if !needs_emulator("an operation that hangs on purpose") {
        return;
    }
    ranks_as_threads(2, |world| -> Outcome {
        let (stream, comm) = start(&world, |builder| {
            builder.with(|comm| comm.timeouts.operation = TIMEOUT)
        })?;
        world.barrier("begin")?;
        if world.rank() == 1 {
            fault(&comm)?;
            return Ok(());
        }
        let mut y = stream.alloc_zeros::<f32>(64)?;
        let first = comm.all_reduce_in_place(&mut y, ReduceOp::Sum)?;
        let second = comm.all_reduce_in_place(&mut y, ReduceOp::Sum)?;
        stream.synchronize()?;
        let error = first.wait_timeout(SOON).unwrap_err();
        assert!(error.is_timeout(), "{error:#}");
        let error = second.wait_timeout(SOON).unwrap_err();
        // It ended with the first one, whose timeout passed.
        let ErrorKind::TimedOut { what, timeout } = error.kind() else {
            return Err(error.into());
        };
        assert_eq!(*timeout, TIMEOUT);
        assert!(what.starts_with("all_reduce #3 of "), "{what}");
        assert!(format!("{error:#}").contains("running for"), "{error:#}");
        Ok(())
    });
}

#[test]
fn work_of_others_in_front_of_an_operation_does_not_count_as_its_own() {
    if !needs_emulator("a stream that is held up") {
        return;
    }
    ranks_as_threads(2, |world| -> Outcome {
        let (stream, comm) = start(&world, |builder| {
            builder.with(|comm| comm.timeouts.operation = TIMEOUT)
        })?;
        // More than once, also while the stream is being watched.
        for _ in 0..3 {
            let gate = Gate::closed_on(&stream)?;
            unattended(&comm)?;
            std::thread::sleep(3 * TIMEOUT);
            drop(gate);
            stream.synchronize()?;
            assert_eq!(comm.fault(), None);
        }
        // Neither does work behind it.
        unattended(&comm)?;
        let gate = Gate::closed_on(&stream)?;
        std::thread::sleep(3 * TIMEOUT);
        drop(gate);
        stream.synchronize()?;
        assert_eq!(comm.fault(), None);
        comm.finalize()?;
        Ok(())
    });
}

/// The watchdog looks every quarter of a second at most, and operations in close succession have no marks of their own.
#[test]
fn work_that_comes_a_moment_after_an_operation_does_not_count_as_that_of_the_operation() {
    const TIMEOUT: Duration = Duration::from_secs(2);
    const MOMENT: Duration = Duration::from_millis(100);
    if !needs_emulator("a stream that is held up") {
        return;
    }
    ranks_as_threads(2, |world| -> Outcome {
        let (stream, comm) = start(&world, |builder| {
            builder.with(|comm| comm.timeouts.operation = TIMEOUT)
        })?;
        let mut y = stream.alloc_zeros::<f32>(64)?;
        let gate = Gate::closed_on(&stream)?;
        comm.all_reduce_in_place(&mut y, ReduceOp::Sum)?;
        // Waits until the watchdog polls at long intervals.
        std::thread::sleep(TIMEOUT / 2);
        drop(gate);
        stream.synchronize()?;
        for pause in [Duration::ZERO, Duration::from_millis(3), Duration::ZERO] {
            comm.all_reduce_in_place(&mut y, ReduceOp::Sum)?;
            std::thread::sleep(pause);
        }
        stream.synchronize()?;
        std::thread::sleep(MOMENT);
        let gate = Gate::closed_on(&stream)?;
        std::thread::sleep(TIMEOUT + TIMEOUT / 2);
        drop(gate);
        stream.synchronize()?;
        assert_eq!(comm.fault(), None);
        comm.finalize()?;
        Ok(())
    });
}

#[test]
fn an_operation_that_does_not_get_its_turn_is_said_to_be_queued() {
    if !needs_emulator("a stream that is held up") {
        return;
    }
    ranks_as_threads(2, |world| -> Outcome {
        let (stream, comm) = start(&world, |builder| {
            builder.with(|comm| {
                comm.timeouts.operation = TIMEOUT;
                comm.timeouts.queue = Some(2 * TIMEOUT);
            })
        })?;
        let begun = Instant::now();
        world.barrier("begin")?;
        let gate = (world.rank() == 1)
            .then(|| Gate::closed_on(&stream))
            .transpose()?;
        // Rank 0 waits for rank 1 in the operation, and has the same timeout as rank 1.
        let patient = comm.within(SOON);
        unattended(if world.rank() == 0 { &patient } else { &comm })?;
        let fault = fault(&comm)?;
        assert!(begun.elapsed() >= 2 * TIMEOUT, "{:?}", begun.elapsed());
        assert_eq!(
            (fault.culprit(), fault.class),
            (Some(1), FaultClass::TimedOut)
        );
        let cause = &fault.cause;
        assert!(cause.contains("the operation was queued for"), "{cause}");
        assert!(cause.contains("not this communicator's"), "{cause}");
        drop(gate);
        Ok(())
    });
}

#[test]
fn the_limit_of_a_call_counts_and_not_that_of_its_communicator() {
    if !needs_emulator("an operation that hangs on purpose") {
        return;
    }
    ranks_as_threads(2, |world| -> Outcome {
        // Set for the world; the communicator inherits it.
        let world = world.with_timeouts(|timeouts| timeouts.operation = TIMEOUT);
        let (stream, comm) = start(&world, |builder| builder)?;
        world.barrier("begin")?;
        if world.rank() == 1 {
            std::thread::sleep(3 * TIMEOUT);
            unattended(&comm)?;
            unattended(&comm)?;
            fault(&comm)?;
            return Ok(());
        }
        unattended(&comm.within(SOON))?;
        stream.synchronize()?;
        unattended(&comm)?;
        // On a stream that is being watched for a longer timeout.
        let begun = Instant::now();
        unattended(&comm.within(TIMEOUT / 4))?;
        stream.synchronize()?;
        assert!(begun.elapsed() < SOON / 2, "{:?}", begun.elapsed());
        let error = unattended(&comm).unwrap_err().to_string();
        assert!(error.contains("within 100ms"), "{error:#}");
        Ok(())
    });
}

#[test]
fn a_replay_that_hangs_is_called_a_replay() {
    if !needs_emulator("an operation that hangs on purpose") {
        return;
    }
    ranks_as_threads(2, |world| -> Outcome {
        let (stream, comm) = start(&world, |builder| {
            builder.with(|comm| comm.timeouts.operation = TIMEOUT)
        })?;
        let buffer = stream.alloc_zeros::<f32>(64)?;
        let mut plan = comm.capture(buffer, |capture, y| {
            capture.group(|group| group.all_reduce_in_place(y, ReduceOp::Sum))
        })?;
        plan.launch()?.wait()?;
        world.barrier("begin")?;
        std::thread::sleep(Duration::from_millis(50));
        if world.rank() == 0 {
            plan.launch()?;
        }
        let fault = fault(&comm)?;
        assert_eq!(
            (fault.culprit(), fault.class),
            (Some(1), FaultClass::TimedOut)
        );
        let operation = fault.operation().ok_or("it was in an operation")?;
        assert!(operation.contains("replay"), "{operation}");
        let cause = &fault.cause;
        assert!(cause.contains("the replay, running for"), "{cause}");
        Ok(())
    });
}

#[test]
fn an_error_that_nccl_finds_in_the_background_is_heard_of_although_nobody_waits() {
    if !needs_emulator("an error on purpose") {
        return;
    }
    ranks_as_processes(2, |world| -> Outcome {
        let (stream, comm) = start(&world, |builder| builder)?;
        world.barrier("begin")?;
        let begun = Instant::now();
        let remote_error = 6;
        let _fault =
            (world.rank() == 1).then(|| faults::at_operation("AllReduce").fail(remote_error));
        unattended(&comm)?;
        stream.synchronize()?;
        assert!(begun.elapsed() < SOON);
        let fault = fault(&comm)?;
        // The error reports that a peer failed, and not which.
        assert_eq!(
            (fault.culprit(), fault.reported_by(), fault.class),
            (None, Some(1), FaultClass::Failed),
            "{}",
            fault.explain()
        );
        let operation = fault.operation().ok_or("it was in an operation")?;
        assert!(operation.contains("all_reduce"), "{operation}");
        Ok(())
    });
}

#[test]
fn a_capture_of_a_watched_stream_is_not_disturbed() {
    // Processes: a capture may forbid calls of all threads of a process.
    ranks_as_processes(2, |world| -> Outcome {
        let (stream, comm) = start(&world, |builder| {
            builder.with(|comm| comm.timeouts.operation = TIMEOUT)
        })?;
        let context = stream.context();
        let other = context.new_stream()?;
        let mut y = other.alloc_zeros::<f32>(64)?;
        stream.synchronize()?;
        for mode in [
            sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL,
            sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
        ] {
            // Two in a row, so that the second is not covered by a mark of its own.
            unattended(&comm)?;
            unattended(&comm)?;
            let last = comm.recording().calls.last().ok_or("a call")?.sequence;
            stream.begin_capture(mode)?;
            // Another stream of the same communicator has work meanwhile.
            for _ in 0..6 {
                comm.on(&other).all_reduce_in_place(&mut y, ReduceOp::Sum)?;
                std::thread::sleep(TIMEOUT / 2);
            }
            // Something to capture that waits for nothing outside.
            unsafe extern "C" fn nothing(_: *mut std::ffi::c_void) {}
            let (on, none) = (stream.cu_stream(), std::ptr::null_mut());
            // SAFETY: the stream is alive, and the function takes nothing.
            unsafe { sys::cuLaunchHostFunc(on, Some(nothing), none) }.result()?;
            let flags = sys::CUgraphInstantiate_flags(0);
            let graph = stream.end_capture(flags)?.ok_or("a graph")?;
            graph.launch()?;
            stream.synchronize()?;
            assert_eq!(comm.fault(), None);
            // Earlier work is found complete later.
            let begun = Instant::now();
            while state(&comm, last) != Some(recorder::CallState::Done) {
                assert!(begun.elapsed() < SOON, "{:?}", state(&comm, last));
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        comm.finalize()?;
        Ok(())
    });
}

fn state(comm: &Communicator, sequence: u64) -> Option<recorder::CallState> {
    let calls = comm.recording().calls;
    let call = calls.iter().find(|call| call.sequence == sequence)?;
    Some(call.state)
}

#[test]
fn the_default_stream_is_one_stream_however_often_it_is_named() {
    ranks_as_threads(1, |world| -> Outcome {
        let (stream, comm) = start(&world, |builder| builder)?;
        let context = stream.context();
        let mut y = context.default_stream().alloc_zeros::<f32>(64)?;
        let begun = Instant::now();
        for _ in 0..3000 {
            let on_default = comm.on(&context.default_stream());
            on_default.all_reduce_in_place(&mut y, ReduceOp::Sum)?;
        }
        assert!(begun.elapsed() < SOON, "{:?}", begun.elapsed());
        context.default_stream().synchronize()?;
        let last = comm.recording().calls.last().ok_or("a call")?.sequence;
        let begun = Instant::now();
        while state(&comm, last) != Some(recorder::CallState::Done) {
            assert!(begun.elapsed() < SOON, "{:?}", state(&comm, last));
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    });
}

#[test]
fn what_nobody_asks_about_is_known_to_be_done_soon() {
    ranks_as_threads(1, |world| -> Outcome {
        let (stream, comm) = start(&world, |builder| builder)?;
        for _ in 0..2000 {
            unattended(&comm)?;
        }
        stream.synchronize()?;
        let last = comm.recording().calls.last().ok_or("a call")?.sequence;
        let begun = Instant::now();
        while state(&comm, last) != Some(recorder::CallState::Done) {
            assert!(begun.elapsed() < SOON, "{:?}", state(&comm, last));
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    });
}

/// How often the threads of these names have gone to sleep: each time they wake, but not when they are preempted.
fn sleeps(names: &[&str]) -> Result<Option<u64>, Box<dyn std::error::Error>> {
    let (mut sleeps, mut threads) = (0, 0);
    for task in std::fs::read_dir("/proc/self/task")? {
        let path = task?.path();
        // Other threads may end meanwhile.
        let Ok(name) = std::fs::read_to_string(path.join("comm")) else {
            continue;
        };
        if !names.contains(&name.trim()) {
            continue;
        }
        threads += 1;
        let status = std::fs::read_to_string(path.join("status"))?;
        let switches = status
            .lines()
            .find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
        sleeps += switches.ok_or("a field")?.trim().parse::<u64>()?;
    }
    // A thread that has just begun has no name yet.
    Ok((threads == names.len()).then_some(sleeps))
}

/// Waits until these threads have slept for a while without waking.
fn await_sleep(names: &[&str], whole: Duration) -> Outcome {
    let begun = Instant::now();
    loop {
        let before = sleeps(names)?;
        std::thread::sleep(whole);
        if before.is_some() && sleeps(names)? == before {
            return Ok(());
        }
        assert!(begun.elapsed() < SOON, "{names:?} do not sleep");
    }
}

#[test]
fn the_watchdog_and_the_monitor_sleep_when_nothing_is_pending_and_wake_seldom_when_something_is() {
    ranks_as_threads(1, |world| -> Outcome {
        let (stream, comm) = start(&world, |builder| builder)?;
        unattended(&comm)?;
        stream.synchronize()?;
        let both = ["nccl-watchdog", "nccl-monitor"];
        await_sleep(&both, Duration::from_secs(3))?;
        let it = ["nccl-watchdog"];
        let before = sleeps(&it)?.ok_or("it is not there")?;
        // The operation is found again, and a busy communicator costs few looks.
        let until = Instant::now() + Duration::from_secs(2);
        let mut calls = 0;
        while Instant::now() < until {
            unattended(&comm)?;
            stream.synchronize()?;
            calls += 1;
        }
        let looks = sleeps(&it)?.ok_or("it is gone")? - before;
        assert!(
            looks >= 4 && looks * 10 < calls,
            "{looks} wakeups for {calls} calls in 2 s"
        );
        Ok(())
    });
}

#[test]
fn nothing_is_kept_alive_for_the_watchdog() {
    ranks_as_threads(1, |world| -> Outcome {
        let (stream, comm) = start(&world, |builder| builder)?;
        let other = stream.context().new_stream()?;
        let weak = Arc::downgrade(&other);
        let mut y = other.alloc_zeros::<f32>(64)?;
        let gate = needs_emulator("a stream that is held up")
            .then(|| Gate::closed_on(&other))
            .transpose()?;
        comm.on(&other).all_reduce_in_place(&mut y, ReduceOp::Sum)?;
        drop((y, other));
        std::thread::sleep(Duration::from_millis(200));
        if gate.is_some() {
            assert!(weak.upgrade().is_some(), "its operation is still pending");
        }
        drop(gate);
        let gone = |what: &str, is_gone: &dyn Fn() -> bool| {
            let begun = Instant::now();
            while !is_gone() {
                assert!(begun.elapsed() < SOON, "{what} is still there");
                std::thread::sleep(Duration::from_millis(5));
            }
        };
        gone("a stream", &|| weak.upgrade().is_none());
        unattended(&comm)?;
        let number = comm.recording().number;
        drop(comm);
        gone("a communicator", &|| {
            let communicators = recorder::snapshot().communicators;
            let mut those = communicators.iter().filter(|one| one.number == number);
            those.all(|one| one.life != "ready") || Arc::strong_count(&stream) == 1
        });
        gone("its stream", &|| Arc::strong_count(&stream) == 1);
        Ok(())
    });
}

#[test]
fn a_rank_that_nobody_could_watch_over_gets_no_communicator_and_all_are_told() {
    if !needs_emulator("a rank without threads") {
        return;
    }
    if Group::new("pids", 100).is_none() {
        nccl_tools::gpu_check::not_tested(
            "a rank without threads: it needs a control group that can be written",
        );
        return;
    }
    ranks_as_processes(2, |world| -> Outcome {
        // Otherwise, where calls block, the guard thread would be the first that cannot be created.
        let world = world.with_launch_mode(LaunchMode::NonBlocking);
        let stream = support::device(&world)?.new_stream()?;
        world.barrier("ready")?;
        let own = std::process::id();
        let mut group = None;
        if world.rank() == 1 {
            // Only one of the watchdog's two threads can be created, or a thread for a call.
            let threads = std::fs::read_dir("/proc/self/task")?.count();
            let limited = Group::new("pids", threads as u64 + 1).ok_or("no control group")?;
            limited.take(own)?;
            group = Some(limited);
        }
        let built = world.communicator("test").stream(&stream);
        let error = built
            .with(|comm| {
                comm.preflight = false;
                comm.timeouts.operation = SOON;
            })
            .build()
            .err();
        if let Some(limited) = &group {
            let above = limited.0.parent().ok_or("no group above")?;
            std::fs::write(above.join("cgroup.procs"), own.to_string())?;
        }
        drop(group);
        let error = error.ok_or("there is a communicator that nobody watches over")?;
        let text = format!("{error:#}");
        for says in [
            "starting a thread that watches operations",
            "pids.max leaves",
        ] {
            if !text.contains(says) {
                return Err(format!("it lacks {says:?}: {text}").into());
            }
        }
        let fault = error.fault().ok_or(text)?;
        assert_eq!(
            (fault.culprit(), fault.class),
            (Some(1), FaultClass::Failed)
        );
        let root = RootCause::ResourceExhausted {
            resource: String::from("threads or processes"),
        };
        assert_eq!(fault.root, root);
        // No resource is half created: with threads, the communicator can be created.
        world.barrier("again")?;
        let comm = world.communicator("test").stream(&stream).build()?;
        unattended(&comm)?;
        Ok(comm.finalize()?)
    });
}
