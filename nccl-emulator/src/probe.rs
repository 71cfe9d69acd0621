//! The probe for a working GPU. It runs CUDA in a child process, because a failed start of CUDA
//! would persist in this process.

use std::ffi::{CStr, c_int, c_uint};
use std::fmt;
use std::io::Write as _;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::install;
use crate::installation::{InstallError, Installation};
use crate::options::Wishes;

/// The device files of the drivers that bring a libcuda: on a PC or server, on a Jetson, under WSL.
const DRIVERS: [&str; 3] = ["/dev/nvidiactl", "/dev/nvhost-ctrl-gpu", "/dev/dxg"];
/// The variable that forces the choice.
const CHOICE: &str = "NCCL_EMULATOR";
/// The variable that suppresses the line about the choice.
const QUIET: &str = "NCCL_EMULATOR_QUIET";
/// How long the driver may take to start.
const PATIENCE: Duration = Duration::from_secs(20);

/// The decision of [`install_unless_gpu`](crate::install_unless_gpu), and its reason.
///
/// ```
/// use nccl_emulator::Choice;
///
/// match nccl_emulator::install_unless_gpu()? {
///     Choice::Gpu { reason } => println!("on real GPUs: {reason}"),
///     Choice::Emulator { reason, .. } => println!("on the CPU emulator: {reason}"),
///     _ => unreachable!("there are only two"),
/// }
/// # Ok::<(), nccl_emulator::InstallError>(())
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Choice {
    /// The emulator was not installed; the real libraries are used.
    Gpu {
        /// The finding.
        reason: String,
    },
    /// The emulator was installed.
    Emulator {
        /// Why no GPU is used.
        reason: String,
        /// The installation.
        installation: Installation,
    },
}

impl Choice {
    /// Whether the emulator was chosen.
    ///
    /// ```
    /// let choice = nccl_emulator::install_unless_gpu()?;
    /// println!("{choice}");
    /// assert_eq!(choice.is_emulator(), choice.to_string().contains("emulator"));
    /// # Ok::<(), nccl_emulator::InstallError>(())
    /// ```
    #[must_use]
    pub fn is_emulator(&self) -> bool {
        matches!(self, Self::Emulator { .. })
    }
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Gpu { reason } => write!(f, "real GPUs are used: {reason}"),
            Self::Emulator {
                reason,
                installation,
            } => write!(f, "{installation}; because {reason}"),
        }
    }
}

pub(crate) fn install_unless_gpu(wishes: &Wishes) -> Result<Choice, InstallError> {
    if install::installation().is_some() {
        let installation = install::install(wishes)?;
        return Ok(Choice::Emulator {
            reason: "it is installed already".into(),
            installation,
        });
    }
    let quiet = is_quiet()? || wishes.quiet;
    let emulate = |reason: String| {
        let installation = install::install(wishes)?;
        if !quiet {
            // stderr may be closed.
            let _ = writeln!(
                std::io::stderr(),
                "nccl-emulator: no GPU is used, CUDA and NCCL are emulated on the CPU: {reason} ({CHOICE}=0 uses the real \
                 libraries or fails, {QUIET}=1 leaves this line out)"
            );
        }
        Ok(Choice::Emulator {
            reason,
            installation,
        })
    };
    match std::env::var(CHOICE).as_deref().map(str::trim) {
        Ok("1") => return emulate(format!("{CHOICE}=1 asks for it")),
        Ok("0") => {
            return Ok(Choice::Gpu {
                reason: format!("{CHOICE}=0 asks for them"),
            });
        }
        Ok("") | Err(_) => {}
        Ok(other) => {
            return Err(InstallError::BadOption {
                name: CHOICE,
                value: other.into(),
                expected: "1 (emulator), 0 (real libraries), or nothing (look for a GPU)".into(),
            });
        }
    }
    let Some(driver) = DRIVERS.iter().find(|path| Path::new(path).exists()) else {
        return emulate(format!(
            "there is no GPU driver ({} does not exist)",
            DRIVERS[0]
        ));
    };
    match count_gpus() {
        Ok(0) => emulate(format!("{driver} exists, but CUDA finds no GPU")),
        Ok(count) => Ok(Choice::Gpu {
            reason: format!("CUDA finds {count}"),
        }),
        Err(reason) => emulate(format!("{driver} exists, but {reason}")),
    }
}

