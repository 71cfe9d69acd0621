//! `cuGraph*`: what becomes of a capture.

use std::ffi::c_void;
use std::sync::Arc;

use super::{CUresult, bad_handle, capture, enter, store, stream_of};
use crate::elf::Symbol;
use crate::exec::{EXECUTABLES, Executable, GRAPHS};

pub(super) fn symbols() -> Vec<Symbol> {
    vec![
        (c"cuGraphInstantiateWithFlags", instantiate as *const c_void),
        (c"cuGraphLaunch", launch as *const c_void),
        (c"cuGraphUpload", upload as *const c_void),
        (c"cuGraphExecDestroy", destroy_executable as *const c_void),
        (c"cuGraphDestroy", destroy as *const c_void),
        (c"cuGraphGetNodes", get_nodes as *const c_void),
    ]
}

const AUTO_FREE_ON_LAUNCH: u64 = 1;
const DEVICE_LAUNCH: u64 = 4;
const USE_NODE_PRIORITY: u64 = 8;

unsafe extern "C" fn instantiate(
    place: *mut *mut c_void,
    graph: *mut c_void,
    flags: u64,
) -> CUresult {
    enter("cuGraphInstantiateWithFlags", || {
        let known = AUTO_FREE_ON_LAUNCH | DEVICE_LAUNCH | USE_NODE_PRIORITY;
        let both = AUTO_FREE_ON_LAUNCH | DEVICE_LAUNCH;
        if place.is_null() || flags & !known != 0 || flags & both == both {
            return Err(CUresult::ERROR_INVALID_VALUE);
        }
        if flags & DEVICE_LAUNCH != 0 {
            super::refused::say(
                "cuGraphInstantiateWithFlags",
                "the emulator has no kernels that could launch a graph",
            );
            return Err(CUresult::ERROR_NOT_SUPPORTED);
        }
        let graph = GRAPHS.get(graph).ok_or_else(|| unknown("graph", graph))?;
        let executable = graph.instantiate()?;
        // SAFETY: not null, and the caller passes a place for the graph.
        unsafe { store(place, executable) }
    })
}

/// Tells of a handle that belongs to nothing that lives.
fn unknown(what: &str, handle: *mut c_void) -> CUresult {
    bad_handle(what, handle);
    CUresult::ERROR_INVALID_VALUE
}

fn executable_of(handle: *mut c_void) -> Result<Arc<Executable>, CUresult> {
    EXECUTABLES
        .get(handle)
        .ok_or_else(|| unknown("executable graph", handle))
}

unsafe extern "C" fn launch(handle: *mut c_void, stream: *mut c_void) -> CUresult {
    enter("cuGraphLaunch", || {
        executable_of(handle)?.launch(&stream_of(stream)?)
    })
}

/// Brings nothing anywhere: there is no other place.
unsafe extern "C" fn upload(handle: *mut c_void, stream: *mut c_void) -> CUresult {
    enter("cuGraphUpload", || {
        executable_of(handle)?;
        let stream = stream_of(stream)?;
        stream.context().check()?;
        capture::refuse(&stream, CUresult::ERROR_STREAM_CAPTURE_UNSUPPORTED)
    })
}

/// Replays that were launched are not disturbed.
unsafe extern "C" fn destroy_executable(handle: *mut c_void) -> CUresult {
    enter("cuGraphExecDestroy", || {
        EXECUTABLES
            .remove(handle)
            .map(drop)
            .ok_or_else(|| unknown("executable graph", handle))
    })
}

/// Executable graphs that were made from it are not disturbed.
unsafe extern "C" fn destroy(handle: *mut c_void) -> CUresult {
    enter("cuGraphDestroy", || {
        GRAPHS
            .remove(handle)
            .map(drop)
            .ok_or_else(|| unknown("graph", handle))
    })
}

/// The number of nodes; the nodes themselves have no handles.
unsafe extern "C" fn get_nodes(
    handle: *mut c_void,
    nodes: *mut *mut c_void,
    count: *mut usize,
) -> CUresult {
    enter("cuGraphGetNodes", || {
        let graph = GRAPHS.get(handle).ok_or_else(|| unknown("graph", handle))?;
        if !nodes.is_null() {
            super::refused::say("cuGraphGetNodes", "the emulator's nodes have no handles");
            return Err(CUresult::ERROR_NOT_SUPPORTED);
        }
        // SAFETY: the caller passes null or a place for the number.
        unsafe { store(count, graph.len()) }
    })
}
