//! The row of each choice of a token, and the number of rows for each expert.

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use cudarc::driver::{CudaSlice, CudaStream, CudaView, DeviceRepr, ValidAsZeroBits};

use super::counts::Counts;
use super::experts::{Direction, ExpertParallel, OnDevice, length};
use super::kernels::{PlaceArgs, RouteArgs};
use super::layout::{DispatchWay, Sizes};
use super::placement::ExpertPlacement;
use crate::active_calls::CallKind;
use crate::buffer::SendBuffer;
use crate::communicator::KeepAlive;
use crate::cuda_driver;
use crate::dtype::DataType;
use crate::error::{Error, ErrorKind, Result};
use crate::forked::{self, ForkGuarded};
use crate::issuing::{IssueBuffers, failed_check, issue};
use crate::op::Function;
use crate::operation::{OperationKind, Shape};
use crate::queued_op::QueuedOp;
use nccl_core::Request;

pub(super) const KIND: OperationKind = OperationKind::Route;

pub(super) const SHAPE: Shape = Shape {
    peer: None,
    root: None,
    count: None,
    data_type: Some(DataType::UInt32),
    reduction: None,
};

/// The destinations of the tokens of one step. Made with [`ExpertParallel::routing`], filled by
/// [`ExpertParallel::route`], and used by any number of dispatches and combines until it is filled again.
///
/// A routing is in device memory; the host does not read it unless the program calls for it. It can be one of the
/// buffers of a captured plan, which then routes with [`ExpertCapture::route`](super::ExpertCapture::route). It does not
/// count as a user of the communicator: keep that, or the `ExpertParallel`, while you wait for counts.
///
/// ```
/// # fn example(ep: &nccl::moe::ExpertParallel, topk: &nccl::cudarc::driver::CudaSlice<i32>) -> nccl::Result<()> {
/// let mut routing = ep.routing()?;
/// for _layer in 0..2 {
///     ep.route(topk, &mut routing)?; // the memory is used again
/// }
/// # Ok(())
/// # }
/// ```
pub struct Routing {
    pub(super) of: u64,
    /// No operation is issued by a routing.
    comm: KeepAlive,
    sizes: Sizes,
    placement: Arc<ExpertPlacement>,
    copies: ForkGuarded<Arc<CudaStream>>,
    pub(super) memory: RoutingMemory,
    pub(super) routed: Option<Routed>,
}

pub(super) struct RoutingMemory {
    /// The place of each entry, where the experts are not in blocks.
    pub(super) placed: Option<ForkGuarded<CudaSlice<i32>>>,
    /// The slot of each entry.
    pub(super) slots: ForkGuarded<CudaSlice<i32>>,
    /// The token of each slot; with [`DispatchWay::AllGather`] among the tokens of all ranks.
    pub(super) tokens: ForkGuarded<CudaSlice<i32>>,
    /// The tokens of the rows that this rank receives, if tokens are gathered.
    pub(super) received: Option<ForkGuarded<CudaSlice<i32>>>,
    /// See [`Sizes::counts`].
    pub(super) counts: ForkGuarded<CudaSlice<u32>>,
}

#[derive(Clone, Copy)]
pub(super) struct Routed {
    pub(super) tokens: usize,
    /// The operation, and when it was issued; `None` for one in a plan, whose launches the routing does not know.
    pub(super) issued: Option<(u64, Instant)>,
}

/// The kernels of a routing.
#[derive(Clone, Copy)]
pub(super) struct RouteKernels {
    place: Option<PlaceArgs>,
    route: RouteArgs,
}

impl RouteKernels {
    /// # Safety
    /// As [`Kernels::route`](super::kernels::Kernels::route): the arguments are those of
    /// [`ExpertParallel::prepare_route`] for these sizes.
    pub(super) unsafe fn launch(
        &self,
        device: &OnDevice,
        sizes: &Sizes,
        on: &CudaStream,
    ) -> Result<()> {
        if let Some(place) = self.place.filter(|place| place.entries > 0) {
            // SAFETY: the caller's promise.
            unsafe { device.kernels.place(on, &place, sizes) }?;
        }
        // SAFETY: likewise.
        unsafe { device.kernels.route(on, &self.route, sizes) }
    }
}

