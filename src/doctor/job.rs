//! A running job, as the command line names it.

use std::time::Duration;

use nccl::{Observer, Rendezvous};

use super::options::Job;

/// Joins the job as an observer.
pub(super) fn observe(job: &Job, timeout: Duration) -> Result<Observer, String> {
    let rendezvous = match job {
        // The other settings are in the environment of this process.
        Job::Address(address) => Rendezvous::observer(address)
            .and_then(Rendezvous::job_from_env)
            .map_err(|error| error.to_string()),
        Job::Process(pid) => {
            Rendezvous::of_process(*pid).map_err(|error| format!("by process {pid}: {error}"))
        }
    };
    Observer::join(rendezvous?.with(|meet| meet.timeout = timeout))
        .map_err(|error| error.to_string())
}
