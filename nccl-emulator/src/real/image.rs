//! [`Image`]: the library as the dynamic linker has loaded it.

use std::ffi::{CStr, CString, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr::{self, NonNull};

use super::error::LoadError;
use super::file::BuildId;

/// A loaded library. Dropping it unloads the library, unless it was [kept](Image::keep).
pub(crate) struct Image {
    handle: NonNull<c_void>,
    base: usize,
}

impl Image {
    /// Loads the library at `path`, which must not be in the process yet. Its constructors run.
    pub(crate) fn load(path: &Path, build_id: &BuildId) -> Result<Self, LoadError> {
        let linker = |reason: String| LoadError::Linker {
            path: path.to_owned(),
            reason,
        };
        // The dynamic linker would search other directories for a relative path without a slash.
        let absolute = std::path::absolute(path).map_err(|error| linker(error.to_string()))?;
        let name = CString::new(absolute.as_os_str().as_bytes())
            .map_err(|error| linker(error.to_string()))?;
        // SAFETY: `name` is a C string; with RTLD_NOLOAD nothing is loaded and no code runs.
        let already = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD) };
        if !already.is_null() {
            // SAFETY: `already` is the handle that the line above returned.
            unsafe { libc::dlclose(already) };
            return Err(LoadError::AlreadyLoaded {
                path: path.to_owned(),
            });
        }
        // SAFETY: `name` is a C string. The constructors that run are those of an NVIDIA libnccl, as
        // its symbols and debug information say; they register kernels and call nothing else.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        let Some(handle) = NonNull::new(handle) else {
            return Err(linker(last_error()));
        };
        let mut image = Self { handle, base: 0 };
        image.base = image.find_base().ok_or_else(|| linker(last_error()))?;
        if !image.has(build_id) {
            return Err(LoadError::OtherFile {
                path: path.to_owned(),
                expected: build_id.text(),
            });
        }
        Ok(image)
    }

    fn find_base(&self) -> Option<usize> {
        let mut map: *mut LinkMap = ptr::null_mut();
        // SAFETY: the handle is open, and RTLD_DI_LINKMAP stores one pointer at the address given.
        let code = unsafe {
            libc::dlinfo(
                self.handle.as_ptr(),
                libc::RTLD_DI_LINKMAP,
                (&raw mut map).cast(),
            )
        };
        if code != 0 || map.is_null() {
            return None;
        }
        // SAFETY: the link map of an open library lives as long as the library, and begins with `l_addr`.
        Some(unsafe { (*map).address })
    }

    fn has(&self, build_id: &BuildId) -> bool {
        let length = build_id.bytes.len();
        // The first page of a library holds its headers, and is mapped whatever file this is.
        let Some(offset) = usize::try_from(build_id.address)
            .ok()
            .filter(|at| at + length <= 4096)
        else {
            return false;
        };
        // SAFETY: `offset + length` is within the first page of the loaded library, which is readable.
        let found =
            unsafe { std::slice::from_raw_parts(self.at(offset as u64).cast::<u8>(), length) };
        found == build_id.bytes
    }

    /// Returns the base address of the library.
    pub(crate) fn base(&self) -> usize {
        self.base
    }

    /// Returns the address in this process of `address` in the library.
    pub(crate) fn at(&self, address: u64) -> *mut c_void {
        // An address of an x86-64 library fits.
        ptr::with_exposed_provenance_mut(self.base.wrapping_add(address as usize))
    }

    /// Keeps the library loaded for the rest of the process: its threads and our trampolines refer to it.
    pub(crate) fn keep(self) {
        std::mem::forget(self);
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        // SAFETY: the handle is open, and no address in the library has left this module's callers,
        // which drop the image only when they return an error.
        unsafe { libc::dlclose(self.handle.as_ptr()) };
    }
}

/// The start of glibc's `struct link_map`, which `<link.h>` publishes.
#[repr(C)]
struct LinkMap {
    address: usize,
}

fn last_error() -> String {
    // SAFETY: dlerror has no preconditions.
    let text = unsafe { libc::dlerror() };
    if text.is_null() {
        return "no reason given".to_owned();
    }
    // SAFETY: dlerror returns a C string that stays until this thread's next call of a dl function.
    unsafe { CStr::from_ptr(text) }
        .to_string_lossy()
        .into_owned()
}
