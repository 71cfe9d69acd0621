//! Blocks of one buffer, and plans in graphs.

use nccl::all_to_all::{AllToAll, AllToAllAlgorithm as By, Parts};
use nccl::cudarc::driver::CudaSlice;
use nccl::{DataType, ErasedMut, ErrorKind, World};
use nccl_emulator::faults;

use super::matrix::{Matrix, REST, algorithms, model};
use super::{LATE, Outcome};
use crate::support::{self, ranks_as_threads};

fn in_place(world: &World) -> Outcome {
    let stream = support::device(world)?.new_stream()?;
    let comm = world.communicator("in place").stream(&stream).build()?;
    let (rank, ranks) = (world.rank(), world.size());
    for turn in 0..10 {
        let mut random = fastrand::Rng::with_seed(turn);
        let matrix = Matrix::random(&mut random, ranks, true);
        let count = matrix.counts[0][0];
        let (sent, expected) = matrix.buffers(rank, REST);
        let block = (count * matrix.size).next_multiple_of(16);
        let late = random.bool().then(|| faults::late(LATE));
        for room in 1..=ranks {
            let what = format!("turn {turn}, {ranks} ranks, room for {room}");
            let buffer = || {
                let mut y = stream.clone_htod(&sent)?;
                if count == 0 {
                    y = stream.alloc_zeros::<u8>(ranks * matrix.size)?;
                }
                Ok::<_, Box<dyn std::error::Error>>(y)
            };
            let elements = count * ranks * matrix.size;
            let check = |y: &CudaSlice<u8>| {
                let found = stream.clone_dtoh(y)?;
                assert!(found[..elements] == expected[..elements], "{what}");
                Ok::<_, Box<dyn std::error::Error>>(())
            };
            let mut y = buffer()?;
            let mut scratch = stream.alloc_zeros::<u8>((room * block).max(1))?;
            let view = ErasedMut::from_bytes(y.slice_mut(..elements), matrix.data_type)?;
            comm.all_to_all_in_place(view, &mut scratch)?;
            check(&y)?;
            let plan = AllToAll::plan(&comm).per_peer(matrix.data_type, count);
            let mut plan = plan
                .with(|plan| {
                    plan.in_place = true;
                    plan.scratch_limit = Some(room * block);
                })
                .build()?;
            for _ in 0..2 {
                let mut y = buffer()?;
                let view = ErasedMut::from_bytes(y.as_view_mut(), matrix.data_type)?;
                plan.enqueue_in_place(view)?;
                check(&y)?;
            }
        }
        drop(late);
    }
    let mut y = stream.alloc_zeros::<u64>(ranks * 4)?;
    let mut scratch = stream.alloc_zeros::<u8>(31)?;
    if ranks > 1 {
        let error = comm.all_to_all_in_place(&mut y, &mut scratch).unwrap_err();
        let ErrorKind::Length {
            given: 31,
            needed: 32,
            ..
        } = error.kind()
        else {
            panic!("{error:#}");
        };
    }
    comm.finalize()?;
    Ok(())
}

#[test]
fn blocks_of_one_buffer_change_places_whatever_room_there_is() {
    if !support::needs_emulator("lateness on purpose") {
        return;
    }
    for ranks in [1, 2, 3, 4, 5] {
        ranks_as_threads(ranks, |world| in_place(&world));
    }
}

fn captured(world: &World) -> Outcome {
    let stream = support::device(world)?.new_stream()?;
    let comm = world.communicator("graph").stream(&stream).build()?;
    let (rank, ranks) = (world.rank(), world.size());
    let block = |from: usize, to: usize, round: usize| (from * 100 + to * 10 + round) as f32;
    let sent = |round| (0..ranks).flat_map(move |to| [block(rank, to, round); 3]);
    let received = |round| (0..ranks).flat_map(move |from| [block(from, rank, round); 3]);
    let memory = || stream.alloc_zeros::<f32>(ranks * 3);
    for (algorithm, nodes) in algorithms(ranks, true) {
        for packs in [false, true] {
            let mut plan = AllToAll::plan(&comm)
                .per_peer(DataType::Float32, 3)
                .with(|plan| {
                    plan.algorithm = algorithm;
                    plan.cost_model = Some(model(packs));
                });
            if let Some(nodes) = nodes {
                plan = plan.with(|plan| plan.ranks_per_node = Some(nodes));
            }
            let plan = plan.build()?;
            let mut captured = plan.capture(memory()?, memory()?)?;
            let in_place = AllToAll::plan(&comm)
                .per_peer(DataType::Float32, 3)
                .with(|plan| plan.in_place = true);
            let in_place = in_place
                .with(|plan| plan.scratch_limit = Some(16))
                .build()?;
            let mut swapped = in_place.capture_in_place(memory()?)?;
            // The graphs own the memory that they use.
            drop((plan, in_place));
            for round in 0..4 {
                let x: Vec<f32> = sent(round).collect();
                let expected: Vec<f32> = received(round).collect();
                stream.memcpy_htod(&x, &mut captured.views_mut().0)?;
                stream.memcpy_htod(&x, &mut swapped.views_mut())?;
                captured.launch()?;
                swapped.launch()?;
                let what = format!("{algorithm}, {nodes:?}, packs {packs}, round {round}");
                assert_eq!(stream.clone_dtoh(&captured.views().1)?, expected, "{what}");
                assert_eq!(stream.clone_dtoh(&swapped.views())?, expected, "{what}");
            }
            captured.into_buffers()?;
        }
    }
    if ranks % 2 == 0 {
        // Unequal parts over two levels.
        let count = |from: usize, to: usize| (from * 2 + to) % 4;
        let sent: Vec<usize> = (0..ranks).map(|to| count(rank, to)).collect();
        let received: Vec<usize> = (0..ranks).map(|from| count(from, rank)).collect();
        let plan = AllToAll::plan(&comm).parts(
            DataType::Float32,
            Parts::from(&sent),
            Parts::from(&received),
        );
        let plan = plan.with(|plan| {
            plan.algorithm = By::TwoLevel;
            plan.ranks_per_node = Some(2.min(ranks / 2));
        });
        if ranks > 2 {
            let mut captured = plan.build()?.capture(
                stream.alloc_zeros::<f32>(4 * ranks)?,
                stream.alloc_zeros::<f32>(4 * ranks)?,
            )?;
            for round in 0..3 {
                let parts = |from: usize, to: usize| {
                    std::iter::repeat_n(block(from, to, round), count(from, to))
                };
                let mut x: Vec<f32> = (0..ranks).flat_map(|to| parts(rank, to)).collect();
                let expected: Vec<f32> = (0..ranks).flat_map(|from| parts(from, rank)).collect();
                x.resize(4 * ranks, -1.0);
                stream.memcpy_htod(&x, &mut captured.views_mut().0)?;
                captured.launch()?;
                let found = stream.clone_dtoh(&captured.views().1)?;
                assert_eq!(found[..expected.len()], expected, "round {round}");
            }
        }
    }
    comm.finalize()?;
    Ok(())
}

#[test]
fn a_graph_of_any_algorithm_exchanges_anew_with_each_launch() {
    for ranks in [1, 2, 4] {
        ranks_as_threads(ranks, |world| captured(&world));
    }
}
