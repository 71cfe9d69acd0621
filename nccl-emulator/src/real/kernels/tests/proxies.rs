//! Connections over a network: proxies carry steps from the sender's buffers to the receiver's, told by the FIFO.

use super::super::functions::{Algorithm, Collective, DeviceOperator, Protocol};
use super::world::{Call, Settings, Side, Wire, World, put};
use crate::numbers::datatype::DataType;

/// `NCCL_DIRECT_NIC`.
const DIRECT_NIC: u32 = 4;

/// A proxy of one connection.
struct Proxy<'a> {
    world: &'a World,
    wire: Wire,
    protocol: Protocol,
    /// Steps that the kernel posts at once.
    slice: u64,
    step: u64,
    /// Steps that the sender may write: their slots are known to it.
    granted: u64,
    /// Where a registered message is read, and where it is written.
    registered: Option<(u64, u64)>,
}

impl<'a> Proxy<'a> {
    fn new(world: &'a World, wire: Wire, protocol: Protocol, slice: u64) -> Self {
        let proxy = Self {
            world,
            wire,
            protocol,
            slice,
            step: 0,
            granted: 0,
            registered: None,
        };
        let arena = &world.arena;
        arena.write_u64(wire.sender.head, 8u64.wrapping_neg());
        for side in [wire.sender, wire.receiver] {
            for step in 0..8 {
                arena.write_u64(proxy.size(side, step), u64::MAX);
                let mode = world.layout.fifo.mode.offset as u64;
                arena.write_u32(proxy.entry(side, step) + mode, 1);
                let known = side.fifo == wire.receiver.fifo;
                let offset = if known { proxy.offset(step) } else { u64::MAX };
                proxy.store_offset(side, step, offset);
            }
        }
        proxy
    }

    fn entry(&self, side: Side, step: u64) -> u64 {
        side.fifo + step % 8 * self.world.layout.fifo.size as u64
    }

    fn store_offset(&self, side: Side, step: u64, offset: u64) {
        let field = self.world.layout.fifo.offset;
        let bytes = &offset.to_le_bytes()[..field.size];
        let at = self.entry(side, step) + field.offset as u64;
        self.world.arena.write(at, bytes);
    }

    /// Tells the sender the slots of another slice. Returns whether there was room for it.
    fn grant(&mut self) -> bool {
        if self.granted >= self.step + 8 {
            return false;
        }
        let sender = self.wire.sender;
        self.store_offset(sender, self.granted, self.offset(self.granted));
        self.granted += self.slice;
        let head = self.granted.wrapping_sub(8);
        self.world.arena.write_u64(sender.head, head);
        true
    }

    fn size(&self, side: Side, step: u64) -> u64 {
        let fifo = &self.world.layout.fifo;
        self.entry(side, step) + fifo.bytes.offset as u64
    }

    /// Where protocol Simple has a step: slots in reverse order; slices of more steps need theirs together.
    fn offset(&self, step: u64) -> u64 {
        let slot = self.world.settings.buffers[2] as u64 / 8;
        (8 - self.slice - step % 8 / self.slice * self.slice) * slot
    }

    fn slot(&self, side: Side) -> u64 {
        let index = self.protocol.index();
        let slot = self.world.settings.buffers[index] as u64 / 8;
        let offset = match self.protocol {
            Protocol::Simple => self.offset(self.step % 8),
            _ => self.step % 8 * slot,
        };
        side.buffers[index] + offset
    }

    /// Carries at most one slice. Returns whether it did.
    fn carry(&mut self) -> bool {
        let granted = self.grant();
        let (arena, sender, receiver) = (&self.world.arena, self.wire.sender, self.wire.receiver);
        let size = arena.read_u64(self.size(sender, self.step)) as i64;
        let room = arena.read_u64(receiver.head) + 8 >= self.step + self.slice;
        if size < 0 || !room {
            return granted;
        }
        let ready = match self.protocol {
            Protocol::Ll => {
                let lines = arena.read(self.slot(sender), size as usize);
                let flag = (self.step as u32).wrapping_add(1).to_le_bytes();
                lines
                    .chunks(16)
                    .all(|line| line[4..8] == flag && line[12..] == flag)
            }
            _ => arena.read_u64(sender.tail) >= self.step + self.slice,
        };
        if !ready {
            return granted;
        }
        let (from, to) = match &mut self.registered {
            Some((from, to)) => {
                let places = (*from, *to);
                *from += size as u64;
                *to += size as u64;
                places
            }
            None => (self.slot(sender), self.slot(receiver)),
        };
        arena.write(to, &arena.read(from, size as usize));
        arena.write_u64(self.size(sender, self.step), u64::MAX);
        self.step += self.slice;
        arena.write_u64(receiver.tail, self.step);
        true
    }
}

