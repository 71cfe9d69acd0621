//! Failover and growth: of four ranks one is killed, and the other three continue in the same processes; a
//! new process joins, and their communicator grows by it.
//!
//! ```text
//! cargo run --release --example going_on [ROUNDS]
//! ```
//!
//! The program starts itself four times. The ranks repeat an all-reduce and check every result. In each of
//! the ROUNDS (default 1), the launcher kills the process of one rank with SIGKILL, that of rank 0 first, and
//! starts it again when the others work without it. The launcher measures the times at the end: from before
//! the signal until it has read from the last survivor that its result is right again.
//!
//! To run the ranks alone and kill them by hand (`kill -9`):
//!
//! ```text
//! cargo build --release --bin nccl-run --example going_on
//! target/release/nccl-run -n 4 --restarts 100 --restart failed -- target/release/examples/going_on rank
//! ```

use std::collections::BTreeSet;
use std::error::Error;
use std::process::Command;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use nccl::cudarc::driver::CudaStream;
use nccl::launch::{Fleet, Output, Signal};
use nccl::{Communicator, ReduceOp, Rendezvous, World};
use nccl_tools::perf;
use nccl_tools::statistics::median_time;

const RANKS: usize = 4;
/// How long ranks wait for each other in a failover.
const TIMEOUT: Duration = Duration::from_secs(20);
/// The time that output of an ended rank may take to arrive.
const MOMENT: Duration = Duration::from_millis(200);

type Outcome<T> = Result<T, Box<dyn Error>>;

fn main() -> Outcome<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match &arguments[..] {
        // Print the error with `Display`, for people.
        [word] if word == "rank" => rank().map_err(|error| {
            eprintln!("{error:#}");
            std::process::exit(1)
        }),
        [rounds] => launch(rounds.parse()?),
        _ => launch(1),
    }
}

// The code of a rank, as any program needs it.

fn rank() -> Outcome<()> {
    perf::install(RANKS)?;
    println!("process {}", std::process::id());
    let rendezvous = Rendezvous::from_env()?.with(|meet| meet.timeout = TIMEOUT);
    let mut world = match rendezvous.was_restarted {
        false => World::join(rendezvous)?,
        // The other ranks work already, and admit this process.
        true => World::join_running(rendezvous)?,
    };
    // Made once: the device and the contents of its memory outlive every generation.
    let stream = nccl::device(world.local_rank())?.new_stream()?;
    let mut comm = None;
    loop {
        let outcome = match comm.take() {
            Some(comm) => work(&world, comm, &stream),
            None => anew(&world, &stream).and_then(|comm| work(&world, comm, &stream)),
        };
        (world, comm) = match outcome {
            Ok(grown) => grown,
            // A departed rank is the root cause of any failure.
            Err(error) => match world.departed().first() {
                Some((rank, how)) => {
                    println!("rank {rank} is gone: {how}");
                    (world.next_generation(TIMEOUT)?, None)
                }
                None => return Err(error),
            },
        };
    }
}

/// Makes a communicator. After a death the surviving ranks call this; a new process calls this while the
/// others [`grow`] their communicator.
fn anew(world: &World, stream: &Arc<CudaStream>) -> Outcome<Communicator> {
    Ok(world.communicator("sum").stream(stream).build()?)
}

/// Moves to the next generation with the joiners, and grows the communicator.
fn grow(world: &World, comm: &Communicator) -> Outcome<(World, Option<Communicator>)> {
    let next = world.next_generation_keeping(&[comm], TIMEOUT)?;
    match comm.grow(&next, "sum") {
        Ok(grown) => {
            println!("grown to {} ranks: {}", next.size(), grown.way);
            Ok((next, Some(grown.communicator)))
        }
        // A rank died meanwhile: its fault is handled in the generation in which it died.
        Err(error) => {
            println!("not grown: {error:#}");
            Ok((next, None))
        }
    }
}

