//! How work gets on a stream's queue, and the order that CUDA gives between streams.
//!
//! The legacy stream (handles 0x0 and 0x1) waits for all blocking streams of its context, and they
//! wait for it. Enqueueing sees to this, under the context's `order` lock: a job on the
//! legacy stream is preceded by a wait for what is pending on each blocking stream, a job on a
//! blocking stream by a wait for what is pending on the legacy stream. A wait only ever names
//! numbers that were given out before it, under the one lock, so waits cannot form a circle.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::dispatch;
use super::graph::{Action, Recipe};
use super::host_call::HostCall;
use super::job::{Job, monotonic_nanos};
use super::run;
use super::stream::{Kind, Stream};
use super::work::Work;
use crate::result::CUresult;
use crate::sync::MutexGuard;

impl Stream {
    /// Appends a job and returns its sequence number (the first of a stream is 1). Never runs
    /// anything.
    ///
    /// # Errors
    /// The context's sticky error; while the stream is captured, `CUDA_ERROR_NOT_SUPPORTED`, and
    /// the capture is void: see [`Stream::submit`].
    pub fn enqueue(self: &Arc<Self>, work: Box<dyn Work>) -> Result<u64, CUresult> {
        self.push(Job::Work(work))
    }

    /// Appends work, or a node if the stream is captured. Returns the sequence number of the job, if
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
                self.context().check()?;
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
                self.context().check()?;
                capture.add(&[self], Action::Host(call))
            }
        }
    }

    /// Makes later jobs of this stream wait for job `sequence` of `other`.
    pub fn wait_for(self: &Arc<Self>, other: &Arc<Self>, sequence: u64) -> Result<(), CUresult> {
        if Arc::ptr_eq(self, other) || other.completed() >= sequence {
            self.context().check()?;
            return self.refuse_while_capturing();
        }
        self.push(Job::Wait {
            stream: Arc::clone(other),
            sequence,
        })?;
        Ok(())
    }

    /// Returns the number of the last job enqueued so far, including the waits that order this stream
    /// with the legacy stream.
    pub fn mark(self: &Arc<Self>) -> Result<u64, CUresult> {
        self.context().check()?;
        self.refuse_while_capturing()?;
        let _order = self.order();
        Ok(self.submitted())
    }

    /// Does what [`Stream::mark`] does, and has the time at which the stream gets there stored in `time`.
    pub fn mark_timed(self: &Arc<Self>, time: &Arc<AtomicU64>) -> Result<u64, CUresult> {
        self.context().check()?;
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

    /// Checks and orders the stream before a job is appended. The caller holds the guard until it has appended the job.
    pub(super) fn admit(self: &Arc<Self>) -> Result<Option<MutexGuard<'_, ()>>, CUresult> {
        self.context().check()?;
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

    /// Locks the end of the queue, to append several jobs with no other job between them.
    pub(super) fn open(&self) -> Open<'_> {
        Open {
            stream: self,
            queue: Some(self.queue.lock()),
        }
    }

    /// Inserts the waits that order this stream and the legacy stream, if both are in use. Hold the
    /// guard while the job is appended.
    fn order(self: &Arc<Self>) -> Option<MutexGuard<'_, ()>> {
        match self.kind() {
            Kind::NonBlocking => None,
            Kind::Legacy => {
                let guard = self.context().order();
                for other in self.context().blocking_streams() {
                    self.order_behind(&other, &other.legacy_waits_for);
                }
                Some(guard)
            }
            Kind::Blocking | Kind::PerThread => {
                let guard = self.context().order();
                if let Some(legacy) = self.context().legacy_if_used() {
                    self.order_behind(&legacy, &self.waits_for_legacy);
                }
                Some(guard)
            }
        }
    }

    /// Makes this stream wait for the pending jobs of `other`, unless it already does: `waits_for` is the last number
    /// waited for.
    fn order_behind(self: &Arc<Self>, other: &Arc<Self>, waits_for: &AtomicU64) {
        let pending = other.submitted();
        if pending > other.completed() && pending > waits_for.load(Ordering::Relaxed) {
            waits_for.store(pending, Ordering::Relaxed);
            self.append(Job::Wait {
                stream: Arc::clone(other),
                sequence: pending,
            });
        }
    }
}

/// See [`Stream::open`].
pub(super) struct Open<'a> {
    stream: &'a Stream,
    /// `None` only in `drop`.
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
        // Sequentially consistent, like the dispatcher's read of it before it sleeps: one of the
        // two sees the other.
        submitted.store(sequence, Ordering::SeqCst);
        sequence
    }

    /// Makes the jobs that follow wait for a job of another stream, unless that job is done.
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
