//! A captured plan: its launches, its buffers, and its end.

use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use cudarc::driver::CudaEvent;

use super::deferred_plan::{DeferredPlan, PlanMemory, Scratch};
use super::launch_throttle::LaunchThrottle;
use crate::active_calls::CallKind;
use crate::communicator::{Communicator, KeepAlive};
use crate::drop_queue::{self, StreamPoint};
use crate::error::{Error, ErrorKind, Result};
use crate::forked;
use crate::graphs::GraphSlot;
use crate::issuing::{IssueBuffers, NotLaunched, Replayed};
use crate::memory::PlanBuffers;
use crate::operation::{OperationKind, Shape};
use crate::request::Request;
use crate::state::State;
use crate::stats::Volume;

/// The operations of a plan that are launched together.
pub(super) struct PlanPart {
    pub(super) slot: Arc<GraphSlot>,
    pub(super) operations: usize,
    /// What a launch adds to the statistics.
    pub(super) volume: Volume,
    /// Whether a launch shows that NCCL reaches all ranks.
    pub(super) reaches_all: bool,
    /// Whether the next launch is counted: the capture counted the first one.
    pub(super) is_counted: bool,
}

/// Operations on the plan's own buffers, captured into a CUDA graph. A launch costs one call for all of them, and needs
/// no thread of NCCL.
///
/// The plan owns its buffers. Between launches, the program reads and writes them through [`views`](Self::views) and
/// [`views_mut`](Self::views_mut), ordered by their streams like any other memory: work that was put on a buffer's
/// stream before a launch is over when the replay begins, and work that is put there afterwards begins when the replay
/// is over.
///
/// A plan may be divided into [parts](super::Capture::next_part), which are launched one by one.
///
/// Every rank has to capture the same operations, and to launch its plan and its parts equally often and in the same order.
/// The plan keeps its communicator alive. Finalizing or aborting the communicator destroys the graph first, and later launches
/// fail. Dropping the plan never waits: buffers that a replay still uses are freed in the background when the replay is
/// over.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # nccl_emulator::install_unless_gpu()?;
/// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
/// # let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
/// use nccl::ReduceOp;
///
/// let gradients = stream.alloc_zeros::<f32>(2)?;
/// let mut step = comm.capture(gradients, |capture, gradients| {
///     capture.group(|group| group.all_reduce_in_place(gradients, ReduceOp::Avg))
/// })?;
/// for round in 0..3 {
///     stream.memcpy_htod(&[round as f32, 1.0], &mut step.views_mut())?;
///     step.launch()?.wait()?;
///     assert_eq!(stream.clone_dtoh(&step.views())?, [round as f32, 1.0]);
/// }
/// let gradients = step.into_buffers()?;
/// # Ok(())
/// # }
/// ```
pub struct CapturedPlan<B: PlanBuffers> {
    pub(super) memory: ManuallyDrop<PlanMemory<B>>,
    /// Never empty.
    pub(super) parts: Vec<PlanPart>,
    pub(super) comm: ManuallyDrop<Communicator>,
    /// Joins the streams of the buffers with that of the launch.
    pub(super) ordering_event: ManuallyDrop<CudaEvent>,
    /// Bounds the number of replays in flight.
    pub(super) throttle: ManuallyDrop<LaunchThrottle>,
}

