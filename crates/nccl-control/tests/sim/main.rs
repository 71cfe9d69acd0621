//! The machines of the control plane as they ship, many of them in one virtual time.
//!
//! ```console
//! $ cargo test --release -p nccl-control --features mistakes --test sim
//! $ cargo test --release -p nccl-control --features mistakes --test sim -- random --seconds 60
//! $ cargo test --release -p nccl-control --features mistakes --test sim -- replay 1234
//! ```

mod network;
mod run;
mod schedule;

use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use nccl_control::proto::Mistakes;

use run::Run;
use schedule::{KINDS, Schedule};

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let words: Vec<_> = arguments.iter().map(String::as_str).collect();
    match &words[..] {
        ["replay", seed] => {
            let schedule = Schedule::draw(seed.parse().expect("a seed"));
            println!("{schedule}");
            match Run::new(&schedule, Mistakes::default(), true).run() {
                Ok(outcome) => println!("rests after {} s", outcome.seconds),
                Err(broken) => {
                    println!("{broken}");
                    return ExitCode::FAILURE;
                }
            }
            ExitCode::SUCCESS
        }
        ["random", "--seconds", seconds] => {
            random(Duration::from_secs(seconds.parse().expect("seconds")))
        }
        _ => random(Duration::from_secs(2)),
    }
}

/// How many broken promises are shown.
const SHOWN: usize = 4;

/// Schedules until the time is over, on all cores.
fn random(limit: Duration) -> ExitCode {
    let begun = Instant::now();
    let next = AtomicU64::new(1);
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let all = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..cores)
            .map(|_| {
                scope.spawn(|| {
                    let mut sum = Sum::default();
                    while begun.elapsed() < limit && sum.broken.len() < SHOWN {
                        for _ in 0..64 {
                            sum.run(next.fetch_add(1, Ordering::Relaxed));
                        }
                    }
                    sum
                })
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().expect("a thread"))
            .collect::<Vec<_>>()
    });
    let total: u64 = all.iter().map(|sum| sum.total).sum();
    let counted: u64 = all.iter().map(|sum| sum.counted).sum();
    let seconds = begun.elapsed().as_secs_f64();
    println!(
        "{total} schedules in {seconds:.1} s on {cores} cores, of which {counted} ended a coordinator or split the world: {:.0} per minute",
        counted as f64 * 60.0 / seconds
    );
    for (kind, name) in KINDS.iter().enumerate() {
        let count: u64 = all.iter().map(|sum| sum.kinds[kind]).sum();
        println!("{count:>12} {name}");
    }
    for (number, name) in ["none", "1", "2", "3 or more"].iter().enumerate() {
        let count: u64 = all.iter().map(|sum| sum.generations[number]).sum();
        println!("{count:>12} with successors: {name}");
    }
    let excluded: u64 = all.iter().map(|sum| sum.excluded).sum();
    println!("{excluded:>12} processes excluded");
    let broken: Vec<_> = all.iter().flat_map(|sum| &sum.broken).collect();
    for (seed, why) in &broken {
        println!("{}{why}", Schedule::draw(*seed));
    }
    match broken.is_empty() {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    }
}

#[derive(Default)]
struct Sum {
    total: u64,
    counted: u64,
    kinds: [u64; KINDS.len()],
    generations: [u64; 4],
    excluded: u64,
    broken: Vec<(u64, String)>,
}

impl Sum {
    fn run(&mut self, seed: u64) {
        let schedule = Schedule::draw(seed);
        match Run::new(&schedule, Mistakes::default(), false).run() {
            Ok(outcome) => {
                self.total += 1;
                self.counted += u64::from(outcome.counts);
                for (sum, own) in self.kinds.iter_mut().zip(outcome.kinds) {
                    *sum += u64::from(own);
                }
                self.generations[outcome.generations.min(3) as usize] += 1;
                self.excluded += u64::from(outcome.excluded);
            }
            Err(broken) => {
                self.broken.push((seed, broken.to_string()));
            }
        }
    }
}
