//! The buffers of one operation, from when they are taken until their borrows may end.
//!
//! Taking a buffer converts it into an address at once. Anything else that has to be kept (cudarc's guard, the stream
//! of the allocation) is stored here, and only if there is something to keep. A buffer of the operation's own stream
//! that cudarc does not track costs only its address.
//!
//! Invariant: [`IssueBuffers`] borrows its buffers for `'a` and is passed to `issue`, which drops it when the work is
//! on the stream and the streams of the buffers wait for it. So no address outlives its buffer.

use std::cell::Cell;
use std::mem::ManuallyDrop;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use cudarc::driver::sys::CUdeviceptr;
use cudarc::driver::{CudaEvent, CudaStream, DriverError, SyncOnDrop};
use nccl_sys as sys;

use super::steps::{DeviceCopy, Step};
use crate::active_calls::CallKind;
use crate::buffer::sealed_buffer::Lend;
use crate::buffer::{RecvBuffer, SendBuffer};
use crate::communicator::stream_order::{self, ForeignCapture};
use crate::communicator::{Backoff, Communicator, Inner};
use crate::cuda_driver;
use crate::dtype::DataType;
use crate::error::{Error, ErrorKind, Result};
use crate::forked;
use crate::op::Function;
use crate::queued_op::{Batch, CollectiveArgs, Extra, QueuedOp};
use crate::reduce::Operator;

/// The buffers and operations of one issue.
#[doc(hidden)]
pub struct IssueBuffers<'a> {
    pub(crate) on: &'a Arc<CudaStream>,
    /// The stream that buffers are leased for: `on` without its indirection.
    stream: &'a CudaStream,
    /// The address of the operation's stream; for buffers of that stream, only the device address is needed. It is 0,
    /// which is no stream, for a plan, and if cudarc orders the buffers.
    stream_address: usize,
    /// The operations, in the order in which they are issued.
    queued: Vec<QueuedOp>,
    /// Whether a single operation has to be wrapped in a group.
    #[doc(hidden)]
    pub grouped: bool,
    optional: ManuallyDrop<Box<OptionalFields<'a>>>,
    /// Whether cudarc orders the operation with other users of the buffers.
    cudarc_orders_buffers: bool,
    /// For a plan: the only memory that may be used. Launches of the plan order it.
    owned: Option<&'a [Range<CUdeviceptr>]>,
}

/// The result of making the buffers' streams wait for the operation.
#[derive(Debug)]
pub(crate) enum OrderingOutcome {
    /// No capture interfered.
    Ordered(Result<()>),
    /// A capture interfered. If the capture is void, the caller has to wait for its end.
    Captured(ForeignCapture),
}

/// The fields that only some operations need. Kept apart, so that [`IssueBuffers`] is small and cheap to move.
struct OptionalFields<'a> {
    /// For each operation that is a collective, in the same order.
    collective_args: Vec<CollectiveArgs>,
    /// Streams that have to be ordered with the operation's.
    foreign: Vec<Arc<CudaStream>>,
    guards: Vec<SyncOnDrop<'a>>,
    /// Why the operation could not be ordered with other users of the buffers.
    unordered: Option<DriverError>,
    /// The indices of the operations that are, or contain, messages of the rank to itself.
    self_messages: Vec<usize>,
    /// The operators of the reductions, kept until they are issued.
    operators: Vec<Arc<Operator>>,
    /// Empty if everything that is queued forms one group.
    steps: Vec<StepEnd>,
    copies: Vec<DeviceCopy>,
}

/// The end of a step in the queued operations and in the copies.
#[derive(Clone, Copy, Debug)]
struct StepEnd {
    queued: usize,
    collective_args: usize,
    copies: usize,
}

/// The allocations of an earlier operation, for the next one.
struct Scratch {
    queued: Vec<QueuedOp>,
    optional: Option<Box<OptionalFields<'static>>>,
}

thread_local! {
    /// One per thread, because a lock would cost as much as a message. One is enough: operations are rarely nested.
    static SCRATCH: Cell<Scratch> = const { Cell::new(Scratch::NONE) };
}

impl Scratch {
    const NONE: Self = Self {
        queued: Vec::new(),
        optional: None,
    };
}

