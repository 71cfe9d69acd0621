//! How work gets on a stream's queue, and the order that CUDA gives between streams.
//!
//! The legacy stream (handles 0x0 and 0x1) waits for all blocking streams of its context, and they
//! for it. This is done when a job is enqueued, under the context's `order` lock: a job on the
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

    /// The number that all work enqueued so far ends with, after the order with the legacy stream
    /// is made part of it.
    pub fn mark(self: &Arc<Self>) -> Result<u64, CUresult> {
        self.context().check()?;
        self.refuse_while_capturing()?;
        let _order = self.order();
        Ok(self.submitted())
    }

    /// [`Stream::mark`], and the time at which the stream gets there is stored in `time`.
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

    /// Everything that comes before a job is appended. Hold the guard meanwhile.
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

    /// The end of the queue, for several jobs that nothing may come between.
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

    /// Waits for what has been put on another stream, unless it does so already, up to the number that `waits_for` has.
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
