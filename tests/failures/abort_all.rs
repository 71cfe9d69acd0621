//! `nccl::process::abort_all` ends all communicators of a process, in whatever state they are.

use std::time::{Duration, Instant};

use nccl::{Communicator, CommunicatorState, ErrorKind, ReduceOp, World};
use nccl_emulator::faults;

use crate::support::{self, Ranks, ranks_as_processes, ranks_as_threads};

type Outcome = Result<(), Box<dyn std::error::Error>>;

/// Timeout of operations: reaching it means that the operation was not ended.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Timeout of a whole abort: generous, for a loaded machine.
const SOON: Duration = Duration::from_secs(10);

/// The communicators that NCCL did not give back.
fn leaked(
    report: &nccl::process::AbortReport,
) -> impl Iterator<Item = &nccl::process::EndedCommunicator> {
    let all = report.communicators.iter();
    all.filter(|ended| ended.state == CommunicatorState::Leaked)
}

/// Waits in an operation that the last rank does not enter.
fn wait_in_vain(comm: &Communicator) -> nccl::Result<()> {
    let mut y = comm.stream().alloc_zeros::<f32>(1 << 12).expect("memory");
    comm.all_reduce_in_place(&mut y, ReduceOp::Sum)?.wait()
}

/// Two communicators of three ranks, which are threads of this process; both have waiting operations when they are
/// ended.
fn end_six(world: &World) -> Outcome {
    let stream = support::device(world)?.new_stream()?;
    let build = |name: &'static str| {
        world
            .communicator(name)
            .stream(&stream)
            .with(|comm| comm.timeouts.operation = TIMEOUT)
    };
    let (a, b) = (build("a").build()?, build("b").build()?);
    // Connects the ranks, so that later operations wait on the device.
    wait_in_vain(&a)?;
    wait_in_vain(&b)?;
    world.barrier("connected")?;
    let begun = Instant::now();
    if world.rank() == 2 {
        std::thread::sleep(Duration::from_millis(50));
        let report = nccl::process::abort_all("enough");
        assert!(begun.elapsed() < SOON, "{:?}", begun.elapsed());
        let mut ended: Vec<_> = report
            .communicators
            .iter()
            .map(|ended| (ended.name.clone(), ended.rank, ended.state))
            .collect();
        ended.sort_by(|one, other| (&one.0, one.1).cmp(&(&other.0, other.1)));
        let all = ["a", "b"]
            .iter()
            .flat_map(|name| (0..3).map(|rank| (name.to_string(), rank)));
        let all: Vec<_> = all
            .map(|(name, rank)| (name, rank, CommunicatorState::Aborted))
            .collect();
        assert_eq!(ended, all, "{report}");
        assert_eq!(leaked(&report).count(), 0, "{report}");
        assert!(
            report.to_string().contains("rank 0 of \"a\" is aborted"),
            "{report}"
        );
        // No communicator is left.
        assert_eq!(nccl::process::abort_all("again").communicators, []);
    } else {
        let error = wait_in_vain(if world.rank() == 0 { &a } else { &b }).unwrap_err();
        assert!(begun.elapsed() < SOON, "{:?}", begun.elapsed());
        assert!(format!("{error:#}").contains("enough"), "{error:#}");
        assert!(
            matches!(error.kind(), ErrorKind::Aborted { .. }),
            "{error:#}"
        );
    }
    world.barrier("over")?;
    for comm in [a, b] {
        assert_eq!(comm.state(), CommunicatorState::Aborted);
        let error = wait_in_vain(&comm).unwrap_err();
        assert!(format!("{error:#}").contains("enough"), "{error:#}");
    }
    Ok(())
}

#[test]
fn all_communicators_of_a_process_end_together() {
    ranks_as_threads(3, |world| end_six(&world));
}

