//! A plan that was captured: its launches, its buffers, its end.

use std::fmt;
use std::mem::ManuallyDrop;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use cudarc::driver::CudaEvent;

use super::agree;
use super::graph::Slot;
use super::record::{Capture, Captured};
use crate::communicator::{
    Backoff, Communicator, Frame, Kept, NotLaunched, State, admit_buffer, lock,
};
use crate::error::{Error, ErrorKind, Result};
use crate::memory::PlanBuffers;
use crate::operation::{OperationKind, Shape};
use crate::reaper::{self, Behind, Remains, Turn};
use crate::rendezvous::{Broken, Ended};
use crate::request::Request;
use crate::stats::Volume;
use crate::supervision::inside::{self, Place};
use crate::time::deadline_after;

/// Operations on buffers of their own, captured into a CUDA graph: a launch costs one call for all of
/// them, and no thread of NCCL's.
///
/// The plan owns its buffers. Between launches they are read and written through
/// [`views`](Self::views) and [`views_mut`](Self::views_mut), ordered by their streams like any other
/// memory: work that was put on a buffer's stream before a launch is over when the replay begins, and
/// work that is put there afterwards begins when the replay is over.
///
/// Every rank has to capture the same operations and to launch its plan as often and in the same
/// order. The plan keeps its communicator: finalizing or aborting that destroys the graph first, and
/// later launches fail. Dropping the plan never waits: what a replay still uses is freed when it is
/// over, in the background.
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
    buffers: ManuallyDrop<B>,
    slot: Arc<Slot>,
    comm: ManuallyDrop<Communicator>,
    operations: usize,
    /// What a launch counts.
    volume: Volume,
    /// Joins the streams of the buffers with that of the launch.
    join: ManuallyDrop<CudaEvent>,
    /// Bounds the replays that are on their way.
    pace: ManuallyDrop<Pace>,
}

/// CUDA lets a launch wait, without a limit, while too many are on their way. So a plan looks at an
/// event now and then, with a limit.
struct Pace {
    launches: u64,
    /// Recorded behind launches, in turn.
    marks: [CudaEvent; 2],
}

/// Launches between two events.
const STRIDE: u64 = 64;

