//! A stream: a queue of jobs, numbered, and the order that CUDA gives between streams.
//!
//! Jobs are numbered from 1 in the order of their enqueueing. `submitted` is the last number given
//! out, `completed` the last one finished; both only grow. `completed` is written by the holder of
//! the token alone.
//!
//! The legacy stream (handles 0x0 and 0x1) waits for all blocking streams of its context, and they
//! for it. This is done when a job is enqueued, under the context's `order` lock: a job on the
//! legacy stream is preceded by a wait for what is pending on each blocking stream, a job on a
//! blocking stream by a wait for what is pending on the legacy stream. A wait only ever names
//! numbers that were given out before it, under the one lock, so waits cannot form a circle.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use super::run::{self, Front};
use super::waiters::Waiters;
use super::work::{HostCall, Job, monotonic_nanos};
use super::{Action, Capture, Recipe, Standing, Work, capture, dispatch};
use crate::driver::CUresult;
use crate::driver::context::Context;
use crate::registry::Registry;
use crate::sync::{Mutex, MutexGuard};

/// Every stream that has a handle.
pub(crate) static STREAMS: Registry<Stream> = Registry::new(0x45);

/// What kind of stream it is; decides how it is ordered against the legacy stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The context's default stream.
    Legacy,
    /// A thread's default stream in a context: blocking.
    PerThread,
    /// Made by `cuStreamCreate` with flags 0.
    Blocking,
    /// Made by `cuStreamCreate` with `CU_STREAM_NON_BLOCKING`.
    NonBlocking,
}

/// A stream. Jobs run one after the other, in the order of [`Stream::enqueue`].
pub struct Stream {
    context: Arc<Context>,
    kind: Kind,
    number: u64,
    priority: i32,
    handle: AtomicUsize,
    queue: Mutex<VecDeque<Job>>,
    submitted: AtomicU64,
    pub(super) completed: AtomicU64,
    /// The token, and what its holder works on.
    pub(super) runner: Mutex<Front>,
    pub(super) waiters: Waiters,
    pub(super) attention: run::Attention,
    pub(super) visits: dispatch::Visits,
    /// Last number of the legacy stream that this one was made to wait for, and the reverse. Under
    /// the `order` lock.
    waits_for_legacy: AtomicU64,
    legacy_waits_for: AtomicU64,
    capture: Mutex<Option<Arc<Capture>>>,
    capturing: AtomicBool,
    destroyed: AtomicBool,
}

impl Stream {
    /// A new stream of a context, known to it and to the dispatcher.
    pub fn new(context: &Arc<Context>, kind: Kind, priority: i32) -> Arc<Self> {
        static NUMBER: AtomicU64 = AtomicU64::new(1);
        let stream = Arc::new(Self {
            context: Arc::clone(context),
            kind,
            number: NUMBER.fetch_add(1, Ordering::Relaxed),
            priority,
            handle: AtomicUsize::new(0),
            queue: Mutex::default(),
            submitted: AtomicU64::new(0),
            completed: AtomicU64::new(0),
            runner: Mutex::default(),
            waiters: Waiters::new(),
            attention: run::Attention::default(),
            visits: dispatch::Visits::default(),
            waits_for_legacy: AtomicU64::new(0),
            legacy_waits_for: AtomicU64::new(0),
            capture: Mutex::new(None),
            capturing: AtomicBool::new(false),
            destroyed: AtomicBool::new(false),
        });
        context.adopt(&stream);
        dispatch::adopt(&stream);
        stream
    }

    /// Gives the stream a handle.
    pub fn publish(self: &Arc<Self>) -> Result<*mut c_void, CUresult> {
        let handle = STREAMS
            .insert(Arc::clone(self))
            .ok_or(CUresult::ERROR_OUT_OF_MEMORY)?;
        self.handle
            .store(handle.expose_provenance(), Ordering::Release);
        Ok(handle)
    }

    /// Ends the stream's handle. What is queued still runs; then the stream goes away.
    pub fn destroy(self: &Arc<Self>) {
        if let Some(capture) = self.capture() {
            capture.lose(self);
        }
        let handle = self.handle.swap(0, Ordering::AcqRel);
        if handle != 0 {
            STREAMS.remove(std::ptr::without_provenance_mut(handle));
        }
        self.destroyed.store(true, Ordering::Release);
        if self.idle() {
            self.retire();
        }
    }

