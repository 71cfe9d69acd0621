//! The thread that wakes the tasks of awaited requests.
//!
//! CUDA can call back when a stream reaches a point, but on a thread that must not call
//! CUDA, and at a cost on every operation. So one thread polls, and only while requests are awaited.
//!
//! Guarantees: a waker is called once, soon after its operation is done, its communicator has ended,
//! or its deadline has passed; dropping a [`PollerEntry`] removes its waker.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, LazyLock};
use std::task::Waker;
use std::time::{Duration, Instant};

use cudarc::driver::CudaEvent;

use crate::active_calls::CallKind;
use crate::communicator::Inner;
use crate::drop_queue;
use crate::error::Result;
use crate::forked;
use crate::sync::{Condvar, Mutex};
use crate::threads;

/// One awaited request.
struct AwaitedRequest {
    /// `None` for a request whose communicator is ending.
    completion_event: Option<Arc<CudaEvent>>,
    inner: Arc<Inner>,
    deadline: Instant,
    waker: Waker,
}

struct Poller {
    state: Mutex<AwaitedRequests>,
    work: Condvar,
}

#[derive(Default)]
struct AwaitedRequests {
    next: u64,
    watched: HashMap<u64, AwaitedRequest>,
    running: bool,
    /// Counts the threads; all but the last end when they return from their call.
    generation: u64,
}

static POLLER: LazyLock<Poller> = LazyLock::new(|| Poller {
    state: Mutex::default(),
    work: Condvar::new(),
});

/// An entry in the poller, removed when this value is dropped.
pub(super) struct PollerEntry {
    key: u64,
    deadline: Instant,
}

impl PollerEntry {
    pub(super) fn deadline(&self) -> Instant {
        self.deadline
    }
}

impl Drop for PollerEntry {
    fn drop(&mut self) {
        // The lock may have been held at the fork.
        if forked::is_child() {
            return;
        }
        let watched = POLLER.state.lock().watched.remove(&self.key);
        // Outside the lock: a waker may run anything when it is dropped.
        drop(watched);
    }
}

/// Registers `waker`, to be called when `completion_event` is reached, `inner` has ended, or `deadline` passes.
pub(super) fn register(
    completion_event: Option<Arc<CudaEvent>>,
    inner: Arc<Inner>,
    deadline: Instant,
    waker: Waker,
) -> Result<PollerEntry> {
    let mut registry = POLLER.state.lock();
    if !registry.running {
        start(registry.generation).map_err(threads::not_started("that wakes awaiting tasks"))?;
        registry.running = true;
        drop_queue::register_exit_handler();
    }
    let key = registry.next;
    registry.next += 1;
    registry.watched.insert(
        key,
        AwaitedRequest {
            completion_event,
            inner,
            deadline,
            waker,
        },
    );
    POLLER.work.notify_one();
    Ok(PollerEntry { key, deadline })
}

fn start(generation: u64) -> std::io::Result<()> {
    threads::spawn("nccl-poller", move || run(generation)).map(drop)
}

/// Starts another thread to replace one that does not return from a call.
pub(crate) fn replace() {
    let mut registry = POLLER.state.lock();
    registry.generation += 1;
    let started = start(registry.generation);
    if let Err(error) = &started {
        crate::events::no_thread("to wake awaiting tasks", error);
    }
    // Otherwise the next request tries again.
    registry.running = started.is_ok();
    // An earlier thread that waits for requests would take the wake-up of the new one.
    POLLER.work.notify_all();
}

/// The entries that the thread polls: the key, and the fields of [`AwaitedRequest`] without the waker.
type PollItem = (u64, Option<Arc<CudaEvent>>, Arc<Inner>, Instant);

fn run(generation: u64) {
    let mut busy_since = Instant::now();
    let mut all: Vec<PollItem> = Vec::new();
    loop {
        let mut registry = POLLER.state.lock();
        while registry.watched.is_empty() && registry.generation == generation {
            POLLER.work.wait(&mut registry);
            busy_since = Instant::now();
        }
        if registry.generation != generation {
            return;
        }
        all.extend(registry.watched.iter().map(|(&key, watched)| {
            let (completion_event, inner) =
                (watched.completion_event.clone(), Arc::clone(&watched.inner));
            (key, completion_event, inner, watched.deadline)
        }));
        // Other threads can add and remove requests while CUDA is queried.
        drop(registry);
        let now = Instant::now();
        let mut ready: Vec<u64> = Vec::new();
        for (key, completion_event, inner, deadline) in all.drain(..) {
            // CUDA is not queried any more while the process exits.
            let Some(_working) = drop_queue::DeviceCallGuard::begin() else {
                threads::park_forever();
            };
            if is_ready(completion_event.as_deref(), &inner, deadline, now) {
                ready.push(key);
            }
            // These may be the last references.
            drop((completion_event, inner));
        }
        let mut registry = POLLER.state.lock();
        let woken: Vec<AwaitedRequest> = ready
            .iter()
            .filter_map(|key| registry.watched.remove(key))
            .collect();
        drop(registry);
        if !woken.is_empty() {
            busy_since = now;
        }
        for AwaitedRequest {
            completion_event,
            inner,
            waker,
            ..
        } in woken
        {
            let Some(_working) = drop_queue::DeviceCallGuard::begin() else {
                threads::park_forever();
            };
            drop((completion_event, inner));
            drop(_working);
            // A waker is foreign code. If it panics, this thread must continue for the other requests.
            let wake = AssertUnwindSafe(|| waker.wake());
            if catch_unwind(wake).is_err() {
                tracing::error!(name: "nccl.internal", target: "nccl", what = "waker", "a waker of an awaiting task panicked");
            }
        }
        std::thread::sleep(pause(now.duration_since(busy_since)));
    }
}

/// The pause between polls, short at first: most operations are short, and long ones can wait a
/// little longer.
fn pause(waiting: Duration) -> Duration {
    if waiting < Duration::from_millis(1) {
        Duration::from_micros(20)
    } else if waiting < Duration::from_millis(100) {
        Duration::from_micros(100)
    } else {
        Duration::from_millis(1)
    }
}

fn is_ready(
    completion_event: Option<&CudaEvent>,
    inner: &Inner,
    deadline: Instant,
    now: Instant,
) -> bool {
    let state = inner.lifecycle.get();
    if state.abort_has_begun() {
        // After an abort, the state of the stream proves nothing.
        return now >= deadline || inner.lifecycle.is_released();
    }
    if now >= deadline || inner.abort_signal.is_aborted() {
        return true;
    }
    let _inside = inner.enter(CallKind::Poller, inner.timeouts.operation);
    // The task finds the error when it is woken.
    completion_event
        .is_some_and(|completion_event| !matches!(completion_event.try_is_complete(), Ok(false)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_poller_polls_less_often_the_longer_it_waits() {
        assert!(pause(Duration::ZERO) < pause(Duration::from_millis(10)));
        assert!(pause(Duration::from_millis(10)) < pause(Duration::from_secs(1)));
    }
}
