//! The one error type: what went wrong, in which operation, on which rank, and what to do.
//!
//! Built in one place ([`Error::new`], [`Error::during`]), so that every error that comes out of an
//! operation carries that operation. NCCL's own text is captured right at the call, because NCCL keeps
//! it in one buffer per process that the next warning of any communicator overwrites.

use std::error::Error as StdError;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::DriverError;
use nccl_sys as sys;

use crate::operation::Operation;
use crate::supervision::Fault;

/// The result of everything in this crate that can fail.
///
/// ```
/// fn sum(comm: &nccl::Communicator, y: &mut nccl::cudarc::driver::CudaSlice<f32>) -> nccl::Result<()> {
///     comm.all_reduce_in_place(y, nccl::ReduceOp::Sum)?.wait()
/// }
/// ```
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error, with the operation in which it arose.
///
/// Printing it gives one sentence for the operation, one for the cause, and a hint where there is
/// something to do; with `{:#}`, also the section of the docs that is about it ([`Error::help`]).
///
/// ```
/// use nccl::{ErrorKind, Rendezvous};
///
/// let error = Rendezvous::unix("/tmp/x.sock", 4, 4).unwrap_err();
/// assert!(matches!(error.kind(), ErrorKind::Rendezvous { .. }));
/// assert!(error.to_string().contains("rank 4"));
/// ```
pub struct Error(Box<Inner>);

struct Inner {
    kind: ErrorKind,
    operation: Option<Operation>,
    /// What ended the communicator on all of its ranks.
    fault: Option<Arc<Fault>>,
    /// What the end of the communicator left open.
    also: Option<String>,
}

/// What went wrong.
///
/// ```
/// use nccl::{Config, ErrorKind};
///
/// let error = Config::new().min_ctas(8).max_ctas(4).check().unwrap_err();
/// assert!(matches!(error.kind(), ErrorKind::InvalidConfig { .. }));
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ErrorKind {
    /// No usable libnccl was found; the text numbers every place that was tried.
    #[error(transparent)]
    Load(#[from] sys::LoadError),

    /// The loaded library does not have something that was asked for.
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

    /// A configuration that cannot work, found before NCCL is called.
    #[error("configuration field `{field}`: {reason}")]
    InvalidConfig {
        /// The field, as in [`Config`](crate::Config).
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
        /// What was being done.
        what: &'static str,
        /// The driver's code and text.
        error: DriverError,
    },

    /// A buffer has the wrong number of elements.
    #[error("{buffer} has {given} elements, needed are {needed} ({rule})")]
    Length {
        /// Which buffer.
        buffer: &'static str,
        /// Its number of elements.
        given: usize,
        /// The number of elements that the operation needs.
        needed: usize,
        /// How that number comes about.
        rule: &'static str,
    },

    /// A buffer that this rank needs was not given.
    #[error("{buffer} is missing, which the root of the operation needs")]
    NoBuffer {
        /// Which buffer.
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
        send: crate::DataType,
        /// The element type of the receive buffer.
        receive: crate::DataType,
    },

    /// The element type's size is unknown, so lengths cannot be checked.
    #[error("element type {0} is not known to this crate")]
    UnknownDataType(crate::DataType),

    /// The bytes of an erased buffer are not a whole number of elements.
    #[error("{bytes} bytes are not a whole number of {data_type} elements")]
    PartialElement {
        /// The length of the buffer in bytes.
        bytes: usize,
        /// The element type that was named.
        data_type: crate::DataType,
    },

    /// A buffer does not begin at a whole element.
    #[error("address {address:#x} is not a multiple of the size of {data_type}")]
    Misaligned {
        /// The device address.
        address: u64,
        /// The element type that was named.
        data_type: crate::DataType,
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

    /// The ranks were about to capture what does not belong together; the same on all of them.
    #[error("the captures of plan {plan} differ: {difference}")]
    CaptureDiffers {
        /// The how manieth capture on the communicator, from 1.
        plan: u64,
        /// The first difference: who has what.
        difference: String,
    },

    /// The ranks were about to call what does not belong together (`NCCL_RUN_CHECK=1`); the same on all of them. Nothing
    /// was launched.
    #[error(
        "the calls of operation {number} of all ranks differ: {difference}; nothing was launched"
    )]
    CallsDiffer {
        /// The how manieth call of the communicator to which all ranks come, from 1.
        number: u64,
        /// The first difference: who has what.
        difference: String,
    },

    /// A deadline passed.
    #[error("{what} did not finish within {limit:?}")]
    TimedOut {
        /// What was waited for.
        what: String,
        /// The time that was given.
        limit: Duration,
    },

    /// An operation did not get its turn: work on its stream that is not the communicator's did not end.
    #[error(
        "{what} was queued for {waited:?}, longer than {limit:?}, behind work on its stream that is not this \
         communicator's"
    )]
    Queued {
        /// Which: an operation, or a replay.
        what: &'static str,
        /// For how long.
        waited: Duration,
        /// The time that was given.
        limit: Duration,
    },

    /// Another thread had the communicator all the time. Nothing was issued, and it is as good as before.
    #[error(
        "another thread has the communicator for {waited:?} or longer, with {holder}; nothing was issued"
    )]
    Busy {
        /// The operation that has it.
        holder: String,
        /// How long this one waited for its turn.
        waited: Duration,
    },

    /// The communicator was aborted, so what it was doing has no result.
    #[error("the communicator was aborted: {reason}")]
    Aborted {
        /// Who aborted it, or why.
        reason: String,
    },

    /// The communicator is not usable any more.
    #[error("the communicator is {state}")]
    Closed {
        /// `being finalized` or `finalized`.
        state: &'static str,
    },

    /// Ranks could not find each other, or disagree.
    #[error("rendezvous: {reason}")]
    Rendezvous {
        /// What happened and what to do.
        reason: String,
    },

    /// Ranks could not be started, or started again.
    #[error("{reason}")]
    Launch {
        /// Which rank, why, and what to do.
        reason: String,
    },

    /// What NCCL needs differs between the ranks, or is not there: found before NCCL was started, on all
    /// ranks alike.
    #[error("before NCCL was started: {}", report.errors_in_one_text())]
    Preflight {
        /// Everything that was found.
        report: crate::preflight::Report,
    },

    /// The operating system refused something.
    #[error("{what}: {error}")]
    Io {
        /// What was being done.
        what: String,
        /// The system's error.
        error: std::io::Error,
    },
}

