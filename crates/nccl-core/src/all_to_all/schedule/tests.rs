//! Executes the schedules of all ranks at once in plain memory: every algorithm has to move every element to its place.

use std::collections::{BTreeMap, VecDeque};

use nccl_base::data_type::DataType;

use super::*;

/// One rank's memory.
struct Rank {
    send: Vec<Vec<u8>>,
    recv: Vec<Vec<u8>>,
    scratch: Vec<u8>,
}

impl Rank {
    fn region(&mut self, region: Region) -> &mut [u8] {
        match region {
            Region::Send(payload) => &mut self.send[payload],
            Region::Recv(payload) => &mut self.recv[payload],
            Region::Scratch => &mut self.scratch,
        }
    }

    fn read(&mut self, at: BufferLocation, bytes: usize) -> Vec<u8> {
        self.region(at.region)[at.offset..at.offset + bytes].to_vec()
    }

    fn write(&mut self, at: BufferLocation, bytes: &[u8]) {
        self.region(at.region)[at.offset..at.offset + bytes.len()].copy_from_slice(bytes);
    }
}

/// Returns the data of rank `from` for rank `to`: no two nearby bytes are equal.
fn byte(from: usize, to: usize, payload: usize, at: usize) -> u8 {
    (from * 89 + to * 31 + payload * 7 + at * 3 + 1) as u8
}

/// The counts from each rank to each other, by payload.
type Counts = Vec<Vec<Vec<usize>>>;

const SIZES: [usize; 3] = [2, 4, 1];
const TYPES: [DataType; 3] = [DataType::Float16, DataType::Float32, DataType::UInt8];

/// The layout of parts: so many elements apart, in the order of the ranks or in reverse.
#[derive(Clone, Copy)]
struct PartLayout {
    gap: usize,
    backwards: bool,
}

impl PartLayout {
    const PACKED: Self = Self {
        gap: 0,
        backwards: false,
    };

    fn random(random: &mut fastrand::Rng) -> Self {
        Self {
            gap: random.usize(..3),
            backwards: random.bool(),
        }
    }
}

fn payloads(counts: &Counts, rank: usize, layout: PartLayout) -> Vec<Payload> {
    let of = |(number, counts): (usize, &Vec<Vec<usize>>)| {
        let packed = |mut parts: Vec<usize>| -> Vec<Part> {
            if layout.backwards {
                parts.reverse();
            }
            let mut offset = 0;
            let part = |count: usize| {
                let part = Part { offset, count };
                offset += count + layout.gap;
                part
            };
            let mut parts: Vec<_> = parts.into_iter().map(part).collect();
            if layout.backwards {
                parts.reverse();
            }
            parts
        };
        Payload {
            data_type: TYPES[number],
            size: SIZES[number],
            send: packed(counts[rank].clone()),
            recv: packed(counts.iter().map(|row| row[rank]).collect()),
            uniform: None,
        }
    };
    counts.iter().enumerate().map(of).collect()
}

fn uniform(counts: &[usize], ranks: usize) -> Vec<Payload> {
    let of = |(number, count): (usize, &usize)| {
        Payload::uniform(TYPES[number], SIZES[number], ranks, *count)
    };
    counts.iter().enumerate().map(of).collect()
}

/// The payload of a message, and its bytes.
type Sent = (usize, Vec<u8>);

