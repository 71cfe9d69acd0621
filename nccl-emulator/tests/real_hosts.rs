//! What NVIDIA's own library does between hosts, and within the limits of one: hosts are namespaces on this machine,
//! with names, networks and shared memory of their own. Each fault is a row of the table of behaviour in
//! `docs/real-nccl.md`.
//!
//! Needs root; without, each test says that it was not run.

#[path = "../../tests/support/delayed_cable.rs"]
mod delayed_cable;
#[path = "../../tests/support/isolated_hosts.rs"]
mod isolated_hosts;
mod ranks;
mod real;
#[path = "../../tests/support/switch.rs"]
mod switch;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::process::{Command, ExitStatus};
use std::time::{Duration, Instant};

use isolated_hosts::{Cables, IsolatedHosts, Plan, Unable};
use nccl_sys::ncclDataType_t as Kind;
use ranks::{Process, Rank, Started, is_child_of, last_error, nccl, processes_started, wait_until};
use real::{Buffers, P2P, SHM, asynchronous_error, environment_of, libraries, stays, version};

/// Long enough to show that a call does not return.
const WATCHED: Duration = Duration::from_secs(2);

const SYSTEM_ERROR: u32 = 2;
const REMOTE_ERROR: u32 = 6;
const IN_PROGRESS: u32 = 7;

/// Devices of each host: one for each of its ranks.
const TWO_DEVICES: (&str, &str) = ("CUDA_VISIBLE_DEVICES", "0,1");

/// A test on isolated hosts, each with the same number of ranks.
struct Case<'a> {
    test: &'a str,
    plan: Plan,
    ranks_of_each: i32,
    environment: &'a [(&'a str, &'a str)],
}

impl<'a> Case<'a> {
    /// Two hosts with two ranks each.
    fn new(test: &'a str, environment: &'a [(&'a str, &'a str)]) -> Self {
        Self {
            test,
            plan: Plan::default(),
            ranks_of_each: 2,
            environment,
        }
    }

    /// Two hosts with a rank each.
    fn pair(test: &'a str, environment: &'a [(&'a str, &'a str)]) -> Self {
        Self {
            ranks_of_each: 1,
            ..Self::new(test, environment)
        }
    }

    /// Runs `body` as each rank, on each library, and `on_cables` in the test itself meanwhile.
    fn run(
        self,
        on_cables: impl Fn(&IsolatedHosts, &Process) -> Result<(), Unable>,
        body: impl Fn(Process),
    ) {
        let hosts = i32::try_from(self.plan.hosts).unwrap();
        let ranks = self.ranks_of_each * hosts;
        let ending = |_, status: ExitStatus| status.success();
        if is_child_of(self.test) {
            let started = Started {
                start: &|_, _| unreachable!("a rank starts no other"),
                meanwhile: &|_| (),
            };
            processes_started(self.test, ranks, &[], started, ending, body);
            std::process::exit(0);
        }
        for library in libraries(self.test) {
            println!("{} on {library}", self.test);
            let Some(hosts) = IsolatedHosts::new(&self.plan) else {
                return;
            };
            let mut environment = vec![TWO_DEVICES];
            environment.extend(self.environment);
            let start = |rank: i32, mut command: Command| {
                let host = usize::try_from(rank / self.ranks_of_each).unwrap();
                hosts.spawn(host, &mut command).unwrap()
            };
            let meanwhile = |process: &Process| {
                if let Err(unable) = on_cables(&hosts, process) {
                    println!("NOT TESTED: {}: {unable}", self.test);
                    process.mark(UNABLE);
                }
            };
            let started = Started {
                start: &start,
                meanwhile: &meanwhile,
            };
            let environment = environment_of(&library, &environment);
            processes_started(self.test, ranks, &environment, started, ending, &body);
        }
    }
}

/// The point that the test marks when this machine cannot change a cable as required.
const UNABLE: &str = "unable";

/// Meets the other ranks at a point, and waits until the test has acted on the hosts. Exits if the test cannot.
fn has_been_done(process: &Process, point: &str) {
    process.meet(point);
    wait_until(point, || {
        process.is_marked(&format!("{point}.done")) || process.is_marked(UNABLE)
    });
    if process.is_marked(UNABLE) {
        std::process::exit(0);
    }
}

/// Before this release an error of a proxy thread reaches the communicator's state by accident, if at all.
const PROXIES_REPORT: i32 = 22_800;

