//! The guards of active faults and of delayed operations, which end with their guards.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::in_force::{COUNT, FAULTS, LATE_NANOS, read_environment};
use super::rule::Rule;

/// The guard of an active fault. Dropping it removes the fault and resumes the calls and operations
/// that it blocks.
///
/// ```
/// use nccl_emulator::faults;
/// let guard: faults::FaultGuard = faults::at_call("ncclSend").fail(3);
/// assert_eq!(guard.hits(), 0);
/// ```
#[derive(Debug)]
#[must_use = "the fault is in place only while the guard lives"]
pub struct FaultGuard(pub(super) Arc<Rule>);

impl FaultGuard {
    /// Returns the number of times that the fault has struck.
    ///
    /// ```
    /// use nccl_emulator::faults;
    /// let guard = faults::at_call("ncclGroupStart").fail(3);
    /// assert_eq!(guard.hits(), 0); // nobody has called it yet
    /// ```
    #[must_use]
    pub fn hits(&self) -> u64 {
        self.0.state.lock().hits
    }

    /// Waits until the fault has struck `hits` times. Returns false if that takes longer than
    /// `patience`.
    ///
    /// ```
    /// use nccl_emulator::faults;
    /// use std::time::Duration;
    /// let guard = faults::at_call("ncclGroupStart").hang();
    /// // Nobody calls it here, so that this waits in vain.
    /// assert!(!guard.wait_for_hits(1, Duration::from_millis(1)));
    /// ```
    #[must_use]
    pub fn wait_for_hits(&self, hits: u64, patience: Duration) -> bool {
        let mut state = self.0.state.lock();
        self.0
            .changed
            .wait_while_for(&mut state, |state| state.hits < hits, patience);
        state.hits >= hits
    }

    /// Removes the fault and resumes what it blocks, as dropping the guard does.
    ///
    /// ```
    /// use nccl_emulator::faults;
    /// let guard = faults::at_call("ncclGroupStart").hang();
    /// guard.release();
    /// assert_eq!(guard.hits(), 0); // what it has seen can still be asked
    /// ```
    pub fn release(&self) {
        let mut faults = FAULTS.lock();
        let before = faults.rules.len();
        faults.rules.retain(|rule| !Arc::ptr_eq(rule, &self.0));
        COUNT.fetch_sub(before - faults.rules.len(), Ordering::Relaxed);
        drop(faults);
        let wakers = {
            let mut state = self.0.state.lock();
            state.released = true;
            std::mem::take(&mut state.wakers)
        };
        self.0.changed.notify_all();
        wakers.into_iter().for_each(|wake| wake());
    }

    /// Keeps the fault active for the rest of the process.
    ///
    /// ```
    /// use nccl_emulator::faults;
    /// faults::at_call("ncclCommAbort").rank(7).hang().keep();
    /// ```
    pub fn keep(self) {
        std::mem::forget(self);
    }
}

impl Drop for FaultGuard {
    fn drop(&mut self) {
        self.release();
    }
}

/// Delays the beginning of every operation by `by` until the guard is dropped.
///
/// ```
/// use nccl_emulator::faults;
/// use std::time::Duration;
/// let late = faults::late(Duration::from_millis(5));
/// // … what is issued here runs at least 5 ms later …
/// drop(late);
/// ```
#[must_use = "the operations are late only while the guard lives"]
pub fn late(by: Duration) -> LateGuard {
    read_environment();
    LATE_NANOS.fetch_add(by.as_nanos() as u64, Ordering::Relaxed);
    LateGuard(by)
}

/// The guard of [`late`]: operations begin late until it is dropped.
///
/// ```
/// use nccl_emulator::faults;
/// use std::time::Duration;
/// let late: faults::LateGuard = faults::late(Duration::from_micros(100));
/// ```
#[derive(Debug)]
#[must_use = "the operations are late only while the guard lives"]
pub struct LateGuard(Duration);

impl Drop for LateGuard {
    fn drop(&mut self) {
        LATE_NANOS.fetch_sub(self.0.as_nanos() as u64, Ordering::Relaxed);
    }
}
