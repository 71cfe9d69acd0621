//! Groups: what a thread queues between `ncclGroupStart` and `ncclGroupEnd`, and what happens at
//! the end.
//!
//! All of it is the thread's own: nesting, the recorded error, the queues. A call outside a group
//! is a group of one. An error that is recorded by a call poisons the group: the outermost end
//! returns it and drops everything that was queued. Errors that are found before a call reaches the
//! group do not, in NCCL and here.
//!
//! At the outermost end: the jobs (init, split, finalize, destroy …) run, each on a thread of its own
//! if there are several; then what all ranks of a communicator do together, one communicator after
//! the other; then the connections that are used for the first time are set up, which may
//! wait for peers; then each communicator's operations become one [`Launch`](super::work::Launch)
//! on its stream. All of this happens in the call, unless the communicators are non-blocking: then
//! it is [`Pending`], and the call returns `ncclInProgress`.

mod jobs;
mod launch;
mod one_sided;
mod operation;
mod pending;
mod tasks;

use std::cell::RefCell;
use std::sync::Arc;

pub(crate) use jobs::{Job, JobKind};
pub(crate) use one_sided::{OneSided, OneSidedTask, enqueue_one_sided};
pub(crate) use operation::{Call, Function, enqueue};
pub(crate) use pending::Pending;
pub(crate) use tasks::{CollectiveTask, MessageTask, Tasks, sort};

use super::communicator::{Communicator, SymmetricTask};
use super::debug::warn;
use crate::code::{Code, IN_PROGRESS, INVALID_ARGUMENT, INVALID_USAGE, Result};

/// The calling thread's group.
#[derive(Default)]
struct Group {
    depth: u32,
    error: Option<Code>,
    /// Whether the outermost end waits; decided by what was queued.
    blocking: Option<bool>,
    jobs: Vec<Job>,
    /// One for each communicator.
    symmetric: Vec<Job>,
    tasks: Vec<Tasks>,
}

thread_local! {
    static GROUP: RefCell<Group> = RefCell::default();
}

/// What the outermost end has to do.
#[derive(Default)]
pub(crate) struct Work {
    jobs: Vec<Job>,
    symmetric: Vec<Job>,
    tasks: Vec<Tasks>,
}

/// `ncclGroupStart`.
pub(crate) fn start() {
    GROUP.with_borrow_mut(|group| group.depth += 1);
}

/// Whether the next end is the outermost one.
pub(crate) fn is_outermost() -> bool {
    GROUP.with_borrow(|group| group.depth == 1)
}

/// `ncclGroupErrCheck`: records the error of a call that reached the group.
pub(crate) fn record(result: Result) -> Result {
    if let Err(code) = result
        && code != IN_PROGRESS
    {
        GROUP.with_borrow_mut(|group| {
            if group.depth > 0 {
                group.error = Some(code);
            }
        });
    }
    result
}

/// The communicators that the open group uses, for faults.
pub(crate) fn communicators() -> Vec<Arc<Communicator>> {
    GROUP.with_borrow(|group| {
        let of_jobs = (group.jobs.iter().chain(&group.symmetric)).map(|job| &job.communicator);
        let of_tasks = group.tasks.iter().map(|tasks| &tasks.communicator);
        of_tasks.chain(of_jobs).cloned().collect()
    })
}

/// Queues a job, in the open group.
pub(crate) fn add_job(job: Job) -> Result {
    GROUP.with_borrow_mut(|group| {
        let wanted = job.communicator.config.blocking;
        if job.communicator.is_destroyed() {
            group.blocking = Some(true);
        } else if *group.blocking.get_or_insert(wanted) != wanted {
            warn!("Blocking and nonblocking communicators are not allowed in the same group.");
            return Err(INVALID_ARGUMENT);
        }
        group.jobs.push(job);
        Ok(())
    })
}

