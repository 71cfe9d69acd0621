//! Operations of experts in captured plans.
//!
//! The kernels become part of the graph, with the addresses of the routing, which is one of the plan's buffers, and of the
//! staging memory, which the recorded functions own, and with them the plan. The plan is launched on the stream on which the
//! staging memory is used.

use std::ops::Deref;
use std::sync::Arc;

use cudarc::driver::{CudaStream, result};
use nccl_core::memory::sealed;
use nccl_core::{Capture, PlanBuffers};

use super::dispatch::{Moment, Move, Payload};
use super::experts::{ExpertParallel, OnDevice};
use super::routing::{KIND, Routed, Routing, SHAPE};
use crate::buffer::{Erased, ErasedMut, RecvBuffer, SendBuffer};
use crate::error::{Error, ErrorKind, Result};
use crate::issuing::IssueBuffers;

// SAFETY: all memory of the routing is visited; it is lent as views, and `RoutingMut` gives no `&mut Routing`.
unsafe impl sealed::Visit for Routing {
    fn visit<'a>(&'a mut self, each: sealed::Each<'_, 'a>) -> Result<()> {
        let memory = &mut self.memory;
        let optional = [&mut memory.placed, &mut memory.received];
        let numbers = optional.into_iter().flatten().map(|one| &mut **one);
        for numbers in numbers.chain([&mut *memory.slots, &mut *memory.tokens]) {
            each(numbers.erase_mut())?;
        }
        each((&mut *memory.counts).erase_mut())
    }
}

impl PlanBuffers for Routing {
    type Views<'a> = &'a Self;
    type ViewsMut<'a> = RoutingMut<'a>;

    fn views(&self) -> &Self {
        self
    }

    fn views_mut(&mut self) -> RoutingMut<'_> {
        RoutingMut(self)
    }
}

/// A [`Routing`] that is one of the buffers of a captured plan. [`ExpertCapture::route`] fills it.
///
/// ```
/// # fn example(plan: &mut nccl::plan::CapturedPlan<nccl::moe::Routing>) -> nccl::Result<()> {
/// let routing: nccl::moe::RoutingMut<'_> = plan.views_mut();
/// println!("{:?}", routing.counts()?);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct RoutingMut<'a>(&'a mut Routing);

impl Deref for RoutingMut<'_> {
    type Target = Routing;

    fn deref(&self) -> &Routing {
        self.0
    }
}

/// Records the operations of an [`ExpertParallel`] in a captured plan; see [`ExpertParallel::capture`].
///
/// ```
/// # use nccl::moe::{ExpertParallel, Routing};
/// # use nccl::cudarc::driver::CudaSlice;
/// # fn example(ep: &ExpertParallel, topk: CudaSlice<i32>, x: CudaSlice<f32>, y: CudaSlice<f32>) -> nccl::Result<()> {
/// let buffers = (ep.routing()?, topk, x, y);
/// let mut plan = ep.communicator().capture(buffers, |capture, (mut routing, topk, x, y)| {
///     let mut experts = ep.capture(capture)?;
///     experts.route(&topk, &mut routing)?;
///     experts.dispatch(&routing, &x, y)
/// })?;
/// plan.launch()?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct ExpertCapture<'c, 'p> {
    ep: &'c ExpertParallel,
    capture: &'c mut Capture<'p>,
}

