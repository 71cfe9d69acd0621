//! How long the host is busy with a small exchange, by kind of communicator.

use std::time::{Duration, Instant};

use cudarc::driver::sys;
use nccl::LaunchMode;

use super::pair::{LIMIT, Pair};
use super::{Setting, Sheet};
use crate::raw::operations::{Stream, connect, exchange};
use crate::raw::{Comm, Rank, Result, settle};

/// A message in bytes.
const BYTES: usize = 8;

/// Blocking, non-blocking with its poll, the child of a parent, a graph's replay; and the safe crate in each of
/// its launch modes.
///
/// # Errors
/// NCCL's and CUDA's.
pub fn host_time(rank: &Rank, setting: Setting, sheet: &mut Sheet) -> Result {
    let repetitions = if setting.short { 50 } else { 2000 };
    for (name, blocking) in [("blocking", true), ("non-blocking, polled", false)] {
        let comm = Comm::new(rank, name, blocking)?;
        connect(rank, comm)?;
        sheet.times(name, exchanges(rank, comm, repetitions)?);
    }
    match Pair::new(rank, "pair", true)? {
        Ok(pair) => {
            connect(rank, pair.child)?;
            sheet.times("blocking child", exchanges(rank, pair.child, repetitions)?);
        }
        Err(why) => sheet.unavailable("blocking child", why),
    }
    match replays(rank, repetitions)? {
        Ok(times) => sheet.times("replay of a graph", times),
        Err(why) => sheet.unavailable("replay of a graph", why),
    }
    for mode in [LaunchMode::NonBlocking, LaunchMode::KillSwitch] {
        let name = match mode == LaunchMode::default() {
            true => String::from("safe crate, default"),
            false => format!("safe crate, {mode}"),
        };
        sheet.times(name, safe_exchanges(rank, mode, repetitions)?);
    }
    Ok(())
}

/// As [`exchanges`], by the safe crate.
fn safe_exchanges(rank: &Rank, mode: LaunchMode, repetitions: usize) -> Result<Vec<Duration>> {
    let name = format!("safe, {mode}");
    let comm = rank.world.communicator(&name);
    let comm = comm.stream(&rank.stream).launch_mode(mode).build()?;
    let memory = |byte| rank.stream.clone_htod(&[byte; BYTES]);
    let (x, mut y) = (memory(1u8)?, memory(0u8)?);
    let peer = 1 - rank.world.rank();
    let mut times = Vec::with_capacity(repetitions);
    for repetition in 0..repetitions + WARM_UP {
        let begun = Instant::now();
        comm.group(|group| {
            group.isend(&x, peer)?;
            group.irecv(&mut y, peer)
        })?;
        let took = begun.elapsed();
        if repetition >= WARM_UP {
            times.push(took);
        }
        if repetition % 64 == 63 {
            ended(rank)?;
        }
    }
    ended(rank)?;
    comm.finalize()?;
    Ok(times)
}

/// The host's times of one exchange each, from the start of the group until all of it is enqueued.
fn exchanges(rank: &Rank, comm: Comm, repetitions: usize) -> Result<Vec<Duration>> {
    let memory = [rank.memory(&[1; BYTES])?, rank.memory(&[0; BYTES])?];
    let (stream, peer) = (Stream::of(&rank.stream), 1 - rank.world.rank());
    let mut times = Vec::with_capacity(repetitions);
    for repetition in 0..repetitions + WARM_UP {
        let begun = Instant::now();
        let code = settle(comm, exchange(comm, memory, BYTES, peer, stream), LIMIT);
        let took = begun.elapsed();
        if code != 0 {
            return Err(format!("an exchange returned {code}").into());
        }
        if repetition >= WARM_UP {
            times.push(took);
        }
        // The queue of the device must not become what is measured.
        if repetition % 64 == 63 {
            ended(rank)?;
        }
    }
    ended(rank)?;
    Ok(times)
}

const WARM_UP: usize = 20;

fn ended(rank: &Rank) -> Result {
    match rank.ends_within(LIMIT) {
        Ok(true) => Ok(()),
        Ok(false) => Err("the exchanges do not end".into()),
        Err(error) => Err(error.into()),
    }
}

fn replays(rank: &Rank, repetitions: usize) -> Result<std::result::Result<Vec<Duration>, String>> {
    let comm = Comm::new(rank, "captured", true)?;
    connect(rank, comm)?;
    let memory = [rank.memory(&[1; BYTES])?, rank.memory(&[0; BYTES])?];
    let (stream, peer) = (Stream::of(&rank.stream), 1 - rank.world.rank());
    let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
    if let Err(error) = rank.stream.begin_capture(mode) {
        return Ok(Err(error.to_string()));
    }
    let code = exchange(comm, memory, BYTES, peer, stream);
    let graph = rank.stream.end_capture(sys::CUgraphInstantiate_flags(0));
    let graph = match graph {
        Ok(Some(graph)) if code == 0 => graph,
        _ => return Ok(Err(format!("an exchange in a capture returned {code}"))),
    };
    let mut times = Vec::with_capacity(repetitions);
    for repetition in 0..repetitions + WARM_UP {
        let begun = Instant::now();
        graph.launch()?;
        let took = begun.elapsed();
        if repetition >= WARM_UP {
            times.push(took);
        }
        if repetition % 64 == 63 {
            ended(rank)?;
        }
    }
    ended(rank)?;
    // Its communicator is never destroyed either.
    std::mem::forget(graph);
    Ok(Ok(times))
}
