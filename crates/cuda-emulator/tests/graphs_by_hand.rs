//! Graphs that a program queries and extends during their capture; and user objects, which live as long as graphs need them.
//! NCCL uses all of this.

mod functions;

use std::ffi::{c_uint, c_void};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, mpsc};
use std::thread;
use std::time::Duration;

use functions::{Handle, NULL, begin, cu, end, enter, event, made, stream, until};

const INVALID_VALUE: u32 = 1;
const UNJOINED: u32 = 904;

/// The capture information of a stream.
struct Info {
    status: c_uint,
    id: u64,
    graph: Handle,
    nodes: Vec<Handle>,
}

fn info(stream: Handle) -> Info {
    let (mut status, mut id, mut count) = (0, 0, 0);
    let (mut graph, mut nodes) = (NULL, std::ptr::null::<Handle>());
    assert_eq!(
        cu!(c"cuStreamGetCaptureInfo_v2", stream => Handle, &raw mut status => *mut c_uint, &raw mut id => *mut u64,
            &raw mut graph => *mut Handle, &raw mut nodes => *mut *const Handle, &raw mut count => *mut usize),
        0
    );
    // SAFETY: as many as the driver says, until the stream is asked again.
    let nodes = (0..count).map(|at| unsafe { nodes.add(at).read() });
    Info {
        status,
        id,
        graph,
        nodes: nodes.collect(),
    }
}

fn set_dependencies(stream: Handle, nodes: &[Handle]) -> u32 {
    cu!(c"cuStreamUpdateCaptureDependencies", stream => Handle, nodes.as_ptr() => *const Handle,
        nodes.len() => usize, 1 => c_uint)
}

fn depend(graph: Handle, from: Handle, to: Handle) -> u32 {
    cu!(c"cuGraphAddDependencies", graph => Handle, &raw const from => *const Handle, &raw const to => *const Handle,
        1 => usize)
}

type Function = unsafe extern "C" fn(*mut c_void);

/// A number, and the list that [`note`] appends it to. Never freed.
struct Note {
    number: u32,
    list: &'static Mutex<Vec<u32>>,
}

unsafe extern "C" fn note(argument: *mut c_void) {
    // SAFETY: a note of `call`, which is never freed.
    let note = unsafe { &*argument.cast::<Note>() };
    note.list.lock().unwrap().push(note.number);
}

fn noted(list: &'static Mutex<Vec<u32>>, number: u32) -> *mut c_void {
    Box::into_raw(Box::new(Note { number, list })).cast()
}

fn list() -> &'static Mutex<Vec<u32>> {
    Box::leak(Box::default())
}

fn call(stream: Handle, list: &'static Mutex<Vec<u32>>, number: u32) {
    assert_eq!(
        cu!(c"cuLaunchHostFunc", stream => Handle, note => Function, noted(list, number) => *mut c_void),
        0
    );
}

fn add_call(
    graph: Handle,
    after: &[Handle],
    list: &'static Mutex<Vec<u32>>,
    number: u32,
) -> Handle {
    let node: (Function, *mut c_void) = (note, noted(list, number));
    let node = [node.0 as usize, node.1.expose_provenance()];
    made(|place| {
        cu!(c"cuGraphAddHostNode", place => *mut Handle, graph => Handle, after.as_ptr() => *const Handle,
            after.len() => usize, (&raw const node).cast() => *const c_void)
    })
}

fn instantiate(graph: Handle) -> Handle {
    made(
        |place| cu!(c"cuGraphInstantiateWithFlags", place => *mut Handle, graph => Handle, 0 => u64),
    )
}

fn launch(executable: Handle, stream: Handle) {
    assert_eq!(
        cu!(c"cuGraphLaunch", executable => Handle, stream => Handle),
        0
    );
}

fn synchronize(stream: Handle) {
    assert_eq!(cu!(c"cuStreamSynchronize", stream => Handle), 0);
}

/// Launches a graph once and waits for it.
fn run(graph: Handle, on: Handle) {
    let executable = instantiate(graph);
    launch(executable, on);
    synchronize(on);
    assert_eq!(cu!(c"cuGraphExecDestroy", executable => Handle), 0);
}

