//! Opening a session, and all sessions of this process.

use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, OnceLock, Weak};

use super::handle::{RankSession, SessionBackend};
use crate::application::application;
use crate::departure::Departure;
use crate::forked;
use crate::inbox::Inbox;
use crate::node::ActiveGeneration;
use crate::sync::Mutex;

static SESSIONS: Mutex<Vec<Weak<RankSession>>> = Mutex::new(Vec::new());

/// Returns all sessions of this process with other ranks.
pub fn sessions() -> Vec<Arc<RankSession>> {
    if forked::is_child() {
        return Vec::new();
    }
    SESSIONS.lock().iter().filter_map(Weak::upgrade).collect()
}

/// Registers an open session.
fn register(session: Weak<RankSession>) {
    if forked::is_child() {
        return;
    }
    let mut sessions = SESSIONS.lock();
    sessions.retain(|session| session.strong_count() > 0);
    sessions.push(session);
}

impl RankSession {
    pub(crate) fn open(
        rank: usize,
        size: usize,
        job: (String, u64),
        backend: SessionBackend,
        inbox: Arc<Inbox>,
    ) -> Arc<Self> {
        let recorder = application().session_opened(&job.0, job.1, rank, size);
        let session = Arc::new(Self {
            rank,
            size,
            backend,
            inbox,
            members: Arc::default(),
            fault_listener: OnceLock::new(),
            job,
            rounds: Mutex::default(),
            has_left_world: AtomicBool::new(false),
            reconfigured_to: AtomicU64::new(0),
            recorder,
            phase: Mutex::default(),
            final_departure: Mutex::new(Departure::Left),
        });
        if let SessionBackend::Node { node, .. } = session.backend() {
            node.set_recorder(&session.recorder);
        }
        forked::watch();
        register(Arc::downgrade(&session));
        session
    }

    /// Creates the session of an active generation of which this process is a member.
    pub(crate) fn of_generation(active: &ActiveGeneration) -> Arc<Self> {
        let backend = SessionBackend::Node {
            node: Arc::clone(&active.node),
            generation: active.generation,
        };
        let session = Self::open(
            active.rank,
            active.membership.members.len(),
            (active.node.job_name().to_owned(), active.generation),
            backend,
            Arc::clone(&active.inbox),
        );
        session.set_members(active.members());
        session
    }
}
