//! All sizes of all types, row by row.

use super::measure::{measure, needed_bytes};
use super::{Collective, Measurement, Placement, Ranks, Ratio, gather, ratio};
use crate::algorithm::Algorithm;
use crate::failure::Failure;
use crate::options::Options;
use crate::shape::{Case, Shape};

/// The options, and the cases that the library and the device support.
#[derive(Clone, Copy, Debug)]
pub struct Setting<'a> {
    /// The options.
    pub options: &'a Options,
    /// The cases, in order; those of an algorithm stand together.
    pub cases: &'a [Case],
}

impl Setting<'_> {
    /// The bytes that each buffer of a rank has to have.
    #[must_use]
    pub fn buffer_bytes(&self) -> u64 {
        // 8 bytes for each element of the misalignment are enough for every type.
        needed_bytes(self.options).saturating_add(8 * u64::from(self.options.unalign))
    }
}

/// A finished row.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// Size, type, operator and algorithm.
    pub shape: Shape,
    /// From one buffer to the other.
    pub out_of_place: Measurement,
    /// In place.
    pub in_place: Measurement,
    /// The comparison with a copy.
    pub ratio: Option<Ratio>,
    /// Further lines about the row.
    pub notes: Vec<String>,
}

/// The totals of all rows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Totals {
    /// Measurements with wrong data, counted on every rank that received it.
    pub out_of_bounds: u64,
    /// The mean bus bandwidth of all measurements in GB/s.
    pub average_bus: f64,
}

/// Receives the progress and the results; only rank 0's prints.
pub trait Reporter {
    /// Reports that `row` of `rows` is about to be measured.
    fn progress(&mut self, row: usize, rows: usize, shape: Shape, doing: &str);

    /// Begins a table: that of an algorithm, where there are several.
    ///
    /// # Errors
    /// When its head cannot be printed.
    fn table(&mut self, algorithm: Option<&'static Algorithm>) -> Result<(), Failure>;

    /// Reports a complete row.
    ///
    /// # Errors
    /// When it cannot be printed.
    fn row(&mut self, row: &Row) -> Result<(), Failure>;
}

/// Measures all rows.
///
/// # Errors
/// The first failure of the collective, of another rank, or of the reporter.
pub fn sweep(
    setting: Setting<'_>,
    ranks: &impl Ranks,
    collective: &mut impl Collective,
    reporter: &mut impl Reporter,
) -> Result<Totals, Failure> {
    let options = setting.options;
    let rows = options.sweep.sizes().count() * setting.cases.len();
    let (mut wrong_here, mut repetition, mut number) = (0u64, 0u64, 0);
    let (mut bus_sum, mut measurements) = (0.0, 0u64);
    let mut table = None;
    for &case in setting.cases {
        if table != Some(case.algorithm) {
            reporter.table(case.algorithm)?;
            table = Some(case.algorithm);
        }
        ranks.barrier()?;
        for bytes in options.sweep.warm_up_sizes() {
            let shape = collective.shape(bytes, case);
            reporter.progress(number, rows, shape, "warming up");
            collective.prepare(shape)?;
            for iteration in 0..u64::from(options.warm_up) {
                let shift = shape.shift(iteration, options.sweep.max);
                collective.start(shape, Placement::OutOfPlace, &[shift])?;
            }
            collective.finish()?;
        }
        let mut cycle = 0u64;
        while options
            .cycles
            .is_none_or(|cycles| cycle < u64::from(cycles))
        {
            for bytes in options.sweep.sizes() {
                let shape = collective.shape(bytes, case);
                number = (number % rows) + 1;
                collective.prepare(shape)?;
                let mut one = |placement, doing: &str| {
                    reporter.progress(number, rows, shape, doing);
                    repetition += 1;
                    let measured =
                        measure(options, ranks, collective, shape, placement, repetition)?;
                    wrong_here += u64::from(measured.wrong_here);
                    bus_sum += shape.speed(measured.seconds).bus;
                    measurements += 1;
                    Ok::<_, Failure>(measured)
                };
                let out_of_place = one(Placement::OutOfPlace, "out of place")?;
                let in_place = one(Placement::InPlace, "in place")?;
                let ratio = if options.memcpy_ratio {
                    reporter.progress(number, rows, shape, "against memcpy");
                    ratio::compare(options, ranks, collective, shape, out_of_place.seconds)?
                } else {
                    None
                };
                let notes = [&out_of_place, &in_place]
                    .iter()
                    .flat_map(|measured| collective.notes(shape, measured.seconds))
                    .collect();
                reporter.row(&Row {
                    shape,
                    out_of_place,
                    in_place,
                    ratio,
                    notes,
                })?;
            }
            cycle += 1;
        }
    }
    let out_of_bounds = gather(ranks, wrong_here as f64)?
        .iter()
        .map(|&count| count as u64)
        .sum();
    Ok(Totals {
        out_of_bounds,
        average_bus: bus_sum / measurements as f64,
    })
}
