//! A collective, from its buffers to the queued operation.

use std::sync::Arc;

use cudarc::driver::CudaStream;
use nccl_sys as sys;

use super::rules::{RankAndRoot, Rule};
use crate::active_calls;
use crate::buffer::{Erased, RecvBuffer, SendBuffer};
use crate::communicator::Communicator;
use crate::error::{Error, ErrorKind, Result};
use crate::issuing::{IssueBuffers, failed_check, issue};
use crate::op::{self, Function};
use crate::operation::{OperationKind, Shape};
use crate::queued_op::{CollectiveArgs, Extra, QueuedOp};
use crate::reduce::{self, Operator, Reduction};
use crate::request::Request;
use nccl_base::data_type::DataType;

/// A requested collective: its row of the table, and its buffers.
///
/// Only the queries of lengths and addresses depend on the kinds of buffers,
/// because that code is compiled for each kind.
pub(crate) struct Collective<X, Y> {
    spec: CollectiveSpec,
    buffers: Buffers<X, Y>,
}

enum Buffers<X, Y> {
    OutOfPlace(Option<X>, Option<Y>),
    InPlace(Y),
}

/// The arguments of a collective other than its buffers.
struct CollectiveSpec {
    rule: Rule,
    root: Option<usize>,
    reduction_op: sys::ncclRedOp_t,
    operator: Option<Arc<Operator>>,
    uses_point_to_point: bool,
}

/// The lengths and types of the buffers; in place there is no `send`.
#[derive(Clone, Copy)]
struct BufferLengths {
    send: Option<BufferLength>,
    recv: Option<BufferLength>,
    in_place: bool,
}

#[derive(Clone, Copy)]
struct BufferLength {
    count: usize,
    data_type: DataType,
}

/// The result of the checks.
struct CheckedArgs {
    count: usize,
    data_type: DataType,
    root: i32,
    /// In bytes from the start of the one buffer; 0 with two buffers.
    send_at: u64,
    recv_at: u64,
    reads: bool,
    writes: bool,
}

impl<'a, X: SendBuffer<'a>, Y: RecvBuffer<'a>> Collective<X, Y> {
    #[inline]
    pub(crate) fn out_of_place(rule: Rule, x: Option<X>, y: Option<Y>) -> Self {
        Self {
            spec: CollectiveSpec::new(rule),
            buffers: Buffers::OutOfPlace(x, y),
        }
    }

    #[inline]
    pub(crate) fn root(mut self, root: usize) -> Self {
        self.spec.root = Some(root);
        self
    }

    #[inline]
    pub(crate) fn reducing(mut self, op: impl Reduction, comm: &Communicator) -> Result<Self> {
        if let Some(data_type) = self.lengths().data_type() {
            (self.spec.reduction_op, self.spec.operator) = reduce::resolve(&op, comm, data_type)?;
        }
        Ok(self)
    }

    /// Uses point-to-point messages, even if the library has a native call for the collective.
    #[inline]
    pub(crate) fn with_point_to_point(mut self) -> Self {
        self.spec.uses_point_to_point = true;
        self
    }

    #[inline]
    fn lengths(&self) -> BufferLengths {
        self.buffers.lengths()
    }

    /// Checks everything that can be checked, queues the operation, and returns its count. Without
    /// elements, nothing is queued.
    // Always inlined, and in two parts: passing it through memory as a whole is most of the cost of a collective.
    #[inline(always)]
    pub(crate) fn enqueue(
        self,
        comm: &Communicator,
        issue_buffers: &mut IssueBuffers<'a>,
    ) -> Result<usize> {
        let Self { spec, buffers } = self;
        let checked = spec.check(comm, &buffers.lengths())?;
        let (send, recv) = buffers.take(&checked, issue_buffers)?;
        if checked.count != 0 {
            spec.push(comm, issue_buffers, &checked, send, recv)?;
        }
        Ok(checked.count)
    }
}

