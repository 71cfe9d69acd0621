//! The error contains what NCCL reports about a hanging operation, over host memory and over the network; a network that drops
//! data is the root cause. On the emulator, and on NVIDIA's library (`NCCL_EMULATOR_NCCL`).

use std::collections::BTreeMap;
use std::error::Error;
use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nccl::fault::{Fault, RootCause};
use nccl::{ReduceOp, World};
use nccl_emulator::faults;
use nccl_tools::testing::{again, name};

use crate::isolated_hosts::{Cables, IsolatedHosts, Plan};
use crate::support::gate::Gate;
use crate::support::{self, Ranks, apart};

type Outcome<T = ()> = Result<T, Box<dyn Error>>;

const RANKS: usize = 3;
const TIMEOUT: Duration = Duration::from_secs(2);
/// More than socket buffers hold.
const LENGTH: usize = 4 << 20;
/// Long enough for several communicators, each of which hangs.
const DEADLINE: Duration = Duration::from_secs(180);
const ALL: &str = "operations,transfers,steps,kernels";

/// A communicator whose ranks are connected.
fn connected(world: &World) -> Outcome<(nccl::Communicator, nccl::cudarc::driver::CudaSlice<f32>)> {
    let stream = support::device(world)?.new_stream()?;
    let comm = world
        .communicator("work")
        .stream(&stream)
        .with(|comm| {
            comm.timeouts.operation = TIMEOUT;
            comm.timeouts.abort = Duration::from_secs(20);
            comm.timeouts.confirm = Duration::from_secs(20);
            comm.preflight = false;
        })
        .build()?;
    let mut y = stream.alloc_zeros::<f32>(LENGTH)?;
    comm.within(Duration::from_secs(60))
        .all_reduce_in_place(&mut y, ReduceOp::Sum)?
        .wait()?;
    Ok((comm, y))
}

/// The fault of an operation that hangs, the same on all ranks.
fn fault_of(done: nccl::Result<()>) -> Fault {
    let error = done.expect_err("it hangs");
    match error.fault() {
        Some(fault) => Fault::clone(fault),
        None => panic!("{error:#}"),
    }
}

/// What the fault reports about each rank inside NCCL.
fn inside(fault: &Fault) -> Vec<&str> {
    let evidence = fault.evidence.iter().map(String::as_str);
    evidence
        .filter(|one| one.starts_with("inside NCCL, "))
        .collect()
}

#[track_caller]
fn has(lines: &[&str], rank: &str, parts: &[&str]) {
    let line = lines.iter().find(|line| line.contains(rank));
    let line = line.unwrap_or_else(|| panic!("{rank} is not in {lines:#?}"));
    for part in parts {
        assert!(line.contains(part), "{part:?} is not in {line}");
    }
}

/// Rank 1 does not enter the operation in which the others wait.
fn one_is_late(world: &World, expected: &[&str]) -> Outcome<Fault> {
    let (comm, mut y) = connected(world)?;
    if world.rank() == 1 {
        world.barrier("the others have given it up")?;
    }
    let done = comm.all_reduce_in_place(&mut y, ReduceOp::Sum);
    let fault = fault_of(done.and_then(|done| done.wait()));
    assert!(
        matches!(fault.root, RootCause::NeverEntered { .. }),
        "{fault:?}"
    );
    let lines = inside(&fault);
    for rank in ["0", "2"] {
        has(&lines, rank, expected);
    }
    if world.rank() != 1 {
        world.barrier("the others have given it up")?;
    }
    let said = world.all_gather("said", lines.join("\n").as_bytes())?;
    assert!(said.iter().all(|one| *one == said[0]), "{said:?}");
    world.barrier("end")?;
    Ok(fault)
}

/// The name that both libraries give to the operation.
const NAMED: &str = "AllReduce (";

#[test]
fn over_the_network_the_rank_that_is_waited_for_and_the_step_are_named() {
    Ranks::new(RANKS)
        .ranks_per_host(1)
        .variable("NCCL_RUN_PROFILER", ALL)
        .processes(|world| {
            let fault = one_is_late(&world, &[NAMED, " waits for ", "channel "])?;
            let lines = inside(&fault);
            // Of the ranks that wait for data, one waits for the absent rank.
            let all = lines.join("\n");
            assert!(all.contains("waits for data from rank 1"), "{all}");
            Ok::<_, Box<dyn Error>>(())
        });
}

