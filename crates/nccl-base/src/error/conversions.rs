//! Conversions into an error, and the source of an error.

use std::error::Error as StdError;

use super::{Error, ErrorKind};

impl<K: Into<ErrorKind>> From<K> for Error {
    fn from(kind: K) -> Self {
        Self::new(kind)
    }
}

impl StdError for Error {
    /// Returns the underlying error whose text is not part of this error's text, so that printing the chain of sources
    /// repeats nothing. The cause itself is [`Error::kind`]; the fault that ended the communicator is [`Error::fault`].
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        match self.0.seen.as_ref().unwrap_or(&self.0.kind) {
            ErrorKind::Load(error) => error.source(),
            ErrorKind::Nccl(failure) => failure.source(),
            ErrorKind::Cuda { error, .. } => error.source(),
            ErrorKind::Io { error, .. } => error.source(),
            _ => None,
        }
    }
}
