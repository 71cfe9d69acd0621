//! Operations of NVIDIA's own library in graphs: captured by the ranks, replayed by all of them, over each transport.
//! `nccl_graphs.rs` holds what they share with the emulator's own NCCL; here is what only NVIDIA's library has.

mod ranks;
mod real;

use cudarc::driver::sys::CUstreamCaptureMode as Mode;
use cudarc::driver::{CudaGraph, result, sys};
use nccl_sys::{ncclDataType_t as Kind, ncclRedOp_t as Op};
use ranks::cases::{Case, Function, Prepared, functions};
use ranks::{Memory, Rank, is_child_of, last_error, nccl, threads};
use real::windows::{Buffers, Collective, MACHINE, Shown};
use real::{P2P, SHM, SOCKETS, on_each};

/// Replays of a graph.
const REPLAYS: usize = 100;

/// Captures what `body` puts on a rank's stream.
fn captured(rank: &Rank, body: impl FnOnce()) -> CudaGraph {
    rank.gpu.bind_to_thread().unwrap();
    let mode = Mode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
    rank.stream.begin_capture(mode).unwrap();
    body();
    let flags = sys::CUgraphInstantiate_flags(0);
    rank.stream.end_capture(flags).unwrap().unwrap()
}

fn in_a_group(body: impl FnOnce()) {
    assert_eq!(nccl!(ncclGroupStart()), 0);
    body();
    assert_eq!(nccl!(ncclGroupEnd()), 0, "{}", last_error());
}

fn write(rank: &Rank, to: &Memory<f32>, value: f32) {
    rank.sync();
    // SAFETY: the memory has as many values.
    unsafe { result::memcpy_htod_sync(to.address, &vec![value; to.len]) }.unwrap();
}

/// A ring of messages, an all-to-all in a group of sends and receives, and an all-reduce of the received data, replayed with
/// other values each time. Other work of the communicator runs between replays.
fn replay(rank: &Rank, length: usize) {
    let (own, ranks) = (rank.rank, rank.ranks);
    let (next, previous) = ((own + 1) % ranks, (own + ranks - 1) % ranks);
    let from = rank.memory(&vec![0f32; length]);
    let to = rank.memory(&vec![0f32; length]);
    let sum = rank.memory(&vec![0f32; length]);
    let all: Vec<_> = (0..ranks)
        .map(|_| rank.memory(&vec![0f32; length]))
        .collect();
    let kind = Kind::ncclFloat32;
    let graph = captured(rank, || {
        in_a_group(|| {
            assert_eq!(rank.send(&from, kind, next), 0);
            assert_eq!(rank.receive(&to, kind, previous), 0);
        });
        assert_eq!(rank.all_reduce(&to, &sum, kind, Op::ncclSum), 0);
        in_a_group(|| {
            for peer in 0..ranks {
                assert_eq!(rank.send(&sum, kind, peer), 0);
                assert_eq!(rank.receive(&all[peer as usize], kind, peer), 0);
            }
        });
    });
    for round in 0..REPLAYS {
        let value = |rank: i32| (rank + 1) as f32 * (round % 7 + 1) as f32;
        write(rank, &from, value(own));
        graph.launch().unwrap();
        if round % 20 == 3 {
            assert_eq!(rank.all_reduce(&from, &to, kind, Op::ncclSum), 0);
            rank.sync();
        }
        rank.sync();
        if round % 20 != 3 {
            assert_eq!(to.read(), vec![value(previous); length]);
        }
        let expected: f32 = (0..ranks).map(value).sum();
        for memory in &all {
            assert_eq!(memory.read(), vec![expected; length], "round {round}");
        }
    }
    for _ in 0..10 {
        graph.launch().unwrap();
    }
    rank.sync();
    drop(graph);
}

#[test]
fn a_graph_of_messages_and_a_sum_is_replayed_over_each_transport() {
    let name = "a_graph_of_messages_and_a_sum_is_replayed_over_each_transport";
    for environment in [&P2P[..], &SHM, &SOCKETS] {
        on_each(name, 3, environment, |process| {
            let rank = process.join();
            replay(&rank, 1001);
            rank.destroy();
        });
        if is_child_of(name) {
            break;
        }
    }
}

#[test]
fn graphs_may_run_beside_other_work_or_the_support_for_it_is_off() {
    let name = "graphs_may_run_beside_other_work_or_the_support_for_it_is_off";
    for support in ["0", "1"] {
        let environment = [("NCCL_GRAPH_MIXING_SUPPORT", support)];
        on_each(name, 1, &environment, |_| {
            ranks::api();
            threads(3, |rank| replay(rank, 100));
        });
    }
}

