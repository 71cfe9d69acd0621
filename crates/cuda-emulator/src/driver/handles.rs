//! Lookup of the caller's handles and addresses, and the errors for invalid ones.

use std::ffi::c_void;
use std::sync::Arc;

use super::context::{self, Context};
use crate::exec::{self, Graph, NODES, Stream};
use crate::result::CUresult;
use crate::violations::{self, Violation, ViolationKind};

/// Returns the stream of a handle; an implicit stream is that of the current context.
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

/// Records a violation for a handle that is destroyed or invalid, and returns the error code.
#[cold]
pub(super) fn bad_handle(what: &str, handle: *mut c_void) -> CUresult {
    if !handle.is_null() {
        let text = format!("{handle:p} is no {what}: it was destroyed, or never was one");
        violations::record(Violation::new(ViolationKind::UseAfterDestroy, None, text));
    }
    CUresult::ERROR_INVALID_HANDLE
}

/// Records the violation of a range of device memory, and returns the call's error code. For freed memory, memory before its
/// allocation, or a range out of bounds, the context fails as well, as it would on a GPU; any other address is only refused.
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

/// Like [`bad_handle`], for functions where CUDA returns `CUDA_ERROR_INVALID_VALUE`.
pub(super) fn unknown(what: &str, handle: *mut c_void) -> CUresult {
    bad_handle(what, handle);
    CUresult::ERROR_INVALID_VALUE
}

/// Returns the indices of nodes in a graph.
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
