//! The counters of the process: none of them is on the path of an operation.

use std::sync::atomic::{AtomicU64, Ordering};

use super::durations::Timer;
use super::tally::KINDS;
use crate::operation::OperationKind;
use nccl_base::fault::FaultClass;

/// A counter that any thread may increment.
#[derive(Debug)]
#[doc(hidden)]
pub struct SharedCounter(AtomicU64);

impl SharedCounter {
    const fn none() -> Self {
        Self(AtomicU64::new(0))
    }

    #[doc(hidden)]
    pub fn count(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    #[doc(hidden)]
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Communicators that were ended by a fault, by its class.
static FAULTS: [SharedCounter; FaultClass::ALL.len()] =
    [const { SharedCounter::none() }; FaultClass::ALL.len()];

/// Aborts from which NCCL returned; below, aborts from which it did not return.
#[doc(hidden)]
pub static FREED: SharedCounter = SharedCounter::none();
#[doc(hidden)]
pub static LEAKED: SharedCounter = SharedCounter::none();
/// Communicators that NCCL has not freed, for whatever reason.
#[doc(hidden)]
pub static LEAKED_COMMUNICATORS: SharedCounter = SharedCounter::none();
/// Ranks that had not entered an operation in which others waited, counted each time such a rank was reported to this
/// process.
#[doc(hidden)]
pub static STRAGGLERS: SharedCounter = SharedCounter::none();

/// How long making a communicator took, including failures; below, how long an abort took.
#[doc(hidden)]
pub static INIT: Timer = Timer::new();
#[doc(hidden)]
pub static ABORT: Timer = Timer::new();

/// The time from the call of an operation that this rank gave up to the root cause that all ranks report.
#[doc(hidden)]
pub static DETECT: Timer = Timer::new();
/// The time from a fault that was reported to this rank until this rank has made the next communicator.
#[doc(hidden)]
pub static RECOVER: Timer = Timer::new();

static ENQUEUE: [Timer; KINDS] = [const { Timer::new() }; KINDS];

/// The time from a call of `kind` until its work is on its stream, for a sample of the calls.
#[doc(hidden)]
pub fn enqueue(kind: OperationKind) -> &'static Timer {
    &ENQUEUE[kind as usize]
}

#[doc(hidden)]
pub fn faults(class: FaultClass) -> &'static SharedCounter {
    &FAULTS[class as usize]
}
