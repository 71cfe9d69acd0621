//! Stream capture and graphs of the driver, through cudarc. Every test has a process of its own: a
//! capture in global mode forbids things to all threads.

#[allow(unused_imports)]
mod ranks;

use std::ffi::c_void;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use cudarc::driver::sys::CUresult as Code;
use cudarc::driver::sys::CUstreamCaptureMode as Mode;
use cudarc::driver::sys::CUstreamCaptureStatus as Status;
use cudarc::driver::{
    CudaContext, CudaEvent, CudaGraph, CudaStream, DevicePtr, DriverError, result, sys,
};
use nccl_emulator::ViolationKind;

use ranks::alone;

const GLOBAL: Mode = Mode::CU_STREAM_CAPTURE_MODE_GLOBAL;
const THREAD_LOCAL: Mode = Mode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
const RELAXED: Mode = Mode::CU_STREAM_CAPTURE_MODE_RELAXED;
const NO_FLAGS: sys::CUgraphInstantiate_flags = sys::CUgraphInstantiate_flags(0);

/// A device whose streams the test orders itself.
fn device() -> Arc<CudaContext> {
    nccl_emulator::install().unwrap();
    let context = CudaContext::new(0).unwrap();
    // SAFETY: the tests order all accesses themselves, or mean not to.
    unsafe { context.disable_event_tracking() };
    context
}

fn code<T>(result: Result<T, DriverError>) -> Code {
    match result {
        Ok(_) => Code::CUDA_SUCCESS,
        Err(error) => error.0,
    }
}

fn event(context: &Arc<CudaContext>) -> CudaEvent {
    context.new_event(None).unwrap()
}

fn end(stream: &Arc<CudaStream>) -> CudaGraph {
    stream.end_capture(NO_FLAGS).unwrap().unwrap()
}

/// Ends a capture that is void.
fn assert_void(stream: &Arc<CudaStream>) {
    assert_eq!(
        stream.capture_status().unwrap(),
        Status::CU_STREAM_CAPTURE_STATUS_INVALIDATED
    );
    assert_eq!(
        code(stream.end_capture(NO_FLAGS)),
        Code::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
    );
    assert_eq!(
        stream.capture_status().unwrap(),
        Status::CU_STREAM_CAPTURE_STATUS_NONE
    );
}

fn nodes(graph: &CudaGraph) -> usize {
    let mut count = 0;
    // SAFETY: the graph lives, and only its number of nodes is asked for.
    unsafe { sys::cuGraphGetNodes(graph.cu_graph(), std::ptr::null_mut(), &raw mut count) }
        .result()
        .unwrap();
    count
}

/// Puts a host function on a stream that may be called any number of times.
fn call(stream: &CudaStream, function: impl Fn() + Send + Sync + 'static) {
    type Function = Box<dyn Fn() + Send + Sync>;
    unsafe extern "C" fn run(argument: *mut c_void) {
        // SAFETY: the box is never freed.
        let function = unsafe { &*argument.cast::<Function>() };
        function();
    }
    let function: Function = Box::new(function);
    let argument = Box::into_raw(Box::new(function)).cast();
    // SAFETY: the argument is good for ever.
    unsafe { result::stream::launch_host_function(stream.cu_stream(), run, argument) }.unwrap();
}

fn fill(stream: &CudaStream, address: u64, value: u8, bytes: usize) -> Result<(), DriverError> {
    // SAFETY: the memory is the test's, or the emulator finds out.
    unsafe { result::memset_d8_async(address, value, bytes, stream.cu_stream()) }
}

/// Memory that nothing frees behind the test's back.
fn memory(context: &CudaContext, bytes: usize) -> u64 {
    context.bind_to_thread().unwrap();
    // SAFETY: a new allocation, and a fill of all of it.
    let address = unsafe {
        let address = result::malloc_sync(bytes).unwrap();
        result::memset_d8_sync(address, 0, bytes).unwrap();
        address
    };
    // The streams of the tests do not wait for the default one.
    context.synchronize().unwrap();
    address
}