impl ExpertParallel {
    /// Returns the number of routed tokens; rejects a routing of another `ExpertParallel`, and one without routed
    /// tokens.
    pub(super) fn tokens_of(&self, routing: &Routing) -> Result<usize> {
        let refuse = |reason| {
            Err(Error::new(ErrorKind::InvalidConfig {
                field: "routing",
                reason: String::from(reason),
            }))
        };
        match routing.routed {
            _ if routing.of != self.number => refuse("it was made by another `ExpertParallel`"),
            None => refuse("nothing was routed with it: call `route` first"),
            Some(routed) => Ok(routed.tokens),
        }
    }

    /// Allocates a routing, on the communicator's stream.
    ///
    /// # Errors
    /// [`ErrorKind::Cuda`] when there is not enough memory.
    ///
    /// ```
    /// # fn example(ep: &nccl::moe::ExpertParallel) -> nccl::Result<()> {
    /// let (first, second) = (ep.routing()?, ep.routing()?); // of two halves of a batch, say
    /// # Ok(())
    /// # }
    /// ```
    pub fn routing(&self) -> Result<Routing> {
        forked::check()?;
        fn zeros<T: DeviceRepr + ValidAsZeroBits>(
            stream: &Arc<CudaStream>,
            len: usize,
        ) -> Result<CudaSlice<T>> {
            let memory =
                cuda_driver::ignoring_stored_error(stream.context(), || stream.alloc_zeros(len));
            memory.map_err(Error::cuda("allocating a routing"))
        }
        let (stream, sizes) = (self.comm.stream(), self.sizes);
        let placed = match self.device.table {
            Some(_) => Some(zeros(stream, sizes.max_tokens * sizes.top_k)?),
            None => None,
        };
        let received = match sizes.way {
            DispatchWay::Rows => None,
            DispatchWay::AllGather => Some(zeros(stream, sizes.rows())?),
        };
        Ok(Routing {
            of: self.number,
            comm: KeepAlive::new(self.comm.clone()),
            sizes,
            placement: Arc::clone(&self.placement),
            copies: self.copies.clone(),
            memory: RoutingMemory {
                placed: placed.map(ForkGuarded::new),
                slots: ForkGuarded::new(zeros(stream, sizes.max_tokens * sizes.top_k)?),
                tokens: ForkGuarded::new(zeros(stream, sizes.rows())?),
                received: received.map(ForkGuarded::new),
                counts: ForkGuarded::new(zeros(stream, sizes.counts())?),
            },
            routed: None,
        })
    }

