//! The all-to-all family on random worlds: the result of every algorithm equals the reference on each rank, for any
//! data, on any streams, late, in steps, in place, or from a graph.

mod costs;
mod in_place;
mod matrix;
mod refusals;

use std::time::Duration;

use nccl::all_to_all::{AllToAll, AllToAllAlgorithm as By, CostModel, LinkCost, Nodes, Parts};
use nccl::{DataType, ErrorKind, Request, World};
use nccl_emulator::faults;

use matrix::{Device, Matrix, algorithms, enqueue, plan};

use crate::support::{self, Ranks, ranks_as_threads};

type Outcome<T = ()> = Result<T, Box<dyn std::error::Error>>;

/// Late enough that a rank that does not wait for the others, or for its own steps, reads data that has not arrived.
const LATE: Duration = Duration::from_micros(300);

fn plans(world: &World, turns: u64) -> Outcome {
    let context = support::device(world)?;
    let [own, other, third] = [
        context.new_stream()?,
        context.new_stream()?,
        context.new_stream()?,
    ];
    let comm = world.communicator("family").stream(&own).build()?;
    let (rank, ranks) = (world.rank(), world.size());
    for turn in 0..turns {
        let mut random = fastrand::Rng::with_seed(turn * 64 + ranks as u64);
        let uniform = random.bool();
        let payloads = random.usize(1..=3);
        let matrices: Vec<_> = (0..payloads)
            .map(|_| Matrix::random(&mut random, ranks, uniform))
            .collect();
        let uniform = matrices.iter().all(Matrix::is_uniform);
        let late = random.bool().then(|| faults::late(LATE));
        let streams = match random.u8(..3) {
            0 => [&own, &own],
            1 => [&other, &own],
            _ => [&other, &third],
        };
        for how in algorithms(ranks, uniform) {
            let packs = random.bool();
            let what = format!("turn {turn}, {ranks} ranks, {how:?}, packs {packs}");
            let mut plan = plan(&comm, &matrices, how, packs)
                .build()
                .map_err(|error| format!("{what}: {error:#}"))?;
            // Two at once: the second is behind the first on the stream, and uses the same memory of the plan.
            let mut twice = Vec::new();
            for _ in 0..2 {
                let devices = matrices.iter().map(|one| Device::new(one, rank, streams));
                twice.push(devices.collect::<Outcome<Vec<_>>>()?);
            }
            let mut done = Vec::new();
            for devices in &mut twice {
                done.push(enqueue(&mut plan, devices, &matrices)?);
            }
            // The order of streams is enough for readers of the results.
            if random.bool() {
                done.iter().try_for_each(Request::wait)?;
            }
            for device in twice.iter().flatten() {
                device.check(&what)?;
            }
            drop(twice);
            done.iter().try_for_each(Request::wait)?;
        }
        drop(late);
    }
    comm.finalize()?;
    Ok(())
}

#[test]
fn every_algorithm_of_a_plan_moves_every_element() {
    if !support::needs_emulator("lateness on purpose") {
        return;
    }
    for ranks in [1, 2, 3, 4, 6, 8] {
        let turns = if ranks > 4 { 6 } else { 12 };
        ranks_as_threads(ranks, move |world| plans(&world, turns));
    }
}

#[test]
fn every_algorithm_of_a_plan_moves_every_element_between_processes() {
    if !support::needs_processes(4) {
        return;
    }
    Ranks::new(4).processes(|world| plans(&world, 4));
}

fn over_hosts(world: &World) -> Outcome {
    let stream = support::device(world)?.new_stream()?;
    let comm = world.communicator("hosts").stream(&stream).build()?;
    let (rank, ranks) = (world.rank(), world.size());
    for turn in 0..8 {
        let mut random = fastrand::Rng::with_seed(turn);
        let matrices = [Matrix::random(&mut random, ranks, turn % 2 == 0)];
        let mut plan = plan(&comm, &matrices, (By::TwoLevel, None), false).build()?;
        let nodes = plan.explain().nodes;
        assert_eq!((nodes.count(), nodes.ranks_per_node()), (2, ranks / 2));
        let mut devices = [Device::new(&matrices[0], rank, [&stream, &stream])?];
        enqueue(&mut plan, &mut devices, &matrices)?.wait()?;
        devices[0].check(&format!("turn {turn}"))?;
    }
    comm.finalize()?;
    Ok(())
}

#[test]
fn hosts_are_the_nodes_of_two_levels() {
    if !support::needs_processes(6) {
        return;
    }
    Ranks::new(6)
        .ranks_per_host(3)
        .processes(|world| over_hosts(&world));
}

