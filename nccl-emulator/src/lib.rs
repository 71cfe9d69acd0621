//! NCCL and the CUDA driver on the CPU, behind the same C ABI.
//!
//! [`install()`] makes this process load the emulator in place of `libcuda` and `libnccl`, without a
//! build step, files or environment variables. From then on programs written against CUDA's driver API and NCCL run without a
//! GPU, on up to 256 devices, as threads of one process or as separate processes.
//!
//! ```
//! use cudarc::driver::CudaContext;
//!
//! nccl_emulator::install()?;
//! let gpu = CudaContext::new(0)?;
//! assert_eq!(gpu.name()?, "CPU emulator, not a GPU");
//! let stream = gpu.new_stream()?;
//! let data = stream.clone_htod(&[1.0_f32, 2.0, 3.0])?;
//! assert_eq!(stream.clone_dtoh(&data)?, [1.0, 2.0, 3.0]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! The emulator is meant for tests and for work on a laptop. It is exact where possible, and strict where a GPU fails only
//! sometimes: work runs in stream order and no earlier than necessary; uses of memory after its free, out of bounds or by the
//! host are detected, and [`violations()`] names the allocation. The emulator executes no PTX; Rust functions replace a
//! program's [`kernels`].
//!
//! # Settings
//!
//! Settings come from [`Emulator`], or else from the environment:
//!
//! | variable | meaning | default |
//! |---|---|---|
//! | `NCCL_EMULATOR_DEVICES` | number of devices | 8 |
//! | `NCCL_EMULATOR_MEMORY` | memory of each device, with `K`, `M`, `G` or `T` | 4G |
//! | `NCCL_EMULATOR_STRICT` | 1: immediate errors where NCCL would hang | 0 |
//! | `NCCL_EMULATOR_LATE_WRITES` | 1: peers complete what a rank has given up, as writes over NVLink that are on their way | 0 |
//! | `NCCL_EMULATOR_PROXY_POLL_MS` | time of `ncclCommAbort` with connections to other processes, in milliseconds | 500, as NCCL's |
//! | `NCCL_EMULATOR_RAS_SECOND_MS` | the length of a second in RAS's timeouts, in milliseconds | 1000 |
//! | `NCCL_EMULATOR_FAULTS` | injected faults, see [`faults`] | none |
//! | `NCCL_EMULATOR_NVML` | states of devices that NVML reports, see [`faults`] | all healthy |
//! | `NCCL_EMULATOR_VERSION` | the emulated release of NCCL, for instance `2.18.3` | the newest |
//! | `NCCL_EMULATOR_NCCL` | the file of NVIDIA's own library, to run on the emulator's driver | none |
//! | `CUDA_VISIBLE_DEVICES` | the devices that a process sees, as with CUDA | all |
//! | `NCCL_EMULATOR` | for [`install_unless_gpu`]: 1 emulator, 0 real libraries | look for a GPU |
//! | `NCCL_EMULATOR_QUIET` | for [`install_unless_gpu`]: 1, no line on stderr when it installs the emulator | 0 |
//!
//! # Limits
//!
//! Linux with a dynamic linker (glibc), on x86-64 or aarch64. The program must not be linked to libcuda or libnccl, and
//! [`install()`] must come before the first call of either. As with CUDA, a process that was forked from one that uses the
//! emulator must call exec before it uses CUDA or NCCL.
//!
//! The following driver functions return `CUDA_ERROR_NOT_SUPPORTED`, and print the reason once on stderr: unknown kernels
//! ([`kernels`]); graphs that do not come from a capture, and memory allocated by a graph; managed memory; events shared
//! between processes, shared or host memory pools, fabric handles, DMA buffers, multicast objects and logical endpoints; fills
//! in two dimensions, copies in three, and copies in two other than from device to device; flushes of remote writes and atomic
//! reductions in streams; external memory and semaphores. Missing functions of NCCL report themselves in the same way. The
//! emulator's own NCCL accepts memory of `cuMemAlloc` and `cuMemAllocAsync` as buffers, but not memory that `cuMemMap` mapped
//! or that another process opened.
//!
//! The host cannot access device memory by a device address; this includes virtual memory management and memory opened from
//! another process. Only pinned host memory, and host memory in virtual memory management, have the same address for host and
//! devices.
#![cfg(not(loom))]

#[cfg(not(all(
    target_os = "linux",
    target_pointer_width = "64",
    any(target_arch = "x86_64", target_arch = "aarch64")
)))]
compile_error!(
    "nccl-emulator takes the place of Linux libraries: it needs Linux on x86-64 or aarch64"
);

mod code;
mod expert_parallel;
pub mod faults;
mod install;
mod installation;
mod lsa;
mod nccl;
mod numbers;
mod options;
mod probe;
#[cfg(feature = "real-nccl")]
mod real;
mod transport;
mod version;

use std::path::PathBuf;

use options::Wishes;

pub use cuda_emulator::kernels;
pub use cuda_emulator::violations::{
    Allocation, Violation, ViolationKind, clear_violations, violations,
};
pub use installation::{InstallError, Installation, RealLibrary};
pub use probe::Choice;
#[cfg(feature = "real-nccl")]
#[doc(hidden)]
pub use real::coverage::real_coverage;
#[cfg(feature = "real-nccl")]
#[doc(hidden)]
pub use real::covered::{CoveredFunction, CoveredKernel, RealCoverage, State};

