//! What looks after the communicators of this process.
//!
//! - `sentinel`: threads that do not come back from a call of NCCL's or CUDA's;
//! - `stragglers`: who has not entered an operation in which others wait;
//! - `watchdog`: what finds operations that do not end, although nobody waits for them.
//!
//! The first and the last have a duty of the [`monitor`](crate::monitor), the thread that calls neither NCCL nor CUDA. What ends a
//! communicator on all of its ranks stands above ([`peers`](crate::peers)). What is on the way of an operation, and writes down
//! what it was, is the [`recorder`](crate::recorder).

pub(crate) mod sentinel;
pub mod stragglers;
pub mod watchdog;
