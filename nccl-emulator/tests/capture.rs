//! Stream capture through cudarc: what is captured, and what invalidates a capture. Every test runs in a
//! process of its own, because a capture in global mode restricts all threads.

mod captures;
mod ranks;

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::Duration;

use cudarc::driver::sys::CUresult as Code;
use cudarc::driver::sys::CUstreamCaptureMode as Mode;
use cudarc::driver::sys::CUstreamCaptureStatus as Status;
use cudarc::driver::{CudaContext, DevicePtr, result, sys};

use captures::{
    GLOBAL, NO_FLAGS, RELAXED, THREAD_LOCAL, assert_void, call, code, device, end, event, fill,
    memory, nodes, read,
};
use ranks::alone;

#[test]
fn a_void_capture_that_another_thread_ends_is_never_told_as_active() {
    alone(
        "a_void_capture_that_another_thread_ends_is_never_told_as_active",
        &[],
        || {
            let context = device();
            let stream = context.new_stream().unwrap();
            // Odd from when the capture is invalidated until its end has returned.
            let (phase, is_done) = (AtomicU32::new(0), AtomicBool::new(false));
            let asked = AtomicU32::new(0);
            thread::scope(|scope| {
                let asks = scope.spawn(|| {
                    context.bind_to_thread().unwrap();
                    while !is_done.load(Ordering::SeqCst) {
                        let before = phase.load(Ordering::SeqCst);
                        // SAFETY: the stream lives.
                        let status = unsafe { result::stream::is_capturing(stream.cu_stream()) };
                        if before % 2 == 1 && phase.load(Ordering::SeqCst) == before {
                            let active = Status::CU_STREAM_CAPTURE_STATUS_ACTIVE;
                            assert_ne!(status.unwrap(), active, "in phase {before}");
                            asked.fetch_add(1, Ordering::SeqCst);
                        }
                    }
                });
                let mut rounds = 0;
                // More rounds where both threads share one core.
                while rounds < 20_000 || asked.load(Ordering::SeqCst) <= 100 {
                    rounds += 1;
                    stream.begin_capture(RELAXED).unwrap();
                    // SAFETY: the stream lives. The query invalidates the capture.
                    let said = unsafe { sys::cuStreamQuery(stream.cu_stream()) };
                    assert_eq!(said, Code::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
                    phase.fetch_add(1, Ordering::SeqCst);
                    assert!(stream.end_capture(NO_FLAGS).is_err(), "it is void");
                    phase.fetch_add(1, Ordering::SeqCst);
                    if asks.is_finished() {
                        break;
                    }
                }
                is_done.store(true, Ordering::SeqCst);
                asks.join().expect("it was never told as active");
            });
        },
    );
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
        // From here on, every call on the stream reports the invalidation.
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

        // The event stays unusable after the capture has ended.
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

        // Recording the event again makes it usable.
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

        // In relaxed mode any thread may end the capture.
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

/// Makes calls that CUDA considers unsafe during a capture.
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
            // The mode of the capture; for another thread and for this one: the mode that the thread sets, and the
            // result of its calls.
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
                // SAFETY: the eight bytes belong to the test, and the default stream always exists.
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

                // The query of the capture status is refused as well, but does not invalidate the capture.
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
            // Work on the default stream does not affect the capture of a stream that is not ordered with it.
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
