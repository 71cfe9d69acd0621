//! The timer thread: it starts background groups that are not polled, and wakes delayed work.
//!
//! The thread ticks while it has work, and a little longer, so that a steady stream of groups
//! costs no system call. Then it sleeps until [`notify`] or [`at`] wakes it.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use cuda_emulator::sync::{Condvar, Mutex, MutexGuard};

use super::communicator::Communicator;

const TICK: Duration = Duration::from_micros(500);
/// The number of ticks that a group waits for a poll.
const GRACE: u64 = 2;
/// The number of idle ticks before the thread sleeps.
const PATIENCE: u32 = 100;

type Action = Box<dyn FnOnce() + Send>;

struct State {
    entries: Vec<(Instant, Action)>,
    watched: Vec<Weak<Communicator>>,
    started: bool,
}

static STATE: Mutex<State> = Mutex::new(State {
    entries: Vec::new(),
    watched: Vec::new(),
    started: false,
});
static WAKE: Condvar = Condvar::new();
static ASLEEP: AtomicBool = AtomicBool::new(false);
static TICKS: AtomicU64 = AtomicU64::new(0);

fn lock() -> MutexGuard<'static, State> {
    STATE.lock()
}

fn start(state: &mut State) {
    if !state.started {
        state.started = true;
        thread::Builder::new()
            .name("nccl-timer".to_owned())
            .spawn(run)
            .expect("nccl-emulator cannot start a thread");
    }
}

/// Calls `action` on the timer's thread at `when` or shortly after. `action` must not block.
pub(crate) fn at(when: Instant, action: impl FnOnce() + Send + 'static) {
    let mut state = lock();
    state.entries.push((when, Box::new(action)));
    start(&mut state);
    drop(state);
    notify();
}

/// Makes the timer start the communicator's background groups that are not polled.
pub(crate) fn watch(communicator: &Arc<Communicator>) {
    let mut state = lock();
    // The thread does so as well, but may sleep for long: blocking communicators never wake it.
    state.watched.retain(|watched| watched.strong_count() > 0);
    state.watched.push(Arc::downgrade(communicator));
    start(&mut state);
}

/// Returns the present tick, which a background group records.
pub(crate) fn tick() -> u64 {
    TICKS.load(Ordering::Relaxed)
}

/// Whether a group that began to wait at `since` has waited long enough.
pub(crate) fn is_due(since: u64) -> bool {
    tick() > since + GRACE
}

/// Wakes the timer thread if it sleeps.
pub(crate) fn notify() {
    if ASLEEP.load(Ordering::SeqCst) {
        let _state = lock();
        ASLEEP.store(false, Ordering::SeqCst);
        WAKE.notify_one();
    }
}

/// Runs the due actions and groups. Returns true if any are left to wait for.
fn look() -> bool {
    let mut state = lock();
    let now = Instant::now();
    let mut due = Vec::new();
    let mut at = 0;
    while at < state.entries.len() {
        if state.entries[at].0 <= now {
            due.push(state.entries.swap_remove(at));
        } else {
            at += 1;
        }
    }
    due.sort_by_key(|(when, _)| *when);
    state
        .watched
        .retain(|communicator| communicator.strong_count() > 0);
    let waiting: Vec<_> = state
        .watched
        .iter()
        .filter_map(Weak::upgrade)
        .filter_map(|communicator| communicator.pending().clone())
        .filter(|pending| pending.is_waiting())
        .collect();
    let left = !state.entries.is_empty() || !waiting.is_empty();
    drop(state);
    for pending in waiting {
        pending.start_if_due();
    }
    for (_, action) in due {
        action();
    }
    left
}

fn run() {
    let mut idle = 0;
    loop {
        idle = if look() { 0 } else { idle + 1 };
        if idle <= PATIENCE {
            thread::sleep(TICK);
            TICKS.fetch_add(1, Ordering::Relaxed);
            continue;
        }
        ASLEEP.store(true, Ordering::SeqCst);
        // This look sees additions before the store; later additions find `ASLEEP` set.
        if look() {
            ASLEEP.store(false, Ordering::SeqCst);
        } else {
            let mut state = lock();
            while ASLEEP.load(Ordering::SeqCst) {
                WAKE.wait(&mut state);
            }
        }
        idle = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[test]
    fn actions_run_at_their_time_and_not_before() {
        let limit = Duration::from_secs(5);
        let (sender, receiver) = mpsc::channel();
        for (name, millis) in [("late", 400), ("soon", 5)] {
            let start = Instant::now();
            let sender = sender.clone();
            at(start + Duration::from_millis(millis), move || {
                sender
                    .send((name, start.elapsed() >= Duration::from_millis(millis)))
                    .unwrap();
            });
        }
        assert_eq!(receiver.recv_timeout(limit), Ok(("soon", true)));
        assert_eq!(receiver.recv_timeout(limit), Ok(("late", true)));
        // Long enough for the thread to have gone to sleep.
        thread::sleep(TICK * (PATIENCE + 20) * 2);
        at(Instant::now(), move || {
            sender.send(("again", true)).unwrap()
        });
        assert_eq!(receiver.recv_timeout(limit), Ok(("again", true)));
    }
}
