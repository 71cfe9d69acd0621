//! The findings from the logs of several ranks.

use super::{read, read_text};
use crate::debug_log::DebugLog;
use nccl_base::report::{Finding, Severity};

/// The only finding of this name that is not fine.
fn found(log: &DebugLog, check: &str) -> Finding {
    let report = log.report();
    let mut all = report
        .findings
        .iter()
        .filter(|f| f.check == check && f.severity > Severity::Ok);
    let one = all
        .next()
        .unwrap_or_else(|| panic!("no {check} in\n{report}"))
        .clone();
    assert!(all.next().is_none(), "several {check} in\n{report}");
    one
}

/// Asserts that these findings, and no others, are errors or warnings.
fn only(log: &DebugLog, checks: &[&str]) {
    let report = log.report();
    let bad = report.findings.iter().filter(|f| f.severity > Severity::Ok);
    let names: Vec<_> = bad.map(|f| &f.check[..]).collect();
    assert_eq!(names, checks, "{report}");
}

#[track_caller]
fn says(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "no {part:?} in {text:?}");
    }
}

#[test]
fn a_log_in_which_all_is_well_has_no_finding() {
    let log = read(&["2.30-fine.log"]);
    only(&log, &[]);
    let report = log.report();
    let fine: Vec<_> = report.findings.iter().map(|f| &f.check[..]).collect();
    assert_eq!(
        fine,
        ["log-version", "log-network", "log-peer-to-peer", "log-init"]
    );
}

/// Logs of NVIDIA's own library, of two ranks on one host without a GPU.
#[test]
fn what_nccl_itself_wrote_is_judged_as_it_was() {
    only(
        &read(&["real-2.32.3-fine-rank-0.log", "real-2.32.3-fine-rank-1.log"]),
        &[],
    );

    // Launch mode `BlockingChild`: each rank has two communicators, of which one is an idle parent.
    let ranks = [
        "real-2.32.3-blocking-child-rank-0.log",
        "real-2.32.3-blocking-child-rank-1.log",
        "real-2.32.3-blocking-child-rank-2.log",
    ];
    let log = read(&ranks);
    // On a machine whose devices do not reach each other.
    only(&log, &["log-peer-to-peer"]);
    says(
        &log.report().to_string(),
        &["1 communicator, of up to 3 ranks, came up"],
    );
    // The log of one rank is missing: the child communicator lacks it.
    let missing = found(&read(&ranks[..2]), "log-ranks");
    says(
        &missing.what,
        &["communicator 0x77d57e7872bb28da, 2 are not in these logs"],
    );

    let interface = found(&read(&["real-2.32.3-interface.log"]), "log-interface");
    assert_eq!(interface.severity, Severity::Error);
    says(interface.fix.as_deref().unwrap(), &["NCCL_SOCKET_IFNAME"]);

    let plugin = found(&read(&["real-2.32.3-plugin.log"]), "log-plugin");
    says(&plugin.what, &["Failed to initialize any NET plugin"]);

    // Two ranks that were told to use sockets, of which one was killed.
    let log = read(&[
        "real-2.32.3-peer-killed-rank-0.log",
        "real-2.32.3-peer-killed-rank-1.log",
    ]);
    only(
        &log,
        &["log-consequence", "log-network", "log-peer-to-peer"],
    );
    let cause = found(&log, "log-consequence");
    assert_eq!(cause.ranks, [0]);
    says(
        cause.fix.as_deref().unwrap(),
        &["rank 1 warned about nothing"],
    );
}

/// Reads the logs of these ranks, which NVIDIA's own library wrote.
fn real(name: &str, ranks: std::ops::Range<usize>) -> DebugLog {
    let names: Vec<_> = ranks
        .map(|rank| format!("real-{name}-rank-{rank}.log"))
        .collect();
    read(&names.iter().map(|name| &**name).collect::<Vec<_>>())
}

