//! All-to-all with one buffer.

use super::record::{Bases, element_size, exchange_of, length, per_rank, record};
use super::schedule::{Payload, beside, in_place};
use crate::buffer::{ErasedMut, RecvBuffer};
use crate::communicator::Communicator;
#[cfg(doc)]
use crate::error::ErrorKind;
use crate::error::Result;
use crate::inside::Place;
use crate::issuing::Frame;
use crate::operation::{OperationKind, Shape};
use crate::request::Request;

impl Communicator {
    /// Gives block `j` of `y` to rank `j`, and puts the block of rank `j` in its place.
    ///
    /// `y` has a multiple of as many elements as there are ranks, the same on all. What NCCL calls in place would
    /// overwrite blocks that were not sent yet; here pairs of ranks exchange theirs, and what comes waits in `scratch`
    /// until the block that it replaces has gone. `scratch` may be of any type and hold anything, and holds nothing of
    /// use afterwards. It has room for one block at least (each begins at a multiple of 16 bytes); with room for as many
    /// as there are ranks, everything goes at once, in one group, and with less in as many groups as it takes.
    ///
    /// # Errors
    /// [`ErrorKind::Length`] when `y` cannot be divided among the ranks, or `scratch` has no room for a block; otherwise
    /// as [`all_reduce`](Self::all_reduce).
    ///
    /// Wraps `ncclSend` and `ncclRecv` in groups, and `cuMemcpyDtoDAsync`.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// # let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
    /// let mut y = stream.clone_htod(&[1u32, 2, 3])?; // one rank: one block
    /// let mut scratch = stream.alloc_zeros::<u8>(16)?;
    /// comm.all_to_all_in_place(&mut y, &mut scratch)?.wait()?;
    /// assert_eq!(stream.clone_dtoh(&y)?, [1, 2, 3]);
    /// # Ok(())
    /// # }
    /// ```
    pub fn all_to_all_in_place<'a, R, S>(&'a self, y: R, scratch: S) -> Result<Request>
    where
        R: RecvBuffer<'a>,
        S: RecvBuffer<'a>,
    {
        const KIND: OperationKind = OperationKind::AllToAll;
        let (y, scratch) = (y.erase_mut(), scratch.erase_mut());
        let mut shape = Shape {
            data_type: Some(y.data_type()),
            ..Shape::default()
        };
        let frame = exchange_in_place(self, y, scratch, &mut shape);
        let frame = frame.map_err(|error| self.failed_check(KIND, shape, error))?;
        self.issue(&frame, KIND, shape)
    }
}

fn exchange_in_place<'a>(
    comm: &'a Communicator,
    y: ErasedMut<'a>,
    scratch: ErasedMut<'a>,
    shape: &mut Shape,
) -> Result<Frame<'a>> {
    let _inside = comm.inner.enter(Place::Issue, comm.limit);
    let mut frame = Frame::new(&comm.stream)?;
    let (data_type, ranks) = (y.data_type(), comm.world_size());
    let size = element_size(comm, data_type)?;
    let count = per_rank("the buffer", y.len(), ranks)?;
    shape.count = Some(count);
    let room = (scratch.range().end - scratch.range().start) as usize;
    let payloads = [Payload::uniform(data_type, size, ranks, count)];
    let block = beside([count * size].into_iter());
    // Nothing has to wait where there is nothing, or nobody else.
    let width = match block {
        _ if ranks == 1 => 1,
        0 => ranks,
        block if room < block => {
            return Err(length(
                "the scratch, in bytes,",
                room,
                block,
                "at least one block, from a multiple of 16 bytes on",
            ));
        }
        block => (room / block).min(ranks),
    };
    let schedule = in_place(exchange_of(comm, &payloads), width);
    let (recv, scratch) = (frame.write(y)?, frame.write(scratch)?);
    let bases = Bases {
        send: &[],
        recv: &[recv],
        scratch,
    };
    record(&schedule, &payloads, bases, comm.rank(), &mut frame);
    Ok(frame)
}