impl<'a, X: SendBuffer<'a>, Y: RecvBuffer<'a>> Buffers<X, Y> {
    /// Whether all buffers belong to `stream`, and cudarc does not order the streams of the context.
    #[inline(always)]
    fn are_taken_without_cuda(&self, stream: &Arc<CudaStream>) -> bool {
        let is_own_stream = |owner: &Arc<CudaStream>| Arc::ptr_eq(owner, stream);
        !stream.context().is_managing_stream_synchronization()
            && match self {
                Self::InPlace(y) => is_own_stream(y.owner_stream()),
                Self::OutOfPlace(x, y) => {
                    x.as_ref().is_none_or(|x| is_own_stream(x.owner_stream()))
                        && y.as_ref().is_none_or(|y| is_own_stream(y.owner_stream()))
                }
            }
    }

    #[inline(always)]
    fn lengths(&self) -> BufferLengths {
        match self {
            Self::InPlace(y) => BufferLengths {
                send: None,
                recv: Some(BufferLength::of_recv(y)),
                in_place: true,
            },
            Self::OutOfPlace(x, y) => BufferLengths {
                send: x.as_ref().map(BufferLength::of_send),
                recv: y.as_ref().map(BufferLength::of_recv),
                in_place: false,
            },
        }
    }

    /// Takes the buffers that the operation reads and writes; returns their addresses.
    #[inline(always)]
    fn take(
        self,
        checked: &CheckedArgs,
        issue_buffers: &mut IssueBuffers<'a>,
    ) -> Result<(u64, u64)> {
        Ok(match self {
            Self::InPlace(y) => {
                let address = issue_buffers.write(y)?;
                (address + checked.send_at, address + checked.recv_at)
            }
            Self::OutOfPlace(x, y) => (
                match x {
                    Some(x) if checked.reads => issue_buffers.read(x)?,
                    _ => 0,
                },
                match y {
                    Some(y) if checked.writes => issue_buffers.write(y)?,
                    _ => 0,
                },
            ),
        })
    }
}

impl<'a, Y: RecvBuffer<'a>> Collective<Erased<'a>, Y> {
    #[inline]
    pub(crate) fn in_place(rule: Rule, y: Y) -> Self {
        Self {
            spec: CollectiveSpec::new(rule),
            buffers: Buffers::InPlace(y),
        }
    }
}

impl BufferLength {
    #[inline]
    fn of_send<'a>(buffer: &impl SendBuffer<'a>) -> Self {
        Self {
            count: buffer.count(),
            data_type: buffer.element(),
        }
    }

    #[inline]
    fn of_recv<'a>(buffer: &impl RecvBuffer<'a>) -> Self {
        Self {
            count: buffer.count(),
            data_type: buffer.element(),
        }
    }
}

impl BufferLengths {
    #[inline]
    fn data_type(&self) -> Option<DataType> {
        self.send.or(self.recv).map(|elements| elements.data_type)
    }

    fn counts(&self) -> (Option<usize>, Option<usize>) {
        let count = |side: Option<BufferLength>| side.map(|elements| elements.count);
        (count(self.send), count(self.recv))
    }
}

impl CollectiveSpec {
    #[inline]
    fn new(rule: Rule) -> Self {
        Self {
            rule,
            root: None,
            reduction_op: sys::ncclRedOp_t::ncclSum,
            operator: None,
            uses_point_to_point: false,
        }
    }

    fn rank_and_root(&self, comm: &Communicator) -> RankAndRoot {
        RankAndRoot {
            rank: comm.rank(),
            ranks: comm.world_size(),
            root: self.root,
        }
    }

    /// Checks root, types and lengths.
    fn check(&self, comm: &Communicator, lengths: &BufferLengths) -> Result<CheckedArgs> {
        let (rule, rank_and_root) = (self.rule, self.rank_and_root(comm));
        let root = rule.root(rank_and_root)?;
        let data_type = match (lengths.send, lengths.recv) {
            (Some(x), Some(y)) => same_type(x.data_type, y.data_type)?,
            // With neither buffer, `count` refuses the operation below, or there is nothing to do.
            _ => lengths.data_type().unwrap_or(DataType::UInt8),
        };
        comm.library().admit(data_type)?;
        let mut checked = CheckedArgs {
            count: 0,
            data_type,
            root,
            send_at: 0,
            recv_at: 0,
            reads: rule.reads(rank_and_root),
            writes: rule.writes(rank_and_root),
        };
        let (send, recv) = lengths.counts();
        if lengths.in_place {
            let in_place = rule.in_place(rank_and_root, recv.unwrap_or_default())?;
            let size = size_of(data_type)?;
            checked.count = in_place.count;
            checked.send_at = (in_place.send * size) as u64;
            checked.recv_at = (in_place.recv * size) as u64;
        } else {
            checked.count = rule.count(rank_and_root, send, recv)?;
        }
        Ok(checked)
    }

    /// Queues the operation that reads at `send` and writes at `recv`.
    fn push(
        self,
        comm: &Communicator,
        issue_buffers: &mut IssueBuffers<'_>,
        checked: &CheckedArgs,
        send: u64,
        recv: u64,
    ) -> Result<()> {
        let function = self.rule.function;
        let &CheckedArgs {
            count,
            data_type,
            root,
            ..
        } = checked;
        issue_buffers.reduce_with(self.operator);
        let whole = QueuedOp::new(function, send, count, data_type, root);
        if self.uses_point_to_point || !comm.library().has_function(function) {
            messages(&whole, recv, comm, issue_buffers)
        } else {
            let collective_args = CollectiveArgs {
                recv,
                reduction_op: self.reduction_op,
                extra: Extra::of(comm),
            };
            issue_buffers.check_launch_event(&collective_args)?;
            let whole = QueuedOp {
                descriptor: whole.descriptor.reducing_with(self.reduction_op),
                ..whole
            };
            issue_buffers.push_collective(whole, collective_args, comm.rank());
            Ok(())
        }
    }
}

