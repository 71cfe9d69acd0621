//! Kernels of fake communicators in host memory, stepped in turn by one thread, and their results compared with direct
//! computations.

mod collectives;
mod types;
mod world;