/// Checks that a connection of this rank breaks: the line in its log, and the state.
fn check_broken(process: &Process, rank: &Rank, what: &str, line: &str) {
    let start = Instant::now();
    wait_until("the log says why", || process.log().contains(line));
    if version() >= PROXIES_REPORT {
        assert_eq!(asynchronous_error(rank), REMOTE_ERROR);
        println!("{what}: after {:?}", start.elapsed());
    }
}

/// In the test: waits until all ranks have reached a point, runs `what`, and lets the ranks continue.
fn when_at<T>(
    process: &Process,
    point: &str,
    what: impl FnOnce() -> Result<T, Unable>,
) -> Result<T, Unable> {
    (0..process.ranks).for_each(|rank| process.wait_for(&format!("{point}.{rank}")));
    let done = what()?;
    process.mark(&format!("{point}.done"));
    Ok(done)
}

/// [`when_at`] for actions that every machine supports.
fn always_at(process: &Process, point: &str, what: impl FnOnce()) -> Result<(), Unable> {
    when_at(process, point, || {
        what();
        Ok(())
    })
}

fn nothing_happens(_: &IsolatedHosts, _: &Process) -> Result<(), Unable> {
    Ok(())
}

/// Each rank sends each other its own number and the other's.
fn check_all_to_all(rank: &Rank) {
    let own = rank.rank * 100;
    let values: Vec<i32> = (0..rank.ranks).map(|peer| own + peer).collect();
    let parts: Vec<_> = values
        .iter()
        .map(|&value| rank.memory(&[value; 3000]))
        .collect();
    let places: Vec<_> = values.iter().map(|_| rank.memory(&[-1; 3000])).collect();
    assert_eq!(nccl!(ncclGroupStart()), 0);
    for peer in 0..rank.ranks {
        assert_eq!(rank.send(&parts[peer as usize], Kind::ncclInt32, peer), 0);
        assert_eq!(
            rank.receive(&places[peer as usize], Kind::ncclInt32, peer),
            0
        );
    }
    assert_eq!(nccl!(ncclGroupEnd()), 0, "{}", last_error());
    wait_until("the all-to-all is over", || rank.is_idle());
    for (peer, place) in (0..).zip(&places) {
        let expected = peer * 100 + rank.rank;
        assert!(place.read().iter().all(|&value| value == expected));
    }
}

/// How this rank sends, from its log, as (peer, transport).
fn ways(process: &Process) -> Vec<(i32, String)> {
    let log = process.log();
    let way = |line: &str| {
        let (peers, transport) = line.split_once(" via ")?;
        let (from, to) = peers.rsplit_once(" : ")?.1.split_once(" -> ")?;
        let rank = |end: &str| end.split('[').next()?.parse::<i32>().ok();
        (rank(from)? == process.rank).then_some(())?;
        Some((rank(to)?, transport.to_owned()))
    };
    log.lines().filter_map(way).collect()
}

fn is_neighbour(process: &Process, other: i32, ranks_of_each: i32) -> bool {
    process.rank / ranks_of_each == other / ranks_of_each
}

#[test]
fn hosts_talk_by_sockets_and_neighbours_by_memory() {
    let name = "hosts_talk_by_sockets_and_neighbours_by_memory";
    for (environment, neighbours) in [(&P2P, "P2P/"), (&SHM, "SHM")] {
        let environment = [environment[0], ("TEST_NEIGHBOURS", neighbours)];
        Case::new(name, &environment).run(nothing_happens, |process| {
            let rank = process.join();
            Buffers::of(&rank).check(&rank);
            Buffers::sized(&rank, 300_000).check(&rank);
            check_all_to_all(&rank);
            let log = process.log();
            assert!(log.contains("nRanks 4 nNodes 2 localRanks 2"), "{log}");
            let neighbours = std::env::var("TEST_NEIGHBOURS").unwrap();
            let ways = ways(&process);
            let reached = |others: bool| {
                let mut all = ways.iter().map(|way| way.0);
                all.any(|to| to != process.rank && is_neighbour(&process, to, 2) != others)
            };
            assert!(reached(false) && reached(true), "{ways:?}");
            for (to, transport) in &ways {
                let expected = match is_neighbour(&process, *to, 2) {
                    true => &*neighbours,
                    false => "NET/Socket",
                };
                assert!(transport.starts_with(expected), "to {to}: {transport}");
            }
            process.meet("over");
            rank.destroy();
        });
    }
}

