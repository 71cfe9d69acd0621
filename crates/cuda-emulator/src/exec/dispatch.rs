//! The dispatcher: finds a runner for streams that no thread waits for.
//!
//! One thread per process looks at all streams every [`TICK`]. A stream that has work, no runner,
//! and that between two looks was neither run nor polled [`POLLS`] times goes to a worker thread:
//! polls are bounded steps, and a thread that sleeps between them moves the work slowly.
//! Each such stream gets a worker of its own, because a job may block; a worker without
//! work ends after [`IDLE`].
//!
//! The dispatcher sleeps when for [`PATIENCE`] looks no stream moved and each stream was idle or
//! had a runner. Enqueueing, and freeing the token of a stream with jobs left, wake it; only that
//! wake-up costs a syscall. No wake-up is lost: the dispatcher looks once more after it has set its
//! state to asleep, and both sides are sequentially consistent.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use super::bell::futex;
use super::run;
use super::stream::{ALL, Stream};
use super::visits::POLLS;
use crate::sync::{Condvar, Mutex};

/// The time between two looks.
const TICK: Duration = Duration::from_micros(200);
/// Looks without work or movement before the dispatcher sleeps.
const PATIENCE: u32 = 25;
/// How long the dispatcher sleeps unless it is woken.
const NAP: Duration = match cfg!(test) {
    true => Duration::from_secs(600),
    false => Duration::from_millis(500),
};
/// How long a worker waits for work.
const IDLE: Duration = Duration::from_secs(2);

const NOT_STARTED: u32 = 0;
const ASLEEP: u32 = 1;
const AWAKE: u32 = 2;

static STATE: AtomicU32 = AtomicU32::new(NOT_STARTED);
static WORKERS: Mutex<Workers> = Mutex::new(Workers {
    queue: Vec::new(),
    idle: 0,
});
static WORK: Condvar = Condvar::new();

struct Workers {
    queue: Vec<Arc<Stream>>,
    idle: usize,
}

/// Wakes the dispatcher: there is work that may have no runner.
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

/// Starts a thread that takes no signals: they are for the program's own threads.
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
    let (mut quiet, mut before) = (0, 0);
    loop {
        let seen = look();
        quiet = if seen.all_is_well && seen.moves == before {
            quiet + 1
        } else {
            0
        };
        before = seen.moves;
        if quiet < PATIENCE {
            std::thread::sleep(TICK);
            continue;
        }
        STATE.store(ASLEEP, Ordering::SeqCst);
        if look().all_is_well {
            futex::wait(&STATE, ASLEEP, NAP);
        }
        STATE.store(AWAKE, Ordering::SeqCst);
        quiet = 0;
    }
}

/// The result of one look at the streams.
struct Seen {
    /// Each stream is idle or has a runner.
    all_is_well: bool,
    /// Changes when any stream moves.
    moves: u64,
}

fn look() -> Seen {
    let mut seen = Seen {
        all_is_well: true,
        moves: 0,
    };
    let mut retired = Vec::new();
    for stream in ALL.lock().iter() {
        let visits = &stream.visits;
        let count = visits.count.load(Ordering::Relaxed);
        seen.moves = seen
            .moves
            .wrapping_add(count)
            .wrapping_add(stream.completed());
        if stream.idle() {
            if stream.destroyed() {
                retired.push(Arc::clone(stream));
            }
            continue;
        }
        if visits.claims.load(Ordering::SeqCst) != 0 {
            visits.seen.store(0, Ordering::Relaxed);
            continue;
        }
        seen.all_is_well = false;
        if count - visits.seen.swap(count, Ordering::Relaxed) < POLLS {
            visits.claim();
            hand_over(Arc::clone(stream));
        }
    }
    for stream in retired {
        stream.retire();
    }
    seen
}

fn hand_over(stream: Arc<Stream>) {
    let mut workers = WORKERS.lock();
    workers.queue.push(stream);
    if workers.idle >= workers.queue.len() {
        WORK.notify_one();
    } else if spawn("nccl-emu-work", work).is_err() {
        // A thread that waits for the stream runs it meanwhile; the next look tries again.
        if let Some(stream) = workers.queue.pop() {
            stream.visits.unclaim();
        }
    }
}

fn work() {
    let mut workers = WORKERS.lock();
    loop {
        if let Some(stream) = workers.queue.pop() {
            drop(workers);
            run::work_on(&stream);
            stream.visits.unclaim();
            drop(stream);
            workers = WORKERS.lock();
            continue;
        }
        workers.idle += 1;
        let wait = WORK.wait_for(&mut workers, IDLE);
        workers.idle -= 1;
        if wait.timed_out() && workers.queue.is_empty() {
            return;
        }
    }
}
