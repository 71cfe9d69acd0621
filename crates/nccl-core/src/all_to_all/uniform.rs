//! All-to-all with parts of equal length.

use super::algorithm::Algorithm;
use super::record::{Bases, element_size, enqueue, exchange_of, length, per_rank};
use super::schedule::{self, Payload};
use crate::active_calls::CallKind;
use crate::buffer::{Erased, ErasedMut, RecvBuffer, SendBuffer};
use crate::collectives::{ALL_TO_ALL, Collective, issue_collective, same_type};
use crate::communicator::Communicator;
use crate::error::{Error, ErrorKind, Result};
use crate::group::Group;
use crate::issuing::{IssueBuffers, failed_check, issue};
use crate::library::Capability;
use crate::operation::{OperationKind, Shape};
use crate::request::Request;

/// Sends block `j` of `x` to rank `j`, by `algorithm`.
pub(super) fn exchange<'a, S, R>(
    comm: &'a Communicator,
    x: S,
    y: R,
    algorithm: Algorithm,
) -> Result<Request>
where
    S: SendBuffer<'a>,
    R: RecvBuffer<'a, Element = S::Element>,
{
    let schedule: fn(schedule::Exchange<'_>, usize) -> schedule::Schedule = match algorithm {
        Algorithm::Auto | Algorithm::Native | Algorithm::Grouped => {
            let collective = collective(comm, x, y, algorithm);
            return issue_collective(comm, OperationKind::AllToAll, collective);
        }
        Algorithm::Chunked { .. } => schedule::chunked,
        Algorithm::Pairwise { .. } => schedule::pairwise,
        Algorithm::TwoLevel | Algorithm::CopyEngine => {
            let error = Error::new(ErrorKind::InvalidConfig {
                field: "algorithm",
                reason: format!("{algorithm} needs a plan: AllToAll::plan(&communicator)"),
            });
            let shape = Shape::default();
            return Err(failed_check(comm, OperationKind::AllToAll, shape, error));
        }
    };
    let parts = match algorithm {
        Algorithm::Chunked { pieces } => pieces.get(),
        Algorithm::Pairwise { width } => width.get(),
        _ => 1,
    };
    in_steps(comm, x.erase(), y.erase_mut(), |exchange| {
        schedule(exchange, parts)
    })
}

fn in_steps<'a>(
    comm: &'a Communicator,
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
        let _inside = comm.inner.enter(CallKind::Issue, comm.timeout);
        let mut buffers = IssueBuffers::new(&comm.stream)?;
        let data_type = same_type(x.data_type(), y.data_type())?;
        let size = element_size(comm, data_type)?;
        let ranks = comm.world_size();
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
        let schedule = schedule(exchange_of(comm, &payloads));
        let (send, recv) = (buffers.read(x)?, buffers.write(y)?);
        let bases = Bases {
            send: &[send],
            recv: &[recv],
            scratch: 0,
        };
        enqueue(&schedule, &payloads, bases, comm, &mut buffers)?;
        Ok(buffers)
    };
    let buffers = recorded().map_err(|error| failed_check(comm, KIND, shape, error))?;
    issue(comm, &buffers, KIND, shape)
}

#[inline(always)]
fn collective<'a, S: SendBuffer<'a>, R: RecvBuffer<'a>>(
    comm: &Communicator,
    x: S,
    y: R,
    algorithm: Algorithm,
) -> Result<Collective<S, R>> {
    let collective = Collective::out_of_place(ALL_TO_ALL, Some(x), Some(y));
    match algorithm {
        Algorithm::Native if !comm.library().has(Capability::NativeAllToAll) => {
            let needs = Capability::NativeAllToAll.since();
            Err(comm
                .library()
                .unsupported(String::from("ncclAlltoAll"), needs))
        }
        Algorithm::Grouped => Ok(collective.with_point_to_point()),
        _ => Ok(collective),
    }
}

impl<'a> Group<'a> {
    /// Records [`Communicator::all_to_all`].
    ///
    /// # Errors
    /// As [`Communicator::all_to_all`]; after an error nothing is recorded.
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
        let collective = collective(self.comm, x, y, Algorithm::Auto);
        self.add(collective)
    }
}