impl Communicator {
    /// Captures operations into a plan that can be launched again and again.
    ///
    /// `record` is called first, with a view of each buffer, and says what to do with them; it runs
    /// before anything is captured, so it may do whatever it likes. Only buffers that are given away
    /// here can be used: the plan owns them from then on. Every rank has to capture at the same time,
    /// because NCCL connects the ranks while it captures. Of an error the buffers do not come back.
    ///
    /// The plan is launched on the stream of this communicator.
    ///
    /// # Errors
    /// What `record` returns; [`ErrorKind::NotInPlan`] for foreign buffers; and as any operation.
    ///
    /// The ranks of a [`World`](crate::World)'s communicator compare what they recorded before NCCL is asked
    /// for anything: [`ErrorKind::CaptureDiffers`] says the same on all of them, who has what;
    /// [`ErrorKind::TimedOut`] names ranks that did not come. The communicator is as good as before then. When
    /// NCCL or CUDA fails, or not everything is captured within the communicator's limit for operations,
    /// the communicator is aborted: the other ranks have captured what this one has not.
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
        let started = Instant::now();
        let span = tracing::info_span!(
            target: "nccl",
            "nccl.capture",
            comm = self.name(),
            rank = self.rank(),
            nranks = self.world_size()
        );
        let _entered = span.enter();
        self.make_plan(buffers, record, started).map_err(|error| {
            self.inner.conclude(error).during(|| {
                self.inner
                    .operation(OperationKind::Capture, Shape::default(), None, started)
            })
        })
    }

    fn make_plan<B: PlanBuffers>(
        &self,
        mut buffers: B,
        record: impl for<'p> FnOnce(&mut Capture<'p>, B::ViewsMut<'p>) -> Result<()>,
        started: Instant,
    ) -> Result<CapturedPlan<B>> {
        let recorded = self.record_plan(&mut buffers, record);
        let number = self.inner.plans.next();
        self.compare_captures(number, &recorded, started)?;
        let Drafted {
            groups,
            join,
            marks,
        } = recorded?;
        // From here on NCCL knows addresses; whether it has let go of them decides who keeps the buffers.
        let buffers = ManuallyDrop::new(buffers);
        let recorded = || groups.iter().flat_map(|group| group.batch().recorded);
        let mut volume = Volume::default();
        recorded().for_each(|one| one.add_to(&mut volume));
        match self.inner.capture(number, &groups, started, self.limit) {
            Ok(slot) => Ok(CapturedPlan {
                buffers,
                slot,
                comm: ManuallyDrop::new(self.clone()),
                operations: recorded().count(),
                volume,
                join: ManuallyDrop::new(join),
                pace: ManuallyDrop::new(Pace { launches: 0, marks }),
            }),
            Err(error) => {
                let stream = self.inner.own_stream();
                let attempt = Remnant {
                    buffers,
                    slot: None,
                    comm: Kept::new(self.clone()),
                    behind: Behind::new(Arc::clone(stream), join),
                };
                reaper::take(Box::new(attempt), reaper::LIMIT);
                Err(error)
            }
        }
    }

    /// Everything before NCCL is asked.
    fn record_plan<B: PlanBuffers>(
        &self,
        buffers: &mut B,
        record: impl for<'p> FnOnce(&mut Capture<'p>, B::ViewsMut<'p>) -> Result<()>,
    ) -> Result<Drafted> {
        let context = &self.inner.context;
        let event = || {
            context
                .new_event(None)
                .map_err(Error::cuda("creating an event (cuEventCreate)"))
        };
        let (join, marks) = (event()?, [event()?, event()?]);
        let mut owned: Vec<Range<u64>> = Vec::new();
        buffers.visit(&mut |buffer| {
            admit_buffer(buffer.stream(), context)?;
            owned.push(buffer.range());
            Ok(())
        })?;
        let mut capture = Capture::new(self, &owned);
        record(&mut capture, buffers.views_mut())?;
        Ok(Drafted {
            groups: capture.finish(),
            join,
            marks,
        })
    }

    /// Compares it with what the other ranks are about to capture, where they can be asked. Nothing has been
    /// captured by then, so that a difference leaves the communicator as it is.
    fn compare_captures(
        &self,
        number: u64,
        drafted: &Result<Drafted>,
        started: Instant,
    ) -> Result<()> {
        let inner = &self.inner;
        let Some(board) = &inner.board else {
            return Ok(());
        };
        let entries = drafted
            .as_ref()
            .map(|drafted| agree::entries(&drafted.groups));
        let given = match &entries {
            Ok(entries) => agree::digest(Ok(entries)),
            Err(error) => agree::digest(Err(error.kind().to_string())),
        };
        let name = |rank: usize| board.name_of(rank);
        let interrupted = || inner.interrupted();
        let gather = |topic: &str, part: &[u8]| {
            let left = self.limit.saturating_sub(started.elapsed());
            match board.gather(topic, part, left, &interrupted) {
                Ended::All(parts) => Ok(Some(parts)),
                Ended::Missing(missing) => {
                    let missing: Vec<_> = missing
                        .iter()
                        .map(|&rank| name(board.place_of(rank)))
                        .collect();
                    Err(Error::new(ErrorKind::TimedOut {
                        what: format!(
                            "the capture of plan {number}, to which {} did not come,",
                            missing.join(", ")
                        ),
                        limit: self.limit,
                    }))
                }
                Ended::Unheard if interrupted() => Err(inner.out_of_use()),
                // Nobody can be asked any more, and what that means for the communicator is told elsewhere.
                Ended::Unheard => Ok(None),
            }
        };
        let broken = |broken: Broken| Error::rendezvous(broken.0);
        let differ = |difference| {
            let plan = number;
            Err(Error::new(ErrorKind::CaptureDiffers { plan, difference }))
        };
        let Some(digests) = gather(&format!("plan/{number}"), &given)? else {
            return Ok(());
        };
        match agree::compare(&digests).map_err(broken)? {
            agree::Compared::Same => Ok(()),
            // What is wrong here is the better answer on this rank.
            agree::Compared::Failed(..) if drafted.is_err() => Ok(()),
            agree::Compared::Failed(rank, reason) => {
                differ(format!("{} captured nothing, because {reason}", name(rank)))
            }
            agree::Compared::Gone(_) if interrupted() => Err(inner.out_of_use()),
            agree::Compared::Gone(rank) => Err(Error::new(ErrorKind::Aborted {
                reason: format!("{} is gone", name(rank)),
            })),
            agree::Compared::Different => {
                let told = agree::encode(entries.as_deref().unwrap_or_default());
                let Some(lists) = gather(&format!("plan/{number}/all"), &told)? else {
                    return differ(String::from(
                        "the line to the other ranks is lost, so that nobody can say in what",
                    ));
                };
                let lists = lists.iter().map(|list| agree::decode(list));
                let lists: Vec<_> = lists.collect::<Result<_, _>>().map_err(broken)?;
                differ(agree::difference(&lists, name))
            }
        }
    }
}

