//! Frees values that were dropped while the device may still use them.
//!
//! A drop must not block, and memory must not be freed while work uses it. So a drop passes what it owns to the drop
//! queue. One thread polls everything that waits for its stream, and frees it when the work is over; work that may
//! block for long (the end of a communicator) gets a thread of its own. Every wait is limited: a value whose work is
//! not over within its timeout is leaked and reported.
//!
//! When the process exits, the remaining work gets a moment to finish, because peers may wait for it. After that,
//! nothing here calls CUDA or NCCL any more, which are being unloaded.
//!
//! Invariants: `PENDING` counts everything that was passed to the queue and is not done; the thread
//! counts itself in `IN_DEVICE_CALLS` while it calls CUDA or NCCL, and does not start a call once `CLOSED` is set.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Once, OnceLock};
use std::time::{Duration, Instant};

use cudarc::driver::{CudaEvent, CudaStream, sys};

use crate::cuda_driver;
use crate::events;
use crate::forked;
use crate::sync::{Condvar, Mutex};
use crate::threads;
use crate::time::deadline_after;

/// How long work on a stream may continue after its memory was dropped.
#[doc(hidden)]
pub const TIMEOUT: Duration = Duration::from_secs(300);

/// A thread that has been in one call for this long is replaced; earlier in tests.
const STUCK_AFTER: Duration = Duration::from_millis(if cfg!(test) { 300 } else { 10_000 });

/// How long an idle thread stays.
const IDLE: Duration = Duration::from_secs(1);

/// How long the exit of the process waits: first for orderly ends, then for aborts.
const AT_EXIT: [Duration; 2] = [Duration::from_millis(1500), Duration::from_millis(500)];

/// The remains of a dropped value.
#[doc(hidden)]
pub trait DeferredDrop: Send {
    /// Returns whether all work that uses the value is over. Never waits.
    fn poll(&mut self) -> DropPoll;

    /// Frees the value; called once, when all work is over.
    fn release(self: Box<Self>);

    /// Returns the description for the message about a leak.
    fn describe(&self) -> String;
}

/// The result of a poll of a dropped value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[doc(hidden)]
pub enum DropPoll {
    /// Work still uses it.
    Wait,
    /// No work uses it.
    Over,
    /// The value must never be freed.
    Never,
}

struct QueuedDrop {
    value: Box<dyn DeferredDrop>,
    deadline: Instant,
}

struct QueueState {
    /// Values that wait for their stream.
    queue: Vec<QueuedDrop>,
    /// Values to free.
    ready: VecDeque<Box<dyn DeferredDrop>>,
    /// The number of the current thread; earlier threads end when they return from their call.
    generation: u64,
    running: bool,
    /// Since when the thread is in a call that polls or frees values.
    busy_since: Option<Instant>,
}

static STATE: Mutex<QueueState> = Mutex::new(QueueState {
    queue: Vec::new(),
    ready: VecDeque::new(),
    generation: 0,
    running: false,
    busy_since: None,
});
static CHANGED: Condvar = Condvar::new();
static IN_DEVICE_CALLS: AtomicUsize = AtomicUsize::new(0);
static PENDING: AtomicUsize = AtomicUsize::new(0);
static EXITING: AtomicBool = AtomicBool::new(false);
static CLOSED: AtomicBool = AtomicBool::new(false);

/// Whether the process is exiting, or is a forked child, so that CUDA and NCCL must not be called any more.
#[doc(hidden)]
pub fn is_closed() -> bool {
    CLOSED.load(Ordering::Acquire) || forked::is_child()
}

/// Whether the process is exiting, so that everything without an orderly end is to be aborted.
pub(crate) fn is_exiting() -> bool {
    EXITING.load(Ordering::Acquire)
}