    /// Routes the tokens of this rank: `topk` holds `top_k` experts for each of them, `[token][top_k]`; any negative
    /// number means no expert. Tokens take turns among the copies of an expert.
    ///
    /// Each choice gets a row of its expert, in the order of the tokens and of the choices of a token, so that the same
    /// choices always give the same rows. Then the ranks exchange the number of their rows for each expert, in one
    /// message from each rank to each. The host does not wait: a choice that does not fit into its expert is reported
    /// by [`Routing::counts`], and by the combined result of its token, which is not a number.
    ///
    /// # Errors
    /// [`ErrorKind::Length`] when `topk` is no multiple of `top_k`, or has more tokens than `max_tokens` of the
    /// builder; [`ErrorKind::InvalidConfig`] for a routing of another `ExpertParallel`; otherwise as any operation.
    ///
    /// Wraps a kernel, and `ncclSend` and `ncclRecv` in a group.
    ///
    /// ```
    /// # fn example(ep: &nccl::moe::ExpertParallel, routing: &mut nccl::moe::Routing) -> Result<(), Box<dyn std::error::Error>> {
    /// let stream = ep.communicator().stream();
    /// let topk = stream.clone_htod(&[0i32, 2, 1, -1])?; // two tokens, the second of which goes to one expert only
    /// ep.route(&topk, routing)?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn route<'a>(
        &'a self,
        topk: impl SendBuffer<'a, Element = i32>,
        routing: &'a mut Routing,
    ) -> Result<Request> {
        let issued = Instant::now();
        let Routing {
            of, memory, routed, ..
        } = routing;
        let entries = topk.count();
        let prepared = self.check_topk(*of, entries).and_then(|()| {
            *routed = None;
            let _inside = self.comm.inner.enter(CallKind::Issue, self.comm.timeout);
            let mut buffers = IssueBuffers::new(self.comm.stream())?;
            let kernels = self.prepare_route(&mut buffers, topk, memory)?;
            Ok((buffers, kernels))
        });
        let (buffers, kernels) =
            prepared.map_err(|error| failed_check(&self.comm, KIND, SHAPE, error))?;
        self.launch_joined(&buffers, KIND, SHAPE, || {
            // SAFETY: prepared for these sizes; all buffers are leased by the operation.
            unsafe { kernels.launch(&self.device, &self.sizes, self.comm.stream()) }
        })?;
        let request = issue(&self.comm, &buffers, KIND, SHAPE)?;
        *routed = Some(Routed {
            tokens: entries / self.sizes.top_k,
            issued: Some((request.sequence(), issued)),
        });
        Ok(request)
    }

    /// Takes the buffers, and queues the messages. As many entries as `topk` has are read, which were checked; a routing
    /// has as many places, slots, tokens and counts as the sizes allow; and the table is that of a placement that was
    /// checked against the sizes.
    pub(super) fn prepare_route<'a>(
        &self,
        buffers: &mut IssueBuffers<'a>,
        topk: impl SendBuffer<'a, Element = i32>,
        memory: &'a mut RoutingMemory,
    ) -> Result<RouteKernels> {
        let entries = topk.count();
        let topk = buffers.read(topk)?;
        let place = match (&self.device.table, &mut memory.placed) {
            (Some(table), Some(placed)) => Some(PlaceArgs {
                topk,
                table: table.address,
                placed: buffers.write(&mut **placed)?,
                entries,
                turn: self.comm.rank() as u32,
            }),
            _ => None,
        };
        let route = RouteArgs {
            topk: place.as_ref().map_or(topk, |place| place.placed),
            slots: buffers.write(&mut *memory.slots)?,
            tokens: buffers.write(&mut *memory.tokens)?,
            counts: buffers.write(&mut *memory.counts)?,
            entries,
            // Fits: the sizes were checked.
            first: match self.sizes.way {
                DispatchWay::Rows => 0,
                DispatchWay::AllGather => (self.comm.rank() * self.sizes.max_tokens) as u32,
            },
        };
        self.exchange_counts(buffers, route.counts);
        if let Some(received) = &mut memory.received {
            let received = buffers.write(&mut **received)?;
            let numbers = (1, DataType::Int32);
            self.exchange(
                buffers,
                (route.tokens, received),
                numbers,
                Direction::ToExperts,
            );
        }
        Ok(RouteKernels { place, route })
    }

    pub(super) fn check_topk(&self, of: u64, entries: usize) -> Result<()> {
        let Sizes {
            top_k, max_tokens, ..
        } = self.sizes;
        if of != self.number {
            return Err(Error::new(ErrorKind::InvalidConfig {
                field: "routing",
                reason: String::from("it was made by another `ExpertParallel`"),
            }));
        }
        if !entries.is_multiple_of(top_k) {
            let needed = entries.next_multiple_of(top_k);
            return length("topk", entries, needed, "`top_k` for each token");
        }
        if entries > max_tokens * top_k {
            let needed = max_tokens * top_k;
            return length(
                "topk",
                entries,
                needed,
                "`top_k` for each of `max_tokens`, at most",
            );
        }
        Ok(())
    }

    /// Sends each rank the number of rows that this rank has for its experts.
    fn exchange_counts(&self, buffers: &mut IssueBuffers<'_>, counts: u64) {
        let (own, rank) = (self.sizes.own, self.comm.rank());
        let at = |number: usize| counts + (number * size_of::<u32>()) as u64;
        for peer in 0..self.sizes.ranks {
            for (function, first) in [
                (Function::Send, 0),
                (Function::Recv, self.sizes.received_counts()),
            ] {
                let address = at(first + peer * own);
                // Fits: the number of ranks was checked when the communicator was made.
                let message = QueuedOp::new(function, address, own, DataType::UInt32, peer as i32);
                buffers.push_message(message, peer == rank);
            }
        }
        buffers.grouped = true;
    }
}