fn read(address: u64, bytes: usize) -> Vec<u8> {
    let mut values = vec![0; bytes];
    // SAFETY: the memory has as many bytes.
    unsafe { result::memcpy_dtoh_sync(&mut values, address) }.unwrap();
    values
}

#[test]
fn captured_work_runs_when_the_graph_is_launched_and_each_time() {
    alone(
        "captured_work_runs_when_the_graph_is_launched_and_each_time",
        &[],
        || {
            let context = device();
            let stream = context.new_stream().unwrap();
            let (a, b) = (memory(&context, 16), memory(&context, 16));
            static SOURCE: Mutex<[u8; 8]> = Mutex::new([1; 8]);
            static RESULT: Mutex<[u8; 16]> = Mutex::new([0; 16]);
            let calls = Arc::new(AtomicU32::new(0));

            stream.begin_capture(THREAD_LOCAL).unwrap();
            fill(&stream, a, 9, 16).unwrap();
            let (source, sink) = (
                SOURCE.lock().unwrap().as_mut_ptr(),
                RESULT.lock().unwrap().as_mut_ptr(),
            );
            // SAFETY: the host's memory is static, and read and written when the graph runs.
            unsafe {
                result::memcpy_htod_async(
                    a,
                    std::slice::from_raw_parts(source, 8),
                    stream.cu_stream(),
                )
                .unwrap();
                result::memcpy_dtod_async(b, a, 16, stream.cu_stream()).unwrap();
                result::memcpy_dtoh_async(
                    std::slice::from_raw_parts_mut(sink, 16),
                    b,
                    stream.cu_stream(),
                )
                .unwrap();
            }
            let counted = Arc::clone(&calls);
            call(&stream, move || {
                counted.fetch_add(1, Ordering::SeqCst);
            });
            assert_eq!(
                stream.capture_status().unwrap(),
                Status::CU_STREAM_CAPTURE_STATUS_ACTIVE
            );
            let graph = end(&stream);
            assert_eq!(nodes(&graph), 5);
            stream.synchronize().unwrap();
            assert_eq!(read(b, 16), [0; 16], "nothing has run yet");

            for round in 1..=3u8 {
                *SOURCE.lock().unwrap() = [round; 8];
                graph.launch().unwrap();
                stream.synchronize().unwrap();
                let expected: Vec<u8> = [[round; 8], [9; 8]].concat();
                assert_eq!(*RESULT.lock().unwrap(), *expected);
                assert_eq!(calls.load(Ordering::SeqCst), u32::from(round));
            }
            graph.upload().unwrap();
        },
    );
}

#[test]
fn the_safe_calls_of_cudarc_can_be_captured() {
    alone("the_safe_calls_of_cudarc_can_be_captured", &[], || {
        let context = device();
        let stream = context.new_stream().unwrap();
        let source = stream.clone_htod(&[7u32; 100]).unwrap();
        let mut target = stream.alloc_zeros::<u32>(100).unwrap();
        stream.synchronize().unwrap();
        stream.begin_capture(GLOBAL).unwrap();
        stream.memcpy_dtod(&source, &mut target).unwrap();
        let graph = end(&stream);
        assert_eq!(stream.clone_dtoh(&target).unwrap(), [0; 100]);
        graph.launch().unwrap();
        assert_eq!(stream.clone_dtoh(&target).unwrap(), [7; 100]);
        stream.memset_zeros(&mut target).unwrap();
        graph.launch().unwrap();
        assert_eq!(stream.clone_dtoh(&target).unwrap(), [7; 100]);
    });
}

