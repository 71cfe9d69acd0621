//! NCCL's own way: `ncclCommShrink`, and what follows when it fails.

use std::sync::Arc;
use std::time::Duration;

use nccl_sys as sys;

use crate::communicator::free::{free, within};
use crate::communicator::handle::{RawComm, Unsettled, settle};
use crate::communicator::init::{Begin, Prepared};
use crate::communicator::lifecycle::{Outcome, Why};
use crate::communicator::slot::Slot;
use crate::communicator::start::Sent;
use crate::communicator::state::{Left, Way};
use crate::communicator::{Communicator, Inner};
use crate::driver;
use crate::error::Result;
use crate::ffi;
use crate::supervision::Cause;
use crate::time::deadline_after;
use crate::unique_id::UniqueId;

impl Communicator {
    pub(super) fn shrink_native(
        &self,
        prepared: Prepared,
        id: UniqueId,
        aborting: bool,
        places: &[usize],
    ) -> Result<Arc<Inner>> {
        let parent = &self.inner;
        // One that was revoked has been stopped already.
        let aborting = aborting && !parent.is_revoked();
        if aborting
            && !parent.begin_abort(Why::Quietly("it was shrunk, and what ran on it was ended"))
        {
            return Err(parent.conclude(parent.out_of_use()));
        }
        let limit = parent.timeouts.init;
        let without: Vec<i32> = (0..self.world_size())
            .filter(|rank| !places.contains(rank))
            .map(|rank| rank as i32)
            .collect();
        let made = Arc::new(Slot::default());
        let begin: Begin = {
            let (parent, made) = (Arc::clone(parent), Arc::clone(&made));
            Box::new(move |_, config, _| {
                let config = Sent(*config);
                let shrunk = within(limit.saturating_add(PATIENCE), "nccl-shrink", move || {
                    parent.shrink_raw(without, config, aborting, &made, limit)
                });
                match shrunk {
                    Some(Ok(raw)) => Ok((raw, Ok(()))),
                    Some(Err(unsettled)) => {
                        Err((Left::Nothing, unsettled.into_error("shrinking", limit)))
                    }
                    None => {
                        let error = Unsettled::TimedOut.into_error("ncclCommShrink", limit);
                        Err((Left::Lost, error))
                    }
                }
            })
        };
        let prepared = prepared.begun_by(begin);
        let outcome = prepared.join(&id, deadline_after(limit), || false);
        outcome.inspect_err(|error| {
            // NCCL's rule for a child that was not made: no other follows, and the parent is aborted, which
            // ends what is under way of it.
            let outcome = match aborting {
                true => {
                    // Those that are left out wait for nothing else.
                    if let Some(board) = &parent.board {
                        board.announce(Cause::from(error));
                    }
                    parent.carry_out_abort()
                }
                false => parent.abort(error),
            };
            if outcome == Outcome::Freed
                && let Some(ruin) = made.take()
            {
                let library = parent.library.clone();
                within(parent.timeouts.abort, "nccl-abort", move || {
                    free(&library, Way::Abort, ruin)
                });
            }
        })
    }
}

/// How much longer than its own limit a call may take that looks at its limit itself.
const PATIENCE: Duration = Duration::from_secs(2);

impl Inner {
    /// Asks NCCL, and waits until the parent is at rest. On a thread that may be given up.
    fn shrink_raw(
        &self,
        mut without: Vec<i32>,
        mut config: Sent,
        aborting: bool,
        made: &Arc<Slot>,
        limit: Duration,
    ) -> Result<RawComm, Unsettled> {
        const CALL: &str = "ncclCommShrink";
        let failed = Unsettled::Failed;
        let library = &self.library;
        let handle = self.handle.wait_for_it();
        let raw = handle.raw.or_else(|| self.revoked());
        let (Some(raw), Some(shrink)) = (raw, library.api().ncclCommShrink) else {
            return Err(failed(ffi::missing(library, CALL)));
        };
        let bound = driver::bind(&self.context);
        if bound.is_err() {
            return Err(Unsettled::Interrupted);
        }
        let flags = match aborting {
            true => sys::NCCL_SHRINK_ABORT,
            false => sys::NCCL_SHRINK_DEFAULT,
        };
        // NCCL writes there when the parent comes to rest, which may be after this thread is gone.
        std::mem::forget(Arc::clone(made));
        let count = without.len() as i32;
        // SAFETY: the lock is held, so nobody else calls on `raw`; the list and the config are valid for the
        // call, and the place for as long as the process lives.
        let code = unsafe {
            shrink(
                raw.as_ptr(),
                without.as_mut_ptr(),
                count,
                made.place(),
                &mut config.0,
                flags,
            )
        };
        ffi::check(library, CALL, code).map_err(failed)?;
        // By an abort that another rank asked for, or a rank that died. An abort of our own has begun already.
        let is_revoked = self.is_revoked();
        let interrupted = || match aborting {
            _ if is_revoked => self.abort_signal.is_aborted(),
            true => self
                .board
                .as_ref()
                .is_some_and(|board| board.fault().is_some()),
            false => self.interrupted(),
        };
        settle(library, raw, CALL, deadline_after(limit), interrupted)?;
        // SAFETY: the parent is at rest: NCCL writes no more.
        unsafe { Arc::decrement_strong_count(Arc::as_ptr(made)) };
        made.take()
            .ok_or_else(|| failed(ffi::missing(library, CALL)))
    }
}
