//! Functions of the CUDA runtime, over the driver: the functions that NVIDIA's libnccl links statically and calls.
//!
//! NVIDIA's own runtime never runs. The loader of such a library first gives the offsets of that build's runtime
//! structures ([`configure`]), and then redirects the library's calls to these functions ([`symbols`]).
//!
//! A function here calls the driver function of the same purpose and adds the runtime's state: a current device for
//! each thread, whose primary context is created at the first call that needs one, and the last error of each thread
//! (`error`). Codes of `cudaError_t` and `CUresult` have the same numbers.
//!
//! | file | contents |
//! |---|---|
//! | `forwarded` | functions that are one driver function with the same arguments |
//! | `device` | devices, the current one, and contexts |
//! | `memory` | memory, copies, and pointer attributes |
//! | `kernel` | kernels by the address of their host stub, and launches |
//! | `stream` | captures and their graphs, where CUDA 12 and 13 differ |
//! | `error` | the last error; names and texts of codes |
//! | `caller` | the calling build, as given to [`configure`] |
//! | `layouts` | offsets of fields |
//! | `driver` | the driver's functions, with their types |

mod caller;
mod device;
mod driver;
mod error;
mod forwarded;
mod kernel;
mod layouts;
mod memory;
mod stream;

pub use self::caller::{Cuda, FunctionOf, configure};
pub use self::error::Code;
pub use self::layouts::{Field, LayoutError, Structures};

use stand_in_object::Symbol;

/// Returns the name and address of every runtime function, for a caller built for `cuda`.
pub fn symbols(cuda: Cuda) -> Vec<Symbol> {
    let mut all = error::symbols();
    all.extend(forwarded::symbols());
    all.extend(device::symbols(cuda));
    all.extend(memory::symbols(cuda));
    all.extend(kernel::symbols());
    all.extend(stream::symbols(cuda));
    all
}
