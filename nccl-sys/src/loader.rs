//! [`Loader`]: finds NCCL, opens it, and makes sure that a process has only one.
//!
//! The rules, in order:
//!
//! 1. [`Loader::path`], or else the environment variable `NCCL_LIBRARY`, names the wanted library. The loader returns
//!    that library or an error, never another library.
//! 2. A copy that is already in the process is used. If it is not the wanted one, or if there are several and none is
//!    wanted, the loader returns an error that names them.
//! 3. Otherwise the places of `search.rs` are tried until one has NCCL.
//!
//! Of NCCL's functions only `ncclGetVersion` is called. An opened library is never closed.

use core::ffi::{CStr, c_int, c_void};
use core::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use crate::in_process::{self, Copy};
use crate::object::Object;
use crate::search;
use crate::{Api, Attempt, LoadError, Origin, Version, ncclResult_t};

/// The environment variable that names the library to load.
const VARIABLE: &str = "NCCL_LIBRARY";

/// Serializes searches: two could each see an empty process and open different files.
static SEARCHING: Mutex<()> = Mutex::new(());

/// Finds and opens NCCL.
///
/// It tries, in this order:
///
/// 1. the file given to [`path`](Self::path), and nothing else;
/// 2. the file in the environment variable `NCCL_LIBRARY`, and nothing else;
/// 3. a copy of NCCL that is in the process already;
/// 4. `libnccl.so.2`, then `libnccl.so`, where the dynamic linker searches;
/// 5. the same two files in `$NCCL_HOME/lib`;
/// 6. Python packages, if [`pip_layout`](Self::pip_layout) was asked for.
///
/// ```no_run
/// // SAFETY: libraries by NCCL's name are trusted to be NCCL.
/// let nccl = unsafe { nccl_sys::Loader::new().pip_layout(true).load() }?;
/// println!("{nccl}");
/// # Ok::<(), nccl_sys::LoadError>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct Loader {
    path: Option<PathBuf>,
    pip_layout: bool,
}

impl Loader {
    /// Returns a loader that searches the usual places.
    ///
    /// ```
    /// let loader = nccl_sys::Loader::new();
    /// println!("{loader:?}");
    /// ```
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the file to load, and no other. The dynamic linker searches for a name without a slash.
    ///
    /// ```
    /// let loader = nccl_sys::Loader::new().path("/opt/nccl/lib/libnccl.so.2");
    /// println!("{loader:?}");
    /// ```
    #[must_use]
    pub fn path(mut self, path: impl Into<PathBuf>) -> Self {
        self.path = Some(path.into());
        self
    }

    /// Sets whether to search Python's `site-packages` for NVIDIA's wheels (`nvidia-nccl-cu13` and the
    /// like), after all other places: those of `PYTHONPATH`, of the active virtual or conda
    /// environment, of the `python3` in `PATH`, of the user and of the system. Off by default: which library
    /// a program loads should not depend on which Python happens to be active.
    ///
    /// ```
    /// let loader = nccl_sys::Loader::new().pip_layout(true);
    /// println!("{loader:?}");
    /// ```
    #[must_use]
    pub fn pip_layout(mut self, search: bool) -> Self {
        self.pip_layout = search;
        self
    }

    /// Finds, opens and identifies NCCL. May be called again: it then finds the copy that is loaded.
    ///
    /// # Errors
    /// [`LoadError::NotFound`] lists every place with the linker's reason; the other kinds refuse a
    /// second copy in one process.
    ///
    /// # Safety
    ///
    /// Opening a library runs its initialisers, and its `ncclGetVersion` is called. The caller
    /// guarantees that a file with this name is NCCL, and that no other code closes it
    /// if it has been opened before.
    ///
    /// ```no_run
    /// // SAFETY: libraries by NCCL's name are trusted to be NCCL.
    /// match unsafe { nccl_sys::Loader::new().load() } {
    ///     Ok(nccl) => println!("{nccl}"),
    ///     Err(error) => eprintln!("{error}"),
    /// }
    /// ```
    pub unsafe fn load(&self) -> Result<Loaded, LoadError> {
        let _guard = SEARCHING.lock().unwrap_or_else(PoisonError::into_inner);
        let wanted = match &self.path {
            Some(path) => Some((path.clone(), Origin::Argument)),
            None => search::variable(VARIABLE).map(|path| (path, Origin::Environment)),
        };
        // SAFETY: by the caller's promise.
        unsafe {
            match wanted {
                Some((file, origin)) => load_wanted(file, origin),
                None => load_any(self.pip_layout),
            }
        }
    }
}