#[test]
fn a_capture_tells_its_graph_and_what_comes_next_to_any_thread() {
    enter(0);
    let (origin, list) = (stream(), list());
    assert_eq!(info(origin).status, 0);
    begin(origin);
    let first = info(origin);
    assert_eq!((first.status, first.nodes.len()), (1, 0));
    call(origin, list, 1);
    let (address, of_graph) = (origin.addr(), first.graph.addr());
    thread::spawn(move || {
        enter(0);
        let origin = std::ptr::without_provenance_mut(address);
        let (second, again) = (info(origin), info(origin));
        assert_eq!((second.id, second.graph.addr()), (first.id, of_graph));
        assert_eq!(second.nodes.len(), 1);
        assert_eq!(second.nodes, again.nodes);
    })
    .join()
    .unwrap();
    let graph = end(origin);
    assert_eq!(graph, first.graph);
    assert_eq!(info(origin).status, 0);
    run(graph, origin);
    assert_eq!(*list.lock().unwrap(), [1]);
}

#[test]
fn nodes_that_are_added_by_hand_run_after_what_they_depend_on() {
    enter(0);
    let (origin, list) = (stream(), list());
    begin(origin);
    call(origin, list, 1);
    let captured = info(origin);
    let last = add_call(captured.graph, &[], list, 3);
    let middle = add_call(captured.graph, &captured.nodes, list, 2);
    // An edge from a later node to an earlier one.
    assert_eq!(depend(captured.graph, middle, last), 0);
    assert_eq!(depend(captured.graph, middle, last), INVALID_VALUE);
    assert_eq!(
        depend(captured.graph, last, captured.nodes[0]),
        INVALID_VALUE
    );
    assert_eq!(depend(captured.graph, last, last), INVALID_VALUE);
    assert_eq!(set_dependencies(origin, &[last]), 0);
    call(origin, list, 4);
    let graph = end(origin);
    run(graph, origin);
    assert_eq!(*list.lock().unwrap(), [1, 2, 3, 4]);

    let mut nodes = [NULL; 6];
    let mut count = nodes.len();
    assert_eq!(
        cu!(c"cuGraphGetNodes", graph => Handle, nodes.as_mut_ptr() => *mut Handle, &raw mut count => *mut usize),
        0
    );
    assert_eq!(count, 4);
    assert_eq!(nodes[..3], [captured.nodes[0], last, middle]);
    assert_eq!(nodes[4..], [NULL; 2]);
    assert_eq!(cu!(c"cuGraphDestroy", graph => Handle), 0);
    // The nodes end with their graph.
    let other = stream();
    begin(other);
    assert_eq!(set_dependencies(other, &[last]), INVALID_VALUE);
    let mut graph = NULL;
    cu!(c"cuStreamEndCapture", other => Handle, &raw mut graph => *mut Handle);
}

#[test]
fn a_node_of_one_graph_is_no_dependency_in_another() {
    enter(0);
    let (one, other, list) = (stream(), stream(), list());
    begin(one);
    begin(other);
    call(one, list, 1);
    call(other, list, 2);
    let (of_one, of_other) = (info(one), info(other));
    assert_ne!(of_one.graph, of_other.graph);
    assert_eq!(set_dependencies(one, &of_other.nodes), INVALID_VALUE);
    assert_eq!(
        depend(of_one.graph, of_one.nodes[0], of_other.nodes[0]),
        INVALID_VALUE
    );
    for stream in [one, other] {
        end(stream);
    }
}