#[test]
fn as_a_rule_transfers_are_observed_and_kernels_are_not() {
    Ranks::new(RANKS).ranks_per_host(1).processes(|world| {
        let fault = one_is_late(&world, &[NAMED, " waits for ", "channel "])?;
        let all = inside(&fault).join("\n");
        assert!(!all.contains("kernel"), "{all}");
        Ok::<_, Box<dyn Error>>(())
    });
}

/// What the recordings of all ranks report about the ranks inside NCCL.
fn recorded(world: &World) -> BTreeMap<usize, String> {
    let timeline = world.recordings(Duration::from_secs(20));
    let standings = timeline.standings().into_iter();
    let work = standings.filter(|one| one.communicator == "work");
    work.flat_map(|one| one.inside_nccl).collect()
}

#[test]
fn the_recordings_of_a_job_that_hangs_have_it_before_the_timeout_and_after_it() {
    Ranks::new(RANKS).ranks_per_host(1).processes(|world| {
        let (comm, mut y) = connected(&world)?;
        world.barrier("all have waited")?;
        assert_eq!(recorded(&world), BTreeMap::new());
        world.barrier("nothing is under way")?;
        if world.rank() == 1 {
            let waits = |seen: &BTreeMap<usize, String>, rank| {
                let said: Option<&String> = seen.get(&rank);
                said.is_some_and(|said| {
                    said.starts_with("all_reduce #2, AllReduce (") && said.contains(" waits for ")
                })
            };
            let begun = Instant::now();
            loop {
                let seen = recorded(&world);
                if waits(&seen, 0) && waits(&seen, 2) {
                    assert!(!seen.contains_key(&1), "{seen:?}");
                    break;
                }
                assert!(begun.elapsed() < Duration::from_secs(60), "{seen:?}");
                std::thread::sleep(Duration::from_millis(100));
            }
            world.barrier("the others have given it up")?;
            return Ok(());
        }
        let limited = comm.within(Duration::from_secs(8));
        let done = limited.all_reduce_in_place(&mut y, ReduceOp::Sum);
        fault_of(done.and_then(|done| done.wait()));
        // The abort has ended the transfers; they were looked at before.
        let snapshot = nccl::recorder::snapshot();
        let mut calls = snapshot.communicators.iter().flat_map(|one| &one.calls);
        let said = calls.find_map(|call| call.inside_nccl.as_deref());
        assert!(
            said.is_some_and(|said| said.contains(" waits for ")),
            "{said:?}"
        );
        world.barrier("the others have given it up")?;
        Ok::<_, Box<dyn Error>>(())
    });
}

#[test]
fn where_operations_alone_are_asked_for_it_is_said_that_no_more_was_observed() {
    Ranks::new(RANKS)
        .variable("NCCL_RUN_PROFILER", "operations")
        .ranks_per_host(1)
        .processes(|world| {
            let expected = [NAMED, "it is enqueued, and no more of it was observed"];
            one_is_late(&world, &expected).map(drop)
        });
}

fn off(world: World) -> Outcome {
    let (comm, mut y) = connected(&world)?;
    if world.rank() == 1 {
        world.barrier("the others have given it up")?;
    }
    let done = comm.all_reduce_in_place(&mut y, ReduceOp::Sum);
    let fault = fault_of(done.and_then(|done| done.wait()));
    assert_eq!(inside(&fault), [""; 0]);
    if world.rank() != 1 {
        world.barrier("the others have given it up")?;
    }
    Ok(world.barrier("end")?)
}

#[test]
fn nothing_is_observed_where_the_profiler_is_off() {
    Ranks::new(RANKS)
        .variable("NCCL_RUN_PROFILER", "off")
        .processes(off);
}

#[test]
fn a_device_on_which_the_kernel_does_not_start_is_the_cause() {
    if support::on_nvidias() {
        nccl_tools::gpu_check::not_tested(format_args!(
            "a device that does not start a kernel is the emulator's NCCL's"
        ));
        return;
    }
    Ranks::new(RANKS)
        .variable("NCCL_RUN_PROFILER", ALL)
        .processes(|world| {
            let (comm, mut y) = connected(&world)?;
            let guard = faults::at_operation("AllReduce").rank(1).hang();
            let done = comm.all_reduce_in_place(&mut y, ReduceOp::Sum);
            let fault = fault_of(done.and_then(|done| done.wait()));
            drop(guard);
            if world.rank() == 0 {
                to_table("DeviceHangs", "peer-to-peer", &fault);
            }
            assert!(
                matches!(fault.root, RootCause::SlowRank { .. }),
                "{fault:#?}"
            );
            assert_eq!(fault.culprit(), Some(1));
            let lines = inside(&fault);
            has(&lines, "rank 1", &["its kernel has not started"]);
            has(&lines, "0", &["its kernel runs on "]);
            Ok::<_, Box<dyn Error>>(world.barrier("end")?)
        });
}