/// Queues what all ranks of a communicator do together, in the open group.
pub(crate) fn add_symmetric(communicator: &Arc<Communicator>, task: SymmetricTask) {
    GROUP.with_borrow_mut(|group| {
        group.blocking = Some(communicator.config.blocking);
        let at = group
            .symmetric
            .iter()
            .position(|job| Arc::ptr_eq(&job.communicator, communicator));
        let at = at.unwrap_or_else(|| {
            let job = Job::new(JobKind::Symmetric, communicator);
            group.symmetric.push(job);
            group.symmetric.len() - 1
        });
        group.symmetric[at].symmetric.push(task);
    });
}

/// Runs a job at once if the thread is in no group, whether the communicator is blocking or not:
/// what `ncclCommInitRank` does. Otherwise queues it.
pub(crate) fn run_or_add_job(job: Job) -> Result {
    if GROUP.with_borrow(|group| group.depth > 0) {
        return add_job(job);
    }
    jobs::run(&[job])
}

/// Gives `add` the queue of a communicator in the open group.
fn with_tasks<T>(communicator: &Arc<Communicator>, add: impl FnOnce(&mut Tasks) -> T) -> T {
    GROUP.with_borrow_mut(|group| {
        group.blocking = Some(communicator.config.blocking);
        let at = group
            .tasks
            .iter()
            .rposition(|tasks| Arc::ptr_eq(&tasks.communicator, communicator));
        let at = at.unwrap_or_else(|| {
            group.tasks.push(Tasks::new(communicator));
            group.tasks.len() - 1
        });
        add(&mut group.tasks[at])
    })
}

/// `ncclGroupEnd`, and the end of every call that opened a group of its own.
pub(crate) fn end() -> Result {
    finish(false)
}

/// `ncclGroupSimulateEnd`: blocking communicators forget their operations; non-blocking ones really
/// launch, in NCCL too.
pub(crate) fn simulate_end() -> Result {
    finish(true)
}

fn finish(simulate: bool) -> Result {
    let (work, blocking) = GROUP.with_borrow_mut(|group| {
        if group.depth == 0 {
            warn!("ncclGroupEnd: not in a group call.");
            return Err(INVALID_USAGE);
        }
        group.depth -= 1;
        if group.depth > 0 {
            return Ok((None, true));
        }
        let blocking = group.blocking.take().unwrap_or(true);
        let work = Work {
            jobs: std::mem::take(&mut group.jobs),
            symmetric: std::mem::take(&mut group.symmetric),
            tasks: std::mem::take(&mut group.tasks),
        };
        match group.error.take() {
            Some(error) => {
                work.give_up(error);
                Err(error)
            }
            None => Ok((Some(work), blocking)),
        }
    })?;
    let Some(mut work) = work.filter(|work| !work.is_empty()) else {
        return Ok(());
    };
    if blocking {
        if simulate {
            work.tasks.clear();
        }
        let result = work.run();
        recycle(work);
        result
    } else {
        Pending::begin(work);
        Err(IN_PROGRESS)
    }
}

/// Keeps the lists for the thread's next group.
fn recycle(mut work: Work) {
    work.jobs.clear();
    work.tasks.clear();
    GROUP.with_borrow_mut(|group| {
        if group.jobs.is_empty() && group.tasks.is_empty() {
            group.jobs = work.jobs;
            group.tasks = work.tasks;
        }
    });
}

impl Work {
    fn is_empty(&self) -> bool {
        !self.has_jobs() && self.tasks.is_empty()
    }

    /// Whether it has more to do than operations.
    fn has_jobs(&self) -> bool {
        !self.jobs.is_empty() || !self.symmetric.is_empty()
    }

    /// Everything at the end of a group.
    fn run(&mut self) -> Result {
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

    /// Whether [`Work::run`] would wait for anything.
    fn waits(&self) -> bool {
        self.has_jobs()
            || self
                .tasks
                .iter()
                .any(|tasks| launch::needs_connections(tasks) || tasks.is_per_thread())
    }

    /// Non-blocking communicators keep the error; everything queued is dropped.
    fn give_up(&self, error: Code) {
        self.communicators()
            .filter(|c| !c.config.blocking)
            .for_each(|c| c.set_state(Err(error)));
    }

    /// Every communicator whose state follows this work: not those that are being destroyed.
    fn communicators(&self) -> impl Iterator<Item = &Arc<Communicator>> {
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
