//! Two levels for parts of any length.
//!
//! As in `two_level`, blocks are collected inside a node and go to each other node together. The lengths of the blocks that a
//! rank collects are known only to its neighbours, so they are exchanged before the schedule is made ([`Within`]). Blocks are
//! sent one by one. Blocks from another node go straight to the receive buffer if their parts are contiguous there; otherwise
//! they go to the scratch memory, and are copied from there.

use super::{
    BufferLocation, Exchange, Message, Move, Part, Payload, Region, Schedule, ScheduleStep,
};

const SPACING: usize = 256;

/// The counts of each rank of this node for the ranks of this rank's rail.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Within {
    pub(crate) ranks_per_node: usize,
    /// Elements by payload, then by neighbour, then by node.
    pub(crate) counts: Vec<Vec<Vec<usize>>>,
}

/// Makes the schedule; see the module.
pub(crate) fn two_level_of_parts(exchange: Exchange<'_>, within: &Within) -> Schedule {
    let (mut inside, mut rail, mut last) = (
        ScheduleStep::default(),
        ScheduleStep::default(),
        ScheduleStep::default(),
    );
    let mut scratch = 0;
    for ((number, payload), counts) in exchange.payloads().zip(&within.counts) {
        let levels = PartLevels {
            exchange,
            number,
            payload,
            counts,
            local: within.ranks_per_node,
        };
        scratch = levels.inside(&mut inside, &mut rail, scratch);
        scratch = levels.arrive(&mut rail, &mut last, scratch);
    }
    Schedule::of(vec![inside, rail, last], scratch)
}

struct PartLevels<'p> {
    exchange: Exchange<'p>,
    number: usize,
    payload: &'p Payload,
    /// By neighbour, then by node.
    counts: &'p [Vec<usize>],
    /// The number of ranks on a node.
    local: usize,
}

impl PartLevels<'_> {
    fn node(&self) -> usize {
        self.exchange.rank / self.local
    }

    fn nodes(&self) -> std::ops::Range<usize> {
        0..self.exchange.ranks / self.local
    }

    /// Returns the rank of this rail on a node.
    fn on_rail(&self, node: usize) -> usize {
        node * self.local + self.exchange.rank % self.local
    }

    fn recv(&self, offset: usize) -> BufferLocation {
        BufferLocation {
            region: Region::Recv(self.number),
            offset: offset * self.payload.size,
        }
    }

    fn message(&self, sends: bool, at: BufferLocation, count: usize, peer: usize) -> Message {
        Message {
            sends,
            at,
            count,
            payload: self.number,
            peer,
        }
    }

    /// Adds one message for each block inside the node, and one to each other node with the collected blocks. Uses the scratch
    /// from `scratch` on; returns where it is free afterwards.
    fn inside(
        &self,
        inside: &mut ScheduleStep,
        rail: &mut ScheduleStep,
        mut scratch: usize,
    ) -> usize {
        let neighbours = 0..self.local;
        for neighbour in neighbours.clone() {
            for node in self.nodes() {
                let part = self.payload.send[node * self.local + neighbour];
                let at = BufferLocation {
                    region: Region::Send(self.number),
                    offset: part.offset * self.payload.size,
                };
                let peer = self.node() * self.local + neighbour;
                inside.message(self.message(true, at, part.count, peer));
            }
        }
        for node in self.nodes() {
            let begin = scratch;
            for neighbour in neighbours.clone() {
                let peer = self.node() * self.local + neighbour;
                let (at, count) = if node == self.node() {
                    let part = self.payload.recv[peer];
                    (self.recv(part.offset), part.count)
                } else {
                    let at = BufferLocation {
                        region: Region::Scratch,
                        offset: scratch,
                    };
                    let count = self.counts[neighbour][node];
                    scratch += count * self.payload.size;
                    (at, count)
                };
                inside.message(self.message(false, at, count, peer));
            }
            let at = BufferLocation {
                region: Region::Scratch,
                offset: begin,
            };
            let count = (scratch - begin) / self.payload.size;
            rail.message(self.message(true, at, count, self.on_rail(node)));
        }
        // The next payload is aligned for any type.
        scratch.next_multiple_of(SPACING)
    }

    /// Adds the messages with the blocks that the other nodes collected for this rank.
    fn arrive(
        &self,
        rail: &mut ScheduleStep,
        last: &mut ScheduleStep,
        mut scratch: usize,
    ) -> usize {
        for node in self.nodes().filter(|node| *node != self.node()) {
            let parts = &self.payload.recv[node * self.local..][..self.local];
            let count = parts.iter().map(|part| part.count).sum();
            let at = match together(parts) {
                Some(offset) => self.recv(offset),
                None => {
                    let begin = scratch;
                    for part in parts.iter().filter(|part| part.count > 0) {
                        let bytes = part.count * self.payload.size;
                        last.moves.push(Move {
                            to: self.recv(part.offset),
                            from: BufferLocation {
                                region: Region::Scratch,
                                offset: scratch,
                            },
                            width: bytes,
                            rows: 1,
                            to_pitch: bytes,
                            from_pitch: bytes,
                        });
                        scratch += bytes;
                    }
                    BufferLocation {
                        region: Region::Scratch,
                        offset: begin,
                    }
                }
            };
            rail.message(self.message(false, at, count, self.on_rail(node)));
        }
        scratch.next_multiple_of(SPACING)
    }
}

/// Returns the start of contiguous parts in their order; parts without elements may lie anywhere.
pub(crate) fn together(parts: &[Part]) -> Option<usize> {
    let mut parts = parts.iter().filter(|part| part.count > 0);
    let Some(first) = parts.next() else {
        return Some(0);
    };
    let mut end = first.offset + first.count;
    let follows = |part: &Part| {
        let follows = part.offset == end;
        end += part.count;
        follows
    };
    parts.all(follows).then_some(first.offset)
}
