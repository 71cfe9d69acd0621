//! What this crate attaches to the sessions of the control plane: the recorder scope of a rank, and the fault listener of its
//! communicators.

use std::any::Any;
use std::sync::{Arc, Once};
use std::time::Duration;

use super::fault_listener::FaultListener;
use super::scope_recorder::{ScopeRecorder, scope_of, to_json_bytes};
use crate::drop_queue;
use crate::forked;
use crate::recorder::{MissingRank, RankRecording, Timeline};
use nccl_base::fault::Fault;
use nccl_control::{
    Application, ClockReading, CommunicatorSupervisor, RankRecorder, RankSession, RecordingAnswers,
    leave_all, set_application,
};
use nccl_core::recorder::{self, Clock, RecorderScope, Snapshot};

/// Registers this crate with the control plane, before the first line is opened.
pub(crate) fn register_with_control() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        set_application(&ControlHost);
        drop_queue::set_exit_hook(leave_all);
    });
}

struct ControlHost;

impl Application for ControlHost {
    fn session_opened(
        &self,
        job: &str,
        generation: u64,
        rank: usize,
        world_size: usize,
    ) -> Arc<dyn RankRecorder> {
        Arc::new(ScopeRecorder(RecorderScope::new(
            job, generation, rank, world_size,
        )))
    }

    fn recording(&self, most: usize) -> Vec<u8> {
        to_json_bytes(recorder::snapshot(), most)
    }

    fn last_call(&self) -> Option<String> {
        recorder::last_call()
    }
}

impl CommunicatorSupervisor for FaultListener {
    fn latest_fault(&self) -> Option<Arc<Fault>> {
        FaultListener::latest(self)
    }

    fn end_all(&self, reason: &str, kept: &[&str]) {
        FaultListener::end_all(self, reason, kept);
    }
}

/// What is attached to a session.
pub(crate) trait SessionExt {
    /// Returns the recorder scope under which its communicators record their calls.
    fn scope(&self) -> Arc<RecorderScope>;

    /// Returns the fault listener of its communicators.
    fn fault_listener(&self) -> Arc<FaultListener>;
}

impl SessionExt for Arc<RankSession> {
    fn scope(&self) -> Arc<RecorderScope> {
        scope_of(self)
    }

    fn fault_listener(&self) -> Arc<FaultListener> {
        let watcher = self.watcher(|session| {
            drop_queue::register_exit_handler();
            FaultListener::start(session)
        });
        let watcher: Arc<dyn Any + Send + Sync> = watcher as _;
        match watcher.downcast() {
            Ok(fault_listener) => fault_listener,
            Err(_) => unreachable!("nobody else looks after communicators"),
        }
    }
}

/// Returns what all ranks of a session did last.
pub(crate) fn recordings(session: &Arc<RankSession>, timeout: Duration) -> Timeline {
    if forked::is_child() {
        return Timeline::default();
    }
    let scope = session.scope();
    let own = |rank| {
        let snapshot = recorder::of_place(&scope.place().of_rank(rank));
        RankRecording::new(rank, Clock::REFERENCE, snapshot)
    };
    let reference = session.describe(session.rank());
    // Copies the own recording before asking the others, which may take long: it must not be overwritten meanwhile.
    let mine = own(session.rank());
    match session.ask_for_recordings(timeout, &decode) {
        Some(asked) => timeline(reference, vec![mine], asked),
        // All ranks are threads of this process.
        None => {
            let (job, generation) = session.job();
            let asked = RecordingAnswers {
                job: job.to_owned(),
                generation,
                answers: Vec::new(),
                missing: Vec::new(),
            };
            timeline(reference, (0..session.size()).map(own).collect(), asked)
        }
    }
}

pub(crate) fn decode(
    rank: usize,
    reading: ClockReading,
    bytes: &[u8],
) -> Result<RankRecording, String> {
    if bytes.is_empty() {
        return Err(String::from("its program records nothing"));
    }
    let text = std::str::from_utf8(bytes).map_err(|error| error.to_string())?;
    let snapshot = Snapshot::from_json(text).map_err(|error| error.to_string())?;
    let clock = Clock::measured(reading.ahead, reading.round_trip);
    Ok(RankRecording::new(rank, clock, snapshot))
}

pub(crate) fn timeline(
    reference: String,
    mut ranks: Vec<RankRecording>,
    asked: RecordingAnswers<RankRecording>,
) -> Timeline {
    ranks.extend(asked.answers);
    ranks.sort_by_key(|one| one.rank);
    let missing = asked.missing.into_iter();
    let missing = missing
        .map(|one| MissingRank::new(one.rank, one.host, one.pid, one.why))
        .collect();
    Timeline::new((asked.job, asked.generation), reference, ranks, missing)
}
