//! What kernels tell the host about their works: the profiler's events and the number of works done.

use std::sync::atomic::Ordering;
use std::time::{SystemTime, UNIX_EPOCH};

use super::block::{Block, Stop};
use super::memory;

/// Events that a channel's ring holds for each of start and end.
const EVENTS: u64 = 64;

/// Which end of a work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Event {
    Started,
    Completed,
}

/// The device's clock in nanoseconds, which CUDA calls `globaltimer`.
fn now() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |time| time.as_nanos() as u64)
}

/// Stores an event of each profiled work of a batch; the first one has number `first`.
pub(super) fn record(
    block: &Block,
    event: Event,
    first: u64,
    profiled: &[bool],
) -> Result<(), Stop> {
    let base = match event {
        Event::Started => block.comm.work_started,
        Event::Completed => block.comm.work_completed,
    };
    let Some(size) = block.layout().profiler.filter(|_| base != 0) else {
        return Ok(());
    };
    let entry = size as u64 / EVENTS;
    for (number, _) in (first..).zip(profiled).filter(|&(_, &profiled)| profiled) {
        let at = base + (block.channel_id * size) as u64 + number % EVENTS * entry;
        let view = memory::view(block.memory(), at, 16)?;
        view.word(8)?.store(now(), Ordering::Relaxed);
        // Release: the host reads the time once it sees the number.
        view.word(0)?.store(number, Ordering::Release);
    }
    Ok(())
}
