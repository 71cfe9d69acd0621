//! Running a stream: by the thread that waits for it, step by step by a thread that polls, or by a
//! worker.
//!
//! # The token
//!
//! `Stream::runner` is a lock that is only ever tried. The thread that gets it runs jobs from the
//! front of the queue until the job it waits for is done, and frees it. A thread that does not get
//! it sleeps on `Waiters::done`.
//!
//! A runner whose front job waits for another stream takes that stream's token too and runs it
//! ([`Chain`] lists the streams that a thread runs, innermost first). Waits name earlier numbers
//! only, so this ends. At [`DEPTH`] it stops taking tokens and sleeps; the dispatcher finds a
//! runner for the rest.
//!
//! A worker is a stand-in: once another thread waits for the stream, the worker frees the token
//! after its current step and that thread takes over ([`super::attention`]).
//!
//! # No wake-up is lost
//!
//! Between a runner and its waiters: see [`Waiters`].
//!
//! A runner that sleeps on the bell of a job first puts that bell into `parked` of every stream it
//! runs, and then looks for reasons to stop. A thread that gives it a reason (a dead context, a
//! waiter that takes over from a worker) rings that bell afterwards. Both use the lock in `parked`,
//! so one of them sees the other.

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

use super::bell::Bell;
use super::dispatch;
use super::job::{Front, Job};
use super::spin;
use super::stream::Stream;
use super::waiters::Waiters;
use super::work::{Pause, Step, Work};
use crate::result::CUresult;
use crate::sync::MutexGuard;

/// The most streams that one thread runs at once.
const DEPTH: u32 = 8;
/// Bytes that a runner copies before it checks for interruptions.
const BUDGET: usize = 4 << 20;
/// Bytes that a poll copies at most.
const POLL_BUDGET: usize = 64 << 10;
/// Short jobs that one poll runs at most.
const POLL_JOBS: u32 = 32;

/// The streams that the calling thread runs, innermost first.
struct Chain<'a> {
    stream: &'a Stream,
    /// The thread is a worker, which stops for threads that wait.
    worker: bool,
    depth: u32,
    outer: Option<&'a Chain<'a>>,
}

impl<'a> Chain<'a> {
    fn links(&self) -> impl Iterator<Item = &Chain<'a>> {
        std::iter::successors(Some(self), |link| link.outer)
    }

    /// Whether the thread should stop waiting.
    fn interrupted(&self) -> bool {
        self.links().any(|link| {
            link.stream.context().dead()
                || self.worker && link.stream.attention.wanted.load(Ordering::SeqCst) > 0
        })
    }

    /// Sleeps until the bell rings, the chain is interrupted, or `limit` has passed.
    fn park(&self, bell: &Bell, seen: u32, limit: Duration) {
        for link in self.links() {
            link.stream.attention.park(bell);
        }
        if !self.interrupted() {
            bell.wait(seen, limit);
        }
        for link in self.links() {
            link.stream.attention.unpark();
        }
    }
}

thread_local! {
    /// Streams that this thread gave work to.
    static MINE: RefCell<Vec<Weak<Stream>>> = const { RefCell::new(Vec::new()) };
}

/// Notes that this thread gave work to `stream`. While the thread waits for another stream it also
/// moves this one, because no other thread may run it soon.
pub(super) fn remember(stream: &Arc<Stream>) {
    let _ = MINE.try_with(|mine| {
        let mine = &mut *mine.borrow_mut();
        let known = |weak: &Weak<Stream>| std::ptr::eq(weak.as_ptr(), Arc::as_ptr(stream));
        if mine.iter().any(known) {
            return;
        }
        mine.retain(|weak| weak.upgrade().is_some_and(|s| !s.idle()));
        mine.push(Arc::downgrade(stream));
    });
}

/// Makes one bounded step of each stream that this thread gave work to and no thread runs. Returns
/// true if any of them moved.
fn help() -> bool {
    let mut moved = false;
    let mut index = 0;
    // The list is not borrowed while a stream runs.
    while let Ok(Some(weak)) = MINE.try_with(|mine| mine.borrow().get(index).map(Weak::clone)) {
        index += 1;
        if let Some(stream) = weak.upgrade()
            && !stream.idle()
        {
            moved |= matches!(poll_at(&stream, u64::MAX, 0), Polled::Moved);
        }
    }
    moved
}

impl Stream {
    /// Waits until all jobs enqueued before the call have finished. Runs them in the calling thread
    /// if no other thread does.
    ///
    /// # Errors
    /// The context's sticky error.
    pub fn synchronize(self: &Arc<Self>) -> Result<(), CUresult> {
        let target = self.mark()?;
        self.wait_until(target)
    }

