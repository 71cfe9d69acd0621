//! What looks after the communicators of this process, and what it writes down of them.
//!
//! - `monitor`: the thread that looks whether somebody is late, and calls neither NCCL nor CUDA;
//! - `inside`: threads that do not come back from a call of NCCL's or CUDA's;
//! - `stragglers`: who has not entered an operation in which others wait;
//! - `watchdog`: what finds operations that do not end, although nobody waits for them.
//!
//! What ends a communicator on all of its ranks stands above ([`peers`](crate::peers)). What is on the way of an operation, and
//! writes down what it was, is the [`recorder`].

pub mod inside;
pub(crate) mod monitor;
pub mod recorder;
pub mod stragglers;
pub mod watchdog;
