//! Revokes pending operations on all ranks, and continues with NCCL's own shrink.

use std::time::{Duration, Instant};

use nccl::fault::FaultClass;
use nccl::{ErrorKind, LaunchMode, ReduceOp, ResizeWay, World};
use nccl_emulator::faults;

use crate::support::sums::{start, sum};
use crate::support::{self, Ranks, ranks_as_processes, ranks_as_threads};

type Outcome = Result<(), Box<dyn std::error::Error>>;

const TIMEOUT: Duration = Duration::from_secs(30);

/// Ranks 0 and 1 wait in an operation for rank 2, which revokes instead.
fn revoke_what_stalls(world: World) -> Outcome {
    let (stream, comm) = start(&world, TIMEOUT)?;
    assert_eq!(sum(&comm, &stream)?, 111.0);
    let begun = Instant::now();
    if world.rank() == 2 {
        std::thread::sleep(Duration::from_millis(100));
        comm.revoke("a better plan")?;
    } else {
        let mut y = stream.clone_htod(&[1f32; 100])?;
        let ended = comm
            .all_reduce_in_place(&mut y, ReduceOp::Sum)
            .and_then(|stalled| stalled.wait());
        let error = ended.unwrap_err();
        assert!(
            matches!(error.kind(), ErrorKind::Aborted { .. }),
            "{error:#}"
        );
        assert!(
            format!("{error:#}").contains("revoked it: a better plan"),
            "{error:#}"
        );
        let fault = error.fault().expect("all ranks know why");
        assert_eq!(
            (fault.class, fault.culprit()),
            (FaultClass::Revoked, Some(2))
        );
    }
    assert!(begun.elapsed() < TIMEOUT / 2, "{:?}", begun.elapsed());
    // Nothing else works any more.
    for error in [
        sum(&comm, &stream).unwrap_err().to_string(),
        comm.finalize().unwrap_err().to_string(),
        comm.revoke("again").unwrap_err().to_string(),
    ] {
        assert!(error.contains("a better plan"), "{error:#}");
    }
    if world.rank() != 1 {
        let shrunk = comm.shrink("both", &[1])?;
        match support::launch_mode() {
            LaunchMode::NonBlocking => assert_eq!(shrunk.way, ResizeWay::Native),
            _ => assert!(shrunk.way.to_string().contains("aborted"), "{}", shrunk.way),
        }
        assert_eq!(sum(&shrunk.communicator, &stream)?, 11.0);
        shrunk.communicator.finalize()?;
    }
    world.barrier("shrunk")?;
    // For all ranks, NCCL has no way of its own.
    let shrunk = comm.shrink("all again", &[])?;
    assert_eq!(sum(&shrunk.communicator, &stream)?, 111.0);
    if support::launch_mode() == LaunchMode::NonBlocking {
        assert!(
            shrunk.way.to_string().contains("one rank at least"),
            "{}",
            shrunk.way
        );
    }
    shrunk.communicator.finalize()?;
    Ok(())
}

#[test]
fn a_stalled_operation_is_revoked_on_all_ranks_and_what_is_left_can_be_shrunk() {
    ranks_as_threads(3, revoke_what_stalls);
    ranks_as_processes(3, revoke_what_stalls);
}

#[test]
fn an_older_library_says_what_it_needs_and_nothing_has_happened() {
    // Ranks cannot share a device before 2.30.3.
    if !support::needs_devices(2) || !support::needs_emulator("a library that is older than it is")
    {
        return;
    }
    Ranks::new(2)
        .variable("NCCL_EMULATOR_VERSION", "2.28.3")
        .processes(|world| -> Outcome {
            let (_, comm) = start(&world, TIMEOUT)?;
            if support::launch_mode() == LaunchMode::BlockingChild {
                // There the revoke uses no new function of NCCL.
                world.barrier("both are there")?;
                if let Err(error) = comm.revoke("old") {
                    assert!(
                        format!("{error:#}").contains("revoked it: old"),
                        "{error:#}"
                    );
                }
            }
            let world = world.with_launch_mode(LaunchMode::NonBlocking);
            let (stream, comm) = start(&world, TIMEOUT)?;
            let error = comm.revoke("too early").unwrap_err();
            assert!(
                matches!(error.kind(), ErrorKind::Unsupported { .. }),
                "{error:#}"
            );
            assert!(format!("{error:#}").contains("2.28.7"), "{error:#}");
            assert_eq!(sum(&comm, &stream)?, 11.0);
            comm.finalize()?;
            Ok(())
        });
}

