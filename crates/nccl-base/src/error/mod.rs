//! The one error type: what went wrong, in which operation, on which rank, and what to do.
//!
//! Errors are built in one place ([`Error::new`], [`Error::during`]), so that every error that an
//! operation returns carries that operation. NCCL's own text is captured right at the call, because NCCL keeps
//! it in one buffer per process that the next warning of any communicator overwrites.
//!
//! - `kind`: what can go wrong; `failure`: a call into NCCL that failed;
//! - `text`: an error as text; `conversions`: conversions into an error, and its source; `cause`: the cause of a fault that an
//!   error becomes.

mod cause;
mod conversions;
mod failure;
mod kind;
mod text;

use std::sync::Arc;

use cudarc::driver::DriverError;

use crate::departure::UnfinishedExchange;
use crate::fault::{Fault, FaultClass};
use crate::operation::Operation;

pub use self::failure::NcclFailure;
pub use self::kind::{ErrorKind, StreamRefusal};

#[doc(hidden)]
pub use self::kind::ranks;

/// The result of every function of this crate that can fail.
///
/// ```
/// fn sum(comm: &nccl::Communicator, y: &mut nccl::cudarc::driver::CudaSlice<f32>) -> nccl::Result<()> {
///     comm.all_reduce_in_place(y, nccl::ReduceOp::Sum)?.wait()
/// }
/// ```
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error, with the operation in which it arose.
///
/// `{}` prints one line: the operation and the cause. `{:#}` prints all that is known, one line for each part: evidence, a hint
/// if there is a remedy, and the section of the documentation ([`Error::help`]). `{:?}` prints the same as `{:#}`, for a `main`
/// that returns the error.
///
/// ```
/// use std::error::Error as _;
///
/// use nccl::{ErrorKind, Rendezvous};
///
/// let error = Rendezvous::unix("/tmp/x.sock", 4, 4).unwrap_err();
/// assert!(matches!(error.kind(), ErrorKind::Rendezvous { .. }));
/// assert!(error.to_string().contains("rank 4"));
/// assert_eq!(error.to_string().lines().count(), 1);
/// assert!(format!("{error:#}").ends_with(&error.help()));
/// assert_eq!(format!("{error:?}"), format!("{error:#}"));
/// // A chain of sources prints nothing twice.
/// assert!(error.source().is_none());
/// ```
pub struct Error(Box<Inner>);

struct Inner {
    kind: ErrorKind,
    operation: Option<Operation>,
    /// The fault that ended the communicator on all of its ranks.
    fault: Option<Arc<Fault>>,
    /// Whether the kind comes from the fault, and not from what this rank observed.
    kind_is_of_fault: bool,
    /// What this rank observed itself, if the kind comes from the fault.
    seen: Option<ErrorKind>,
    /// A second cause of the error on this rank, in addition to the kind.
    beside: Option<ErrorKind>,
    /// The sentence about the ranks that did not confirm the end of the communicator.
    unconfirmed: Option<String>,
    /// How the exchange between the ranks ended, if the error is about an exchange.
    unfinished: Option<UnfinishedExchange>,
    /// A property beyond the kind.
    property: Option<ErrorProperty>,
}

/// A property of an error in addition to its kind, on which other code depends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorProperty {
    /// The system could not provide a thread.
    NoThread,
    /// A call that waits for no other rank did not return in time. A thread that polls ends its wait itself at the timeout,
    /// so a call that the watchdog still finds under way after that is inside NCCL.
    Inside,
    /// The ranks do not fit together, and this rank cannot know which of them is to blame.
    BetweenRanks,
}

impl Error {
    #[doc(hidden)]
    pub fn new(kind: impl Into<ErrorKind>) -> Self {
        Self(Box::new(Inner {
            kind: kind.into(),
            operation: None,
            fault: None,
            kind_is_of_fault: false,
            seen: None,
            beside: None,
            unconfirmed: None,
            unfinished: None,
            property: None,
        }))
    }

    /// Sets the operation in which the error arose; an operation that is already set stays.
    #[doc(hidden)]
    pub fn during(mut self, operation: impl FnOnce() -> Operation) -> Self {
        if self.0.operation.is_none() {
            self.0.operation = Some(operation());
        }
        self
    }

    /// Adds a second cause of the error on this rank.
    #[doc(hidden)]
    pub fn beside(mut self, other: ErrorKind) -> Self {
        self.0.beside = Some(other);
        self
    }

    /// Sets how the exchange ended that this error is about.
    #[doc(hidden)]
    pub fn of_exchange(mut self, unfinished: Option<UnfinishedExchange>) -> Self {
        self.0.unfinished = unfinished;
        self
    }

    /// Sets a property beyond the kind.
    #[doc(hidden)]
    pub fn with_property(mut self, property: ErrorProperty) -> Self {
        self.0.property = Some(property);
        self
    }

    /// Returns whether the error has this property.
    #[doc(hidden)]
    pub fn is(&self, property: ErrorProperty) -> bool {
        self.0.property == Some(property)
    }

    /// Returns how the exchange ended that this error is about.
    #[doc(hidden)]
    pub fn unfinished(&self) -> Option<&UnfinishedExchange> {
        self.0.unfinished.as_ref()
    }

    /// Returns the same fault as [`fault`](Self::fault), shared, to be attached to another error.
    #[doc(hidden)]
    pub fn shared_fault(&self) -> Option<&Arc<Fault>> {
        self.0.fault.as_ref()
    }

