//! All-to-all: every rank gives every rank one block.
//!
//! Block `j` of rank `i`'s send buffer becomes block `i` of rank `j`'s receive buffer. Two ways lead
//! there: NCCL's own call, where the release has it, and grouped messages, which every release has.

mod variable;

use crate::buffer::{RecvBuffer, SendBuffer};
use crate::collectives::{ALL_TO_ALL, Collective};
use crate::communicator::Communicator;
#[cfg(doc)]
use crate::error::ErrorKind;
use crate::error::Result;
use crate::group::Group;
use crate::library::Capability;
use crate::operation::OperationKind;
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
        let collective = self.all_to_all_by(x, y, algorithm);
        self.issue_collective(OperationKind::AllToAll, collective)
    }

    fn all_to_all_by<'a, S: SendBuffer<'a>, R: RecvBuffer<'a>>(
        &self,
        x: S,
        y: R,
        algorithm: Algorithm,
    ) -> Result<Collective<S, R>> {
        let collective = Collective::apart(ALL_TO_ALL, Some(x), Some(y));
        match algorithm {
            Algorithm::Native if !self.library().has(Capability::NativeAllToAll) => {
                let needs = Capability::NativeAllToAll.since();
                Err(self
                    .library()
                    .unsupported(String::from("ncclAlltoAll"), needs))
            }
            Algorithm::Native | Algorithm::Auto => Ok(collective),
            Algorithm::Grouped => Ok(collective.made_of_messages()),
        }
    }
}

impl<'a> Group<'a> {
    /// Records [`Communicator::all_to_all`].
    ///
    /// # Errors
    /// As there; nothing is recorded then.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// # let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
    /// # let (tokens, scales) = (stream.clone_htod(&[1u8, 2])?, stream.clone_htod(&[0.5f32])?);
    /// # let (mut all_tokens, mut all_scales) = (stream.alloc_zeros::<u8>(2)?, stream.alloc_zeros::<f32>(1)?);
    /// comm.group(|group| {
    ///     group.all_to_all(&tokens, &mut all_tokens)?;
    ///     group.all_to_all(&scales, &mut all_scales)
    /// })?
    /// .wait()?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn all_to_all<S, R>(&mut self, x: S, y: R) -> Result<()>
    where
        S: SendBuffer<'a>,
        R: RecvBuffer<'a, Element = S::Element>,
    {
        let collective = self.comm.all_to_all_by(x, y, Algorithm::Auto);
        self.add(collective)
    }
}