    /// Waits until job `sequence` has finished.
    ///
    /// # Errors
    /// The context's sticky error.
    pub fn wait_until(self: &Arc<Self>, sequence: u64) -> Result<(), CUresult> {
        wait_in(self, sequence, false, None);
        self.context().check()
    }

    /// Returns whether nothing is pending. Makes one bounded step if no other thread runs the
    /// stream.
    ///
    /// # Errors
    /// The context's sticky error.
    pub fn query(self: &Arc<Self>) -> Result<bool, CUresult> {
        let target = self.mark()?;
        self.poll(target)
    }

    /// Returns whether job `sequence` has finished. Makes one bounded step if no other thread runs
    /// the stream.
    ///
    /// # Errors
    /// The context's sticky error.
    pub fn poll(self: &Arc<Self>, sequence: u64) -> Result<bool, CUresult> {
        if self.completed() < sequence {
            poll(self, sequence);
        }
        self.context().check()?;
        Ok(self.completed() >= sequence)
    }
}

/// Runs the jobs of a stream, as a worker. Returns when the queue is empty, or when another thread
/// runs the stream or wants to.
pub(super) fn work_on(stream: &Arc<Stream>) {
    if let Some(front) = try_token(stream) {
        let link = Chain {
            stream,
            worker: true,
            depth: 0,
            outer: None,
        };
        run(stream, front, u64::MAX, &link);
    }
}

fn try_token(stream: &Stream) -> Option<MutexGuard<'_, Front>> {
    stream.runner.try_lock()
}

/// Waits until job `target` of the stream is done, and runs the stream if it can. Returns false if
/// interrupted.
fn wait_in(stream: &Arc<Stream>, target: u64, worker: bool, outer: Option<&Chain<'_>>) -> bool {
    let depth = outer.map_or(0, |chain| chain.depth + 1);
    let link = Chain {
        stream,
        worker,
        depth,
        outer,
    };
    loop {
        if stream.completed() >= target {
            return true;
        }
        if outer.is_some_and(Chain::interrupted) {
            return false;
        }
        let may_run = depth < DEPTH;
        if may_run && let Some(front) = try_token(stream) {
            if !run(stream, front, target, &link) {
                return false;
            }
            continue;
        }
        let (waiters, attention) = (&stream.waiters, &stream.attention);
        let wants = may_run && !worker;
        if wants {
            attention.wanted.fetch_add(1, Ordering::SeqCst);
        }
        let seen = waiters.announce(target);
        let front = if may_run { try_token(stream) } else { None };
        let finished = match front {
            Some(front) => {
                if wants {
                    attention.wanted.fetch_sub(1, Ordering::SeqCst);
                }
                if !run(stream, front, target, &link) {
                    return false;
                }
                continue;
            }
            None => stream.completed() >= target,
        };
        if !finished {
            if wants {
                attention.poke();
            }
            wait_for_runner(waiters, seen, outer);
        }
        if wants {
            attention.wanted.fetch_sub(1, Ordering::SeqCst);
        }
    }
}

/// Waits until the runner rings.
fn wait_for_runner(waiters: &Waiters, seen: u32, outer: Option<&Chain<'_>>) {
    let (bell, count) = (waiters.bell(), spin::local_spinners());
    if spin::patient(bell, seen, count, || outer.is_some_and(Chain::interrupted)) {
        return;
    }
    match outer {
        Some(chain) => chain.park(bell, seen, spin::NAP),
        None => {
            bell.wait(seen, spin::NAP);
        }
    }
}

/// Waits until the blocked job should be stepped again, the chain is interrupted, or other streams
/// of this thread moved.
fn rest(work: &dyn Work, seen: u32, chain: &Chain<'_>) {
    let bell = work.bell();
    if let Pause::For(pause) = work.pause() {
        if pause.is_zero() {
            std::thread::yield_now();
        } else if !chain.interrupted() && !help() {
            // Only an interruption of the chain rings this bell.
            let alarm = Bell::new();
            chain.park(&alarm, alarm.value(), pause);
        }
        return;
    }
    if !spin::patient(bell, seen, work.spinners(), || {
        chain.interrupted() || help()
    }) {
        chain.park(bell, seen, spin::NAP);
    }
}

/// Runs jobs until `target` is done or the queue is empty. Returns false if the chain was
/// interrupted.
fn run(
    stream: &Arc<Stream>,
    mut front: MutexGuard<'_, Front>,
    target: u64,
    chain: &Chain<'_>,
) -> bool {
    stream.visits.claim();
    let reached = run_jobs(stream, &mut front, target, chain);
    stream.visits.ran();
    let_go(stream, front);
    reached
}

