//! What a schedule is made from, and of.

use nccl_base::data_type::DataType;

/// Who asks, and how much goes where.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Exchange<'p> {
    pub(crate) rank: usize,
    pub(crate) ranks: usize,
    /// At least one.
    pub(crate) payloads: &'p [Payload],
}

/// One kind of data that is exchanged: tokens, or their scales.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Payload {
    pub(crate) data_type: DataType,
    /// Bytes of an element.
    pub(crate) size: usize,
    /// By peer.
    pub(crate) send: Vec<Part>,
    pub(crate) recv: Vec<Part>,
    /// Where all parts are equally long and lie one after another: elements for each peer.
    pub(crate) uniform: Option<usize>,
}

/// What goes to a peer or comes from it, in elements of the buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    pub(crate) offset: usize,
    pub(crate) count: usize,
}

/// Which buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Region {
    /// The one of this payload that is read.
    Send(usize),
    /// The one of this payload that is written.
    Recv(usize),
    /// Memory of the plan's own, in bytes.
    Scratch,
}

/// A place in a buffer, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) region: Region,
    pub(crate) offset: usize,
}

/// A message of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Message {
    pub(crate) sends: bool,
    pub(crate) at: Place,
    /// Elements of this payload's type.
    pub(crate) count: usize,
    pub(crate) payload: usize,
    pub(crate) peer: usize,
}

/// Rows of bytes that are moved on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Move {
    pub(crate) to: Place,
    pub(crate) from: Place,
    pub(crate) width: usize,
    pub(crate) rows: usize,
    pub(crate) to_pitch: usize,
    pub(crate) from_pitch: usize,
}

/// First the moves, then everything else in one group.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Step {
    pub(crate) moves: Vec<Move>,
    pub(crate) messages: Vec<Message>,
    /// For each of these payloads, so many elements for each peer, by NCCL's own call.
    pub(crate) native: Vec<(usize, usize)>,
}

/// What one rank does.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Schedule {
    pub(crate) steps: Vec<Step>,
    /// Bytes of memory that it needs besides the buffers.
    pub(crate) scratch: usize,
}

impl Exchange<'_> {
    /// The payloads with their numbers.
    pub(super) fn payloads(&self) -> impl Iterator<Item = (usize, &Payload)> {
        self.payloads.iter().enumerate()
    }
}

impl Payload {
    /// One block of `count` elements for each of `ranks` peers.
    pub(crate) fn uniform(data_type: DataType, size: usize, ranks: usize, count: usize) -> Self {
        let blocks = (0..ranks).map(|peer| Part {
            offset: peer * count,
            count,
        });
        let blocks: Vec<_> = blocks.collect();
        Self {
            data_type,
            size,
            send: blocks.clone(),
            recv: blocks,
            uniform: Some(count),
        }
    }

    /// The elements that its send buffer has at least.
    pub(crate) fn send_len(&self) -> usize {
        end_of(&self.send)
    }

    /// The elements that its receive buffer has at least.
    pub(crate) fn recv_len(&self) -> usize {
        end_of(&self.recv)
    }
}

fn end_of(parts: &[Part]) -> usize {
    let ends = parts.iter().filter(|part| part.count > 0);
    ends.map(|part| part.offset + part.count)
        .max()
        .unwrap_or_default()
}

impl Step {
    /// Messages without elements are neither sent nor received.
    pub(super) fn message(&mut self, message: Message) {
        if message.count > 0 {
            self.messages.push(message);
        }
    }

    fn is_empty(&self) -> bool {
        self.moves.is_empty() && self.messages.is_empty() && self.native.is_empty()
    }
}

impl Schedule {
    pub(super) fn of(steps: Vec<Step>, scratch: usize) -> Self {
        let mut steps = steps;
        // A rank without a part in a step leaves it out: NCCL pairs messages, not steps.
        steps.retain(|step| !step.is_empty());
        Self { steps, scratch }
    }

    /// The groups that NCCL is given.
    pub(crate) fn launches(&self) -> usize {
        let groups = self.steps.iter();
        groups
            .filter(|step| !step.messages.is_empty() || !step.native.is_empty())
            .count()
    }

    /// Moves of memory on the device.
    pub(crate) fn moves(&self) -> usize {
        self.steps.iter().map(|step| step.moves.len()).sum()
    }
}
