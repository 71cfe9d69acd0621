//! [`Loader`]: finds NCCL EP and opens it.
//!
//! The rules, in order:
//!
//! 1. The process must not have an NCCL under a name that is not NCCL EP's for it, because the linker would load a second one.
//! 2. [`Loader::path`], or else the environment variable `NCCL_EP_LIBRARY`, names the wanted library. The loader returns that
//!    library or an error, never another library.
//! 3. A copy that is already in the process is used; otherwise the places are tried until one has NCCL EP.
//!
//! Of the library's functions only `ncclEpGetVersion` is called. An opened library is never closed.

use core::ffi::{CStr, c_int, c_void};
use core::fmt;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use super::api::Api;
use super::load_error::{LoadError, VARIABLE, explained};
use crate::loader::ask_version;
use crate::object::Object;
use crate::search::{self, Place};
use crate::{Attempt, Origin, Version, in_process};

/// The names for the linker to search, in the order of preference: the wheels have only the second one.
const FILES: [&str; 2] = ["libnccl_ep.so.0", "libnccl_ep.so"];

/// The name by which NCCL EP depends on NCCL.
const NCCL: &str = "libnccl.so.2";

/// Serializes searches, which could each open a different file.
static SEARCHING: Mutex<()> = Mutex::new(());

/// Finds and opens NCCL EP. Load NCCL before, with [`crate::Loader`].
///
/// It tries, in this order:
///
/// 1. the file given to [`path`](Self::path), and nothing else;
/// 2. the file in the environment variable `NCCL_EP_LIBRARY`, and nothing else;
/// 3. a copy of NCCL EP that is in the process already;
/// 4. `libnccl_ep.so.0`, then `libnccl_ep.so`, where the dynamic linker searches;
/// 5. Python packages, if [`pip_layout`](Self::pip_layout) was asked for.
///
/// ```no_run
/// // SAFETY: libraries by NCCL's name are trusted to be NCCL, and likewise those by NCCL EP's name.
/// let nccl = unsafe { nccl_sys::Loader::new().pip_layout(true).load() }?;
/// // SAFETY: as above.
/// let ep = unsafe { nccl_sys::ep::Loader::new().pip_layout(13).load() }?;
/// println!("{nccl}, {ep}");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct Loader {
    path: Option<PathBuf>,
    pip_layout: Option<u32>,
}

impl Loader {
    /// Returns a loader that searches the usual places.
    ///
    /// ```
    /// let loader = nccl_sys::ep::Loader::new();
    /// println!("{loader:?}");
    /// ```
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the file to load, and no other. The dynamic linker searches for a name without a slash.
    ///
    /// ```
    /// let loader = nccl_sys::ep::Loader::new().path("/opt/nccl-ep/lib/libnccl_ep.so.0");
    /// println!("{loader:?}");
    /// ```
    #[must_use]
    pub fn path(mut self, path: impl Into<PathBuf>) -> Self {
        self.path = Some(path.into());
        self
    }

    /// Makes the loader search Python's `site-packages` for NVIDIA's wheel `nccl-extensions`, after all other places, as
    /// [`crate::Loader::pip_layout`] does. The wheel has a library for each major version of CUDA: `cuda` is 12 or 13, and the
    /// driver has to support it.
    ///
    /// ```
    /// let loader = nccl_sys::ep::Loader::new().pip_layout(13);
    /// println!("{loader:?}");
    /// ```
    #[must_use]
    pub fn pip_layout(mut self, cuda: u32) -> Self {
        self.pip_layout = Some(cuda);
        self
    }

    /// Finds, opens and identifies NCCL EP. May be called again: it then finds the copy that is loaded.
    ///
    /// # Errors
    /// [`LoadError::NotFound`] lists every place with the linker's reason, which names NCCL or the CUDA driver if that is
    /// what is missing; [`LoadError::OtherNccl`] refuses a second copy of NCCL in one process.
    ///
    /// # Safety
    ///
    /// Opening a library runs its initialisers, and those of NCCL if NCCL is not loaded, and its `ncclEpGetVersion` is called.
    /// The caller guarantees that a file with this name is NCCL EP, and that no other code closes it if it has been opened
    /// before.
    ///
    /// ```no_run
    /// // SAFETY: libraries by NCCL EP's name are trusted to be NCCL EP.
    /// match unsafe { nccl_sys::ep::Loader::new().load() } {
    ///     Ok(ep) => println!("{ep}"),
    ///     Err(error) => eprintln!("{error}"),
    /// }
    /// ```
    pub unsafe fn load(&self) -> Result<Loaded, LoadError> {
        let _guard = SEARCHING.lock().unwrap_or_else(PoisonError::into_inner);
        let own = Object::already_loaded(OsStr::new(NCCL)).map(|object| object.file());
        // One that was loaded into a namespace of its own does not concern this one.
        let is_other =
            |copy: &in_process::Copy| copy.object.is_some() && Some(&copy.file) != own.as_ref();
        if let Some(copy) = in_process::copies().into_iter().find(is_other) {
            return Err(LoadError::OtherNccl { loaded: copy.file });
        }
        let mut attempts = Vec::new();
        for Place { file, origin } in self.places() {
            // SAFETY: by the caller's promise.
            match unsafe { open(&file, origin) } {
                Ok(loaded) => return Ok(loaded),
                Err(reason) => attempts.push(Attempt::new(file, origin, reason)),
            }
        }
        Err(LoadError::NotFound { attempts })
    }