#[test]
fn branches_of_a_graph_run_side_by_side_and_are_joined() {
    alone(
        "branches_of_a_graph_run_side_by_side_and_are_joined",
        &[],
        || {
            let context = device();
            let (stream, other) = (context.new_stream().unwrap(), context.new_stream().unwrap());
            let (a, b) = (memory(&context, 8), memory(&context, 8));
            let (forked, joined) = (event(&context), event(&context));
            // Each branch waits for the other to be there.
            let (to_left, left) = mpsc::channel::<()>();
            let (to_right, right) = mpsc::channel::<()>();
            let (left, right) = (Mutex::new(left), Mutex::new(right));
            let met = Arc::new(AtomicU32::new(0));
            let meet = |there: mpsc::Sender<()>, here: Mutex<mpsc::Receiver<()>>| {
                let met = Arc::clone(&met);
                move || {
                    there.send(()).unwrap();
                    if here
                        .lock()
                        .unwrap()
                        .recv_timeout(Duration::from_secs(10))
                        .is_ok()
                    {
                        met.fetch_add(1, Ordering::SeqCst);
                    }
                }
            };

            stream.begin_capture(GLOBAL).unwrap();
            fill(&stream, a, 1, 8).unwrap();
            forked.record(&stream).unwrap();
            other.wait(&forked).unwrap();
            assert_eq!(
                other.capture_status().unwrap(),
                Status::CU_STREAM_CAPTURE_STATUS_ACTIVE
            );
            call(&stream, meet(to_right, left));
            call(&other, meet(to_left, right));
            // SAFETY: both have eight bytes.
            unsafe { result::memcpy_dtod_async(b, a, 8, other.cu_stream()) }.unwrap();
            joined.record(&other).unwrap();
            stream.wait(&joined).unwrap();
            fill(&stream, a, 3, 8).unwrap();
            let graph = end(&stream);
            assert_eq!(
                other.capture_status().unwrap(),
                Status::CU_STREAM_CAPTURE_STATUS_NONE
            );

            for round in 1..=2 {
                fill(&stream, b, 0, 8).unwrap();
                graph.launch().unwrap();
                stream.synchronize().unwrap();
                assert_eq!((read(a, 8), read(b, 8)), (vec![3; 8], vec![1; 8]));
                assert_eq!(met.load(Ordering::SeqCst), 2 * round);
            }
        },
    );
}

#[test]
fn work_that_is_not_joined_makes_no_graph() {
    alone("work_that_is_not_joined_makes_no_graph", &[], || {
        let context = device();
        let (stream, other) = (context.new_stream().unwrap(), context.new_stream().unwrap());
        let a = memory(&context, 8);
        let forked = event(&context);
        stream.begin_capture(GLOBAL).unwrap();
        forked.record(&stream).unwrap();
        other.wait(&forked).unwrap();
        fill(&other, a, 1, 8).unwrap();
        assert_eq!(
            code(stream.end_capture(NO_FLAGS)),
            Code::CUDA_ERROR_STREAM_CAPTURE_UNJOINED
        );
        for stream in [&stream, &other] {
            assert_eq!(
                stream.capture_status().unwrap(),
                Status::CU_STREAM_CAPTURE_STATUS_NONE
            );
            fill(stream, a, 2, 8).unwrap();
            stream.synchronize().unwrap();
        }
    });
}

#[test]
fn an_event_from_outside_voids_a_capture() {
    alone("an_event_from_outside_voids_a_capture", &[], || {
        let context = device();
        let (stream, other) = (context.new_stream().unwrap(), context.new_stream().unwrap());
        let a = memory(&context, 8);
        let outside = event(&context);
        outside.record(&other).unwrap();
        stream.begin_capture(THREAD_LOCAL).unwrap();
        assert_eq!(
            code(stream.wait(&outside)),
            Code::CUDA_ERROR_STREAM_CAPTURE_ISOLATION
        );
        // From now on everything says so.
        let void = Code::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
        assert_eq!(code(stream.wait(&outside)), void);
        assert_eq!(code(fill(&stream, a, 1, 8)), void);
        assert_eq!(code(outside.record(&stream)), void);
        assert_void(&stream);
        fill(&stream, a, 1, 8).unwrap();
        stream.synchronize().unwrap();
    });
}

