//! A plan that is captured again on the next communicator.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::captured::CapturedPlan;
use crate::communicator::Communicator;
use crate::error::Error;
use crate::events::millis;
use crate::memory::PlanBuffers;

/// A captured plan, together with how it is made. When ranks have died or joined, there is another communicator, and the
/// graphs of the old one are gone with it: then the plan is captured again.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # nccl_emulator::install_unless_gpu()?;
/// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
/// # let (world, again) = (nccl::World::single(), nccl::World::single());
/// # let mut comm = world.communicator("demo").stream(&stream).build()?;
/// use nccl::ReduceOp;
/// use nccl::plan::RenewablePlan;
///
/// let mut sum = RenewablePlan::new(|comm, former| {
///     let gradients = match former {
///         Some(gradients) => gradients,
///         None => comm.buffer::<f32>(1024)?,
///     };
///     comm.capture(gradients, |capture, y| capture.group(|group| group.all_reduce_in_place(y, ReduceOp::Sum)))
/// });
/// sum.on(&comm)?.launch()?.wait()?;
/// sum.on(&comm)?.launch()?.wait()?; // the same plan
/// assert_eq!(sum.captures(), 1);
///
/// comm = again.communicator("demo").stream(&stream).build()?; // after `World::next_generation`, say
/// sum.on(&comm)?.launch()?.wait()?;
/// assert_eq!(sum.captures(), 2);
/// # Ok(())
/// # }
/// ```
pub struct RenewablePlan<B: PlanBuffers, E = Error> {
    make: Box<MakePlan<B, E>>,
    made: Option<Made<B>>,
    captures: u64,
}

/// Makes a plan for a communicator, with the buffers of the former plan if there are any.
type MakePlan<B, E> = dyn FnMut(&Communicator, Option<B>) -> Result<CapturedPlan<B>, E> + Send;

struct Made<B: PlanBuffers> {
    plan: CapturedPlan<B>,
    took: Duration,
}

impl<B: PlanBuffers, E> RenewablePlan<B, E> {
    /// Returns a plan that is made by `make` when it is first asked for.
    ///
    /// `make` gets the communicator, and the buffers of the former plan: `None` the first time, after an error of `make`,
    /// and when NCCL may still use them. So keep nothing in them that cannot be made again. `make` may make anything that
    /// belongs to the communicator, such as an `ExpertParallel` or a registration. All ranks make the plan at the same time;
    /// if one of them fails before it captures, the others wait for it until their timeout.
    ///
    /// ```
    /// # use nccl::cudarc::driver::CudaSlice;
    /// # use nccl::moe::{ExpertParallel, Routing};
    /// # use nccl::plan::RenewablePlan;
    /// type Buffers = (Routing, CudaSlice<i32>, CudaSlice<f32>, CudaSlice<f32>);
    ///
    /// let mut layer = RenewablePlan::<Buffers, Box<dyn std::error::Error>>::new(|comm, _| {
    ///     let ep = ExpertParallel::builder(comm)
    ///         .with(|ep| (ep.experts, ep.top_k, ep.max_tokens, ep.max_row_bytes) = (8 * comm.world_size(), 2, 64, 512))
    ///         .build()?;
    ///     let numbers = |len| comm.stream().alloc_zeros::<f32>(len);
    ///     let topk = comm.stream().alloc_zeros::<i32>(64 * 2)?;
    ///     let buffers = (ep.routing()?, topk, numbers(64 * 128)?, numbers(ep.rows() * 128)?);
    ///     Ok(comm.capture(buffers, |capture, (mut routing, topk, x, y)| {
    ///         let mut experts = ep.capture(capture)?;
    ///         experts.route(&topk, &mut routing)?;
    ///         experts.dispatch(&routing, &x, y)
    ///     })?)
    /// });
    /// # let _ = &mut layer;
    /// ```
    pub fn new(
        make: impl FnMut(&Communicator, Option<B>) -> Result<CapturedPlan<B>, E> + Send + 'static,
    ) -> Self {
        Self {
            make: Box::new(make),
            made: None,
            captures: 0,
        }
    }

    /// Returns the plan for this communicator: the same as before if the communicator and its stream are, otherwise captured now,
    /// by all ranks together, after the end of an abort of the former communicator. The log tells of the second and each later
    /// capture (`nccl.plan.renewed`), and how long it took.
    ///
    /// # Errors
    /// Those of the function that makes the plan. The next call tries again, without former buffers.
    ///
    /// ```
    /// # fn example(layer: &mut nccl::plan::RenewablePlan<nccl::Buffer<f32>>, comm: &nccl::Communicator) -> nccl::Result<()> {
    /// layer.on(comm)?.launch()?.wait()?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn on(&mut self, comm: &Communicator) -> Result<&mut CapturedPlan<B>, E> {
        let made = match self.made.take() {
            Some(made) if made.plan.is_on(comm) => made,
            former => {
                let started = Instant::now();
                // Buffers that NCCL may still use are not returned: the error says that they are leaked.
                let former = former.and_then(|former| former.plan.into_buffers().ok());
                let plan = (self.make)(comm, former)?;
                let took = started.elapsed();
                self.captures += 1;
                if self.captures > 1 {
                    plan.log_renewal(self.captures, took);
                }
                Made { plan, took }
            }
        };
        Ok(&mut self.made.insert(made).plan)
    }

    /// Returns how often the plan was captured. It grows when the last call of [`on`](Self::on) captured the plan again, and
    /// does not when the plan survived.
    ///
    /// ```
    /// # fn example(layer: &nccl::plan::RenewablePlan<nccl::Buffer<f32>>) {
    /// println!("captured {} times", layer.captures());
    /// # }
    /// ```
    #[must_use]
    pub fn captures(&self) -> u64 {
        self.captures
    }

    /// Returns how long the last capture took, with everything that the function made; `None` if there is no plan.
    ///
    /// ```
    /// # fn example(layer: &nccl::plan::RenewablePlan<nccl::Buffer<f32>>) {
    /// println!("captured again in {:?}", layer.took());
    /// # }
    /// ```
    #[must_use]
    pub fn took(&self) -> Option<Duration> {
        self.made.as_ref().map(|made| made.took)
    }
}

impl<B: PlanBuffers> CapturedPlan<B> {
    fn is_on(&self, comm: &Communicator) -> bool {
        Arc::ptr_eq(&self.comm.inner, &comm.inner) && Arc::ptr_eq(&self.comm.stream, &comm.stream)
    }

    fn log_renewal(&self, captures: u64, took: Duration) {
        let (roster, rank) = (self.comm.inner.roster(), self.comm.rank());
        tracing::info!(
            name: "nccl.plan.renewed",
            target: "nccl",
            comm = self.comm.name(),
            world_ranks = roster.world_ranks(),
            rank,
            world_rank = roster.world_rank(rank),
            launcher_rank = roster.launcher_rank(rank),
            nranks = self.comm.world_size(),
            captures,
            elapsed_ms = millis(took),
            "a plan was captured again"
        );
    }
}

impl<B: PlanBuffers, E> fmt::Debug for RenewablePlan<B, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RenewablePlan")
            .field("plan", &self.made.as_ref().map(|made| &made.plan))
            .field("captures", &self.captures)
            .finish_non_exhaustive()
    }
}
