//! Several messages issued together.
//!
//! NCCL's group is a pair of calls with state in the thread between them, which a panic, a `?` or a
//! forgotten guard leaves open. Here a closure only records; start, messages and end happen afterwards
//! in one call that cannot be left half way.

use std::fmt;
use std::time::Instant;

use crate::buffer::{RecvBuffer, SendBuffer};
use crate::communicator::{Communicator, lock};
use crate::error::{Error, ErrorKind, Result};
use crate::library::Library;
use crate::operation::{OperationKind, Shape};
use crate::point_to_point::{Message, Messages, reuse};
use crate::request::Request;

/// Messages that are recorded to be issued together; see [`Communicator::group`].
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # nccl_emulator::install_unless_gpu()?;
/// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
/// # let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
/// let x = stream.clone_htod(&[1u8, 2, 3])?;
/// let mut y = stream.alloc_zeros::<u8>(3)?;
/// comm.group(|group| {
///     group.isend(&x, 0)?; // a message to oneself, for once
///     group.irecv(&mut y, 0)
/// })?
/// .wait()?;
/// assert_eq!(stream.clone_dtoh(&y)?, [1, 2, 3]);
/// # Ok(())
/// # }
/// ```
pub struct Group<'a> {
    rank: usize,
    world_size: usize,
    messages: Vec<Message<'a>>,
}

impl<'a> Group<'a> {
    /// Records a message to `peer`.
    ///
    /// The peer has to receive as many elements of the same type. Messages to one peer arrive in the
    /// order in which they were recorded; messages to different peers are independent. A message
    /// without elements is not sent at all, and its counterpart is not received.
    ///
    /// # Errors
    /// [`ErrorKind::NoSuchRank`] for a peer that does not exist.
    ///
    /// Wraps `ncclSend`.
    ///
    /// ```
    /// # fn example(comm: &nccl::Communicator, x: &nccl::cudarc::driver::CudaSlice<f32>) -> nccl::Result<()> {
    /// let n = x.len() / comm.world_size();
    /// comm.group(|group| {
    ///     for peer in 0..comm.world_size() {
    ///         group.isend(x.slice(peer * n..(peer + 1) * n), peer)?;
    ///     }
    ///     Ok(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn isend(&mut self, buffer: impl SendBuffer<'a>, peer: usize) -> Result<()> {
        self.record(Message::send(buffer.erase()), peer)
    }

    /// Records a message from `peer`.
    ///
    /// # Errors
    /// [`ErrorKind::NoSuchRank`] for a peer that does not exist.
    ///
    /// Wraps `ncclRecv`.
    ///
    /// ```
    /// # fn example(comm: &nccl::Communicator, mut parts: Vec<nccl::cudarc::driver::CudaSlice<f32>>) -> nccl::Result<()> {
    /// comm.group(|group| {
    ///     for (peer, part) in parts.iter_mut().enumerate() {
    ///         group.irecv(part, peer)?;
    ///     }
    ///     Ok(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn irecv(&mut self, buffer: impl RecvBuffer<'a>, peer: usize) -> Result<()> {
        self.record(Message::recv(buffer.erase_mut()), peer)
    }

    #[inline]
    fn record(&mut self, message: Message<'a>, peer: usize) -> Result<()> {
        let world_size = self.world_size;
        match i32::try_from(peer) {
            Ok(index) if peer < world_size => {
                if !message.is_empty() {
                    self.messages.push(message.with(index));
                }
                Ok(())
            }
            _ => Err(Error::new(ErrorKind::NoSuchRank {
                role: "peer",
                rank: peer,
                world_size,
            })),
        }
    }

    fn check_types(&self, library: &Library) -> Result<()> {
        self.messages
            .iter()
            .try_for_each(|message| library.admit(message.data_type()))
    }

    /// A message to oneself without its counterpart makes NCCL fail at the end of the group, which
    /// costs the communicator.
    fn check_own_messages(&self) -> Result<()> {
        let own = |sent| {
            self.messages
                .iter()
                .filter(move |message| message.is_with(self.rank) && message.is_send() == sent)
                .map(Message::num_bytes)
        };
        if own(true).eq(own(false)) {
            Ok(())
        } else {
            Err(Error::new(ErrorKind::UnpairedOwnMessages {
                rank: self.rank,
            }))
        }
    }
}

impl Communicator {
    /// Records messages in `record`, and issues them together on the communicator's stream.
    ///
    /// The buffers stay borrowed until the messages are on the stream. When `record` fails, nothing is
    /// issued and its error is returned. A group without messages is a request that is done at once.
    ///
    /// # Errors
    /// What `record` returns; [`ErrorKind::UnpairedOwnMessages`]; and as any operation:
    /// [`ErrorKind::Stream`] for a stream that cannot carry it, [`ErrorKind::Nccl`] and
    /// [`ErrorKind::TimedOut`] when NCCL fails or does not launch in time, after which the communicator
    /// is aborted.
    ///
    /// Wraps `ncclGroupStart`, `ncclSend`, `ncclRecv` and `ncclGroupEnd`.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// # let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
    /// let x = stream.alloc_zeros::<u8>(4)?;
    /// let error = comm.group(|group| group.isend(&x, 7)).unwrap_err();
    /// assert!(matches!(error.kind(), nccl::ErrorKind::NoSuchRank { .. }));
    /// # Ok(())
    /// # }
    /// ```
    pub fn group<'a>(&self, record: impl FnOnce(&mut Group<'a>) -> Result<()>) -> Result<Request> {
        let scratch = lock(&self.0.scratch).pop().unwrap_or_default();
        let mut group = Group {
            rank: self.rank(),
            world_size: self.world_size(),
            messages: reuse(scratch),
        };
        let request = match record(&mut group)
            .and_then(|()| group.check_own_messages())
            .and_then(|()| group.check_types(self.library()))
        {
            Ok(()) => self.0.issue(
                &self.0.stream,
                OperationKind::Group,
                Shape::default(),
                &mut Messages(&mut group.messages),
            ),
            Err(error) => {
                let operation = || {
                    self.0
                        .operation(OperationKind::Group, Shape::default(), None, Instant::now())
                };
                Err(error.during(operation))
            }
        };
        lock(&self.0.scratch).push(reuse(group.messages));
        request
    }
}

impl fmt::Debug for Group<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Group")
            .field("messages", &self.messages.len())
            .finish_non_exhaustive()
    }
}
