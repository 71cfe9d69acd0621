//! Frees values that were dropped while the device may still use them.
//!
//! A drop must not block, and memory must not be freed under running work. So a drop hands what it owns
//! to the reaper: one thread polls everything that waits for its stream and frees it when the
//! work is over; work that may block for long (the end of a communicator) gets a thread of its own. No wait
//! is endless: what is not over within its timeout is leaked, and reported.
//!
//! When the process exits, the rest gets a moment to finish, because peers may wait for it; after
//! that nothing here calls CUDA or NCCL any more, which are being unloaded.
//!
//! Invariants: `PENDING` counts everything that was handed over and is not done; the thread
//! counts itself in `AT_WORK` while it calls CUDA or NCCL, and does not start a call once `CLOSED` is set.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Once, OnceLock};
use std::time::{Duration, Instant};

use cudarc::driver::{CudaEvent, CudaStream, sys};

use crate::driver;
use crate::events;
use crate::forked;
use crate::sync::{Condvar, Mutex};
use crate::threads;
use crate::time::deadline_after;

/// How long work on a stream may go on after its memory was dropped.
#[doc(hidden)]
pub const TIMEOUT: Duration = Duration::from_secs(300);

/// A thread that is in one call for this long gets a successor.
const STUCK: Duration = Duration::from_secs(10);

/// How long an idle thread stays.
const IDLE: Duration = Duration::from_secs(1);

/// How long the exit of the process waits: for orderly ends, then for aborts.
const AT_EXIT: [Duration; 2] = [Duration::from_millis(1500), Duration::from_millis(500)];

/// The remains of a dropped value.
#[doc(hidden)]
pub trait DeferredDrop: Send {
    /// Whether all work that uses it is over. Never waits.
    fn poll(&mut self) -> Turn;

    /// Frees it; called once, when all work is over.
    fn release(self: Box<Self>);

    /// The description for the message when it is leaked.
    fn describe(&self) -> String;
}

/// The result of a poll of the remains.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[doc(hidden)]
pub enum Turn {
    /// Work still uses them.
    Wait,
    /// No work uses them.
    Over,
    /// Work uses them for ever.
    Never,
}

struct Entry {
    remains: Box<dyn DeferredDrop>,
    deadline: Instant,
}

struct State {
    /// Remains that wait for their stream.
    queue: Vec<Entry>,
    /// Remains to free.
    over: VecDeque<Box<dyn DeferredDrop>>,
    /// Counts the threads; all but the last end when they return from their call.
    generation: u64,
    running: bool,
    /// Since when the thread is in a call that polls or frees remains.
    busy_since: Option<Instant>,
}

static STATE: Mutex<State> = Mutex::new(State {
    queue: Vec::new(),
    over: VecDeque::new(),
    generation: 0,
    running: false,
    busy_since: None,
});
static BELL: Condvar = Condvar::new();
static AT_WORK: AtomicUsize = AtomicUsize::new(0);
static PENDING: AtomicUsize = AtomicUsize::new(0);
static HURRY: AtomicBool = AtomicBool::new(false);
static CLOSED: AtomicBool = AtomicBool::new(false);

/// Whether the process is exiting, or is a forked child, so that CUDA and NCCL must not be called any more.
#[doc(hidden)]
pub fn is_closed() -> bool {
    CLOSED.load(Ordering::Acquire) || forked::is_child()
}

/// Whether the process is exiting, so that everything without an orderly end is to be aborted.
pub(crate) fn is_in_a_hurry() -> bool {
    HURRY.load(Ordering::Acquire)
}

