//! Mixture of experts: the results of dispatch and combine equal a plain reference, to the bit.
//!
//! Random worlds: a failure names its seed. `NCCL_TEST_SEED=N` runs that one.

mod captured;
mod copies;
mod interpreter;
mod ptx;
mod reference;
mod single;

use std::sync::Arc;

use half::{bf16, f16};
use nccl::cudarc::driver::{CudaSlice, CudaStream, DriverError};
use nccl::moe::{DispatchWay, ExpertLayout, ExpertParallel, Routing};
use nccl::{Communicator, ErrorKind, World};
use reference::{Case, Element, Step, Weighed, assert_same, expert};

use crate::support::{self, Ranks, ranks_as_processes};

type Outcome = Result<(), Box<dyn std::error::Error>>;

fn start(world: &World) -> Result<Communicator, Box<dyn std::error::Error>> {
    let context = support::device(world)?;
    let stream = context.new_stream()?;
    Ok(world.communicator("experts").stream(&stream).build()?)
}

fn nothing_was_caught() {
    let violations = nccl_emulator::violations();
    assert!(violations.is_empty(), "{violations:#?}");
}

fn made(comm: &Communicator, case: &Case, row_bytes: usize) -> nccl::Result<ExpertParallel> {
    ExpertParallel::builder(comm)
        .with(|ep| {
            ep.experts = case.experts;
            ep.top_k = case.top_k;
            ep.max_tokens = case.max_tokens;
            ep.capacity = Some(case.capacity);
            ep.layout = case.layout;
            ep.way = case.way;
            ep.max_row_bytes = row_bytes;
        })
        .build()
}

/// An arrangement that all ranks derive from the same random numbers.
fn random_case(random: &mut fastrand::Rng, ranks: usize) -> Case {
    let experts = ranks * random.usize(1..=4);
    let max_tokens = random.usize(1..=24);
    Case {
        ranks,
        experts,
        top_k: random.usize(1..=experts.min(5)),
        max_tokens,
        capacity: match random.u8(..) {
            0..96 => random.usize(1..=max_tokens),
            _ => max_tokens,
        },
        layout: match random.bool() {
            true => ExpertLayout::RankMajor,
            false => ExpertLayout::ExpertMajor,
        },
        way: match random.bool() {
            true => DispatchWay::Rows,
            false => DispatchWay::AllGather,
        },
    }
}

/// The number of tokens of each rank: some ranks have none.
fn random_tokens(random: &mut fastrand::Rng, case: &Case) -> Vec<usize> {
    let mut tokens = || match random.u8(..) {
        0..32 => 0,
        32..64 => case.max_tokens,
        _ => random.usize(0..=case.max_tokens),
    };
    (0..case.ranks).map(|_| tokens()).collect()
}

/// The tokens of all ranks: some all choose the same experts, some choose none.
fn random_step(random: &mut fastrand::Rng, case: &Case, tokens: &[usize]) -> Step {
    let mut step = Step {
        topk: Vec::new(),
        weights: Vec::new(),
    };
    let busy = random.usize(0..case.experts);
    for &tokens in tokens {
        let skew = random.u8(..);
        let choices: Vec<Vec<i32>> = (0..tokens)
            .map(|_| {
                let mut experts: Vec<_> = (0..case.experts as i32).collect();
                random.shuffle(&mut experts);
                if random.u8(..) < skew {
                    experts.retain(|&expert| expert != busy as i32);
                    experts.insert(0, busy as i32);
                }
                experts.truncate(case.top_k);
                let masked = |random: &mut fastrand::Rng| random.u8(..) < 24;
                for expert in &mut experts {
                    if masked(random) {
                        *expert = -random.i32(1..100);
                    }
                }
                experts
            })
            .collect();
        let weights = choices
            .iter()
            .map(|choices| choices.iter().map(|_| random.f32() * 2.0 - 0.5).collect())
            .collect();
        step.topk.push(choices);
        step.weights.push(weights);
    }
    step
}

fn random_rows<T: Element>(random: &mut fastrand::Rng, step: &Step, width: usize) -> Vec<Vec<T>> {
    let of = |topk: &Vec<Vec<i32>>| topk.len() * width;
    let lengths: Vec<_> = step.topk.iter().map(of).collect();
    let mut row = |length: usize| (0..length).map(|_| T::random(random)).collect();
    lengths.into_iter().map(&mut row).collect()
}

/// Copies values to the device; also none.
fn up<T: Element>(stream: &Arc<CudaStream>, values: &[T]) -> Result<CudaSlice<T>, DriverError> {
    match values {
        [] => stream.null::<T>(),
        values => stream.clone_htod(values),
    }
}

fn flat<T: Copy>(values: &[Vec<T>]) -> Vec<T> {
    values.concat()
}

/// The work of the experts of one rank, on the host.
fn experts_work<T: Weighed>(case: &Case, rank: usize, y: &[T], width: usize) -> Vec<T> {
    let places = case.places(rank);
    let rows = y.chunks_exact(width).zip(places);
    rows.flat_map(|(row, (number, ..))| {
        row.iter()
            .map(move |&element| expert(number, element))
            .collect::<Vec<_>>()
    })
    .collect()
}

