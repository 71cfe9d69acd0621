//! Evidence of this rank for an error: the first warning in NCCL's log, and resources that are used up on the host.

use nccl_sys as sys;

use nccl_base::fault::{Cause, FaultClass, RootCause};
use nccl_diagnose::debug_log::{self, LogPosition};

use nccl_diagnose::preflight;

/// Returns `cause` with the first warning in NCCL's log file since `from`, if the warning may explain more.
pub(super) fn with_nccl_warning(mut cause: Cause, from: LogPosition) -> Cause {
    if cause.class == FaultClass::Failed && cause.origin_fault.is_none() {
        let first = debug_log::first_warning(from);
        cause.add_nccl_warnings(None, first.as_ref());
        if first.is_none_or(|first| first.check.is_none()) {
            name_exhausted_resource(&mut cause);
        }
    }
    cause
}

/// Names a resource that is used up: a system call failed under NCCL, which does not say which call.
fn name_exhausted_resource(cause: &mut Cause) {
    const SYSTEM: u32 = sys::ncclResult_t::ncclSystemError.0;
    let failed = matches!(
        cause.root,
        RootCause::CallFailed {
            nccl: Some(SYSTEM),
            ..
        }
    );
    if let Some(resource_shortage) = failed.then(preflight::resource_shortage).flatten() {
        cause.root = RootCause::ResourceExhausted {
            resource: resource_shortage.resource.to_owned(),
        };
        cause.evidence.push(format!(
            "there is too little of something: {}",
            resource_shortage.text
        ));
        cause.hint = resource_shortage.fix;
    }
}