/// A plan before NCCL is asked.
struct Drafted {
    groups: Vec<Captured>,
    /// As in the plan.
    join: CudaEvent,
    marks: [CudaEvent; 2],
}

impl<B: PlanBuffers> CapturedPlan<B> {
    /// Replays the operations, on the stream of the communicator that captured them.
    ///
    /// # Errors
    /// [`ErrorKind::Aborted`] and [`ErrorKind::Closed`] when the communicator has ended,
    /// [`ErrorKind::Stream`] when a stream is capturing, [`ErrorKind::TimedOut`] when too many replays
    /// are on their way and none ends within the limit for operations; [`ErrorKind::Cuda`] when CUDA
    /// refuses. In the last two cases the communicator is aborted.
    ///
    /// Wraps `cuGraphLaunch`.
    ///
    /// ```
    /// # fn example(plan: &mut nccl::CapturedPlan<nccl::Buffer<f32>>) -> nccl::Result<()> {
    /// let done = plan.launch()?;
    /// done.wait()?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn launch(&mut self) -> Result<Request> {
        let started = Instant::now();
        const KIND: OperationKind = OperationKind::Replay;
        let comm = &*self.comm;
        let launched = self.pace.keep(comm, self.slot.number).and_then(|()| {
            let mut frame = Frame::new(&comm.stream)?;
            self.buffers
                .visit(&mut |buffer| frame.write(buffer).map(drop))?;
            // The first launch was counted when it was captured.
            let volume = (self.pace.launches > 0).then_some(&self.volume);
            let (join, limit) = (&self.join, comm.limit);
            comm.inner
                .replay(&frame, join, volume, limit, self.slot.number, |inner| {
                    let graph = lock(&self.slot.graph);
                    // Under this lock: the communicator cannot end before the graph does.
                    match graph.as_ref() {
                        Some(graph) if inner.phase.get() == State::Ready => {
                            graph.launch(&comm.stream).map_err(NotLaunched::Failed)
                        }
                        _ => Err(NotLaunched::Refused(inner.out_of_use())),
                    }
                })
        });
        match launched {
            Ok(sequence) => {
                self.pace.mark(comm);
                Ok(Request::new(
                    comm,
                    KIND,
                    Shape::default(),
                    sequence,
                    started,
                    false,
                ))
            }
            Err(error) => Err(comm
                .inner
                .conclude(error)
                .during(|| comm.inner.replay_of(self.slot.number, started))),
        }
    }

    /// The buffers, to read between launches: a view for each, as they were given.
    ///
    /// ```
    /// # fn example(plan: &nccl::CapturedPlan<(nccl::Buffer<f32>, nccl::Buffer<f32>)>,
    /// #     stream: &std::sync::Arc<nccl::cudarc::driver::CudaStream>) -> Result<(), nccl::cudarc::driver::DriverError> {
    /// let (_, y) = plan.views();
    /// let host: Vec<f32> = stream.clone_dtoh(&y)?;
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn views(&self) -> B::Views<'_> {
        self.buffers.views()
    }

    /// The buffers, to write between launches: a view for each, as they were given.
    ///
    /// ```
    /// # fn example(plan: &mut nccl::CapturedPlan<(nccl::Buffer<f32>, nccl::Buffer<f32>)>,
    /// #     stream: &std::sync::Arc<nccl::cudarc::driver::CudaStream>) -> Result<(), nccl::cudarc::driver::DriverError> {
    /// let (mut x, _) = plan.views_mut();
    /// stream.memset_zeros(&mut x)?;
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn views_mut(&mut self) -> B::ViewsMut<'_> {
        self.buffers.views_mut()
    }

    /// How many operations a launch replays.
    ///
    /// ```
    /// # fn example(plan: &nccl::CapturedPlan<nccl::Buffer<f32>>) {
    /// println!("{} operations in one launch", plan.operations());
    /// # }
    /// ```
    #[must_use]
    pub fn operations(&self) -> usize {
        self.operations
    }

    /// Ends the plan and gives the buffers back. Replays that are on their way go on, and the streams of
    /// the buffers wait for them.
    ///
    /// # Errors
    /// [`ErrorKind::Aborted`] when the communicator was leaked: NCCL may still use the buffers, so they
    /// stay where they are.
    ///
    /// ```
    /// # fn example(plan: nccl::CapturedPlan<nccl::Buffer<f32>>) -> nccl::Result<()> {
    /// let buffer = plan.into_buffers()?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn into_buffers(self) -> Result<B> {
        let mut plan = ManuallyDrop::new(self);
        // SAFETY: each is taken once, because `plan` is never dropped.
        let (buffers, comm) = unsafe {
            (
                ManuallyDrop::take(&mut plan.buffers),
                ManuallyDrop::take(&mut plan.comm),
            )
        };
        // SAFETY: likewise; these are dropped here.
        unsafe {
            ManuallyDrop::drop(&mut plan.join);
            ManuallyDrop::drop(&mut plan.pace);
        }
        // SAFETY: likewise.
        let slot = unsafe { std::ptr::read(&raw const plan.slot) };
        // SAFETY: likewise.
        drop(unsafe { std::ptr::read(&raw const plan.volume) });
        {
            let _inside = inside::enter(&comm.inner, Place::Replay, comm.limit);
            comm.inner.plans.destroy(&slot);
        }
        if comm.inner.phase.get() == State::Aborting {
            // Other ranks may still write into them.
            comm.inner.wait_for_the_end();
        }
        if comm.inner.phase.get() == State::Leaked {
            std::mem::forget(buffers);
            return Err(comm.inner.conclude(comm.inner.out_of_use()));
        }
        Ok(buffers)
    }
}

