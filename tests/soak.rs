//! Random operations for a long time: no resource grows.
//!
//! Ten seconds unless `NCCL_TEST_SOAK_SECONDS` says otherwise; ten minutes are
//! `NCCL_TEST_SOAK_SECONDS=600 cargo test --release -p nccl-tests --test soak -- --nocapture`. Communicators are made,
//! split, finalized, dropped and aborted all the time.

mod random;
mod support;

use std::time::{Duration, Instant};

use nccl::World;
use random::Outcome;
use support::Ranks;
use support::held::held;

fn seconds() -> u64 {
    std::env::var("NCCL_TEST_SOAK_SECONDS")
        .ok()
        .and_then(|seconds| seconds.parse().ok())
        .unwrap_or(10)
}

/// Communicators after which every pool is full, however slow the machine is.
const WARM: u64 = 40;

/// One communicator and its parts, from creation to one of its ends.
fn life(world: &World, turn: u64) -> Outcome {
    let stream = support::device(world)?.new_stream()?;
    let comm = world.communicator("soak").stream(&stream).build()?;
    random::run(&comm, turn, 20)?;
    if turn.is_multiple_of(3) {
        let color = comm.rank() as u32 % 2;
        if let Some(part) = comm.split("part", Some(color), 0)? {
            random::run(&part, turn, 5)?;
        }
    }
    match turn % 4 {
        0 => {
            // An abort on one rank leaves the others waiting for its pending operations.
            stream.context().synchronize()?;
            world.barrier("done")?;
            comm.abort("it is time")?;
        }
        1 => drop(comm),
        _ => comm.finalize()?,
    }
    Ok(())
}

fn soak(world: &World) -> Outcome {
    let (begun, length) = (Instant::now(), Duration::from_secs(seconds()));
    let mut before = None;
    let mut next_report = length / 8;
    let mut turn = 0;
    loop {
        // Rank 0 decides for all, so that no rank waits for one that has ended.
        let more = [u8::from(begun.elapsed() < length || turn < 2 * WARM)];
        if world.all_gather("more", &more)?[0] == [0] {
            break;
        }
        life(world, turn)?;
        turn += 1;
        if begun.elapsed() > next_report {
            println!("rank {}: {turn} communicators, {:?}", world.rank(), held()?);
            next_report += length / 8;
        }
        // The first half fills pools and caches.
        if before.is_none() && turn >= WARM && begun.elapsed() > length / 2 {
            before = Some(held()?);
        }
    }
    // Dropped communicators end in the background.
    std::thread::sleep(Duration::from_millis(500));
    let (before, after) = (before.ok_or("there was no second half")?, held()?);
    println!(
        "rank {}: {turn} communicators, {before:?} became {after:?}",
        world.rank()
    );
    if after.is_more_than(&before) {
        return Err(format!("{turn} turns: {before:?} became {after:?}").into());
    }
    Ok(())
}

#[test]
fn nothing_grows_between_threads() {
    // Ranks of one process that share a device share its default stream, too.
    if !support::needs_devices(3) {
        return;
    }
    Ranks::new(3)
        .deadline(Duration::from_secs(seconds() + 400))
        .threads(|world| soak(&world));
}

#[test]
fn nothing_grows_between_processes() {
    Ranks::new(3)
        .deadline(Duration::from_secs(seconds() + 400))
        .processes(|world| soak(&world));
}
