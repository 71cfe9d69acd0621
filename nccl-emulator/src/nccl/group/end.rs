//! The work at the outermost end of a group.

use std::sync::Arc;

use super::jobs::{self, Job, JobKind};
use super::launch;
use super::tasks::Tasks;
use crate::code::{Code, Result};
use crate::nccl::communicator::Communicator;

/// The work of the outermost end.
#[derive(Default)]
pub(super) struct Work {
    pub(super) jobs: Vec<Job>,
    pub(super) symmetric: Vec<Job>,
    pub(super) tasks: Vec<Tasks>,
}

impl Work {
    pub(super) fn is_empty(&self) -> bool {
        !self.has_jobs() && self.tasks.is_empty()
    }

    /// Whether there is work other than operations.
    pub(super) fn has_jobs(&self) -> bool {
        !self.jobs.is_empty() || !self.symmetric.is_empty()
    }

    /// Runs all the work.
    pub(super) fn run(&mut self) -> Result {
        let result = self.try_run();
        match result {
            Ok(()) => self
                .communicators()
                .filter(|c| !c.config.blocking)
                .for_each(|c| c.set_state(Ok(()))),
            Err(error) => self.give_up(error),
        }
        result
    }

    fn try_run(&mut self) -> Result {
        jobs::run(&self.jobs)?;
        self.symmetric.sort_by_key(|job| job.communicator.hash);
        self.symmetric
            .chunk_by(|a, b| a.communicator.hash == b.communicator.hash)
            .try_for_each(jobs::run)?;
        self.tasks.iter().try_for_each(launch::check_events)?;
        self.tasks.sort_by_key(|tasks| tasks.communicator.hash);
        launch::connect(&self.tasks)?;
        launch::check_captures(&self.tasks)?;
        self.tasks.iter_mut().try_for_each(launch::launch)
    }

    /// Whether [`Work::run`] would wait.
    pub(super) fn waits(&self) -> bool {
        self.has_jobs()
            || self
                .tasks
                .iter()
                .any(|tasks| launch::needs_connections(tasks) || tasks.is_per_thread())
    }

    /// Sets the error as the state of the non-blocking communicators.
    pub(super) fn give_up(&self, error: Code) {
        self.communicators()
            .filter(|c| !c.config.blocking)
            .for_each(|c| c.set_state(Err(error)));
    }

    /// Returns every communicator whose state follows this work, without those that are being
    /// destroyed.
    pub(super) fn communicators(&self) -> impl Iterator<Item = &Arc<Communicator>> {
        let of_jobs = self
            .jobs
            .iter()
            .chain(&self.symmetric)
            .filter(|job| job.kind != JobKind::Reclaim)
            .map(|job| &job.communicator);
        self.tasks
            .iter()
            .map(|tasks| &tasks.communicator)
            .chain(of_jobs)
    }
}
