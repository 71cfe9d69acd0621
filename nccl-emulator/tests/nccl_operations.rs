//! Results of sends and receives, all-to-all and all-reduce, with ranks as threads and as processes.

mod ranks;

use half::{bf16, f16};
use nccl_sys::{ncclDataType_t as Kind, ncclRedOp_t as Op};
use ranks::{Memory, Rank, alone, last_error, nccl, processes, threads};

/// A value that encodes its sender, its receiver and its index.
fn value(from: i32, to: i32, at: usize) -> u32 {
    (from as u32) << 24 | (to as u32) << 16 | at as u32 & 0xffff
}

fn all_to_all(rank: &Rank, count: usize) {
    let input: Vec<u32> = (0..rank.ranks)
        .flat_map(|to| (0..count).map(move |at| value(rank.rank, to, at)))
        .collect();
    let from = rank.memory(&input);
    let to = rank.memory(&vec![0u32; input.len()]);
    assert_eq!(
        rank.all_to_all(&from, &to, Kind::ncclUint32),
        0,
        "{}",
        last_error()
    );
    rank.sync();
    let expected: Vec<u32> = (0..rank.ranks)
        .flat_map(|from| (0..count).map(move |at| value(from, rank.rank, at)))
        .collect();
    assert!(
        to.read() == expected,
        "{count} elements among {} ranks",
        rank.ranks
    );
    assert!(from.read() == input);
    from.free();
    to.free();
}

fn all_reduce_sum(rank: &Rank, count: usize) {
    let input: Vec<u64> = (0..count)
        .map(|at| at as u64 * 3 + rank.rank as u64)
        .collect();
    let from = rank.memory(&input);
    let to = rank.memory(&vec![0u64; count]);
    assert_eq!(
        rank.all_reduce(&from, &to, Kind::ncclUint64, Op::ncclSum),
        0,
        "{}",
        last_error()
    );
    rank.sync();
    let n = rank.ranks as u64;
    let expected: Vec<u64> = (0..count)
        .map(|at| at as u64 * 3 * n + n * (n - 1) / 2)
        .collect();
    assert!(
        to.read() == expected,
        "{count} elements among {} ranks",
        rank.ranks
    );
    from.free();
    to.free();
}

const COUNTS: [usize; 7] = [1, 3, 127, 4096, 65_537, 100_003, 300_007];

#[test]
fn all_to_all_is_right_for_any_number_of_ranks_and_odd_counts() {
    alone(
        "all_to_all_is_right_for_any_number_of_ranks_and_odd_counts",
        &[],
        || {
            for ranks in [1, 2, 4, 8] {
                threads(ranks, |rank| {
                    COUNTS.iter().for_each(|&count| all_to_all(rank, count))
                });
            }
        },
    );
}

#[test]
fn all_to_all_is_right_between_processes() {
    processes("all_to_all_is_right_between_processes", 4, &[], |process| {
        let rank = process.join();
        COUNTS.iter().for_each(|&count| all_to_all(&rank, count));
        rank.destroy();
    });
}

#[test]
fn all_reduce_is_right_for_any_number_of_ranks_and_odd_counts() {
    alone(
        "all_reduce_is_right_for_any_number_of_ranks_and_odd_counts",
        &[],
        || {
            for ranks in [1, 2, 4, 8] {
                threads(ranks, |rank| {
                    COUNTS.iter().for_each(|&count| all_reduce_sum(rank, count))
                });
            }
        },
    );
}

#[test]
fn all_reduce_is_right_between_processes() {
    processes("all_reduce_is_right_between_processes", 3, &[], |process| {
        let rank = process.join();
        COUNTS
            .iter()
            .for_each(|&count| all_reduce_sum(&rank, count));
        rank.destroy();
    });
}

trait Number: Copy + Default + PartialEq + std::fmt::Debug {
    fn from(value: f64) -> Self;
}
macro_rules! numbers {
    ($($type:ty),*) => {$(impl Number for $type { fn from(value: f64) -> Self { value as $type } })*};
}
numbers!(i8, u8, i32, u32, i64, u64, f32, f64);
impl Number for f16 {
    fn from(value: f64) -> Self {
        Self::from_f64(value)
    }
}
impl Number for bf16 {
    fn from(value: f64) -> Self {
        Self::from_f64(value)
    }
}

