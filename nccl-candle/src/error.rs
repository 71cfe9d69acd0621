//! Errors on tensors, and how they survive candle's error type.
//!
//! candle's errors that wrap others keep only their text, with one exception: `Error::Cuda` keeps the error itself, and
//! prints like it. So this crate wraps its errors in `Error::Cuda`, even those of tensors on the CPU.

use std::sync::Arc;

use candle_core::{DType, Shape};

/// What went wrong with an operation on tensors.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use nccl_candle::{Error, TensorCommunicator};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # nccl_emulator::install_unless_gpu()?;
/// let comm = TensorCommunicator::join(&nccl::World::single(), "demo", &Device::Cpu)?;
/// let x = Tensor::zeros(4, DType::I16, &Device::Cpu)?;
/// let error = comm.all_reduce(&x, nccl::ReduceOp::Sum).unwrap_err();
/// assert!(matches!(Error::of(&error), Some(Error::DType { .. })));
/// # Ok(())
/// # }
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An error of NCCL, of CUDA, of a deadline, or of another rank.
    #[error(transparent)]
    Nccl(#[from] nccl::Error),

    /// Elements that NCCL does not have.
    #[error(
        "{operation} on \"{comm}\": NCCL has no {}: {}",
        dtype.as_str(),
        remedy(*dtype)
    )]
    DType {
        /// The operation.
        operation: &'static str,
        /// The communicator's name.
        comm: String,
        /// The type of the tensor's elements.
        dtype: DType,
    },

    /// A dimension that the ranks cannot share equally.
    #[error(
        "{operation} on \"{comm}\", rank {rank}: dimension {dim} of shape {shape:?} cannot be shared equally by {ranks} \
         ranks: make it a multiple of {ranks}"
    )]
    NotDivisible {
        /// The operation.
        operation: &'static str,
        /// The communicator's name.
        comm: String,
        /// This rank.
        rank: usize,
        /// The number of ranks.
        ranks: usize,
        /// The shape of the tensor.
        shape: Shape,
        /// The dimension.
        dim: usize,
    },

    /// A scalar, which has no dimension that the ranks could share.
    #[error(
        "{operation} on \"{comm}\", rank {rank}: a scalar has no dimension that {ranks} ranks could share; it needs a \
         shape such as [{ranks}]"
    )]
    Scalar {
        /// The operation.
        operation: &'static str,
        /// The communicator's name.
        comm: String,
        /// This rank.
        rank: usize,
        /// The number of ranks.
        ranks: usize,
    },

    /// A strided view, which NCCL cannot read or write.
    #[error(
        "{operation} on \"{comm}\": a view of shape {shape:?} with strides {stride:?} is not contiguous: call \
         `contiguous()?` on it before, as the methods of TensorCommunicator that are not in place do"
    )]
    Strided {
        /// The operation.
        operation: &'static str,
        /// The communicator's name.
        comm: String,
        /// The shape of the view.
        shape: Shape,
        /// Its strides, in elements.
        stride: Vec<usize>,
    },

    /// A gradient that is unknown or undefined.
    #[error("the gradient of {operation} on \"{comm}\": {reason}")]
    NoGradient {
        /// The operation.
        operation: &'static str,
        /// The communicator's name.
        comm: String,
        /// Why there is none, and what to do.
        reason: &'static str,
    },

    /// A device whose tensors cannot take part.
    #[error("{operation} on \"{comm}\": {reason}")]
    Device {
        /// The operation.
        operation: &'static str,
        /// The communicator's name.
        comm: String,
        /// Why, and what to do.
        reason: &'static str,
    },
}

fn remedy(dtype: DType) -> &'static str {
    match dtype {
        DType::I16 => "convert the tensor before, with `to_dtype(DType::I32)`, and back after",
        _ => "convert it to f8e4m3 or wider before, or move its bytes in a tensor of u8",
    }
}

impl Error {
    /// Returns the error of this crate inside of an error of candle's, if there is one that was not converted to text.
    ///
    /// Context, backtraces and paths that candle added are skipped.
    ///
    /// ```
    /// # fn show(error: &candle_core::Error) {
    /// if let Some(nccl_candle::Error::Nccl(error)) = nccl_candle::Error::of(error) {
    ///     eprintln!("{error}\nfault: {:?}", error.fault());
    /// }
    /// # }
    /// ```
    #[must_use]
    pub fn of(error: &candle_core::Error) -> Option<&Self> {
        use candle_core::Error as E;
        match error {
            E::Cuda(inner) => inner.downcast_ref::<Arc<Self>>().map(|error| &**error),
            E::Context { inner, .. }
            | E::WithPath { inner, .. }
            | E::WithBacktrace { inner, .. } => Self::of(inner),
            E::WrappedContext { wrapped, .. } => Self::of(wrapped.downcast_ref::<E>()?),
            _ => None,
        }
    }

    /// Returns the error of the crate `nccl`, if it is one.
    ///
    /// ```
    /// # fn show(error: &nccl_candle::Error) {
    /// if error.nccl().is_some_and(nccl::Error::is_timeout) {
    ///     eprintln!("a deadline passed");
    /// }
    /// # }
    /// ```
    #[must_use]
    pub fn nccl(&self) -> Option<&nccl::Error> {
        match self {
            Self::Nccl(error) => Some(error),
            _ => None,
        }
    }

    /// Wraps an error in candle's type.
    pub(crate) fn wrap(this: &Arc<Self>) -> candle_core::Error {
        candle_core::Error::Cuda(Box::new(Arc::clone(this))).bt()
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Context;

    use super::*;

    #[test]
    fn candles_context_does_not_hide_the_error() {
        let error = Arc::new(Error::DType {
            operation: "all_reduce",
            comm: String::from("demo"),
            dtype: DType::I16,
        });
        let wrapped = Error::wrap(&error);
        assert_eq!(
            wrapped.to_string().lines().next(),
            Some(&*error.to_string())
        );
        let once = wrapped.context("in layer 3").with_path("model.safetensors");
        assert!(Error::of(&once).is_some(), "{once:?}");
        let twice = Err::<(), _>(once).context("again").unwrap_err();
        let found = Error::of(&twice).expect("still there");
        assert!(
            found.to_string().contains("i16") && found.to_string().contains("I32"),
            "{found}"
        );
    }
}
