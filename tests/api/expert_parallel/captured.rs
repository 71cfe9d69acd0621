//! Experts in captured plans: replays equal a plain reference, to the bit, and what could replay after a free is refused.

use std::sync::Arc;
use std::time::Duration;

use nccl::cudarc::driver::{CudaSlice, CudaStream};
use nccl::moe::{DispatchWay, ExpertLayout, ExpertParallel, ExpertPlacement, Routing};
use nccl::plan::{CapturedPlan, PlanBuffers};
use nccl::{Communicator, CommunicatorState, ErrorKind, World};

use super::reference::{Case, Weighed, assert_same};
use super::{
    Outcome, SEEDS, counts_are_right, experts_work, flat, made, nothing_was_caught, one_step,
    random_case, random_rows, random_step, random_tokens, start, up,
};
use crate::support::{self, Ranks, ranks_as_threads};

/// Routing, choices, weights, tokens, rows of the experts, their results, and the combined results.
type Buffers<T> = (
    Routing,
    CudaSlice<i32>,
    CudaSlice<f32>,
    CudaSlice<T>,
    CudaSlice<T>,
    CudaSlice<T>,
    CudaSlice<T>,
);

/// A plan with two parts: everything before the experts, and everything behind them.
fn plan<T: Weighed>(
    ep: &ExpertParallel,
    case: &Case,
    tokens: usize,
    width: usize,
) -> Result<CapturedPlan<Buffers<T>>, Box<dyn std::error::Error>> {
    let stream = ep.communicator().stream();
    let numbers = |len: usize| up(stream, &vec![T::ZERO; len]);
    let buffers = (
        ep.routing()?,
        up(stream, &vec![0i32; tokens * case.top_k])?,
        up(stream, &vec![0f32; tokens * case.top_k])?,
        numbers(tokens * width)?,
        numbers(case.rows() * width)?,
        numbers(case.rows() * width)?,
        numbers(tokens * width)?,
    );
    let plan = ep.communicator().capture(
        buffers,
        |capture, (mut routing, topk, weights, x, y, z, out)| {
            let mut experts = ep.capture(capture)?;
            experts.route(&topk, &mut routing)?;
            experts.dispatch(&routing, &x, y)?;
            experts.next_part();
            experts.combine(&routing, &z, &weights, out)
        },
    )?;
    assert_eq!(plan.parts(), 2);
    Ok(plan)
}

/// Replays a step with new data, and compares all results.
fn replay<T: Weighed>(
    what: &str,
    plan: &mut CapturedPlan<Buffers<T>>,
    (rank, stream): (usize, &Arc<CudaStream>),
    case: &Case,
    tokens: &[usize],
    random: &mut fastrand::Rng,
    width: usize,
) -> Outcome {
    let step = random_step(random, case, tokens);
    let rows = random_rows::<T>(random, &step, width);
    if tokens[rank] > 0 {
        let (_, mut topk, mut weights, mut x, ..) = plan.views_mut();
        stream.memcpy_htod(&flat(&step.topk[rank]), &mut topk)?;
        stream.memcpy_htod(&flat(&step.weights[rank]), &mut weights)?;
        stream.memcpy_htod(&rows[rank], &mut x)?;
    }
    plan.launch_part(0)?;
    let found = stream.clone_dtoh(&plan.views().4)?;
    let expected = case.received(&step, rank, &rows, width);
    assert_same(&format!("{what}: received"), &found, &expected, width);
    let results = experts_work(case, rank, &found, width);
    stream.memcpy_htod(&results, &mut plan.views_mut().5)?;
    plan.launch_part(1)?.wait()?;
    let (routing, .., out) = plan.views();
    let found = match out.len() {
        0 => Vec::new(),
        _ => stream.clone_dtoh(&out)?,
    };
    let expected = case.combined(&step, rank, &rows[rank], width);
    assert_same(&format!("{what}: combined"), &found, &expected, width);
    counts_are_right(what, routing, case, &step, rank);
    Ok(())
}

