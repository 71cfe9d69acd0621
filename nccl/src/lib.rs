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
//! Without a GPU [`device()`] returns an error that says so. For tests, and for programs that are to run on a laptop as well, the
//! crate `nccl-emulator` takes NCCL's place: `nccl_emulator::install_unless_gpu()`, called first, does nothing where there is a
//! GPU. A program for GPUs leaves it out, so that it does not continue on the CPU when its driver is missing.
//!
//! # Overview
//! 1. [`World`]: the ranks that have met; [`Rendezvous`] says where. [`Observer`] watches them, [`control`] has what they say to
//!    each other.
//! 2. [`Communicator`]: ranks that work together (`ncclComm_t`); its operations take `&self`. [`CommunicatorBuilder`] sets [`Timeouts`]
//!    and [`Config`].
//! 3. [`Request`]: what an operation returns: to poll, to wait for, or to `.await`.
//! 4. [`Group`]: several operations issued together, point-to-point messages (`isend`, `irecv`) among them; [`group()`]: those of several
//!    communicators.
//!
//! Memory of an operation is a [`SendBuffer`] or a [`RecvBuffer`]: cudarc's slices and views, a [`Buffer`], [`Registered`] memory, or
//! [`Erased`] where the type is known at run time. [`Error`] says what went wrong, where, and what to do.
//!
//! | module | for |
//! |---|---|
//! | [`all_to_all`] | an all-to-all that is planned once, by the algorithm that fits |
//! | [`device_api`] | kernels that reach the memory of other ranks |
//! | [`one_sided`] | writing into the memory of another rank: windows, puts, signals |
//! | [`plan`] | operations that are captured once and launched many times |
//! | [`moe`] | mixture of experts: routing, dispatch and combine |
//! | [`dlpack`] | tensors of other libraries |
//! | [`fault`] | why a communicator ended: root cause, culprit, evidence |
//! | [`error`] | parts of an error, and errors as plain values |
//! | [`control`] | what ranks tell each other beside NCCL: events, channels, states |
//! | [`process`] | ending all communicators of a process; when a process cannot continue |
//! | [`launch`] | starting, watching and restarting the processes of ranks |
//! | [`preflight`] | what must agree or be reachable before NCCL is started |
//! | [`recorder`] | the flight recorder: the last calls of every communicator, and of all ranks together |
//! | [`stats`](mod@stats) | how much was done, and the current state; as metrics with the feature `metrics` |
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
//! - `nvml`: what NVIDIA's management library says of the devices, in faults and checks; it is loaded at run time.
//! - `metrics`: [`stats()`] as counters, gauges and histograms of the facade crate `metrics`.
//!
//! cudarc is re-exported as [`cudarc`]; this crate selects neither a CUDA version of it nor a way to link,
//! so that other crates of the build may.
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
    //! An all-to-all that is planned once, by the algorithm that fits.
    //!
    //! [`Communicator::all_to_all`](crate::Communicator::all_to_all) needs none of this. A plan ([`AllToAll::plan`]) checks everything
    //! once, compares it with the other ranks, and chooses the algorithm by a [`CostModel`]; [`Explanation`] says why.

    pub use nccl_core::{
        AllToAll, AllToAllAlgorithm, AllToAllBuilder, Alternative, CostModel, Explanation,
        LinkCost, Nodes, Parts, Payloads,
    };
}
#[cfg(feature = "world")]
pub mod control {
    //! What the ranks of a [`World`](crate::World) tell each other beside NCCL.
    //!
    //! - [`Events`]: what happens to the ranks, as values ([`WorldEvent`]); [`WorldState`]: how they are now.
    //! - [`Channel`], [`Subgroup`], [`CompareSet`]: messages, exchanges and the store of a program; [`ProposedStep`]: agreement on what is
    //!   done next.
    //! - [`Discovery`]: where the coordinator is found; [`Secret`]: who may come in; [`Witness`]: a process that votes and has no rank.

    pub use nccl_control::{
        Channel, ChannelMessage, CompareSet, Discovery, Events, RankEnd, RankState, Secret,
        Subgroup, Witness, WorldEvent, WorldState,
    };

    pub use crate::proposed_step::ProposedStep;
}
#[cfg(feature = "world")]
pub mod debug_log {
    //! NCCL's debug logs of several ranks: what each rank uses, and what is wrong among them.
    //!
    //! With `NCCL_DEBUG=INFO` every rank writes some hundred lines about the network it chose, the path to each
    //! other rank, and what it waits for, into its output or into a file of its own. One rank's log rarely
    //! shows what is wrong; comparing those of all ranks does: the rank that fell back to sockets, the host with
    //! another interface, the first warning of all. [`DebugLog`] reads such logs of every release since 2.18,
    //! also in the middle of a program's own output, and [`DebugLog::report`] compares them.