/// Executes the schedules of all ranks; messages between two ranks are paired in the order of their posting, as in NCCL,
/// whatever their step and payload.
fn execute(
    ranks: usize,
    payloads: impl Fn(usize) -> Vec<Payload>,
    schedule: impl Fn(Exchange<'_>) -> Schedule,
    in_place: bool,
) {
    let mut all: Vec<Rank> = Vec::new();
    let mut schedules = Vec::new();
    for rank in 0..ranks {
        let payloads = payloads(rank);
        let exchange = Exchange {
            rank,
            ranks,
            payloads: &payloads,
        };
        let schedule = schedule(exchange);
        let mut memory = Rank {
            send: Vec::new(),
            recv: Vec::new(),
            scratch: vec![0xEE; schedule.scratch],
        };
        for (number, payload) in payloads.iter().enumerate() {
            let mut send = vec![0; payload.send_len() * payload.size];
            for (peer, part) in payload.send.iter().enumerate() {
                for at in 0..part.count * payload.size {
                    send[part.offset * payload.size + at] = byte(rank, peer, number, at);
                }
            }
            let empty = vec![0xEE; payload.recv_len() * payload.size];
            memory
                .recv
                .push(if in_place { send.clone() } else { empty });
            memory.send.push(send);
        }
        all.push(memory);
        schedules.push(schedule);
    }
    let mut sent: BTreeMap<(usize, usize), VecDeque<Sent>> = BTreeMap::new();
    let mut next = vec![0; ranks];
    // A step begins after the one before it on this rank, and ends with its messages.
    let mut begun = vec![false; ranks];
    loop {
        let mut progress = false;
        for rank in 0..ranks {
            let Some(step) = schedules[rank].steps.get(next[rank]) else {
                continue;
            };
            assert!(step.native.is_empty(), "NCCL would do that");
            if !begun[rank] {
                begun[rank] = true;
                progress = true;
                for one in &step.moves {
                    for row in 0..one.rows {
                        let shifted = |place: BufferLocation, pitch: usize| BufferLocation {
                            offset: place.offset + row * pitch,
                            ..place
                        };
                        let bytes = all[rank].read(shifted(one.from, one.from_pitch), one.width);
                        all[rank].write(shifted(one.to, one.to_pitch), &bytes);
                    }
                }
                for message in step.messages.iter().filter(|message| message.sends) {
                    let bytes = message.count * SIZES[message.payload];
                    let bytes = all[rank].read(message.at, bytes);
                    let queue = sent.entry((rank, message.peer)).or_default();
                    queue.push_back((message.payload, bytes));
                }
            }
            let receives = || step.messages.iter().filter(|message| !message.sends);
            let mut needed: BTreeMap<_, usize> = BTreeMap::new();
            for message in receives() {
                *needed.entry((message.peer, rank)).or_default() += 1;
            }
            let there = |key| sent.get(key).map_or(0, VecDeque::len);
            if needed.iter().any(|(key, count)| there(key) < *count) {
                continue;
            }
            for message in receives().copied().collect::<Vec<_>>() {
                let queue = sent.get_mut(&(message.peer, rank)).unwrap();
                let (payload, bytes) = queue.pop_front().unwrap();
                assert_eq!(payload, message.payload);
                assert_eq!(bytes.len(), message.count * SIZES[message.payload]);
                all[rank].write(message.at, &bytes);
            }
            next[rank] += 1;
            begun[rank] = false;
            progress = true;
        }
        if !progress {
            break;
        }
    }
    for rank in 0..ranks {
        assert_eq!(next[rank], schedules[rank].steps.len(), "rank {rank} waits");
        for (number, payload) in payloads(rank).iter().enumerate() {
            for (peer, part) in payload.recv.iter().enumerate() {
                for at in 0..part.count * payload.size {
                    let found = all[rank].recv[number][part.offset * payload.size + at];
                    let expected = byte(peer, rank, number, at);
                    assert_eq!(found, expected, "rank {rank} from {peer}, {number}: {at}");
                }
            }
        }
    }
    let left: usize = sent.values().map(VecDeque::len).sum();
    assert_eq!(left, 0, "messages that nobody received");
}

fn random_counts(random: &mut fastrand::Rng, ranks: usize) -> Counts {
    let payloads = random.usize(1..=SIZES.len());
    let count = |random: &mut fastrand::Rng| match random.u8(..4) {
        0 => 0,
        1 => random.usize(..3),
        _ => random.usize(..40),
    };
    let row = |random: &mut fastrand::Rng| (0..ranks).map(|_| count(random)).collect();
    let matrix = |random: &mut fastrand::Rng| (0..ranks).map(|_| row(random)).collect();
    (0..payloads).map(|_| matrix(random)).collect()
}

#[test]
fn direct_algorithms_move_any_counts_to_any_displacements() {
    for seed in 0..300 {
        let mut random = fastrand::Rng::with_seed(seed);
        let ranks = random.usize(1..=9);
        let counts = random_counts(&mut random, ranks);
        let layout = PartLayout::random(&mut random);
        let payloads = |rank| payloads(&counts, rank, layout);
        execute(ranks, payloads, grouped, false);
        let pieces = random.usize(1..=5);
        execute(ranks, payloads, |exchange| chunked(exchange, pieces), false);
        let width = random.usize(1..=ranks);
        execute(ranks, payloads, |exchange| pairwise(exchange, width), false);
    }
}

#[test]
fn two_levels_move_every_block_over_its_rail() {
    for (nodes, ranks_per_node) in [(1, 1), (1, 4), (4, 1), (2, 2), (3, 2), (2, 3), (4, 4)] {
        for counts in [vec![1], vec![5, 3], vec![0], vec![7, 0, 2]] {
            let ranks = nodes * ranks_per_node;
            for packed in [false, true] {
                let how = TwoLevel {
                    ranks_per_node,
                    packed,
                };
                let payloads = |_| uniform(&counts, ranks);
                execute(ranks, payloads, |exchange| two_level(exchange, how), false);
            }
        }
    }
}

/// Returns the counts that the ranks of `rank`'s node tell it.
fn within(counts: &Counts, rank: usize, ranks_per_node: usize) -> Within {
    let ranks = counts[0].len();
    let (node, place) = (rank / ranks_per_node, rank % ranks_per_node);
    let of = |counts: &Vec<Vec<usize>>| {
        let neighbours = 0..ranks_per_node;
        let on_rail = |neighbour: usize| {
            let nodes = 0..ranks / ranks_per_node;
            let row = &counts[node * ranks_per_node + neighbour];
            nodes
                .map(|other| row[other * ranks_per_node + place])
                .collect()
        };
        neighbours.map(on_rail).collect()
    };
    Within {
        ranks_per_node,
        counts: counts.iter().map(of).collect(),
    }
}

#[test]
fn two_levels_move_any_counts_to_any_displacements() {
    for seed in 0..300 {
        let mut random = fastrand::Rng::with_seed(seed);
        let (nodes, ranks_per_node) = (random.usize(1..=4), random.usize(1..=4));
        let counts = random_counts(&mut random, nodes * ranks_per_node);
        let layout = PartLayout::random(&mut random);
        let schedule = |exchange: Exchange<'_>| {
            let schedule =
                two_level_of_parts(exchange, &within(&counts, exchange.rank, ranks_per_node));
            let messages = schedule.steps.iter().flat_map(|step| &step.messages);
            let outside = |message: &&Message| {
                message.peer / ranks_per_node != exchange.rank / ranks_per_node
            };
            let outside = messages.filter(outside);
            // One message to each other node and one from it, for each payload; all on the rail.
            let most = 2 * (nodes - 1) * counts.len();
            assert!(outside.clone().count() <= most);
            assert!(outside.clone().all(|message| {
                message.peer % ranks_per_node == exchange.rank % ranks_per_node
            }));
            schedule
        };
        let payloads = |rank| payloads(&counts, rank, layout);
        execute(nodes * ranks_per_node, payloads, schedule, false);
    }
}

