//! Numbers for reductions, whose result does not depend on the order, and is known to each rank.
//!
//! Integers are arbitrary: their arithmetic wraps, so that the order does not matter. Floats are chosen so that nothing
//! is ever rounded: for sums, whole numbers times a power of two, so small that all their sums are representable; for
//! products, powers of two, and one number with all its digits. The minimum and the maximum are one of the numbers.
//! Only a mean has to be rounded, at a point that NCCL chooses: only two ranks contribute to a mean, and as in
//! nccl-tests a result may be two units in the last place away.

use nccl::ReduceOp;

use super::number::{Float, Number};
use super::source::mix;
use crate::element::Element;

/// How many ranks change the exponent of a product: fewer than the narrowest type can hold.
const FACTORS: u64 = 5;

/// The contributions of all ranks to a reduction, in one repetition.
#[derive(Clone, Debug)]
pub struct Numbers {
    number: Number,
    size: usize,
    op: ReduceOp,
    /// For each rank, the key of its contributions.
    keys: Vec<u64>,
    /// The key of properties of a position that all ranks share.
    position_key: u64,
    /// 1 over the number of ranks, by which NCCL multiplies.
    inverse: f64,
}

impl Numbers {
    /// The numbers of `repetition`.
    ///
    /// ```
    /// use nccl::ReduceOp;
    /// use nccl_tools::{element::FLOAT, verify::Numbers};
    /// let numbers = Numbers::new(FLOAT, ReduceOp::Sum, 2, 7);
    /// let (mut one, mut other) = ([0u8; 4], [0u8; 4]);
    /// numbers.fill(0, 100, &mut one); // rank 0's element 100
    /// numbers.fill(1, 100, &mut other);
    /// let sum = f32::from_le_bytes(one) + f32::from_le_bytes(other);
    /// assert_eq!(numbers.count_wrong(100, &sum.to_le_bytes()), 0);
    /// assert_eq!(numbers.count_wrong(101, &sum.to_le_bytes()), 1);
    /// ```
    #[must_use]
    pub fn new(element: Element, op: ReduceOp, ranks: usize, repetition: u64) -> Self {
        let repetition = mix(repetition.wrapping_add(1));
        let number = Number::of(element);
        let inverse = 1.0 / ranks as f64;
        Self {
            number,
            size: element.size,
            op,
            keys: (1..=ranks as u64)
                .map(|rank| mix(repetition ^ rank))
                .collect(),
            position_key: mix(repetition),
            inverse: match number {
                Number::Float(float) if float.fraction_bits < 52 => f64::from(inverse as f32),
                _ => inverse,
            },
        }
    }

    /// Writes the contributions of `rank`, from element `first` on.
    ///
    /// # Panics
    /// When there is no such rank.
    pub fn fill(&self, rank: usize, first: u64, bytes: &mut [u8]) {
        for (index, element) in (first..).zip(bytes.chunks_exact_mut(self.size)) {
            let bits = match self.number {
                Number::Float(float) => float.bits(self.float(float, rank, index)),
                _ => self.integer(rank, index),
            };
            element.copy_from_slice(&bits.to_le_bytes()[..self.size]);
        }
    }

    /// How many elements, from element `first` on, are not the result of all contributions.
    #[must_use]
    pub fn count_wrong(&self, first: u64, bytes: &[u8]) -> u64 {
        let tolerance = match (self.number, self.op) {
            (Number::Float(_), ReduceOp::Avg) => 2,
            _ => 0,
        };
        let wrong = (first..)
            .zip(bytes.chunks_exact(self.size))
            .filter(|(index, element)| {
                let mut actual = [0; 8];
                actual[..self.size].copy_from_slice(element);
                u64::from_le_bytes(actual).abs_diff(self.expected(*index)) > tolerance
            });
        wrong.count() as u64
    }

    fn word(key: u64, index: u64) -> u64 {
        mix(key.wrapping_add(index.wrapping_mul(0x9E37_79B9_7F4A_7C15)))
    }

    fn expected(&self, index: u64) -> u64 {
        match self.number {
            Number::Float(float) => float.bits(self.expected_float(float, index)),
            Number::Unsigned(bits) => self.expected_integer(index, bits, |value| value),
            // Two's complement is in the order of unsigned numbers once the sign bit is flipped.
            Number::Signed(bits) => {
                self.expected_integer(index, bits, |value| value ^ (1 << (bits - 1)))
            }
        }
    }

    fn integer(&self, rank: usize, index: u64) -> u64 {
        let word = Self::word(self.keys[rank], index);
        // Products of even numbers would soon be nothing but zeros.
        word | u64::from(self.op == ReduceOp::Prod)
    }