/// Works with all ranks of this generation until a joiner appears; then grows.
fn work(
    world: &World,
    comm: Communicator,
    stream: &Arc<CudaStream>,
) -> Outcome<(World, Option<Communicator>)> {
    const NUMBERS: usize = 1000;
    let (ranks, generation) = (world.size(), world.generation());
    let expected = (ranks * (ranks + 1) / 2) as f32;
    let mut worked = 0;
    loop {
        let mut numbers = vec![comm.rank() as f32 + 1.0; NUMBERS];
        // Ranks learn of a joiner at different times, but must move on together: the sum tells all of them.
        numbers.push(world.joiners() as f32);
        let mut y = stream.clone_htod(&numbers)?;
        comm.all_reduce_in_place(&mut y, ReduceOp::Sum)?.wait()?;
        let y = stream.clone_dtoh(&y)?;
        if let Some(wrong) = y[..NUMBERS].iter().find(|&&sum| sum != expected) {
            return Err(format!("{wrong} instead of {expected}").into());
        }
        worked += 1;
        match worked {
            1 => println!("right: {ranks} ranks in generation {generation}"),
            100 => {
                let (files, threads) = (entries("/proc/self/fd")?, entries("/proc/self/task")?);
                println!(
                    "at work: {ranks} ranks in generation {generation}, {files} descriptors, {threads} threads"
                );
            }
            _ => {}
        }
        if y[NUMBERS] > 0.0 && worked > 100 {
            println!("a new process wants to come in");
            return grow(world, &comm);
        }
    }
}

/// Counts the entries of a directory, to show that past generations leave none behind.
fn entries(directory: &str) -> std::io::Result<usize> {
    Ok(std::fs::read_dir(directory)?.count())
}

// The launcher: starts the ranks, and kills them.

fn launch(rounds: usize) -> Outcome<()> {
    if rounds == 0 {
        return Err("at least one round is needed".into());
    }
    let (said, lines) = mpsc::channel();
    let output = Output::Lines(Arc::new(move |line| {
        let text = String::from_utf8_lossy(line.bytes).into_owned();
        // At the end the receiver is gone.
        let _ = said.send((line.rank, text, Instant::now()));
    }));
    let program = std::env::current_exe()?;
    let fleet = Fleet::builder(RANKS).with(|fleet| {
        fleet.output = output;
        fleet.keep_others = true;
    });
    let fleet = fleet.start(move |_| {
        let mut command = Command::new(&program);
        command.arg("rank");
        command
    })?;
    let script = Script { lines };
    script.all_say(&fleet, 0..RANKS, "at work: 4 ranks")?;
    let before = fleet.pids();
    let mut times = Vec::new();
    for round in 0..rounds {
        // At first the coordinator. The last rank survives, to show its resources at the end.
        let victim = round % (RANKS - 1);
        let survivors = || (0..RANKS).filter(move |&rank| rank != victim);
        let begun = Instant::now();
        fleet.signal(victim, Signal::Kill);
        println!("launcher: killed rank {victim}");
        let right = script.all_say(&fleet, survivors(), "right: 3 ranks")?;
        times.push(right - begun);
        script.all_say(&fleet, survivors(), "at work: 3 ranks")?;
        fleet.restart(victim)?;
        println!("launcher: started rank {victim} again");
        script.all_say(&fleet, 0..RANKS, "at work: 4 ranks")?;
    }
    let after = fleet.pids();
    println!("launcher: processes before {before:?}, after {after:?}");
    times.sort();
    println!(
        "launcher: three ranks went on {:.1} ms after SIGKILL (median of {rounds}; at most {:.1} ms)",
        median_time(&times).unwrap_or_default().as_secs_f64() * 1e3,
        times[rounds - 1].as_secs_f64() * 1e3,
    );
    fleet.kill();
    Ok(())
}

/// The output of the ranks.
struct Script {
    lines: mpsc::Receiver<(usize, String, Instant)>,
}

impl Script {
    /// Waits until all of these ranks have printed these words; returns when the last one did.
    fn all_say(
        &self,
        fleet: &Fleet,
        ranks: impl Iterator<Item = usize>,
        words: &str,
    ) -> Outcome<Instant> {
        let mut silent: BTreeSet<usize> = ranks.collect();
        let deadline = Instant::now() + 2 * TIMEOUT;
        loop {
            // Queried before the lines are read: the output of an ended rank arrives within a moment.
            let pids = fleet.pids();
            let line = self.lines.recv_timeout(MOMENT);
            // Ranks with other output may print without end.
            if Instant::now() >= deadline {
                return Err(format!("ranks {silent:?} have not said {words:?}").into());
            }
            let Ok((rank, text, at)) = line else {
                match silent.iter().find(|&&rank| pids[rank].is_none()) {
                    Some(rank) => {
                        return Err(format!("rank {rank} has ended without {words:?}").into());
                    }
                    None => continue,
                }
            };
            println!("rank {rank}: {text}");
            if text.starts_with(words) {
                silent.remove(&rank);
            }
            if silent.is_empty() {
                return Ok(at);
            }
        }
    }
}
