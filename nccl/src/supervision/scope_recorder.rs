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

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::process::Command;

    use super::*;

    /// The environment names NCCL's log file: this test starts itself again, with a file.
    #[test]
    fn a_generation_begins_at_the_end_of_the_log() {
        const MARK: &str = "NCCL_TEST_WITH_LOG";
        let Some(path) = std::env::var_os(MARK) else {
            let name =
                "supervision::scope_recorder::tests::a_generation_begins_at_the_end_of_the_log";
            let path = std::env::temp_dir().join(format!("nccl-log-{}", std::process::id()));
            let child = Command::new(std::env::current_exe().unwrap())
                .args(["--exact", name])
                .env("NCCL_DEBUG_FILE", &path)
                .env(MARK, &path)
                .output()
                .unwrap();
            let _ = std::fs::remove_file(path);
            let said = String::from_utf8_lossy(&child.stdout);
            // Under a wrong name, no test would run, and so none would fail.
            let has_run = said.contains("1 passed");
            return assert!(child.status.success() && has_run, "{said}");
        };
        let mut log = std::fs::File::create(path).unwrap();
        let mut warn = || {
            let pid = std::process::id();
            writeln!(log, "h:{pid}:{pid} [0] odd.cc:3 NCCL WARN it is odd").unwrap();
        };
        warn();
        // Reading gives up after a moment, which a busy machine may need.
        let begin = |_| ScopeRecorder::new(RecorderScope::new("job", 1, 0, 1)).log_start;
        let found = |start: &LogPosition| debug_log::first_warning(*start);
        let start = (0..20)
            .map(begin)
            .find(|start| *start != LogPosition::default());
        let start = start.expect("the log has a line");
        assert_eq!(found(&start), None);
        warn();
        let warning = (0..20).find_map(|_| found(&start));
        assert_eq!(warning.unwrap().text, "it is odd");
    }
}
