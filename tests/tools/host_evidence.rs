//! The error of a rank that hangs or has died contains what the hosts show: on every rank, in the same words.
//!
//! `NCCL_RUN_KMSG` names the kernel's log of the tests.

use std::error::Error;
use std::fmt::Write as _;
use std::path::Path;
use std::time::Duration;

use nccl::fault::RootCause;
use nccl::host_evidence::{HostEvidence, KernelEventKind, LogAccess};
use nccl::{ReduceOp, World};
use nccl_tools::testing::name;
use rustix::time::{ClockId, clock_gettime};

use crate::support::{self, Ranks, apart};

type Outcome<T = ()> = Result<T, Box<dyn Error>>;

const TIMEOUT: Duration = Duration::from_millis(600);
const SOON: Duration = Duration::from_secs(30);

const FALLEN: &str = "Xid 79 (GPU has fallen off the bus) for 0000:3b:00.0";

/// Writes a log: an Xid from before the start of the ranks, a current one, and a process of another job that was killed.
fn write_log(path: &Path) -> Outcome {
    let now = clock_gettime(ClockId::Monotonic);
    let now = now.tv_sec * 1_000_000 + now.tv_nsec / 1000;
    let mut log = String::new();
    for (time, text) in [
        (1, "NVRM: Xid (PCI:0000:1a:00): 48, pid=1, name=old, DBE"),
        (now, "usb 1-1: new device"),
        (
            now,
            "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
        ),
        (
            now,
            "oom-kill:constraint=CONSTRAINT_MEMCG,oom_memcg=/x,task_memcg=/x,task=other,pid=4194305,uid=0",
        ),
    ] {
        writeln!(log, "4,{time},{time},-;{text}")?;
    }
    // Atomically, because the ranks read the file at any time.
    let new = path.with_extension("new");
    std::fs::write(&new, log)?;
    Ok(std::fs::rename(new, path)?)
}

fn log_of_ranks() -> Outcome<std::path::PathBuf> {
    Ok(std::env::var_os("NCCL_RUN_KMSG")
        .ok_or("the test sets it")?
        .into())
}

/// Returns what the hosts show, from the text of an error.
fn hosts(text: &str) -> Option<&str> {
    let (_, hosts) = text.split_once("\n  hosts:      ")?;
    hosts.lines().next()
}

#[track_caller]
fn is_named(error: &nccl::Error) -> String {
    let text = format!("{error:#}");
    let hosts = hosts(&text).unwrap_or_else(|| panic!("{text}"));
    assert!(hosts.starts_with("host "), "{hosts}");
    assert!(hosts.contains(FALLEN), "{hosts}");
    assert!(hosts.contains(" s ago"), "{hosts}");
    assert!(
        !hosts.contains("Xid 48"),
        "it is older than the ranks: {hosts}"
    );
    assert!(!hosts.contains("4194305"), "it is of another job: {hosts}");
    let fault = error.fault().unwrap_or_else(|| panic!("{text}"));
    assert_eq!(fault.host_evidence.join("; "), hosts);
    hosts.to_owned()
}

fn one_hangs(world: World) -> Outcome {
    let stream = support::device(&world)?.new_stream()?;
    let comm = world
        .communicator("work")
        .stream(&stream)
        .with(|comm| comm.timeouts.operation = SOON)
        .build()?;
    let mut y = stream.clone_htod(&[1.0f32; 100])?;
    comm.all_reduce_in_place(&mut y, ReduceOp::Sum)?.wait()?;
    if world.rank() == 0 {
        write_log(&log_of_ranks()?)?;
    }
    world.barrier("the log is written")?;
    if world.rank() == 1 {
        // Until the others have given it up.
        world.barrier("they have")?;
    }
    let limited = comm.within(TIMEOUT);
    let done = limited.all_reduce_in_place(&mut y, ReduceOp::Sum);
    let error = done
        .and_then(|done| done.wait())
        .expect_err("rank 1 does not come");
    let root = error.fault().map(|fault| &fault.root);
    assert!(
        matches!(root, Some(RootCause::NeverEntered { .. })),
        "{error:#}"
    );
    let hosts = is_named(&error);
    if world.rank() != 1 {
        world.barrier("they have")?;
    }
    let all = world.all_gather("hosts", hosts.as_bytes())?;
    assert!(all.iter().all(|one| *one == hosts.as_bytes()), "{all:?}");
    Ok(world.barrier("end")?)
}

#[test]
fn an_xid_is_named_on_every_rank_when_one_hangs() {
    let directory = tempfile::tempdir().expect("a directory");
    let log = directory.path().join("kmsg");
    std::fs::write(&log, "").expect("a file");
    Ranks::new(3)
        .variable("NCCL_RUN_KMSG", log)
        .processes(one_hangs);
}

const RANKS: usize = 3;

fn one_dies(world: &World) -> Outcome {
    let stream = support::device(world)?.new_stream()?;
    let comm = world
        .communicator("work")
        .stream(&stream)
        .with(|comm| comm.timeouts.operation = SOON)
        .build()?;
    let mut y = stream.clone_htod(&[1.0f32; 100])?;
    comm.all_reduce_in_place(&mut y, ReduceOp::Sum)?.wait()?;
    if world.rank() == 0 {
        write_log(&log_of_ranks()?)?;
    }
    world.barrier("the log is written")?;
    println!("ready");
    if world.rank() == 1 {
        std::thread::sleep(2 * SOON);
    }
    let done = comm.all_reduce_in_place(&mut y, ReduceOp::Sum);
    let error = done.and_then(|done| done.wait()).expect_err("rank 1 dies");
    let root = error.fault().map(|fault| &fault.root);
    assert!(matches!(root, Some(RootCause::Died { .. })), "{error:#}");
    println!("hosts: {}", is_named(&error));
    Ok(())
}

#[test]
fn an_xid_is_named_on_every_rank_when_one_dies() {
    let test = name(&|| ());
    if let Some((_, world)) = apart::rank(&test, RANKS) {
        one_dies(&world).expect("it survives");
        return;
    }
    if !support::needs_processes(RANKS) {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let log = directory.path().join("kmsg");
    std::fs::write(&log, "").expect("a file");
    let log = log.to_str().expect("a path");
    let mut ranks = apart::start(&test, "", RANKS, &[("NCCL_RUN_KMSG", log)]);
    apart::all_say(&mut ranks, "ready");
    ranks.remove(1).kill();
    let said = apart::all_say(&mut ranks, "hosts: ");
    assert_eq!(said[0], said[1]);
    ranks.into_iter().for_each(|rank| rank.succeeds(SOON));
}

#[test]
fn a_program_asks_for_what_its_host_shows() {
    // Ends at once, with whatever this machine permits.
    let evidence = HostEvidence::gather();
    assert_ne!(evidence.kernel_log.access, LogAccess::NotRead);
    let of_host = HostEvidence::of_host();
    let xids = of_host.kernel_log.events.iter();
    let xids = xids.filter(|event| matches!(event.kind, KernelEventKind::Xid(_)));
    println!("{} Xid messages since this host was started", xids.count());
}
