//! All-to-all with a length of its own for each pair of ranks, as grouped messages.

use crate::buffer::{Erased, ErasedMut, RecvBuffer, SendBuffer};
use crate::collectives::same_type;
use crate::communicator::{Communicator, Frame};
use crate::error::{Error, ErrorKind, Result};
use crate::group::Group;
use crate::operation::{OperationKind, Shape};
use crate::recorded::{Function, Recorded};
use crate::request::Request;

impl Communicator {
    /// Gives each rank its part of `x`, and puts what each rank gives into its part of `y`.
    ///
    /// The parts lie one after another in the order of the ranks: rank `j`'s part of `x` begins behind
    /// the first `j` of `send_counts` and has `send_counts[j]` elements, likewise in `y`. Both buffers may
    /// be longer than the sum. What rank `i` sends to rank `j` must be as long as what rank `j` receives
    /// from rank `i`; parts without elements are neither sent nor received.
    ///
    /// # Errors
    /// [`ErrorKind::Length`] when there is not one count for each rank, when a buffer is shorter than the
    /// sum, or when a rank would not receive from itself what it sends; otherwise as
    /// [`all_reduce`](Self::all_reduce).
    ///
    /// Wraps `ncclSend` and `ncclRecv` in a group.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// # let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
    /// let x = stream.clone_htod(&[1u32, 2, 3])?;
    /// let mut y = stream.alloc_zeros::<u32>(8)?; // room for more
    /// comm.all_to_all_v(&x, &[3], &mut y, &[3])?.wait()?;
    /// assert_eq!(stream.clone_dtoh(&y)?[..3], [1, 2, 3]);
    /// # Ok(())
    /// # }
    /// ```
    pub fn all_to_all_v<'a, S, R>(
        &'a self,
        x: S,
        send_counts: &[usize],
        y: R,
        recv_counts: &[usize],
    ) -> Result<Request>
    where
        S: SendBuffer<'a>,
        R: RecvBuffer<'a, Element = S::Element>,
    {
        const KIND: OperationKind = OperationKind::AllToAllV;
        let (x, y) = (x.erase(), y.erase_mut());
        let shape = Shape {
            data_type: Some(x.data_type()),
            ..Shape::default()
        };
        let frame = Frame::new(&self.stream).and_then(|mut frame| {
            record(self, &mut frame, x, send_counts, y, recv_counts)?;
            Ok(frame)
        });
        let frame = frame.map_err(|error| self.failed_check(KIND, shape, error))?;
        self.issue(&frame, KIND, shape)
    }
}

impl<'a> Group<'a> {
    /// Records [`Communicator::all_to_all_v`].
    ///
    /// # Errors
    /// As there; nothing is recorded then.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// # let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
    /// let x = stream.clone_htod(&[1u32, 2, 3])?;
    /// let mut y = stream.alloc_zeros::<u32>(3)?;
    /// comm.group(|group| group.all_to_all_v(&x, &[3], &mut y, &[3]))?.wait()?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn all_to_all_v<S, R>(
        &mut self,
        x: S,
        send_counts: &[usize],
        y: R,
        recv_counts: &[usize],
    ) -> Result<()>
    where
        S: SendBuffer<'a>,
        R: RecvBuffer<'a, Element = S::Element>,
    {
        let (x, y) = (x.erase(), y.erase_mut());
        record(self.comm, &mut self.frame, x, send_counts, y, recv_counts)
    }
}

fn record<'a>(
    comm: &Communicator,
    frame: &mut Frame<'a>,
    x: Erased<'a>,
    send_counts: &[usize],
    y: ErasedMut<'a>,
    recv_counts: &[usize],
) -> Result<()> {
    let data_type = same_type(x.data_type(), y.data_type())?;
    comm.library().admit(data_type)?;
    let size = data_type
        .size_in_bytes()
        .ok_or_else(|| Error::new(ErrorKind::UnknownDataType(data_type)))?;
    check(
        "the send counts",
        "the send buffer",
        x.len(),
        send_counts,
        comm,
    )?;
    check(
        "the receive counts",
        "the receive buffer",
        y.len(),
        recv_counts,
        comm,
    )?;
    let own = comm.rank();
    if send_counts[own] != recv_counts[own] {
        return Err(Error::new(ErrorKind::Length {
            buffer: "what this rank receives from itself",
            given: recv_counts[own],
            needed: send_counts[own],
            rule: "as many as it sends to itself",
        }));
    }
    if send_counts
        .iter()
        .chain(recv_counts)
        .all(|&count| count == 0)
    {
        return Ok(());
    }
    let (send, recv) = (frame.read(x)?, frame.write(y)?);
    let mut parts = |function, start: u64, counts: &[usize]| {
        let mut address = start;
        for (peer, &count) in counts.iter().enumerate() {
            if count > 0 {
                // Fits: the number of ranks was checked when the communicator was made.
                let message = Recorded::new(function, address, count, data_type, peer as i32);
                frame.push_message(message, peer == own);
            }
            address += (count * size) as u64;
        }
    };
    parts(Function::Send, send, send_counts);
    parts(Function::Recv, recv, recv_counts);
    frame.grouped = true;
    Ok(())
}

/// One count for each rank, and a buffer that holds all parts.
fn check(
    counts_name: &'static str,
    buffer: &'static str,
    length: usize,
    counts: &[usize],
    comm: &Communicator,
) -> Result<()> {
    let error = |buffer, given, needed, rule| {
        Err(Error::new(ErrorKind::Length {
            buffer,
            given,
            needed,
            rule,
        }))
    };
    if counts.len() != comm.world_size() {
        return error(
            counts_name,
            counts.len(),
            comm.world_size(),
            "one for each rank",
        );
    }
    let needed = counts
        .iter()
        .try_fold(0usize, |sum, &count| sum.checked_add(count))
        .unwrap_or(usize::MAX);
    if length < needed {
        return error(buffer, length, needed, "at least the sum of its counts");
    }
    Ok(())
}
