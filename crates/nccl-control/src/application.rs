//! The interface between the control plane and the program that it runs in, whose recorders and fault listeners it does
//! not know.
//!
//! The program registers an [`Application`] once ([`set_application`]). The application attaches a [`RankRecorder`] to
//! each session, which records the calls of the session's rank. With the first communicator, it attaches a
//! [`FaultListener`], which ends failed communicators.

use std::any::Any;
use std::panic::{RefUnwindSafe, UnwindSafe};
use std::sync::{Arc, OnceLock};

use crate::fault::Fault;

/// The program of this process.
pub trait Application: Sync {
    /// Called when the process has become a rank of a world.
    fn session_opened(
        &self,
        job: &str,
        generation: u64,
        rank: usize,
        world_size: usize,
    ) -> Arc<dyn RankRecorder>;

    /// Returns the recordings of all ranks of this process, in at most `max_bytes` bytes.
    fn recording(&self, max_bytes: usize) -> Vec<u8>;

    /// Returns the last call of this process, for heartbeats.
    fn last_call(&self) -> Option<String>;
}

/// The recorder attached to a session when it is opened.
pub trait RankRecorder: Any + Send + Sync + UnwindSafe + RefUnwindSafe {
    /// Returns the recording of this rank, in at most `max_bytes` bytes.
    fn recording(&self, max_bytes: usize) -> Vec<u8>;

    /// Returns a number that grows while NCCL moves data between all ranks of the world.
    fn progress(&self) -> u64;

    /// Whether the recorder needs the offset of its clock to that of rank 0.
    fn wants_clock(&self) -> bool;

    /// Called on the recorder of the next generation; `past` is the recorder of the previous one.
    fn continue_from(&self, past: &Arc<dyn RankRecorder>);

    /// Sets the offset of the clock to that of rank 0; `None` on rank 0 itself.
    fn set_clock(&self, measured: Option<ClockReading>);
}

/// Ends the communicators of a session when one of their faults is decided.
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
