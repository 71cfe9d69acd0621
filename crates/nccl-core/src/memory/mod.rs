//! Device memory that this crate owns: allocated by NCCL, registered with a communicator, or both.
//!
//! - `communicator`: what a program calls on a communicator for that;
//! - [`Buffer`](self::buffer): memory from `ncclMemAlloc`;
//! - `registered`: memory that a communicator knows beforehand (`ncclCommRegister`);
//! - `window`: memory that all ranks of a communicator know beforehand (`ncclCommWindowRegister`);
//! - `owned`: what both, and captured plans, can own.
//!
//! What must stay true: such memory is lent out as cudarc's views only, never as a `&mut CudaSlice`, with
//! which a program could swap it for other memory; and it is freed behind everything that was put on
//! its stream, by the reaper.

mod buffer;
mod communicator;
mod owned;
mod registered;
mod window;

pub use buffer::Buffer;
pub use owned::{OwnedBuffer, PlanBuffers};
pub use registered::Registered;
