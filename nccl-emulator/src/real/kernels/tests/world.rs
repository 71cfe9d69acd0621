//! Communicators in host memory, as NCCL's host code would leave them to its kernels.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use cuda_emulator::sync::Mutex;

use super::super::functions::{Algorithm, Collective, DeviceOperator, Function, Protocol};
use super::super::launch::{Interpreter, Progress, Running};
use super::super::layout::Layout;
use super::super::memory::{Cause, Lease, Memory, View, Violation};
use super::types::Release;
use crate::numbers::datatype::DataType;
use nccl_sys::Version;

pub(super) const GENERIC: &str = "_Z21ncclDevKernel_Generic24ncclDevKernelArgsStorageILm4096EE";

/// Host memory that kernels may use: nothing but what was allocated here.
#[derive(Default)]
pub(super) struct Arena {
    blocks: Mutex<BTreeMap<u64, Allocation>>,
}

struct Allocation {
    words: Box<[u64]>,
    length: usize,
    freed: Arc<AtomicBool>,
}

#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Refusal(&'static str);

fn violation(address: u64, length: usize, what: &'static str) -> Violation {
    Violation {
        address,
        length,
        cause: Cause::Driver(Arc::new(Refusal(what))),
    }
}

struct Held {
    freed: Arc<AtomicBool>,
    address: u64,
}

impl Lease for Held {
    fn still_valid(&self) -> Result<(), Violation> {
        match self.freed.load(Ordering::Relaxed) {
            false => Ok(()),
            true => Err(violation(self.address, 0, "freed")),
        }
    }
}

impl Memory for Arena {
    fn view(&self, address: u64, length: usize) -> Result<View, Violation> {
        let blocks = self.blocks.lock();
        let Some((&base, block)) = blocks.range(..=address).next_back() else {
            return Err(violation(address, length, "no allocation"));
        };
        if address - base + length as u64 > block.length as u64 {
            return Err(violation(address, length, "out of bounds"));
        }
        let freed = block.freed.clone();
        if freed.load(Ordering::Relaxed) {
            return Err(violation(address, length, "freed"));
        }
        // SAFETY: allocations live until the arena does, which outlives its kernels.
        Ok(unsafe {
            View::new(
                address,
                std::ptr::with_exposed_provenance_mut(address as usize),
                length,
                Box::new(Held { freed, address }),
            )
        })
    }
}

impl Arena {
    /// Zeroed memory, with room around it that no kernel may touch.
    pub(super) fn allocate(&self, length: usize) -> u64 {
        self.allocate_at(length, 0)
    }

    /// The same, `shift` bytes off its natural alignment.
    pub(super) fn allocate_at(&self, length: usize, shift: usize) -> u64 {
        let mut words = vec![0u64; (length + shift).div_ceil(8) + 16].into_boxed_slice();
        let address = (words.as_mut_ptr().expose_provenance() + 64 + shift) as u64;
        let freed = Arc::default();
        let allocation = Allocation {
            words,
            length,
            freed,
        };
        self.blocks.lock().insert(address, allocation);
        address
    }

    pub(super) fn free(&self, address: u64) {
        let blocks = self.blocks.lock();
        blocks[&address].freed.store(true, Ordering::Relaxed);
    }

    pub(super) fn write(&self, address: u64, bytes: &[u8]) {
        self.view(address, bytes.len())
            .unwrap()
            .write(0, bytes)
            .unwrap();
    }

    pub(super) fn write_u64(&self, address: u64, value: u64) {
        self.write(address, &value.to_le_bytes());
    }

    pub(super) fn write_u32(&self, address: u64, value: u32) {
        self.write(address, &value.to_le_bytes());
    }

    pub(super) fn read(&self, address: u64, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        self.view(address, length)
            .unwrap()
            .read(0, &mut bytes)
            .unwrap();
        bytes
    }