fn random_plans(world: &World, seed: u64) -> Outcome {
    let comm = start(world)?;
    let stream = comm.stream().clone();
    // The same on all ranks.
    let mut random = fastrand::Rng::with_seed(seed);
    let random = &mut random;
    for round in 0..3 {
        let case = random_case(random, world.size());
        let width = random.usize(1..40);
        let what = format!("seed {seed}, round {round}, {case:?}, width {width}");
        let mut ep = made(&comm, &case, width * 4)?;
        let mut beside = ep.routing()?;
        let tokens = [random_tokens(random, &case), random_tokens(random, &case)];
        let own = |at: usize| tokens[at][world.rank()];
        let mut first = plan::<f32>(&ep, &case, own(0), width)?;
        let mut second = plan::<half::bf16>(&ep, &case, own(1), width)?;
        let at = (world.rank(), &stream);
        for step in 0..3 {
            let what = format!("{what}, step {step}");
            replay(&what, &mut first, at, &case, &tokens[0], random, width)?;
            // Calls outside of plans use the same staging memory.
            one_step::<f32>(&what, &mut ep, &mut beside, &case, random, width)?;
            replay(&what, &mut second, at, &case, &tokens[1], random, width)?;
        }
        // A plan does not need the value that it was recorded with.
        drop(ep);
        replay(&what, &mut first, at, &case, &tokens[0], random, width)?;
    }
    comm.finalize()?;
    nothing_was_caught();
    Ok(())
}

fn random_worlds(late: &str) {
    for (seed, ranks) in SEEDS.into_iter().enumerate() {
        Ranks::new(ranks)
            .variable("NCCL_EMULATOR_FAULTS", late)
            .threads(move |world| random_plans(&world, 100 + seed as u64));
    }
}

#[test]
fn replays_route_dispatch_and_combine_as_the_reference_says() {
    random_worlds("");
}

#[test]
fn replays_are_right_when_operations_and_kernels_run_late() {
    if support::needs_emulator("operations that run late on purpose") {
        random_worlds("late=1ms");
    }
}

fn two_ranks(way: DispatchWay) -> Case {
    Case {
        ranks: 2,
        experts: 2,
        top_k: 1,
        max_tokens: 5,
        capacity: 5,
        layout: ExpertLayout::RankMajor,
        way,
    }
}

/// A routing, its choices, tokens, and received rows.
type Halves = (Routing, CudaSlice<i32>, CudaSlice<i32>, CudaSlice<i32>);

/// A plan with the route in its first part, and the dispatch in its second.
fn route_then_dispatch(
    ep: &ExpertParallel,
    routing: Routing,
    tokens: usize,
) -> Result<CapturedPlan<Halves>, Box<dyn std::error::Error>> {
    let stream = ep.communicator().stream();
    let buffers = (
        routing,
        stream.clone_htod(&vec![1i32; tokens])?,
        stream.clone_htod(&vec![7i32; tokens])?,
        stream.clone_htod(&vec![9i32; ep.rows()])?,
    );
    Ok(ep
        .communicator()
        .capture(buffers, |capture, (mut routing, topk, x, y)| {
            let mut experts = ep.capture(capture)?;
            experts.route(&topk, &mut routing)?;
            experts.next_part();
            experts.dispatch(&routing, &x, y)
        })?)
}

#[test]
fn a_dispatch_before_its_route_sends_nothing_that_the_routing_named_before() {
    for way in [DispatchWay::Rows, DispatchWay::AllGather] {
        ranks_as_threads(2, move |world: World| -> Outcome {
            let comm = start(&world)?;
            let stream = comm.stream().clone();
            let case = two_ranks(way);
            let ep = made(&comm, &case, 4)?;
            let mut routing = ep.routing()?;
            // Five tokens, and the plan has two.
            ep.route(&stream.clone_htod(&[1i32; 5])?, &mut routing)?;
            let mut plan = route_then_dispatch(&ep, routing, 2)?;
            plan.launch_part(1)?.wait()?;
            assert_eq!(stream.clone_dtoh(&plan.views().3)?, [0; 10], "{way:?}");
            plan.launch()?.wait()?;
            let expected = match world.rank() {
                1 => [7, 7, 0, 0, 0, 7, 7, 0, 0, 0],
                _ => [0; 10],
            };
            assert_eq!(stream.clone_dtoh(&plan.views().3)?, expected, "{way:?}");

            // The same routing in another plan, and then outside of plans.
            let (routing, ..) = plan.into_buffers()?;
            let mut plan = route_then_dispatch(&ep, routing, 2)?;
            plan.launch()?.wait()?;
            assert_eq!(stream.clone_dtoh(&plan.views().3)?, expected, "{way:?}");
            let (mut routing, ..) = plan.into_buffers()?;
            ep.route(&stream.clone_htod(&[0i32; 5])?, &mut routing)?;
            assert_eq!(routing.counts()?.sent, [5, 0]);
            comm.finalize()?;
            nothing_was_caught();
            Ok(())
        });
    }
}