#[test]
fn a_captured_event_cannot_be_used_outside() {
    alone("a_captured_event_cannot_be_used_outside", &[], || {
        let context = device();
        let (stream, other) = (context.new_stream().unwrap(), context.new_stream().unwrap());
        let (one, two) = (event(&context), event(&context));
        let captured = Code::CUDA_ERROR_CAPTURED_EVENT;

        stream.begin_capture(RELAXED).unwrap();
        one.record(&stream).unwrap();
        assert_eq!(code(one.try_is_complete()), captured);
        assert_void(&stream);

        stream.begin_capture(RELAXED).unwrap();
        one.record(&stream).unwrap();
        assert_eq!(code(one.synchronize()), captured);
        assert_void(&stream);

        // Nor after the capture.
        stream.begin_capture(RELAXED).unwrap();
        one.record(&stream).unwrap();
        drop(end(&stream));
        assert_eq!(code(one.synchronize()), captured);
        assert_eq!(code(other.wait(&one)), captured);
        other.begin_capture(RELAXED).unwrap();
        two.record(&other).unwrap();
        assert_eq!(
            code(other.wait(&one)),
            Code::CUDA_ERROR_STREAM_CAPTURE_ISOLATION
        );
        assert_void(&other);

        // Until it is recorded again.
        one.record(&stream).unwrap();
        one.synchronize().unwrap();
    });
}

#[test]
fn two_captures_do_not_merge() {
    alone("two_captures_do_not_merge", &[], || {
        let context = device();
        let (stream, other) = (context.new_stream().unwrap(), context.new_stream().unwrap());
        let one = event(&context);
        stream.begin_capture(THREAD_LOCAL).unwrap();
        other.begin_capture(THREAD_LOCAL).unwrap();
        one.record(&stream).unwrap();
        assert_eq!(
            code(other.wait(&one)),
            Code::CUDA_ERROR_STREAM_CAPTURE_MERGE
        );
        assert_void(&stream);
        assert_void(&other);
    });
}

#[test]
fn a_capture_begins_and_ends_where_it_may() {
    alone("a_capture_begins_and_ends_where_it_may", &[], || {
        let context = device();
        let (stream, other) = (context.new_stream().unwrap(), context.new_stream().unwrap());
        let legacy = context.default_stream();
        assert_eq!(
            code(legacy.begin_capture(GLOBAL)),
            Code::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
        );
        assert_eq!(
            code(stream.end_capture(NO_FLAGS)),
            Code::CUDA_ERROR_ILLEGAL_STATE
        );

        stream.begin_capture(THREAD_LOCAL).unwrap();
        assert_eq!(
            code(stream.begin_capture(THREAD_LOCAL)),
            Code::CUDA_ERROR_ILLEGAL_STATE
        );
        thread::scope(|scope| {
            scope.spawn(|| {
                let wrong = Code::CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
                assert_eq!(code(stream.end_capture(NO_FLAGS)), wrong);
            });
        });
        drop(end(&stream));

        // In relaxed mode any thread may.
        stream.begin_capture(RELAXED).unwrap();
        thread::scope(|scope| {
            scope.spawn(|| drop(end(&stream)));
        });

        let forked = event(&context);
        stream.begin_capture(THREAD_LOCAL).unwrap();
        forked.record(&stream).unwrap();
        other.wait(&forked).unwrap();
        assert_eq!(
            code(other.end_capture(NO_FLAGS)),
            Code::CUDA_ERROR_STREAM_CAPTURE_UNMATCHED
        );
        assert_void(&stream);
    });
}

