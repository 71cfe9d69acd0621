//! The facts that are read of each process.

use std::net::IpAddr;

use super::{read, read_text};
use crate::debug_log::{Class, Ended, InitState, Link, PluginState, Process, Transport};

fn one(text: &str) -> Process {
    let log = read_text(text);
    assert_eq!(log.processes().len(), 1, "{text}");
    log.processes()[0].clone()
}

/// The process of one log line with this text.
fn said(text: &str) -> Process {
    one(&format!("a:1:2 [0] NCCL INFO {text}"))
}

const START: &str = "a:1:2 [3] NCCL INFO ncclCommInitRank comm 0x5 rank 3 nranks 8 cudaDev 3 nvmlDev 3 busId 1000 \
                     commId 0x77 - Init START\n";

#[test]
fn the_bootstrap_interface_is_read_in_every_releases_words() {
    let cases = [
        ("Bootstrap : Using eth0:10.0.0.1<0>", "eth0", "10.0.0.1"),
        (
            "Bootstrap : Using [0]br0:10.137.141.16<0>",
            "br0",
            "10.137.141.16",
        ),
        (
            "Bootstrap: Using ib0:fe80::966d:ae03:a2:8cf0%ib0<0>",
            "ib0",
            "fe80::966d:ae03:a2:8cf0",
        ),
        (
            "Bootstrap: Using eno1:avahi:192.168.0.9<0>",
            "eno1:avahi",
            "192.168.0.9",
        ),
    ];
    for (text, interface, address) in cases {
        let endpoint = said(text).bootstrap.unwrap();
        let address: IpAddr = address.parse().unwrap();
        assert_eq!(
            (&endpoint.interface[..], endpoint.address),
            (interface, Some(address)),
            "{text}"
        );
    }
    let other = said("Bootstrap: Using mlx5_0:1").bootstrap.unwrap();
    assert_eq!((&other.interface[..], other.address), ("mlx5_0", None));
}

#[test]
fn networks_adapters_and_plugins_are_read() {
    let adapters = said(
        "NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/RoCE:rail0:plane0 [RO]; OOB eth0:10.0.0.1<0>",
    );
    assert_eq!(
        adapters.adapters,
        ["mlx5_0:1/IB", "mlx5_1:1/RoCE:rail0:plane0"]
    );
    assert_eq!(adapters.bootstrap.unwrap().interface, "eth0");
    assert!(said("NET/IB : No device found.").no_adapters);
    let sockets = said("NET/Socket : Using [0]eth0:10.0.0.1<0> [1]eth1:10.1.0.1<0>").sockets;
    assert_eq!(
        sockets
            .iter()
            .map(|one| &one.interface[..])
            .collect::<Vec<_>>(),
        ["eth0", "eth1"]
    );
    assert!(
        said("NET/Socket: Using 2 threads and 8 sockets per thread")
            .sockets
            .is_empty()
    );

    let plugins = [
        (
            "NET/Plugin : No plugin found, using internal implementation",
            PluginState::Missing,
        ),
        (
            "NET/Plugin: Could not find: libnccl-net.so. Using internal network plugin.",
            PluginState::Missing,
        ),
        (
            "NET/Plugin : Plugin load (libnccl-net.so) returned 2 : libnccl-net.so: cannot open shared object file: \
          No such file or directory",
            PluginState::Missing,
        ),
        (
            "NET/Plugin: libnccl-net-ofi.so: undefined symbol: fi_getinfo",
            PluginState::Failed,
        ),
        (
            "GIN/Plugin: Failed to load external plugin libnccl-gin.so, dlHandle: (nil), ncclGin: (nil)",
            PluginState::Missing,
        ),
        (
            "GIN/Plugin: Failed to load external plugin libnccl-gin-asked-for.so, dlHandle: (nil), ncclGin: (nil)",
            PluginState::Failed,
        ),
        (
            "NET/Plugin: Loaded net plugin Libfabric (v8)",
            PluginState::Loaded,
        ),
        (
            "Successfully loaded external network plugin libnccl-net-ofi.so",
            PluginState::Loaded,
        ),
        (
            "NET/Plugin: Failed to find ncclNetPlugin symbol (>= v5). ncclNetPlugin symbols v4 and lower are not supported.",
            PluginState::Failed,
        ),
        (
            "Failed to initialize NET plugin Libfabric",
            PluginState::Failed,
        ),
    ];
    for (text, state) in plugins {
        let plugins = said(text).plugins;
        assert_eq!(plugins.len(), 1, "{text}");
        assert_eq!(
            (&plugins[0].kind[..], plugins[0].state),
            (
                if text.starts_with("GIN") {
                    "GIN"
                } else {
                    "NET"
                },
                state
            ),
            "{text}"
        );
    }
    for own in [
        "Failed to initialize NET plugin IB",
        "Assigned NET plugin Socket to comm",
        "NET/Plugin: Plugin name set by env to libnccl-net.so",
    ] {
        assert!(said(own).plugins.is_empty(), "{own}");
    }
}

