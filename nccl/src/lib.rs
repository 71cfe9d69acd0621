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
//! Without a GPU, [`device()`] returns an error that says so. For tests, and for programs that also run on a laptop,
//! the crate `nccl-emulator` takes NCCL's place: `nccl_emulator::install_unless_gpu()`, called first, does nothing
//! where there is a GPU. A program for GPUs leaves it out, so that it does not continue on the CPU when its driver is
//! missing.
//!
//! # Overview
//! 1. [`World`]: the ranks of a job, after they have met; [`Rendezvous`] says where they meet. [`Observer`] watches
//!    them; [`control`] has what they exchange beside NCCL.
//! 2. [`Communicator`]: ranks that work together (`ncclComm_t`); its operations take `&self`. [`CommunicatorBuilder`] sets [`Timeouts`]
//!    and [`Config`].
//! 3. [`Request`]: what an operation returns: poll it, wait for it, or `.await` it.
//! 4. [`Group`]: several operations issued together, including point-to-point messages (`isend`, `irecv`); [`group()`]:
//!    operations of several communicators.
//!
//! An operation reads a [`SendBuffer`] and writes a [`RecvBuffer`]: cudarc's slices and views, a [`Buffer`],
//! [`Registered`] memory, or [`Erased`] where the type is known only at run time. [`Error`] says what went wrong,
//! where, and what to do.
//!
//! | module | for |
//! |---|---|
//! | [`all_to_all`] | an all-to-all that is planned once, with the algorithm chosen by cost |
//! | [`device_api`] | kernels that access the memory of other ranks |
//! | [`one_sided`] | writing into the memory of another rank: windows, puts, signals |
//! | [`plan`] | operations that are captured once and launched many times |
//! | [`moe`] | mixture of experts: routing, dispatch and combine |
//! | [`dlpack`] | tensors of other libraries |
//! | [`fault`] | why a communicator ended: root cause, culprit, evidence |
//! | [`error`] | parts of an error, and errors as plain values |
//! | [`control`] | what ranks exchange beside NCCL: events, channels, states |
//! | [`process`] | ending all communicators of a process; ending a process that cannot continue |
//! | [`launch`] | starting, watching and restarting the processes of ranks |
//! | [`preflight`] | what must agree or be reachable before NCCL is started |
//! | [`recorder`] | the flight recorder: the last calls of every communicator, and of all ranks together |
//! | [`stats`](mod@stats) | counters and current state of this process; as metrics with the feature `metrics` |
//! | [`debug_log`] | what NCCL's own logs of several ranks show |
//! | [`ras`] | what NCCL's own RAS service knows of the ranks |
//! | [`host_evidence`] | what the host shows of a failure: Xid messages, killed processes, stuck threads |
//!
//! `docs/glossary.md` has the terms.
//!
//! # Memory
//! Safe code cannot free memory that an operation still uses, and cannot read or overwrite it on the
//! buffer's own stream or through this crate. On other streams cudarc's events order the accesses, and they record
//! the last reader only: see `docs/streams-and-memory.md`. Allocate what you
//! communicate on the communicator's stream: the order of that stream then suffices, at no
//! cost. A buffer of another stream works as well; the two streams are then joined by events, which
//! stalls the other stream until the operation is done.
//!
//! # Features
//! - `world` (default): [`World`] and everything that connects the ranks beside NCCL: one fault for all of them, checks before a
//!   start, [`launch`], [`debug_log`], timelines. Without it, the program distributes NCCL's token to the ranks itself
//!   ([`Communicator::builder`]), and each rank handles faults alone: half of the code, and no sockets.
//! - `half` (default): `half::f16` and `half::bf16` as elements.
//! - `moe` (default): [`moe::ExpertParallel`].
//! - `float8`: the types of the crate `float8` as elements, as cudarc's feature `f8` has them.
//! - `nvml`: state of the devices from NVIDIA's management library, in faults and checks; the library is loaded at run
//!   time.
//! - `metrics`: [`stats()`] as counters, gauges and histograms of the facade crate `metrics`.
//!
//! cudarc is re-exported as [`cudarc`]; this crate selects neither its CUDA version nor how it is linked, so that other
//! crates of the build can.
#![cfg(not(loom))]

#[cfg(not(target_os = "linux"))]
compile_error!("the nccl crate works on Linux only, as NCCL does");

pub use cudarc;
pub use nccl_sys::Version;

