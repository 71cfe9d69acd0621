//! Several operations issued together.
//!
//! NCCL's group is a pair of calls with state in the thread between them; a panic, a `?` or a forgotten guard would
//! leave the group open. Here the closure only records. Afterwards one function calls start, operations and end, and
//! always closes the group.

mod collectives;

use std::fmt;
use std::ops::Range;
use std::time::Duration;

use crate::active_calls::CallKind;
use crate::buffer::{RecvBuffer, SendBuffer};
use crate::collectives::Collective;
use crate::communicator::Communicator;
use crate::error::{Error, ErrorKind, Result};
use crate::issuing::{IssueBuffers, failed_check, issue};
use crate::op::Function;
use crate::operation::{OperationKind, Shape};
use crate::queued_op::QueuedOp;
use crate::request::Request;
use nccl_base::data_type::DataType;

/// Operations that are recorded to be issued together; see [`Communicator::group`].
///
/// Besides messages it takes every collective of [`Communicator`], under the same name. NCCL implements all-to-all,
/// gather and scatter as messages, so they count in the order of messages: two ranks
/// have to record them in the same order as the messages between them.
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
    pub(crate) comm: &'a Communicator,
    pub(crate) rank: usize,
    pub(crate) world_size: usize,
    pub(crate) buffers: IssueBuffers<'a>,
}

impl<'a> Group<'a> {
    /// Records a message to `peer`.
    ///
    /// The peer must receive the same number of elements of the same type. Messages to one peer arrive in the order in
    /// which they were recorded; messages to different peers are independent. A message without elements is not sent,
    /// and the matching receive is skipped.
    ///
    /// # Errors
    /// [`ErrorKind::NoSuchRank`] for a peer that does not exist, [`ErrorKind::Stream`] for a buffer whose
    /// stream cannot be ordered with the communicator's, [`ErrorKind::Unsupported`] for an element type
    /// that the loaded NCCL does not know. After an error nothing is recorded.
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
    #[inline]
    pub fn isend(&mut self, buffer: impl SendBuffer<'a>, peer: usize) -> Result<()> {
        let (count, data_type) = (buffer.count(), buffer.element());
        let Some(rank) = self.peer(peer, count, data_type)? else {
            return Ok(());
        };
        let address = match self.buffers.is_own_stream(&buffer) {
            true => self.buffers.lease_untracked(buffer),
            false => self.read_elsewhere(buffer)?,
        };
        let message = QueuedOp::new(Function::Send, address, count, data_type, rank);
        self.buffers.push_message(message, peer == self.rank);
        Ok(())
    }

    /// Records a message from `peer`.
    ///
    /// # Errors
    /// As [`isend`](Self::isend).
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
    #[inline]
    pub fn irecv(&mut self, buffer: impl RecvBuffer<'a>, peer: usize) -> Result<()> {
        let (count, data_type) = (buffer.count(), buffer.element());
        let Some(rank) = self.peer(peer, count, data_type)? else {
            return Ok(());
        };
        let address = match self.buffers.is_own_stream(&buffer) {
            true => self.buffers.lease_untracked(buffer),
            false => self.write_elsewhere(buffer)?,
        };
        let message = QueuedOp::new(Function::Recv, address, count, data_type, rank);
        self.buffers.push_message(message, peer == self.rank);
        Ok(())
    }

    /// Returns an empty group; the communicator's stream must have passed `IssueBuffers::admit`.
    #[inline]
    pub(crate) fn of(comm: &'a Communicator) -> Self {
        Self::with(comm, IssueBuffers::empty(comm.stream(), None))
    }

    /// Returns an empty group for a plan that owns the memory in `owned`, and may use no other memory.
    pub(crate) fn of_plan(comm: &'a Communicator, owned: &'a [Range<u64>]) -> Self {
        Self::with(comm, IssueBuffers::empty(comm.stream(), Some(owned)))
    }

