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
//! | `caller` | who calls: what was given to [`configure`] |
//! | `layouts` | where fields lie |
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

use crate::elf::Symbol;

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
