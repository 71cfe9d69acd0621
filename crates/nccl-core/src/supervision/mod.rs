//! Supervision of the communicators of this process.
//!
//! - `stuck_call_monitor`: finds threads that do not return from a call of NCCL or CUDA;
//! - `stragglers`: finds the ranks that have not entered an operation in which others wait;
//! - `watchdog`: finds operations that do not end, whether or not the program waits for them.
//!
//! The first and the last are checks of the [`monitor`](crate::monitor), the thread that calls neither NCCL nor CUDA. The
//! module that ends a communicator on all of its ranks belongs to a crate above this one ([`peers`](crate::peers)). The
//! [`recorder`](crate::recorder) records every operation as it is issued.

pub mod stragglers;
pub(crate) mod stuck_call_monitor;
pub mod watchdog;
