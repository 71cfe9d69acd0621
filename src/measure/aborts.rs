//! How long aborts take, and what they release.

use std::sync::mpsc;
use std::time::{Duration, Instant};

use super::cost::status;
use super::pair::Pair;
use super::{Setting, Sheet};
use crate::conformance::name_of;
use crate::raw::operations::{Stream, connect, exchange, group_end, group_start, recv};
use crate::raw::{Comm, Rank, Result, bounded, settle};

/// After this time, an abort is reported as not ending.
const LONG: Duration = Duration::from_secs(20);

/// Aborts on a thread of its own; records how long it took, or that it does not end.
fn abort(sheet: &mut Sheet, what: &str, comm: Comm) {
    let begun = Instant::now();
    match bounded(LONG, move || comm.abort()) {
        Some(0) => sheet.time(format!("{what} returns after"), begun.elapsed()),
        Some(code) => sheet.add(format!("{what} returns"), name_of(code), ""),
        None => sheet.add(what, "does not end", ""),
    }
}

/// Rank 1 does not enter the first message; rank 0 waits in it, on a child and on a plain communicator.
///
/// # Errors
/// NCCL's and CUDA's.
pub fn in_connect(rank: &Rank, _: Setting, sheet: &mut Sheet) -> Result {
    let y = rank.memory(&[0; 8])?;
    let stream = Stream::of(&rank.stream);
    let plain = Comm::new(rank, "plain", false)?;
    if rank.world.rank() == 0 {
        group_start();
        recv(plain, y, 8, 1, stream);
        let code = group_end();
        sheet.add(
            "non-blocking: after half a second",
            name_of(settle(plain, code, HALF)),
            "",
        );
        abort(sheet, "non-blocking: abort", plain);
    }
    rank.barrier("plain")?;
    let pair = match Pair::new(rank, "pair", true)? {
        Ok(pair) => pair,
        Err(why) => {
            sheet.unavailable("parent and child", why);
            return Ok(());
        }
    };
    if rank.world.rank() == 0 {
        let (sender, freed) = mpsc::channel();
        std::thread::spawn(move || {
            let code = recv(pair.child, y, 8, 1, stream);
            let _ = sender.send((code, Instant::now()));
        });
        let before = freed.recv_timeout(HALF);
        sheet.add("child: the thread waits", before.is_err(), "");
        let begun = Instant::now();
        abort(sheet, "parent: abort", pair.parent);
        match freed.recv_timeout(LONG) {
            Ok((code, at)) => {
                sheet.time(
                    "child: the thread is free after",
                    at.saturating_duration_since(begun),
                );
                sheet.add("child: its code", name_of(code), "");
                abort(sheet, "child: abort", pair.child);
            }
            Err(_) => sheet.add("child: the thread", "is not freed", ""),
        }
    }
    Ok(())
}

const HALF: Duration = Duration::from_millis(500);

/// Rank 0 issues receives that rank 1 never matches, often enough that the launch queue is full.
///
/// # Errors
/// NCCL's and CUDA's.
pub fn in_kernel(rank: &Rank, setting: Setting, sheet: &mut Sheet) -> Result {
    let launches = if setting.short { 8 } else { 3000 };
    let plain = Comm::new(rank, "plain", false)?;
    connect(rank, plain)?;
    spin(rank, "non-blocking", plain, plain, launches, sheet)?;
    rank.barrier("plain")?;
    match Pair::new(rank, "pair", true)? {
        Ok(pair) => {
            connect(rank, pair.child)?;
            spin(
                rank,
                "parent and child",
                pair.parent,
                pair.child,
                launches,
                sheet,
            )?;
        }
        Err(why) => sheet.unavailable("parent and child", why),
    }
    Ok(())
}

