//! Events with default flags; captures and their graphs. Their functions have an additional argument for edge data: under a new
//! name in CUDA 12, under the old name in CUDA 13.

use std::ffi::{c_uint, c_void};

use super::caller::Cuda;
use super::device::context;
use super::driver;
use super::error::{Code, run};
use stand_in_object::Symbol;

pub(super) fn symbols(cuda: Cuda) -> Vec<Symbol> {
    let mut all = vec![(c"cudaEventCreate", create_event as *const c_void)];
    all.extend(match cuda {
        Cuda::V12 => vec![
            (
                c"cudaStreamGetCaptureInfo_v2",
                get_capture_info_v2 as *const c_void,
            ),
            (
                c"cudaStreamGetCaptureInfo_v3",
                get_capture_info as *const c_void,
            ),
            (
                c"cudaStreamUpdateCaptureDependencies",
                update_dependencies_v1 as *const c_void,
            ),
            (
                c"cudaStreamUpdateCaptureDependencies_v2",
                update_dependencies as *const c_void,
            ),
            (
                c"cudaGraphAddDependencies",
                add_dependencies_v1 as *const c_void,
            ),
            (
                c"cudaGraphAddDependencies_v2",
                add_dependencies as *const c_void,
            ),
        ],
        Cuda::V13 => vec![
            (
                c"cudaStreamGetCaptureInfo",
                get_capture_info as *const c_void,
            ),
            (
                c"cudaStreamUpdateCaptureDependencies",
                update_dependencies as *const c_void,
            ),
            (
                c"cudaGraphAddDependencies",
                add_dependencies as *const c_void,
            ),
        ],
    });
    all
}

unsafe extern "C" fn create_event(place: *mut *mut c_void) -> Code {
    run(|| {
        context()?;
        // SAFETY: the caller passes null or a place for the event.
        unsafe { driver::cuEventCreate(place, 0) }
    })
}

unsafe extern "C" fn get_capture_info(
    stream: *mut c_void,
    status: *mut c_uint,
    id: *mut u64,
    graph: *mut *mut c_void,
    nodes: *mut *const c_void,
    edges: *mut *const c_void,
    count: *mut usize,
) -> Code {
    run(|| {
        context()?;
        // SAFETY: the caller passes null or a place for each.
        unsafe { driver::cuStreamGetCaptureInfo_v3(stream, status, id, graph, nodes, edges, count) }
    })
}

unsafe extern "C" fn get_capture_info_v2(
    stream: *mut c_void,
    status: *mut c_uint,
    id: *mut u64,
    graph: *mut *mut c_void,
    nodes: *mut *const c_void,
    count: *mut usize,
) -> Code {
    let edges = std::ptr::null_mut();
    // SAFETY: the same promises; the data of edges are not asked for.
    unsafe { get_capture_info(stream, status, id, graph, nodes, edges, count) }
}

unsafe extern "C" fn update_dependencies(
    stream: *mut c_void,
    nodes: *const *mut c_void,
    edges: *const c_void,
    count: usize,
    flags: c_uint,
) -> Code {
    run(|| {
        context()?;
        // SAFETY: the caller passes `count` nodes.
        unsafe { driver::cuStreamUpdateCaptureDependencies_v2(stream, nodes, edges, count, flags) }
    })
}

unsafe extern "C" fn update_dependencies_v1(
    stream: *mut c_void,
    nodes: *const *mut c_void,
    count: usize,
    flags: c_uint,
) -> Code {
    // SAFETY: the same promises; ordinary edges.
    unsafe { update_dependencies(stream, nodes, std::ptr::null(), count, flags) }
}

unsafe extern "C" fn add_dependencies(
    graph: *mut c_void,
    from: *const *mut c_void,
    to: *const *mut c_void,
    edges: *const c_void,
    count: usize,
) -> Code {
    run(|| {
        context()?;
        // SAFETY: the caller passes `count` of each.
        unsafe { driver::cuGraphAddDependencies_v2(graph, from, to, edges, count) }
    })
}

unsafe extern "C" fn add_dependencies_v1(
    graph: *mut c_void,
    from: *const *mut c_void,
    to: *const *mut c_void,
    count: usize,
) -> Code {
    // SAFETY: the same promises; ordinary edges.
    unsafe { add_dependencies(graph, from, to, std::ptr::null(), count) }
}
