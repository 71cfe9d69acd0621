//! The loaded libnccl, and its capabilities.
//!
//! The library is loaded once per process and never unloaded: NCCL owns threads. Features depend on
//! the symbols it has, and on its version where a structure grew.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nccl_sys as sys;
use nccl_sys::Version;
use once_cell::sync::OnceCell;

use crate::error::{Error, ErrorKind, Result};
use crate::forked;
use crate::op::Function;
use nccl_base::data_type::DataType;

/// A loaded libnccl; cheap to clone.
///
/// ```
/// # fn main() -> nccl::Result<()> {
/// nccl_emulator::install_unless_gpu().expect("an emulator or a GPU");
/// let library = nccl::Library::load()?;
/// println!("NCCL {} at {}", library.version(), library.path().display());
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Library(Arc<LoadedLibrary>);

struct LoadedLibrary {
    api: sys::Api,
    version: Version,
    path: PathBuf,
}

/// A feature that not every supported release has.
///
/// ```
/// # fn main() -> nccl::Result<()> {
/// # nccl_emulator::install_unless_gpu().expect("an emulator or a GPU");
/// use nccl::Capability;
/// let library = nccl::Library::load()?;
/// if !library.has(Capability::TrustworthyAbort) {
///     eprintln!("{}", Capability::TrustworthyAbort);
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Capability {
    /// All-to-all as one call (`ncclAlltoAll`, 2.28.3); without it, this crate uses grouped messages.
    NativeAllToAll,
    /// Several communicators of a process aborted together (2.22.3).
    GroupAbort,
    /// `ncclCommAbort` returns (2.26.2). In earlier releases it may hang, and the communicator is then leaked.
    TrustworthyAbort,
    /// 8-bit floats (2.24.3).
    Float8,
    /// Communicators whose names appear in NCCL's own messages (2.27.3).
    CommunicatorName,
    /// Timeouts for blocking calls, which need `ncclCommSplit` and an abort that returns
    /// ([`LaunchMode::BlockingChild`](crate::LaunchMode::BlockingChild), 2.26.2).
    BlockingChild,
}

impl Capability {
    /// All capabilities.
    ///
    /// ```
    /// for capability in nccl::Capability::ALL {
    ///     println!("{capability}");
    /// }
    /// ```
    pub const ALL: &'static [Self] = &[
        Self::NativeAllToAll,
        Self::GroupAbort,
        Self::TrustworthyAbort,
        Self::Float8,
        Self::CommunicatorName,
        Self::BlockingChild,
    ];

    /// Returns the first release that has the capability.
    ///
    /// ```
    /// use nccl::{Capability, Version};
    /// assert_eq!(Capability::GroupAbort.since(), Version::new(2, 22, 3));
    /// ```
    #[must_use]
    pub const fn since(self) -> Version {
        match self {
            Self::NativeAllToAll => Version::new(2, 28, 3),
            Self::GroupAbort => Version::new(2, 22, 3),
            Self::TrustworthyAbort => Version::new(2, 26, 2),
            Self::Float8 => Version::new(2, 24, 3),
            Self::CommunicatorName => Version::new(2, 27, 3),
            Self::BlockingChild => Version::new(2, 26, 2),
        }
    }
}

impl fmt::Display for Capability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = match self {
            Self::NativeAllToAll => "all-to-all as one call",
            Self::GroupAbort => "abort of several communicators together",
            Self::TrustworthyAbort => "an abort that always returns",
            Self::Float8 => "8-bit floats",
            Self::CommunicatorName => "communicator names in NCCL's messages",
            Self::BlockingChild => "calls that block and can be ended",
        };
        write!(f, "{what} (NCCL ≥ {})", self.since())
    }
}

/// The oldest release this crate works with.
pub(crate) const OLDEST: Version = Version::new(2, 18, 1);

static LOADED: OnceCell<Library> = OnceCell::new();

/// See [`Library::on_load`].
static ON_LOAD: OnceCell<fn(&Library)> = OnceCell::new();

