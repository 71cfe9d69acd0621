//! A rendezvous across hosts: each host is a network namespace.
//!
//! Needs root; without, the tests say that they were skipped.

use std::io::{BufRead, BufReader};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::meeting::{self, ENDS, Hosts, ip, results, start, start_with};
use crate::support::table;

/// The users' documentation of these messages.
const PAGE: &str = include_str!("../../docs/start-up-faults.md");

#[test]
fn hosts_with_other_interface_names_meet_at_the_subnet_that_they_share() {
    let Some(hosts) = Hosts::new([&["10.77.0.1/24"], &["10.77.0.2/24"]]) else {
        return;
    };
    let more = [
        ("NCCL_RUN_RENDEZVOUS", "tcp:10.77.0.1:29400-29403"),
        ("NCCL_RUN_INTERFACE", "10.77.0.0/16"),
    ];
    let ranks = (0..4).map(|rank| hosts.start(rank % 2, rank, 4, "meet", &more));
    assert_eq!(results(ranks.collect()), ["fine"; 4]);
}

#[test]
fn hosts_without_any_ipv4_meet() {
    let Some(hosts) = Hosts::new([&["fd77::1/64"], &["fd77::2/64"]]) else {
        return;
    };
    let more = [("NCCL_RUN_RENDEZVOUS", "tcp:[fd77::1]:29400")];
    let ranks = (0..2).map(|rank| hosts.start(rank, rank, 2, "meet", &more));
    assert_eq!(results(ranks.collect()), ["fine"; 2]);
}

#[test]
fn what_keeps_hosts_apart_is_said_with_the_interfaces_there_are() {
    let Some(hosts) = Hosts::new([&["10.77.0.1/24"], &["10.78.0.2/24"]]) else {
        return;
    };
    let limit = ("NCCL_TEST_LIMIT", "1500");

    // There is no route to that subnet.
    let more = [("NCCL_RUN_RENDEZVOUS", "tcp:10.77.0.1:29400"), limit];
    let ranks = (0..2).map(|rank| hosts.start(rank, rank, 2, "meet", &more));
    let said = results(ranks.collect());
    assert!(said[0].contains("rank 1 of 2 did not come"), "{said:?}");
    assert!(
        said[1].contains("unreachable") && said[1].contains("10.77.0.1:29400"),
        "{said:?}"
    );

    // Rank 0 was started on the other host.
    let said = results(vec![hosts.start(1, 0, 2, "meet", &more)]).remove(0);
    for word in ["10.77.0.1", "not an address of this host", "ens3 10.78.0.2"] {
        assert!(said.contains(word), "{word:?} in {said:?}");
    }

    // There is no such interface.
    let more_wrong = [more[0], ("NCCL_RUN_INTERFACE", "eno9"), limit];
    let said = results(vec![hosts.start(0, 0, 2, "meet", &more_wrong)]).remove(0);
    println!("said: {said}");
    for word in ["eno9", "eth7 10.77.0.1", "docker0"] {
        assert!(said.contains(word), "{word:?} in {said:?}");
    }

    // The requested interface is down.
    ip(&format!("-n {} link set {} down", hosts.names[0], ENDS[0]));
    let more = [more[0], ("NCCL_RUN_INTERFACE", "eth7"), limit];
    let said = results(vec![hosts.start(0, 0, 2, "meet", &more)]).remove(0);
    for word in ["eth7 (10.77.0.1)", "is down", "ip link set eth7 up"] {
        assert!(said.contains(word), "{word:?} in {said:?}");
    }
}

#[test]
fn a_host_that_is_cut_off_is_named_within_seconds() {
    let Some(hosts) = Hosts::new([&["10.77.0.1/24"], &["10.77.0.2/24"]]) else {
        return;
    };
    let more = [("NCCL_RUN_RENDEZVOUS", "tcp:10.77.0.1:29400")];
    let scripts = ["wait for all", "wait for all", "stand still"];
    let mut ranks: Vec<_> = scripts
        .iter()
        .enumerate()
        .map(|(rank, script)| hosts.start(rank / 2, rank, 3, script, &more))
        .collect();
    // All have joined; a moment later, all wait.
    let mut out = BufReader::new(ranks[2].stdout.take().unwrap());
    let mut line = String::new();
    while !line.contains("met as") {
        line.clear();
        assert!(out.read_line(&mut line).unwrap() > 0, "rank 2 ended");
    }
    std::thread::sleep(Duration::from_millis(500));
    ip(&format!("-n {} link set {} down", hosts.names[1], ENDS[1]));
    let cut = Instant::now();
    let mut far = ranks.pop().unwrap();
    let said = results(ranks);
    assert!(
        cut.elapsed() < Duration::from_secs(8),
        "{:?}",
        cut.elapsed()
    );
    println!("said after {:.1?}: {said:#?}", cut.elapsed());
    for said in said {
        assert!(
            said.contains("rank 2") && said.contains("connection broke"),
            "{said}"
        );
    }
    // Which passes the signal on.
    let pid = rustix::process::Pid::from_child(&far);
    let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
    let _ = far.wait();
}

