//! NCCL's profiler plugin in the middle of everything: communicators that are aborted, revoked, captured from, finalized and dropped
//! while kernels and transfers are reported. NCCL calls plugins with handles of what is gone, and after the last communicator.
//!
//! `NCCL_TEST_ROUNDS=N` sets the number of communicators; `.ci/run all` makes a thousand.

mod support;

use std::error::Error;
use std::time::Duration;

use nccl::{Communicator, ReduceOp, World};
use nccl_plugin::profiler::{self, Events};
use support::Ranks;

type Outcome<T = ()> = Result<T, Box<dyn Error>>;

const LENGTH: usize = 200_000;

fn rounds() -> u64 {
    let asked = std::env::var("NCCL_TEST_ROUNDS").map(|rounds| rounds.parse());
    match (asked, std::env::var_os("NCCL_TEST_PATIENCE")) {
        (Ok(rounds), _) => rounds.expect("a number of rounds"),
        (Err(_), None) => 30,
        (Err(_), Some(_)) => 12,
    }
}

fn build(world: &World, round: u64) -> Outcome<Communicator> {
    let stream = support::device(world)?.new_stream()?;
    let comm = world
        .communicator(&format!("storm {}", round % 7))
        .stream(&stream)
        .with(|comm| {
            comm.timeouts.operation = Duration::from_secs(30);
            comm.timeouts.abort = Duration::from_secs(30);
            comm.preflight = false;
        })
        .build()?;
    Ok(comm)
}

/// One communicator with pending work, and one way of ending it.
fn one(world: &World, round: u64) -> Outcome {
    let comm = build(world, round)?;
    let stream = comm.stream().clone();
    let mut y = stream.alloc_zeros::<f32>(LENGTH)?;
    comm.all_reduce_in_place(&mut y, ReduceOp::Sum)?.wait()?;
    world.barrier("connected")?;
    let is_breaker = world.rank() as u64 == round / 7 % world.size() as u64;
    let is_first = world.rank() == 0;
    // The first abort takes effect; the other ranks get its fault.
    let tolerated = |outcome: nccl::Result<()>| match outcome {
        Err(error) if error.fault().is_none() => Err(error),
        _ => Ok(()),
    };
    match round % 7 {
        // An abort and a revocation in the middle of operations.
        0 | 1 => {
            let mut all = Vec::new();
            let mut buffers = Vec::new();
            for _ in 0..3 {
                buffers.push(comm.buffer::<f32>(LENGTH)?);
            }
            for buffer in &mut buffers {
                match comm.all_reduce_in_place(buffer, ReduceOp::Sum) {
                    Ok(request) => all.push(request),
                    Err(error) => tolerated(Err(error))?,
                }
            }
            if is_breaker {
                match round % 7 {
                    0 => comm.abort("in the middle")?,
                    _ => tolerated(comm.revoke("in the middle"))?,
                }
            }
            for request in all {
                tolerated(request.wait())?;
            }
        }
        // A captured operation is reported when it is captured, and its transfers at each launch.
        2 => {
            let mut plan = comm.capture(y, |capture, y| {
                capture.group(|group| group.all_reduce_in_place(y, ReduceOp::Sum))
            })?;
            for _ in 0..3 {
                plan.launch()?.wait()?;
            }
            match is_first {
                true => drop(plan),
                false => drop(comm),
            }
        }
        // One rank does not take part, and the others abort.
        3 => {
            if !is_breaker {
                let request = comm.all_reduce_in_place(&mut y, ReduceOp::Sum);
                comm.abort("one is not there")?;
                tolerated(request.and_then(|request| request.wait()))?;
            }
            world.barrier("aborted")?;
        }
        // The set of reported events changes during the work.
        4 => {
            for turn in 0..8 {
                profiler::set_events(Events {
                    operations: true,
                    transfers: turn % 2 == 0,
                    steps: turn % 4 == 0,
                    kernels: turn % 3 == 0,
                });
                comm.all_reduce_in_place(&mut y, ReduceOp::Sum)?.wait()?;
            }
            comm.finalize()?;
        }
        5 => {
            let color = world.rank() as u32 % 2;
            let part = comm.split("part", Some(color), 0)?;
            if let Some(part) = &part {
                part.all_reduce_in_place(&mut y, ReduceOp::Sum)?.wait()?;
            }
            match is_first {
                true => drop((comm, part)),
                false => drop((part, comm)),
            }
        }
        _ => {
            let request = comm.all_reduce_in_place(&mut y, ReduceOp::Sum)?;
            drop(request);
            drop(comm);
        }
    }
    Ok(())
}

fn storm(world: &World) -> Outcome {
    for round in 0..rounds() {
        profiler::set_events(Events {
            operations: true,
            transfers: true,
            steps: true,
            kernels: true,
        });
        one(world, round).map_err(|error| format!("round {round}: {error:#}"))?;
        world.barrier("round")?;
    }
    // Without this, nothing of the above was reported to it.
    assert!(
        profiler::taken_by() >= Some(4),
        "{:?}",
        profiler::taken_by()
    );
    Ok(())
}

fn ranks() -> Ranks {
    Ranks::new(2).deadline(4 * support::DEADLINE + Duration::from_secs(2 * rounds()))
}

#[test]
fn a_profiler_survives_whatever_ends_communicators_between_threads() {
    ranks().threads(|world| storm(&world));
}

#[test]
fn a_profiler_survives_whatever_ends_communicators_between_processes() {
    ranks().processes(|world| storm(&world));
}

#[test]
fn a_profiler_survives_whatever_ends_communicators_over_a_network() {
    ranks().ranks_per_host(1).processes(|world| storm(&world));
}
