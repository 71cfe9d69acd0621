//! Mixture of experts over NVIDIA NCCL: tokens are sent to the ranks that have their experts, and back.
#![cfg(not(loom))]
#![allow(
    rustdoc::private_intra_doc_links,
    reason = "an internal crate: who reads its pages reads its sources"
)]

#[cfg(not(target_os = "linux"))]
compile_error!("the nccl crate works on Linux only, as NCCL does");

pub use expert_parallel::{
    Counts, DispatchWay, ExpertCapture, ExpertLayout, ExpertParallel, ExpertParallelBuilder,
    ExpertPlacement, ExpertTransfer, Routing, RoutingMut, TransferPart,
};

use nccl_base::{error, forked, operation};
use nccl_core::{
    active_calls, buffer, collectives, communicator, cuda_driver, drop_queue, dtype, issuing, op,
    queued_op,
};

mod expert_parallel;
