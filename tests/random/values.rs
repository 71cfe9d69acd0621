//! The data of random programs, and the results of reductions.

use half::{bf16, f16};
use nccl::DataType;

/// The operators whose results are exact for small numbers.
#[derive(Clone, Copy, Debug)]
pub enum Reduction {
    Sum,
    Prod,
    Max,
    Min,
}

impl Reduction {
    pub const ALL: [Self; 4] = [Self::Sum, Self::Prod, Self::Max, Self::Min];

    /// The reduction of all ranks' `block` of `count` elements.
    pub fn of(
        self,
        step: u64,
        ranks: usize,
        block: usize,
        count: usize,
        data_type: DataType,
    ) -> Vec<u8> {
        self.scaled(step, ranks, block, count, 1, data_type)
    }

    /// As [`of`](Self::of), for values that were multiplied by `factor` before.
    pub fn scaled(
        self,
        step: u64,
        ranks: usize,
        block: usize,
        count: usize,
        factor: u32,
        data_type: DataType,
    ) -> Vec<u8> {
        let reduce = |index| {
            let values = (0..ranks).map(|rank| factor * number(step, rank, block, index));
            match self {
                Self::Sum => values.sum(),
                Self::Prod => values.product(),
                Self::Max => values.max().unwrap_or_default(),
                Self::Min => values.min().unwrap_or_default(),
            }
        };
        (0..count)
            .flat_map(|index| encode(reduce(index), data_type))
            .collect()
    }
}

/// Bytes that differ for every step, rank and block.
pub fn moved(step: u64, rank: usize, block: usize, len: usize) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(mix(step, rank, block));
    let mut bytes = vec![0; len];
    random.fill(&mut bytes);
    bytes
}

/// Elements to be reduced.
pub fn reduced(step: u64, rank: usize, block: usize, count: usize, data_type: DataType) -> Vec<u8> {
    (0..count)
        .flat_map(|index| encode(number(step, rank, block, index), data_type))
        .collect()
}

fn mix(step: u64, rank: usize, block: usize) -> u64 {
    step.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ ((rank as u64) << 32) ^ block as u64
}

/// 0, 1 or 2.
fn number(step: u64, rank: usize, block: usize, index: usize) -> u32 {
    let mixed = (mix(step, rank, block) ^ index as u64).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    ((mixed >> 40) % 3) as u32
}

/// A number of at most 16 as one element.
fn encode(number: u32, data_type: DataType) -> Vec<u8> {
    match data_type {
        DataType::Int8 | DataType::UInt8 => vec![number as u8],
        DataType::Int32 | DataType::UInt32 => number.to_ne_bytes().to_vec(),
        DataType::Int64 | DataType::UInt64 => u64::from(number).to_ne_bytes().to_vec(),
        DataType::Float16 => f16::from_f32(number as f32).to_ne_bytes().to_vec(),
        DataType::BFloat16 => bf16::from_f32(number as f32).to_ne_bytes().to_vec(),
        DataType::Float32 => (number as f32).to_ne_bytes().to_vec(),
        DataType::Float64 => f64::from(number).to_ne_bytes().to_vec(),
        DataType::Float8E4M3 => vec![float8(number, 7, 3)],
        DataType::Float8E5M2 => vec![float8(number, 15, 2)],
        other => panic!("{other} is not known here"),
    }
}

/// Encodes a number that the format represents exactly: sign, exponent with this bias, mantissa of `mantissa_bits`
/// bits.
fn float8(number: u32, bias: u32, mantissa_bits: u32) -> u8 {
    let Some(exponent) = number.checked_ilog2() else {
        return 0;
    };
    let fraction = number - (1 << exponent);
    let mantissa = (fraction << mantissa_bits) >> exponent;
    assert_eq!(
        mantissa << exponent,
        fraction << mantissa_bits,
        "{number} is not exact"
    );
    (((exponent + bias) << mantissa_bits) | mantissa) as u8
}
