//! A launch as work on a stream: once, or again whenever a graph is replayed.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;

use super::launch::Failed;
use super::{Entry, Function, Launch};
use crate::driver::CUresult;
use crate::driver::context::Context;
use crate::exec::{Bell, Recipe, Step, Stream, Work};
use crate::faults;
use crate::nccl::at;

/// See the module.
#[derive(Clone)]
pub(crate) struct Kernel {
    pub(crate) entry: Arc<Entry>,
    pub(crate) function: Function,
    pub(crate) context: Arc<Context>,
    pub(crate) grid: [u32; 3],
    pub(crate) block: [u32; 3],
    pub(crate) shared: u32,
    /// Copied when it was launched.
    pub(crate) arguments: Arc<[u8]>,
}

impl Recipe for Kernel {
    fn job(&self, stream: &Arc<Stream>) -> Box<dyn Work> {
        self.clone().into_job(stream)
    }

    fn into_job(self, stream: &Arc<Stream>) -> Box<dyn Work> {
        let late = faults::lateness().map(|delay| Late::until(Instant::now() + delay));
        Box::new(Running {
            kernel: self,
            stream: Arc::clone(stream),
            late,
        })
    }
}

struct Running {
    kernel: Kernel,
    stream: Arc<Stream>,
    late: Option<Late>,
}

/// It begins later than it could.
struct Late {
    start: Instant,
    /// Rings then.
    bell: Arc<Bell>,
}

impl Late {
    fn until(start: Instant) -> Self {
        let bell = Arc::new(Bell::new());
        let ringing = Arc::clone(&bell);
        at(start, move || ringing.ring());
        Self { start, bell }
    }
}

impl Running {
    fn run(&self) -> Result<(), Failed> {
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
        let returned = (kernel.function)(&mut launch);
        match (launch.failed.take(), returned) {
            (Some(failed), _) => Err(failed),
            // Of another launch, which failed for it.
            (None, Err(violation)) => Err(Failed {
                violation,
                misaligned: false,
            }),
            (None, Ok(())) => Ok(()),
        }
    }
}

impl Work for Running {
    fn step(&mut self, _budget: usize) -> Step {
        if let Some(late) = &self.late {
            let seen = late.bell.value();
            if Instant::now() < late.start {
                return Step::Blocked { seen };
            }
            self.late = None;
        }
        let context = &self.kernel.context;
        match catch_unwind(AssertUnwindSafe(|| self.run())) {
            Ok(Ok(())) => {}
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

    fn bell(&self) -> &Bell {
        static NEVER: Bell = Bell::new();
        self.late.as_ref().map_or(&NEVER, |late| &late.bell)
    }

    fn describe(&self) -> String {
        format!("kernel {} on {}", self.kernel.entry.name, self.stream)
    }
}
