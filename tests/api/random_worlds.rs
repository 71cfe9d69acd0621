//! Random programs of random worlds: every operation, every type, any length, any stream, in threads and
//! in processes, on time and late, with and without the event tracking of cudarc.
//!
//! A failure names its seed. `NCCL_TEST_SEED=N` runs that one, `NCCL_TEST_STEPS=N` sets the length.

use nccl::World;

use crate::random::{self, Outcome};
use crate::support::{self, Ranks};

/// Worlds of 1 to 4 ranks, with event tracking and without.
const SEEDS: std::ops::Range<u64> = 0..8;

fn variable(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

fn program(world: &World, seed: u64) -> Outcome {
    let context = support::device(world)?;
    if seed % 8 >= 4 {
        // SAFETY: each buffer is used on its own stream and through operations only.
        unsafe { context.disable_event_tracking() };
    }
    let stream = context.new_stream()?;
    let comm = world.communicator("random").stream(&stream).build()?;
    let steps = variable("NCCL_TEST_STEPS").unwrap_or(60) as usize;
    random::run(&comm, seed, steps)?;
    comm.finalize()?;
    let violations = nccl_emulator::violations();
    if violations.is_empty() {
        Ok(())
    } else {
        Err(format!("seed {seed}: {violations:#?}").into())
    }
}

fn worlds(late: bool) -> impl Iterator<Item = (u64, Ranks)> {
    let seeds = match variable("NCCL_TEST_SEED") {
        Some(seed) => seed..seed + 1,
        None => SEEDS,
    };
    seeds.map(move |seed| {
        let ranks = Ranks::new(seed as usize % 4 + 1);
        let faults = if late { "late=3ms" } else { "" };
        (seed, ranks.variable("NCCL_EMULATOR_FAULTS", faults))
    })
}

#[test]
fn random_programs_are_right_between_threads() {
    // The program uses the default stream: on one device, threads would wait for each other in it.
    if !support::needs_devices(4) {
        return;
    }
    for (seed, ranks) in worlds(false) {
        ranks.threads(move |world| program(&world, seed));
    }
}

#[test]
fn random_programs_are_right_between_threads_when_operations_run_late() {
    if !support::needs_emulator("operations that run late on purpose") || !support::needs_devices(4)
    {
        return;
    }
    for (seed, ranks) in worlds(true) {
        ranks.threads(move |world| program(&world, seed));
    }
}

#[test]
fn random_programs_are_right_between_processes() {
    for (seed, ranks) in worlds(false) {
        ranks.processes(move |world| program(&world, seed));
    }
}

#[test]
fn random_programs_are_right_between_processes_when_operations_run_late() {
    if !support::needs_emulator("operations that run late on purpose") {
        return;
    }
    for (seed, ranks) in worlds(true) {
        ranks.processes(move |world| program(&world, seed));
    }
}