/// Fills the queue of rank 0 by `data`, and aborts `first`, then `data` if that is another.
fn spin(
    rank: &Rank,
    name: &str,
    first: Comm,
    data: Comm,
    launches: usize,
    sheet: &mut Sheet,
) -> Result {
    if rank.world.rank() != 0 {
        return Ok(());
    }
    let y = rank.memory(&vec![0; 1 << 20])?;
    let stream = Stream::of(&rank.stream);
    let (sender, progress) = mpsc::channel();
    std::thread::spawn(move || {
        for launch in 1..=launches {
            let code = settle(
                data,
                recv(data, y, 1 << 20, 1, stream),
                Duration::from_secs(10),
            );
            if sender.send((launch, code)).is_err() || code != 0 {
                break;
            }
        }
    });
    let mut launched = 0;
    while let Ok((launch, code)) = progress.recv_timeout(Duration::from_secs(2)) {
        launched = launch;
        if code != 0 {
            sheet.add(format!("{name}: launch {launch}"), name_of(code), "");
        }
    }
    sheet.add(
        format!("{name}: launches until the host waited, or all"),
        launched,
        "",
    );
    sheet.add(
        format!("{name}: the stream ends"),
        format!("{:?}", rank.ends_within(HALF)),
        "",
    );
    let begun = Instant::now();
    abort(sheet, &format!("{name}: abort"), first);
    let ended = rank.ends_within(LONG);
    sheet.add(
        format!("{name}: the stream ends after it"),
        format!("{ended:?}"),
        "",
    );
    sheet.time(
        format!("{name}: from abort to the end of the stream"),
        begun.elapsed(),
    );
    if first.0 != data.0 {
        abort(sheet, &format!("{name}: abort of the child"), data);
    }
    Ok(())
}

/// Aborts parent, then child, again and again; then destroys them in both orders.
///
/// # Errors
/// NCCL's and CUDA's.
pub fn repeated(rank: &Rank, setting: Setting, sheet: &mut Sheet) -> Result {
    let times = if setting.short { 3 } else { 1000 };
    let mut aborted = 0;
    let begun = Instant::now();
    for turn in 0..times {
        // NCCL's proxy thread checks for an abort twice a second, so a thousand take a quarter of an hour. Rank 0
        // decides.
        let goes_on = u8::from(begun.elapsed() < Duration::from_secs(60));
        let all = rank.world.all_gather(&format!("turn {turn}"), &[goes_on])?;
        if all[0] == [0] {
            break;
        }
        let pair = match Pair::new(rank, &format!("pair {turn}"), true)? {
            Ok(pair) => pair,
            Err(why) => {
                sheet.unavailable("parent and child", why);
                return Ok(());
            }
        };
        if turn % 2 == 0 {
            connect(rank, pair.child)?;
        }
        for comm in [pair.parent, pair.child] {
            let code = bounded(LONG, move || comm.abort());
            if code != Some(0) {
                sheet.add(format!("abort in turn {turn}"), format!("{code:?}"), "");
                return Ok(());
            }
        }
        aborted += 1;
    }
    sheet.add("parent and child aborted, times", aborted, "");
    for (name, child_first) in [("child first", true), ("parent first", false)] {
        let Ok(pair) = Pair::new(rank, name, true)? else {
            break;
        };
        connect(rank, pair.child)?;
        let mut order = [pair.parent, pair.child];
        if child_first {
            order.reverse();
        }
        for comm in order {
            let code = bounded(LONG, move || comm.destroy());
            let text = code.map_or("does not end".to_owned(), name_of);
            sheet.add(format!("destroy, {name}"), text, "");
        }
    }
    Ok(())
}

