//! The polling thread and its schedule, and the monitor's reaction when that thread is stuck.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::poll::{self, CommunicatorPoller, PollFinding, PollReport, PollTask, StreamTask};
use super::registry::{
    CurrentPoll, LINGER, POLL_DUE, STATE, WAKE_FLAG, WatchdogState, WatchdogThreads,
    WatchedCommunicator, WatchedStream, period,
};
use crate::communicator::{Inner, TemporaryHandle, is_same_stream};
use crate::drop_queue;
use crate::monitor::{self, NextCheck, PeriodicCheck};
use crate::pending_call::{CallStage, Overdue};
use crate::recorder::{origin, timeout_of_code};
use crate::state::State as Life;
use crate::sync::{Condvar, MutexGuard};
use crate::threads;
use nccl_base::fault::short_key;

/// How often the monitor checks whether the watchdog is stuck, while anything is pending. Below, the number of checks
/// that have to find the same poll; counted instead of timed, because a process may be stopped for a while.
const TICK: Duration = Duration::from_secs(1);
const STUCK_AFTER_CHECKS: u32 = 3;

/// Starts the watchdog and the monitor, if they do not run.
pub(super) fn start(running: &mut WatchdogThreads) -> io::Result<()> {
    if !running.has_poller {
        let generation = running.generation;
        threads::spawn("nccl-watchdog", move || run_poller(generation))?;
        running.has_poller = true;
        drop_queue::register_exit_handler();
    }
    monitor::ensure(&WAKE_FLAG, WatchdogMonitor::default)
}

fn wait(condvar: &Condvar, state: &mut MutexGuard<'_, WatchdogState>, timeout: Option<Duration>) {
    match timeout {
        None => condvar.wait(state),
        Some(timeout) => {
            condvar.wait_for(state, timeout);
        }
    }
}

/// The polling thread.
fn run_poller(generation: u64) {
    let mut pollers: HashMap<u64, CommunicatorPoller> = HashMap::new();
    let mut state = STATE.lock();
    while state.threads.generation == generation {
        let query = state.queries.iter().map(|query| query.next).min();
        if query.is_some_and(|query| query <= Instant::now()) {
            state = answer_queries(state);
            continue;
        }
        let now = Instant::now();
        let lulls = state.entries.iter_mut();
        let lulls = lulls.filter(|entry| entry.quiet.as_ref().is_some_and(|quiet| quiet.at <= now));
        lulls.for_each(WatchedCommunicator::check_quiet);
        let lulls = state
            .entries
            .iter()
            .filter_map(|entry| entry.quiet.as_ref());
        let quiet = lulls.map(|quiet| quiet.at).min();
        let next = state.entries.iter().filter(|entry| entry.stuck.is_none());
        let next = next.min_by_key(|entry| entry.next);
        let next_poll = next.map(|entry| entry.next);
        let wakes = next_poll.into_iter().chain(query).chain(quiet).min();
        let pause = wakes.map(|wakes| wakes.saturating_duration_since(Instant::now()));
        if pause.is_none_or(|pause| !pause.is_zero()) {
            state.threads.planned = wakes;
            wait(&POLL_DUE, &mut state, pause);
            continue;
        }
        let due = next.filter(|entry| entry.next <= now);
        let Some(communicator_number) = due.map(|entry| entry.track.communicator_number) else {
            continue;
        };
        let Some(mut task) = state.begin(communicator_number) else {
            continue;
        };
        drop(state);
        // CUDA is not called any more while the process exits.
        let Some(working) = drop_queue::DeviceCallGuard::begin() else {
            std::mem::forget((pollers, task));
            threads::park_forever();
        };
        let begun = Instant::now();
        let report = pollers
            .entry(communicator_number)
            .or_default()
            .poll(&mut task);
        state = STATE.lock();
        if state.threads.generation != generation {
            // The call returned after all.
            if let Some(entry) = state.entry(communicator_number) {
                entry.stuck = None;
                entry.next = Instant::now();
                POLL_DUE.notify_one();
            }
            break;
        }
        state.threads.current_poll = None;
        let (found, dropped) = state.store_report(communicator_number, &task, report, begun);
        let gone = state.entry(communicator_number).is_none();
        drop(state);
        if gone {
            pollers.remove(&communicator_number);
        }
        if let Some(found) = found
            && let Some(inner) = TemporaryHandle::of(&task.inner)
        {
            end(&inner, found, &task);
        }
        // These may hold the last reference to a stream or the context, whose drop calls CUDA.
        drop((task, dropped));
        drop(working);
        state = STATE.lock();
    }
    drop(state);
    match drop_queue::DeviceCallGuard::begin() {
        Some(_working) => drop(pollers),
        None => {
            std::mem::forget(pollers);
            threads::park_forever();
        }
    }
}

