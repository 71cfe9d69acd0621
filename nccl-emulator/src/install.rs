//! The installation: the emulator replaces libcuda, libnccl and libnvidia-ml in this process.
//!
//! For each name by which programs load the libraries, the installation makes and loads a shared object without
//! code ([`cuda_emulator::stand_in`]). From then on the dynamic linker treats that name as loaded, and `dlsym`
//! returns the emulator's functions. One emulator serves any number of names, without a file, an environment
//! variable or a build step.

use std::ffi::CStr;
use std::path::Path;

use cuda_emulator::hooks::{self, Hooks};
use cuda_emulator::settings::{self, Settings};
use cuda_emulator::stand_in::loaded_from;
use cuda_emulator::sync::Mutex;

use crate::installation::{InstallError, Installation, RealLibrary};
use crate::options::{self, Wishes};
use crate::{expert_parallel, faults, lsa};

/// The replaced names.
const CUDA: [&CStr; 2] = [c"libcuda.so", c"libcuda.so.1"];
const NCCL: [&CStr; 2] = [c"libnccl.so", c"libnccl.so.2"];
/// NVML, which NVIDIA's NCCL queries about devices, and programs about their health.
const NVML: [&CStr; 2] = [c"libnvidia-ml.so.1", c"libnvidia-ml.so"];

/// The present installation.
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
    if let Some(states) = std::env::var_os(faults::NVML_VARIABLE) {
        let states = states.to_string_lossy();
        faults::nvml(&states).map_err(|error| InstallError::BadOption {
            name: faults::NVML_VARIABLE,
            value: states.to_string(),
            expected: format!("states of devices: {error}"),
        })?;
    }
    settings::fix(Settings {
        devices: options.devices,
        memory: options.memory,
    });
    hooks::set(Hooks {
        call: faults::check_driver_call,
        lateness: faults::lateness,
    });
    expert_parallel::provide();
    lsa::provide();
    let mut installation = Installation {
        sonames: Vec::new(),
        symbols: 0,
        options: options.to_string(),
        real_nccl: None,
    };
    installation.take(&CUDA, &cuda_emulator::driver::symbols())?;
    // A library that the program has already loaded stays: it knows nothing of the emulator's devices, which does no other
    // harm.
    if NVML.iter().all(|soname| loaded_from(soname).is_none()) {
        installation.take(&NVML, &cuda_emulator::nvml::symbols())?;
    }
    match &options.nccl {
        None => installation.take(&NCCL, &crate::nccl::symbols())?,
        Some(path) => installation.real_nccl = Some(carry(path, &mut installation)?),
    }
    *installed = Some(installation.clone());
    Ok(installation)
}

/// Loads NVIDIA's library on the emulator's driver.
#[cfg(feature = "real-nccl")]
fn carry(path: &Path, installation: &mut Installation) -> Result<RealLibrary, InstallError> {
    crate::real::install(path, installation)
}

/// Refuses NVIDIA's library without the feature.
#[cfg(not(feature = "real-nccl"))]
fn carry(path: &Path, _: &mut Installation) -> Result<RealLibrary, InstallError> {
    let reason = format!(
        "{} asks for {}, but nccl-emulator was built without its feature `real-nccl`",
        options::NCCL,
        path.display()
    );
    Err(InstallError::RealNccl { reason })
}

/// Returns the installation, after [`install()`](crate::install()).
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
    use cuda_emulator::stand_in;

    /// The variable for the child process that acts as a program linked to CUDA.
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

    /// Not a test: the other process of the test above.
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