#[test]
fn a_routing_has_one_number_of_tokens_in_plans_and_is_one_of_their_buffers() {
    ranks_as_threads(1, |world: World| -> Outcome {
        let comm = start(&world)?;
        let stream = comm.stream().clone();
        let case = Case {
            ranks: 1,
            ..two_ranks(DispatchWay::Rows)
        };
        let ep = made(&comm, &case, 4)?;
        let plan = route_then_dispatch(&ep, ep.routing()?, 2)?;
        let (routing, ..) = plan.into_buffers()?;
        let Err(error) = route_then_dispatch(&ep, routing, 3) else {
            panic!("it is for two tokens");
        };
        assert!(error.to_string().contains("it is for 2 tokens"), "{error}");

        // A dispatch is checked against the number of tokens of a route in the plan, not of one before it.
        let mut routing = ep.routing()?;
        ep.route(&stream.clone_htod(&[1i32; 2])?, &mut routing)?;
        let (topk, x) = (
            stream.clone_htod(&[1i32; 5])?,
            stream.clone_htod(&[7i32; 2])?,
        );
        let buffers = (routing, topk, x, stream.alloc_zeros::<i32>(10)?);
        let refused = comm.capture(buffers, |capture, (mut routing, topk, x, y)| {
            let mut experts = ep.capture(capture)?;
            experts.dispatch(&routing, &x, y)?;
            experts.route(&topk, &mut routing)
        });
        let Err(error) = refused else {
            panic!("the route comes behind the dispatch");
        };
        assert!(error.to_string().contains("call `route` first"), "{error}");

        // A routing beside the plan could be freed before a replay.
        let mut beside = ep.routing()?;
        ep.route(&stream.clone_htod(&[1i32; 2])?, &mut beside)?;
        let buffers = (
            stream.clone_htod(&[7i32; 2])?,
            stream.alloc_zeros::<i32>(10)?,
        );
        let refused = comm.capture(buffers, |capture, (x, y)| {
            let mut experts = ep.capture(capture)?;
            experts.route(&x, &mut beside.views_mut())?;
            experts.dispatch(&beside, &x, y)
        });
        let Err(error) = refused else {
            panic!("the plan does not own the routing");
        };
        assert!(
            matches!(error.kind(), ErrorKind::NotInPlan { .. }),
            "{error}"
        );

        // It is as it was.
        assert_eq!(beside.counts()?.sent, [0, 2]);

        // The staging memory is used on the stream of the experts only.
        let elsewhere: Communicator = comm.on(&stream.context().new_stream()?);
        let buffers = ep.routing()?;
        let refused = elsewhere.capture(buffers, |capture, _| ep.capture(capture).map(drop));
        let Err(error) = refused else {
            panic!("it is another stream");
        };
        assert!(error.to_string().contains("another stream"), "{error}");
        comm.finalize()?;
        nothing_was_caught();
        Ok(())
    });
}

