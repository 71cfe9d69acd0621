//! Plugins: libraries of the user that provide NCCL with tables of functions.
//!
//! A variable names the library, by its path or by the middle part of its file name; without the variable the dynamic linker
//! looks for the default name. Used by the environment plugin and the profiler plugin.

use std::ffi::{CStr, CString, c_void};

use super::debug::{info, subsystem};

/// A kind of plugin.
pub(super) struct Kind {
    /// The kind in NCCL's log.
    pub(super) name: &'static str,
    /// The default file name without `.so`.
    pub(super) prefix: &'static str,
    /// The subsystem of its log lines.
    pub(super) about: u32,
}

pub(super) const ENVIRONMENT: Kind = Kind {
    name: "ENV",
    prefix: "libnccl-env",
    about: subsystem::INIT | subsystem::ENV,
};

pub(super) const PROFILER: Kind = Kind {
    name: "PROFILER",
    prefix: "libnccl-profiler",
    about: subsystem::INIT,
};

pub(super) const NETWORK: Kind = Kind {
    name: "NET",
    prefix: "libnccl-net",
    about: subsystem::INIT | subsystem::NET,
};

/// The value of a plugin's variable that stands for symbols of the program itself.
const STATIC: &str = "STATIC_PLUGIN";

/// An open library. It stays open unless [`Library::close`] is called.
pub(super) struct Library {
    handle: *mut c_void,
    /// The name under which the dynamic linker found it.
    pub(super) name: String,
}

// SAFETY: the dynamic linker's handles may be used by any thread.
unsafe impl Send for Library {}
// SAFETY: as above.
unsafe impl Sync for Library {}

impl Library {
    /// Returns the address of a symbol.
    pub(super) fn find(&self, symbol: &CStr) -> Option<*const c_void> {
        // SAFETY: an open library and a C string.
        let address = unsafe { libc::dlsym(self.handle, symbol.as_ptr()) };
        (!address.is_null()).then_some(address.cast_const())
    }

    /// Gives back the reference to the library.
    ///
    /// # Safety
    /// Nothing of the library is used any more by the owner of this reference.
    pub(super) unsafe fn close(self) {
        // SAFETY: a handle of `dlopen` that is closed once; the rest is the caller's promise.
        unsafe { libc::dlclose(self.handle) };
    }
}

/// Opens the library that a variable `named`, or the default one.
pub(super) fn open(kind: &Kind, named: Option<&str>) -> Option<Library> {
    let named = named.filter(|name| !name.is_empty());
    let mut names = vec![named.map_or_else(|| format!("{}.so", kind.prefix), String::from)];
    names.extend(
        named
            .filter(|name| is_short(name))
            .map(|name| format!("{}-{name}.so", kind.prefix)),
    );
    let opened = names.iter().find_map(|name| dlopen(name));
    if opened.is_none() {
        info!(
            kind.about,
            "{}/Plugin: Could not find: {}",
            kind.name,
            names.join(" ")
        );
    }
    opened
}

/// Returns whether a name can be the middle part of a file name: neither a path nor the name of a library.
fn is_short(name: &str) -> bool {
    let is_library = name.starts_with("lib") && name.ends_with(".so");
    !name.contains('/') && !is_library
}

fn dlopen(name: &str) -> Option<Library> {
    // NCCL compares only as many characters as the name has.
    let is_static = STATIC
        .get(..name.len())
        .is_some_and(|beginning| beginning.eq_ignore_ascii_case(name));
    let file = CString::new(name).ok()?;
    let file = match is_static {
        true => std::ptr::null(),
        false => file.as_ptr(),
    };
    // SAFETY: runs the initialisers of a library that the user has installed as a plugin, as NCCL does.
    let handle = unsafe { libc::dlopen(file, libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if handle.is_null() {
        // Otherwise the program's next `dlerror` returns this error.
        // SAFETY: takes this thread's last error.
        unsafe { libc::dlerror() };
        return None;
    }
    Some(Library {
        handle,
        name: name.to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_is_neither_a_path_nor_a_library_is_the_middle_of_a_file_name() {
        assert!(is_short("counts") && is_short("counts.so") && is_short("libcounts"));
        assert!(!is_short("libcounts.so") && !is_short("./counts") && !is_short("/tmp/counts.so"));
    }

    #[test]
    fn a_static_plugin_is_the_program_itself() {
        let program = open(&PROFILER, Some("static_plugin")).unwrap();
        assert!(program.find(c"dlopen").is_some());
        assert!(program.find(c"ncclProfiler_v4").is_none());
        assert!(open(&PROFILER, Some("no-such-plugin")).is_none());
    }
}
