//! When NCCL has let go of lent memory, which is before an abort has come back.
//!
//! `ncclCommAbort` raises the abort flag at once, and returns when NCCL's own threads have ended, half a second later.
//! What touches a program's memory are kernels, and they end when they see the flag. So before the call an event is
//! recorded behind what was put on each stream; when all are reached, this rank has let go, and says so to the others,
//! whose memory its kernels may have written. When all have said it, an error is handed out.
//!
//! Where more than kernels touches memory of a rank (registered buffers, windows, captured graphs, copy engines: proxies and
//! network cards do), it says that with the end of its kernels, and the end of the aborts of all ranks counts.
//!
//! ```text
//! abort begins ─▶ no call is under way ─▶ events recorded ─▶ ncclCommAbort ───────────────▶ it has come back
//!                                                └─▶ reached ─▶ all ranks say so ─▶ errors are handed out
//! ```

use std::mem::ManuallyDrop;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use cudarc::driver::CudaEvent;

use super::Inner;
use super::handle::Backoff;
use crate::driver;
use crate::events;
use crate::peers::LetGo;
use crate::reaper;
use crate::threads;
use crate::time::deadline_after;

impl Inner {
    /// Looks for the end of all kernels, on a thread of its own; nothing more is issued. To be called before the pointer is
    /// given to `ncclCommAbort`.
    pub(super) fn look_for_the_end(self: &Arc<Self>) {
        let unsettled = self.is_unsettled.load(Ordering::Acquire);
        if unsettled || self.phase.has_let_go() || reaper::is_closed() {
            return;
        }
        let inner = Arc::clone(self);
        let spawned = threads::spawn("nccl-let-go", move || inner.let_go());
        if let Err(error) = spawned {
            // The end of the abort is waited for.
            events::no_thread("that looks for the end of kernels", &error);
        }
    }

    /// NCCL has a launch under way that its abort has to end.
    pub(crate) fn left_unsettled(&self) {
        self.is_unsettled.store(true, Ordering::Release);
    }

    /// Whether more than kernels may touch memory that was lent.
    pub(super) fn needs_the_whole_end(&self) -> bool {
        self.is_zero_cta || self.lends_to_proxies.load(Ordering::Acquire) || copy_engines_copy()
    }

    /// From now on NCCL's proxies, network cards or copy engines may use memory that was lent: it is registered, by the
    /// program or by NCCL because a graph has it.
    pub(crate) fn lends_to_proxies(&self) {
        self.lends_to_proxies.store(true, Ordering::Release);
    }

    fn let_go(self: &Arc<Self>) {
        // No call is made while the process exits.
        let working = || reaper::Working::begin();
        let behind = working().and_then(|_working| self.events_behind());
        let Some(behind) = behind.map(ManuallyDrop::new) else {
            return;
        };
        let deadline = deadline_after(self.timeouts.abort);
        let mut backoff = Backoff::new();
        loop {
            let Some(_working) = working() else {
                return;
            };
            let reached = behind.iter().try_fold(true, |all, event| {
                event.try_is_complete().map(|reached| all && reached)
            });
            // What a failed context does to memory is not known before the end.
            let gives_up =
                reached.is_err() || self.phase.get().is_final() || Instant::now() >= deadline;
            if gives_up || reached == Ok(true) {
                drop(ManuallyDrop::into_inner(behind));
                if gives_up {
                    return;
                }
                break;
            }
            drop(_working);
            backoff.pause();
        }
        let needs_all = self.needs_the_whole_end();
        let so_far = match needs_all {
            true => LetGo::KernelsAndNeedsAll,
            false => LetGo::Kernels,
        };
        let is_over = match &self.board {
            // Without a fault the others go on, and do not come to say anything.
            Some(board) => board.is_at_fault() && board.let_go(so_far),
            None => true,
        };
        // Also where other ranks did not answer, its own abort is waited for.
        if is_over && !needs_all {
            self.phase.let_go();
        }
    }

    /// Behind all that was put on streams and is not known to be done; none where that cannot be had.
    fn events_behind(&self) -> Option<Vec<CudaEvent>> {
        driver::bind(&self.context).ok()?;
        let streams = self.in_use.lock().clone();
        let behind = streams.iter().map(|stream| {
            if driver::is_capturing(stream) {
                return None;
            }
            let event = driver::new_event(&self.context, None).ok()?;
            driver::record(&event, stream).ok()?;
            Some(event)
        });
        behind.collect()
    }
}

/// Whether NCCL was told to copy messages with copy engines.
fn copy_engines_copy() -> bool {
    static THEY_DO: OnceLock<bool> = OnceLock::new();
    *THEY_DO.get_or_init(|| {
        ["NCCL_P2P_USE_CUDA_MEMCPY", "NCCL_SHM_USE_CUDA_MEMCPY"]
            .iter()
            .any(|name| {
                nccl_base::system::variables::variable(name)
                    .and_then(|(value, _)| nccl_base::system::variables::number(&value))
                    .is_some_and(|value| value != 0)
            })
    })
}
