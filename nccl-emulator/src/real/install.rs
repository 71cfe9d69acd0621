//! Installs NVIDIA's library on the emulator's driver: replaces its runtime, and registers its kernels with the driver.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::Path;
use std::sync::{Arc, OnceLock};

use cuda_emulator::kernels::program::{self, Attributes};
use cuda_emulator::{runtime, stand_in};

use super::cache::CacheUse;
use super::coverage;
use super::kernels::Interpreter;
use super::library::{Provided, RealNccl, load};
use super::program::Kernel;
use super::types::Types;
use crate::installation::{InstallError, Installation, RealLibrary};

/// A library name that NVIDIA's library does not have; it resolves to the same functions.
const OTHER_NAME: &CStr = c"libnccl.so";

/// The most threads of a block of NCCL's kernels: `NCCL_MAX_NTHREADS`.
const THREADS: u32 = 640;

/// NVIDIA's library in this process.
static LIBRARY: OnceLock<RealNccl> = OnceLock::new();

/// Loads the library, and registers everything that it needs.
///
/// # Errors
/// The expectation that the library does not meet, and the finding.
pub(crate) fn install(
    path: &Path,
    installation: &mut Installation,
) -> Result<RealLibrary, InstallError> {
    let provided = Provided {
        functions: &runtime_of,
        refused,
    };
    let library = load(path, provided).map_err(refuse)?;
    let structures = Structures(library.types());
    let cuda = runtime::Cuda::of(library.cuda())
        .ok_or_else(|| refuse(format!("it is built for CUDA {}", library.cuda())))?;
    let name = match cuda {
        runtime::Cuda::V12 => c"libcudart.so.12",
        runtime::Cuda::V13 => c"libcudart.so.13",
    };
    // For plugins: the library's own calls are redirected anyway. A runtime that the program has already loaded stays.
    if stand_in::loaded_from(name).is_none() {
        installation.take(&[name], &runtime::symbols(cuda))?;
    }
    runtime::configure(library.cuda(), &structures, program::handle_of).map_err(refuse)?;
    let rows = rows(&library).ok_or_else(|| refuse("it has no table of its device functions"))?;
    let interpreter = Interpreter::new(library.types(), rows, library.version()).map_err(refuse)?;
    let interpreter = Arc::new(interpreter);
    let mut kernels = Vec::new();
    for (stub, name) in library.kernels() {
        let attributes = Attributes {
            max_threads: THREADS,
            parameters: Kernel::parameters(name),
        };
        let kernel = Arc::new(Kernel::new(Arc::clone(&interpreter), name));
        kernels.push(Arc::clone(&kernel));
        program::register_program(stub, name, attributes, kernel)
            .map_err(|_| refuse("there is no memory for its kernels"))?;
    }
    // The names live as long as the stand-in, for the rest of the process.
    let leaked = |(name, address): (CString, *const c_void)| {
        let name: &'static CStr = Box::leak(name.into_boxed_c_str());
        (name, address)
    };
    let symbols: Vec<_> = library.nccl_symbols().into_iter().map(leaked).collect();
    stand_in::load(OTHER_NAME, &symbols)?;
    if let CacheUse::None(reason) = library.cache() {
        eprintln!(
            "nccl-emulator: what was read of the library is not kept for the next process: {reason}"
        );
    }
    let found = RealLibrary {
        version: library.version().to_string(),
        path: library.path().to_owned(),
        build_id: library.build_id().to_owned(),
    };
    coverage::set(interpreter, kernels);
    // Never unloaded: its functions are in use.
    let _ = LIBRARY.set(library);
    Ok(found)
}

/// Returns the functions of the runtime for a library compiled with this version of CUDA.
fn runtime_of(cuda: i32) -> Vec<(&'static str, *const c_void)> {
    let Some(cuda) = runtime::Cuda::of(cuda) else {
        return Vec::new();
    };
    let named = |(name, address): stand_in::Symbol| Some((name.to_str().ok()?, address));
    runtime::symbols(cuda)
        .into_iter()
        .filter_map(named)
        .collect()
}

/// The structures of the runtime, as the library's debug information describes them.
struct Structures<'a>(&'a Types);

impl runtime::Structures for Structures<'_> {
    fn size_of(&self, name: &str) -> Option<usize> {
        self.0.size_of(name).ok()
    }

    fn field(&self, name: &str, path: &str) -> Option<runtime::Field> {
        let field = self.0.field(name, path).ok()?;
        Some(runtime::Field {
            offset: field.offset,
            size: field.size,
            count: field.count,
        })
    }
}

fn refuse(reason: impl ToString) -> InstallError {
    InstallError::RealNccl {
        reason: reason.to_string(),
    }
}

/// Returns the table that assigns each device function its number.
fn rows(library: &RealNccl) -> Option<&'static [i32]> {
    let table = library.data("ncclDevFuncRowToId")?;
    // SAFETY: a table of ints in the library's constant data, which is never unloaded.
    Some(unsafe {
        std::slice::from_raw_parts(table.address.cast(), table.size / size_of::<c_int>())
    })
}

/// Answers a call of a runtime function that the emulator does not have.
extern "C" fn refused(name: *const c_char) -> c_int {
    const NOT_SUPPORTED: c_int = 801;
    // SAFETY: the loader passes a name that lives as long as the process.
    let name = unsafe { CStr::from_ptr(name) };
    eprintln!(
        "nccl-emulator: {} is not provided: it returns cudaErrorNotSupported",
        name.to_string_lossy()
    );
    NOT_SUPPORTED
}