    fn expected_integer(&self, index: u64, bits: u32, order: impl Fn(u64) -> u64) -> u64 {
        let mask = u64::MAX >> (64 - bits);
        let all = (0..self.keys.len()).map(|rank| self.integer(rank, index) & mask);
        let ranks = self.keys.len() as i128;
        let result = match self.op {
            ReduceOp::Prod => all.fold(1, u64::wrapping_mul),
            ReduceOp::Max => all.max_by_key(|&value| order(value)).unwrap_or(0),
            ReduceOp::Min => all.min_by_key(|&value| order(value)).unwrap_or(0),
            ReduceOp::Avg => {
                let sum = all.fold(0, u64::wrapping_add) & mask;
                let value = match self.number {
                    Number::Signed(_) => {
                        let shift = 64 - bits;
                        i128::from((sum << shift) as i64 >> shift)
                    }
                    _ => i128::from(sum),
                };
                (value / ranks) as u64
            }
            _ => all.fold(0, u64::wrapping_add),
        };
        result & mask
    }

    fn float(&self, float: Float, rank: usize, index: u64) -> f64 {
        let word = Self::word(self.keys[rank], index);
        let position = Self::word(self.position_key, index);
        let ranks = self.keys.len() as u64;
        // Selects ranks for the parts that not all ranks contribute: others at each position.
        let turn = (rank as u64).wrapping_add(position >> 8) % ranks;
        let sign = if word & 1 == 0 { 1.0 } else { -1.0 };
        let word = word >> 1;
        match self.op {
            ReduceOp::Prod => {
                let exponent = match turn {
                    0..FACTORS => (word % 3) as i32 - 1,
                    _ => 0,
                };
                let digits = match turn {
                    0 => one_to_two(float, position),
                    _ => 1.0,
                };
                sign * digits * 2f64.powi(exponent)
            }
            ReduceOp::Max | ReduceOp::Min => {
                // The number of exponents that lead neither to infinity nor to subnormal numbers.
                let exponents = (float.greatest - float.least()) as u64;
                let exponent = float.least() + (word % exponents) as i32;
                sign * one_to_two(float, word >> 11) * 2f64.powi(exponent)
            }
            ReduceOp::Avg if turn > 1 => 0.0,
            ReduceOp::Avg => {
                // So large that the product with the inverse is normal.
                let above = (ranks.next_power_of_two().ilog2() as i32).min(float.greatest - 2);
                // Both contributions have the same exponent, or the tolerance would be that of the larger one; the
                // exponent differs by position, or the few numbers of a narrow type would be too close to each other.
                let further = position % (float.greatest - above).min(8) as u64;
                one_to_two(float, word) * 2f64.powi(above + further as i32)
            }
            _ => {
                let most = 1u64 << float.digits();
                let contributing = ranks.div_ceil(most);
                if !turn.is_multiple_of(contributing) {
                    return 0.0;
                }
                let each = (most / ranks.div_ceil(contributing)).max(1);
                let value = (word % (2 * each + 1)) as i64 - each as i64;
                let exponents = (float.greatest - float.digits() as i32 - float.least()) as u64;
                let exponent = float.least() + (position % exponents) as i32;
                value as f64 * 2f64.powi(exponent)
            }
        }
    }

    fn expected_float(&self, float: Float, index: u64) -> f64 {
        let all = (0..self.keys.len()).map(|rank| self.float(float, rank, index));
        match self.op {
            ReduceOp::Prod => all.product(),
            ReduceOp::Max => all.fold(f64::NEG_INFINITY, f64::max),
            ReduceOp::Min => all.fold(f64::INFINITY, f64::min),
            ReduceOp::Avg => {
                let parts = all.map(|value| float.rounded(value * self.inverse));
                float.rounded(parts.sum())
            }
            // Starts with positive zero, the sum of numbers that cancel out.
            _ => all.fold(0.0, |sum, value| sum + value),
        }
    }
}

/// A number from 1 to 2 with random digits.
fn one_to_two(float: Float, random: u64) -> f64 {
    let digits = random & ((1 << float.fraction_bits) - 1);
    1.0 + digits as f64 * 2f64.powi(-(float.fraction_bits as i32))
}

#[cfg(test)]
mod tests {
    use half::f16;

    use super::*;
    use crate::element;
    use crate::program::OPERATORS;

    const COUNT: usize = 512;

    fn contributions(numbers: &Numbers, ranks: usize) -> Vec<Vec<u8>> {
        let one = |rank| {
            let mut bytes = vec![0; COUNT * numbers.size];
            numbers.fill(rank, 3, &mut bytes);
            bytes
        };
        (0..ranks).map(one).collect()
    }

    /// Reduces with the arithmetic of the type, in the order of the ranks or in reverse.
    macro_rules! reduced {
        ($type:ty, $parts:expr, $backwards:expr, $with:expr) => {{
            let width = size_of::<$type>();
            let mut parts: Vec<Vec<$type>> = $parts
                .iter()
                .map(|part| {
                    let elements = part.chunks_exact(width);
                    elements
                        .map(|bytes| <$type>::from_le_bytes(bytes.try_into().unwrap()))
                        .collect()
                })
                .collect();
            if $backwards {
                parts.reverse();
            }
            let mut result = parts[0].clone();
            for part in &parts[1..] {
                for (all, one) in result.iter_mut().zip(part) {
                    *all = $with(*all, *one);
                }
            }
            result
                .iter()
                .flat_map(|value| value.to_le_bytes())
                .collect::<Vec<u8>>()
        }};
    }

