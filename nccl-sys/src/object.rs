//! A shared object in this process, and the dynamic linker's data on it.
//!
//! Every [`Object`] is a reference that is never released: NCCL has threads of its own and hands out
//! pointers into itself, so closing it is never right.

use core::ffi::{CStr, c_char, c_int, c_void};
use core::ptr::{self, NonNull};
use std::error::Error;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use libloading::os::unix::Library;

/// A handle of `dlopen` that is never closed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Object(NonNull<c_void>);

// SAFETY: the handle is only passed to `dlsym` and `dlinfo`, which any thread may call, and it is
// never closed.
unsafe impl Send for Object {}
// SAFETY: as above.
unsafe impl Sync for Object {}

impl Object {
    /// Opens `name` as `dlopen` interprets it: a path if it has a slash, otherwise a name that the
    /// linker searches for. On failure, returns the linker's reason.
    ///
    /// # Safety
    ///
    /// The initialisers of the object, and of all that it depends on, run.
    pub(crate) unsafe fn open(name: &Path) -> Result<Self, String> {
        if name.as_os_str().is_empty() {
            // To the linker, an empty name is the program.
            return Err("the name is empty".into());
        }
        // Resolves all symbols now: an unresolved symbol should be an error here, not the end of the
        // process at the first call.
        // SAFETY: by the caller's promise.
        unsafe { Library::open(Some(name), libc::RTLD_NOW | libc::RTLD_LOCAL) }
            .map_err(|error| reason(&error))
            .and_then(|library| Self::keep(library).ok_or_else(|| "no handle".into()))
    }

    /// Returns the object of this name, if it is already in the process.
    pub(crate) fn already_loaded(name: &OsStr) -> Option<Self> {
        if name.is_empty() {
            return None;
        }
        // SAFETY: with this flag nothing is loaded, so that no initialiser runs.
        let library = unsafe { Library::open(Some(name), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
        Self::keep(library.ok()?)
    }

    /// Returns the program itself. Its symbols are those of all objects in the global scope.
    fn program() -> Option<Self> {
        Self::keep(Library::this())
    }

    fn keep(library: Library) -> Option<Self> {
        NonNull::new(library.into_raw()).map(Self)
    }

    /// Returns the object that provides the symbol `name` in the program's global scope.
    pub(crate) fn with_global_symbol(name: &CStr) -> Option<Self> {
        // SAFETY: `name` is a C string.
        let address = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
        let file = file_of_symbol(address)?;
        // The program has no name by which it can be opened.
        Self::already_loaded(&file).or_else(Self::program)
    }

    /// Returns the address of `name` in this object or in one that it depends on; null if there is none.
    pub(crate) fn symbol(self, name: &CStr) -> *mut c_void {
        // SAFETY: the handle is open, `name` is a C string.
        unsafe { libc::dlsym(self.0.as_ptr(), name.as_ptr()) }
    }

    /// Returns whether `name` is defined in this very object, not in one that it depends on.
    pub(crate) fn defines(self, name: &CStr) -> bool {
        file_of_symbol(self.symbol(name)).is_some_and(|file| file == self.linker_name())
    }

    /// Returns the file that was loaded, with links resolved, as in `/proc/self/maps`.
    pub(crate) fn file(self) -> PathBuf {
        let name = PathBuf::from(match self.linker_name() {
            name if name.is_empty() => "/proc/self/exe".into(),
            name => name,
        });
        fs::canonicalize(&name)
            // A link to a file that was removed, or never was in a directory: a file in memory.
            .or_else(|_| fs::read_link(&name))
            .unwrap_or(name)
    }

    /// Returns the name under which the linker opened it; empty for the program.
    fn linker_name(self) -> OsString {
        let map = self.link_map();
        if map.is_null() {
            return OsString::new();
        }
        // SAFETY: not null, so the linker's own record of an object that is never closed.
        string(unsafe { (*map).name })
    }

    fn link_map(self) -> *const LinkMap {
        let mut map: *const LinkMap = ptr::null();
        // SAFETY: the handle is open, and this request writes one pointer.
        let failed = unsafe { dlinfo(self.0.as_ptr(), RTLD_DI_LINKMAP, (&raw mut map).cast()) };
        if failed == 0 { map } else { ptr::null() }
    }
}

/// Returns the linker's name of the object in which `address` lies.
fn file_of_symbol(address: *mut c_void) -> Option<OsString> {
    if address.is_null() {
        return None;
    }
    // SAFETY: a struct of pointers, for which zero is a value.
    let mut info: libc::Dl_info = unsafe { core::mem::zeroed() };
    // SAFETY: any address may be asked about, and `info` is the out parameter.
    let found = unsafe { libc::dladdr(address, &mut info) };
    (found != 0).then(|| string(info.dli_fname))
}

fn string(text: *const c_char) -> OsString {
    if text.is_null() {
        return OsString::new();
    }
    // SAFETY: callers pass names that the linker keeps for as long as the object is loaded.
    OsStr::from_bytes(unsafe { CStr::from_ptr(text) }.to_bytes()).to_owned()
}

/// Returns the linker's error. It is in the source of the error, whose own text is only the name of a call.
fn reason(error: &libloading::Error) -> String {
    match error.source() {
        Some(source) => source.to_string(),
        None => error.to_string(),
    }
}

/// The public beginning of the linker's record of an object.
#[repr(C)]
struct LinkMap {
    address: usize,
    name: *const c_char,
}

/// Requests the [`LinkMap`] of a handle.
const RTLD_DI_LINKMAP: c_int = 2;

// In glibc and in musl, but `libc` declares it for glibc only.
unsafe extern "C" {
    fn dlinfo(handle: *mut c_void, request: c_int, info: *mut c_void) -> c_int;
}
