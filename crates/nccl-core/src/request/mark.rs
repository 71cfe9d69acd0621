//! Where an operation ends on its stream.

use cudarc::driver::CudaEvent;

/// An event behind the operation.
#[derive(Debug)]
pub(crate) struct Mark {
    pub(super) event: CudaEvent,
}
