//! The library that calls these functions.

use std::ffi::c_void;
use std::sync::OnceLock;

use super::error::Code;
use super::layouts::{LayoutError, Layouts, Structures};
use crate::result::CUresult;

/// The major version of CUDA that the caller was built for: the arguments of some functions differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cuda {
    /// 12.0 to 12.9.
    V12,
    /// 13.
    V13,
}

impl Cuda {
    /// Returns the major version of a version number (13020 is 13.2), if it is supported.
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

/// The properties of the calling library.
pub(super) struct Caller {
    pub(super) version: i32,
    pub(super) layouts: Layouts,
    pub(super) function_of: FunctionOf,
}

static CALLER: OnceLock<Caller> = OnceLock::new();

/// Sets the properties of the calling library: the runtime version that it was built with (13020 is 13.2), the layouts of its
/// structures, and the lookup of the driver function for a kernel's host stub. The first caller of a process stays.
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

/// Returns the properties of the calling library.
pub(super) fn caller() -> Result<&'static Caller, Code> {
    CALLER.get().ok_or_else(|| {
        eprintln!(
            "cuda-emulator: a function of the CUDA runtime was called that needs to know its caller, and \
             cuda_emulator::runtime::configure was not: it returns cudaErrorNotSupported"
        );
        CUresult::ERROR_NOT_SUPPORTED.into()
    })
}
