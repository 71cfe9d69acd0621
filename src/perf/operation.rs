//! The part that differs between benchmark programs.

use cudarc::driver::{CudaView, CudaViewMut};
use nccl::{Communicator, Config, DataType, Erased, ErasedMut, Group, Library, Request};

use crate::failure::Failure;
use crate::options::Options;
use crate::program::Program;
use crate::shape::{Case, Shape};
use crate::verify::Contents;

/// A measured operation: the meaning of a size, the calls, and the expected result.
pub trait Operation: Sized {
    /// The properties that options and output depend on.
    const PROGRAM: &'static Program;

    /// Creates the operation from the options, and from variables of its own.
    ///
    /// # Errors
    /// When a variable is invalid.
    fn new(options: &Options) -> Result<Self, Failure>;

    /// Checks that the options fit this number of ranks, before any of them is started, and once more where sizes were
    /// reduced.
    ///
    /// # Errors
    /// When they do not.
    fn check(&self, _options: &Options, _ranks: usize) -> Result<(), Failure> {
        Ok(())
    }

    /// Settings that must agree on all ranks, as bytes that differ where the settings do.
    fn agreement(&self) -> Vec<u8> {
        Vec::new()
    }

    /// The reason why NCCL does not support this case with this number of ranks, if any.
    fn lacks(&self, _case: Case, _ranks: usize) -> Option<&'static str> {
        None
    }

    /// Changes the config of the communicator.
    fn configure(&self, config: Config, _library: &Library) -> Config {
        config
    }

    /// The shape of a row with `bytes` per rank.
    fn shape(&self, bytes: u64, case: Case, ranks: usize) -> Shape;

    /// The expected result of `rank`. Its input is at the beginning of the buffer.
    fn contents(&self, shape: Shape, rank: usize) -> Contents;

    /// Prepares operations of a shape, before they are timed. All ranks do so at the same time.
    ///
    /// # Errors
    /// When a resource is not available.
    fn prepare(&mut self, _communicator: &Communicator, _call: Call) -> Result<(), Failure> {
        Ok(())
    }

    /// Puts one operation into a group.
    ///
    /// # Errors
    /// NCCL's.
    fn record<'a>(
        &self,
        group: &mut Group<'a>,
        call: Call,
        operands: Operands<'a>,
    ) -> nccl::Result<()>;

    /// Issues one operation alone.
    ///
    /// # Errors
    /// NCCL's.
    fn issue<'a>(
        &mut self,
        communicator: &'a Communicator,
        call: Call,
        operands: Operands<'a>,
    ) -> nccl::Result<Request> {
        communicator.group(|group| self.record(group, call, operands))
    }

    /// What to print above the row of a measurement that took `seconds`, without `# `.
    fn notes(&self, _shape: Shape, _seconds: f64) -> Vec<String> {
        Vec::new()
    }
}

/// One operation, seen from one rank.
#[derive(Clone, Copy, Debug)]
pub struct Call {
    /// Sizes and types.
    pub shape: Shape,
    /// This rank.
    pub rank: usize,
}

impl Call {
    /// The type of the elements.
    #[must_use]
    pub fn data_type(self) -> DataType {
        DataType::from_raw(self.shape.element().code)
    }
}

/// The memory of one operation, `shape.bytes` each.
pub enum Operands<'a> {
    /// One buffer is read, the other written.
    Apart(CudaView<'a, u8>, CudaViewMut<'a, u8>),
    /// One buffer for both: only for programs whose operation NCCL supports in place.
    InPlace(CudaViewMut<'a, u8>),
}

impl<'a> Operands<'a> {
    /// The two buffers, as bytes.
    ///
    /// # Panics
    /// When the operation is in place, which needs [`Program::in_place`].
    #[must_use]
    pub fn bytes(self) -> (CudaView<'a, u8>, CudaViewMut<'a, u8>) {
        match self {
            Self::Apart(send, recv) => (send, recv),
            Self::InPlace(_) => panic!("this program's operation is never in place"),
        }
    }

    /// The two buffers, as elements.
    ///
    /// # Errors
    /// When they do not hold whole elements.
    ///
    /// # Panics
    /// As [`bytes`](Self::bytes).
    pub fn elements(self, data_type: DataType) -> nccl::Result<(Erased<'a>, ErasedMut<'a>)> {
        let (send, recv) = self.bytes();
        Ok((
            Erased::from_bytes(send, data_type)?,
            ErasedMut::from_bytes(recv, data_type)?,
        ))
    }
}
