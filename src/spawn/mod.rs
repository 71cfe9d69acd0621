//! Starting the ranks of a world on this machine, and ending them: all or none.
//!
//! [`Job`] runs each rank as a process; [`threads`] runs them as threads of this one. The first rank
//! that fails ends the job, and [`RankFailure`] says which rank that was, how it ended, and what it
//! said last. No rank outlives its job: not when another fails, not at a deadline, and not when the
//! process that started it is killed; [`nccl::launch`] sees to that. Nothing here waits without a limit,
//! except for ranks that run well.
//!
//! For half a second after the first failure ranks may say why *they* failed; one that was killed by a
//! signal in that time is taken for the cause rather than one that returned an error, because an error is
//! often what a rank makes of another's death.

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
