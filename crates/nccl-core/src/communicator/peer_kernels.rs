//! Kernels of this crate that reach the memory of other ranks through windows.
//!
//! When NCCL frees a communicator, it unmaps its windows: a kernel that still reaches them would destroy the context. So such
//! kernels are told to leave when an abort begins, and NCCL frees the communicator only when they are over. Where one does not
//! end, the communicator is leaked.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::Inner;
use super::handle::Backoff;
use crate::state::FreeMethod;
use crate::sync::Mutex;

/// How long kernels may take to end before they are told to leave, and how long afterwards.
const PATIENCE: Duration = Duration::from_secs(2);

/// A kernel that may be under way, launched any number of times.
#[doc(hidden)]
pub trait PeerKernel: Send + Sync {
    /// Tells it to leave, now and whenever it is launched again. Never waits.
    fn leave(&self);

    /// Whether no launch of it is under way, or waits on its stream.
    fn is_over(&self) -> bool;
}

/// Those of a communicator.
#[derive(Default)]
pub(crate) struct PeerKernels(Mutex<Vec<Weak<dyn PeerKernel>>>);

impl PeerKernels {
    fn alive(&self) -> Vec<Arc<dyn PeerKernel>> {
        self.0.lock().iter().filter_map(Weak::upgrade).collect()
    }

    /// Whether there are none.
    pub(super) fn is_empty(&self) -> bool {
        self.alive().is_empty()
    }

    /// Tells all to leave.
    pub(super) fn leave(&self) {
        for kernel in self.alive() {
            kernel.leave();
        }
    }

    /// Waits until none is under way; false if that takes too long. After an orderly end they may come to their own.
    pub(super) fn end(&self, method: FreeMethod) -> bool {
        let kernels = self.alive();
        if kernels.is_empty() {
            return true;
        }
        let are_over = || kernels.iter().all(|kernel| kernel.is_over());
        if method == FreeMethod::Destroy && wait(are_over) {
            return true;
        }
        self.leave();
        wait(are_over)
    }
}

fn wait(is_over: impl Fn() -> bool) -> bool {
    let deadline = Instant::now() + PATIENCE;
    let mut backoff = Backoff::new();
    while !is_over() {
        if Instant::now() >= deadline {
            return false;
        }
        backoff.pause();
    }
    true
}

impl Inner {
    /// Adds a kernel, for as long as it is there.
    #[doc(hidden)]
    pub fn add_peer_kernel(&self, kernel: &Arc<dyn PeerKernel>) {
        let mut all = self.peer_kernels.0.lock();
        all.retain(|other| other.strong_count() > 0);
        all.push(Arc::downgrade(kernel));
        drop(all);
        // An abort that has begun meanwhile did not see it.
        if self.has_ended() {
            kernel.leave();
        }
    }

    /// Whether the communicator has ended, or its abort has begun.
    #[doc(hidden)]
    pub fn has_ended(&self) -> bool {
        let state = self.lifecycle.get();
        state.abort_has_begun() || state.is_final()
    }
}