pub use mesh::Mesh;
pub use nccl_base::error::{Error, ErrorKind, Result};
pub use nccl_base::operation::{Operation, OperationKind};
#[cfg(feature = "world")]
pub use nccl_control::Rendezvous;
pub use nccl_core::{
    AbortSignal, AtRunTime, BackgroundCall, Buffer, Capability, CollectiveConfig, Communicator,
    CommunicatorBuilder, CommunicatorMemory, CommunicatorState, Config, CtaPolicy, DataType,
    Element, Erased, ErasedMut, Group, Groups, LaunchMode, Library, NcclType, OwnedBuffer,
    Parameter, PreMulSum, RecvBuffer, ReduceOp, Reduction, Registered, Request, Requests,
    ResizeWay, Resized, SendBuffer, Timeouts, UniqueId, device, group,
};
#[cfg(feature = "world")]
pub use observer::Observer;
pub use stats::read::stats;
#[cfg(feature = "world")]
pub use world::World;

use nccl_base::operation;
#[cfg(feature = "world")]
use nccl_base::{forked, host, sync, time};
#[cfg(feature = "world")]
use nccl_core::{communicator, drop_queue, events, peers, threads};
use nccl_core::{library, op};

pub mod all_to_all {
    //! An all-to-all that is planned once, with the algorithm chosen by cost.
    //!
    //! [`Communicator::all_to_all`](crate::Communicator::all_to_all) needs none of this. A plan ([`AllToAll::plan`]) is
    //! checked once, compared with the plans of the other ranks, and its algorithm chosen by a [`CostModel`];
    //! [`Explanation`] gives the reason for the choice.

    pub use nccl_core::{
        AllToAll, AllToAllAlgorithm, AllToAllBuilder, Alternative, CostModel, Explanation,
        LinkCost, Nodes, Parts, Payloads,
    };
}
#[cfg(feature = "world")]
pub mod control {
    //! What the ranks of a [`World`](crate::World) exchange beside NCCL.
    //!
    //! - [`Events`]: what happens to the ranks, as values ([`WorldEvent`]); [`WorldState`]: their current state.
    //! - [`Channel`], [`Subgroup`], [`CompareSet`]: messages, exchanges and the store of a program; [`ProposedStep`]:
    //!   agreement on the next step.
    //! - [`Discovery`]: where to find the coordinator; [`Secret`]: what a process has to know to be admitted;
    //!   [`Witness`]: a process that votes and has no rank.

    pub use nccl_control::{
        Channel, ChannelMessage, CompareSet, Discovery, Events, RankEnd, RankState, Secret, Slot,
        Subgroup, Witness, WorldEvent, WorldState,
    };

    pub use crate::proposed_step::ProposedStep;
}
#[cfg(feature = "world")]
pub mod debug_log {
    //! NCCL's debug logs of several ranks: what each rank uses, and what is wrong between them.
    //!
    //! With `NCCL_DEBUG=INFO` every rank writes some hundred lines about the network it chose, the path to each other
    //! rank, and what it waits for, to its output or to a file of its own. The fault rarely shows in the log of one
    //! rank, but in a comparison of all logs: the rank that fell back to sockets, the host with another interface, the
    //! earliest warning. [`DebugLog`] reads such logs of every release since 2.18, also when they are mixed with a
    //! program's own output, and [`DebugLog::report`] compares them.

    pub use nccl_base::warning::Class;
    pub use nccl_diagnose::debug_log::{
        Counts, DebugLog, Ended, Endpoint, InitState, Link, Membership, PluginFact, PluginState,
        Process, Retry, Transport, Warning,
    };
}
/// For `nccl-candle`, whose calls of CUDA must not break a capture of the program either.
#[doc(hidden)]
pub mod cuda_driver {
    pub use nccl_core::cuda_driver::{bind, is_reached, record, undisturbed};
}
pub mod dlpack {
    //! Tensors of other libraries, in DLPack's layout: `__dlpack__` of PyTorch, JAX, CuPy and TVM.
    //!
    //! For a `__cuda_array_interface__`, pass the address, number of elements and type in its dictionary to
    //! [`Erased::from_raw`](crate::Erased::from_raw).

    pub use nccl_core::dlpack::{Device, ElementType, Tensor};
}
#[doc = include_str!("../errors.md")]
pub mod error {

    pub use nccl_base::error::{NcclFailure, StreamRefusal};
    pub use nccl_base::error_report::{ErrorReport, ReportedOperation};
}
pub mod fault {
    //! Why a communicator was ended: the cause that all of its ranks return.

    pub use nccl_base::fault::{
        Ending, Fault, FaultClass, FaultRole, MismatchField, MismatchSide, PastEvent, RootCause,
        Waiting,
    };
}
#[cfg(feature = "world")]
pub mod host_evidence {
    //! Evidence of a failure on the host: NVIDIA's messages in the kernel's log (Xid, SXid), processes killed by the
    //! out-of-memory killer, shortage of memory, threads stuck in the kernel, and devices in trouble.
    //!
    //! Every rank gathers this evidence when a communicator fails, and the [`Fault`](crate::fault::Fault) contains it
    //! ([`Fault::host_evidence`](crate::fault::Fault::host_evidence)); `docs/root-cause.md` describes it. A program
    //! gathers it with [`HostEvidence::gather`]. `NCCL_RUN_KMSG` names a file to read instead of `/dev/kmsg`. With the
    //! feature `nvml`, devices are queried through NVIDIA's management library; `NCCL_RUN_NVML` names another library,
    //! or disables the query with 0.

