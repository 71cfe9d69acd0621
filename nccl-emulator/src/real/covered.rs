//! The result of [`super::coverage`].

use super::kernels::Coverage;

/// The treatment of a function or a kernel that NCCL launches.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum State {
    /// The interpreter runs it.
    Interpreted {
        /// The number of runs in this process: channels of a function, launches of a kernel.
        times: u64,
    },
    /// Its launch fails, for this reason.
    Refused {
        /// The missing requirement.
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
    /// The collective, such as `AllReduce`.
    pub collective: String,
    /// The operator of a reduction, such as `SumPostDiv`.
    pub operator: Option<String>,
    /// The type of a reduction, such as `Bf16`.
    pub data_type: Option<String>,
    /// The algorithm, such as `Ring`.
    pub algorithm: String,
    /// The protocol, such as `Ll128`.
    pub protocol: String,
    /// Whether the interpreter runs it.
    pub state: State,
}

/// A kernel of the library.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CoveredKernel {
    /// The name of the kernel.
    pub name: String,
    /// Whether the interpreter runs it.
    pub state: State,
}

/// The result of [`real_coverage`](super::coverage::real_coverage).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RealCoverage {
    /// All rows of the library's table of device functions, in its order.
    pub functions: Vec<CoveredFunction>,
    /// All kernels. The kernels `ncclDevKernel_*` run the functions.
    pub kernels: Vec<CoveredKernel>,
}
