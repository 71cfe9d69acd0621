//! Which algorithm a plan takes, and why.

use std::fmt;

use crate::all_to_all::algorithm::Algorithm;
use crate::all_to_all::model::{CostModel, Nodes};
use crate::all_to_all::schedule::{
    Exchange, Payload, Schedule, TwoLevel, chunked, grouped, native, pairwise, two_level,
};
use crate::communicator::Communicator;
use crate::error::{Error, ErrorKind, Result};
use crate::library::Capability;

/// What a plan does, and why not otherwise; see [`AllToAll::explain`](crate::AllToAll::explain).
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
    algorithm: Algorithm,
    reason: String,
    nodes: Nodes,
    bytes_per_peer: u64,
    groups: usize,
    messages: usize,
    copies: usize,
    scratch: usize,
    model: CostModel,
    alternatives: Vec<Alternative>,
}

/// An algorithm that a plan could have taken, or not.
///
/// ```
/// # fn example(plan: &nccl::AllToAll) {
/// let refused = plan.explain().alternatives().iter().filter(|other| other.refused().is_some());
/// println!("{} algorithms cannot be used here", refused.count());
/// # }
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Alternative {
    algorithm: Algorithm,
    outcome: std::result::Result<f64, String>,
}

impl Alternative {
    /// Which.
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

    /// How long the model says that it takes, µs; `None` for one that cannot be used. No measurement.
    ///
    /// ```
    /// # fn example(other: &nccl::Alternative) {
    /// println!("{:?}", other.modelled_us());
    /// # }
    /// ```
    #[must_use]
    pub fn modelled_us(&self) -> Option<f64> {
        self.outcome.as_ref().ok().copied()
    }

    /// Why it cannot be used.
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
            Ok(time) => write!(f, "{}: {time:.1} µs by the model", self.algorithm),
            Err(reason) => write!(f, "{}: no, {reason}", self.algorithm),
        }
    }
}

impl Explanation {
    /// The algorithm that the plan takes; never [`Algorithm::Auto`].
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

    /// In a sentence, why this one.
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

    /// All algorithms, with what the model says of them or why they cannot be used.
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

    /// How many groups NCCL is given for each exchange.
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

    /// How many messages this rank sends and receives in each exchange; those that NCCL makes of its own call are not
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

    /// How many copies on the device there are in each exchange.
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

    /// Bytes of device memory that the plan has besides the buffers.
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

    /// Where the ranks are, as far as the plan knows.
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

