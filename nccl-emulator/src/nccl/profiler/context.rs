//! A communicator, as passed to the plugin.

use std::ffi::{CString, c_void};
use std::sync::Arc;

use cuda_emulator::sync::{RwLock, RwLockReadGuard};

use super::event::{Event, Handle, State};
use super::library::{self, Description, Plugin};
use crate::nccl::debug::{info, subsystem};

/// A communicator's context in the plugin. Events are reported until it is finalized, and not afterwards: a launch that its
/// stream drops later must not call a library that may be closed.
pub(crate) struct Context {
    live: RwLock<Option<Live>>,
}

struct Live {
    plugin: Arc<Plugin>,
    /// May be null: some plugins have no context.
    context: *mut c_void,
    /// The communicator's name, whose pointer the plugin may keep.
    _name: Option<CString>,
}

// SAFETY: an opaque value that NCCL hands back to the plugin from any thread.
unsafe impl Send for Live {}
// SAFETY: as above.
unsafe impl Sync for Live {}

/// Reports a new communicator to the plugin, if there is one.
pub(crate) fn init(
    hash: u64,
    name: Option<&str>,
    nodes: usize,
    ranks: i32,
    rank: i32,
) -> Option<Arc<Context>> {
    let plugin = library::plugin()?;
    let name = name.and_then(|name| CString::new(name).ok());
    let description = Description {
        hash,
        name: name.as_deref(),
        nodes: nodes as i32,
        ranks,
        rank,
    };
    match plugin.init(&description) {
        Ok(context) => {
            let mask = library::mask();
            if mask != 0 {
                info!(subsystem::INIT, "Profiler event mask: {mask:#x} ({mask})");
            }
            let live = RwLock::new(Some(Live {
                plugin,
                context,
                _name: name,
            }));
            Some(Arc::new(Context { live }))
        }
        Err(code) => {
            info!(
                subsystem::INIT,
                "Profiler init failed with error '{code}'. Continue without profiler."
            );
            None
        }
    }
}

impl Context {
    /// Returns the access by which events are reported, until it is dropped; `None` once the communicator is finalized. A
    /// thread has at most one at a time.
    pub(super) fn telling(&self) -> Option<Telling<'_>> {
        let live = self.live.read();
        live.is_some().then_some(Telling(live))
    }

    /// Reports the end of the communicator. The library is closed with its last communicator.
    pub(crate) fn finalize(&self) {
        let live = self.live.write().take();
        if let Some(live) = live
            && !live.context.is_null()
        {
            // SAFETY: taken out, so that it is finalized once.
            unsafe { live.plugin.finalize(live.context) };
        }
    }
}

/// Reports events to the plugin. The communicator is not finalized meanwhile.
pub(super) struct Telling<'a>(RwLockReadGuard<'a, Option<Live>>);

impl Telling<'_> {
    /// Whether the plugin knows the events of calls and launches.
    pub(super) fn knows_calls(&self) -> bool {
        self.0
            .as_ref()
            .is_some_and(|live| live.plugin.knows_calls())
    }

    /// Reports the beginning of an event.
    pub(super) fn start(&self, event: &Event) -> Handle {
        match &*self.0 {
            // SAFETY: it is not finalized while the lock is held.
            Some(live) => unsafe { live.plugin.start(live.context, event) },
            None => Handle::NONE,
        }
    }

    /// Reports the end of an event, and clears its handle.
    pub(super) fn stop(&self, handle: &mut Handle) {
        let handle = std::mem::replace(handle, Handle::NONE);
        if let (true, Some(live)) = (handle.is_some(), &*self.0) {
            // SAFETY: as in `start`; the handle is forgotten, so that it is stopped once.
            unsafe { live.plugin.stop(handle) };
        }
    }

    /// Reports a state of an event. `argument` is a size or a time, depending on the state.
    pub(super) fn record(&self, handle: Handle, state: State, argument: u64) {
        if let (true, Some(live)) = (handle.is_some(), &*self.0) {
            // SAFETY: as in `start`; the owner of a handle forgets it when it stops the event.
            unsafe { live.plugin.record(handle, state, argument) };
        }
    }
}

impl Drop for Context {
    /// A communicator whose init failed is not destroyed by a call.
    fn drop(&mut self) {
        self.finalize();
    }
}
