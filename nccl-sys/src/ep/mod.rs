//! Bindings of NVIDIA's NCCL EP library, `libnccl_ep.so`: dispatch and combine of the tokens of a mixture of experts, in kernels
//! that it compiles at run time with `nvcc`.
//!
//! **No GPU has run these bindings.** What was checked, and what not, is in the page `docs/expert-parallel.md` of the
//! repository: layouts, values and symbols are those of NVIDIA's header and libraries; on a machine without a GPU the library
//! loads, returns its version, allocates a tensor's description and refuses bad configs. Nothing else of it was run.
//!
//! - Every function, type and constant of `nccl_ep.h` 0.2.0, of the Python package `nccl-extensions` 0.1.0. They are generated
//!   and checked in, as those of `nccl.h` are. Types of `nccl.h` are those of this crate.
//! - The functions are in a table, [`Api`], in which each is optional. Their type is `extern "C-unwind"`: the library throws
//!   C++ exceptions out of them in place of some results, for example if a call of CUDA fails. Rust cannot catch those: the
//!   process ends. Wrong arguments fail an assertion of the library in some cases, which ends the process as well.
//! - The [`Loader`] finds the library. NCCL EP works on communicators of the NCCL in the process, and depends on
//!   `libnccl.so.2` and `libcuda.so.1`: load NCCL first, with [`crate::Loader`].
//! - The structs begin with their size and a magic number. [`ncclEpGroupConfig_t::init`] and its like return what the header's
//!   `NCCL_EP_…_INIT` macros do, which is also the default; all other fields are zero.
//!
//! # Example
//!
//! ```no_run
//! use nccl_sys::ep::{self, ncclEpGroupConfig_t};
//!
//! // SAFETY: libraries by NCCL's name are trusted to be NCCL.
//! let nccl = unsafe { nccl_sys::Loader::new().load() }?;
//! // SAFETY: the same for NCCL EP.
//! let library = unsafe { ep::Loader::new().load() }?;
//! println!("{nccl}, {library}"); // …, NCCL EP 0.2.0 at /opt/nccl-ep/lib/libnccl_ep.so.0 (…)
//!
//! # let comm = nccl_sys::NCCL_COMM_NULL;
//! let config = ncclEpGroupConfig_t {
//!     num_experts: 64,
//!     max_dispatch_tokens_per_rank: 128,
//!     max_token_bytes: 7168 * 2,
//!     ..ncclEpGroupConfig_t::init()
//! };
//! let mut group = std::ptr::null_mut();
//! // SAFETY: `comm` is a communicator of this NCCL, and all its ranks make this call.
//! let result = unsafe { library.api.ncclEpCreateGroup()?(&mut group, comm, &config) };
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Other releases
//!
//! A library of another version loads, whichever it is; [`Loaded::version`] returns the version. A function that it lacks is
//! a [`MissingFunction`]. NVIDIA's header promises that later releases of the library accept these structs. A library older
//! than [`VERSION`] was not tried.

mod api;
mod load_error;
mod loader;
mod types;

pub use api::{Api, MissingFunction};
pub use load_error::LoadError;
pub use loader::{Loaded, Loader};
pub use types::*;