#[test]
fn waiting_for_what_is_captured_voids_it_in_every_mode() {
    alone(
        "waiting_for_what_is_captured_voids_it_in_every_mode",
        &[],
        || {
            let context = device();
            let stream = context.new_stream().unwrap();
            let refused = Code::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
            for mode in [GLOBAL, THREAD_LOCAL, RELAXED] {
                stream.begin_capture(mode).unwrap();
                assert_eq!(code(stream.synchronize()), refused);
                assert_void(&stream);
                stream.begin_capture(mode).unwrap();
                // SAFETY: the stream lives.
                let answer = unsafe { sys::cuStreamQuery(stream.cu_stream()) };
                assert_eq!(answer, refused);
                assert_void(&stream);
                stream.begin_capture(mode).unwrap();
                assert_eq!(code(context.synchronize()), refused);
                assert_void(&stream);
            }
        },
    );
}

/// Calls something that CUDA holds for unsafe.
fn allocate_and_free(context: &CudaContext) -> Code {
    context.bind_to_thread().unwrap();
    // SAFETY: what is freed was just allocated.
    code(unsafe { result::malloc_sync(64).and_then(|address| result::free_sync(address)) })
}

fn exchange(mut mode: Mode) -> Mode {
    // SAFETY: a mode to exchange.
    unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut mode) }
        .result()
        .unwrap();
    mode
}

#[test]
fn the_modes_say_whom_a_capture_forbids_unsafe_calls() {
    alone(
        "the_modes_say_whom_a_capture_forbids_unsafe_calls",
        &[],
        || {
            let context = device();
            let stream = context.new_stream().unwrap();
            let (ok, refused) = (
                Code::CUDA_SUCCESS,
                Code::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
            );
            let elsewhere = |mode: Option<Mode>| {
                thread::scope(|scope| {
                    let body = || {
                        mode.map(exchange);
                        allocate_and_free(&context)
                    };
                    scope.spawn(body).join().unwrap()
                })
            };
            // Mode of the capture; of another thread, and what becomes of its call; and of the own
            // thread's.
            for (mode, other, own) in [
                (GLOBAL, (None, refused), (None, refused)),
                (GLOBAL, (Some(THREAD_LOCAL), ok), (Some(RELAXED), ok)),
                (GLOBAL, (Some(RELAXED), ok), (Some(THREAD_LOCAL), refused)),
                (THREAD_LOCAL, (None, ok), (None, refused)),
                (RELAXED, (None, ok), (None, ok)),
            ] {
                stream.begin_capture(mode).unwrap();
                assert_eq!(elsewhere(other.0), other.1, "{mode:?}");
                if other.1 == refused {
                    assert_void(&stream);
                    stream.begin_capture(mode).unwrap();
                }
                let before = own.0.map(exchange);
                assert_eq!(allocate_and_free(&context), own.1, "{mode:?}");
                before.map(exchange);
                if own.1 == refused {
                    assert_void(&stream);
                } else {
                    drop(end(&stream));
                }
            }
        },
    );
}

#[test]
fn the_default_stream_does_not_wait_for_a_stream_that_is_captured() {
    alone(
        "the_default_stream_does_not_wait_for_a_stream_that_is_captured",
        &[],
        || {
            let context = device();
            let a = memory(&context, 8);
            let mut blocking = std::ptr::null_mut();
            // SAFETY: a place for the stream.
            unsafe { sys::cuStreamCreate(&raw mut blocking, 0) }
                .result()
                .unwrap();
            let implicit = Code::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
            let set = |value| {
                // SAFETY: eight bytes of the test's; the default stream is always there.
                unsafe { sys::cuMemsetD8Async(a, value, 8, std::ptr::null_mut()) }
            };
            let mut graph = std::ptr::null_mut();
            // SAFETY: the stream lives, and there is a place for the graph.
            unsafe {
                sys::cuStreamBeginCapture_v2(blocking, RELAXED)
                    .result()
                    .unwrap();
                assert_eq!(set(1), implicit);
                let ended = sys::cuStreamEndCapture(blocking, &raw mut graph);
                assert_eq!(ended, Code::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);

                // Asking whether it is captured is refused, too, but does no harm.
                sys::cuStreamBeginCapture_v2(blocking, RELAXED)
                    .result()
                    .unwrap();
                let mut status = Status::CU_STREAM_CAPTURE_STATUS_NONE;
                let asked = sys::cuStreamIsCapturing(std::ptr::null_mut(), &raw mut status);
                assert_eq!(asked, implicit);
                sys::cuStreamEndCapture(blocking, &raw mut graph)
                    .result()
                    .unwrap();
                sys::cuGraphDestroy(graph).result().unwrap();
            }
            // A stream that is not ordered with the default one does not mind.
            let stream = context.new_stream().unwrap();
            stream.begin_capture(RELAXED).unwrap();
            set(2).result().unwrap();
            drop(end(&stream));
            assert_eq!(read(a, 8), [2; 8]);
        },
    );
}