/// Resources that a process keeps of ended communicators: destroyed, aborted at rest, and aborted in an operation.
///
/// # Errors
/// NCCL's and CUDA's.
pub fn kept(rank: &Rank, setting: Setting, sheet: &mut Sheet) -> Result {
    let (warm, times) = if setting.short { (1, 2) } else { (5, 20) };
    let stream = Stream::of(&rank.stream);
    let (x, y) = (rank.memory(&[0; 8])?, rank.memory(&vec![0; 1 << 20])?);
    let peer = 1 - rank.world.rank();
    let ends = [
        ("destroyed", Ending::Destroyed),
        ("aborted at rest", Ending::AbortedAtRest),
        ("aborted in an operation", Ending::AbortedInside),
    ];
    for (name, ending) in ends {
        let mut before = None;
        for turn in 0..warm + times {
            if turn == warm {
                before = Some(Belongings::now(rank)?);
            }
            let comm = Comm::new(rank, &format!("{name} {turn}"), true)?;
            if settle(comm, exchange(comm, [x, y], 8, peer, stream), LONG) != 0
                || rank.ends_within(LONG) != Ok(true)
            {
                return Err("the first exchange does not end".into());
            }
            if ending == Ending::AbortedInside {
                // Both receive, and neither sends.
                let _ = settle(comm, recv(comm, y, 1 << 20, peer, stream), LONG);
            }
            rank.barrier(&format!("{name} {turn}"))?;
            let code = bounded(LONG, move || match ending {
                Ending::Destroyed => comm.destroy(),
                Ending::AbortedAtRest | Ending::AbortedInside => comm.abort(),
            });
            if code != Some(0) || rank.ends_within(LONG) != Ok(true) {
                return Err(format!("{name}: {code:?}").into());
            }
        }
        let (Some(before), after) = (before, Belongings::now(rank)?) else {
            continue;
        };
        let mut kept = |what: &str, before: f64, after: f64, unit: &str| {
            let each = (after - before) / f64::from(times);
            let value = (each * 100.0).round() / 100.0;
            sheet.add(format!("{name}, {what} kept by each"), value, unit);
        };
        kept("descriptors", before.descriptors, after.descriptors, "");
        kept("threads", before.threads, after.threads, "");
        kept("memory", before.own, after.own, "KiB");
        kept(
            "device memory of all ranks on it",
            before.device,
            after.device,
            "KiB",
        );
    }
    Ok(())
}

/// The end of a communicator.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Ending {
    Destroyed,
    AbortedAtRest,
    AbortedInside,
}

/// The resources of a process.
struct Belongings {
    descriptors: f64,
    threads: f64,
    /// Private memory, in KiB.
    own: f64,
    /// Device memory in use, in KiB; by all ranks on the device.
    device: f64,
}

impl Belongings {
    /// The resources after a moment without changes; NCCL's threads end after the call.
    fn now(rank: &Rank) -> Result<Self> {
        std::thread::sleep(Duration::from_secs(1));
        rank.barrier("counting")?;
        let count = |what: &str| -> Result<f64> {
            Ok(std::fs::read_dir(format!("/proc/self/{what}"))?.count() as f64)
        };
        let (free, total) = rank.context.mem_get_info()?;
        let found = Self {
            descriptors: count("fd")?,
            threads: count("task")?,
            own: status().and_then(|status| status.rssanon).unwrap_or(0) as f64,
            device: (total - free) as f64 / 1024.0,
        };
        rank.barrier("counted")?;
        Ok(found)
    }
}

/// All ranks wait in an operation; one of them aborts, or both do.
///
/// # Errors
/// NCCL's and CUDA's.
pub fn one_or_all(rank: &Rank, _: Setting, sheet: &mut Sheet) -> Result {
    for all in [true, false] {
        let name = if all {
            "all ranks abort"
        } else {
            "one rank aborts"
        };
        let comm = Comm::new(rank, name, false)?;
        connect(rank, comm)?;
        let stream = Stream::of(&rank.stream);
        let (x, y) = (rank.memory(&[0; 8])?, rank.memory(&vec![0; 1 << 20])?);
        let peer = 1 - rank.world.rank();
        let _ = settle(comm, exchange(comm, [x, y], 8, peer, stream), LONG);
        // Both receive, and neither sends.
        let _ = settle(comm, recv(comm, y, 1 << 20, peer, stream), LONG);
        rank.barrier(name)?;
        if all || rank.world.rank() == 0 {
            abort(sheet, name, comm);
        }
        rank.barrier(&format!("{name}: done"))?;
        if rank.world.rank() == 0 {
            sheet.add(
                format!("{name}: the stream ends"),
                format!("{:?}", rank.ends_within(LONG)),
                "",
            );
        }
    }
    Ok(())
}
