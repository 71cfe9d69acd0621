//! An event: a stream and a number. It is complete when the stream's `completed` has reached the
//! number, so recording one adds no job, unless it has to note the time. In a capture it stands for
//! nodes instead.

use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::context::Context;
use super::{Action, Capture, Standing, Stream};
use crate::registry::Registry;
use crate::result::CUresult;
use crate::sync::{Mutex, MutexGuard};

/// Every event that was not destroyed.
static EVENTS: Registry<Event> = Registry::new(0x4E);

/// An event of a context.
pub struct Event {
    context: Arc<Context>,
    /// A place for the time of what it marks; none if it notes no time.
    time: Option<Arc<AtomicU64>>,
    record: Mutex<Option<Record>>,
}

#[derive(Clone)]
enum Record {
    /// A job of a stream.
    Job {
        stream: Arc<Stream>,
        sequence: u64,
        /// When the stream got there, in nanoseconds; 0 before. Only of timing events.
        time: Option<Arc<AtomicU64>>,
    },
    /// Nodes of a capture, which may be over.
    Nodes {
        capture: Arc<Capture>,
        tips: Vec<usize>,
    },
}

impl Event {
    /// A new event and its handle.
    pub fn create(context: &Arc<Context>, timing: bool) -> Result<*mut c_void, CUresult> {
        let event = Self {
            context: Arc::clone(context),
            time: timing.then(Arc::default),
            record: Mutex::new(None),
        };
        EVENTS
            .insert(Arc::new(event))
            .ok_or(CUresult::ERROR_OUT_OF_MEMORY)
    }

    /// The event of a handle.
    pub fn lookup(handle: *mut c_void) -> Result<Arc<Self>, CUresult> {
        EVENTS.get(handle).ok_or(CUresult::ERROR_INVALID_HANDLE)
    }

    /// Ends a handle. Waits that were enqueued are not disturbed.
    pub fn destroy(handle: *mut c_void) -> Result<Arc<Self>, CUresult> {
        EVENTS.remove(handle).ok_or(CUresult::ERROR_INVALID_HANDLE)
    }