#[test]
fn memory_cannot_be_allocated_or_freed_by_a_graph() {
    alone(
        "memory_cannot_be_allocated_or_freed_by_a_graph",
        &[],
        || {
            let context = device();
            let stream = context.new_stream().unwrap();
            let buffer = stream.alloc_zeros::<u8>(8).unwrap();
            stream.begin_capture(RELAXED).unwrap();
            // SAFETY: nothing is read before it is written.
            let allocated = unsafe { stream.alloc::<u8>(8) };
            assert_eq!(code(allocated), Code::CUDA_ERROR_NOT_SUPPORTED);
            assert_void(&stream);
            stream.begin_capture(RELAXED).unwrap();
            let (address, _) = buffer.device_ptr(&stream);
            // SAFETY: it is refused, so the slice still owns the memory.
            let freed = unsafe { result::free_async(address, stream.cu_stream()) };
            assert_eq!(code(freed), Code::CUDA_ERROR_INVALID_VALUE);
            assert_void(&stream);
            assert_eq!(stream.clone_dtoh(&buffer).unwrap(), [0; 8]);
        },
    );
}

/// Holds a stream until it is told to go on.
fn hold(stream: &CudaStream) -> mpsc::Sender<()> {
    let (send, receive) = mpsc::channel();
    let receive = Mutex::new(receive);
    call(stream, move || {
        let _ = receive
            .lock()
            .unwrap()
            .recv_timeout(Duration::from_secs(30));
    });
    send
}

#[test]
fn graph_executable_and_launch_outlive_each_other() {
    alone(
        "graph_executable_and_launch_outlive_each_other",
        &[],
        || {
            let context = device();
            let (stream, other) = (context.new_stream().unwrap(), context.new_stream().unwrap());
            let a = memory(&context, 8);
            let forked = event(&context);
            stream.begin_capture(GLOBAL).unwrap();
            fill(&stream, a, 1, 8).unwrap();
            // With a branch, which has a stream of the executable's own.
            forked.record(&stream).unwrap();
            other.wait(&forked).unwrap();
            fill(&other, a, 2, 4).unwrap();
            fill(&stream, a + 4, 3, 4).unwrap();
            forked.record(&other).unwrap();
            stream.wait(&forked).unwrap();
            // SAFETY: each handle is used until it is destroyed.
            unsafe {
                let (mut graph, mut executable) = (std::ptr::null_mut(), std::ptr::null_mut());
                sys::cuStreamEndCapture(stream.cu_stream(), &raw mut graph)
                    .result()
                    .unwrap();
                sys::cuGraphInstantiateWithFlags(&raw mut executable, graph, 0)
                    .result()
                    .unwrap();
                sys::cuGraphDestroy(graph).result().unwrap();
                let gate = hold(&stream);
                sys::cuGraphLaunch(executable, stream.cu_stream())
                    .result()
                    .unwrap();
                sys::cuGraphExecDestroy(executable).result().unwrap();
                gate.send(()).unwrap();
                stream.synchronize().unwrap();
                assert_eq!(read(a, 8), [2, 2, 2, 2, 3, 3, 3, 3]);

                // A handle that is gone is known.
                assert_eq!(
                    sys::cuGraphLaunch(executable, stream.cu_stream()),
                    Code::CUDA_ERROR_INVALID_VALUE
                );
                assert_eq!(sys::cuGraphDestroy(graph), Code::CUDA_ERROR_INVALID_VALUE);
            }
            let told = nccl_emulator::violations();
            assert_eq!(told.len(), 2, "{told:?}");
            assert!(
                told.iter()
                    .all(|violation| violation.kind() == ViolationKind::UseAfterDestroy)
            );
        },
    );
}

