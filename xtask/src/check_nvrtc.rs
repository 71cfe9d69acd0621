//! `check-nvrtc`: checks that NVIDIA's compiler NVRTC accepts the kernel of the crate `lsa-protocol` without a warning, and
//! that NVIDIA's assembler accepts the compiler's output, for old and for new GPUs.
//!
//! Programs compile the kernel in the same way when they use it. `libnvrtc` comes from NVIDIA's packages for Python, at the
//! versions below, into `.cache/nvrtc-VERSION`; it needs neither GPU nor driver. A failed download fails the chore.

use std::ffi::{CStr, CString, c_char, c_int};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::ptr;

use libloading::Library;
use lsa_protocol::{CUDA_SOURCE, KERNEL, STAND_IN_PTX};

use crate::arguments::Arguments;
use crate::check_ptx::{self, Assembler};
use crate::{Result, wheels, workspace};

/// The result of a step, or the message of the compiler or of this check.
type Checked<T = ()> = std::result::Result<T, String>;

/// The name of the source in NVRTC's messages.
const NAME: &CStr = c"all_to_all.cu";

/// Compute capabilities.
const TARGETS: [u32; 3] = [80, 90, 100];

/// Instructions that the protocol depends on.
const NEEDED: [&str; 2] = ["st.release.sys", "ld.acquire.sys"];

/// Forbidden in the output: a function that the driver would not find, and loads through a cache that an acquire does not
/// invalidate.
const FORBIDDEN: [&str; 2] = [".extern .func", "ld.global.nc"];

/// A compiler, and the assembler of the same CUDA.
struct Compiler {
    package: &'static str,
    version: &'static str,
    library: &'static str,
    assembler: Assembler,
}

const COMPILERS: [Compiler; 2] = [
    Compiler {
        package: "nvidia-cuda-nvrtc-cu12",
        version: "12.9.86",
        library: "libnvrtc.so.12",
        assembler: check_ptx::TWELVE,
    },
    Compiler {
        package: "nvidia-cuda-nvrtc",
        version: "13.5.37",
        library: "libnvrtc.so.13",
        assembler: check_ptx::THIRTEEN,
    },
];

pub(crate) fn run(arguments: &mut Arguments) -> Result {
    arguments.finish()?;
    for compiler in COMPILERS {
        let version = compiler.version;
        let nvrtc = Nvrtc::load(&fetch(&compiler)?.join(compiler.library))?;
        for target in TARGETS {
            let failed =
                |error: String| format!("{KERNEL} with NVRTC {version} for {target}: {error}");
            let ptx = nvrtc.compile(CUDA_SOURCE, target).map_err(failed)?;
            check(&ptx).map_err(failed)?;
            println!("NVRTC {version:<8} compute_{target:<4} compiled");
            let file = tempfile::NamedTempFile::with_suffix(".ptx")?;
            fs::write(file.path(), &ptx)?;
            compiler
                .assembler
                .assemble(file.path(), &format!("sm_{target}"))
                .map_err(|error| failed(error.to_string()))?;
        }
        // A program loads the stand-in first: a driver that accepts it is the emulator's.
        let file = tempfile::NamedTempFile::with_suffix(".ptx")?;
        fs::write(file.path(), STAND_IN_PTX)?;
        if compiler.assembler.assemble(file.path(), "sm_90").is_ok() {
            return Err("the stand-in for the emulator assembles for a GPU".into());
        }
    }
    Ok(())
}

/// Checks that the compiler's output meets the expectations of a program.
fn check(ptx: &str) -> Checked {
    let parameters =
        parameters(ptx).ok_or_else(|| format!("there is no entry {KERNEL} in the PTX:\n{ptx}"))?;
    if let Some(missing) = NEEDED.iter().find(|needed| !ptx.contains(**needed)) {
        return Err(format!("there is no {missing} in the PTX:\n{ptx}"));
    }
    if let Some(present) = FORBIDDEN.iter().find(|forbidden| ptx.contains(**forbidden)) {
        return Err(format!("there is {present} in the PTX:\n{ptx}"));
    }
    let expected = self::parameters(STAND_IN_PTX);
    if Some(&parameters) != expected.as_ref() {
        return Err(format!(
            "the parameters are {parameters:?}, those of the stand-in {expected:?}"
        ));
    }
    Ok(())
}

/// Returns the types of the kernel's parameters in a PTX text.
fn parameters(ptx: &str) -> Option<Vec<&str>> {
    let (_, entry) = ptx.split_once(&format!(".visible .entry {KERNEL}("))?;
    let (list, _) = entry.split_once(')')?;
    let of = |parameter| str::split_whitespace(parameter).nth(1);
    list.split(',').map(of).collect()
}

/// Returns the directory of the compiler, and downloads the compiler if it is missing.
fn fetch(compiler: &Compiler) -> Result<PathBuf> {
    let Compiler {
        package,
        version,
        library,
        ..
    } = compiler;
    let cache = workspace::root().join(".cache");
    let directory = cache.join(format!("nvrtc-{version}"));
    if directory.join(library).is_file() {
        return Ok(directory);
    }
    eprintln!("downloading NVRTC {version} to {}", directory.display());
    let in_cache = |error| format!("cannot write to {}: {error}", cache.display());
    fs::create_dir_all(&cache).map_err(in_cache)?;
    // A directory with this name is always complete.
    let download = tempfile::tempdir_in(&cache).map_err(in_cache)?;
    wheels::download(package, version, &[], download.path())?;
    let wheel = wheels::only_file(download.path())?;
    let unpacked = download.path().join("unpacked");
    workspace::run(
        Command::new("python3")
            .args(["-c", UNPACK])
            .args([&wheel, &unpacked]),
    )?;
    fs::rename(&unpacked, &directory).map_err(in_cache)?;
    Ok(directory)
}

