//! The experts of the ranks of a communicator, and the common part of dispatch and combine.

use std::fmt;
use std::sync::Arc;

use cudarc::driver::sys::CUdeviceptr;
use cudarc::driver::{CudaSlice, CudaStream, DevicePtr};

use super::kernels::Kernels;
use super::layout::{DispatchWay, Layout, Sizes};
use super::placement::ExpertPlacement;
use crate::communicator::Communicator;
use crate::cuda_driver;
use crate::dtype::DataType;
use crate::error::{Error, ErrorKind, Result};
use crate::forked::ForkGuarded;
use crate::issuing::IssueBuffers;
use crate::op::Function;
use crate::operation::{OperationKind, Shape};
use crate::queued_op::QueuedOp;

/// The experts of a mixture, distributed over the ranks of a communicator: in blocks, with expert `e` of `experts` on
/// rank `e / (experts / ranks)`, or by an [`ExpertPlacement`], with copies of experts.
///
/// A step is three calls, each of which only enqueues work on the communicator's stream: [`route`](Self::route) assigns
/// a row to each choice of a token, [`dispatch`](Self::dispatch) sends the rows of the tokens to their experts, and
/// [`combine`](Self::combine) returns the experts' results, weighted and added up. A [`Routing`](super::Routing) can be
/// used for any number of dispatches and combines, and several can be in use at once.
///
/// Every rank calls the same operations in the same order, even a rank without tokens. Rows are sent whether or not
/// they are filled: a buffer of received rows has [`rows`](Self::rows) rows, in the order of the
/// [`ExpertLayout`](super::ExpertLayout); rows without a token are zeros.
///
/// Operations on captured streams are refused; [`capture`](Self::capture) records them in a plan instead.
/// The kernels have not run on a GPU yet: see the page on expert parallelism.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # nccl_emulator::install_unless_gpu()?;
/// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
/// # let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
/// use nccl::moe::ExpertParallel;
///
/// let (experts, width) = (4, 2);
/// let mut ep = ExpertParallel::builder(&comm)
///     .with(|ep| {
///         ep.experts = experts;
///         ep.top_k = 2;
///         ep.max_tokens = 3;
///         ep.max_row_bytes = width * size_of::<f32>();
///     })
///     .build()?;
/// let mut routing = ep.routing()?;
///
/// // Two tokens: the first goes to experts 3 and 1, the second to expert 3 alone.
/// let topk = stream.clone_htod(&[3i32, 1, 3, -1])?;
/// let weights = stream.clone_htod(&[0.75f32, 0.25, 1.0, 0.0])?;
/// let x = stream.clone_htod(&[1.0f32, 2.0, 10.0, 20.0])?;
/// let mut y = stream.alloc_zeros::<f32>(ep.rows() * width)?;
/// let mut out = stream.alloc_zeros::<f32>(2 * width)?;
///
/// ep.route(&topk, &mut routing)?;
/// ep.dispatch(&routing, &x, &mut y)?;
/// // … the experts work on `y` here …
/// ep.combine(&routing, &y, &weights, &mut out)?.wait()?;
///
/// assert_eq!(stream.clone_dtoh(&out)?, [1.0, 2.0, 10.0, 20.0]);
/// assert_eq!(routing.counts()?.sent, [0, 1, 0, 2]); // waits, and says if an expert was full
/// # Ok(())
/// # }
/// ```
pub struct ExpertParallel {
    pub(super) comm: Communicator,
    pub(super) sizes: Sizes,
    pub(super) placement: Arc<ExpertPlacement>,
    /// Plans that contain operations keep this as well.
    pub(super) device: Arc<OnDevice>,
    /// The stream for copies to the host, which wait for no other work.
    pub(super) copies: ForkGuarded<Arc<CudaStream>>,
    /// Identifies the routings made for this value.
    pub(super) number: u64,
}

/// What the operations use on the device, beside the program's buffers.
pub(super) struct OnDevice {
    pub(super) kernels: Kernels,
    /// The placement for the kernel, unless the experts are in blocks.
    pub(super) table: Option<Owned<i32>>,
    /// Rows in the order of their experts, sent by a dispatch and received by a combine; or the tokens of all ranks, gathered
    /// by a dispatch.
    pub(super) staging: Owned<u8>,
}

/// Memory that no other code uses, and only on its own stream, that of the communicator.
pub(super) struct Owned<T> {
    pub(super) address: CUdeviceptr,
    _memory: ForkGuarded<CudaSlice<T>>,
}

impl<T> Owned<T> {
    pub(super) fn new(memory: CudaSlice<T>) -> Self {
        let stream = Arc::clone(memory.stream());
        let context = stream.context();
        let (address, guard) =
            cuda_driver::ignoring_stored_error(context, || memory.device_ptr(&stream));
        // The stream orders all accesses.
        std::mem::forget(guard);
        Self {
            address,
            _memory: ForkGuarded::new(memory),
        }
    }
}

impl ExpertParallel {
    /// Returns the communicator whose ranks have the experts.
    ///
    /// ```
    /// # fn example(ep: &nccl::moe::ExpertParallel) {
    /// println!("{} ranks", ep.communicator().world_size());
    /// # }
    /// ```
    #[must_use]
    pub fn communicator(&self) -> &Communicator {
        &self.comm
    }

