//! What one program is about: the rest of a benchmark is the same for all of them.

use cudarc::driver::{CudaView, CudaViewMut};
use nccl::{Communicator, Config, DataType, Erased, ErasedMut, Group, Library, Request};

use crate::failure::Failure;
use crate::options::Options;
use crate::program::Program;
use crate::shape::{Case, Shape};
use crate::verify::Contents;

/// An operation that is measured: what a size means, what is issued, and what has to arrive.
pub trait Operation: Sized {
    /// What options and output depend on.
    const PROGRAM: &'static Program;

    /// From the options, and from variables of its own.
    ///
    /// # Errors
    /// When a variable makes no sense.
    fn new(options: &Options) -> Result<Self, Failure>;

    /// Looks whether the options fit to as many ranks, before any of them is started, and once more
    /// where sizes were reduced.
    ///
    /// # Errors
    /// When they do not.
    fn check(&self, _options: &Options, _ranks: usize) -> Result<(), Failure> {
        Ok(())
    }

    /// What all ranks have to have alike, as bytes that differ where it does.
    fn agreement(&self) -> Vec<u8> {
        Vec::new()
    }

    /// Why NCCL cannot do this case among as many ranks, if it cannot.
    fn lacks(&self, _case: Case, _ranks: usize) -> Option<&'static str> {
        None
    }

    /// Changes what the communicator is created with.
    fn configure(&self, config: Config, _library: &Library) -> Config {
        config
    }

    /// What a size of `bytes` per rank stands for.
    fn shape(&self, bytes: u64, case: Case, ranks: usize) -> Shape;

    /// What `rank` has to receive. What it sends is at the beginning of the buffer.
    fn contents(&self, shape: Shape, rank: usize) -> Contents;

    /// Makes what operations of a shape need, before they are timed. All ranks do so at the same time.
    ///
    /// # Errors
    /// When it cannot be had.
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
    /// What it is.
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
    /// One for both: only for programs whose operation NCCL has in place.
    InPlace(CudaViewMut<'a, u8>),
}

impl<'a> Operands<'a> {
    /// The two buffers, as bytes.
    ///
    /// # Panics
    /// When the operation is in place, which it never is for a program that has not said so.
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
    /// When they do not hold elements.
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
