//! Two levels: blocks are collected inside a node, and go to each other node together.
//!
//! Rank `l` of each node is on rail `l`. First, every rank sends its neighbour on rail `l` the blocks for the ranks of
//! that rail, on all nodes. Then each rank sends one message to every other rank of its own rail, with the blocks of its
//! whole node. So the `n` messages over the network become one per node, each with as many blocks as a node has ranks.
//!
//! ```text
//! rank (a, l)    x[(b, k)]  for each node b, neighbour k
//!   inside       to (a, k): x[(b, k)] of all b      from (a, k): what (a, k) has for (b, l)  ->  stage[b][k]
//!   rail         to (b, l): stage[b]                from (b, l): what all of b have for (a, l)  ->  y[b]
//! ```
//!
//! The blocks of a node are contiguous in both buffers, so `stage[b]` goes to `y[b]` as it is. Inside the node
//! the blocks for one neighbour are not contiguous: they are sent as one message each, or packed first by a
//! copy of rows, and unpacked by another on the other side. Which is faster depends on the number of nodes.

use super::{BufferLocation, Exchange, Message, Move, Payload, Region, Schedule, ScheduleStep};

/// The settings of the schedule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TwoLevel {
    /// The same on every node; the ranks of a node are consecutive.
    pub(crate) ranks_per_node: usize,
    /// Whether blocks for one neighbour are packed.
    pub(crate) packed: bool,
}

/// Makes the schedule for uniform payloads.
pub(crate) fn two_level(exchange: Exchange<'_>, how: TwoLevel) -> Schedule {
    let (mut inside, mut rail) = (ScheduleStep::default(), ScheduleStep::default());
    let mut last = ScheduleStep::default();
    let mut scratch = 0;
    for (number, payload) in exchange.payloads() {
        let Some(count) = payload.uniform.filter(|count| *count > 0) else {
            continue;
        };
        let levels = Levels {
            exchange,
            number,
            payload,
            count,
            local: how.ranks_per_node,
            stage: scratch,
        };
        match how.packed {
            false => levels.inside(&mut inside),
            true => levels.inside_packed(&mut inside, &mut rail),
        }
        levels.rail(&mut rail);
        let all = exchange.ranks * count * payload.size;
        // Each buffer is aligned for any type.
        let buffers = if how.packed { 2 } else { 1 };
        scratch += (buffers * all).next_multiple_of(SPACING);
        if how.packed {
            levels.own_node(&mut last);
        }
    }
    // Unpacking completes before the messages of the following step.
    rail.moves.extend(std::mem::take(&mut last.moves));
    Schedule::of(vec![inside, rail], scratch)
}

const SPACING: usize = 256;

struct Levels<'p> {
    exchange: Exchange<'p>,
    number: usize,
    payload: &'p Payload,
    count: usize,
    /// The number of ranks on a node.
    local: usize,
    /// The start of this payload's part of the scratch.
    stage: usize,
}

impl Levels<'_> {
    fn nodes(&self) -> usize {
        self.exchange.ranks / self.local
    }

    fn node(&self) -> usize {
        self.exchange.rank / self.local
    }

    /// Returns the rank's index on its node, which is its rail.
    fn place(&self) -> usize {
        self.exchange.rank % self.local
    }

    /// Returns the bytes of a block.
    fn block(&self) -> usize {
        self.count * self.payload.size
    }

    fn send(&self, block: usize) -> BufferLocation {
        BufferLocation {
            region: Region::Send(self.number),
            offset: block * self.block(),
        }
    }

    fn recv(&self, block: usize) -> BufferLocation {
        BufferLocation {
            region: Region::Recv(self.number),
            offset: block * self.block(),
        }
    }

    /// Returns the place of a block in the stage.
    fn staged(&self, block: usize) -> BufferLocation {
        BufferLocation {
            region: Region::Scratch,
            offset: self.stage + block * self.block(),
        }
    }

    /// Returns the place of a block from a neighbour, before it is unpacked.
    fn arrived(&self, block: usize) -> BufferLocation {
        self.staged(self.exchange.ranks + block)
    }

    fn message(&self, sends: bool, at: BufferLocation, blocks: usize, peer: usize) -> Message {
        Message {
            sends,
            at,
            count: blocks * self.count,
            payload: self.number,
            peer,
        }
    }

    /// Adds one message for each block; blocks for this node arrive directly in their final place.
    fn inside(&self, step: &mut ScheduleStep) {
        let (node, place, local) = (self.node(), self.place(), self.local);
        for neighbour in 0..local {
            let peer = node * local + neighbour;
            for other in 0..self.nodes() {
                let to = self.send(other * local + neighbour);
                step.message(self.message(true, to, 1, peer));
                let block = other * local + neighbour;
                let from = match other == node {
                    true => self.recv(block),
                    false => self.staged(block),
                };
                step.message(self.message(false, from, 1, peer));
            }
        }
        debug_assert!(place < local);
    }

    /// Adds one message of packed rows for each neighbour; received rows are unpacked before the
    /// next step.
    fn inside_packed(&self, step: &mut ScheduleStep, next: &mut ScheduleStep) {
        let (local, nodes, block) = (self.local, self.nodes(), self.block());
        for neighbour in 0..local {
            let peer = self.node() * local + neighbour;
            let packed = self.staged(neighbour * nodes);
            step.moves.push(Move {
                to: packed,
                from: self.send(neighbour),
                width: block,
                rows: nodes,
                to_pitch: block,
                from_pitch: local * block,
            });
            step.message(self.message(true, packed, nodes, peer));
            let arrived = self.arrived(neighbour * nodes);
            step.message(self.message(false, arrived, nodes, peer));
            // By then the packed blocks, which this overwrites, have been sent.
            next.moves.push(Move {
                to: self.staged(neighbour),
                from: arrived,
                width: block,
                rows: nodes,
                to_pitch: local * block,
                from_pitch: block,
            });
        }
    }

    /// Copies the unpacked blocks of this node to their place.
    fn own_node(&self, step: &mut ScheduleStep) {
        let first = self.node() * self.local;
        let bytes = self.local * self.block();
        step.moves.push(Move {
            to: self.recv(first),
            from: self.staged(first),
            width: bytes,
            rows: 1,
            to_pitch: bytes,
            from_pitch: bytes,
        });
    }

    /// Adds the messages with the blocks of a whole node to each other rank of the rail.
    fn rail(&self, step: &mut ScheduleStep) {
        for other in (0..self.nodes()).filter(|other| *other != self.node()) {
            let (first, peer) = (other * self.local, other * self.local + self.place());
            step.message(self.message(true, self.staged(first), self.local, peer));
            step.message(self.message(false, self.recv(first), self.local, peer));
        }
    }
}