    /// Returns the number of experts, of all ranks together, each counted once.
    ///
    /// ```
    /// # fn example(ep: &nccl::moe::ExpertParallel) {
    /// println!("{} experts on {} ranks", ep.experts(), ep.communicator().world_size());
    /// # }
    /// ```
    #[must_use]
    pub fn experts(&self) -> usize {
        self.sizes.experts
    }

    /// Returns the number of experts of each rank; with a placement, the number of its places, some of which may be empty.
    ///
    /// ```
    /// # fn example(ep: &nccl::moe::ExpertParallel) {
    /// let first = ep.communicator().rank() * ep.own_experts();
    /// println!("experts {first} to {} are here", first + ep.own_experts() - 1); // without a placement
    /// # }
    /// ```
    #[must_use]
    pub fn own_experts(&self) -> usize {
        self.sizes.own
    }

    /// Returns which experts each rank has.
    ///
    /// ```
    /// # fn example(ep: &nccl::moe::ExpertParallel) {
    /// for (place, expert) in ep.placement().held_by(ep.communicator().rank()) {
    ///     println!("expert {expert} is here, at place {place}");
    /// }
    /// # }
    /// ```
    #[must_use]
    pub fn placement(&self) -> &ExpertPlacement {
        &self.placement
    }

    /// Returns the number of rows of the received rows, and of the results of experts: `capacity` for each place of each
    /// rank.
    ///
    /// ```
    /// # fn example(ep: &nccl::moe::ExpertParallel) {
    /// let places = ep.communicator().world_size() * ep.own_experts();
    /// assert_eq!(ep.rows(), places * ep.capacity());
    /// # }
    /// ```
    #[must_use]
    pub fn rows(&self) -> usize {
        self.sizes.rows()
    }

    /// Returns the number of rows for each pair of a rank and a copy of an expert.
    ///
    /// ```
    /// # fn example(ep: &nccl::moe::ExpertParallel) {
    /// println!("room for {} tokens of each rank", ep.capacity());
    /// # }
    /// ```
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.sizes.capacity
    }

    /// Returns the order of the rows that are received.
    ///
    /// ```
    /// # fn example(ep: &nccl::moe::ExpertParallel) {
    /// if ep.layout() == nccl::moe::ExpertLayout::ExpertMajor { println!("ready for a grouped GEMM") }
    /// # }
    /// ```
    #[must_use]
    pub fn layout(&self) -> Layout {
        self.sizes.layout
    }

    /// Returns how rows are dispatched.
    ///
    /// ```
    /// # fn example(ep: &nccl::moe::ExpertParallel) {
    /// if ep.way() == nccl::moe::DispatchWay::AllGather { println!("all tokens are on all ranks") }
    /// # }
    /// ```
    #[must_use]
    pub fn way(&self) -> DispatchWay {
        self.sizes.way
    }

    /// Adds the messages between the rows at `by_expert`, in the order of their experts, and the rows at `by_layout`,
    /// in the order of the layout, to the buffers' operations.
    pub(super) fn exchange(
        &self,
        buffers: &mut IssueBuffers<'_>,
        (by_expert, by_layout): (CUdeviceptr, CUdeviceptr),
        (width, data_type): (usize, DataType),
        direction: Direction,
    ) {
        let row_bytes = (width * data_type.size_in_bytes().unwrap_or_default()) as u64;
        let (outwards, inwards) = match direction {
            Direction::ToExperts => (Function::Send, Function::Recv),
            Direction::FromExperts => (Function::Recv, Function::Send),
        };
        let own = self.comm.rank();
        for message in self.sizes.messages() {
            let mut push = |function, start: u64, rows: usize| {
                let (address, count) = (start + rows as u64 * row_bytes, message.rows * width);
                // Fits: the number of ranks was checked when the communicator was made.
                let peer = message.peer as i32;
                let one = QueuedOp::new(function, address, count, data_type, peer);
                buffers.push_message(one, message.peer == own);
            };
            push(outwards, by_expert, message.by_expert);
            push(inwards, by_layout, message.by_layout);
        }
        buffers.grouped = true;
    }

    /// Launches kernels on the stream, between the joins with the streams of the buffers.
    pub(super) fn launch_joined(
        &self,
        buffers: &IssueBuffers<'_>,
        kind: OperationKind,
        shape: Shape,
        launch: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let inner = &self.comm.inner;
        let started = std::time::Instant::now();
        let describe = || inner.operation(kind, shape, None, started);
        inner.compute(buffers, kind, self.comm.timeout, describe, launch)
    }
}

/// The direction of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    ToExperts,
    FromExperts,
}

/// Returns an error about a buffer's length.
pub(super) fn length<T>(
    buffer: &'static str,
    given: usize,
    needed: usize,
    rule: &'static str,
) -> Result<T> {
    Err(Error::new(ErrorKind::Length {
        buffer,
        given,
        needed,
        rule,
    }))
}

impl fmt::Debug for ExpertParallel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ExpertParallel")
            .field("communicator", &self.comm.name())
            .field("experts", &self.sizes.experts)
            .field("top_k", &self.sizes.top_k)
            .field("capacity", &self.sizes.capacity)
            .field("layout", &self.sizes.layout)
            .field("way", &self.sizes.way)
            .finish_non_exhaustive()
    }
}