impl<'a> IssueBuffers<'a> {
    /// Returns empty buffers for an operation on `on`.
    ///
    /// # Errors
    /// When taking a buffer would put cudarc's waits into a graph.
    #[inline]
    #[doc(hidden)]
    pub fn new(on: &'a Arc<CudaStream>) -> Result<Self> {
        Self::admit(on)?;
        Ok(Self::empty(on, None))
    }

    /// Makes the check of [`IssueBuffers::new`].
    #[inline]
    pub(crate) fn admit(on: &CudaStream) -> Result<()> {
        forked::check()?;
        if on.context().is_managing_stream_synchronization() {
            stream_order::check_not_capturing(stream_order::OPERATION, on)?;
        }
        Ok(())
    }

    /// Returns empty buffers for operations on a stream that passed [`admit`](Self::admit), or for a plan that owns
    /// `owned`.
    #[inline]
    pub(crate) fn empty(on: &'a Arc<CudaStream>, owned: Option<&'a [Range<CUdeviceptr>]>) -> Self {
        // While the thread ends, there is nothing to reuse.
        let scratch = SCRATCH
            .try_with(|scratch| scratch.replace(Scratch::NONE))
            .unwrap_or(Scratch::NONE);
        let cudarc_orders_buffers = on.context().is_managing_stream_synchronization();
        Self {
            on,
            stream: on,
            stream_address: match owned {
                None if !cudarc_orders_buffers => address(on),
                _ => 0,
            },
            queued: scratch.queued,
            grouped: false,
            optional: ManuallyDrop::new(scratch.optional.unwrap_or_else(OptionalFields::new)),
            cudarc_orders_buffers,
            owned,
        }
    }

    /// Whether these buffers are for the plan that owns `owned`; with `None`, whether they are for no plan.
    #[inline]
    pub(crate) fn is_for(&self, owned: Option<&[Range<CUdeviceptr>]>) -> bool {
        match (self.owned, owned) {
            (Some(a), Some(b)) => std::ptr::eq(a, b),
            (None, None) => true,
            _ => false,
        }
    }

    /// Whether [`lease_untracked`](Self::lease_untracked), which does not call CUDA, is enough for a buffer. [`read`](Self::read) and
    /// [`write`](Self::write) take any buffer; checking this first is faster.
    #[inline]
    pub(crate) fn is_own_stream(&self, buffer: &impl Lend<'a>) -> bool {
        address(buffer.owner_stream()) == self.stream_address
    }

    /// Takes a buffer that the operation reads, and returns its address.
    #[inline(always)]
    #[doc(hidden)]
    pub fn read(&mut self, buffer: impl SendBuffer<'a>) -> Result<CUdeviceptr> {
        if !self.is_own_stream(&buffer) {
            if let Some(owned) = self.owned {
                return within(owned, &buffer.erase().range());
            }
            stream_order::check_buffer_stream(
                buffer.owner_stream(),
                self.on,
                &mut self.optional.foreign,
            )?;
        }
        Ok(self.lease(buffer))
    }

    /// Takes a buffer that the operation writes, and returns its address.
    #[inline(always)]
    #[doc(hidden)]
    pub fn write(&mut self, buffer: impl RecvBuffer<'a>) -> Result<CUdeviceptr> {
        if !self.is_own_stream(&buffer) {
            if let Some(owned) = self.owned {
                return within(owned, &buffer.erase_mut().range());
            }
            stream_order::check_buffer_stream(
                buffer.owner_stream(),
                self.on,
                &mut self.optional.foreign,
            )?;
        }
        Ok(self.lease(buffer))
    }

    /// Takes a buffer whose stream is ordered with the operation's.
    #[inline(always)]
    fn lease(&mut self, buffer: impl Lend<'a>) -> CUdeviceptr {
        match self.cudarc_orders_buffers {
            true => self.lease_tracked(buffer),
            false => self.lease_untracked(buffer),
        }
    }

    /// Takes a buffer that cudarc does not order: one for which [`is_own_stream`](Self::is_own_stream) is true, or any buffer
    /// of a plan that is not tracked.
    // Always inlined: this is the larger half of the cost of a message, and otherwise the optimizer shares one copy among
    // messages and collectives.
    #[inline(always)]
    pub(crate) fn lease_untracked(&mut self, buffer: impl Lend<'a>) -> CUdeviceptr {
        debug_assert!(!self.cudarc_orders_buffers, "cudarc orders its buffers");
        let (address, guard) = buffer.lease(self.stream);
        self.keep(guard);
        address
    }

