//! The part of a plan that lives until the device has finished with it.

use std::mem::ManuallyDrop;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use cudarc::driver::CudaSlice;

use super::record::Held;
use crate::communicator::KeepAlive;
use crate::cuda_driver;
use crate::drop_queue::{DeferredDrop, DropPoll, StreamPoint};
use crate::graphs::GraphSlot;
use crate::memory::PlanBuffers;
use crate::state::State;

/// Memory of a plan that its caller does not see: none or one.
pub(super) type Scratch = Vec<CudaSlice<u8>>;

/// The caller's buffers, the scratch memory that the operations use between them, and what else has to live as long as
/// the last replay.
pub(super) type PlanMemory<B> = (B, Scratch, Held);

/// The remains of a plan, or of an attempt to make one. Dropping this value leaks the buffers.
pub(super) struct DeferredPlan<B: PlanBuffers> {
    pub(super) memory: ManuallyDrop<PlanMemory<B>>,
    /// The graphs of all parts.
    pub(super) slots: Vec<Arc<GraphSlot>>,
    pub(super) comm: KeepAlive,
    pub(super) behind: StreamPoint,
}

impl<B: PlanBuffers> DeferredDrop for DeferredPlan<B> {
    fn poll(&mut self) -> DropPoll {
        match self.comm.inner.lifecycle.get() {
            // NCCL may still use the buffers.
            State::Leaked => DropPoll::Never,
            // NCCL may put work on its stream until the abort is over.
            State::Aborting => DropPoll::Wait,
            _ if self.behind.is_over() => DropPoll::Over,
            _ => {
                self.comm.abort_if_overdue();
                DropPoll::Wait
            }
        }
    }

    fn release(self: Box<Self>) {
        let Self {
            memory,
            slots,
            comm,
            behind,
        } = *self;
        for slot in &slots {
            comm.inner.plans.destroy(slot);
        }
        drop(behind);
        // Functions of the program are among it, which may release anything: they expect their context, and a panic of them
        // must not end the thread that runs this.
        let _ = cuda_driver::bind(&comm.inner.context);
        let _ = catch_unwind(AssertUnwindSafe(|| {
            drop(ManuallyDrop::into_inner(memory));
        }));
    }

    fn describe(&self) -> String {
        match self.slots.first() {
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
