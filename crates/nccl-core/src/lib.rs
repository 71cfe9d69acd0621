//! Safe bindings to NVIDIA NCCL within one process: communicators, their operations, memory, and records of them.
//!
//! These functions need only NCCL's token, however the ranks exchange it. Connections between ranks outside of NCCL belong to a
//! crate above this one and are used through [`peers`]; programs use the crate `nccl`, which has both.
#![cfg(not(loom))]
#![allow(
    rustdoc::private_intra_doc_links,
    reason = "an internal crate: who reads its pages reads its sources"
)]

#[cfg(not(target_os = "linux"))]
compile_error!("the nccl crate works on Linux only, as NCCL does");

pub use nccl_sys::Version;

pub use abort::AbortSignal;
pub use all_to_all::{
    Algorithm as AllToAllAlgorithm, AllToAll, AllToAllBuilder, Alternative, CostModel, Explanation,
    LinkCost, Nodes, Parts, Payloads,
};
pub use background_call::BackgroundCall;
pub use buffer::{AtRunTime, Element, Erased, ErasedMut, RecvBuffer, SendBuffer};
pub use collective_config::CollectiveConfig;
pub use communicator::{
    AbortReport, Communicator, CommunicatorMemory, EndedCommunicator, LaunchMode, Timeouts,
    abort_all, peers,
};
pub use config::{Config, CtaPolicy};
pub use creation::{CommunicatorBuilder, ResizeWay, Resized};
pub use device::device;
pub use dtype::{DataType, NcclType};
pub use fatal::{FatalCause, FatalExit, FatalReport, on_fatal};
pub use group::Group;
pub use groups::{Groups, Requests, group};
pub use library::{Capability, Library};
pub use memory::{Buffer, OwnedBuffer, PlanBuffers, Registered};
pub use nccl_base::error::{Error, ErrorKind, NcclFailure, Result, StreamRefusal};
pub use nccl_base::error_report::{ErrorReport, ReportedOperation};
pub use nccl_base::operation::{Operation, OperationKind};
pub use parameter::Parameter;
pub use plan::{Capture, CapturedPlan, RenewablePlan};
pub use reduce::{PreMulSum, ReduceOp, Reduction};
pub use request::Request;
pub use state::State as CommunicatorState;
pub use unique_id::UniqueId;

use nccl_base::{atomic_file, bounded_write, error, fault, forked, host, operation, sync, time};

mod abort;
pub mod active_calls;
mod all_to_all;
mod background_call;
pub mod buffer;
mod collective_config;
pub mod collectives;
pub mod communicator;
mod config;
mod creation;
pub mod cuda_driver;
mod detached_call;
mod device;
pub mod device_api;
mod digest;
pub mod dlpack;
pub mod drop_queue;
pub mod dtype;
pub mod events;
mod fatal;
mod ffi;
#[cfg(test)]
#[path = "../../../tests/support/gate.rs"]
#[allow(
    unreachable_pub,
    reason = "other tests of the workspace use it as well"
)]
mod gate;
mod graphs;
mod group;
mod groups;
mod identity;
pub mod issuing;
pub mod library;
pub mod memory;
mod monitor;
pub mod one_sided;
pub mod op;
mod operation_comparison;
mod parameter;
mod pending_call;
mod plan;
pub mod queued_op;
pub mod recorder;
pub mod reduce;
mod request;
mod sealed_unique_id;
mod single_rank;
pub mod state;
pub mod stats;
pub mod supervision;
pub mod threads;
mod unique_id;
