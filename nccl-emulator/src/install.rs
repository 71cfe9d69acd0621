//! Taking the place of libcuda and libnccl in this process.
//!
//! For each name that programs load the libraries by, a shared object without code ([`cuda_emulator::stand_in`])
//! is made and loaded. From then on the dynamic linker finds that name loaded, and `dlsym` gives
//! the emulator's functions. One emulator, any number of names; no file, no environment variable,
//! nothing to build.

use std::ffi::CStr;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use cuda_emulator::hooks::{self, Hooks};
use cuda_emulator::settings::{self, Settings};
use cuda_emulator::stand_in::{self, StandInError, Symbol, loaded_from};
use cuda_emulator::sync::Mutex;

use crate::options::{self, Wishes};
use crate::{expert_parallel, faults};

/// The names that are taken over.
const CUDA: [&CStr; 2] = [c"libcuda.so", c"libcuda.so.1"];
const NCCL: [&CStr; 2] = [c"libnccl.so", c"libnccl.so.2"];

/// Why the emulator could not take over.
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
        /// The name it has.
        soname: String,
        /// The file it came from.
        path: PathBuf,
    },
    /// An option of the builder, or an environment variable, has no sensible value.
    #[error("{name} is {value:?}, expected {expected}")]
    BadOption {
        /// The environment variable that sets the option.
        name: &'static str,
        /// What it was set to.
        value: String,
        /// What it may be set to.
        expected: String,
    },
    /// The emulator runs already, as something else.
    #[error(
        "the emulator runs with {in_force}, and cannot become {asked}: install it once, first of all"
    )]
    OptionsInForce {
        /// What the builder asked for.
        asked: String,
        /// What is in force.
        in_force: String,
    },
    /// NVIDIA's own library cannot be put on the emulator's driver.
    #[error("NVIDIA's NCCL cannot run on the emulator: {reason}")]
    RealNccl {
        /// Why: what was expected, and found.
        reason: String,
    },
    /// The dynamic linker does not take the object that stands for a library.
    #[error("the dynamic linker does not load the stand-in for {soname}: {reason}")]
    Refused {
        /// The library's name.
        soname: String,
        /// What the dynamic linker says.
        reason: String,
    },
    /// Neither memory nor a temporary file could be had for the stand-in.
    #[error("no file for the stand-in of {soname}")]
    NoFile {
        /// The library's name.
        soname: String,
        /// Why.
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

/// What [`install()`](crate::install()) took over.
///
/// ```
/// let taken = nccl_emulator::install()?;
/// assert!(taken.sonames().contains(&"libcuda.so.1"));
/// println!("{taken}");
/// # Ok::<(), nccl_emulator::InstallError>(())
/// ```
#[derive(Debug, Clone)]
pub struct Installation {
    sonames: Vec<&'static str>,
    symbols: usize,
    options: String,
    real_nccl: Option<RealLibrary>,
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
    /// Its release: 2.32.3.
    pub version: String,
    /// Its file.
    pub path: PathBuf,
    /// Its build, in hexadecimal digits.
    pub build_id: String,
}

impl Installation {
    /// The library names that lead to the emulator from now on.
    ///
    /// ```
    /// assert!(nccl_emulator::install()?.sonames().contains(&"libnccl.so.2"));
    /// # Ok::<(), nccl_emulator::InstallError>(())
    /// ```
    #[must_use]
    pub fn sonames(&self) -> &[&'static str] {
        &self.sonames
    }

    /// How many functions they have together.
    ///
    /// ```
    /// assert!(nccl_emulator::install()?.symbols() > 100);
    /// # Ok::<(), nccl_emulator::InstallError>(())
    /// ```
    #[must_use]
    pub fn symbols(&self) -> usize {
        self.symbols
    }

    /// NVIDIA's own library, if it runs here in the place of the emulator's NCCL (`NCCL_EMULATOR_NCCL`): its kernels are
    /// interpreted by the CPU, so that times mean nothing.
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

/// Installed already.
static INSTALLED: Mutex<Option<Installation>> = Mutex::new(None);

pub(crate) fn install(wishes: &Wishes) -> Result<Installation, InstallError> {
    let mut installed = INSTALLED.lock();
    let options = options::fix(wishes)?;
    if let Some(installation) = &*installed {
        return Ok(installation.clone());
    }
    for soname in CUDA.iter().chain(&NCCL) {
        refuse_loaded(soname)?;
    }
    faults::check_for(options).map_err(|reason| match options.nccl.is_some() {
        true => InstallError::RealNccl { reason },
        false => InstallError::BadOption {
            name: options::VERSION,
            value: options.version.to_string(),
            expected: format!("a release in which all faults can strike: {reason}"),
        },
    })?;
    settings::fix(Settings {
        devices: options.devices,
        memory: options.memory,
    });
    hooks::set(Hooks {
        call: faults::check_driver_call,
        lateness: faults::lateness,
    });
    expert_parallel::provide();
    let mut installation = Installation {
        sonames: Vec::new(),
        symbols: 0,
        options: options.to_string(),
        real_nccl: None,
    };
    installation.take(&CUDA, &cuda_emulator::driver::symbols())?;
    match &options.nccl {
        None => installation.take(&NCCL, &crate::nccl::symbols())?,
        Some(path) => installation.real_nccl = Some(carry(path, &mut installation)?),
    }
    *installed = Some(installation.clone());
    Ok(installation)
}

impl Installation {
    /// Makes each of the names lead to these functions.
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
}

/// Puts NVIDIA's library on the driver.
#[cfg(feature = "real-nccl")]
fn carry(path: &Path, installation: &mut Installation) -> Result<RealLibrary, InstallError> {
    crate::real::install(path, installation)
}

/// Refuses to, without the feature.
#[cfg(not(feature = "real-nccl"))]
fn carry(path: &Path, _: &mut Installation) -> Result<RealLibrary, InstallError> {
    let reason = format!(
        "{} asks for {}, but nccl-emulator was built without its feature `real-nccl`",
        options::NCCL,
        path.display()
    );
    Err(InstallError::RealNccl { reason })
}

/// Whether [`install()`](crate::install()) has been done.
pub(crate) fn installation() -> Option<Installation> {
    INSTALLED.lock().clone()
}

fn refuse_loaded(soname: &CStr) -> Result<(), InstallError> {
    match loaded_from(soname) {
        Some(path) => Err(InstallError::AlreadyLoaded {
            soname: soname.to_string_lossy().into_owned(),
            path,
        }),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// In the environment of the child that plays a program which is linked to CUDA.
    const LINKED: &str = "NCCL_EMULATOR_TEST_LINKED";

    #[test]
    fn a_program_that_has_the_real_library_is_told_so() {
        let output = std::process::Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "install::tests::the_linked_program_of_another_test",
                "--nocapture",
            ])
            .env(LINKED, "1")
            .output()
            .unwrap();
        assert!(output.status.success(), "{output:?}");
    }

    /// Not a test but the other process of the one above.
    #[test]
    fn the_linked_program_of_another_test() {
        if std::env::var_os(LINKED).is_none() {
            return;
        }
        let symbol = (c"cuInit", std::ptr::without_provenance(1));
        let object = stand_in::shared_object(c"libcuda.so.1", &[symbol]);
        let directory = std::env::temp_dir().join(format!("linked-{}", std::process::id()));
        std::fs::create_dir(&directory).unwrap();
        let path = directory.join("libcuda.so.535.54.03");
        std::fs::write(&path, object).unwrap();
        let name = std::ffi::CString::new(path.to_str().unwrap()).unwrap();
        // SAFETY: an object without code.
        unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW) };
        std::fs::remove_dir_all(&directory).unwrap();
        let error = install(&Wishes::default()).unwrap_err();
        let InstallError::AlreadyLoaded { path: found, .. } = &error else {
            panic!("{error}")
        };
        assert_eq!(*found, path);
        assert!(installation().is_none());
    }
}