#[test]
fn a_rank_is_known_from_the_start_of_its_communicator() {
    let starts = [
        "comm 0x5 rank 3 nranks 8 cudaDev 3 nvmlDev 3 busId 1000 commId 0x77 - Init START",
        "ncclCommInitRank comm 0x5 rank 3 nranks 8 cudaDev 3 nvmlDev 3 busId 1000 commId 0x77 - Init START",
        "[Rank 3] ncclCommInitRankConfig comm 0x5 rank 3 nranks 8 cudaDev 3 nvmlDev 3 busId 1000 commId 0x77 - Init START",
        "ncclCommSplit comm 0x5 rank 3 nranks 8 cudaDev 3 nvmlDev 3 busId 1000 commId 0x77 parent 0x4 childCount 1 \
         color 0 key 3- Init START",
    ];
    for text in starts {
        let process = said(text);
        assert_eq!(process.rank(), Some(3), "{text}");
        let member = &process.communicators[0];
        assert_eq!(
            (member.ranks, member.state),
            (8, InitState::Started),
            "{text}"
        );
        assert_eq!(member.id.as_deref(), Some("0x77"), "{text}");
        let completed = text
            .replace("- Init START", "- Init COMPLETE")
            .replace("[Rank 3] ", "");
        let process = one(&format!(
            "a:1:2 [3] NCCL INFO {text}\na:1:2 [3] NCCL INFO {completed}"
        ));
        assert_eq!(process.communicators.len(), 1, "{text}");
        assert_eq!(
            process.communicators[0].state,
            InitState::Completed,
            "{text}"
        );
    }
    let split = said(
        "ncclCommSplit comm 0x9 rank 0 nranks 2 cudaDev 0 nvmlDev 0 busId 1 parent 0x5 splitCount 1 color 3 \
                      key 0- Init START",
    );
    let member = &split.communicators[0];
    assert_eq!(
        (member.id.as_deref(), member.parent.as_deref()),
        (None, Some("0x5"))
    );
    let impossible = said("comm 0x5 rank 8 nranks 8 cudaDev 3 busId 1 commId 0x7 - Init START");
    assert!(impossible.communicators.is_empty());
}

#[test]
fn the_network_belongs_to_the_communicator_that_its_thread_starts() {
    let process = one(&format!("a:1:2 [3] NCCL INFO Using network IB\n{START}"));
    assert_eq!(process.communicators[0].network.as_deref(), Some("IB"));
    let process = one(&format!("{START}a:1:2 [3] NCCL INFO Using network IB\n"));
    assert_eq!(process.communicators[0].network.as_deref(), Some("IB"));
    // Two ranks that are threads of one process.
    let log = read_text(
        "a:1:8 [0] NCCL INFO Using network IB\na:1:9 [1] NCCL INFO Using network Socket\n\
         a:1:8 [0] NCCL INFO comm 0x5 rank 0 nranks 2 cudaDev 0 nvmlDev 0 busId 1 commId 0x7 - Init START\n\
         a:1:9 [1] NCCL INFO comm 0x6 rank 1 nranks 2 cudaDev 1 nvmlDev 1 busId 2 commId 0x7 - Init START\n\
         a:1:9 [1] x.cc:1 NCCL WARN of rank 1\n",
    );
    let process = &log.processes()[0];
    assert_eq!(process.ranks(), [0, 1]);
    let networks: Vec<_> = process
        .communicators
        .iter()
        .map(|one| one.network.as_deref())
        .collect();
    assert_eq!(networks, [Some("IB"), Some("Socket")]);
    assert_eq!(process.warnings[0].rank, Some(1));
}

