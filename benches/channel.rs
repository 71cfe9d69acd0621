//! Measures the throughput and the latency of messages on a channel.
//!
//! `cargo bench -p nccl-benches --bench channel [-- MESSAGES]`: the ranks are processes of their own on this host, each
//! with one connection to rank 0 over a Unix socket. Messages of 256 bytes: from rank 0 to all others one after
//! another, until all have received all; and from rank 0 to the last rank and back.

use std::error::Error;
use std::process::Command;
use std::time::{Duration, Instant};

use nccl::launch::{Fleet, Output};
use nccl::{Rendezvous, World};
use nccl_tools::statistics::median_time;

const BYTES: usize = 256;
const LONG: Duration = Duration::from_secs(60);

fn main() -> Result<(), Box<dyn Error>> {
    let number = |name: &str| std::env::var(name).ok()?.parse().ok();
    if let Some(messages) = number("NCCL_BENCH_MESSAGES") {
        return Ok(run(World::join(Rendezvous::from_env()?)?, messages)?);
    }
    let messages = std::env::args().skip(1).find_map(|word| word.parse().ok());
    let messages = messages.unwrap_or(20_000);
    // A tenth of them go there and back.
    if messages < 10 {
        return Err("MESSAGES: at least 10 are needed".into());
    }
    for ranks in [2, 4, 8] {
        let fleet = Fleet::builder(ranks).with(|fleet| {
            fleet.output = Output::Plain;
            fleet.observe = false;
        });
        let fleet = fleet.start(move |_| {
            let mut command = Command::new(std::env::current_exe().expect("this program"));
            command.env("NCCL_BENCH_MESSAGES", messages.to_string());
            command
        })?;
        let report = fleet.wait();
        assert!(report.is_success(), "{report}");
    }
    Ok(())
}

fn run(world: World, messages: usize) -> nccl::Result<()> {
    let steps = world.channel("steps");
    let last = world.size() - 1;
    let turns = messages / 10;
    let bytes = [7; BYTES];
    world.barrier("start")?;
    let begun = Instant::now();
    if world.rank() == 0 {
        (0..messages).try_for_each(|_| steps.send(&bytes))?;
    } else {
        for _ in 0..messages {
            steps.recv(LONG)?.expect("a message");
        }
    }
    world.barrier("taken")?;
    let rate = messages as f64 / begun.elapsed().as_secs_f64();

    let mut times: Vec<_> = (0..turns)
        .map(|_| {
            let begun = Instant::now();
            if world.rank() == 0 {
                steps.send_to(last, &bytes)?;
                steps.recv(LONG)?.expect("an answer");
            } else if world.rank() == last {
                steps.recv(LONG)?.expect("a message");
                steps.send_to(0, &bytes)?;
            }
            Ok(begun.elapsed())
        })
        .collect::<nccl::Result<_>>()?;
    world.barrier("end")?;
    if world.rank() == 0 {
        times.sort();
        println!(
            "{} ranks: {rate:.0} messages/s to all others; there and back, median of {turns}: {:.1?}, \
             p99 {:.1?}",
            world.size(),
            median_time(&times).unwrap_or_default(),
            times[turns * 99 / 100]
        );
    }
    Ok(())
}
