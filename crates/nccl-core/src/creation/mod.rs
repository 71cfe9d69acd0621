//! How communicators are made, alone or from another one.
//!
//! - `communicator`: the public functions;
//! - [`builder`]: the settings; `build`: the steps of the ranks before NCCL is called; `first_handle`: the first handle;
//! - `init_exchange`: the exchange that determines which ranks can take part; `init_message`: its messages;
//! - `init`: from before NCCL is called until the communicator is ready; `start`: the NCCL calls for that; `async_out`: the
//!   memory into which NCCL writes in the background;
//! - `init_all`: communicators of several threads of this process; `raw`: communicators that were made elsewhere;
//! - `grow`: a communicator with more ranks; `split`, `shrink`: communicators of some of the ranks.

mod async_out;
mod build;
mod builder;
mod communicator;
mod first_handle;
mod grow;
mod init;
mod init_all;
mod init_exchange;
mod init_message;
mod raw;
mod shrink;
mod split;
mod start;

pub use builder::CommunicatorBuilder;
pub use shrink::{ResizeWay, Resized};
