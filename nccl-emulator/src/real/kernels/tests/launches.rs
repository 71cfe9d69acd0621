//! Launches: what is refused, how kernels end early, and what they tell the host.

use super::super::asked::Field;
use super::super::block::Trouble;
use super::super::functions::{Algorithm, Collective, DeviceOperator, Function, Protocol, Reason};
use super::super::launch::Progress;
use super::super::memory::{Cause, Memory, Violation};
use super::types::Release;
use super::world::{Batch, Call, GENERIC, Settings, World, put};
use crate::numbers::datatype::DataType;
use std::sync::Arc;

fn all_reduce(ty: DataType, operator: DeviceOperator, argument: u64, count: usize) -> Call {
    Call {
        collective: Collective::AllReduce,
        reduction: Some((operator, ty)),
        algorithm: Algorithm::Ring,
        protocol: Protocol::Ll,
        count,
        root: 0,
        argument,
        profiled: false,
    }
}

/// Two ranks' inputs, reduced.
fn reduced(world: &World, call: Call, inputs: [&[u8]; 2]) -> Vec<u8> {
    let mut outputs = Vec::new();
    let mut kernels = Vec::new();
    for (rank, data) in inputs.into_iter().enumerate() {
        let (input, output) = (
            world.arena.allocate(data.len()),
            world.arena.allocate(data.len()),
        );
        world.arena.write(input, data);
        outputs.push(output);
        kernels.push(world.launch(rank, &world.collective(call, input, output, |_, _| {})));
    }
    world.run(kernels);
    let results: Vec<_> = outputs
        .iter()
        .map(|&output| world.arena.read(output, inputs[0].len()))
        .collect();
    assert_eq!(results[0], results[1]);
    results.into_iter().next().unwrap()
}

#[test]
fn operators_act_by_their_arguments() {
    let world = World::new(Settings::new(2), 1);
    let (two, minus) = (2f32.to_le_bytes(), (-7f32).to_le_bytes());
    let of = |operator, argument| {
        let call = all_reduce(DataType::F32, operator, argument, 1);
        let bytes = reduced(&world, call, [&two, &minus]);
        f32::from_le_bytes(bytes.try_into().unwrap())
    };
    assert_eq!(of(DeviceOperator::Sum, 0), -5.0);
    assert_eq!(of(DeviceOperator::Prod, 0), -14.0);
    assert_eq!(of(DeviceOperator::MinMax, 0), -7.0);
    assert_eq!(of(DeviceOperator::MinMax, 1), 2.0);
    let half = u64::from(0.5f32.to_bits());
    assert_eq!(of(DeviceOperator::PreMulSum, half), -2.5);

    // -6 and -5, divided towards zero.
    let call = all_reduce(DataType::U8, DeviceOperator::SumPostDiv, 2 << 1 | 1, 1);
    assert_eq!(reduced(&world, call, [&[250], &[251]]), [251]);
}

#[test]
fn the_argument_of_an_operator_may_lie_in_memory() {
    let world = World::new(Settings::new(2), 1);
    let factor = world.arena.allocate(4);
    world.arena.write(factor, &10f32.to_le_bytes());
    let call = all_reduce(DataType::F32, DeviceOperator::PreMulSum, factor, 1);
    let kernels = (0..2).map(|rank| {
        let buffer = world.arena.allocate(4);
        world.arena.write(buffer, &3f32.to_le_bytes());
        let works = world.collective(call, buffer, buffer, |layout, work| {
            put(work, 0, layout.coll.argument_is_pointer, 1);
        });
        (buffer, world.launch(rank, &works))
    });
    let (buffers, kernels): (Vec<_>, Vec<_>) = kernels.unzip();
    world.run(kernels);
    for buffer in buffers {
        assert_eq!(world.arena.read(buffer, 4), 60f32.to_le_bytes());
    }
}

#[test]
fn flags_of_ll_come_around_without_old_data_being_taken_for_new() {
    for first_step in [0x7fff_fff0, 0xffff_fff0, 0x1_ffff_fff4] {
        let settings = Settings {
            first_step,
            ..Settings::new(2)
        };
        let world = World::new(settings, 1);
        for round in 0..40u8 {
            let call = all_reduce(DataType::U8, DeviceOperator::Sum, 0, 2);
            assert_eq!(
                reduced(&world, call, [&[round, 1], &[1, 2]]),
                [round + 1, 3]
            );
        }
        // The slots that were filled to their ends hold no flag of a later step.
        let steps = world.layout.connection.step;
        let end = world.end(0, 0, 1, true, 0);
        assert!(world.arena.read_u64(end + steps.offset as u64) > first_step + 40);
    }
}

