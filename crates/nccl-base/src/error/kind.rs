//! The kinds of errors.

use std::path::PathBuf;
use std::time::Duration;

use cudarc::driver::DriverError;
use nccl_sys as sys;

use super::NcclFailure;

/// What went wrong.
///
/// ```
/// use nccl::ErrorKind;
///
/// let error = nccl::Rendezvous::unix("/tmp/x.sock", 4, 4).unwrap_err();
/// assert!(matches!(error.kind(), ErrorKind::Rendezvous { .. }));
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ErrorKind {
    /// No usable libnccl was found; the text numbers every place that was tried.
    #[error(transparent)]
    Load(#[from] sys::LoadError),

    /// The loaded library lacks something that the program requested, such as a function or an element type.
    #[error("{what} needs NCCL {needs}, found {found} at {}", path.display())]
    Unsupported {
        /// The function, configuration field or element type.
        what: String,
        /// The first release that has it.
        needs: sys::Version,
        /// The release that is loaded.
        found: sys::Version,
        /// The file that is loaded.
        path: PathBuf,
    },

    /// NCCL has the requested feature, but not on these devices, between these ranks, or with these settings.
    #[error("{what} is not available: {reason}")]
    Unavailable {
        /// The requested feature.
        what: &'static str,
        /// Why it is not available, and what it needs.
        reason: String,
    },

    /// An invalid configuration, found before NCCL is called.
    #[error("configuration field `{field}`: {reason}")]
    InvalidConfig {
        /// The field, as in `Config`.
        field: &'static str,
        /// What is wrong with its value.
        reason: String,
    },

    /// A call into NCCL failed.
    #[error(transparent)]
    Nccl(#[from] NcclFailure),

    /// A call into the CUDA driver failed.
    #[error("CUDA: {what}: {error}")]
    Cuda {
        /// The operation that failed.
        what: &'static str,
        /// The driver's code and text.
        error: DriverError,
    },

    /// There is no CUDA driver.
    #[error(
        "there is no CUDA driver here: {looked_for} cannot be loaded ({reason}); it comes with NVIDIA's driver, and into a container \
         with `--gpus`"
    )]
    NoDriver {
        /// The name of the library.
        looked_for: &'static str,
        /// The error of the dynamic linker.
        reason: String,
    },

    /// A device that this process does not have.
    #[error("device {ordinal} does not exist: {}", visible(*devices))]
    NoSuchDevice {
        /// The device that was given.
        ordinal: usize,
        /// The number of devices that the process sees.
        devices: usize,
    },

    /// A buffer has the wrong number of elements.
    #[error("{buffer} has {given} elements, needed are {needed} ({rule})")]
    Length {
        /// The name of the buffer.
        buffer: &'static str,
        /// Its number of elements.
        given: usize,
        /// The number of elements that the operation needs.
        needed: usize,
        /// How that number is computed.
        rule: &'static str,
    },

    /// A buffer that this rank needs was not given.
    #[error("{buffer} is missing, which the root of the operation needs")]
    NoBuffer {
        /// The name of the buffer.
        buffer: &'static str,
    },

    /// A reduction operator that was made for something else.
    #[error("the operator was made for {made_for}, and is used for {used_for}")]
    WrongReduction {
        /// The communicator or element type it was made for.
        made_for: String,
        /// The communicator or element type it was used with.
        used_for: String,
    },

    /// The two buffers of an operation hold different types.
    #[error("the send buffer holds {send}, the receive buffer {receive}")]
    DataTypeMismatch {
        /// The element type of the send buffer.
        send: crate::data_type::DataType,
        /// The element type of the receive buffer.
        receive: crate::data_type::DataType,
    },

    /// The element type's size is unknown, so lengths cannot be checked.
    #[error("element type {0} is not known to this crate")]
    UnknownDataType(crate::data_type::DataType),

    /// The bytes of an erased buffer are not a whole number of elements.
    #[error("{bytes} bytes are not a whole number of {data_type} elements")]
    PartialElement {
        /// The length of the buffer in bytes.
        bytes: usize,
        /// The given element type.
        data_type: crate::data_type::DataType,
    },

    /// The address of a buffer is not a multiple of the element size.
    #[error("address {address:#x} is not a multiple of the size of {data_type}")]
    Misaligned {
        /// The device address.
        address: u64,
        /// The given element type.
        data_type: crate::data_type::DataType,
    },

    /// A peer or root that does not exist.
    #[error("{role} {rank} does not exist: {}", ranks(*world_size))]
    NoSuchRank {
        /// `peer`, `root` or `rank`.
        role: &'static str,
        /// The rank that was given.
        rank: usize,
        /// The number of ranks.
        world_size: usize,
    },

    /// A group sends to its own rank without receiving the same there, or the other way round.
    #[error(
        "rank {rank} sends to itself what it does not receive in the same group, or the other way \
         round: such messages need each other, in the same order and of the same sizes"
    )]
    UnpairedOwnMessages {
        /// This rank.
        rank: usize,
    },

    /// A stream that cannot carry the operation safely.
    #[error("{what}: {reason}")]
    Stream {
        /// Whose stream: the operation's or a buffer's.
        what: &'static str,
        /// Why it is refused.
        reason: StreamRefusal,
    },

    /// A captured operation uses memory that its plan does not own.
    #[error(
        "{bytes} bytes at {address:#x} are not in a buffer of the plan, which could be launched when they \
         are freed; give the buffer to `capture`"
    )]
    NotInPlan {
        /// The device address.
        address: u64,
        /// The length of the buffer in bytes.
        bytes: usize,
    },

    /// The ranks were about to capture operations that do not match; the same on all of them.
    #[error("the captures of plan {plan} differ: {difference}")]
    CaptureDiffers {
        /// The number of the capture on the communicator, from 1.
        plan: u64,
        /// The first difference, with the ranks of each side.
        difference: String,
    },

    /// The ranks were about to make calls that do not match (`NCCL_RUN_CHECK=1`); the same on all of them. Nothing
    /// was launched.
    #[error(
        "the calls of operation {number} of all ranks differ: {difference}; nothing was launched"
    )]
    CallsDiffer {
        /// The number of the call, among the calls of the communicator that all ranks enter, from 1.
        number: u64,
        /// The first difference, with the ranks of each side.
        difference: String,
    },

    /// The ranks made plans of an all-to-all that do not match; the same on all of them. Nothing was exchanged.
    #[error("the all-to-all plans {plan} of all ranks differ: {difference}")]
    PlansDiffer {
        /// The number of the plan on the communicator, from 1.
        plan: u64,
        /// The first difference, with the ranks of each side.
        difference: String,
    },

    /// The ranks were about to enter steps that differ ([`World::propose_step`](https://docs.rs/nccl/latest/nccl/struct.World.html)); the
    /// same on all of them.
    #[error("the ranks do not agree on the step of {name:?}: {difference}")]
    StepsDiffer {
        /// The name of the kind of step.
        name: String,
        /// The ranks of each side, and what they would enter.
        difference: String,
    },

    /// A rank sent an expert more tokens than the expert has room for; reported by the sending rank and by the expert's
    /// rank.
    #[error(
        "rank {rank} routed {tokens} tokens to expert {expert}, which has room for {capacity} of each rank; the last \
         {} were lost, and what is combined for them is not a number", tokens - capacity
    )]
    ExpertCapacity {
        /// The rank that routed the tokens.
        rank: usize,
        /// The expert.
        expert: usize,
        /// How many of its tokens the rank routed to the expert.
        tokens: usize,
        /// The number of tokens of each rank for which the expert has room.
        capacity: usize,
    },

    /// A rank routed tokens to experts that do not exist.
    #[error(
        "rank {rank} routed {entries} times to an expert that does not exist: they are 0 to {}, and any negative \
         number stands for none; what is combined for those tokens is not a number", experts - 1
    )]
    NoSuchExpert {
        /// The rank that routed the tokens.
        rank: usize,
        /// How many entries name an expert that does not exist.
        entries: usize,
        /// The number of experts.
        experts: usize,
    },

    /// The kernels cannot weigh and add up elements of this type.
    #[error("{0} cannot be weighed and added up: f32, f16 and bf16 can")]
    NotWeighed(crate::data_type::DataType),

    /// A deadline passed on this rank, or on another rank, which then ended the communicator
    /// ([`Error::fault`](super::Error::fault)).
    #[error("{what} did not finish within {timeout:?}")]
    TimedOut {
        /// What the caller waited for.
        what: String,
        /// The timeout.
        timeout: Duration,
    },

    /// An operation did not start, because work on its stream that does not belong to the communicator did not end.
    #[error(
        "{what} was queued for {waited:?}, longer than {timeout:?}, behind work on its stream that is not this \
         communicator's"
    )]
    Queued {
        /// The operation, or a replay.
        what: &'static str,
        /// How long it was queued.
        waited: Duration,
        /// The timeout.
        timeout: Duration,
    },

    /// Another thread, or several in turn, used the communicator during the whole wait. Nothing was issued, and the
    /// communicator is still usable.
    #[error(
        "another thread has been using the communicator for {waited:?} or longer, in {holder}; nothing was issued"
    )]
    Busy {
        /// The operation that held the communicator last.
        holder: String,
        /// How long the caller waited for the communicator.
        waited: Duration,
    },

    /// The communicator was aborted, so its operation has no result.
    #[error("the communicator was aborted: {reason}")]
    Aborted {
        /// Why it was aborted, or by which rank.
        reason: String,
    },

    /// The communicator is not usable any more.
    #[error("the communicator is {state}")]
    Closed {
        /// `being finalized` or `finalized`.
        state: &'static str,
    },

    /// This process was forked from one that had used this crate. Nothing was done, and the parent's values are
    /// still usable.
    #[error(
        "this process was forked from process {made_by}, to which everything belongs that was made there: use it there, fork \
         before the first use, or start a program in the child (exec)"
    )]
    Forked {
        /// The process that used this crate first.
        made_by: u32,
    },

    /// Ranks could not find each other, or disagree with each other.
    #[error("rendezvous: {reason}")]
    Rendezvous {
        /// What happened and what to do.
        reason: String,
    },

    /// Ranks could not be started, or started again.
    #[error("{reason}")]
    Launch {
        /// The rank, the reason, and the remedy.
        reason: String,
    },

    /// A requirement of NCCL is not met, or differs between the ranks. The check ran before NCCL was started, and fails
    /// on all ranks alike.
    #[error(fmt = crate::report::Report::write_errors)]
    Preflight {
        /// All findings.
        report: crate::report::Report,
    },

    /// The operating system refused something.
    #[error("{what}: {error}")]
    Io {
        /// The operation that failed.
        what: String,
        /// The system's error.
        error: std::io::Error,
    },
}