    #[inline]
    fn with(comm: &'a Communicator, mut buffers: IssueBuffers<'a>) -> Self {
        buffers.grouped = true;
        Self {
            comm,
            rank: comm.rank(),
            world_size: comm.world_size(),
            buffers,
        }
    }

    /// Checks whether the recorded operations can be issued.
    ///
    /// # Errors
    /// A program can swap two groups when one is recorded inside the closure of the other. Each keeps its own
    /// communicator, but only a plan's group was restricted to the plan's memory, and only a group without a plan is
    /// ordered with its buffers. So this fails unless the group belongs to the plan that owns `owned`, or to no plan
    /// for `None`.
    pub(crate) fn finish(&self, owned: Option<&[Range<u64>]>) -> Result<()> {
        if !self.buffers.is_for(owned) {
            return Err(Error::new(ErrorKind::InvalidConfig {
                field: "group",
                reason: String::from("it was swapped with one of a captured plan"),
            }));
        }
        self.check_own_messages()
    }

    /// Takes a buffer that requires calls to CUDA: a buffer of another stream, or one that cudarc orders.
    #[inline(never)]
    fn read_elsewhere(&mut self, buffer: impl SendBuffer<'a>) -> Result<u64> {
        let _inside = self.comm.inner.enter(CallKind::Issue, self.comm.timeout);
        self.buffers.read(buffer)
    }

    /// Like [`read_elsewhere`](Self::read_elsewhere), for a buffer to write.
    #[inline(never)]
    fn write_elsewhere(&mut self, buffer: impl RecvBuffer<'a>) -> Result<u64> {
        let _inside = self.comm.inner.enter(CallKind::Issue, self.comm.timeout);
        self.buffers.write(buffer)
    }

    /// Records a collective.
    #[inline]
    pub(crate) fn add<X: SendBuffer<'a>, Y: RecvBuffer<'a>>(
        &mut self,
        collective: Result<Collective<X, Y>>,
    ) -> Result<()> {
        let _inside = self.comm.inner.enter(CallKind::Issue, self.comm.timeout);
        collective?.enqueue(self.comm, &mut self.buffers).map(drop)
    }

    /// Returns the peer as NCCL's type; `None` for a message without elements.
    #[inline]
    fn peer(&self, peer: usize, count: usize, data_type: DataType) -> Result<Option<i32>> {
        self.comm.library().admit(data_type)?;
        if peer >= self.world_size {
            return Err(self.no_such_peer(peer));
        }
        if count == 0 {
            return Ok(None);
        }
        // Fits: the number of ranks was checked when the communicator was made.
        Ok(Some(peer as i32))
    }

    /// Issues the group after its closure returned `recorded`.
    fn issue(self, kind: OperationKind, shape: Shape, recorded: Result<()>) -> Result<Request> {
        // Not always the communicator of the call: two groups, one inside the other, can be swapped.
        let comm = self.comm;
        match recorded.and_then(|()| self.finish(None)) {
            Ok(()) => issue(comm, &self.buffers, kind, shape),
            Err(error) => Err(failed_check(comm, kind, shape, error)),
        }
    }

    /// Refuses operations that NCCL keeps after it has simulated the group (`ncclGroupCommLeave`, group.h, leaves the queues of
    /// messages filled), and communicators for which NCCL does not simulate a group.
    fn check_estimated(&self) -> Result<()> {
        let refused =
            |field, reason: String| Err(Error::new(ErrorKind::InvalidConfig { field, reason }));
        self.comm
            .library()
            .function(nccl_sys::Api::ncclGroupSimulateEnd)?;
        if !self.comm.inner.has_blocking_calls {
            return refused(
                "launch_mode",
                String::from(
                    "NCCL estimates nothing for a communicator in launch mode NonBlocking: it would launch the operations",
                ),
            );
        }
        let has_model = |queued: &&QueuedOp| {
            matches!(
                queued.descriptor.function(),
                Function::AllReduce
                    | Function::Reduce
                    | Function::AllGather
                    | Function::ReduceScatter
            )
        };
        match self
            .buffers
            .batch()
            .queued
            .iter()
            .find(|queued| !has_model(queued))
        {
            None => Ok(()),
            Some(other) => refused(
                "estimate",
                format!(
                    "NCCL's model is for all_reduce, reduce, all_gather and reduce_scatter, not for {}",
                    other.descriptor.function().kind()
                ),
            ),
        }
    }