/// Extracts the libraries from a wheel: the compiler and its built-in functions.
const UNPACK: &str = r#"
import os, shutil, sys, zipfile
wheel, target = sys.argv[1:]
os.makedirs(target)
with zipfile.ZipFile(wheel) as archive:
    for member in archive.namelist():
        name = os.path.basename(member)
        if name.startswith("libnvrtc") and ".alt." not in name:
            with archive.open(member) as source, open(os.path.join(target, name), "wb") as file:
                shutil.copyfileobj(source, file)
"#;

/// `nvrtcProgram`.
#[repr(C)]
struct Opaque {
    _private: [u8; 0],
}

type Program = *mut Opaque;

/// `nvrtcResult`; 0 is success.
type Code = c_int;

type Create = unsafe extern "C" fn(
    *mut Program,
    *const c_char,
    *const c_char,
    c_int,
    *const *const c_char,
    *const *const c_char,
) -> Code;
type Compile = unsafe extern "C" fn(Program, c_int, *const *const c_char) -> Code;
type Size = unsafe extern "C" fn(Program, *mut usize) -> Code;
type Text = unsafe extern "C" fn(Program, *mut c_char) -> Code;
type Destroy = unsafe extern "C" fn(*mut Program) -> Code;

/// The functions of a loaded compiler.
struct Nvrtc {
    create: Create,
    compile: Compile,
    destroy: Destroy,
    log: (Size, Text),
    ptx: (Size, Text),
}

impl Nvrtc {
    /// Loads a compiler for the life of the process.
    fn load(path: &Path) -> Result<Self> {
        // SAFETY: NVIDIA's library, whose initialisers have no conditions.
        let library = unsafe { Library::new(path) }?;
        // Its threads may outlive a call.
        let library: &'static Library = Box::leak(Box::new(library));
        // SAFETY: each function is of its type in nvrtc.h, and stays loaded.
        unsafe {
            Ok(Self {
                create: *library.get(b"nvrtcCreateProgram\0")?,
                compile: *library.get(b"nvrtcCompileProgram\0")?,
                destroy: *library.get(b"nvrtcDestroyProgram\0")?,
                log: (
                    *library.get(b"nvrtcGetProgramLogSize\0")?,
                    *library.get(b"nvrtcGetProgramLog\0")?,
                ),
                ptx: (
                    *library.get(b"nvrtcGetPTXSize\0")?,
                    *library.get(b"nvrtcGetPTX\0")?,
                ),
            })
        }
    }

    /// Compiles a source to PTX for a compute capability; messages of the compiler are errors.
    fn compile(&self, source: &str, target: u32) -> Checked<String> {
        let source = CString::new(source).map_err(|error| error.to_string())?;
        let options = [
            CString::new(format!("--gpu-architecture=compute_{target}")),
            CString::new("--std=c++17"),
        ]
        .map(|option| option.expect("there is no zero in it"));
        let options = options.each_ref().map(|option| option.as_ptr());
        let mut program = ptr::null_mut();
        // SAFETY: the strings outlive the call, and there are no headers.
        let code = unsafe {
            (self.create)(
                &raw mut program,
                source.as_ptr(),
                NAME.as_ptr(),
                0,
                ptr::null(),
                ptr::null(),
            )
        };
        if code != 0 {
            return Err(format!("nvrtcCreateProgram returned {code}"));
        }
        // SAFETY: the program is new, and there are as many options.
        let code = unsafe { (self.compile)(program, options.len() as c_int, options.as_ptr()) };
        let log = text(program, self.log);
        let ptx = match (code, log.as_deref()) {
            (0, Ok("")) => text(program, self.ptx),
            (code, Ok(log)) => Err(format!("NVRTC returned {code} and says:\n{log}")),
            (_, Err(_)) => log,
        };
        // SAFETY: the program is used no more.
        unsafe { (self.destroy)(&raw mut program) };
        ptx
    }
}

/// Returns a text that the compiler has created for a program, without surrounding space.
fn text(program: Program, (size, text): (Size, Text)) -> Checked<String> {
    let mut bytes = 0;
    // SAFETY: the program was created and not destroyed.
    let code = unsafe { size(program, &raw mut bytes) };
    if code != 0 {
        return Err(format!("NVRTC does not give the size of a text ({code})"));
    }
    let mut buffer = vec![0u8; bytes + 1];
    // SAFETY: as above, and the buffer has the size that the compiler stated.
    let code = unsafe { text(program, buffer.as_mut_ptr().cast()) };
    if code != 0 {
        return Err(format!("NVRTC does not give a text ({code})"));
    }
    let text = CStr::from_bytes_until_nul(&buffer).map_err(|error| error.to_string())?;
    Ok(text.to_string_lossy().trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_read_as_a_compiler_writes_them() {
        let ptx = format!(
            ".visible .entry {KERNEL}(\n\t.param .u64 .ptr .align 1 {KERNEL}_param_0,\n\t.param .u32 {KERNEL}_param_1\n)\n{{"
        );
        assert_eq!(parameters(&ptx), Some(vec![".u64", ".u32"]));
        assert_eq!(parameters(".visible .entry other()"), None);
        assert_eq!(parameters(STAND_IN_PTX).map(|list| list.len()), Some(11));
    }

    #[test]
    fn a_stand_in_is_no_output_of_a_compiler() {
        let refused = check(STAND_IN_PTX).unwrap_err();
        assert!(
            refused.starts_with("there is no st.release.sys"),
            "{refused}"
        );
    }
}
