//! The conversion of an error into a cause, and of a fault into a kind of error.

use std::time::Instant;

use nccl_sys as sys;

use super::{Error, ErrorKind, ErrorProperty, NcclFailure};
use crate::fault::{Cause, Fault, FaultClass, FaultOperation, FaultRole, RootCause};
use crate::warning::{Class, FirstWarning};

impl Fault {
    /// Returns the kind of error for ranks that observed nothing but the fault.
    #[doc(hidden)]
    pub fn kind(&self) -> ErrorKind {
        match (self.class, self.timeout()) {
            (FaultClass::TimedOut, Some(timeout)) => ErrorKind::TimedOut {
                what: match self.operation() {
                    Some(operation) => operation.to_owned(),
                    None => String::from("an operation of another rank"),
                },
                timeout,
            },
            _ => ErrorKind::Aborted {
                reason: self.to_string(),
            },
        }
    }
}

impl Cause {
    /// Builds the cause for a CUDA context that failed permanently. `before` is whether it failed before an operation was
    /// handed to NCCL.
    #[doc(hidden)]
    pub fn of_lost_context(error: &Error, before: bool, evidence: &str, hint: &str) -> Self {
        let mut cause = Self::from(error);
        if let RootCause::CallFailed { failed_before, .. } = &mut cause.root {
            *failed_before = before;
        }
        cause.evidence.push(evidence.to_owned());
        cause.hint = hint.to_owned();
        cause
    }
}

impl From<&Error> for Cause {
    fn from(error: &Error) -> Self {
        if let Some(fault) = error.fault() {
            return Self::of_origin_fault(fault);
        }
        let operation = error
            .operation()
            .map(FaultOperation::from)
            .unwrap_or_default();
        let (class, role, root) = match error.kind() {
            // The call should have returned whatever the other ranks do.
            ErrorKind::TimedOut { what, .. } if error.is(ErrorProperty::Inside) => {
                let operation = what.trim_end_matches(',').to_owned();
                let root = RootCause::StuckInside { operation };
                (FaultClass::TimedOut, FaultRole::Initiating, root)
            }
            // The waiting rank is not the rank that causes the wait.
            ErrorKind::TimedOut { .. } => {
                (FaultClass::TimedOut, FaultRole::Unknown, RootCause::Unknown)
            }
            ErrorKind::Queued { .. } => {
                let operation = operation.text.clone();
                let root = RootCause::StuckOutside { operation };
                (FaultClass::TimedOut, FaultRole::Initiating, root)
            }
            ErrorKind::Aborted { .. } => {
                (FaultClass::Asked, FaultRole::Initiating, RootCause::Asked)
            }
            ErrorKind::Nccl(failure) => {
                let root = RootCause::CallFailed {
                    call: Some(failure.call.to_owned()),
                    nccl: Some(failure.code),
                    cuda: None,
                    failed_before: false,
                };
                (FaultClass::Failed, role_of(failure), root)
            }
            ErrorKind::Cuda { error, .. } if error.0 as u32 == OUT_OF_MEMORY => {
                let resource = String::from("device memory");
                let root = RootCause::ResourceExhausted { resource };
                (FaultClass::Failed, FaultRole::Initiating, root)
            }
            ErrorKind::Cuda { error, .. } => {
                let root = RootCause::CallFailed {
                    call: None,
                    nccl: None,
                    cuda: Some(error.0 as u32),
                    failed_before: false,
                };
                (FaultClass::Failed, FaultRole::Initiating, root)
            }
            _ if error.is(ErrorProperty::NoThread) => {
                let resource = String::from("threads or processes");
                let root = RootCause::ResourceExhausted { resource };
                (FaultClass::Failed, FaultRole::Initiating, root)
            }
            kind => {
                let root = RootCause::ProgramFailed {
                    reason: kind.to_string(),
                };
                let role = match error.is(ErrorProperty::BetweenRanks) {
                    true => FaultRole::Unknown,
                    false => FaultRole::Initiating,
                };
                (FaultClass::Failed, role, root)
            }
        };
        let mut cause = Self {
            operation,
            timeout: match *error.kind() {
                ErrorKind::TimedOut { timeout, .. } | ErrorKind::Queued { timeout, .. } => {
                    Some(timeout)
                }
                _ => None,
            },
            hint: error.hint().unwrap_or_default().to_owned(),
            began: error
                .operation()
                .and_then(|operation| Instant::now().checked_sub(operation.elapsed)),
            ..Self::of(
                class,
                role,
                root,
                match error.kind() {
                    ErrorKind::Aborted { reason } => reason.clone(),
                    kind => kind.to_string(),
                },
            )
        };
        if let ErrorKind::Nccl(failure) = error.kind() {
            cause.add_nccl_warnings(FirstWarning::read(&failure.last_error).as_ref(), None);
        }
        cause
    }
}

/// Returns the role of a failed call, by its code and by NCCL's last error.
fn role_of(failure: &NcclFailure) -> FaultRole {
    // The peer, or the path to it, failed first.
    if failure.is_remote() {
        return FaultRole::Cascade;
    }
    // NCCL also returns these two codes when a connection or one of its own threads was cut off. Any other code is
    // about this rank's own call or device.
    let of_either = [
        sys::ncclResult_t::ncclSystemError,
        sys::ncclResult_t::ncclInternalError,
    ];
    if !of_either.iter().any(|code| failure.is(*code)) {
        return FaultRole::Initiating;
    }
    match Class::of(&failure.last_error) {
        Class::Consequence => FaultRole::Cascade,
        Class::Noise => FaultRole::Teardown,
        Class::Cause | Class::Unknown => FaultRole::Initiating,
    }
}

/// CUDA's code for insufficient memory.
const OUT_OF_MEMORY: u32 = 2;
