//! What an error of the safe layer, the driver or the emulator means for a program.

use cudarc::driver::DriverError;
use nccl::ErrorKind;

use crate::failure::{Exit, Failure};

impl From<nccl::Error> for Failure {
    fn from(error: nccl::Error) -> Self {
        let exit = match error.kind() {
            ErrorKind::Load(_)
            | ErrorKind::Unsupported { .. }
            | ErrorKind::InvalidConfig { .. } => Exit::Usage,
            ErrorKind::TimedOut { .. } => Exit::TimedOut,
            ErrorKind::Nccl(_) | ErrorKind::Cuda { .. } | ErrorKind::Aborted { .. } => Exit::Nccl,
            _ => Exit::Failed,
        };
        Self::new(exit, error.to_string())
    }
}

/// What the driver said, and about what.
pub(super) fn cuda(what: &'static str) -> impl FnOnce(DriverError) -> Failure {
    move |error| Failure::new(Exit::Nccl, format!("CUDA: {what}: {error}"))
}
