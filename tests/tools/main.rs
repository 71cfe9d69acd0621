//! The programs beside the crate, what they and the crate report about a job, and the helpers of the tests themselves.

#[path = "../support/cgroup.rs"]
mod cgroup;
#[path = "../support/delayed_cable.rs"]
mod delayed_cable;
// Another name than that of the file, because the module of its tests has that one.
#[path = "../support/isolated_hosts.rs"]
mod hosts;
#[path = "../meeting/mod.rs"]
mod meeting;
#[path = "../support/programs.rs"]
mod programs;
#[path = "../support/mod.rs"]
mod support;
#[path = "../support/switch.rs"]
mod switch;

mod device;
mod device_evidence;
mod doctor;
mod examples;
mod host_evidence;
mod isolated_hosts;
mod launch;
mod libraries;
mod manifests;
mod nccl_environment;
mod nccl_run;
mod perf;
mod preflight;
mod pytorch_analyser;
mod ras;
mod recorder;
mod recordings;
mod spawn;
mod support_itself;
