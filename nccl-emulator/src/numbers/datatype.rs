//! Element types and reduction operators.

use half::{bf16, f16};
use nccl_sys::{ncclDataType_t, ncclRedOp_t};

use super::float8::{E4M3, E5M2};
use crate::version;

/// An element type of NCCL 2.32.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DataType {
    I8,
    U8,
    I32,
    U32,
    I64,
    U64,
    F16,
    F32,
    F64,
    Bf16,
    F8E4M3,
    F8E5M2,
}

impl DataType {
    pub(crate) fn from_c(value: ncclDataType_t) -> Option<Self> {
        if value.0 >= 10 && !version::is_at_least(2, 24, 3) {
            // The 8-bit floats came with that release.
            return None;
        }
        Some(match value.0 {
            0 => Self::I8,
            1 => Self::U8,
            2 => Self::I32,
            3 => Self::U32,
            4 => Self::I64,
            5 => Self::U64,
            6 => Self::F16,
            7 => Self::F32,
            8 => Self::F64,
            9 => Self::Bf16,
            10 => Self::F8E4M3,
            11 => Self::F8E5M2,
            _ => return None,
        })
    }

    /// Returns the size of an element in bytes.
    pub(crate) fn size(self) -> u64 {
        match self {
            Self::I8 | Self::U8 | Self::F8E4M3 | Self::F8E5M2 => 1,
            Self::F16 | Self::Bf16 => 2,
            Self::I32 | Self::U32 | Self::F32 => 4,
            Self::I64 | Self::U64 | Self::F64 => 8,
        }
    }

    /// Returns whether this is one of the two 8-bit float formats.
    pub(crate) fn is_float8(self) -> bool {
        matches!(self, Self::F8E4M3 | Self::F8E5M2)
    }

    fn is_float(self) -> bool {
        matches!(self, Self::F16 | Self::F32 | Self::F64 | Self::Bf16) || self.is_float8()
    }

    /// Returns the bits of the value nearest to `1 / n`, as NCCL rounds it.
    fn reciprocal(self, n: i32) -> u64 {
        let exact = 1.0 / f64::from(n);
        let single = exact as f32;
        match self {
            Self::F16 => u64::from(f16::from_f32(single).to_bits()),
            Self::Bf16 => u64::from(bf16::from_f32(single).to_bits()),
            Self::F8E4M3 => u64::from(E4M3::from_f32(single).0),
            Self::F8E5M2 => u64::from(E5M2::from_f32(single).0),
            Self::F64 => exact.to_bits(),
            _ => u64::from(single.to_bits()),
        }
    }
}

/// The basic operators, to which the operators of the API are reduced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Operator {
    Sum,
    Prod,
    Max,
    Min,
    /// Each rank's elements are multiplied by a scalar of that rank, then added.
    PreMulSum,
    /// The elements are added, then divided by the number of ranks. Only for integers.
    SumPostDiv,
}

/// The factor of [`Operator::PreMulSum`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scalar {
    /// The bits of a value of the element type, the others 0.
    Value(u64),
    /// An address in device memory, read when the stream reaches the operation.
    At(u64),
}

/// An operator with its scalar, which only [`Operator::PreMulSum`] uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Reduction {
    pub(crate) operator: Operator,
    pub(crate) scalar: Scalar,
}

impl Reduction {
    /// Returns the reduction of a built-in operator for `ranks` ranks; `None` if `op` is not built in.
    pub(crate) fn built_in(op: ncclRedOp_t, data_type: DataType, ranks: i32) -> Option<Self> {
        let mut scalar = Scalar::Value(0);
        let operator = match op {
            ncclRedOp_t::ncclSum => Operator::Sum,
            ncclRedOp_t::ncclProd => Operator::Prod,
            ncclRedOp_t::ncclMax => Operator::Max,
            ncclRedOp_t::ncclMin => Operator::Min,
            ncclRedOp_t::ncclAvg if data_type.is_float() => {
                scalar = Scalar::Value(data_type.reciprocal(ranks));
                Operator::PreMulSum
            }
            ncclRedOp_t::ncclAvg => Operator::SumPostDiv,
            _ => return None,
        };
        Some(Self { operator, scalar })
    }

    /// `PreMulSum`.
    pub(crate) fn scaled(scalar: Scalar) -> Self {
        Self {
            operator: Operator::PreMulSum,
            scalar,
        }
    }
}