    /// Forgets a destroyed stream whose work is done.
    pub(super) fn retire(self: &Arc<Self>) {
        self.context.forget(self);
        dispatch::forget(self);
    }

    /// True once the stream has no handle any more.
    pub fn destroyed(&self) -> bool {
        self.destroyed.load(Ordering::Acquire)
    }

    /// Appends a job and returns its sequence number (the first of a stream is 1). Never runs
    /// anything.
    ///
    /// # Errors
    /// The context's sticky error; while the stream is captured, `CUDA_ERROR_NOT_SUPPORTED`, and
    /// the capture is void: see [`Stream::submit`].
    pub fn enqueue(self: &Arc<Self>, work: Box<dyn Work>) -> Result<u64, CUresult> {
        self.push(Job::Work(work))
    }

    /// Appends work, or a node if the stream is captured. Gives the sequence number of the job, if
    /// there is one.
    ///
    /// # Errors
    /// The context's sticky error; `CUDA_ERROR_STREAM_CAPTURE_INVALIDATED`.
    pub fn submit(
        self: &Arc<Self>,
        recipe: impl Recipe + 'static,
    ) -> Result<Option<u64>, CUresult> {
        match self.capture() {
            None => self.push(Job::Work(recipe.into_job(self))).map(Some),
            Some(capture) => {
                self.context.check()?;
                capture.add(&[self], Action::Work(Arc::new(recipe)))?;
                Ok(None)
            }
        }
    }

    /// Appends a call of a host function, or a node if the stream is captured.
    pub fn submit_host(self: &Arc<Self>, call: HostCall) -> Result<(), CUresult> {
        match self.capture() {
            None => self.push(Job::Host(call)).map(drop),
            Some(capture) => {
                self.context.check()?;
                capture.add(&[self], Action::Host(call))
            }
        }
    }

    /// Makes later jobs of this stream wait for job `sequence` of `other`.
    pub fn wait_for(self: &Arc<Self>, other: &Arc<Self>, sequence: u64) -> Result<(), CUresult> {
        if Arc::ptr_eq(self, other) || other.completed() >= sequence {
            self.context.check()?;
            return self.refuse_while_capturing();
        }
        self.push(Job::Wait {
            stream: Arc::clone(other),
            sequence,
        })?;
        Ok(())
    }

    /// The number that all work enqueued so far ends with, after the order with the legacy stream
    /// is made part of it.
    pub fn mark(self: &Arc<Self>) -> Result<u64, CUresult> {
        self.context.check()?;
        self.refuse_while_capturing()?;
        let _order = self.order();
        Ok(self.submitted())
    }

    /// [`Stream::mark`], and the time at which the stream gets there is stored in `time`.
    pub fn mark_timed(self: &Arc<Self>, time: &Arc<AtomicU64>) -> Result<u64, CUresult> {
        self.context.check()?;
        self.refuse_while_capturing()?;
        let order = self.order();
        if self.idle() {
            time.store(monotonic_nanos(), Ordering::Release);
            return Ok(self.submitted());
        }
        let sequence = self.append(Job::Stamp(Arc::clone(time)));
        drop(order);
        Ok(sequence)
    }