/// Work items that do not fit into a kernel's arguments stay in memory of their own for as long as their graph.
#[test]
fn more_work_than_a_kernel_has_arguments_for_is_kept_for_replays() {
    let name = "more_work_than_a_kernel_has_arguments_for_is_kept_for_replays";
    on_each(name, 1, &[("NCCL_WORK_ARGS_BYTES", "256")], |_| {
        ranks::api();
        threads(3, |rank| {
            let prepare = |salt| -> Vec<Prepared> {
                let case = |count| Case {
                    salt,
                    ..Case::new(Function::AllReduce, count)
                };
                (1..60).map(|count| case(count).prepare(rank)).collect()
            };
            let first = prepare(1);
            let graph = captured(rank, || {
                in_a_group(|| first.iter().for_each(|one| assert_eq!(one.issue(rank), 0)));
            });
            // Other work, which must not take the place of the graph's.
            for salt in 2..6 {
                let others = prepare(salt);
                in_a_group(|| others.iter().for_each(|one| assert_eq!(one.issue(rank), 0)));
                rank.sync();
                others.into_iter().for_each(|one| one.verify(rank));
            }
            for _ in 0..3 {
                graph.launch().unwrap();
            }
            rank.sync();
            first.into_iter().for_each(|one| one.verify(rank));
            drop(graph);
        });
    });
}

#[test]
fn every_collective_is_right_in_a_graph() {
    let name = "every_collective_is_right_in_a_graph";
    for environment in [&P2P[..], &SOCKETS] {
        on_each(name, 4, environment, |process| {
            let rank = process.join();
            for function in functions() {
                let cases = [1, 1000, 50_001].map(|count| Case {
                    root: 2,
                    ..Case::new(function, count)
                });
                let prepared = cases.map(|case| case.prepare(&rank));
                let graph = captured(&rank, || {
                    for one in &prepared {
                        assert_eq!(one.issue(&rank), 0, "{}", last_error());
                    }
                });
                for _ in 0..3 {
                    graph.launch().unwrap();
                }
                rank.sync();
                for one in prepared {
                    one.verify(&rank);
                }
            }
            rank.destroy();
        });
        if is_child_of(name) {
            break;
        }
    }
}

/// Several graphs of a communicator, destroyed in another order than they were made; the communicator works on.
#[test]
fn graphs_end_in_any_order_and_the_communicator_goes_on() {
    let name = "graphs_end_in_any_order_and_the_communicator_goes_on";
    on_each(name, 2, &SOCKETS, |process| {
        let rank = process.join();
        let prepared: Vec<_> = (1..6)
            .map(|count| Case::new(Function::AllReduce, 1000 * count).prepare(&rank))
            .collect();
        let mut graphs: Vec<_> = prepared
            .iter()
            .map(|one| captured(&rank, || assert_eq!(one.issue(&rank), 0)))
            .collect();
        for at in [3, 0, 1, 0, 0] {
            graphs.iter().for_each(|graph| graph.launch().unwrap());
            rank.sync();
            drop(graphs.remove(at));
            Case::new(Function::AllReduce, 777).check(&rank);
        }
        prepared.into_iter().for_each(|one| one.verify(&rank));
        rank.destroy();
    });
}

/// The most groups after which NCCL looks for graphs that have ended.
const GROUPS: usize = 11;

/// Buffers that NCCL registers by itself when they are captured, and that a rank's peers use in place.
///
/// NCCL drops the registration of an ended graph only some groups later. If the memory is freed before that, and another
/// allocation gets its address, peers write through the old registration. So this test first lets NCCL look.
#[test]
fn buffers_of_a_graph_are_registered_and_used_in_place() {
    let name = "buffers_of_a_graph_are_registered_and_used_in_place";
    let environment = [
        MACHINE,
        ("NCCL_GRAPH_REGISTER", "1"),
        ("NCCL_PROTO", "Simple"),
    ];
    on_each(name, 3, &environment, |process| {
        let rank = process.join();
        let (count, kind, op) = (50_001, Kind::ncclFloat32, Op::ncclSum);
        let room = 4 * count * rank.ranks as usize;
        for collective in [
            Collective::AllReduce,
            Collective::AllGather,
            Collective::ReduceScatter,
        ] {
            let buffers = Buffers {
                input: Shown::without_window(&rank, room),
                output: Shown::without_window(&rank, room),
                offsets: [0; 2],
            };
            buffers.fill(&rank, collective, kind, count);
            let graph = captured(&rank, || buffers.call(&rank, collective, kind, op, count));
            for _ in 0..10 {
                buffers.output.write(0, &vec![0xa5; room]);
                graph.launch().unwrap();
                rank.sync();
                buffers.check(&rank, collective, kind, op, count);
            }
            drop(graph);
            for _ in 0..GROUPS {
                Case::new(Function::AllReduce, 7).check(&rank);
            }
            buffers.input.end(&rank);
            buffers.output.end(&rank);
        }
        let log = process.log();
        assert!(log.contains("IPC register buffer"), "nothing registered");
        assert!(
            log.contains("IPC deregistered buffer"),
            "all is still registered"
        );
        rank.destroy();
    });
}
