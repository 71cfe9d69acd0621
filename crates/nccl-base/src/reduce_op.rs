//! The operators of reductions.

use std::fmt;

use nccl_sys as sys;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// How the values of all ranks are combined (`ncclRedOp_t`).
///
/// ```
/// use nccl::ReduceOp;
/// assert_eq!(ReduceOp::Avg.to_string(), "avg");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ReduceOp {
    /// The sum.
    Sum,
    /// The product.
    Prod,
    /// The largest value; NaN loses against a number.
    Max,
    /// The smallest value; NaN loses against a number.
    Min,
    /// The mean: integers are summed, then divided by the number of ranks; floats are multiplied
    /// by the inverse of that number, rounded to the element type, before they are summed.
    Avg,
}

impl ReduceOp {
    /// All operators; the index of each is its code.
    #[doc(hidden)]
    pub const ALL: [Self; 5] = [Self::Sum, Self::Prod, Self::Max, Self::Min, Self::Avg];

    #[doc(hidden)]
    pub const fn raw(self) -> sys::ncclRedOp_t {
        match self {
            Self::Sum => sys::ncclRedOp_t::ncclSum,
            Self::Prod => sys::ncclRedOp_t::ncclProd,
            Self::Max => sys::ncclRedOp_t::ncclMax,
            Self::Min => sys::ncclRedOp_t::ncclMin,
            Self::Avg => sys::ncclRedOp_t::ncclAvg,
        }
    }
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Sum => "sum",
            Self::Prod => "prod",
            Self::Max => "max",
            Self::Min => "min",
            Self::Avg => "avg",
        })
    }
}

/// An operator, as far as the recorder distinguishes them.
///
/// ```
/// use nccl::ReduceOp;
/// use nccl::recorder::{RecordedOperation, RecordedReduction};
///
/// fn is_sum(operation: &RecordedOperation) -> bool {
///     operation.reduction == Some(RecordedReduction::Op(ReduceOp::Sum))
/// }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RecordedReduction {
    /// A built-in operator of NCCL.
    Op(ReduceOp),
    /// An operator that the program made, like `PreMulSum`.
    Made,
}

impl fmt::Display for RecordedReduction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Op(op) => op.fmt(f),
            Self::Made => f.write_str("made"),
        }
    }
}

impl Serialize for RecordedReduction {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for RecordedReduction {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let text = String::deserialize(from)?;
        let ops = ReduceOp::ALL.map(Self::Op);
        let mut all = ops.into_iter().chain([Self::Made]);
        all.find(|one| one.to_string() == text)
            .ok_or_else(|| serde::de::Error::custom(format_args!("{text:?} is no reduction")))
    }
}