    #[cold]
    pub(crate) fn no_such_peer(&self, peer: usize) -> Error {
        Error::new(ErrorKind::NoSuchRank {
            role: "peer",
            rank: peer,
            world_size: self.world_size,
        })
    }

    /// Checks that each message of the rank to itself has its counterpart. Without a counterpart, NCCL fails at the end
    /// of the group, and the communicator is lost. With a counterpart of another size, NCCL copies the size that was
    /// sent, past the end of a shorter receive buffer.
    fn check_own_messages(&self) -> Result<()> {
        let (queued, self_messages) = (self.buffers.batch().queued, self.buffers.self_messages());
        if self_messages.is_empty() {
            return Ok(());
        }
        let messages = self_messages.iter().map(|&at| &queued[at]);
        let bytes = |message: &QueuedOp| message.descriptor.bytes();
        // A collective that NCCL implements as messages has both a send and a receive.
        let all_but = |function| {
            let of_side = messages
                .clone()
                .filter(move |message| message.descriptor.function() != function);
            of_side.map(bytes)
        };
        if all_but(Function::Recv).eq(all_but(Function::Send)) {
            Ok(())
        } else {
            Err(Error::new(ErrorKind::UnpairedOwnMessages {
                rank: self.rank,
            }))
        }
    }
}

impl Communicator {
    /// Records operations in `record`, and issues them together on the communicator's stream.
    ///
    /// The buffers stay borrowed until the operations are on the stream. When `record` fails, nothing is issued and its
    /// error is returned. A group without operations returns a request that is already complete.
    ///
    /// # Errors
    /// The error of `record`; [`ErrorKind::UnpairedOwnMessages`]; and as any operation:
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
    pub fn group<'a>(
        &'a self,
        record: impl FnOnce(&mut Group<'a>) -> Result<()>,
    ) -> Result<Request> {
        self.group_of_kind(OperationKind::Group, Shape::default(), record)
    }

    /// Issues a group whose errors and recordings name another kind of operation.
    #[inline]
    pub(crate) fn group_of_kind<'a>(
        &'a self,
        kind: OperationKind,
        shape: Shape,
        record: impl FnOnce(&mut Group<'a>) -> Result<()>,
    ) -> Result<Request> {
        // If cudarc keeps no events, CUDA is not called.
        let admitted = match self.stream.context().is_managing_stream_synchronization() {
            false => Ok(()),
            true => {
                let _inside = self.inner.enter(CallKind::Issue, self.timeout);
                IssueBuffers::admit(&self.stream)
            }
        };
        if let Err(error) = admitted {
            return Err(failed_check(self, kind, shape, error));
        }
        let mut group = Group::of(self);
        let recorded = record(&mut group);
        group.issue(kind, shape, recorded)
    }

