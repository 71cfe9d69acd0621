//! All-to-all as one group of messages.
//!
//! The order of the messages does not matter: NCCL serves the peers of a group in an order of its own.

use super::Blocks;
use crate::communicator::Calls;
use crate::error::NcclFailure;
use crate::ffi::{self, Progress};
use crate::point_to_point::grouped;

pub(super) fn call(
    blocks: &Blocks,
    ranks: usize,
    calls: &Calls<'_>,
) -> Result<Progress, NcclFailure> {
    if blocks.count == 0 {
        return Ok(Progress::Done);
    }
    let data_type = blocks.data_type;
    let size = blocks.count * data_type.size_in_bytes().unwrap_or_default();
    grouped(calls.library, |functions| {
        for peer in 0..ranks {
            // Fits: the number of ranks was checked when the communicator was made.
            let rank = peer as i32;
            let from = blocks.pair.send.wrapping_byte_add(peer * size);
            // SAFETY: both buffers hold a block per rank, valid until the work is done on the stream,
            // which the order of streams sees to; communicator and stream are alive.
            let code = unsafe {
                (functions.send)(
                    from,
                    blocks.count,
                    data_type.raw(),
                    rank,
                    calls.comm,
                    calls.stream,
                )
            };
            ffi::check(calls.library, "ncclSend", code)?;
            let to = blocks.pair.recv.wrapping_byte_add(peer * size);
            // SAFETY: as above, and nothing else reads or writes the receive buffer meanwhile.
            let code = unsafe {
                (functions.recv)(
                    to,
                    blocks.count,
                    data_type.raw(),
                    rank,
                    calls.comm,
                    calls.stream,
                )
            };
            ffi::check(calls.library, "ncclRecv", code)?;
        }
        Ok(())
    })
}
