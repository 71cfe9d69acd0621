//! Determines when NCCL has released borrowed memory, which happens before an abort returns.
//!
//! `ncclCommAbort` raises the abort flag at once, and returns half a second later, when NCCL's own threads have ended. Only
//! kernels access a program's memory, and they end when they see the flag. So before the call, an event is recorded behind the
//! work on each stream. When all events are reached, this rank has released the memory and reports that to the other ranks,
//! whose memory its kernels may have written. Errors are returned to callers when all ranks have reported.
//!
//! If more than kernels accesses a rank's memory (registered buffers, windows, captured graphs, copy engines; through proxies
//! and network cards), the rank reports that together with the end of its kernels, and all ranks wait for the end of all
//! aborts.
//!
//! ```text
//! abort begins ─▶ no call is under way ─▶ events recorded ─▶ ncclCommAbort ───────────────▶ ncclCommAbort returns
//!                                                └─▶ reached ─▶ all ranks report that ─▶ errors are handed out
//! ```

use std::mem::ManuallyDrop;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use cudarc::driver::CudaEvent;

use super::Inner;
use super::handle::Backoff;
use crate::cuda_driver;
use crate::drop_queue;
use crate::events;
use crate::peers::ReleaseProgress;
use crate::threads;
use crate::time::deadline_after;

impl Inner {
    /// Starts a thread that waits for the end of all kernels. To be called when nothing more is issued, and before the
    /// pointer is passed to `ncclCommAbort`.
    pub(super) fn watch_for_release(self: &Arc<Self>) {
        let not_idle = self.has_unfinished_launch.load(Ordering::Acquire);
        if not_idle || self.lifecycle.is_released() || drop_queue::is_closed() {
            return;
        }
        let inner = Arc::clone(self);
        let spawned = threads::spawn("nccl-release", move || inner.await_release());
        if let Err(error) = spawned {
            // Without the thread, errors are withheld until the abort has ended.
            events::no_thread("to wait for the end of kernels", &error);
        }
    }

    /// Whether objects of NCCL that are not used any more may be freed with the pointer in the slot: no thread of NCCL's own is
    /// inside a launch, and no abort has begun, which takes the pointer and ends the kernels of peers.
    pub(crate) fn may_free_objects(&self) -> bool {
        let has_ended = self.lifecycle.get().abort_has_begun();
        !has_ended && !self.has_unfinished_launch.load(Ordering::Acquire)
    }

    /// Records that NCCL has a launch under way that its abort has to end.
    pub(crate) fn record_unfinished_launch(&self) {
        self.has_unfinished_launch.store(true, Ordering::Release);
    }

    /// Whether borrowed memory may be accessed by more than kernels.
    pub(super) fn needs_full_abort(&self) -> bool {
        self.is_zero_cta || self.lends_beyond_kernels.load(Ordering::Acquire) || uses_copy_engines()
    }

    /// Records that NCCL's proxies, network cards or copy engines may use borrowed memory from now on, because the program,
    /// or NCCL for a graph, has registered it.
    pub(crate) fn lends_beyond_kernels(&self) {
        self.lends_beyond_kernels.store(true, Ordering::Release);
    }

    fn await_release(self: &Arc<Self>) {
        // No call is made while the process exits.
        let working = || drop_queue::DeviceCallGuard::begin();
        let events = working().and_then(|_working| self.record_events());
        let Some(events) = events.map(ManuallyDrop::new) else {
            return;
        };
        let deadline = deadline_after(self.timeouts.abort);
        let mut backoff = Backoff::new();
        loop {
            let Some(_working) = working() else {
                return;
            };
            let reached = events.iter().try_fold(true, |all, event| {
                event.try_is_complete().map(|reached| all && reached)
            });
            // If the context has failed, it is unknown what its work does to memory until the abort has ended.
            let stops_waiting =
                reached.is_err() || self.lifecycle.get().is_final() || Instant::now() >= deadline;
            if stops_waiting || reached == Ok(true) {
                drop(ManuallyDrop::into_inner(events));
                if stops_waiting {
                    return;
                }
                break;
            }
            drop(_working);
            backoff.pause();
        }
        let needs_all = self.needs_full_abort();
        let so_far = match needs_all {
            true => ReleaseProgress::KernelsAndNeedsAll,
            false => ReleaseProgress::Kernels,
        };
        let all_released = match &self.supervisor {
            // Without a fault the other ranks continue, and report nothing.
            Some(supervisor) => supervisor.has_fault() && supervisor.report_release(so_far),
            None => true,
        };
        // Otherwise the end of this rank's abort is awaited, also if other ranks did not answer.
        if all_released && !needs_all {
            self.lifecycle.set_released();
        }
    }

    /// Records an event behind the unfinished work on each stream; `None` if that is not possible.
    fn record_events(&self) -> Option<Vec<CudaEvent>> {
        cuda_driver::bind(&self.context).ok()?;
        let streams = self.in_use.lock().clone();
        let events = streams.iter().map(|stream| {
            if cuda_driver::is_capturing(stream) {
                return None;
            }
            let event = cuda_driver::new_event(&self.context, None).ok()?;
            cuda_driver::record(&event, stream).ok()?;
            Some(event)
        });
        events.collect()
    }
}

/// Whether NCCL is configured to copy messages with copy engines.
fn uses_copy_engines() -> bool {
    static USES_COPY_ENGINES: OnceLock<bool> = OnceLock::new();
    *USES_COPY_ENGINES.get_or_init(|| {
        ["NCCL_P2P_USE_CUDA_MEMCPY", "NCCL_SHM_USE_CUDA_MEMCPY"]
            .iter()
            .any(|name| {
                nccl_base::system::variables::variable(name)
                    .and_then(|(value, _)| nccl_base::system::variables::number(&value))
                    .is_some_and(|value| value != 0)
            })
    })
}
