//! The settings of a plan.

use std::path::PathBuf;
use std::time::Instant;

use super::choose::{Choice, Decision};
use super::exchange::AllToAll;
use super::payloads::MOST;
use super::traffic::{Traffic, within};
use crate::all_to_all::algorithm::Algorithm;
use crate::all_to_all::model::{CostModel, Nodes};
use crate::all_to_all::record;
use crate::all_to_all::schedule::{Payload, beside, grouped};
use crate::all_to_all::variable::{Parts, Sides};
use crate::communicator::Communicator;
use crate::error::{Error, ErrorKind, Result};
use crate::forked;
use crate::op::{Descriptor, Function};
use crate::operation::{OperationKind, Shape};
use crate::operation_comparison::{OperationUse, Operations};
use crate::plan::Comparison;
use nccl_base::data_type::DataType;

/// Builds an [`AllToAll`] from its payloads and settings. The fields are the settings.
///
/// Each payload is added by a call of its own ([`per_peer`](Self::per_peer), [`parts`](Self::parts)); all payloads are exchanged
/// together, at most 4.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # nccl_emulator::install_unless_gpu()?;
/// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
/// # let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
/// use nccl::DataType;
/// use nccl::all_to_all::{AllToAll, AllToAllAlgorithm};
///
/// // 128 tokens of 7168 bytes for each rank, and a scale for each 128 of these.
/// let mut plan = AllToAll::plan(&comm)
///     .per_peer(DataType::UInt8, 128 * 7168)
///     .per_peer(DataType::Float32, 128 * 56)
///     .with(|plan| plan.algorithm = AllToAllAlgorithm::Grouped)
///     .build()?;
/// # Ok(())
/// # }
/// ```
#[must_use = "nothing is made before `build`"]
#[derive(Debug)]
#[non_exhaustive]
pub struct AllToAllBuilder<'c> {
    comm: &'c Communicator,
    payloads: Vec<Payload>,
    /// The algorithm; default [`Algorithm::Auto`].
    pub algorithm: Algorithm,
    /// The number of consecutive ranks on each node; `None` (default) derives it from the hosts of a world's ranks.
    pub ranks_per_node: Option<usize>,
    /// The model with which [`Algorithm::Auto`] chooses; `None` (default) means [`CostModel::published`]. Must be the same on
    /// all ranks.
    pub cost_model: Option<CostModel>,
    /// A file with the model, which [`build`](Self::build) reads like [`CostModel::read`]; used instead of
    /// [`cost_model`](Self::cost_model).
    pub cost_model_file: Option<PathBuf>,
    /// Whether the constants of the model are measured when the plan is made, by [`CostModel::measure`]; default `false`.
    pub measured: bool,
    /// Whether each payload has a single buffer, whose blocks are exchanged in place ([`AllToAll::enqueue_in_place`]); only
    /// for equal parts. The algorithm is then an exchange between pairs. Default `false`.
    pub in_place: bool,
    /// The maximum memory of an in-place plan in addition to its buffer, in bytes. With less than the length of the buffer, the
    /// plan needs several groups. With `None` (default), it uses one group, and about as much memory as the buffer.
    pub scratch_limit: Option<usize>,
    /// The first error in the payloads.
    wrong: Option<Error>,
}

impl AllToAll {
    /// Returns a builder for a plan on `comm`.
    ///
    /// ```
    /// # fn example(comm: &nccl::Communicator) -> nccl::Result<()> {
    /// let plan = nccl::all_to_all::AllToAll::plan(comm).per_peer(nccl::DataType::Float32, 1024).build()?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn plan(comm: &Communicator) -> AllToAllBuilder<'_> {
        AllToAllBuilder::new(comm)
    }
}

impl<'c> AllToAllBuilder<'c> {
    pub(super) fn new(comm: &'c Communicator) -> Self {
        Self {
            comm,
            payloads: Vec::new(),
            algorithm: Algorithm::Auto,
            ranks_per_node: None,
            cost_model: None,
            cost_model_file: None,
            measured: false,
            in_place: false,
            scratch_limit: None,
            wrong: None,
        }
    }