/// Takes over dropped remains, and frees them when all work is over; leaks them with a message when that
/// takes longer than `timeout`.
#[doc(hidden)]
pub fn take(remains: Box<dyn DeferredDrop>, timeout: Duration) {
    if is_closed() {
        std::mem::forget(remains);
        return;
    }
    register_exit();
    PENDING.fetch_add(1, Ordering::AcqRel);
    let mut state = STATE.lock();
    state.queue.push(Entry {
        remains,
        deadline: deadline_after(timeout),
    });
    let stuck = state
        .busy_since
        .is_some_and(|since| since.elapsed() > STUCK);
    if stuck {
        tracing::error!(
            name: "nccl.internal",
            target: "nccl",
            what = "reaper",
            "freeing dropped memory has not come back for {STUCK:?}; another thread goes on"
        );
    }
    if state.running && !stuck {
        BELL.notify_all();
        return;
    }
    state.generation += 1;
    state.busy_since = None;
    let generation = state.generation;
    let spawned = threads::spawn("nccl-reaper", move || run(generation));
    match spawned {
        Ok(_) => state.running = true,
        Err(error) => {
            state.running = false;
            let entries = std::mem::take(&mut state.queue);
            drop(state);
            // Remains that are already over wait for the next thread.
            events::no_thread("to free dropped memory", &error);
            entries.into_iter().for_each(leak);
        }
    }
}

/// Runs `work`, which may block, on a thread of its own; at exit the process waits for it a while.
/// Returns `with` when no thread can be started.
pub(crate) fn on_a_thread<T: Send + 'static>(
    with: T,
    work: impl FnOnce(T) + Send + 'static,
) -> Result<(), T> {
    if is_closed() {
        return Err(with);
    }
    register_exit();
    PENDING.fetch_add(1, Ordering::AcqRel);
    let (sender, receiver) = std::sync::mpsc::sync_channel::<T>(1);
    let spawned = threads::spawn("nccl-reaper", move || {
        if let Ok(with) = receiver.recv() {
            work(with);
        }
        PENDING.fetch_sub(1, Ordering::AcqRel);
    });
    if let Err(error) = spawned {
        PENDING.fetch_sub(1, Ordering::AcqRel);
        events::no_thread("for a dropped communicator", &error);
        return Err(with);
    }
    // The thread waits for exactly this message.
    sender.send(with).map_err(|unsent| unsent.0)
}

fn leak(entry: Entry) {
    events::leaked(&entry.remains.describe(), "it was not over in time");
    std::mem::forget(entry.remains);
    PENDING.fetch_sub(1, Ordering::AcqRel);
}

/// The reaper's thread.
fn run(generation: u64) {
    let mut pause = SHORTEST;
    let mut state = STATE.lock();
    while state.generation == generation && !is_closed() {
        if let Some(remains) = state.over.pop_front() {
            state.busy_since = Some(Instant::now());
            drop(state);
            if let Some(_working) = Working::begin() {
                remains.release();
            } else {
                std::mem::forget(remains);
            }
            PENDING.fetch_sub(1, Ordering::AcqRel);
            state = STATE.lock();
            if state.generation == generation {
                state.busy_since = None;
            }
            pause = SHORTEST;
        } else if state.queue.is_empty() {
            let waited = BELL.wait_for(&mut state, IDLE);
            let is_last = state.generation == generation;
            if is_last && waited.timed_out() && state.queue.is_empty() && state.over.is_empty() {
                state.running = false;
                return;
            }
            pause = SHORTEST;
        } else {
            let entries = std::mem::take(&mut state.queue);
            state.busy_since = Some(Instant::now());
            drop(state);
            let (over, left) = look_at(entries);
            state = STATE.lock();
            if state.generation == generation {
                state.busy_since = None;
            }
            state.queue.extend(left);
            state.over.extend(over);
            if state.over.is_empty() && !state.queue.is_empty() {
                BELL.wait_for(&mut state, pause);
                pause = (pause * 2).min(LONGEST);
            }
        }
    }
    drop(state);
    if is_closed() {
        threads::stay();
    }
}

const SHORTEST: Duration = Duration::from_micros(50);
const LONGEST: Duration = Duration::from_millis(5);

