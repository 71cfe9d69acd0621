//! The costs that a model predicts for an exchange, and the actual messages.

use nccl::all_to_all::{AllToAll, AllToAllAlgorithm as By, CostModel, Parts};
use nccl::{DataType, World};

use super::Outcome;
use super::matrix::{few, model};
use crate::support::{self, ranks_as_threads};

fn measured(world: &World) -> Outcome {
    let stream = support::device(world)?.new_stream()?;
    let comm = world.communicator("measured").stream(&stream).build()?;
    let ranks = world.size();
    // Equal parts on one node, unequal ones on two.
    for local in [ranks, 2] {
        let pair = |other: usize| 64 + (world.rank() + other) * usize::from(local == 2);
        let counts: Vec<usize> = (0..ranks).map(pair).collect();
        let plan = AllToAll::plan(&comm).with(|plan| plan.ranks_per_node = Some(local));
        let plan = match local == ranks {
            true => plan.per_peer(DataType::Float32, 64),
            false => plan.parts(
                DataType::Float32,
                Parts::from(&counts),
                Parts::from(&counts),
            ),
        };
        let mut plan = plan.with(|plan| plan.measured = true).build()?;
        let model = plan.explain().model;
        assert_ne!(model, CostModel::published());
        // All ranks have the same, to the bit.
        let all = world.all_gather(
            &format!("model {local}"),
            serde_json::to_string(&model)?.as_bytes(),
        )?;
        assert!(all.iter().all(|other| *other == all[0]));
        let memory = || stream.alloc_zeros::<f32>(counts.iter().sum());
        plan.enqueue(&memory()?, &mut memory()?)?.wait()?;
    }
    // If one rank cannot build the plan, all ranks fail with its reason, and none waits for it.
    let plan = AllToAll::plan(&comm)
        .per_peer(DataType::Float32, 64)
        .with(|plan| plan.measured = true);
    let plan = match world.rank() {
        0 => plan.with(|plan| plan.ranks_per_node = Some(3)),
        _ => plan,
    };
    let error = plan.build().unwrap_err();
    assert!(format!("{error:#}").contains("nodes of 3"), "{error:#}");
    assert!(comm.fault().is_none());
    comm.finalize()?;
    Ok(())
}

#[test]
fn measured_constants_are_the_same_on_all_ranks() {
    ranks_as_threads(4, |world| measured(&world));
}

/// The messages and bytes that the model's formulas count for all ranks.
fn counted(by: By, packed: bool, ranks: usize, local: usize, block: usize) -> (usize, usize) {
    let nodes = ranks / local;
    let (messages, bytes) = match by {
        By::Chunked { pieces } => (pieces.get() * ranks, ranks * block),
        By::TwoLevel => {
            let inside = if packed { local } else { ranks };
            (inside + nodes - 1, (ranks + (nodes - 1) * local) * block)
        }
        _ => (ranks, ranks * block),
    };
    (ranks * messages, ranks * bytes)
}

fn carried(world: &World) -> Outcome {
    const BLOCK: usize = 64;
    let stream = support::device(world)?.new_stream()?;
    let ranks = world.size();
    let local = 8;
    for (by, packs) in [
        (By::Grouped, false),
        (By::Chunked { pieces: few(4) }, false),
        (By::Pairwise { width: few(3) }, false),
        (By::TwoLevel, false),
        (By::TwoLevel, true),
    ] {
        let name = format!("{by}, {packs}");
        let comm = world.communicator(&name).stream(&stream).build()?;
        let plan = AllToAll::plan(&comm)
            .per_peer(DataType::UInt8, BLOCK)
            .with(|plan| plan.algorithm = by);
        let mut plan = plan
            .with(|plan| {
                plan.ranks_per_node = Some(local);
                plan.cost_model = Some(model(packs));
            })
            .build()?;
        let (x, mut y) = (
            stream.alloc_zeros::<u8>(ranks * BLOCK)?,
            stream.alloc_zeros::<u8>(ranks * BLOCK)?,
        );
        plan.enqueue(&x, &mut y)?.wait()?;
        world.barrier(&format!("{name} done"))?;
        let stats = nccl::stats();
        let of_this = stats.communicators.iter().filter(|one| one.name == name);
        let sends = of_this.flat_map(|one| &one.operations);
        let sends = sends.filter(|one| one.kind == nccl::OperationKind::Send);
        let found = sends.fold((0, 0), |(count, bytes), one| {
            (count + one.count as usize, bytes + one.bytes as usize)
        });
        let packed = plan.explain().copies > 0;
        assert_eq!(packed, packs, "{name}");
        assert_eq!(found, counted(by, packed, ranks, local, BLOCK), "{name}");
        world.barrier(&format!("{name} looked"))?;
        drop(plan);
        comm.finalize()?;
    }
    Ok(())
}

#[test]
fn the_model_counts_the_messages_and_bytes_that_the_emulator_carries() {
    if !support::needs_emulator("more ranks than there are GPUs") {
        return;
    }
    for ranks in [16, 64] {
        ranks_as_threads(ranks, |world| carried(&world));
    }
}