    /// Sets the fault, which is the same on all ranks, and keeps the kind.
    #[doc(hidden)]
    pub fn with_fault(mut self, fault: &Arc<Fault>) -> Self {
        self.0.fault = Some(Arc::clone(fault));
        self
    }

    /// Sets the fault that ended the communicator on all of its ranks, and the sentence about ranks that did not confirm the
    /// end. The kind becomes that of the fault, the same on all ranks; what this rank observed is kept beside it if the fault
    /// is its `own`.
    #[doc(hidden)]
    pub fn because_of(mut self, fault: &Arc<Fault>, own: bool, unconfirmed: Option<&str>) -> Self {
        let kind_of_fault = fault.kind();
        // If both are timeouts, the kind stays: it shows what this rank waited for.
        let is_same = self.0.kind.is_timed_out() && kind_of_fault.is_timed_out();
        if !is_same {
            let seen = std::mem::replace(&mut self.0.kind, kind_of_fault);
            (self.0.kind_is_of_fault, self.0.property) = (true, None);
            // An error that already had a fault keeps what was observed then.
            if !matches!(seen, ErrorKind::Aborted { .. }) {
                self.0.seen = own.then_some(seen);
            }
        }
        self.0.fault = Some(Arc::clone(fault));
        self.0.unconfirmed = unconfirmed.map(str::to_owned);
        self
    }

    /// Like [`because_of`](Self::because_of), for a communicator that was not made. There is nothing to abort, and what this
    /// rank observed is kept beside the fault in any case.
    #[doc(hidden)]
    pub fn before_nccl(mut self, fault: &Arc<Fault>) -> Self {
        let kind_of_fault = fault.kind();
        if std::mem::discriminant(&self.0.kind) != std::mem::discriminant(&kind_of_fault) {
            self.0.seen = Some(std::mem::replace(&mut self.0.kind, kind_of_fault));
            (self.0.kind_is_of_fault, self.0.property) = (true, None);
        }
        self.with_fault(fault)
    }

    #[doc(hidden)]
    pub fn cuda(what: &'static str) -> impl FnOnce(DriverError) -> Self {
        move |error| Self::new(ErrorKind::Cuda { what, error })
    }

    #[doc(hidden)]
    pub fn io(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> Self {
        move |error| {
            Self::new(ErrorKind::Io {
                what: what.into(),
                error,
            })
        }
    }

    #[doc(hidden)]
    pub fn rendezvous(reason: impl Into<String>) -> Self {
        Self::new(ErrorKind::Rendezvous {
            reason: reason.into(),
        })
    }

    #[doc(hidden)]
    pub fn launch(reason: impl Into<String>) -> Self {
        Self::new(ErrorKind::Launch {
            reason: reason.into(),
        })
    }

    /// Returns what went wrong.
    ///
    /// ```
    /// # nccl_emulator::install_unless_gpu().expect("an emulator or a GPU");
    /// let error = nccl::device(1000).unwrap_err();
    /// assert!(matches!(error.kind(), nccl::ErrorKind::NoSuchDevice { .. }));
    /// ```
    #[must_use]
    pub fn kind(&self) -> &ErrorKind {
        &self.0.kind
    }

    /// Returns the operation in which the error arose, if it arose in one.
    ///
    /// ```
    /// # nccl_emulator::install_unless_gpu().expect("an emulator or a GPU");
    /// let error = nccl::device(1000).unwrap_err();
    /// assert!(error.operation().is_none());
    /// ```
    #[must_use]
    pub fn operation(&self) -> Option<&Operation> {
        self.0.operation.as_ref()
    }

    /// Returns the fault that ended the communicator on all of its ranks: the same on each of them.
    ///
    /// `None` when the communicator was not ended, or has ranks that did not receive the fault: the ranks of a
    /// `Communicator::builder` do not know each other.
    ///
    /// ```
    /// # fn show(error: nccl::Error) {
    /// if let Some(fault) = error.fault() {
    ///     println!("it began on rank {:?}: {}", fault.culprit(), fault.cause);
    /// }
    /// # }
    /// ```
    #[must_use]
    pub fn fault(&self) -> Option<&Fault> {
        self.0.fault.as_deref()
    }

    /// Returns what went wrong on this rank itself, if [`kind`](Self::kind) is the kind that the fault has on all ranks: for
    /// instance NCCL's failure, on the rank with which the fault began.
    ///
    /// ```
    /// # fn show(error: nccl::Error) {
    /// if let Some(nccl::ErrorKind::Nccl(failure)) = error.local_kind() {
    ///     println!("{} failed on this rank", failure.call);
    /// }
    /// # }
    /// ```
    #[must_use]
    pub fn local_kind(&self) -> Option<&ErrorKind> {
        self.0.seen.as_ref()
    }

    /// Returns whether the kind is that of the fault, and this rank observed nothing else.
    #[doc(hidden)]
    pub fn kind_is_of_fault(&self) -> bool {
        self.0.kind_is_of_fault && self.0.seen.is_none()
    }

    /// Returns whether a deadline passed, on this rank or on the rank that ended the communicator. All ranks of a
    /// communicator that was ended return the same ([`FaultClass::TimedOut`]).
    ///
    /// ```
    /// # nccl_emulator::install_unless_gpu().expect("an emulator or a GPU");
    /// let error = nccl::device(1000).unwrap_err();
    /// assert!(!error.is_timeout());
    /// ```
    #[must_use]
    pub fn is_timeout(&self) -> bool {
        let is_of_all = |fault: &Fault| fault.class == FaultClass::TimedOut;
        self.0.kind.is_timeout() || self.fault().is_some_and(is_of_all)
    }
}
