//! The contents of a plan, before it is captured.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use crate::communicator::Communicator;
use crate::error::Result;
use crate::group::Group;
use crate::issuing::{DeviceCopy, IssueBuffers, Step};
use crate::queued_op::{Batch, CollectiveArgs, QueuedOp};
use crate::reduce::Operator;

/// Records the operations of a plan; see [`Communicator::capture`].
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # nccl_emulator::install_unless_gpu()?;
/// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
/// # let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
/// # use nccl::ReduceOp;
/// let x = stream.clone_htod(&[1.0f32, 2.0])?;
/// let y = stream.alloc_zeros::<f32>(2)?;
/// let mut plan = comm.capture((x, y), |capture, (x, mut y)| {
///     capture.group(|group| group.all_reduce(&x, &mut y, ReduceOp::Sum))?;
///     capture.group(|group| group.all_reduce_in_place(y, ReduceOp::Max)) // after the first
/// })?;
/// plan.launch()?.wait()?;
/// # Ok(())
/// # }
/// ```
pub struct Capture<'p> {
    comm: &'p Communicator,
    owned: &'p [Range<u64>],
    groups: Vec<Captured>,
}

/// A group, and the copies before it, ready to be issued.
pub(crate) struct Captured {
    copies: Vec<DeviceCopy>,
    recorded: Vec<QueuedOp>,
    collective_args: Vec<CollectiveArgs>,
    grouped: bool,
    /// The operators of the reductions, kept until they are issued.
    _operators: Vec<Arc<Operator>>,
}

impl Captured {
    pub(super) fn batch(&self) -> Batch<'_> {
        Batch {
            queued: &self.recorded,
            collective_args: &self.collective_args,
            grouped: self.grouped,
        }
    }

    pub(super) fn step(&self) -> Step<'_> {
        Step {
            copies: &self.copies,
            batch: self.batch(),
        }
    }
}

impl<'p> Capture<'p> {
    pub(super) fn new(comm: &'p Communicator, owned: &'p [Range<u64>]) -> Self {
        Self {
            comm,
            owned,
            groups: Vec::new(),
        }
    }

    pub(super) fn finish(self) -> Vec<Captured> {
        self.groups
    }

    /// Adds operations that are issued together, after those of earlier groups.
    ///
    /// # Errors
    /// As [`Communicator::group`], and [`ErrorKind::NotInPlan`](crate::ErrorKind::NotInPlan) for a buffer
    /// that the plan does not own. After an error nothing is added.
    ///
    /// ```
    /// # fn example(comm: &nccl::Communicator, y: nccl::Buffer<f32>) -> nccl::Result<()> {
    /// let plan = comm.capture(y, |capture, y| {
    ///     capture.group(|group| group.all_reduce_in_place(y, nccl::ReduceOp::Sum))
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn group<'a>(&mut self, record: impl FnOnce(&mut Group<'a>) -> Result<()>) -> Result<()>
    where
        'p: 'a,
    {
        let mut group = Group::of_plan(self.comm, self.owned);
        record(&mut group)?;
        group.finish(Some(self.owned))?;
        let operators = group.buffers.take_operators();
        let batch = group.buffers.batch();
        if !batch.queued.is_empty() {
            self.groups.push(Captured {
                copies: Vec::new(),
                recorded: batch.queued.to_vec(),
                collective_args: batch.collective_args.to_vec(),
                grouped: batch.grouped,
                _operators: operators,
            });
        }
        Ok(())
    }

    /// The communicator, with the configuration of the plan's collectives.
    pub(crate) fn comm(&self) -> &'p Communicator {
        self.comm
    }

    /// Buffers that accept only memory of the plan.
    pub(crate) fn buffers(&self) -> IssueBuffers<'p> {
        IssueBuffers::empty(self.comm.stream(), Some(self.owned))
    }

    /// Adds the steps of the buffers from [`buffers`](Self::buffers).
    pub(crate) fn add_steps(&mut self, buffers: &IssueBuffers<'p>) {
        if !buffers.has_steps() {
            let batch = buffers.batch();
            if !batch.queued.is_empty() {
                self.groups.push(Captured {
                    copies: Vec::new(),
                    recorded: batch.queued.to_vec(),
                    collective_args: batch.collective_args.to_vec(),
                    grouped: batch.grouped,
                    _operators: Vec::new(),
                });
            }
            return;
        }
        let steps = buffers.steps().map(|step| Captured {
            copies: step.copies.to_vec(),
            recorded: step.batch.queued.to_vec(),
            collective_args: step.batch.collective_args.to_vec(),
            grouped: step.batch.grouped,
            _operators: Vec::new(),
        });
        self.groups.extend(steps);
    }
}

impl fmt::Debug for Capture<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Capture")
            .field("groups", &self.groups.len())
            .finish_non_exhaustive()
    }
}