/// Answers the queries of other ranks that are due.
fn answer_queries(
    mut state: MutexGuard<'static, WatchdogState>,
) -> MutexGuard<'static, WatchdogState> {
    let now = Instant::now();
    let due: Vec<_> = state
        .queries
        .extract_if(.., |query| query.next <= now)
        .collect();
    drop(state);
    let kept = due.into_iter().filter_map(|mut query| {
        let again = !drop_queue::is_closed() && query.poll();
        again.then_some(query)
    });
    let kept: Vec<_> = kept.collect();
    state = STATE.lock();
    for query in kept {
        // A later query of the same rank may have arrived meanwhile.
        if !state.queries.iter().any(|other| other.is_about(&query)) {
            state.queries.push(query);
        }
    }
    state
}

impl WatchdogState {
    fn entry(&mut self, communicator_number: u64) -> Option<&mut WatchedCommunicator> {
        let mut entries = self.entries.iter_mut();
        entries.find(|entry| entry.track.communicator_number == communicator_number)
    }

    /// Begins a poll, and returns what to poll now.
    fn begin(&mut self, communicator_number: u64) -> Option<PollTask> {
        let entry = self.entry(communicator_number)?;
        let streams = entry.streams.iter_mut().map(|watched_stream| {
            let incoming = watched_stream.incoming.drain(..).collect();
            StreamTask {
                stream: Arc::clone(&watched_stream.stream),
                floor: watched_stream.floor,
                incoming,
            }
        });
        let task = PollTask {
            track: Arc::clone(&entry.track),
            streams: streams.collect(),
            inner: entry.inner.clone(),
        };
        self.threads.current_poll = Some(CurrentPoll {
            communicator_number,
            since: Instant::now(),
            ticks: 0,
        });
        Some(task)
    }

    /// Stores the report of a poll that began at `begun`. Returns the streams that are not watched any more, which the caller
    /// must drop without holding the lock.
    fn store_report(
        &mut self,
        communicator_number: u64,
        task: &PollTask,
        report: Option<PollReport>,
        begun: Instant,
    ) -> (Option<PollFinding>, Vec<WatchedStream>) {
        let Some(entry) = self.entry(communicator_number) else {
            return (None, Vec::new());
        };
        let Some(report) = report else {
            return (None, self.forget(communicator_number));
        };
        let PollReport {
            results,
            streams,
            found,
        } = report;
        let queued = results
            .pending_call
            .filter(|pending_call| pending_call.stage == CallStage::Queued);
        entry
            .track
            .set_queued_call(queued.map(|queued| queued.call.sequence));
        entry.results = results;
        let began = begun.saturating_duration_since(origin().monotonic);
        entry.unseen = entry.unseen.filter(|unseen| unseen.call.since > began);
        let mut dropped = Vec::new();
        for (StreamTask { stream, .. }, backlog) in task.streams.iter().zip(streams) {
            let stream_index = entry
                .streams
                .iter()
                .position(|watched_stream| Arc::ptr_eq(&watched_stream.stream, stream));
            let Some(at) = stream_index else { continue };
            let watched_stream = &mut entry.streams[at];
            let is_idle = backlog.is_none() && watched_stream.incoming.is_empty();
            watched_stream.backlog = backlog.unwrap_or(0);
            match watched_stream.idle_since {
                _ if !is_idle => watched_stream.idle_since = None,
                Some(since) if begun.saturating_duration_since(since) >= LINGER => {
                    if let Some(inner) = TemporaryHandle::of(&entry.inner) {
                        inner
                            .in_use
                            .lock()
                            .retain(|stream| !is_same_stream(stream, &watched_stream.stream));
                    }
                    dropped.push(entry.streams.swap_remove(at));
                }
                Some(_) => {}
                None => {
                    // The next call is reported, and its marks distinguish it from earlier work.
                    watched_stream.unlist(&entry.track);
                    watched_stream.idle_since = Some(Instant::now());
                }
            }
        }
        if entry.streams.is_empty() {
            dropped.extend(self.forget(communicator_number));
            return (found, dropped);
        }
        let now = Instant::now();
        entry.next = if entry
            .streams
            .iter()
            .all(|watched_stream| watched_stream.idle_since.is_some())
        {
            now + LINGER
        } else {
            let timeout = timeout_of_code(entry.track.fast_path.timeout());
            entry.interval = (entry.interval * 2).min(period(timeout));
            let next = now + entry.interval;
            let deadline = entry
                .results
                .pending_call
                .and_then(|pending_call| pending_call.deadline);
            let deadline = deadline.and_then(|deadline| origin().monotonic.checked_add(deadline));
            deadline.map_or(next, |deadline| next.min(deadline.max(now + MOMENT)))
        };
        (found, dropped)
    }