/// Takes over a dropped value, and frees it when all work is over. If that takes longer than `timeout`, leaks the value
/// with a message.
#[doc(hidden)]
pub fn defer(value: Box<dyn DeferredDrop>, timeout: Duration) {
    if is_closed() {
        std::mem::forget(value);
        return;
    }
    register_exit_handler();
    PENDING.fetch_add(1, Ordering::AcqRel);
    let mut state = STATE.lock();
    state.queue.push(QueuedDrop {
        value,
        deadline: deadline_after(timeout),
    });
    let stuck = state
        .busy_since
        .is_some_and(|since| since.elapsed() > STUCK_AFTER);
    if stuck {
        tracing::error!(
            name: "nccl.internal",
            target: "nccl",
            what = "reaper",
            "freeing dropped memory has not returned for {STUCK_AFTER:?}; another thread takes over"
        );
    }
    if state.running && !stuck {
        CHANGED.notify_all();
        return;
    }
    state.generation += 1;
    state.busy_since = None;
    let generation = state.generation;
    let spawned = threads::spawn("nccl-drop-queue", move || run(generation));
    match spawned {
        Ok(_) => state.running = true,
        Err(error) => {
            state.running = false;
            let entries = std::mem::take(&mut state.queue);
            drop(state);
            // Values whose work is already over wait for the next thread.
            events::no_thread("to free dropped memory", &error);
            entries.into_iter().for_each(leak);
        }
    }
}

