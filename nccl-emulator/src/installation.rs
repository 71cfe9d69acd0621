//! The result of an installation.

use std::ffi::CStr;
use std::fmt;
use std::io;
use std::path::PathBuf;

use cuda_emulator::stand_in::{self, StandInError, Symbol};

/// The error of an installation.
///
/// ```
/// use nccl_emulator::{Emulator, InstallError};
///
/// Emulator::new().devices(2).install()?;
/// match Emulator::new().devices(3).install() {
///     Err(error @ InstallError::OptionsInForce { .. }) => println!("{error}"),
///     other => panic!("{other:?}"),
/// }
/// # Ok::<(), InstallError>(())
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InstallError {
    /// The real library is in the process already: linked into the program, or loaded before.
    #[error(
        "{soname} is already loaded from {path}: the emulator must be installed before anything loads CUDA or NCCL, and \
         cannot serve a program that is linked to them"
    )]
    AlreadyLoaded {
        /// The library's name.
        soname: String,
        /// The library's file.
        path: PathBuf,
    },
    /// An option of the builder, or an environment variable, has an invalid value.
    #[error("{name} is {value:?}, expected {expected}")]
    BadOption {
        /// The environment variable that sets the option.
        name: &'static str,
        /// The invalid value.
        value: String,
        /// The valid values.
        expected: String,
    },
    /// The emulator already runs with other options.
    #[error(
        "the emulator runs with {in_force}, and cannot become {asked}: install it once, first of all"
    )]
    OptionsInForce {
        /// The requested options.
        asked: String,
        /// The options in force.
        in_force: String,
    },
    /// NVIDIA's own library cannot run on the emulator's driver.
    #[error("NVIDIA's NCCL cannot run on the emulator: {reason}")]
    RealNccl {
        /// The reason: the expectation and the finding.
        reason: String,
    },
    /// The dynamic linker refused the stand-in for a library.
    #[error("the dynamic linker does not load the stand-in for {soname}: {reason}")]
    Refused {
        /// The library's name.
        soname: String,
        /// The dynamic linker's message.
        reason: String,
    },
    /// Neither a memory file nor a temporary file could be made for the stand-in.
    #[error("no file for the stand-in of {soname}")]
    NoFile {
        /// The library's name.
        soname: String,
        /// The cause.
        source: io::Error,
    },
}

impl From<StandInError> for InstallError {
    fn from(error: StandInError) -> Self {
        match error {
            StandInError::Refused { soname, reason } => Self::Refused { soname, reason },
            StandInError::NoFile { soname, source } => Self::NoFile { soname, source },
        }
    }
}

/// The result of [`install()`](crate::install()): the replaced libraries.
///
/// ```
/// let taken = nccl_emulator::install()?;
/// assert!(taken.sonames().contains(&"libcuda.so.1"));
/// println!("{taken}");
/// # Ok::<(), nccl_emulator::InstallError>(())
/// ```
#[derive(Debug, Clone)]
pub struct Installation {
    pub(crate) sonames: Vec<&'static str>,
    pub(crate) symbols: usize,
    pub(crate) options: String,
    pub(crate) real_nccl: Option<RealLibrary>,
}

/// NVIDIA's own library, on the emulator's driver; see [`Installation::real_nccl`].
///
/// ```
/// if let Some(library) = nccl_emulator::install()?.real_nccl() {
///     println!("NCCL {} of {}", library.version, library.path.display());
/// }
/// # Ok::<(), nccl_emulator::InstallError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct RealLibrary {
    /// The release, for example 2.32.3.
    pub version: String,
    /// The file.
    pub path: PathBuf,
    /// The build ID, in hexadecimal digits.
    pub build_id: String,
}

impl Installation {
    /// Makes each of the names resolve to these functions.
    pub(crate) fn take(
        &mut self,
        sonames: &[&'static CStr],
        symbols: &[Symbol],
    ) -> Result<(), InstallError> {
        for soname in sonames {
            stand_in::load(soname, symbols)?;
            self.sonames.push(soname.to_str().unwrap_or_default());
        }
        self.symbols += symbols.len();
        Ok(())
    }

    /// Returns the library names that resolve to the emulator.
    ///
    /// ```
    /// assert!(nccl_emulator::install()?.sonames().contains(&"libnccl.so.2"));
    /// # Ok::<(), nccl_emulator::InstallError>(())
    /// ```
    #[must_use]
    pub fn sonames(&self) -> &[&'static str] {
        &self.sonames
    }

    /// Returns the number of functions of all these libraries.
    ///
    /// ```
    /// assert!(nccl_emulator::install()?.symbols() > 100);
    /// # Ok::<(), nccl_emulator::InstallError>(())
    /// ```
    #[must_use]
    pub fn symbols(&self) -> usize {
        self.symbols
    }

    /// Returns NVIDIA's own library, if it replaces the emulator's NCCL (`NCCL_EMULATOR_NCCL`). The CPU interprets its
    /// kernels, so times mean nothing.
    ///
    /// ```
    /// assert_eq!(nccl_emulator::install()?.real_nccl(), None);
    /// # Ok::<(), nccl_emulator::InstallError>(())
    /// ```
    #[must_use]
    pub fn real_nccl(&self) -> Option<&RealLibrary> {
        self.real_nccl.as_ref()
    }
}

impl fmt::Display for Installation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "the CPU emulator answers for {} ({} functions): {}",
            self.sonames.join(", "),
            self.symbols,
            self.options
        )?;
        match &self.real_nccl {
            Some(library) => write!(
                f,
                "; NVIDIA's NCCL {} runs on it: its kernels are interpreted, and times mean nothing",
                library.version
            ),
            None => Ok(()),
        }
    }
}