#[test]
fn an_aborted_kernel_ends_and_leaves_its_connections_as_they_were() {
    for protocol in [Protocol::Ll, Protocol::Ll128, Protocol::Simple] {
        let world = World::new(Settings::new(2), 1);
        let (input, output) = (world.arena.allocate(1000), world.arena.allocate(1000));
        let call = Call {
            protocol,
            ..all_reduce(DataType::U8, DeviceOperator::Sum, 0, 1000)
        };
        let works = world.collective(call, input, output, |_, _| {});
        let mut kernel = world.launch(0, &works);
        while kernel.step(1 << 20).unwrap() == Progress::Moved {}
        for _ in 0..3 {
            assert_eq!(kernel.step(1 << 20).unwrap(), Progress::Waiting);
        }
        let waits = kernel.describe();
        assert!(waits.contains("waits for data of rank 1"), "{waits}");
        assert!(waits.contains("AllReduce Sum U8 Ring"), "{waits}");
        world.arena.write_u32(world.ranks[0].abort, 1);
        assert_eq!(kernel.step(1 << 20).unwrap(), Progress::Done);
        let step = world.layout.connection.step.offset as u64;
        for send in [false, true] {
            let end = world.end(0, 0, 1, send, 0);
            assert_eq!(world.arena.read_u64(end + step), 0);
        }
    }
}

#[test]
fn what_is_not_interpreted_is_refused_by_name_and_reason() {
    let world = World::new(Settings::new(2), 1);
    let launch = |kernel: &str, parameters: Vec<u8>| {
        let memory: Arc<dyn Memory> = world.arena.clone();
        let launched = world
            .interpreter
            .launch(kernel, [1, 1, 1], [32, 1, 1], parameters, memory);
        launched.err().unwrap()
    };
    let nvls = Function {
        collective: Collective::AllReduce,
        reduction: Some((DeviceOperator::Sum, DataType::F32)),
        algorithm: Algorithm::Nvls,
        protocol: Protocol::Simple,
    };
    let batch = Batch {
        id: world.id(nvls),
        work_type: 1,
        works: vec![vec![0; 96]],
        extended: false,
        collective: 0,
    };
    let refused = launch(GENERIC, world.parameters(0, &[(0, vec![batch.clone()])]));
    assert_eq!(refused.reason, Reason::Multicast);
    assert_eq!(refused.function, Some(nvls));
    let text = refused.to_string();
    let name = "ncclDevKernel_Generic cannot be interpreted for AllReduce Sum F32 Nvls Simple";
    assert!(text.contains(name), "{text}");

    let ring = Function {
        algorithm: Algorithm::Ring,
        ..nvls
    };
    let wrong = Batch {
        id: world.id(ring),
        work_type: 3,
        ..batch
    };
    let refused = launch(GENERIC, world.parameters(0, &[(0, vec![wrong])]));
    assert_eq!(refused.reason, Reason::WrongWork { work_type: 3 });

    assert_eq!(launch("_Z3foov", vec![0; 64]).reason, Reason::UnknownKernel);
    let short = launch(GENERIC, vec![0; 8]).reason;
    let (needed, found) = (32, 8);
    assert_eq!(short, Reason::Parameters { needed, found });
    let grid = launch(GENERIC, world.parameters(0, &[])).reason;
    let (channels, blocks) = (0, 1);
    assert_eq!(grid, Reason::Grid { channels, blocks });
}

#[test]
fn a_buffer_that_is_too_short_or_freed_is_named() {
    let world = World::new(Settings::new(2), 1);
    let failure = |freed: bool| {
        let (input, output) = (
            world.arena.allocate(999 + usize::from(freed)),
            world.arena.allocate(1000),
        );
        let call = all_reduce(DataType::U8, DeviceOperator::Sum, 0, 1000);
        let works = world.collective(call, input, output, |_, _| {});
        let mut kernel = world.launch(0, &works);
        if freed {
            world.arena.free(input);
        }
        let failure = loop {
            match kernel.step(1 << 20) {
                Ok(Progress::Moved) => {}
                Ok(other) => panic!("{other:?}"),
                Err(failure) => break failure,
            }
        };
        assert_eq!(failure.channel, Some(0));
        let Trouble::Violation(Violation { address, cause, .. }) = &failure.trouble else {
            panic!("{failure}");
        };
        assert!((input..input + 1000).contains(address));
        let Cause::Driver(cause) = cause else {
            panic!("{failure}");
        };
        assert!(failure.to_string().ends_with(&cause.to_string()));
        cause.to_string()
    };
    assert_eq!(failure(false), "out of bounds");
    assert_eq!(failure(true), "freed");
}