/// The order of NCCL's launches: a stream of its own joins a capture, drops its dependencies, waits for an event from outside
/// the capture, works, and records the event by hand. The origin continues after that work by way of a short-lived stream.
#[test]
fn a_stream_beside_the_origin_is_ordered_as_nccl_orders_its_launches() {
    enter(0);
    let (origin, beside, list) = (stream(), stream(), list());
    let (serial, scratch, work) = (event(), event(), event());
    let record = |event, stream| {
        assert_eq!(cu!(c"cuEventRecord", event => Handle, stream => Handle), 0);
    };
    let wait = |stream, event, flags| {
        assert_eq!(
            cu!(c"cuStreamWaitEvent", stream => Handle, event => Handle, flags => c_uint),
            0
        );
    };
    record(serial, beside);
    begin(origin);
    call(origin, list, 1);
    record(scratch, origin);
    wait(beside, scratch, 0);
    assert_eq!(set_dependencies(beside, &[]), 0);
    assert_eq!(info(beside).nodes.len(), 0);
    wait(beside, serial, 1);
    record(scratch, origin);
    wait(beside, scratch, 0);
    call(beside, list, 2);
    record(work, beside);

    let captured = info(beside);
    let node = made(|place| {
        cu!(c"cuGraphAddEventRecordNode", place => *mut Handle, captured.graph => Handle,
            std::ptr::null() => *const Handle, 0 => usize, serial => Handle)
    });
    assert_eq!(depend(captured.graph, captured.nodes[0], node), 0);
    assert_eq!(set_dependencies(beside, &[node]), 0);

    let moment = stream();
    wait(moment, work, 0);
    let nodes = info(moment).nodes;
    assert_eq!(set_dependencies(origin, &nodes), 0);
    assert_eq!(cu!(c"cuStreamDestroy_v2", moment => Handle), 0);
    call(origin, list, 3);

    // The recorded node is not joined, which is allowed.
    let graph = end(origin);
    let executable = instantiate(graph);
    for _ in 0..3 {
        launch(executable, origin);
    }
    // Work behind the event runs after the work of the graph.
    wait(beside, serial, 0);
    call(beside, list, 9);
    synchronize(beside);
    synchronize(origin);
    let ran = list.lock().unwrap().clone();
    assert_eq!(
        ran.iter()
            .filter(|&&number| number != 9)
            .copied()
            .collect::<Vec<_>>(),
        [1, 2, 3].repeat(3)
    );
    let nine = ran.iter().position(|&number| number == 9).unwrap();
    assert_eq!(ran[..nine].iter().filter(|&&number| number == 2).count(), 3);
}

#[test]
fn work_on_a_stream_that_was_destroyed_must_be_joined_all_the_same() {
    enter(0);
    let (origin, other, list) = (stream(), stream(), list());
    let forked = event();
    begin(origin);
    assert_eq!(cu!(c"cuEventRecord", forked => Handle, origin => Handle), 0);
    assert_eq!(
        cu!(c"cuStreamWaitEvent", other => Handle, forked => Handle, 0 => c_uint),
        0
    );
    call(other, list, 1);
    assert_eq!(cu!(c"cuStreamDestroy_v2", other => Handle), 0);
    assert_eq!(info(origin).status, 1);
    let mut graph = NULL;
    assert_eq!(
        cu!(c"cuStreamEndCapture", origin => Handle, &raw mut graph => *mut Handle),
        UNJOINED
    );
}

/// Creates an object whose destructor increments a counter.
fn object(count: &'static AtomicU32, references: c_uint) -> Handle {
    unsafe extern "C" fn destroy(argument: *mut c_void) {
        // SAFETY: the counter of a test, which is never freed.
        let count = unsafe { &*argument.cast::<AtomicU32>() };
        count.fetch_add(1, Ordering::SeqCst);
    }
    let argument = std::ptr::from_ref(count).cast_mut().cast();
    made(|place| {
        cu!(c"cuUserObjectCreate", place => *mut Handle, argument => *mut c_void, destroy => Function,
            references => c_uint, 1 => c_uint)
    })
}

/// Gives the graph the caller's reference.
fn give(graph: Handle, object: Handle) {
    assert_eq!(
        cu!(c"cuGraphRetainUserObject", graph => Handle, object => Handle, 1 => c_uint, 1 => c_uint),
        0
    );
}

#[test]
fn a_destructor_runs_once_and_after_graph_executables_and_replays() {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    enter(0);
    let origin = stream();
    begin(origin);
    give(info(origin).graph, object(&COUNT, 1));
    let (gate, opened) = mpsc::channel();
    let gate_of_replay = Box::into_raw(Box::new(Mutex::new(opened)));
    unsafe extern "C" fn wait(argument: *mut c_void) {
        // SAFETY: the gate of this test, which is never freed.
        let opened = unsafe { &*argument.cast::<Mutex<mpsc::Receiver<()>>>() };
        let _ = opened.lock().unwrap().recv_timeout(Duration::from_secs(20));
    }
    assert_eq!(
        cu!(c"cuLaunchHostFunc", origin => Handle, wait => Function, gate_of_replay.cast() => *mut c_void),
        0
    );
    let graph = end(origin);
    let (one, other) = (instantiate(graph), instantiate(graph));
    launch(one, origin);
    assert_eq!(cu!(c"cuGraphDestroy", graph => Handle), 0);
    assert_eq!(cu!(c"cuGraphExecDestroy", other => Handle), 0);
    assert_eq!(cu!(c"cuGraphExecDestroy", one => Handle), 0);
    thread::sleep(Duration::from_millis(50));
    assert_eq!(COUNT.load(Ordering::SeqCst), 0, "a replay is under way");
    gate.send(()).unwrap();
    synchronize(origin);
    until("the destructor", || COUNT.load(Ordering::SeqCst) > 0);
    thread::sleep(Duration::from_millis(50));
    assert_eq!(COUNT.load(Ordering::SeqCst), 1);
}

