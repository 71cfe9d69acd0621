//! The looking thread and its schedule; and what the monitor does when that thread is stuck.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::look::{self, Eye, Found, Report, Task};
use super::registry::{AtWork, BELL, Entry, LINGER, LOOK, Running, STATE, State, Watched, period};
use crate::communicator::{Inner, Visit, same_stream};
use crate::monitor::{self, Duty, Next};
use crate::reaper;
use crate::recorder::{limit_of_word, origin};
use crate::standing::Overdue;
use crate::state::State as Life;
use crate::sync::{Condvar, MutexGuard};
use crate::threads;
use nccl_base::fault::short_key;

/// How often the monitor checks whether the watchdog is stuck, while anything is pending; and at how many checks
/// it has to find the same look. Counted, because a process may be stopped for a while.
const TICK: Duration = Duration::from_secs(1);
const STUCK: u32 = 3;

/// Starts the watchdog and the monitor, if they do not run.
pub(super) fn start(running: &mut Running) -> io::Result<()> {
    if !running.looks {
        let generation = running.generation;
        threads::spawn("nccl-watchdog", move || watch(generation))?;
        running.looks = true;
        reaper::register_exit();
    }
    monitor::ensure(&BELL, Keeper::default)
}

fn wait(bell: &Condvar, state: &mut MutexGuard<'_, State>, timeout: Option<Duration>) {
    match timeout {
        None => bell.wait(state),
        Some(timeout) => {
            bell.wait_for(state, timeout);
        }
    }
}

/// The looking thread.
fn watch(generation: u64) {
    let mut eyes: HashMap<u64, Eye> = HashMap::new();
    let mut state = STATE.lock();
    while state.threads.generation == generation {
        let asked = state.inquired.iter().map(|asked| asked.next).min();
        if asked.is_some_and(|asked| asked <= Instant::now()) {
            state = look_for_others(state);
            continue;
        }
        let now = Instant::now();
        let lulls = state.entries.iter_mut();
        let lulls = lulls.filter(|entry| entry.lull.as_ref().is_some_and(|lull| lull.at <= now));
        lulls.for_each(Entry::listen);
        let lulls = state.entries.iter().filter_map(|entry| entry.lull.as_ref());
        let lull = lulls.map(|lull| lull.at).min();
        let next = state.entries.iter().filter(|entry| entry.stuck.is_none());
        let next = next.min_by_key(|entry| entry.next);
        let looks = next.map(|entry| entry.next);
        let wakes = looks.into_iter().chain(asked).chain(lull).min();
        let pause = wakes.map(|wakes| wakes.saturating_duration_since(Instant::now()));
        if pause.is_none_or(|pause| !pause.is_zero()) {
            state.threads.planned = wakes;
            wait(&LOOK, &mut state, pause);
            continue;
        }
        let due = next.filter(|entry| entry.next <= now);
        let Some(number) = due.map(|entry| entry.track.number) else {
            continue;
        };
        let Some(mut task) = state.begin(number) else {
            continue;
        };
        drop(state);
        // CUDA is not called any more while the process exits.
        let Some(working) = reaper::Working::begin() else {
            std::mem::forget((eyes, task));
            threads::stay();
        };
        let begun = Instant::now();
        let report = eyes.entry(number).or_default().look(&mut task);
        state = STATE.lock();
        if state.threads.generation != generation {
            // The call returned after all.
            if let Some(entry) = state.entry(number) {
                entry.stuck = None;
                entry.next = Instant::now();
                LOOK.notify_one();
            }
            break;
        }
        state.threads.at_work = None;
        let (found, dropped) = state.conclude(number, &task, report, begun);
        let gone = state.entry(number).is_none();
        drop(state);
        if gone {
            eyes.remove(&number);
        }
        if let Some(found) = found
            && let Some(inner) = Visit::of(&task.inner)
        {
            end(&inner, found, &task);
        }
        // These may hold the last reference to a stream or the context, whose drop calls CUDA.
        drop((task, dropped));
        drop(working);
        state = STATE.lock();
    }
    drop(state);
    match reaper::Working::begin() {
        Some(_working) => drop(eyes),
        None => {
            std::mem::forget(eyes);
            threads::stay();
        }
    }
}

