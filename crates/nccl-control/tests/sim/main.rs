//! Runs many machines of the control plane, as shipped, in one virtual time.
//!
//! ```console
//! $ cargo run --profile simulator -p nccl-control-sim -- random --schedules 1400000
//! $ cargo run --profile simulator -p nccl-control-sim -- random --seconds 600
//! $ cargo run --profile simulator -p nccl-control-sim -- all
//! $ cargo run --profile simulator -p nccl-control-sim -- halves --schedules 100000
//! $ cargo run --profile simulator -p nccl-control-sim -- replay 1234
//! $ cargo run --profile simulator -p nccl-control-sim -- replay-halves 1234
//! $ cargo run --profile simulator -p nccl-control-sim -- large
//! $ cargo run --profile simulator -p nccl-control-sim --features mistakes -- mistakes
//! ```
//!
//! A schedule is derived from its seed, so that a broken guarantee can be reproduced. `all` runs every schedule of a
//! small kind: up to five ranks, of which one or two die before any of their first frames, with the network cut or
//! intact. `halves` cuts jobs permanently into two halves, and checks that the half that claims first continues.

mod large;
mod network;
mod run;
mod schedule;
mod store;

use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

#[cfg(feature = "mistakes")]
use nccl_control::proto::Mistake;
use nccl_control::proto::Mistakes;

use run::Run;
use schedule::{KINDS, Schedule};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let words: Vec<_> = arguments.iter().map(String::as_str).collect();
    match &words[..] {
        ["replay" | "replay-dense", seed, ..] | ["replay-halves", seed] => {
            let seed = seed.parse().expect("a seed");
            let schedule = match words[0] {
                "replay" => Schedule::draw(seed),
                "replay-dense" => Schedule::dense(seed),
                _ => Schedule::halves(seed),
            };
            println!("{schedule}");
            #[cfg(feature = "mistakes")]
            let mistakes = Mistakes(words.get(2).map(|name| mistake(name)));
            #[cfg(not(feature = "mistakes"))]
            let mistakes = Mistakes::default();
            match Run::new(&schedule, mistakes, true).run() {
                Ok(outcome) => println!("rests after {} s", outcome.seconds),
                Err(broken) => {
                    println!("{broken}");
                    return ExitCode::FAILURE;
                }
            }
            ExitCode::SUCCESS
        }
        ["random", "--seconds", seconds] => {
            let seconds = seconds.parse().expect("seconds");
            random(Duration::from_secs(seconds), u64::MAX)
        }
        ["random", "--schedules", most] => random(Duration::MAX, most.parse().expect("a number")),
        ["all"] => {
            let all = Schedule::all();
            report(Duration::MAX, all.len() as u64, &|number| {
                all[number as usize - 1].clone()
            })
        }
        ["halves", "--schedules", most] => report(
            Duration::MAX,
            most.parse().expect("a number"),
            &Schedule::halves,
        ),
        ["large"] => large::run(10_000, 100),
        ["large", size, dies] => large::run(
            size.parse().expect("how many ranks"),
            dies.parse().expect("how many of them"),
        ),
        #[cfg(feature = "mistakes")]
        // The rarest takes a minute of two cores that do nothing else.
        ["mistakes"] => mistakes(&Mistake::ALL, Duration::from_secs(180)),
        #[cfg(feature = "mistakes")]
        ["mistakes", name, "--seconds", seconds] => {
            let seconds = seconds.parse().expect("seconds");
            mistakes(&[mistake(name)], Duration::from_secs(seconds))
        }
        _ => random(Duration::from_secs(2), u64::MAX),
    }
}

/// Returns the planted mistake of that name.
#[cfg(feature = "mistakes")]
fn mistake(name: &str) -> Mistake {
    let named = |mistake: &Mistake| format!("{mistake:?}") == name;
    Mistake::ALL.into_iter().find(named).expect("a mistake")
}

