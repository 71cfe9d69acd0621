//! The calls that free a communicator in NCCL.
//!
//! `ncclCommDestroy` and `ncclCommAbort` may block although they should not, so each runs on a thread that
//! can be given up.

use std::io;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use super::handle::{RawComm, Unsettled, free, settle};
use super::{Inner, SharedLaunch, Switch};
use crate::error::NcclFailure;
use crate::events;
use crate::ffi;
use crate::library::Library;
use crate::state::{Native, Way};
use crate::threads;

impl Native for Arc<Inner> {
    type Raw = RawComm;
    type Failure = NcclFailure;

    fn break_in(&self) {
        if let Some(switch) = &self.switch {
            switch.pull();
        }
    }

    fn slot<R>(&self, look: impl FnOnce(&mut Option<RawComm>) -> R) -> R {
        self.handle.slot(look)
    }

    fn free(&self, way: Way, raw: RawComm) -> Result<(), NcclFailure> {
        // NCCL waits for graphs that hold the communicator. A capture holds the lock, so that every graph is
        // in the list by now.
        self.destroy_plans();
        if way == Way::Abort {
            self.look_for_the_end();
        }
        let launch = self.shared_launch();
        let _first = launch.as_ref().map(|launch| launch.0.lock());
        if way == Way::Abort && self.revoke_instead(raw) {
            // NCCL has let go of all borrowed memory, and keeps the communicator.
            return Ok(());
        }
        let freed = free_with(&self.library, way, raw, self.switch.as_deref());
        freed.inspect_err(|failure| self.tell_not_freed(failure))
    }
}

impl Inner {
    /// Logs that NCCL refused to free it.
    pub(super) fn tell_not_freed(&self, failure: &NcclFailure) {
        events::not_freed(Some((&self.name, self.roster(), self.rank)), failure);
    }

    /// Returns the launch under way, or left unfinished, that it shares with others; to be locked while the communicator is freed.
    pub(super) fn shared_launch(&self) -> Option<Arc<SharedLaunch>> {
        self.launch.lock().clone()
    }
}

/// Frees a communicator together with the parent in its switch: an abort frees the parent first, a destroy frees it
/// last. See [`free`].
pub(crate) fn free_with(
    library: &Library,
    way: Way,
    raw: RawComm,
    switch: Option<&Switch>,
) -> Result<(), NcclFailure> {
    let Some(switch) = switch else {
        return free(library, way, raw);
    };
    match way {
        Way::Destroy => {
            free(library, way, raw)?;
            switch.destroy_parent(|parent| free(library, way, parent))
        }
        Way::Abort => {
            let pulled = switch.pull();
            switch.drained();
            let freed = free(library, way, raw);
            if freed.is_err() {
                switch.leak_place();
            }
            // If `raw` is an unfinished parent, the split may have written a child by then.
            let child = switch.take_child();
            let child = child.map_or(Ok(()), |child| free(library, way, child));
            let parent = match pulled {
                true => Ok(()),
                false => Err(ffi::missing(library, "ncclCommAbort")),
            };
            freed.and(child).and(parent)
        }
    }
}

/// Aborts a communicator that was made too late, or incompletely, and for which there is no [`Communicator`](crate::Communicator).
/// Blocks for as long as NCCL does.
pub(crate) fn discard(library: &Library, raw: RawComm, switch: Option<&Switch>) {
    if let Err(failure) = free_with(library, Way::Abort, raw, switch) {
        events::not_freed(None, &failure);
    }
}

/// Aborts several communicators in one group, so that no abort waits for a later one; returns for each whether
/// NCCL freed it. May block for as long as NCCL does.
pub(super) fn abort_in_a_group(
    library: &Library,
    raws: &[RawComm],
) -> Vec<Result<(), NcclFailure>> {
    let group = |call: &'static str, function: Option<unsafe extern "C" fn() -> _>| {
        let function = function.ok_or_else(|| ffi::missing(library, call))?;
        // SAFETY: takes no arguments. This thread is in no group before the first call; the second one closes it.
        ffi::check(library, call, unsafe { function() }).map(drop)
    };
    let none = |failure: NcclFailure| raws.iter().map(|_| Err(failure.clone())).collect();
    let api = library.api();
    if let Err(failure) = group("ncclGroupStart", api.ncclGroupStart) {
        return none(failure);
    }
    let abort = |&raw: &RawComm| free(library, Way::Abort, raw);
    let called = raws.iter().map(abort).collect();
    match group("ncclGroupEnd", api.ncclGroupEnd) {
        Ok(()) => called,
        Err(failure) => none(failure),
    }
}

