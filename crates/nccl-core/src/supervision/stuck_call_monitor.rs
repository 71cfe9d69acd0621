//! Finds threads that do not return from a call of NCCL or CUDA (`active_calls.rs` describes the consequences).
//!
//! The stuck-call monitor is a periodic check of the [`monitor`]. It sleeps when no thread has entered a call for a while, and
//! the next thread that enters a call wakes it. It counts its own runs instead of time, because no thread made progress while
//! the process was stopped.

use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use crate::active_calls::{self, ActiveCall, CallKind, WAKE_FLAG};
use crate::communicator::{Inner, TemporaryHandle};
use crate::error::{Error, ErrorKind, ErrorProperty, Result};
use crate::fatal::{FatalCause, FatalReport, end_the_process};
use crate::monitor::{self, IdleCounter, NextCheck, PeriodicCheck};
use crate::request::replace_poller;
use crate::sync::Mutex;
use crate::threads::not_started;

/// How often the stuck-call monitor runs.
const TICK: Duration = Duration::from_millis(100);
/// How much longer than its timeout a call may take. The waits of this crate end by themselves before that.
const SLACK: Duration = Duration::from_secs(2);
/// How long a thread may take to return after its communicator has ended.
const GRACE: Duration = Duration::from_secs(5);
/// The number of runs without a new call after which the stuck-call monitor sleeps.
const QUIET: u32 = 5;

static COMMUNICATORS: Mutex<Vec<Weak<Inner>>> = Mutex::new(Vec::new());

/// Watches the calls on this communicator from now on.
///
/// # Errors
/// When no thread can be started for it.
pub(crate) fn watch(inner: &Arc<Inner>) -> Result<()> {
    {
        let mut communicators = COMMUNICATORS.lock();
        communicators.retain(|inner| inner.strong_count() > 0);
        let own = Arc::downgrade(inner);
        if !communicators.iter().any(|known| known.ptr_eq(&own)) {
            communicators.push(own);
        }
    }
    monitor::ensure(&WAKE_FLAG, StuckCallMonitor::new)
        .map_err(not_started("that monitors stuck calls"))
}

/// A thread that is inside a call.
#[derive(Clone, Copy)]
struct OngoingCall {
    found: ActiveCall,
    checks_seen: u32,
    /// How many runs ago its communicator ended.
    over: Option<u32>,
    /// Whether its timeout has passed, and the abort has been started.
    expired: bool,
    /// Whether another thread has taken the place of this one, which is not checked any more.
    replaced: bool,
}

/// The check that finds threads that do not return from a call.
struct StuckCallMonitor {
    /// The calls in progress, by the address of their slots.
    ongoing_calls: HashMap<usize, OngoingCall>,
    versions: u64,
    rest: IdleCounter,
}

impl StuckCallMonitor {
    fn new() -> Self {
        Self {
            ongoing_calls: HashMap::new(),
            versions: 0,
            rest: IdleCounter::new(&WAKE_FLAG, TICK, QUIET),
        }
    }
}

impl PeriodicCheck for StuckCallMonitor {
    fn check(&mut self) -> NextCheck {
        let slots = active_calls::slots();
        let versions = slots
            .iter()
            .fold(0_u64, |sum, slot| sum.wrapping_add(slot.version()));
        let has_moved = versions != self.versions;
        self.versions = versions;
        for slot in slots {
            let key = std::ptr::from_ref(slot).addr();
            let Some(found) = slot.read() else {
                self.ongoing_calls.remove(&key);
                continue;
            };
            let new = OngoingCall {
                found,
                checks_seen: 0,
                over: None,
                expired: false,
                replaced: false,
            };
            let ongoing = self.ongoing_calls.entry(key).or_insert(new);
            if ongoing.found.version != found.version {
                *ongoing = new;
            }
            ongoing.checks_seen += 1;
            if ongoing.checks_seen > 1 {
                check_call(ongoing);
            }
        }
        self.rest.after(has_moved || !self.ongoing_calls.is_empty())
    }

    fn is_over(&self) -> bool {
        let communicators = COMMUNICATORS.try_lock();
        communicators.is_some_and(|communicators| {
            communicators.iter().all(|inner| inner.strong_count() == 0)
        })
    }
}

fn check_call(ongoing: &mut OngoingCall) {
    if ongoing.replaced {
        return;
    }
    // No thread can be inside a call on a communicator that was dropped.
    let Some(inner) = communicator_at(ongoing.found.communicator_address) else {
        return;
    };
    let inside = TICK * ongoing.checks_seen;
    if !ongoing.expired && inside > ongoing.found.timeout.saturating_add(SLACK) {
        ongoing.expired = true;
        let error = stuck(&inner, &ongoing.found);
        let (rank, roster) = (inner.rank, inner.roster());
        tracing::error!(
            name: "nccl.comm.stuck",
            target: "nccl",
            comm = &*inner.name,
            world_ranks = roster.world_ranks(),
            rank,
            world_rank = roster.world_rank(rank),
            launcher_rank = roster.launcher_rank(rank),
            %error,
            "a thread does not return from a call"
        );
        inner.abort_in_background(&error);
    }
    if !inner.lifecycle.get().is_final() {
        return;
    }
    let over = ongoing.over.get_or_insert(0);
    *over += 1;
    if TICK * *over <= GRACE {
        return;
    }
    if ongoing.found.kind == CallKind::Poller {
        replace_poller();
        ongoing.replaced = true;
        return;
    }
    let cause = FatalCause::StuckCall {
        call: ongoing.found.kind.text(),
        since: inside,
        timeout: ongoing.found.timeout,
    };
    end_the_process(FatalReport::new(inner.identity(), cause));
}

fn communicator_at(address: usize) -> Option<TemporaryHandle> {
    let communicators = COMMUNICATORS.lock();
    let inner = communicators
        .iter()
        .find(|inner| inner.as_ptr().addr() == address);
    inner.and_then(TemporaryHandle::of)
}

fn stuck(inner: &Arc<Inner>, found: &ActiveCall) -> Error {
    let (kind, sequence) = inner.handle.last_holder();
    let error = Error::new(ErrorKind::TimedOut {
        what: format!("{}, which has not returned,", found.kind.text()),
        timeout: found.timeout,
    });
    // The call may be waiting for a rank that does not arrive.
    let may_connect = matches!(found.kind, CallKind::Issue | CallKind::Capture)
        && inner.track_handle.track().may_connect(sequence);
    let error = match may_connect {
        true => error,
        false => error.with_property(ErrorProperty::Inside),
    };
    let now = Instant::now();
    match kind {
        Some(kind) => error.during(|| {
            let shape = inner.track_handle.track().shape_of(sequence);
            inner.operation(kind, shape, Some(sequence), now)
        }),
        None => error,
    }
}
