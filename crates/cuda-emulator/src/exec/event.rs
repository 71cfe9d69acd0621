//! An event: a stream and a job number. An event is complete when the stream's `completed` has reached
//! the number, so recording an event adds no job, unless the event notes the time. In a capture an event
//! stands for nodes instead.

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
    /// The place for the recorded time; `None` if the event has no timing.
    time: Option<Arc<AtomicU64>>,
    record: Mutex<Option<Record>>,
}

#[derive(Clone)]
enum Record {
    /// A job of a stream.
    Job {
        stream: Arc<Stream>,
        sequence: u64,
        /// When the stream reached `sequence`, in nanoseconds; 0 before. Only for events with timing.
        time: Option<Arc<AtomicU64>>,
    },
    /// Nodes of a capture, which may be over.
    Nodes {
        capture: Arc<Capture>,
        tips: Vec<usize>,
    },
}

impl Event {
    /// Creates an event and returns its handle.
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

    /// Returns the event of a handle.
    pub fn lookup(handle: *mut c_void) -> Result<Arc<Self>, CUresult> {
        EVENTS.get(handle).ok_or(CUresult::ERROR_INVALID_HANDLE)
    }

    /// Ends a handle. Enqueued waits are not affected.
    pub fn destroy(handle: *mut c_void) -> Result<Arc<Self>, CUresult> {
        EVENTS.remove(handle).ok_or(CUresult::ERROR_INVALID_HANDLE)
    }

    fn slot(&self) -> MutexGuard<'_, Option<Record>> {
        self.record.lock()
    }

    /// Returns the context of the event.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Whether the event notes the time.
    pub fn has_timing(&self) -> bool {
        self.time.is_some()
    }

    /// Marks the end of the jobs enqueued on the stream so far. In a capture the event marks nodes, or,
    /// with `external`, becomes a node.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_HANDLE` when the stream is of another context;
    /// `CUDA_ERROR_INVALID_VALUE` with `external` outside a capture.
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

    /// Returns a place for a time that no pending record uses: the event's own, unless a job or an older record
    /// still holds it. So recording an event again and again allocates nothing.
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

    /// Makes later jobs of the stream wait for the job that the event marks now. In a capture this adds
    /// edges, or, with `external`, a node.
    ///
    /// # Errors
    /// `CUDA_ERROR_STREAM_CAPTURE_ISOLATION` in a capture if the event marks no node, and
    /// the capture is void; those of [`Capture::wait`] if the event marks nodes.
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

    /// Returns the job that the event marks now.
    pub(super) fn recorded(&self) -> Option<(Arc<Stream>, u64)> {
        match &*self.slot() {
            Some(Record::Job {
                stream, sequence, ..
            }) => Some((Arc::clone(stream), *sequence)),
            _ => None,
        }
    }

    /// Makes the event mark this job, which belongs to the replay of a graph.
    pub(super) fn set_recorded(&self, stream: &Arc<Stream>, sequence: u64, time: Arc<AtomicU64>) {
        *self.slot() = Some(Record::Job {
            stream: Arc::clone(stream),
            sequence,
            time: self.has_timing().then_some(time),
        });
    }

    /// Checks that the event marks no node: the host cannot wait for a node.
    ///
    /// # Errors
    /// `CUDA_ERROR_CAPTURED_EVENT` if the event marks nodes, and the capture is void.
    pub fn check_captured(&self) -> Result<(), CUresult> {
        match &*self.slot() {
            Some(Record::Nodes { capture, .. }) => {
                capture.invalidate();
                Err(CUresult::ERROR_CAPTURED_EVENT)
            }
            _ => Ok(()),
        }
    }

    /// Waits until the job that the event marks is done.
    pub fn synchronize(&self) -> Result<(), CUresult> {
        self.context.check()?;
        match self.recorded() {
            Some((stream, sequence)) => stream.wait_until(sequence),
            None => Ok(()),
        }
    }

    /// Returns whether the job that the event marks is done. True if nothing was recorded.
    pub fn query(&self) -> Result<bool, CUresult> {
        self.context.check()?;
        match self.recorded() {
            Some((stream, sequence)) => stream.poll(sequence),
            None => Ok(true),
        }
    }

    /// Returns the milliseconds from this event to `end`.
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
