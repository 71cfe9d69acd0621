//! Tests on libraries that the C compiler makes ([`made`]), and on NVIDIA's ([`wheels`]).

mod made;
mod wheels;

use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::Path;

use cuda_emulator::sync::Mutex;

use super::cache::Cache;

/// The functions in whose place [`refused`] was called.
static REFUSED: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// cudaErrorNotSupported.
const NOT_SUPPORTED: c_int = 801;

extern "C" fn refused(name: *const c_char) -> c_int {
    // SAFETY: trampolines pass C strings that live as long as the process.
    let name = unsafe { CStr::from_ptr(name) };
    let name = name.to_string_lossy().into_owned();
    REFUSED.lock().push(name);
    NOT_SUPPORTED
}

fn address(function: extern "C" fn() -> c_int) -> *const c_void {
    function as *const c_void
}

fn cache_in(directory: &Path) -> Cache {
    let value = directory.as_os_str().to_owned();
    Cache::choose(
        |name| (name == "NCCL_EMULATOR_CACHE").then(|| value.clone()),
        directory,
    )
}
