//! NVIDIA's example of a profiler plugin, compiled for the tests.
//!
//! The example is in NCCL's sources, which the wheels do not include. Debian has them: the chore gets the mirror from apt, and
//! verifies the archive. The variable `NCCL_SOURCES` names a directory with NCCL's sources instead. The compiled plugin stays
//! in `.cache`.

use std::env;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::wheels::{Cuda, Unavailable};
use crate::workspace::{self, run as run_command};
use crate::{Result, workspace::output};

/// A directory with NCCL's sources.
const SOURCES: &str = "NCCL_SOURCES";
/// Debian's archive of NCCL's sources: its path in the pool, and its SHA-256.
const RELEASE: &str = "2.29.7";
const ARCHIVE: &str = "pool/contrib/n/nvidia-nccl/nvidia-nccl_2.29.7-1.orig.tar.gz";
const SHA256: &str = "e67239212c395bfdb398a7519491840d06fdf6b599c299f97c7ed0109777bba1";
/// apt's own downloads.
const APT_HELPER: &str = "/usr/lib/apt/apt-helper";
/// The plugin in the sources.
const PLUGIN: &str = "plugins/profiler/example";
/// Declares the functions of the CUDA runtime that the plugin calls: CUDA's own headers are not needed.
const CUDA_RUNTIME: &str = include_str!("profiler/cuda_runtime.h");

/// Returns the plugin for a library of this CUDA version, compiled if it is missing.
///
/// # Errors
/// [`Unavailable`] if there is neither source nor compiler; the compiler's error.
pub(super) fn example(cuda: Cuda) -> Result<PathBuf> {
    let cache = workspace::root().join(".cache");
    let given = env::var_os(SOURCES).map(PathBuf::from);
    let name = format!("libnccl-profiler-example-cu{cuda}.so");
    let kept = cache
        .join(format!("nccl-{RELEASE}-profiler-example"))
        .join(name);
    if given.is_none() && kept.is_file() {
        return Ok(kept);
    }
    fs::create_dir_all(&cache)?;
    let work = tempfile::tempdir_in(&cache)?;
    let sources = match &given {
        Some(sources) => sources.join(PLUGIN),
        None => download(work.path())?,
    };
    if !sources.join("plugin.cc").is_file() {
        let text = format!("{} has no plugin.cc", sources.display());
        // What the caller has named is to be there.
        return Err(match given {
            Some(_) => text.into(),
            None => Unavailable(text).into(),
        });
    }
    let compiled = compile(&sources, work.path(), cuda)?;
    let directory = kept.parent().unwrap_or(&cache);
    fs::create_dir_all(directory)?;
    fs::rename(&compiled, &kept)?;
    Ok(kept)
}

/// The plugin's sources from Debian's archive.
fn download(directory: &Path) -> Result<PathBuf> {
    let unavailable = |why: &str| {
        Unavailable(format!(
            "the sources of NCCL {RELEASE} cannot be downloaded ({why}): it takes Debian's or Ubuntu's apt and a mirror \
             that has {ARCHIVE}, or {SOURCES}, a directory with NCCL's sources"
        ))
    };
    let archive = directory.join("nccl.tar.gz");
    let mirrors = mirrors().map_err(|error| unavailable(&error.to_string()))?;
    let mut said = "apt has no mirror".to_owned();
    let mut found = false;
    for mirror in &mirrors {
        eprintln!("downloading the sources of NCCL {RELEASE} by apt");
        let output = Command::new(APT_HELPER)
            .args(["-o", "Acquire::Retries=1", "download-file"])
            .arg(format!("{}/{ARCHIVE}", mirror.trim_end_matches('/')))
            .arg(&archive)
            .arg(format!("SHA256:{SHA256}"))
            .stdin(Stdio::null())
            .output()
            .map_err(|error| unavailable(&format!("cannot run {APT_HELPER}: {error}")))?;
        found = output.status.success();
        if found {
            break;
        }
        let errors = String::from_utf8_lossy(&output.stderr);
        let last = errors.lines().rfind(|line| !line.trim().is_empty());
        said = last.unwrap_or("apt does not say why").trim().to_owned();
    }
    if !found {
        return Err(unavailable(&said).into());
    }
    run_command(
        Command::new("tar")
            .arg("--extract")
            .arg("--file")
            .arg(&archive)
            .arg("--directory")
            .arg(directory)
            .args(["--strip-components=1", "--wildcards"])
            .arg(format!("*/{PLUGIN}")),
    )?;
    Ok(directory.join(PLUGIN))
}

/// The mirrors that this machine's apt uses.
fn mirrors() -> Result<Vec<String>> {
    let said = output(
        Command::new("apt-get")
            .args(["indextargets", "--no-release-info", "--format"])
            .args(["$(REPO_URI)", "Created-By: Packages"]),
    )?;
    let mut mirrors: Vec<String> = said.lines().map(str::to_owned).collect();
    mirrors.sort();
    mirrors.dedup();
    // Debian's own archive is tried before apt's other repositories.
    mirrors.sort_by_key(|mirror| !mirror.trim_end_matches('/').ends_with("/debian"));
    Ok(mirrors)
}

/// A compiler that is there and fails is an error of its own.
fn need_compiler(program: &OsStr) -> Result {
    let mut version = Command::new(program);
    version
        .arg("--version")
        .stdin(Stdio::null())
        .stdout(Stdio::null());
    match version.status() {
        Err(error) => {
            let text = format!("there is no C++ compiler ({}): {error}", program.display());
            Err(Unavailable(text).into())
        }
        Ok(_) => Ok(()),
    }
}

/// Compiles the plugin, as its own Makefile does, against the few functions of CUDA that it uses.
fn compile(sources: &Path, work: &Path, cuda: Cuda) -> Result<PathBuf> {
    fs::write(work.join("cuda_runtime.h"), CUDA_RUNTIME)?;
    // The dynamic linker needs only the runtime's name; its contents are resolved when it runs.
    let runtime = work.join("libcudart.so");
    let mut stub = Command::new("c++");
    stub.args(["-shared", "-nostdlib", "-x", "c++", "/dev/null", "-o"])
        .arg(&runtime)
        .arg(format!("-Wl,-soname,libcudart.so.{cuda}"));
    need_compiler(stub.get_program())?;
    run_command(&mut stub)?;
    let plugin = work.join("plugin.so");
    let mut command = Command::new("c++");
    command
        .args(["-shared", "-fPIC", "-O1", "-g", "-I"])
        .arg(sources.join("nccl"))
        .arg("-I")
        .arg(work)
        .arg("-o")
        .arg(&plugin);
    for file in fs::read_dir(sources)? {
        let path = file?.path();
        if path.extension() == Some(OsStr::new("cc")) {
            command.arg(path);
        }
    }
    run_command(command.arg("-Wl,--no-as-needed").arg(&runtime))?;
    Ok(plugin)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_compiler_that_is_absent_is_unavailable_and_one_that_fails_is_not() {
        let error = need_compiler(OsStr::new("/absent/c++")).unwrap_err();
        assert!(error.is::<Unavailable>(), "{error}");
        need_compiler(OsStr::new("false")).unwrap();
    }
}