    /// From what the times come.
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

impl Explanation {
    /// What has to be the same on all ranks, beside the lengths.
    pub(super) fn choice(&self) -> String {
        let Self { algorithm, .. } = self;
        match algorithm {
            Algorithm::TwoLevel => {
                let way = if self.copies > 0 { "packed" } else { "apart" };
                format!(
                    "{algorithm} over nodes of {} ({way})",
                    self.nodes.ranks_per_node()
                )
            }
            _ => algorithm.to_string(),
        }
    }
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{}: {} ({} nodes of {} ranks, {} bytes for each peer at most)",
            self.algorithm,
            self.reason,
            self.nodes.count(),
            self.nodes.ranks_per_node(),
            self.bytes_per_peer
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

/// What a plan is to be chosen from.
pub(super) struct Choice<'c> {
    pub(super) comm: &'c Communicator,
    pub(super) payloads: &'c [Payload],
    pub(super) nodes: Nodes,
    /// Why the nodes are what they are, where that excludes two levels.
    pub(super) no_nodes: Option<String>,
    pub(super) model: CostModel,
    pub(super) asked: Algorithm,
}

impl Choice<'_> {
    fn exchange(&self) -> Exchange<'_> {
        Exchange {
            rank: self.comm.rank(),
            ranks: self.comm.world_size(),
            payloads: self.payloads,
        }
    }

    fn is_uniform(&self) -> bool {
        self.payloads
            .iter()
            .all(|payload| payload.uniform.is_some())
    }

    /// The longest message to a peer, all payloads together.
    fn bytes_per_peer(&self) -> u64 {
        let peers = 0..self.comm.world_size();
        let bytes = peers.map(|peer| {
            let parts = self.payloads.iter();
            let bytes = parts.map(|payload| payload.send[peer].count * payload.size);
            bytes.sum::<usize>() as u64
        });
        bytes.max().unwrap_or_default()
    }

    /// Why it cannot be used, if so.
    fn refusal(&self, algorithm: Algorithm) -> Option<String> {
        let not_uniform = || {
            (!self.is_uniform())
                .then(|| String::from("it is for equal parts, one behind the other"))
        };
        match algorithm {
            Algorithm::Auto | Algorithm::Grouped => None,
            Algorithm::Chunked { .. } | Algorithm::Pairwise { .. } => None,
            Algorithm::Native => not_uniform().or_else(|| self.not_native()),
            Algorithm::TwoLevel => not_uniform().or_else(|| self.not_two_levels()),
            Algorithm::CopyEngine => not_uniform()
                .or_else(|| self.not_native())
                .or_else(|| self.not_copy_engine()),
        }
    }

    fn not_native(&self) -> Option<String> {
        let library = self.comm.library();
        (!library.has(Capability::NativeAllToAll)).then(|| {
            format!(
                "ncclAlltoAll needs NCCL {}, found {} at {}",
                Capability::NativeAllToAll.since(),
                library.version(),
                library.path().display()
            )
        })
    }

    fn not_two_levels(&self) -> Option<String> {
        if let Some(why) = &self.no_nodes {
            return Some(why.clone());
        }
        match (self.nodes.count(), self.nodes.ranks_per_node()) {
            (1, _) => Some(String::from("all ranks are on one node")),
            (_, 1) => Some(String::from("every node has one rank")),
            _ => None,
        }
    }

    fn not_copy_engine(&self) -> Option<String> {
        if !self.comm.inner.is_zero_cta {
            return Some(String::from(
                "the communicator was not made with Config::cta_policy(CtaPolicy::Zero), without which NCCL uses \
                 multiprocessors",
            ));
        }
        None
    }

    /// The algorithm, and the steps that this rank takes.
    pub(super) fn decide(&self) -> Result<(Schedule, Explanation)> {
        let bytes = self.bytes_per_peer();
        let pieces = Algorithm::Chunked { pieces: FEW };
        let width = Algorithm::Pairwise { width: ONE };
        let mut known = vec![
            Algorithm::Native,
            Algorithm::Grouped,
            pieces,
            width,
            Algorithm::TwoLevel,
            Algorithm::CopyEngine,
        ];
        if !known.contains(&self.asked) && self.asked != Algorithm::Auto {
            known.push(self.asked);
        }
        let alternatives: Vec<Alternative> = known
            .into_iter()
            .map(|algorithm| {
                let time = || {
                    let time = self.model.microseconds(algorithm, self.nodes, bytes);
                    time.ok_or_else(|| String::from("the model does not know it"))
                };
                let outcome = self.refusal(algorithm).map_or_else(time, Err);
                Alternative { algorithm, outcome }
            })
            .collect();
        let (algorithm, reason) = self.pick(&alternatives)?;
        let schedule = self.schedule(algorithm, bytes);
        let explanation = self.explanation(algorithm, reason, &schedule, bytes, alternatives);
        Ok((schedule, explanation))
    }

    /// The same in place, where the algorithm is given; `steps` with how many peers there are at a time.
    pub(super) fn in_place(
        &self,
        steps: impl FnOnce(Exchange<'_>) -> Result<(Schedule, usize)>,
    ) -> Result<(Schedule, Explanation)> {
        if self.asked != Algorithm::Auto {
            return Err(Error::new(ErrorKind::InvalidConfig {
                field: "algorithm",
                reason: format!(
                    "{} cannot be used in place: only pairs of ranks can exchange blocks of one buffer",
                    self.asked
                ),
            }));
        }
        let (schedule, width) = steps(self.exchange())?;
        let width = std::num::NonZeroUsize::new(width).unwrap_or(ONE);
        let algorithm = Algorithm::Pairwise { width };
        let reason = String::from(
            "only pairs of ranks can exchange blocks of one buffer; as many at a time as its memory has room for",
        );
        let bytes = self.bytes_per_peer();
        let time = self.model.microseconds(algorithm, self.nodes, bytes);
        let alternatives = vec![Alternative {
            algorithm,
            outcome: time.ok_or_else(String::new),
        }];
        let explanation = self.explanation(algorithm, reason, &schedule, bytes, alternatives);
        Ok((schedule, explanation))
    }

    fn explanation(
        &self,
        algorithm: Algorithm,
        reason: String,
        schedule: &Schedule,
        bytes: u64,
        alternatives: Vec<Alternative>,
    ) -> Explanation {
        let messages = schedule.steps.iter().map(|step| step.messages.len());
        Explanation {
            algorithm,
            reason,
            nodes: self.nodes,
            bytes_per_peer: bytes,
            groups: schedule.launches(),
            messages: messages.sum(),
            copies: schedule.moves(),
            scratch: schedule.scratch,
            model: self.model,
            alternatives,
        }
    }

    fn pick(&self, alternatives: &[Alternative]) -> Result<(Algorithm, String)> {
        if self.asked != Algorithm::Auto {
            return match self.refusal(self.asked) {
                None => Ok((self.asked, String::from("the program asked for it"))),
                Some(reason) => Err(Error::new(ErrorKind::InvalidConfig {
                    field: "algorithm",
                    reason: format!("{} cannot be used: {reason}", self.asked),
                })),
            };
        }
        // The copy engines need windows, of which nothing is known before the buffers are given.
        let usable = alternatives.iter().filter_map(|other| {
            let time = other.modelled_us()?;
            (other.algorithm != Algorithm::CopyEngine).then_some((other.algorithm, time))
        });
        // Of equals the first: NCCL's own call costs the host less than messages.
        let best = usable.min_by(|one, other| one.1.total_cmp(&other.1));
        let (algorithm, time) = best.unwrap_or((Algorithm::Grouped, 0.0));
        let reason = format!("the model holds it for the fastest, {time:.1} µs");
        Ok((algorithm, reason))
    }

    fn schedule(&self, algorithm: Algorithm, bytes: u64) -> Schedule {
        let exchange = self.exchange();
        match algorithm {
            Algorithm::Native | Algorithm::CopyEngine => native(exchange),
            Algorithm::Chunked { pieces } => chunked(exchange, pieces.get()),
            Algorithm::Pairwise { width } => pairwise(exchange, width.get()),
            Algorithm::TwoLevel => {
                let how = TwoLevel {
                    ranks_per_node: self.nodes.ranks_per_node(),
                    packed: self.model.packs(self.nodes, bytes),
                };
                two_level(exchange, how)
            }
            Algorithm::Auto | Algorithm::Grouped => grouped(exchange),
        }
    }
}

const FEW: std::num::NonZeroUsize = std::num::NonZeroUsize::new(4).unwrap();
const ONE: std::num::NonZeroUsize = std::num::NonZeroUsize::MIN;
