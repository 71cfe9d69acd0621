//! What the functions know of the library that calls them.

use std::ffi::c_void;
use std::sync::OnceLock;

use super::error::Code;
use super::layouts::{LayoutError, Layouts, Structures};
use crate::result::CUresult;

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
pub(super) struct Caller {
    pub(super) version: i32,
    pub(super) layouts: Layouts,
    pub(super) function_of: FunctionOf,
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
pub(super) fn caller() -> Result<&'static Caller, Code> {
    CALLER.get().ok_or_else(|| {
        eprintln!(
            "cuda-emulator: a function of the CUDA runtime was called that needs to know its caller, and \
             cuda_emulator::runtime::configure was not: it returns cudaErrorNotSupported"
        );
        CUresult::ERROR_NOT_SUPPORTED.into()
    })
}