/// Two hosts (network namespaces), with two ranks each or one.
#[test]
fn what_nccl_itself_wrote_on_two_hosts_is_judged_as_it_was() {
    // InfiniBand and P2P were switched off; no plugin was asked for.
    let log = real("2.30.7-two-hosts", 0..4);
    only(&log, &["log-network", "log-peer-to-peer"]);
    says(
        &found(&log, "log-network").fix.unwrap(),
        &["NCCL_IB_DISABLE=1", "ranks 0-3 (host1, host2)"],
    );

    // The cable was cut, and rank 0 had something to send.
    let log = real("2.27.7-cut", 0..2);
    only(&log, &["log-connect", "log-network"]);
    let cut = found(&log, "log-connect");
    assert_eq!((cut.severity, &cut.ranks[..]), (Severity::Error, &[0][..]));
    says(
        &cut.what,
        &[
            "Connection timed out",
            "10.78.0.2 is eth0 of host2 (rank 1)",
        ],
    );
    says(&cut.fix.unwrap(), &["cable"]);

    // The kernel of rank 0 reset the connections; rank 1 saw them closed.
    let log = real("2.32.3-reset", 0..2);
    only(&log, &["log-connect", "log-network"]);
    let reset = found(&log, "log-connect");
    assert_eq!(reset.ranks, [0]);
    says(
        &reset.what,
        &["Software caused connection abort", "warnings of rank 1"],
    );
}

/// Two ranks of one host that were set up wrongly, or lost each other before they had connected.
#[test]
fn what_nccl_itself_wrote_of_a_bad_start_is_judged_as_it_was() {
    let log = real("2.32.3-other-size", 0..2);
    let size = found(&log, "log-ranks");
    assert_eq!(log.report().findings[0].check, "log-ranks");
    says(&size.what, &["nranks 2 vs 3"]);
    says(&size.fix.unwrap(), &["WORLD_SIZE"]);

    let log = real("2.32.3-open-files", 0..2);
    only(&log, &["log-open-files"]);
    says(
        &found(&log, "log-open-files").what,
        &["Too many open files", "rank 1 alike"],
    );

    // Rank 1 was killed before the first operation.
    let log = real("2.27.7-first-contact", 0..2);
    only(&log, &["log-connect", "log-connect"]);
    let report = log.report();
    let first = &report.findings[0];
    assert_eq!(
        (&first.check[..], first.severity),
        ("log-connect", Severity::Error)
    );
    says(
        &first.what,
        &["exceeded error retry count", "192.0.2.2 is eth0 of vm"],
    );
}

#[test]
fn a_host_that_fell_back_to_sockets_is_named_with_the_reason() {
    let log = read(&["2.27-node-a-of-two.log", "2.27-node-b-of-two.log"]);
    let network = found(&log, "log-network");
    assert_eq!(
        (network.severity, &network.ranks[..]),
        (Severity::Error, &[2, 3][..])
    );
    assert_eq!(network.hosts, ["node-b"]);
    says(
        &network.what,
        &["IB on ranks 0-1 (node-a)", "Socket on ranks 2-3 (node-b)"],
    );
    says(
        &network.fix.unwrap(),
        &["no InfiniBand", "NCCL_IB_HCA=mlx5 has to name one"],
    );
    // And the ranks wait for each other for ever.
    let init = found(&log, "log-init");
    assert_eq!(init.ranks, [0, 1, 2, 3]);
}

#[test]
fn a_variable_that_forbids_the_adapters_is_the_reason() {
    let mut log = read(&["2.27-node-a-of-two.log", "2.27-node-b-of-two.log"]);
    log.read(
        "more",
        &b"node-b:5020:1 [0] NCCL INFO NCCL_IB_DISABLE set by environment to 1.\n"[..],
    )
    .unwrap();
    let fix = found(&log, "log-network").fix.unwrap();
    says(
        &fix,
        &["NCCL_IB_DISABLE=1 asks for that: unset it on ranks 2-3"],
    );
}

#[test]
fn connections_through_host_memory_are_named_with_the_variable_that_asks_for_them() {
    let log = read(&["2.18-no-p2p.log"]);
    only(&log, &["log-peer-to-peer"]);
    let lost = found(&log, "log-peer-to-peer");
    says(
        &lost.what,
        &["ranks 0-1 (pcie)", "2 of 2 connections", "0 to 1"],
    );
    says(&lost.fix.unwrap(), &["NCCL_P2P_DISABLE=1 asks for that"]);
}

