//! Queues an operation from a schedule and the addresses of its buffers.

use nccl_sys as sys;

use super::schedule::{BufferLocation, Exchange, Payload, Region, Schedule};
use crate::communicator::Communicator;
use crate::error::{Error, ErrorKind, Result};
use crate::issuing::{DeviceCopy, IssueBuffers};
use crate::op::Function;
use crate::queued_op::{CollectiveArgs, Extra, QueuedOp};
use nccl_base::data_type::DataType;

/// The start addresses of the buffers of a schedule.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bases<'b> {
    /// By payload.
    pub(super) send: &'b [u64],
    pub(super) recv: &'b [u64],
    /// Ignored if the schedule needs no scratch.
    pub(super) scratch: u64,
}

impl Bases<'_> {
    fn address(&self, place: BufferLocation) -> u64 {
        let base = match place.region {
            Region::Send(payload) => self.send[payload],
            Region::Recv(payload) => self.recv[payload],
            Region::Scratch => self.scratch,
        };
        base + place.offset as u64
    }
}

/// Queues all steps of `schedule`, which was made for this rank and these payloads; `buffers` holds the buffers.
pub(super) fn enqueue(
    schedule: &Schedule,
    payloads: &[Payload],
    bases: Bases<'_>,
    comm: &Communicator,
    buffers: &mut IssueBuffers<'_>,
) -> Result<()> {
    let own = comm.rank();
    let whole = match &schedule.steps[..] {
        // One group, as in most operations.
        [only] if only.moves.is_empty() => true,
        _ => false,
    };
    for step in &schedule.steps {
        for one in &step.moves {
            buffers.copy(DeviceCopy {
                to: bases.address(one.to),
                from: bases.address(one.from),
                width: one.width,
                rows: one.rows,
                to_pitch: one.to_pitch,
                from_pitch: one.from_pitch,
            });
        }
        for message in &step.messages {
            let function = match message.sends {
                true => Function::Send,
                false => Function::Recv,
            };
            let data_type = payloads[message.payload].data_type;
            // Fits: the number of ranks was checked when the communicator was made.
            let peer = message.peer as i32;
            let address = bases.address(message.at);
            let queued = QueuedOp::new(function, address, message.count, data_type, peer);
            buffers.push_message(queued, message.peer == own);
        }
        for &(payload, count) in &step.native {
            let (send, recv) = (bases.send[payload], bases.recv[payload]);
            let data_type = payloads[payload].data_type;
            let args = CollectiveArgs {
                recv,
                reduction_op: sys::ncclRedOp_t::ncclSum,
                extra: Extra::of(comm),
            };
            buffers.check_launch_event(&args)?;
            let queued = QueuedOp::new(Function::AllToAll, send, count, data_type, 0);
            buffers.push_collective(queued, args, own);
        }
        buffers.grouped |= !step.messages.is_empty();
        if !whole {
            buffers.next_step();
        }
    }
    Ok(())
}

/// Returns this rank's exchange of `payloads`.
pub(super) fn exchange_of<'p>(comm: &Communicator, payloads: &'p [Payload]) -> Exchange<'p> {
    Exchange {
        rank: comm.rank(),
        ranks: comm.world_size(),
        payloads,
    }
}

/// Returns the host of each rank, if a world knows them.
pub(super) fn hosts(comm: &Communicator) -> Option<Vec<String>> {
    let supervisor = comm.inner.supervisor.as_ref()?;
    supervisor.peers().hosts(supervisor.members())
}

/// Returns the size of an element, if the loaded NCCL supports the type.
pub(super) fn element_size(comm: &Communicator, data_type: DataType) -> Result<usize> {
    comm.library().admit(data_type)?;
    data_type
        .size_in_bytes()
        .ok_or_else(|| Error::new(ErrorKind::UnknownDataType(data_type)))
}

/// Returns the error for a buffer of the wrong length.
#[cold]
pub(super) fn length(
    buffer: &'static str,
    given: usize,
    needed: usize,
    rule: &'static str,
) -> Error {
    Error::new(ErrorKind::Length {
        buffer,
        given,
        needed,
        rule,
    })
}

/// Returns how many elements of `given` belong to each rank; `given` has to be a multiple of the number of ranks.
pub(super) fn per_rank(buffer: &'static str, given: usize, ranks: usize) -> Result<usize> {
    match given.is_multiple_of(ranks) {
        true => Ok(given / ranks),
        false => Err(length(
            buffer,
            given,
            given.next_multiple_of(ranks),
            "a multiple of the number of ranks",
        )),
    }
}
