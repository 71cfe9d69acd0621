//! The sizes to measure.

/// How one size leads to the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Multiplied (`-f`), at least by 2.
    Factor(u64),
    /// Added (`-i`), in bytes.
    Bytes(u64),
}

/// Sizes from `min` to `max`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sweep {
    /// The first size in bytes.
    pub min: u64,
    /// No size exceeds this, in bytes.
    pub max: u64,
    /// How sizes grow.
    pub step: Step,
}

impl Sweep {
    /// The sizes that get a row each.
    ///
    /// ```
    /// use nccl_tools::sizes::{Step, Sweep};
    /// let sweep = Sweep { min: 8, max: 40, step: Step::Factor(2) };
    /// assert_eq!(sweep.sizes().collect::<Vec<_>>(), [8, 16, 32]);
    /// ```
    pub fn sizes(self) -> impl Iterator<Item = u64> {
        successors(self.min, self.max, move |size| match self.step {
            Step::Factor(factor) => size.checked_mul(factor),
            Step::Bytes(bytes) => size.checked_add(bytes),
        })
    }

    /// The sizes that are warmed up: doubled, whatever the step, as nccl-tests does.
    pub fn warm_up_sizes(self) -> impl Iterator<Item = u64> {
        successors(self.min.max(1), self.max, |size| size.checked_mul(2))
    }
}

fn successors(
    first: u64,
    max: u64,
    next: impl Fn(u64) -> Option<u64>,
) -> impl Iterator<Item = u64> {
    std::iter::successors((first <= max).then_some(first), move |&size| {
        // A step that does not grow would never end; the options refuse it, and here it ends the sweep.
        next(size).filter(|&following| following > size && following <= max)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sweep_ends_where_numbers_end() {
        let sweep = Sweep {
            min: 1 << 62,
            max: u64::MAX,
            step: Step::Factor(3),
        };
        assert_eq!(sweep.sizes().count(), 2);
        let sweep = Sweep {
            min: u64::MAX - 1,
            max: u64::MAX,
            step: Step::Bytes(1 << 40),
        };
        assert_eq!(sweep.sizes().count(), 1);
        assert_eq!(
            Sweep {
                min: 2,
                max: 1,
                step: Step::Bytes(1)
            }
            .sizes()
            .count(),
            0
        );
    }

    #[test]
    fn warm_up_doubles_whatever_the_step() {
        let sweep = Sweep {
            min: 0,
            max: 9,
            step: Step::Bytes(3),
        };
        assert_eq!(sweep.sizes().collect::<Vec<_>>(), [0, 3, 6, 9]);
        assert_eq!(sweep.warm_up_sizes().collect::<Vec<_>>(), [1, 2, 4, 8]);
    }
}