impl Pace {
    /// Before a launch: waits until enough of those before are over.
    fn keep(&self, comm: &Communicator, plan: u64) -> Result<()> {
        if self.launches == 0 || !self.launches.is_multiple_of(STRIDE) {
            return Ok(());
        }
        let deadline = deadline_after(comm.limit);
        let mut backoff = Backoff::new();
        // The older of the two, which is about to be recorded again; never recorded at first.
        let mark = &self.marks[(self.launches / STRIDE % 2) as usize];
        reaper::bind(mark.context());
        let is_over = || {
            let _inside = inside::enter(&comm.inner, Place::Look, comm.limit);
            mark.try_is_complete().map_err(Error::cuda(
                "asking whether earlier launches are done (cuEventQuery)",
            ))
        };
        while !is_over()? {
            if comm.inner.interrupted() {
                return Err(comm.inner.out_of_use());
            }
            if Instant::now() >= deadline {
                let error = Error::new(ErrorKind::TimedOut {
                    what: format!("one of {} launches of plan {plan}", 2 * STRIDE),
                    limit: comm.limit,
                });
                let now = Instant::now();
                let error = error.during(|| comm.inner.replay_of(plan, now));
                comm.inner.abort(&error);
                return Err(error);
            }
            backoff.pause();
        }
        Ok(())
    }

    /// After a launch.
    fn mark(&mut self, comm: &Communicator) {
        if self.launches > 0 && self.launches.is_multiple_of(STRIDE) {
            let mark = &self.marks[(self.launches / STRIDE % 2) as usize];
            if let Err(error) = mark.record(&comm.stream) {
                tracing::warn!(name: "nccl.internal", target: "nccl", what = "launch", %error, "an event behind a launch was not recorded");
            }
        }
        self.launches += 1;
    }
}

/// What is left of a plan, or of the attempt to make one. Dropping it leaks the buffers.
struct Remnant<B: PlanBuffers> {
    buffers: ManuallyDrop<B>,
    slot: Option<Arc<Slot>>,
    comm: Kept,
    behind: Behind,
}