    pub use nccl_diagnose::host_evidence::{
        DeviceState, DeviceTrouble, Devices, HostEvidence, KernelEvent, KernelEventKind, KernelLog,
        LogAccess, Memory, NvlinkError, NvmlAccess, OomKill, ThreadState, ThrottleReason, Xid,
        build_id,
    };
}
#[cfg(feature = "world")]
pub mod launch {
    //! Starting the ranks of a world on this host, watching them, and ending them: the library behind `nccl-run`.
    //!
    //! ```
    //! use std::process::Command;
    //! use nccl::launch::Fleet;
    //!
    //! let fleet = Fleet::builder(4).start(|_| {
    //!     let mut command = Command::new("sh");
    //!     command.args(["-c", "echo I am $NCCL_RUN_RANK of $NCCL_RUN_WORLD_SIZE"]);
    //!     command
    //! })?;
    //! assert!(fleet.wait().is_success());
    //! # Ok::<(), nccl::Error>(())
    //! ```
    //!
    //! # What a rank gets
    //! The variables that [`Rendezvous::from_env`](crate::Rendezvous::from_env) reads, a fresh secret in a file that
    //! only this user can read, and a process group of its own. So Ctrl-C at a terminal reaches the process that
    //! started the fleet and not the ranks; that process decides how to react. This module installs no signal handler,
    //! waits for no children that it did not start, and does not change this process's environment.
    //!
    //! # What is ended, and when
    //! A rank is its process group: the process that was started and its descendants, unless one moves into a group of
    //! its own.
    //!
    //! - When a rank's first process ends, the rest of its group has half a second to close the rank's output, and is
    //!   then killed.
    //! - When a rank fails, the others may continue for a while ([`FleetBuilder::linger`]), are sent SIGTERM, and after
    //!   a while ([`FleetBuilder::grace`]) SIGKILL; or they are left alone ([`FleetBuilder::keep_others`]).
    //! - When the [`Fleet`] is dropped, all groups are killed.
    //! - When this process ends in any way, including SIGKILL, the kernel kills the ranks' first processes, and a small
    //!   shell process of every fleet kills all groups and removes the fleet's directory. Without `/bin/sh`, only the
    //!   first processes are killed. A child that this process forks without `exec` shares the connection to the shell;
    //!   the shell does not act until that child has ended as well.
    //!
    //! # Which rank died first
    //! The fleet notices ends through process descriptors (pidfd), in the order in which the kernel reports them.
    //! [`Report::first`] is the first end that was not requested; [`RankEnd`] has what is known about it.
    //!
    //! Ranks that have joined their `World` learn of it as well: the fleet takes part in the world as an `Observer`, so
    //! that their errors say "killed by SIGKILL" and what the dead rank wrote last, rather than that its connection
    //! closed.

    pub use crate::local_ranks::local_ranks;
    pub use nccl_base::departure::Signal;
    pub use nccl_launch::{
        Event, Events, Exit, Fleet, FleetBuilder, Line, OomKill, Output, RankEnd, Report, Stream,
    };

    /// For `nccl-run`, and for programs that start ranks as it does.
    #[doc(hidden)]
    pub use nccl_base::{bounded_write::write_within, sanitize};
    #[doc(hidden)]
    pub use nccl_control::find_wrong_address;
}
#[cfg(all(feature = "metrics", feature = "world"))]
mod kernel_metrics;
#[cfg(feature = "metrics")]
pub mod metrics;
#[cfg(feature = "moe")]
pub mod moe {
    //! Mixture of experts: routing, dispatch and combine ([`ExpertParallel`]).

    pub use nccl_moe::{
        Counts, DispatchWay, ExpertCapture, ExpertLayout, ExpertParallel, ExpertParallelBuilder,
        ExpertPlacement, ExpertTransfer, Routing, RoutingMut, TransferPart,
    };
}
#[cfg(feature = "world")]
mod json_values;
#[cfg(feature = "world")]
mod observer;
pub mod device_api {
    //! Support for kernels that access the memory of other ranks themselves: what a communicator can do
    //! ([`Communicator::properties`](crate::Communicator::properties)), which ranks reach each other ([`Team`]), at
    //! which address ([`Window::peer_address`](crate::one_sided::Window::peer_address)), for how long
    //! ([`Communicator::hold_windows`](crate::Communicator::hold_windows)), and the argument of kernels that use NCCL's
    //! device functions ([`DeviceCommunicator`]).

