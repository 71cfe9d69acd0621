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
/// let plan = nccl::AllToAll::plan(&comm).per_peer::<f32>(1024).build()?;
/// for other in plan.explain().alternatives() {
///     println!("{other}");
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Explanation {
    pub(super) algorithm: Algorithm,
    pub(super) reason: String,
    pub(super) nodes: Nodes,
    /// `None` if the ranks could not exchange it.
    pub(super) traffic: Option<Traffic>,
    pub(super) groups: usize,
    pub(super) messages: usize,
    pub(super) copies: usize,
    pub(super) scratch: usize,
    pub(super) model: CostModel,
    pub(super) alternatives: Vec<Alternative>,
}

/// An algorithm that a plan has considered.
///
/// ```
/// # fn example(plan: &nccl::AllToAll) {
/// let refused = plan.explain().alternatives().iter().filter(|other| other.refused().is_some());
/// println!("{} algorithms cannot be used here", refused.count());
/// # }
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Alternative {
    pub(super) algorithm: Algorithm,
    /// The modelled time, if any, or why the algorithm cannot be used.
    pub(super) outcome: std::result::Result<Option<f64>, String>,
}

impl Alternative {
    /// Returns the algorithm.
    ///
    /// ```
    /// # fn example(other: &nccl::Alternative) {
    /// println!("{}", other.algorithm());
    /// # }
    /// ```
    #[must_use]
    pub fn algorithm(&self) -> Algorithm {
        self.algorithm
    }

    /// Returns the modelled time, µs; `None` for an algorithm that cannot be used, and where the ranks could not exchange
    /// how much data there is. Not a measurement.
    ///
    /// ```
    /// # fn example(other: &nccl::Alternative) {
    /// println!("{:?}", other.modelled_us());
    /// # }
    /// ```
    #[must_use]
    pub fn modelled_us(&self) -> Option<f64> {
        self.outcome.as_ref().ok().copied().flatten()
    }

    /// Returns why it cannot be used.
    ///
    /// ```
    /// # fn example(other: &nccl::Alternative) {
    /// println!("{}", other.refused().unwrap_or("it can be used"));
    /// # }
    /// ```
    #[must_use]
    pub fn refused(&self) -> Option<&str> {
        self.outcome.as_ref().err().map(String::as_str)
    }
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

impl Explanation {
    /// Returns the algorithm of the plan; never [`Algorithm::Auto`].
    ///
    /// ```
    /// # fn example(plan: &nccl::AllToAll) {
    /// println!("{}", plan.explain().algorithm());
    /// # }
    /// ```
    #[must_use]
    pub fn algorithm(&self) -> Algorithm {
        self.algorithm
    }

    /// Returns the reason for the algorithm, as a sentence.
    ///
    /// ```
    /// # fn example(plan: &nccl::AllToAll) {
    /// println!("{}", plan.explain().reason());
    /// # }
    /// ```
    #[must_use]
    pub fn reason(&self) -> &str {
        &self.reason
    }

    /// Returns all algorithms, with their modelled times or why they cannot be used.
    ///
    /// ```
    /// # fn example(plan: &nccl::AllToAll) {
    /// assert!(!plan.explain().alternatives().is_empty());
    /// # }
    /// ```
    #[must_use]
    pub fn alternatives(&self) -> &[Alternative] {
        &self.alternatives
    }

    /// Returns the number of NCCL groups in each exchange.
    ///
    /// ```
    /// # fn example(plan: &nccl::AllToAll) {
    /// println!("{} launches", plan.explain().groups());
    /// # }
    /// ```
    #[must_use]
    pub fn groups(&self) -> usize {
        self.groups
    }

    /// Returns how many messages this rank sends and receives in each exchange; messages inside `ncclAlltoAll` are not
    /// counted.
    ///
    /// ```
    /// # fn example(plan: &nccl::AllToAll) {
    /// println!("{} messages", plan.explain().messages());
    /// # }
    /// ```
    #[must_use]
    pub fn messages(&self) -> usize {
        self.messages
    }

    /// Returns the number of copies on the device in each exchange.
    ///
    /// ```
    /// # fn example(plan: &nccl::AllToAll) {
    /// println!("{} copies", plan.explain().copies());
    /// # }
    /// ```
    #[must_use]
    pub fn copies(&self) -> usize {
        self.copies
    }

    /// Returns how many bytes of device memory the plan owns besides the buffers.
    ///
    /// ```
    /// # fn example(plan: &nccl::AllToAll) {
    /// println!("{} bytes", plan.explain().scratch_bytes());
    /// # }
    /// ```
    #[must_use]
    pub fn scratch_bytes(&self) -> usize {
        self.scratch
    }

    /// Returns the placement of the ranks, as far as the plan knows it.
    ///
    /// ```
    /// # fn example(plan: &nccl::AllToAll) {
    /// println!("{} nodes", plan.explain().nodes().count());
    /// # }
    /// ```
    #[must_use]
    pub fn nodes(&self) -> Nodes {
        self.nodes
    }

    /// Returns the cost model of the times.
    ///
    /// ```
    /// # fn example(plan: &nccl::AllToAll) {
    /// println!("{}", plan.explain().model());
    /// # }
    /// ```
    #[must_use]
    pub fn model(&self) -> &CostModel {
        &self.model
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
            self.groups, self.messages, self.copies, self.scratch
        )?;
        for other in &self.alternatives {
            writeln!(f, "  {other}")?;
        }
        write!(f, "  model: {}", self.model)
    }
}