/// How an operation of living ranks can hang.
#[derive(Clone, Copy, Debug)]
enum Hang {
    /// Rank 1 does not enter it.
    NeverEntered,
    /// On rank 1, work of the program precedes the operation on the stream.
    StuckOutside,
    /// Rank 1 does not receive what rank 0 sends.
    MissingReceive,
    /// Each rank sends to the next one, and would receive only afterwards.
    Cycle,
    /// The process of rank 1 is stopped.
    Stopped,
}

const HANGS: [Hang; 5] = [
    Hang::NeverEntered,
    Hang::StuckOutside,
    Hang::MissingReceive,
    Hang::Cycle,
    Hang::Stopped,
];

/// Makes a communicator hang; returns the fault that this rank has for it.
fn hang(world: &World, hang: Hang) -> Outcome<Fault> {
    let (comm, mut y) = connected(world)?;
    let (own, next) = (world.rank(), (world.rank() + 1) % RANKS);
    // The first message between two ranks waits in the call until both have connected.
    let mut received = comm.stream().alloc_zeros::<f32>(LENGTH)?;
    comm.group(|group| {
        group.isend(&y, next)?;
        group.irecv(&mut received, (own + RANKS - 1) % RANKS)
    })?
    .wait()?;
    world.barrier("connected")?;
    let mut gate = None;
    let done = match (hang, own) {
        (Hang::NeverEntered, 1) | (Hang::MissingReceive, 1 | 2) => Ok(()),
        (Hang::MissingReceive, _) => comm
            .group(|group| group.isend(&y, 1))
            .and_then(|done| done.wait()),
        (Hang::Cycle, _) => comm
            .group(|group| group.isend(&y, next))
            .and_then(|done| done.wait()),
        (Hang::Stopped, 1) => {
            let wake = format!("sleep 5; kill -CONT {}", std::process::id());
            let mut waker = Command::new("sh").args(["-c", &wake]).spawn()?;
            // SAFETY: stops this process until the shell above continues it.
            unsafe { libc::raise(libc::SIGSTOP) };
            waker.wait()?;
            Ok(())
        }
        _ => {
            if matches!((hang, own), (Hang::StuckOutside, 1)) {
                gate = Some(Gate::closed_on(comm.stream())?);
            }
            comm.all_reduce_in_place(&mut y, ReduceOp::Sum)
                .and_then(|done| done.wait())
        }
    };
    let waits = own != 1 && !matches!((hang, own), (Hang::MissingReceive, 2));
    assert!(done.is_err() || !waits, "it hangs");
    let begun = Instant::now();
    let fault = loop {
        match comm.fault() {
            Some(fault) => break Fault::clone(&fault),
            None if begun.elapsed() > 20 * TIMEOUT => return Err("no fault".into()),
            None => std::thread::sleep(Duration::from_millis(20)),
        }
    };
    drop(gate);
    Ok(fault)
}

/// Adds a row to the table of `docs/root-cause.md`, where `NCCL_TEST_TABLE` names a file for it: the way to hang, the transport, the
/// root cause, and what the fault reports about rank 0, or else about the first rank.
fn to_table(hang: &str, transport: &str, fault: &Fault) {
    let Some(file) = std::env::var_os("NCCL_TEST_TABLE") else {
        return;
    };
    let lines = inside(fault);
    let of_0 = lines.iter().find(|line| line.contains(" 0"));
    let line = of_0.or(lines.first()).copied().unwrap_or_default();
    let line = line.trim_start_matches("inside NCCL, ");
    let file = std::fs::File::options()
        .append(true)
        .create(true)
        .open(file);
    let root = format!("{:?}", fault.root);
    let root = root.split([' ', '(']).next().unwrap_or_default();
    let row = format!(
        "| {hang} | {transport} | {root}: {} | {line} |\n",
        fault.cause
    );
    let written = file.and_then(|mut file| file.write_all(row.as_bytes()));
    written.expect("a file for the table");
}