#[test]
fn the_ways_between_ranks_are_read_in_every_releases_words() {
    let net = |net: &str, adapter: &str, gdr| Transport::Net {
        net: net.to_owned(),
        adapter: adapter.to_owned(),
        gdr,
    };
    let p2p = |kind: &str| Transport::P2p(kind.to_owned());
    let cases = [
        (
            "Channel 00/0 : 3[3] -> 4[4] via P2P/direct pointer/read",
            (3, 4),
            p2p("direct pointer"),
        ),
        (
            "Channel 00/0 : 3[3] -> 4[4] via P2P/CUMEM/read/CE",
            (3, 4),
            p2p("CUMEM"),
        ),
        (
            "Channel 00/0 : 3[3] -> 4[4] via P2P/IPC",
            (3, 4),
            p2p("IPC"),
        ),
        (
            "Channel 00/0 : 3[3] -> 4[4] via P2P/indirect/1[1]/read",
            (3, 4),
            p2p("indirect"),
        ),
        (
            "Channel 00 : 3[3] -> 4[4] via SHM/direct/direct",
            (3, 4),
            Transport::Shm,
        ),
        (
            "Channel 00 : 3[3] -> 4[4] via SHM/direct",
            (3, 4),
            Transport::Shm,
        ),
        (
            "Channel 00/0 : 3[3] -> 4[4] [send] via NET/IB/3(5)/GDRDMA(PCI)/Shared",
            (3, 4),
            net("IB", "3", true),
        ),
        (
            "Channel 00/0 : 7[7] -> 3[3] [receive] via NET/Socket/0",
            (7, 3),
            net("Socket", "0", false),
        ),
        (
            "Channel 00/0 : 3[3] -> 4[4] [send] via NET/AWS Libfabric/0/GDRDMA",
            (3, 4),
            net("AWS Libfabric", "0", true),
        ),
    ];
    for (text, (from, to), via) in cases {
        // Lines about channels come late, from other threads.
        let process = one(&format!("{START}a:1:77 [3] NCCL INFO {text}"));
        let links: Vec<_> = process.communicators[0].links.keys().cloned().collect();
        assert_eq!(links, [Link { from, to, via }], "{text}");
    }
    let ring = one(&format!(
        "{START}a:1:2 [3] NCCL INFO Channel 00/02 :    0   1   2"
    ));
    assert_eq!(ring.communicators[0].ring.as_deref(), Some("0 1 2"));
}

