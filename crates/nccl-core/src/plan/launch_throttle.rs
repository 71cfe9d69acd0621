//! Bounds how far a plan's launches run ahead of the device.

use std::time::Instant;

use cudarc::driver::CudaEvent;

use crate::active_calls::CallKind;
use crate::communicator::{Backoff, Communicator};
use crate::cuda_driver;
use crate::error::{Error, ErrorKind, Result};
use crate::time::deadline_after;

/// Limits the launches of a plan in flight. CUDA blocks a launch, without a timeout, while too many are in flight, so
/// the plan queries an event now and then, with a timeout.
pub(super) struct LaunchThrottle {
    pub(super) launches: u64,
    /// Recorded alternately behind launches.
    marks: [CudaEvent; 2],
}

/// The number of launches between two events.
const STRIDE: u64 = 64;

impl LaunchThrottle {
    pub(super) fn new(marks: [CudaEvent; 2]) -> Self {
        Self { launches: 0, marks }
    }

    /// Waits, before a launch, until enough earlier launches are over.
    pub(super) fn wait(&self, comm: &Communicator, plan: u64) -> Result<()> {
        if self.launches == 0 || !self.launches.is_multiple_of(STRIDE) {
            return Ok(());
        }
        let deadline = deadline_after(comm.timeout);
        let mut backoff = Backoff::new();
        // The older of the two events, which is about to be recorded again; at first it is not recorded yet.
        let mark = &self.marks[(self.launches / STRIDE % 2) as usize];
        let _ = cuda_driver::bind(mark.context());
        let is_over = || {
            let _inside = comm.inner.enter(CallKind::Query, comm.timeout);
            cuda_driver::is_reached(mark).map_err(Error::cuda(
                "asking whether earlier launches are done (cuEventQuery)",
            ))
        };
        while !is_over()? {
            if comm.inner.interrupted() {
                return Err(comm.inner.out_of_use());
            }
            if Instant::now() >= deadline {
                let error = Error::new(ErrorKind::TimedOut {
                    what: format!("one of {} launches of plan {plan}", 2 * STRIDE),
                    timeout: comm.timeout,
                });
                let now = Instant::now();
                let error = error.during(|| comm.inner.replay_of(plan, now));
                comm.inner.abort(&error);
                return Err(error);
            }
            backoff.pause();
        }
        Ok(())
    }

    /// Records an event after every `STRIDE` launches.
    pub(super) fn mark(&mut self, comm: &Communicator) {
        if self.launches > 0 && self.launches.is_multiple_of(STRIDE) {
            let mark = &self.marks[(self.launches / STRIDE % 2) as usize];
            if let Err(error) = cuda_driver::record(mark, &comm.stream) {
                tracing::warn!(name: "nccl.internal", target: "nccl", what = "launch", %error, "an event behind a launch was not recorded");
            }
        }
        self.launches += 1;
    }
}