/// Whether the environment suppresses the line.
fn is_quiet() -> Result<bool, InstallError> {
    match std::env::var(QUIET).as_deref().map(str::trim) {
        Ok("1") => Ok(true),
        Ok("" | "0") | Err(_) => Ok(false),
        Ok(other) => Err(InstallError::BadOption {
            name: QUIET,
            value: other.into(),
            expected: "1 or 0".into(),
        }),
    }
}

/// Counts the GPUs with the real libcuda, in a child process.
fn count_gpus() -> Result<u32, String> {
    // SAFETY: the child calls the dynamic linker and libcuda, and then ends without returning.
    // Other threads' locks may be held in it for ever; glibc makes those of malloc and of the
    // dynamic linker usable after a fork, and should the child hang all the same, it is killed.
    let child = unsafe { libc::fork() };
    match child {
        -1 => Err(format!(
            "no child process can be made to ask it ({})",
            std::io::Error::last_os_error()
        )),
        0 => {
            let code = in_child();
            // SAFETY: ends the child without running the parent's exit handlers.
            unsafe { libc::_exit(code) }
        }
        child => wait_for(child),
    }
}

/// The exit codes of the child besides the number of GPUs.
const NO_LIBRARY: c_int = 255;
const NO_SYMBOL: c_int = 254;
const FAILED: c_int = 253;

fn in_child() -> c_int {
    let names = [c"libcuda.so.1", c"libcuda.so"];
    let open = |name: &&CStr| {
        // SAFETY: loads the driver's library as any CUDA program does.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW) };
        (!handle.is_null()).then_some(handle)
    };
    let Some(handle) = names.iter().find_map(open) else {
        return NO_LIBRARY;
    };
    // SAFETY: a live handle and C strings.
    let (init, count) = unsafe {
        (
            libc::dlsym(handle, c"cuInit".as_ptr()),
            libc::dlsym(handle, c"cuDeviceGetCount".as_ptr()),
        )
    };
    if init.is_null() || count.is_null() {
        return NO_SYMBOL;
    }
    // SAFETY: these are the functions' C types.
    let (init, count) = unsafe {
        (
            std::mem::transmute::<*mut libc::c_void, unsafe extern "C" fn(c_uint) -> c_uint>(init),
            std::mem::transmute::<*mut libc::c_void, unsafe extern "C" fn(*mut c_int) -> c_uint>(
                count,
            ),
        )
    };
    let mut devices = 0;
    // SAFETY: calls with valid arguments, in the order the driver wants them.
    let ok = unsafe { init(0) == 0 && count(&raw mut devices) == 0 };
    if ok { devices.clamp(0, 200) } else { FAILED }
}

fn wait_for(child: libc::pid_t) -> Result<u32, String> {
    let start = Instant::now();
    let mut status = 0;
    loop {
        // SAFETY: a child of this process that only this function waits for; `status` is a local.
        let done = unsafe { libc::waitpid(child, &raw mut status, libc::WNOHANG) };
        if done == child {
            break;
        }
        if done < 0 {
            return Err("the process that asks it was lost".into());
        }
        if start.elapsed() > PATIENCE {
            // SAFETY: a child of this process that was not waited for yet.
            unsafe {
                libc::kill(child, libc::SIGKILL);
                libc::waitpid(child, &raw mut status, 0);
            }
            return Err(format!(
                "CUDA did not start within {} s",
                PATIENCE.as_secs()
            ));
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    if !libc::WIFEXITED(status) {
        return Err("CUDA crashed while it started".into());
    }
    match libc::WEXITSTATUS(status) {
        NO_LIBRARY => Err("libcuda cannot be loaded".into()),
        NO_SYMBOL => Err("libcuda lacks cuInit".into()),
        FAILED => Err("cuInit fails".into()),
        count => Ok(count as u32),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_probe_answers_and_loads_nothing_here() {
        let start = Instant::now();
        let answer = count_gpus();
        assert!(start.elapsed() < PATIENCE);
        if install::installation().is_none() && answer.is_err() {
            assert_eq!(cuda_emulator::stand_in::loaded_from(c"libcuda.so.1"), None);
        }
    }
}