    /// Sets fields in a chain of calls.
    ///
    /// ```
    /// # fn example(comm: &nccl::Communicator) -> nccl::Result<nccl::all_to_all::AllToAll> {
    /// use nccl::all_to_all::{AllToAll, CostModel};
    ///
    /// let plan = AllToAll::plan(comm).per_peer(nccl::DataType::Float32, 1024);
    /// plan.with(|plan| {
    ///     plan.ranks_per_node = Some(8);
    ///     plan.cost_model = Some(CostModel { launch_us: 3.0, ..CostModel::published() });
    /// })
    /// .build()
    /// # }
    /// ```
    pub fn with(mut self, set: impl FnOnce(&mut Self)) -> Self {
        set(&mut self);
        self
    }

    /// Adds a payload of `count` elements of `data_type` from each rank to each other, the same on all ranks.
    ///
    /// ```
    /// # fn example(comm: &nccl::Communicator) -> nccl::Result<nccl::all_to_all::AllToAll> {
    /// nccl::all_to_all::AllToAll::plan(comm).per_peer(nccl::DataType::Float32, 1024).build()
    /// # }
    /// ```
    pub fn per_peer(self, data_type: DataType, count: usize) -> Self {
        let ranks = self.comm.world_size();
        self.add(data_type, |size| {
            let all = count
                .checked_mul(ranks)
                .and_then(|all| all.checked_mul(size));
            match all.filter(|bytes| isize::try_from(*bytes).is_ok()) {
                Some(_) => Ok(Payload::uniform(data_type, size, ranks, count)),
                None => Err(record::length(
                    "the count for each rank",
                    count,
                    isize::MAX as usize / size / ranks,
                    "at most what a device can address",
                )),
            }
        })
    }

