//! The host side of NCCL's device API, for kernels that access the memory of other ranks themselves.
//!
//! - `properties`: the capabilities of a communicator;
//! - `team`: the ranks that reach each other's memory, or each other over the network;
//! - `device_communicator`: the argument of kernels that use NCCL's device functions.
//!
//! The address at which a device reaches a peer's part of a window is
//! [`Window::peer_address`](crate::one_sided::Window::peer_address).

mod device_communicator;
mod properties;
mod team;

pub use crate::communicator::WindowHold;
pub(crate) use device_communicator::device_communicator;
pub use device_communicator::{DeviceArgument, DeviceCommunicator, DeviceRequirements};
pub(crate) use properties::properties;
pub use properties::{Gin, Properties};
pub use team::Team;
