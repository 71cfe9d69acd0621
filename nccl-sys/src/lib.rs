//! Raw bindings to [NVIDIA NCCL](https://developer.nvidia.com/nccl), opened at run time.
//!
//! - Every function, type and constant of `nccl.h` 2.32.3, and those of the host's side of its device API
//!   (`nccl_device/host.h`). They are generated and checked in:
//!   this crate needs neither clang, nor CUDA, nor NCCL at build time, and links nothing.
//! - C's enums are newtypes, such as [`ncclResult_t`], because a library may be newer than these
//!   bindings and return values that they do not know.
//! - The functions are in a table, [`Api`], in which each is optional: one build runs on old and new
//!   releases. A function that a library lacks is a [`MissingFunction`] with the release that [has it](since()).
//! - The [`Loader`] finds the library, reports which one it took, and refuses to have two in one process.
//!
//! The crate `nccl` builds a safe interface on this one.
//!
//! # Example
//!
//! ```no_run
//! use nccl_sys::{Loader, ncclResult_t, ncclUniqueId};
//!
//! // SAFETY: libraries by NCCL's name are trusted to be NCCL.
//! let nccl = unsafe { Loader::new().load() }?;
//! println!("{nccl}"); // NCCL 2.32.3 at /usr/lib/x86_64-linux-gnu/libnccl.so.2.32.3 (…)
//!
//! let mut id = ncclUniqueId::default();
//! // SAFETY: `id` outlives the call.
//! let result = unsafe { nccl.api.ncclGetUniqueId()?(&mut id) };
//! assert_eq!(result, ncclResult_t::ncclSuccess);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Structs that grew
//!
//! [`ncclConfig_t`] and its like carry their own size and version, and grew with the releases. The
//! layout here is that of 2.32.3, and older libraries accept it. But NCCL ignores, **without an error**,
//! a field that is newer than itself; a program that sets one has to compare [`Loaded::version`] first. Start
//! from [`NCCL_CONFIG_INITIALIZER`] (which is also `ncclConfig_t::default()`) and set `version` to the
//! lower of [`NCCL_VERSION_CODE`] and the library's.
//!
//! # Features
//!
//! - `bindgen` (off): generate the bindings while building, from the header that the environment
//!   variable `NCCL_HEADER` names, or else from `$NCCL_HOME/include/nccl.h`. Needs libclang. For a
//!   header newer than 2.32.3, or a vendor's own.
//!
//! - `ep` (off): the module `ep`, bindings of NVIDIA's NCCL EP library (`libnccl_ep.so`), a library for
//!   expert parallelism on top of NCCL. No GPU has run them. With `bindgen`, these stay as they are checked in.
//!
//! # Platforms
//!
//! Linux on x86-64 and aarch64, as NCCL itself.

#[cfg(not(target_os = "linux"))]
compile_error!("nccl-sys supports Linux only, as NCCL's own releases do");

mod api;
mod bindings;
mod constants;
#[cfg(feature = "ep")]
pub mod ep;
mod in_process;
mod load_error;
mod loader;
mod object;
mod search;
mod since;
mod table;
mod version;

pub use api::{Api, MissingFunction};
pub use bindings::initializers::*;
pub use bindings::types::*;
pub use constants::*;
pub use load_error::{Attempt, LoadError, Origin};
pub use loader::{Loaded, Loader};
pub use since::since;
pub use version::Version;