    /// Adds a payload of elements of `data_type` with an individual length for each pair of ranks, as in
    /// [`Communicator::all_to_all_v`].
    ///
    /// ```
    /// # fn example(comm: &nccl::Communicator, counts: &[usize]) -> nccl::Result<nccl::all_to_all::AllToAll> {
    /// use nccl::all_to_all::{AllToAll, Parts};
    ///
    /// let parts = Parts::from(counts); // as much to each rank as from it
    /// AllToAll::plan(comm).parts(nccl::DataType::Float32, parts, parts).build()
    /// # }
    /// ```
    pub fn parts<'p>(
        self,
        data_type: DataType,
        send: impl Into<Parts<'p>>,
        recv: impl Into<Parts<'p>>,
    ) -> Self {
        let (send, recv) = (send.into(), recv.into());
        let comm = self.comm;
        self.add(data_type, |size| {
            let most = isize::MAX as usize / size;
            Sides::check_both((send, most), (recv, most), comm)?;
            Ok(Payload {
                data_type,
                size,
                send: send.each().collect(),
                recv: recv.each().collect(),
                uniform: None,
            })
        })
    }

    fn add(mut self, data_type: DataType, make: impl FnOnce(usize) -> Result<Payload>) -> Self {
        let payload = record::element_size(self.comm, data_type).and_then(make);
        match payload {
            Ok(payload) => self.payloads.push(payload),
            Err(error) => self.wrong = self.wrong.or(Some(error)),
        }
        self
    }

    /// Returns the model with which the algorithm is chosen.
    fn model(&mut self) -> Result<CostModel> {
        let invalid = |reason| {
            Error::new(ErrorKind::InvalidConfig {
                field: "cost model",
                reason,
            })
        };
        match (self.cost_model.take(), &self.cost_model_file) {
            (Some(_), Some(path)) => Err(invalid(format!(
                "both a model and its file {} are given: leave one",
                path.display()
            ))),
            (None, Some(path)) => CostModel::read(path),
            (Some(model), None) => model.check().map(|()| model).map_err(invalid),
            (None, None) => Ok(CostModel::default()),
        }
    }

    /// Makes the plan: checks everything, compares it with the other ranks, and allocates the scratch memory. All ranks must do
    /// this at the same time. The ranks of a `World`'s communicator compare their plans. Ranks that met with a token cannot, so
    /// all of them have to make the plan with the same calls, [`per_peer`](Self::per_peer) or [`parts`](Self::parts). For two
    /// levels with unequal parts, the ranks of a node exchange some counts on the communicator's stream, and this call waits
    /// for that.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidConfig`] for an algorithm that cannot be used, with the reason; [`ErrorKind::Length`] for a plan
    /// without payloads or with more than 4, and for counts that do not fit; [`ErrorKind::PlansDiffer`], the same on all ranks,
    /// if the ranks request different algorithms, or their counts do not match; [`ErrorKind::TimedOut`] names ranks that did
    /// not arrive; [`ErrorKind::Cuda`] if there is not enough memory.
    ///
    /// ```
    /// # fn example(comm: &nccl::Communicator) -> nccl::Result<()> {
    /// let plan = nccl::all_to_all::AllToAll::plan(comm).per_peer(nccl::DataType::Float32, 1024).build()?;
    /// println!("{}", plan.explain());
    /// # Ok(())
    /// # }
    /// ```
    pub fn build(self) -> Result<AllToAll> {
        forked::check()?;
        let started = Instant::now();
        let comm = self.comm;
        self.make(started).map_err(|error| {
            comm.inner.final_error_before_issue(error.during(|| {
                let (kind, shape) = (OperationKind::AllToAll, Shape::default());
                comm.inner.operation(kind, shape, None, started)
            }))
        })
    }

    fn make(mut self, started: Instant) -> Result<AllToAll> {
        let comm = self.comm;
        let number = comm.inner.plans.next();
        let comparison = Comparison {
            comm,
            topic: format!("exchange/{number}"),
            what: format!("the making of all-to-all plan {number}"),
            started,
        };
        let model = self.model();
        let (wrong, model) = match (self.wrong.take(), model) {
            (Some(wrong), _) | (None, Err(wrong)) => (Some(wrong), CostModel::default()),
            (None, Ok(model)) => (None, model),
        };
        let agreed = Traffic::agreed(&comparison, &self.payloads);
        let (traffic, made) = match (wrong, agreed) {
            // If the exchange of the traffic failed, the comparison would fail as well.
            (Some(error), Err(_)) => return Err(error),
            // The comparison below reports the error to the other ranks.
            (Some(error), Ok(_)) => (None, Err(error)),
            (None, agreed) => {
                let traffic = agreed?;
                if !self.in_place && !traffic.is_some_and(|traffic| traffic.is_uniform()) {
                    // Parts that are equal on this rank may be unequal on another.
                    let payloads = self.payloads.iter_mut();
                    payloads.for_each(|payload| payload.uniform = None);
                }
                (traffic, self.decide(model, traffic))
            }
        };
        self.compare(number, &comparison, &made)?;
        let made = self.finish(made?, traffic);
        // A failure on one rank, for instance for lack of memory, must not surface only in the first exchange.
        let reason = made.as_ref().err().map(|error| error.kind().to_string());
        match (made, comparison.outcomes(reason.as_deref())) {
            (Ok(_), Ok(Some(difference))) => Err(Error::new(ErrorKind::PlansDiffer {
                plan: number,
                difference,
            })),
            (Ok(_), Err(error)) => Err(error),
            (made, _) => made,
        }
    }

    /// Completes the plan after all ranks have agreed.
    fn finish(self, mut decision: Decision, traffic: Option<Traffic>) -> Result<AllToAll> {
        let comm = self.comm;
        if self.measured {
            // All ranks measure, and get the same constants.
            let model = CostModel::measure(comm, decision.nodes())?;
            decision = self.decide(model, traffic)?;
        }
        let within = decision
            .unknown_within()
            .map(|nodes| within(comm, nodes, &self.payloads))
            .transpose()?;
        let exchange = record::exchange_of(comm, &self.payloads);
        let (schedule, explanation) = decision.carry_out(exchange, within.as_ref());
        AllToAll::new(comm, self.payloads, schedule, explanation, self.in_place)
    }

    fn decide(&self, model: CostModel, traffic: Option<Traffic>) -> Result<Decision> {
        if self.payloads.is_empty() || self.payloads.len() > MOST {
            return Err(record::length(
                "the payloads of the plan",
                self.payloads.len(),
                self.payloads.len().clamp(1, MOST),
                "1 to 4",
            ));
        }
        let (nodes, no_nodes) = self.nodes()?;
        let choice = Choice {
            comm: self.comm,
            nodes,
            no_nodes,
            model,
            asked: self.algorithm,
            traffic,
        };
        match self.in_place {
            false => choice.decide(),
            true => choice.in_place(self.width()?),
        }
    }

    /// Returns the number of peers at a time for which the scratch memory has room.
    fn width(&self) -> Result<usize> {
        let blocks = self.payloads.iter().map(|payload| {
            let count = payload.uniform.ok_or_else(|| {
                Error::new(ErrorKind::InvalidConfig {
                    field: "in_place",
                    reason: String::from("it is for equal parts, one behind the other (per_peer)"),
                })
            })?;
            Ok(count * payload.size)
        });
        let blocks = blocks.collect::<Result<Vec<_>>>()?;
        let (block, ranks) = (beside(blocks.into_iter()), self.comm.world_size());
        let limit = self.scratch_limit.unwrap_or(usize::MAX);
        match limit.checked_div(block) {
            None => Ok(ranks),
            Some(0) if ranks > 1 => Err(record::length(
                "the scratch, in bytes,",
                limit,
                block,
                "at least one block of each payload, each from a multiple of 16 bytes on",
            )),
            Some(fit) => Ok(fit.clamp(1, ranks)),
        }
    }

    /// Returns the placement of the ranks; if they cannot be divided into nodes, also the reason.
    fn nodes(&self) -> Result<(Nodes, Option<String>)> {
        let ranks = self.comm.world_size();
        if let Some(ranks_per_node) = self.ranks_per_node {
            return Ok((Nodes::new(ranks, ranks_per_node)?, None));
        }
        let one = Nodes::new(ranks, ranks)?;
        let Some(hosts) = record::hosts(self.comm) else {
            return Ok((
                one,
                Some(String::from(
                    "it is not known which ranks share a host: say ranks_per_node",
                )),
            ));
        };
        let mut runs: Vec<usize> = Vec::new();
        for (rank, host) in hosts.iter().enumerate() {
            match rank.checked_sub(1).map(|before| hosts[before] == *host) {
                Some(true) => {
                    if let Some(last) = runs.last_mut() {
                        *last += 1;
                    }
                }
                _ => runs.push(1),
            }
        }
        let mut distinct = hosts.clone();
        distinct.sort_unstable();
        distinct.dedup();
        if runs.iter().any(|run| *run != runs[0]) || distinct.len() != runs.len() {
            let why =
                "the hosts have different numbers of ranks, or ranks that do not follow each other";
            return Ok((one, Some(String::from(why))));
        }
        Ok((Nodes::new(ranks, runs[0])?, None))
    }

    /// Compares the plan with the other ranks. A rank whose plan failed takes part, so that the others receive its
    /// error.
    fn compare(
        &self,
        number: u64,
        comparison: &Comparison<'_>,
        made: &Result<Decision>,
    ) -> Result<()> {
        let straight = grouped(record::exchange_of(self.comm, &self.payloads));
        let messages = straight.steps.iter().flat_map(|step| &step.messages);
        let entries = messages.map(|message| {
            let function = if message.sends {
                Function::Send
            } else {
                Function::Recv
            };
            let data_type = self.payloads[message.payload].data_type;
            // Fits: the number of ranks was checked when the communicator was made.
            Descriptor::new(function, message.count, data_type, message.peer as i32)
        });
        let entries: Vec<_> = entries.collect();
        let entries = match made {
            Ok(_) => Ok(Operations::undivided(&entries)),
            Err(error) => Err(error.kind().to_string()),
        };
        let differ = |difference: String| {
            Err(Error::new(ErrorKind::PlansDiffer {
                plan: number,
                difference,
            }))
        };
        if let Some(difference) = comparison.operations(OperationUse::InPlan, entries)? {
            return differ(difference);
        }
        let Ok(decision) = made else {
            return Ok(());
        };
        let choice = match self.measured {
            true => {
                let local = decision.nodes().ranks_per_node();
                format!("{} as measured, over nodes of {local}", self.algorithm)
            }
            false => decision.choice(),
        };
        match comparison.choices(&choice)? {
            Some(difference) => differ(difference),
            None => Ok(()),
        }
    }
}