/// Returns a clause that names the existing devices.
fn visible(devices: usize) -> String {
    match devices {
        0 => String::from("this process sees none; look at CUDA_VISIBLE_DEVICES"),
        1 => String::from(
            "this process sees one, which is 0; look at CUDA_VISIBLE_DEVICES, and start no more ranks on a host than it \
             has devices",
        ),
        _ => format!(
            "this process sees {devices}, which are 0 to {}; look at CUDA_VISIBLE_DEVICES, and start no more ranks on a host \
             than it has devices",
            devices - 1
        ),
    }
}

impl ErrorKind {
    #[doc(hidden)]
    pub fn is_timeout(&self) -> bool {
        matches!(self, Self::TimedOut { .. } | Self::Queued { .. })
    }

    #[doc(hidden)]
    pub fn is_timed_out(&self) -> bool {
        matches!(self, Self::TimedOut { .. })
    }
}

/// Returns a clause that names the existing ranks.
#[doc(hidden)]
pub fn ranks(world_size: usize) -> String {
    match world_size {
        0 => String::from("of 0 ranks there is none"),
        1 => String::from("the only rank is 0"),
        _ => format!("ranks are 0 to {}", world_size - 1),
    }
}

/// Why a stream is refused.
///
/// ```
/// let text = nccl::error::StreamRefusal::PerThread.to_string();
/// assert!(text.contains("per-thread"));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StreamRefusal {
    /// On NCCL's threads, the per-thread default stream is a different stream.
    #[error(
        "the per-thread default stream (0x2) is a different stream on NCCL's threads; use \
         `CudaContext::new_stream` or the default stream"
    )]
    PerThread,
    /// Work put on a capturing stream could be replayed after its buffers are freed.
    #[error("it is capturing a graph, and a replay could outlive the buffers")]
    Capturing,
    /// Another thread began a capture on the stream while an operation was being put on it.
    #[error(
        "another thread began to capture a graph on it while an operation was put there: that capture is void, the operation \
         may not have run, and the communicator is ended, which NCCL does once the capture has ended; do not capture on \
         streams that a communicator uses, or capture with `Communicator::capture`"
    )]
    CapturedMeanwhile,
    /// Another thread captured the stream while a plan was being launched on it.
    #[error(
        "another thread captured a graph on it while a plan was launched there, and that graph may hold the plan: never launch \
         it; the communicator is ended, which NCCL does once no graph has its operations; do not capture on streams that a \
         communicator uses, or capture with `Communicator::capture`"
    )]
    InGraph,
    /// NCCL uses the primary context of the device.
    #[error("it belongs to a context that is not the device's primary context, which NCCL uses")]
    NotPrimary,
    /// Two context objects track their events separately, so the streams cannot be ordered.
    #[error(
        "it belongs to another `CudaContext` object than the communicator; share one \
         `Arc<CudaContext>` per device"
    )]
    ForeignContext,
}