fn every_operator<T: Number>(rank: &Rank, kind: Kind) {
    let count = 1001;
    let value = |rank: i32, at: usize| ((at * 5 + rank as usize * 3) % 4 + 1) as f64;
    let input: Vec<T> = (0..count).map(|at| T::from(value(rank.rank, at))).collect();
    let both: Memory<T> = rank.memory(&input);
    for (operator, fold) in [
        (Op::ncclSum, (|a, b| a + b) as fn(f64, f64) -> f64),
        (Op::ncclProd, |a, b| a * b),
        (Op::ncclMax, f64::max),
        (Op::ncclMin, f64::min),
    ] {
        let to = rank.memory(&vec![T::default(); count]);
        assert_eq!(
            rank.all_reduce(&both, &to, kind, operator),
            0,
            "{}",
            last_error()
        );
        rank.sync();
        let expected: Vec<T> = (0..count)
            .map(|at| {
                T::from(
                    (0..rank.ranks)
                        .map(|rank| value(rank, at))
                        .reduce(fold)
                        .unwrap(),
                )
            })
            .collect();
        assert_eq!(to.read(), expected, "{kind:?} {operator:?}");
        to.free();
    }
    // In place.
    assert_eq!(rank.all_reduce(&both, &both, kind, Op::ncclMax), 0);
    rank.sync();
    assert!(both.read().iter().all(|&x| x != T::default()));
    both.free();
}

#[test]
fn all_reduce_is_right_for_every_type_and_operator() {
    alone(
        "all_reduce_is_right_for_every_type_and_operator",
        &[],
        || {
            threads(3, |rank| {
                every_operator::<i8>(rank, Kind::ncclInt8);
                every_operator::<u8>(rank, Kind::ncclUint8);
                every_operator::<i32>(rank, Kind::ncclInt32);
                every_operator::<u32>(rank, Kind::ncclUint32);
                every_operator::<i64>(rank, Kind::ncclInt64);
                every_operator::<u64>(rank, Kind::ncclUint64);
                every_operator::<f16>(rank, Kind::ncclFloat16);
                every_operator::<bf16>(rank, Kind::ncclBfloat16);
                every_operator::<f32>(rank, Kind::ncclFloat32);
                every_operator::<f64>(rank, Kind::ncclFloat64);
            });
        },
    );
}

#[test]
fn an_average_divides_by_the_number_of_ranks() {
    alone("an_average_divides_by_the_number_of_ranks", &[], || {
        threads(4, |rank| {
            let memory = rank.memory(&[rank.rank as f32 * 4.0, 8.0]);
            assert_eq!(
                rank.all_reduce(&memory, &memory, Kind::ncclFloat32, Op::ncclAvg),
                0
            );
            rank.sync();
            assert_eq!(memory.read(), [6.0, 8.0]);
        });
    });
}

#[test]
fn messages_of_a_pair_keep_their_order_and_pairs_do_not_wait_for_each_other() {
    let name = "messages_of_a_pair_keep_their_order_and_pairs_do_not_wait_for_each_other";
    alone(name, &[], || {
        threads(3, |rank| {
            let peers: Vec<i32> = (0..3).filter(|&peer| peer != rank.rank).collect();
            // All messages differ in size, so that swapped messages would not match.
            let out: Vec<Vec<Memory<u32>>> = peers
                .iter()
                .map(|&to| {
                    let message =
                        |n: usize| rank.memory(&vec![value(rank.rank, to, n); n * 3000 + 1]);
                    (0..20).map(message).collect()
                })
                .collect();
            let into: Vec<Vec<Memory<u32>>> = peers
                .iter()
                .map(|_| {
                    (0..20)
                        .map(|n| rank.memory(&vec![0u32; n * 3000 + 1]))
                        .collect()
                })
                .collect();
            assert_eq!(nccl!(ncclGroupStart()), 0);
            // Each rank has another order of peers, and interleaves sends and receives.
            for (at, &peer) in peers.iter().enumerate().rev() {
                for n in 0..20 {
                    if (n + rank.rank as usize).is_multiple_of(2) {
                        assert_eq!(rank.send(&out[at][n], Kind::ncclUint32, peer), 0);
                        assert_eq!(rank.receive(&into[at][n], Kind::ncclUint32, peer), 0);
                    } else {
                        assert_eq!(rank.receive(&into[at][n], Kind::ncclUint32, peer), 0);
                        assert_eq!(rank.send(&out[at][n], Kind::ncclUint32, peer), 0);
                    }
                }
            }
            assert_eq!(nccl!(ncclGroupEnd()), 0, "{}", last_error());
            rank.sync();
            for (at, &peer) in peers.iter().enumerate() {
                for (n, message) in into[at].iter().enumerate() {
                    let expected = vec![value(peer, rank.rank, n); n * 3000 + 1];
                    assert!(message.read() == expected, "message {n} from {peer}");
                }
            }
        });
    });
}

