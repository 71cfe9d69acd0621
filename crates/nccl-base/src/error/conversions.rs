//! Conversions into an error, and the source of an error.

use std::error::Error as StdError;

use super::{Error, ErrorKind};

impl<K: Into<ErrorKind>> From<K> for Error {
    fn from(kind: K) -> Self {
        Self::new(kind)
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        match self.0.seen.as_ref().unwrap_or(&self.0.kind) {
            ErrorKind::Load(error) => Some(error),
            ErrorKind::Nccl(failure) => Some(failure),
            ErrorKind::Cuda { error, .. } => Some(error),
            ErrorKind::Io { error, .. } => Some(error),
            // Lets a caller that walks a chain of sources find the cause behind this error.
            _ => self.fault().map(|fault| fault as &(dyn StdError + 'static)),
        }
    }
}
