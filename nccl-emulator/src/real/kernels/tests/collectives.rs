//! Every collective, with every algorithm and protocol that is interpreted.

use super::super::functions::{Algorithm, Collective, DeviceOperator, Protocol};
use super::types::Release;
use super::world::{Call, Settings, World};
use crate::numbers::datatype::DataType;

const PROTOCOLS: [Protocol; 3] = [Protocol::Ll, Protocol::Ll128, Protocol::Simple];

/// Counts of elements that meet the edges of lines, slices, chunks and loops of the small buffers of tests.
const COUNTS: [usize; 9] = [1, 2, 7, 120, 1000, 1025, 4096, 9_999, 50_001];

fn elements(ty: DataType, bytes: &[u8]) -> Vec<i64> {
    bytes
        .chunks_exact(ty.size() as usize)
        .map(|element| match ty {
            DataType::U8 => i64::from(element[0]),
            DataType::U32 => i64::from(u32::from_le_bytes(element.try_into().unwrap())),
            DataType::U64 => i64::from_le_bytes(element.try_into().unwrap()),
            DataType::F32 => f32::from_le_bytes(element.try_into().unwrap()) as i64,
            other => panic!("{other:?}"),
        })
        .collect()
}

fn bytes(ty: DataType, elements: impl IntoIterator<Item = i64>) -> Vec<u8> {
    elements
        .into_iter()
        .flat_map(|element| match ty {
            DataType::U8 => (element as u8).to_le_bytes().to_vec(),
            DataType::U32 => (element as u32).to_le_bytes().to_vec(),
            DataType::U64 => element.to_le_bytes().to_vec(),
            DataType::F32 => (element as f32).to_le_bytes().to_vec(),
            other => panic!("{other:?}"),
        })
        .collect()
}

/// What every rank must have in its output, from the inputs of all.
fn expected(call: Call, inputs: &[Vec<i64>], rank: usize) -> Option<Vec<i64>> {
    let sum = || -> Vec<i64> {
        (0..inputs[0].len())
            .map(|at| inputs.iter().map(|input| input[at]).sum())
            .collect()
    };
    match call.collective {
        Collective::AllReduce => Some(sum()),
        Collective::Reduce => (rank == call.root).then(sum),
        Collective::ReduceScatter => {
            Some(sum()[rank * call.count..(rank + 1) * call.count].to_vec())
        }
        Collective::AllGather => Some(inputs.concat()),
        Collective::Broadcast => Some(inputs[call.root].clone()),
        Collective::SendRecv | Collective::AllGatherV => None,
    }
}

/// Runs one collective on every rank and compares all results.
fn check(world: &World, call: Call, in_place: bool) {
    let ranks = world.settings.ranks;
    let ty = call.reduction.map_or(DataType::U8, |(_, ty)| ty);
    let size = ty.size() as usize;
    let scattered = call.collective == Collective::ReduceScatter;
    let gathered = call.collective == Collective::AllGather;
    let input_count = call.count * if scattered { ranks } else { 1 };
    let output_count = call.count * if gathered { ranks } else { 1 };
    let mut inputs = Vec::new();
    let mut kernels = Vec::new();
    let mut outputs = Vec::new();
    for rank in 0..ranks {
        let values: Vec<i64> = (0..input_count)
            .map(|_| world.below(256 / ranks) as i64)
            .collect();
        let shift = size * world.below(3);
        let (input, output) = if in_place {
            let all = world
                .arena
                .allocate_at(input_count.max(output_count) * size, shift);
            let own = (rank * call.count * size) as u64;
            match (gathered, scattered) {
                (true, _) => (all + own, all),
                (_, true) => (all, all + own),
                _ => (all, all),
            }
        } else {
            (
                world.arena.allocate_at(input_count * size, shift),
                world.arena.allocate_at(output_count * size, shift),
            )
        };
        world.arena.write(input, &bytes(ty, values.iter().copied()));
        inputs.push(values);
        outputs.push(output);
        let works = world.collective(call, input, output, |_, _| {});
        kernels.push(world.launch(rank, &works));
    }
    world.run(kernels);
    for (rank, output) in outputs.iter().enumerate() {
        let Some(expected) = expected(call, &inputs, rank) else {
            continue;
        };
        let found = elements(ty, &world.arena.read(*output, output_count * size));
        let wrong = found.iter().zip(&expected).position(|(a, b)| a != b);
        assert_eq!(
            wrong, None,
            "rank {rank} of {ranks}: {call:?} in place {in_place}"
        );
    }
}

