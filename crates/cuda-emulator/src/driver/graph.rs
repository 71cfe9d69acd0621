//! `cuGraph*`: graphs that result from captures, and nodes added by hand.

use std::ffi::{c_uint, c_void};
use std::sync::Arc;

use super::call::{enter, store};
use super::handles::{places, stream_of, unknown};
use super::{capture, context};
use crate::exec::{
    Action, EXECUTABLES, Event, Executable, GRAPHS, Graph, HostCall, OBJECTS, UserObject,
};
use crate::result::CUresult;
use stand_in_object::Symbol;

pub(super) fn symbols() -> Vec<Symbol> {
    vec![
        (c"cuGraphInstantiateWithFlags", instantiate as *const c_void),
        (c"cuGraphLaunch", launch as *const c_void),
        (c"cuGraphUpload", upload as *const c_void),
        (c"cuGraphExecDestroy", destroy_executable as *const c_void),
        (c"cuGraphDestroy", destroy as *const c_void),
        (c"cuGraphGetNodes", get_nodes as *const c_void),
        (
            c"cuGraphAddEventRecordNode",
            add_event_record_node as *const c_void,
        ),
        (
            c"cuGraphAddEventWaitNode",
            add_event_wait_node as *const c_void,
        ),
        (c"cuGraphAddHostNode", add_host_node as *const c_void),
        (c"cuGraphAddDependencies", add_dependencies as *const c_void),
        (
            c"cuGraphAddDependencies_v2",
            add_dependencies_v2 as *const c_void,
        ),
        (c"cuUserObjectCreate", create_object as *const c_void),
        (c"cuUserObjectRetain", retain_object as *const c_void),
        (c"cuUserObjectRelease", release_object as *const c_void),
        (c"cuGraphRetainUserObject", retain_in_graph as *const c_void),
        (
            c"cuGraphReleaseUserObject",
            release_in_graph as *const c_void,
        ),
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
        let executable = graph_of(graph)?.instantiate()?;
        // SAFETY: not null, and the caller passes a place for the graph.
        unsafe { store(place, executable) }
    })
}

fn graph_of(handle: *mut c_void) -> Result<Arc<Graph>, CUresult> {
    GRAPHS.get(handle).ok_or_else(|| unknown("graph", handle))
}