/// Tests of this file that measure how late ranks are run one at a time.
static TURN: Mutex<()> = Mutex::new(());

/// The rank is alive: no rank may report it dead, and every rank gets its state.
#[test]
fn a_rank_that_is_stopped_is_said_to_be_alive_and_silent_with_its_state() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let stop = |victim: usize| {
        let directory = tempfile::tempdir().unwrap();
        let place = format!("unix:{}/meet", directory.path().display());
        let more = [("NCCL_RUN_RENDEZVOUS", &place[..])];
        let mut ranks: Vec<_> = (0..3)
            .map(|rank| {
                let script = match rank == victim {
                    true => "stand still",
                    false => "wait 6 s for all",
                };
                start_with(&[], rank, 3, script, &more)
            })
            .collect();
        let mut stopped = ranks.remove(victim);
        let mut out = BufReader::new(stopped.stdout.take().unwrap());
        let mut line = String::new();
        while !line.contains("met as") {
            line.clear();
            assert!(out.read_line(&mut line).unwrap() > 0, "it ended");
        }
        // By then the others have received all messages of the rank.
        std::thread::sleep(Duration::from_millis(500));
        let pid = rustix::process::Pid::from_child(&stopped);
        let signal = |signal| rustix::process::kill_process(pid, signal).unwrap();
        signal(rustix::process::Signal::STOP);
        let said = results(ranks);
        signal(rustix::process::Signal::KILL);
        stopped.wait().unwrap();
        println!("rank {victim} is stopped: {said:#?}");
        for said in said {
            let alive = format!("pid {}) is alive, but silent for ", stopped.id());
            for word in [&alive[..], " s: process state T (stopped)"] {
                assert!(said.contains(word), "{word:?} in {said:?}");
            }
            assert!(!said.contains("died") && !said.contains("gone"), "{said:?}");
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(|| stop(2));
        stop(0);
    });
}

/// On a busy machine a rank may be silent for so long that the succession passes it over.
#[test]
fn a_rank_that_was_passed_over_goes_on_behind_the_one_that_took_over() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let directory = tempfile::tempdir().unwrap();
    let place = format!("unix:{}/meet", directory.path().display());
    let more = [("NCCL_RUN_RENDEZVOUS", &place[..])];
    let mut ranks: Vec<_> = (0..3)
        .map(|rank| start_with(&[], rank, 3, "go on once", &more))
        .collect();
    for rank in &mut ranks {
        let mut out = BufReader::new(rank.stdout.as_mut().unwrap());
        let mut line = String::new();
        while !line.contains("met as") {
            line.clear();
            assert!(out.read_line(&mut line).unwrap() > 0, "it ended");
        }
    }
    // By then all ranks have received each other's messages.
    std::thread::sleep(Duration::from_millis(500));
    let pids: Vec<_> = ranks.iter().map(rustix::process::Pid::from_child).collect();
    let signal = |rank: usize, signal| rustix::process::kill_process(pids[rank], signal).unwrap();
    signal(1, rustix::process::Signal::STOP);
    signal(0, rustix::process::Signal::KILL);
    ranks.remove(0).wait().unwrap();
    // Longer than a rank waits for an answer.
    std::thread::sleep(Duration::from_secs(5));
    signal(1, rustix::process::Signal::CONT);
    let said = results(ranks);
    // The ranks keep their order, whichever of them coordinates.
    let order = [
        "rank 0 of [Some(1), Some(2)]",
        "rank 1 of [Some(1), Some(2)]",
    ];
    assert_eq!(said, order);
}

/// Ten minutes: `NCCL_TEST_SOAK_SECONDS=600 cargo test -p nccl-tests --test failures busy -- --nocapture`.
#[test]
fn many_busy_ranks_on_few_cores_are_all_heard_in_time() {
    const RANKS: usize = 16;
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let directory = tempfile::tempdir().unwrap();
    let place = format!("unix:{}/meet", directory.path().display());
    let limit = ("NCCL_TEST_LIMIT", "60000");
    let more = [("NCCL_RUN_RENDEZVOUS", &place[..]), limit];
    let ranks = (0..RANKS).map(|rank| start_with(&[], rank, RANKS, "spin and be heard", &more));
    for (rank, said) in results(ranks.collect()).iter().enumerate() {
        let (heard, worst) = said.split_once(' ').unwrap_or_else(|| panic!("{said}"));
        println!("rank {rank} heard {heard}, and none of them for {worst} ms at most");
        let expected = if rank == 0 { RANKS - 1 } else { 1 };
        assert_eq!(heard.parse(), Ok(expected), "{said}");
        // A silence of this length makes a suspect.
        let worst: u64 = worst.parse().unwrap_or_else(|_| panic!("{said}"));
        assert!(worst < 3000, "rank {rank}: {said}");
    }
}