#[test]
fn what_lands_where_it_belongs_is_not_moved() {
    let counts: Counts = vec![vec![vec![3, 0, 5, 1]; 4]];
    let moves = |layout| {
        let payloads = payloads(&counts, 2, layout);
        let exchange = Exchange {
            rank: 2,
            ranks: 4,
            payloads: &payloads,
        };
        two_level_of_parts(exchange, &within(&counts, 2, 2)).moves()
    };
    let apart = PartLayout {
        gap: 1,
        ..PartLayout::PACKED
    };
    let backwards = PartLayout {
        backwards: true,
        ..PartLayout::PACKED
    };
    assert_eq!(moves(PartLayout::PACKED), 0);
    assert_eq!((moves(apart), moves(backwards)), (2, 2));
}

#[test]
fn two_levels_send_one_message_to_each_other_node() {
    let payloads = uniform(&[5], 12);
    let exchange = Exchange {
        rank: 7,
        ranks: 12,
        payloads: &payloads,
    };
    for packed in [false, true] {
        let how = TwoLevel {
            ranks_per_node: 3,
            packed,
        };
        let schedule = two_level(exchange, how);
        let outside = |message: &&Message| message.peer / 3 != 2;
        let messages = schedule.steps.iter().flat_map(|step| &step.messages);
        let outside: Vec<_> = messages.filter(outside).collect();
        // To and from the ranks 1, 4 and 10 of the same rail, three blocks each.
        assert_eq!(outside.len(), 6);
        assert!(outside.iter().all(|message| message.peer % 3 == 1));
        assert!(outside.iter().all(|message| message.count == 15));
        assert_eq!(schedule.launches(), 2);
    }
}

#[test]
fn blocks_change_places_in_one_buffer() {
    for ranks in 1..=9 {
        for width in 1..=ranks {
            for counts in [vec![1], vec![5, 3, 2], vec![0]] {
                let payloads = |_| uniform(&counts, ranks);
                execute(ranks, payloads, |exchange| in_place(exchange, width), true);
            }
        }
    }
}

#[test]
fn in_place_needs_no_more_than_as_many_blocks_as_it_has_peers_at_a_time() {
    let payloads = uniform(&[8], 8);
    for rank in 0..8 {
        let exchange = Exchange {
            rank,
            ranks: 8,
            payloads: &payloads,
        };
        let schedule = in_place(exchange, 2);
        assert!(schedule.scratch <= beside([16, 16].into_iter()), "{rank}");
        assert_eq!(schedule.launches(), 4);
    }
}

#[test]
fn pieces_begin_where_blocks_are_aligned_and_are_all_of_it() {
    let payloads = uniform(&[1000], 2);
    let exchange = Exchange {
        rank: 0,
        ranks: 2,
        payloads: &payloads,
    };
    let schedule = chunked(exchange, 3);
    let sent = |peer: usize| {
        let messages = schedule.steps.iter().flat_map(|step| &step.messages);
        messages.filter(move |message| message.sends && message.peer == peer)
    };
    assert!(sent(1).all(|message| message.at.offset % 16 == 0));
    assert_eq!(sent(1).map(|message| message.count).sum::<usize>(), 1000);
}
