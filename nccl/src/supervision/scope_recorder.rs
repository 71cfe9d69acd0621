//! The recorder scope of the calls of a rank, attached to its session.

use std::any::Any;
use std::sync::Arc;

use nccl_control::{ClockReading, RankRecorder, RankSession};
use nccl_core::recorder::{self, Clock, RecorderScope, Snapshot};
use nccl_diagnose::debug_log::{self, LogPosition};

/// The recorder scope of the calls of a rank in one generation.
pub(super) struct ScopeRecorder {
    scope: Arc<RecorderScope>,
    /// Where NCCL's log file ended when the generation began.
    log_start: LogPosition,
}

impl ScopeRecorder {
    pub(super) fn new(scope: Arc<RecorderScope>) -> Self {
        Self {
            scope,
            log_start: debug_log::log_end(),
        }
    }
}

impl RankRecorder for ScopeRecorder {
    fn recording(&self, max_bytes: usize) -> Vec<u8> {
        to_json_bytes(recorder::of_place(self.scope.place()), max_bytes)
    }

    fn progress(&self) -> u64 {
        recorder::progress_of(&self.scope)
    }

    fn wants_clock(&self) -> bool {
        recorder::is_enabled(&self.scope)
    }

    fn continue_from(&self, past: &Arc<dyn RankRecorder>) {
        self.scope.set_previous_generation(&of(past).scope);
    }

    fn set_clock(&self, measured: Option<ClockReading>) {
        // The offset that turns times of this process into times of rank 0.
        let clock = measured.map_or(Clock::REFERENCE, |reading| {
            Clock::measured(-reading.ahead, reading.round_trip)
        });
        self.scope.set_clock(clock);
    }
}

/// Returns the recorder scope under which the communicators of a session record their calls.
pub(super) fn scope_of(session: &RankSession) -> Arc<RecorderScope> {
    Arc::clone(&of(session.recorder()).scope)
}

/// Returns where the generation of a session begins in NCCL's log file: what is before is evidence of no fault of this generation.
pub(super) fn log_start(session: &RankSession) -> LogPosition {
    of(session.recorder()).log_start
}

fn of(recorder: &Arc<dyn RankRecorder>) -> Arc<ScopeRecorder> {
    let recorder: Arc<dyn Any + Send + Sync> = Arc::clone(recorder) as _;
    match recorder.downcast::<ScopeRecorder>() {
        Ok(scope_recorder) => scope_recorder,
        Err(_) => unreachable!("a line was opened before this crate had introduced itself"),
    }
}

pub(super) fn to_json_bytes(mut snapshot: Snapshot, max_bytes: usize) -> Vec<u8> {
    snapshot.limit_to(max_bytes);
    snapshot.to_json().into_bytes()
}