#[test]
fn the_full_shared_memory_is_the_cause_and_closed_connections_are_not() {
    let log = read(&["2.26-shared-memory.log"]);
    let cause = found(&log, "log-shared-memory");
    assert_eq!(
        (cause.severity, &cause.ranks[..]),
        (Severity::Error, &[1][..])
    );
    says(
        &cause.what,
        &[
            "rank 1 (trainer, pid 21) at 2026-04-22 21:34:20",
            "the first by",
            "/dev/shm/nccl-WU88OE",
            "misc/shmutils.cc:88",
            "3 warnings of ranks 0,2",
            "consequences",
        ],
    );
    says(&cause.fix.unwrap(), &["--shm-size"]);
    let report = log.report();
    assert_eq!(
        report.findings[0].check, "log-shared-memory",
        "the cause comes first\n{report}"
    );
    assert!(!report.to_string().contains("Accept failed"), "{report}");
}

#[test]
fn the_first_cause_is_the_first_by_time_and_not_by_line() {
    let warn = |second: u32, rank: u32, text: &str| {
        format!("[2026-04-22 21:34:{second:02}] a:{rank}:9 [{rank}] x.cc:{rank} NCCL WARN {text}\n")
    };
    let connect = "ncclOsSocketStartConnect: connect to 10.0.0.2<4> failed : No route to host";
    // Within the same second, a failed connection is rather the consequence.
    let log = read_text(&format!(
        "{}{}{}",
        warn(20, 1, "Cuda failure 2 'out of memory'"),
        warn(5, 2, connect),
        warn(5, 3, "Call to socket failed: Too many open files"),
    ));
    let report = log.report();
    let checks: Vec<_> = report
        .of(Severity::Error)
        .map(|one| &one.check[..])
        .collect();
    assert_eq!(
        checks,
        ["log-open-files", "log-connect", "log-memory"],
        "{report}"
    );
    says(
        &report.findings[0].what,
        &["the first by the hosts' clocks: a, pid 3 at 2026-04-22 21:34:05"],
    );
}

#[test]
fn an_address_that_nobody_reaches_is_told_with_its_owner() {
    let log = read(&["2.21-other-network-h1.log", "2.21-other-network-h2.log"]);
    let report = log.report();
    let connect: Vec<_> = report
        .findings
        .iter()
        .filter(|f| f.check == "log-connect")
        .collect();
    assert_eq!(connect[0].severity, Severity::Error);
    says(
        &connect[0].what,
        &[
            "rank 1 (h1, pid 51)",
            "10.37.12.78 is eno2 of h2 (ranks 2-3)",
        ],
    );
    assert_eq!(connect[1].severity, Severity::Warning, "{report}");
    says(&connect[1].what, &["Connection refused"]);
    let interface = found(&log, "log-interface");
    says(&interface.what, &["bond0 10.9.0.1", "eno2 10.37.12.78"]);
    says(&interface.fix.unwrap(), &["NCCL_SOCKET_IFNAME"]);
}

#[test]
fn a_rank_that_never_began_is_named() {
    let log = read(&["2.32-missing-rank.log"]);
    let init = found(&log, "log-init");
    assert_eq!(init.severity, Severity::Error);
    says(
        &init.what,
        &[
            "communicator 0xabcdef of 3 ranks did not come up on ranks 0-1",
            "rank 2 never began",
        ],
    );
    says(&init.fix.unwrap(), &["look at rank 2"]);
    let retries = found(&log, "log-connect");
    says(
        &retries.what,
        &[
            "rank 1 (n1, pid 70) tried 3 times",
            "10.8.0.1 is ib0 of n0 (rank 0)",
        ],
    );
}

