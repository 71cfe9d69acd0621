//! Makes a plan: the closure is recorded, the ranks compare their recordings, and only then NCCL is called.

use std::mem::ManuallyDrop;
use std::ops::Range;
use std::panic::resume_unwind;
use std::sync::Arc;
use std::time::Instant;

use cudarc::driver::{CudaEvent, CudaViewMut};

use super::capture::CaptureFailure;
use super::captured::{CapturedPlan, PlanPart};
use super::compare::Comparison;
use super::deferred_plan::{DeferredPlan, PlanMemory, Scratch};
use super::launch_throttle::LaunchThrottle;
use super::record::{Capture, Captured, Held};
use crate::communicator::{Communicator, KeepAlive, check_buffer_context};
use crate::cuda_driver;
use crate::drop_queue::{self, StreamPoint};
use crate::error::{Error, ErrorKind, Result};
use crate::forked;
use crate::memory::PlanBuffers;
use crate::op::{Descriptor, reach_all};
use crate::operation::{OperationKind, Shape};
use crate::operation_comparison::{OperationUse, Operations};
use crate::stats::Volume;

impl Communicator {
    /// Captures operations into a plan that can be launched again and again.
    ///
    /// `record` is called first, with a view of each buffer, and records the operations on them. It runs before
    /// anything is captured, so it may call any code. The operations can use only the buffers that are passed here; the
    /// plan owns them from then on. All ranks must capture at the same time, because NCCL connects the ranks while it
    /// captures. After an error the buffers are not returned.
    ///
    /// The plan is launched on the stream of this communicator.
    ///
    /// # Errors
    /// The errors of `record`; [`ErrorKind::NotInPlan`] for buffers that the plan does not own; and as any operation.
    ///
    /// The ranks of a `World`'s communicator compare their recordings before NCCL is called:
    /// [`ErrorKind::CaptureDiffers`] reports the difference, the same on all of them; [`ErrorKind::TimedOut`] names
    /// ranks that did not arrive. Both leave the communicator usable. When NCCL or CUDA fails, or not everything is
    /// captured within the communicator's timeout for operations, the communicator is aborted, because the other ranks
    /// have captured what this rank has not.
    ///
    /// Wraps `cuStreamBeginCapture`, the operations, `cuStreamEndCapture` and `cuGraphInstantiate`.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// # let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
    /// let (x, y) = (comm.buffer::<u8>(8)?, comm.buffer::<u8>(8)?);
    /// let mut exchange = comm.capture((x, y), |capture, (x, y)| {
    ///     capture.group(|group| {
    ///         group.isend(&x, 0)?; // to itself, for once
    ///         group.irecv(y, 0)
    ///     })
    /// })?;
    /// exchange.launch()?.wait()?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn capture<B: PlanBuffers>(
        &self,
        buffers: B,
        record: impl for<'p> FnOnce(&mut Capture<'p>, B::ViewsMut<'p>) -> Result<()>,
    ) -> Result<CapturedPlan<B>> {
        self.capture_with_scratch(buffers, Scratch::new(), |capture, (buffers, _)| {
            record(capture, buffers)
        })
    }

    /// Like [`capture`](Self::capture), with scratch memory that the plan also owns, and that `record` gets in addition
    /// to the buffers.
    pub(crate) fn capture_with_scratch<B: PlanBuffers>(
        &self,
        buffers: B,
        scratch: Scratch,
        record: impl for<'p> FnOnce(
            &mut Capture<'p>,
            (B::ViewsMut<'p>, Vec<CudaViewMut<'p, u8>>),
        ) -> Result<()>,
    ) -> Result<CapturedPlan<B>> {
        let started = Instant::now();
        let (rank, roster) = (self.rank(), self.inner.roster());
        let span = tracing::info_span!(
            target: "nccl",
            "nccl.capture",
            comm = self.name(),
            world_ranks = roster.world_ranks(),
            rank,
            world_rank = roster.world_rank(rank),
            launcher_rank = roster.launcher_rank(rank),
            nranks = self.world_size()
        );
        let _entered = span.enter();
        let made = self.make_plan((buffers, scratch), record, started);
        made.map_err(|error| {
            self.inner.final_error_before_issue(error.during(|| {
                self.inner
                    .operation(OperationKind::Capture, Shape::default(), None, started)
            }))
        })
    }

    fn make_plan<B: PlanBuffers>(
        &self,
        mut buffers: (B, Scratch),
        record: impl for<'p> FnOnce(
            &mut Capture<'p>,
            (B::ViewsMut<'p>, Vec<CudaViewMut<'p, u8>>),
        ) -> Result<()>,
        started: Instant,
    ) -> Result<CapturedPlan<B>> {
        forked::check()?;
        let recorded = self.record_plan(&mut buffers, record);
        let number = self.inner.plans.next();
        self.compare_captures(number, &recorded, started)?;
        let DraftPlan {
            parts,
            ordering_event,
            marks,
        } = recorded?;
        // From here on, NCCL knows addresses of the buffers, which can be freed only when it does not use them any
        // more.
        let buffers = ManuallyDrop::new(buffers);
        let part_of = |slot, captured: &Vec<Captured>| {
            let recorded = || captured.iter().flat_map(Captured::queued);
            let mut volume = Volume::default();
            recorded().for_each(|one| one.add_to(&mut volume));
            let descriptors = recorded().map(|one| &one.descriptor);
            PlanPart {
                slot,
                operations: recorded().count(),
                volume,
                reaches_all: reach_all(descriptors, self.rank(), self.world_size()),
                is_counted: false,
            }
        };
        match self.inner.capture(number, &parts, started, self.timeout) {
            Ok(slots) => Ok(CapturedPlan {
                parts: slots
                    .into_iter()
                    .zip(&parts)
                    .map(|(slot, part)| part_of(slot, part))
                    .collect(),
                memory: with_held(buffers, parts),
                comm: ManuallyDrop::new(self.clone()),
                ordering_event: ManuallyDrop::new(ordering_event),
                throttle: ManuallyDrop::new(LaunchThrottle::new(marks)),
            }),
            Err(CaptureFailure { error, panic }) => {
                let stream = self.inner.capture_stream();
                let attempt = DeferredPlan {
                    memory: with_held(buffers, parts),
                    slots: Vec::new(),
                    comm: KeepAlive::new(self.clone()),
                    behind: StreamPoint::new(Arc::clone(stream), ordering_event),
                };
                drop_queue::defer(Box::new(attempt), drop_queue::TIMEOUT);
                match panic {
                    Some(payload) => resume_unwind(payload),
                    None => Err(error),
                }
            }
        }
    }

    /// All steps before NCCL is called.
    fn record_plan<B: PlanBuffers>(
        &self,
        buffers: &mut B,
        record: impl for<'p> FnOnce(&mut Capture<'p>, B::ViewsMut<'p>) -> Result<()>,
    ) -> Result<DraftPlan> {
        let context = &self.inner.context;
        let event = || {
            cuda_driver::new_event(context, None)
                .map_err(Error::cuda("creating an event (cuEventCreate)"))
        };
        let (ordering_event, marks) = (event()?, [event()?, event()?]);
        let mut owned: Vec<Range<u64>> = Vec::new();
        buffers.visit(&mut |buffer| {
            check_buffer_context(buffer.stream(), context)?;
            owned.push(buffer.range());
            Ok(())
        })?;
        let mut capture = Capture::new(self, &owned);
        record(&mut capture, buffers.views_mut())?;
        Ok(DraftPlan {
            parts: capture.finish(),
            ordering_event,
            marks,
        })
    }

    /// Compares the plan with those that the other ranks are about to capture, if they can be reached. Nothing has been
    /// captured yet, so a difference leaves the communicator usable.
    fn compare_captures(
        &self,
        number: u64,
        drafted: &Result<DraftPlan>,
        started: Instant,
    ) -> Result<()> {
        let entries = drafted.as_ref().map(|drafted| entries(&drafted.parts));
        let comparison = Comparison {
            comm: self,
            topic: format!("plan/{number}"),
            what: format!("the capture of plan {number}"),
            started,
        };
        let entries = match &entries {
            Ok((entries, ends)) => Ok(Operations { entries, ends }),
            Err(error) => Err(error.kind().to_string()),
        };
        match comparison.operations(OperationUse::Captured, entries)? {
            None => Ok(()),
            Some(difference) => Err(Error::new(ErrorKind::CaptureDiffers {
                plan: number,
                difference,
            })),
        }
    }
}

/// A plan before NCCL is called.
struct DraftPlan {
    parts: Vec<Vec<Captured>>,
    /// As in [`CapturedPlan`].
    ordering_event: CudaEvent,
    marks: [CudaEvent; 2],
}

/// Keeps, with the buffers, what the kernels of the plan use.
fn with_held<B: PlanBuffers>(
    buffers: ManuallyDrop<(B, Scratch)>,
    parts: Vec<Vec<Captured>>,
) -> ManuallyDrop<PlanMemory<B>> {
    let (buffers, scratch) = ManuallyDrop::into_inner(buffers);
    ManuallyDrop::new((buffers, scratch, Held::of(parts)))
}

/// The operations that this rank is about to capture, and where among them each part but the last ends.
fn entries(parts: &[Vec<Captured>]) -> (Vec<Descriptor>, Vec<usize>) {
    let (mut entries, mut ends) = (Vec::new(), Vec::new());
    for part in parts {
        let recorded = part.iter().flat_map(Captured::queued);
        entries.extend(recorded.map(|one| one.descriptor));
        ends.push(entries.len());
    }
    ends.pop();
    (entries, ends)
}