    #[inline(always)]
    fn keep(&mut self, guard: SyncOnDrop<'a>) {
        // Taken apart, because a guard that is moved would be written to memory for every message.
        match &*ManuallyDrop::new(guard) {
            // Its drop does nothing.
            SyncOnDrop::Record(None) => {}
            &SyncOnDrop::Record(Some((event, _))) => self.keep_event(event),
            &SyncOnDrop::Sync(stream) => self.optional.guards.push(SyncOnDrop::Sync(stream)),
        }
    }

    /// Queues a message.
    #[inline]
    #[doc(hidden)]
    pub fn push_message(&mut self, message: QueuedOp, to_oneself: bool) {
        if to_oneself {
            self.next_is_own();
        }
        self.queued.push(message);
    }

    /// Queues a collective of rank `own`.
    #[inline]
    pub(crate) fn push_collective(
        &mut self,
        collective: QueuedOp,
        collective_args: CollectiveArgs,
        own: usize,
    ) {
        self.optional.collective_args.push(collective_args);
        self.push_message(collective, collective.descriptor.has_message_to(own));
    }

    /// Queues an all-gather in place, of `count` elements of each rank, which are at `start` in the order of the ranks.
    ///
    /// # Safety
    /// The memory is on the device of the stream, is as long as the elements of all ranks, and stays allocated until the
    /// operation is done; in a plan, until the last replay is over.
    #[doc(hidden)]
    pub unsafe fn push_all_gather(
        &mut self,
        comm: &Communicator,
        start: CUdeviceptr,
        count: usize,
        data_type: DataType,
    ) -> Result<()> {
        let args = CollectiveArgs {
            recv: start,
            reduction_op: sys::ncclRedOp_t::ncclSum,
            extra: Extra::of(comm),
        };
        self.check_launch_event(&args)?;
        let own = count * data_type.size_in_bytes().unwrap_or_default() * comm.rank();
        let all_gather =
            QueuedOp::new(Function::AllGather, start + own as u64, count, data_type, 0);
        self.push_collective(all_gather, args, comm.rank());
        Ok(())
    }

    /// Refuses an event for the launch in a plan, and a second one in a group.
    #[inline]
    pub(crate) fn check_launch_event(&self, collective_args: &CollectiveArgs) -> Result<()> {
        match collective_args.extra.has_event() {
            false => Ok(()),
            true => self.check_event(),
        }
    }

    #[cold]
    fn check_event(&self) -> Result<()> {
        let mut others = self.optional.collective_args.iter();
        let reason = match () {
            // In CUDA, waiting for such an event from outside of the graph is an error.
            () if self.owned.is_some() => "in a captured plan, an event cannot be waited for",
            () if others.any(|args| args.extra.has_event()) => {
                "a group has one launch: only one of its collectives may have an event"
            }
            () => return Ok(()),
        };
        Err(Error::new(ErrorKind::InvalidConfig {
            field: "launch_event",
            reason: String::from(reason),
        }))
    }

    /// Queues a copy on the device before the operations of this step.
    pub(crate) fn copy(&mut self, copy: DeviceCopy) {
        self.optional.copies.push(copy);
    }

    /// Ends the current step: operations that are queued afterwards form a later group of their own.
    pub(crate) fn next_step(&mut self) {
        let end = StepEnd {
            queued: self.queued.len(),
            collective_args: self.optional.collective_args.len(),
            copies: self.optional.copies.len(),
        };
        self.optional.steps.push(end);
    }

