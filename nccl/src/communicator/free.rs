//! The calls that give a communicator back to NCCL.
//!
//! `ncclCommDestroy` and `ncclCommAbort` may block although they should not, so each runs on a thread that
//! can be given up.

use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use super::Inner;
use super::handle::{RawComm, Unsettled, settle};
use super::state::{Native, Way};
use crate::error::NcclFailure;
use crate::ffi;
use crate::library::Library;

impl Native for Arc<Inner> {
    type Raw = RawComm;
    type Failure = NcclFailure;

    fn slot<R>(&self, look: impl FnOnce(&mut Option<RawComm>) -> R) -> R {
        look(&mut self.handle.wait_for_it().raw)
    }

    fn free(&self, way: Way, raw: RawComm) -> Result<(), NcclFailure> {
        // NCCL waits for graphs that hold the communicator. Whoever captured one had the lock, so that it is
        // in the list by now.
        self.destroy_plans();
        free(&self.library, way, raw)
    }
}

/// Gives the communicator back to NCCL. May block for as long as NCCL likes. When it fails, NCCL may
/// still use what it was lent.
pub(super) fn free(library: &Library, way: Way, raw: RawComm) -> Result<(), NcclFailure> {
    let (call, function) = match way {
        Way::Destroy => ("ncclCommDestroy", library.api().ncclCommDestroy),
        Way::Abort => ("ncclCommAbort", library.api().ncclCommAbort),
    };
    let Some(function) = function else {
        return Err(ffi::missing(library, call));
    };
    // SAFETY: `raw` was taken out of its slot by the one caller that is to free it, so nothing else
    // reaches it.
    let code = unsafe { function(raw.as_ptr()) };
    let freed = ffi::check(library, call, code).map(drop);
    if let Err(failure) = &freed {
        tracing::warn!(target: "nccl", %failure, "a communicator could not be freed");
    }
    freed
}

/// Aborts all of them in one group, so that none waits for another one that comes later; for each whether
/// NCCL let go of it. May block for as long as NCCL likes.
pub(super) fn abort_in_a_group(library: &Library, raws: &[RawComm]) -> Vec<bool> {
    let api = library.api();
    let (Some(start), Some(end)) = (api.ncclGroupStart, api.ncclGroupEnd) else {
        return vec![false; raws.len()];
    };
    // SAFETY: takes no arguments; this thread is in no group.
    let started = unsafe { start() };
    if ffi::check(library, "ncclGroupStart", started).is_err() {
        return vec![false; raws.len()];
    }
    let called: Vec<bool> = raws
        .iter()
        .map(|&raw| free(library, Way::Abort, raw).is_ok())
        .collect();
    // SAFETY: takes no arguments; closes the group opened above.
    let ended = unsafe { end() };
    match ffi::check(library, "ncclGroupEnd", ended) {
        Ok(_) => called,
        Err(failure) => {
            tracing::warn!(target: "nccl", %failure, "communicators could not be freed together");
            vec![false; raws.len()]
        }
    }
}

pub(super) fn finalize_raw(
    library: &Library,
    raw: RawComm,
    deadline: Instant,
    interrupted: impl Fn() -> bool,
) -> Result<(), Unsettled> {
    const CALL: &str = "ncclCommFinalize";
    let Some(finalize) = library.api().ncclCommFinalize else {
        return Ok(());
    };
    // SAFETY: the caller owns `raw`, so no other call on it is under way.
    let code = unsafe { finalize(raw.as_ptr()) };
    ffi::check(library, CALL, code).map_err(Unsettled::Failed)?;
    settle(library, raw, CALL, deadline, interrupted)
}

/// Runs `work` on a thread of its own, and waits for it no longer than `limit`.
pub(super) fn within<T: Send + 'static>(
    limit: Duration,
    name: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    let (sender, receiver) = mpsc::sync_channel(1);
    std::thread::Builder::new()
        .name(name.to_owned())
        .spawn(move || {
            // Nobody listens any more if the deadline has passed.
            let _ = sender.send(work());
        })
        .ok()?;
    receiver.recv_timeout(limit).ok()
}
