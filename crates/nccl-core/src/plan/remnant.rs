//! The part of a plan that lives until the device is done with it.

use std::mem::ManuallyDrop;
use std::sync::Arc;

use crate::communicator::KeepAlive;
use crate::graphs::Slot;
use crate::memory::PlanBuffers;
use crate::reaper::{Behind, DeferredDrop, Turn};
use crate::state::State;

/// The remains of a plan, or of the attempt to make one. Dropping them leaks the buffers.
pub(super) struct Remnant<B: PlanBuffers> {
    pub(super) buffers: ManuallyDrop<B>,
    pub(super) slot: Option<Arc<Slot>>,
    pub(super) comm: KeepAlive,
    pub(super) behind: Behind,
}

impl<B: PlanBuffers> DeferredDrop for Remnant<B> {
    fn poll(&mut self) -> Turn {
        match self.comm.inner.phase.get() {
            // NCCL may still use the buffers.
            State::Leaked => Turn::Never,
            // NCCL may put work on its stream until the abort is over.
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
