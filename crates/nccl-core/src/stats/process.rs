//! What is counted once for the process: nothing of it is on the way of an operation.

use std::sync::atomic::{AtomicU64, Ordering};

use super::durations::Timer;
use super::tally::KINDS;
use crate::operation::OperationKind;
use nccl_base::fault::FaultClass;

/// A number that any thread may add to.
#[derive(Debug)]
#[doc(hidden)]
pub struct Events(AtomicU64);

impl Events {
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
static FAULTS: [Events; FaultClass::ALL.len()] = [const { Events::none() }; FaultClass::ALL.len()];

/// Aborts that NCCL came back from, and those that it did not.
#[doc(hidden)]
pub static FREED: Events = Events::none();
#[doc(hidden)]
pub static LEAKED: Events = Events::none();
/// Communicators that NCCL has not given back, for whatever reason.
#[doc(hidden)]
pub static LEAKED_COMMUNICATORS: Events = Events::none();
/// Ranks that had not entered an operation in which others waited, each time that this process heard of one.
#[doc(hidden)]
pub static STRAGGLERS: Events = Events::none();

/// How long communicators took to make, also those that failed, and to abort.
#[doc(hidden)]
pub static INIT: Timer = Timer::new();
#[doc(hidden)]
pub static ABORT: Timer = Timer::new();

/// From the call of an operation that this rank gave up to the cause that all ranks have.
#[doc(hidden)]
pub static DETECT: Timer = Timer::new();
/// From a fault that this rank heard of until a communicator was made with which it goes on.
#[doc(hidden)]
pub static RECOVER: Timer = Timer::new();

static ENQUEUE: [Timer; KINDS] = [const { Timer::new() }; KINDS];

/// How long calls of a kind took until their work was on its stream, of some of them.
#[doc(hidden)]
pub fn enqueue(kind: OperationKind) -> &'static Timer {
    &ENQUEUE[kind as usize]
}

#[doc(hidden)]
pub fn faults(class: FaultClass) -> &'static Events {
    &FAULTS[class as usize]
}