#[test]
fn two_machines_with_nvswitches_make_rings_over_both() {
    let name = "two_machines_with_nvswitches_make_rings_over_both";
    let topology = concat!(env!("CARGO_MANIFEST_DIR"), "/topologies/nvswitch8.xml");
    let environment = [("NCCL_TOPO_FILE", topology)];
    Case::new(name, &environment).run(nothing_happens, |process| {
        let rank = process.join();
        Buffers::sized(&rank, 50_000).check(&rank);
        check_all_to_all(&rank);
        let log = process.log();
        assert!(log.contains("nRanks 4 nNodes 2 localRanks 2"), "{log}");
        let ways = ways(&process);
        for (to, transport) in &ways {
            // No setting asks for P2P: the links of the topology do.
            let expected = match is_neighbour(&process, *to, 2) {
                true => "P2P/",
                false => "NET/Socket",
            };
            assert!(transport.starts_with(expected), "to {to}: {transport}");
        }
        process.meet("over");
        rank.destroy();
    });
}

#[test]
fn nobody_is_told_of_a_cable_that_is_cut_and_the_work_goes_on_when_it_is_mended() {
    let name = "nobody_is_told_of_a_cable_that_is_cut_and_the_work_goes_on_when_it_is_mended";
    let on_cables = |hosts: &IsolatedHosts, process: &Process| {
        always_at(process, "reduced", || hosts.cut(1))?;
        always_at(process, "watched", || hosts.mend(1))
    };
    Case::new(name, &P2P).run(on_cables, |process| {
        let rank = process.join_nonblocking();
        let buffers = Buffers::of(&rank);
        buffers.check(&rank);
        has_been_done(&process, "reduced");
        buffers.begin(&rank);
        assert!(stays(WATCHED, || rank.state() == 0 && !rank.is_idle()));
        has_been_done(&process, "watched");
        wait_until("the all-reduce is over", || rank.is_idle());
        assert_eq!(rank.state(), 0);
        buffers.check(&rank);
        process.meet("over");
        assert_eq!(rank.abort(), 0);
    });
}

/// Makes TCP give up after about three seconds, where its default takes about fifteen minutes.
fn give_up_early(hosts: &IsolatedHosts) {
    for host in 0..2 {
        let mut command = Command::new("sh");
        command.args(["-c", "echo 3 >/proc/sys/net/ipv4/tcp_retries2"]);
        hosts.output(host, &mut command);
    }
}

#[test]
fn a_rank_that_only_waits_is_not_told_of_a_cut_by_tcp_either() {
    let name = "a_rank_that_only_waits_is_not_told_of_a_cut_by_tcp_either";
    let on_cables = |hosts: &IsolatedHosts, process: &Process| {
        give_up_early(hosts);
        always_at(process, "reduced", || hosts.cut(1))
    };
    Case::pair(name, &[]).run(on_cables, |process| {
        let rank = process.join_nonblocking();
        let buffers = Buffers::of(&rank);
        buffers.check(&rank);
        has_been_done(&process, "reduced");
        // The kernel has accepted all data to send, and NCCL reads from a connection on which nothing arrives.
        buffers.begin(&rank);
        assert!(stays(Duration::from_secs(8), || rank.state() == 0
            && !rank.is_idle()));
        assert_eq!(rank.abort(), 0);
    });
}

#[test]
fn a_sender_gets_a_remote_error_once_tcp_gives_up_and_a_receiver_nothing() {
    let name = "a_sender_gets_a_remote_error_once_tcp_gives_up_and_a_receiver_nothing";
    let on_cables = |hosts: &IsolatedHosts, process: &Process| {
        give_up_early(hosts);
        always_at(process, "sent", || hosts.cut(1))
    };
    Case::pair(name, &[]).run(on_cables, |process| {
        let rank = process.join_nonblocking();
        // More than the kernel buffers for a connection.
        let memory = rank.memory(&vec![1.0f32; 16 << 20]);
        let begin = || {
            let code = match process.rank {
                0 => rank.send(&memory, Kind::ncclFloat, 1),
                _ => rank.receive(&memory, Kind::ncclFloat, 0),
            };
            let error = last_error();
            assert!(matches!(code, 0 | IN_PROGRESS), "{code}: {error}");
            rank.settle();
        };
        begin();
        wait_until("the data are there", || rank.is_idle());
        has_been_done(&process, "sent");
        begin();
        if process.rank == 0 {
            check_broken(
                &process,
                &rank,
                "cut, to the sender",
                "Connection timed out",
            );
        } else {
            assert!(stays(Duration::from_secs(8), || rank.state() == 0));
        }
        process.meet("over");
        assert_eq!(rank.abort(), 0);
    });
}