impl<B: PlanBuffers> CapturedPlan<B> {
    /// Replays the operations of all parts, on the stream of the communicator that captured them. Returns the request of the
    /// last part.
    ///
    /// # Errors
    /// [`ErrorKind::Aborted`] and [`ErrorKind::Closed`] when the communicator has ended,
    /// [`ErrorKind::Stream`] when a stream is capturing, [`ErrorKind::TimedOut`] when too many replays
    /// are in flight and none ends within the timeout for operations; [`ErrorKind::Cuda`] when CUDA
    /// refuses. In the last two cases, and when a part other than the first is refused, the communicator is aborted.
    ///
    /// Wraps `cuGraphLaunch`.
    ///
    /// ```
    /// # fn example(plan: &mut nccl::plan::CapturedPlan<nccl::Buffer<f32>>) -> nccl::Result<()> {
    /// let done = plan.launch()?;
    /// done.wait()?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn launch(&mut self) -> Result<Request> {
        let mut launched = self.launch_part(0);
        for part in 1..self.parts.len() {
            launched?;
            // Parts went out before it: this rank is out of step with the others.
            launched = self.launch_part(part).map_err(|error| {
                let inner = &self.comm.inner;
                inner.abort(&error);
                inner.final_error(error)
            });
        }
        launched
    }

    /// Replays the operations of one part, counted from 0.
    ///
    /// The ranks launch the same parts in the same order, which need not be that of the capture.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidConfig`] when there is no such part; otherwise as [`launch`](Self::launch).
    ///
    /// Wraps `cuGraphLaunch`.
    ///
    /// ```
    /// # fn example(layer: &mut nccl::plan::CapturedPlan<nccl::Buffer<f32>>) -> nccl::Result<()> {
    /// layer.launch_part(0)?;
    /// // … kernels of the program, on the buffers …
    /// layer.launch_part(1)?.wait()?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn launch_part(&mut self, part: usize) -> Result<Request> {
        let started = Instant::now();
        const KIND: OperationKind = OperationKind::Replay;
        let comm = &*self.comm;
        let parts = self.parts.len();
        let Some(part) = self.parts.get_mut(part) else {
            return Err(Error::new(ErrorKind::InvalidConfig {
                field: "part",
                reason: format!("part {part} of a plan with {parts}, which are counted from 0"),
            }));
        };
        let launched = self.throttle.wait(comm, part.slot.number).and_then(|()| {
            let taking = comm.inner.enter(CallKind::Replay, comm.timeout);
            let mut buffers = IssueBuffers::new(&comm.stream)?;
            let (own, scratch, _) = &mut *self.memory;
            own.visit(&mut |buffer| buffers.write(buffer).map(drop))?;
            for memory in scratch {
                buffers.write(memory)?;
            }
            drop(taking);
            let replayed = Replayed {
                plan: part.slot.number,
                volume: part.is_counted.then_some(&part.volume),
                reaches_all: part.reaches_all,
            };
            let (ordering_event, timeout) = (&self.ordering_event, comm.timeout);
            comm.inner
                .replay(&buffers, ordering_event, &replayed, timeout, |inner| {
                    let graph = part.slot.graph.lock();
                    // Launched under this lock: the communicator cannot end before the graph is destroyed.
                    match graph.as_ref() {
                        Some(_) if inner.is_suspended.load(Ordering::Acquire) => {
                            Err(NotLaunched::Refused(inner.suspended()))
                        }
                        Some(graph) if inner.lifecycle.get() == State::Ready => {
                            graph.launch(&comm.stream).map_err(NotLaunched::Failed)
                        }
                        _ => Err(NotLaunched::Refused(inner.out_of_use())),
                    }
                })
        });
        match launched {
            Ok(sequence) => {
                part.is_counted = true;
                self.throttle.mark(comm);
                Ok(Request::new(
                    comm,
                    KIND,
                    Shape::default(),
                    sequence,
                    started,
                    false,
                ))
            }
            Err(error) => {
                let error = error.during(|| comm.inner.replay_of(part.slot.number, started));
                Err(comm.inner.final_error_before_issue(error))
            }
        }
    }

    /// Returns views of the buffers, to read between launches: one for each, in the order in which they were given.
    ///
    /// ```
    /// # fn example(plan: &nccl::plan::CapturedPlan<(nccl::Buffer<f32>, nccl::Buffer<f32>)>,
    /// #     stream: &std::sync::Arc<nccl::cudarc::driver::CudaStream>) -> Result<(), nccl::cudarc::driver::DriverError> {
    /// let (_, y) = plan.views();
    /// let host: Vec<f32> = stream.clone_dtoh(&y)?;
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn views(&self) -> B::Views<'_> {
        self.memory.0.views()
    }

    /// Returns mutable views of the buffers, to write between launches: one for each, in the order in which they were
    /// given.
    ///
    /// ```
    /// # fn example(plan: &mut nccl::plan::CapturedPlan<(nccl::Buffer<f32>, nccl::Buffer<f32>)>,
    /// #     stream: &std::sync::Arc<nccl::cudarc::driver::CudaStream>) -> Result<(), nccl::cudarc::driver::DriverError> {
    /// let (mut x, _) = plan.views_mut();
    /// stream.memset_zeros(&mut x)?;
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn views_mut(&mut self) -> B::ViewsMut<'_> {
        self.memory.0.views_mut()
    }

    /// Returns the number of parts, at least one.
    ///
    /// ```
    /// # fn example(plan: &mut nccl::plan::CapturedPlan<nccl::Buffer<f32>>) -> nccl::Result<()> {
    /// for part in 0..plan.parts() {
    ///     plan.launch_part(part)?;
    /// }
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn parts(&self) -> usize {
        self.parts.len()
    }

    /// Returns how many operations a launch of all parts replays.
    ///
    /// ```
    /// # fn example(plan: &nccl::plan::CapturedPlan<nccl::Buffer<f32>>) {
    /// println!("{} operations in one launch", plan.operations());
    /// # }
    /// ```
    #[must_use]
    pub fn operations(&self) -> usize {
        self.parts.iter().map(|part| part.operations).sum()
    }

    /// Ends the plan and returns the buffers. Replays in flight continue, and the streams of
    /// the buffers wait for them. Waits for the end of an abort that has begun.
    ///
    /// # Errors
    /// [`ErrorKind::Aborted`] when the communicator was leaked, or its abort does not end: NCCL may still use the buffers,
    /// so they are not freed.
    ///
    /// ```
    /// # fn example(plan: nccl::plan::CapturedPlan<nccl::Buffer<f32>>) -> nccl::Result<()> {
    /// let buffer = plan.into_buffers()?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn into_buffers(self) -> Result<B> {
        forked::check()?;
        let mut plan = ManuallyDrop::new(self);
        // SAFETY: each is taken once, because `plan` is never dropped.
        let ((buffers, scratch, held), comm, ordering_event) = unsafe {
            (
                ManuallyDrop::take(&mut plan.memory),
                ManuallyDrop::take(&mut plan.comm),
                ManuallyDrop::take(&mut plan.ordering_event),
            )
        };
        // SAFETY: likewise; it is dropped here.
        unsafe { ManuallyDrop::drop(&mut plan.throttle) };
        // SAFETY: likewise.
        let parts = unsafe { std::ptr::read(&raw const plan.parts) };
        {
            let _inside = comm.inner.enter(CallKind::Replay, comm.timeout);
            for part in &parts {
                comm.inner.plans.destroy(&part.slot);
            }
        }
        if comm.inner.lifecycle.get() == State::Aborting {
            // Other ranks may still write into the buffers.
            comm.inner.wait_for_end();
        }
        if matches!(comm.inner.lifecycle.get(), State::Aborting | State::Leaked) {
            std::mem::forget((buffers, scratch, held));
            return Err(comm.inner.final_error(comm.inner.out_of_use()));
        }
        // The streams of the buffers wait for the replays in flight. This memory has no such streams.
        if drop_queue::is_closed() {
            std::mem::forget((scratch, held));
        } else if !(scratch.is_empty() && held.is_empty()) {
            let deferred = DeferredPlan::<Scratch> {
                memory: ManuallyDrop::new((scratch, Scratch::new(), held)),
                slots: Vec::new(),
                behind: StreamPoint::new(Arc::clone(&comm.stream), ordering_event),
                comm: KeepAlive::new(comm),
            };
            drop_queue::defer(Box::new(deferred), drop_queue::TIMEOUT);
        }
        Ok(buffers)
    }
}

