//! Safe bindings to NVIDIA NCCL: communicators, collectives, grouped messages and all-to-all, with a
//! deadline on everything that can wait.
//!
//! ```
//! use nccl::{ReduceOp, World};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # nccl_emulator::install_unless_gpu()?;
//! let world = World::single(); // or World::join(Rendezvous::from_env()?)?
//! let stream = nccl::device(world.local_rank())?.new_stream()?;
//! let comm = world.communicator("demo").stream(&stream).build()?;
//!
//! let x = stream.clone_htod(&[1.0f32, 2.0, 3.0])?;
//! let mut y = stream.alloc_zeros::<f32>(3)?;
//! comm.all_reduce(&x, &mut y, ReduceOp::Sum)?.wait()?;
//! assert_eq!(stream.clone_dtoh(&y)?, [1.0, 2.0, 3.0]);
//! # Ok(())
//! # }
//! ```
//!
//! Without a GPU [`device()`] is an error that says so. For tests, and for programs that are to run on a laptop as well, the crate
//! `nccl-emulator` takes NCCL's place: `nccl_emulator::install_unless_gpu()` before anything else does nothing where there is a
//! GPU. A program for GPUs leaves it out, so that it does not go on with the CPU when its driver is missing.
//!
//! # Overview
//! - [`Library`]: which libnccl is loaded, what it can do.
//! - [`World`], [`Rendezvous`]: how ranks find each other; [`Observer`]: watching them.
//! - [`debug_log`]: what NCCL's own logs of several ranks say.
//! - [`preflight`]: what must agree or be reachable before NCCL is started.
//! - [`Communicator`]: the ranks that work together; its operations take `&self` and return a
//!   [`Request`] to poll, wait for or `.await`.
//! - [`Group`]: several operations issued together; [`group`]: those of several communicators.
//! - [`SendBuffer`], [`RecvBuffer`]: memory, typed, [`Erased`], or raw.
//! - [`Buffer`], [`Registered`]: memory of NCCL's own allocator, and memory that it knows beforehand.
//! - [`CapturedPlan`]: operations that are captured once and launched many times.
//! - [`AllToAll`], [`CostModel`]: an all-to-all that is planned once, by the algorithm that fits.
//! - [`Timeouts`], [`AbortSignal`], [`LaunchMode`]: how long everything may take, and how it is ended.
//! - [`ExpertParallel`]: mixture of experts: routing, dispatch and combine.
//! - [`recorder`]: the last calls of every communicator, and of all ranks together.
//! - [`stats()`]: how much was done, and how it stands; as metrics with the feature `metrics`.
//! - [`launch`]: the processes of ranks: starting, watching, restarting them.
//! - [`Error`]: what went wrong, where, and what to do.
//!
//! # Memory
//! Safe code cannot free memory that an operation still uses, and cannot read or overwrite it on the
//! buffer's own stream or through this crate. On other streams cudarc's events see to that, and they know
//! the last reader only: see `docs/streams-and-memory.md`. Allocate what you
//! communicate on the communicator's stream: the order of that stream then does all the work, at no
//! cost. A buffer of another stream works as well; the two streams are then joined by events, which
//! stalls the other stream until the operation is done.
//!
//! # Features
//! - `float8`: the types of the crate `float8` as elements, as cudarc's feature `f8` has them.
//! - `metrics`: [`stats()`] as metrics of the facade of that name: counters, gauges and histograms.
//!
//! cudarc is re-exported as [`cudarc`]; this crate names neither a CUDA version nor a way to link of it,
//! so that whatever else is in the build may.
#![cfg(not(loom))]

#[cfg(not(target_os = "linux"))]
compile_error!("the nccl crate works on Linux only, as NCCL does");

pub use cudarc;
pub use nccl_sys::Version;

pub use abort::AbortSignal;
pub use all_to_all::{
    Algorithm as AllToAllAlgorithm, AllToAll, AllToAllBuilder, Alternative, CapturedAllToAll,
    CostModel, Explanation, LinkCost, Nodes, Parts, Payloads,
};
pub use buffer::{AtRunTime, Element, Erased, ErasedMut, RecvBuffer, SendBuffer};
pub use communicator::{
    AbortReport, Communicator, CommunicatorBuilder, EndedCommunicator, GrowWay, Grown, LaunchMode,
    ShrinkWay, Shrunk, State as CommunicatorState, Timeouts, abort_all, leaked_communicators,
};
pub use config::{Config, CtaPolicy};
pub use device::device;
pub use dtype::{DataType, NcclType};
pub use expert_parallel::{Counts, ExpertLayout, ExpertParallel, ExpertParallelBuilder, Routing};
pub use fatal::{FatalCause, FatalExit, FatalReport, on_fatal};
pub use group::Group;
pub use groups::{Groups, Requests, group};
pub use library::{Capability, Library};
pub use memory::{Buffer, OwnedBuffer, PlanBuffers, Registered};
pub use nccl_base::error::{Error, ErrorKind, NcclFailure, Result, StreamRefusal};
pub use nccl_base::error_report::{ErrorReport, ReportedOperation};
pub use nccl_base::fault::{
    Differs, Earlier, Ending, Fault, FaultClass, FaultRole, RootCause, Side, Waiting,
};
pub use nccl_base::operation::{Operation, OperationKind};
pub use nccl_control::{
    Channel, ChannelMessage, Events, RankEnd, RankState, Rendezvous, Subgroup, WorldEvent,
    WorldState, install_panic_hook,
};
pub use observer::Observer;
pub use plan::{Capture, CapturedPlan};
pub use reduce::{PreMulSum, ReduceOp, Reduction};
pub use request::Request;
pub use stats::{Stats, stats};
pub use supervision::recorder;
pub use unique_id::UniqueId;
pub use world::World;

use nccl_base::{error, fault, forked, host, operation, say, sync, time, visible, whole_file};
use nccl_control as rendezvous;

mod abort;
mod all_to_all;
mod buffer;
mod collectives;
mod communicator;
mod config;
pub mod debug_log;
mod device;
mod driver;
mod dtype;
mod envelope;
mod events;
mod expendable;
mod expert_parallel;
mod fatal;
mod ffi;
mod group;
mod groups;
pub mod launch;
mod library;
mod local;
mod memory;
#[cfg(feature = "metrics")]
pub mod metrics;
mod observer;
mod plan;
pub mod preflight;
mod reaper;
mod recorded;
mod reduce;
mod request;
pub mod stats;
mod supervision;
mod threads;
mod unique_id;
mod world;