    /// Stops watching a communicator.
    fn forget(&mut self, communicator_number: u64) -> Vec<WatchedStream> {
        let at = self
            .entries
            .iter()
            .position(|entry| entry.track.communicator_number == communicator_number);
        let Some(at) = at else { return Vec::new() };
        let entry = self.entries.swap_remove(at);
        entry.track.fast_path.clear();
        entry.streams
    }
}

/// The shortest time between two polls at the same deadline.
const MOMENT: Duration = Duration::from_micros(500);

/// The monitor's check of the watchdog: replaces a stuck thread, and enforces the deadlines of the communicator at which that
/// thread is stuck.
#[derive(Default)]
struct WatchdogMonitor {
    is_awake: bool,
}

impl PeriodicCheck for WatchdogMonitor {
    fn check(&mut self) -> NextCheck {
        // The thread that holds the lock is about to release it.
        let Some(mut state) = STATE.try_lock() else {
            return NextCheck::After(MOMENT);
        };
        if state.entries.is_empty() || drop_queue::is_closed() {
            self.is_awake = false;
            WAKE_FLAG.lower();
            return NextCheck::Asleep;
        }
        if !std::mem::replace(&mut self.is_awake, true) {
            return NextCheck::After(TICK);
        }
        if let Some(current_poll) = &mut state.threads.current_poll {
            current_poll.ticks += 1;
            if current_poll.ticks >= STUCK_AFTER_CHECKS {
                let (communicator_number, since) =
                    (current_poll.communicator_number, current_poll.since);
                replace(&mut state, communicator_number, since);
            }
        }
        let late = state.late();
        drop(state);
        for (inner, overdue) in late {
            end_overdue(&inner, &overdue);
        }
        NextCheck::After(TICK)
    }

    fn is_over(&self) -> bool {
        STATE
            .try_lock()
            .is_some_and(|state| state.entries.is_empty())
    }
}

/// Starts another thread, for all communicators except the one at which the last thread is stuck.
fn replace(state: &mut WatchdogState, communicator_number: u64, since: Instant) {
    let call = poll::call();
    let identity = state
        .entry(communicator_number)
        .map(|entry| &entry.track.identity);
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
        "a call of the watchdog does not return; another thread takes over"
    );
    if let Some(entry) = state.entry(communicator_number) {
        entry.stuck = Some((call, since));
    }
    state.threads.generation += 1;
    state.threads.current_poll = None;
    state.threads.has_poller = false;
    if let Err(error) = start(&mut state.threads) {
        // The next issued call tries again, and reports the failure.
        crate::events::no_thread("to watch operations", &error);
    }
}

impl WatchdogState {
    /// Returns the overdue calls of communicators at which a thread is stuck.
    fn late(&mut self) -> Vec<(TemporaryHandle, Overdue)> {
        let now = origin().monotonic.elapsed();
        let mut late = Vec::new();
        let has_ended = |entry: &mut WatchedCommunicator| {
            let is_over = entry.track.lifecycle.get() != Life::Ready;
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
            let known = [entry.results.pending_call, entry.unseen]
                .into_iter()
                .flatten();
            let mut overdue =
                known.filter_map(|pending_call| pending_call.overdue_without_poll(now));
            if let Some(mut overdue) = overdue.next()
                && let Some(inner) = TemporaryHandle::of(&entry.inner)
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
fn end(inner: &Arc<Inner>, found: PollFinding, task: &PollTask) {
    match found {
        PollFinding::Overdue(overdue) => end_overdue(inner, &overdue),
        PollFinding::Signalled => inner.abort_in_background("its abort signal was given"),
        PollFinding::Failed(error, detected) => {
            let oldest = super::registry::results()
                .into_iter()
                .find(|pending| pending.communicator_number == task.track.communicator_number)
                .and_then(|pending| pending.oldest);
            let error = match oldest {
                Some(oldest) => error.during(|| {
                    let (kind, sequence) = (oldest.kind, Some(oldest.sequence));
                    inner.operation(kind, oldest.shape, sequence, oldest.since)
                }),
                None => error,
            };
            if !inner.abort_if_context_lost(&error, detected) {
                inner.abort_in_background(&error);
            }
        }
    }
}

fn end_overdue(inner: &Arc<Inner>, overdue: &Overdue) {
    let call = overdue.call();
    let since = origin().monotonic + call.since;
    let error = overdue.error();
    let describe = || inner.operation(call.kind, overdue.shape, Some(call.sequence), since);
    let error = error.during(describe);
    // Stored so that a request for the call reports the same error.
    let _ = inner.overdue_operation.set(*overdue);
    inner.abort_in_background(&error);
}