/// One rank sends much, the others next to nothing, so that each rank alone would take another algorithm for the
/// fastest.
fn unequal(world: &World) -> Outcome {
    let stream = support::device(world)?.new_stream()?;
    let comm = world.communicator("unequal").stream(&stream).build()?;
    let (rank, ranks) = (world.rank(), world.size());
    let model = CostModel {
        between: LinkCost {
            message_us: 100.0,
            bandwidth_gbps: 0.01,
        },
        ..CostModel::published()
    };
    let crossover = model.crossover(Nodes::new(ranks, 2)?);
    let crossover = crossover.ok_or("two levels win at first")? as usize;
    for (most, expected) in [(2 * crossover, By::Grouped), (crossover / 2, By::TwoLevel)] {
        let sent = vec![if rank == 0 { most } else { 1 }; ranks];
        let mut received = vec![1; ranks];
        received[0] = most;
        let plan = AllToAll::plan(&comm).parts(
            DataType::UInt8,
            Parts::from(&sent),
            Parts::from(&received),
        );
        let mut plan = plan
            .with(|plan| {
                plan.ranks_per_node = Some(2);
                plan.cost_model = Some(model);
            })
            .build()?;
        assert_eq!(plan.explain().algorithm, expected, "{}", plan.explain());
        let mean = format!("{most} bytes for each peer in the mean of the busiest rank");
        assert!(
            plan.explain().to_string().contains(&mean),
            "{}",
            plan.explain()
        );
        let x = stream.clone_htod(&vec![rank as u8; sent.iter().sum()])?;
        let mut y = stream.alloc_zeros::<u8>(received.iter().sum())?;
        plan.enqueue(&x, &mut y)?.wait()?;
        let of = |(from, count): (usize, &usize)| vec![from as u8; *count];
        let expected: Vec<u8> = received.iter().enumerate().flat_map(of).collect();
        assert!(stream.clone_dtoh(&y)? == expected);
    }
    // Parts that are equal on one rank but not on another count as unequal.
    let plan = AllToAll::plan(&comm).with(|plan| plan.ranks_per_node = Some(2));
    let counts = vec![3; ranks];
    let plan = match rank {
        0 => plan.parts(
            DataType::Float32,
            Parts::from(&counts),
            Parts::from(&counts),
        ),
        _ => plan.per_peer(DataType::Float32, 3),
    };
    let mut plan = plan.with(|plan| plan.algorithm = By::TwoLevel).build()?;
    let memory = || stream.alloc_zeros::<f32>(3 * ranks);
    plan.enqueue(&memory()?, &mut memory()?)?.wait()?;
    assert!(plan.explain().to_string().contains("unequal parts"));
    comm.finalize()?;
    Ok(())
}

#[test]
fn all_ranks_choose_the_same_however_unequal_their_parts_are() {
    ranks_as_threads(4, |world| unequal(&world));
}

/// A communicator whose ranks have no connection for agreeing on an algorithm.
#[test]
fn ranks_that_nobody_can_ask_take_one_group_for_unequal_parts() {
    ranks_as_threads(2, |world| -> Outcome {
        let stream = support::device(&world)?.new_stream()?;
        let comm = support::strangers(&world, "alone")?
            .stream(&stream)
            .build()?;
        let (rank, ranks) = (world.rank(), world.size());
        let sent: Vec<usize> = (0..ranks).map(|to| 10 * rank + to).collect();
        let received: Vec<usize> = (0..ranks).map(|from| 10 * from + rank).collect();
        let parts = (Parts::from(&sent), Parts::from(&received));
        let plan = || AllToAll::plan(&comm).parts(DataType::Float32, parts.0, parts.1);
        let mut auto = plan().build()?;
        assert_eq!(auto.explain().algorithm, By::Grouped);
        let said = auto.explain().to_string();
        assert!(said.contains("cannot ask how much"), "{said}");
        let x = stream.clone_htod(&vec![rank as f32 + 1.0; sent.iter().sum::<usize>().max(1)])?;
        let of = |(from, count): (usize, &usize)| vec![from as f32 + 1.0; *count];
        let expected: Vec<f32> = received.iter().enumerate().flat_map(of).collect();
        let mut y = stream.alloc_zeros::<f32>(expected.len().max(1))?;
        auto.enqueue(&x, &mut y)?.wait()?;
        assert_eq!(stream.clone_dtoh(&y)?[..expected.len()], expected);
        comm.finalize()?;
        Ok(())
    });
}