impl<B: PlanBuffers> Drop for CapturedPlan<B> {
    /// Never waits; see the type.
    fn drop(&mut self) {
        if drop_queue::is_closed() {
            return;
        }
        // SAFETY: each is taken or dropped once, here.
        let (memory, comm, ordering_event) = unsafe {
            ManuallyDrop::drop(&mut self.throttle);
            (
                ManuallyDrop::take(&mut self.memory),
                ManuallyDrop::take(&mut self.comm),
                ManuallyDrop::take(&mut self.ordering_event),
            )
        };
        let deferred_plan = DeferredPlan {
            memory: ManuallyDrop::new(memory),
            slots: self.parts.drain(..).map(|part| part.slot).collect(),
            behind: StreamPoint::new(Arc::clone(&comm.stream), ordering_event),
            comm: KeepAlive::new(comm),
        };
        drop_queue::defer(Box::new(deferred_plan), drop_queue::TIMEOUT);
    }
}

impl<B: PlanBuffers> fmt::Debug for CapturedPlan<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CapturedPlan")
            .field("communicator", &self.comm.name())
            .field("number", &self.parts[0].slot.number)
            .field("parts", &self.parts.len())
            .field("operations", &self.operations())
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::time::Duration;

    use super::*;
    use crate::{Library, ReduceOp, UniqueId};

    type Pair = (
        cudarc::driver::CudaSlice<f32>,
        cudarc::driver::CudaSlice<f32>,
    );

    fn plan(comm: &Communicator) -> CapturedPlan<Pair> {
        let memory = || comm.stream().alloc_zeros::<f32>(8).expect("memory");
        comm.capture((memory(), memory()), |capture, (x, y)| {
            capture.group(|group| group.all_reduce(&x, y, ReduceOp::Sum))
        })
        .expect("a plan")
    }

    /// A communicator whose ranks do not tell each other about aborts.
    fn communicator(id: UniqueId, rank: usize) -> Communicator {
        let device = crate::device(rank).expect("a device");
        Communicator::builder("held", id, rank, 2)
            .stream(&device.new_stream().expect("a stream"))
            .with(|comm| comm.timeouts.abort = Duration::from_millis(300))
            .build()
            .expect("a communicator")
    }

    #[test]
    fn an_abort_that_does_not_come_back_names_the_plan_that_holds_it() {
        nccl_emulator::install_unless_gpu().expect("an emulator or a GPU");
        let library = Library::load().expect("a library");
        let id = UniqueId::new(&library).expect("a token");
        let first = Barrier::new(2);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let comm = communicator(id, 1);
                let _plans = (plan(&comm), plan(&comm));
                // Of the ranks of a process, the last one to abort waits for the graphs.
                comm.abort("first").expect("an abort that only counts");
                first.wait();
            });
            let comm = communicator(id, 0);
            let (free, held) = (plan(&comm), plan(&comm));
            first.wait();
            // As in a launch that does not return.
            let slot = Arc::clone(&held.parts[0].slot);
            let launching = slot.graph.lock();
            let begun = Instant::now();
            let error = comm.abort("on purpose").expect_err("it is held");
            assert!(begun.elapsed() < Duration::from_secs(5));
            assert!(
                error.to_string().contains("the graph of plan 2,"),
                "{error}"
            );
            drop(launching);
            drop(free);
            // Buffers that NCCL may still use are not returned.
            let error = held.into_buffers().expect_err("the communicator is leaked");
            assert!(matches!(error.kind(), ErrorKind::Aborted { .. }), "{error}");
        });
    }
}
