//! The bindings of NCCL EP: their layout, NVIDIA's header and libraries, and the loader with small libraries that the tests
//! compile. What NVIDIA's library does is tested in `nccl-emulator/tests/real_ep.rs`.

mod header;
mod layout;
#[allow(dead_code)] // The tests of the other loader use the rest.
#[path = "../loader/libraries.rs"]
mod libraries;
mod load;
#[path = "../loader/process.rs"]
mod process;
mod symbols;
