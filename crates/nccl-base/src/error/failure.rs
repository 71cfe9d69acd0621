//! A call into NCCL that did not succeed.

use std::error::Error as StdError;
use std::fmt;

use nccl_sys as sys;

/// A call into NCCL that did not succeed (`ncclResult_t`).
///
/// ```
/// use nccl::ErrorKind;
/// # fn show(error: nccl::Error) {
/// if let ErrorKind::Nccl(failure) = error.kind() {
///     eprintln!("{} gave {}", failure.call, failure.code);
/// }
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct NcclFailure {
    /// The function that failed, for instance `ncclGroupEnd`.
    pub call: &'static str,
    /// NCCL's code, known to this crate or not.
    pub code: u32,
    text: String,
    /// The last warning that NCCL had stored at that moment, or an empty text.
    ///
    /// NCCL keeps one such text per process, so it may come from another communicator.
    pub last_error: String,
}

impl NcclFailure {
    #[doc(hidden)]
    pub fn new(
        call: &'static str,
        code: sys::ncclResult_t,
        text: String,
        last_error: String,
    ) -> Self {
        Self {
            call,
            code: code.0,
            text,
            last_error,
        }
    }

    /// Returns whether NCCL reports that another rank, or the path to it, failed.
    #[doc(hidden)]
    pub fn is_remote(&self) -> bool {
        self.is(sys::ncclResult_t::ncclRemoteError)
    }

    #[doc(hidden)]
    pub fn is(&self, code: sys::ncclResult_t) -> bool {
        self.code == code.0
    }
}

impl fmt::Display for NcclFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} returned {} ({})", self.call, self.code, self.text)?;
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
