//! The part of a plan that lives until the device has finished with it.

use std::mem::ManuallyDrop;
use std::sync::Arc;

use crate::communicator::KeepAlive;
use crate::drop_queue::{DeferredDrop, DropPoll, StreamPoint};
use crate::graphs::GraphSlot;
use crate::memory::PlanBuffers;
use crate::state::State;

/// The remains of a plan, or of an attempt to make one. Dropping this value leaks the buffers.
pub(super) struct DeferredPlan<B: PlanBuffers> {
    pub(super) buffers: ManuallyDrop<B>,
    pub(super) slot: Option<Arc<GraphSlot>>,
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
