//! The completion of an operation: poll it, wait for it with a deadline, or `.await` it.
//!
//! Issuing an operation records no event behind it, because that would cost more than the rest of this layer together.
//! The first query of a request records the event, which covers everything that is on the stream by then, including the
//! operation. Nothing has to be kept alive until the end, so a request may be dropped at any time; that neither cancels
//! nor frees anything.

mod poller;

pub(crate) use poller::replace as replace_poller;

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use cudarc::driver::{CudaEvent, CudaStream};
use once_cell::sync::OnceCell;

use crate::active_calls::CallKind;
use crate::communicator::{Backoff, Communicator, DetectionPhase, Inner, check_not_capturing};
use crate::cuda_driver;
use crate::error::{Error, ErrorKind, Result};
use crate::forked::{self, ForkGuarded};
use crate::operation::{OperationKind, Shape};
use crate::recorder::handle_of;
use crate::time::deadline_after;

/// An issued operation.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # nccl_emulator::install_unless_gpu()?;
/// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
/// # let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
/// use std::time::Duration;
///
/// let mut y = stream.clone_htod(&[1.0f32; 8])?;
/// let done = comm.all_reduce_in_place(&mut y, nccl::ReduceOp::Sum)?;
/// done.wait_timeout(Duration::from_secs(5))?;
/// assert!(done.is_complete()?);
/// # Ok(())
/// # }
/// ```
pub struct Request {
    inner: ForkGuarded<Arc<Inner>>,
    /// `None` means the communicator's stream.
    stream: Option<ForkGuarded<Arc<CudaStream>>>,
    timeout: Duration,
    kind: OperationKind,
    shape: Shape,
    sequence: u64,
    issued: Instant,
    completion_event: OnceCell<CompletionEvent>,
    complete: AtomicBool,
    /// The poller's entry with the waker, while the request is awaited.
    entry: Option<poller::PollerEntry>,
    /// Set while the request is awaited and its communicator is being aborted.
    ending: Option<Box<AwaitedAbort>>,
}

/// The event behind an operation.
struct CompletionEvent {
    event: Arc<CudaEvent>,
    /// Up to which number all calls on the stream are in front of the event. Less than the operation's number if a replay
    /// with a lower number was being launched, which happens without the communicator's lock.
    covers: u64,
}

/// An abort whose end a task awaits.
struct AwaitedAbort {
    /// The error to return at the end, if this request knows it.
    error: Option<Error>,
    /// When the request stops waiting for the end of the abort.
    until: Instant,
}

impl Request {
    /// Returns a request for an operation. With `is_empty`, nothing was issued, and the request is complete.
    #[inline]
    #[doc(hidden)]
    pub fn new(
        comm: &Communicator,
        kind: OperationKind,
        shape: Shape,
        sequence: u64,
        issued: Instant,
        is_empty: bool,
    ) -> Self {
        let (inner, stream) = (&comm.inner, &comm.stream);
        Self {
            inner: inner.clone(),
            stream: (!Arc::ptr_eq(stream, &inner.stream)).then(|| stream.clone()),
            timeout: comm.timeout,
            kind,
            shape,
            sequence,
            issued,
            completion_event: OnceCell::new(),
            complete: AtomicBool::new(is_empty),
            entry: None,
            ending: None,
        }
    }

    /// Returns the request with another timeout.
    pub(crate) fn with_timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Returns the operation's number on its communicator, from 1.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// # let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
    /// # let mut y = stream.clone_htod(&[1.0f32; 8])?;
    /// let first = comm.all_reduce_in_place(&mut y, nccl::ReduceOp::Sum)?;
    /// assert_eq!(first.sequence(), 1);
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn sequence(&self) -> u64 {
        self.sequence
    }

    /// Returns whether the operation is done; never waits.
    ///
    /// The answer also covers work that was put on the stream after the operation and before the first query
    /// of this request.
    ///
    /// # Errors
    /// [`ErrorKind::Aborted`] when the communicator has been aborted: work that ends because of an abort has not
    /// succeeded. [`ErrorKind::Cuda`] when the device failed.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// # let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
    /// # let mut y = stream.clone_htod(&[1.0f32; 8])?;
    /// let sum = comm.all_reduce_in_place(&mut y, nccl::ReduceOp::Sum)?;
    /// while !sum.is_complete()? {
    ///     std::thread::yield_now(); // or something useful
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn is_complete(&self) -> Result<bool> {
        self.poll_once().map_err(|error| {
            let error = self.describe(error);
            self.inner
                .abort_if_context_lost(&error, DetectionPhase::AfterIssue);
            self.with_fault_if_released(error)
        })
    }