/// Tries each way to hang.
fn every_hang(world: &World, transport: &str, observed: &[&str]) -> Outcome {
    for kind in HANGS {
        let fault = hang(world, kind)?;
        let lines = inside(&fault);
        let line = lines
            .iter()
            .find(|line| line.contains("rank 0: ") || line.contains("ranks 0"));
        let line = line.unwrap_or_else(|| panic!("{kind:?} over {transport}: {fault:#?}"));
        let operation = match kind {
            Hang::MissingReceive | Hang::Cycle => "Send",
            _ => NAMED,
        };
        assert!(
            line.contains(operation),
            "{kind:?} over {transport}: {line}"
        );
        let is_observed = observed.iter().any(|part| line.contains(part));
        assert!(is_observed, "{kind:?} over {transport}: {line}");
        let said = world.all_gather("said", fault.evidence.join("\n").as_bytes())?;
        assert!(said.iter().all(|one| *one == said[0]), "{said:?}");
        if world.rank() == 0 {
            to_table(&format!("{kind:?}"), transport, &fault);
        }
    }
    Ok(())
}

#[test]
fn every_hang_over_peer_to_peer_says_what_was_observed() {
    Ranks::new(RANKS)
        .deadline(DEADLINE)
        .variable("NCCL_RUN_PROFILER", ALL)
        .processes(|world| every_hang(&world, "peer-to-peer", &["its kernel "]));
}

#[test]
fn every_hang_over_shared_memory_says_what_was_observed() {
    Ranks::new(RANKS)
        .deadline(DEADLINE)
        .variable("NCCL_RUN_PROFILER", ALL)
        .variable("NCCL_P2P_DISABLE", "1")
        .processes(|world| every_hang(&world, "shared memory", &["its kernel "]));
}

#[test]
fn every_hang_over_the_network_says_what_was_observed() {
    Ranks::new(RANKS)
        .deadline(DEADLINE)
        .ranks_per_host(1)
        .variable("NCCL_RUN_PROFILER", ALL)
        .processes(|world| every_hang(&world, "sockets", &[" waits for ", " sends to "]));
}

const PORT: u16 = 29_417;

/// The events that NCCL reports for ranks on hosts of their own; fewer may be requested for a table.
fn observed() -> String {
    std::env::var("NCCL_TEST_OBSERVED").unwrap_or_else(|_| ALL.to_owned())
}

/// A rank on a host of its own: connects, waits for a line from the test, and prints the fault of an operation.
fn on_host(world: &World) -> Outcome {
    let (comm, mut y) = connected(world)?;
    println!("\nready");
    std::io::stdin().lock().read_line(&mut String::new())?;
    let done = comm.all_reduce_in_place(&mut y, ReduceOp::Sum);
    match done.and_then(|done| done.wait()) {
        Ok(()) => println!("\nfault none"),
        Err(error) => match error.fault() {
            Some(fault) => println!("\nfault {}", serde_json::to_string(fault)?),
            None => println!("\nfault {error:#}"),
        },
    }
    Ok(())
}

/// Three ranks on hosts of their own.
struct Apart {
    // First, so that they are dropped before their hosts.
    ranks: Vec<Child>,
    lines: Vec<std::io::Lines<BufReader<std::process::ChildStdout>>>,
    hosts: IsolatedHosts,
}

impl Apart {
    fn new(test: &str, cables: Cables) -> Option<Self> {
        if !support::on_nvidias() {
            nccl_tools::gpu_check::not_tested(format_args!(
                "the emulator's NCCL does not connect network namespaces: cargo xtask real-nccl test"
            ));
            return None;
        }
        let hosts = IsolatedHosts::new(&Plan {
            hosts: RANKS,
            cables,
            ..Plan::default()
        })?;
        let at = format!("tcp:{}:{PORT}", hosts.address(0));
        let mut ranks: Vec<Child> = (0..RANKS)
            .map(|rank| {
                let mut command = again(test, "rank");
                command
                    .env("NCCL_RUN_RANK", rank.to_string())
                    .env("NCCL_RUN_LOCAL_RANK", "0")
                    .env("NCCL_RUN_WORLD_SIZE", RANKS.to_string())
                    .env("NCCL_RUN_RENDEZVOUS", &at)
                    .env("NCCL_RUN_PROFILER", observed())
                    .env("NCCL_IB_DISABLE", "1")
                    .stdin(Stdio::piped())
                    .stdout(Stdio::piped());
                hosts.spawn(rank, &mut command).expect("a process")
            })
            .collect();
        let outputs = ranks.iter_mut().map(|rank| rank.stdout.take());
        let lines = outputs.map(|output| BufReader::new(output.expect("a pipe")).lines());
        let mut apart = Self {
            lines: lines.collect(),
            ranks,
            hosts,
        };
        apart.all_say("ready");
        Some(apart)
    }