/// Which ranks there are.
pub(crate) fn ranks(world_size: usize) -> String {
    match world_size {
        0 => String::from("of 0 ranks there is none"),
        1 => String::from("the only rank is 0"),
        _ => format!("ranks are 0 to {}", world_size - 1),
    }
}

/// Why a stream is refused.
///
/// ```
/// let text = nccl::StreamRefusal::PerThread.to_string();
/// assert!(text.contains("per-thread"));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StreamRefusal {
    /// The per-thread default stream is another stream on NCCL's threads.
    #[error(
        "the per-thread default stream (0x2) is a different stream on NCCL's threads; use \
         `CudaContext::new_stream` or the default stream"
    )]
    PerThread,
    /// Work put on a capturing stream could be replayed after its buffers are freed.
    #[error("it is capturing a graph, and a replay could outlive the buffers")]
    Capturing,
    /// NCCL uses the primary context of the device.
    #[error("it belongs to a context that is not the device's primary context, which NCCL uses")]
    NotPrimary,
    /// Two context objects track their events apart, so they cannot be ordered.
    #[error(
        "it belongs to another `CudaContext` object than the communicator; share one \
         `Arc<CudaContext>` per device"
    )]
    ForeignContext,
}

/// A call into NCCL that did not succeed (`ncclResult_t`).
///
/// ```
/// use nccl::ErrorKind;
/// # fn show(error: nccl::Error) {
/// if let ErrorKind::Nccl(failure) = error.kind() {
///     eprintln!("{} gave {}", failure.call(), failure.code());
/// }
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NcclFailure {
    call: &'static str,
    code: sys::ncclResult_t,
    text: String,
    last_error: String,
}

impl NcclFailure {
    pub(crate) fn new(
        call: &'static str,
        code: sys::ncclResult_t,
        text: String,
        last_error: String,
    ) -> Self {
        Self {
            call,
            code,
            text,
            last_error,
        }
    }