/// Answers the inquiries of other ranks that are due.
fn look_for_others(mut state: MutexGuard<'static, State>) -> MutexGuard<'static, State> {
    let now = Instant::now();
    let due: Vec<_> = state
        .inquired
        .extract_if(.., |asked| asked.next <= now)
        .collect();
    drop(state);
    let kept = due.into_iter().filter_map(|mut asked| {
        let again = !reaper::is_closed() && asked.look();
        again.then_some(asked)
    });
    let kept: Vec<_> = kept.collect();
    state = STATE.lock();
    for asked in kept {
        // A later inquiry of the same rank may have arrived meanwhile.
        if !state.inquired.iter().any(|other| other.is_about(&asked)) {
            state.inquired.push(asked);
        }
    }
    state
}

impl State {
    fn entry(&mut self, number: u64) -> Option<&mut Entry> {
        let mut entries = self.entries.iter_mut();
        entries.find(|entry| entry.track.number == number)
    }

    /// Begins a look: what to look at now.
    fn begin(&mut self, number: u64) -> Option<Task> {
        let entry = self.entry(number)?;
        let streams = entry.streams.iter_mut().map(|watched| {
            let incoming = watched.incoming.drain(..).collect();
            (Arc::clone(&watched.stream), watched.floor, incoming)
        });
        let task = Task {
            track: Arc::clone(&entry.track),
            streams: streams.collect(),
            inner: entry.inner.clone(),
        };
        self.threads.at_work = Some(AtWork {
            number,
            since: Instant::now(),
            ticks: 0,
        });
        Some(task)
    }

    /// Keeps the result of a look that began at `begun`. Returns the streams that are not watched any more, for the caller to
    /// drop without the lock.
    fn conclude(
        &mut self,
        number: u64,
        task: &Task,
        report: Option<Report>,
        begun: Instant,
    ) -> (Option<Found>, Vec<Watched>) {
        let Some(entry) = self.entry(number) else {
            return (None, Vec::new());
        };
        let Some(report) = report else {
            return (None, self.forget(number));
        };
        let Report {
            facts,
            streams,
            found,
        } = report;
        entry.facts = facts;
        let began = begun.saturating_duration_since(origin().monotonic);
        entry.unseen = entry.unseen.filter(|unseen| unseen.call.since > began);
        let mut dropped = Vec::new();
        for ((stream, ..), backlog) in task.streams.iter().zip(streams) {
            let watched = entry
                .streams
                .iter()
                .position(|watched| Arc::ptr_eq(&watched.stream, stream));
            let Some(at) = watched else { continue };
            let watched = &mut entry.streams[at];
            let is_idle = backlog.is_none() && watched.incoming.is_empty();
            watched.backlog = backlog.unwrap_or(0);
            match watched.idle_since {
                _ if !is_idle => watched.idle_since = None,
                Some(since) if begun.saturating_duration_since(since) >= LINGER => {
                    if let Some(inner) = Visit::of(&entry.inner) {
                        inner
                            .in_use
                            .lock()
                            .retain(|stream| !same_stream(stream, &watched.stream));
                    }
                    dropped.push(entry.streams.swap_remove(at));
                }
                Some(_) => {}
                None => {
                    // The next call comes here, and its marks tell it from earlier work.
                    watched.unlist(&entry.track);
                    watched.idle_since = Some(Instant::now());
                }
            }
        }
        if entry.streams.is_empty() {
            dropped.extend(self.forget(number));
            return (found, dropped);
        }
        let now = Instant::now();
        entry.next = if entry
            .streams
            .iter()
            .all(|watched| watched.idle_since.is_some())
        {
            now + LINGER
        } else {
            let timeout = limit_of_word(entry.track.usual.timeout());
            entry.interval = (entry.interval * 2).min(period(timeout));
            let next = now + entry.interval;
            let deadline = entry.facts.standing.and_then(|standing| standing.deadline);
            let deadline = deadline.and_then(|deadline| origin().monotonic.checked_add(deadline));
            deadline.map_or(next, |deadline| next.min(deadline.max(now + MOMENT)))
        };
        (found, dropped)
    }

    /// Stops watching a communicator.
    fn forget(&mut self, number: u64) -> Vec<Watched> {
        let at = self
            .entries
            .iter()
            .position(|entry| entry.track.number == number);
        let Some(at) = at else { return Vec::new() };
        let entry = self.entries.swap_remove(at);
        entry.track.usual.clear();
        entry.streams
    }
}

/// The shortest time between two looks at the same deadline.
const MOMENT: Duration = Duration::from_micros(500);

/// The monitor's duty for the watchdog: starts a successor of a stuck thread, and enforces the deadlines of the communicator at
/// which that thread is stuck.
#[derive(Default)]
struct Keeper {
    is_awake: bool,
}

impl Duty for Keeper {
    fn look(&mut self) -> Next {
        // The thread that holds the lock is about to release it.
        let Some(mut state) = STATE.try_lock() else {
            return Next::After(MOMENT);
        };
        if state.entries.is_empty() || reaper::is_closed() {
            self.is_awake = false;
            BELL.rest();
            return Next::Asleep;
        }
        if !std::mem::replace(&mut self.is_awake, true) {
            return Next::After(TICK);
        }
        if let Some(at_work) = &mut state.threads.at_work {
            at_work.ticks += 1;
            if at_work.ticks >= STUCK {
                let (number, since) = (at_work.number, at_work.since);
                replace(&mut state, number, since);
            }
        }
        let late = state.late();
        drop(state);
        for (inner, overdue) in late {
            end_overdue(&inner, &overdue);
        }
        Next::After(TICK)
    }

    fn is_over(&self) -> bool {
        STATE
            .try_lock()
            .is_some_and(|state| state.entries.is_empty())
    }
}

/// Starts another thread for everything but the communicator at which the last one is stuck.
fn replace(state: &mut State, number: u64, since: Instant) {
    let call = look::call();
    let identity = state.entry(number).map(|entry| &entry.track.identity);
    tracing::error!(
        name: "nccl.watchdog.stuck",
        target: "nccl",
        comm = identity.map(|of| &*of.name),
        comm_key = identity.and_then(|of| of.key.as_deref()).map(short_key),
        world_ranks = identity.and_then(|of| of.roster.world_ranks()),
        rank = identity.map(|of| of.rank),
        world_rank = identity.map(|of| of.roster.world_rank(of.rank)),
        launcher_rank = identity.and_then(|of| of.roster.launcher_rank(of.rank)),
        call,
        since = ?since.elapsed(),
        "a call of the watchdog does not come back; another thread goes on"
    );
    if let Some(entry) = state.entry(number) {
        entry.stuck = Some((call, since));
    }
    state.threads.generation += 1;
    state.threads.at_work = None;
    state.threads.looks = false;
    if let Err(error) = start(&mut state.threads) {
        // The next issued call tries again, and reports the failure.
        crate::events::no_thread("to watch over operations", &error);
    }
}

impl State {
    /// The overdue calls of communicators at which a thread is stuck.
    fn late(&mut self) -> Vec<(Visit, Overdue)> {
        let now = origin().monotonic.elapsed();
        let mut late = Vec::new();
        let has_ended = |entry: &mut Entry| {
            let is_over = entry.track.phase.get() != Life::Ready;
            entry.stuck.is_some() && (is_over || entry.inner.strong_count() == 0)
        };
        // Dropping a stream calls CUDA, which does not return: leaked.
        self.entries
            .extract_if(.., has_ended)
            .for_each(std::mem::forget);
        for entry in &self.entries {
            let Some((call, since)) = entry.stuck else {
                continue;
            };
            let known = [entry.facts.standing, entry.unseen].into_iter().flatten();
            let mut overdue = known.filter_map(|standing| standing.unseen_overdue(now));
            if let Some(mut overdue) = overdue.next()
                && let Some(inner) = Visit::of(&entry.inner)
            {
                overdue.stuck = Some((call, since.elapsed()));
                overdue.shape = entry.track.shape_of(overdue.sequence());
                overdue.may_connect = entry.track.may_connect(overdue.sequence());
                late.push((inner, overdue));
            }
        }
        late
    }
}

/// Ends a communicator because of `found`.
fn end(inner: &Arc<Inner>, found: Found, task: &Task) {
    match found {
        Found::Overdue(overdue) => end_overdue(inner, &overdue),
        Found::Signalled => inner.abort_in_background("its abort signal was given"),
        Found::Failed(error, noticed) => {
            let oldest = super::registry::facts()
                .into_iter()
                .find(|pending| pending.number == task.track.number)
                .and_then(|pending| pending.oldest);
            let error = match oldest {
                Some(oldest) => error.during(|| {
                    let (kind, number) = (oldest.kind, Some(oldest.sequence));
                    inner.operation(kind, oldest.shape, number, oldest.since)
                }),
                None => error,
            };
            if !inner.ends_if_lost(&error, noticed) {
                inner.abort_in_background(&error);
            }
        }
    }
}

fn end_overdue(inner: &Arc<Inner>, overdue: &Overdue) {
    let call = overdue.call();
    let since = origin().monotonic + call.since;
    let error = overdue.error();
    let describe = || inner.operation(call.kind, overdue.shape, Some(call.number), since);
    let error = error.during(describe);
    // So that a request for the call reports the same error.
    let _ = inner.overdue.set(*overdue);
    inner.abort_in_background(&error);
}
