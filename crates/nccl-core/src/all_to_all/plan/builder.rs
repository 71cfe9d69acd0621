//! The settings of a plan.

use std::path::Path;
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
use crate::dtype::NcclType;
use crate::error::{Error, ErrorKind, Result};
use crate::forked;
use crate::op::{Descriptor, Function};
use crate::operation::{OperationKind, Shape};
use crate::operation_comparison::OperationUse;
use crate::plan::Comparison;
use nccl_base::data_type::DataType;

/// Makes an [`AllToAll`] from its payloads and settings.
///
/// Each payload is added by a call of its own ([`per_peer`](Self::per_peer), [`parts`](Self::parts)); all payloads are exchanged
/// together, at most 4.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # nccl_emulator::install_unless_gpu()?;
/// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
/// # let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
/// // 128 tokens of 7168 bytes for each rank, and a scale for each 128 of these.
/// let mut plan = nccl::all_to_all::AllToAll::plan(&comm)
///     .per_peer::<u8>(128 * 7168)
///     .per_peer::<f32>(128 * 56)
///     .algorithm(nccl::all_to_all::AllToAllAlgorithm::Grouped)
///     .build()?;
/// # Ok(())
/// # }
/// ```
#[must_use = "nothing is made before `build`"]
#[derive(Debug)]
pub struct AllToAllBuilder<'c> {
    comm: &'c Communicator,
    payloads: Vec<Payload>,
    algorithm: Algorithm,
    ranks_per_node: Option<usize>,
    model: Option<CostModel>,
    measured: bool,
    in_place: bool,
    scratch_limit: Option<usize>,
    /// The first error in the settings.
    wrong: Option<Error>,
}