    /// Returns the places to try, in order.
    fn places(&self) -> Vec<Place> {
        let place = |origin| move |file: PathBuf| Place { file, origin };
        if let Some(file) = &self.path {
            return vec![place(Origin::Argument)(file.clone())];
        }
        if let Some(file) = search::variable(VARIABLE) {
            return vec![place(Origin::EpEnvironment)(file)];
        }
        let loaded = |file: &&str| Object::already_loaded(OsStr::new(file)).is_some();
        if let Some(file) = FILES.into_iter().find(|file| loaded(file)) {
            return vec![place(Origin::AlreadyLoaded)(file.into())];
        }
        let named = FILES.map(PathBuf::from).map(place(Origin::LinkerPath));
        let wheels = self
            .pip_layout
            .map(|cuda| search::wheels_with(&format!("nccl/ep/lib/cu{cuda}/libnccl_ep.so")))
            .unwrap_or_default();
        named
            .into_iter()
            .chain(wheels.into_iter().map(place(Origin::Pip)))
            .collect()
    }
}

/// # Safety
/// As for [`Loader::load`].
unsafe fn open(file: &Path, origin: Origin) -> Result<Loaded, String> {
    // SAFETY: by the caller's promise.
    let object = unsafe { Object::open(file) }.map_err(explained)?;
    // SAFETY: by the caller's promise; the object is never closed.
    let api = unsafe { Api::load(|name| object.symbol(name)) };
    let get_version = api
        .ncclEpGetVersion
        .ok_or("it is not NCCL EP: it does not have ncclEpGetVersion")?;
    // SAFETY: may be called at any time.
    let ask = |code: &mut c_int| unsafe { get_version(code) };
    let version = ask_version("ncclEpGetVersion", ask, version_of)?;
    Ok(Loaded {
        api,
        version,
        path: object.file(),
        origin,
        object,
    })
}

/// Reads `NCCL_EP_VERSION_CODE`, whose rule is the newer one of NCCL's two.
fn version_of(code: c_int) -> Option<Version> {
    let code = u32::try_from(code).ok().filter(|code| *code > 0)?;
    Some(Version::new(code / 10_000, code % 10_000 / 100, code % 100))
}

/// A loaded NCCL EP library, for the rest of the process's life.
///
/// ```no_run
/// // SAFETY: libraries by NCCL EP's name are trusted to be NCCL EP.
/// let ep = unsafe { nccl_sys::ep::Loader::new().load() }?;
/// println!("{} at {}: {}", ep.version, ep.path.display(), ep.origin);
/// # Ok::<(), nccl_sys::ep::LoadError>(())
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Loaded {
    /// Its functions.
    pub api: Api,
    /// The version that its `ncclEpGetVersion` returns.
    pub version: Version,
    /// Its file, with links resolved.
    pub path: PathBuf,
    /// Why this file was chosen.
    pub origin: Origin,
    object: Object,
}

impl Loaded {
    /// Returns the address of a symbol of the library or of one that it depends on, null if none has this name: for functions
    /// that `nccl_ep.h` does not declare.
    ///
    /// ```no_run
    /// # fn example(ep: &nccl_sys::ep::Loaded) {
    /// println!("{:?}", ep.symbol(c"ncclEpCombine"));
    /// # }
    /// ```
    pub fn symbol(&self, name: &CStr) -> *mut c_void {
        self.object.symbol(name)
    }
}

impl fmt::Display for Loaded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "NCCL EP {} at {} ({})",
            self.version,
            self.path.display(),
            self.origin
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ep::types;

    #[test]
    fn a_code_is_read_as_the_header_makes_it() {
        let header = version_of(types::NCCL_EP_VERSION_CODE);
        assert_eq!(header, Some(types::VERSION));
        assert_eq!(version_of(10_203), Some(Version::new(1, 2, 3)));
        assert_eq!(version_of(0), None);
        assert_eq!(version_of(-200), None);
    }

    #[test]
    fn the_builds_of_a_wheel_are_searched_by_their_cuda_and_last() {
        let places = Loader::new().pip_layout(12).places();
        let files: Vec<_> = places.iter().map(|place| place.file.as_path()).collect();
        assert_eq!(files[..2], FILES.map(Path::new));
        assert!(files.len() > 2);
        assert!(
            files[2..]
                .iter()
                .all(|file| file.ends_with("nccl/ep/lib/cu12/libnccl_ep.so")),
            "{files:?}"
        );
    }
}