/// Runs `work`, which may block, on a thread of its own; the exit of the process waits for it for a while. Returns
/// `with` if no thread can be started.
pub(crate) fn run_on_thread<T: Send + 'static>(
    with: T,
    work: impl FnOnce(T) + Send + 'static,
) -> Result<(), T> {
    if is_closed() {
        return Err(with);
    }
    register_exit_handler();
    PENDING.fetch_add(1, Ordering::AcqRel);
    let (sender, receiver) = std::sync::mpsc::sync_channel::<T>(1);
    let spawned = threads::spawn("nccl-drop-queue", move || {
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

fn leak(entry: QueuedDrop) {
    events::leaked(&entry.value.describe(), "it was not over in time");
    std::mem::forget(entry.value);
    PENDING.fetch_sub(1, Ordering::AcqRel);
}

/// The drop queue's thread.
fn run(mut generation: u64) {
    let mut pause = SHORTEST;
    let mut state = STATE.lock();
    while state.generation == generation && !is_closed() {
        if let Some(value) = state.ready.pop_front() {
            state.busy_since = Some(Instant::now());
            drop(state);
            if let Some(_working) = DeviceCallGuard::begin() {
                value.release();
            } else {
                std::mem::forget(value);
            }
            PENDING.fetch_sub(1, Ordering::AcqRel);
            state = STATE.lock();
            if state.generation == generation {
                state.busy_since = None;
            }
            pause = SHORTEST;
        } else if state.queue.is_empty() {
            let waited = CHANGED.wait_for(&mut state, IDLE);
            let is_last = state.generation == generation;
            if is_last && waited.timed_out() && state.queue.is_empty() && state.ready.is_empty() {
                state.running = false;
                return;
            }
            pause = SHORTEST;
        } else {
            let entries = std::mem::take(&mut state.queue);
            state.busy_since = Some(Instant::now());
            drop(state);
            let (ready, left) = poll_entries(entries);
            state = STATE.lock();
            if state.generation == generation {
                state.busy_since = None;
            }
            let has_values = !left.is_empty() || !ready.is_empty();
            state.queue.extend(left);
            state.ready.extend(ready);
            if has_values && !state.running {
                // The thread that replaced this one has ended meanwhile.
                state.generation += 1;
                state.running = true;
                generation = state.generation;
            }
            if state.ready.is_empty() && !state.queue.is_empty() {
                CHANGED.wait_for(&mut state, pause);
                pause = (pause * 2).min(LONGEST);
            }
        }
    }
    drop(state);
    if is_closed() {
        threads::park_forever();
    }
}

const SHORTEST: Duration = Duration::from_micros(50);
const LONGEST: Duration = Duration::from_millis(5);

/// Polls each entry once. Returns the values to free, and the entries that wait.
fn poll_entries(entries: Vec<QueuedDrop>) -> (Vec<Box<dyn DeferredDrop>>, Vec<QueuedDrop>) {
    let (mut ready, mut left) = (Vec::new(), Vec::new());
    let Some(_working) = DeviceCallGuard::begin() else {
        return (ready, entries);
    };
    for mut entry in entries {
        match entry.value.poll() {
            DropPoll::Wait if Instant::now() < entry.deadline => left.push(entry),
            DropPoll::Wait | DropPoll::Never => leak(entry),
            DropPoll::Over => ready.push(entry.value),
        }
    }
    (ready, left)
}

/// Counts work for which the exit of the process waits, for a limited time.
#[derive(Debug)]
pub(crate) struct ExitHold(());

impl ExitHold {
    pub(crate) fn begin() -> Self {
        register_exit_handler();
        PENDING.fetch_add(1, Ordering::AcqRel);
        Self(())
    }
}

impl Drop for ExitHold {
    fn drop(&mut self) {
        PENDING.fetch_sub(1, Ordering::AcqRel);
    }
}

/// A thread that may call CUDA and NCCL.
pub(crate) struct DeviceCallGuard;

impl DeviceCallGuard {
    pub(crate) fn begin() -> Option<Self> {
        // Incremented before the check, so that either the exit sees this thread or this thread sees the exit.
        IN_DEVICE_CALLS.fetch_add(1, Ordering::SeqCst);
        let working = Self;
        (!CLOSED.load(Ordering::SeqCst)).then_some(working)
    }
}

impl Drop for DeviceCallGuard {
    fn drop(&mut self) {
        IN_DEVICE_CALLS.fetch_sub(1, Ordering::SeqCst);
    }
}

/// The function that is called at the end of the process, with its exit status.
static EXIT_HOOK: OnceLock<fn(i32)> = OnceLock::new();

/// Sets `hook` to be called when the process exits, after the communicators' work has stopped, if
/// [an exit handler is registered](register_exit_handler). Only the first call has an effect.
#[doc(hidden)]
pub fn set_exit_hook(hook: fn(i32)) {
    let _ = EXIT_HOOK.set(hook);
}

/// Registers [`at_exit`] to run when the process exits.
#[doc(hidden)]
pub fn register_exit_handler() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // If this is refused, the only effect is that a process that ends right after a drop does not wait for it.
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
    /// Like `atexit`, but the function gets the exit status of the process. Exists only in the GNU C library.
    fn on_exit(
        function: extern "C" fn(std::ffi::c_int, *mut std::ffi::c_void),
        argument: *mut std::ffi::c_void,
    ) -> std::ffi::c_int;
}

#[cfg(not(target_env = "gnu"))]
extern "C" fn at_unknown_exit() {
    at_exit(0, std::ptr::null_mut());
}

/// Waits, at exit, for pending work. Without this wait, a process that drops its communicators and ends would leave its
/// peers waiting for their finalize. Also, CUDA's exit handlers, which were registered before this one and so run after
/// it, must not find this crate's threads inside CUDA.
extern "C" fn at_exit(status: std::ffi::c_int, _: *mut std::ffi::c_void) {
    // The pending work belongs to the parent.
    if forked::is_child() {
        return;
    }
    for (timeout, then) in AT_EXIT.into_iter().zip([&EXITING, &CLOSED]) {
        let deadline = Instant::now() + timeout;
        while PENDING.load(Ordering::Acquire) > 0 && Instant::now() < deadline {
            CHANGED.notify_all();
            std::thread::sleep(Duration::from_millis(1));
        }
        then.store(true, Ordering::SeqCst);
    }
    // A thread may have started a call just before.
    let deadline = Instant::now() + Duration::from_millis(200);
    while IN_DEVICE_CALLS.load(Ordering::SeqCst) > 0 && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(1));
    }
    // No communicator that could be ended runs here any more.
    if let Some(hook) = EXIT_HOOK.get() {
        hook(status);
    }
}

/// A point on a stream after which a value may be freed.
#[doc(hidden)]
pub struct StreamPoint {
    stream: Arc<CudaStream>,
    event: CudaEvent,
    recorded: bool,
}

