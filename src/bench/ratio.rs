//! Compares the operation with a copy of the same bytes.
//!
//! Absolute bandwidths of one machine differ threefold between runs, with its load and with the layout of its memory. A
//! copy of as many bytes, by all ranks at once and alternating with the operation, meets the same conditions, so that
//! the ratio of the two is comparable between runs and machines.

use std::time::{Duration, Instant};

use super::{Collective, Placement, Ranks, not_our_numbers};
use crate::failure::Failure;
use crate::options::Options;
use crate::shape::Shape;
use crate::statistics::median;

/// The time of an operation compared with that of a copy.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ratio {
    /// Seconds for one copy: the median over the rounds.
    pub copy_seconds: f64,
    /// Seconds for one operation: the median over the rounds.
    pub operation_seconds: f64,
    /// The median of the rounds' ratios.
    pub ratio: f64,
    /// The smallest of them.
    pub lowest: f64,
    /// The largest of them.
    pub highest: f64,
}

/// How often the two alternate.
pub(crate) const ROUNDS: usize = 7;

/// How long one turn should last: much longer than ranks take to leave a barrier, and, where ranks share cores, than
/// the kernel's time slice.
const TURN: Duration = Duration::from_millis(4);

/// Repetitions in a turn, at least and at most.
const REPETITIONS: std::ops::RangeInclusive<u64> = 3..=1 << 20;

/// Compares out of place. `seconds` is the measured time of one operation, the same number on all ranks.
pub(super) fn compare(
    options: &Options,
    ranks: &impl Ranks,
    collective: &mut impl Collective,
    shape: Shape,
    seconds: f64,
) -> Result<Option<Ratio>, Failure> {
    let bytes = shape.bytes;
    if bytes == 0 {
        return Ok(None);
    }
    let buffer = options.sweep.max;
    let copies = agree(ranks, calibrate(collective, bytes, shape, buffer)?)?;
    let operations = agree(ranks, repetitions(seconds))?;
    // As many at a time as in the measurement.
    let batch = u64::from(options.iterations);
    let (mut copy_times, mut operation_times) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        ranks.barrier()?;
        copy_times.push(turn(ranks, copies, |iteration, last| {
            collective.copy(bytes, shape.shift(iteration, buffer))?;
            if last {
                collective.finish_copies()
            } else {
                Ok(())
            }
        })?);
        ranks.barrier()?;
        operation_times.push(turn(ranks, operations, |iteration, last| {
            let shift = shape.shift(iteration, buffer);
            collective.start(shape, Placement::OutOfPlace, &[shift])?;
            if last || (iteration + 1).is_multiple_of(batch) {
                collective.finish()
            } else {
                Ok(())
            }
        })?);
    }
    let ratios: Vec<f64> = operation_times
        .iter()
        .zip(&copy_times)
        .map(|(operation, copy)| operation / copy)
        .collect();
    let (Some(copy_seconds), Some(operation_seconds), Some(ratio)) = (
        median(&copy_times),
        median(&operation_times),
        median(&ratios),
    ) else {
        return Ok(None);
    };
    Ok(Some(Ratio {
        copy_seconds,
        operation_seconds,
        ratio,
        lowest: ratios.iter().copied().fold(f64::INFINITY, f64::min),
        highest: ratios.iter().copied().fold(0.0, f64::max),
    }))
}

/// How often an operation of `seconds` fits into a turn.
fn repetitions(seconds: f64) -> u64 {
    let fitting = (TURN.as_secs_f64() / seconds.max(1e-9)) as u64;
    fitting.clamp(*REPETITIONS.start(), *REPETITIONS.end())
}

fn calibrate(
    collective: &mut impl Collective,
    bytes: u64,
    shape: Shape,
    buffer: u64,
) -> Result<u64, Failure> {
    let mut copies = *REPETITIONS.start();
    loop {
        let begun = Instant::now();
        for iteration in 0..copies {
            collective.copy(bytes, shape.shift(iteration, buffer))?;
        }
        collective.finish_copies()?;
        let seconds = begun.elapsed().as_secs_f64();
        if seconds > TURN.as_secs_f64() / 8.0 || copies >= *REPETITIONS.end() {
            return Ok(repetitions(seconds / copies as f64));
        }
        copies *= 4;
    }
}

/// The largest number among the ranks.
fn agree(ranks: &impl Ranks, number: u64) -> Result<u64, Failure> {
    let all = ranks.all_gather(&number.to_le_bytes())?;
    let numbers = all
        .iter()
        .map(|bytes| Some(u64::from_le_bytes(bytes[..].try_into().ok()?)));
    numbers.max().flatten().ok_or_else(not_our_numbers)
}

/// Runs `body` `times` times and returns the seconds for one, over all ranks: from the first begin to the last end, if
/// all ranks share one clock, and else the longest.
fn turn(
    ranks: &impl Ranks,
    times: u64,
    mut body: impl FnMut(u64, bool) -> Result<(), Failure>,
) -> Result<f64, Failure> {
    let begun = monotonic();
    for iteration in 0..times {
        body(iteration, iteration + 1 == times)?;
    }
    let ended = monotonic();
    let mut bytes = [begun.to_le_bytes(), ended.to_le_bytes()].concat();
    bytes.extend_from_slice(boot_id().as_bytes());
    let mut spans = Vec::with_capacity(ranks.size());
    let mut one_clock = true;
    for bytes in ranks.all_gather(&bytes)? {
        let (Some(begun), Some(ended)) = (bytes.first_chunk::<8>(), bytes.get(8..16)) else {
            return Err(not_our_numbers());
        };
        let ended = ended.try_into().map_err(|_| not_our_numbers())?;
        spans.push((u64::from_le_bytes(*begun), u64::from_le_bytes(ended)));
        one_clock &= bytes[16..] == *boot_id().as_bytes();
    }
    let first = spans.iter().map(|(begun, _)| *begun).min();
    let last = spans.iter().map(|(_, ended)| *ended).max();
    let nanoseconds = match (one_clock, first, last) {
        (true, Some(first), Some(last)) => last - first,
        _ => spans
            .iter()
            .map(|(begun, ended)| ended - begun)
            .max()
            .unwrap_or(0),
    };
    Ok(nanoseconds as f64 * 1e-9 / times as f64)
}

/// Nanoseconds by the clock that all processes of this host share.
fn monotonic() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// Identifies a host until it reboots.
fn boot_id() -> &'static str {
    static BOOT_ID: std::sync::LazyLock<String> = std::sync::LazyLock::new(|| {
        std::fs::read_to_string("/proc/sys/kernel/random/boot_id")
            .unwrap_or_else(|_| std::process::id().to_string())
    });
    &BOOT_ID
}