fn run_jobs(stream: &Arc<Stream>, front: &mut Front, target: u64, chain: &Chain<'_>) -> bool {
    loop {
        if stream.completed.load(Ordering::Relaxed) >= target {
            return true;
        }
        if front.batch.is_empty() {
            stream.take_queue(&mut front.batch);
        }
        let Some(job) = front.batch.front_mut() else {
            return true;
        };
        if stream.context().dead() {
            finish(stream, front);
            continue;
        }
        match job {
            Job::Work(work) => match step(work.as_mut(), stream, BUDGET) {
                Step::Done => finish(stream, front),
                Step::Progress => {
                    if chain.interrupted() && !stream.context().dead() {
                        return false;
                    }
                }
                Step::Blocked { seen } => {
                    rest(work.as_ref(), seen, chain);
                    if chain.interrupted() && !stream.context().dead() {
                        return false;
                    }
                }
            },
            Job::Wait {
                stream: other,
                sequence,
            } => {
                if wait_in(other, *sequence, chain.worker, Some(chain)) {
                    finish(stream, front);
                } else if !stream.context().dead() {
                    return false;
                }
            }
            Job::Host(call) => {
                call.make();
                finish(stream, front);
            }
            Job::Stamp(time) => {
                Job::stamp(time);
                finish(stream, front);
            }
        }
    }
}

/// Frees the token, and wakes the dispatcher if jobs are left.
fn let_go(stream: &Stream, front: MutexGuard<'_, Front>) {
    drop(front);
    stream.visits.unclaim();
    stream.waiters.released();
    if !stream.idle() {
        dispatch::notify();
    }
}

/// Drops the job in progress and counts it as done.
fn finish(stream: &Stream, front: &mut Front) {
    drop(front.batch.pop_front());
    let sequence = stream.completed.load(Ordering::Relaxed) + 1;
    stream.completed.store(sequence, Ordering::SeqCst);
    stream.waiters.finished(sequence);
}

/// Runs one step of a job. A panic in it kills the context, not the process.
fn step(work: &mut dyn Work, stream: &Stream, budget: usize) -> Step {
    match catch_unwind(AssertUnwindSafe(|| work.step(budget))) {
        Ok(step) => step,
        Err(_) => {
            eprintln!(
                "nccl-emulator: internal error: a job on {stream} panicked; its context is lost"
            );
            stream.context().kill(CUresult::ERROR_LAUNCH_FAILED);
            Step::Done
        }
    }
}

enum Polled {
    Moved,
    Stuck,
}

/// Makes one bounded step towards job `target`.
fn poll(stream: &Arc<Stream>, target: u64) {
    if matches!(poll_at(stream, target, 0), Polled::Stuck) {
        help();
    }
}

fn poll_at(stream: &Arc<Stream>, target: u64, depth: u32) -> Polled {
    let Some(mut front) = try_token(stream) else {
        return Polled::Stuck;
    };
    stream.visits.claim();
    let (polled, declined) = poll_jobs(stream, &mut front, target, depth);
    if !declined {
        stream.visits.polled();
    }
    let_go(stream, front);
    polled
}

/// Returns the outcome, and whether the front is a job that a poll must not run.
fn poll_jobs(stream: &Arc<Stream>, front: &mut Front, target: u64, depth: u32) -> (Polled, bool) {
    let mut polled = Polled::Stuck;
    for _ in 0..POLL_JOBS {
        if stream.completed.load(Ordering::Relaxed) >= target {
            break;
        }
        if front.batch.is_empty() {
            stream.take_queue(&mut front.batch);
        }
        let Some(job) = front.batch.front_mut() else {
            break;
        };
        if !stream.context().dead() {
            match job {
                Job::Work(work) => match step(work.as_mut(), stream, POLL_BUDGET) {
                    Step::Done => {}
                    Step::Progress => return (Polled::Moved, false),
                    Step::Blocked { .. } => return (polled, false),
                },
                Job::Wait {
                    stream: other,
                    sequence,
                } => {
                    if other.completed() < *sequence {
                        if depth + 1 >= DEPTH {
                            return (polled, true);
                        }
                        if matches!(poll_at(other, *sequence, depth + 1), Polled::Moved) {
                            polled = Polled::Moved;
                        }
                        if other.completed() < *sequence {
                            return (polled, false);
                        }
                    }
                }
                Job::Host(_) => return (polled, true),
                Job::Stamp(time) => Job::stamp(time),
            }
        }
        finish(stream, front);
        polled = Polled::Moved;
    }
    (polled, false)
}