    pub(super) fn read_u64(&self, address: u64) -> u64 {
        u64::from_le_bytes(self.read(address, 8).try_into().unwrap())
    }

    /// Fails if a kernel wrote around an allocation.
    pub(super) fn check_guards(&self) {
        for (address, block) in self.blocks.lock().iter() {
            assert!(
                block.words[..8].iter().all(|&word| word == 0),
                "something wrote before the allocation at {address:#x}"
            );
        }
    }
}

/// One side of a connection.
#[derive(Debug, Clone, Copy)]
pub(super) struct Side {
    pub(super) tail: u64,
    pub(super) head: u64,
    pub(super) buffers: [u64; 3],
    /// 0 without a network.
    pub(super) fifo: u64,
    slot: u64,
}

/// A connection: both sides are the same memory, unless a network is between them.
#[derive(Debug, Clone, Copy)]
pub(super) struct Wire {
    pub(super) sender: Side,
    pub(super) receiver: Side,
}

pub(super) struct Rank {
    pub(super) comm: u64,
    pub(super) abort: u64,
    pub(super) started: u64,
    pub(super) completed: u64,
}

/// What a world is made like.
#[derive(Debug, Clone)]
pub(super) struct Settings {
    pub(super) release: Release,
    pub(super) ranks: usize,
    pub(super) channels: usize,
    /// Bytes of a connection's buffers, by protocol.
    pub(super) buffers: [usize; 3],
    /// Children of a node of the tree, 2 for the root.
    pub(super) arity: usize,
    /// The step that every connection begins at.
    pub(super) first_step: u64,
    /// `ncclConnInfo.flags`.
    pub(super) flags: u32,
    /// A proxy carries every step from the sender's buffers to the receiver's.
    pub(super) network: bool,
}

impl Settings {
    pub(super) fn new(ranks: usize) -> Self {
        Self {
            release: Release::V2_32_3,
            ranks,
            channels: 1,
            buffers: [8 * 1024, 8 * 2 * 2048, 8 * 4096],
            arity: 2,
            first_step: 0,
            flags: 0,
            network: false,
        }
    }
}

pub(super) struct World {
    pub(super) settings: Settings,
    pub(super) arena: Arc<Arena>,
    pub(super) layout: Layout,
    pub(super) interpreter: Interpreter,
    pub(super) ranks: Vec<Rank>,
    /// By channel: the ranks in ring order.
    pub(super) rings: Vec<Vec<usize>>,
    /// By channel, sender, receiver and index.
    pub(super) wires: BTreeMap<(usize, usize, usize, usize), Wire>,
    random: Mutex<fastrand::Rng>,
}

/// A collective for [`World::collective`].
#[derive(Debug, Clone, Copy)]
pub(super) struct Call {
    pub(super) collective: Collective,
    pub(super) reduction: Option<(DeviceOperator, DataType)>,
    pub(super) algorithm: Algorithm,
    pub(super) protocol: Protocol,
    /// Elements, as each collective counts them.
    pub(super) count: usize,
    pub(super) root: usize,
    pub(super) argument: u64,
    pub(super) profiled: bool,
}

impl World {
    pub(super) fn new(settings: Settings, seed: u64) -> Self {
        let release = settings.release;
        let (version, rows) = match release {
            Release::V2_32_3 => (Version::new(2, 32, 3), 1999),
            Release::V2_30_7 => (Version::new(2, 30, 7), 1999),
            Release::V2_27_7 => (Version::new(2, 27, 7), 1996),
        };
        let table: Vec<i32> = (0..rows).collect();
        let layout = Layout::new(&release).unwrap();
        let mut world = Self {
            arena: Arc::default(),
            interpreter: Interpreter::new(&release, &table, version).unwrap(),
            ranks: Vec::new(),
            rings: Vec::new(),
            wires: BTreeMap::new(),
            random: Mutex::new(fastrand::Rng::with_seed(seed)),
            layout,
            settings,
        };
        for _ in 0..world.settings.channels {
            let mut ring: Vec<usize> = (0..world.settings.ranks).collect();
            world.random.lock().shuffle(&mut ring);
            world.rings.push(ring);
        }
        world.connect();
        world.build();
        world
    }

