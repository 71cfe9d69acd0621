//! How long the host is busy with a small exchange, for each kind of communicator.

use std::time::{Duration, Instant};

use cudarc::driver::sys;
use nccl::{Communicator, LaunchMode};

use super::pair::{LIMIT, Pair};
use super::{Setting, Sheet};
use crate::machine;
use crate::raw::operations::{Stream, connect, exchange};
use crate::raw::{Comm, IN_PROGRESS, Rank, Result, settle};
use crate::statistics::{median, median_time};

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
    for mode in [LaunchMode::BlockingChild, LaunchMode::NonBlocking] {
        let name = match mode {
            LaunchMode::BlockingChild => String::from("safe crate, default"),
            _ => format!("safe crate, {mode}"),
        };
        sheet.times(name, safe_exchanges(rank, mode, repetitions)?);
    }
    Ok(())
}

/// How often the compared runs alternate.
const ROUNDS: usize = 10;

/// The cost of the safe crate's default over the C functions on a blocking communicator: medians of alternating runs,
/// each on a communicator that all runs of its kind share. Each rank is bound to a core, where there are enough.
///
/// # Errors
/// NCCL's and CUDA's.
pub fn ratio(rank: &Rank, setting: Setting, sheet: &mut Sheet) -> Result {
    let repetitions = if setting.short { 50 } else { 2000 };
    let is_bound = machine::cores()?.len() >= rank.world.size();
    if is_bound {
        machine::bind(rank.world.rank())?;
    }
    sheet.add("a rank is bound to a core", is_bound, "");
    let raw = Comm::new(rank, "blocking", true)?;
    connect(rank, raw)?;
    let comm = rank.world.communicator("safe, default");
    let comm = comm.stream(&rank.stream).build()?;
    let mut rounds = Vec::with_capacity(ROUNDS);
    for round in 0..ROUNDS {
        // The order alternates between rounds.
        let (of_raw, of_safe) = if round % 2 == 0 {
            let of_raw = exchanges(rank, raw, repetitions)?;
            (of_raw, safe_exchanges_on(rank, &comm, repetitions)?)
        } else {
            let of_safe = safe_exchanges_on(rank, &comm, repetitions)?;
            (exchanges(rank, raw, repetitions)?, of_safe)
        };
        let median = |times: &[Duration]| median_time(times).unwrap_or_default();
        let us = |times: &[Duration]| median(times).as_secs_f64() * 1e6;
        rounds.push((us(&of_raw), us(&of_safe)));
    }
    comm.finalize()?;
    let sorted = |of: fn(&(f64, f64)) -> f64| {
        let mut values: Vec<f64> = rounds.iter().map(of).collect();
        values.sort_by(f64::total_cmp);
        values
    };
    let shown = |value: f64| (value * 100.0).round() / 100.0;
    for (what, of, unit) in [
        (
            "blocking, C functions",
            (|both: &(f64, f64)| both.0) as fn(&(f64, f64)) -> f64,
            "us",
        ),
        ("safe crate, default", |both| both.1, "us"),
        ("ratio within a round", |both| both.1 / both.0, ""),
    ] {
        let values = sorted(of);
        sheet.add(
            format!("{what}, median of {ROUNDS}"),
            shown(median(&values).unwrap_or(f64::NAN)),
            unit,
        );
        // Two of ten medians lie outside on average.
        sheet.add(format!("{what}, second lowest"), shown(values[1]), unit);
        sheet.add(
            format!("{what}, second highest"),
            shown(values[ROUNDS - 2]),
            unit,
        );
    }
    let middle = |of: fn(&(f64, f64)) -> f64| median(&sorted(of)).unwrap_or(f64::NAN);
    let of_medians = middle(|both| both.1) / middle(|both| both.0);
    sheet.add("ratio of the medians", shown(of_medians), "");
    Ok(())
}

/// As [`exchanges`], through the safe crate.
fn safe_exchanges(rank: &Rank, mode: LaunchMode, repetitions: usize) -> Result<Vec<Duration>> {
    let name = format!("safe, {mode}");
    let comm = rank.world.communicator(&name);
    let comm = comm
        .stream(&rank.stream)
        .with(|comm| comm.launch_mode = Some(mode));
    let comm = comm.build()?;
    let times = safe_exchanges_on(rank, &comm, repetitions)?;
    comm.finalize()?;
    Ok(times)
}

fn safe_exchanges_on(
    rank: &Rank,
    comm: &Communicator,
    repetitions: usize,
) -> Result<Vec<Duration>> {
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
    Ok(times)
}

/// The host's times of one exchange each, from the start of the group until all of it is enqueued.
fn exchanges(rank: &Rank, comm: Comm, repetitions: usize) -> Result<Vec<Duration>> {
    let memory = [rank.memory(&[1; BYTES])?, rank.memory(&[0; BYTES])?];
    let (stream, peer) = (Stream::of(&rank.stream), 1 - rank.world.rank());
    let mut times = Vec::with_capacity(repetitions);
    for repetition in 0..repetitions + WARM_UP {
        let begun = Instant::now();
        let mut code = exchange(comm, memory, BYTES, peer, stream);
        // A blocking communicator's code is final; its program does not poll.
        if code == IN_PROGRESS {
            code = settle(comm, code, LIMIT);
        }
        let took = begun.elapsed();
        if code != 0 {
            return Err(format!("an exchange returned {code}").into());
        }
        if repetition >= WARM_UP {
            times.push(took);
        }
        // The queue of the device must not become the bottleneck.
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
