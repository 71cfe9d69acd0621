//! The contents of a plan, before it is captured.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::{CudaStream, DriverError};

use crate::communicator::Communicator;
use crate::error::{Error, Result};
use crate::group::Group;
use crate::issuing::{DeviceCopy, IssueBuffers, Step};
use crate::queued_op::{Batch, CollectiveArgs, QueuedOp};
use crate::reduce::Operator;
use crate::sync::Mutex;

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
    /// Never empty; each becomes a graph.
    parts: Vec<Vec<Captured>>,
}

/// Puts work other than NCCL's on the capturing stream. It owns what the work uses beside the plan's buffers, and so is kept
/// until the last replay is over.
type KernelLaunch = Box<dyn Fn(&Arc<CudaStream>) -> Result<()> + Send>;

/// What is kept for the kernels of a plan.
pub(super) struct Held {
    launches: Mutex<Vec<KernelLaunch>>,
}

impl Held {
    pub(super) fn is_empty(&self) -> bool {
        self.launches.lock().is_empty()
    }

    pub(super) fn of(parts: Vec<Vec<Captured>>) -> Self {
        let captured = parts.into_iter().flatten();
        let launches = captured.filter_map(|captured| match captured {
            Captured::Kernel(launch) => Some(launch),
            Captured::Group(_) => None,
        });
        Self {
            // Makes the value `Sync`.
            launches: Mutex::new(launches.collect()),
        }
    }
}

/// What is put on the capturing stream at once.
pub(crate) enum Captured {
    Group(CapturedGroup),
    Kernel(KernelLaunch),
}

/// A group, and the copies before it, ready to be issued.
pub(crate) struct CapturedGroup {
    copies: Vec<DeviceCopy>,
    recorded: Vec<QueuedOp>,
    collective_args: Vec<CollectiveArgs>,
    grouped: bool,
    /// The operators of the reductions, kept until they are issued.
    _operators: Vec<Arc<Operator>>,
}

impl Captured {
    pub(super) fn queued(&self) -> &[QueuedOp] {
        match self {
            Self::Group(group) => &group.recorded,
            Self::Kernel(_) => &[],
        }
    }
}