fn call(collective: Collective, algorithm: Algorithm, protocol: Protocol, count: usize) -> Call {
    let reduces = matches!(
        collective,
        Collective::AllReduce | Collective::Reduce | Collective::ReduceScatter
    );
    Call {
        collective,
        reduction: reduces.then_some((DeviceOperator::Sum, DataType::U32)),
        algorithm,
        protocol,
        count,
        root: 0,
        argument: 0,
        profiled: false,
    }
}

/// A few calls after each other on the same connections, of which each begins where the last one ended.
fn check_all(world: &World, collective: Collective, algorithm: Algorithm, protocols: &[Protocol]) {
    let types = [DataType::U8, DataType::U32, DataType::U64, DataType::F32];
    for &protocol in protocols {
        for count in COUNTS {
            let mut call = call(collective, algorithm, protocol, count);
            if let Some((_, ty)) = &mut call.reduction {
                *ty = types[world.below(types.len())];
            }
            call.root = world.below(world.settings.ranks);
            check(world, call, world.below(2) == 0);
        }
    }
}

fn worlds() -> impl Iterator<Item = World> {
    [
        (2, 1, Release::V2_32_3),
        (3, 2, Release::V2_30_7),
        (4, 3, Release::V2_27_7),
        (7, 1, Release::V2_32_3),
    ]
    .into_iter()
    .map(|(ranks, channels, release)| {
        let settings = Settings {
            channels,
            release,
            ..Settings::new(ranks)
        };
        World::new(settings, ranks as u64)
    })
}

#[test]
fn a_ring_all_reduce_adds_up_on_every_rank() {
    for world in worlds() {
        check_all(&world, Collective::AllReduce, Algorithm::Ring, &PROTOCOLS);
    }
}

#[test]
fn a_ring_all_gather_gives_every_rank_the_data_of_all() {
    for world in worlds() {
        check_all(&world, Collective::AllGather, Algorithm::Ring, &PROTOCOLS);
    }
}

#[test]
fn a_ring_reduce_scatter_gives_every_rank_its_part_of_the_sum() {
    for world in worlds() {
        check_all(
            &world,
            Collective::ReduceScatter,
            Algorithm::Ring,
            &PROTOCOLS,
        );
    }
}

#[test]
fn a_ring_reduce_adds_up_at_the_root() {
    for world in worlds() {
        check_all(&world, Collective::Reduce, Algorithm::Ring, &PROTOCOLS);
    }
}

#[test]
fn a_ring_broadcast_gives_every_rank_the_data_of_the_root() {
    for world in worlds() {
        check_all(&world, Collective::Broadcast, Algorithm::Ring, &PROTOCOLS);
    }
}

#[test]
fn a_tree_all_reduce_adds_up_on_every_rank() {
    for world in worlds() {
        check_all(&world, Collective::AllReduce, Algorithm::Tree, &PROTOCOLS);
    }
    // Three children below the root.
    let arity = 3;
    let settings = Settings {
        arity,
        ..Settings::new(10)
    };
    let world = World::new(settings, 1);
    check_all(&world, Collective::AllReduce, Algorithm::Tree, &PROTOCOLS);
}

#[test]
fn pat_gathers_and_scatters_over_any_number_of_ranks() {
    let simple = &[Protocol::Simple];
    for ranks in [2, 3, 4, 5, 8, 13, 16] {
        let world = World::new(Settings::new(ranks), 7);
        check_all(&world, Collective::AllGather, Algorithm::Pat, simple);
        check_all(&world, Collective::ReduceScatter, Algorithm::Pat, simple);
    }
}