    pub(super) fn below(&self, limit: usize) -> usize {
        self.random.lock().usize(..limit)
    }

    pub(super) fn random_bytes(&self, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        self.random.lock().fill(&mut bytes);
        bytes
    }

    fn connect(&mut self) {
        let Settings {
            ranks,
            channels,
            network,
            ..
        } = self.settings;
        for channel in 0..channels {
            for from in 0..ranks {
                for to in (0..ranks).filter(|&to| to != from) {
                    for index in 0..2 {
                        let sender = self.side();
                        let receiver = if network { self.side() } else { sender };
                        let wire = Wire { sender, receiver };
                        self.wires.insert((channel, from, to, index), wire);
                    }
                }
            }
        }
    }

    fn side(&self) -> Side {
        let (arena, step) = (&self.arena, self.settings.first_step);
        let fifo = match self.settings.network {
            true => arena.allocate(8 * self.layout.fifo.size),
            false => 0,
        };
        let side = Side {
            tail: arena.allocate(8),
            head: arena.allocate(8),
            buffers: self.settings.buffers.map(|size| arena.allocate(size)),
            fifo,
            slot: arena.allocate(8),
        };
        arena.write_u64(side.tail, step);
        arena.write_u64(side.head, step);
        side
    }

    /// The bytes of an end's `ncclConnInfo`.
    fn information(&self, side: Side) -> Vec<u8> {
        let fields = &self.layout.connection;
        let mut bytes = vec![0; fields.size];
        for (at, buffer) in side.buffers.into_iter().enumerate() {
            put(&mut bytes, 0, fields.buffers.element(at, 8), buffer);
        }
        for (field, value) in [
            (fields.tail, side.tail),
            (fields.head, side.head),
            (fields.pointer_exchange, side.slot),
            (fields.fifo, side.fifo),
            (fields.step, self.settings.first_step),
            (fields.step_size, self.settings.buffers[2] as u64 / 8),
            (fields.flags, self.settings.flags.into()),
        ] {
            put(&mut bytes, 0, field, value);
        }
        bytes
    }

    fn build(&mut self) {
        let Settings {
            ranks,
            channels,
            buffers,
            arity,
            ..
        } = self.settings;
        let arena = self.arena.clone();
        let layout = self.layout.clone();
        for rank in 0..ranks {
            let size = layout.channels.offset + layout.channels.size;
            let comm = arena.allocate(size);
            let abort = arena.allocate(4);
            let local = arena.allocate(4 * ranks);
            let profiler = layout.profiler.unwrap() * 64;
            let (started, completed) = (arena.allocate(profiler), arena.allocate(profiler));
            for peer in 0..ranks {
                arena.write_u32(local + 4 * peer as u64, peer as u32);
            }
            let fields = &layout.comm;
            arena.write_u32(comm + fields.rank.offset as u64, rank as u32);
            arena.write_u32(comm + fields.ranks.offset as u64, ranks as u32);
            for (at, size) in buffers.iter().enumerate() {
                let field = fields.buffer_sizes.element(at, 4);
                arena.write_u32(comm + field.offset as u64, *size as u32);
            }
            let chunk = buffers[2] as u32 / 8;
            arena.write_u32(comm + fields.p2p_chunk.offset as u64, chunk);
            arena.write_u64(comm + fields.abort_flag.offset as u64, abort);
            arena.write_u64(comm + fields.rank_to_local.offset as u64, local);
            let at = fields.work_started.unwrap().offset as u64;
            arena.write_u64(comm + at, started);
            let at = fields.work_completed.unwrap().offset as u64;
            arena.write_u64(comm + at, completed);
            for channel in 0..channels {
                let at = comm + (layout.channels.offset + channel * layout.channel.size) as u64;
                self.build_channel(at, rank, channel, arity);
            }
            self.ranks.push(Rank {
                comm,
                abort,
                started,
                completed,
            });
        }
    }

