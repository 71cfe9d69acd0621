//! The dispatcher: finds a runner for streams that nobody waits for.
//!
//! One thread per process looks at all streams every [`TICK`] while anything is pending, and sleeps
//! when nothing was for a while. A stream that has work, no runner, and moved nothing between two
//! ticks goes to a worker thread. There are as many workers as there are such streams, because a
//! job may block; a worker without work ends after [`IDLE`].
//!
//! Enqueueing costs a syscall only when the dispatcher sleeps: it looks once more after it has said
//! so, and both sides are sequentially consistent.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::bell::futex;
use super::{Stream, run};

/// Between two looks.
const TICK: Duration = Duration::from_micros(200);
/// Looks without anything pending before the dispatcher sleeps.
const PATIENCE: u32 = 25;
/// How long a worker waits for work.
const IDLE: Duration = Duration::from_secs(2);

const NOT_STARTED: u32 = 0;
const ASLEEP: u32 = 1;
const AWAKE: u32 = 2;

static STATE: AtomicU32 = AtomicU32::new(NOT_STARTED);
static STREAMS: Mutex<Vec<Arc<Stream>>> = Mutex::new(Vec::new());
static WORKERS: Mutex<Workers> = Mutex::new(Workers {
    queue: Vec::new(),
    idle: 0,
});
static WORK: Condvar = Condvar::new();

struct Workers {
    queue: Vec<Arc<Stream>>,
    idle: usize,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What the dispatcher knows of a stream's runners.
#[derive(Debug, Default)]
pub(crate) struct Visits {
    /// Someone runs the stream now, or was sent to. A worker that was sent and finds the token
    /// taken leaves this to whoever has the token.
    running: AtomicBool,
    /// Times that somebody ran or polled it.
    count: AtomicU64,
    /// `count` at the last look.
    seen: AtomicU64,
}

impl Visits {
    /// The token was taken.
    pub(super) fn begin(&self) {
        self.running.store(true, Ordering::Relaxed);
    }

    /// The token is about to be freed.
    pub(super) fn end(&self) {
        // Only the holder of the token writes.
        self.count
            .store(self.count.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        self.running.store(false, Ordering::Relaxed);
    }

    /// The token is about to be freed by one who may not run what is next.
    pub(super) fn end_unable(&self) {
        self.running.store(false, Ordering::Relaxed);
    }
}

/// Makes a stream known.
pub(super) fn adopt(stream: &Arc<Stream>) {
    lock(&STREAMS).push(Arc::clone(stream));
}

/// Forgets a stream.
pub(super) fn forget(stream: &Arc<Stream>) {
    lock(&STREAMS).retain(|other| !Arc::ptr_eq(other, stream));
}

/// The streams of a device, and what is enqueued on each.
pub(super) fn marks(device: i32) -> Vec<(u64, Arc<Stream>)> {
    let streams = lock(&STREAMS);
    let here = streams
        .iter()
        .filter(|stream| stream.device() == device && !stream.idle());
    here.map(|stream| (stream.submitted(), Arc::clone(stream)))
        .collect()
}

/// Work was enqueued.
pub(super) fn notify() {
    if STATE.load(Ordering::SeqCst) != AWAKE {
        wake();
    }
}

#[cold]
fn wake() {
    match STATE.swap(AWAKE, Ordering::SeqCst) {
        ASLEEP => futex::wake_all(&STATE),
        NOT_STARTED => {
            if let Err(error) = spawn("nccl-emu-watch", watch) {
                STATE.store(NOT_STARTED, Ordering::SeqCst);
                eprintln!(
                    "nccl-emulator: cannot start a thread ({error}): work only runs while somebody waits for it"
                );
            }
        }
        _ => {}
    }
}

/// A thread that takes no signals: they are for the program's own threads.
fn spawn(name: &str, body: fn()) -> std::io::Result<()> {
    // SAFETY: all-zero sets are valid to fill; the calls write to these two sets only.
    let before = unsafe {
        let mut all: libc::sigset_t = std::mem::zeroed();
        let mut before: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
        before
    };
    let spawned = std::thread::Builder::new().name(name.into()).spawn(body);
    // SAFETY: restores the mask read above.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, std::ptr::null_mut()) };
    spawned.map(drop)
}

fn watch() {
    let mut quiet = 0;
    loop {
        if look() {
            quiet = 0;
        } else {
            quiet += 1;
        }
        if quiet < PATIENCE {
            std::thread::sleep(TICK);
            continue;
        }
        STATE.store(ASLEEP, Ordering::SeqCst);
        if look() {
            STATE.store(AWAKE, Ordering::SeqCst);
        } else {
            while STATE.load(Ordering::SeqCst) == ASLEEP {
                futex::wait(&STATE, ASLEEP, Duration::from_secs(60));
            }
        }
        quiet = 0;
    }
}

/// True if any stream has work.
fn look() -> bool {
    let mut pending = false;
    let mut retired = Vec::new();
    for stream in lock(&STREAMS).iter() {
        if stream.idle() {
            if stream.destroyed() {
                retired.push(Arc::clone(stream));
            }
            continue;
        }
        pending = true;
        let visits = &stream.visits;
        if visits.running.load(Ordering::Relaxed) {
            visits.seen.store(u64::MAX, Ordering::Relaxed);
            continue;
        }
        let count = visits.count.load(Ordering::Relaxed);
        if visits.seen.swap(count, Ordering::Relaxed) == count {
            visits.running.store(true, Ordering::Relaxed);
            hand_over(Arc::clone(stream));
        }
    }
    for stream in retired {
        stream.retire();
    }
    pending
}

fn hand_over(stream: Arc<Stream>) {
    let mut workers = lock(&WORKERS);
    workers.queue.push(stream);
    if workers.idle >= workers.queue.len() {
        WORK.notify_one();
    } else if spawn("nccl-emu-work", work).is_err() {
        // Whoever waits for the stream runs it; the next look tries again.
        if let Some(stream) = workers.queue.pop() {
            stream.visits.running.store(false, Ordering::Relaxed);
        }
    }
}

fn work() {
    let mut workers = lock(&WORKERS);
    loop {
        if let Some(stream) = workers.queue.pop() {
            drop(workers);
            run::work_on(&stream);
            drop(stream);
            workers = lock(&WORKERS);
            continue;
        }
        workers.idle += 1;
        let (guard, wait) = WORK
            .wait_timeout(workers, IDLE)
            .unwrap_or_else(PoisonError::into_inner);
        workers = guard;
        workers.idle -= 1;
        if wait.timed_out() && workers.queue.is_empty() {
            return;
        }
    }
}
