//! The interface of the control plane to the program that it runs in, whose recorders and fault listeners it does not know.
//!
//! The program registers an [`Application`] once ([`set_application`]). The application attaches a value to each session, which
//! records the calls of the session's rank, and with the first communicator a fault listener, which ends failed communicators.

use std::any::Any;
use std::panic::{RefUnwindSafe, UnwindSafe};
use std::sync::{Arc, OnceLock};

use crate::fault::Fault;

/// The program of this process.
pub trait Application: Sync {
    /// Called when the process has a rank of a world.
    fn session_opened(
        &self,
        job: &str,
        generation: u64,
        rank: usize,
        world_size: usize,
    ) -> Arc<dyn RankRecorder>;

    /// Returns the recordings of all its ranks, in at most `max_bytes` bytes.
    fn recording(&self, max_bytes: usize) -> Vec<u8>;

    /// Returns its last call, for heartbeats.
    fn last_call(&self) -> Option<String>;
}

/// The value attached to a session when it is opened.
pub trait RankRecorder: Any + Send + Sync + UnwindSafe + RefUnwindSafe {
    /// Returns the recording of this rank, in at most `max_bytes` bytes.
    fn recording(&self, max_bytes: usize) -> Vec<u8>;

    /// Returns a number that grows while NCCL moves data between all ranks of the world.
    fn progress(&self) -> u64;

    /// Whether the offset of its clock to that of rank 0 matters.
    fn wants_clock(&self) -> bool;

    /// Called on the value of the next generation; `past` is that of the generation before.
    fn continue_from(&self, past: &Arc<dyn RankRecorder>);

    /// Sets that offset; `None` on rank 0 itself.
    fn set_clock(&self, measured: Option<ClockReading>);
}

/// Ends the communicators of a session when a fault of them is decided.
pub trait FaultListener: Any + Send + Sync + UnwindSafe + RefUnwindSafe {
    /// Returns the latest fault.
    fn latest_fault(&self) -> Option<Arc<Fault>>;

    /// Ends all communicators except those with the keys `kept`.
    fn end_all(&self, reason: &str, kept: &[&str]);
}

/// How far another process's clock is ahead, and the round trip of the request for it, both in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[doc(hidden)]
pub struct ClockReading {
    pub ahead: i128,
    pub round_trip: u128,
}

static APPLICATION: OnceLock<&'static dyn Application> = OnceLock::new();

/// Registers the application; only the first call has an effect.
pub fn set_application(application: &'static dyn Application) {
    let _ = APPLICATION.set(application);
}

pub(super) fn application() -> &'static dyn Application {
    APPLICATION.get().copied().unwrap_or(&NoApplication)
}

/// An application that records nothing.
struct NoApplication;

impl Application for NoApplication {
    fn session_opened(&self, _: &str, _: u64, _: usize, _: usize) -> Arc<dyn RankRecorder> {
        Arc::new(Self)
    }

    fn recording(&self, _: usize) -> Vec<u8> {
        Vec::new()
    }

    fn last_call(&self) -> Option<String> {
        None
    }
}

impl RankRecorder for NoApplication {
    fn recording(&self, _: usize) -> Vec<u8> {
        Vec::new()
    }

    fn progress(&self) -> u64 {
        0
    }

    fn wants_clock(&self) -> bool {
        false
    }

    fn continue_from(&self, _: &Arc<dyn RankRecorder>) {}

    fn set_clock(&self, _: Option<ClockReading>) {}
}