    /// The function that failed, for instance `ncclGroupEnd`.
    ///
    /// ```
    /// # fn example(failure: &nccl::NcclFailure) {
    /// assert_eq!(failure.call(), "ncclAllReduce");
    /// # }
    /// ```
    #[must_use]
    pub fn call(&self) -> &'static str {
        self.call
    }

    /// NCCL's code, known to this crate or not.
    ///
    /// ```
    /// # fn example(failure: &nccl::NcclFailure) {
    /// if failure.code() == 6 {
    ///     eprintln!("ncclRemoteError: look for the rank that failed first");
    /// }
    /// # }
    /// ```
    #[must_use]
    pub fn code(&self) -> u32 {
        self.code.0
    }

    /// The last warning NCCL kept at that moment, or an empty text.
    ///
    /// NCCL keeps one such text per process, so it may come from another communicator.
    ///
    /// ```
    /// # fn example(failure: &nccl::NcclFailure) {
    /// if !failure.last_error().is_empty() {
    ///     eprintln!("NCCL warned: {}", failure.last_error());
    /// }
    /// # }
    /// ```
    #[must_use]
    pub fn last_error(&self) -> &str {
        &self.last_error
    }

    /// Whether it says that another rank, or the way to it, failed.
    pub(crate) fn is_remote(&self) -> bool {
        self.is(sys::ncclResult_t::ncclRemoteError)
    }

    pub(crate) fn is(&self, code: sys::ncclResult_t) -> bool {
        self.code == code
    }
}

impl fmt::Display for NcclFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} returned {} ({})", self.call, self.code.0, self.text)?;
        if !self.last_error.is_empty() {
            write!(
                f,
                "; NCCL's last warning in this process: {}",
                self.last_error
            )?;
        }
        Ok(())
    }
}

impl StdError for NcclFailure {}

impl Error {
    pub(crate) fn new(kind: impl Into<ErrorKind>) -> Self {
        Self(Box::new(Inner {
            kind: kind.into(),
            operation: None,
            fault: None,
            also: None,
        }))
    }

    /// Says in which operation the error arose; an operation already known stays.
    pub(crate) fn during(mut self, operation: impl FnOnce() -> Operation) -> Self {
        if self.0.operation.is_none() {
            self.0.operation = Some(operation());
        }
        self
    }

    /// Says what ended the communicator on all of its ranks, and what is left open. Only the rank that it
    /// began with has seen more than that: it keeps its own kind of error.
    pub(crate) fn because_of(mut self, fault: &Arc<Fault>, own: bool, also: Option<&str>) -> Self {
        if !own || matches!(self.0.kind, ErrorKind::Aborted { .. }) {
            self.0.kind = ErrorKind::Aborted {
                reason: fault.to_string(),
            };
        }
        self.0.fault = Some(Arc::clone(fault));
        self.0.also = also.map(str::to_owned);
        self
    }

    pub(crate) fn cuda(what: &'static str) -> impl FnOnce(DriverError) -> Self {
        move |error| Self::new(ErrorKind::Cuda { what, error })
    }

