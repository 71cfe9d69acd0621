//! What is wrong with a host, among hosts, or in what NCCL printed: found before a start, and afterwards.
#![cfg(not(loom))]
#![allow(
    rustdoc::private_intra_doc_links,
    reason = "an internal crate: who reads its pages reads its sources"
)]

#[cfg(not(target_os = "linux"))]
compile_error!("the nccl crate works on Linux only, as NCCL does");

use nccl_base::{error, host, operation, sync};

pub mod debug_log;
pub mod preflight;
pub mod timeline;
