//! Collectives over registered buffers: a rank writes into the output of the next.

use super::super::functions::{Algorithm, Collective, DeviceOperator, Protocol};
use super::world::{Call, Settings, World, put};
use crate::numbers::datatype::DataType;

/// `NCCL_P2P_WRITE` and `NCCL_P2P_READ` of a connection: collectives write in either case.
const WRITE: u32 = 1;
const READ: u32 = 2;

/// The registered buffers of all ranks.
struct Registered {
    inputs: Vec<u64>,
    outputs: Vec<u64>,
}

fn register(world: &World, input: usize, output: usize) -> Registered {
    let (arena, ranks) = (&world.arena, world.settings.ranks);
    let buffers = |length| (0..ranks).map(|_| arena.allocate(length)).collect();
    Registered {
        inputs: buffers(input),
        outputs: buffers(output),
    }
}

fn run(world: &World, call: Call, registered: &Registered) {
    let arena = &world.arena;
    let ranks = world.settings.ranks;
    let mut kernels = Vec::new();
    for rank in 0..ranks {
        // Every rank has its own table of where its buffers are for each peer; here all share an address space.
        let (send, recv) = (arena.allocate(8 * ranks), arena.allocate(8 * ranks));
        for peer in 0..ranks {
            arena.write_u64(send + 8 * peer as u64, registered.inputs[rank] - 24);
            arena.write_u64(recv + 8 * peer as u64, registered.outputs[rank] - 40);
        }
        let works = world.collective(
            call,
            registered.inputs[rank],
            registered.outputs[rank],
            |layout, work| {
                let fields = &layout.coll;
                for (field, value) in [
                    (fields.registered, 1),
                    (fields.send_offset, 24),
                    (fields.recv_offset, 40),
                    (fields.send_remote, send),
                    (fields.recv_remote, recv),
                ] {
                    put(work, 0, field, value);
                }
            },
        );
        kernels.push(world.launch(rank, &works));
    }
    world.run(kernels);
}

fn call(collective: Collective, count: usize) -> Call {
    Call {
        collective,
        reduction: (collective == Collective::AllReduce)
            .then_some((DeviceOperator::Sum, DataType::U8)),
        algorithm: Algorithm::Ring,
        protocol: Protocol::Simple,
        count,
        root: 1,
        argument: 0,
        profiled: false,
    }
}

#[test]
fn rings_over_registered_buffers_come_to_the_same_results() {
    for flags in [WRITE, READ] {
        for (ranks, channels) in [(2, 1), (4, 2), (5, 1)] {
            let settings = Settings {
                flags,
                channels,
                ..Settings::new(ranks)
            };
            let world = World::new(settings, 3);
            for count in [1, 1000, 40_001] {
                let data: Vec<_> = (0..ranks).map(|_| world.random_bytes(count)).collect();
                let gathered = register(&world, count, ranks * count);
                for (input, data) in gathered.inputs.iter().zip(&data) {
                    world.arena.write(*input, data);
                }
                run(&world, call(Collective::AllGather, count), &gathered);
                for output in &gathered.outputs {
                    assert!(world.arena.read(*output, ranks * count) == data.concat());
                }

                run(&world, call(Collective::Broadcast, count), &gathered);
                for output in &gathered.outputs {
                    assert!(world.arena.read(*output, count) == data[1]);
                }

                run(&world, call(Collective::AllReduce, count), &gathered);
                let sum: Vec<u8> = (0..count)
                    .map(|at| {
                        data.iter()
                            .fold(0u8, |sum, data| sum.wrapping_add(data[at]))
                    })
                    .collect();
                for output in &gathered.outputs {
                    assert!(world.arena.read(*output, count) == sum);
                }
            }
        }
    }
}

#[test]
fn a_gather_into_registered_buffers_leaves_the_connections_buffers_alone() {
    for flags in [WRITE, READ] {
        let settings = Settings {
            flags,
            ..Settings::new(3)
        };
        let world = World::new(settings, 4);
        let before = world.buffers();
        let gathered = register(&world, 5000, 15_000);
        for input in &gathered.inputs {
            world.arena.write(*input, &world.random_bytes(5000));
        }
        run(&world, call(Collective::AllGather, 5000), &gathered);
        assert!(before == world.buffers());
    }
}