    fn build_channel(&self, at: u64, rank: usize, channel: usize, arity: usize) {
        let (arena, layout, ranks) = (&self.arena, &self.layout, self.settings.ranks);
        let peers = arena.allocate(8 * ranks);
        for peer in (0..ranks).filter(|&peer| peer != rank) {
            let entry = arena.allocate(layout.peer.size);
            arena.write_u64(peers + 8 * peer as u64, entry);
            for index in 0..2 {
                let size = layout.connection.size;
                let send = self.wires[&(channel, rank, peer, index)].sender;
                let receive = self.wires[&(channel, peer, rank, index)].receiver;
                for (side, end) in [(layout.peer.send, send), (layout.peer.recv, receive)] {
                    let to = entry + (side.offset + index * size) as u64;
                    arena.write(to, &self.information(end));
                }
            }
        }
        let fields = &layout.channel;
        arena.write_u64(at + fields.peers.offset as u64, peers);
        let ring = &self.rings[channel];
        let index = ring.iter().position(|&other| other == rank).unwrap();
        let order = arena.allocate(4 * ranks);
        for position in 0..ranks {
            let other = ring[(index + position) % ranks];
            arena.write_u32(order + 4 * position as u64, other as u32);
        }
        let put = |field: super::super::asked::Field, value: i64| {
            arena.write_u32(at + field.offset as u64, value as u32);
        };
        put(fields.ring_prev, ring[(index + ranks - 1) % ranks] as i64);
        put(fields.ring_next, ring[(index + 1) % ranks] as i64);
        arena.write_u64(at + fields.ring_ranks.offset as u64, order);
        put(fields.ring_index, index as i64);
        // A tree over the ring's order, whose root has two children at most, the others `arity`.
        let children = |node: usize| match node {
            0 => 1..ranks.min(3),
            node => {
                let first = 3 + (node - 1) * arity;
                first.min(ranks)..(first + arity).min(ranks)
            }
        };
        let parent = (0..ranks).find(|&node| children(node).contains(&index));
        put(fields.tree_up, parent.map_or(-1, |node| ring[node] as i64));
        let down: Vec<usize> = children(index).collect();
        for child in 0..3 {
            let to = down.get(child).map_or(-1, |&node| ring[node] as i64);
            put(fields.tree_down.element(child, 4), to);
        }
    }

    /// What is in the connections' buffers.
    pub(super) fn buffers(&self) -> Vec<Vec<u8>> {
        let wires = self.wires.values();
        wires
            .flat_map(|wire| wire.sender.buffers.into_iter().zip(self.settings.buffers))
            .map(|(buffer, size)| self.arena.read(buffer, size))
            .collect()
    }

    /// The device's copy of one end.
    pub(super) fn end(
        &self,
        channel: usize,
        rank: usize,
        peer: usize,
        send: bool,
        index: usize,
    ) -> u64 {
        let (arena, layout) = (&self.arena, &self.layout);
        let at =
            self.ranks[rank].comm + (layout.channels.offset + channel * layout.channel.size) as u64;
        let peers = arena.read_u64(at + layout.channel.peers.offset as u64);
        let entry = arena.read_u64(peers + 8 * peer as u64);
        let side = if send {
            layout.peer.send
        } else {
            layout.peer.recv
        };
        entry + (side.offset + index * layout.connection.size) as u64
    }

    /// The row of a function, which is its id here.
    pub(super) fn id(&self, function: Function) -> u64 {
        let rows = self.interpreter.coverage();
        rows.iter()
            .position(|row| row.function == function)
            .unwrap() as u64
    }