#[test]
fn messages_without_bytes_pair_up_and_collectives_without_elements_vanish() {
    let name = "messages_without_bytes_pair_up_and_collectives_without_elements_vanish";
    alone(name, &[], || {
        threads(2, |rank| {
            let peer = 1 - rank.rank;
            let nothing = rank.memory::<u8>(&[]);
            let some = rank.memory(&[7u8 + rank.rank as u8]);
            let into = rank.memory(&[0u8]);
            assert_eq!(nccl!(ncclGroupStart()), 0);
            assert_eq!(rank.send(&nothing, Kind::ncclUint8, peer), 0);
            assert_eq!(rank.send(&some, Kind::ncclUint8, peer), 0);
            assert_eq!(rank.receive(&nothing, Kind::ncclUint8, peer), 0);
            assert_eq!(rank.receive(&into, Kind::ncclUint8, peer), 0);
            assert_eq!(nccl!(ncclGroupEnd()), 0);
            // Rank 0 alone makes this call, which does not wait for the other rank.
            if rank.rank == 0 {
                assert_eq!(
                    rank.all_reduce(&nothing, &nothing, Kind::ncclUint8, Op::ncclSum),
                    0
                );
            }
            rank.sync();
            assert_eq!(into.read(), [7 + peer as u8]);
        });
    });
}

#[test]
fn a_message_to_oneself_needs_both_halves_in_one_group() {
    static TURN: std::sync::Mutex<()> = std::sync::Mutex::new(());
    alone(
        "a_message_to_oneself_needs_both_halves_in_one_group",
        &[],
        || {
            threads(2, |rank| {
                let from = rank.memory(&[1u32, 2, 3]);
                let to = rank.memory(&[0u32; 3]);
                // The last error is one for the whole process.
                let turn = TURN.lock().unwrap();
                assert_eq!(rank.send(&from, Kind::ncclUint32, rank.rank), 5);
                assert_eq!(
                    last_error(),
                    "Trying to send to self without a matching recv"
                );
                assert_eq!(rank.receive(&to, Kind::ncclUint32, rank.rank), 5);
                assert_eq!(
                    last_error(),
                    "Trying to recv to self without a matching send"
                );
                drop(turn);
                // A failed group leaves a blocking communicator as it was.
                assert_eq!(nccl!(ncclGroupStart()), 0);
                assert_eq!(rank.send(&from, Kind::ncclUint32, rank.rank), 0);
                assert_eq!(rank.receive(&to, Kind::ncclUint32, rank.rank), 0);
                assert_eq!(nccl!(ncclGroupEnd()), 0);
                rank.sync();
                assert_eq!(to.read(), [1, 2, 3]);
            });
        },
    );
}

#[test]
fn a_single_rank_copies() {
    alone("a_single_rank_copies", &[], || {
        threads(1, |rank| {
            let from = rank.memory(&[1.5f32, -2.0]);
            let to = rank.memory(&[0f32; 2]);
            // The copy is issued at once, even inside a group.
            assert_eq!(nccl!(ncclGroupStart()), 0);
            assert_eq!(
                rank.all_reduce(&from, &to, Kind::ncclFloat32, Op::ncclAvg),
                0
            );
            rank.sync();
            assert_eq!(to.read(), [1.5, -2.0]);
            assert_eq!(nccl!(ncclGroupEnd()), 0);
            assert_eq!(rank.all_reduce(&to, &to, Kind::ncclFloat32, Op::ncclSum), 0);
            all_to_all(rank, 1000);
        });
    });
}