#[test]
fn launches_of_one_executable_come_one_after_the_other() {
    alone(
        "launches_of_one_executable_come_one_after_the_other",
        &[],
        || {
            let context = device();
            let (stream, other) = (context.new_stream().unwrap(), context.new_stream().unwrap());
            let running = Arc::new(AtomicU32::new(0));
            let most = Arc::new(AtomicU32::new(0));
            let (now, max) = (Arc::clone(&running), Arc::clone(&most));
            stream.begin_capture(GLOBAL).unwrap();
            call(&stream, move || {
                max.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                thread::sleep(Duration::from_millis(5));
                now.fetch_sub(1, Ordering::SeqCst);
            });
            let graph = end(&stream);
            for _ in 0..5 {
                graph.launch().unwrap();
                // SAFETY: both live.
                unsafe { result::graph::launch(graph.cu_graph_exec(), other.cu_stream()) }.unwrap();
            }
            other.synchronize().unwrap();
            stream.synchronize().unwrap();
            assert_eq!(most.load(Ordering::SeqCst), 1);
        },
    );
}

#[test]
fn memory_that_was_freed_is_named_when_the_graph_runs() {
    alone(
        "memory_that_was_freed_is_named_when_the_graph_runs",
        &[],
        || {
            let context = device();
            let stream = context.new_stream().unwrap();
            let a = memory(&context, 4096);
            stream.begin_capture(GLOBAL).unwrap();
            fill(&stream, a, 1, 4096).unwrap();
            let graph = end(&stream);
            graph.launch().unwrap();
            stream.synchronize().unwrap();
            // SAFETY: a live allocation; the graph still uses it, which is the point.
            unsafe { result::free_sync(a) }.unwrap();
            graph.launch().unwrap();
            assert_eq!(code(stream.synchronize()), Code::CUDA_ERROR_ILLEGAL_ADDRESS);
            let told = nccl_emulator::violations();
            assert_eq!(told.len(), 1, "{told:?}");
            assert_eq!(told[0].kind(), ViolationKind::UseAfterFree);
            let text = told[0].to_string();
            assert!(
                text.contains("4096 bytes") && text.contains("fill"),
                "{text}"
            );
        },
    );
}

#[test]
fn a_graph_that_is_launched_in_a_capture_becomes_part_of_it() {
    alone(
        "a_graph_that_is_launched_in_a_capture_becomes_part_of_it",
        &[],
        || {
            let context = device();
            let stream = context.new_stream().unwrap();
            let (a, b) = (memory(&context, 8), memory(&context, 8));
            stream.begin_capture(GLOBAL).unwrap();
            // SAFETY: both have eight bytes.
            unsafe { result::memcpy_dtod_async(b, a, 8, stream.cu_stream()) }.unwrap();
            let inner = end(&stream);
            stream.begin_capture(GLOBAL).unwrap();
            fill(&stream, a, 1, 8).unwrap();
            inner.launch().unwrap();
            fill(&stream, a, 2, 8).unwrap();
            let outer = end(&stream);
            drop(inner);
            assert_eq!(read(b, 8), [0; 8]);
            outer.launch().unwrap();
            stream.synchronize().unwrap();
            assert_eq!((read(a, 8), read(b, 8)), (vec![2; 8], vec![1; 8]));
        },
    );
}