impl StreamPoint {
    /// Returns the point behind all work that is on `stream` now; `event` belongs to its context. While the stream is
    /// capturing, the event is recorded later.
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
        let _ = cuda_driver::bind(self.stream.context());
        if !self.recorded && !cuda_driver::is_capturing(&self.stream) {
            // Another thread may begin a capture meanwhile. Then the event is part of its graph, proves nothing, and must not
            // be queried, because that breaks the capture.
            self.recorded = cuda_driver::record(&self.event, &self.stream).is_ok()
                && !cuda_driver::is_capturing(&self.stream);
        }
    }

    /// Whether the stream has reached the point. A failed device runs nothing any more.
    #[doc(hidden)]
    pub fn is_over(&mut self) -> bool {
        let _ = cuda_driver::bind(self.stream.context());
        if self.recorded {
            match cuda_driver::is_reached(&self.event) {
                Ok(is_over) => return is_over,
                // A capture that has ended since took the event, or the device failed. The event is recorded again, which
                // fails on a failed device.
                Err(_) => self.recorded = false,
            }
        }
        self.record();
        // A failed device records no event either. Querying a capturing stream would break the capture.
        !self.recorded && !cuda_driver::is_capturing(&self.stream) && has_failed(&self.stream)
    }
}

/// Whether the device of the stream failed, so that nothing runs on it any more.
fn has_failed(stream: &CudaStream) -> bool {
    !matches!(
        cuda_driver::query(stream),
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
    use crate::gate::Gate;
    use cudarc::driver::CudaContext;
    use nccl_emulator::faults;
    use std::sync::atomic::AtomicU32;

    struct Counted {
        turns: Vec<DropPoll>,
        released: Arc<AtomicU32>,
        dropped: Arc<AtomicU32>,
    }

    impl DeferredDrop for Counted {
        fn poll(&mut self) -> DropPoll {
            self.turns.pop().unwrap_or(DropPoll::Wait)
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

    /// Its first poll does not return before `returns` is set.
    struct Stuck {
        returns: Arc<AtomicBool>,
        polls: u32,
        released: Arc<AtomicU32>,
    }

    impl DeferredDrop for Stuck {
        fn poll(&mut self) -> DropPoll {
            self.polls += 1;
            wait_for(|| self.returns.load(Ordering::Acquire));
            match self.polls {
                1 => DropPoll::Wait,
                _ => DropPoll::Over,
            }
        }

        fn release(self: Box<Self>) {
            self.released.fetch_add(1, Ordering::AcqRel);
        }

        fn describe(&self) -> String {
            String::from("a test")
        }
    }

    #[test]
    fn a_value_of_a_thread_that_was_stuck_is_released_also_when_its_replacement_has_ended() {
        let _alone = ALONE.lock();
        let (returns, released) = (Arc::default(), Arc::new(AtomicU32::new(0)));
        let stuck = Stuck {
            returns: Arc::clone(&returns),
            polls: 0,
            released: Arc::clone(&released),
        };
        defer(Box::new(stuck), TIMEOUT);
        // Until the thread counts as stuck.
        wait_for(|| {
            std::thread::sleep(STUCK_AFTER + Duration::from_millis(50));
            STATE.lock().busy_since.is_some()
        });
        let quick = Stuck {
            returns: Arc::new(AtomicBool::new(true)),
            polls: 1,
            released: Arc::clone(&released),
        };
        defer(Box::new(quick), TIMEOUT);
        // Until the replacement has released this value, and has ended.
        wait_for(|| released.load(Ordering::Acquire) == 1 && !STATE.lock().running);
        returns.store(true, Ordering::Release);
        wait_for(|| released.load(Ordering::Acquire) == 2);
    }

    /// Held by each test, because there is one queue, and another value may replace a stuck thread.
    static ALONE: Mutex<()> = Mutex::new(());

    fn wait_for(what: impl Fn() -> bool) {
        let deadline = Instant::now() + Duration::from_secs(20);
        while !what() {
            assert!(Instant::now() < deadline, "it did not come");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn what_is_over_is_released_once_and_what_never_is_stays() {
        let _alone = ALONE.lock();
        nccl_emulator::install_unless_gpu().expect("an emulator or a GPU");
        let (released, dropped) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicU32::new(0)));
        let hand_over = |turns: Vec<DropPoll>, timeout| {
            let counted = Counted {
                turns,
                released: Arc::clone(&released),
                dropped: Arc::clone(&dropped),
            };
            defer(Box::new(counted), timeout);
        };
        for _ in 0..10 {
            hand_over(
                vec![DropPoll::Over, DropPoll::Wait, DropPoll::Wait],
                TIMEOUT,
            );
        }
        hand_over(vec![DropPoll::Never], TIMEOUT);
        hand_over(vec![], Duration::from_millis(20));
        wait_for(|| released.load(Ordering::Acquire) == 10 && Arc::strong_count(&released) == 3);
        std::thread::sleep(Duration::from_millis(100));
        // Two were leaked: they hold their counters, and were neither released nor dropped.
        assert_eq!(Arc::strong_count(&released), 3);
        assert_eq!(released.load(Ordering::Acquire), 10);
        assert_eq!(dropped.load(Ordering::Acquire), 10);
        // And the thread continues, also after it was idle.
        std::thread::sleep(IDLE + Duration::from_millis(200));
        hand_over(vec![DropPoll::Over], TIMEOUT);
        wait_for(|| released.load(Ordering::Acquire) == 11);
    }

    const RELAXED: sys::CUstreamCaptureMode =
        sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;

    /// Returns whether the capture has become a graph.
    fn ends_as_graph(stream: &Arc<CudaStream>) -> bool {
        let graph = stream.end_capture(sys::CUgraphInstantiate_flags(0));
        matches!(graph, Ok(Some(_)))
    }

    /// Asserts that `behind` is reached after `work`.
    fn is_over_after(mut behind: StreamPoint, work: Gate) {
        assert!(!behind.is_over(), "the work has not ended");
        work.open();
        let deadline = Instant::now() + Duration::from_secs(20);
        while !behind.is_over() {
            assert!(Instant::now() < deadline, "the work has ended");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn a_capture_that_begins_under_a_drop_is_not_taken_for_the_end_of_the_work_and_stays_whole() {
        const DROPS: &str = "late-drop";
        nccl_emulator::install().expect("an emulator");
        let context = CudaContext::new(0).expect("a context");
        let stream = context.new_stream().expect("a stream");
        let work = Gate::closed_on(&stream).expect("work");
        let event = cuda_driver::new_event(&context, None).expect("an event");
        let record = faults::at_call("cuEventRecord").on_threads_named(DROPS);
        let record = record.hang();
        let mut behind = std::thread::scope(|scope| {
            let theirs = Arc::clone(&stream);
            let thread = std::thread::Builder::new().name(String::from(DROPS));
            let drops = thread.spawn_scoped(scope, move || StreamPoint::new(theirs, event));
            let drops = drops.expect("a thread");
            assert!(record.wait_for_hits(1, Duration::from_secs(20)));
            stream.begin_capture(RELAXED).expect("it begins");
            drop(record);
            drops.join().expect("no panic")
        });
        assert!(!behind.is_over(), "the work has not ended");
        assert!(ends_as_graph(&stream), "the capture is broken");
        is_over_after(behind, work);
    }

    #[test]
    fn a_point_in_a_capture_that_has_ended_is_not_taken_for_the_end_of_the_work() {
        nccl_emulator::install_unless_gpu().expect("an emulator or a GPU");
        let context = CudaContext::new(0).expect("a context");
        let stream = context.new_stream().expect("a stream");
        let work = Gate::closed_on(&stream).expect("work");
        let event = cuda_driver::new_event(&context, None).expect("an event");
        // As if it began after a drop has found that the stream is not capturing, and ended before the drop asked again.
        stream.begin_capture(RELAXED).expect("it begins");
        cuda_driver::record(&event, &stream).expect("it is recorded");
        assert!(ends_as_graph(&stream));
        let behind = StreamPoint {
            stream,
            event,
            recorded: true,
        };
        is_over_after(behind, work);
    }
}