    /// Parameters of a launch: for each channel a list of batches, each with a function, a type and works.
    pub(super) fn parameters(&self, rank: usize, channels: &[(usize, Vec<Batch>)]) -> Vec<u8> {
        let layout = &self.layout;
        let (arguments, batch) = (&layout.arguments, &layout.batch);
        let mut all: Vec<(usize, &Batch, usize)> = Vec::new();
        // The first batch of each block comes first.
        for (at, (_, batches)) in channels.iter().enumerate() {
            all.push((at, &batches[0], 0));
        }
        for (at, (_, batches)) in channels.iter().enumerate() {
            for (which, batch) in batches.iter().enumerate().skip(1) {
                all.push((at, batch, which));
            }
        }
        let mut bytes = vec![0; arguments.size + all.len() * batch.size];
        put(&mut bytes, 0, arguments.comm, self.ranks[rank].comm);
        let mask = channels
            .iter()
            .fold(0, |mask, (channel, _)| mask | 1 << channel);
        put(&mut bytes, 0, arguments.channel_mask, mask);
        for (position, &(block, entry, which)) in all.iter().enumerate() {
            let at = arguments.size + position * batch.size;
            let next = all
                .iter()
                .position(|&(other, _, later)| other == block && later == which + 1);
            let jump = next.map_or(0, |next| next - position) as u64;
            put(&mut bytes, at, batch.next_jump, jump);
            put(
                &mut bytes,
                at,
                batch.next_extends,
                u64::from(entry.extended),
            );
            put(&mut bytes, at, batch.work_type, entry.work_type as u64);
            put(&mut bytes, at, batch.function, entry.id);
            let base = bytes.len() as u64;
            if let Some(field) = batch.collective {
                put(&mut bytes, at, field, entry.collective);
            }
            put(&mut bytes, at, batch.offset_base, base);
            put(
                &mut bytes,
                at,
                batch.offset_bits,
                (1 << entry.works.len()) - 1,
            );
            for work in &entry.works {
                bytes.extend(work);
            }
        }
        bytes
    }

    pub(super) fn launch(&self, rank: usize, channels: &[(usize, Vec<Batch>)]) -> Running {
        let grid = [channels.len() as u32, 1, 1];
        let parameters = self.parameters(rank, channels);
        self.interpreter
            .launch(GENERIC, grid, [640, 1, 1], parameters, self.arena.clone())
            .unwrap()
    }

    /// Steps kernels in turn with small budgets until all are done.
    pub(super) fn run(&self, kernels: Vec<Running>) {
        self.run_beside(kernels, || false);
    }

    /// The same, beside something that says whether it did anything.
    pub(super) fn run_beside(&self, mut kernels: Vec<Running>, mut beside: impl FnMut() -> bool) {
        let mut done = vec![false; kernels.len()];
        while !done.iter().all(|&done| done) {
            let mut waiting = !beside();
            for (kernel, done) in kernels.iter_mut().zip(&mut done) {
                if *done {
                    continue;
                }
                match kernel.step(1 + self.below(20_000)) {
                    Ok(Progress::Done) => *done = true,
                    Ok(Progress::Moved) => {}
                    Ok(Progress::Waiting) => continue,
                    Err(failure) => panic!("{failure}"),
                }
                waiting = false;
            }
            if waiting {
                let all: Vec<_> = kernels.iter().map(Running::describe).collect();
                panic!("nothing moves: {all:#?}");
            }
        }
        self.arena.check_guards();
    }

    /// A batch of Send/Recv.
    pub(super) fn messages(&self, works: Vec<Vec<u8>>) -> Batch {
        let function = Function {
            collective: Collective::SendRecv,
            reduction: None,
            algorithm: Algorithm::Ring,
            protocol: Protocol::Simple,
        };
        Batch {
            id: self.id(function),
            work_type: self.layout.work_types.p2p,
            works,
            extended: false,
            collective: 0,
        }
    }

