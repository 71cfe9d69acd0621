//! Ends all communicators of a CUDA context that failed permanently.
//!
//! After some errors, a CUDA context does nothing more: every call returns the same error, and only a new process helps. The
//! first call that returns such an error ends all communicators of that context, and reports the failure to the other ranks,
//! which would otherwise wait for operations that never begin. The detection costs no extra CUDA call, because the error
//! comes from calls that are made anyway.

use std::sync::Arc;

use nccl_sys as sys;

use super::end_reason::EndReason;
use super::handle::state;
use super::{Inner, registry};
use crate::error::{Error, ErrorKind, ErrorProperty, NcclFailure};
use crate::events;
use crate::ffi;
use crate::state::State;
use crate::threads;
use nccl_base::fault::Cause;

/// CUDA's codes (`CUresult`) after which a context is unusable, each with its likely origin. All other codes are errors of the
/// caller and end nothing.
const LOST_CONTEXT_CODES: &[(u32, LikelyOrigin)] = &[
    (214, LikelyOrigin::Hardware), // CUDA_ERROR_ECC_UNCORRECTABLE
    (220, LikelyOrigin::Hardware), // CUDA_ERROR_NVLINK_UNCORRECTABLE
    (226, LikelyOrigin::Hardware), // CUDA_ERROR_CONTAINED
    (700, LikelyOrigin::Kernel),   // CUDA_ERROR_ILLEGAL_ADDRESS
    (702, LikelyOrigin::Kernel),   // CUDA_ERROR_LAUNCH_TIMEOUT
    (709, LikelyOrigin::Context),  // CUDA_ERROR_CONTEXT_IS_DESTROYED
    (710, LikelyOrigin::Kernel),   // CUDA_ERROR_ASSERT
    (714, LikelyOrigin::Kernel),   // CUDA_ERROR_HARDWARE_STACK_ERROR
    (715, LikelyOrigin::Kernel),   // CUDA_ERROR_ILLEGAL_INSTRUCTION
    (716, LikelyOrigin::Kernel),   // CUDA_ERROR_MISALIGNED_ADDRESS
    (717, LikelyOrigin::Kernel),   // CUDA_ERROR_INVALID_ADDRESS_SPACE
    (718, LikelyOrigin::Kernel),   // CUDA_ERROR_INVALID_PC
    (719, LikelyOrigin::Kernel),   // CUDA_ERROR_LAUNCH_FAILED
    (721, LikelyOrigin::Kernel),   // CUDA_ERROR_TENSOR_MEMORY_LEAK
    (810, LikelyOrigin::Context),  // CUDA_ERROR_MPS_CLIENT_TERMINATED
    (911, LikelyOrigin::Hardware), // CUDA_ERROR_EXTERNAL_DEVICE
];

/// The part of the system to investigate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LikelyOrigin {
    Kernel,
    Hardware,
    Context,
}

/// When the error was detected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DetectionPhase {
    /// With no operation under way, or before the operation was handed to NCCL: earlier work is at
    /// fault.
    BeforeIssue,
    /// After operations were handed to NCCL.
    AfterIssue,
}

/// Whether `code` means that its context is lost.
pub(crate) fn is_context_lost(code: u32) -> bool {
    LOST_CONTEXT_CODES.iter().any(|(lost, _)| *lost == code)
}

/// Returns the cause to announce to all ranks, if the error means that its context is lost.
fn cause(error: &Error, detected: DetectionPhase) -> Option<Cause> {
    let ErrorKind::Cuda { error: driver, .. } = error.kind() else {
        return None;
    };
    let code = driver.0 as u32;
    let (_, likely_origin) = LOST_CONTEXT_CODES.iter().find(|(lost, _)| *lost == code)?;
    let evidence = match (likely_origin, detected) {
        (LikelyOrigin::Kernel, DetectionPhase::BeforeIssue) => {
            "the device had failed before an operation was handed to NCCL: a kernel that ran earlier did"
        }
        (LikelyOrigin::Kernel, DetectionPhase::AfterIssue) => {
            "a kernel on that device failed: one of the program's, or one of the operations under way; CUDA does not \
             tell which"
        }
        (LikelyOrigin::Hardware, _) => "the device or a link of it failed, whatever ran there",
        (LikelyOrigin::Context, _) => "the context is gone, whatever ran in it",
    };
    let hint = match likely_origin {
        LikelyOrigin::Kernel => {
            "CUDA does nothing more in that process: start it again; compute-sanitizer, or CUDA_LAUNCH_BLOCKING=1, finds \
             the kernel"
        }
        LikelyOrigin::Hardware => {
            "an Xid in that host's kernel log names what failed: it is beside `hosts` where the ranks may read the log, and \
             nccl-doctor reads it there; look at `nvidia-smi -q`; CUDA does nothing more in that process: start it again, \
             on another device if it fails again"
        }
        LikelyOrigin::Context => {
            "find out what reset the device or destroyed its context, or ended the MPS server; CUDA does nothing more in \
             that process: start it again"
        }
    };
    Some(Cause::of_lost_context(
        error,
        detected == DetectionPhase::BeforeIssue,
        evidence,
        hint,
    ))
}

