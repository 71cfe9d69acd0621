//! What this process has too little of, asked when a call of NCCL's has failed without saying for want of what.

use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};

use super::facts::Process;
use super::rules::{self, Scarce};
use nccl_base::system::System;
use nccl_base::system::limits;

/// What is the scarcest now, if anything is.
#[doc(hidden)]
pub fn scarce() -> Option<Scarce> {
    // Without a descriptor nothing of what follows can be read.
    let none_left = std::fs::File::open("/proc/self/limits")
        .err()
        .and_then(|error| error.raw_os_error())
        .is_some_and(|number| number == Errno::MFILE.raw_os_error());
    if none_left {
        let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        return Some(Scarce {
            resource: rules::OPEN_FILES,
            text: format!("all {limit} files that may be open are open"),
            fix: String::from("ulimit -n with a larger number before the start"),
        });
    }
    let process = Process {
        limits: limits::gather(&System::real()),
        ..Process::default()
    };
    rules::scarce(&process)
}