/// Loads `file` or returns an error.
///
/// # Safety
/// As for [`Loader::load`].
unsafe fn load_wanted(file: PathBuf, origin: Origin) -> Result<Loaded, LoadError> {
    if let Some(object) = Object::already_loaded(file.as_os_str()) {
        // SAFETY: by the caller's promise.
        return unsafe { identify(object, origin) }
            .map_err(|reason| not_found(file, origin, reason));
    }
    let loaded = files(in_process::copies());
    if !loaded.is_empty() {
        return Err(LoadError::AnotherIsLoaded {
            wanted: file,
            origin,
            loaded,
        });
    }
    // SAFETY: by the caller's promise.
    unsafe { open(&file, origin) }.map_err(|reason| not_found(file, origin, reason))
}

/// Takes the copy that is in the process, or searches for one.
///
/// # Safety
/// As for [`Loader::load`].
unsafe fn load_any(pip_layout: bool) -> Result<Loaded, LoadError> {
    let mut copies = in_process::copies();
    match (copies.pop(), copies.is_empty()) {
        (None, _) => (),
        (
            Some(Copy {
                object: Some(object),
                file,
            }),
            true,
        ) => {
            let origin = Origin::AlreadyLoaded;
            // SAFETY: by the caller's promise.
            return unsafe { identify(object, origin) }
                .map_err(|reason| not_found(file, origin, reason));
        }
        (Some(Copy { object: None, file }), true) => {
            return Err(LoadError::OutOfReach { loaded: file });
        }
        (Some(last), false) => {
            copies.push(last);
            return Err(LoadError::SeveralAreLoaded {
                loaded: files(copies),
            });
        }
    }

    let mut attempts = Vec::new();
    for place in search::places(pip_layout) {
        // SAFETY: by the caller's promise.
        match unsafe { open(&place.file, place.origin) } {
            Ok(loaded) => return Ok(loaded),
            Err(reason) => {
                attempts.push(Attempt::new(place.file, place.origin, reason));
            }
        }
    }
    Err(LoadError::NotFound { attempts })
}

fn files(copies: Vec<Copy>) -> Vec<PathBuf> {
    copies.into_iter().map(|copy| copy.file).collect()
}

fn not_found(file: PathBuf, origin: Origin, reason: String) -> LoadError {
    LoadError::NotFound {
        attempts: vec![Attempt::new(file, origin, reason)],
    }
}

/// # Safety
/// As for [`Loader::load`].
unsafe fn open(file: &Path, origin: Origin) -> Result<Loaded, String> {
    // SAFETY: by the caller's promise.
    let object = unsafe { Object::open(file) }?;
    // SAFETY: by the caller's promise.
    unsafe { identify(object, origin) }
}

/// Looks up all functions and reads the version.
///
/// # Safety
/// If `object` has functions with NCCL's names, they are NCCL's.
unsafe fn identify(object: Object, origin: Origin) -> Result<Loaded, String> {
    // SAFETY: by the caller's promise; the object is never closed.
    let api = unsafe { Api::load(|name| object.symbol(name)) };
    let get_version = api
        .ncclGetVersion
        .ok_or("it is not NCCL: it does not have ncclGetVersion")?;
    // SAFETY: may be called at any time.
    let ask = |code: &mut c_int| unsafe { get_version(code) };
    let version = ask_version("ncclGetVersion", ask, Version::from_code)?;
    Ok(Loaded {
        api,
        version,
        path: object.file(),
        origin,
        object,
    })
}

/// Asks a library for its version, by its function `name`.
pub(crate) fn ask_version(
    name: &str,
    ask: impl FnOnce(&mut c_int) -> ncclResult_t,
    read: impl FnOnce(c_int) -> Option<Version>,
) -> Result<Version, String> {
    let mut code: c_int = 0;
    let result = ask(&mut code);
    if result != ncclResult_t::ncclSuccess {
        return Err(format!("its {name} failed with code {}", result.0));
    }
    read(code).ok_or_else(|| format!("its {name} says {code}, which stands for no release"))
}

/// A loaded library, for the rest of the process's life.
///
/// ```no_run
/// // SAFETY: libraries by NCCL's name are trusted to be NCCL.
/// let nccl = unsafe { nccl_sys::Loader::new().load() }?;
/// println!("{} at {}: {}", nccl.version, nccl.path.display(), nccl.origin);
/// # Ok::<(), nccl_sys::LoadError>(())
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Loaded {
    /// Its functions.
    pub api: Api,
    /// The version that its `ncclGetVersion` returns.
    pub version: Version,
    /// Its file, with links resolved as they are now. For a library that exists only in memory, the system's name for
    /// it, such as `/memfd:NAME (deleted)`.
    pub path: PathBuf,
    /// Why this file was chosen.
    pub origin: Origin,
    object: Object,
}

impl Loaded {
    /// Returns the address of a symbol of the library, null if it has none of this name: for functions that
    /// `nccl.h` does not declare.
    ///
    /// ```no_run
    /// # fn example(nccl: &nccl_sys::Loaded) {
    /// if nccl.symbol(c"pncclAllReduce").is_null() {
    ///     println!("built without the names of the profiling interface");
    /// }
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
            "NCCL {} at {} ({})",
            self.version,
            self.path.display(),
            self.origin
        )
    }
}
