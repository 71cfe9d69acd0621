//! One measurement: one size, one placement.

use std::time::Instant;

use super::{Collective, Placement, Ranks, gather, graph, not_our_numbers};
use crate::failure::Failure;
use crate::options::{Blocking, Options};
use crate::shape::Shape;
use crate::statistics::Summary;

/// The result of one measurement.
#[derive(Clone, Debug, PartialEq)]
pub struct Measurement {
    /// Seconds for one operation, over all ranks by `-a`.
    pub seconds: f64,
    /// Seconds that this rank's host needed to enqueue one operation.
    pub host_seconds: f64,
    /// Wrong elements over all ranks; `None`: not verified.
    pub wrong: Option<u64>,
    /// Whether this rank itself received wrong elements.
    pub wrong_here: bool,
    /// The iterations one by one, with `-I 1`.
    pub per_iteration: Option<PerIteration>,
}

/// The iterations of one measurement, in seconds.
#[derive(Clone, Debug, PartialEq)]
pub struct PerIteration {
    /// Over all ranks, without those that `-K` leaves out.
    pub summary: Summary,
    /// The longest over all ranks, for each iteration.
    pub longest: Vec<f64>,
    /// For each rank, each iteration.
    pub by_rank: Vec<Vec<f64>>,
}

/// The repetition number of data that is only moved, not verified.
const TIMED_REPETITION: u64 = 99;

/// Measures and verifies. `repetition` numbers the measurements, so that no two use the same data.
pub(super) fn measure(
    options: &Options,
    ranks: &impl Ranks,
    collective: &mut impl Collective,
    shape: Shape,
    placement: Placement,
    repetition: u64,
) -> Result<Measurement, Failure> {
    if options.checks > 0 {
        collective.fill(shape, placement, TIMED_REPETITION)?;
    }
    collective.start(shape, placement, &[0])?;
    collective.finish()?;
    ranks.barrier()?;
    collective.align()?;

    let timed = match options.graph {
        0 => time(options, ranks, collective, shape, placement)?,
        launches => graph::time(options, launches, ranks, collective, shape, placement)?,
    };
    let seconds = options.average.of(&gather(ranks, timed.seconds)?);
    let per_iteration = match timed.iterations {
        Some(times) => Some(per_iteration(options, ranks, &times)?),
        None => None,
    };
    ranks.barrier()?;

    let (mut wrong, mut wrong_here) = (None, false);
    for check in 0..options.checks {
        let repetition = TIMED_REPETITION + 1 + repetition * u64::from(options.checks);
        let repetition = repetition + u64::from(check);
        collective.fill(shape, placement, repetition)?;
        if options.graph > 0 {
            graph::once(collective, shape, placement)?;
        } else {
            collective.start(shape, placement, &[0])?;
            collective.finish()?;
        }
        let here = collective.count_wrong(shape, placement, repetition)?;
        wrong_here = here > 0;
        let all: u64 = gather(ranks, here as f64)?
            .iter()
            .map(|&count| count as u64)
            .sum();
        wrong = Some(all);
        if all > 0 {
            break;
        }
    }
    let host_seconds = timed.host_seconds;
    Ok(Measurement {
        seconds,
        host_seconds,
        wrong,
        wrong_here,
        per_iteration,
    })
}

/// The result of a loop on this rank, for one operation.
pub(super) struct Timed {
    pub(super) seconds: f64,
    pub(super) host_seconds: f64,
    /// Each iteration, with `-I 1`.
    pub(super) iterations: Option<Vec<f64>>,
}

