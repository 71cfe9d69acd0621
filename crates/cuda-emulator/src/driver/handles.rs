//! What callers name: streams and nodes by their handles, and memory by its address; and what they are told when there
//! is no such thing.

use std::ffi::c_void;
use std::sync::Arc;

use super::context::{self, Context};
use crate::exec::{self, Graph, NODES, Stream};
use crate::result::CUresult;
use crate::violations::{self, Violation, ViolationKind};

/// The stream of a handle, in the current context if it is an implicit one.
pub(super) fn stream_of(handle: *mut c_void) -> Result<Arc<Stream>, CUresult> {
    if handle.addr() > 2 {
        match exec::named(handle) {
            Some(stream) => Ok(stream),
            None => Err(bad_handle("stream", handle)),
        }
    } else {
        exec::lookup(handle, &context::current()?)
    }
}

/// Tells of a handle that belongs to nothing that lives.
#[cold]
pub(super) fn bad_handle(what: &str, handle: *mut c_void) -> CUresult {
    if !handle.is_null() {
        let text = format!("{handle:p} is no {what}: it was destroyed, or never was one");
        violations::record(Violation::new(ViolationKind::UseAfterDestroy, None, text));
    }
    CUresult::ERROR_INVALID_HANDLE
}

/// What a call returns that was given a bad range of device memory. An address that is none is
/// refused; memory that is not there any more, or not there at that length, is lost to the device,
/// and the context with it.
#[cold]
pub(super) fn refuse(violation: Violation, context: &Context) -> CUresult {
    match violation.kind() {
        ViolationKind::UseAfterFree
        | ViolationKind::OutOfBounds
        | ViolationKind::UseBeforeAllocation => {
            context.fail(violation);
            CUresult::ERROR_ILLEGAL_ADDRESS
        }
        _ => {
            violations::record(violation);
            CUresult::ERROR_INVALID_VALUE
        }
    }
}

/// [`bad_handle`], where CUDA calls it an invalid value.
pub(super) fn unknown(what: &str, handle: *mut c_void) -> CUresult {
    bad_handle(what, handle);
    CUresult::ERROR_INVALID_VALUE
}

/// The places of nodes in a graph.
///
/// # Safety
/// `nodes` has `count` entries, or none at all.
pub(super) unsafe fn places(
    nodes: *const *mut c_void,
    count: usize,
    graph: &Arc<Graph>,
) -> Result<Vec<usize>, CUresult> {
    if nodes.is_null() && count > 0 {
        return Err(CUresult::ERROR_INVALID_VALUE);
    }
    (0..count)
        .map(|at| {
            // SAFETY: the caller promises as many.
            let node = unsafe { nodes.add(at).read() };
            NODES
                .get(node)
                .ok_or_else(|| unknown("node", node))?
                .place_in(graph)
        })
        .collect()
}
