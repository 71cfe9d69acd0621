//! Which sizes are measured, and what a size means for an all-to-all.

use crate::element::Element;

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
        // A step that does not grow would never end; options refuse it, and here it ends the sweep.
        next(size).filter(|&following| following > size && following <= max)
    })
}

/// One all-to-all: how much each rank sends to each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// The element type.
    pub element: Element,
    /// The number of ranks.
    pub ranks: usize,
    /// Elements from each rank to each rank, itself included.
    pub count: u64,
}

impl Shape {
    /// The all-to-all that a size of `bytes` per rank stands for: split evenly, each part rounded
    /// down to a multiple of 16 bytes, so that it may well be empty.
    ///
    /// ```
    /// use nccl_tools::{element::FLOAT, sizes::Shape};
    /// let shape = Shape::new(1000, FLOAT, 3);
    /// assert_eq!((shape.count, shape.total_bytes()), (80, 960));
    /// ```
    #[must_use]
    pub fn new(bytes: u64, element: Element, ranks: usize) -> Self {
        let per_peer = bytes / element.size as u64 / ranks as u64;
        Self {
            element,
            ranks,
            count: per_peer & !(16 / element.size as u64 - 1),
        }
    }

    /// Bytes from each rank to each rank.
    #[must_use]
    pub fn part_bytes(self) -> u64 {
        self.count * self.element.size as u64
    }

    /// Bytes that each rank sends in all, which is also what it receives.
    #[must_use]
    pub fn total_bytes(self) -> u64 {
        self.part_bytes() * self.ranks as u64
    }

    /// Where in a buffer of `buffer_bytes` the `iteration`-th repetition lies, in bytes.
    ///
    /// Repetitions walk through the buffer, so that one does not find the data of the one before it
    /// in a cache.
    #[must_use]
    pub fn shift(self, iteration: u64, buffer_bytes: u64) -> u64 {
        let total = self.total_bytes();
        match buffer_bytes.checked_div(total) {
            Some(places) if places > 0 => total * (iteration % places),
            _ => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::element;

    #[test]
    fn parts_are_multiples_of_sixteen_bytes_for_every_type_and_number_of_ranks() {
        for element in element::ALL {
            for ranks in 1..=9 {
                for bytes in [0, 1, 15, 16, 8191, 8192, 1 << 20, (1 << 20) + 12345] {
                    let shape = Shape::new(bytes, element, ranks);
                    assert_eq!(shape.part_bytes() % 16, 0, "{bytes} {element:?} {ranks}");
                    assert!(shape.total_bytes() <= bytes);
                    let wasted = bytes / ranks as u64 - shape.part_bytes();
                    assert!(
                        wasted < 16 + element.size as u64,
                        "{bytes} {element:?} {ranks}"
                    );
                }
            }
        }
    }

    #[test]
    fn eight_bytes_among_eight_ranks_leave_nothing() {
        let shape = Shape::new(8, element::FLOAT, 8);
        assert_eq!((shape.count, shape.total_bytes()), (0, 0));
        assert_eq!(shape.shift(5, 1 << 20), 0);
    }

    #[test]
    fn repetitions_walk_through_the_buffer_and_start_over() {
        let shape = Shape::new(1024, element::FLOAT, 4);
        let shifts: Vec<u64> = (0..5).map(|i| shape.shift(i, 4000)).collect();
        assert_eq!(shifts, [0, 1024, 2048, 0, 1024]);
    }

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