#[test]
fn an_abort_ends_replays_and_the_memory_outlives_them() {
    ranks_as_threads(2, |world: World| -> Outcome {
        let comm = start(&world)?;
        let case = two_ranks(DispatchWay::AllGather);
        let ep = made(&comm, &case, 4)?;
        let mut plan = route_then_dispatch(&ep, ep.routing()?, 2)?;
        plan.launch()?.wait()?;
        if world.rank() == 0 {
            // The other rank never comes.
            let replay = plan.launch()?;
            drop(ep);
            let error = replay.wait_timeout(Duration::from_millis(50));
            assert!(error.is_err_and(|error| error.is_timeout()));
            comm.abort("on purpose")?;
            let Err(error) = plan.launch() else {
                panic!("the communicator has ended");
            };
            assert!(matches!(error.kind(), ErrorKind::Aborted { .. }), "{error}");
        } else {
            while comm.state() == CommunicatorState::Ready {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        drop(plan);
        nothing_was_caught();
        Ok(())
    });
}

#[test]
fn replays_with_copies_of_experts_are_those_of_single_calls() {
    ranks_as_threads(3, |world: World| -> Outcome {
        let comm = start(&world)?;
        let stream = comm.stream().clone();
        let placement = ExpertPlacement::balanced(&[9, 1, 4, 2], 3, 3, 2)?;
        let made = |way| {
            ExpertParallel::builder(&comm)
                .with(|ep| {
                    ep.placement = Some(placement.clone());
                    (ep.top_k, ep.max_tokens, ep.max_row_bytes) = (2, 6, 4);
                    ep.way = way;
                })
                .build()
        };
        let choices: Vec<i32> = (0..12)
            .map(|entry| (entry * 7 + entry / 2 + world.rank() as i32) % 4)
            .collect();
        let values: Vec<f32> = (0..12).map(|at| at as f32 + 0.5).collect();
        let weights = stream.clone_htod(&values)?;
        let x = stream.clone_htod(&values[..6])?;
        let topk = stream.clone_htod(&choices)?;
        let mut ep = made(DispatchWay::Rows)?;
        let mut routing = ep.routing()?;
        let mut y = stream.alloc_zeros::<f32>(ep.rows())?;
        let mut out = stream.alloc_zeros::<f32>(6)?;
        ep.route(&topk, &mut routing)?;
        ep.dispatch(&routing, &x, &mut y)?;
        ep.combine(&routing, &y, &weights, &mut out)?.wait()?;
        let expected = (stream.clone_dtoh(&y)?, stream.clone_dtoh(&out)?);
        for way in [DispatchWay::Rows, DispatchWay::AllGather] {
            let ep = made(way)?;
            assert_eq!(ep.way(), way);
            let zeros = |len| stream.alloc_zeros::<f32>(len);
            let rows = (
                stream.clone_htod(&values[..6])?,
                zeros(ep.rows())?,
                zeros(6)?,
            );
            let choices = (stream.clone_htod(&choices)?, stream.clone_htod(&values)?);
            let buffers = (ep.routing()?, choices, rows);
            let mut plan = comm.capture(buffers, |capture, (mut routing, choices, rows)| {
                let mut experts = ep.capture(capture)?;
                let (x, mut y, out) = rows;
                experts.route(&choices.0, &mut routing)?;
                experts.dispatch(&routing, &x, &mut y)?;
                experts.combine(&routing, &y, &choices.1, out)
            })?;
            plan.launch()?.wait()?;
            let (replayed, _, (_, y, out)) = plan.views();
            let found = (stream.clone_dtoh(&y)?, stream.clone_dtoh(&out)?);
            assert_eq!(found, expected, "{way:?}");
            assert_eq!(replayed.counts()?, routing.counts()?, "{way:?}");
        }
        comm.finalize()?;
        nothing_was_caught();
        Ok(())
    });
}

#[test]
fn buffers_come_back_under_a_replay_of_experts_that_are_dropped() {
    if !support::needs_emulator("work that runs late on purpose") {
        return;
    }
    ranks_as_threads(2, |world: World| -> Outcome {
        let comm = start(&world)?;
        let stream = comm.stream().clone();
        let ep = made(&comm, &two_ranks(DispatchWay::AllGather), 4)?;
        let mut plan = route_then_dispatch(&ep, ep.routing()?, 2)?;
        let late = nccl_emulator::faults::late(Duration::from_millis(20));
        plan.launch()?;
        drop(ep);
        let (routing, _, _, y) = plan.into_buffers()?;
        let expected = match world.rank() {
            1 => [7, 7, 0, 0, 0, 7, 7, 0, 0, 0],
            _ => [0; 10],
        };
        assert_eq!(stream.clone_dtoh(&y)?, expected);
        drop(late);
        drop((comm, routing));
        nothing_was_caught();
        Ok(())
    });
}
