//! Finds threads that do not return from a call of NCCL or CUDA (`inside.rs` describes the consequences).
//!
//! The sentinel is a duty of the [`monitor`]. It sleeps after a while in which no thread entered a call, and the next thread that
//! enters wakes it. It counts its own looks and not the time: while the process was stopped, no thread was inside any longer.

use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use crate::communicator::{Inner, Visit};
use crate::error::{Error, ErrorKind, Mark, Result};
use crate::fatal::{FatalCause, FatalReport, end_the_process};
use crate::inside::{self, BELL, Found, Place};
use crate::monitor::{self, Duty, Next, Rest};
use crate::request::replace_poller;
use crate::sync::Mutex;
use crate::threads::not_started;

/// How often the sentinel looks.
const TICK: Duration = Duration::from_millis(100);
/// How much longer than its timeout a call may take: the waits of this crate end by themselves before.
const SLACK: Duration = Duration::from_secs(2);
/// How long a thread may take to return after its communicator has ended.
const GRACE: Duration = Duration::from_secs(5);
/// After how many looks without a new call the sentinel sleeps.
const QUIET: u32 = 5;

static LIVES: Mutex<Vec<Weak<Inner>>> = Mutex::new(Vec::new());

/// Watches the calls on this communicator from now on.
///
/// # Errors
/// When no thread can be started for it.
pub(crate) fn watch(inner: &Arc<Inner>) -> Result<()> {
    {
        let mut lives = LIVES.lock();
        lives.retain(|inner| inner.strong_count() > 0);
        let own = Arc::downgrade(inner);
        if !lives.iter().any(|known| known.ptr_eq(&own)) {
            lives.push(own);
        }
    }
    monitor::ensure(&BELL, Sentinel::new)
        .map_err(not_started("that looks for calls that do not come back"))
}

/// A thread that is inside a call.
#[derive(Clone, Copy)]
struct Stay {
    found: Found,
    looks: u32,
    /// How many looks ago its communicator ended.
    over: Option<u32>,
    /// Whether its timeout has passed, and the abort has been started.
    expired: bool,
}

/// The duty that finds threads that do not return from a call.
struct Sentinel {
    /// The calls in progress, by the address of their slots.
    stays: HashMap<usize, Stay>,
    turns: u64,
    rest: Rest,
}

impl Sentinel {
    fn new() -> Self {
        Self {
            stays: HashMap::new(),
            turns: 0,
            rest: Rest::new(&BELL, TICK, QUIET),
        }
    }
}

impl Duty for Sentinel {
    fn look(&mut self) -> Next {
        let slots = inside::slots();
        let turns = slots
            .iter()
            .fold(0_u64, |sum, slot| sum.wrapping_add(slot.turn()));
        let has_moved = turns != self.turns;
        self.turns = turns;
        for slot in slots {
            let key = std::ptr::from_ref(slot).addr();
            let Some(found) = slot.look() else {
                self.stays.remove(&key);
                continue;
            };
            let new = Stay {
                found,
                looks: 0,
                over: None,
                expired: false,
            };
            let stay = self.stays.entry(key).or_insert(new);
            if stay.found.turn != found.turn {
                *stay = new;
            }
            stay.looks += 1;
            if stay.looks > 1 {
                look_at(stay);
            }
        }
        self.rest.after(has_moved || !self.stays.is_empty())
    }

    fn is_over(&self) -> bool {
        let lives = LIVES.try_lock();
        lives.is_some_and(|lives| lives.iter().all(|inner| inner.strong_count() == 0))
    }
}

fn look_at(stay: &mut Stay) {
    // No thread can be inside a communicator that is gone.
    let Some(inner) = alive(stay.found.of) else {
        return;
    };
    let inside = TICK * stay.looks;
    if !stay.expired && inside > stay.found.timeout.saturating_add(SLACK) {
        stay.expired = true;
        let error = stuck(&inner, &stay.found);
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
            "a thread does not come back"
        );
        inner.abort_in_background(&error);
    }
    if !inner.phase.get().is_final() {
        return;
    }
    let over = stay.over.get_or_insert(0);
    *over += 1;
    if TICK * *over <= GRACE {
        return;
    }
    if stay.found.place == Place::Poller {
        stay.over = None;
        replace_poller();
        // The sentinel ignores this call from now on.
        stay.found.timeout = Duration::MAX;
        return;
    }
    let cause = FatalCause::Inside {
        call: stay.found.place.text(),
        since: inside,
        timeout: stay.found.timeout,
    };
    end_the_process(FatalReport::new(inner.identity(), cause));
}

fn alive(of: usize) -> Option<Visit> {
    let lives = LIVES.lock();
    let inner = lives.iter().find(|inner| inner.as_ptr().addr() == of);
    inner.and_then(Visit::of)
}

fn stuck(inner: &Arc<Inner>, found: &Found) -> Error {
    let (kind, sequence) = inner.handle.holder();
    let error = Error::new(ErrorKind::TimedOut {
        what: format!("{}, and has not come back,", found.place.text()),
        timeout: found.timeout,
    });
    // The call may be waiting for a rank that does not arrive.
    let may_connect = matches!(found.place, Place::Issue | Place::Capture)
        && inner.tracked.track().may_connect(sequence);
    let error = match may_connect {
        true => error,
        false => error.marked(Mark::Inside),
    };
    let now = Instant::now();
    match kind {
        Some(kind) => error.during(|| {
            let shape = inner.tracked.track().shape_of(sequence);
            inner.operation(kind, shape, Some(sequence), now)
        }),
        None => error,
    }
}