/// Routes, dispatches, runs the experts, and combines; compares all results.
fn one_step<T: Weighed>(
    what: &str,
    ep: &mut ExpertParallel,
    routing: &mut Routing,
    case: &Case,
    random: &mut fastrand::Rng,
    width: usize,
) -> Outcome {
    let rank = ep.communicator().rank();
    let stream = ep.communicator().stream().clone();
    let tokens = random_tokens(random, case);
    let step = random_step(random, case, &tokens);
    let x = random_rows::<T>(random, &step, width);
    let topk = up(&stream, &flat(&step.topk[rank]))?;
    ep.route(&topk, routing)?;

    let mine = up(&stream, &x[rank])?;
    let mut y = stream.alloc_zeros::<T>(case.rows() * width)?;
    // Earlier contents must not be visible in the result.
    stream.memcpy_htod(&vec![T::narrow(7.0); case.rows() * width], &mut y)?;
    ep.dispatch(routing, &mine, &mut y)?;
    let found = stream.clone_dtoh(&y)?;
    let expected = case.received(&step, rank, &x, width);
    assert_same(&format!("{what}: received"), &found, &expected, width);

    let z = up(&stream, &experts_work(case, rank, &found, width))?;
    let weights = up(&stream, &flat(&step.weights[rank]))?;
    let mut out = up(&stream, &x[rank])?;
    ep.combine(routing, &z, &weights, &mut out)?.wait()?;
    let found = match out.len() {
        0 => Vec::new(),
        _ => stream.clone_dtoh(&out)?,
    };
    let expected = case.combined(&step, rank, &x[rank], width);
    assert_same(&format!("{what}: combined"), &found, &expected, width);
    counts_are_right(what, routing, case, &step, rank);
    Ok(())
}

/// Asserts that the counts are correct, or that the error is.
fn counts_are_right(what: &str, routing: &Routing, case: &Case, step: &Step, rank: usize) {
    let all = case.counts(step);
    let own = rank * case.own()..(rank + 1) * case.own();
    let received: Vec<Vec<u32>> = all
        .iter()
        .map(|counts| counts[own.clone()].to_vec())
        .collect();
    let too_many = |&count: &u32| count as usize > case.capacity;
    let full = all[rank]
        .iter()
        .chain(received.iter().flatten())
        .any(too_many);
    match routing.counts() {
        Ok(counts) => {
            assert!(!full, "{what}: an expert was full");
            assert_eq!(counts.sent, all[rank], "{what}: sent");
            assert_eq!(counts.received, flat(&received), "{what}: received");
        }
        Err(error) => match *error.kind() {
            ErrorKind::ExpertCapacity {
                rank: source,
                expert,
                tokens,
                capacity,
            } => {
                assert!(full, "{what}: {error:#}");
                assert_eq!(capacity, case.capacity);
                assert_eq!(all[source][expert] as usize, tokens, "{what}: {error:#}");
                assert!(tokens > capacity, "{what}: {error:#}");
                assert!(source == rank || own.contains(&expert), "{what}: {error:#}");
            }
            _ => panic!("{what}: {error:#}"),
        },
    }
}

fn random_world(world: &World, seed: u64) -> Outcome {
    let comm = start(world)?;
    // The same on all ranks.
    let mut random = fastrand::Rng::with_seed(seed);
    for round in 0..4 {
        let case = random_case(&mut random, world.size());
        let width = random.usize(1..40);
        let what = format!("seed {seed}, round {round}, {case:?}, width {width}");
        let mut ep = made(&comm, &case, width * 4)?;
        let mut routings = [ep.routing()?, ep.routing()?];
        for step in 0..4 {
            let routing = &mut routings[step % 2];
            let (what, random) = (format!("{what}, step {step}"), &mut random);
            match random.u8(0..3) {
                0 => one_step::<f32>(&what, &mut ep, routing, &case, random, width)?,
                1 => one_step::<f16>(&what, &mut ep, routing, &case, random, width)?,
                _ => one_step::<bf16>(&what, &mut ep, routing, &case, random, width)?,
            }
        }
    }
    comm.finalize()?;
    nothing_was_caught();
    Ok(())
}

/// The number of ranks for each seed.
const SEEDS: [usize; 8] = [1, 2, 3, 4, 8, 2, 3, 4];

fn random_worlds(late: &str) {
    let one: Option<u64> = std::env::var("NCCL_TEST_SEED")
        .ok()
        .and_then(|seed| seed.parse().ok());
    for (seed, ranks) in SEEDS.into_iter().enumerate() {
        let seed = seed as u64;
        if one.is_none_or(|one| one == seed) {
            Ranks::new(ranks)
                .variable("NCCL_EMULATOR_FAULTS", late)
                .threads(move |world| random_world(&world, seed));
        }
    }
}

#[test]
fn random_routings_arrive_and_come_back_as_the_reference_says() {
    random_worlds("");
}

#[test]
fn random_routings_are_right_when_operations_and_kernels_run_late() {
    if support::needs_emulator("operations that run late on purpose") {
        random_worlds("late=1ms");
    }
}

#[test]
fn processes_are_ranks_as_threads_are() {
    ranks_as_processes(2, |world| random_world(&world, 11));
}
