//! The calling thread's group: its nesting, its queues, and its end.

use std::cell::RefCell;
use std::sync::Arc;

use super::end::Work;
use super::jobs::{self, Job, JobKind};
use super::pending::Pending;
use super::tasks::Tasks;
use crate::code::{Code, IN_PROGRESS, INVALID_ARGUMENT, INVALID_USAGE, Result};
use crate::nccl::communicator::{Communicator, SymmetricTask};
use crate::nccl::debug::warn;
use crate::nccl::profiler;

/// The calling thread's group.
#[derive(Default)]
struct Group {
    depth: u32,
    error: Option<Code>,
    /// Whether the outermost end waits; set by the queued work.
    blocking: Option<bool>,
    jobs: Vec<Job>,
    /// One job for each communicator.
    symmetric: Vec<Job>,
    tasks: Vec<Tasks>,
}

thread_local! {
    static GROUP: RefCell<Group> = RefCell::default();
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

/// Returns the communicators that the open group uses, for faults.
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

/// Queues a task that all ranks of a communicator do together, in the open group.
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

/// Runs a job at once if the thread is in no group, whether the communicator is blocking or not, as
/// `ncclCommInitRank` does. Otherwise queues the job.
pub(crate) fn run_or_add_job(job: Job) -> Result {
    if GROUP.with_borrow(|group| group.depth > 0) {
        return add_job(job);
    }
    jobs::run(&[job])
}

/// Calls `add` with the queue of a communicator in the open group.
pub(super) fn with_tasks<T>(
    communicator: &Arc<Communicator>,
    add: impl FnOnce(&mut Tasks) -> T,
) -> T {
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
        group.tasks[at].depth = group.depth;
        add(&mut group.tasks[at])
    })
}

/// `ncclGroupEnd`, and the end of the implicit group of a call.
pub(crate) fn end() -> Result {
    profiled(false)
}

/// `ncclGroupSimulateEnd`: blocking communicators drop their operations. Non-blocking communicators
/// launch theirs, in NCCL too.
pub(crate) fn simulate_end() -> Result {
    profiled(true)
}

/// [`finish`], and a profiler is told of it.
fn profiled(simulate: bool) -> Result {
    profiler::group_ends();
    let result = finish(simulate);
    profiler::group_ended();
    result
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