#[test]
fn a_killed_rank_is_named_on_every_other_rank() {
    let directory = tempfile::tempdir().unwrap();
    let place = format!("unix:{}/meet", directory.path().display());
    let more = [("NCCL_RUN_RENDEZVOUS", &place[..])];
    let begun = Instant::now();
    let mut ranks: Vec<_> = (0..4)
        .map(|rank| {
            let script = if rank == 2 { "die" } else { "wait for all" };
            start(&[], rank, 4, script, &more)
        })
        .collect();
    let mut dead = ranks.remove(2);
    for said in results(ranks) {
        assert!(
            said.contains("rank 2 (") && said.contains("it died"),
            "{said}"
        );
    }
    assert!(begun.elapsed() < Duration::from_secs(10));
    let _ = dead.wait();
}

#[test]
fn a_coordinator_without_descriptors_waits_for_some_without_spinning() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("meet");
    let place = format!("unix:{}", path.display());
    let more = [
        ("NCCL_RUN_RENDEZVOUS", &place[..]),
        ("NCCL_TEST_FILES", "20"),
    ];
    let zero = start(&[], 0, 2, "meet cheaply", &more);
    let deadline = Instant::now() + Duration::from_secs(10);
    // The file exists before rank 0 listens.
    let first = loop {
        match std::os::unix::net::UnixStream::connect(&path) {
            Ok(stream) => break stream,
            Err(error) => assert!(Instant::now() < deadline, "rank 0 listens: {error:#}"),
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    // More connections than it has descriptors for; the rest waits in the kernel.
    let mut silent = vec![first];
    silent.resize_with(40, || {
        std::os::unix::net::UnixStream::connect(&path).unwrap()
    });
    std::thread::sleep(Duration::from_secs(2));
    drop(silent);
    let one = start(&[], 1, 2, "meet", &more[..1]);
    let said = results(vec![zero, one]);
    let cpu: u64 = said[0].parse().unwrap_or_else(|_| panic!("{said:?}"));
    assert!(cpu < 700, "rank 0 used {cpu} ms of two seconds");
    assert_eq!(said[1], "fine");
}

/// The second host reaches 10.99.0.1 through the first, which handles the packets by its route.
#[test]
fn a_firewall_that_drops_is_told_from_one_that_refuses_and_from_the_hosts_own() {
    let Some(hosts) = Hosts::new([&["10.77.0.1/24"], &["10.77.0.2/24"]]) else {
        return;
    };
    let [router, host] = &hosts.names;
    ip(&format!(
        "netns exec {router} sysctl -qw net.ipv4.ip_forward=1"
    ));
    let more = [
        ("NCCL_RUN_RENDEZVOUS", "tcp:10.99.0.1:29400"),
        ("NCCL_TEST_LIMIT", "1500"),
    ];
    for (far, near, words) in [
        (
            "blackhole",
            None,
            &["no answer at all", "firewall may drop it"][..],
        ),
        ("prohibit", None, &["router or a firewall refuses it"]),
        ("unreachable", None, &["router or a firewall refuses it"]),
        (
            "blackhole",
            Some("prohibit"),
            &["firewall of this host forbids it"],
        ),
        (
            "blackhole",
            Some("blackhole"),
            &["route of this host drops it"],
        ),
    ] {
        if far == "unreachable" {
            // So many refusals before would rate-limit the next ones.
            ip(&format!(
                "netns exec {router} sysctl -qw net.ipv4.icmp_ratelimit=0"
            ));
        }
        ip(&format!("-n {router} route add {far} 10.99.0.1"));
        match near {
            None => ip(&format!("-n {host} route add 10.99.0.1 via 10.77.0.1")),
            Some(kind) => ip(&format!("-n {host} route add {kind} 10.99.0.1")),
        }
        let begun = Instant::now();
        let said = results(vec![hosts.start(1, 1, 2, "meet", &more)]).remove(0);
        println!("{far} {near:?}, said after {:?}: {said}", begun.elapsed());
        assert!(said.contains("10.99.0.1:29400"), "{said}");
        for word in words {
            assert!(said.contains(word), "{word:?} in {said:?}");
        }
        ip(&format!("-n {router} route del {far} 10.99.0.1"));
        match near {
            None => ip(&format!("-n {host} route del 10.99.0.1 via 10.77.0.1")),
            Some(kind) => ip(&format!("-n {host} route del {kind} 10.99.0.1")),
        }
    }
}

#[test]
fn a_name_that_is_the_loopback_on_rank_0s_host_is_said() {
    let Some(hosts) = Hosts::new([&["10.77.0.1/24"], &["10.77.0.2/24"]]) else {
        return;
    };
    // The line that Debian writes for a host's own name; the other host resolves it correctly.
    hosts.know(
        0,
        "127.0.0.1 localhost\n127.0.1.1 node-a # by the installer\n",
    );
    hosts.know(1, "127.0.0.1 localhost\n10.77.0.1 node-a\n");
    let more = [
        ("NCCL_RUN_RENDEZVOUS", "tcp:node-a:29400"),
        ("NCCL_TEST_LIMIT", "1500"),
    ];
    // No setting says that there are other hosts: the report comes when a rank is missing.
    let ranks = (0..2).map(|rank| hosts.start(rank, rank, 2, "meet", &more));
    let said = results(ranks.collect());
    println!("said: {said:#?}");
    for word in [
        "127.0.1.1",
        "line 2 of /etc/hosts",
        "no other host can reach",
    ] {
        assert!(said[0].contains(word), "{word:?} in {said:?}");
    }
    assert!(
        said[1].contains("10.77.0.1:29400") && said[1].contains("refused"),
        "{said:?}"
    );
    // With the setting, the report comes at once.
    let more = [more[0], ("NCCL_RUN_LOCAL_WORLD_SIZE", "1")];
    let begun = Instant::now();
    let said = results(vec![hosts.start(0, 0, 2, "meet", &more)]).remove(0);
    println!("said after {:?}: {said}", begun.elapsed());
    for word in ["127.0.1.1", "line 2 of /etc/hosts", "eth7 10.77.0.1"] {
        assert!(said.contains(word), "{word:?} in {said:?}");
    }
    assert!(begun.elapsed() < Duration::from_secs(10));
}

#[test]
fn ranks_of_one_host_meet_without_any_network() {
    let Some(hosts) = Hosts::new([&[], &[]]) else {
        return;
    };
    let host = &hosts.names[0];
    ip(&format!("-n {host} link set lo down"));
    ip(&format!("-n {host} link set {} down", ENDS[0]));
    let directory = tempfile::tempdir().unwrap();
    let path = format!("unix:{}/meet", directory.path().display());
    for place in [&path[..], "unix:@nccl-test-without-a-network"] {
        let more = [("NCCL_RUN_RENDEZVOUS", place)];
        let ranks = (0..3).map(|rank| hosts.start(0, rank, 3, "meet", &more));
        assert_eq!(results(ranks.collect()), ["fine"; 3], "{place}");
    }
    // Over TCP the address of the rendezvous is missing, and the error says so.
    let more = [
        ("NCCL_RUN_RENDEZVOUS", "tcp:127.0.0.1:29400"),
        ("NCCL_TEST_LIMIT", "1500"),
    ];
    let ranks = (0..2).map(|rank| hosts.start(0, rank, 2, "meet", &more));
    let said = results(ranks.collect());
    println!("said: {said:#?}");
    assert!(
        said[0].contains("interface lo (127.0.0.1)") && said[0].contains("is down"),
        "{said:?}"
    );
    assert!(said[1].contains("no answer at all"), "{said:?}");
}

#[test]
fn a_rank_0_that_dies_while_others_still_come_is_named_at_once() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("meet");
    let place = format!("unix:{}", path.display());
    let more = [("NCCL_RUN_RENDEZVOUS", &place[..])];
    let mut zero = meeting::start_with(&[], 0, 3, "meet", &more);
    let one = start(&[], 1, 3, "meet", &more);
    // Rank 1 has joined when its own socket exists; rank 2 never does.
    let door = directory.path().join("meet.1");
    let deadline = Instant::now() + Duration::from_secs(10);
    while !door.exists() {
        assert!(Instant::now() < deadline, "rank 1 comes");
        std::thread::sleep(Duration::from_millis(5));
    }
    std::thread::sleep(Duration::from_millis(50));
    let begun = Instant::now();
    zero.kill().unwrap();
    zero.wait().unwrap();
    let said = results(vec![one]).remove(0);
    println!("said after {:?}: {said}", begun.elapsed());
    table::is_as_quoted(PAGE, "rank 0 is killed while others still come", &said);
    // Below the silence after which a rank counts as dead.
    assert!(begun.elapsed() < Duration::from_millis(2500));
}
