//! The recorder scope of the calls of a rank, attached to its session.

use std::any::Any;
use std::sync::Arc;

use nccl_control::{ClockReading, RankRecorder, RankSession};
use nccl_core::recorder::{self, Clock, RecorderScope, Snapshot};

/// The recorder scope of the calls of a rank.
pub(super) struct ScopeRecorder(pub(super) Arc<RecorderScope>);

impl RankRecorder for ScopeRecorder {
    fn recording(&self, max_bytes: usize) -> Vec<u8> {
        to_json_bytes(recorder::of_place(self.0.place()), max_bytes)
    }

    fn progress(&self) -> u64 {
        recorder::progress_of(&self.0)
    }

    fn wants_clock(&self) -> bool {
        recorder::is_enabled(&self.0)
    }

    fn continue_from(&self, past: &Arc<dyn RankRecorder>) {
        self.0.set_previous_generation(&scope(past));
    }

    fn set_clock(&self, measured: Option<ClockReading>) {
        // The offset that turns times of this process into times of rank 0.
        let clock = measured.map_or(Clock::REFERENCE, |reading| {
            Clock::measured(-reading.ahead, reading.round_trip)
        });
        self.0.set_clock(clock);
    }
}

/// Returns the recorder scope under which the communicators of a session record their calls.
pub(super) fn scope_of(session: &RankSession) -> Arc<RecorderScope> {
    scope(session.recorder())
}

fn scope(recorder: &Arc<dyn RankRecorder>) -> Arc<RecorderScope> {
    let recorder: Arc<dyn Any + Send + Sync> = Arc::clone(recorder) as _;
    match recorder.downcast::<ScopeRecorder>() {
        Ok(scope_recorder) => Arc::clone(&scope_recorder.0),
        Err(_) => unreachable!("a line was opened before this crate had introduced itself"),
    }
}

pub(super) fn to_json_bytes(mut snapshot: Snapshot, max_bytes: usize) -> Vec<u8> {
    snapshot.limit_to(max_bytes);
    snapshot.to_json().into_bytes()
}
