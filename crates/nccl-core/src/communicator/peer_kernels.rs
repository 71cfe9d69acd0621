//! Kernels that reach the memory of other ranks through windows.
//!
//! When NCCL frees a communicator, it unmaps its windows, and a kernel that still accesses them would destroy the context. So
//! such kernels are told to leave when an abort begins, and NCCL frees the communicator only when they are over. If one of
//! them does not end, the communicator is leaked.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::handle::Backoff;
use crate::drop_queue;
use crate::error::Error;
use crate::sync::Mutex;

/// A kernel that may be under way, launched any number of times.
#[doc(hidden)]
pub trait PeerKernel: Send + Sync {
    /// Tells the kernel to leave, now and whenever it is launched again. Never waits.
    fn leave(&self);

    /// Whether none of its launches is under way, or waits on its stream.
    fn is_over(&self) -> bool;

    /// Returns the failure of a launch, which ends the communicator.
    fn failure(&self) -> Option<Error>;

    /// Whether it stands for work of the program that may use any window, once.
    fn is_hold(&self) -> bool {
        false
    }
}

/// The kernels of a communicator. Each is kept until it is over, even if its owner was dropped.
#[derive(Default)]
pub(crate) struct PeerKernels {
    kernels: Mutex<Vec<Arc<dyn PeerKernel>>>,
    /// Whether there has ever been one, so that most requests take no lock.
    any: AtomicBool,
}

/// Holds that must be over before something is freed: those that there were at one time. Later ones do not concern it.
#[derive(Default)]
pub(crate) struct Holds(Vec<Arc<dyn PeerKernel>>);

impl Holds {
    /// Whether all of them are over.
    pub(crate) fn are_over(&self) -> bool {
        self.0.iter().all(|hold| hold.is_over())
    }

    /// How long to wait for them before something is leaked: as long as the program holds the windows.
    pub(crate) fn patience(&self) -> Duration {
        match self.0.is_empty() {
            true => drop_queue::TIMEOUT,
            false => Duration::MAX,
        }
    }
}

impl PeerKernels {
    fn all(&self) -> Vec<Arc<dyn PeerKernel>> {
        match self.any.load(Ordering::Acquire) {
            true => self.kernels.lock().clone(),
            false => Vec::new(),
        }
    }

    /// Whether there are no kernels.
    pub(super) fn is_empty(&self) -> bool {
        self.all().is_empty()
    }

    /// Returns the holds that are not over.
    pub(crate) fn holds(&self) -> Holds {
        let mut all = self.all();
        all.retain(|kernel| kernel.is_hold() && !kernel.is_over());
        Holds(all)
    }

    /// Tells all kernels to leave.
    pub(super) fn leave(&self) {
        self.all().iter().for_each(|kernel| kernel.leave());
    }

    /// Whether no kernel is under way.
    pub(super) fn are_over(&self) -> bool {
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
        self.kernels.lock().push(kernel);
        self.any.store(true, Ordering::Release);
    }

    /// Removes the kernels that are over and have no other owner.
    fn forget(&self) {
        let mut gone = Vec::new();
        {
            let mut all = self.kernels.lock();
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
