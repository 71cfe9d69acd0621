//! Logarithmic axes: the position of a value, and the values that label them.

/// An axis from the least to the greatest value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Axis {
    least: f64,
    greatest: f64,
    /// The positions of both on the picture.
    from: f64,
    to: f64,
}

impl Axis {
    /// An axis for `values` with their powers of two at both ends; `None` without values.
    #[must_use]
    pub fn of_sizes(values: impl Iterator<Item = f64>, from: f64, to: f64) -> Option<Self> {
        let (least, greatest) = bounds(values)?;
        // A single size is placed in the middle.
        let beside = if least == greatest { 2.0 } else { 1.0 };
        Some(Self {
            least: least / beside,
            greatest: greatest * beside,
            from,
            to,
        })
    }

    /// An axis for `values` from a round number to a round number; `None` without values.
    #[must_use]
    pub fn of_quantities(values: impl Iterator<Item = f64>, from: f64, to: f64) -> Option<Self> {
        let (least, greatest) = bounds(values)?;
        // Room for the marks at both ends.
        let (low, high) = (least / 1.1, greatest * 1.1);
        let below = round_numbers(low / 10.0, low).last()?;
        let above = round_numbers(high, high * 10.0).next()?;
        Some(Self {
            least: below,
            greatest: above,
            from,
            to,
        })
    }

    /// The position of `value` on the picture.
    #[must_use]
    pub fn at(self, value: f64) -> f64 {
        let share = (value / self.least).log2() / (self.greatest / self.least).log2();
        self.from + share * (self.to - self.from)
    }

    /// The round numbers on the axis, and whether each gets a label: all while they are few, else the powers of ten.
    #[must_use]
    pub fn round_numbers(self) -> Vec<(f64, bool)> {
        let all: Vec<f64> = round_numbers(self.least * 0.999, self.greatest * 1.001).collect();
        let few = all.len() <= 8;
        let written = |value: f64| few || (value.log10() - value.log10().round()).abs() < 1e-9;
        all.into_iter()
            .map(|value| (value, written(value)))
            .collect()
    }

    /// The powers of two on the axis that are at least `apart` from each other on the picture.
    #[must_use]
    pub fn powers_of_two(self, apart: f64) -> Vec<f64> {
        let first = (self.least * 0.999).log2().ceil() as i32;
        let last = (self.greatest * 1.001).log2().floor() as i32;
        let one = (self.at(2.0) - self.at(1.0)).abs();
        let step = [1, 2, 5, 10]
            .into_iter()
            .find(|&step| one * f64::from(step) >= apart);
        let step = step.unwrap_or(10);
        (first..=last)
            .filter(|power| power.rem_euclid(step) == 0)
            .map(|power| 2f64.powi(power))
            .collect()
    }
}

fn bounds(values: impl Iterator<Item = f64>) -> Option<(f64, f64)> {
    let usable = values.filter(|value| value.is_finite() && *value > 0.0);
    usable.fold(None, |bounds, value| match bounds {
        None => Some((value, value)),
        Some((least, greatest)) => Some((f64::min(least, value), f64::max(greatest, value))),
    })
}

/// 1, 2, 5, 10, 20 … in a range.
fn round_numbers(from: f64, to: f64) -> impl Iterator<Item = f64> {
    let (first, last) = (from.log10().floor() as i32, to.log10().ceil() as i32);
    (first..=last)
        .flat_map(|power| [1.0, 2.0, 5.0].map(|digit| power_of_ten(digit, power)))
        .filter(move |value| (from..=to).contains(value))
}

/// Exact where it is a whole number, and the nearest number where it is not.
fn power_of_ten(digit: f64, power: i32) -> f64 {
    match power {
        0.. => digit * 10f64.powi(power),
        _ => digit / 10f64.powi(-power),
    }
}

/// A size in bytes as the options write it: 1K, 16M.
#[must_use]
pub fn size(bytes: f64) -> String {
    let units = [(30, "G"), (20, "M"), (10, "K")];
    let unit = units
        .into_iter()
        .find(|(power, _)| bytes >= 2f64.powi(*power));
    match unit {
        Some((power, unit)) => format!("{}{unit}", bytes / 2f64.powi(power)),
        None => format!("{bytes}"),
    }
}

/// A time with its unit.
#[must_use]
pub fn time(seconds: f64) -> String {
    let units = [(1.0, "s"), (1e-3, "ms"), (1e-6, "µs")];
    let unit = units.into_iter().find(|(unit, _)| seconds >= unit * 0.999);
    let (unit, name) = unit.unwrap_or((1e-9, "ns"));
    format!("{} {name}", (seconds / unit * 1000.0).round() / 1000.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_begin_and_end_with_round_numbers() {
        let axis = Axis::of_quantities([3e-6, 4.2e-3].into_iter(), 0.0, 100.0).unwrap();
        assert_eq!((axis.at(2e-6), axis.at(5e-3).round()), (0.0, 100.0));
        let written: Vec<f64> = axis
            .round_numbers()
            .into_iter()
            .filter_map(|(value, written)| written.then_some(value))
            .collect();
        assert_eq!(written, [1e-5, 1e-4, 1e-3]);
        let narrow = Axis::of_quantities([3.0, 4.0].into_iter(), 0.0, 100.0).unwrap();
        assert_eq!(narrow.round_numbers(), [(2.0, true), (5.0, true)]);
    }

    #[test]
    fn sizes_are_written_so_that_they_do_not_overlap() {
        let axis = Axis::of_sizes([8.0, 2f64.powi(30)].into_iter(), 0.0, 700.0).unwrap();
        let texts: Vec<String> = axis.powers_of_two(40.0).into_iter().map(size).collect();
        assert_eq!(
            texts,
            [
                "16", "64", "256", "1K", "4K", "16K", "64K", "256K", "1M", "4M", "16M", "64M",
                "256M", "1G"
            ]
        );
        let one = Axis::of_sizes([1024.0].into_iter(), 0.0, 700.0).unwrap();
        assert_eq!(one.at(1024.0), 350.0);
        assert_eq!(one.powers_of_two(40.0).len(), 3);
    }

    #[test]
    fn nothing_has_no_axis() {
        assert_eq!(Axis::of_sizes([0.0, f64::NAN].into_iter(), 0.0, 1.0), None);
        assert_eq!(Axis::of_quantities([].into_iter(), 0.0, 1.0), None);
    }

    #[test]
    fn times_have_units() {
        let texts = [2e-9, 1e-6, 5e-4, 1e-3, 0.2, 10.0].map(time);
        assert_eq!(texts, ["2 ns", "1 µs", "500 µs", "1 ms", "200 ms", "10 s"]);
    }
}
