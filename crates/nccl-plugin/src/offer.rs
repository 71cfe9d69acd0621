//! How a plugin gets under the name by which NCCL asks for it.

use std::ffi::{CStr, c_void};
use std::ptr::NonNull;

use stand_in_object::{Symbol, load};

/// What became of the attempt to offer a plugin to NCCL.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Offer {
    /// NCCL finds the plugin of this process, when it asks.
    Made,
    /// The user has configured another: this variable, or this file under the plugin's default name.
    UserHasOne(String),
    /// The dynamic linker does not take the stand-in.
    Failed(String),
}

/// Offers `symbols` under the name by which NCCL asks for a plugin if the `variable` names none.
pub(crate) fn offer(variable: &str, soname: &'static CStr, symbols: &[Symbol]) -> Offer {
    if let Some(value) = std::env::var_os(variable) {
        return Offer::UserHasOne(format!("{variable}={}", value.display()));
    }
    if let Some(path) = installed(soname) {
        return Offer::UserHasOne(path);
    }
    match load("nccl", soname, symbols) {
        Ok(()) => Offer::Made,
        Err(error) => Offer::Failed(error.to_string()),
    }
}

/// Returns the file that the dynamic linker opens under this name. The file stays open: NCCL would open it as well.
pub(crate) fn installed(soname: &CStr) -> Option<String> {
    open(soname)?;
    let name = soname.to_string_lossy();
    let path = stand_in_object::loaded_from(soname);
    Some(path.map_or_else(|| name.into_owned(), |path| path.display().to_string()))
}

/// Opens a library as NCCL does, for ever.
pub(crate) fn open(name: &CStr) -> Option<NonNull<c_void>> {
    // SAFETY: runs the initialisers of a library that NCCL itself would open in its first call, by the same search.
    let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if handle.is_null() {
        // Otherwise the next caller of `dlerror` in this thread is given this error.
        // SAFETY: takes this thread's last error.
        unsafe { libc::dlerror() };
    }
    NonNull::new(handle)
}
