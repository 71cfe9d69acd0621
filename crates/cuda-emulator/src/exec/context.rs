//! Contexts: their streams, peers and sticky error.
//!
//! A context lives until it is destroyed. Once it has a sticky error, every call on it returns that
//! error and the jobs queued on its streams are dropped. The driver tracks which context is current
//! and which is primary ([`crate::driver::context`]).

use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use super::{Kind, Stream};
use crate::memory;
use crate::registry::Registry;
use crate::result::CUresult;
use crate::sync::{Mutex, MutexGuard};
use crate::violations::{self, Violation};

/// All contexts that were not destroyed.
static CONTEXTS: Registry<Context> = Registry::new(0x40);

/// A CUDA context; the primary one of its device, or one made by `cuCtxCreate`.
pub struct Context {
    number: u32,
    device: i32,
    primary: bool,
    handle: AtomicUsize,
    flags: AtomicU32,
    /// 0 without a sticky error, else the code that every call returns.
    state: AtomicU32,
    streams: Mutex<Streams>,
    /// Numbers and devices of the contexts that peer access was enabled for.
    peers: Mutex<Vec<(u32, i32)>>,
    /// Held while work is put on the legacy stream or on a blocking one.
    order: Mutex<()>,
}

#[derive(Default)]
struct Streams {
    all: Vec<Arc<Stream>>,
    legacy: Option<Arc<Stream>>,
}

impl Context {
    pub(crate) fn create(device: i32, primary: bool, flags: u32) -> Result<Arc<Self>, CUresult> {
        static NUMBER: AtomicU32 = AtomicU32::new(1);
        memory::pool(device)?;
        let context = Arc::new(Self {
            number: NUMBER.fetch_add(1, Ordering::Relaxed),
            device,
            primary,
            handle: AtomicUsize::new(0),
            flags: AtomicU32::new(flags),
            state: AtomicU32::new(0),
            streams: Mutex::default(),
            peers: Mutex::default(),
            order: Mutex::new(()),
        });
        let handle = CONTEXTS
            .insert(Arc::clone(&context))
            .ok_or(CUresult::ERROR_OUT_OF_MEMORY)?;
        context.handle.store(handle.addr(), Ordering::Release);
        Ok(context)
    }

    /// Creates a context besides the primary one.
    pub(crate) fn create_own(device: i32, flags: u32) -> Result<Arc<Self>, CUresult> {
        Self::create(device, false, flags)
    }

    /// Creates a context for one test, whose failure affects no other test.
    #[cfg(test)]
    pub fn for_test(device: i32) -> Arc<Self> {
        Self::create(device, false, 0).expect("a context")
    }

    /// The context of a handle.
    pub(crate) fn lookup(handle: *mut c_void) -> Result<Arc<Self>, CUresult> {
        CONTEXTS.get(handle).ok_or(CUresult::ERROR_INVALID_CONTEXT)
    }

    /// Drops what is queued, frees the context's memory, ends its handle.
    pub(crate) fn destroy(&self) {
        let handle = self.handle.swap(0, Ordering::AcqRel);
        CONTEXTS.remove(std::ptr::without_provenance_mut(handle));
        self.kill_with(CUresult::ERROR_CONTEXT_IS_DESTROYED, true);
        let streams = {
            let mut streams = self.streams.lock();
            streams.legacy = None;
            std::mem::take(&mut streams.all)
        };
        for stream in streams {
            // This wait or the present runner drops the stream's jobs.
            let _ = stream.wait_until(stream.submitted());
            stream.destroy();
        }
        for (_, peer) in std::mem::take(&mut *self.peers.lock()) {
            memory::forbid_peer(self.device, peer);
        }
        memory::ipc::close_all_of(self.number);
        memory::free_all_of(self.device, self.number);
    }

    /// Returns the handle of this context.
    pub(crate) fn handle(&self) -> *mut c_void {
        std::ptr::without_provenance_mut(self.handle.load(Ordering::Acquire))
    }

    /// Tells contexts of this process apart; never 0.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// The device's ordinal.
    pub fn device(&self) -> i32 {
        self.device
    }

    /// Whether this is its device's primary context.
    pub fn primary(&self) -> bool {
        self.primary
    }

    /// The `CUctx_flags`, which change nothing here.
    pub(crate) fn flags(&self) -> &AtomicU32 {
        &self.flags
    }