/// Looks for each of the planted mistakes for some time.
#[cfg(feature = "mistakes")]
fn mistakes(planted: &[Mistake], limit: Duration) -> ExitCode {
    let mut missed = 0;
    for &mistake in planted {
        let made = Mistakes(Some(mistake));
        let begun = Instant::now();
        // Even seeds (`replay-dense`) and odd ones (`replay`): mistakes that need few steps are found soon as well.
        let draw = |seed: u64| match seed.is_multiple_of(2) {
            true => Schedule::dense(seed),
            false => Schedule::draw(seed),
        };
        let found = on_all_cores(limit, u64::MAX, 1, made, &draw);
        let seconds = begun.elapsed().as_secs_f64();
        let total: u64 = found.iter().map(|sum| sum.total).sum();
        let broken = found.iter().flat_map(|sum| &sum.broken).min();
        match broken {
            Some((seed, why)) => {
                println!(
                    "{mistake:?}: found after {total} schedules, {seconds:.1} s: seed {seed}, {why}"
                );
            }
            None => {
                println!("{mistake:?}: NOT FOUND in {total} schedules, {seconds:.1} s");
                missed += 1;
            }
        }
    }
    match missed {
        0 => ExitCode::SUCCESS,
        _ => ExitCode::FAILURE,
    }
}

/// Makes the schedule with the given number.
type Make<'m> = &'m (dyn Fn(u64) -> Schedule + Sync);

/// Runs schedules until the time has passed, or until `most` schedules on each core have broken a guarantee.
fn on_all_cores(
    limit: Duration,
    last: u64,
    most: usize,
    mistakes: Mistakes,
    make: Make<'_>,
) -> Vec<Sum> {
    let begun = Instant::now();
    let next = AtomicU64::new(1);
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let stop = AtomicBool::new(false);
    let run = || {
        let mut sum = Sum::default();
        while begun.elapsed() < limit && sum.broken.len() < most {
            for _ in 0..64 {
                if most == 1 && stop.load(Ordering::Relaxed) {
                    return sum;
                }
                let seed = next.fetch_add(1, Ordering::Relaxed);
                if seed > last {
                    return sum;
                }
                sum.run(&make(seed), mistakes);
                stop.fetch_or(!sum.broken.is_empty(), Ordering::Relaxed);
            }
        }
        sum
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..cores).map(|_| scope.spawn(run)).collect();
        let joined = threads
            .into_iter()
            .map(|thread| thread.join().expect("a thread"));
        joined.collect()
    })
}

/// The maximum number of broken guarantees shown.
const SHOWN: usize = 4;

fn random(limit: Duration, last: u64) -> ExitCode {
    report(limit, last, &Schedule::draw)
}

/// Runs schedules on all cores until the time has passed.
fn report(limit: Duration, last: u64, make: Make<'_>) -> ExitCode {
    let begun = Instant::now();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let all = on_all_cores(limit, last, SHOWN, Mistakes::default(), make);
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
    let sums: u64 = all.iter().map(|sum| sum.sums).sum();
    println!("{sums:>12} additions to a counter of the store");
    let exchanged: u64 = all.iter().map(|sum| sum.exchanged).sum();
    println!("{exchanged:>12} results of exchanges");
    let messages: u64 = all.iter().map(|sum| sum.messages).sum();
    println!("{messages:>12} received messages of a channel");
    let broken: Vec<_> = all.iter().flat_map(|sum| &sum.broken).collect();
    for (seed, why) in &broken {
        println!("{}{why}", make(*seed));
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
    sums: u64,
    exchanged: u64,
    messages: u64,
    broken: Vec<(u64, String)>,
}

impl Sum {
    fn run(&mut self, schedule: &Schedule, mistakes: Mistakes) {
        match Run::new(schedule, mistakes, false).run() {
            Ok(outcome) => {
                self.total += 1;
                self.counted += u64::from(outcome.counts);
                for (sum, own) in self.kinds.iter_mut().zip(outcome.kinds) {
                    *sum += u64::from(own);
                }
                self.generations[outcome.generations.min(3) as usize] += 1;
                self.excluded += u64::from(outcome.excluded);
                self.sums += outcome.sums;
                self.exchanged += outcome.exchanged;
                self.messages += outcome.messages;
            }
            Err(broken) => {
                self.broken.push((schedule.seed, broken.to_string()));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_schedules_keep_what_is_promised() {
        let schedules = (1..=300).map(Schedule::draw);
        for schedule in schedules.chain((1..=2000).map(Schedule::halves)) {
            if let Err(broken) = Run::new(&schedule, Mistakes::default(), false).run() {
                panic!("{schedule}{broken}");
            }
        }
    }
}
