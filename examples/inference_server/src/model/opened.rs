//! Reading of model files, common to both architectures: errors name the file.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use candle_core::Tensor;

use super::error::{Error, Result};

/// A file of weights.
#[derive(Debug)]
pub(super) struct Opened {
    path: PathBuf,
    pub(super) file: File,
    /// The length of the file in bytes.
    pub(super) length: u64,
}

impl Opened {
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn new(path: impl Into<PathBuf>) -> Result<Self> {
        let path = path.into();
        let opened = File::open(&path).and_then(|file| Ok((file.metadata()?.len(), file)));
        match opened {
            Ok((length, file)) => Ok(Self { path, file, length }),
            Err(error) => Err(Error::Weights {
                path,
                reason: format!("cannot open it: {error}"),
            }),
        }
    }

    /// Returns an error for this file.
    pub(super) fn refuse(&self, reason: String) -> Error {
        let path = self.path.clone();
        Error::Weights { path, reason }
    }

    /// Reads `length` bytes at offset `at`; `what` names them in an error.
    pub(super) fn bytes(&self, what: &str, at: u64, length: usize) -> Result<Vec<u8>> {
        let mut bytes = vec![0; length];
        self.file
            .read_exact_at(&mut bytes, at)
            .map_err(|error| self.refuse(format!("{what} cannot be read: {error}")))?;
        Ok(bytes)
    }

    /// Refuses a tensor that is missing or has the wrong shape.
    pub(super) fn check(&self, name: &str, found: Option<&[usize]>, shape: &[usize]) -> Result<()> {
        match found {
            Some(found) if found == shape => Ok(()),
            Some(found) => Err(self.refuse(format!(
                "{name} has the shape {found:?}, and should have {shape:?}"
            ))),
            None => Err(self.refuse(format!("it lacks the tensor {name}, of shape {shape:?}"))),
        }
    }

    /// Returns the tensor, unless it contains an infinity or a NaN.
    pub(super) fn finite(&self, name: &str, tensor: Tensor) -> Result<Tensor> {
        let numbers = tensor.flatten_all()?.to_vec1::<f32>()?;
        match numbers.iter().find(|number| !number.is_finite()) {
            None => Ok(tensor),
            Some(bad) => Err(self.refuse(format!("{name} has a {bad} in it: the file is damaged"))),
        }
    }
}