    /// The sticky error, if the context has one.
    pub fn check(&self) -> Result<(), CUresult> {
        match self.state.load(Ordering::Acquire) {
            0 => Ok(()),
            code => Err(CUresult(code)),
        }
    }

    /// Whether queued work is to be dropped.
    pub fn dead(&self) -> bool {
        self.state.load(Ordering::Acquire) != 0
    }

    /// Records the violation and makes `CUDA_ERROR_ILLEGAL_ADDRESS` this context's sticky error.
    /// Jobs that are queued on its streams are dropped without running.
    pub fn fail(&self, violation: Violation) {
        violations::record(violation);
        self.kill(CUresult::ERROR_ILLEGAL_ADDRESS);
    }

    /// Makes `code` the sticky error, unless the context already has one.
    pub fn kill(&self, code: CUresult) {
        self.kill_with(code, false);
    }

    fn kill_with(&self, code: CUresult, replace: bool) {
        if replace {
            self.state.store(code.0, Ordering::SeqCst);
        } else {
            let _ = self
                .state
                .compare_exchange(0, code.0, Ordering::SeqCst, Ordering::SeqCst);
        }
        let streams = self.streams.lock().all.clone();
        for stream in streams {
            stream.poke();
        }
    }

    /// Enables or disables peer access. Returns false if nothing changed.
    pub(crate) fn set_peer(&self, peer: &Self, enabled: bool) -> bool {
        let mut peers = self.peers.lock();
        let known = peers.iter().any(|&(number, _)| number == peer.number);
        if known == enabled {
            return false;
        }
        if enabled {
            peers.push((peer.number, peer.device));
            memory::allow_peer(self.device, peer.device);
        } else {
            peers.retain(|&(number, _)| number != peer.number);
            memory::forbid_peer(self.device, peer.device);
        }
        true
    }

    /// Held while work is put on the legacy stream or on a blocking one.
    pub fn order(&self) -> MutexGuard<'_, ()> {
        self.order.lock()
    }

    /// Adds a new stream to this context.
    pub fn adopt(&self, stream: &Arc<Stream>) {
        self.streams.lock().all.push(Arc::clone(stream));
    }

    /// Removes a stream from this context.
    pub fn forget(&self, stream: &Arc<Stream>) {
        self.streams
            .lock()
            .all
            .retain(|other| !Arc::ptr_eq(other, stream));
    }

    /// All streams of this context.
    pub fn streams(&self) -> Vec<Arc<Stream>> {
        self.streams.lock().all.clone()
    }

    /// The streams that the legacy stream is ordered with.
    pub fn blocking_streams(&self) -> Vec<Arc<Stream>> {
        let blocking =
            |stream: &&Arc<Stream>| matches!(stream.kind(), Kind::Blocking | Kind::PerThread);
        self.streams
            .lock()
            .all
            .iter()
            .filter(blocking)
            .cloned()
            .collect()
    }

    /// The legacy stream.
    pub fn legacy_stream(self: &Arc<Self>) -> Result<Arc<Stream>, CUresult> {
        if let Some(stream) = self.legacy_if_used() {
            return Ok(stream);
        }
        self.check()?;
        let fresh = Stream::new(self, Kind::Legacy, 0);
        let mut streams = self.streams.lock();
        match &streams.legacy {
            Some(stream) => {
                let stream = Arc::clone(stream);
                drop(streams);
                fresh.destroy();
                Ok(stream)
            }
            None => {
                streams.legacy = Some(Arc::clone(&fresh));
                Ok(fresh)
            }
        }
    }

    /// Returns the legacy stream, if the context has used it.
    pub fn legacy_if_used(&self) -> Option<Arc<Stream>> {
        self.streams.lock().legacy.clone()
    }

    /// Waits for everything on all streams of this context.
    pub fn synchronize(&self) -> Result<(), CUresult> {
        self.check()?;
        let marks: Vec<_> = self
            .streams()
            .into_iter()
            .map(|s| (s.submitted(), s))
            .collect();
        for (mark, stream) in marks {
            stream.wait_until(mark)?;
        }
        self.check()
    }
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Context")
            .field("number", &self.number)
            .field("device", &self.device)
            .field("primary", &self.primary)
            .field("state", &self.state)
            .finish_non_exhaustive()
    }
}
