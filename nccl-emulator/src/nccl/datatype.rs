//! Element types and reduction operators, as far as the arguments of a call go.

use nccl_sys::{ncclDataType_t, ncclRedOp_t};

use super::version;

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

    /// Bytes of one element.
    pub(crate) fn size(self) -> u64 {
        match self {
            Self::I8 | Self::U8 | Self::F8E4M3 | Self::F8E5M2 => 1,
            Self::F16 | Self::Bf16 => 2,
            Self::I32 | Self::U32 | Self::F32 => 4,
            Self::I64 | Self::U64 | Self::F64 => 8,
        }
    }

    pub(crate) fn is_f8(self) -> bool {
        matches!(self, Self::F8E4M3 | Self::F8E5M2)
    }
}

/// A built-in reduction operator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Operator {
    Sum,
    Prod,
    Max,
    Min,
    Avg,
}

impl Operator {
    pub(crate) fn from_c(value: ncclRedOp_t) -> Option<Self> {
        Some(match value {
            ncclRedOp_t::ncclSum => Self::Sum,
            ncclRedOp_t::ncclProd => Self::Prod,
            ncclRedOp_t::ncclMax => Self::Max,
            ncclRedOp_t::ncclMin => Self::Min,
            ncclRedOp_t::ncclAvg => Self::Avg,
            _ => return None,
        })
    }
}
