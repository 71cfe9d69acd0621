//! The buffers of one operation, from the moment when they are taken to the moment when their borrow
//! may end.
//!
//! Taking a buffer turns it into an address at once; what has to be kept beside that (cudarc's guard,
//! the stream it was allocated on) is kept here, and only where there is something to keep. A buffer of
//! the operation's own stream that cudarc does not track costs its address and nothing else.
//!
//! What must stay true: a frame borrows its buffers for `'a` and is given to `Inner::issue`, which
//! drops it when the work is on the stream and the streams of the buffers wait for it. So an address
//! never outlives its frame.

use std::cell::Cell;
use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::sys::CUdeviceptr;
use cudarc::driver::{CudaStream, SyncOnDrop};

use super::order;
use crate::buffer::{Erased, ErasedMut};
use crate::error::{Error, ErrorKind, Result};
use crate::recorded::Recorded;
use crate::reduce::Operator;

/// See the module.
pub(crate) struct Frame<'a> {
    pub(crate) on: &'a Arc<CudaStream>,
    /// Streams that have to be ordered with the operation's.
    pub(super) foreign: Vec<Arc<CudaStream>>,
    guards: Vec<SyncOnDrop<'a>>,
    /// The operations, in the order in which they are issued.
    pub(crate) recorded: Vec<Recorded>,
    /// Which of them are, or have among them, messages to oneself.
    pub(crate) own: Vec<usize>,
    /// Whether a single operation has to be a group as well.
    pub(crate) grouped: bool,
    /// What the operations reduce with, kept until they are issued.
    pub(crate) operators: Vec<Arc<Operator>>,
    /// For a plan: the only memory that may be used. It is ordered when the plan is launched.
    owned: Option<&'a [Range<CUdeviceptr>]>,
}

/// The allocations of a past frame.
struct Scratch {
    foreign: Vec<Arc<CudaStream>>,
    guards: Vec<SyncOnDrop<'static>>,
    recorded: Vec<Recorded>,
    own: Vec<usize>,
}

thread_local! {
    /// A lock would cost as much as a message does. One is enough: frames are rarely nested.
    static SCRATCH: Cell<Scratch> = const { Cell::new(Scratch::new()) };
}

impl Scratch {
    const fn new() -> Self {
        Self {
            foreign: Vec::new(),
            guards: Vec::new(),
            recorded: Vec::new(),
            own: Vec::new(),
        }
    }
}

impl<'a> Frame<'a> {
    /// An empty frame for an operation on `on`.
    ///
    /// # Errors
    /// When taking a buffer would put cudarc's waits into a graph.
    pub(crate) fn new(on: &'a Arc<CudaStream>) -> Result<Self> {
        if on.context().is_managing_stream_synchronization() {
            order::not_capturing(order::OPERATION, on)?;
        }
        Ok(Self::empty(on, None))
    }

    /// An empty frame for operations of a plan that owns `owned`.
    pub(crate) fn of_plan(on: &'a Arc<CudaStream>, owned: &'a [Range<CUdeviceptr>]) -> Self {
        Self::empty(on, Some(owned))
    }

    fn empty(on: &'a Arc<CudaStream>, owned: Option<&'a [Range<CUdeviceptr>]>) -> Self {
        // Nothing is kept any more while the thread ends.
        let scratch = SCRATCH
            .try_with(|scratch| scratch.replace(Scratch::new()))
            .unwrap_or_else(|_| Scratch::new());
        Self {
            on,
            foreign: scratch.foreign,
            guards: empty(scratch.guards),
            recorded: scratch.recorded,
            own: scratch.own,
            grouped: false,
            operators: Vec::new(),
            owned,
        }
    }

    /// Whether this is for a plan that owns `owned`, or for none.
    pub(crate) fn is_for(&self, owned: Option<&[Range<CUdeviceptr>]>) -> bool {
        match (self.owned, owned) {
            (Some(a), Some(b)) => std::ptr::eq(a, b),
            (None, None) => true,
            _ => false,
        }
    }

    /// Takes a buffer that the operation reads.
    #[inline]
    pub(crate) fn read(&mut self, buffer: Erased<'a>) -> Result<CUdeviceptr> {
        if let Some(owned) = self.owned {
            return within(owned, &buffer.range());
        }
        self.order(buffer.stream())?;
        let (address, guard) = buffer.lease(self.on);
        self.keep(guard);
        Ok(address)
    }

    /// Takes a buffer that the operation writes.
    #[inline]
    pub(crate) fn write(&mut self, buffer: ErasedMut<'a>) -> Result<CUdeviceptr> {
        if let Some(owned) = self.owned {
            return within(owned, &buffer.range());
        }
        self.order(buffer.stream())?;
        let (address, guard) = buffer.lease(self.on);
        self.keep(guard);
        Ok(address)
    }

    /// Records a message.
    #[inline]
    pub(crate) fn push_message(&mut self, message: Recorded, to_oneself: bool) {
        if to_oneself {
            self.own.push(self.recorded.len());
        }
        self.recorded.push(message);
    }

    /// Records an operation of rank `own`.
    #[inline]
    pub(crate) fn push(&mut self, operation: Recorded, own: usize) {
        if operation.has_message_to(own) {
            self.own.push(self.recorded.len());
        }
        self.recorded.push(operation);
    }

    #[inline]
    fn order(&mut self, stream: &Arc<CudaStream>) -> Result<()> {
        if Arc::ptr_eq(stream, self.on) {
            return Ok(());
        }
        order::visit(stream, self.on, &mut self.foreign)
    }

    #[inline]
    fn keep(&mut self, guard: SyncOnDrop<'a>) {
        match guard {
            // Does nothing when it is dropped.
            SyncOnDrop::Record(None) => std::mem::forget(guard),
            guard => self.guards.push(guard),
        }
    }
}

/// The address of memory that lies in one of the plan's buffers.
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

impl Drop for Frame<'_> {
    /// Ends the guards, which record their events, and keeps the allocations.
    fn drop(&mut self) {
        self.foreign.clear();
        self.recorded.clear();
        self.own.clear();
        let scratch = Scratch {
            foreign: std::mem::take(&mut self.foreign),
            guards: empty(std::mem::take(&mut self.guards)),
            recorded: std::mem::take(&mut self.recorded),
            own: std::mem::take(&mut self.own),
        };
        let _ = SCRATCH.try_with(|kept| kept.replace(scratch));
    }
}

/// An empty vector with the allocation of `used`, for guards of another lifetime.
#[inline]
fn empty<'a, 'b>(mut used: Vec<SyncOnDrop<'a>>) -> Vec<SyncOnDrop<'b>> {
    used.clear();
    if used.capacity() == 0 {
        return Vec::new();
    }
    // Collecting in place: the elements have one layout, so the allocation stays.
    used.into_iter()
        .map(|_| unreachable!("the vector is empty"))
        .collect()
}