#[test]
fn a_library_that_knows_how_aborts_them_in_one_group_and_an_older_one_does_not() {
    // Ranks cannot share a device before 2.30.3.
    if !support::needs_devices(3) || !support::needs_emulator("older libraries, and counted calls")
    {
        return;
    }
    for (version, groups) in [("2.22.3", 1), ("2.21.5", 0)] {
        Ranks::new(3)
            .variable("NCCL_EMULATOR_VERSION", version)
            .threads(move |world| -> Outcome {
                if world.rank() != 2 {
                    return end_six(&world);
                }
                let starts = faults::at_call("ncclGroupStart").delay(Duration::ZERO);
                let aborts = faults::at_call("ncclCommAbort").delay(Duration::ZERO);
                end_six(&world)?;
                assert_eq!(starts.hits(), groups);
                assert_eq!(aborts.hits(), 6);
                Ok(())
            });
    }
}

/// An operation that waits may be part of a group with another communicator.
#[test]
fn communicators_of_one_group_end_together() {
    if !support::needs_devices(2) {
        return;
    }
    ranks_as_threads(2, |world| -> Outcome {
        let stream = support::device(&world)?.new_stream()?;
        let build = |name: &'static str| {
            world
                .communicator(name)
                .stream(&stream)
                .with(|comm| comm.timeouts.operation = TIMEOUT)
        };
        let (a, b) = (build("a").build()?, build("b").build()?);
        world.barrier("made")?;
        let begun = Instant::now();
        if world.rank() == 0 {
            // Never connected: it waits inside NCCL.
            let (mut x, mut y) = (stream.alloc_zeros::<f32>(8)?, stream.alloc_zeros::<f32>(8)?);
            let error = nccl::group(|group| {
                group.on(&a)?.all_reduce_in_place(&mut x, ReduceOp::Sum)?;
                group.on(&b)?.all_reduce_in_place(&mut y, ReduceOp::Sum)
            });
            let error = error.unwrap_err();
            assert!(format!("{error:#}").contains("enough"), "{error:#}");
        } else {
            std::thread::sleep(Duration::from_millis(100));
            let report = nccl::process::abort_all("enough");
            assert_eq!(report.communicators.len(), 4, "{report}");
            assert_eq!(leaked(&report).count(), 0, "{report}");
        }
        assert!(begun.elapsed() < SOON, "{:?}", begun.elapsed());
        world.barrier("over")?;
        Ok(())
    });
}

#[test]
fn those_of_other_processes_end_as_well_and_tell_the_reason() {
    ranks_as_processes(2, |world| -> Outcome {
        let stream = support::device(&world)?.new_stream()?;
        let comm = world
            .communicator("all")
            .stream(&stream)
            .with(|comm| comm.timeouts.operation = TIMEOUT);
        let comm = comm.build()?;
        let part = comm
            .split("part", Some(0), 0)?
            .ok_or("a colour was given")?;
        world.barrier("made")?;
        let begun = Instant::now();
        if world.rank() == 0 {
            let report = nccl::process::abort_all("the service is shutting down");
            assert_eq!(report.communicators.len(), 2, "{report}");
            assert_eq!(leaked(&report).count(), 0, "{report}");
        } else {
            for comm in [&part, &comm] {
                let error = wait_in_vain(comm).unwrap_err();
                let fault = error.fault().ok_or("a cause that all know")?;
                assert_eq!(
                    (fault.culprit(), &*fault.cause),
                    (Some(0), "the service is shutting down")
                );
            }
        }
        assert!(begun.elapsed() < SOON, "{:?}", begun.elapsed());
        world.barrier("over")?;
        Ok(())
    });
}

