//! Send/Recv: messages of all sizes in every direction at once, through buffers and directly.

use super::super::launch::Running;
use super::types::Release;
use super::world::{Batch, Settings, World, put};

/// `NCCL_P2P_WRITE` and `NCCL_P2P_READ`.
const FLAGS: [u32; 2] = [1, 2];

/// How messages of a test travel.
#[derive(Debug, Clone, Copy, Default)]
struct Way {
    ll: bool,
    registered: bool,
}

/// A send and a receive of one rank.
struct Pair {
    to: usize,
    send: (u64, usize),
    from: usize,
    receive: (u64, usize),
}

/// The exponent and mantissa of a chunk size that is a power of two of at least 8.
fn chunk_code(bytes: usize) -> u64 {
    ((bytes.trailing_zeros() - 2) << 3).into()
}

fn work(world: &World, pair: &Pair, way: Way) -> Vec<u8> {
    let (layout, channels) = (&world.layout, world.settings.channels as u64);
    let fields = &layout.p2p;
    let mut work = vec![0; fields.size];
    let chunk = match way.ll {
        true => world.settings.buffers[0] / 8 / 2,
        false => world.settings.buffers[2] / 8,
    };
    for (field, value) in [
        (fields.send_address, pair.send.0),
        (fields.send_bytes, pair.send.1 as u64),
        (fields.send_rank, pair.to as u64),
        (fields.recv_address, pair.receive.0),
        (fields.recv_bytes, pair.receive.1 as u64),
        (fields.recv_rank, pair.from as u64),
        (fields.channels, channels),
        (fields.channel_base, channels / 2),
        (fields.send_channels, channels),
        (fields.recv_channels, channels),
        (fields.send_chunk, chunk_code(chunk)),
        (fields.recv_chunk, chunk_code(chunk)),
        (fields.send_ll, way.ll.into()),
        (fields.recv_ll, way.ll.into()),
        (fields.send_ipc_registered, way.registered.into()),
        (fields.recv_ipc_registered, way.registered.into()),
    ] {
        put(&mut work, 0, field, value);
    }
    work
}

fn launch(world: &World, rank: usize, pairs: &[Pair], way: Way) -> Running {
    let works: Vec<_> = pairs.iter().map(|pair| work(world, pair, way)).collect();
    // As NCCL does beyond eight works: a batch that extends another.
    let batches: Vec<_> = works
        .chunks(2)
        .enumerate()
        .map(|(at, chunk)| Batch {
            extended: 2 * (at + 1) < works.len(),
            ..world.messages(chunk.to_vec())
        })
        .collect();
    let channels: Vec<_> = (0..world.settings.channels)
        .map(|channel| (channel, batches.clone()))
        .collect();
    world.launch(rank, &channels)
}

/// Every rank sends to every rank, itself too, messages of random sizes.
fn all_to_all(world: &World, way: Way) {
    let ranks = world.settings.ranks;
    let size = |_| match world.below(4) {
        0 => 0,
        1 => world.below(20),
        2 => 4096 * world.below(9),
        _ => world.below(40_000),
    };
    let sizes: Vec<Vec<usize>> = (0..ranks).map(|_| (0..ranks).map(size).collect()).collect();
    let messages: Vec<Vec<Vec<u8>>> = sizes
        .iter()
        .map(|sizes| sizes.iter().map(|&size| world.random_bytes(size)).collect())
        .collect();
    let mut received = Vec::new();
    let mut kernels = Vec::new();
    for rank in 0..ranks {
        let mut pairs = Vec::new();
        for round in 0..ranks {
            let (to, from) = ((rank + round) % ranks, (rank + ranks - round) % ranks);
            let send = world.arena.allocate_at(sizes[rank][to], round);
            world.arena.write(send, &messages[rank][to]);
            let receive = world.arena.allocate_at(sizes[from][rank], 2 * round);
            received.push((from, rank, receive));
            pairs.push(Pair {
                to,
                send: (send, sizes[rank][to]),
                from,
                receive: (receive, sizes[from][rank]),
            });
        }
        kernels.push(launch(world, rank, &pairs, way));
    }
    world.run(kernels);
    for (from, to, buffer) in received {
        let found = world.arena.read(buffer, sizes[from][to]);
        assert!(found == messages[from][to], "{from} to {to}: {way:?}");
    }
}

#[test]
fn every_rank_exchanges_messages_of_all_sizes_with_every_rank() {
    for (ranks, channels, release) in [
        (1, 1, Release::V2_32_3),
        (2, 4, Release::V2_32_3),
        (3, 1, Release::V2_30_7),
        (5, 2, Release::V2_27_7),
    ] {
        let settings = Settings {
            channels,
            release,
            ..Settings::new(ranks)
        };
        let world = World::new(settings, 11);
        for _ in 0..5 {
            for ll in [false, true] {
                let registered = false;
                all_to_all(&world, Way { ll, registered });
            }
        }
    }
}

#[test]
fn registered_messages_are_written_or_read_directly() {
    for flags in FLAGS {
        let settings = Settings {
            flags,
            channels: 2,
            ..Settings::new(4)
        };
        let world = World::new(settings, 12);
        let before = world.buffers();
        for _ in 0..5 {
            let (ll, registered) = (false, true);
            all_to_all(&world, Way { ll, registered });
        }
        assert!(before == world.buffers(), "a connection's buffer was used");
    }
}