    fn all_say(&mut self, word: &str) -> Vec<String> {
        let lines = self.lines.iter_mut();
        lines
            .map(|lines| {
                let mut lines = lines.map_while(Result::ok);
                let line = lines.find_map(|line| Some(line.strip_prefix(word)?.to_owned()));
                line.unwrap_or_else(|| panic!("it ends without saying {word}"))
            })
            .collect()
    }

    /// Lets all ranks begin, and returns the fault that all of them print.
    fn fault(mut self) -> Fault {
        for rank in &mut self.ranks {
            let order = rank.stdin.as_mut().expect("a pipe");
            order.write_all(b"go\n").expect("it reads");
        }
        let said = self.all_say("fault ");
        let faults: Vec<Fault> = said
            .iter()
            .map(|said| serde_json::from_str(said).unwrap_or_else(|_| panic!("{said}")))
            .collect();
        for other in &faults[1..] {
            assert_eq!(other.root, faults[0].root);
            assert_eq!(other.evidence, faults[0].evidence);
        }
        faults[0].clone()
    }
}

impl Drop for Apart {
    fn drop(&mut self) {
        for rank in &mut self.ranks {
            let _ = rank.kill();
            let _ = rank.wait();
        }
    }
}

/// Runs the ranks of a test in their processes, or the test.
fn apart(test: &str, body: impl FnOnce()) {
    match apart::rank(test, RANKS) {
        Some((_, world)) => on_host(&world).expect("it ends"),
        None => body(),
    }
}

#[test]
fn a_network_that_drops_data_is_the_cause() {
    let test = name(&|| ());
    apart(&test, || {
        let Some(ranks) = Apart::new(&test, Cables::Direct) else {
            return;
        };
        // Everything that the third host receives, except for the control plane.
        let rule = format!(
            "tcp sport {PORT} accept; add rule inet hosts input tcp dport {PORT} accept; add rule inet hosts input ip protocol tcp drop"
        );
        if let Err(unable) = ranks.hosts.filter(2, &rule) {
            nccl_tools::gpu_check::not_tested(format_args!("{unable}"));
            return;
        }
        let fault = ranks.fault();
        to_table("Dropped", "sockets", &fault);
        let RootCause::SlowNetwork { to, is_moving, .. } = fault.root else {
            panic!("{fault:#?}");
        };
        assert!(!is_moving, "{fault:#?}");
        // Data to the host is dropped, and so are the acknowledgements of the data that it sends.
        assert_eq!(fault.culprit(), None);
        let lines = inside(&fault);
        has(&lines, &format!("rank {to}"), &["waits for data from rank"]);
    });
}

#[test]
fn a_network_that_is_too_slow_is_the_cause() {
    let test = name(&|| ());
    apart(&test, || {
        let Some(ranks) = Apart::new(&test, Cables::Direct) else {
            return;
        };
        if let Err(unable) = ranks.hosts.throttle(2, 8_000_000) {
            nccl_tools::gpu_check::not_tested(format_args!("{unable}"));
            return;
        }
        let fault = ranks.fault();
        to_table("Throttled", "sockets", &fault);
        let RootCause::SlowNetwork { from, to, .. } = fault.root else {
            panic!("{fault:#?}");
        };
        assert!(from == 2 || to == 2, "{fault:#?}");
    });
}

#[test]
fn a_distant_network_is_the_cause() {
    let test = name(&|| ());
    apart(&test, || {
        let Some(ranks) = Apart::new(&test, Cables::Delayed) else {
            return;
        };
        ranks.hosts.delay(2, Duration::from_millis(400));
        let fault = ranks.fault();
        to_table("Delayed", "sockets", &fault);
        let lines = inside(&fault);
        has(&lines, "rank 0", &[NAMED, "steps"]);
        assert!(
            matches!(
                fault.root,
                RootCause::SlowNetwork { .. } | RootCause::Unknown
            ),
            "{fault:#?}"
        );
    });
}
