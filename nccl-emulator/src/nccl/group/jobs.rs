//! The jobs of a group: all its work other than operations on a stream.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use crate::code::{Result, SYSTEM};
use crate::nccl::communicator::{
    ChildRequest, Communicator, InitRequest, SymmetricTask, create_child, finalize, init, reclaim,
    revoke, run_symmetric,
};
use crate::nccl::debug::{info, subsystem, warn};

/// The kind of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum JobKind {
    /// Creates the communicator.
    Init,
    /// Makes a child of the communicator: a split or a shrink.
    Child,
    /// Does the work that all ranks do together before operations.
    Symmetric,
    /// Stops the work of the communicator.
    Revoke,
    /// Flushes the communicator.
    Finalize,
    /// Destroys or aborts the communicator.
    Reclaim,
}

/// A job.
#[derive(Clone)]
pub(crate) struct Job {
    pub(crate) kind: JobKind,
    pub(crate) communicator: Arc<Communicator>,
    /// The request of an init.
    pub(crate) request: Option<Arc<InitRequest>>,
    /// The request of a split or a shrink.
    pub(crate) child: Option<Arc<ChildRequest>>,
    /// The tasks of a symmetric job.
    pub(crate) symmetric: Vec<SymmetricTask>,
}

impl Job {
    /// Creates a job without a request.
    pub(crate) fn new(kind: JobKind, communicator: &Arc<Communicator>) -> Self {
        Self {
            kind,
            communicator: Arc::clone(communicator),
            request: None,
            child: None,
            symmetric: Vec::new(),
        }
    }

    fn run(&self) -> Result {
        let waits_for_threads = matches!(self.kind, JobKind::Reclaim | JobKind::Revoke);
        let _inside = (!waits_for_threads).then(|| self.communicator.enter());
        match (self.kind, &self.request) {
            (JobKind::Init, Some(request)) => init(&self.communicator, request),
            (JobKind::Init, None) => unreachable!("an init comes with its request"),
            (JobKind::Child, _) => {
                let request = self.child.as_ref().expect("a child comes with its request");
                create_child(&self.communicator, request)
            }
            (JobKind::Symmetric, _) => run_symmetric(&self.communicator, &self.symmetric),
            (JobKind::Revoke, _) => revoke(&self.communicator),
            (JobKind::Finalize, _) => finalize(&self.communicator),
            (JobKind::Reclaim, _) => reclaim(&self.communicator),
        }
    }
}

/// Runs all jobs concurrently and returns the first error. When a job fails, the jobs still running
/// are aborted: they may be waiting for it.
pub(super) fn run(jobs: &[Job]) -> Result {
    let [first, others @ ..] = jobs else {
        return Ok(());
    };
    if others.is_empty() {
        return first.run();
    }
    let failed = AtomicBool::new(false);
    thread::scope(|scope| {
        let spawn = |job: &'_ Job| {
            let failed = &failed;
            let job = job.clone();
            thread::Builder::new()
                .name("nccl-job".to_owned())
                .spawn_scoped(scope, move || {
                    let result = job.run();
                    if let Err(error) = result {
                        info!(
                            subsystem::INIT,
                            "{} -> {} [Async thread]",
                            file!(),
                            error.number()
                        );
                        failed.store(true, Ordering::Release);
                    }
                    result
                })
        };
        let mut handles = Vec::with_capacity(jobs.len());
        for job in jobs {
            match spawn(job) {
                Ok(handle) => handles.push(handle),
                Err(error) => {
                    warn!("nccl-emulator cannot start a thread: {error}");
                    failed.store(true, Ordering::Release);
                    break;
                }
            }
        }
        let all_started = handles.len() == jobs.len();
        let mut aborted = false;
        while handles.iter().any(|handle| !handle.is_finished()) {
            if failed.load(Ordering::Acquire) && !aborted {
                aborted = true;
                jobs.iter()
                    .filter(|job| job.kind != JobKind::Reclaim)
                    .for_each(|job| job.communicator.raise_abort());
            }
            thread::sleep(std::time::Duration::from_micros(100));
        }
        let results = handles
            .into_iter()
            .map(|handle| handle.join().unwrap_or(Err(crate::code::INTERNAL)));
        let result = results
            .reduce(|first, next| first.and(next))
            .unwrap_or(Ok(()));
        if all_started { result } else { Err(SYSTEM) }
    })
}