    pub(crate) fn io(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> Self {
        move |error| {
            Self::new(ErrorKind::Io {
                what: what.into(),
                error,
            })
        }
    }

    pub(crate) fn rendezvous(reason: impl Into<String>) -> Self {
        Self::new(ErrorKind::Rendezvous {
            reason: reason.into(),
        })
    }

    pub(crate) fn launch(reason: impl Into<String>) -> Self {
        Self::new(ErrorKind::Launch {
            reason: reason.into(),
        })
    }

    /// What went wrong.
    ///
    /// ```
    /// # use nccl::{ErrorKind, UniqueId};
    /// let error = nccl::Library::load_from("/no/such/libnccl.so.2").unwrap_err();
    /// assert!(matches!(error.kind(), ErrorKind::Load(_)));
    /// ```
    #[must_use]
    pub fn kind(&self) -> &ErrorKind {
        &self.0.kind
    }

    /// The operation in which it arose, if it arose in one.
    ///
    /// ```
    /// let error = nccl::Library::load_from("/no/such/libnccl.so.2").unwrap_err();
    /// assert!(error.operation().is_none());
    /// ```
    #[must_use]
    pub fn operation(&self) -> Option<&Operation> {
        self.0.operation.as_ref()
    }

    /// What ended the communicator on all of its ranks: the same on each of them.
    ///
    /// `None` when the communicator was not ended, or has ranks that were not told: those of a
    /// [`Communicator::builder`](crate::Communicator::builder) do not know each other.
    ///
    /// ```
    /// # fn show(error: nccl::Error) {
    /// if let Some(fault) = error.fault() {
    ///     println!("it began on rank {}: {}", fault.rank(), fault.cause());
    /// }
    /// # }
    /// ```
    #[must_use]
    pub fn fault(&self) -> Option<&Fault> {
        self.0.fault.as_deref()
    }

    /// Whether a deadline passed.
    ///
    /// ```
    /// let error = nccl::Library::load_from("/no/such/libnccl.so.2").unwrap_err();
    /// assert!(!error.is_timeout());
    /// ```
    #[must_use]
    pub fn is_timeout(&self) -> bool {
        matches!(
            self.0.kind,
            ErrorKind::TimedOut { .. } | ErrorKind::Queued { .. }
        )
    }

    /// What can be done about it, where that is known.
    pub(crate) fn hint(&self) -> Option<&str> {
        match &self.0.kind {
            ErrorKind::Aborted { .. } => self.0.fault.as_ref()?.hint(),
            ErrorKind::TimedOut { .. } => Some(
                "a rank that did not call the same operation, or whose process died, makes the \
                 others wait; look at the ranks that print nothing",
            ),
            ErrorKind::Queued { .. } => Some(
                "look at what the program put on that stream before the operation, and at what that waits \
                 for; where it may take so long, set a longer `queue_timeout`",
            ),
            ErrorKind::Busy { .. } => Some(
                "calls on one communicator take turns: try again, give it a longer limit, or give each \
                 thread a communicator of its own",
            ),
            ErrorKind::Nccl(failure) => match failure.code {
                sys::ncclResult_t::ncclRemoteError => Some(
                    "a peer's process exited or the network failed: this rank is a victim, look for \
                     the rank that failed first",
                ),
                sys::ncclResult_t::ncclSystemError | sys::ncclResult_t::ncclUnhandledCudaError => {
                    Some("run with NCCL_DEBUG=INFO to see the failing system or CUDA call")
                }
                _ => None,
            },
            _ => None,
        }
    }
}

impl<K: Into<ErrorKind>> From<K> for Error {
    fn from(kind: K) -> Self {
        Self::new(kind)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.say(f)?;
        match f.alternate() {
            true => write!(f, "\n  help:       {}", self.help()),
            false => Ok(()),
        }
    }
}

impl Error {
    fn say(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.0.operation, &self.0.fault) {
            (Some(operation), Some(fault)) => {
                write!(f, "nccl: {operation}")?;
                // What this rank saw itself, where that is more than what all tell.
                if !matches!(self.0.kind, ErrorKind::Aborted { .. }) {
                    write!(f, "\n  seen here:  {}", self.0.kind)?;
                }
                write!(f, "\n{}", fault.explain())?;
                if let (None, Some(hint)) = (fault.hint(), self.hint()) {
                    write!(f, "\n  hint:       {hint}")?;
                }
                if let Some(also) = &self.0.also {
                    write!(f, "\n  left open:  {also}")?;
                }
                Ok(())
            }
            (Some(operation), None) => {
                write!(f, "nccl: {operation}\n  cause: {}", self.0.kind)?;
                if let Some(also) = &self.0.also {
                    write!(f, "\n  also:  {also}")?;
                }
                if let Some(hint) = self.hint() {
                    write!(f, "\n  hint:  {hint}")?;
                }
                Ok(())
            }
            (None, _) => {
                write!(f, "{}", self.0.kind)?;
                if let Some(also) = &self.0.also {
                    write!(f, "; {also}")?;
                }
                if let Some(hint) = self.hint() {
                    write!(f, " ({hint})")?;
                }
                Ok(())
            }
        }
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Error")
            .field("kind", &self.0.kind)
            .field("operation", &self.0.operation)
            .finish()
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        match &self.0.kind {
            ErrorKind::Load(error) => Some(error),
            ErrorKind::Nccl(failure) => Some(failure),
            ErrorKind::Cuda { error, .. } => Some(error),
            ErrorKind::Io { error, .. } => Some(error),
            // For whoever finds this error at the end of a chain of others, and looks for the cause.
            _ => self.fault().map(|fault| fault as &(dyn StdError + 'static)),
        }
    }
}
