//! [`LoadError`]: why a libnccl cannot be used.

use std::io;
use std::path::PathBuf;

use super::types::LayoutError;

/// Why NVIDIA's libnccl cannot run on the emulator. Each error states the finding, the expectation, and a remedy if there is
/// one.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum LoadError {
    /// The file cannot be opened or read.
    #[error(
        "{}: cannot be read ({source}); expected NVIDIA's libnccl.so.2, for instance from the Python wheel nvidia-nccl-cu13",
        path.display()
    )]
    Unreadable {
        /// The library.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The file is not an ELF file.
    #[error("{}: not an ELF file; expected NVIDIA's libnccl.so.2", path.display())]
    NotElf {
        /// The library.
        path: PathBuf,
    },
    /// The file is for another CPU or word size.
    #[error("{}: made for {found}; expected 64-bit little-endian x86-64 (ELF machine 62)", path.display())]
    OtherCpu {
        /// The library.
        path: PathBuf,
        /// The CPU and word size in the ELF header.
        found: String,
    },
    /// This program is not an x86-64 program.
    #[error(
        "NVIDIA's libnccl runs on the emulator on x86-64 only; this program is built for {found}"
    )]
    ThisCpu {
        /// The program's architecture.
        found: &'static str,
    },
    /// A part of the ELF file cannot be read.
    #[error("{}: {part} cannot be read ({source}); the file is damaged or incomplete: install it again", path.display())]
    Damaged {
        /// The library.
        path: PathBuf,
        /// The part.
        part: &'static str,
        /// The error in this part.
        source: object::Error,
    },
    /// The file is a library, but not libnccl.
    #[error("{}: exports no ncclGetVersion; expected NVIDIA's libnccl.so.2", path.display())]
    NotNccl {
        /// The library.
        path: PathBuf,
    },
    /// The file has no build ID.
    #[error("{}: has no build ID; expected a library as NVIDIA publishes it, with .note.gnu.build-id", path.display())]
    NoBuildId {
        /// The library.
        path: PathBuf,
    },
    /// The file has no symbol table.
    #[error(
        "{}: has no symbol table (stripped, as Linux distributions do); expected the library of NVIDIA's Python wheels, \
         which has one",
        path.display()
    )]
    Stripped {
        /// The library.
        path: PathBuf,
    },
    /// The file has no debug information, or none that this program can read.
    #[error("{}: {section} {found}; expected the library of NVIDIA's Python wheels, with debug information", path.display())]
    NoDebugInformation {
        /// The library.
        path: PathBuf,
        /// The section.
        section: &'static str,
        /// The problem with the section.
        found: &'static str,
    },
    /// The debug information cannot be read.
    #[error("{}: debug information cannot be read ({source}); expected DWARF 4 or 5 as NVIDIA's wheels have it", path.display())]
    Dwarf {
        /// The library.
        path: PathBuf,
        /// The problem.
        source: super::dwarf::DwarfError,
    },
    /// NVIDIA's CUDA runtime is not inside the library, or is not arranged as in the known releases.
    #[error("{}: {found}; expected the static CUDA runtime in one piece, as in NVIDIA's wheels", path.display())]
    Runtime {
        /// The library.
        path: PathBuf,
        /// The finding.
        found: String,
    },
    /// The kernels that the library registers differ from those with known host stubs.
    #[error("{}: registers {registered} kernels, but {known} host stubs have known names; expected as many", path.display())]
    Kernels {
        /// The library.
        path: PathBuf,
        /// The number of calls of `__cudaRegisterFunction`.
        registered: usize,
        /// The number of known host stubs.
        known: usize,
    },
    /// The library does not state its version of CUDA.
    #[error("{}: says nowhere which CUDA it was compiled with; expected \"compiled with CUDA 12.9\" or the like", path.display())]
    NoCudaVersion {
        /// The library.
        path: PathBuf,
    },
    /// NCCL's code refers to the runtime in a way that cannot be redirected.
    #[error("{}: {function} refers to {target} at {address:#x} by {by}; expected call, jump or lea with a 32-bit displacement", path.display())]
    Reference {
        /// The library.
        path: PathBuf,
        /// The function of NCCL.
        function: String,
        /// The function of the runtime.
        target: String,
        /// The address of the reference in the library.
        address: u64,
        /// The kind of reference.
        by: &'static str,
    },
    /// NCCL calls functions of the runtime that the emulator does not have.
    #[error("{}: NCCL calls {}, which the emulator does not provide; use one of the releases {releases}", path.display(), names.join(", "))]
    NotProvided {
        /// The library.
        path: PathBuf,
        /// The functions.
        names: Vec<String>,
        /// The releases that are known to work.
        releases: String,
    },
    /// A release that has not been tested.
    #[error("{}: is NCCL {found}; expected one of {releases}, whose kernels and layouts the emulator knows", path.display())]
    UnknownRelease {
        /// The library.
        path: PathBuf,
        /// Its version.
        found: String,
        /// The releases that are known to work.
        releases: String,
    },
    /// The dynamic linker cannot load the library.
    #[error("{}: the dynamic linker does not load it ({reason})", path.display())]
    Linker {
        /// The library.
        path: PathBuf,
        /// The dynamic linker's message.
        reason: String,
    },
    /// The library is already in the process, and its functions may be in use.
    #[error("{}: already loaded; the emulator must load it first, before any other part of the program", path.display())]
    AlreadyLoaded {
        /// The library.
        path: PathBuf,
    },
    /// The dynamic linker has loaded another file.
    #[error("{}: changed while it was loaded: build ID {expected} in the file, another in memory; try again", path.display())]
    OtherFile {
        /// The library.
        path: PathBuf,
        /// The build ID in the file.
        expected: String,
    },
    /// The loaded code differs from the file.
    #[error("{}: code at {address:#x} is not as in the file; another tool changes the library in memory", path.display())]
    Changed {
        /// The library.
        path: PathBuf,
        /// The address in the library.
        address: u64,
    },
    /// There is no free memory near the library.
    #[error("{}: no free address range within 2 GiB of it for {bytes} bytes of trampolines", path.display())]
    NoRoom {
        /// The library.
        path: PathBuf,
        /// The required bytes.
        bytes: usize,
    },
    /// The protection of pages cannot be changed.
    #[error("{}: {what} cannot be made {protection} ({source}); a security policy (SELinux execmod, seccomp) may forbid it", path.display())]
    Protect {
        /// The library.
        path: PathBuf,
        /// The pages.
        what: &'static str,
        /// The requested protection.
        protection: &'static str,
        /// The system's error.
        source: io::Error,
    },
    /// A type of NCCL has an unexpected layout.
    #[error(transparent)]
    Layout(#[from] LayoutError),
}