fn calls(world: &World) -> Outcome {
    let stream = support::device(world)?.new_stream()?;
    let comm = world.communicator("calls").stream(&stream).build()?;
    let (rank, ranks) = (world.rank(), world.size());
    for by in ["chunked:3", "pairwise:1", "pairwise:2"] {
        let sent: Vec<u32> = (0..ranks * 9).map(|at| (rank * 1000 + at) as u32).collect();
        let from = |from: usize| (0..9).map(move |at| (from * 1000 + rank * 9 + at) as u32);
        let expected: Vec<u32> = (0..ranks).flat_map(from).collect();
        let (x, mut y) = (
            stream.clone_htod(&sent)?,
            stream.alloc_zeros::<u32>(ranks * 9)?,
        );
        comm.all_to_all_with(&x, &mut y, by.parse()?)?.wait()?;
        assert_eq!(stream.clone_dtoh(&y)?, expected, "{by}");
    }
    // Rank r sends p + r elements to rank p, in reverse order.
    let counts: Vec<usize> = (0..ranks).map(|peer| peer + rank).collect();
    let mut at: Vec<usize> = counts.clone();
    let mut next = 1;
    for peer in (0..ranks).rev() {
        at[peer] = next;
        next += counts[peer] + 1;
    }
    let parts = Parts::at(&counts, &at);
    let mut sent = vec![0u64; next];
    let mut expected = vec![0u64; next];
    for peer in 0..ranks {
        for index in 0..counts[peer] {
            sent[at[peer] + index] = (rank * 100 + peer * 10 + index + 1) as u64;
            expected[at[peer] + index] = (peer * 100 + rank * 10 + index + 1) as u64;
        }
    }
    let (x, mut y) = (stream.clone_htod(&sent)?, stream.alloc_zeros::<u64>(next)?);
    comm.all_to_all_v(&x, parts, &mut y, parts)?.wait()?;
    assert_eq!(stream.clone_dtoh(&y)?, expected);
    // Overlapping parts are refused, wherever they are.
    if ranks > 1 {
        let twos = vec![2; ranks];
        let mut overlapping: Vec<_> = (0..ranks).map(|peer| 8 + 2 * peer).collect();
        overlapping[0] = 11;
        let mut long = stream.alloc_zeros::<u64>(16)?;
        let other = Parts::at(&twos, &overlapping);
        let error = comm.all_to_all_v(&x, Parts::from(&twos), &mut long, other);
        let error = error.unwrap_err();
        let ErrorKind::InvalidConfig { reason, .. } = error.kind() else {
            panic!("{error:#}");
        };
        assert_eq!(
            reason,
            "what ranks 0 and 1 send would lie in the same place"
        );
    }
    for by in [By::TwoLevel, By::CopyEngine] {
        let error = comm.all_to_all_with(&x, &mut y, by).unwrap_err();
        assert!(format!("{error:#}").contains("needs a plan"), "{error:#}");
    }
    comm.finalize()?;
    Ok(())
}

#[test]
fn calls_in_steps_and_with_displacements_are_right() {
    for ranks in [1, 2, 3] {
        ranks_as_threads(ranks, |world| calls(&world));
    }
}

fn windows(world: &World) -> Outcome {
    let stream = support::device(world)?.new_stream()?;
    let comm = world
        .communicator("windows")
        .stream(&stream)
        .with(|comm| comm.config.cta_policy = Some(nccl::CtaPolicy::Zero))
        .build()?;
    let (rank, ranks) = (world.rank(), world.size());
    let window = || comm.register_window(comm.buffer::<u32>(ranks * 5)?);
    let (mut x, mut y) = (window()?, window()?);
    let plan = || {
        AllToAll::plan(&comm)
            .per_peer(DataType::UInt32, 5)
            .with(|plan| plan.algorithm = By::CopyEngine)
    };
    let mut plan = plan().build()?;
    assert_eq!(plan.explain().algorithm, By::CopyEngine);
    let sent: Vec<u32> = (0..ranks * 5).map(|at| (rank * 100 + at) as u32).collect();
    let of = |from: usize| (0..5).map(move |at| (from * 100 + rank * 5 + at) as u32);
    let expected: Vec<u32> = (0..ranks).flat_map(of).collect();
    stream.memcpy_htod(&sent, &mut x.view_mut())?;
    assert!(x.is_effective() && y.is_effective());
    plan.enqueue(&x, &mut y)?.wait()?;
    assert_eq!(stream.clone_dtoh(&y.view())?, expected);
    // The plan fails where NCCL would silently use another method.
    let mut elsewhere = comm.buffer::<u32>(ranks * 5)?;
    let error = plan.enqueue(&x, &mut elsewhere).unwrap_err();
    assert!(
        format!("{error:#}").contains("symmetric windows"),
        "{error:#}"
    );
    let y = y.into_inner()?;
    let mut y = comm.register_window(y)?;
    plan.enqueue(&x, &mut y)?.wait()?;
    assert_eq!(stream.clone_dtoh(&y.view())?, expected);
    // A deregistered window is no window.
    let mut y = y.into_inner()?;
    assert!(plan.enqueue(&x, &mut y).is_err());
    drop(plan);
    comm.finalize()?;
    drop(x);
    Ok(())
}

#[test]
fn copy_engines_take_what_lies_in_symmetric_windows_and_nothing_else() {
    for ranks in [1, 2, 3] {
        ranks_as_threads(ranks, |world| windows(&world));
    }
    if support::needs_processes(2) {
        Ranks::new(2).processes(|world| windows(&world));
    }
}
