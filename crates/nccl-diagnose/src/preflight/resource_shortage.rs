//! The scarcest resource of this process, determined when a call of NCCL has failed without naming it.

use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};

use super::facts::ProcessFacts;
use super::rules::{self, ResourceShortage};
use nccl_base::system::System;
use nccl_base::system::limits;

/// Returns the resource that this process has too little of, if there is one.
#[doc(hidden)]
pub fn resource_shortage() -> Option<ResourceShortage> {
    // Without a free descriptor none of the files below can be read.
    let none_left = std::fs::File::open("/proc/self/limits")
        .err()
        .and_then(|error| error.raw_os_error())
        .is_some_and(|number| number == Errno::MFILE.raw_os_error());
    if none_left {
        let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        return Some(ResourceShortage {
            resource: rules::OPEN_FILES,
            text: format!("all {limit} files that may be open are open"),
            fix: String::from("ulimit -n with a larger number before the start"),
        });
    }
    let process = ProcessFacts {
        limits: limits::gather(&System::real()),
        ..ProcessFacts::default()
    };
    rules::resource_shortage(&process)
}