#[test]
fn a_filter_that_drops_is_a_cut_and_one_that_rejects_is_a_remote_error() {
    let name = "a_filter_that_drops_is_a_cut_and_one_that_rejects_is_a_remote_error";
    let on_cables = |hosts: &IsolatedHosts, process: &Process| {
        when_at(process, "reduced", || hosts.filter(1, "tcp dport > 1 drop"))?;
        when_at(process, "watched", || {
            // No packet may pass between the two filters, or the operation would end.
            hosts.cut(1);
            hosts.unfilter(1);
            hosts.filter(1, "tcp dport > 1 reject with tcp reset")?;
            hosts.mend(1);
            Ok(())
        })
    };
    Case::pair(name, &[]).run(on_cables, |process| {
        let rank = process.join_nonblocking();
        let buffers = Buffers::of(&rank);
        buffers.check(&rank);
        has_been_done(&process, "reduced");
        buffers.begin(&rank);
        assert!(stays(WATCHED, || rank.state() == 0 && !rank.is_idle()));
        has_been_done(&process, "watched");
        // The filter answers for the host behind it, which does not notice. Older releases do not check the connection.
        if version() < PROXIES_REPORT {
            assert!(stays(WATCHED, || rank.state() == 0 && !rank.is_idle()));
        } else if process.rank == 0 {
            let line = "Connection closed by remote peer";
            check_broken(&process, &rank, "rejected", line);
        }
        process.meet("over");
        assert_eq!(rank.abort(), 0);
    });
}

#[test]
fn connections_that_are_reset_are_a_remote_error_of_their_ranks() {
    let name = "connections_that_are_reset_are_a_remote_error_of_their_ranks";
    let on_cables = |hosts: &IsolatedHosts, process: &Process| {
        when_at(process, "reduced", || {
            let reset = hosts.reset(0, "dst 10.78.0.2")?;
            assert!(reset > 0, "there were connections");
            Ok(())
        })
    };
    Case::pair(name, &[]).run(on_cables, |process| {
        let rank = process.join_nonblocking();
        let buffers = Buffers::of(&rank);
        buffers.check(&rank);
        has_been_done(&process, "reduced");
        // The proxy thread may detect the reset first.
        let code = buffers.issue(&rank);
        assert!(matches!(code, 0 | IN_PROGRESS | REMOTE_ERROR), "{code}");
        // The line on the host that resets, and the line on the other.
        let line = match process.rank {
            0 => "Software caused connection abort",
            _ => "Connection closed by remote peer",
        };
        check_broken(&process, &rank, "reset", line);
        process.meet("over");
        assert_eq!(rank.abort(), 0);
    });
}

/// The shortest time of several all-reduces.
fn time_of(buffers: &Buffers, rank: &Rank) -> Duration {
    let once = |_| {
        let start = Instant::now();
        buffers.check(rank);
        start.elapsed()
    };
    // The minimum, because a busy machine delays some.
    (0..9).map(once).min().unwrap()
}

#[test]
fn a_throttled_cable_makes_operations_slow_and_not_wrong() {
    let name = "a_throttled_cable_makes_operations_slow_and_not_wrong";
    let on_cables = |hosts: &IsolatedHosts, process: &Process| {
        when_at(process, "free", || hosts.throttle(1, 40_000_000))?;
        always_at(process, "throttled", || hosts.unthrottle(1))
    };
    Case::pair(name, &[]).run(on_cables, |process| {
        let rank = process.join();
        // 2 MB each way.
        let buffers = Buffers::sized(&rank, 500_000);
        buffers.check(&rank);
        let free = time_of(&buffers, &rank);
        has_been_done(&process, "free");
        let throttled = time_of(&buffers, &rank);
        has_been_done(&process, "throttled");
        // 2 MB at 5 MB/s.
        println!("2 MB: {free:?} free, {throttled:?} at 40 Mbit/s");
        assert!(throttled > Duration::from_millis(200), "{throttled:?}");
        assert!(throttled > 3 * free, "{throttled:?}, {free:?} free");
        rank.destroy();
    });
}

