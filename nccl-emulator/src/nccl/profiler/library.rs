//! The library of the plugin: found at the first init of a communicator, closed at the end of the last one.
//!
//! ```text
//! Untried ──init──▶ Loaded ──end of the last communicator──▶ Untried
//!    └────init, no plugin──▶ Failed     for the rest of the process
//! ```

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, Weak};

use cuda_emulator::sync::Mutex;

use super::event::{Descriptor, Event, Handle, State, bits};
use crate::nccl::debug::{info, subsystem};
use crate::nccl::environment;
use crate::nccl::plugin::{self, Library};
use crate::nccl::plugin_log::log;
use crate::version;

/// The kinds of events that the plugin wants. The plugin has its address and may write to it at any time.
static MASK: AtomicI32 = AtomicI32::new(0);

/// Returns the kinds of events that the plugin wants now; 0 without a plugin.
#[inline]
pub(super) fn mask() -> i32 {
    MASK.load(Ordering::Relaxed)
}

/// The names of the table in a plugin's library, newest first, and the first release of NCCL that looks for each.
const TABLES: [(&CStr, u32, [u32; 3]); 4] = [
    (c"ncclProfiler_v7", 7, [2, 31, 0]),
    (c"ncclProfiler_v6", 6, [2, 29, 0]),
    (c"ncclProfiler_v5", 5, [2, 28, 0]),
    (c"ncclProfiler_v4", 4, [2, 27, 0]),
];

/// `ncclProfiler_v4_t` to `ncclProfiler_v7_t`; only `init` and the descriptors differ.
#[repr(C)]
struct Table {
    name: *const c_char,
    init: *const c_void,
    start: unsafe extern "C" fn(*mut c_void, *mut *mut c_void, *mut Descriptor) -> c_int,
    stop: unsafe extern "C" fn(*mut c_void) -> c_int,
    record: unsafe extern "C" fn(*mut c_void, c_int, *mut u64) -> c_int,
    finalize: unsafe extern "C" fn(*mut c_void) -> c_int,
}

type Log = unsafe extern "C" fn(c_int, u64, *const c_char, c_int, *const c_char);

type InitV4 = unsafe extern "C" fn(
    *mut *mut c_void,
    *mut c_int,
    *const c_char,
    u64,
    c_int,
    c_int,
    c_int,
    Log,
) -> c_int;

type InitV5 = unsafe extern "C" fn(
    *mut *mut c_void,
    u64,
    *mut c_int,
    *const c_char,
    c_int,
    c_int,
    c_int,
    Log,
) -> c_int;

/// The description of a communicator for the plugin.
pub(super) struct Description<'a> {
    pub(super) hash: u64,
    /// The plugin may keep the pointer until it finalizes the communicator.
    pub(super) name: Option<&'a CStr>,
    pub(super) nodes: i32,
    pub(super) ranks: i32,
    pub(super) rank: i32,
}

/// A plugin whose library is open.
pub(super) struct Plugin {
    /// Taken by the drop, which closes it.
    library: Option<Library>,
    table: *const Table,
    version: u32,
}

// SAFETY: the table is constant, and NCCL calls its functions from any thread.
unsafe impl Send for Plugin {}
// SAFETY: as above.
unsafe impl Sync for Plugin {}

enum Status {
    Untried,
    Failed,
    Loaded(Weak<Plugin>),
}

/// Returns the plugin, and loads it if necessary. It stays loaded as long as any communicator holds the returned value.
pub(super) fn plugin() -> Option<Arc<Plugin>> {
    static STATUS: Mutex<Status> = Mutex::new(Status::Untried);
    let mut status = STATUS.lock();
    match &*status {
        Status::Failed => return None,
        Status::Loaded(plugin) => {
            if let Some(plugin) = plugin.upgrade() {
                return Some(plugin);
            }
        }
        Status::Untried => {}
    }
    let plugin = load().map(Arc::new);
    *status = match &plugin {
        Some(plugin) => Status::Loaded(Arc::downgrade(plugin)),
        None => Status::Failed,
    };
    plugin
}

fn load() -> Option<Plugin> {
    let current = version::current();
    let release = [current.major, current.minor, current.patch];
    if TABLES.iter().all(|&(_, _, first)| release < first) {
        return None;
    }
    let named = environment::text("NCCL_PROFILER_PLUGIN");
    if let Some(name) = &named {
        info!(
            subsystem::ENV,
            "NCCL_PROFILER_PLUGIN set by environment to {name}"
        );
        if name.eq_ignore_ascii_case("none") {
            return None;
        }
    }
    let library = plugin::open(&plugin::PROFILER, named.as_deref()).or_else(network_plugin)?;
    let found = TABLES
        .iter()
        .filter(|&&(_, _, first)| first <= release)
        .find_map(|&(symbol, version, _)| Some((library.find(symbol)?.cast::<Table>(), version)));
    let Some((table, version)) = found else {
        info!(
            subsystem::INIT,
            "External profiler plugin {} is unsupported", library.name
        );
        // SAFETY: nothing of it was taken.
        unsafe { library.close() };
        return None;
    };
    let name = library.name.clone();
    let plugin = Plugin {
        library: Some(library),
        table,
        version,
    };
    info!(
        subsystem::INIT,
        "PROFILER/Plugin: Loaded {} (v{version})",
        plugin.name()
    );
    info!(
        subsystem::INIT,
        "Successfully loaded external profiler plugin {name}"
    );
    Some(plugin)
}

