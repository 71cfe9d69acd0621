//! Converts errors of the safe layer, the driver and the emulator to failures of a program.

use cudarc::driver::DriverError;
use nccl::ErrorKind;
use nccl::fault::RootCause;

use crate::failure::{Exit, Failure};

impl From<nccl::Error> for Failure {
    fn from(error: nccl::Error) -> Self {
        // One rank may see the timeout itself while another is told of it: the agreed root cause decides.
        let agreed = error.fault().and_then(|fault| agreed(&fault.root));
        let exit = agreed.unwrap_or(match error.kind() {
            ErrorKind::Load(_)
            | ErrorKind::Unsupported { .. }
            | ErrorKind::InvalidConfig { .. } => Exit::Usage,
            ErrorKind::TimedOut { .. } => Exit::TimedOut,
            ErrorKind::Nccl(_) | ErrorKind::Cuda { .. } | ErrorKind::Aborted { .. } => Exit::Nccl,
            _ => Exit::Failed,
        });
        Self::new(exit, format!("{error:#}"))
    }
}

/// Returns the exit code of a root cause, the same on all ranks; `None` if each rank uses its own error.
fn agreed(root: &RootCause) -> Option<Exit> {
    Some(match root {
        RootCause::Died { .. }
        | RootCause::ProgramFailed { .. }
        | RootCause::HostLost { .. }
        | RootCause::Partition { .. } => Exit::Failed,
        RootCause::CallFailed { .. }
        | RootCause::ResourceExhausted { .. }
        | RootCause::Warned { .. } => Exit::Nccl,
        // These causes are only found because an operation waited too long.
        RootCause::NotAnswering { .. }
        | RootCause::NeverEntered { .. }
        | RootCause::Mismatch { .. }
        | RootCause::Unmatched { .. }
        | RootCause::UnequalCounts { .. }
        | RootCause::Cycle { .. }
        | RootCause::InverseOrder { .. }
        | RootCause::StuckInside { .. }
        | RootCause::StuckOutside { .. }
        | RootCause::SlowRank { .. }
        | RootCause::SlowNetwork { .. } => Exit::TimedOut,
        _ => return None,
    })
}

/// Converts an error of the driver during `what`.
pub(super) fn cuda(what: &'static str) -> impl FnOnce(DriverError) -> Failure {
    move |error| Failure::new(Exit::Nccl, format!("CUDA: {what}: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_root_cause_decides_on_the_exit_code() {
        let frozen = RootCause::NotAnswering {
            ranks: vec![1],
            state: Some(String::from("T (stopped)")),
        };
        let died = RootCause::Died {
            ending: None,
            out_of_memory: false,
        };
        let failed = RootCause::CallFailed {
            call: None,
            nccl: Some(2),
            cuda: None,
            failed_before: false,
        };
        assert_eq!(agreed(&frozen), Some(Exit::TimedOut));
        assert_eq!(agreed(&died), Some(Exit::Failed));
        assert_eq!(agreed(&failed), Some(Exit::Nccl));
        assert_eq!(agreed(&RootCause::Unknown), None);
    }
}