    pub use nccl_core::device_api::{
        DeviceArgument, DeviceCommunicator, DeviceRequirements, Gin, Properties, Team, WindowHold,
    };
    #[cfg(feature = "lsa")]
    pub use nccl_lsa::{LoadStoreAllToAll, LoadStoreRequest};
}
pub mod one_sided {
    //! Writes into the memory of another rank, without a call on that rank: windows, puts and signals.
    //!
    //! All ranks make a [`Window`] together ([`Communicator::window`](crate::Communicator::window)); each owns its
    //! part. A put writes into another rank's part and signals that rank, which waits for the signal before it reads.
    //! No rank waits until another is ready, so the program has to arrange which part may be written when.
    //!
    //! An all-to-all by puts, from one window to another:
    //!
    //! ```
    //! use nccl::one_sided::{Signals, Target, Window};
    //!
    //! fn exchange(x: &Window<f32>, y: &mut Window<f32>) -> nccl::Result<()> {
    //!     let comm = y.communicator().clone();
    //!     let (own, ranks) = (comm.rank(), comm.world_size());
    //!     let n = x.len() / ranks;
    //!     comm.group(|group| {
    //!         (0..ranks).try_for_each(|peer| {
    //!             group.put(x.view().slice(peer * n..(peer + 1) * n), y, Target::rank(peer).at(own * n))
    //!         })
    //!     })?;
    //!     let from_all: Vec<_> = (0..ranks).map(Signals::from).collect();
    //!     y.wait(&from_all)?.wait()
    //! }
    //! ```

    pub use nccl_core::one_sided::{Signals, Target, Window};
}
pub mod plan {
    //! Operations that are captured once and launched many times ([`Communicator::capture`](crate::Communicator::capture)).

    pub use nccl_core::{Capture, CapturedPlan, PlanBuffers, RenewablePlan};
}
#[cfg(feature = "world")]
mod local_ranks;
mod mesh;
#[cfg(feature = "world")]
mod nccl_environment;
#[cfg(feature = "world")]
mod nccl_profiler;
#[cfg(feature = "world")]
mod network_retries;
#[cfg(feature = "world")]
pub mod preflight;
pub mod process {
    //! All communicators of this process, ending a process that cannot continue, and NCCL's settings for a process.

    #[cfg(feature = "world")]
    pub use crate::network_retries::NetworkRetries;
    #[cfg(feature = "world")]
    pub use nccl_control::install_panic_hook;
    pub use nccl_core::{
        AbortReport, EndedCommunicator, FatalCause, FatalExit, FatalReport, abort_all, on_fatal,
    };
}
#[cfg(feature = "world")]
pub mod ras {
    //! NCCL's RAS service: what every process of a job knows about all ranks, from NCCL's own counters.
    //!
    //! From 2.24 each process that uses NCCL has a RAS thread, which listens for clients. A [`RasClient`] queries one
    //! of these threads, which queries the others. For each communicator, the answer has the number of collectives that
    //! each rank has launched ([`RasReport::lagging`] finds the ranks that have launched fewer), and the ranks that do
    //! not answer. It covers neither completion, nor sends and receives, nor launches of captured graphs.
    //!
    //! Several releases of NCCL have crashed when queried repeatedly: query once, when something hangs.

    pub use nccl_diagnose::ras::{
        LaggingRank, MissingRasRank, MissingStatus, RasAnswer, RasClient, RasCommunicator,
        RasEvents, RasRank, RasReport, RasStatus,
    };
}
pub mod recorder {
    //! The flight recorder: the last calls of each communicator, to find out why it makes no progress.
    //!
    //! The recorder is always on. Every call leaves a record in a ring of its communicator: its sequence number and
    //! time, and for each operation in it the kind, count, type, peer or root, reduction, and number of the message to
    //! that peer. Writing a record allocates nothing, takes no lock that the call does not take anyway, and does not
    //! call CUDA; `docs/results/overhead.md` has what it costs.
    //! Each communicator keeps its last 512 calls and its last 2048 operations; those of the last 16 ended
    //! communicators are kept as well.
    //!
    //! [`snapshot`] copies everything at any time, from any thread, and blocks no other thread. A [`Timeline`] merges the
    //! snapshots of several ranks for display.

    pub use nccl_core::recorder::{
        Call, CallSpan, CallState, Clock, ClockSource, Note, RecordedOperation, RecordedReduction,
        Recording, Snapshot, WorldRank, describe_spans, note, snapshot,
    };
    #[cfg(feature = "world")]
    pub use nccl_diagnose::timeline::{MissingRank, RankRecording, Standing, Timeline};
}
#[cfg(feature = "world")]
mod proposed_step;
pub mod stats;
#[cfg(feature = "world")]
mod supervision;
#[cfg(feature = "world")]
pub mod testing;
#[cfg(feature = "world")]
mod world;