    #[test]
    fn sums_and_products_of_floats_are_the_same_in_any_order() {
        for ranks in [1, 2, 3, 8, 100] {
            for backwards in [false, true] {
                for (op, repetition) in [(ReduceOp::Sum, 1), (ReduceOp::Prod, 2)] {
                    let numbers =
                        |name| Numbers::new(Element::named(name).unwrap(), op, ranks, repetition);
                    let sum = op == ReduceOp::Sum;
                    macro_rules! the_same {
                        ($type:ty, $name:literal) => {
                            let numbers = numbers($name);
                            let parts = contributions(&numbers, ranks);
                            let with = |a: $type, b: $type| if sum { a + b } else { a * b };
                            let result = reduced!($type, parts, backwards, with);
                            assert_eq!(numbers.count_wrong(3, &result), 0, "{op} of {ranks}");
                        };
                    }
                    the_same!(f32, "float");
                    the_same!(f64, "double");
                    the_same!(f16, "half");
                }
            }
        }
    }

    #[test]
    fn narrow_floats_are_never_rounded() {
        for element in [
            Element::named("f8e4m3"),
            Element::named("f8e5m2"),
            Element::named("bfloat16"),
        ] {
            let element = element.unwrap();
            let Number::Float(float) = Number::of(element) else {
                panic!("{element:?}");
            };
            for ranks in [1, 2, 5, 8, 64, 1000] {
                for op in [ReduceOp::Sum, ReduceOp::Prod, ReduceOp::Max] {
                    let numbers = Numbers::new(element, op, ranks, 9);
                    for index in 0..200 {
                        let mut so_far: f64 = if op == ReduceOp::Prod { 1.0 } else { 0.0 };
                        for rank in 0..ranks {
                            let one = numbers.float(float, rank, index);
                            so_far = match op {
                                ReduceOp::Sum => so_far + one,
                                ReduceOp::Prod => so_far * one,
                                _ => one,
                            };
                            for value in [one, so_far] {
                                assert_eq!(float.rounded(value), value, "{element:?} {op} {ranks}");
                                assert!(
                                    value == 0.0
                                        || (float.least()..=float.greatest)
                                            .contains(&(value.abs().log2().floor() as i32)),
                                    "{element:?} {op} {ranks}: {value}"
                                );
                            }
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn integers_wrap_and_means_are_rounded_towards_zero() {
        let ranks = 3;
        let of = |op| Numbers::new(Element::named("int8").unwrap(), op, ranks, 4);
        type Two = fn(i8, i8) -> i8;
        let cases: [(ReduceOp, Two); 4] = [
            (ReduceOp::Sum, i8::wrapping_add),
            (ReduceOp::Prod, i8::wrapping_mul),
            (ReduceOp::Max, i8::max),
            (ReduceOp::Min, i8::min),
        ];
        for (op, with) in cases {
            let numbers = of(op);
            let result = reduced!(i8, contributions(&numbers, ranks), false, with);
            assert_eq!(numbers.count_wrong(3, &result), 0, "{op}");
        }
        let numbers = of(ReduceOp::Avg);
        let parts = contributions(&numbers, ranks);
        let mut result = reduced!(i8, parts, false, i8::wrapping_add);
        for value in &mut result {
            *value = (*value as i8 / 3) as u8;
        }
        assert_eq!(numbers.count_wrong(3, &result), 0);
        assert!(result.iter().any(|&value| (value as i8) < 0));
    }

    #[test]
    fn a_mean_may_be_two_units_away_and_no_more() {
        let numbers = Numbers::new(element::FLOAT, ReduceOp::Avg, 3, 5);
        for (away, wrong) in [(0i64, 0), (2, 0), (-2, 0), (3, 1), (-3, 1)] {
            let bits = numbers.expected(8).wrapping_add_signed(away) as u32;
            assert_eq!(numbers.count_wrong(8, &bits.to_le_bytes()), wrong, "{away}");
        }
        let sum = Numbers::new(element::FLOAT, ReduceOp::Sum, 3, 5);
        let bits = sum.expected(8).wrapping_add(1) as u32;
        assert_eq!(sum.count_wrong(8, &bits.to_le_bytes()), 1);
    }

    #[test]
    fn what_one_rank_left_out_is_noticed_nearly_everywhere() {
        for element in element::ALL {
            for op in OPERATORS {
                let ranks = 4;
                let numbers = Numbers::new(element, op, ranks, 6);
                let other = Numbers::new(element, op, ranks, 7);
                let mut expected = Vec::new();
                for index in 0..COUNT as u64 {
                    expected
                        .extend_from_slice(&numbers.expected(index).to_le_bytes()[..element.size]);
                }
                assert_eq!(numbers.count_wrong(0, &expected), 0);
                let wrong = other.count_wrong(0, &expected);
                assert!(wrong > COUNT as u64 / 2, "{element:?} {op}: {wrong}");
                let zeros = vec![0; expected.len()];
                let wrong = numbers.count_wrong(0, &zeros);
                assert!(
                    wrong > COUNT as u64 / 2,
                    "{element:?} {op}: {wrong} of zeros"
                );
            }
        }
    }
}