#[test]
fn works_are_counted_and_profiled_ones_are_timed() {
    let world = World::new(Settings::new(2), 1);
    let layout = &world.layout;
    let mut kernels = Vec::new();
    for rank in 0..2 {
        let buffer = world.arena.allocate(100);
        let mut call = all_reduce(DataType::U8, DeviceOperator::Sum, 0, 100);
        let mut channels = world.collective(call, buffer, buffer, |_, _| {});
        call.profiled = true;
        let profiled = world.collective(call, buffer, buffer, |_, _| {});
        // A batch that follows, with two works.
        let mut next = profiled[0].1[0].clone();
        next.works.push(channels[0].1[0].works[0].clone());
        channels[0].1.push(next);
        kernels.push(world.launch(rank, &channels));
    }
    world.run(kernels);
    for rank in &world.ranks {
        let at = rank.comm + layout.channels.offset as u64;
        let counter = layout.channel.work_counter.unwrap().offset as u64;
        assert_eq!(world.arena.read_u64(at + counter), 3);
        let event = |base: u64, number: u64| {
            let at = base + 16 * number;
            (world.arena.read_u64(at), world.arena.read_u64(at + 8))
        };
        let (started, completed) = (event(rank.started, 2), event(rank.completed, 2));
        assert_eq!((started.0, completed.0), (2, 2));
        assert!(0 < started.1 && started.1 <= completed.1);
        for number in [1, 3] {
            assert_eq!(event(rank.started, number), (0, 0));
            assert_eq!(event(rank.completed, number), (0, 0));
        }
    }
}

#[test]
fn progress_counters_tell_the_works_of_each_collective() {
    let settings = Settings {
        channels: 3,
        ..Settings::new(2)
    };
    let world = World::new(settings, 1);
    let counters = world.layout.progress.as_ref().unwrap();
    let field = world.layout.comm.progress.unwrap().offset as u64;
    let call = all_reduce(DataType::U8, DeviceOperator::Sum, 0, 1000);
    let mut blocks = Vec::new();
    let mut kernels = Vec::new();
    for (rank, entry) in world.ranks.iter().enumerate() {
        let block = world.arena.allocate(counters.size);
        world.arena.write_u64(entry.comm + field, block);
        blocks.push(block);
        let buffer = world.arena.allocate(1000);
        let mut channels = world.collective(call, buffer, buffer, |_, _| {});
        for (_, batches) in &mut channels {
            batches[0].collective = 4;
        }
        kernels.push(world.launch(rank, &channels));
    }
    let word = |block: u64, field: Field, index: u64| {
        world
            .arena
            .read_u64(block + field.offset as u64 + 8 * index)
    };
    kernels[0].step(1 << 20).unwrap();
    for channel in 0..3 {
        assert_eq!(word(blocks[0], counters.active, channel), 1 << 4);
    }
    world.run(kernels);
    for block in blocks {
        // One work, which begins at one of its channels.
        assert_eq!(word(block, counters.completed, 4), 1);
        assert!(word(block, counters.completed_time, 4) > 0);
        assert_eq!(word(block, counters.completed, 3), 0);
        assert_eq!(word(block, counters.active, 1), 0);
    }
}

#[test]
fn the_devices_clock_is_stored_where_the_host_asks_for_it() {
    let world = World::new(Settings::new(1), 1);
    let to = world.arena.allocate(8);
    let kernel = "_Z33ncclProgressCounterCaptureGpuTimePm";
    let memory: Arc<dyn Memory> = world.arena.clone();
    let parameters = to.to_le_bytes().to_vec();
    let launched = world
        .interpreter
        .launch(kernel, [1, 1, 1], [1, 1, 1], parameters, memory);
    world.run(vec![launched.unwrap()]);
    // Nanoseconds since 1970.
    assert!(world.arena.read_u64(to) > 1 << 60);
}

#[test]
fn works_may_wrap_around_in_a_buffer_of_the_device() {
    let world = World::new(Settings::new(2), 1);
    let layout = &world.layout;
    let call = all_reduce(DataType::U8, DeviceOperator::Sum, 0, 4);
    let mut buffers = Vec::new();
    let mut kernels = Vec::new();
    for rank in 0..2 {
        let buffer = world.arena.allocate(4);
        world.arena.write(buffer, &[1, 2, 3, 4]);
        buffers.push(buffer);
        let channels = world.collective(call, buffer, buffer, |_, _| {});
        let work = channels[0].1[0].works[0].clone();
        let mut parameters = world.parameters(rank, &channels);
        parameters.truncate(layout.arguments.size + layout.batch.size);
        let ring = world.arena.allocate(1024);
        let base = 5 * 1024 + 1024 - 48;
        for (at, unit) in work.chunks(16).enumerate() {
            world
                .arena
                .write(ring + (base + 16 * at as u64) % 1024, unit);
        }
        let (arguments, batch) = (&layout.arguments, &layout.batch);
        put(&mut parameters, 0, arguments.storage, 1);
        put(&mut parameters, 0, arguments.work_buffer, ring);
        put(&mut parameters, 0, arguments.work_mask, 1023);
        put(&mut parameters, arguments.size, batch.offset_base, base);
        let memory: Arc<dyn Memory> = world.arena.clone();
        let launched = world
            .interpreter
            .launch(GENERIC, [1, 1, 1], [32, 1, 1], parameters, memory);
        kernels.push(launched.unwrap());
    }
    world.run(kernels);
    for buffer in buffers {
        assert_eq!(world.arena.read(buffer, 4), [2, 4, 6, 8]);
    }
}