#[test]
fn a_connection_that_both_ends_tell_of_is_one() {
    let mut text = String::new();
    for rank in 0..2 {
        let other = 1 - rank;
        text.push_str(&format!(
            "a:{rank}:9 [{rank}] NCCL INFO comm 0x5 rank {rank} nranks 2 cudaDev {rank} nvmlDev {rank} busId 1 commId 0x7 - \
             Init COMPLETE\n\
             a:{rank}:9 [{rank}] NCCL INFO Channel 00/0 : {rank}[{rank}] -> {other}[{other}] [send] via NET/Socket/0\n\
             a:{rank}:9 [{rank}] NCCL INFO Channel 00/0 : {other}[{other}] -> {rank}[{rank}] [receive] via NET/Socket/0\n"
        ));
    }
    let lost = found(&read_text(&text), "log-peer-to-peer");
    says(
        &lost.what,
        &["2 of 2 connections inside hosts go over the network: 0 to 1, 1 to 0"],
    );
}

#[test]
fn who_gave_up_waiting_had_not_come_up() {
    let mut log = read(&["2.32-missing-rank.log"]);
    let abort = b"n0:70:70 [0] NCCL INFO comm 0x900 rank 0 nranks 3 cudaDev 0 busId 1000 commId 0xabcdef - Abort COMPLETE\n";
    log.read("more", &abort[..]).unwrap();
    says(
        &found(&log, "log-init").what,
        &["did not come up on ranks 0-1", "rank 2 never began"],
    );
}

#[test]
fn adapters_without_direct_access_to_the_device_are_named() {
    let log = read(&["2.28-without-gdr.log"]);
    only(&log, &["log-direct-rdma"]);
    let gdr = found(&log, "log-direct-rdma");
    says(&gdr.what, &["ranks 0-1 (g0, g1)", "4 of 8", "mlx5_4"]);
    says(&gdr.fix.unwrap(), &["nvidia-peermem"]);
}

#[test]
fn interfaces_that_lead_nowhere_are_errors_where_there_are_other_hosts() {
    let docker = "h1:1:1 [0] NCCL INFO Bootstrap: Using eth0:10.0.0.1<0>\n\
                  h2:1:1 [0] NCCL INFO Bootstrap: Using docker0:172.17.0.1<0>\n";
    let log = read_text(docker);
    let interface = found(&log, "log-interface");
    assert_eq!(
        (interface.severity, &interface.hosts[..]),
        (Severity::Error, &["h2".to_owned()][..])
    );
    // On one host, every interface is good.
    only(
        &read_text("h2:1:1 [0] NCCL INFO Bootstrap: Using docker0:172.17.0.1<0>\n"),
        &[],
    );
}

#[test]
fn releases_and_variables_that_differ_are_found() {
    let log = read_text(
        "NCCL version 2.21.5+cuda12.4\na:1:1 [0] NCCL INFO NCCL version 2.27.7+cuda12.9\n\
         a:1:1 [0] NCCL INFO NCCL_ALGO set by environment to Ring\n\
         b:1:1 [0] NCCL INFO NCCL_ALGO set by environment to Tree\n\
         a:1:1 [0] NCCL INFO NCCL_SOCKET_IFNAME set by environment to eth0\n\
         b:1:1 [0] NCCL INFO NCCL_SOCKET_IFNAME set by environment to ens3\n",
    );
    only(&log, &["log-version", "log-variable"]);
    says(
        &found(&log, "log-version").what,
        &["2.21.5 (in log)", "2.27.7 on a, pid 1"],
    );
    says(
        &found(&log, "log-variable").what,
        &["NCCL_ALGO differs: Ring on a, pid 1; Tree on b, pid 1"],
    );
}

#[test]
fn where_only_consequences_are_seen_the_silent_ranks_are_named() {
    let mut text = String::new();
    for rank in 0..3 {
        text.push_str(&format!(
            "a:{rank}:9 [{rank}] NCCL INFO comm 0x5 rank {rank} nranks 3 cudaDev {rank} nvmlDev {rank} busId 1 commId 0x7 - \
             Init COMPLETE\n"
        ));
    }
    text.push_str("a:0:9 [0] misc/socket.cc:49 NCCL WARN socketProgress: Connection closed by remote peer a<57557>\n");
    let log = read_text(&text);
    let finding = found(&log, "log-consequence");
    says(&finding.fix.unwrap(), &["ranks 1-2 warned about nothing"]);
    says(
        &finding.what,
        &["rank 0 (a, pid 0)", "is not in these logs"],
    );
}

