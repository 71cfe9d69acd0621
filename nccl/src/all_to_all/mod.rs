//! All-to-all: every rank gives every rank one block.
//!
//! Block `j` of rank `i`'s send buffer becomes block `i` of rank `j`'s receive buffer. Two ways lead
//! there: NCCL's own call, where the release has it, and grouped messages, which every release has.

mod grouped;
mod native;

use crate::buffer::{Erased, ErasedMut, RecvBuffer, SendBuffer};
use crate::collectives::{Pair, same_length, same_type, shape};
use crate::communicator::Communicator;
use crate::dtype::DataType;
use crate::error::{Error, ErrorKind, Result};
use crate::library::Capability;
use crate::operation::{OperationKind, Shape};
use crate::request::Request;

/// Which way an all-to-all takes.
///
/// ```
/// assert_eq!(nccl::AllToAllAlgorithm::default(), nccl::AllToAllAlgorithm::Auto);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Algorithm {
    /// NCCL's own call where the release has it, grouped messages elsewhere.
    #[default]
    Auto,
    /// NCCL's own call (`ncclAlltoAll`, NCCL ≥ 2.28.3).
    Native,
    /// One message to and one from every rank, in one group.
    Grouped,
}

/// What every rank exchanges with every rank: a block of `count` elements.
struct Blocks {
    pair: Pair,
    count: usize,
    data_type: DataType,
}

impl Communicator {
    /// Gives block `j` of `x` to rank `j`, and puts the block of rank `j` at block `j` of `y`.
    ///
    /// `x` and `y` have the same number of elements, a multiple of the number of ranks and the same on
    /// all ranks. There is no in-place form: NCCL has none that is right.
    ///
    /// # Errors
    /// [`ErrorKind::Length`] when the lengths differ or are no multiple of the number of ranks;
    /// otherwise as [`all_reduce`](Self::all_reduce).
    ///
    /// Wraps `ncclAlltoAll`, or `ncclSend` and `ncclRecv` in a group before NCCL 2.28.3.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// # let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
    /// let x = stream.clone_htod(&[1u32, 2, 3])?; // one rank: one block
    /// let mut y = stream.alloc_zeros::<u32>(3)?;
    /// comm.all_to_all(&x, &mut y)?.wait()?;
    /// assert_eq!(stream.clone_dtoh(&y)?, [1, 2, 3]);
    /// # Ok(())
    /// # }
    /// ```
    pub fn all_to_all<'a, S, R>(&'a self, x: S, y: R) -> Result<Request>
    where
        S: SendBuffer<'a>,
        R: RecvBuffer<'a, Element = S::Element>,
    {
        self.all_to_all_with(x, y, Algorithm::Auto)
    }

    /// [`all_to_all`](Self::all_to_all) by the way that `algorithm` says.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] when the loaded NCCL does not have it.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// # let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
    /// # let x = stream.clone_htod(&[1u32, 2, 3])?;
    /// # let mut y = stream.alloc_zeros::<u32>(3)?;
    /// comm.all_to_all_with(&x, &mut y, nccl::AllToAllAlgorithm::Grouped)?.wait()?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn all_to_all_with<'a, S, R>(&'a self, x: S, y: R, algorithm: Algorithm) -> Result<Request>
    where
        S: SendBuffer<'a>,
        R: RecvBuffer<'a, Element = S::Element>,
    {
        const KIND: OperationKind = OperationKind::AllToAll;
        let (x, y) = (x.erase(), y.erase_mut());
        let total = shape(x.len(), x.data_type());
        let shape = self.checked(KIND, total, self.all_to_all_shape(&x, &y))?;
        let native = self.library().has(Capability::NativeAllToAll);
        let native = match algorithm {
            Algorithm::Native if !native => {
                let needs = Capability::NativeAllToAll.since();
                let error = self
                    .library()
                    .unsupported(String::from("ncclAlltoAll"), needs);
                return self.checked(KIND, shape, Err(error));
            }
            Algorithm::Native | Algorithm::Auto => native,
            Algorithm::Grouped => false,
        };
        let (ranks, total, data_type) = (self.world_size(), x.len(), x.data_type());
        let (frame, pair) = self.take(KIND, shape, Some(x), y)?;
        let blocks = Blocks {
            pair,
            count: total / ranks,
            data_type,
        };
        self.0.issue(frame, KIND, shape, |calls, _| {
            if native {
                native::call(&blocks, calls)
            } else {
                grouped::call(&blocks, ranks, calls)
            }
        })
    }

    /// The block that each pair of ranks exchanges.
    fn all_to_all_shape(&self, x: &Erased<'_>, y: &ErasedMut<'_>) -> Result<Shape> {
        let data_type = same_type(x, y)?;
        self.library().admit(data_type)?;
        let ranks = self.world_size();
        let len = x.len();
        if !len.is_multiple_of(ranks) {
            return Err(Error::new(ErrorKind::Length {
                buffer: "the send buffer",
                given: len,
                needed: len.next_multiple_of(ranks),
                rule: "a multiple of the number of ranks",
            }));
        }
        same_length(x, y)?;
        Ok(shape(len / ranks, data_type))
    }
}
