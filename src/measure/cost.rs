//! The cost of a parent with a child against one plain communicator.

use std::time::{Duration, Instant};

use nccl_sys::ncclDataType_t;
use procfs::FromRead;
use procfs::process::Status;

use super::pair::{LIMIT, Pair};
use super::{Setting, Sheet};
use crate::nccl_call;
use crate::raw::operations::{Stream, connect};
use crate::raw::{Comm, Rank, Result};
use crate::statistics::{median, median_time};

/// Time and memory of init, with the first exchange.
///
/// # Errors
/// NCCL's and CUDA's.
pub fn init(rank: &Rank, setting: Setting, sheet: &mut Sheet) -> Result {
    let repetitions = if setting.short { 2 } else { 7 };
    type Make = fn(&Rank, &str) -> Result<std::result::Result<Comm, String>>;
    let kinds: [(&str, Make); 3] = [
        ("one communicator", |rank, name| {
            Ok(Ok(Comm::new(rank, name, true)?))
        }),
        ("parent and child, shared", |rank, name| {
            Ok(Pair::new(rank, name, true)?.map(|pair| pair.child))
        }),
        ("parent and child, not shared", |rank, name| {
            Ok(Pair::new(rank, name, false)?.map(|pair| pair.child))
        }),
    ];
    let mut figures: [Figures; 3] = Default::default();
    // Alternating, so that other load of the machine affects all of them.
    for repetition in 0..repetitions {
        for ((name, make), figures) in kinds.iter().zip(&mut figures) {
            if figures.unavailable {
                continue;
            }
            rank.barrier(&format!("{name} {repetition}"))?;
            let (before, resident) = (free(rank)?, resident());
            let begun = Instant::now();
            let comm = match make(rank, &format!("{name} {repetition}"))? {
                Ok(comm) => comm,
                Err(why) => {
                    sheet.unavailable(name, why);
                    figures.unavailable = true;
                    continue;
                }
            };
            figures.times.push(begun.elapsed());
            connect(rank, comm)?;
            rank.barrier(&format!("{name} {repetition} connected"))?;
            figures.device.push(before - free(rank)?);
            figures.host.push(self::resident() - resident);
        }
    }
    for ((name, _), figures) in kinds.iter().zip(figures) {
        let Some(time) = median_time(&figures.times) else {
            continue;
        };
        sheet.time(format!("{name}: init, median"), time);
        let mut memory = |what: &str, bytes: &[i64]| {
            let mib: Vec<f64> = bytes
                .iter()
                .map(|&b| b as f64 / f64::from(1 << 20))
                .collect();
            let what = format!("{name}: memory of the {what}, median");
            sheet.add(what, median(&mib), "MiB");
        };
        // Of both ranks on a shared device.
        memory("device", &figures.device);
        memory("process", &figures.host);
    }
    Ok(())
}

/// The repetitions of one kind.
#[derive(Default)]
struct Figures {
    times: Vec<Duration>,
    device: Vec<i64>,
    host: Vec<i64>,
    unavailable: bool,
}

/// Resident memory of this process in bytes.
fn resident() -> i64 {
    status().and_then(|status| status.vmrss).unwrap_or(0) as i64 * 1024
}

/// The kernel's status of this process; its memory is in KiB.
pub(super) fn status() -> Option<Status> {
    Status::from_file("/proc/self/status").ok()
}

fn free(rank: &Rank) -> Result<i64> {
    Ok(rank.context.mem_get_info()?.0 as i64)
}

/// All-to-all on a plain communicator and on a child, alternating.
///
/// # Errors
/// NCCL's and CUDA's.
pub fn child_bandwidth(rank: &Rank, setting: Setting, sheet: &mut Sheet) -> Result {
    let (turns, iterations) = if setting.short { (3, 3) } else { (9, 20) };
    let plain = Comm::new(rank, "plain", true)?;
    connect(rank, plain)?;
    let pair = match Pair::new(rank, "pair", true)? {
        Ok(pair) => Some(pair),
        Err(why) => {
            sheet.unavailable("child", why);
            None
        }
    };
    if let Some(pair) = pair {
        connect(rank, pair.child)?;
    }
    let largest = if setting.short { 1 << 20 } else { 256 << 20 };
    let (x, y) = (
        rank.memory(&vec![1; largest])?,
        rank.memory(&vec![0; largest])?,
    );
    let stream = Stream::of(&rank.stream);
    for bytes in [1 << 10, 1 << 16, 1 << 20, 1 << 24, 1 << 28] {
        if bytes > largest {
            break;
        }
        let mut times: [Vec<Duration>; 2] = Default::default();
        for turn in 0..turns {
            for (which, comm) in [Some(plain), pair.map(|pair| pair.child)]
                .into_iter()
                .enumerate()
            {
                let Some(comm) = comm else { continue };
                rank.barrier(&format!("{bytes} {turn} {which}"))?;
                let begun = Instant::now();
                for _ in 0..iterations {
                    let (kind, count) = (ncclDataType_t::ncclInt8, bytes / 2);
                    let code = nccl_call!(ncclAlltoAll(
                        x.pointer(),
                        y.pointer(),
                        count,
                        kind,
                        comm.0,
                        stream.raw()
                    ));
                    if code != 0 {
                        return Err(format!("ncclAlltoAll returned {code}").into());
                    }
                }
                if rank.ends_within(LIMIT) != Ok(true) {
                    return Err("the operations do not end".into());
                }
                times[which].push(begun.elapsed() / iterations);
            }
        }
        for (name, times) in ["plain", "child"].into_iter().zip(times) {
            let Some(time) = median_time(&times) else {
                continue;
            };
            let rate = bytes as f64 / time.as_secs_f64() / 1e9;
            sheet.time(
                format!("{bytes} B, {name}: all-to-all, median of {turns}"),
                time,
            );
            sheet.add(
                format!("{bytes} B, {name}: algorithm bandwidth"),
                (rate * 100.0).round() / 100.0,
                "GB/s",
            );
        }
    }
    Ok(())
}
