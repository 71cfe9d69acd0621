//! The kernels' reports to the host: profiler events, and progress counters (2.32 and later).

use std::sync::atomic::Ordering;
use std::time::{SystemTime, UNIX_EPOCH};

use super::asked::Field;
use super::block::{Block, Context, Stop};
use super::memory::{self, View};

/// The number of start events, and of end events, in a channel's ring.
pub(super) const EVENTS: u64 = 64;

/// The start or the end of a work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Event {
    Started,
    Completed,
}

/// Returns the device's clock in nanoseconds, which CUDA calls `globaltimer`.
pub(super) fn now() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |time| time.as_nanos() as u64)
}

/// The kernel that stores the device's clock, so that the host learns its offset to the host's clock (2.32 and later).
pub(crate) const CLOCK: &str = "ncclProgressCounterCaptureGpuTime";

/// Runs [`CLOCK`].
pub(super) async fn store_clock(context: &Context, to: u64) -> Result<(), Stop> {
    let view = memory::view(context.memory.as_ref(), to, 8)?;
    view.word(0)?.store(now(), Ordering::Release);
    Ok(())
}

/// Stores an event of each profiled work of a batch; `first` is the number of the first work.
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

/// The progress counters of a communicator, for the works of one batch.
pub(super) struct Progress<'a> {
    block: &'a Block,
    view: View,
    /// The collective, by NCCL's number.
    collective: u64,
}

impl<'a> Progress<'a> {
    /// Marks the channel as active in a collective. `None` if the communicator has no such counters.
    pub(super) fn begin(block: &'a Block, collective: Option<u64>) -> Result<Option<Self>, Stop> {
        let address = block.comm.progress;
        let (Some(fields), Some(collective)) = (&block.layout().progress, collective) else {
            return Ok(None);
        };
        if address == 0 {
            return Ok(None);
        }
        let progress = Self {
            block,
            view: memory::view(block.memory(), address, fields.size)?,
            collective,
        };
        let active = progress.at(fields.active, block.channel_id as u64);
        progress
            .view
            .word(active)?
            .store(1u64.wrapping_shl(collective as u32), Ordering::Release);
        Ok(Some(progress))
    }

    fn at(&self, array: Field, index: u64) -> usize {
        array.offset + 8 * index as usize
    }

    /// Adds the works that start at this channel: exactly one channel counts each work.
    pub(super) fn end(self, works: u64) -> Result<(), Stop> {
        let Some(fields) = &self.block.layout().progress else {
            return Ok(());
        };
        let active = self.at(fields.active, self.block.channel_id as u64);
        self.view.word(active)?.store(0, Ordering::Release);
        if works > 0 {
            let time = self.at(fields.completed_time, self.collective);
            self.view.word(time)?.store(now(), Ordering::Relaxed);
            let count = self.at(fields.completed, self.collective);
            self.view.word(count)?.fetch_add(works, Ordering::Release);
        }
        Ok(())
    }
}
