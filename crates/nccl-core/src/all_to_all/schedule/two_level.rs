//! Blocks are collected inside of a node, and go to each other node together.
//!
//! Rank `l` of each node is on rail `l`. First every rank gives its neighbour on rail `l` what it has for the ranks of
//! that rail, on all nodes; then each sends one message to every other rank of its own rail: the blocks of its whole
//! node. From `n` messages over the network it becomes as many as there are nodes, each as long as a node has ranks.
//!
//! ```text
//! rank (a, l)    x[(b, k)]  for each node b, neighbour k
//!   inside       to (a, k): x[(b, k)] of all b      from (a, k): what (a, k) has for (b, l)  ->  stage[b][k]
//!   rail         to (b, l): stage[b]                from (b, l): what all of b have for (a, l)  ->  y[b]
//! ```
//!
//! The blocks of a node lie one after another in both buffers, so `stage[b]` goes to `y[b]` as it is. Inside of the node
//! the blocks for one neighbour do not lie together: they are sent as one message each, or brought together first by a
//! copy of rows, and taken apart by another on the other side. Which is faster depends on how many nodes there are.

use super::{Exchange, Message, Move, Payload, Place, Region, Schedule, Step};

/// How it is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TwoLevel {
    /// Of every node; the ranks of a node follow each other.
    pub(crate) ranks_per_node: usize,
    /// Whether blocks for one neighbour are brought together.
    pub(crate) packed: bool,
}

/// Of payloads that are all uniform.
pub(crate) fn two_level(exchange: Exchange<'_>, how: TwoLevel) -> Schedule {
    let (mut inside, mut rail) = (Step::default(), Step::default());
    let mut last = Step::default();
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
        // Each begins where any type may lie.
        let buffers = if how.packed { 2 } else { 1 };
        scratch += (buffers * all).next_multiple_of(SPACING);
        if how.packed {
            levels.own_node(&mut last);
        }
    }
    // What is taken apart is complete before the messages of the step that follows.
    rail.moves.extend(std::mem::take(&mut last.moves));
    Schedule::of(vec![inside, rail], scratch)
}

const SPACING: usize = 256;

struct Levels<'p> {
    exchange: Exchange<'p>,
    number: usize,
    payload: &'p Payload,
    count: usize,
    /// Ranks of a node.
    local: usize,
    /// Where this payload's part of the scratch begins.
    stage: usize,
}

impl Levels<'_> {
    fn nodes(&self) -> usize {
        self.exchange.ranks / self.local
    }

    fn node(&self) -> usize {
        self.exchange.rank / self.local
    }

    /// This rank on its node, and its rail.
    fn place(&self) -> usize {
        self.exchange.rank % self.local
    }

    /// Bytes of a block.
    fn block(&self) -> usize {
        self.count * self.payload.size
    }

    fn send(&self, block: usize) -> Place {
        Place {
            region: Region::Send(self.number),
            offset: block * self.block(),
        }
    }

    fn recv(&self, block: usize) -> Place {
        Place {
            region: Region::Recv(self.number),
            offset: block * self.block(),
        }
    }

    /// Block `block` of the stage.
    fn staged(&self, block: usize) -> Place {
        Place {
            region: Region::Scratch,
            offset: self.stage + block * self.block(),
        }
    }

    /// What came from a neighbour, before it is taken apart.
    fn arrived(&self, block: usize) -> Place {
        self.staged(self.exchange.ranks + block)
    }

    fn message(&self, sends: bool, at: Place, blocks: usize, peer: usize) -> Message {
        Message {
            sends,
            at,
            count: blocks * self.count,
            payload: self.number,
            peer,
        }
    }

    /// One message for each block; what is for this node arrives where it stays.
    fn inside(&self, step: &mut Step) {
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

    /// One message for each neighbour, of rows that were brought together; those that come are taken apart before the
    /// next step.
    fn inside_packed(&self, step: &mut Step, next: &mut Step) {
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
            // What was packed has gone by then.
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

    /// Of what was taken apart, the blocks of this node are where they belong.
    fn own_node(&self, step: &mut Step) {
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

    /// The blocks of a whole node to each other rank of the rail.
    fn rail(&self, step: &mut Step) {
        for other in (0..self.nodes()).filter(|other| *other != self.node()) {
            let (first, peer) = (other * self.local, other * self.local + self.place());
            step.message(self.message(true, self.staged(first), self.local, peer));
            step.message(self.message(false, self.recv(first), self.local, peer));
        }
    }
}