#[test]
fn a_communicator_of_one_rank_scales_its_input() {
    let world = World::new(Settings::new(1), 1);
    let kernel = "_ZN43_GLOBAL__N__d7e99391_10_onerank_cu_24390e2c13oneRankReduceI13FuncPreMulSumI6__halfEEEvPvS4_mmb";
    let half = |value: f32| half::f16::from_f32(value).to_le_bytes();
    let (from, to, factor) = (
        world.arena.allocate(6),
        world.arena.allocate(6),
        world.arena.allocate(2),
    );
    world
        .arena
        .write(from, &[half(1.0), half(-2.0), half(3.5)].concat());
    world.arena.write(factor, &half(2.0));
    let value = u64::from(u16::from_le_bytes(half(2.0)));
    for (argument, pointer) in [(value, 0u8), (factor, 1)] {
        world.arena.write(to, &[0; 6]);
        let mut parameters: Vec<u8> = [to, from, 3, argument]
            .into_iter()
            .flat_map(u64::to_le_bytes)
            .collect();
        parameters.push(pointer);
        let memory: Arc<dyn Memory> = world.arena.clone();
        let launched = world
            .interpreter
            .launch(kernel, [1, 1, 1], [512, 1, 1], parameters, memory);
        world.run(vec![launched.unwrap()]);
        let expected = [half(2.0), half(-4.0), half(7.0)].concat();
        assert_eq!(world.arena.read(to, 6), expected);
    }
}

#[test]
fn a_batch_of_broadcasts_gives_every_rank_the_data_of_every_root() {
    for release in [Release::V2_32_3, Release::V2_30_7] {
        for protocol in [Protocol::Ll, Protocol::Ll128, Protocol::Simple] {
            for ranks in [2, 3, 5] {
                let settings = Settings {
                    release,
                    ..Settings::new(ranks)
                };
                let world = World::new(settings, 9);
                broadcasts(&world, protocol);
            }
        }
    }
}

fn broadcasts(world: &World, protocol: Protocol) {
    let ranks = world.settings.ranks;
    let fields = world.layout.bcast.as_ref().unwrap();
    let sizes: Vec<_> = (0..ranks).map(|_| world.below(9000)).collect();
    let data: Vec<_> = sizes.iter().map(|&size| world.random_bytes(size)).collect();
    let function = Function {
        collective: Collective::AllGatherV,
        reduction: None,
        algorithm: Algorithm::Ring,
        protocol,
    };
    let chunk = match protocol {
        Protocol::Ll => 512,
        Protocol::Ll128 => 1920,
        Protocol::Simple => 4096,
    };
    let ring = &world.rings[0];
    let mut outputs = Vec::new();
    let mut kernels = Vec::new();
    for rank in 0..ranks {
        let mut works = Vec::new();
        for root in 0..ranks {
            let output = world.arena.allocate(sizes[root]);
            let at = |rank| ring.iter().position(|&other| other == rank).unwrap();
            let depth = (at(rank) + ranks - at(root)) % ranks;
            let input = match (depth, root % 2) {
                (0, 0) => output,
                (0, _) => world.arena.allocate(sizes[root]),
                _ => 0,
            };
            if depth == 0 {
                world.arena.write(input, &data[root]);
            }
            outputs.push((root, output));
            let mut work = vec![0; fields.size];
            for (field, value) in [
                (fields.ring_depth, depth as u64),
                (fields.chunk, chunk),
                (fields.send_buffer, input),
                (fields.recv_buffer, output),
                (fields.bytes, sizes[root] as u64),
            ] {
                put(&mut work, 0, field, value);
            }
            works.push(work);
        }
        let batch = Batch {
            id: world.id(function),
            work_type: 3,
            works,
            extended: false,
            collective: 0,
        };
        kernels.push(world.launch(rank, &[(0, vec![batch])]));
    }
    world.run(kernels);
    for (root, output) in outputs {
        assert!(world.arena.read(output, sizes[root]) == data[root]);
    }
}
