//! Graphs through cudarc: instantiation, launches, and what graphs outlive. Every test runs in a process
//! of its own, as the tests of captures do.

mod captures;
mod ranks;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::Duration;

use cudarc::driver::sys::CUresult as Code;
use cudarc::driver::{CudaEvent, CudaStream, result, sys};
use nccl_emulator::ViolationKind;

use captures::{GLOBAL, NO_FLAGS, call, code, device, end, event, fill, hold, memory, read};
use ranks::alone;

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
            // The capture has a branch, which runs on a stream that belongs to the executable graph.
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

                // A destroyed handle is recognized.
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
            // Outside of a capture these flags are refused.
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
                    // An empty graph can be launched.
                    graph.launch().unwrap();
                    stream.synchronize().unwrap();
                }
                assert_eq!(code(graph), expected, "{flags:?}");
            }
        },
    );
}
