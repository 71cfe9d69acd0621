//! NCCL operations in graphs: captured by the ranks, replayed by all of them.

mod ranks;

use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use cudarc::driver::sys::CUstreamCaptureMode as Mode;
use cudarc::driver::{CudaGraph, CudaStream, result, sys};
use nccl_emulator::ViolationKind;
use nccl_sys::{ncclDataType_t, ncclRedOp_t};

use ranks::{
    Gate, Memory, Rank, alone, last_error, nccl, processes, threads, unique_id, wait_until,
};

const F32: ncclDataType_t = ncclDataType_t::ncclFloat32;
const U8: ncclDataType_t = ncclDataType_t::ncclUint8;
const SUM: ncclRedOp_t = ncclRedOp_t::ncclSum;
const INVALID_USAGE: u32 = 5;
const IN_PROGRESS: u32 = 7;

fn begin(rank: &Rank) {
    rank.gpu.bind_to_thread().unwrap();
    rank.stream
        .begin_capture(Mode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
        .unwrap();
}

fn end(rank: &Rank) -> CudaGraph {
    rank.stream
        .end_capture(sys::CUgraphInstantiate_flags(0))
        .unwrap()
        .unwrap()
}

fn nodes(graph: &CudaGraph) -> usize {
    let mut count = 0;
    // SAFETY: the graph lives, and the call only reads its number of nodes.
    unsafe { sys::cuGraphGetNodes(graph.cu_graph(), std::ptr::null_mut(), &raw mut count) }
        .result()
        .unwrap();
    count
}

/// Checks the number of a graph's nodes. NVIDIA's library records and awaits events beside its operations.
fn assert_operations(graph: &CudaGraph, count: usize) {
    let found = nodes(graph);
    assert!(
        found == count || on_nvidias() && found > count,
        "{found} nodes"
    );
}

/// Whether NVIDIA's own library is tested.
fn on_nvidias() -> bool {
    std::env::var_os("NCCL_EMULATOR_NCCL").is_some()
}

/// Overwrites device memory, once the stream is idle.
fn write(rank: &Rank, to: &Memory<f32>, values: &[f32]) {
    rank.sync();
    // SAFETY: the memory has as many values.
    unsafe { result::memcpy_htod_sync(to.address, values) }.unwrap();
}

/// A ring of messages and an all-reduce in one graph, replayed with other data each time.
fn replay_a_ring_and_a_sum(rank: &Rank) {
    let (own, ranks) = (rank.rank, rank.ranks);
    let (next, previous) = ((own + 1) % ranks, (own + ranks - 1) % ranks);
    let length = 10_000;
    let from = rank.memory(&vec![0f32; length]);
    let to = rank.memory(&vec![0f32; length]);
    let sum = rank.memory(&vec![0f32; length]);

    begin(rank);
    nccl!(ncclGroupStart());
    assert_eq!(rank.send(&from, F32, next), 0);
    assert_eq!(rank.receive(&to, F32, previous), 0);
    assert_eq!(nccl!(ncclGroupEnd()), 0, "{}", last_error());
    // Stream order: the all-reduce sums the data that was just received.
    assert_eq!(rank.all_reduce(&to, &sum, F32, SUM), 0, "{}", last_error());
    let graph = end(rank);
    assert_operations(&graph, 2);
    assert_eq!(to.read(), vec![0.; length], "nothing has run yet");

    for round in 1..=4 {
        let value = |rank: i32| (rank + 1) as f32 * round as f32;
        write(rank, &from, &vec![value(own); length]);
        graph.launch().unwrap();
        rank.sync();
        assert_eq!(to.read(), vec![value(previous); length]);
        let expected: f32 = (0..ranks).map(value).sum();
        assert_eq!(sum.read(), vec![expected; length]);
        // An operation that is not captured runs between two replays.
        assert_eq!(rank.all_reduce(&from, &sum, F32, SUM), 0);
        rank.sync();
        assert_eq!(sum.read(), vec![expected; length]);
    }
    // Several launches at once.
    for _ in 0..10 {
        graph.launch().unwrap();
    }
    rank.sync();
    drop(graph);
}

#[test]
fn threads_replay_messages_and_a_sum() {
    alone("threads_replay_messages_and_a_sum", &[], || {
        threads(3, replay_a_ring_and_a_sum);
        assert_eq!(nccl_emulator::violations().len(), 0);
    });
}

#[test]
fn processes_replay_messages_and_a_sum() {
    processes("processes_replay_messages_and_a_sum", 3, &[], |process| {
        let rank = process.join();
        replay_a_ring_and_a_sum(&rank);
        rank.destroy();
    });
}

#[test]
fn one_thread_captures_several_ranks_into_one_graph() {
    alone(
        "one_thread_captures_several_ranks_into_one_graph",
        &[],
        || {
            let id = unique_id();
            let members: Vec<Rank> = thread::scope(|scope| {
                let join = |rank| scope.spawn(move || Rank::join(id, 3, rank));
                let joining: Vec<_> = (0..3).map(join).collect();
                joining
                    .into_iter()
                    .map(|rank| rank.join().unwrap())
                    .collect()
            });
            let from: Vec<_> = members
                .iter()
                .map(|r| r.memory(&[r.rank as f32; 100]))
                .collect();
            let to: Vec<_> = members.iter().map(|r| r.memory(&[0f32; 100])).collect();
            // All streams are brought into the capture of the first.
            let origin = &members[0];
            begin(origin);
            let fork = origin.gpu.new_event(None).unwrap();
            fork.record(&origin.stream).unwrap();
            for other in &members[1..] {
                other.stream.wait(&fork).unwrap();
            }
            nccl!(ncclGroupStart());
            for (at, rank) in members.iter().enumerate() {
                assert_eq!(rank.all_reduce(&from[at], &to[at], F32, SUM), 0);
            }
            assert_eq!(nccl!(ncclGroupEnd()), 0, "{}", last_error());
            for other in &members[1..] {
                other.gpu.bind_to_thread().unwrap();
                let joined = other.gpu.new_event(None).unwrap();
                joined.record(&other.stream).unwrap();
                origin.gpu.bind_to_thread().unwrap();
                origin.stream.wait(&joined).unwrap();
            }
            let graph = end(origin);
            assert_operations(&graph, 3);
            for _ in 0..2 {
                // The ranks wait for each other inside of the one graph.
                graph.launch().unwrap();
                origin.sync();
                for memory in &to {
                    assert_eq!(memory.read(), [3.; 100]);
                }
            }
            drop(graph);
            nccl!(ncclGroupStart());
            for rank in members {
                assert_eq!(nccl!(ncclCommDestroy(rank.comm)), 0);
            }
            assert_eq!(nccl!(ncclGroupEnd()), 0);
        },
    );
}

/// Holds a stream for a while, so that others get ahead of it.
fn pause(stream: &CudaStream) {
    unsafe extern "C" fn sleep(_: *mut c_void) {
        thread::sleep(Duration::from_millis(50));
    }
    let stream = stream.cu_stream();
    // SAFETY: the function takes no argument.
    unsafe { result::stream::launch_host_function(stream, sleep, std::ptr::null_mut()) }.unwrap();
}

/// An all-reduce on a stream other than the rank's.
fn sum_on(stream: &CudaStream, rank: &Rank, from: &Memory<f32>, to: &Memory<f32>) {
    let (send, receive, count) = (from.ptr(), to.ptr(), from.len);
    let stream = stream.cu_stream().cast();
    let code = nccl!(ncclAllReduce(
        send, receive, count, F32, SUM, rank.comm, stream
    ));
    assert_eq!(code, 0, "{}", last_error());
}

// In the next tests one rank's first operation is late. If its second one went ahead, it would meet
// the first one of the other rank.

#[test]
fn two_launches_of_a_communicator_in_one_graph_keep_their_order() {
    let name = "two_launches_of_a_communicator_in_one_graph_keep_their_order";
    alone(name, &[], || {
        threads(2, |rank| {
            let other = rank.gpu.new_stream().unwrap();
            let fork = rank.gpu.new_event(None).unwrap();
            let join = rank.gpu.new_event(None).unwrap();
            let (small, a) = (rank.memory(&[1f32; 10]), rank.memory(&[0f32; 10]));
            let (large, b) = (rank.memory(&[2f32; 500]), rank.memory(&[0f32; 500]));
            begin(rank);
            fork.record(&rank.stream).unwrap();
            other.wait(&fork).unwrap();
            if rank.rank == 0 {
                pause(&rank.stream);
            }
            sum_on(&rank.stream, rank, &large, &b);
            sum_on(&other, rank, &small, &a);
            join.record(&other).unwrap();
            rank.stream.wait(&join).unwrap();
            let graph = end(rank);
            for _ in 0..3 {
                graph.launch().unwrap();
            }
            rank.sync();
            assert_eq!((a.read(), b.read()), (vec![2.; 10], vec![4.; 500]));
        });
    });
}

#[test]
fn a_replay_keeps_its_place_among_other_launches_of_the_communicator() {
    let name = "a_replay_keeps_its_place_among_other_launches_of_the_communicator";
    alone(name, &[], || {
        threads(2, |rank| {
            let other = rank.gpu.new_stream().unwrap();
            let (small, a) = (rank.memory(&[1f32; 10]), rank.memory(&[0f32; 10]));
            let (large, b) = (rank.memory(&[2f32; 500]), rank.memory(&[0f32; 500]));
            begin(rank);
            sum_on(&rank.stream, rank, &small, &a);
            let graph = end(rank);
            for replay_first in [true, false] {
                let late = if replay_first { &*rank.stream } else { &other };
                if rank.rank == 0 {
                    pause(late);
                }
                if replay_first {
                    graph.launch().unwrap();
                    sum_on(&other, rank, &large, &b);
                } else {
                    sum_on(&other, rank, &large, &b);
                    graph.launch().unwrap();
                }
                // No other thread runs the stream that is not late.
                if replay_first { &other } else { &rank.stream }
                    .synchronize()
                    .unwrap();
                late.synchronize().unwrap();
            }
            assert_eq!((a.read(), b.read()), (vec![2.; 10], vec![4.; 500]));
        });
    });
}

#[test]
fn streams_of_one_group_are_all_captured_or_none() {
    alone("streams_of_one_group_are_all_captured_or_none", &[], || {
        threads(2, |rank| {
            let other = rank.gpu.new_stream().unwrap();
            let memory = rank.memory(&[0u8; 8]);
            begin(rank);
            nccl!(ncclGroupStart());
            assert_eq!(rank.send(&memory, U8, 1 - rank.rank), 0);
            let stream = other.cu_stream().cast();
            let code = nccl!(ncclRecv(
                memory.ptr(),
                8,
                U8,
                1 - rank.rank,
                rank.comm,
                stream
            ));
            assert_eq!(code, INVALID_USAGE);
            assert!(last_error().contains("must either be all uncaptured or all captured"));
            assert_eq!(nccl!(ncclGroupEnd()), INVALID_USAGE);
            drop(end(rank));
        });
    });
}

#[test]
fn ranks_of_one_group_are_all_captured_or_none() {
    alone("ranks_of_one_group_are_all_captured_or_none", &[], || {
        let id = unique_id();
        let [a, b] = thread::scope(|scope| {
            let other = scope.spawn(move || Rank::join(id, 2, 1));
            [Rank::join(id, 2, 0), other.join().unwrap()]
        });
        let (from, to) = (a.memory(&[1u8; 8]), b.memory(&[0u8; 8]));
        begin(&a);
        nccl!(ncclGroupStart());
        assert_eq!(a.send(&from, U8, 1), 0);
        assert_eq!(b.receive(&to, U8, 0), 0);
        assert_eq!(nccl!(ncclGroupEnd()), INVALID_USAGE);
        assert!(
            last_error().contains("Either none or all communicators"),
            "{}",
            last_error()
        );
        drop(end(&a));
    });
}

#[test]
fn a_non_blocking_group_is_captured_once_it_was_polled() {
    alone(
        "a_non_blocking_group_is_captured_once_it_was_polled",
        &[],
        || {
            let id = unique_id();
            thread::scope(|scope| {
                for rank in 0..2 {
                    scope.spawn(move || {
                        let rank = Rank::join_nonblocking(id, 2, rank);
                        assert_eq!(rank.settle(), 0);
                        let (from, to) = (rank.memory(&[2f32; 8]), rank.memory(&[0f32; 8]));
                        begin(&rank);
                        let code = rank.all_reduce(&from, &to, F32, SUM);
                        assert!(code == IN_PROGRESS || on_nvidias() && code == 0);
                        assert_eq!(rank.settle(), 0);
                        let graph = end(&rank);
                        assert_operations(&graph, 1);
                        graph.launch().unwrap();
                        rank.sync();
                        assert_eq!(to.read(), [4.; 8]);

                        if on_nvidias() {
                            // NCCL's thread may be done before the capture ends.
                            drop(graph);
                            rank.abort();
                            return;
                        }
                        // This capture ends before the operation is captured, which then has nothing to be captured into.
                        begin(&rank);
                        assert_eq!(rank.all_reduce(&from, &to, F32, SUM), IN_PROGRESS);
                        let empty = end(&rank);
                        assert_eq!(rank.settle(), 1);
                        assert!(nodes(&empty) <= 1);
                        drop((graph, empty));
                        rank.abort();
                    });
                }
            });
        },
    );
}

#[test]
fn a_destroy_waits_for_graph_and_executable() {
    alone("a_destroy_waits_for_graph_and_executable", &[], || {
        wait_for_graphs(|rank| nccl!(ncclCommDestroy(rank.comm)));
    });
}

#[test]
fn a_finalize_waits_for_graph_and_executable() {
    alone("a_finalize_waits_for_graph_and_executable", &[], || {
        wait_for_graphs(|rank| nccl!(ncclCommFinalize(rank.comm)));
    });
}

#[test]
fn even_an_abort_waits_for_graph_and_executable() {
    alone("even_an_abort_waits_for_graph_and_executable", &[], || {
        wait_for_graphs(|rank| nccl!(ncclCommAbort(rank.comm)));
    });
}

fn wait_for_graphs(leave: impl Fn(&Rank) -> u32 + Sync) {
    let rank = Rank::join(unique_id(), 1, 0);
    // A message to itself, because a collective of one rank launches nothing.
    let (from, to) = (rank.memory(&[1u8; 8]), rank.memory(&[0u8; 8]));
    begin(&rank);
    nccl!(ncclGroupStart());
    assert_eq!(rank.send(&from, U8, 0), 0);
    assert_eq!(rank.receive(&to, U8, 0), 0);
    assert_eq!(nccl!(ncclGroupEnd()), 0, "{}", last_error());
    let (mut graph, mut executable) = (std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: places for the handles, and the handles are live.
    unsafe {
        sys::cuStreamEndCapture(rank.stream.cu_stream(), &raw mut graph)
            .result()
            .unwrap();
        sys::cuGraphInstantiateWithFlags(&raw mut executable, graph, 0)
            .result()
            .unwrap();
    }
    let left = AtomicBool::new(false);
    let pause = || thread::sleep(Duration::from_millis(100));
    thread::scope(|scope| {
        scope.spawn(|| {
            assert_eq!(leave(&rank), 0);
            left.store(true, Ordering::SeqCst);
        });
        pause();
        assert!(!left.load(Ordering::SeqCst), "both are there");
        // SAFETY: a live handle, used for the last time.
        unsafe { sys::cuGraphDestroy(graph) }.result().unwrap();
        pause();
        assert!(!left.load(Ordering::SeqCst), "the executable is there");
        // A pending launch holds the communicator as well.
        let gate = Gate::on(&rank);
        // SAFETY: live handles; the executable is used for the last time.
        unsafe {
            sys::cuGraphLaunch(executable, rank.stream.cu_stream())
                .result()
                .unwrap();
            sys::cuGraphExecDestroy(executable).result().unwrap();
        }
        pause();
        assert!(!left.load(Ordering::SeqCst), "a launch is on its way");
        gate.open();
        wait_until("the communicator is left", || left.load(Ordering::SeqCst));
    });
}

#[test]
fn a_replay_that_no_peer_joins_ends_by_an_abort() {
    let name = "a_replay_that_no_peer_joins_ends_by_an_abort";
    processes(name, 2, &[], |process| {
        let rank = process.join();
        let (from, to) = (rank.memory(&[1f32; 64]), rank.memory(&[0f32; 64]));
        begin(&rank);
        assert_eq!(rank.all_reduce(&from, &to, F32, SUM), 0);
        let graph = end(&rank);
        graph.launch().unwrap();
        rank.sync();
        assert_eq!(to.read(), [2.; 64]);
        if rank.rank == 1 {
            process.wait_for("aborted");
            drop(graph);
            assert_eq!(rank.abort(), 0);
            return;
        }
        graph.launch().unwrap();
        thread::sleep(Duration::from_millis(50));
        assert!(!rank.is_idle(), "the peer does not take part");
        thread::scope(|scope| {
            let abort = scope.spawn(|| rank.abort());
            // The abort ends the replay on the stream, and waits for the graph.
            rank.sync();
            thread::sleep(Duration::from_millis(100));
            assert!(!abort.is_finished());
            drop(graph);
            assert_eq!(abort.join().unwrap(), 0);
        });
        process.mark("aborted");
    });
}

#[test]
fn memory_that_was_freed_is_named_when_a_rank_replays() {
    alone(
        "memory_that_was_freed_is_named_when_a_rank_replays",
        &[],
        || {
            let rank = Rank::join(unique_id(), 1, 0);
            let (from, to) = (rank.memory(&[1u8; 4096]), rank.memory(&[0u8; 4096]));
            begin(&rank);
            nccl!(ncclGroupStart());
            assert_eq!(rank.send(&from, U8, 0), 0);
            assert_eq!(rank.receive(&to, U8, 0), 0);
            assert_eq!(nccl!(ncclGroupEnd()), 0);
            let graph = end(&rank);
            graph.launch().unwrap();
            rank.sync();
            assert_eq!(to.read(), [1; 4096]);
            from.free();
            graph.launch().unwrap();
            let error = rank.stream.synchronize().unwrap_err();
            assert_eq!(error.0, sys::CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
            let told = nccl_emulator::violations();
            assert_eq!(told.len(), 1, "{told:?}");
            assert_eq!(told[0].kind(), ViolationKind::UseAfterFree);
            assert!(told[0].to_string().contains("4096 bytes"), "{}", told[0]);
        },
    );
}

#[test]
fn a_collective_of_one_rank_is_a_copy_in_the_graph() {
    alone(
        "a_collective_of_one_rank_is_a_copy_in_the_graph",
        &[],
        || {
            let rank = Rank::join(unique_id(), 1, 0);
            let (from, to) = (rank.memory(&[5f32; 8]), rank.memory(&[0f32; 8]));
            begin(&rank);
            assert_eq!(rank.all_reduce(&from, &to, F32, SUM), 0);
            let graph = end(&rank);
            assert_operations(&graph, 1);
            graph.launch().unwrap();
            rank.sync();
            assert_eq!(to.read(), [5.; 8]);
            // A copy is no launch, so the communicator need not wait for the graph.
            rank.destroy();
            drop(graph);
        },
    );
}

#[test]
fn a_void_capture_takes_no_operation() {
    alone("a_void_capture_takes_no_operation", &[], || {
        let rank = Rank::join(unique_id(), 1, 0);
        let (from, to) = (rank.memory(&[5f32; 8]), rank.memory(&[0f32; 8]));
        begin(&rank);
        assert!(rank.stream.synchronize().is_err());
        assert_eq!(rank.all_reduce(&from, &to, F32, SUM), 1);
        let error = last_error();
        assert!(
            error.contains("901") || error.contains("previous error during capture"),
            "{error}"
        );
        assert!(
            rank.stream
                .end_capture(sys::CUgraphInstantiate_flags(0))
                .is_err()
        );
        rank.destroy();
    });
}
