//! `check-ptx`: checks that NVIDIA's assembler accepts the kernels of the crate `nccl`, for old and for new GPUs.
//!
//! The driver translates the kernels in the same way when a program loads them. `ptxas` comes from NVIDIA's packages for
//! Python, at the versions below, into `.cache/ptxas-VERSION`. A failed download fails the chore. `check-nvrtc` uses the same
//! assemblers.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::arguments::Arguments;
use crate::{Result, workspace};

/// The kernels.
const KERNELS: &str = "crates/nccl-moe/src/expert_parallel/kernels.ptx";

/// An assembler, and its targets: the oldest GPUs that it supports, and newer ones. CUDA 13 dropped those before 7.5;
/// code for 7.0 must work on all later GPUs.
pub(crate) struct Assembler {
    package: &'static str,
    pub(crate) version: &'static str,
    targets: &'static [&'static str],
}

/// The assembler of CUDA 12.
pub(crate) const TWELVE: Assembler = Assembler {
    package: "nvidia-cuda-nvcc-cu12",
    version: "12.9.86",
    targets: &["sm_70", "sm_80", "sm_90", "sm_100"],
};

/// The assembler of CUDA 13.
pub(crate) const THIRTEEN: Assembler = Assembler {
    package: "nvidia-cuda-nvcc",
    version: "13.5.37",
    targets: &["sm_75", "sm_80", "sm_90", "sm_100", "sm_120"],
};

pub(crate) fn run(arguments: &mut Arguments) -> Result {
    arguments.finish()?;
    let kernels = workspace::root().join(KERNELS);
    for assembler in [TWELVE, THIRTEEN] {
        for target in assembler.targets {
            assembler
                .assemble(&kernels, target)
                .map_err(|error| format!("{KERNELS}: {error}"))?;
        }
    }
    Ok(())
}

impl Assembler {
    /// Assembles a text for a GPU, and prints that it did.
    ///
    /// # Errors
    /// The assembler cannot be downloaded, refuses the text, or warns about it.
    pub(crate) fn assemble(&self, text: &Path, target: &str) -> Result {
        let ptxas = fetch(self)?;
        let output = tempfile::NamedTempFile::new()?;
        let version = self.version;
        workspace::run(
            Command::new(&ptxas)
                .arg(format!("--gpu-name={target}"))
                .arg("--warning-as-error")
                .arg(text)
                .arg("--output-file")
                .arg(output.path()),
        )
        .map_err(|error| format!("ptxas {version} for {target}: {error}"))?;
        println!("ptxas {version:<8} {target:<7} assembled");
        Ok(())
    }
}

/// Returns the assembler, and downloads it if it is missing.
fn fetch(assembler: &Assembler) -> Result<PathBuf> {
    let Assembler {
        package, version, ..
    } = assembler;
    let cache = workspace::root().join(".cache");
    let directory = cache.join(format!("ptxas-{version}"));
    let ptxas = directory.join("ptxas");
    if ptxas.is_file() {
        return Ok(ptxas);
    }
    eprintln!("downloading ptxas {version} to {}", directory.display());
    fs::create_dir_all(&directory)
        .map_err(|error| format!("cannot write to {}: {error}", directory.display()))?;
    // A directory with this name is always complete.
    let download = tempfile::tempdir_in(&cache)?;
    workspace::run(
        Command::new("python3")
            .args(["-m", "pip", "download", "--no-deps", "--only-binary=:all:"])
            .args([
                "--quiet",
                "--disable-pip-version-check",
                "--no-cache-dir",
                "--dest",
            ])
            .arg(download.path())
            .arg(format!("{package}=={version}")),
    )
    .map_err(|error| format!("{error}\nPython 3 with pip is needed to download {package}"))?;
    workspace::run(
        Command::new("python3")
            .args(["-c", UNPACK])
            .arg(download.path()),
    )?;
    fs::rename(download.path().join("ptxas"), &ptxas)?;
    Ok(ptxas)
}

/// Extracts the assembler from the one wheel in a directory.
const UNPACK: &str = r#"
import glob, os, shutil, sys, zipfile
(directory,) = sys.argv[1:]
(wheel,) = glob.glob(os.path.join(directory, "*.whl"))
path = os.path.join(directory, "ptxas")
with zipfile.ZipFile(wheel) as archive:
    (member,) = [name for name in archive.namelist() if name.endswith("/bin/ptxas")]
    with archive.open(member) as source, open(path, "wb") as file:
        shutil.copyfileobj(source, file)
os.chmod(path, 0o755)
"#;