    /// Attaches the fault that all ranks report, if borrowed memory has been released already; otherwise returns the error
    /// unchanged.
    fn with_fault_if_released(&self, error: Error) -> Error {
        match self.inner.lifecycle.is_released() {
            true => self.inner.final_error(error),
            false => error,
        }
    }

    /// Waits until the operation is done, at most for the operation timeout of the communicator.
    ///
    /// The thread spins briefly, then yields, then sleeps in steps of up to a millisecond.
    ///
    /// # Errors
    /// [`ErrorKind::TimedOut`] when it is not done by then; the communicator is aborted, because no later
    /// operation on it could succeed. Otherwise as [`is_complete`](Self::is_complete), and
    /// [`ErrorKind::Nccl`] when NCCL reports an asynchronous error.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// # let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
    /// # let mut y = stream.clone_htod(&[1.0f32; 8])?;
    /// comm.all_reduce_in_place(&mut y, nccl::ReduceOp::Sum)?.wait()?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn wait(&self) -> Result<()> {
        let timeout = self.timeout;
        self.wait_until(deadline_after(timeout), timeout)
            .map_err(|error| {
                let error = self.describe(error);
                if error.is_timeout() {
                    self.inner.abort_in_background(&error);
                }
                self.inner.final_error(error)
            })
    }

    /// Waits until the operation is done, at most for `timeout`.
    ///
    /// # Errors
    /// [`ErrorKind::TimedOut`] when it is not done by then; the operation continues, and can be waited
    /// for again. Otherwise as [`wait`](Self::wait).
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// # let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
    /// # let mut y = stream.clone_htod(&[1.0f32; 8])?;
    /// use std::time::Duration;
    /// let sum = comm.all_reduce_in_place(&mut y, nccl::ReduceOp::Sum)?;
    /// sum.wait_timeout(Duration::from_secs(5))?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn wait_timeout(&self, timeout: Duration) -> Result<()> {
        self.wait_until(deadline_after(timeout), timeout)
            .map_err(|error| match error.is_timeout() {
                // The operation continues, or the abort has not ended yet.
                true => self.describe(error),
                false => self.inner.final_error(self.describe(error)),
            })
    }

    fn wait_until(&self, deadline: Instant, timeout: Duration) -> Result<()> {
        let mut backoff = Backoff::new();
        let mut next_nccl_query = Instant::now() + ASYNC_ERROR_INTERVAL;
        let mut failed = None;
        loop {
            match self.poll_once() {
                Ok(true) => return Ok(()),
                Ok(false) => {}
                Err(error) => return Err(failed.unwrap_or(error)),
            }
            let now = Instant::now();
            if now >= deadline {
                return Err(self.timed_out(timeout));
            }
            if now >= next_nccl_query {
                // The loop continues until the abort that this error causes has ended.
                failed = failed.or(self.check_nccl().err());
                next_nccl_query = now + ASYNC_ERROR_INTERVAL;
            }
            backoff.pause();
        }
    }

    fn stream(&self) -> &Arc<CudaStream> {
        self.stream.as_deref().unwrap_or(&self.inner.stream)
    }

    fn timed_out(&self, timeout: Duration) -> Error {
        Error::new(ErrorKind::TimedOut {
            what: String::from("the operation"),
            timeout,
        })
    }

    fn describe(&self, error: Error) -> Error {
        error.during(|| {
            // A number of 0 stands for no operation.
            let sequence = Some(self.sequence).filter(|&sequence| sequence > 0);
            self.inner
                .operation(self.kind, self.shape, sequence, self.issued)
        })
    }

    fn poll_once(&self) -> Result<bool> {
        forked::check()?;
        if self.complete.load(Ordering::Relaxed) {
            return Ok(true);
        }
        if self.inner.abort_signal.is_aborted() {
            self.inner.abort_in_background("its abort signal was given");
        }
        if self.inner.lifecycle.get().abort_has_begun() {
            return self.ended();
        }
        let inside = self.inner.enter(CallKind::Query, self.timeout);
        let CompletionEvent { event, covers } = self.completion_event()?;
        let done = cuda_driver::is_reached(event).map_err(Error::cuda(
            "asking whether the operation is done (cuEventQuery)",
        ))?;
        drop(inside);
        // After the query: an abort is announced before it frees the stream.
        if self.inner.lifecycle.get().abort_has_begun() {
            return self.ended();
        }
        // Another call took too long inside NCCL. NCCL's abort flag, which ends that call, also ends kernels, and an
        // abort follows; so this event does not show that the operation is done.
        if done && self.inner.is_abort_flag_raised() {
            return Ok(false);
        }
        // Behind a kernel that has failed, the operation may have used wrong data.
        if let Some(error) = self.inner.peer_kernels.failure().filter(|_| done) {
            self.inner.abort_in_background(&error);
            return self.ended();
        }
        if done {
            let stream = self.stream();
            self.inner.track_handle.track().done(stream, *covers);
            self.complete.store(true, Ordering::Relaxed);
        }
        Ok(done)
    }

    /// Returns the error of an abort once other ranks cannot write into this rank's memory any more; until
    /// then, the operation is not done.
    #[cold]
    fn ended(&self) -> Result<bool> {
        if !self.inner.lifecycle.is_released() {
            return Ok(false);
        }
        match self.inner.overdue_operation.get() {
            // The watchdog ended the communicator because of this operation.
            Some(overdue) if overdue.sequence() == self.sequence => Err(overdue.error()),
            _ => Err(self.inner.out_of_use()),
        }
    }

    /// Returns the final error of an awaited request, which does not wait for the end of an abort any more.
    fn final_error(&mut self, error: Error) -> Error {
        let known = self.ending.take().and_then(|ending| ending.error);
        let error = known.unwrap_or(error);
        let error = self.with_fault_if_released(error);
        self.describe(error)
    }

    /// Returns the event behind the operation, which the first query records.
    fn completion_event(&self) -> Result<&CompletionEvent> {
        self.completion_event.get_or_try_init(|| {
            let stream = self.stream();
            check_not_capturing("the operation's stream", stream)?;
            let pooled = self.inner.completion_events.lock().pop();
            let event = match pooled {
                Some(event) => event,
                None => Arc::new(
                    cuda_driver::new_event(&self.inner.context, None)
                        .map_err(Error::cuda("creating an event (cuEventCreate)"))?,
                ),
            };
            let track = self.inner.track_handle.track();
            let covers = track.issued_below(handle_of(stream), self.sequence + 1);
            cuda_driver::record(&event, stream).map_err(Error::cuda(
                "recording an event behind the operation (cuEventRecord)",
            ))?;
            Ok(CompletionEvent { event, covers })
        })
    }

    /// Checks for an error that NCCL found in the background; skipped while another thread calls NCCL.
    fn check_nccl(&self) -> Result<()> {
        let failure = {
            let _inside = self.inner.enter(CallKind::Query, self.timeout);
            self.inner.background_failure()
        };
        let Some(failure) = failure else {
            return Ok(());
        };
        let error = self.describe(failure.into());
        self.inner.abort_in_background(&error);
        Err(error)
    }
}

