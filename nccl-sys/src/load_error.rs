//! [`LoadError`]: why NCCL could not be loaded, with everything that was tried.

use core::fmt;
use std::path::PathBuf;

/// Why the [`Loader`](crate::Loader) tried a file.
///
/// ```
/// assert_eq!(nccl_sys::Origin::NcclHome.to_string(), "from NCCL_HOME");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Origin {
    /// [`Loader::path`](crate::Loader::path).
    Argument,
    /// The environment variable `NCCL_LIBRARY`.
    Environment,
    /// The environment variable `NCCL_EP_LIBRARY`, which names NCCL EP ([`ep::Loader`](crate::ep::Loader)).
    #[cfg(feature = "ep")]
    EpEnvironment,
    /// The file was in the process already.
    AlreadyLoaded,
    /// A name for the dynamic linker to search.
    LinkerPath,
    /// The environment variable `NCCL_HOME`.
    NcclHome,
    /// NVIDIA's wheels among Python's packages.
    Pip,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Argument => "named by the program",
            Self::Environment => "named by NCCL_LIBRARY",
            #[cfg(feature = "ep")]
            Self::EpEnvironment => "named by NCCL_EP_LIBRARY",
            Self::AlreadyLoaded => "already in the process",
            Self::LinkerPath => "the dynamic linker's search path",
            Self::NcclHome => "from NCCL_HOME",
            Self::Pip => "a Python package",
        })
    }
}

/// A place where NCCL was not found.
///
/// ```
/// use nccl_sys::LoadError;
/// # fn example(error: &LoadError) {
/// if let LoadError::NotFound { attempts, .. } = error {
///     for attempt in attempts {
///         eprintln!("{}: {}", attempt.file.display(), attempt.reason);
///     }
/// }
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Attempt {
    /// The file, or the name for the linker to search.
    pub file: PathBuf,
    /// Why the file was tried.
    pub origin: Origin,
    /// Why it failed: the linker's error where the file could not be opened.
    pub reason: String,
}

impl Attempt {
    pub(crate) fn new(file: PathBuf, origin: Origin, reason: String) -> Self {
        Self {
            file,
            origin,
            reason,
        }
    }
}

impl fmt::Display for Attempt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} ({}): {}",
            self.file.display(),
            self.origin,
            self.reason
        )
    }
}

/// NCCL could not be loaded.
///
/// ```
/// use nccl_sys::{LoadError, Loader};
///
/// // SAFETY: there is no such file, so that nothing is opened.
/// let error = unsafe { Loader::new().path("/no/such/libnccl.so.2").load() }.unwrap_err();
/// assert!(matches!(error, LoadError::NotFound { .. }));
/// assert!(error.to_string().contains("1. /no/such/libnccl.so.2 (named by the program)"));
/// ```
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// No place had a library that loads and is NCCL.
    #[error(fmt = not_found)]
    #[non_exhaustive]
    NotFound {
        /// Everything that was tried, in order.
        attempts: Vec<Attempt>,
    },

    /// The process has a copy of NCCL that is not the wanted one. Two copies in one process do not
    /// know of each other, so the second is not opened.
    #[error(
        "{} ({origin}) is wanted, but the process has already loaded {}: \
         it cannot have two copies of NCCL; use the loaded one or keep it from being loaded",
        wanted.display(), list(loaded)
    )]
    AnotherIsLoaded {
        /// The file that was asked for.
        wanted: PathBuf,
        /// Where the file was named.
        origin: Origin,
        /// The copies in the process.
        loaded: Vec<PathBuf>,
    },

    /// The process has several copies of NCCL already, and none was chosen.
    #[error(
        "the process has already loaded several copies of NCCL: {}; \
         name the one to use in NCCL_LIBRARY",
        list(loaded)
    )]
    #[non_exhaustive]
    SeveralAreLoaded {
        /// Their files.
        loaded: Vec<PathBuf>,
    },

    /// The process has a copy of NCCL for which the dynamic linker returns no handle, and a second copy
    /// is not opened.
    #[error(
        "the process has already loaded {}, but in a namespace of the dynamic linker \
         that is not ours, and it cannot have two copies of NCCL", loaded.display()
    )]
    #[non_exhaustive]
    OutOfReach {
        /// Its file.
        loaded: PathBuf,
    },
}

/// One line; in the alternate form each attempt has a line of its own.
fn not_found(attempts: &[Attempt], f: &mut fmt::Formatter<'_>) -> fmt::Result {
    write_attempts("NCCL", attempts, hint(attempts), f)
}

/// Writes where a library was looked for and why it was not found there, and what to do about it.
pub(crate) fn write_attempts(
    library: &str,
    attempts: &[Attempt],
    hint: &str,
    f: &mut fmt::Formatter<'_>,
) -> fmt::Result {
    let (before, last) = if f.alternate() {
        ("\n  ", "\n  ")
    } else {
        (" ", "; ")
    };
    write!(f, "no {library} library could be loaded:")?;
    for (attempt, number) in attempts.iter().zip(1..) {
        let before = if number > 1 { last } else { before };
        write!(f, "{before}{number}. {attempt}")?;
    }
    write!(f, "{last}{hint}")
}

/// Returns what to do about it.
fn hint(attempts: &[Attempt]) -> &'static str {
    match attempts {
        [
            Attempt {
                origin: Origin::Argument,
                ..
            },
        ] => "nothing else was tried: this file is wanted",
        [
            Attempt {
                origin: Origin::Environment,
                ..
            },
        ] => "nothing else was tried: unset NCCL_LIBRARY to search the usual places",
        _ => {
            "install NCCL 2, put its directory into LD_LIBRARY_PATH, \
             or name the file in NCCL_LIBRARY"
        }
    }
}

fn list(files: &[PathBuf]) -> String {
    let files: Vec<_> = files
        .iter()
        .map(|file| file.display().to_string())
        .collect();
    files.join(" and ")
}
