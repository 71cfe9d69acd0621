//! The inputs and the data structures of a schedule.

use nccl_base::data_type::DataType;

/// The inputs: the rank, and its parts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Exchange<'p> {
    pub(crate) rank: usize,
    pub(crate) ranks: usize,
    /// At least one.
    pub(crate) payloads: &'p [Payload],
}

/// One kind of data that is exchanged: tokens, or their scales, for instance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Payload {
    pub(crate) data_type: DataType,
    /// Bytes of an element.
    pub(crate) size: usize,
    /// By peer.
    pub(crate) send: Vec<Part>,
    pub(crate) recv: Vec<Part>,
    /// Elements for each peer, if all parts are equally long and contiguous.
    pub(crate) uniform: Option<usize>,
}

/// The part for a peer or from a peer, in elements of the buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    pub(crate) offset: usize,
    pub(crate) count: usize,
}

/// A buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Region {
    /// The send buffer of this payload.
    Send(usize),
    /// The receive buffer of this payload.
    Recv(usize),
    /// The plan's own memory.
    Scratch,
}

/// A place in a buffer, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BufferLocation {
    pub(crate) region: Region,
    pub(crate) offset: usize,
}

/// A message of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Message {
    pub(crate) sends: bool,
    pub(crate) at: BufferLocation,
    /// In elements of this payload's type.
    pub(crate) count: usize,
    pub(crate) payload: usize,
    pub(crate) peer: usize,
}

/// A copy of rows of bytes on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Move {
    pub(crate) to: BufferLocation,
    pub(crate) from: BufferLocation,
    pub(crate) width: usize,
    pub(crate) rows: usize,
    pub(crate) to_pitch: usize,
    pub(crate) from_pitch: usize,
}

/// A step: first the moves, then everything else in one group, the messages and the uses of `ncclAlltoAll`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ScheduleStep {
    pub(crate) moves: Vec<Move>,
    pub(crate) messages: Vec<Message>,
    /// Uses of `ncclAlltoAll`: the payload, and its number of elements for each peer.
    pub(crate) native: Vec<(usize, usize)>,
}

/// The steps of one rank.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Schedule {
    pub(crate) steps: Vec<ScheduleStep>,
    /// Bytes of memory that it needs besides the buffers.
    pub(crate) scratch: usize,
}

impl Exchange<'_> {
    /// Returns the payloads with their numbers.
    pub(super) fn payloads(&self) -> impl Iterator<Item = (usize, &Payload)> {
        self.payloads.iter().enumerate()
    }
}

impl Payload {
    /// Returns a payload with one block of `count` elements for each of `ranks` peers.
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

    /// Returns how many elements its send buffer must have.
    pub(crate) fn send_len(&self) -> usize {
        end_of(&self.send)
    }

    /// Returns how many elements its receive buffer must have.
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

impl ScheduleStep {
    /// Adds a message, unless it has no elements.
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
    pub(super) fn of(steps: Vec<ScheduleStep>, scratch: usize) -> Self {
        let mut steps = steps;
        // A rank without work in a step leaves the step out: NCCL pairs messages, not steps.
        steps.retain(|step| !step.is_empty());
        Self { steps, scratch }
    }

    /// Returns the number of groups that NCCL executes.
    pub(crate) fn launches(&self) -> usize {
        let groups = self.steps.iter();
        groups
            .filter(|step| !step.messages.is_empty() || !step.native.is_empty())
            .count()
    }

    /// Returns the number of copies on the device.
    pub(crate) fn moves(&self) -> usize {
        self.steps.iter().map(|step| step.moves.len()).sum()
    }
}
