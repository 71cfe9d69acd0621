//! What arrives of collectives on NVIDIA's own library: by each algorithm, protocol and transport, in threads and processes.

mod ranks;
mod real;

use std::env;

use nccl_emulator::{State, real_coverage};
use ranks::cases::{Case, Dice, Function, at_random, every_function, functions, seed};
use ranks::{Process, Rank, is_child_of, threads};
use real::{P2P, SHM, SOCKETS, on_each};

/// A transport: its settings, and how NCCL's log names its connections.
type Transport = (&'static [(&'static str, &'static str)], &'static str);

const TRANSPORTS: [Transport; 6] = [
    (&P2P, " via P2P/CUMEM"),
    (
        &[("NCCL_P2P_LEVEL", "SYS"), ("NCCL_CUMEM_ENABLE", "0")],
        " via P2P/IPC",
    ),
    (
        &[("NCCL_P2P_LEVEL", "SYS"), ("NCCL_P2P_USE_CUDA_MEMCPY", "1")],
        "/CE",
    ),
    (&SHM, " via SHM/direct"),
    (
        &[("NCCL_P2P_DISABLE", "1"), ("NCCL_CUMEM_HOST_ENABLE", "0")],
        " via SHM/direct",
    ),
    (&SOCKETS, " via NET/Socket"),
];

/// Buffers of connections that are smaller than what most collectives move.
const SMALL_BUFFERS: (&str, &str) = ("NCCL_BUFFSIZE", "131072");

/// Runs `body` in processes over each transport, and checks that it was used.
fn over_each_transport(
    test: &str,
    ranks: i32,
    environment: &[(&'static str, &'static str)],
    body: impl Fn(&Process, &Rank),
) {
    for (settings, word) in TRANSPORTS {
        let mut all = vec![SMALL_BUFFERS, ("TEST_WORD", word)];
        all.extend(settings);
        all.extend(environment);
        on_each(test, ranks, &all, |process| {
            let rank = process.join();
            body(&process, &rank);
            let word = env::var("TEST_WORD").unwrap();
            let log = process.log();
            assert!(log.contains(&word), "no connection is {word}");
            rank.destroy();
        });
        if is_child_of(test) {
            break;
        }
    }
}

#[test]
fn every_collective_is_right_over_each_transport() {
    let name = "every_collective_is_right_over_each_transport";
    over_each_transport(name, 3, &[], |_, rank| every_function(rank));
}

#[test]
fn random_groups_are_right_over_each_transport() {
    let name = "random_groups_are_right_over_each_transport";
    over_each_transport(name, 4, &[], |_, rank| at_random(rank, seed() + 200, 12));
}

/// The algorithms and protocols that NCCL has here; a tree is for all-reduces.
const HELD: [(&str, &str); 6] = [
    ("Ring", "LL"),
    ("Ring", "LL128"),
    ("Ring", "Simple"),
    ("Tree", "LL"),
    ("Tree", "LL128"),
    ("Tree", "Simple"),
];

/// Checks that nothing but this algorithm and protocol was interpreted, besides Send/Recv.
fn only(algorithm: &str, protocol: &str) {
    let functions = real_coverage().unwrap().functions;
    let ran = functions
        .iter()
        .filter(|one| matches!(one.state, State::Interpreted { times: 1.. }))
        .filter(|one| one.collective != "SendRecv");
    let mut count = 0;
    for one in ran {
        let held = one.algorithm.eq_ignore_ascii_case(algorithm)
            && one.protocol.eq_ignore_ascii_case(protocol);
        assert!(held, "{algorithm} {protocol}: {one:?}");
        count += 1;
    }
    assert!(count > 0);
}

/// Collectives of odd counts, some larger than all buffers of a channel, and some unaligned.
fn odd_sizes(rank: &Rank, of: &[Function]) {
    let mut dice = Dice(seed());
    for &function in of {
        for count in [0, 1, 2, 1025, 30_011, 400_003] {
            for (in_place, shift) in [(false, 0), (true, 1)] {
                Case {
                    in_place: in_place && function != Function::AlltoAll,
                    shift,
                    root: dice.below(rank.ranks as usize) as i32,
                    ..Case::new(function, count)
                }
                .check(rank);
            }
        }
    }
}

#[test]
fn each_algorithm_and_protocol_is_right_over_each_transport() {
    let name = "each_algorithm_and_protocol_is_right_over_each_transport";
    for held in HELD {
        let environment = [("NCCL_ALGO", held.0), ("NCCL_PROTO", held.1)];
        over_each_transport(name, 3, &environment, |_, rank| {
            let [algorithm, protocol] =
                ["NCCL_ALGO", "NCCL_PROTO"].map(|name| env::var(name).unwrap());
            match algorithm.as_str() {
                "Tree" => odd_sizes(rank, &[Function::AllReduce]),
                _ => {
                    use Function::{AllGather, AllReduce, Broadcast, Reduce, ReduceScatter};
                    odd_sizes(
                        rank,
                        &[AllReduce, Reduce, ReduceScatter, AllGather, Broadcast],
                    );
                }
            }
            only(&algorithm, &protocol);
        });
        if is_child_of(name) {
            break;
        }
    }
}

/// Gives each process a host of its own, as NCCL sees it; `of` processes share one.
fn share_hosts(process: &Process, of: i32) {
    // SAFETY: nothing else uses the environment yet.
    unsafe { env::set_var("NCCL_HOSTID", format!("host{}", process.rank / of)) };
}

#[test]
fn parallel_aggregated_trees_are_right_for_any_number_of_hosts() {
    let name = "parallel_aggregated_trees_are_right_for_any_number_of_hosts";
    let environment = [
        ("NCCL_ALGO", "PAT"),
        ("NCCL_PROTO", "Simple"),
        SMALL_BUFFERS,
    ];
    for ranks in [2, 3, 5] {
        let ranks_text = ranks.to_string();
        let mut environment = environment.to_vec();
        environment.push(("TEST_RANKS", &ranks_text));
        let ranks = env::var("TEST_RANKS").map_or(ranks, |ranks| ranks.parse().unwrap());
        on_each(name, ranks, &environment, |process| {
            share_hosts(&process, 1);
            let rank = process.join();
            odd_sizes(&rank, &[Function::AllGather, Function::ReduceScatter]);
            only("PAT", "Simple");
            rank.destroy();
        });
    }
}

#[test]
fn ranks_of_two_hosts_are_right() {
    let name = "ranks_of_two_hosts_are_right";
    on_each(name, 4, &[SMALL_BUFFERS], |process| {
        share_hosts(&process, 2);
        let rank = process.join();
        every_function(&rank);
        let log = process.log();
        assert!(log.contains("nNodes 2"), "not two nodes");
        assert!(log.contains(" via NET/Socket"), "no network");
        rank.destroy();
    });
}

#[test]
fn threads_of_a_process_are_right_for_any_number_of_ranks() {
    let name = "threads_of_a_process_are_right_for_any_number_of_ranks";
    on_each(name, 1, &[SMALL_BUFFERS], |_| {
        ranks::api();
        for ranks in [1, 2, 3, 5, 8] {
            threads(ranks, |rank| {
                at_random(rank, seed() + ranks as u64, 40 / ranks as usize);
            });
        }
    });
}

#[test]
fn eight_processes_are_right() {
    let name = "eight_processes_are_right";
    on_each(name, 8, &[SMALL_BUFFERS], |process| {
        let rank = process.join();
        at_random(&rank, seed() + 300, 10);
        for function in functions() {
            Case {
                root: 5,
                ..Case::new(function, 1001)
            }
            .check(&rank);
        }
        rank.destroy();
    });
}
