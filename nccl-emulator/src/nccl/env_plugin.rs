//! The environment plugin: since 2.28.7 NCCL reads its variables through a library that the user can provide.
//!
//! `NCCL_ENV_PLUGIN` names the library; the default is `libnccl-env.so`. It is opened before the first variable is read, and
//! stays open.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::sync::OnceLock;

use super::debug::{info, subsystem};
use super::plugin::{self, Library};
use super::plugin_log;
use crate::version;

/// The beginning of `ncclEnv_v1_t` and `ncclEnv_v2_t`, whose `init` differ.
#[repr(C)]
struct Table {
    name: *const c_char,
    init: *const c_void,
    finalize: Option<unsafe extern "C" fn() -> c_int>,
    get_env: GetEnv,
}

type GetEnv = unsafe extern "C" fn(*const c_char) -> *const c_char;

type InitV1 = unsafe extern "C" fn(u8, u8, u8, *const c_char) -> c_int;
type InitV2 = unsafe extern "C" fn(u8, u8, u8, *const c_char, *const c_void) -> c_int;

/// Returns the text of the variable from the plugin, or without a plugin from the process's environment.
pub(super) fn text(name: &str) -> Option<String> {
    let Some(get_env) = plugin() else {
        return exported(name);
    };
    let name = CString::new(name).ok()?;
    // SAFETY: a function of the plugin, with a C string.
    let value = unsafe { get_env(name.as_ptr()) };
    if value.is_null() {
        return None;
    }
    // SAFETY: the plugin's strings stay valid until it is asked for the same variable again.
    let value = unsafe { CStr::from_ptr(value) };
    Some(value.to_string_lossy().into_owned())
}

/// Returns the text of the variable from the process's environment.
fn exported(name: &str) -> Option<String> {
    std::env::var_os(name).map(|value| value.to_string_lossy().into_owned())
}

fn plugin() -> Option<GetEnv> {
    static PLUGIN: OnceLock<Option<GetEnv>> = OnceLock::new();
    *PLUGIN.get_or_init(load)
}

fn load() -> Option<GetEnv> {
    if !version::is_at_least(2, 28, 7) {
        return None;
    }
    let named = exported("NCCL_ENV_PLUGIN").filter(|name| !name.is_empty());
    if let Some(name) = &named {
        info!(
            subsystem::ENV,
            "NCCL_ENV_PLUGIN set by environment to {name}"
        );
        if name.eq_ignore_ascii_case("none") {
            return None;
        }
    }
    let library = plugin::open(&plugin::ENVIRONMENT, named.as_deref())?;
    let v2 = if version::is_at_least(2, 30, 7) {
        find(&library, c"ncclEnvPlugin_v2")
    } else {
        None
    };
    let Some((table, interface)) = v2
        .map(|table| (table, 2))
        .or_else(|| find(&library, c"ncclEnvPlugin_v1").map(|table| (table, 1)))
    else {
        info!(
            subsystem::INIT,
            "External env plugin {} is unsupported", library.name
        );
        return None;
    };
    // SAFETY: a C string of the plugin.
    let name = unsafe { CStr::from_ptr(table.name) }.to_string_lossy();
    info!(
        subsystem::INIT | subsystem::ENV,
        "ENV/Plugin: Using {name} (v{interface})"
    );
    let code = init(table, interface);
    if let Some(finalize) = table.finalize {
        at_exit(finalize);
    }
    (code == 0).then_some(table.get_env)
}

fn init(table: &Table, interface: u32) -> c_int {
    let release = version::current();
    let [major, minor, patch] =
        [release.major, release.minor, release.patch].map(|part| u8::try_from(part).unwrap_or(0));
    let suffix = c"+cuda13.0".as_ptr();
    // SAFETY: `init` is a function of this type in that version of the table.
    unsafe {
        if interface == 2 {
            let init = std::mem::transmute::<*const c_void, InitV2>(table.init);
            init(
                major,
                minor,
                patch,
                suffix,
                plugin_log::log as *const c_void,
            )
        } else {
            let init = std::mem::transmute::<*const c_void, InitV1>(table.init);
            init(major, minor, patch, suffix)
        }
    }
}

fn at_exit(finalize: unsafe extern "C" fn() -> c_int) {
    static FINALIZE: OnceLock<unsafe extern "C" fn() -> c_int> = OnceLock::new();
    extern "C" fn run() {
        if let Some(finalize) = FINALIZE.get() {
            // SAFETY: a function of the plugin, which stays open.
            unsafe { finalize() };
        }
    }
    if FINALIZE.set(finalize).is_ok() {
        // SAFETY: registers a function without arguments.
        unsafe { libc::atexit(run) };
    }
}

fn find(library: &Library, symbol: &CStr) -> Option<&'static Table> {
    // SAFETY: a symbol of this name is a table of this layout, and the library stays open.
    unsafe { library.find(symbol)?.cast::<Table>().as_ref() }
}