impl ExpertParallel {
    /// Records operations in a plan: they are captured with the other operations of the plan, in the order of the calls,
    /// and each launch of the plan does them again, with what is in the buffers by then.
    ///
    /// The routing has to be one of the plan's buffers. Its number of tokens is fixed by the plan. Between
    /// [parts](Capture::next_part) of the plan, the program runs its experts; or in the plan, by [`Capture::launch`].
    ///
    /// The plan keeps the memory of this value; this value can be used for other calls and plans as well, but not at the
    /// same time from several threads: rows of one step could be sent in another.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidConfig`] when the plan is of another communicator or stream.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// # let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
    /// # let width = 2;
    /// # let ep = nccl::moe::ExpertParallel::builder(&comm)
    /// #     .with(|ep| (ep.experts, ep.top_k, ep.max_tokens, ep.max_row_bytes) = (4, 1, 2, 8))
    /// #     .build()?;
    /// let numbers = |len| stream.alloc_zeros::<f32>(len);
    /// let (topk, weights) = (stream.clone_htod(&[3i32, 0])?, stream.clone_htod(&[1.0f32, 0.5])?);
    /// let (x, y) = (numbers(2 * width)?, numbers(ep.rows() * width)?);
    /// let out = numbers(2 * width)?;
    /// let buffers = (ep.routing()?, topk, weights, x, y, out);
    /// let mut layer = comm.capture(buffers, |capture, (mut routing, topk, weights, x, mut y, out)| {
    ///     let mut experts = ep.capture(capture)?;
    ///     experts.route(&topk, &mut routing)?;
    ///     experts.dispatch(&routing, &x, &mut y)?;
    ///     experts.next_part();
    ///     experts.combine(&routing, &y, &weights, out)
    /// })?;
    ///
    /// stream.memcpy_htod(&[1.0f32, 2.0, 3.0, 4.0], &mut layer.views_mut().3)?;
    /// layer.launch_part(0)?;
    /// // … the experts work on `layer.views_mut().4` here …
    /// layer.launch_part(1)?.wait()?;
    /// assert_eq!(stream.clone_dtoh(&layer.views().5)?, [1.0, 2.0, 1.5, 2.0]);
    /// assert_eq!(layer.views().0.counts()?.sent, [1, 0, 0, 1]);
    /// # Ok(())
    /// # }
    /// ```
    pub fn capture<'c, 'p>(
        &'c self,
        capture: &'c mut Capture<'p>,
    ) -> Result<ExpertCapture<'c, 'p>> {
        let (own, plans) = (&self.comm, capture.comm());
        let same =
            Arc::ptr_eq(&own.inner, &plans.inner) && Arc::ptr_eq(own.stream(), plans.stream());
        if !same {
            return Err(Error::new(ErrorKind::InvalidConfig {
                field: "capture",
                reason: format!(
                    "the plan is of communicator {:?}, and the experts are of {:?}, or of another stream of it",
                    plans.name(),
                    own.name()
                ),
            }));
        }
        Ok(ExpertCapture { ep: self, capture })
    }
}