impl Library {
    /// Loads libnccl, or returns the library that this process already uses.
    ///
    /// Tries in this order: the file named by `NCCL_LIBRARY`, a libnccl that is already loaded, `libnccl.so.2` and
    /// `libnccl.so` in the linker's search path, `$NCCL_HOME/lib`. The operator of the program is responsible for the
    /// files that these variables name, as for `LD_LIBRARY_PATH`.
    ///
    /// # Errors
    /// [`ErrorKind::Load`] lists every place that was tried, with the linker's reason.
    /// [`ErrorKind::Unsupported`] when the library is older than 2.18.1.
    ///
    /// Calls only `ncclGetVersion`.
    ///
    /// ```
    /// # nccl_emulator::install_unless_gpu().expect("an emulator or a GPU");
    /// let library = nccl::Library::load()?;
    /// assert!(library.version() >= nccl::Version::new(2, 18, 1));
    /// # Ok::<(), nccl::Error>(())
    /// ```
    pub fn load() -> Result<Self> {
        forked::begin()?;
        LOADED
            // SAFETY: the operator vouches for the environment's file, as for any program that the linker starts; a library that
            // the linker finds under NCCL's name is assumed to be NCCL. No libnccl is closed, because its threads would lose
            // their code.
            .get_or_try_init(|| unsafe { open(&sys::Loader::new()) })
            .cloned()
    }

    /// Loads libnccl from this file.
    ///
    /// # Errors
    /// As [`load`](Self::load); also when the process already uses another libnccl, because two copies
    /// in one process share no state.
    ///
    /// # Safety
    /// The file is NCCL, or behaves like NCCL: opening it runs its initializers, and this crate calls its functions by
    /// NCCL's names. No part of the program closes the library afterwards.
    ///
    /// ```
    /// // SAFETY: there is no such file.
    /// let loaded = unsafe { nccl::Library::load_from("/no/such/file") };
    /// assert!(loaded.is_err());
    /// ```
    pub unsafe fn load_from(path: impl AsRef<Path>) -> Result<Self> {
        forked::begin()?;
        let wanted = path.as_ref();
        let loader = sys::Loader::new().path(wanted);
        let mut is_first = false;
        let used = LOADED.get_or_try_init(|| {
            is_first = true;
            // SAFETY: by the caller's promise.
            unsafe { open(&loader) }
        })?;
        if is_first || used.path() == wanted {
            return Ok(used.clone());
        }
        // A path through links, or another library that is in the process as well.
        // SAFETY: by the caller's promise.
        let found = unsafe { loader.load() }?;
        match found.path == used.path() {
            true => Ok(used.clone()),
            false => Err(sys::LoadError::AnotherIsLoaded {
                wanted: wanted.to_owned(),
                origin: found.origin,
                loaded: vec![used.path().to_owned()],
            }
            .into()),
        }
    }

    /// Uses a table of functions from the caller, for instance to measure the overhead of this crate
    /// over the library below it.
    ///
    /// # Safety
    /// Each function must do what NCCL's function of that name does, as far as this crate calls it,
    /// and must stay callable for the life of the process.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] when `version` is older than 2.18.1.
    ///
    /// ```
    /// # fn example() -> nccl::Result<()> {
    /// use nccl::{Library, Version};
    ///
    /// let api = nccl_sys::Api::empty();
    /// // SAFETY: nothing is called through an empty table.
    /// let library = unsafe { Library::from_api(api, Version::new(2, 28, 3))? };
    /// assert!(!library.has(nccl::Capability::NativeAllToAll));
    /// # Ok(())
    /// # }
    /// # example().unwrap();
    /// ```
    pub unsafe fn from_api(api: sys::Api, version: Version) -> Result<Self> {
        // SAFETY: the same contract.
        unsafe { Self::from_table(api, version, "(a table of functions)") }
    }

    /// Like [`from_api`](Self::from_api), with a text in place of the file's path.
    ///
    /// # Safety
    /// As for [`from_api`](Self::from_api).
    pub(crate) unsafe fn from_table(api: sys::Api, version: Version, path: &str) -> Result<Self> {
        Self::checked(LoadedLibrary {
            api,
            version,
            path: PathBuf::from(path),
        })
    }

    fn wrap(loaded: sys::Loaded) -> Result<Self> {
        let library = Self::checked(LoadedLibrary {
            api: loaded.api,
            version: loaded.version,
            path: loaded.path,
        })?;
        tracing::info!(
            name: "nccl.library",
            target: "nccl",
            version = %library.version(),
            path = %library.path().display(),
            "loaded libnccl"
        );
        if let Some(hook) = ON_LOAD.get() {
            hook(&library);
        }
        Ok(library)
    }

    fn checked(inner: LoadedLibrary) -> Result<Self> {
        if inner.version < OLDEST {
            return Err(Error::new(ErrorKind::Unsupported {
                what: String::from("this crate"),
                needs: OLDEST,
                found: inner.version,
                path: inner.path,
            }));
        }
        Ok(Self(Arc::new(inner)))
    }

