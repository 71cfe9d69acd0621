//! What [`super::coverage`] finds.

use super::kernels::Coverage;

/// What becomes of a function or a kernel when NCCL launches it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum State {
    /// It is interpreted.
    Interpreted {
        /// How often it was in this process: channels of a function, launches of a kernel.
        times: u64,
    },
    /// Its launch fails, with this text.
    Refused {
        /// What it needs.
        reason: String,
    },
    /// The library has no code for it.
    Absent,
}

impl State {
    pub(super) fn new(coverage: Coverage, times: u64) -> Self {
        match coverage {
            Coverage::Interpreted => Self::Interpreted { times },
            Coverage::Refused(reason) => Self::Refused {
                reason: reason.to_string(),
            },
            Coverage::Absent => Self::Absent,
        }
    }
}

/// A row of the library's table of device functions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CoveredFunction {
    /// What it does: `AllReduce`.
    pub collective: String,
    /// The operator of a reduction: `SumPostDiv`.
    pub operator: Option<String>,
    /// The type of a reduction: `Bf16`.
    pub data_type: Option<String>,
    /// How the data travels: `Ring`.
    pub algorithm: String,
    /// How a step is written: `Ll128`.
    pub protocol: String,
    /// Whether it is carried out.
    pub state: State,
}

/// A kernel of the library.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CoveredKernel {
    /// Its name.
    pub name: String,
    /// Whether it is carried out.
    pub state: State,
}

/// What [`real_coverage`](super::coverage::real_coverage) finds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RealCoverage {
    /// All rows of the library's table, in its order.
    pub functions: Vec<CoveredFunction>,
    /// All kernels. Those of `ncclDevKernel_*` carry out the functions.
    pub kernels: Vec<CoveredKernel>,
}
