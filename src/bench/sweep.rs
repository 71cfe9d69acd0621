//! All sizes of all types, row by row.

use super::measure::{measure, needed_bytes};
use super::{Collective, Measurement, Placement, Ranks, Ratio, gather, ratio};
use crate::bandwidth;
use crate::element::Element;
use crate::failure::Failure;
use crate::options::Options;
use crate::sizes::Shape;

/// What is measured: the options, and the element types that the library and the device have.
#[derive(Clone, Copy, Debug)]
pub struct Setting<'a> {
    /// The options.
    pub options: &'a Options,
    /// The types, in order.
    pub elements: &'a [Element],
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
    /// Size and type.
    pub shape: Shape,
    /// From one buffer to the other.
    pub out_of_place: Measurement,
    /// Into the buffer that was sent.
    pub in_place: Measurement,
    /// Against a copy.
    pub ratio: Option<Ratio>,
}

/// What all rows came to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Totals {
    /// Measurements with wrong data, counted on every rank that received it.
    pub out_of_bounds: u64,
    /// The mean bus bandwidth of all measurements in GB/s.
    pub average_bus: f64,
}

/// Is told what happens; only rank 0's says anything to a person.
pub trait Reporter {
    /// Something is about to be measured: the first, second … of so many.
    fn progress(&mut self, row: usize, rows: usize, shape: Shape, doing: &str);

    /// A row is complete.
    ///
    /// # Errors
    /// When it cannot be printed.
    fn row(&mut self, row: &Row) -> Result<(), Failure>;
}

/// Measures everything.
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
    let size = ranks.size();
    let rows = options.sweep.sizes().count() * setting.elements.len();
    let (mut wrong_here, mut repetition, mut number) = (0u64, 0u64, 0);
    let (mut bus_sum, mut measurements) = (0.0, 0u64);
    for &element in setting.elements {
        ranks.barrier()?;
        for bytes in options.sweep.warm_up_sizes() {
            let shape = Shape::new(bytes, element, size);
            reporter.progress(number, rows, shape, "warming up");
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
                let shape = Shape::new(bytes, element, size);
                number = (number % rows) + 1;
                let mut one = |placement, doing: &str| {
                    reporter.progress(number, rows, shape, doing);
                    repetition += 1;
                    let measured =
                        measure(options, ranks, collective, shape, placement, repetition)?;
                    wrong_here += u64::from(measured.wrong_here);
                    let speed = bandwidth::all_to_all(shape.total_bytes(), size, measured.seconds);
                    bus_sum += speed.bus;
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
                reporter.row(&Row {
                    shape,
                    out_of_place,
                    in_place,
                    ratio,
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
