//! Functions of the CUDA runtime, over the driver: what NVIDIA's libnccl has linked into itself and calls.
//!
//! NVIDIA's own runtime is never run; whoever loads such a library leads its calls to these functions ([`symbols`]),
//! after it has said where that build has the fields of the runtime's structures ([`configure`]).
//!
//! A function here is a driver function of the same purpose, and what the runtime adds to it: a current device for each
//! thread, whose primary context comes to life at the first call that needs one, and the last error of each thread
//! (`error`). Codes of `cudaError_t` and `CUresult` have the same numbers.
//!
//! | file | what it has |
//! |---|---|
//! | `forwarded` | functions that are one driver function with the same arguments |
//! | `device` | devices, the current one, and contexts |
//! | `memory` | memory, copies, and what an address is |
//! | `kernel` | kernels by the address of their host stub, and launches |
//! | `stream` | captures and their graphs, where CUDA 12 and 13 differ |
//! | `error` | the last error; names and texts of codes |
//! | `layouts` | where fields lie |
//! | `driver` | the driver's functions, with their types |

mod device;
mod driver;
mod error;
mod forwarded;
mod kernel;
mod layouts;
mod memory;
mod stream;

use std::ffi::c_void;
use std::sync::OnceLock;

pub use self::error::Code;
pub use self::layouts::{Field, LayoutError, Structures};

use self::layouts::Layouts;
use crate::driver::CUresult;
use crate::elf::Symbol;

/// The generation of CUDA that the caller was built for: some functions of one name have other arguments.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cuda {
    /// 12.0 to 12.9.
    V12,
    /// 13.
    V13,
}

impl Cuda {
    /// The generation of a version (13020 is 13.2), if it is one of these.
    pub fn of(version: i32) -> Option<Self> {
        match version / 1000 {
            12 => Some(Self::V12),
            13 => Some(Self::V13),
            _ => None,
        }
    }
}

/// The driver's function for a kernel, by the address of the kernel's host stub.
pub type FunctionOf = fn(*const c_void) -> Option<*mut c_void>;

/// What the functions know of their caller.
struct Caller {
    version: i32,
    layouts: Layouts,
    function_of: FunctionOf,
}

static CALLER: OnceLock<Caller> = OnceLock::new();

/// Tells the functions who calls them: the runtime's version that the caller was built with (13020 is 13.2), where its
/// structures have their fields, and which driver function stands for the kernel of a host stub. The first caller of
/// a process stays.
///
/// # Errors
/// See [`LayoutError`].
pub fn configure(
    version: i32,
    structures: &dyn Structures,
    function_of: FunctionOf,
) -> Result<(), LayoutError> {
    let caller = Caller {
        version,
        layouts: Layouts::read(structures)?,
        function_of,
    };
    let _ = CALLER.set(caller);
    Ok(())
}

/// What is known of the caller.
fn caller() -> Result<&'static Caller, Code> {
    CALLER.get().ok_or_else(|| {
        eprintln!(
            "cuda-emulator: a function of the CUDA runtime was called that needs to know its caller, and \
             cuda_emulator::runtime::configure was not: it returns cudaErrorNotSupported"
        );
        CUresult::ERROR_NOT_SUPPORTED.into()
    })
}

/// Name and address of every runtime function, as a caller built for `cuda` calls them.
pub fn symbols(cuda: Cuda) -> Vec<Symbol> {
    let mut all = error::symbols();
    all.extend(forwarded::symbols());
    all.extend(device::symbols(cuda));
    all.extend(memory::symbols(cuda));
    all.extend(kernel::symbols());
    all.extend(stream::symbols(cuda));
    all
}
