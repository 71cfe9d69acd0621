//! An error in plain values, for logs in JSON and for other processes.

use serde::{Deserialize, Serialize};

use crate::error::{Error, ErrorKind};
use crate::supervision::Fault;

/// An [`Error`] in plain values, that serde reads and writes.
///
/// ```
/// let error = nccl::Rendezvous::unix("/tmp/x.sock", 4, 4).unwrap_err();
/// let report = error.report();
/// assert_eq!(report.kind, "rendezvous");
/// assert_eq!(report.text, error.to_string());
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ErrorReport {
    /// Which [`ErrorKind`] it is, in lower case: `timed_out`, `nccl`, …
    pub kind: String,
    /// What printing it gives.
    pub text: String,
    /// The operation in which it arose, if it arose in one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub operation: Option<ReportedOperation>,
    /// What ended the communicator on all of its ranks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fault: Option<Fault>,
}

/// An [`Operation`](crate::Operation) in plain values.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ReportedOperation {
    /// What was asked for, as [`OperationKind`](crate::OperationKind) prints it.
    pub kind: String,
    /// The name of the communicator.
    pub communicator: String,
    /// The rank that reports, in the communicator.
    pub rank: usize,
    /// The number of ranks of the communicator.
    pub world_size: usize,
    /// The host that reports.
    pub host: String,
    /// The process that reports.
    pub pid: u32,
    /// The epoch of the world that made the communicator; 0 where there is none.
    pub epoch: u64,
    /// The number of the operation on its communicator.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sequence: Option<u64>,
    /// The rank at the other end, for messages.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peer: Option<usize>,
    /// The rank that gives or gets everything, for operations that have one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub root: Option<usize>,
    /// The number of elements.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub count: Option<usize>,
    /// Their type.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data_type: Option<String>,
    /// The time from the call to the error, in milliseconds.
    pub elapsed_ms: u64,
}

impl Error {
    /// It in plain values.
    ///
    /// ```
    /// # fn show(error: nccl::Error) {
    /// let report = error.report();
    /// if let Some(operation) = &report.operation {
    ///     println!("{} on rank {}", operation.kind, operation.rank);
    /// }
    /// # }
    /// ```
    #[must_use]
    pub fn report(&self) -> ErrorReport {
        let operation = self.operation().map(|operation| ReportedOperation {
            kind: operation.kind().to_string(),
            communicator: operation.communicator().to_owned(),
            rank: operation.rank(),
            world_size: operation.world_size(),
            host: operation.host().to_owned(),
            pid: operation.pid(),
            epoch: operation.epoch(),
            sequence: operation.sequence(),
            peer: operation.peer(),
            root: operation.root(),
            count: operation.count(),
            data_type: operation.data_type().map(|data_type| data_type.to_string()),
            elapsed_ms: crate::events::millis(operation.elapsed()),
        });
        ErrorReport {
            kind: name(self.kind()).to_owned(),
            text: self.to_string(),
            operation,
            fault: self.fault().cloned(),
        }
    }
}

/// The name of a kind, which stays what it is.
fn name(kind: &ErrorKind) -> &'static str {
    match kind {
        ErrorKind::Load(_) => "load",
        ErrorKind::Unsupported { .. } => "unsupported",
        ErrorKind::InvalidConfig { .. } => "invalid_config",
        ErrorKind::Nccl(_) => "nccl",
        ErrorKind::Cuda { .. } => "cuda",
        ErrorKind::Length { .. } => "length",
        ErrorKind::NoBuffer { .. } => "no_buffer",
        ErrorKind::WrongReduction { .. } => "wrong_reduction",
        ErrorKind::DataTypeMismatch { .. } => "data_type_mismatch",
        ErrorKind::UnknownDataType(_) => "unknown_data_type",
        ErrorKind::PartialElement { .. } => "partial_element",
        ErrorKind::Misaligned { .. } => "misaligned",
        ErrorKind::NoSuchRank { .. } => "no_such_rank",
        ErrorKind::UnpairedOwnMessages { .. } => "unpaired_own_messages",
        ErrorKind::Stream { .. } => "stream",
        ErrorKind::NotInPlan { .. } => "not_in_plan",
        ErrorKind::CaptureDiffers { .. } => "capture_differs",
        ErrorKind::TimedOut { .. } => "timed_out",
        ErrorKind::Queued { .. } => "queued",
        ErrorKind::Busy { .. } => "busy",
        ErrorKind::Aborted { .. } => "aborted",
        ErrorKind::Closed { .. } => "closed",
        ErrorKind::Rendezvous { .. } => "rendezvous",
        ErrorKind::Launch { .. } => "launch",
        ErrorKind::Preflight { .. } => "preflight",
        ErrorKind::Io { .. } => "io",
    }
}

#[cfg(test)]
mod tests {
    use std::error::Error as _;
    use std::sync::Arc;

    use super::*;
    use crate::supervision::Cause;

    #[test]
    fn an_error_with_its_fault_goes_through_json_and_has_the_fault_at_the_end_of_its_chain() {
        let fault = Arc::new(Fault::here(Cause::asked("enough"), "model/tp", 3, 1));
        let error = Error::new(ErrorKind::Aborted {
            reason: String::new(),
        });
        let error = error.because_of(&fault, false, None);
        let report = error.report();
        let json = serde_json::to_string(&report).unwrap();
        assert_eq!(serde_json::from_str::<ErrorReport>(&json).unwrap(), report);
        let source = error.source().and_then(|source| source.downcast_ref());
        assert_eq!(source, Some(&*fault));
    }
}