fn object_of(handle: *mut c_void) -> Result<Arc<UserObject>, CUresult> {
    OBJECTS
        .get(handle)
        .ok_or_else(|| unknown("user object", handle))
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

/// Does nothing after its checks: an executable graph has no other place to be uploaded to.
unsafe extern "C" fn upload(handle: *mut c_void, stream: *mut c_void) -> CUresult {
    enter("cuGraphUpload", || {
        executable_of(handle)?;
        let stream = stream_of(stream)?;
        stream.context().check()?;
        capture::refuse(&stream, CUresult::ERROR_STREAM_CAPTURE_UNSUPPORTED)
    })
}

/// Does not affect replays that were already launched.
unsafe extern "C" fn destroy_executable(handle: *mut c_void) -> CUresult {
    enter("cuGraphExecDestroy", || {
        EXECUTABLES
            .remove(handle)
            .map(drop)
            .ok_or_else(|| unknown("executable graph", handle))
    })
}

/// Does not affect executable graphs that were made from this graph.
unsafe extern "C" fn destroy(handle: *mut c_void) -> CUresult {
    enter("cuGraphDestroy", || {
        graph_of(handle)?;
        Graph::destroy(handle)
    })
}

/// Returns the number of nodes, and as many of their handles as there is room for.
unsafe extern "C" fn get_nodes(
    handle: *mut c_void,
    nodes: *mut *mut c_void,
    count: *mut usize,
) -> CUresult {
    enter("cuGraphGetNodes", || {
        let graph = graph_of(handle)?;
        if count.is_null() {
            return Err(CUresult::ERROR_INVALID_VALUE);
        }
        let all = graph.len();
        if nodes.is_null() {
            // SAFETY: not null, and the caller passes a place for the number.
            return unsafe { store(count, all) };
        }
        // SAFETY: not null, and it says for how many there is room.
        let room = unsafe { count.read() };
        let handles = graph.handles(&(0..all.min(room)).collect::<Vec<_>>())?;
        for at in 0..room {
            let node = handles.get(at).copied().unwrap_or(std::ptr::null_mut());
            // SAFETY: the caller says that there is room; those that are left over become null.
            unsafe { nodes.add(at).write(node) };
        }
        // SAFETY: as above.
        unsafe { store(count, handles.len()) }
    })
}

/// # Safety
/// `place` is null or may be written, `nodes` has `count` entries.
unsafe fn add(
    place: *mut *mut c_void,
    graph: *mut c_void,
    (nodes, count): (*const *mut c_void, usize),
    action: Action,
    context: &Arc<context::Context>,
) -> Result<(), CUresult> {
    if place.is_null() {
        return Err(CUresult::ERROR_INVALID_VALUE);
    }
    let graph = graph_of(graph)?;
    // SAFETY: the caller's promises.
    unsafe {
        let after = places(nodes, count, &graph)?;
        store(place, graph.add(action, &after, context)?)
    }
}

fn event_of(handle: *mut c_void) -> Result<Arc<Event>, CUresult> {
    Event::lookup(handle).map_err(|_| unknown("event", handle))
}

unsafe extern "C" fn add_event_record_node(
    place: *mut *mut c_void,
    graph: *mut c_void,
    nodes: *const *mut c_void,
    count: usize,
    event: *mut c_void,
) -> CUresult {
    enter("cuGraphAddEventRecordNode", || {
        let event = event_of(event)?;
        let context = Arc::clone(event.context());
        // SAFETY: the caller passes a place for the node, and `count` nodes that it depends on.
        unsafe {
            add(
                place,
                graph,
                (nodes, count),
                Action::Record(event),
                &context,
            )
        }
    })
}

unsafe extern "C" fn add_event_wait_node(
    place: *mut *mut c_void,
    graph: *mut c_void,
    nodes: *const *mut c_void,
    count: usize,
    event: *mut c_void,
) -> CUresult {
    enter("cuGraphAddEventWaitNode", || {
        let event = event_of(event)?;
        let context = Arc::clone(event.context());
        // SAFETY: as above.
        unsafe { add(place, graph, (nodes, count), Action::Wait(event), &context) }
    })
}

/// `CUDA_HOST_NODE_PARAMS`.
#[repr(C)]
struct HostNode {
    function: Option<unsafe extern "C" fn(*mut c_void)>,
    argument: *mut c_void,
}

unsafe extern "C" fn add_host_node(
    place: *mut *mut c_void,
    graph: *mut c_void,
    nodes: *const *mut c_void,
    count: usize,
    node: *const HostNode,
) -> CUresult {
    enter("cuGraphAddHostNode", || {
        // SAFETY: the caller passes null or a function and its argument.
        let node = unsafe { node.as_ref() }.ok_or(CUresult::ERROR_INVALID_VALUE)?;
        let function = node.function.ok_or(CUresult::ERROR_INVALID_VALUE)?;
        let call = HostCall {
            function,
            argument: node.argument,
        };
        let context = context::current()?;
        // SAFETY: as above.
        unsafe { add(place, graph, (nodes, count), Action::Host(call), &context) }
    })
}

unsafe extern "C" fn add_dependencies(
    graph: *mut c_void,
    from: *const *mut c_void,
    to: *const *mut c_void,
    count: usize,
) -> CUresult {
    // SAFETY: the same promises; ordinary edges.
    unsafe { add_dependencies_v2(graph, from, to, std::ptr::null(), count) }
}

/// Treats edges of any kind as full dependencies.
unsafe extern "C" fn add_dependencies_v2(
    graph: *mut c_void,
    from: *const *mut c_void,
    to: *const *mut c_void,
    _edges: *const c_void,
    count: usize,
) -> CUresult {
    enter("cuGraphAddDependencies", || {
        let graph = graph_of(graph)?;
        // SAFETY: the caller passes `count` of each.
        let (from, to) = unsafe { (places(from, count, &graph)?, places(to, count, &graph)?) };
        graph.depend(&from.into_iter().zip(to).collect::<Vec<_>>())
    })
}

unsafe extern "C" fn create_object(
    place: *mut *mut c_void,
    argument: *mut c_void,
    destructor: Option<unsafe extern "C" fn(*mut c_void)>,
    references: c_uint,
    flags: c_uint,
) -> CUresult {
    /// Waiting for the destructor is not supported. This is the only valid flag, and it is
    /// mandatory.
    const NO_DESTRUCTOR_SYNC: c_uint = 1;
    enter("cuUserObjectCreate", || {
        let function = destructor.ok_or(CUresult::ERROR_INVALID_VALUE)?;
        if place.is_null() || flags != NO_DESTRUCTOR_SYNC {
            return Err(CUresult::ERROR_INVALID_VALUE);
        }
        let object = UserObject::create(HostCall { function, argument }, references)?;
        // SAFETY: not null, and the caller passes a place for the object.
        unsafe { store(place, object) }
    })
}

unsafe extern "C" fn retain_object(object: *mut c_void, count: c_uint) -> CUresult {
    enter("cuUserObjectRetain", || object_of(object)?.retain(count))
}

unsafe extern "C" fn release_object(object: *mut c_void, count: c_uint) -> CUresult {
    enter("cuUserObjectRelease", || object_of(object)?.release(count))
}

unsafe extern "C" fn retain_in_graph(
    graph: *mut c_void,
    object: *mut c_void,
    count: c_uint,
    flags: c_uint,
) -> CUresult {
    /// Moves the caller's references to the graph.
    const MOVE: c_uint = 1;
    enter("cuGraphRetainUserObject", || {
        if flags > MOVE {
            return Err(CUresult::ERROR_INVALID_VALUE);
        }
        graph_of(graph)?.retain(object_of(object)?, count, flags == MOVE)
    })
}

unsafe extern "C" fn release_in_graph(
    graph: *mut c_void,
    object: *mut c_void,
    count: c_uint,
) -> CUresult {
    enter("cuGraphReleaseUserObject", || {
        graph_of(graph)?.release(&object_of(object)?, count)
    })
}
