//! Reduction operators.

use std::fmt;

use nccl_sys as sys;

/// How the values of all ranks become one (`ncclRedOp_t`).
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
    /// with its inverse, rounded to the element type, before they are summed.
    Avg,
}

impl ReduceOp {
    pub(crate) const fn raw(self) -> sys::ncclRedOp_t {
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