#[test]
fn nothing_is_left_of_many_revoked_communicators() {
    ranks_as_processes(2, |world| -> Outcome {
        let held = || -> std::io::Result<(usize, usize)> {
            let count = |path: &str| Ok::<_, std::io::Error>(std::fs::read_dir(path)?.count());
            Ok((count("/proc/self/fd")?, count("/proc/self/task")?))
        };
        let mut early = (0, 0);
        for round in 0..30 {
            let (stream, comm) = start(&world, TIMEOUT)?;
            assert_eq!(sum(&comm, &stream)?, 11.0);
            // Not while the other still waits for its sum. Then both at once: one revoke arrives first.
            world.barrier("summed")?;
            if let Err(error) = comm.revoke("round") {
                assert!(
                    format!("{error:#}").contains("revoked it: round"),
                    "{error:#}"
                );
            }
            drop(comm);
            if round == 9 {
                early = held()?;
            }
        }
        let begun = Instant::now();
        loop {
            let late = held()?;
            if late.0 <= early.0 + 2 && late.1 <= early.1 + 2 {
                return Ok(());
            }
            assert!(begun.elapsed() < TIMEOUT, "{early:?}, then {late:?}");
            std::thread::sleep(Duration::from_millis(10));
        }
    });
}

/// NCCL keeps the registrations of a revoked communicator. When NCCL does not destroy it, the memory stays.
#[test]
fn what_is_registered_is_kept_when_a_revoked_communicator_is_not_given_back() {
    if !support::needs_emulator("calls that fail and hang on purpose") {
        return;
    }
    for hangs in [false, true] {
        // Where calls block the communicator is aborted.
        ranks_as_processes(2, move |world: World| -> Outcome {
            let world = world.with_launch_mode(LaunchMode::NonBlocking);
            let stream = support::device(&world)?.new_stream()?;
            let comm = world
                .communicator("all")
                .stream(&stream)
                .with(|comm| comm.timeouts.operation = TIMEOUT);
            let comm = comm
                .with(|comm| comm.timeouts.abort = Duration::from_secs(3))
                .build()?;
            assert_eq!(sum(&comm, &stream)?, 11.0);
            let y = comm.register(comm.buffer::<u8>(1 << 20)?)?;
            world.barrier("registered")?;
            if world.rank() == 1 {
                while comm.state() != nccl::CommunicatorState::Aborted {
                    std::thread::sleep(Duration::from_millis(1));
                }
                world.barrier("kept")?;
                return Ok(());
            }
            comm.revoke("another plan")?;
            let system_error = 2;
            let refuses = faults::at_call("ncclCommShrink").fail(system_error);
            let abort = faults::at_call("ncclCommAbort");
            let abort = match hangs {
                true => abort.hang(),
                false => abort.fail(system_error),
            };
            let freed = faults::at_call("ncclMemFree").delay(Duration::ZERO);
            let leaked = nccl::stats().leaked_communicators;
            assert!(comm.shrink("alone", &[1]).is_err());
            assert_eq!(comm.state(), nccl::CommunicatorState::Leaked);
            assert_eq!(nccl::stats().leaked_communicators, leaked + 1);
            drop(refuses);
            // The call returns late, and NCCL's remaining use of the memory is unknown.
            drop(abort);
            drop(y);
            assert!(!freed.wait_for_hits(1, Duration::from_millis(500)));
            world.barrier("kept")?;
            Ok(())
        });
    }
}

#[test]
fn what_is_registered_with_a_revoked_communicator_is_deregistered_before_it_is_freed() {
    if !support::needs_emulator("calls that are counted") {
        return;
    }
    // Where calls block the communicator is aborted.
    ranks_as_processes(2, |world: World| -> Outcome {
        let world = world.with_launch_mode(LaunchMode::NonBlocking);
        let (stream, comm) = start(&world, TIMEOUT)?;
        assert_eq!(sum(&comm, &stream)?, 11.0);
        let y = comm.register(comm.buffer::<u8>(1 << 20)?)?;
        world.barrier("registered")?;
        if world.rank() == 0 {
            comm.revoke("another plan")?;
        } else {
            while comm.state() != nccl::CommunicatorState::Aborted {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        let deregistered = faults::at_call("ncclCommDeregister").delay(Duration::ZERO);
        let freed = faults::at_call("ncclMemFree").delay(Duration::ZERO);
        drop(y);
        assert!(freed.wait_for_hits(1, TIMEOUT));
        assert_eq!(deregistered.hits(), 1);
        world.barrier("freed")?;
        Ok(())
    });
}