fn proxies(world: &World, protocol: Protocol, slice: u64) -> Vec<Proxy<'_>> {
    let wires = world.wires.values();
    wires
        .map(|&wire| Proxy::new(world, wire, protocol, slice))
        .collect()
}

#[test]
fn an_all_reduce_goes_over_proxies_with_every_protocol() {
    for (protocol, slice) in [
        (Protocol::Ll, 1),
        (Protocol::Ll128, 1),
        (Protocol::Simple, 2),
    ] {
        let network = true;
        let ranks = 3;
        let settings = Settings {
            network,
            ..Settings::new(ranks)
        };
        let world = World::new(settings, 5);
        let mut proxies = proxies(&world, protocol, slice);
        for count in [1, 77, 4096, 30_011] {
            let call = Call {
                collective: Collective::AllReduce,
                reduction: Some((DeviceOperator::Sum, DataType::U8)),
                algorithm: Algorithm::Ring,
                protocol,
                count,
                root: 0,
                argument: 0,
                profiled: false,
            };
            let data: Vec<_> = (0..ranks).map(|_| world.random_bytes(count)).collect();
            let mut outputs = Vec::new();
            let mut kernels = Vec::new();
            for (rank, data) in data.iter().enumerate() {
                let (input, output) = (world.arena.allocate(count), world.arena.allocate(count));
                world.arena.write(input, data);
                outputs.push(output);
                kernels.push(world.launch(rank, &world.collective(call, input, output, |_, _| {})));
            }
            world.run_beside(kernels, || {
                let carried = proxies.iter_mut().map(Proxy::carry);
                carried.fold(false, |any, carried| any | carried)
            });
            let sum: Vec<u8> = (0..count)
                .map(|at| {
                    data.iter()
                        .fold(0u8, |sum, data| sum.wrapping_add(data[at]))
                })
                .collect();
            for output in outputs {
                assert!(world.arena.read(output, count) == sum, "{protocol:?}");
            }
        }
    }
}

/// One rank sends a registered message to another, and the network takes it out of the user's buffer.
#[test]
fn a_registered_message_is_left_to_the_network_and_its_buffer_kept_until_it_is_sent() {
    let settings = Settings {
        network: true,
        flags: DIRECT_NIC,
        ..Settings::new(2)
    };
    let world = World::new(settings, 6);
    let message = world.random_bytes(10_000);
    let (from, to) = (world.arena.allocate(10_000), world.arena.allocate(10_000));
    world.arena.write(from, &message);
    let mut proxy = Proxy::new(&world, world.wires[&(0, 0, 1, 1)], Protocol::Simple, 1);
    proxy.registered = Some((from, to));
    let work = |send: Option<u64>, receive: Option<u64>| {
        let fields = &world.layout.p2p;
        let mut work = vec![0; fields.size];
        let peer = u64::from(send.is_some());
        for (field, value) in [
            (fields.send_address, send.unwrap_or(0)),
            (fields.recv_address, receive.unwrap_or(0)),
            (fields.send_bytes, 10_000),
            (fields.recv_bytes, 10_000),
            (
                fields.send_rank,
                if send.is_some() {
                    1
                } else {
                    u64::from(u32::MAX)
                },
            ),
            (fields.recv_rank, peer),
            (fields.channels, 1),
            (fields.send_channels, send.is_some().into()),
            (fields.recv_channels, receive.is_some().into()),
            (fields.send_net_registered, 1),
            (fields.recv_net_registered, 1),
        ] {
            put(&mut work, 0, field, value);
        }
        work
    };
    let launch = |rank, work| world.launch(rank, &[(0, vec![world.messages(vec![work])])]);
    let mut sender = launch(0, work(Some(from), None));
    sender.step(1 << 20).unwrap();
    let waits = sender.describe();
    assert!(waits.contains("waits for room at rank 1"), "{waits}");
    assert!(proxy.grant());
    for _ in 0..10 {
        // The message is posted, but the buffer is still the network's.
        sender.step(1 << 20).unwrap();
    }
    assert!(
        sender.describe().contains("rank 1 to be done"),
        "{}",
        sender.describe()
    );
    assert!(proxy.carry());
    let receiver = launch(1, work(None, Some(to)));
    world.run(vec![sender, receiver]);
    assert!(world.arena.read(to, 10_000) == message);
}
