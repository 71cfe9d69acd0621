//! All-to-all with parts of equal length.

use super::algorithm::Algorithm;
use super::record::{Bases, element_size, exchange_of, length, per_rank, record};
use super::schedule::{self, Payload};
use crate::buffer::{Erased, ErasedMut, RecvBuffer, SendBuffer};
use crate::collectives::{ALL_TO_ALL, Collective, same_type};
use crate::communicator::Communicator;
use crate::error::{Error, ErrorKind, Result};
use crate::group::Group;
use crate::inside::Place;
use crate::issuing::Frame;
use crate::library::Capability;
use crate::operation::{OperationKind, Shape};
use crate::request::Request;

impl Communicator {
    /// Gives block `j` of `x` to rank `j`, and puts the block of rank `j` at block `j` of `y`.
    ///
    /// `x` and `y` have the same number of elements, a multiple of the number of ranks and the same on
    /// all ranks. With one buffer for both, use [`all_to_all_in_place`](Self::all_to_all_in_place).
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
    /// [`ErrorKind::Unsupported`] when the loaded NCCL does not have it, [`ErrorKind::InvalidConfig`] for one that needs
    /// more than the two buffers, for which there are plans ([`AllToAll`](crate::AllToAll)).
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
        let schedule: fn(schedule::Exchange<'_>, usize) -> schedule::Schedule = match algorithm {
            Algorithm::Auto | Algorithm::Native | Algorithm::Grouped => {
                let collective = self.all_to_all_by(x, y, algorithm);
                return self.issue_collective(OperationKind::AllToAll, collective);
            }
            Algorithm::Chunked { .. } => schedule::chunked,
            Algorithm::Pairwise { .. } => schedule::pairwise,
            Algorithm::TwoLevel | Algorithm::CopyEngine => {
                let error = Error::new(ErrorKind::InvalidConfig {
                    field: "algorithm",
                    reason: format!("{algorithm} needs a plan: AllToAll::plan(&communicator)"),
                });
                let shape = Shape::default();
                return Err(self.failed_check(OperationKind::AllToAll, shape, error));
            }
        };
        let parts = match algorithm {
            Algorithm::Chunked { pieces } => pieces.get(),
            Algorithm::Pairwise { width } => width.get(),
            _ => 1,
        };
        self.all_to_all_in_steps(x.erase(), y.erase_mut(), |exchange| {
            schedule(exchange, parts)
        })
    }

    fn all_to_all_in_steps<'a>(
        &'a self,
        x: Erased<'a>,
        y: ErasedMut<'a>,
        schedule: impl FnOnce(schedule::Exchange<'_>) -> schedule::Schedule,
    ) -> Result<Request> {
        const KIND: OperationKind = OperationKind::AllToAll;
        let mut shape = Shape {
            data_type: Some(x.data_type()),
            ..Shape::default()
        };
        let recorded = || {
            let _inside = self.inner.enter(Place::Issue, self.limit);
            let mut frame = Frame::new(&self.stream)?;
            let data_type = same_type(x.data_type(), y.data_type())?;
            let size = element_size(self, data_type)?;
            let ranks = self.world_size();
            let count = per_rank("the send buffer", x.len(), ranks)?;
            if y.len() != x.len() {
                return Err(length(
                    "the receive buffer",
                    y.len(),
                    x.len(),
                    "as many as the send buffer",
                ));
            }
            shape.count = Some(count);
            let payloads = [Payload::uniform(data_type, size, ranks, count)];
            let schedule = schedule(exchange_of(self, &payloads));
            let (send, recv) = (frame.read(x)?, frame.write(y)?);
            let bases = Bases {
                send: &[send],
                recv: &[recv],
                scratch: 0,
            };
            record(&schedule, &payloads, bases, self.rank(), &mut frame);
            Ok(frame)
        };
        let frame = recorded().map_err(|error| self.failed_check(KIND, shape, error))?;
        self.issue(&frame, KIND, shape)
    }

    #[inline(always)]
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
            Algorithm::Grouped => Ok(collective.made_of_messages()),
            _ => Ok(collective),
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