/// Finalizes a communicator, and then the parent in its switch.
pub(super) fn finalize_with(
    library: &Library,
    raw: RawComm,
    switch: Option<&Arc<Switch>>,
    deadline: Instant,
    interrupted: impl Fn() -> bool,
) -> Result<(), Unsettled> {
    let Some(switch) = switch else {
        return finalize_raw(library, raw, deadline, interrupted);
    };
    finalize_blocking(library, raw, switch, deadline, &interrupted)?;
    // The parent has nothing to flush, but ends together with the parents of the other ranks.
    let ended = switch.with_parent(|parent| finalize_raw(library, parent, deadline, &interrupted));
    ended.unwrap_or(Ok(()))
}

/// Finalizes a communicator whose calls block, on a thread of its own. If the deadline passes, that thread is
/// still inside when this returns, until the switch is pulled.
fn finalize_blocking(
    library: &Library,
    raw: RawComm,
    switch: &Arc<Switch>,
    deadline: Instant,
    interrupted: impl Fn() -> bool,
) -> Result<(), Unsettled> {
    const LOOK: Duration = Duration::from_millis(1);
    let (entered, inside) = mpsc::sync_channel(1);
    let (sender, receiver) = mpsc::sync_channel(1);
    let (library, switch) = (library.clone(), Arc::clone(switch));
    let spawned = threads::spawn("nccl-finalize", move || {
        let finalizing = switch.finalizing();
        let _ = entered.send(());
        let finalized = call_finalize(&library, raw);
        drop(finalizing);
        let _ = sender.send(finalized);
    });
    // Without a thread the caller aborts; with one, `drained` must not succeed before the finalize has begun.
    if spawned.is_err() || inside.recv().is_err() {
        return Err(Unsettled::Interrupted);
    }
    loop {
        match receiver.recv_timeout(LOOK) {
            Ok(Ok(())) => return Ok(()),
            // The switch ended the finalize.
            Ok(Err(_)) if interrupted() => return Err(Unsettled::Interrupted),
            Ok(Err(failure)) => return Err(Unsettled::Failed(failure)),
            Err(mpsc::RecvTimeoutError::Disconnected) => return Err(Unsettled::Interrupted),
            Err(mpsc::RecvTimeoutError::Timeout) => {}
        }
        if interrupted() {
            return Err(Unsettled::Interrupted);
        }
        if Instant::now() >= deadline {
            return Err(Unsettled::TimedOut);
        }
    }
}

const FINALIZE: &str = "ncclCommFinalize";

fn finalize_raw(
    library: &Library,
    raw: RawComm,
    deadline: Instant,
    interrupted: impl Fn() -> bool,
) -> Result<(), Unsettled> {
    call_finalize(library, raw).map_err(Unsettled::Failed)?;
    settle(library, raw, FINALIZE, deadline, interrupted)
}

/// Calls `ncclCommFinalize`. The caller owns `raw`, and no other call on it is under way.
fn call_finalize(library: &Library, raw: RawComm) -> Result<(), NcclFailure> {
    let Some(finalize) = library.api().ncclCommFinalize else {
        return Ok(());
    };
    // SAFETY: guaranteed by the caller.
    let code = unsafe { finalize(raw.as_ptr()) };
    ffi::check(library, FINALIZE, code).map(drop)
}

/// Runs `work` on a thread of its own, and waits for the result for at most `timeout`.
pub(crate) fn within<T: Send + 'static>(
    timeout: Duration,
    name: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    match apart(name, work) {
        Ok(receiver) => receiver.recv_timeout(timeout).ok(),
        Err(error) => {
            events::no_thread("to end a communicator", &error);
            None
        }
    }
}

/// Runs `work` on a thread of its own, which sends the result; an error if there is no thread.
pub(super) fn apart<T: Send + 'static>(
    name: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<mpsc::Receiver<T>> {
    let (sender, receiver) = mpsc::sync_channel(1);
    threads::spawn(name, move || {
        // The receiver is gone if the deadline has passed.
        let _ = sender.send(work());
    })?;
    Ok(receiver)
}