    /// Returns the loaded release, from `ncclGetVersion`.
    ///
    /// ```
    /// # nccl_emulator::install_unless_gpu().expect("an emulator or a GPU");
    /// assert!(nccl::Library::load()?.version() >= nccl::Version::new(2, 18, 1));
    /// # Ok::<(), nccl::Error>(())
    /// ```
    #[must_use]
    pub fn version(&self) -> Version {
        self.0.version
    }

    /// Returns the path of the loaded file. The path of an emulator contains its name.
    ///
    /// ```
    /// # nccl_emulator::install_unless_gpu().expect("an emulator or a GPU");
    /// println!("{}", nccl::Library::load()?.path().display());
    /// # Ok::<(), nccl::Error>(())
    /// ```
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0.path
    }

    /// Returns whether the loaded release has this capability.
    ///
    /// ```
    /// # nccl_emulator::install_unless_gpu().expect("an emulator or a GPU");
    /// let library = nccl::Library::load()?;
    /// assert!(library.has(nccl::Capability::NativeAllToAll));
    /// # Ok::<(), nccl::Error>(())
    /// ```
    #[must_use]
    pub fn has(&self, capability: Capability) -> bool {
        let symbol = match capability {
            Capability::NativeAllToAll => self.0.api.ncclAlltoAll.is_some(),
            Capability::BlockingChild => self.0.api.ncclCommSplit.is_some(),
            _ => true,
        };
        symbol && self.0.version >= capability.since()
    }

    /// Sets a hook that is called with the library that this process loads, before a communicator is made; at once if a library
    /// is already loaded. Only the first hook has an effect.
    #[doc(hidden)]
    pub fn on_load(hook: fn(&Self)) {
        if ON_LOAD.set(hook).is_ok()
            && let Some(library) = Self::loaded()
        {
            hook(&library);
        }
    }

    /// Returns the library that this process has loaded, if any.
    #[doc(hidden)]
    pub fn loaded() -> Option<Self> {
        LOADED.get().cloned()
    }

    /// Whether this is the emulator: its path, or the target of that link, contains the emulator's name.
    #[doc(hidden)]
    pub fn is_emulated(&self) -> bool {
        const NAME: &str = "nccl-emulator";
        let path = &self.0.path;
        let target = std::fs::read_link(path).unwrap_or_default();
        [path, &target]
            .iter()
            .any(|path| path.to_string_lossy().contains(NAME))
    }

    /// Whether both are the same loaded library.
    pub(crate) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Whether the library has the C function of an operation; older releases lack some.
    pub(crate) fn has_function(&self, function: Function) -> bool {
        let api = &self.0.api;
        match function {
            Function::AllToAll => api.ncclAlltoAll.is_some(),
            Function::Gather => api.ncclGather.is_some(),
            Function::Scatter => api.ncclScatter.is_some(),
            _ => true,
        }
    }

    pub(crate) fn api(&self) -> &sys::Api {
        &self.0.api
    }

    /// Returns a function of the table, or an error that names the function and the first release that has it.
    pub(crate) fn function<F>(
        &self,
        get: impl FnOnce(&sys::Api) -> std::result::Result<F, sys::MissingFunction>,
    ) -> Result<F> {
        forked::check()?;
        get(&self.0.api)
            .map_err(|missing| self.unsupported(missing.function.to_owned(), missing.needs))
    }

    /// Fails for an element type that the library does not know.
    #[inline]
    #[doc(hidden)]
    pub fn admit(&self, data_type: DataType) -> Result<()> {
        match data_type.since() {
            Some(needs) if self.0.version < needs => {
                Err(self.unsupported(format!("element type {data_type}"), needs))
            }
            _ => Ok(()),
        }
    }

    pub(crate) fn unsupported(&self, what: String, needs: Version) -> Error {
        Error::new(ErrorKind::Unsupported {
            what,
            needs,
            found: self.0.version,
            path: self.0.path.clone(),
        })
    }
}

/// # Safety
/// As for [`sys::Loader::load`].
unsafe fn open(loader: &sys::Loader) -> Result<Library> {
    // SAFETY: by the caller's promise.
    let loaded = unsafe { loader.load() }?;
    Library::wrap(loaded)
}

impl fmt::Debug for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Library")
            .field("version", &self.0.version)
            .field("path", &self.0.path)
            .finish()
    }
}