#[test]
fn a_delay_of_the_cable_is_in_every_operation() {
    let name = "a_delay_of_the_cable_is_in_every_operation";
    let delay = Duration::from_millis(40);
    let on_cables = |hosts: &IsolatedHosts, process: &Process| {
        always_at(process, "near", || hosts.delay(1, delay))
    };
    let plan = Plan {
        cables: Cables::Delayed,
        ..Plan::default()
    };
    let case = Case {
        plan,
        ..Case::pair(name, &[])
    };
    case.run(on_cables, |process| {
        let rank = process.join();
        let buffers = Buffers::of(&rank);
        buffers.check(&rank);
        let near = time_of(&buffers, &rank);
        has_been_done(&process, "near");
        let far = time_of(&buffers, &rank);
        println!("4 kB: {near:?} near, {far:?} with {delay:?} in each direction");
        assert!(far > delay, "{far:?}");
        assert!(far > 3 * near, "{far:?}, {near:?} near");
        assert!(far > near + delay, "{far:?}, {near:?} near");
        rank.destroy();
    });
}

#[test]
fn shared_memory_that_is_too_small_is_a_system_error() {
    let name = "shared_memory_that_is_too_small_is_a_system_error";
    let plan = Plan {
        hosts: 1,
        shared_memory: 1 << 20,
        ..Plan::default()
    };
    let environment = [SHM[0], ("NCCL_CUMEM_HOST_ENABLE", "0")];
    let case = Case {
        plan,
        ..Case::new(name, &environment)
    };
    case.run(nothing_happens, |process| {
        let rank = process.join();
        assert_eq!(Buffers::of(&rank).issue(&rank), SYSTEM_ERROR);
        let log = process.log();
        let line = |line: &str| line.contains("/dev/shm/nccl-") && line.contains("No space left");
        assert!(log.lines().any(line), "{log}");
        process.meet("over");
    });
}

/// The answer of RAS to a command, on the host of the calling thread.
fn ask_ras(command: &str) -> String {
    let mut ras = TcpStream::connect((Ipv4Addr::LOCALHOST, 28028)).unwrap();
    ras.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    ras.write_all(b"CLIENT PROTOCOL 2\n").unwrap();
    let mut answers = BufReader::new(ras.try_clone().unwrap());
    let mut protocol = String::new();
    answers.read_line(&mut protocol).unwrap();
    ras.write_all(format!("{command}\n").as_bytes()).unwrap();
    let mut text = String::new();
    answers.read_to_string(&mut text).unwrap();
    text
}

#[test]
fn ras_names_the_rank_that_lags_on_another_host() {
    let name = "ras_names_the_rank_that_lags_on_another_host";
    let environment = [P2P[0], ("NCCL_RAS_ENABLE", "1")];
    let on_cables = |hosts: &IsolatedHosts, process: &Process| {
        when_at(process, "lagging", || {
            let text = hosts.inside(0, || ask_ras("VERBOSE STATUS"));
            std::fs::write(process.file("ras"), text).unwrap();
            Ok(())
        })
    };
    Case::new(name, &environment).run(on_cables, |process| {
        let rank = process.join();
        let buffers = Buffers::of(&rank);
        buffers.check(&rank);
        if process.rank != 3 {
            assert_eq!(buffers.issue(&rank), 0);
        } else {
            std::fs::write(process.file("pid"), std::process::id().to_string()).unwrap();
        }
        has_been_done(&process, "lagging");
        if process.rank == 0 {
            let text = std::fs::read_to_string(process.file("ras")).unwrap();
            let pid = std::fs::read_to_string(process.file("pid")).unwrap();
            let lagging = |line: &str| {
                line.contains("Rank 3") && line.contains("operation 1") && !line.contains("Ranks")
            };
            assert!(text.contains("MISMATCH"), "{text}");
            assert!(text.lines().any(lagging), "{text}");
            assert!(text.contains(&format!("process {pid}")), "{text}");
            assert!(
                text.contains("host2") || text.contains("10.78.0.2"),
                "{text}"
            );
        }
        if process.rank == 3 {
            assert_eq!(buffers.issue(&rank), 0);
        }
        wait_until("the all-reduce is over", || rank.is_idle());
        process.meet("over");
        rank.destroy();
    });
}
