//! Starts the ranks of a world on this machine, and ends them: all or none.
//!
//! [`Job`] runs each rank as a process; [`threads`] runs them as threads of this one. The first rank that fails ends
//! the job, and [`RankFailure`] has that rank, how it ended, and its last output. No rank outlives its job: not when
//! another fails, not at a deadline, and not when the process that started it is killed; [`nccl::launch`] ensures that.
//! Every wait has a timeout, except that for ranks that run well.
//!
//! For half a second after the first failure ranks may report why *they* failed. A rank that was killed by a signal in
//! that time is taken for the cause rather than a rank that returned an error, because an error is often the
//! consequence of another rank's death.

mod child;
mod environment;
mod job;
mod output;
mod report;
pub mod threads;

pub use child::{end_within, wait_within};
pub use environment::Launcher;
pub use job::{Ended, Job, Outcome};
pub use output::{CLEAR_LINE, Output, PROGRESS};
pub use report::{RankEnd, RankFailure, describe_process};
