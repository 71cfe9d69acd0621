//! Starting the ranks of a world on this machine, and ending them: all or none.
//!
//! [`Job`] runs each rank as a process; [`threads`] runs them as threads of this one. The first rank
//! that fails ends the job, and [`RankFailure`] says which rank that was, how it ended, and what it
//! said last. No rank outlives its job: not when another fails, not at a deadline, and not when the
//! process that started it is killed ([`lifeline`]). Nothing here waits without a limit, except for
//! ranks that run well.
//!
//! ```text
//!           start                 first failure           grace over       still there
//! (nothing) ─────▶ Running ──────────────────────▶ Grace ───────────▶ Term ───────────▶ Kill
//!                     │  all ranks exited with 0     │ all exited       │                │ given up
//!                     ▼                              ▼                  ▼                ▼ after 5 s
//!                  Succeeded                      Failed             Failed           Failed
//! ```
//!
//! During the grace ranks may say why *they* failed; a rank that was killed by a signal in that time
//! is taken for the cause rather than one that returned an error, because an error is often what a
//! rank makes of another's death.

mod environment;
mod job;
pub mod lifeline;
mod output;
mod report;
pub mod threads;

pub use environment::{Launcher, rank_variables};
pub use job::{Ended, Job, Outcome};
pub use output::{CLEAR_LINE, Output};
pub use report::{RankEnd, RankFailure, describe_process};
