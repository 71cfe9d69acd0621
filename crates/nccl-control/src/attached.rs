//! What the control plane asks of the program that it runs in, without knowing what that records and looks after.
//!
//! A program says once who answers ([`set_host`]). Of each line it attaches a value, under which the calls of this rank are recorded,
//! and with the first communicator another one, which looks after all of them.

use std::any::Any;
use std::panic::{RefUnwindSafe, UnwindSafe};
use std::sync::{Arc, OnceLock};

use crate::fault::Fault;

/// The program of this process.
pub trait Host: Sync {
    /// It has a rank of a world from now on.
    fn opens(&self, job: &str, epoch: u64, rank: usize, world_size: usize) -> Arc<dyn Attached>;

    /// What all of its ranks have recorded, in at most `most` bytes.
    fn recording(&self, most: usize) -> Vec<u8>;

    /// Its last call, as a heartbeat tells it.
    fn last_call(&self) -> Option<String>;
}

/// What is attached to a line when it is opened.
pub trait Attached: Any + Send + Sync + UnwindSafe + RefUnwindSafe {
    /// What this rank has recorded, in at most `most` bytes.
    fn recording(&self, most: usize) -> Vec<u8>;

    /// A number that grows while NCCL moves data between all ranks of the world.
    fn progress(&self) -> u64;

    /// Whether it matters how its clock stands to that of rank 0.
    fn wants_clock(&self) -> bool;

    /// This is the rank of the next epoch; that of the one before was `past`.
    fn goes_on_from(&self, past: &Arc<dyn Attached>);

    /// How it does; `None` on rank 0 itself.
    fn set_clock(&self, measured: Option<ClockReading>);
}

/// What looks after the communicators of a line.
pub trait Watcher: Any + Send + Sync + UnwindSafe + RefUnwindSafe {
    /// The verdict that was written last.
    fn latest(&self) -> Option<Arc<Fault>>;

    /// Ends all communicators but those with the keys `kept`.
    fn end_all(&self, reason: &str, kept: &[&str]);
}

/// How far ahead another process's clock is, in nanoseconds, and how long the question for that took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[doc(hidden)]
pub struct ClockReading {
    pub ahead: i128,
    pub round_trip: u128,
}

static HOST: OnceLock<&'static dyn Host> = OnceLock::new();

/// Says who answers. The first one stays.
pub fn set_host(host: &'static dyn Host) {
    let _ = HOST.set(host);
}

pub(super) fn host() -> &'static dyn Host {
    HOST.get().copied().unwrap_or(&Nobody)
}

/// Records nothing.
struct Nobody;

impl Host for Nobody {
    fn opens(&self, _: &str, _: u64, _: usize, _: usize) -> Arc<dyn Attached> {
        Arc::new(Self)
    }

    fn recording(&self, _: usize) -> Vec<u8> {
        Vec::new()
    }

    fn last_call(&self) -> Option<String> {
        None
    }
}

impl Attached for Nobody {
    fn recording(&self, _: usize) -> Vec<u8> {
        Vec::new()
    }

    fn progress(&self) -> u64 {
        0
    }

    fn wants_clock(&self) -> bool {
        false
    }

    fn goes_on_from(&self, _: &Arc<dyn Attached>) {}

    fn set_clock(&self, _: Option<ClockReading>) {}
}
