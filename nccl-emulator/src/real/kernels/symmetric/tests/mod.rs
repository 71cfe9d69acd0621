//! Kernels over symmetric memory of fake devices, stepped in turn by one thread, and their results compared with direct
//! computations.

mod kernels;
mod machine;
