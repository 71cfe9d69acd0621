//! Kernels that reach the memory of other ranks through windows.
//!
//! When NCCL frees a communicator, it unmaps its windows, and a kernel that still accesses them would destroy the context. So
//! such kernels are told to leave when an abort begins, and NCCL frees the communicator only when they are over. If one of
//! them does not end, the communicator is leaked.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::handle::Backoff;
use crate::error::Error;
use crate::sync::Mutex;

/// A kernel that may be under way, launched any number of times.
#[doc(hidden)]
pub trait PeerKernel: Send + Sync {
    /// Tells the kernel to leave, now and whenever it is launched again. Never waits.
    fn leave(&self);

    /// Whether none of its launches is under way, or waits on its stream.
    fn is_over(&self) -> bool;

    /// Returns the failure of a launch, which an orderly end reports.
    fn failure(&self) -> Option<Error>;
}

/// The kernels of a communicator. Each is kept until it is over, even if its owner was dropped.
#[derive(Default)]
pub(crate) struct PeerKernels(Mutex<Vec<Arc<dyn PeerKernel>>>);

impl PeerKernels {
    fn all(&self) -> Vec<Arc<dyn PeerKernel>> {
        self.0.lock().clone()
    }

    /// Whether there are no kernels.
    pub(super) fn is_empty(&self) -> bool {
        self.0.lock().is_empty()
    }

    /// Tells all kernels to leave.
    pub(super) fn leave(&self) {
        self.all().iter().for_each(|kernel| kernel.leave());
    }

    /// Whether no kernel is under way.
    pub(crate) fn are_over(&self) -> bool {
        self.all().iter().all(|kernel| kernel.is_over())
    }

    /// Waits until no kernel is under way; false at the deadline, or when interrupted.
    pub(super) fn wait(&self, deadline: Instant, interrupted: impl Fn() -> bool) -> bool {
        let mut backoff = Backoff::new();
        while !self.are_over() {
            if Instant::now() >= deadline || interrupted() {
                return false;
            }
            backoff.pause();
        }
        true
    }

    /// Returns the failure of a kernel that has failed.
    pub(crate) fn failure(&self) -> Option<Error> {
        self.all().iter().find_map(|kernel| kernel.failure())
    }

    /// Adds a kernel.
    pub(super) fn add(&self, kernel: Arc<dyn PeerKernel>) {
        self.forget();
        self.0.lock().push(kernel);
    }

    /// Removes the kernels that are over and have no other owner.
    fn forget(&self) {
        let mut gone = Vec::new();
        {
            let mut all = self.0.lock();
            let mut index = 0;
            while index < all.len() {
                let is_gone = Arc::strong_count(&all[index]) == 1 && all[index].is_over();
                match is_gone {
                    true => gone.push(all.swap_remove(index)),
                    false => index += 1,
                }
            }
        }
        // Dropped after the lock is released.
        drop(gone);
    }
}

/// How long a dropped communicator waits for kernels that were told to leave.
pub(super) const DROPPED: Duration = Duration::from_secs(5);