#[test]
fn settings_retries_times_and_ends_are_read() {
    let process = said("NCCL_P2P_LEVEL set by environment to NVL.");
    assert_eq!(process.variables["NCCL_P2P_LEVEL"], "NVL");
    assert_eq!(
        said("NCCL_IB_HCA set to =mlx5_9").variables["NCCL_IB_HCA"],
        "=mlx5_9"
    );
    assert_eq!(
        said("Comm config blocking set to 0").config["blocking"],
        "0"
    );
    assert_eq!(
        said("Comm config minCTAs reset to NCCL_MIN_CTAS=4").config["minCTAs"],
        "NCCL_MIN_CTAS=4"
    );
    let tuned = said(
        "AllReduce: 1024 Bytes -> Algo RING proto SIMPLE channel{Lo..Hi}={0..31} cgaClusterSize 4",
    );
    assert_eq!(tuned.tuning["AllReduce RING SIMPLE"], 1);
    let tries = said(
        "ncclOsSocketStartConnect: connect to 10.0.0.2<4000> returned No route to host, retrying (1/34) after \
                      sleep for 100 msec",
    );
    assert_eq!(tries.retries[0].address, Some("10.0.0.2".parse().unwrap()));
    assert_eq!(tries.retries[0].reason, "No route to host");
    let old = said("Call to connect returned Connection refused, retrying");
    assert_eq!((old.retries[0].address, old.retries[0].times), (None, 1));
    let slow = one(&format!(
        "{START}a:1:2 [3] NCCL INFO Init timings - ncclCommInitRank: rank 3 nranks 8 total 61.20 (kernels 0.31, alloc \
         0.20, bootstrap 60.01, rest 0.68)"
    ));
    assert_eq!(
        slow.communicators[0].init_seconds,
        Some((61.2, "bootstrap".to_owned(), 60.01))
    );
    for (text, ended) in [
        (
            "nranks 8 cudaDev 3 busId 1000 - Destroy COMPLETE",
            Ended::Destroyed,
        ),
        (
            "nranks 8 cudaDev 3 busId 1000 - Abort COMPLETE",
            Ended::Aborted,
        ),
        (
            "nRanks 8 cudaDev 3 busId 1000 - Revoke COMPLETE, result 0",
            Ended::Revoked,
        ),
    ] {
        let process = one(&format!(
            "{START}a:1:2 [3] NCCL INFO comm 0x5 rank 3 {text}"
        ));
        assert_eq!(process.communicators[0].ended, Some(ended));
    }
}

#[test]
fn a_whole_log_of_four_ranks_on_one_output_is_read() {
    let log = read(&["2.30-fine.log"]);
    assert_eq!(log.processes().len(), 4);
    for (rank, process) in log.processes().iter().enumerate() {
        assert_eq!((process.rank(), process.tag), (Some(rank), Some(rank)));
        assert_eq!(process.version.unwrap().to_string(), "2.30.7");
        let member = &process.communicators[0];
        assert_eq!((member.layout, member.ring_gdr), (Some((1, 4)), Some(true)));
        assert_eq!(member.network.as_deref(), Some("Socket"));
        assert_eq!(member.links.len(), 1);
        assert_eq!(member.links.values().copied().collect::<Vec<_>>(), [2]);
        assert_eq!(member.ended, Some(Ended::Destroyed));
    }
}

/// The output of NVIDIA's libraries on a machine without a driver; `cargo xtask conformance` fetches them.
#[test]
fn the_words_of_nvidias_own_libraries_are_understood() {
    for (release, device) in [("2.18.3", None), ("2.27.7", Some(0)), ("2.32.3", Some(0))] {
        let log = read(&[&format!("real-{release}-without-gpu.log")]);
        assert_eq!(log.processes().len(), 1, "{release}");
        let process = &log.processes()[0];
        let endpoint = process.bootstrap.as_ref().unwrap();
        assert_eq!(endpoint.interface, "lo", "{release}");
        assert_eq!(
            endpoint.address,
            Some("127.0.0.1".parse().unwrap()),
            "{release}"
        );
        assert_eq!(
            process.variables["NCCL_SOCKET_IFNAME"], "eth0,lo",
            "{release}"
        );
        let classes: Vec<_> = process
            .warnings
            .iter()
            .map(|warning| warning.class)
            .collect();
        assert!(
            classes.iter().all(|class| *class == Class::Cause),
            "{release}: {classes:?}"
        );
        let stamped = process
            .warnings
            .iter()
            .all(|warning| warning.time.is_some());
        assert_eq!(stamped, release != "2.18.3", "{release}");
        assert_eq!(log.counts().broken, 0, "{release}");
        // Old releases print uninitialised memory as the device.
        let line =
            String::from_utf8(super::text(&format!("real-{release}-without-gpu.log"))).unwrap();
        let records = crate::debug_log::line::parse(line.lines().next().unwrap()).records;
        assert_eq!(records[0].device, device, "{release}");
        assert_eq!(
            log.report().findings[0].check,
            "log-driver",
            "{release}\n{}",
            log.report()
        );
    }
}
