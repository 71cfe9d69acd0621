//! Finds faults of a host, among hosts, and in NCCL's logs: before a start (`preflight`), and afterwards (`debug_log`,
//! `host_evidence`, `timeline`).
#![cfg(not(loom))]
#![allow(
    rustdoc::private_intra_doc_links,
    reason = "an internal crate: who reads its pages reads its sources"
)]

#[cfg(not(target_os = "linux"))]
compile_error!("the nccl crate works on Linux only, as NCCL does");

use nccl_base::{error, host, operation, sync};

pub mod debug_log;
pub mod host_evidence;
pub mod preflight;
pub mod ras;
mod regular_file;
pub mod timeline;