/// Polls each entry once. Returns the remains to free, and the entries that wait.
fn look_at(entries: Vec<Entry>) -> (Vec<Box<dyn DeferredDrop>>, Vec<Entry>) {
    let (mut over, mut left) = (Vec::new(), Vec::new());
    let Some(_working) = Working::begin() else {
        return (over, entries);
    };
    for mut entry in entries {
        match entry.remains.poll() {
            Turn::Wait if Instant::now() < entry.deadline => left.push(entry),
            Turn::Wait | Turn::Never => leak(entry),
            Turn::Over => over.push(entry.remains),
        }
    }
    (over, left)
}

/// Counts work that the exit of the process waits for, for a while.
#[derive(Debug)]
pub(crate) struct Pending(());

impl Pending {
    pub(crate) fn begin() -> Self {
        register_exit();
        PENDING.fetch_add(1, Ordering::AcqRel);
        Self(())
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        PENDING.fetch_sub(1, Ordering::AcqRel);
    }
}

/// A thread that may call CUDA and NCCL.
pub(crate) struct Working;

impl Working {
    pub(crate) fn begin() -> Option<Self> {
        // Before the check, so that the exit sees this thread or this thread sees the exit.
        AT_WORK.fetch_add(1, Ordering::SeqCst);
        let working = Self;
        (!CLOSED.load(Ordering::SeqCst)).then_some(working)
    }
}

impl Drop for Working {
    fn drop(&mut self) {
        AT_WORK.fetch_sub(1, Ordering::SeqCst);
    }
}

/// The function that is called at the end of the process, with its exit status.
static GOODBYE: OnceLock<fn(i32)> = OnceLock::new();

/// Has `goodbye` called when the process exits, after the communicators' work has stopped, if
/// [an exit handler is registered](register_exit). Only the first call has an effect.
#[doc(hidden)]
pub fn at_exit_say(goodbye: fn(i32)) {
    let _ = GOODBYE.set(goodbye);
}

/// Registers [`at_exit`] to run when the process exits.
#[doc(hidden)]
pub fn register_exit() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // If this is refused, a process that ends right after a drop does not wait for it, and that is all.
        #[cfg(target_env = "gnu")]
        // SAFETY: a plain function that does not use its second argument.
        unsafe {
            on_exit(at_exit, std::ptr::null_mut())
        };
        #[cfg(not(target_env = "gnu"))]
        // SAFETY: a plain function without arguments.
        unsafe {
            libc::atexit(at_unknown_exit)
        };
    });
}

#[cfg(target_env = "gnu")]
unsafe extern "C" {
    /// As `atexit`, and the function gets the process's exit status. Of the GNU C library only.
    fn on_exit(
        function: extern "C" fn(std::ffi::c_int, *mut std::ffi::c_void),
        argument: *mut std::ffi::c_void,
    ) -> std::ffi::c_int;
}

#[cfg(not(target_env = "gnu"))]
extern "C" fn at_unknown_exit() {
    at_exit(0, std::ptr::null_mut());
}

/// Waits, at exit, for what is pending. Without this wait, a process that drops its communicators and ends
/// would leave its peers waiting for their finalize; and CUDA's exit handlers, registered before this one
/// and so run after it, must not find this crate's threads inside CUDA.
extern "C" fn at_exit(status: std::ffi::c_int, _: *mut std::ffi::c_void) {
    // The pending work belongs to the parent.
    if forked::is_child() {
        return;
    }
    for (timeout, then) in AT_EXIT.into_iter().zip([&HURRY, &CLOSED]) {
        let deadline = Instant::now() + timeout;
        while PENDING.load(Ordering::Acquire) > 0 && Instant::now() < deadline {
            BELL.notify_all();
            std::thread::sleep(Duration::from_millis(1));
        }
        then.store(true, Ordering::SeqCst);
    }
    // A thread may have started a call just before.
    let deadline = Instant::now() + Duration::from_millis(200);
    while AT_WORK.load(Ordering::SeqCst) > 0 && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(1));
    }
    // No communicator runs here any more that could be ended.
    if let Some(goodbye) = GOODBYE.get() {
        goodbye(status);
    }
}