    /// Whether nothing is put on the stream.
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.queued.is_empty() && self.optional.copies.is_empty()
    }

    /// Whether there are several steps, or copies.
    #[inline]
    pub(crate) fn has_steps(&self) -> bool {
        !self.optional.steps.is_empty()
    }

    /// The steps, in order; each has its copies first, then its group. The last step also has to be ended with
    /// [`next_step`](Self::next_step).
    pub(crate) fn steps(&self) -> impl Iterator<Item = Step<'_>> {
        let mut begin = StepEnd {
            queued: 0,
            collective_args: 0,
            copies: 0,
        };
        self.optional.steps.iter().map(move |end| {
            let step = Step {
                copies: &self.optional.copies[begin.copies..end.copies],
                batch: Batch {
                    queued: &self.queued[begin.queued..end.queued],
                    collective_args: &self.optional.collective_args
                        [begin.collective_args..end.collective_args],
                    grouped: self.grouped,
                },
            };
            begin = *end;
            step
        })
    }

    /// Keeps the operator of the next operation, if that operator can be destroyed.
    #[inline]
    pub(crate) fn reduce_with(&mut self, operator: Option<Arc<Operator>>) {
        if operator.is_some() {
            self.optional.operators.extend(operator);
        }
    }

    /// The indices of the operations that are, or contain, messages of the rank to itself.
    #[inline]
    pub(crate) fn self_messages(&self) -> &[usize] {
        &self.optional.self_messages
    }

    /// The operations.
    #[inline]
    pub(crate) fn batch(&self) -> Batch<'_> {
        Batch {
            queued: &self.queued,
            collective_args: &self.optional.collective_args,
            grouped: self.grouped,
        }
    }

    /// Takes the operators of the reductions.
    pub(crate) fn take_operators(&mut self) -> Vec<Arc<Operator>> {
        std::mem::take(&mut self.optional.operators)
    }

    /// The streams that have to be ordered with the operation's.
    #[inline]
    pub(super) fn foreign(&self) -> &[Arc<CudaStream>] {
        &self.optional.foreign
    }

    /// Fails for an operation that cudarc could not order with other users of the buffers.
    #[inline]
    pub(super) fn check_ordering(&self) -> Result<()> {
        match self.optional.unordered {
            None => Ok(()),
            Some(error) => Err(Error::cuda("ordering the operation behind its buffers")(
                error,
            )),
        }
    }

    /// Makes the streams of the operation's buffers wait for the operation, and also the next use of the buffers on a
    /// stream that cudarc orders; needed after the operation on every path. Invalidates a capture that another thread has
    /// begun on the stream, because an event recorded in it would order nothing. To be called inside a call of the
    /// communicator.
    #[inline]
    pub(crate) fn order_after(&self, inner: &Inner, ordering_event: &CudaEvent) -> OrderingOutcome {
        if self.needs_no_order() {
            let capture = stream_order::invalidate_foreign_capture(self.on);
            return capture.map_or(OrderingOutcome::Ordered(Ok(())), OrderingOutcome::Captured);
        }
        self.order_behind(inner, ordering_event)
    }

    /// Whether all buffers belong to the operation's own stream, and cudarc does not order them.
    #[inline]
    pub(super) fn needs_no_order(&self) -> bool {
        self.optional.foreign.is_empty() && self.optional.guards.is_empty()
    }

    fn void_capture(&self, inner: &Inner) -> Option<ForeignCapture> {
        let _inside = inner.enter(CallKind::Query, inner.timeouts.abort);
        stream_order::invalidate_foreign_capture(self.on)
    }

    /// Makes the buffers' streams wait for the operation. Returns [`OrderingOutcome::Captured`] if a capture has taken the
    /// events, or may have.
    fn order_behind(&self, inner: &Inner, ordering_event: &CudaEvent) -> OrderingOutcome {
        let _inside = inner.enter(CallKind::Query, inner.timeouts.abort);
        // In a group over several devices, the last device's context is bound.
        let _ = cuda_driver::bind(self.on.context());
        if let Some(capture) = stream_order::invalidate_foreign_capture(self.on) {
            return OrderingOutcome::Captured(capture);
        }
        let waits = stream_order::order_after(self.on, self.foreign(), ordering_event);
        let ordered = waits.and_then(|()| self.record_guards());
        let capture = stream_order::invalidate_foreign_capture(self.on);
        capture.map_or(OrderingOutcome::Ordered(ordered), OrderingOutcome::Captured)
    }

    /// Waits until `deadline` for the end of the capture that interfered, and then does what [`order_after`](Self::order_after)
    /// could not do. Uses nothing that the communicator's lock protects; the lock must not be held.
    #[cold]
    pub(crate) fn wait_for_capture(&self, inner: &Inner, deadline: Instant) -> OrderingOutcome {
        let mut backoff = Backoff::new();
        while let Some(capture) = self.void_capture(inner) {
            if capture == ForeignCapture::InGraph || Instant::now() >= deadline {
                return OrderingOutcome::Captured(capture);
            }
            backoff.pause();
        }
        if self.needs_no_order() {
            return OrderingOutcome::Ordered(Ok(()));
        }
        let ordering_event = cuda_driver::new_event(&inner.context, None);
        match ordering_event.map_err(Error::cuda("creating an event (cuEventCreate)")) {
            Ok(ordering_event) => match self.order_behind(inner, &ordering_event) {
                // Another capture has begun.
                OrderingOutcome::Captured(ForeignCapture::Void) => {
                    self.wait_for_capture(inner, deadline)
                }
                outcome => outcome,
            },
            Err(error) => OrderingOutcome::Ordered(Err(error)),
        }
    }

    /// Records the events of cudarc's guards, as their drops would, but regardless of an error that cudarc stores.
    fn record_guards(&self) -> Result<()> {
        for guard in &self.optional.guards {
            match guard {
                &SyncOnDrop::Record(Some((event, stream))) => cuda_driver::record(event, stream)
                    .map_err(Error::cuda(
                        "recording an event of a buffer behind the operation",
                    ))?,
                SyncOnDrop::Record(None) => {}
                // The buffer is not in device memory.
                SyncOnDrop::Sync(_) => return Ok(()),
            }
        }
        Ok(())
    }

    // Not inlined, so that its result costs messages nothing where cudarc orders nothing.
    #[inline(never)]
    fn lease_tracked(&mut self, buffer: impl Lend<'a>) -> CUdeviceptr {
        let stream = self.stream;
        let ((address, guard), ordered) =
            cuda_driver::stored_error_of(stream.context(), || buffer.lease(stream));
        if let Err(error) = ordered {
            self.optional.unordered.get_or_insert(error);
        }
        self.keep(guard);
        address
    }

    #[cold]
    fn next_is_own(&mut self) {
        self.optional.self_messages.push(self.queued.len());
    }

    #[inline(never)]
    fn keep_event(&mut self, event: &'a CudaEvent) {
        let guard = SyncOnDrop::Record(Some((event, self.stream)));
        self.optional.guards.push(guard);
    }
}