    /// Everything that comes before a job is appended. Hold the guard meanwhile.
    pub(super) fn admit(self: &Arc<Self>) -> Result<Option<MutexGuard<'_, ()>>, CUresult> {
        self.context.check()?;
        self.refuse_while_capturing()?;
        Ok(self.order())
    }

    fn push(self: &Arc<Self>, job: Job) -> Result<u64, CUresult> {
        let _order = self.admit()?;
        run::remember(self);
        Ok(self.append(job))
    }

    fn append(&self, job: Job) -> u64 {
        self.open().push(job)
    }

    /// The end of the queue, for several jobs that nothing may come between.
    pub(super) fn open(&self) -> Open<'_> {
        Open {
            stream: self,
            queue: Some(self.queue.lock()),
        }
    }

    /// Moves what is queued to the runner's empty batch.
    pub(super) fn take_queue(&self, batch: &mut VecDeque<Job>) {
        std::mem::swap(&mut *self.queue.lock(), batch);
    }

    /// Inserts the waits that order this stream and the legacy stream, if both are in use. Hold the
    /// guard while the job is appended.
    fn order(self: &Arc<Self>) -> Option<MutexGuard<'_, ()>> {
        match self.kind {
            Kind::NonBlocking => None,
            Kind::Legacy => {
                let guard = self.context.order();
                for other in self.context.blocking_streams() {
                    let pending = other.submitted();
                    if pending > other.completed()
                        && pending > other.legacy_waits_for.load(Ordering::Relaxed)
                    {
                        other.legacy_waits_for.store(pending, Ordering::Relaxed);
                        self.append(Job::Wait {
                            stream: other,
                            sequence: pending,
                        });
                    }
                }
                Some(guard)
            }
            Kind::Blocking | Kind::PerThread => {
                let guard = self.context.order();
                if let Some(legacy) = self.context.legacy_if_used() {
                    let pending = legacy.submitted();
                    if pending > legacy.completed()
                        && pending > self.waits_for_legacy.load(Ordering::Relaxed)
                    {
                        self.waits_for_legacy.store(pending, Ordering::Relaxed);
                        self.append(Job::Wait {
                            stream: legacy,
                            sequence: pending,
                        });
                    }
                }
                Some(guard)
            }
        }
    }

    /// Sequence number of the last job given to the stream.
    pub fn submitted(&self) -> u64 {
        self.submitted.load(Ordering::SeqCst)
    }

    /// Sequence number of the last job that finished.
    pub fn completed(&self) -> u64 {
        self.completed.load(Ordering::SeqCst)
    }

    /// True when nothing is pending.
    pub fn idle(&self) -> bool {
        self.completed() == self.submitted()
    }

    /// Returns when all that was enqueued before the call has finished; runs it in the calling
    /// thread if nobody else does.
    ///
    /// # Errors
    /// The context's sticky error.
    pub fn synchronize(self: &Arc<Self>) -> Result<(), CUresult> {
        let target = self.mark()?;
        self.wait_until(target)
    }

    /// Returns when job `sequence` has finished.
    ///
    /// # Errors
    /// The context's sticky error.
    pub fn wait_until(self: &Arc<Self>, sequence: u64) -> Result<(), CUresult> {
        run::wait_until(self, sequence);
        self.context.check()
    }

    /// True when nothing is pending. Makes one bounded step if nobody else runs the stream.
    ///
    /// # Errors
    /// The context's sticky error.
    pub fn query(self: &Arc<Self>) -> Result<bool, CUresult> {
        let target = self.mark()?;
        self.poll(target)
    }

    /// True when job `sequence` has finished. Makes one bounded step if nobody else runs the
    /// stream.
    ///
    /// # Errors
    /// The context's sticky error.
    pub fn poll(self: &Arc<Self>, sequence: u64) -> Result<bool, CUresult> {
        if self.completed() < sequence {
            run::poll(self, sequence);
        }
        self.context.check()?;
        Ok(self.completed() >= sequence)
    }

    /// True while the stream takes part in a capture.
    pub fn capturing(&self) -> bool {
        self.capturing.load(Ordering::Acquire)
    }

    /// The capture that the stream takes part in.
    pub fn capture(&self) -> Option<Arc<Capture>> {
        if self.capturing() {
            self.capture.lock().clone()
        } else {
            None
        }
    }

    /// Makes the stream take part in a capture, or in none. The capture's own.
    pub(super) fn set_capture(&self, capture: Option<Arc<Capture>>) {
        let mut slot = self.capture.lock();
        self.capturing.store(capture.is_some(), Ordering::Release);
        *slot = capture;
    }

    /// What cannot be captured voids the capture; neither can the legacy stream be used beside a
    /// capture of a stream that it is ordered with.
    fn refuse_while_capturing(&self) -> Result<(), CUresult> {
        if self.kind == Kind::Legacy {
            return capture::check_legacy(&self.context);
        }
        let Some(capture) = self.capture() else {
            return Ok(());
        };
        if capture.standing() == Standing::Invalid {
            return Err(CUresult::ERROR_STREAM_CAPTURE_INVALIDATED);
        }
        capture.invalidate();
        Err(CUresult::ERROR_NOT_SUPPORTED)
    }

    /// Makes whoever runs the stream look up if it sleeps.
    pub fn poke(&self) {
        self.attention.poke();
    }

    /// The context the stream belongs to.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// The ordinal of the device it runs on.
    pub fn device(&self) -> i32 {
        self.context.device()
    }

    /// What kind of stream this is.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// The priority it was made with; nothing depends on it here.
    pub fn priority(&self) -> i32 {
        self.priority
    }

    /// Tells streams of this process apart.
    pub fn number(&self) -> u64 {
        self.number
    }
}

