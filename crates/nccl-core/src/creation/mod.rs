//! How communicators are made, alone or from another one.
//!
//! - `communicator`: the public functions;
//! - [`builder`]: the settings; `build`: the steps of the ranks before NCCL is called; `handed_out`: the first handle;
//! - `meeting`: the exchange about which ranks can take part; `said`: its messages;
//! - `init`: from before NCCL is called until the communicator is ready; `start`: the NCCL calls for that; `slot`: the memory
//!   into which NCCL writes in the background;
//! - `init_all`: communicators of several threads of this process; `raw`: communicators that were made elsewhere;
//! - `grow`: a communicator with more ranks; `split`, `shrink`: communicators of some of the ranks.

mod build;
mod builder;
mod communicator;
mod grow;
mod handed_out;
mod init;
mod init_all;
mod meeting;
mod raw;
mod said;
mod shrink;
mod slot;
mod split;
mod start;

pub use builder::CommunicatorBuilder;
pub use shrink::{ResizeWay, Resized};