/// One communicator still waits for its rendezvous, one waits inside NCCL for the other rank, one is in use.
#[test]
fn communicators_that_are_being_made_end_as_well() {
    ranks_as_threads(2, |world| -> Outcome {
        if world.rank() == 1 {
            world.barrier("over")?;
            return Ok(());
        }
        let context = support::device(&world)?;
        let stream = || context.new_stream();
        let used = World::single()
            .communicator("used")
            .stream(&stream()?)
            .build()?;
        let id = nccl::UniqueId::new(&nccl::Library::load()?)?;
        let begun = Instant::now();
        let (looking, waiting, report) = std::thread::scope(|scope| {
            let (one, other) = (stream()?, stream()?);
            let world = &world;
            let looking = scope.spawn(move || {
                world
                    .communicator("looking")
                    .stream(&one)
                    .with(|comm| comm.timeouts.init = TIMEOUT)
                    .build()
            });
            let waiting = scope.spawn(move || {
                let builder = Communicator::builder("waiting", id, 0, 2);
                builder
                    .stream(&other)
                    .with(|comm| comm.timeouts.init = TIMEOUT)
                    .build()
            });
            std::thread::sleep(Duration::from_millis(200));
            let report = nccl::process::abort_all("not now");
            let error = |made: Result<Communicator, _>| made.expect_err("nobody came");
            let looking = error(looking.join().expect("no panic"));
            let waiting = error(waiting.join().expect("no panic"));
            Ok::<_, Box<dyn std::error::Error>>((looking, waiting, report))
        })?;
        assert!(begun.elapsed() < SOON, "{:?}", begun.elapsed());
        for error in [looking, waiting] {
            assert!(
                matches!(error.kind(), ErrorKind::Aborted { .. }),
                "{error:#}"
            );
            assert!(format!("{error:#}").contains("not now"), "{error:#}");
        }
        assert_eq!(used.state(), CommunicatorState::Aborted);
        let mut names: Vec<_> = report
            .communicators
            .iter()
            .map(|ended| &*ended.name)
            .collect();
        names.sort_unstable();
        assert_eq!(names, ["looking", "used", "waiting"], "{report}");
        assert_eq!(leaked(&report).count(), 0, "{report}");
        // Later communicators are not affected.
        World::single()
            .communicator("new")
            .stream(&stream()?)
            .build()?
            .finalize()?;
        world.barrier("over")?;
        Ok(())
    });
}

/// One abort hangs in NCCL; the other communicators are freed, and the report names the leaked one.
#[test]
fn what_is_leaked_is_reported_and_keeps_nobody() {
    if !support::needs_emulator("an abort that hangs") {
        return;
    }
    // Each on a thread of its own, so that the hanging abort blocks no other.
    let ranks = Ranks::new(1).variable("NCCL_EMULATOR_VERSION", "2.21.5");
    ranks.threads(|world| -> Outcome {
        // A real library: a world of one rank has no NCCL.
        let stream = support::device(&world)?.new_stream()?;
        let timeout = Duration::from_millis(300);
        let mut comms = Vec::new();
        for name in ["a", "b", "c"] {
            let id = nccl::UniqueId::new(&nccl::Library::load()?)?;
            let builder = Communicator::builder(name, id, 0, 1).stream(&stream);
            comms.push(builder.with(|comm| comm.timeouts.abort = timeout).build()?);
        }
        let hangs = faults::at_call("ncclCommAbort").nth(2).hang();
        let begun = Instant::now();
        let report = nccl::process::abort_all("on purpose");
        assert!(
            begun.elapsed() >= timeout && begun.elapsed() < SOON,
            "{:?}",
            begun.elapsed()
        );
        assert_eq!(report.communicators.len(), 3, "{report}");
        let leaked: Vec<_> = leaked(&report).collect();
        assert_eq!(leaked.len(), 1, "{report}");
        assert!(report.to_string().contains("leaked"), "{report}");
        for comm in &comms {
            let expected = match *leaked[0].name == *comm.name() {
                true => CommunicatorState::Leaked,
                false => CommunicatorState::Aborted,
            };
            assert_eq!(comm.state(), expected);
            let debug = format!("{comm:?}");
            assert!(debug.contains(&format!("{expected:?}")), "{debug}");
        }
        drop(hangs);
        Ok(())
    });
}