impl AllToAll {
    /// Returns a builder for a plan on `comm`.
    ///
    /// ```
    /// # fn example(comm: &nccl::Communicator) -> nccl::Result<()> {
    /// let plan = nccl::all_to_all::AllToAll::plan(comm).per_peer::<f32>(1024).build()?;
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
            model: None,
            measured: false,
            in_place: false,
            scratch_limit: None,
            wrong: None,
        }
    }

    /// Adds a payload of `count` elements of `T` from each rank to each other, the same on all ranks.
    ///
    /// ```
    /// # fn example(comm: &nccl::Communicator) -> nccl::Result<nccl::all_to_all::AllToAll> {
    /// nccl::all_to_all::AllToAll::plan(comm).per_peer::<f32>(1024).build()
    /// # }
    /// ```
    pub fn per_peer<T: NcclType>(self, count: usize) -> Self {
        self.per_peer_of(T::DATA_TYPE, count)
    }

    /// Does the same as [`per_peer`](Self::per_peer), for a type that is known at run time.
    ///
    /// ```
    /// # fn example(comm: &nccl::Communicator, data_type: nccl::DataType) -> nccl::Result<nccl::all_to_all::AllToAll> {
    /// nccl::all_to_all::AllToAll::plan(comm).per_peer_of(data_type, 1024).build()
    /// # }
    /// ```
    pub fn per_peer_of(self, data_type: DataType, count: usize) -> Self {
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

    /// Adds a payload of `T` with a length of its own for each pair of ranks: as [`Communicator::all_to_all_v`].
    ///
    /// ```
    /// # fn example(comm: &nccl::Communicator, send: &[usize], recv: &[usize]) -> nccl::Result<nccl::all_to_all::AllToAll> {
    /// nccl::all_to_all::AllToAll::plan(comm).parts::<f32>(send, recv).build()
    /// # }
    /// ```
    pub fn parts<'p, T: NcclType>(
        self,
        send: impl Into<Parts<'p>>,
        recv: impl Into<Parts<'p>>,
    ) -> Self {
        self.parts_of(T::DATA_TYPE, send, recv)
    }

    /// Does the same as [`parts`](Self::parts), for a type that is known at run time.
    ///
    /// ```
    /// # fn example(comm: &nccl::Communicator, data_type: nccl::DataType, counts: &[usize]) -> nccl::Result<nccl::all_to_all::AllToAll> {
    /// use nccl::all_to_all::{AllToAll, Parts};
    ///
    /// let parts = Parts::from(counts); // as much to each rank as from it
    /// AllToAll::plan(comm).parts_of(data_type, parts, parts).build()
    /// # }
    /// ```
    pub fn parts_of<'p>(
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

    /// Sets the algorithm; [`Algorithm::Auto`] unless set.
    ///
    /// ```
    /// # fn example(comm: &nccl::Communicator) -> nccl::Result<nccl::all_to_all::AllToAll> {
    /// use nccl::all_to_all::{AllToAll, AllToAllAlgorithm};
    ///
    /// AllToAll::plan(comm).per_peer::<f32>(8).algorithm(AllToAllAlgorithm::Native).build()
    /// # }
    /// ```
    pub fn algorithm(mut self, algorithm: Algorithm) -> Self {
        self.algorithm = algorithm;
        self
    }

    /// Sets the number of consecutive ranks on each node. Unless set, it is derived from the hosts of a world's ranks.
    ///
    /// ```
    /// # fn example(comm: &nccl::Communicator) -> nccl::Result<nccl::all_to_all::AllToAll> {
    /// nccl::all_to_all::AllToAll::plan(comm).per_peer::<f32>(8).ranks_per_node(8).build()
    /// # }
    /// ```
    pub fn ranks_per_node(mut self, ranks: usize) -> Self {
        self.ranks_per_node = Some(ranks);
        self
    }

    /// Sets the model with which [`Algorithm::Auto`] chooses; [`CostModel::published`] unless set. The same on all ranks.
    ///
    /// ```
    /// # fn example(comm: &nccl::Communicator) -> nccl::Result<nccl::all_to_all::AllToAll> {
    /// let model = nccl::all_to_all::CostModel { launch_us: 3.0, ..nccl::all_to_all::CostModel::published() };
    /// nccl::all_to_all::AllToAll::plan(comm).per_peer::<f32>(8).cost_model(model).build()
    /// # }
    /// ```
    pub fn cost_model(mut self, model: CostModel) -> Self {
        if let Err(reason) = model.check() {
            let error = Error::new(ErrorKind::InvalidConfig {
                field: "cost model",
                reason,
            });
            self.wrong = self.wrong.or(Some(error));
        }
        self.model = Some(model);
        self
    }

    /// Does the same as [`cost_model`](Self::cost_model), with a file that [`CostModel::read`] reads.
    ///
    /// ```
    /// # fn example(comm: &nccl::Communicator) -> nccl::Result<nccl::all_to_all::AllToAll> {
    /// nccl::all_to_all::AllToAll::plan(comm).per_peer::<f32>(8).cost_model_file("/etc/server/all_to_all.json").build()
    /// # }
    /// ```
    pub fn cost_model_file(mut self, path: impl AsRef<Path>) -> Self {
        match CostModel::read(path) {
            Ok(model) => self.model = Some(model),
            Err(error) => self.wrong = self.wrong.or(Some(error)),
        }
        self
    }

    /// Does the same as [`cost_model`](Self::cost_model), with constants that are measured when the plan is made, by
    /// [`CostModel::measure`].
    ///
    /// ```
    /// # fn example(comm: &nccl::Communicator) -> nccl::Result<nccl::all_to_all::AllToAll> {
    /// nccl::all_to_all::AllToAll::plan(comm).per_peer::<f32>(1024).measured().build()
    /// # }
    /// ```
    pub fn measured(mut self) -> Self {
        self.measured = true;
        self
    }

    /// Uses one buffer for each payload, whose blocks are exchanged in place ([`AllToAll::enqueue_in_place`]); for equal parts.
    /// The algorithm is then an exchange between pairs.
    ///
    /// ```
    /// # fn example(comm: &nccl::Communicator) -> nccl::Result<nccl::all_to_all::AllToAll> {
    /// nccl::all_to_all::AllToAll::plan(comm).per_peer::<f32>(1024).in_place().build()
    /// # }
    /// ```
    pub fn in_place(mut self) -> Self {
        self.in_place = true;
        self
    }

    /// Limits the memory that a plan in place has besides its buffer, in bytes: with less than the length of the buffer, it
    /// needs several groups. Unless set, the plan uses one group, and about as much memory as the buffer has.
    ///
    /// ```
    /// # fn example(comm: &nccl::Communicator) -> nccl::Result<nccl::all_to_all::AllToAll> {
    /// nccl::all_to_all::AllToAll::plan(comm).per_peer::<f32>(1 << 20).in_place().scratch_limit(16 << 20).build()
    /// # }
    /// ```
    pub fn scratch_limit(mut self, bytes: usize) -> Self {
        self.scratch_limit = Some(bytes);
        self
    }

    /// Makes the plan: checks everything, compares with the other ranks, allocates the scratch memory. Every rank makes it at
    /// the same time. The ranks of a `World`'s communicator compare their plans; ranks that met with a token
    /// cannot: all of them have to make the plan by the same calls, [`per_peer`](Self::per_peer) or
    /// [`parts`](Self::parts). For two levels with unequal parts the ranks of a node exchange some counts on the communicator's
    /// stream, and this call waits for that.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidConfig`] for an algorithm that cannot be used, with the reason; [`ErrorKind::Length`] for a plan
    /// without or with more than 4 payloads, and for counts that do not fit; [`ErrorKind::PlansDiffer`], the same on all ranks,
    /// where the ranks want different algorithms, or their counts do not match; [`ErrorKind::TimedOut`] names
    /// ranks that did not come; [`ErrorKind::Cuda`] where there is no memory.
    ///
    /// ```
    /// # fn example(comm: &nccl::Communicator) -> nccl::Result<()> {
    /// let plan = nccl::all_to_all::AllToAll::plan(comm).per_peer::<f32>(1024).build()?;
    /// println!("{}", plan.explain());
    /// # Ok(())
    /// # }
    /// ```
    pub fn build(self) -> Result<AllToAll> {
        forked::check()?;
        let started = Instant::now();
        let comm = self.comm;
        self.make(started).map_err(|error| {
            comm.inner.conclude_before_issue(error.during(|| {
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
        let wrong = self.wrong.take();
        let agreed = Traffic::agreed(&comparison, &self.payloads);
        let (traffic, made) = match (wrong, agreed) {
            // If the exchange of the traffic failed, the comparison would fail as well.
            (Some(error), Err(_)) => return Err(error),
            // The comparison that follows tells the other ranks.
            (Some(error), Ok(_)) => (None, Err(error)),
            (None, agreed) => {
                let traffic = agreed?;
                if !self.in_place && !traffic.is_some_and(|traffic| traffic.is_uniform()) {
                    // Parts that are equal on this rank may be unequal on another.
                    let payloads = self.payloads.iter_mut();
                    payloads.for_each(|payload| payload.uniform = None);
                }
                let model = self.model.unwrap_or_default();
                (traffic, self.decide(model, traffic))
            }
        };
        self.compare(number, &comparison, &made)?;
        let made = self.finish(made?, traffic);
        // A failure on one rank, for want of memory for instance, must not surface only in the first exchange.
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

    /// Returns for how many peers at a time the scratch has room.
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

    /// Returns the placement of the ranks, and why they cannot be divided into nodes, if so.
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

    /// Compares with the other ranks; a rank whose plan failed takes part, so that the others are told.
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
            Ok(_) => Ok(&entries[..]),
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