#[test]
fn an_error_without_a_warning_tells_where_to_begin() {
    // 2.18.1 logs nothing when a connection fails.
    let log = read_text(
        "a:1:9 [0] NCCL INFO misc/socket.cc:49 -> 6\n\
         a:1:9 [0] misc/socket.cc:49 NCCL WARN socketProgress: Connection closed by remote peer b<57557>\n\
         b:2:9 [0] NCCL INFO misc/socket.cc:567 -> 2\n\
         b:2:9 [0] NCCL INFO proxy.cc:1306 -> 2\n\
         b:2:9 [0] proxy.cc:1519 NCCL WARN [Proxy Service 1] Failed to execute operation Connect from rank 1, retcode 2\n",
    );
    let finding = found(&log, "log-consequence");
    says(
        &finding.fix.unwrap(),
        &["begin with b, pid 2 (error 2 at misc/socket.cc:567)"],
    );
}

#[test]
fn a_network_plugin_that_was_asked_for_and_is_missing_is_an_error() {
    let log = read_text(
        "a:1:1 [0] NCCL INFO NCCL_NET_PLUGIN set by environment to ofi\n\
         a:1:1 [0] NCCL INFO NET/Plugin: Could not find: ofi libnccl-net-ofi.so.\n",
    );
    says(&found(&log, "log-plugin").what, &["ofi was asked for"]);
    let failed =
        read_text("a:1:1 [0] NCCL INFO NET/Plugin: libnccl-net.so: undefined symbol: fi_getinfo\n");
    assert_eq!(found(&failed, "log-plugin").severity, Severity::Warning);
}

#[test]
fn what_is_not_known_is_told_and_not_judged() {
    let log = read_text(
        "a:1:1 [0] init.cc:1 NCCL WARN a new trouble 1\na:1:1 [0] init.cc:1 NCCL WARN a new trouble 2\n",
    );
    let unknown = found(&log, "log-warning");
    assert_eq!((unknown.severity, unknown.fix), (Severity::Warning, None));
    says(&unknown.what, &["a new trouble 1", "1 more times"]);
    assert_eq!(found(&log, "log-level").severity, Severity::Warning);
    let empty = read_text("nothing of interest\n");
    says(
        &found(&empty, "log-level").fix.unwrap(),
        &["NCCL_DEBUG=INFO"],
    );
}

#[test]
fn the_file_of_a_rank_names_it_where_nothing_else_does() {
    let mut log = DebugLog::new();
    let warning = b"a:1:1 [0] x.cc:1 NCCL WARN Cuda failure 2 'out of memory'\n";
    log.read("/tmp/job/nccl.rank-5.generation-1.log", &warning[..])
        .unwrap();
    assert_eq!(found(&log, "log-memory").ranks, [5]);
}

#[test]
fn an_abort_that_nothing_explains_is_told() {
    let log = read_text(
        "a:1:1 [0] NCCL INFO comm 0x5 rank 0 nranks 1 cudaDev 0 nvmlDev 0 busId 1 commId 0x7 - Init COMPLETE\n\
         a:1:1 [0] NCCL INFO comm 0x5 rank 0 nranks 1 cudaDev 0 busId 1 - Abort COMPLETE\n",
    );
    only(&log, &["log-abort"]);
    says(
        &found(&log, "log-abort").what,
        &["rank 0 (a, pid 1) aborted"],
    );
}

#[test]
fn ranks_whose_logs_are_elsewhere_are_told() {
    let log = read(&["2.27-node-a-of-two.log"]);
    says(&found(&log, "log-init").what, &["ranks 2-3 never began"]);
    let half = read_text(
        "a:1:1 [0] NCCL INFO comm 0x5 rank 0 nranks 2 cudaDev 0 nvmlDev 0 busId 1 commId 0x7 - Init COMPLETE\n",
    );
    says(
        &found(&half, "log-ranks").what,
        &["of the 2 ranks", "1 are not in these logs"],
    );
}
