//! Contexts: what belongs to one, which is current, and the sticky error.

use std::sync::Arc;

use super::CUresult;
use crate::violations::Violation;

/// A CUDA context; the primary one of its device, or one made by `cuCtxCreate`.
#[derive(Debug)]
pub(crate) struct Context {
    device: i32,
}

impl Context {
    /// The device's ordinal.
    pub(crate) fn device(&self) -> i32 {
        self.device
    }

    /// The sticky error, if the context has one.
    pub(crate) fn check(&self) -> Result<(), CUresult> {
        todo!()
    }

    /// Records the violation and makes CUDA_ERROR_ILLEGAL_ADDRESS this context's sticky error. Jobs that are queued on
    /// its streams are dropped without running.
    pub(crate) fn fail(&self, violation: Violation) {
        let _ = violation;
        todo!()
    }
}

/// The calling thread's current context.
pub(crate) fn current() -> Result<Arc<Context>, CUresult> {
    todo!()
}

/// The primary context of a device, brought to life if need be (as the CUDA runtime inside NCCL does); the caller holds
/// no count of it.
pub(crate) fn primary(device: i32) -> Result<Arc<Context>, CUresult> {
    let _ = device;
    todo!()
}

/// [`Context::fail`] on the primary context of `device`.
pub(crate) fn fail(device: i32, violation: Violation) {
    let _ = (device, violation);
    todo!()
}