/// How often a waiting thread queries NCCL for errors of its background threads.
const ASYNC_ERROR_INTERVAL: Duration = Duration::from_millis(10);

/// Resolves when the operation is done; works with any executor.
///
/// One thread per process polls all awaited requests, every 20 µs to 1 ms, and wakes
/// their tasks. Dropping the future cancels nothing.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # nccl_emulator::install_unless_gpu()?;
/// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
/// # let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
/// # let mut y = stream.clone_htod(&[1.0f32; 8])?;
/// async fn step(comm: &nccl::Communicator, y: &mut nccl::cudarc::driver::CudaSlice<f32>) -> nccl::Result<()> {
///     comm.all_reduce_in_place(y, nccl::ReduceOp::Sum)?.await
/// }
/// # fn block_on<F: std::future::Future>(future: F) -> F::Output {
/// #     struct Unpark(std::thread::Thread);
/// #     impl std::task::Wake for Unpark {
/// #         fn wake(self: std::sync::Arc<Self>) { self.0.unpark() }
/// #     }
/// #     let waker = std::sync::Arc::new(Unpark(std::thread::current())).into();
/// #     let mut future = std::pin::pin!(future);
/// #     loop {
/// #         match future.as_mut().poll(&mut std::task::Context::from_waker(&waker)) {
/// #             std::task::Poll::Ready(value) => return value,
/// #             std::task::Poll::Pending => std::thread::park(),
/// #         }
/// #     }
/// # }
/// block_on(step(&comm, &mut y))?;
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// As [`Request::wait`], with the same timeout, counted from the first poll.
impl Future for Request {
    type Output = Result<()>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let mut failed = None;
        match self.poll_once() {
            Ok(true) => return Poll::Ready(Ok(())),
            Ok(false) => {}
            Err(error) => {
                let error = self.describe(error);
                if !self
                    .inner
                    .abort_if_context_lost(&error, DetectionPhase::AfterIssue)
                    || self.inner.lifecycle.is_released()
                {
                    return Poll::Ready(Err(self.final_error(error)));
                }
                // Below, the request awaits the end of the abort that has begun.
                failed = Some(error);
            }
        }
        let timeout = self.timeout;
        if let (Some(entry), None, None) = (&self.entry, &self.ending, &failed) {
            if Instant::now() >= entry.deadline() {
                let error = self.describe(self.timed_out(timeout));
                self.inner.abort_in_background(&error);
                failed = Some(error);
            } else {
                failed = self.check_nccl().err();
            }
        }
        let completion_event = match self.completion_event() {
            Ok(completion_event) => Some(Arc::clone(&completion_event.event)),
            // The event could not be recorded; the end of an abort is awaited without one.
            Err(_) if self.inner.lifecycle.get().abort_has_begun() => None,
            Err(error) => return Poll::Ready(Err(self.final_error(failed.unwrap_or(error)))),
        };
        let deadline = if self.inner.lifecycle.get().abort_has_begun() {
            let until = deadline_after(self.inner.end_timeout());
            let ending = AwaitedAbort {
                error: failed,
                until,
            };
            let until = self.ending.get_or_insert_with(|| Box::new(ending)).until;
            if Instant::now() >= until {
                let error = self.inner.out_of_use();
                return Poll::Ready(Err(self.final_error(error)));
            }
            until
        } else {
            let entry = self.entry.as_ref();
            entry.map_or_else(|| deadline_after(timeout), poller::PollerEntry::deadline)
        };
        let inner = Arc::clone(&self.inner);
        match poller::register(completion_event, inner, deadline, context.waker().clone()) {
            Ok(entry) => {
                self.entry = Some(entry);
                Poll::Pending
            }
            Err(error) => Poll::Ready(Err(self.describe(error))),
        }
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        if forked::is_child() {
            std::mem::forget(self.completion_event.take());
            return;
        }
        self.entry = None;
        if let Some(CompletionEvent { event, .. }) = self.completion_event.take()
            && Arc::strong_count(&event) == 1
        {
            self.inner.completion_events.lock().push(event);
        }
    }
}