#[test]
fn external_events_are_recorded_and_waited_for_by_each_launch() {
    alone(
        "external_events_are_recorded_and_waited_for_by_each_launch",
        &[],
        || {
            const EXTERNAL: u32 = 1;
            let context = device();
            let (stream, other) = (context.new_stream().unwrap(), context.new_stream().unwrap());
            let (a, b) = (memory(&context, 8), memory(&context, 8));
            let (before, after) = (event(&context), event(&context));
            let record = |event: &CudaEvent, stream: &CudaStream| {
                // SAFETY: both live.
                unsafe {
                    sys::cuEventRecordWithFlags(event.cu_event(), stream.cu_stream(), EXTERNAL)
                }
            };
            let wait = |stream: &CudaStream, event: &CudaEvent| {
                // SAFETY: both live.
                unsafe { sys::cuStreamWaitEvent(stream.cu_stream(), event.cu_event(), EXTERNAL) }
            };
            // The flags mean nothing outside of a capture.
            assert_eq!(record(&after, &stream), Code::CUDA_ERROR_INVALID_VALUE);
            assert_eq!(wait(&stream, &before), Code::CUDA_ERROR_INVALID_VALUE);

            stream.begin_capture(GLOBAL).unwrap();
            wait(&stream, &before).result().unwrap();
            // SAFETY: both have eight bytes.
            unsafe { result::memcpy_dtod_async(b, a, 8, stream.cu_stream()) }.unwrap();
            record(&after, &stream).result().unwrap();
            let graph = end(&stream);

            for round in 1..=2 {
                let gate = hold(&other);
                fill(&other, a, round, 8).unwrap();
                before.record(&other).unwrap();
                graph.launch().unwrap();
                assert!(!after.try_is_complete().unwrap());
                gate.send(()).unwrap();
                after.synchronize().unwrap();
                assert_eq!(read(b, 8), [round; 8]);
            }
        },
    );
}

#[test]
fn a_graph_is_instantiated_with_the_flags_that_there_are() {
    alone(
        "a_graph_is_instantiated_with_the_flags_that_there_are",
        &[],
        || {
            use sys::CUgraphInstantiate_flags as Flags;
            let context = device();
            let stream = context.new_stream().unwrap();
            let free = Flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
            let device = Flags::CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH;
            let priority = Flags::CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY;
            for (flags, expected) in [
                (NO_FLAGS, Code::CUDA_SUCCESS),
                (free | priority, Code::CUDA_SUCCESS),
                (free | device, Code::CUDA_ERROR_INVALID_VALUE),
                (Flags(64), Code::CUDA_ERROR_INVALID_VALUE),
                (device, Code::CUDA_ERROR_NOT_SUPPORTED),
            ] {
                stream.begin_capture(GLOBAL).unwrap();
                let graph = stream.end_capture(flags);
                if let Ok(Some(graph)) = &graph {
                    // Empty, and still something that can be launched.
                    graph.launch().unwrap();
                    stream.synchronize().unwrap();
                }
                assert_eq!(code(graph), expected, "{flags:?}");
            }
        },
    );
}

#[test]
fn a_stream_that_is_destroyed_takes_its_capture_along() {
    alone(
        "a_stream_that_is_destroyed_takes_its_capture_along",
        &[],
        || {
            let context = device();
            let (stream, other) = (context.new_stream().unwrap(), context.new_stream().unwrap());
            let forked = event(&context);
            stream.begin_capture(GLOBAL).unwrap();
            forked.record(&stream).unwrap();
            other.wait(&forked).unwrap();
            drop(stream);
            assert_eq!(
                other.capture_status().unwrap(),
                Status::CU_STREAM_CAPTURE_STATUS_NONE
            );
            other.synchronize().unwrap();
            assert_eq!(allocate_and_free(&context), Code::CUDA_SUCCESS);
        },
    );
}
