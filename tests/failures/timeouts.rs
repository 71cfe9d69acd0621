//! Timeouts of the environment override those of the program.

use std::time::Duration;

use nccl::{ErrorKind, Observer, ReduceOp, Rendezvous, World};
use nccl_tools::testing::{Role, again, name};

use crate::support::{self, Ranks};

type Result<T, E = Box<dyn std::error::Error>> = std::result::Result<T, E>;

const LONG: Duration = Duration::from_secs(100);
const SHORT: Duration = Duration::from_millis(50);

#[test]
fn a_limit_of_the_environment_wins_over_those_of_builders_and_calls() {
    let ranks = Ranks::new(2).variable("NCCL_RUN_TIMEOUT", "300ms");
    ranks.processes(|world| -> Result<()> {
        let stream = support::device(&world)?.new_stream()?;
        let comm = world
            .communicator("short")
            .stream(&stream)
            .with(|comm| comm.timeouts.operation = LONG)
            .build()?;
        let mut values = stream.alloc_zeros::<f32>(8)?;
        if world.rank() == 0 {
            let patient = comm.within(LONG);
            let late = patient.all_reduce_in_place(&mut values, ReduceOp::Sum);
            let error = late.and_then(|request| request.wait()).unwrap_err();
            let ErrorKind::TimedOut { timeout, .. } = error.kind() else {
                return Err(error.into());
            };
            assert_eq!(*timeout, Duration::from_millis(300));
        }
        world.barrier("it has passed")?;
        Ok(())
    });
}

#[test]
fn a_limit_that_the_environment_switches_off_never_passes() {
    let ranks = Ranks::new(2).variable("NCCL_RUN_TIMEOUT", "off");
    ranks.processes(|world| -> Result<()> {
        let world = world.with_timeout(SHORT);
        let stream = support::device(&world)?.new_stream()?;
        let comm = world.communicator("off").stream(&stream);
        let comm = comm.with(|comm| {
            comm.timeouts.operation = SHORT;
            comm.timeouts.init = SHORT;
            comm.timeouts.queue = Some(SHORT);
            comm.timeouts.finalize = SHORT;
        });
        // Holds up rank 1, as a debugger would.
        let hold = || {
            if world.rank() == 1 {
                std::thread::sleep(SHORT * 12);
            }
        };
        hold();
        let comm = comm.build()?;
        hold();
        comm.warm_up(SHORT)?;
        let mut values = stream.clone_htod(&[1.0f32; 8])?;
        hold();
        comm.within(SHORT)
            .all_reduce_in_place(&mut values, ReduceOp::Sum)?
            .wait()?;
        assert_eq!(stream.clone_dtoh(&values)?, [2.0; 8]);
        hold();
        world.barrier("held")?;
        hold();
        comm.finalize()?;
        hold();
        let next = world.next_generation(SHORT)?;
        assert_eq!((next.generation(), next.size()), (1, 2));
        Ok(())
    });
}

#[test]
fn a_limit_that_the_environment_switches_off_never_passes_for_a_newcomer_and_an_observer() {
    let ranks = Ranks::new(1).variable("NCCL_RUN_TIMEOUT", "off");
    ranks.processes(|_| -> Result<()> {
        let place = std::env::temp_dir().join(format!("nccl-limits-{}.sock", std::process::id()));
        let meet =
            || Rendezvous::unix(&place, 0, 1).map(|meet| meet.with(|meet| meet.timeout = SHORT));
        std::thread::scope(|scope| -> Result<()> {
            let observer = scope.spawn(|| Observer::join(meet()?));
            std::thread::sleep(SHORT * 12);
            let world = World::join(meet()?)?;
            observer.join().expect("an observer")?;
            let newcomer = scope.spawn(|| World::join_running(meet()?));
            std::thread::sleep(SHORT * 12);
            let next = world.next_generation(SHORT)?;
            let newcomer = newcomer.join().expect("a newcomer")?;
            assert_eq!((next.size(), newcomer.rank()), (2, 1));
            Ok(())
        })
    });
}

#[test]
fn a_limit_that_cannot_be_read_is_an_error_before_the_ranks_meet() {
    let test = &name(&|| ());
    if Role::of(test) == Role::Test {
        let mut process = again(test, "reads");
        process.env("NCCL_RUN_FINALIZE_TIMEOUT", "5 minutes");
        let status = process.status().expect("a process");
        assert!(status.success(), "{status}");
        return;
    }
    let is_told = |error: nccl::Error| {
        let ErrorKind::InvalidConfig { field, reason } = error.kind() else {
            panic!("{error:#}");
        };
        assert_eq!(*field, "NCCL_RUN_FINALIZE_TIMEOUT");
        assert!(
            reason.contains("\"5 minutes\"") && reason.contains("5m"),
            "{reason}"
        );
    };
    let rendezvous = Rendezvous::unix("/tmp/nccl-test-nobody.sock", 1, 2).expect("an address");
    is_told(World::join(rendezvous).expect_err("it cannot be read"));
    // Worlds of threads cannot fail; their communicators do.
    nccl_tools::perf::install(1).expect("a GPU or the emulator");
    let world = World::threads(1).remove(0);
    let stream = support::device(&world).and_then(|context| context.new_stream());
    let stream = stream.expect("a stream");
    let built = world.communicator("none").stream(&stream).build();
    is_told(built.expect_err("it cannot be read"));
}