/// See [`Stream::open`].
pub(super) struct Open<'a> {
    stream: &'a Stream,
    /// Taken only at the end.
    queue: Option<MutexGuard<'a, VecDeque<Job>>>,
}

impl Open<'_> {
    /// Appends a job and returns its number.
    pub(super) fn push(&mut self, job: Job) -> u64 {
        if let Some(queue) = &mut self.queue {
            queue.push_back(job);
        }
        let submitted = &self.stream.submitted;
        let sequence = submitted.load(Ordering::Relaxed) + 1;
        // Sequentially consistent, as is the dispatcher's look at it before it sleeps: one of the
        // two sees the other.
        submitted.store(sequence, Ordering::SeqCst);
        sequence
    }

    /// Makes what follows wait for a job of another stream, unless it is done.
    pub(super) fn push_wait(&mut self, other: &Arc<Stream>, sequence: u64) {
        if !std::ptr::eq(Arc::as_ptr(other), self.stream) && other.completed() < sequence {
            self.push(Job::Wait {
                stream: Arc::clone(other),
                sequence,
            });
        }
    }

    /// The number of the last job.
    pub(super) fn last(&self) -> u64 {
        self.stream.submitted()
    }
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        drop(self.queue.take());
        dispatch::notify();
    }
}

impl fmt::Display for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            Kind::Legacy => write!(f, "the default stream of GPU {}", self.device()),
            Kind::PerThread => write!(f, "a per-thread stream of GPU {}", self.device()),
            Kind::Blocking | Kind::NonBlocking => {
                write!(f, "stream #{} of GPU {}", self.number, self.device())
            }
        }
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stream")
            .field("number", &self.number)
            .field("kind", &self.kind)
            .field("device", &self.device())
            .field("submitted", &self.submitted())
            .field("completed", &self.completed())
            .finish_non_exhaustive()
    }
}

/// The per-thread streams of one thread; they end with it.
struct Own(Vec<Arc<Stream>>);

impl Drop for Own {
    fn drop(&mut self) {
        for stream in &self.0 {
            stream.destroy();
        }
    }
}

thread_local! {
    static OWN: RefCell<Own> = const { RefCell::new(Own(Vec::new())) };
}

thread_local! {
    /// The stream that this thread named last: most programs name the same one again and again.
    static LAST: RefCell<Option<Arc<Stream>>> = const { RefCell::new(None) };
}

/// Looks at the live stream of a handle, which is none of those that every context has. Without a lock where the thread looks at
/// the same one again. Nothing else may be looked at meanwhile.
pub fn look<R>(handle: *mut c_void, look: impl FnOnce(&Arc<Stream>) -> R) -> Option<R> {
    if handle.is_null() {
        return None;
    }
    // A destroyed one has no handle any more, and no other gets the same.
    let is_meant = |stream: &Arc<Stream>| stream.handle.load(Ordering::Acquire) == handle.addr();
    let known = LAST.try_with(|last| {
        if !last.borrow().as_ref().is_some_and(is_meant) {
            // Whatever the one before does when it goes: not while it is borrowed.
            drop(last.replace(Some(STREAMS.get(handle)?)));
        }
        Some(look(last.borrow().as_ref()?))
    });
    known.ok().flatten()
}

/// The live stream of a handle, which is none of those that every context has.
pub fn named(handle: *mut c_void) -> Option<Arc<Stream>> {
    // A thread that is ending keeps nothing.
    look(handle, Arc::clone).or_else(|| STREAMS.get(handle))
}

/// The calling thread's own stream in a context.
pub fn per_thread(context: &Arc<Context>) -> Result<Arc<Stream>, CUresult> {
    context.check()?;
    OWN.try_with(|own| {
        let own = &mut own.borrow_mut().0;
        if let Some(stream) = own.iter().find(|s| Arc::ptr_eq(&s.context, context)) {
            return Arc::clone(stream);
        }
        own.retain(|stream| !stream.context.dead());
        let stream = Stream::new(context, Kind::PerThread, 0);
        own.push(Arc::clone(&stream));
        stream
    })
    // The thread is ending and its stream is gone.
    .map_err(|_| CUresult::ERROR_DEINITIALIZED)
}