impl Inner {
    /// Begins to abort all communicators of this one's context if the error means that the context is lost; returns
    /// whether it does. Does not wait for the aborts to finish.
    #[cold]
    pub(crate) fn abort_if_context_lost(
        self: &Arc<Self>,
        error: &Error,
        detected: DetectionPhase,
    ) -> bool {
        let Some(cause) = cause(error, detected) else {
            return false;
        };
        let begun = registry::begin_end_of_context(self, &cause);
        if begun.is_empty() {
            return true;
        }
        let all = begun.clone();
        let spawned = threads::spawn("nccl-abort", move || registry::end_together(all));
        if let Err(error) = spawned {
            events::no_thread("to abort the communicators of a lost context", &error);
            for (inner, _) in begun {
                let _ = inner.finish_abort(false);
            }
        }
        true
    }

    /// Returns the reason for the end of a communicator whose creation failed.
    pub(crate) fn end_reason_of_failed_init(&self, error: &Error) -> EndReason<'static> {
        EndReason::own(
            cause(error, DetectionPhase::BeforeIssue).unwrap_or_else(|| Cause::from(error)),
        )
    }

    /// Like [`final_error`](Self::final_error), for an error that occurred before anything was handed to NCCL.
    #[cold]
    pub(crate) fn final_error_before_issue(self: &Arc<Self>, error: Error) -> Error {
        self.abort_if_context_lost(&error, DetectionPhase::BeforeIssue);
        // The other ranks would wait for an operation that this rank has no watchdog thread to supervise.
        if error.is(ErrorProperty::NoThread) {
            self.abort(&error);
        }
        self.final_error(error)
    }

    /// Whether the loss of `other`'s context ends this communicator: same context, and still in use.
    pub(super) fn shares_context_with(&self, other: &Self) -> bool {
        self.context == other.context && self.lifecycle.get() == State::Ready
    }
}

impl Inner {
    /// Returns an error that NCCL found in the background; `None` while another thread holds the lock.
    pub(crate) fn background_failure(&self) -> Option<NcclFailure> {
        let handle = self.handle.try_lock()?;
        let state = state(&self.library, handle.raw?);
        drop(handle);
        match state {
            Ok(sys::ncclResult_t::ncclSuccess | sys::ncclResult_t::ncclInProgress) => None,
            Ok(code) => Some(ffi::failure(&self.library, "ncclCommGetAsyncError", code)),
            Err(failure) => Some(failure),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cudarc::driver::{DriverError, sys::CUresult};

    fn failed(code: CUresult) -> Error {
        Error::cuda("asking whether a stream is capturing (cuStreamIsCapturing)")(DriverError(code))
    }

    #[test]
    fn errors_after_which_a_context_is_of_no_use_are_told_from_those_of_a_caller() {
        nccl_emulator::install_unless_gpu().expect("an emulator or a GPU");
        for code in [
            CUresult::CUDA_ERROR_ILLEGAL_ADDRESS,
            CUresult::CUDA_ERROR_ECC_UNCORRECTABLE,
            CUresult::CUDA_ERROR_NVLINK_UNCORRECTABLE,
            CUresult::CUDA_ERROR_LAUNCH_TIMEOUT,
            CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED,
            CUresult::CUDA_ERROR_ASSERT,
            CUresult::CUDA_ERROR_HARDWARE_STACK_ERROR,
            CUresult::CUDA_ERROR_ILLEGAL_INSTRUCTION,
            CUresult::CUDA_ERROR_MISALIGNED_ADDRESS,
            CUresult::CUDA_ERROR_INVALID_ADDRESS_SPACE,
            CUresult::CUDA_ERROR_INVALID_PC,
            CUresult::CUDA_ERROR_LAUNCH_FAILED,
            CUresult::CUDA_ERROR_MPS_CLIENT_TERMINATED,
            CUresult::CUDA_ERROR_EXTERNAL_DEVICE,
        ] {
            let cause =
                cause(&failed(code), DetectionPhase::BeforeIssue).expect("the context is lost");
            assert!(cause.text().contains(&format!("{code:?}")), "{cause:?}");
            assert!(is_context_lost(code as u32));
        }
        for code in [
            CUresult::CUDA_ERROR_INVALID_VALUE,
            CUresult::CUDA_ERROR_OUT_OF_MEMORY,
            CUresult::CUDA_ERROR_INVALID_CONTEXT,
            CUresult::CUDA_ERROR_INVALID_HANDLE,
            CUresult::CUDA_ERROR_NOT_READY,
            CUresult::CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES,
            CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED,
            CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT,
            CUresult::CUDA_ERROR_CAPTURED_EVENT,
            CUresult::CUDA_ERROR_UNKNOWN,
        ] {
            assert!(
                cause(&failed(code), DetectionPhase::BeforeIssue).is_none(),
                "{code:?}"
            );
        }
        assert!(!is_context_lost(0));
    }
}
