//! An event: a stream and a number. It is complete when the stream's `completed` has reached the
//! number, so recording one adds no job, unless it has to note the time.

use std::ffi::c_void;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::Stream;
use crate::driver::CUresult;
use crate::driver::context::Context;
use crate::registry::Registry;

/// Every event that was not destroyed.
static EVENTS: Registry<Event> = Registry::new(0xCE);

/// An event of a context.
pub(crate) struct Event {
    context: Arc<Context>,
    timing: bool,
    record: Mutex<Option<Record>>,
}

#[derive(Clone)]
struct Record {
    stream: Arc<Stream>,
    sequence: u64,
    /// When the stream got there, in nanoseconds; 0 before. Only of timing events.
    time: Option<Arc<AtomicU64>>,
}

impl Event {
    /// A new event and its handle.
    pub(crate) fn create(context: &Arc<Context>, timing: bool) -> Result<*mut c_void, CUresult> {
        let event = Self {
            context: Arc::clone(context),
            timing,
            record: Mutex::new(None),
        };
        EVENTS
            .insert(Arc::new(event))
            .ok_or(CUresult::ERROR_OUT_OF_MEMORY)
    }

    /// The event of a handle.
    pub(crate) fn lookup(handle: *mut c_void) -> Result<Arc<Self>, CUresult> {
        EVENTS.get(handle).ok_or(CUresult::ERROR_INVALID_HANDLE)
    }

    /// Ends a handle. Waits that were enqueued are not disturbed.
    pub(crate) fn destroy(handle: *mut c_void) -> Result<Arc<Self>, CUresult> {
        EVENTS.remove(handle).ok_or(CUresult::ERROR_INVALID_HANDLE)
    }

    fn slot(&self) -> MutexGuard<'_, Option<Record>> {
        self.record.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The context it was made in.
    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Marks the end of what is enqueued on the stream so far.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_HANDLE` when the stream is of another context.
    pub(crate) fn record(&self, stream: &Arc<Stream>) -> Result<(), CUresult> {
        if !Arc::ptr_eq(stream.context(), &self.context) {
            return Err(CUresult::ERROR_INVALID_HANDLE);
        }
        let (sequence, time) = if self.timing {
            let time = Arc::new(AtomicU64::new(0));
            (stream.mark_timed(&time)?, Some(time))
        } else {
            (stream.mark()?, None)
        };
        *self.slot() = Some(Record {
            stream: Arc::clone(stream),
            sequence,
            time,
        });
        Ok(())
    }

    /// Makes later jobs of the stream wait for what the event marks now.
    pub(crate) fn make_wait(&self, stream: &Arc<Stream>) -> Result<(), CUresult> {
        let record = self.slot().clone();
        match record {
            Some(record) => stream.wait_for(&record.stream, record.sequence),
            None => stream.context().check(),
        }
    }

    /// Waits until what the event marks is done.
    pub(crate) fn synchronize(&self) -> Result<(), CUresult> {
        let record = self.slot().clone();
        self.context.check()?;
        match record {
            Some(record) => record.stream.wait_until(record.sequence),
            None => Ok(()),
        }
    }

    /// True if what the event marks is done, or nothing was recorded.
    pub(crate) fn query(&self) -> Result<bool, CUresult> {
        let record = self.slot().clone();
        self.context.check()?;
        match record {
            Some(record) => record.stream.poll(record.sequence),
            None => Ok(true),
        }
    }

    /// Milliseconds from this event to `end`.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_HANDLE` if one of them was not recorded or has no time,
    /// `CUDA_ERROR_NOT_READY`.
    pub(crate) fn elapsed(&self, end: &Self) -> Result<f32, CUresult> {
        let at = |event: &Self| -> Result<u64, CUresult> {
            let record = event.slot().clone().ok_or(CUresult::ERROR_INVALID_HANDLE)?;
            let time = record.time.ok_or(CUresult::ERROR_INVALID_HANDLE)?;
            match time.load(Ordering::Acquire) {
                0 => Err(CUresult::ERROR_NOT_READY),
                nanos => Ok(nanos),
            }
        };
        let (from, to) = (at(self)?, at(end)?);
        Ok((to as f64 - from as f64) as f32 / 1e6)
    }
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Event")
            .field("timing", &self.timing)
            .finish_non_exhaustive()
    }
}
