//! A stream: a queue of jobs, numbered. [`super::queue`] puts jobs on it, [`super::run`] runs them.
//!
//! Jobs are numbered from 1 in the order of their enqueueing. `submitted` is the last number given
//! out, `completed` the last one finished; both only grow. `completed` is written by the holder of
//! the token alone.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use super::attention::Attention;
use super::capture::{self, Capture, Standing};
use super::context::Context;
use super::job::{Front, Job};
use super::visits::Visits;
use super::waiters::Waiters;
use crate::registry::Registry;
use crate::result::CUresult;
use crate::sync::Mutex;

/// All streams with a handle.
pub(crate) static STREAMS: Registry<Stream> = Registry::new(0x45);
/// All streams that were not retired, with a handle or without.
pub(super) static ALL: Mutex<Vec<Arc<Stream>>> = Mutex::new(Vec::new());

/// The kind of a stream, which decides its order with the legacy stream.
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
    pub(super) queue: Mutex<VecDeque<Job>>,
    pub(super) submitted: AtomicU64,
    pub(super) completed: AtomicU64,
    /// The number of the last job that frees memory.
    last_free: AtomicU64,
    /// The token, and the batch that its holder works on.
    pub(super) runner: Mutex<Front>,
    pub(super) waiters: Waiters,
    pub(super) attention: Attention,
    pub(super) visits: Visits,
    /// The last number of the legacy stream that this stream was made to wait for, and the reverse.
    /// Used under the `order` lock.
    pub(super) waits_for_legacy: AtomicU64,
    pub(super) legacy_waits_for: AtomicU64,
    capture: Mutex<Option<Arc<Capture>>>,
    capturing: AtomicBool,
    destroyed: AtomicBool,
}

impl Stream {
    /// Creates a stream, known to its context and to the dispatcher.
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
            last_free: AtomicU64::new(0),
            runner: Mutex::default(),
            waiters: Waiters::new(),
            attention: Attention::default(),
            visits: Visits::default(),
            waits_for_legacy: AtomicU64::new(0),
            legacy_waits_for: AtomicU64::new(0),
            capture: Mutex::new(None),
            capturing: AtomicBool::new(false),
            destroyed: AtomicBool::new(false),
        });
        context.adopt(&stream);
        ALL.lock().push(Arc::clone(&stream));
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

    /// Ends the stream's handle. Queued jobs still run; then the stream is retired.
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
        ALL.lock().retain(|other| !Arc::ptr_eq(other, self));
    }

    /// Returns whether the stream has been destroyed.
    pub fn destroyed(&self) -> bool {
        self.destroyed.load(Ordering::Acquire)
    }

    /// Moves all queued jobs to the runner's empty batch.
    pub(super) fn take_queue(&self, batch: &mut VecDeque<Job>) {
        std::mem::swap(&mut *self.queue.lock(), batch);
    }

    /// Sequence number of the last job given to the stream.
    pub fn submitted(&self) -> u64 {
        self.submitted.load(Ordering::SeqCst)
    }

    /// Sequence number of the last job that finished.
    pub fn completed(&self) -> u64 {
        self.completed.load(Ordering::SeqCst)
    }

    /// Notes that job `sequence` frees memory.
    pub(crate) fn note_free(&self, sequence: u64) {
        self.last_free.fetch_max(sequence, Ordering::AcqRel);
    }

    /// Sequence number of the last job that frees memory, if it has not finished.
    pub(crate) fn pending_free(&self) -> Option<u64> {
        let last = self.last_free.load(Ordering::Acquire);
        (last > self.completed()).then_some(last)
    }

    /// True when nothing is pending.
    pub fn idle(&self) -> bool {
        self.completed() == self.submitted()
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

    /// Makes the stream take part in a capture, or in none. Only captures call this.
    pub(super) fn set_capture(&self, capture: Option<Arc<Capture>>) {
        let mut slot = self.capture.lock();
        self.capturing.store(capture.is_some(), Ordering::Release);
        *slot = capture;
    }

    /// Refuses a call that cannot be captured, and voids the capture. Refuses the legacy stream during a
    /// capture of a stream that it is ordered with.
    pub(super) fn refuse_while_capturing(&self) -> Result<(), CUresult> {
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

    /// Wakes the stream's runner if it sleeps.
    pub fn poke(&self) {
        self.attention.poke();
    }

    /// The context the stream belongs to.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// The ordinal of the stream's device.
    pub fn device(&self) -> i32 {
        self.context.device()
    }

    /// What kind of stream this is.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// The stream's priority, which has no effect in the emulator.
    pub fn priority(&self) -> i32 {
        self.priority
    }

    /// Tells streams of this process apart.
    pub fn number(&self) -> u64 {
        self.number
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

/// Calls `look` with the live stream of a handle, other than the default streams. Takes no lock if the thread looked at the same
/// stream last. `look` must not call this function.
pub fn look<R>(handle: *mut c_void, look: impl FnOnce(&Arc<Stream>) -> R) -> Option<R> {
    if handle.is_null() {
        return None;
    }
    // A destroyed stream has no handle, and no other stream gets the same handle.
    let is_meant = |stream: &Arc<Stream>| stream.handle.load(Ordering::Acquire) == handle.addr();
    let known = LAST.try_with(|last| {
        if !last.borrow().as_ref().is_some_and(is_meant) {
            // The former stream is dropped only after the borrow ends.
            drop(last.replace(Some(STREAMS.get(handle)?)));
        }
        Some(look(last.borrow().as_ref()?))
    });
    known.ok().flatten()
}

/// Returns the live stream of a handle, other than the default streams.
pub fn named(handle: *mut c_void) -> Option<Arc<Stream>> {
    // In a thread that is ending, `look` returns `None`.
    look(handle, Arc::clone).or_else(|| STREAMS.get(handle))
}

/// Returns the streams of a device that have pending jobs, each with the number of its last job.
pub(super) fn marks(device: i32) -> Vec<(u64, Arc<Stream>)> {
    let streams = ALL.lock();
    let here = streams
        .iter()
        .filter(|stream| stream.device() == device && !stream.idle());
    here.map(|stream| (stream.submitted(), Arc::clone(stream)))
        .collect()
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
