//! Whether ranks on one device can register windows of each other's memory, and run collectives on the copy engine.

use std::ptr::null_mut;
use std::time::Duration;

use nccl_sys::{NCCL_CTA_POLICY_ZERO, NCCL_WIN_COLL_SYMMETRIC, ncclDataType_t};

use super::{Setting, Sheet};
use crate::conformance::name_of;
use crate::nccl_call;
use crate::raw::operations::Stream;
use crate::raw::{Comm, Rank, Result, config, last_error};

/// Registers a window in NCCL's memory, then sends through it without multiprocessors.
///
/// # Errors
/// NCCL's and CUDA's.
pub fn windows(rank: &Rank, _: Setting, sheet: &mut Sheet) -> Result {
    let mut zero = config(true);
    zero.CTAPolicy = NCCL_CTA_POLICY_ZERO;
    let (comm, code) = Comm::init(rank, "zero", zero)?;
    sheet.add("a communicator with policy ZERO", name_of(code), "");
    if code != 0 {
        sheet.add("its error", last_error(), "");
        return Ok(());
    }
    let size = 4 << 20;
    let mut buffers = [null_mut(); 2];
    let mut has_windows = true;
    for (name, buffer) in ["send", "receive"].into_iter().zip(&mut buffers) {
        let code = nccl_call!(ncclMemAlloc(buffer, size));
        sheet.add(format!("ncclMemAlloc to {name}"), name_of(code), "");
        let mut window = null_mut();
        let code = nccl_call!(ncclCommWindowRegister(
            comm.0,
            *buffer,
            size,
            &mut window,
            NCCL_WIN_COLL_SYMMETRIC
        ));
        sheet.add(format!("window to {name}"), name_of(code), "");
        sheet.add(format!("window to {name} is there"), !window.is_null(), "");
        has_windows &= code == 0 && !window.is_null();
    }
    let stream = Stream::of(&rank.stream);
    let (count, kind) = (size / 2, ncclDataType_t::ncclInt8);
    let code = nccl_call!(ncclAlltoAll(
        buffers[0],
        buffers[1],
        count,
        kind,
        comm.0,
        stream.raw()
    ));
    let by = if has_windows {
        "with windows, so by the copy engine"
    } else {
        "without windows, so by kernels"
    };
    sheet.add(format!("all-to-all {by}"), name_of(code), "");
    let ends = rank.ends_within(Duration::from_secs(20));
    sheet.add("it ends", format!("{ends:?}"), "");
    Ok(())
}
