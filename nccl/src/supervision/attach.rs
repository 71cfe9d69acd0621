//! What this crate attaches to the sessions of the control plane: the recorder scope of a rank, and the fault listener of its
//! communicators.

use std::any::Any;
use std::sync::{Arc, Once};
use std::time::Duration;

use super::fault_listener::CommunicatorFaultListener;
use super::inside_nccl;
use super::scope_recorder::{ScopeRecorder, scope_of, to_json_bytes};
use crate::drop_queue;
use crate::forked;
use crate::recorder::{MissingRank, RankRecording, Timeline};
use nccl_base::fault::Fault;
use nccl_control::{
    Application, ClockReading, FaultListener, RankRecorder, RankSession, RecordingAnswers,
    leave_all, set_application,
};
use nccl_core::recorder::{self, Clock, RecorderScope, Snapshot};

/// Registers this crate with the control plane, before the first session is opened.
pub(crate) fn register_with_control() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        set_application(&NcclApplication);
        recorder::set_inside_nccl(inside_nccl::sentences);
        drop_queue::set_exit_hook(leave_all);
    });
}

struct NcclApplication;

impl Application for NcclApplication {
    fn session_opened(
        &self,
        job: &str,
        generation: u64,
        rank: usize,
        world_size: usize,
    ) -> Arc<dyn RankRecorder> {
        Arc::new(ScopeRecorder::new(RecorderScope::new(
            job, generation, rank, world_size,
        )))
    }

    fn recording(&self, max_bytes: usize) -> Vec<u8> {
        to_json_bytes(recorder::snapshot(), max_bytes)
    }

    fn last_call(&self) -> Option<String> {
        recorder::last_call()
    }
}

impl FaultListener for CommunicatorFaultListener {
    fn latest_fault(&self) -> Option<Arc<Fault>> {
        CommunicatorFaultListener::latest(self)
    }

    fn end_all(&self, reason: &str, kept: &[&str]) {
        CommunicatorFaultListener::end_all(self, reason, kept);
    }
}

/// What is attached to a session.
pub(crate) trait SessionExt {
    /// Returns the recorder scope under which its communicators record their calls.
    fn scope(&self) -> Arc<RecorderScope>;

    /// Returns the fault listener of its communicators.
    fn fault_listener(&self) -> Arc<CommunicatorFaultListener>;
}

impl SessionExt for Arc<RankSession> {
    fn scope(&self) -> Arc<RecorderScope> {
        scope_of(self)
    }

    fn fault_listener(&self) -> Arc<CommunicatorFaultListener> {
        let fault_listener = self.fault_listener_with(|session| {
            drop_queue::register_exit_handler();
            CommunicatorFaultListener::start(session)
        });
        let fault_listener: Arc<dyn Any + Send + Sync> = fault_listener as _;
        match fault_listener.downcast() {
            Ok(fault_listener) => fault_listener,
            Err(_) => unreachable!("only this crate attaches a fault listener"),
        }
    }
}

/// Returns the recordings of all ranks of a session.
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
    // Copies this rank's recording before asking the others, which may take long, so that it is not overwritten
    // meanwhile.
    let mine = own(session.rank());
    match session.ask_for_recordings(timeout, &decode) {
        Some(answers) => timeline(reference, vec![mine], answers),
        // All ranks are threads of this process.
        None => {
            let (job, generation) = session.job();
            let answers = RecordingAnswers {
                job: job.to_owned(),
                generation,
                answers: Vec::new(),
                missing: Vec::new(),
            };
            timeline(reference, (0..session.size()).map(own).collect(), answers)
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
    answers: RecordingAnswers<RankRecording>,
) -> Timeline {
    ranks.extend(answers.answers);
    ranks.sort_by_key(|one| one.rank);
    let missing = answers.missing.into_iter();
    let missing = missing
        .map(|one| MissingRank::new(one.rank, one.host, one.pid, one.why))
        .collect();
    Timeline::new((answers.job, answers.generation), reference, ranks, missing)
}