/// Replaces libcuda and libnccl in this process, with the settings of the environment.
/// May be called any number of times, from any thread.
///
/// ```
/// println!("{}", nccl_emulator::install()?);
/// # Ok::<(), nccl_emulator::InstallError>(())
/// ```
///
/// # Errors
/// If the real libraries are loaded already, or a setting has an invalid value.
pub fn install() -> Result<Installation, InstallError> {
    Emulator::new().install()
}

/// Calls [`install()`], unless the machine has a working GPU. A child process queries CUDA, because a
/// driver that failed to start stays broken for its process.
///
/// If this function installs the emulator, it prints one line with the reason on stderr: otherwise a server in a container
/// without its GPUs would silently run on the CPU. Use this function in tests and for work on a laptop, as a dev-dependency
/// or behind a feature; a program for production that finds no GPU should fail.
///
/// ```
/// println!("{}", nccl_emulator::install_unless_gpu()?);
/// # Ok::<(), nccl_emulator::InstallError>(())
/// ```
///
/// # Errors
/// As [`install()`].
pub fn install_unless_gpu() -> Result<Choice, InstallError> {
    Emulator::new().install_unless_gpu()
}

/// The settings of the emulator. Settings that are not set come from the environment.
///
/// ```
/// use cudarc::driver::CudaContext;
///
/// nccl_emulator::Emulator::new().devices(2).memory(1 << 30).install()?;
/// assert_eq!(CudaContext::device_count()?, 2);
/// assert_eq!(CudaContext::new(0)?.total_mem()?, 1 << 30);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Default)]
#[must_use]
pub struct Emulator {
    wishes: Wishes,
}

impl Emulator {
    /// Creates a builder without settings.
    ///
    /// ```
    /// nccl_emulator::Emulator::new().install()?;
    /// # Ok::<(), nccl_emulator::InstallError>(())
    /// ```
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the number of devices, 1 to 256.
    ///
    /// ```
    /// nccl_emulator::Emulator::new().devices(16).install()?;
    /// # Ok::<(), nccl_emulator::InstallError>(())
    /// ```
    pub fn devices(mut self, devices: u32) -> Self {
        self.wishes.devices = Some(devices);
        self
    }

    /// Sets the memory of each device in bytes, rounded up to 2 MiB. It takes host memory only as it is
    /// used.
    ///
    /// ```
    /// nccl_emulator::Emulator::new().memory(256 << 20).install()?;
    /// # Ok::<(), nccl_emulator::InstallError>(())
    /// ```
    pub fn memory(mut self, bytes: u64) -> Self {
        self.wishes.memory = Some(bytes);
        self
    }

    /// Sets whether NCCL operations that can never finish return an error immediately, where NCCL would hang.
    ///
    /// ```
    /// nccl_emulator::Emulator::new().strict(true).install()?;
    /// # Ok::<(), nccl_emulator::InstallError>(())
    /// ```
    pub fn strict(mut self, strict: bool) -> Self {
        self.wishes.strict = Some(strict);
        self
    }

    /// Sets the emulated release of NCCL, from 2.18.1 to the release of this crate's header. Functions
    /// of later releases are missing, and later fields of `ncclConfig_t` are silently ignored, as that
    /// release ignores them.
    ///
    /// ```
    /// let taken = nccl_emulator::Emulator::new().version(2, 27, 7).install()?;
    /// assert!(taken.to_string().ends_with("as NCCL 2.27.7"));
    /// # Ok::<(), nccl_emulator::InstallError>(())
    /// ```
    pub fn version(mut self, major: u32, minor: u32, patch: u32) -> Self {
        self.wishes.version = Some(nccl_sys::Version::new(major, minor, patch));
        self
    }

    /// Sets the file of NVIDIA's own library (`libnccl.so.2` of a Python wheel), which replaces the emulator's NCCL. Its
    /// kernels are interpreted. Needs the feature `real-nccl`, and x86-64.
    ///
    /// ```
    /// let missing = nccl_emulator::Emulator::new().nccl("/no/libnccl.so.2").install();
    /// println!("{}", missing.unwrap_err());
    /// ```
    pub fn nccl(mut self, library: impl Into<PathBuf>) -> Self {
        self.wishes.nccl = Some(library.into());
        self
    }

    /// Suppresses the line on stderr with which [`install_unless_gpu`](Self::install_unless_gpu) reports that it installs
    /// the emulator, for programs that report it themselves.
    ///
    /// ```
    /// let choice = nccl_emulator::Emulator::new().quiet().install_unless_gpu()?;
    /// eprintln!("{choice}");
    /// # Ok::<(), nccl_emulator::InstallError>(())
    /// ```
    pub fn quiet(mut self) -> Self {
        self.wishes.quiet = true;
        self
    }

    /// Installs the emulator as [`install()`] does, with these settings.
    ///
    /// ```
    /// let taken = nccl_emulator::Emulator::new().devices(4).install()?;
    /// assert!(taken.to_string().contains("4 devices"));
    /// # Ok::<(), nccl_emulator::InstallError>(())
    /// ```
    ///
    /// # Errors
    /// As [`install()`]; and [`InstallError::OptionsInForce`] if the emulator already runs with
    /// other settings.
    pub fn install(&self) -> Result<Installation, InstallError> {
        install::install(&self.wishes)
    }

    /// Does what [`install_unless_gpu`] does, with these settings.
    ///
    /// ```
    /// let choice = nccl_emulator::Emulator::new().devices(4).install_unless_gpu()?;
    /// println!("{choice}");
    /// # Ok::<(), nccl_emulator::InstallError>(())
    /// ```
    ///
    /// # Errors
    /// As [`Emulator::install`].
    pub fn install_unless_gpu(&self) -> Result<Choice, InstallError> {
        probe::install_unless_gpu(&self.wishes)
    }
}
