//! The explanation of a plan: the algorithm, the reason, and the costs.

use std::fmt;

use super::traffic::Traffic;
use crate::all_to_all::algorithm::Algorithm;
use crate::all_to_all::model::{CostModel, Nodes};

/// The choice of a plan and its alternatives; see [`AllToAll::explain`](crate::AllToAll::explain).
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # nccl_emulator::install_unless_gpu()?;
/// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
/// # let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
/// let plan = nccl::all_to_all::AllToAll::plan(&comm).per_peer(nccl::DataType::Float32, 1024).build()?;
/// for other in &plan.explain().alternatives {
///     println!("{other}");
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Explanation {
    /// The algorithm; never [`Algorithm::Auto`].
    pub algorithm: Algorithm,
    /// The reason for the algorithm, as a sentence.
    pub reason: String,
    /// The placement of the ranks, as far as the plan knows.
    pub nodes: Nodes,
    /// `None` if the ranks could not exchange it.
    pub(super) traffic: Option<Traffic>,
    /// The number of NCCL groups in each exchange.
    pub groups: usize,
    /// How many messages this rank sends and receives in each exchange; messages inside `ncclAlltoAll` are not
    /// counted.
    pub messages: usize,
    /// The number of copies on the device in each exchange.
    pub copies: usize,
    /// How many bytes of device memory the plan owns besides the buffers.
    pub scratch_bytes: usize,
    /// The cost model from which the times were computed.
    pub model: CostModel,
    /// All algorithms, with their modelled times, or why they cannot be used.
    pub alternatives: Vec<Alternative>,
}

/// An algorithm that a plan has considered.
///
/// ```
/// # fn example(plan: &nccl::all_to_all::AllToAll) {
/// let refused = plan.explain().alternatives.iter().filter(|other| other.outcome.is_err());
/// println!("{} algorithms cannot be used here", refused.count());
/// # }
/// ```
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Alternative {
    /// The algorithm.
    pub algorithm: Algorithm,
    /// The modelled time in µs, or why the algorithm cannot be used. `None` if the ranks could not exchange the amount of
    /// data. The time is not a measurement.
    pub outcome: std::result::Result<Option<f64>, String>,
}

impl fmt::Display for Alternative {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.outcome {
            Ok(Some(time)) => write!(f, "{}: {time:.1} µs by the model", self.algorithm),
            Ok(None) => write!(f, "{}: no time by the model", self.algorithm),
            Err(reason) => write!(f, "{}: no, {reason}", self.algorithm),
        }
    }
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{}: {} ({} nodes of {} ranks, {})",
            self.algorithm,
            self.reason,
            self.nodes.count(),
            self.nodes.ranks_per_node(),
            match &self.traffic {
                Some(traffic) => traffic.to_string(),
                None => String::from("unequal parts"),
            }
        )?;
        writeln!(
            f,
            "  each exchange: {} groups, {} messages, {} copies; {} bytes of its own",
            self.groups, self.messages, self.copies, self.scratch_bytes
        )?;
        for other in &self.alternatives {
            writeln!(f, "  {other}")?;
        }
        write!(f, "  model: {}", self.model)
    }
}
