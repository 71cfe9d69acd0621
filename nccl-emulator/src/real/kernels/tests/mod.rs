//! Kernels of fake communicators in host memory, stepped in turn by one thread, and their results compared with direct
//! computations.

mod collectives;
mod launches;
mod point_to_point;
mod proxies;
mod registered;
pub(super) mod types;
mod world;