    fn slot(&self) -> MutexGuard<'_, Option<Record>> {
        self.record.lock()
    }

    /// The context it was made in.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Whether it notes the time.
    pub fn has_timing(&self) -> bool {
        self.time.is_some()
    }

    /// Marks the end of what is enqueued on the stream so far. In a capture it marks nodes, or if
    /// it is `external`, becomes one.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_HANDLE` when the stream is of another context;
    /// `CUDA_ERROR_INVALID_VALUE` when it is external and there is no capture.
    pub fn record(self: &Arc<Self>, stream: &Arc<Stream>, external: bool) -> Result<(), CUresult> {
        if !Arc::ptr_eq(stream.context(), &self.context) {
            return Err(CUresult::ERROR_INVALID_HANDLE);
        }
        let record = match stream.capture() {
            Some(capture) => {
                self.context.check()?;
                if external {
                    return capture.add(&[stream], Action::Record(Arc::clone(self)));
                }
                let tips = capture.tips(stream)?;
                Record::Nodes { capture, tips }
            }
            None if external => return Err(CUresult::ERROR_INVALID_VALUE),
            None => {
                let (sequence, time) = if let Some(own) = &self.time {
                    let time = self.unshared(own);
                    let before = time.swap(0, Ordering::AcqRel);
                    let marked = stream.mark_timed(&time);
                    let sequence = marked.inspect_err(|_| time.store(before, Ordering::Release))?;
                    (sequence, Some(time))
                } else {
                    (stream.mark()?, None)
                };
                Record::Job {
                    stream: Arc::clone(stream),
                    sequence,
                    time,
                }
            }
        };
        *self.slot() = Some(record);
        Ok(())
    }

    /// A place for a time that nobody else has: the event's own, unless what it has marked is still to come. So one
    /// that is recorded again and again allocates nothing.
    fn unshared(&self, own: &Arc<AtomicU64>) -> Arc<AtomicU64> {
        let slot = self.slot();
        let marked = match &*slot {
            Some(Record::Job { time, .. }) => time.as_ref(),
            _ => None,
        };
        let holders = 1 + usize::from(marked.is_some_and(|time| Arc::ptr_eq(time, own)));
        match Arc::strong_count(own) == holders {
            true => Arc::clone(own),
            false => Arc::default(),
        }
    }

    /// Makes later jobs of the stream wait for what the event marks now. In a capture it adds
    /// edges, or if it is `external`, a node.
    ///
    /// # Errors
    /// `CUDA_ERROR_STREAM_CAPTURE_ISOLATION` in a capture if the event marks something outside, and
    /// the capture is void; as [`Capture::wait`] if it marks something in one.
    pub fn make_wait(
        self: &Arc<Self>,
        stream: &Arc<Stream>,
        external: bool,
    ) -> Result<(), CUresult> {
        let record = self.slot().clone();
        let capture = stream.capture();
        if external {
            stream.context().check()?;
            return match capture {
                Some(capture) => capture.add(&[stream], Action::Wait(Arc::clone(self))),
                None => Err(CUresult::ERROR_INVALID_VALUE),
            };
        }
        match (record, capture) {
            (Some(Record::Nodes { capture, tips }), _) => {
                stream.context().check()?;
                capture.wait(stream, &tips)
            }
            (_, Some(capture)) => {
                if capture.standing() == Standing::Invalid {
                    return Err(CUresult::ERROR_STREAM_CAPTURE_INVALIDATED);
                }
                capture.invalidate();
                Err(CUresult::ERROR_STREAM_CAPTURE_ISOLATION)
            }
            (
                Some(Record::Job {
                    stream: other,
                    sequence,
                    ..
                }),
                None,
            ) => stream.wait_for(&other, sequence),
            (None, None) => stream.context().check(),
        }
    }

    /// The job that the event marks now.
    pub(super) fn recorded(&self) -> Option<(Arc<Stream>, u64)> {
        match &*self.slot() {
            Some(Record::Job {
                stream, sequence, ..
            }) => Some((Arc::clone(stream), *sequence)),
            _ => None,
        }
    }

    /// A graph records the event: it marks this job from now on.
    pub(super) fn set_recorded(&self, stream: &Arc<Stream>, sequence: u64, time: Arc<AtomicU64>) {
        *self.slot() = Some(Record::Job {
            stream: Arc::clone(stream),
            sequence,
            time: self.has_timing().then_some(time),
        });
    }

    /// Nobody can wait on the host for a node.
    ///
    /// # Errors
    /// `CUDA_ERROR_CAPTURED_EVENT` if the event marks one, and the capture is void.
    pub fn check_captured(&self) -> Result<(), CUresult> {
        match &*self.slot() {
            Some(Record::Nodes { capture, .. }) => {
                capture.invalidate();
                Err(CUresult::ERROR_CAPTURED_EVENT)
            }
            _ => Ok(()),
        }
    }

    /// Waits until what the event marks is done.
    pub fn synchronize(&self) -> Result<(), CUresult> {
        self.context.check()?;
        match self.recorded() {
            Some((stream, sequence)) => stream.wait_until(sequence),
            None => Ok(()),
        }
    }

    /// True if what the event marks is done, or nothing was recorded.
    pub fn query(&self) -> Result<bool, CUresult> {
        self.context.check()?;
        match self.recorded() {
            Some((stream, sequence)) => stream.poll(sequence),
            None => Ok(true),
        }
    }

    /// Milliseconds from this event to `end`.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_HANDLE` if one of them was not recorded or has no time,
    /// `CUDA_ERROR_NOT_READY`.
    pub fn elapsed(&self, end: &Self) -> Result<f32, CUresult> {
        let at = |event: &Self| -> Result<u64, CUresult> {
            let Some(Record::Job {
                time: Some(time), ..
            }) = event.slot().clone()
            else {
                return Err(CUresult::ERROR_INVALID_HANDLE);
            };
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
            .field("timing", &self.has_timing())
            .finish_non_exhaustive()
    }
}