impl Routing {
    /// Returns how many tokens were routed to each expert. **Waits** for the routing, and for work enqueued on the
    /// communicator's stream before this call, at most as long as the communicator's operations may take: it is the
    /// only call that waits. In a captured plan, the counts are those of the last launch; zeros before the first.
    ///
    /// # Errors
    /// [`ErrorKind::ExpertCapacity`] when an expert received more tokens than fit, on the rank that sent them and on
    /// the rank that has the expert; [`ErrorKind::NoSuchExpert`] on the rank whose tokens chose an expert that does not
    /// exist; [`ErrorKind::InvalidConfig`] when nothing was routed; otherwise as [`Request::wait`].
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// # let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
    /// use nccl::moe::ExpertParallel;
    /// use nccl::ErrorKind;
    ///
    /// let ep = ExpertParallel::builder(&comm)
    ///     .with(|ep| {
    ///         ep.experts = 2;
    ///         ep.top_k = 1;
    ///         ep.max_tokens = 8;
    ///         ep.capacity = Some(2);
    ///         ep.max_row_bytes = 4;
    ///     })
    ///     .build()?;
    /// let mut routing = ep.routing()?;
    /// ep.route(&stream.clone_htod(&[1i32, 0, 1])?, &mut routing)?;
    /// assert_eq!(routing.counts()?.sent, [1, 2]);
    ///
    /// ep.route(&stream.clone_htod(&[1i32, 0, 1, 1])?, &mut routing)?;
    /// let error = routing.counts().unwrap_err();
    /// assert!(matches!(error.kind(), ErrorKind::ExpertCapacity { expert: 1, tokens: 3, capacity: 2, .. }));
    /// # Ok(())
    /// # }
    /// ```
    pub fn counts(&self) -> Result<Counts> {
        forked::check()?;
        let comm = &self.comm;
        let Some(routed) = self.routed else {
            return Err(Error::new(ErrorKind::InvalidConfig {
                field: "routing",
                reason: String::from(
                    "nothing was routed with it: call `ExpertParallel::route` first",
                ),
            }));
        };
        // A request waits for all work on the stream; the number is for its error.
        let (sequence, issued) = routed.issued.unwrap_or_else(|| (0, Instant::now()));
        Request::new(comm, KIND, SHAPE, sequence, issued, false).wait()?;
        let numbers = {
            // Copies on a stream of its own: work behind the routing may wait for other ranks.
            let _inside = comm.inner.enter(CallKind::Query, comm.timeout);
            let mut numbers = vec![0u32; self.sizes.counts()];
            cuda_driver::ignoring_stored_error(self.copies.context(), || {
                self.copies
                    .memcpy_dtoh(&*self.memory.counts, &mut numbers)?;
                self.copies.synchronize()
            })
            .map(|()| numbers)
        };
        numbers
            .map_err(Error::cuda("reading the counts of a routing"))
            .and_then(|numbers| Counts::of(numbers, &self.sizes, &self.placement, comm.rank()))
            .map_err(|error| {
                error.during(|| {
                    comm.inner.operation(
                        KIND,
                        SHAPE,
                        Some(sequence).filter(|&number| number > 0),
                        issued,
                    )
                })
            })
    }

    /// Returns, on the device, how many tokens each rank sent for each expert of this rank: `[source rank][own
    /// expert]`, with a placement `[source rank][own place]`. The counts include tokens beyond the capacity. For
    /// kernels that should stop at the last token; zeros before tokens were routed.
    ///
    /// ```
    /// # fn example(ep: &nccl::moe::ExpertParallel, routing: &nccl::moe::Routing) {
    /// let counts = routing.received();
    /// assert_eq!(counts.len(), ep.communicator().world_size() * ep.own_experts());
    /// # }
    /// ```
    #[must_use]
    pub fn received(&self) -> CudaView<'_, u32> {
        self.memory.counts.slice(self.sizes.received_counts()..)
    }
}

impl fmt::Debug for Routing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Routing")
            .field("communicator", &self.comm.name())
            .field("tokens", &self.routed.map(|routed| routed.tokens))
            .finish_non_exhaustive()
    }
}
