//! Device memory that this crate owns: allocated by NCCL, registered with a communicator, or both.
//!
//! - `communicator`: the methods of a communicator that allocate and register memory;
//! - [`Buffer`](self::buffer): memory from `ncclMemAlloc`;
//! - `registered`: memory that one rank has registered with a communicator (`ncclCommRegister`);
//! - `window`: memory that all ranks of a communicator have registered (`ncclCommWindowRegister`);
//! - `owned`: memory that registrations and captured plans can own.
//!
//! Invariants: such memory is lent out only as cudarc's views, never as a `&mut CudaSlice`, with which a program could
//! swap it for other memory; and the drop queue frees it, after everything that was put on its stream.

mod buffer;
mod communicator;
mod owned;
mod registered;
mod window;

pub use buffer::Buffer;
#[doc(hidden)]
pub use owned::sealed;
pub use owned::{OwnedBuffer, PlanBuffers};
pub use registered::Registered;
pub(crate) use window::register as register_alone;