impl<B: PlanBuffers> Remains for Remnant<B> {
    fn poll(&mut self) -> Turn {
        match self.comm.inner.phase.get() {
            // NCCL may still use the buffers.
            State::Leaked => Turn::Never,
            // It may put work on its stream until it is over.
            State::Aborting => Turn::Wait,
            _ if self.behind.is_over() => Turn::Over,
            _ => {
                self.comm.watch();
                Turn::Wait
            }
        }
    }

    fn release(self: Box<Self>) {
        let Self {
            buffers,
            slot,
            comm,
            behind,
        } = *self;
        if let Some(slot) = &slot {
            comm.inner.plans.destroy(slot);
        }
        drop(behind);
        drop(ManuallyDrop::into_inner(buffers));
    }

    fn describe(&self) -> String {
        match &self.slot {
            Some(slot) => format!(
                "the buffers of plan {} of communicator {:?}",
                slot.number,
                self.comm.name()
            ),
            None => format!(
                "the buffers of a failed capture on communicator {:?}",
                self.comm.name()
            ),
        }
    }
}

impl<B: PlanBuffers> Drop for CapturedPlan<B> {
    /// Never waits; see the type.
    fn drop(&mut self) {
        if reaper::is_closed() {
            return;
        }
        // SAFETY: each is taken or dropped once, here.
        let (buffers, comm, join) = unsafe {
            ManuallyDrop::drop(&mut self.pace);
            (
                ManuallyDrop::take(&mut self.buffers),
                ManuallyDrop::take(&mut self.comm),
                ManuallyDrop::take(&mut self.join),
            )
        };
        let remnant = Remnant {
            buffers: ManuallyDrop::new(buffers),
            slot: Some(Arc::clone(&self.slot)),
            behind: Behind::new(Arc::clone(&comm.stream), join),
            comm: Kept::new(comm),
        };
        reaper::take(Box::new(remnant), reaper::LIMIT);
    }
}

impl<B: PlanBuffers> fmt::Debug for CapturedPlan<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CapturedPlan")
            .field("communicator", &self.comm.name())
            .field("number", &self.slot.number)
            .field("operations", &self.operations)
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use cudarc::driver::CudaContext;

    use super::*;
    use crate::{ReduceOp, World};

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

    /// One whose ranks do not tell each other what they abort.
    fn communicator(world: &World) -> Communicator {
        let context = CudaContext::new(world.local_rank()).expect("a device");
        let library = crate::Library::load().expect("a library");
        let id = crate::UniqueId::new(&library).expect("a token");
        let id = world.broadcast("id", 0, id.as_bytes()).expect("the token");
        let id = crate::UniqueId::from_bytes(id.try_into().expect("a token"));
        Communicator::builder("held", id, world.rank(), world.size())
            .stream(&context.new_stream().expect("a stream"))
            .abort_timeout(Duration::from_millis(300))
            .build()
            .expect("a communicator")
    }

    #[test]
    fn an_abort_that_does_not_come_back_names_the_plan_that_holds_it() {
        nccl_emulator::install_unless_gpu().expect("an emulator or a GPU");
        let worlds = World::threads(2);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let comm = communicator(&worlds[1]);
                let _plans = (plan(&comm), plan(&comm));
                // Of the ranks of a process the last one that is aborted waits for the graphs.
                comm.abort("first").expect("an abort that only counts");
                worlds[1].barrier("first").expect("rank 0");
            });
            let comm = communicator(&worlds[0]);
            let (free, held) = (plan(&comm), plan(&comm));
            worlds[0].barrier("first").expect("rank 1");
            // As a launch does that does not come back.
            let slot = Arc::clone(&held.slot);
            let launching = lock(&slot.graph);
            let begun = Instant::now();
            let error = comm.abort("on purpose").expect_err("it is held");
            assert!(begun.elapsed() < Duration::from_secs(5));
            assert!(
                error.to_string().contains("the graph of plan 2,"),
                "{error}"
            );
            drop(launching);
            drop(free);
            // What NCCL may still use does not come back.
            let error = held.into_buffers().expect_err("the communicator is leaked");
            assert!(matches!(error.kind(), ErrorKind::Aborted { .. }), "{error}");
        });
    }
}