#[test]
fn operations_on_two_streams_of_a_communicator_run_one_after_the_other() {
    let name = "operations_on_two_streams_of_a_communicator_run_one_after_the_other";
    alone(name, &[], || {
        threads(2, |rank| {
            let other = rank.gpu.new_stream().unwrap();
            let streams = [rank.cuda_stream(), other.cu_stream().cast()];
            let memory = rank.memory(&vec![1u64; 10_000]);
            // Each all-reduce doubles the result of the previous one: the result is right only if none overlap.
            for turn in 0..20 {
                let code = nccl!(ncclAllReduce(
                    memory.ptr(),
                    memory.ptr(),
                    memory.len,
                    Kind::ncclUint64,
                    Op::ncclSum,
                    rank.comm,
                    streams[turn % 2],
                ));
                assert_eq!(code, 0);
            }
            rank.sync();
            other.synchronize().unwrap();
            assert!(memory.read().iter().all(|&x| x == 1 << 20));
        });
    });
}

#[test]
fn a_group_on_two_streams_joins_them() {
    alone("a_group_on_two_streams_joins_them", &[], || {
        threads(2, |rank| {
            let other = rank.gpu.new_stream().unwrap();
            let peer = 1 - rank.rank;
            let (from, to) = (rank.memory(&[rank.rank; 100]), rank.memory(&[9i32; 100]));
            let (comm, kind) = (rank.comm, Kind::ncclInt32);
            assert_eq!(nccl!(ncclGroupStart()), 0);
            assert_eq!(
                nccl!(ncclSend(
                    from.ptr(),
                    100,
                    kind,
                    peer,
                    comm,
                    rank.cuda_stream()
                )),
                0
            );
            let second = other.cu_stream().cast();
            assert_eq!(nccl!(ncclRecv(to.ptr(), 100, kind, peer, comm, second)), 0);
            assert_eq!(nccl!(ncclGroupEnd()), 0);
            // Waiting for either stream waits for the whole group.
            rank.gpu.bind_to_thread().unwrap();
            if rank.rank == 0 {
                other.synchronize().unwrap();
            } else {
                rank.stream.synchronize().unwrap();
            }
            assert_eq!(to.read(), [peer; 100]);
        });
    });
}

#[test]
fn one_thread_drives_several_communicators_in_one_group() {
    alone(
        "one_thread_drives_several_communicators_in_one_group",
        &[],
        || {
            let mut comms = [std::ptr::null_mut(); 4];
            assert_eq!(
                nccl!(ncclCommInitAll(comms.as_mut_ptr(), 4, std::ptr::null())),
                0
            );
            let ranks: Vec<Rank> = (0..4)
                .map(|rank| Rank {
                    comm: comms[rank as usize],
                    ..Rank::alone(4, rank)
                })
                .collect();
            let memory: Vec<_> = ranks
                .iter()
                .map(|rank| rank.memory(&[rank.rank as f64; 1000]))
                .collect();
            for _ in 0..3 {
                assert_eq!(nccl!(ncclGroupStart()), 0);
                for (rank, memory) in ranks.iter().zip(&memory) {
                    assert_eq!(
                        rank.all_reduce(memory, memory, Kind::ncclFloat64, Op::ncclMax),
                        0
                    );
                }
                assert_eq!(nccl!(ncclGroupEnd()), 0, "{}", last_error());
            }
            for (rank, memory) in ranks.iter().zip(&memory) {
                rank.sync();
                assert_eq!(memory.read(), [3.0; 1000]);
            }
            ranks.into_iter().for_each(Rank::destroy);
        },
    );
}

#[test]
fn collectives_of_a_group_meet_whatever_their_order() {
    alone(
        "collectives_of_a_group_meet_whatever_their_order",
        &[],
        || {
            threads(2, |rank| {
                let (small, large) = (rank.memory(&[1u32; 10]), rank.memory(&[2u32; 5000]));
                assert_eq!(nccl!(ncclGroupStart()), 0);
                let order = if rank.rank == 0 {
                    [&small, &large]
                } else {
                    [&large, &small]
                };
                for memory in order {
                    assert_eq!(
                        rank.all_reduce(memory, memory, Kind::ncclUint32, Op::ncclSum),
                        0
                    );
                }
                assert_eq!(nccl!(ncclGroupEnd()), 0);
                rank.sync();
                assert_eq!((small.read(), large.read()), (vec![2; 10], vec![4; 5000]));
            });
        },
    );
}

#[test]
fn sixty_four_ranks_exchange_and_reduce() {
    let devices = [
        ("NCCL_EMULATOR_DEVICES", "64"),
        ("NCCL_EMULATOR_MEMORY", "64M"),
    ];
    alone("sixty_four_ranks_exchange_and_reduce", &devices, || {
        threads(64, |rank| {
            all_to_all(rank, 101);
            all_reduce_sum(rank, 10_007);
        });
    });
}