#[test]
fn a_capture_that_fails_or_loses_its_stream_lets_go_of_its_objects() {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    enter(0);
    let origin = stream();
    begin(origin);
    let graph = info(origin).graph;
    give(graph, object(&COUNT, 1));
    // A program cannot destroy a graph during its capture.
    assert_eq!(cu!(c"cuGraphDestroy", graph => Handle), INVALID_VALUE);
    assert_ne!(cu!(c"cuStreamSynchronize", origin => Handle), 0);
    let mut ended = NULL;
    assert_ne!(
        cu!(c"cuStreamEndCapture", origin => Handle, &raw mut ended => *mut Handle),
        0
    );
    until("the first", || COUNT.load(Ordering::SeqCst) == 1);
    assert_eq!(cu!(c"cuGraphDestroy", graph => Handle), INVALID_VALUE);

    begin(origin);
    give(info(origin).graph, object(&COUNT, 1));
    assert_eq!(cu!(c"cuStreamDestroy_v2", origin => Handle), 0);
    until("the second", || COUNT.load(Ordering::SeqCst) == 2);
}

#[test]
fn references_are_counted() {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    enter(0);
    let object = object(&COUNT, 2);
    let retain = |count| cu!(c"cuUserObjectRetain", object => Handle, count => c_uint);
    let release = |count| cu!(c"cuUserObjectRelease", object => Handle, count => c_uint);
    assert_eq!(retain(0), INVALID_VALUE);
    assert_eq!(retain(i32::MAX as u32), INVALID_VALUE);
    assert_eq!(retain(3), 0);
    assert_eq!(release(6), INVALID_VALUE);
    assert_eq!(release(4), 0);

    let origin = stream();
    begin(origin);
    let graph = end(origin);
    let in_graph = |count| cu!(c"cuGraphReleaseUserObject", graph => Handle, object => Handle, count => c_uint);
    assert_eq!(
        cu!(c"cuGraphRetainUserObject", graph => Handle, object => Handle, 2 => c_uint, 0 => c_uint),
        0
    );
    assert_eq!(release(1), 0);
    assert_eq!(in_graph(3), INVALID_VALUE);
    assert_eq!(in_graph(1), 0);
    thread::sleep(Duration::from_millis(20));
    assert_eq!(COUNT.load(Ordering::SeqCst), 0);
    assert_eq!(cu!(c"cuGraphDestroy", graph => Handle), 0);
    until("the destructor", || COUNT.load(Ordering::SeqCst) == 1);
    assert_eq!(release(1), INVALID_VALUE);
    assert_eq!(COUNT.load(Ordering::SeqCst), 1);
}

#[test]
fn a_graph_that_is_launched_into_a_capture_brings_its_objects() {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    enter(0);
    let (origin, list) = (stream(), list());
    begin(origin);
    give(info(origin).graph, object(&COUNT, 1));
    call(origin, list, 1);
    let inner = end(origin);
    let executable = instantiate(inner);
    begin(origin);
    launch(executable, origin);
    let outer = end(origin);
    assert_eq!(cu!(c"cuGraphExecDestroy", executable => Handle), 0);
    assert_eq!(cu!(c"cuGraphDestroy", inner => Handle), 0);
    thread::sleep(Duration::from_millis(20));
    assert_eq!(COUNT.load(Ordering::SeqCst), 0);
    run(outer, origin);
    assert_eq!(*list.lock().unwrap(), [1]);
    assert_eq!(cu!(c"cuGraphDestroy", outer => Handle), 0);
    until("the destructor", || COUNT.load(Ordering::SeqCst) == 1);
}