/// The identity of a stream, as `Arc::ptr_eq` compares it.
#[inline]
fn address(stream: &Arc<CudaStream>) -> usize {
    Arc::as_ptr(stream).addr()
}

impl<'a> OptionalFields<'a> {
    #[cold]
    fn new() -> Box<Self> {
        Box::new(Self {
            collective_args: Vec::new(),
            foreign: Vec::new(),
            guards: Vec::new(),
            unordered: None,
            self_messages: Vec::new(),
            operators: Vec::new(),
            steps: Vec::new(),
            copies: Vec::new(),
        })
    }

    /// Clears everything.
    #[inline]
    fn into_empty(mut self: Box<Self>) -> Box<OptionalFields<'static>> {
        self.collective_args.clear();
        self.foreign.clear();
        self.self_messages.clear();
        self.unordered = None;
        // `IssueBuffers::order_after` has done what the drops of the guards would do. If it was not called, no work of the
        // operation runs, and an event recorded now would replace an earlier one for which other work waits.
        self.guards.drain(..).for_each(std::mem::forget);
        self.operators.clear();
        self.steps.clear();
        self.copies.clear();
        // SAFETY: only the lifetime changes, and no value in it has one: the guards are the only field
        // with the lifetime, and there are none.
        unsafe {
            std::mem::transmute::<Box<OptionalFields<'a>>, Box<OptionalFields<'static>>>(self)
        }
    }
}

/// Returns the address of memory that lies inside one of the plan's buffers.
#[cold]
fn within(owned: &[Range<CUdeviceptr>], used: &Range<CUdeviceptr>) -> Result<CUdeviceptr> {
    let contains = |whole: &Range<CUdeviceptr>| whole.start <= used.start && used.end <= whole.end;
    if owned.iter().any(contains) {
        Ok(used.start)
    } else {
        Err(Error::new(ErrorKind::NotInPlan {
            address: used.start,
            bytes: (used.end - used.start) as usize,
        }))
    }
}

impl Drop for IssueBuffers<'_> {
    /// Keeps the allocations for the next operation.
    #[inline]
    fn drop(&mut self) {
        self.queued.clear();
        // SAFETY: taken once, here, and not used afterwards.
        let optional = unsafe { ManuallyDrop::take(&mut self.optional) };
        let scratch = Scratch {
            queued: std::mem::take(&mut self.queued),
            optional: Some(optional.into_empty()),
        };
        let _ = SCRATCH.try_with(|kept| kept.replace(scratch));
    }
}