    /// Asks NCCL how long the operations that `record` records would take, without issuing any of them. All ranks have to call
    /// this with the same operations, because NCCL may connect the ranks for them.
    ///
    /// The estimate comes from the model with which NCCL chooses algorithms, and assumes an idle machine. The model
    /// covers `all_reduce`, `reduce`, `all_gather` and `reduce_scatter`. To estimate another algorithm, set that
    /// algorithm with [`with_config`](Self::with_config). The result is `None` if the model has no estimate, as for a
    /// single rank.
    ///
    /// # Errors
    /// As [`group`](Self::group); [`ErrorKind::Unsupported`] before NCCL 2.22.3; [`ErrorKind::InvalidConfig`] for any other
    /// operation, because NCCL would keep its addresses and run it with a later group, and for a communicator in
    /// [`LaunchMode::NonBlocking`](crate::LaunchMode), because NCCL would launch the operations.
    ///
    /// Wraps `ncclGroupSimulateEnd`.
    ///
    /// ```
    /// # fn example(comm: &nccl::Communicator, y: &mut nccl::cudarc::driver::CudaSlice<f32>) -> nccl::Result<()> {
    /// let whole = comm.estimate(|group| group.all_reduce_in_place(&mut *y, nccl::ReduceOp::Sum))?;
    /// if let Some(time) = whole {
    ///     println!("an all-reduce of {} elements: about {time:?}", y.len());
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn estimate<'a>(
        &'a self,
        record: impl FnOnce(&mut Group<'a>) -> Result<()>,
    ) -> Result<Option<Duration>> {
        IssueBuffers::admit(&self.stream).map_err(|error| in_group(self, error))?;
        let mut group = Group::of(self);
        let recorded = record(&mut group);
        // As in `issue`: not always the communicator of the call.
        let comm = group.comm;
        recorded
            .and_then(|()| group.finish(None))
            .and_then(|()| group.check_estimated())
            .and_then(|()| comm.inner.estimate(&group.buffers, comm.timeout))
            .map_err(|error| in_group(comm, error))
    }

    /// Sends `x` to `peer`, which has to [`recv`](Self::recv) the same number of elements of the same type.
    ///
    /// This is a group of one message: the message is done on the stream before the next operation begins there. **Two ranks
    /// that both send before they receive wait for each other for ever**: messages that have to progress together belong in one
    /// [`group`](Self::group), with [`Group::isend`] and [`Group::irecv`].
    ///
    /// # Errors
    /// As [`group`](Self::group) and [`Group::isend`]; [`ErrorKind::UnpairedOwnMessages`] for this rank itself.
    ///
    /// Wraps `ncclSend`.
    ///
    /// ```
    /// # fn example(comm: &nccl::Communicator, x: &mut nccl::cudarc::driver::CudaSlice<f32>) -> nccl::Result<()> {
    /// match comm.rank() {
    ///     0 => comm.send(&*x, 1)?.wait()?,
    ///     1 => comm.recv(x, 0)?.wait()?,
    ///     _ => {}
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn send<'a>(&'a self, x: impl SendBuffer<'a>, peer: usize) -> Result<Request> {
        self.group(|group| group.isend(x, peer))
    }

    /// Receives `y` from `peer`, which has to [`send`](Self::send) the same number of elements of the same type.
    ///
    /// # Errors
    /// As [`send`](Self::send).
    ///
    /// Wraps `ncclRecv`.
    ///
    /// ```
    /// # fn example(comm: &nccl::Communicator, y: &mut nccl::cudarc::driver::CudaSlice<f32>) -> nccl::Result<()> {
    /// // A pipeline: each stage takes what the one before it has made.
    /// if comm.rank() > 0 {
    ///     comm.recv(&mut *y, comm.rank() - 1)?;
    /// }
    /// // … this stage's kernels, on the same stream …
    /// if comm.rank() + 1 < comm.world_size() {
    ///     comm.send(&*y, comm.rank() + 1)?;
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn recv<'a>(&'a self, y: impl RecvBuffer<'a>, peer: usize) -> Result<Request> {
        self.group(|group| group.irecv(y, peer))
    }
}

/// Returns the error for a group that was not issued.
#[cold]
pub(crate) fn in_group(comm: &Communicator, error: Error) -> Error {
    failed_check(comm, OperationKind::Group, Shape::default(), error)
}

impl fmt::Debug for Group<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Group")
            .field("operations", &self.buffers.batch().queued.len())
            .finish_non_exhaustive()
    }
}
