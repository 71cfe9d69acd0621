//! Determines when NCCL has let go of borrowed memory, which is before an abort returns.
//!
//! `ncclCommAbort` raises the abort flag at once, and returns when NCCL's own threads have ended, half a second later.
//! Only kernels access a program's memory, and they end when they see the flag. So before the call an event is
//! recorded behind the work on each stream; when all events are reached, this rank has let go, and tells the other ranks,
//! whose memory its kernels may have written. When all ranks have reported that, errors are handed out.
//!
//! Where more than kernels accesses memory of a rank (registered buffers, windows, captured graphs, copy engines: through
//! proxies and network cards), the rank reports that with the end of its kernels, and then all ranks wait for the end of all aborts.
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
    /// Starts a thread that waits for the end of all kernels; nothing more is issued. To be called before the pointer is
    /// passed to `ncclCommAbort`.
    pub(super) fn look_for_the_end(self: &Arc<Self>) {
        let unsettled = self.is_unsettled.load(Ordering::Acquire);
        if unsettled || self.phase.has_let_go() || reaper::is_closed() {
            return;
        }
        let inner = Arc::clone(self);
        let spawned = threads::spawn("nccl-let-go", move || inner.let_go());
        if let Err(error) = spawned {
            // Without the thread, errors wait for the end of the abort.
            events::no_thread("that looks for the end of kernels", &error);
        }
    }

    /// Records that NCCL has a launch under way that its abort has to end.
    pub(crate) fn left_unsettled(&self) {
        self.is_unsettled.store(true, Ordering::Release);
    }

    /// Whether more than kernels may access borrowed memory.
    pub(super) fn needs_the_whole_end(&self) -> bool {
        self.is_zero_cta || self.lends_to_proxies.load(Ordering::Acquire) || copy_engines_copy()
    }

    /// Records that NCCL's proxies, network cards or copy engines may use borrowed memory from now on: it is registered, by
    /// the program or by NCCL for a graph.
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
            // The effect of a failed context on memory is unknown before the abort ends.
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
            // Without a fault the other ranks continue, and do not report.
            Some(board) => board.is_at_fault() && board.let_go(so_far),
            None => true,
        };
        // Even if other ranks did not answer, the end of this rank's own abort is waited for.
        if is_over && !needs_all {
            self.phase.let_go();
        }
    }

    /// Records an event behind the unfinished work on each stream; `None` if that is not possible.
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

/// Whether NCCL is configured to copy messages with copy engines.
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