/// Queues the messages that replace a call of newer releases.
///
/// Their order does not matter: NCCL serves the peers of a group in an order of its own.
fn messages(
    whole: &QueuedOp,
    recv: u64,
    comm: &Communicator,
    issue_buffers: &mut IssueBuffers<'_>,
) -> Result<()> {
    let (send, count) = (whole.address, whole.descriptor.count as usize);
    let (data_type, root) = (whole.descriptor.data_type(), whole.descriptor.rank);
    // Both fit: the number of ranks was checked when the communicator was made.
    let (ranks, own) = (comm.world_size() as i32, comm.rank() as i32);
    let size = (count * size_of(data_type)?) as u64;
    let block = |start: u64, rank: i32| start + rank as u64 * size;
    let mut push = |function, address, peer| {
        let message = QueuedOp::new(function, address, count, data_type, peer);
        issue_buffers.push_message(message, peer == own);
    };
    match whole.descriptor.function() {
        Function::AllToAll => {
            for peer in 0..ranks {
                push(Function::Send, block(send, peer), peer);
                push(Function::Recv, block(recv, peer), peer);
            }
        }
        Function::Gather => {
            // In place, the root's own block is already in its place.
            let in_place = own == root && send == block(recv, own);
            if !in_place {
                push(Function::Send, send, root);
            }
            for peer in (0..ranks).filter(|&peer| own == root && !(in_place && peer == own)) {
                push(Function::Recv, block(recv, peer), peer);
            }
        }
        Function::Scatter => {
            let in_place = own == root && recv == block(send, own);
            for peer in (0..ranks).filter(|&peer| own == root && !(in_place && peer == own)) {
                push(Function::Send, block(send, peer), peer);
            }
            if !in_place {
                push(Function::Recv, recv, root);
            }
        }
        function => unreachable!("every release has {function:?}"),
    }
    issue_buffers.grouped = true;
    Ok(())
}

fn size_of(data_type: DataType) -> Result<usize> {
    data_type
        .size_in_bytes()
        .ok_or_else(|| Error::new(ErrorKind::UnknownDataType(data_type)))
}

/// Checks that both buffers hold the same type, which the compiler cannot check for erased buffers.
#[inline]
#[doc(hidden)]
pub fn same_type(send: DataType, receive: DataType) -> Result<DataType> {
    if send == receive {
        Ok(send)
    } else {
        Err(Error::new(ErrorKind::DataTypeMismatch { send, receive }))
    }
}

/// Issues a single collective.
#[inline(always)]
pub(crate) fn issue_collective<'a, X: SendBuffer<'a>, Y: RecvBuffer<'a>>(
    comm: &'a Communicator,
    kind: OperationKind,
    collective: Result<Collective<X, Y>>,
) -> Result<Request> {
    let Collective { spec, buffers } = match collective {
        Ok(collective) => collective,
        Err(error) => return Err(failed_check(comm, kind, Shape::default(), error)),
    };
    let (lengths, rule, root) = (buffers.lengths(), spec.rule, spec.root);
    let shape = Shape {
        peer: None,
        root,
        count: None,
        data_type: lengths.data_type(),
        reduction: op::reduction(rule.function, spec.reduction_op),
    };
    // Taking buffers may query CUDA about their streams; the issue below enters `active_calls` itself.
    let may_call_cuda = !buffers.are_taken_without_cuda(&comm.stream);
    let call_guard = may_call_cuda.then(|| {
        comm.inner
            .enter(active_calls::CallKind::Issue, comm.timeout)
    });
    let failed = |error| {
        let shape = Shape {
            count: count_of(comm, rule, root, &lengths),
            ..shape
        };
        failed_check(comm, kind, shape, error)
    };
    IssueBuffers::admit(&comm.stream).map_err(failed)?;
    let mut issue_buffers = IssueBuffers::empty(&comm.stream, None);
    let queued = Collective { spec, buffers }.enqueue(comm, &mut issue_buffers);
    drop(call_guard);
    let count = Some(queued.map_err(failed)?);
    issue(comm, &issue_buffers, kind, Shape { count, ..shape })
}

/// Returns the count for the C function, or `None` where the lengths give none.
#[cold]
fn count_of(
    comm: &Communicator,
    rule: Rule,
    root: Option<usize>,
    lengths: &BufferLengths,
) -> Option<usize> {
    let rank_and_root = RankAndRoot {
        rank: comm.rank(),
        ranks: comm.world_size(),
        root,
    };
    let (send, recv) = lengths.counts();
    if lengths.in_place {
        let in_place = rule
            .in_place(rank_and_root, recv.unwrap_or_default())
            .ok()?;
        Some(in_place.count)
    } else {
        rule.count(rank_and_root, send, recv).ok()
    }
}
