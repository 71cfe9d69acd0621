//! One operation of a row: its parts, and its sizes.

use nccl::ReduceOp;

use crate::algorithm::Algorithm;
use crate::bandwidth::Bandwidth;
use crate::element::Element;

/// What a sweep over the sizes is repeated for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Case {
    /// The element type.
    pub element: Element,
    /// The `redop` column; `None` where nothing is reduced.
    pub op: Option<ReduceOp>,
    /// The algorithm, where there are several.
    pub algorithm: Option<&'static Algorithm>,
}

impl Case {
    /// The case of a program that has only element types.
    #[must_use]
    pub fn of(element: Element) -> Self {
        Self {
            element,
            op: None,
            algorithm: None,
        }
    }

    /// All combinations, the operators changing first.
    ///
    /// ```
    /// use nccl_tools::{element::FLOAT, program::OPERATORS, shape::Case};
    /// let operators = OPERATORS.map(Some);
    /// assert_eq!(Case::all(&[None], &[FLOAT, FLOAT], &operators).len(), 10);
    /// ```
    #[must_use]
    pub fn all(
        algorithms: &[Option<&'static Algorithm>],
        elements: &[Element],
        operators: &[Option<ReduceOp>],
    ) -> Vec<Self> {
        let mut cases = Vec::new();
        for &algorithm in algorithms {
            for &element in elements {
                cases.extend(operators.iter().map(|&op| Self {
                    element,
                    op,
                    algorithm,
                }));
            }
        }
        cases
    }

    /// The `redop` column.
    #[must_use]
    pub fn redop(self) -> String {
        self.op.map_or("none".to_owned(), |op| op.to_string())
    }
}

/// One operation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Shape {
    /// Element type, operator and algorithm.
    pub case: Case,
    /// The number of ranks.
    pub ranks: usize,
    /// The `count` column, in elements: per pair of ranks, or per rank.
    pub count: u64,
    /// The `size` column: the bytes that the rank with the most sends or receives.
    pub bytes: u64,
    /// The part of a rank's bytes that a link between ranks has to carry.
    pub bus_factor: f64,
}

impl Shape {
    /// An operation whose `bytes` per rank are split evenly among all ranks, each part rounded down to a multiple of 16
    /// bytes, so that it may be empty: an all-to-all.
    ///
    /// ```
    /// use nccl_tools::{element::FLOAT, shape::{Case, Shape}};
    /// let shape = Shape::split(1000, Case::of(FLOAT), 3);
    /// assert_eq!((shape.count, shape.bytes), (80, 960));
    /// ```
    #[must_use]
    pub fn split(bytes: u64, case: Case, ranks: usize) -> Self {
        let size = case.element.size as u64;
        let count = (bytes / size / ranks as u64) & !(16 / size - 1);
        Self {
            case,
            ranks,
            count,
            bytes: count * size * ranks as u64,
            bus_factor: (ranks as f64 - 1.0) / ranks as f64,
        }
    }

    /// An operation in which each rank has all of `bytes`, rounded down to whole elements.
    ///
    /// ```
    /// use nccl_tools::{element::FLOAT, shape::{Case, Shape}};
    /// let shape = Shape::whole(1003, Case::of(FLOAT), 3, 1.0);
    /// assert_eq!((shape.count, shape.bytes), (250, 1000));
    /// ```
    #[must_use]
    pub fn whole(bytes: u64, case: Case, ranks: usize, bus_factor: f64) -> Self {
        let size = case.element.size as u64;
        Self {
            case,
            ranks,
            count: bytes / size,
            bytes: bytes / size * size,
            bus_factor,
        }
    }

    /// The element type.
    #[must_use]
    pub fn element(self) -> Element {
        self.case.element
    }

    /// The bytes of `count` elements: of an all-to-all, what each rank sends to each.
    #[must_use]
    pub fn part_bytes(self) -> u64 {
        self.count * self.case.element.size as u64
    }

    /// The bandwidth of one operation that takes `seconds`.
    #[must_use]
    pub fn speed(self, seconds: f64) -> Bandwidth {
        Bandwidth::of(self.bytes, seconds, self.bus_factor)
    }

    /// The offset of the `iteration`-th repetition in a buffer of `buffer_bytes`, in bytes.
    ///
    /// Repetitions walk through the buffer, so that a repetition does not find the data of the previous one in a cache.
    #[must_use]
    pub fn shift(self, iteration: u64, buffer_bytes: u64) -> u64 {
        match buffer_bytes.checked_div(self.bytes) {
            Some(places) if places > 0 => self.bytes * (iteration % places),
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
                    let shape = Shape::split(bytes, Case::of(element), ranks);
                    assert_eq!(shape.part_bytes() % 16, 0, "{bytes} {element:?} {ranks}");
                    assert_eq!(shape.bytes, shape.part_bytes() * ranks as u64);
                    assert!(shape.bytes <= bytes);
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
        let shape = Shape::split(8, Case::of(element::FLOAT), 8);
        assert_eq!((shape.count, shape.bytes), (0, 0));
        assert_eq!(shape.shift(5, 1 << 20), 0);
    }

    #[test]
    fn repetitions_walk_through_the_buffer_and_start_over() {
        let shape = Shape::split(1024, Case::of(element::FLOAT), 4);
        let shifts: Vec<u64> = (0..5).map(|i| shape.shift(i, 4000)).collect();
        assert_eq!(shifts, [0, 1024, 2048, 0, 1024]);
    }

    #[test]
    fn one_rank_of_an_all_to_all_uses_no_bus() {
        let shape = Shape::split(1 << 20, Case::of(element::FLOAT), 1);
        assert_eq!(shape.speed(1e-3).bus, 0.0);
        assert!(shape.speed(1e-3).algorithm > 1.0);
    }
}
