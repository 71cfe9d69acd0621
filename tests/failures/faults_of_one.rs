//! Faults that are limited to one communicator do not affect those of other tests in the process; and a call that
//! stalls ends with the abort where calls block.

use std::time::{Duration, Instant};

use nccl::{LaunchMode, ReduceOp, World};
use nccl_emulator::faults;

use crate::support::{self, needs_emulator, ranks_as_processes, ranks_as_threads};

type Result<T, E = Box<dyn std::error::Error>> = std::result::Result<T, E>;

const SHORT: Duration = Duration::from_millis(300);

/// An all-reduce on a communicator of this name.
fn sum(world: &World, name: &str) -> Result<()> {
    let stream = support::device(world)?.new_stream()?;
    let comm = world
        .communicator(name)
        .stream(&stream)
        .with(|comm| comm.timeouts.operation = SHORT * 20);
    let comm = comm.build()?;
    let mut values = stream.clone_htod(&[1.0f32; 8])?;
    let hasty = match name {
        // Long enough for the operation of rank 1 to begin, and to stall.
        "struck/tp" => comm.within(SHORT * 10),
        _ => comm.clone(),
    };
    for _ in 0..10 {
        hasty
            .all_reduce_in_place(&mut values, ReduceOp::Max)?
            .wait()?;
    }
    comm.finalize()?;
    Ok(())
}

#[test]
fn a_fault_of_one_communicator_leaves_its_neighbours_in_the_process_alone() {
    if !needs_emulator("faults on purpose") {
        return;
    }
    ranks_as_threads(2, |world| -> Result<()> {
        // Both ranks install it, for the same communicators.
        let fault = faults::at_operation("AllReduce")
            .communicator("struck/*")
            .rank(1)
            .stall();
        world.barrier("in place")?;
        // As another test of the process would, with worlds of its own.
        let neighbours = std::thread::spawn(|| {
            let ranks = World::threads(2).into_iter();
            let ranks = ranks.map(|world| {
                std::thread::spawn(move || {
                    sum(&world, "neighbour/tp").map_err(|error| format!("{error:#}"))
                })
            });
            let ranks: Vec<_> = ranks.collect();
            ranks
                .into_iter()
                .map(|rank| rank.join().map_err(|_| "it panicked"))
                .collect::<Vec<_>>()
        });
        let struck = sum(&world, "struck/tp").unwrap_err();
        let struck = struck.downcast::<nccl::Error>()?;
        assert!(struck.fault().is_some(), "{struck}");
        for neighbour in neighbours.join().map_err(|_| "it panicked")? {
            neighbour??;
        }
        world.barrier("over")?;
        assert!(world.rank() != 1 || fault.hits() > 0);
        Ok(())
    });
}

/// The parent of the communicator is aborted, and shares its abort flag: the stalled thread returns from the call.
#[test]
fn a_call_that_stalls_ends_with_the_abort_in_a_blocking_child() {
    if !needs_emulator("faults on purpose") {
        return;
    }
    ranks_as_processes(2, |world| -> Result<()> {
        let world = world.with_launch_mode(LaunchMode::BlockingChild);
        let _fault = faults::at_call("ncclAllReduce")
            .communicator("stalls")
            .rank(1)
            .stall();
        let stream = support::device(&world)?.new_stream()?;
        let comm = world
            .communicator("stalls")
            .stream(&stream)
            .with(|comm| comm.timeouts.operation = SHORT);
        let comm = comm.build()?;
        let mut values = stream.clone_htod(&[1.0f32; 8])?;
        let begun = Instant::now();
        let sum = comm.all_reduce_in_place(&mut values, ReduceOp::Sum);
        let error = sum.and_then(|sum| sum.wait()).unwrap_err();
        assert!(error.fault().is_some(), "{error:#}");
        assert!(
            begun.elapsed() < Duration::from_secs(10),
            "{:?}",
            begun.elapsed()
        );
        // Nothing is left of it: the next communicator works.
        drop(comm);
        let next = world.communicator("works").stream(&stream).build()?;
        next.all_reduce_in_place(&mut values, ReduceOp::Sum)?
            .wait()?;
        next.finalize()?;
        Ok(())
    });
}

/// Any communicator of the group may be aborted, not only the first. In the default launch mode.
#[test]
fn a_group_that_stalls_ends_with_the_abort_of_any_of_its_communicators() {
    if !needs_emulator("faults on purpose") {
        return;
    }
    ranks_as_processes(2, |world| -> Result<()> {
        let stream = support::device(&world)?.new_stream()?;
        let build = |name| world.communicator(name).stream(&stream).build();
        let (first, second) = (build("first")?, build("second")?);
        let _fault = faults::at_call("ncclGroupEnd")
            .communicator("second")
            .rank(1)
            .stall();
        let mut x = stream.clone_htod(&[1.0f32; 8])?;
        let mut y = stream.clone_htod(&[1.0f32; 8])?;
        std::thread::scope(|scope| -> Result<()> {
            scope.spawn(|| {
                std::thread::sleep(SHORT);
                (world.rank() == 1).then(|| second.abort("on purpose"))
            });
            let stalled = nccl::group(|group| {
                group
                    .on(&first)?
                    .all_reduce_in_place(&mut x, ReduceOp::Sum)?;
                group
                    .on(&second)?
                    .all_reduce_in_place(&mut y, ReduceOp::Sum)?;
                Ok(())
            });
            let error = stalled.and_then(|sums| sums.wait()).unwrap_err();
            assert!(error.fault().is_some(), "{error:#}");
            let fault = second.fault().expect("it was aborted").to_string();
            assert!(fault.contains("on purpose"), "{fault}");
            Ok(())
        })
    });
}