    pub use nccl_base::warning::Class;
    pub use nccl_diagnose::debug_log::{
        Counts, DebugLog, Ended, Endpoint, InitState, Link, Membership, PluginFact, PluginState,
        Process, Retry, Transport, Warning,
    };
}
pub mod dlpack {
    //! Tensors of other libraries, by the layout of DLPack: PyTorch's, JAX's, CuPy's and TVM's `__dlpack__`.
    //!
    //! A `__cuda_array_interface__` has the same in a dictionary: its address, number of elements and type go to
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
    //! What the host shows of a failure: NVIDIA's messages in the kernel's log (Xid, SXid), processes that the out-of-memory
    //! killer ended, memory that is short, threads that do not come back from the kernel, devices in trouble.
    //!
    //! Every rank gathers this when a communicator fails, and the [`Fault`](crate::fault::Fault) has what was seen
    //! ([`Fault::host_evidence`](crate::fault::Fault::host_evidence)); `docs/root-cause.md` describes it. A program asks by
    //! [`HostEvidence::gather`]. `NCCL_RUN_KMSG` names a file that is read in the place of `/dev/kmsg`. Devices are
    //! asked with the feature `nvml`, through NVIDIA's management library; `NCCL_RUN_NVML` names another one, or with 0 none.

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
    //! started the fleet and not the ranks; that process decides what to do about it. Nothing in here installs a
    //! signal handler, waits for children that it did not start, or changes this process's environment.
    //!
    //! # What is ended, and when
    //! A rank is its process group: the process that was started and what that starts, unless it moves into a group
    //! of its own.
    //!
    //! - When a rank's first process ends, what is left of its group has half a second to close the rank's output,
    //!   and is then killed.
    //! - When a rank fails, the others may continue for a while ([`FleetBuilder::linger`]), are sent SIGTERM, and after
    //!   a while ([`FleetBuilder::grace`]) SIGKILL; or they are left alone ([`FleetBuilder::keep_others`]).
    //! - When the [`Fleet`] is dropped, all groups are killed.
    //! - When this process ends in whatever way, by SIGKILL as well, the kernel kills the ranks' first processes,
    //!   and a small shell process of every fleet kills all groups and removes the fleet's directory. Without
    //!   `/bin/sh` only the former holds. A child that this process forks without `exec` shares the connection to
    //!   the shell; until the child has ended as well, the shell does not act.
    //!
    //! # Which rank died first
    //! Ends are noticed by descriptors of processes (pidfd), in the order in which the kernel reports them, and
    //! [`Report::first`] is the first of them that was not requested. What is known about it is in [`RankEnd`].
    //!
    //! The ranks learn it as well, if they have joined their `World`: the fleet takes part in the world as
    //! an `Observer`, so that their errors say "killed by SIGKILL" and what the dead rank wrote
    //! last, rather than that its connection closed.

    pub use crate::local_ranks::local_ranks;
    pub use nccl_base::departure::Signal;
    pub use nccl_launch::{
        Event, Events, Exit, Fleet, FleetBuilder, Line, OomKill, Output, RankEnd, Report, Stream,
    };

    /// For `nccl-run`.
    #[doc(hidden)]
    pub use nccl_base::bounded_write::write_within;
}
#[cfg(all(feature = "metrics", feature = "world"))]
mod kernel_metrics;
#[cfg(feature = "metrics")]
pub mod metrics;
#[cfg(feature = "moe")]
pub mod moe {
    //! Mixture of experts: routing, dispatch and combine ([`ExpertParallel`]).

    pub use nccl_moe::{
        Counts, ExpertLayout, ExpertParallel, ExpertParallelBuilder, ExpertPlacement,
        ExpertTransfer, Routing, TransferPart,
    };
}
#[cfg(feature = "world")]
mod json_values;
#[cfg(feature = "world")]
mod observer;
pub mod device_api {
    //! For kernels that reach the memory of other ranks by themselves: what a communicator can do there
    //! ([`Communicator::properties`](crate::Communicator::properties)), which ranks reach each other ([`Team`]), where
    //! ([`Window::peer_address`](crate::one_sided::Window::peer_address)), how long
    //! ([`Communicator::hold_windows`](crate::Communicator::hold_windows)), and the argument of kernels that are written with NCCL's
    //! device functions ([`DeviceCommunicator`]).

    pub use nccl_core::device_api::{
        DeviceArgument, DeviceCommunicator, DeviceRequirements, Gin, Properties, Team, WindowHold,
    };
    #[cfg(feature = "lsa")]
    pub use nccl_lsa::{LoadStoreAllToAll, LoadStoreRequest};
}
pub mod one_sided {
    //! Writing into the memory of another rank, without a call there: windows, puts and signals.
    //!
    //! All ranks make a [`Window`] together ([`Communicator::window`](crate::Communicator::window)); each owns its part. A put writes
    //! into another rank's part and signals that rank, which waits for the signal before it reads. No rank waits for the other to
    //! be ready, so what may be written when is for the program to arrange.
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

    pub use nccl_core::{Capture, CapturedPlan, PlanBuffers};
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
    //! All communicators of this process, its end when it cannot continue, and settings that NCCL has for a process.

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
    //! NCCL's RAS service: what every process of a job knows of all ranks, from NCCL's own counters.
    //!
    //! From 2.24 each process that uses NCCL has a RAS thread, which listens for clients. A [`RasClient`] asks one of them; the
    //! thread asks the others. The answer has, for each communicator, how many collectives each rank has launched
    //! ([`RasReport::lagging`] finds those that have launched fewer), and the ranks that do not answer. It has neither what has
    //! completed, nor sends and receives, nor the launches of captured graphs.
    //!
    //! Several releases of NCCL have crashed when they were asked again and again: ask once, when something hangs.

    pub use nccl_diagnose::ras::{
        LaggingRank, MissingRasRank, MissingStatus, RasAnswer, RasClient, RasCommunicator,
        RasEvents, RasRank, RasReport, RasStatus,
    };
}
pub mod recorder {
    //! The flight recorder: the last calls of each communicator, to find out why it makes no progress.
    //!
    //! The recorder is always on. Every call leaves a fingerprint in a ring of its communicator: its sequence number and
    //! time, and for each operation in it what it was, count, type, peer or root, reduction, and which message to
    //! that peer. Writing it allocates nothing, takes no lock that the call does not have anyway, and calls nothing of
    //! CUDA; `docs/results/overhead.md` has what it costs.
    //! The last 512 calls and the last 2048 operations of each communicator are kept, also of the last 16 that
    //! ended.
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