impl<'p> ExpertCapture<'_, 'p> {
    /// Records [`ExpertParallel::route`].
    ///
    /// # Errors
    /// [`ErrorKind::InvalidConfig`] for another number of tokens than in an earlier call for this routing in a plan;
    /// otherwise as [`ExpertParallel::route`].
    ///
    /// ```
    /// # use nccl::moe::{ExpertCapture, RoutingMut};
    /// # fn example(experts: &mut ExpertCapture<'_, '_>, topk: nccl::cudarc::driver::CudaSlice<i32>,
    /// #     routing: &mut RoutingMut<'_>) -> nccl::Result<()> {
    /// experts.route(&topk, routing)?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn route<'a>(
        &mut self,
        topk: impl SendBuffer<'a, Element = i32>,
        routing: &'a mut RoutingMut<'_>,
    ) -> Result<()>
    where
        'p: 'a,
    {
        let ep = self.ep;
        let routing = &mut *routing.0;
        let entries = topk.count();
        ep.check_topk(routing.of, entries)?;
        let tokens = entries / ep.sizes.top_k;
        let is_filled = match routing.routed {
            Some(Routed {
                tokens: known,
                issued: None,
            }) if known == tokens => true,
            Some(Routed {
                tokens: known,
                issued: None,
            }) => {
                return Err(Error::new(ErrorKind::InvalidConfig {
                    field: "routing",
                    reason: format!(
                        "it is for {known} tokens in plans, and not for {tokens}: use another one"
                    ),
                }));
            }
            _ => false,
        };
        if !is_filled {
            // Checked before anything is done to a routing that is not in the plan.
            self.capture.buffers().read(&*routing.memory.slots)?;
            ep.forget_tokens(routing)?;
        }
        let mut buffers = self.capture.buffers();
        let kernels = ep.prepare_route(&mut buffers, topk, &mut routing.memory)?;
        let (device, sizes) = (Arc::clone(&ep.device), ep.sizes);
        // SAFETY: prepared for these sizes, with memory of the plan and of `device`.
        let launch = move |on: &Arc<CudaStream>| unsafe { kernels.launch(&device, &sizes, on) };
        // SAFETY: as above.
        unsafe { self.capture.add_kernel(launch) };
        self.capture.add_steps(&buffers);
        routing.routed = Some(Routed {
            tokens,
            issued: None,
        });
        Ok(())
    }

    /// Records [`ExpertParallel::dispatch`].
    ///
    /// # Errors
    /// As [`ExpertParallel::dispatch`]; [`ErrorKind::NotInPlan`] for a buffer or routing that the plan does not own.
    ///
    /// ```
    /// # use nccl::moe::{ExpertCapture, RoutingMut};
    /// # fn example<'p>(experts: &mut ExpertCapture<'_, 'p>, routing: &'p RoutingMut<'p>,
    /// #     x: nccl::cudarc::driver::CudaView<'p, f32>, y: nccl::cudarc::driver::CudaViewMut<'p, f32>) -> nccl::Result<()> {
    /// experts.dispatch(routing, x, y)?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn dispatch<'a, X, Y>(&mut self, routing: &'a Routing, x: X, y: Y) -> Result<()>
    where
        'p: 'a,
        X: SendBuffer<'a>,
        Y: RecvBuffer<'a, Element = X::Element>,
    {
        self.dispatch_payloads(routing, [Payload::rows(x.erase(), y.erase_mut())])
    }

    /// Records [`ExpertParallel::dispatch_with_scales`].
    ///
    /// # Errors
    /// As [`dispatch`](Self::dispatch).
    ///
    /// ```
    /// # use nccl::cudarc::driver::{CudaView, CudaViewMut};
    /// # use nccl::moe::{ExpertCapture, RoutingMut};
    /// # fn example<'p>(experts: &mut ExpertCapture<'_, 'p>, routing: &'p RoutingMut<'p>,
    /// #     x: CudaView<'p, u8>, y: CudaViewMut<'p, u8>, scales: CudaView<'p, f32>, received: CudaViewMut<'p, f32>) -> nccl::Result<()> {
    /// experts.dispatch_with_scales(routing, x, y, scales, received)?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn dispatch_with_scales<'a, X, Y, S, R>(
        &mut self,
        routing: &'a Routing,
        x: X,
        y: Y,
        scales: S,
        received_scales: R,
    ) -> Result<()>
    where
        'p: 'a,
        X: SendBuffer<'a>,
        Y: RecvBuffer<'a, Element = X::Element>,
        S: SendBuffer<'a>,
        R: RecvBuffer<'a, Element = S::Element>,
    {
        let rows = Payload::rows(x.erase(), y.erase_mut());
        let scales = Payload::scales(scales.erase(), received_scales.erase_mut());
        self.dispatch_payloads(routing, [rows, scales])
    }

    fn dispatch_payloads<'a, const N: usize>(
        &mut self,
        routing: &'a Routing,
        payloads: [Payload<'a>; N],
    ) -> Result<()>
    where
        'p: 'a,
    {
        is_routed_in_a_plan(routing)?;
        let mut buffers: IssueBuffers<'a> = self.capture.buffers();
        let moves = self.ep.prepare_dispatch(&mut buffers, routing, payloads)?;
        self.add_moves(Moment::BeforeMessages, moves);
        self.capture.add_steps(&buffers);
        self.add_moves(Moment::AfterMessages, moves);
        Ok(())
    }

    fn add_moves<const N: usize>(&mut self, moment: Moment, moves: [Move; N]) {
        let device = Arc::clone(&self.ep.device);
        let launch = move |on: &Arc<CudaStream>| {
            // SAFETY: prepared, with memory of the plan and of `device`.
            let launch = |one: &Move| unsafe { one.launch(moment, &device, on) };
            moves.iter().try_for_each(launch)
        };
        // SAFETY: as above.
        unsafe { self.capture.add_kernel(launch) };
    }

    /// Records [`ExpertParallel::combine`].
    ///
    /// # Errors
    /// As [`ExpertParallel::combine`]; [`ErrorKind::NotInPlan`] for a buffer or routing that the plan does not own.
    ///
    /// ```
    /// # use nccl::cudarc::driver::{CudaView, CudaViewMut};
    /// # use nccl::moe::{ExpertCapture, RoutingMut};
    /// # fn example<'p>(experts: &mut ExpertCapture<'_, 'p>, routing: &'p RoutingMut<'p>,
    /// #     z: CudaView<'p, f32>, weights: CudaView<'p, f32>, out: CudaViewMut<'p, f32>) -> nccl::Result<()> {
    /// experts.combine(routing, z, weights, out)?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn combine<'a, Z, O>(
        &mut self,
        routing: &'a Routing,
        expert_out: Z,
        weights: impl SendBuffer<'a, Element = f32>,
        out: O,
    ) -> Result<()>
    where
        'p: 'a,
        Z: SendBuffer<'a>,
        O: RecvBuffer<'a, Element = Z::Element>,
    {
        let (expert_out, weights): (Erased<'a>, Erased<'a>) = (expert_out.erase(), weights.erase());
        let out: ErasedMut<'a> = out.erase_mut();
        let data_type = expert_out.data_type();
        is_routed_in_a_plan(routing)?;
        let mut buffers = self.capture.buffers();
        let combine = self
            .ep
            .prepare_combine(&mut buffers, routing, expert_out, weights, out)?;
        self.capture.add_steps(&buffers);
        let device: Arc<OnDevice> = Arc::clone(&self.ep.device);
        // Without tokens as well: the messages use the memory of `device`.
        let launch = move |on: &Arc<CudaStream>| match combine.tokens {
            0 => Ok(()),
            // SAFETY: prepared, with memory of the plan and of `device`.
            _ => unsafe { device.kernels.combine(on, &combine, data_type) },
        };
        // SAFETY: as above.
        unsafe { self.capture.add_kernel(launch) };
        Ok(())
    }

    /// Begins another part of the plan: [`Capture::next_part`].
    ///
    /// ```
    /// # fn example(experts: &mut nccl::moe::ExpertCapture<'_, '_>) {
    /// experts.next_part();
    /// # }
    /// ```
    pub fn next_part(&mut self) {
        self.capture.next_part();
    }
}

