//! What is counted once for the process: nothing of it is on the way of an operation.

use std::sync::atomic::{AtomicU64, Ordering};

use super::durations::Timer;
use super::tally::KINDS;
use crate::operation::OperationKind;
use crate::supervision::FaultClass;

/// A number that any thread may add to.
#[derive(Debug)]
pub(crate) struct Events(AtomicU64);

impl Events {
    const fn none() -> Self {
        Self(AtomicU64::new(0))
    }

    pub(crate) fn count(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Communicators that were ended by a fault, by its class.
static FAULTS: [Events; FaultClass::ALL.len()] = [const { Events::none() }; FaultClass::ALL.len()];

/// Aborts that NCCL came back from, and those that it did not.
pub(crate) static FREED: Events = Events::none();
pub(crate) static LEAKED: Events = Events::none();
/// Communicators that NCCL has not given back, for whatever reason.
pub(crate) static LEAKED_COMMUNICATORS: Events = Events::none();
/// Ranks that had not entered an operation in which others waited, each time that this process heard of one.
pub(crate) static STRAGGLERS: Events = Events::none();

/// How long communicators took to make, also those that failed, and to abort.
pub(crate) static INIT: Timer = Timer::new();
pub(crate) static ABORT: Timer = Timer::new();

/// From the call of an operation that this rank gave up to the cause that all ranks have.
pub(crate) static DETECT: Timer = Timer::new();
/// From a fault that this rank heard of until a communicator was made with which it goes on.
pub(crate) static RECOVER: Timer = Timer::new();

static ENQUEUE: [Timer; KINDS] = [const { Timer::new() }; KINDS];

/// How long calls of a kind took until their work was on its stream, of some of them.
pub(crate) fn enqueue(kind: OperationKind) -> &'static Timer {
    &ENQUEUE[kind as usize]
}

pub(crate) fn faults(class: FaultClass) -> &'static Events {
    &FAULTS[class as usize]
}
