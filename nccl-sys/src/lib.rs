//! Raw bindings to NVIDIA NCCL.

#[cfg(not(target_os = "linux"))]
compile_error!("nccl-sys supports Linux only, as NCCL's own releases do");

mod api;
mod bindings;
mod constants;
mod since;
mod version;

pub use api::{Api, MissingFunction};
pub use bindings::initializers::*;
pub use bindings::types::*;
pub use constants::*;
pub use since::since;
pub use version::Version;
