//! Sums in kernels over symmetric memory.
//!
//! These kernels add in a wider type than the element type, and round once at the end: 8-bit and 16-bit floats in 32 bits,
//! except the average of 8-bit floats, which uses 16 bits. The average is the sum times a factor, in the type of the sum.

use half::{bf16, f16};

use crate::numbers::datatype::DataType;
use crate::numbers::float8::Float8;

/// How elements of a type are added.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Sum {
    ty: DataType,
    factor: Option<f32>,
    /// Whether every step rounds to 16 bits.
    half: bool,
}

impl Sum {
    /// Creates a sum, or an average with the factor whose bits are in `argument`.
    pub(super) fn new(ty: DataType, average: bool, argument: u64) -> Self {
        let half = average && matches!(ty, DataType::F8E4M3 | DataType::F8E5M2);
        let factor = match half {
            true => f16::from_bits(argument as u16).to_f32(),
            false => f32::from_bits(argument as u32),
        };
        Self {
            ty,
            factor: average.then_some(factor),
            half,
        }
    }

    fn round(self, value: f32) -> f32 {
        match self.half {
            true => f16::from_f32(value).to_f32(),
            false => value,
        }
    }

    /// Calls `each` with every element's index and value.
    fn decode(self, bytes: &[u8], mut each: impl FnMut(usize, f32)) {
        macro_rules! elements {
            ($size:literal, $value:expr) => {
                for (index, bytes) in bytes.chunks_exact($size).enumerate() {
                    let mut array = [0; $size];
                    array.copy_from_slice(bytes);
                    each(index, $value(array));
                }
            };
        }
        match self.ty {
            DataType::F32 => elements!(4, f32::from_le_bytes),
            DataType::F16 => elements!(2, |bytes| f16::from_le_bytes(bytes).to_f32()),
            DataType::Bf16 => elements!(2, |bytes| bf16::from_le_bytes(bytes).to_f32()),
            DataType::F8E4M3 => elements!(1, |[byte]: [u8; 1]| Float8::<3>(byte).to_f32()),
            DataType::F8E5M2 => elements!(1, |[byte]: [u8; 1]| Float8::<2>(byte).to_f32()),
            // Kernels exist only for the other types.
            _ => {}
        }
    }

    /// Initialises sums with the elements in `bytes`.
    pub(super) fn begin(self, bytes: &[u8], sums: &mut Vec<f32>) {
        sums.clear();
        self.decode(bytes, |_, value| sums.push(value));
    }

    /// Adds the elements in `bytes`, as many as there are sums.
    pub(super) fn add(self, bytes: &[u8], sums: &mut [f32]) {
        self.decode(bytes, |index, value| {
            sums[index] = self.round(sums[index] + value);
        });
    }

    /// Stores the results in `bytes`.
    pub(super) fn finish(self, sums: &[f32], bytes: &mut [u8]) {
        let result = |sum| self.factor.map_or(sum, |factor| self.round(sum * factor));
        macro_rules! elements {
            ($size:literal, $bytes:expr) => {
                for (&sum, bytes) in sums.iter().zip(bytes.chunks_exact_mut($size)) {
                    bytes.copy_from_slice(&$bytes(result(sum)));
                }
            };
        }
        match self.ty {
            DataType::F32 => elements!(4, f32::to_le_bytes),
            DataType::F16 => elements!(2, |value| f16::from_f32(value).to_le_bytes()),
            DataType::Bf16 => elements!(2, |value| bf16::from_f32(value).to_le_bytes()),
            DataType::F8E4M3 => elements!(1, |value| [Float8::<3>::from_f32(value).0]),
            DataType::F8E5M2 => elements!(1, |value| [Float8::<2>::from_f32(value).0]),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sum(sum: Sum, inputs: &[&[u8]]) -> Vec<u8> {
        let (mut sums, mut bytes) = (Vec::new(), vec![0; inputs[0].len()]);
        sum.begin(inputs[0], &mut sums);
        inputs[1..]
            .iter()
            .for_each(|input| sum.add(input, &mut sums));
        sum.finish(&sums, &mut bytes);
        bytes
    }

    #[test]
    fn sixteen_bit_floats_round_once() {
        // 2048 + 1 is 2048 in 16 bits, so that rounding every step would lose both ones.
        let [big, one, result] = [2048.0, 1.0, 2050.0].map(|x| f16::from_f32(x).to_le_bytes());
        let ty = Sum::new(DataType::F16, false, 0);
        assert_eq!(sum(ty, &[&big, &one, &one]), result);
    }

    #[test]
    fn an_average_is_the_sum_times_the_factor() {
        let inputs = [1f32, 2.5, 4.0].map(f32::to_le_bytes);
        let inputs: Vec<&[u8]> = inputs.iter().map(|input| &input[..]).collect();
        let ty = Sum::new(DataType::F32, true, u64::from(0.5f32.to_bits()));
        assert_eq!(sum(ty, &inputs), 3.75f32.to_le_bytes());
    }

    #[test]
    fn the_average_of_eight_bit_floats_is_added_in_sixteen() {
        // Sums of 57344 are infinite in 16 bits, and saturate; in 32 bits the average would be 57344.
        let big = [Float8::<2>::from_f32(57344.0).0];
        let half = u64::from(f16::from_f32(0.25).to_bits());
        let average = Sum::new(DataType::F8E5M2, true, half);
        let four: [&[u8]; 4] = [&big; 4];
        assert_eq!(sum(average, &four), big);
        let small = [Float8::<2>::from_f32(1.0).0];
        assert_eq!(sum(average, &[&small[..]; 4]), small);
        // Between two values of 16 bits: 2048 + 1 is 2048, three times.
        let (many, one) = ([Float8::<2>::from_f32(2048.0).0], small);
        let bytes = sum(average, &[&many, &one, &one, &one]);
        assert_eq!(bytes, [Float8::<2>::from_f32(512.0).0]);
    }
}