/// The timed loop.
fn time(
    options: &Options,
    ranks: &impl Ranks,
    collective: &mut impl Collective,
    shape: Shape,
    placement: Placement,
) -> Result<Timed, Failure> {
    let operations = f64::from(options.iterations) * f64::from(options.aggregate);
    // A barrier between two iterations must not count as a part of one.
    let paired = options.blocking == Blocking::WaitAndUntimedBarrier;
    let mut shifts = Vec::with_capacity(options.aggregate as usize);
    let mut without_barriers = 0.0;
    let begun = Instant::now();
    for iteration in 0..options.iterations {
        let iteration_begun = Instant::now();
        if options.per_iteration {
            collective.mark(iteration as usize * if paired { 2 } else { 1 })?;
        }
        shifts_of(options, shape, u64::from(iteration), &mut shifts);
        collective.start(shape, placement, &shifts)?;
        match options.blocking {
            Blocking::Never => {}
            Blocking::Wait => collective.finish()?,
            Blocking::WaitAndBarrier => {
                collective.finish()?;
                ranks.barrier()?;
            }
            Blocking::WaitAndUntimedBarrier => {
                collective.finish()?;
                if options.per_iteration {
                    collective.mark(2 * iteration as usize + 1)?;
                }
                without_barriers += iteration_begun.elapsed().as_secs_f64();
                ranks.barrier()?;
            }
        }
    }
    if options.per_iteration && !paired {
        collective.mark(options.iterations as usize)?;
    }
    let host_seconds = if paired {
        without_barriers
    } else {
        begun.elapsed().as_secs_f64()
    };
    if options.blocking == Blocking::Never {
        collective.finish()?;
    }
    let seconds = if paired {
        without_barriers
    } else {
        begun.elapsed().as_secs_f64()
    };
    let iterations = if options.per_iteration {
        // The last moment was recorded after the last wait.
        collective.finish()?;
        let between = |iteration: usize| match paired {
            true => (2 * iteration, 2 * iteration + 1),
            false => (iteration, iteration + 1),
        };
        let times = (0..options.iterations as usize).map(|iteration| {
            let (from, to) = between(iteration);
            Ok(collective.seconds_between(from, to)? / f64::from(options.aggregate))
        });
        Some(times.collect::<Result<Vec<_>, Failure>>()?)
    } else {
        None
    };
    Ok(Timed {
        seconds: seconds / operations,
        host_seconds: host_seconds / operations,
        iterations,
    })
}

/// The offsets of the operations of one iteration. Operations of a group run at the same time, so they must not share a
/// place; the buffers are large enough for that.
pub(super) fn shifts_of(options: &Options, shape: Shape, iteration: u64, shifts: &mut Vec<u64>) {
    let group = u64::from(options.aggregate);
    let buffer = buffer_bytes(options, shape);
    shifts.clear();
    shifts.extend((0..group).map(|one| shape.shift(iteration * group + one, buffer)));
}

/// How many bytes of its buffers the operations of `shape` walk through: `-e`, or the size of a group, in whole groups,
/// so that no two operations of a group overlap.
fn buffer_bytes(options: &Options, shape: Shape) -> u64 {
    let group = shape.bytes * u64::from(options.aggregate);
    match options.sweep.max.checked_div(group) {
        Some(groups) if options.aggregate > 1 => group * groups.max(1),
        _ => options.sweep.max,
    }
}

/// The bytes that each buffer needs, for all sizes and groups of `options`, without what `-u` adds.
#[must_use]
pub(super) fn needed_bytes(options: &Options) -> u64 {
    options
        .sweep
        .max
        .saturating_mul(u64::from(options.aggregate))
}

fn per_iteration(
    options: &Options,
    ranks: &impl Ranks,
    times: &[f64],
) -> Result<PerIteration, Failure> {
    let bytes: Vec<u8> = times.iter().flat_map(|time| time.to_le_bytes()).collect();
    let mut by_rank = Vec::with_capacity(ranks.size());
    for bytes in ranks.all_gather(&bytes)? {
        let (numbers, rest) = bytes.as_chunks::<8>();
        if numbers.len() != times.len() || !rest.is_empty() {
            return Err(not_our_numbers());
        }
        by_rank.push(
            numbers
                .iter()
                .map(|bytes| f64::from_le_bytes(*bytes))
                .collect::<Vec<_>>(),
        );
    }
    let longest: Vec<f64> = (0..times.len())
        .map(|iteration| {
            by_rank
                .iter()
                .map(|times| times[iteration])
                .fold(0.0, f64::max)
        })
        .collect();
    let counted = &longest[options.per_iteration_skip as usize..];
    let summary = Summary::of(counted).ok_or_else(not_our_numbers)?;
    Ok(PerIteration {
        summary,
        longest,
        by_rank,
    })
}
