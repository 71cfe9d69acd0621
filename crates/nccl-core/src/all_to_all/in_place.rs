//! All-to-all with one buffer.

use super::record::{Bases, element_size, enqueue, exchange_of, length, per_rank};
use super::schedule::{Payload, beside, in_place};
use crate::active_calls::CallKind;
use crate::buffer::ErasedMut;
use crate::communicator::Communicator;
use crate::error::Result;
use crate::issuing::{IssueBuffers, failed_check, issue};
use crate::operation::{OperationKind, Shape};
use crate::request::Request;

/// Sends block `j` of `y` to rank `j`, and receives the block of rank `j` in its place.
pub(super) fn exchange<'a>(
    comm: &'a Communicator,
    y: ErasedMut<'a>,
    scratch: ErasedMut<'a>,
) -> Result<Request> {
    const KIND: OperationKind = OperationKind::AllToAll;
    let mut shape = Shape {
        data_type: Some(y.data_type()),
        ..Shape::default()
    };
    let buffers = record_in_place(comm, y, scratch, &mut shape);
    let buffers = buffers.map_err(|error| failed_check(comm, KIND, shape, error))?;
    issue(comm, &buffers, KIND, shape)
}

fn record_in_place<'a>(
    comm: &'a Communicator,
    y: ErasedMut<'a>,
    scratch: ErasedMut<'a>,
    shape: &mut Shape,
) -> Result<IssueBuffers<'a>> {
    let _inside = comm.inner.enter(CallKind::Issue, comm.timeout);
    let mut buffers = IssueBuffers::new(&comm.stream)?;
    let (data_type, ranks) = (y.data_type(), comm.world_size());
    let size = element_size(comm, data_type)?;
    let count = per_rank("the buffer", y.len(), ranks)?;
    shape.count = Some(count);
    let room = (scratch.range().end - scratch.range().start) as usize;
    let payloads = [Payload::uniform(data_type, size, ranks, count)];
    let block = beside([count * size].into_iter());
    // No scratch is needed for empty blocks, or for a single rank.
    let width = match block {
        _ if ranks == 1 => 1,
        0 => ranks,
        block if room < block => {
            return Err(length(
                "the scratch, in bytes,",
                room,
                block,
                "at least one block, from a multiple of 16 bytes on",
            ));
        }
        block => (room / block).min(ranks),
    };
    let schedule = in_place(exchange_of(comm, &payloads), width);
    let (recv, scratch) = (buffers.write(y)?, buffers.write(scratch)?);
    let bases = Bases {
        send: &[],
        recv: &[recv],
        scratch,
    };
    enqueue(&schedule, &payloads, bases, comm, &mut buffers)?;
    Ok(buffers)
}
