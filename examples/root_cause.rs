//! Eight ranks work together; one of them is killed. What do the other seven report?
//!
//! ```text
//! cargo run --release --example root_cause [RANK]
//! ```
//!
//! The program starts itself eight times, as `nccl-run -n 8` would. The ranks repeat an all-reduce. Then one process (that of
//! RANK, or of a random rank) gets SIGKILL, which a program cannot handle. Every other rank is then in an operation that can
//! never end; each prints the error of this operation, and the program compares them. The exit code is 0 when all of them name
//! the killed process, in the same words.

use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::process::Command;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use nccl::launch::{Fleet, Output, Signal};
use nccl::{ReduceOp, Rendezvous, World};
use nccl_tools::perf;

const RANKS: usize = 8;
/// The timeout of every wait in this program.
const PATIENCE: Duration = Duration::from_secs(30);
/// The time that output of an ended rank may take to arrive.
const MOMENT: Duration = Duration::from_millis(200);

type Outcome<T = ()> = Result<T, Box<dyn Error>>;

fn main() -> Outcome {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match &arguments[..] {
        // Print the error with `Display`, for people.
        [word] if word == "rank" => rank().map_err(|error| {
            eprintln!("{error:#}");
            std::process::exit(1)
        }),
        [number] => launch(number.parse()?),
        _ => launch(any()),
    }
}

// The code of a rank.

fn rank() -> Outcome {
    perf::install(RANKS)?; // the emulator, where there is no GPU
    let world = World::join(Rendezvous::from_env()?)?;
    let stream = nccl::device(world.local_rank())?.new_stream()?;
    let comm = world.communicator("sum").stream(&stream).build()?;
    let mut y = stream.alloc_zeros::<f32>(1 << 20)?;
    for turn in 0.. {
        if turn == 100 {
            println!("works");
        }
        let pending = comm.all_reduce_in_place(&mut y, ReduceOp::Sum);
        if let Err(error) = pending.and_then(|pending| pending.wait()) {
            // The fault is the same on all ranks, for programs to use; `error` is for people, and names the operation of this
            // rank.
            let fault = error.fault().ok_or("an error without a cause")?;
            println!("cause: {fault}");
            println!("{error:#}");
            println!("said all");
            break;
        }
    }
    Ok(())
}

// The launcher: starts the ranks, and kills one.

fn launch(victim: usize) -> Outcome {
    if victim >= RANKS {
        return Err(format!("there are ranks 0 to {}", RANKS - 1).into());
    }
    let (say, lines) = mpsc::channel();
    let output = Output::Lines(Arc::new(move |line| {
        let text = String::from_utf8_lossy(line.bytes).into_owned();
        let _ = say.send((line.rank, text));
    }));
    let program = std::env::current_exe()?;
    // When a rank dies, the launcher leaves the others alone, so that they report the death.
    let fleet = Fleet::builder(RANKS).with(|fleet| {
        fleet.output = output;
        fleet.keep_others = true;
    });
    let fleet = fleet.start(move |_| {
        let mut command = Command::new(&program);
        command.arg("rank");
        command
    })?;
    let mut said: BTreeMap<usize, Vec<String>> = BTreeMap::new();
    let mut until_all_say = |word: &str, ranks: &[usize]| -> Outcome {
        let deadline = Instant::now() + PATIENCE;
        let mut silent: BTreeSet<usize> = ranks.iter().copied().collect();
        while !silent.is_empty() {
            // Queried before the lines are read: the output of an ended rank arrives within a moment.
            let pids = fleet.pids();
            let line = lines.recv_timeout(MOMENT).ok();
            let is_quiet = line.is_none();
            if let Some((rank, line)) = line {
                if line == word {
                    silent.remove(&rank);
                }
                said.entry(rank).or_default().push(line);
            }
            let ended = silent.iter().copied();
            let ended: Vec<usize> = ended.filter(|&rank| pids[rank].is_none()).collect();
            // Ranks with other output may print without end.
            let is_late = Instant::now() >= deadline && !silent.is_empty();
            if is_late || (is_quiet && !ended.is_empty()) {
                for rank in &silent {
                    for line in said.get(rank).into_iter().flatten() {
                        eprintln!("[{rank}] {line}");
                    }
                }
                return Err(format!(
                    "ranks {silent:?} have not said {word:?}, and of them {ended:?} have ended"
                )
                .into());
            }
        }
        Ok(())
    };

    let everybody: Vec<usize> = (0..RANKS).collect();
    until_all_say("works", &everybody)?;
    let pid = fleet.pids()[victim].ok_or("it is not there")?;
    println!("{RANKS} ranks work. kill -9 {pid}, which is rank {victim}.\n");
    let begun = Instant::now();
    fleet.signal(victim, Signal::Kill);
    let others: Vec<usize> = (0..RANKS).filter(|&rank| rank != victim).collect();
    until_all_say("said all", &others)?;
    let took = begun.elapsed();
    let Some(report) = fleet.wait_timeout(PATIENCE) else {
        fleet.kill();
        return Err(format!("not all ranks have ended within {PATIENCE:?}").into());
    };

    said.remove(&victim);
    let mut causes: BTreeMap<String, Vec<usize>> = BTreeMap::new();
    for (rank, lines) in &said {
        let error = lines
            .iter()
            .filter(|line| *line != "works" && *line != "said all");
        for line in error {
            match line.strip_prefix("cause: ") {
                Some(cause) => causes.entry(cause.to_owned()).or_default().push(*rank),
                None => println!("[{rank}] {line}"),
            }
        }
        println!();
    }
    if let Some(first) = &report.first {
        println!(
            "Who started them saw: rank {} died first, {}.",
            first.rank, first.exit
        );
    }
    println!(
        "The cause, as each of the {} ranks that live has it:",
        said.len()
    );
    for (cause, ranks) in &causes {
        println!("  {cause}\n    say ranks {ranks:?}");
    }
    let right = format!("rank {victim} (");
    let process = format!("pid {pid})");
    let agree = causes.len() == 1
        && causes
            .keys()
            .all(|cause| cause.contains(&right) && cause.contains(&process));
    if !agree {
        return Err("they do not agree".into());
    }
    println!(
        "They agree, and they are right. The last of them had said so {:.0} ms after the signal.",
        took.as_secs_f64() * 1e3
    );
    Ok(())
}

/// Returns a random rank.
fn any() -> usize {
    let time = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    time.map_or(5, |time| time.subsec_nanos() as usize % RANKS)
}