    /// A collective's work for every channel.
    pub(super) fn collective(
        &self,
        call: Call,
        input: u64,
        output: u64,
        change: impl Fn(&Layout, &mut Vec<u8>),
    ) -> Vec<(usize, Vec<Batch>)> {
        let (layout, channels) = (&self.layout, self.settings.channels);
        let element = call.reduction.map_or(1, |(_, ty)| ty.size() as usize);
        // As NCCL: most channels get the same, the first and the last another part.
        let share = call.count.div_ceil(channels).next_multiple_of(16 / element);
        let mut counts = vec![0usize; channels];
        let mut left = call.count;
        for count in &mut counts {
            *count = left.min(share);
            left -= *count;
        }
        let (low, high) = (0, channels - 1);
        let (count_low, count_high) = (counts[0], if high > 0 { counts[high] } else { 0 });
        let count_mid = if channels > 2 { counts[1] } else { 0 };
        // Where the middle is uneven, only the first channels work.
        let even = counts
            .get(1..high.max(1))
            .unwrap_or(&[])
            .iter()
            .all(|&count| count == count_mid);
        let (count_low, count_mid, count_high) = match even {
            true => (count_low, count_mid, count_high),
            false => (call.count, 0, 0),
        };
        let bytes = match call.protocol {
            Protocol::Ll => self.settings.buffers[0] / 8 / 2,
            Protocol::Ll128 => self.settings.buffers[1] / 8 / 2048 * 1920,
            Protocol::Simple => match (call.collective, call.algorithm) {
                (
                    Collective::AllReduce | Collective::AllGather | Collective::ReduceScatter,
                    Algorithm::Ring,
                ) => self.settings.buffers[2] / 2,
                _ => self.settings.buffers[2] / 8,
            },
        };
        let grains = (bytes / call.protocol.grain()) as u64;
        let mut work = vec![0; layout.coll.size];
        let fields = &layout.coll;
        for (field, value) in [
            (fields.channel_low, low as u64),
            (fields.channel_high, high as u64),
            (fields.profiled.unwrap(), u64::from(call.profiled)),
            (fields.root, call.root as u64),
            (fields.recv_buffer, output),
            (fields.send_buffer, input),
            (fields.count_low, count_low as u64),
            (fields.count_mid, count_mid as u64),
            (fields.count_high, count_high as u64),
            (fields.grains_low, grains),
            (fields.grains_mid, grains),
            (fields.grains_high, grains),
            (fields.argument, call.argument),
        ] {
            put(&mut work, 0, field, value);
        }
        change(layout, &mut work);
        let batch = Batch {
            id: self.id(Function {
                collective: call.collective,
                reduction: call.reduction,
                algorithm: call.algorithm,
                protocol: call.protocol,
            }),
            work_type: layout.work_types.coll,
            works: vec![work],
            extended: false,
            collective: 0,
        };
        (0..channels)
            .map(|channel| (channel, vec![batch.clone()]))
            .collect()
    }
}

/// Works of one function.
#[derive(Debug, Clone)]
pub(super) struct Batch {
    pub(super) id: u64,
    pub(super) work_type: i64,
    pub(super) works: Vec<Vec<u8>>,
    /// The next batch extends this one.
    pub(super) extended: bool,
    /// The collective's number, where batches have it.
    pub(super) collective: u64,
}

/// Stores a field's value in the bytes of its structure.
pub(super) fn put(bytes: &mut [u8], at: usize, field: super::super::asked::Field, value: u64) {
    let range = at + field.offset..at + field.offset + field.size;
    let mut word = [0; 8];
    word[..field.size].copy_from_slice(&bytes[range.clone()]);
    let old = u64::from_le_bytes(word);
    let new = match field.bits {
        None => value,
        Some((first, count)) => {
            let mask = (u64::MAX >> (64 - count)) << first;
            assert!(value <= u64::MAX >> (64 - count));
            old & !mask | value << first
        }
    };
    bytes[range].copy_from_slice(&new.to_le_bytes()[..field.size]);
}