/// Refuses a routing whose number of tokens is not that of a plan: an operation is checked against that number, which a
/// later route in the plan could change.
fn is_routed_in_a_plan(routing: &Routing) -> Result<()> {
    match routing.routed {
        Some(Routed { issued: None, .. }) => Ok(()),
        _ => Err(Error::new(ErrorKind::InvalidConfig {
            field: "routing",
            reason: String::from("nothing was routed with it in the plan: call `route` first"),
        })),
    }
}

impl ExpertParallel {
    /// Marks all rows as without tokens, and resets the counts. The parts of a plan can be launched in any order; whatever a
    /// routing was filled with before, in a plan it names no token that the plan does not have.
    fn forget_tokens(&self, routing: &mut Routing) -> Result<()> {
        routing.routed = None;
        let memory = &mut routing.memory;
        let optional = memory.received.as_deref_mut();
        let mut buffers = IssueBuffers::new(self.comm.stream())?;
        let counts = &mut *memory.counts;
        let bytes = counts.len() * size_of::<u32>();
        let mut marked = vec![(buffers.write(counts)?, 0, bytes)];
        for numbers in [&mut *memory.slots, &mut *memory.tokens]
            .into_iter()
            .chain(optional)
        {
            let bytes = numbers.len() * size_of::<i32>();
            marked.push((buffers.write(numbers)?, 0xff, bytes));
        }
        self.launch_joined(&buffers, KIND, SHAPE, || {
            let on: &Arc<CudaStream> = self.comm.stream();
            marked.iter().try_for_each(|&(address, value, bytes)| {
                // SAFETY: the memory has that length, and is leased by the operation.
                unsafe { result::memset_d8_async(address, value, bytes, on.cu_stream()) }
                    .map_err(Error::cuda("resetting a routing (cuMemsetD8Async)"))
            })
        })
    }
}