impl fmt::Debug for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Request")
            .field("communicator", &self.inner.name)
            .field("operation", &self.kind)
            .field("sequence", &self.sequence)
            .field("complete", &self.complete)
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ReduceOp;
    use crate::issuing::{IssueBuffers, Replayed};
    use crate::single_rank;

    #[test]
    fn the_end_of_a_request_does_not_count_an_earlier_replay_that_is_not_launched_yet() {
        nccl_emulator::install_unless_gpu().expect("an emulator or a GPU");
        let device = crate::device(0).expect("a device");
        let comm = single_rank::communicator(&device.new_stream().expect("a stream"));
        let mut y = comm.stream().alloc_zeros::<f32>(4).expect("memory");
        let mut reduce = || {
            let request = comm.all_reduce_in_place(&mut y, ReduceOp::Sum)?;
            request.wait()?;
            Ok::<_, Error>(request.sequence())
        };
        let done = || {
            let track = comm.inner.track_handle.track();
            track.done_on(handle_of(comm.stream()))
        };
        let event = cuda_driver::new_event(&device, None).expect("an event");
        let buffers = IssueBuffers::new(&comm.stream).expect("a stream");
        let replayed = Replayed {
            plan: 1,
            volume: None,
            reaches_all: false,
        };
        let launch = |_: &Inner| {
            // The thread of the replay has its number, and is interrupted before it launches.
            let other = std::thread::scope(|scope| scope.spawn(&mut reduce).join());
            let sequence = other.expect("no panic").expect("no error");
            assert_eq!((sequence, done()), (2, 0));
            Ok(())
        };
        let replay = comm
            .inner
            .replay(&buffers, &event, &replayed, comm.timeout, launch);
        assert_eq!(replay.expect("no error"), 1);
        assert_eq!(reduce().expect("no error"), 3);
        assert_eq!(done(), 3);
    }
}
