//! Results of collectives on NVIDIA's own library: by each algorithm, protocol and transport, in threads and processes.

mod ranks;
mod real;

use std::env;

use nccl_emulator::{State, real_coverage};
use ranks::cases::{Case, Dice, Function, at_random, every_function, functions, seed};
use ranks::{Process, Rank, is_child_of, threads};
use real::{P2P, SHM, SOCKETS, on_each, version};

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

/// Runs `body` in processes over each transport, and checks that NCCL used it.
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

/// Assigns the process to a host, as NCCL sees it: `of` processes share one.
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

const INVALID_USAGE: u32 = 5;

#[test]
fn algorithms_that_need_other_hardware_are_refused_and_nothing_hangs() {
    let name = "algorithms_that_need_other_hardware_are_refused_and_nothing_hangs";
    for algorithm in ["NVLS", "NVLSTree", "CollNetDirect", "CollNetChain"] {
        on_each(name, 2, &[("NCCL_ALGO", algorithm)], |process| {
            let rank = process.join();
            let prepared = Case::new(Function::AllReduce, 1000).prepare(&rank);
            assert_eq!(prepared.issue(&rank), INVALID_USAGE);
            let error = ranks::last_error();
            // Upper and lower case differ from release to release.
            let says = error.to_lowercase().contains("no algorithm/protocol");
            assert!(says, "{error}");
            process.meet("refused");
            assert_eq!(rank.abort(), 0);
            rank.sync();
        });
        if is_child_of(name) {
            break;
        }
    }
}

/// A machine by its file in `topologies/`.
macro_rules! machine {
    ($name:literal) => {
        (
            "NCCL_TOPO_FILE",
            concat!(env!("CARGO_MANIFEST_DIR"), "/topologies/", $name, ".xml"),
        )
    };
}

/// Runs every collective with eight ranks on this machine; NCCL has to use at least `channels` channels.
fn on_machine(test: &str, machine: (&str, &str), channels: usize) {
    on_each(test, 8, &[machine, SMALL_BUFFERS], |process| {
        let rank = process.join();
        for function in functions() {
            for count in [1, 3001, 100_003] {
                Case {
                    root: 3,
                    ..Case::new(function, count)
                }
                .check(&rank);
            }
        }
        if rank.rank == 0 {
            let log = process.log();
            let found = log.lines().find_map(|line| {
                let (before, _) = line.split_once(" coll channels")?;
                before.rsplit(' ').next()?.parse::<usize>().ok()
            });
            assert!(found >= Some(channels), "{found:?} channels");
        }
        rank.destroy();
    });
}

#[test]
fn eight_ranks_of_an_nvswitch_machine_are_right() {
    let name = "eight_ranks_of_an_nvswitch_machine_are_right";
    on_machine(name, machine!("nvswitch8"), 16);
}

#[test]
fn eight_ranks_of_a_machine_of_pci_switches_are_right() {
    let name = "eight_ranks_of_a_machine_of_pci_switches_are_right";
    on_machine(name, machine!("pcie8"), 2);
}

#[test]
fn the_diagnostics_of_nccl_find_the_links_of_all_ranks_good() {
    use std::os::fd::AsRawFd;
    let name = "the_diagnostics_of_nccl_find_the_links_of_all_ranks_good";
    let environment = [machine!("nvswitch8"), ("NCCL_RUN_DIAGNOSTICS", "1")];
    on_each(name, 3, &environment, |process| {
        // NCCL says what it finds on the standard output of rank 0.
        let said = process.file(&format!("said.{}", process.rank));
        let file = std::fs::File::create(&said).unwrap();
        // SAFETY: both descriptors are open; the file takes the place of this process's output.
        unsafe { libc::dup2(file.as_raw_fd(), 1) };
        let rank = process.join();
        if version() >= 23200 {
            let kernels = real_coverage().unwrap().kernels;
            let ran = kernels
                .iter()
                .filter(|one| one.name.starts_with("diagP2p"))
                .filter(|one| matches!(one.state, State::Interpreted { times: 1.. }));
            assert_eq!(ran.count(), 4);
            // SAFETY: writes out what C has buffered.
            unsafe { libc::fflush(std::ptr::null_mut()) };
            let said = std::fs::read_to_string(said).unwrap();
            let good = "verified P2P access in both directions between every GPU pair";
            assert!(rank.rank != 0 || said.contains(good), "{said}");
        }
        rank.destroy();
    });
}
