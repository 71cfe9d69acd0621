//! A launch as work on a stream: once, or again whenever a graph is replayed.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;

use super::launch::{Failed, Launch};
use super::program::Progress;
use super::provided::{Function, Run};
use super::ptx::Entry;
use crate::exec::context::Context;
use crate::exec::{Backoff, Pause, Recipe, Step, Stream, Work};
use crate::hooks;
use crate::result::CUresult;

/// See the module.
#[derive(Clone)]
pub(crate) struct Kernel {
    pub(crate) entry: Arc<Entry>,
    pub(crate) function: Function,
    pub(crate) context: Arc<Context>,
    pub(crate) grid: [u32; 3],
    pub(crate) block: [u32; 3],
    pub(crate) shared: u32,
    /// The arguments, copied at the launch.
    pub(crate) arguments: Arc<[u8]>,
}

impl Recipe for Kernel {
    fn job(&self, stream: &Arc<Stream>) -> Box<dyn Work> {
        self.clone().into_job(stream)
    }

    fn into_job(self, stream: &Arc<Stream>) -> Box<dyn Work> {
        let start = hooks::lateness().map(|delay| Instant::now() + delay);
        Box::new(Running {
            kernel: self,
            stream: Arc::clone(stream),
            start,
            run: None,
            backoff: Backoff::default(),
        })
    }
}

struct Running {
    kernel: Kernel,
    stream: Arc<Stream>,
    /// The time at which a delayed kernel begins.
    start: Option<Instant>,
    /// `None` before the first step.
    run: Option<Run>,
    backoff: Backoff,
}

impl Running {
    fn run(&mut self) -> Result<Progress, Failed> {
        let kernel = &self.kernel;
        let mut launch = Launch {
            name: &kernel.entry.name,
            grid: kernel.grid,
            block: kernel.block,
            shared: kernel.shared,
            device: self.stream.device(),
            parameters: &kernel.entry.parameters,
            arguments: &kernel.arguments,
            failed: None,
        };
        let run = self.run.get_or_insert_with(|| (kernel.function)());
        let returned = run(&mut launch);
        match (launch.failed.take(), returned) {
            (Some(failed), _) => Err(failed),
            // The error stems from another `Launch`, whose failed access the function passed on.
            (None, Err(violation)) => Err(Failed {
                violation,
                misaligned: false,
            }),
            (None, Ok(progress)) => Ok(progress),
        }
    }
}

impl Work for Running {
    fn step(&mut self, _budget: usize) -> Step {
        if let Some(start) = self.start {
            if Instant::now() < start {
                return Step::Blocked { seen: 0 };
            }
            self.start = None;
        }
        let ran = catch_unwind(AssertUnwindSafe(|| self.run()));
        let context = &self.kernel.context;
        match ran {
            Ok(Ok(Progress::Done)) => {}
            Ok(Ok(Progress::Moved)) => {
                self.backoff.moved();
                return Step::Progress;
            }
            Ok(Ok(Progress::Waiting)) => {
                self.backoff.missed();
                return Step::Blocked { seen: 0 };
            }
            Ok(Err(failed)) => {
                let violation = failed.violation.during(&self.describe());
                if failed.misaligned {
                    crate::violations::record(violation);
                    context.kill(CUresult::ERROR_MISALIGNED_ADDRESS);
                } else {
                    context.fail(violation);
                }
            }
            Err(_) => {
                eprintln!(
                    "nccl-emulator: {} panicked (above); its context is lost, as after a kernel that traps",
                    self.describe()
                );
                context.kill(CUresult::ERROR_LAUNCH_FAILED);
            }
        }
        Step::Done
    }

    fn pause(&self) -> Pause {
        if let Some(start) = self.start {
            return Pause::For(start.saturating_duration_since(Instant::now()));
        }
        self.backoff.pause()
    }

    fn describe(&self) -> String {
        format!("kernel {} on {}", self.kernel.entry.name, self.stream)
    }
}