/// Opens the library of a network plugin that the user has named; it may also contain a profiler.
fn network_plugin() -> Option<Library> {
    let names = environment::text("NCCL_NET_PLUGIN")?;
    let mut names = names.split(',').filter(|name| !name.is_empty());
    names.find_map(|name| match name.eq_ignore_ascii_case("none") {
        true => None,
        false => plugin::open(&plugin::NETWORK, Some(name)),
    })
}

impl Plugin {
    fn table(&self) -> &Table {
        // SAFETY: a symbol of that name is a table of this layout, and the library is open.
        unsafe { &*self.table }
    }

    fn name(&self) -> String {
        // SAFETY: a C string of the plugin.
        let name = unsafe { CStr::from_ptr(self.table().name) };
        name.to_string_lossy().into_owned()
    }

    /// Whether the plugin knows the events of calls and launches.
    pub(super) fn knows_calls(&self) -> bool {
        self.version >= 5
    }

    /// Reports a communicator to the plugin and returns the plugin's context for it.
    ///
    /// # Errors
    /// The code that the plugin returned.
    pub(super) fn init(&self, of: &Description<'_>) -> Result<*mut c_void, c_int> {
        let mut context = std::ptr::null_mut();
        let name = of.name.map_or(std::ptr::null(), CStr::as_ptr);
        let Description {
            hash,
            nodes,
            ranks,
            rank,
            ..
        } = *of;
        let init = self.table().init;
        // SAFETY: `init` is a function of this type in that version of the table. The mask lives for ever.
        let code = unsafe {
            if self.version == 4 {
                let init = std::mem::transmute::<*const c_void, InitV4>(init);
                let mask = MASK.as_ptr();
                init(&mut context, mask, name, hash, nodes, ranks, rank, log)
            } else {
                let init = std::mem::transmute::<*const c_void, InitV5>(init);
                let mask = MASK.as_ptr();
                init(&mut context, hash, mask, name, nodes, ranks, rank, log)
            }
        };
        if self.version < 6 {
            MASK.fetch_and(!bits::COPY_ENGINE, Ordering::Relaxed);
        }
        match code {
            0 => Ok(context),
            code => Err(code),
        }
    }

    /// Tells the plugin that an event begins.
    ///
    /// # Safety
    /// `context` is of this plugin and not finalized.
    pub(super) unsafe fn start(&self, context: *mut c_void, event: &Event) -> Handle {
        let mut handle = std::ptr::null_mut();
        let mut descriptor = event.descriptor(self.version);
        // SAFETY: the caller's promise; both pointers are to locals.
        unsafe { (self.table().start)(context, &mut handle, &mut descriptor) };
        Handle(handle)
    }

    /// Tells the plugin that an event is over.
    ///
    /// # Safety
    /// `handle` is of [`Plugin::start`], with a context that is not finalized, and was not stopped.
    pub(super) unsafe fn stop(&self, handle: Handle) {
        // SAFETY: the caller's promise.
        unsafe { (self.table().stop)(handle.0) };
    }

    /// Tells the plugin of a state of an event. `argument` is a size or a time, by the state.
    ///
    /// # Safety
    /// As [`Plugin::stop`].
    pub(super) unsafe fn record(&self, handle: Handle, state: State, mut argument: u64) {
        // SAFETY: the caller's promise; the pointer is to a local.
        unsafe { (self.table().record)(handle.0, state as c_int, &mut argument) };
    }

    /// Ends the plugin's context of a communicator.
    ///
    /// # Safety
    /// `context` is of this plugin and not finalized.
    pub(super) unsafe fn finalize(&self, context: *mut c_void) {
        // SAFETY: the caller's promise.
        unsafe { (self.table().finalize)(context) };
    }
}

impl Drop for Plugin {
    fn drop(&mut self) {
        info!(
            subsystem::DESTROY,
            "PROFILER/Plugin: Closing profiler plugin {}",
            self.name()
        );
        if let Some(library) = self.library.take() {
            // SAFETY: no communicator uses the table any more.
            unsafe { library.close() };
        }
    }
}
