//! The timed loop as a graph: captured once, launched many times.

use std::time::Instant;

use super::measure::{Timed, shifts_of};
use super::{Collective, Placement, Ranks};
use crate::failure::Failure;
use crate::options::Options;
use crate::shape::Shape;

/// Captures the iterations and times `launches` of them. As in nccl-tests, the capture is not counted.
pub(super) fn time(
    options: &Options,
    launches: u32,
    ranks: &impl Ranks,
    collective: &mut impl Collective,
    shape: Shape,
    placement: Placement,
) -> Result<Timed, Failure> {
    let iterations: Vec<Vec<u64>> = (0..u64::from(options.iterations))
        .map(|iteration| {
            let mut shifts = Vec::new();
            shifts_of(options, shape, iteration, &mut shifts);
            shifts
        })
        .collect();
    collective.capture(shape, placement, &iterations)?;
    ranks.barrier()?;
    collective.align()?;
    let begun = Instant::now();
    for _ in 0..launches {
        collective.launch()?;
    }
    let host_seconds = begun.elapsed().as_secs_f64();
    collective.finish()?;
    let seconds = begun.elapsed().as_secs_f64();
    collective.release()?;
    let operations =
        f64::from(options.iterations) * f64::from(options.aggregate) * f64::from(launches);
    Ok(Timed {
        seconds: seconds / operations,
        // nccl-tests does not divide by the launches here.
        host_seconds: host_seconds / operations,
        iterations: None,
    })
}

/// One operation in a graph of its own.
pub(super) fn once(
    collective: &mut impl Collective,
    shape: Shape,
    placement: Placement,
) -> Result<(), Failure> {
    collective.capture(shape, placement, &[vec![0]])?;
    collective.launch()?;
    collective.finish()?;
    collective.release()
}
