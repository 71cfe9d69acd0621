//! The host's side of NCCL's device API: for kernels that reach the memory of other ranks by themselves.
//!
//! - `properties`: what a communicator can do;
//! - `team`: which ranks reach each other how;
//! - `device_communicator`: the argument of kernels that are written with NCCL's device functions.
//!
//! The address at which a device reaches a peer's part of a window is
//! [`Window::peer_address`](crate::one_sided::Window::peer_address).

mod device_communicator;
mod properties;
mod team;

pub use crate::communicator::WindowHold;
pub use device_communicator::{DeviceArgument, DeviceCommunicator, DeviceRequirements};
pub use properties::{Gin, Properties};
pub use team::Team;
