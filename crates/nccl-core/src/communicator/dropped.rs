//! The end of a communicator that was dropped.

use std::sync::Arc;

use cudarc::driver::CudaStream;
use nccl_sys as sys;

use super::free::{KERNEL, finalize_with, free_with};
use super::handle::{NotIdle, RawComm, revoke_raw};
use super::peer_kernels::{DROPPED, PeerKernels};
use super::timeouts::Timeouts;
use super::{AbortFlagParent, Inner};
use crate::abort::AbortSignal;
use crate::active_calls;
use crate::drop_queue;
use crate::events;
use crate::ffi;
use crate::library::Library;
use crate::peers::Supervisor;
use crate::state::{FreeMethod, State, retire};
use crate::time::deadline_after;
use nccl_base::fault::{Cause, Roster};

/// The remains of a dropped communicator.
struct Dropped {
    library: Library,
    raw: RawComm,
    abort_flag_parent: Option<Arc<AbortFlagParent>>,
    name: Arc<str>,
    rank: usize,
    roster: Arc<Roster>,
    timeouts: Timeouts,
    /// The stream on which it captured, and the program's stream.
    streams: (Option<Arc<CudaStream>>, Arc<CudaStream>),
    in_use: Vec<Arc<CudaStream>>,
    peer_kernels: PeerKernels,
    has_blocking_calls: bool,
    supervisor: Option<Arc<dyn Supervisor>>,
    abort_signal: AbortSignal,
}

impl Drop for Inner {
    /// Never blocks: a thread finalizes the communicator, and only then releases its resources.
    fn drop(&mut self) {
        self.end_revoked();
        active_calls::wake_monitor();
        let raw = self.lifecycle.take_for_drop(&mut self.handle.get_mut().raw);
        let Some(raw) = raw else {
            if self.lifecycle.get() == State::Leaked {
                // NCCL may still be using these streams in the context.
                std::mem::forget((
                    self.capture_stream.take(),
                    Arc::clone(&self.context),
                    Arc::clone(&self.stream),
                    std::mem::take(&mut *self.in_use.lock()),
                ));
            }
            return;
        };
        let dropped = Dropped {
            library: self.library.clone(),
            raw,
            abort_flag_parent: self.abort_flag_parent.take(),
            name: Arc::clone(&self.name),
            rank: self.rank,
            roster: Arc::clone(self.roster()),
            timeouts: self.timeouts,
            streams: (self.capture_stream.take(), Arc::clone(&self.stream)),
            in_use: std::mem::take(&mut *self.in_use.lock()),
            peer_kernels: std::mem::take(&mut self.peer_kernels),
            has_blocking_calls: self.has_blocking_calls,
            supervisor: self.supervisor.take(),
            abort_signal: self.abort_signal.clone(),
        };
        if let Err(dropped) = drop_queue::run_on_thread(dropped, finalize_dropped) {
            std::mem::forget(dropped);
        }
    }
}

fn finalize_dropped(dropped: Dropped) {
    let timeout = dropped.timeouts.finalize;
    let (supervisor, signal) = (dropped.supervisor, dropped.abort_signal);
    let at_fault = || {
        supervisor
            .as_ref()
            .is_some_and(|supervisor| supervisor.has_fault())
    };
    let interrupted = || drop_queue::is_exiting() || at_fault() || signal.is_aborted();
    let abort_flag_parent = dropped.abort_flag_parent.as_ref();
    let peer_kernels = &dropped.peer_kernels;
    let retired = retire(
        dropped.raw,
        |raw| {
            let deadline = deadline_after(timeout);
            if !peer_kernels.wait(deadline, interrupted) {
                return Err(match interrupted() {
                    true => NotIdle::Interrupted,
                    false => NotIdle::TimedOut,
                });
            }
            finalize_with(
                &dropped.library,
                raw,
                abort_flag_parent,
                deadline,
                interrupted,
            )
        },
        |_| {
            // The other ranks may be waiting in an operation that this rank never enters.
            if let (true, Some(supervisor)) = (signal.is_aborted(), &supervisor) {
                Arc::clone(supervisor).announce(Cause::asked("its abort signal was given"));
            }
        },
        |way, raw| {
            peer_kernels.leave();
            // A kernel may be queued behind an operation of NCCL's that hangs.
            match abort_flag_parent {
                _ if way != FreeMethod::Abort || peer_kernels.are_over() => {}
                Some(abort_flag_parent) => {
                    abort_flag_parent.raise();
                }
                None if dropped.has_blocking_calls => {}
                // If NCCL refuses, such kernels do not end.
                None => drop(revoke_raw(&dropped.library, raw, deadline_after(DROPPED))),
            }
            if !peer_kernels.wait(deadline_after(DROPPED), || false) {
                let code = sys::ncclResult_t::ncclInProgress;
                return Err(ffi::failure(&dropped.library, KERNEL, code));
            }
            free_with(
                &dropped.library,
                way,
                raw,
                abort_flag_parent.map(|abort_flag_parent| &**abort_flag_parent),
            )
        },
    );
    let (rank, roster) = (dropped.rank, &dropped.roster);
    if let Err(failure) = &retired.freed {
        events::not_freed(Some((&dropped.name, roster, rank)), failure);
    }
    if let Err(not_idle) = retired.finalized {
        tracing::warn!(
            name: "nccl.comm.unclean",
            target: "nccl",
            comm = &*dropped.name,
            world_ranks = roster.world_ranks(),
            rank,
            world_rank = roster.world_rank(rank),
            launcher_rank = roster.launcher_rank(rank),
            unsettled=?not_idle,
            "a dropped communicator could not be finalized and was aborted"
        );
    }
    if retired.freed.is_err() {
        if let (true, Some(supervisor)) = (at_fault(), &supervisor) {
            supervisor.report_abort_returned(false, false);
        }
        let why = "it was dropped, and NCCL did not free it";
        crate::events::leaked_communicator((&dropped.name, roster), rank, why);
        std::mem::forget((dropped.streams, dropped.in_use));
    }
    // Dropped last, when no other rank waits for this one: now the session may send its leave message.
    drop(supervisor);
}
