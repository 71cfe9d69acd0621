//! Measures how long many ranks take to join and agree.
//!
//! `cargo bench -p nccl-benches --bench rendezvous [-- RANKS [ROUNDS]]`: the ranks are threads, each with a connection
//! of its own to rank 0, over a Unix socket and over TCP; the figure is the greatest time of all ranks, from the start
//! of the first to the end of a barrier behind `World::join`, and then to the end of `World::preflight`, which compares
//! all of them. With `--check`, more than 3 s to the barrier, or for the comparison, is a failure.

use std::process::ExitCode;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use nccl::preflight::{Settings, Severity};
use nccl::{Rendezvous, World};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let mut numbers = arguments
        .iter()
        .filter_map(|argument| argument.parse().ok());
    let ranks: usize = numbers.next().unwrap_or(1024);
    let rounds: usize = numbers.next().unwrap_or(5);
    if ranks == 0 || rounds == 0 {
        eprintln!("RANKS and ROUNDS: at least 1 is needed");
        return ExitCode::FAILURE;
    }
    if let Err(error) = make_room(ranks) {
        eprintln!("{error}");
        return ExitCode::FAILURE;
    }

    // Memory, as /run is: a file system on a disk needs longer for the socket's file of each rank than the rank for all else.
    let memory = std::path::Path::new("/dev/shm");
    let directory = match memory.is_dir() {
        true => tempfile::tempdir_in(memory),
        false => tempfile::tempdir(),
    };
    let directory = directory.expect("a directory for the sockets");
    let mut worst = Duration::ZERO;
    for (name, secret) in [("unix", false), ("tcp", true)] {
        let mut times: Vec<_> = (0..rounds)
            .map(|round| {
                let path = directory.path().join(format!("{name}{round}"));
                let times = meet(ranks, |rank| {
                    let rendezvous = if name == "unix" {
                        Rendezvous::unix(&path, rank, ranks)?
                    } else {
                        Rendezvous::tcp("127.0.0.1", 0, rank, ranks)?.publish(&path)
                    };
                    Ok(if secret {
                        rendezvous
                            .with(|meet| meet.secret = Some("hush, and nobody hears it".into()))
                    } else {
                        rendezvous
                    })
                });
                (times.0 + times.1, times)
            })
            .collect();
        times.sort();
        let (whole, (joined, agreed, _)) = times[times.len() / 2];
        let (longest, _) = times[times.len() - 1];
        let mut checks: Vec<_> = times.iter().map(|(_, (_, _, checked))| *checked).collect();
        checks.sort();
        let (checked, slowest) = (checks[checks.len() / 2], checks[checks.len() - 1]);
        worst = worst.max(longest).max(slowest);
        println!(
            "{name}: {ranks} ranks, median of {rounds}: joined after {joined:.3?}, agreed after \
             {agreed:.3?} more, together {whole:.3?} (longest {longest:.3?}); compared after {checked:.3?} more \
             (longest {slowest:.3?})"
        );
    }
    if arguments.iter().any(|argument| argument == "--check") && worst > Duration::from_secs(3) {
        eprintln!("{worst:?} is more than 3 s");
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}

/// The time until all have joined, until all have passed a barrier, and until all have been compared.
fn meet(
    ranks: usize,
    rendezvous: impl Fn(usize) -> nccl::Result<Rendezvous> + Sync,
) -> (Duration, Duration, Duration) {
    let start = Barrier::new(ranks + 1);
    let rendezvous = &rendezvous;
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..ranks)
            .map(|rank| {
                let start = &start;
                let body = move || {
                    start.wait();
                    let world = World::join(rendezvous(rank)?)?;
                    let joined = Instant::now();
                    world.barrier("agree")?;
                    let agreed = Instant::now();
                    let report = world.preflight(&Settings::default())?;
                    assert!(report.worst() < Severity::Error, "{report}");
                    let checked = Instant::now();
                    // No rank leaves while others are still in the barrier above; this one is not measured.
                    world.barrier("end")?;
                    Ok::<_, nccl::Error>((joined, agreed, checked))
                };
                std::thread::Builder::new()
                    .stack_size(256 << 10)
                    .spawn_scoped(scope, body)
                    .expect("a thread for a rank")
            })
            .collect();
        let begun = Instant::now();
        start.wait();
        let ends: Vec<_> = threads
            .into_iter()
            .map(|thread| thread.join().expect("no panic").expect("all ranks meet"))
            .collect();
        let joined = ends.iter().map(|end| end.0).max().expect("a rank");
        let agreed = ends.iter().map(|end| end.1).max().expect("a rank");
        let checked = ends.iter().map(|end| end.2).max().expect("a rank");
        (
            joined - begun,
            agreed - joined.min(agreed),
            checked - agreed.min(checked),
        )
    })
}

/// Two descriptors per rank, for both ends of its connection.
fn make_room(ranks: usize) -> Result<(), String> {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let needed = 4 * ranks as u64 + 100;
    let limit = getrlimit(Resource::Nofile);
    if limit.current.is_none_or(|current| current >= needed) {
        return Ok(());
    }
    let wanted = Rlimit {
        current: limit
            .maximum
            .map_or(Some(needed), |most| Some(most.min(needed))),
        ..limit
    };
    match setrlimit(Resource::Nofile, wanted) {
        Ok(()) if limit.maximum.is_none_or(|most| most >= needed) => Ok(()),
        _ => Err(format!(
            "{ranks} ranks need {needed} open files: ulimit -n {needed}"
        )),
    }
}
