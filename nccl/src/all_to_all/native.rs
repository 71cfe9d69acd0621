//! All-to-all by NCCL's own call.

use super::Blocks;
use crate::communicator::Calls;
use crate::error::NcclFailure;
use crate::ffi::{self, Progress};

pub(super) fn call(blocks: &Blocks, calls: &Calls<'_>) -> Result<Progress, NcclFailure> {
    const CALL: &str = "ncclAlltoAll";
    if blocks.count == 0 {
        return Ok(Progress::Done);
    }
    let Some(all_to_all) = calls.library.api().ncclAlltoAll else {
        return Err(ffi::missing(calls.library, CALL));
    };
    // SAFETY: both addresses are valid for a block per rank until the work is done on the stream,
    // which the order of streams sees to; communicator and stream are alive.
    let code = unsafe {
        all_to_all(
            blocks.pair.send,
            blocks.pair.recv,
            blocks.count,
            blocks.data_type.raw(),
            calls.comm,
            calls.stream,
        )
    };
    ffi::check(calls.library, CALL, code)
}