impl CapturedGroup {
    fn of(batch: Batch<'_>, copies: &[DeviceCopy], operators: Vec<Arc<Operator>>) -> Self {
        Self {
            copies: copies.to_vec(),
            recorded: batch.queued.to_vec(),
            collective_args: batch.collective_args.to_vec(),
            grouped: batch.grouped,
            _operators: operators,
        }
    }

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
            parts: vec![Vec::new()],
        }
    }

    pub(super) fn finish(self) -> Vec<Vec<Captured>> {
        self.parts
    }

    fn push(&mut self, captured: Captured) {
        match self.parts.last_mut() {
            Some(part) => part.push(captured),
            None => unreachable!("there is a part from the beginning"),
        }
    }

    /// Begins another part of the plan, which [`CapturedPlan::launch_part`](super::CapturedPlan::launch_part) launches
    /// on its own: between two parts, the program works on the buffers with its own kernels.
    ///
    /// All ranks divide their operations in the same way.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// # let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
    /// # use nccl::ReduceOp;
    /// let activations = stream.alloc_zeros::<f32>(4096)?;
    /// let mut layer = comm.capture(activations, |capture, mut y| {
    ///     capture.group(|group| group.all_reduce_in_place(&mut y, ReduceOp::Sum))?; // behind the attention
    ///     capture.next_part();
    ///     capture.group(|group| group.all_reduce_in_place(&mut y, ReduceOp::Sum)) // behind the feed-forward network
    /// })?;
    /// // … kernels of the attention, on `layer.views_mut()` …
    /// layer.launch_part(0)?;
    /// // … kernels of the feed-forward network …
    /// layer.launch_part(1)?.wait()?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn next_part(&mut self) {
        self.parts.push(Vec::new());
    }

    /// Adds work of the program itself, after the groups before it: kernels, copies, calls of cuBLAS.
    ///
    /// `launch` puts the work on the stream that it gets. It is called once, while the stream is capturing. It is dropped when
    /// the last replay of the plan is over, on a thread of this library that frees other memory as well: its drop does not
    /// wait. It owns no communicator and nothing that keeps one, such as another plan, because a communicator whose last
    /// other handle is dropped could then not be ended.
    ///
    /// # Safety
    /// Each replay does the work again. So everything that the work uses is the memory of the plan's buffers, or is owned by
    /// `launch`, or is never released: other memory, modules of kernels, handles and workspaces of libraries. `launch` uses
    /// buffers by their addresses: cudarc's own calls with them wait for events from outside of the capture, which ends it.
    /// It neither ends the capture nor waits for the stream nor changes the current context.
    ///
    /// # Errors
    /// None here; an error or a panic of `launch` ends [`Communicator::capture`], and the communicator is aborted. A call of
    /// the communicator in `launch` waits for the capture, which waits for `launch`: until its timeout.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// # let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
    /// use cudarc::driver::{DevicePtrMut, result};
    ///
    /// let mut sums = stream.clone_htod(&[1.0f32; 8])?;
    /// let address = sums.device_ptr_mut(&stream).0;
    /// let mut plan = comm.capture(sums, |capture, y| {
    ///     // SAFETY: the memory of the plan's buffer, by its address.
    ///     unsafe {
    ///         capture.launch(move |stream| result::memset_d8_async(address, 0, 32, stream.cu_stream()));
    ///     }
    ///     capture.group(|group| group.all_reduce_in_place(y, nccl::ReduceOp::Sum))
    /// })?;
    /// plan.launch()?.wait()?;
    /// assert_eq!(stream.clone_dtoh(&plan.views())?, [0.0; 8]);
    /// # Ok(())
    /// # }
    /// ```
    pub unsafe fn launch(
        &mut self,
        launch: impl Fn(&Arc<CudaStream>) -> std::result::Result<(), DriverError> + Send + 'static,
    ) {
        let what = "capturing work of the program (`Capture::launch`)";
        let launch = move |stream: &Arc<CudaStream>| launch(stream).map_err(Error::cuda(what));
        // SAFETY: the caller's promise.
        unsafe { self.add_kernel(launch) };
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
            self.push(Captured::Group(CapturedGroup::of(batch, &[], operators)));
        }
        Ok(())
    }

    /// The communicator, with the configuration of the plan's collectives.
    #[doc(hidden)]
    pub fn comm(&self) -> &'p Communicator {
        self.comm
    }

    /// Buffers that accept only memory of the plan.
    #[doc(hidden)]
    pub fn buffers<'a>(&self) -> IssueBuffers<'a>
    where
        'p: 'a,
    {
        IssueBuffers::empty(self.comm.stream(), Some(self.owned))
    }

    /// Adds the steps of the buffers from [`buffers`](Self::buffers).
    #[doc(hidden)]
    pub fn add_steps(&mut self, buffers: &IssueBuffers<'_>) {
        let group = |batch, copies| Captured::Group(CapturedGroup::of(batch, copies, Vec::new()));
        match buffers.has_steps() {
            true => buffers
                .steps()
                .for_each(|step| self.push(group(step.batch, step.copies))),
            false if buffers.batch().queued.is_empty() => {}
            false => self.push(group(buffers.batch(), &[])),
        }
    }

    /// Adds work behind that of earlier calls.
    ///
    /// # Safety
    /// As [`launch`](Self::launch).
    #[doc(hidden)]
    pub unsafe fn add_kernel(
        &mut self,
        launch: impl Fn(&Arc<CudaStream>) -> Result<()> + Send + 'static,
    ) {
        self.push(Captured::Kernel(Box::new(launch)));
    }
}

impl fmt::Debug for Capture<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let groups: Vec<_> = self.parts.iter().map(Vec::len).collect();
        f.debug_struct("Capture")
            .field("groups", &groups)
            .finish_non_exhaustive()
    }
}
