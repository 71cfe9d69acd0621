//! Conversions into an error, and the source of an error.

use std::error::Error as StdError;

use super::{Error, ErrorKind};

impl<K: Into<ErrorKind>> From<K> for Error {
    fn from(kind: K) -> Self {
        Self::new(kind)
    }
}

impl StdError for Error {
    /// What is beneath it and not in its text: a chain of sources prints nothing twice. The cause itself is
    /// [`Error::kind`], what ended the communicator [`Error::fault`].
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
