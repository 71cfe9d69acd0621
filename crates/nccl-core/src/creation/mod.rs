//! How communicators are made, alone or from another one.
//!
//! - `communicator`: what a program calls;
//! - [`builder`]: what one is made from; `build`: how its ranks come to make it; `handed_out`: its first handle;
//! - `meeting`: the ranks tell each other whether they can take part; `said`: what they say;
//! - `init`: from before NCCL is asked until it is ready; `start`: the calls for that; `slot`: where NCCL puts
//!   what it makes in the background;
//! - `init_all`: those of several threads of this process; `raw`: one that was made elsewhere;
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
pub use grow::{GrowWay, Grown};
pub use shrink::{ShrinkWay, Shrunk};