/// A point on a stream behind which a value may be freed.
#[doc(hidden)]
pub struct Behind {
    stream: Arc<CudaStream>,
    event: CudaEvent,
    recorded: bool,
}

impl Behind {
    /// The point behind everything that is on `stream` now; `event` belongs to its context. While the stream
    /// is capturing, the event is recorded later.
    #[doc(hidden)]
    pub fn new(stream: Arc<CudaStream>, event: CudaEvent) -> Self {
        let mut behind = Self {
            stream,
            event,
            recorded: false,
        };
        behind.record();
        behind
    }

    fn record(&mut self) {
        let _ = driver::bind(self.stream.context());
        if !self.recorded && !driver::is_capturing(&self.stream) {
            self.recorded = driver::record(&self.event, &self.stream).is_ok();
        }
    }

    /// Whether the stream has reached the point. A failed device runs nothing any more.
    #[doc(hidden)]
    pub fn is_over(&mut self) -> bool {
        let _ = driver::bind(self.stream.context());
        if !self.recorded {
            // Querying a capturing stream would break the capture.
            if driver::is_capturing(&self.stream) {
                return false;
            }
            self.record();
            // A failed device records no event either.
            return !self.recorded && has_failed(&self.stream);
        }
        !matches!(self.event.try_is_complete(), Ok(false))
    }
}

/// Whether the device of the stream failed, so that nothing runs on it any more.
fn has_failed(stream: &CudaStream) -> bool {
    !matches!(
        driver::query(stream),
        sys::CUresult::CUDA_SUCCESS
            | sys::CUresult::CUDA_ERROR_NOT_READY
            | sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
            | sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
            | sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU32;

    struct Counted {
        turns: Vec<Turn>,
        released: Arc<AtomicU32>,
        dropped: Arc<AtomicU32>,
    }

    impl DeferredDrop for Counted {
        fn poll(&mut self) -> Turn {
            self.turns.pop().unwrap_or(Turn::Wait)
        }

        fn release(self: Box<Self>) {
            self.released.fetch_add(1, Ordering::AcqRel);
        }

        fn describe(&self) -> String {
            String::from("a test")
        }
    }

    impl Drop for Counted {
        fn drop(&mut self) {
            self.dropped.fetch_add(1, Ordering::AcqRel);
        }
    }

    fn wait_for(what: impl Fn() -> bool) {
        let deadline = Instant::now() + Duration::from_secs(20);
        while !what() {
            assert!(Instant::now() < deadline, "it did not come");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn what_is_over_is_released_once_and_what_never_is_stays() {
        nccl_emulator::install_unless_gpu().expect("an emulator or a GPU");
        let (released, dropped) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicU32::new(0)));
        let hand_over = |turns: Vec<Turn>, timeout| {
            let counted = Counted {
                turns,
                released: Arc::clone(&released),
                dropped: Arc::clone(&dropped),
            };
            take(Box::new(counted), timeout);
        };
        for _ in 0..10 {
            hand_over(vec![Turn::Over, Turn::Wait, Turn::Wait], TIMEOUT);
        }
        hand_over(vec![Turn::Never], TIMEOUT);
        hand_over(vec![], Duration::from_millis(20));
        wait_for(|| released.load(Ordering::Acquire) == 10 && Arc::strong_count(&released) == 3);
        std::thread::sleep(Duration::from_millis(100));
        // Two were leaked: they hold their counters, and were neither released nor dropped.
        assert_eq!(Arc::strong_count(&released), 3);
        assert_eq!(released.load(Ordering::Acquire), 10);
        assert_eq!(dropped.load(Ordering::Acquire), 10);
        // And the thread goes on, also after it was idle.
        std::thread::sleep(IDLE + Duration::from_millis(200));
        hand_over(vec![Turn::Over], TIMEOUT);
        wait_for(|| released.load(Ordering::Acquire) == 11);
    }
}
