//! Collectives: the length rules, and the calls.

use std::sync::Arc;

use cudarc::driver::CudaStream;
use nccl_sys as sys;

use crate::buffer::{Erased, ErasedMut, RecvBuffer, SendBuffer};
use crate::communicator::{Calls, Communicator, Issue, Leased};
use crate::dtype::DataType;
use crate::error::{Error, ErrorKind, NcclFailure, Result};
use crate::ffi::{self, Progress};
use crate::operation::{OperationKind, Shape};
use crate::reduce::ReduceOp;
use crate::request::Request;

/// The buffers of a collective that reads one and writes one; in place, it has only the second.
pub(crate) struct Pair<'a> {
    pub(crate) send: Option<Erased<'a>>,
    pub(crate) recv: Option<ErasedMut<'a>>,
    /// Whether the C call reads where it writes.
    in_place: bool,
}

impl<'a> Pair<'a> {
    pub(crate) fn new(send: Option<Erased<'a>>, recv: ErasedMut<'a>) -> Self {
        let in_place = send.is_none();
        Self {
            send,
            recv: Some(recv),
            in_place,
        }
    }

    pub(crate) fn streams(
        &self,
        mut visit: impl FnMut(&Arc<CudaStream>) -> Result<()>,
    ) -> Result<()> {
        if let Some(send) = &self.send {
            visit(send.stream())?;
        }
        if let Some(recv) = &self.recv {
            visit(recv.stream())?;
        }
        Ok(())
    }

    /// Leases the receive buffer as number 0, the send buffer as number 1.
    pub(crate) fn lease<'s>(&mut self, on: &'s CudaStream, leases: &mut Vec<Leased<'s>>)
    where
        'a: 's,
    {
        leases.extend(self.recv.take().map(|recv| recv.lease(on)));
        leases.extend(self.send.take().map(|send| send.lease(on)));
    }

    pub(crate) fn recv_address(&self, calls: &Calls<'_>) -> *mut std::ffi::c_void {
        calls.address(0)
    }

    pub(crate) fn send_address(&self, calls: &Calls<'_>) -> *const std::ffi::c_void {
        calls.address(usize::from(!self.in_place))
    }
}

/// Both buffers hold the same type, which the compiler cannot see for erased ones.
pub(crate) fn same_type(send: &Erased<'_>, recv: &ErasedMut<'_>) -> Result<DataType> {
    if send.data_type() == recv.data_type() {
        Ok(send.data_type())
    } else {
        Err(Error::new(ErrorKind::DataTypeMismatch {
            send: send.data_type(),
            receive: recv.data_type(),
        }))
    }
}

/// The receive buffer has exactly as many elements as the send buffer.
pub(crate) fn same_length(send: &Erased<'_>, recv: &ErasedMut<'_>) -> Result<usize> {
    if send.len() == recv.len() {
        Ok(send.len())
    } else {
        Err(Error::new(ErrorKind::Length {
            buffer: "the receive buffer",
            given: recv.len(),
            needed: send.len(),
            rule: "as many as the send buffer",
        }))
    }
}

struct AllReduce<'a> {
    pair: Pair<'a>,
    count: usize,
    data_type: DataType,
    op: ReduceOp,
}

impl<'s, 'a: 's> Issue<'s> for AllReduce<'a> {
    fn streams(&self, visit: impl FnMut(&Arc<CudaStream>) -> Result<()>) -> Result<()> {
        self.pair.streams(visit)
    }

    fn lease(&mut self, on: &'s CudaStream, leases: &mut Vec<Leased<'s>>) {
        self.pair.lease(on, leases);
    }

    fn call(&self, calls: &Calls<'_>) -> Result<Progress, NcclFailure> {
        const CALL: &str = "ncclAllReduce";
        if self.count == 0 {
            return Ok(Progress::Done);
        }
        let Some(all_reduce) = calls.library.api().ncclAllReduce else {
            return Err(ffi::failure(
                calls.library,
                CALL,
                sys::ncclResult_t::ncclInternalError,
            ));
        };
        // SAFETY: both addresses are valid for `count` elements until the work is done on the stream,
        // which the order of streams sees to; communicator and stream are alive.
        let code = unsafe {
            all_reduce(
                self.pair.send_address(calls),
                self.pair.recv_address(calls),
                self.count,
                self.data_type.raw(),
                self.op.raw(),
                calls.comm,
                calls.stream,
            )
        };
        ffi::check(calls.library, CALL, code)
    }
}

impl Communicator {
    /// Reduces the `x` of all ranks, element by element, into the `y` of every rank.
    ///
    /// `x` and `y` have the same number of elements, the same on all ranks. With no elements this is
    /// done at once.
    ///
    /// # Errors
    /// [`ErrorKind::Length`] and [`ErrorKind::DataTypeMismatch`] for buffers that do not fit;
    /// [`ErrorKind::Stream`] for a stream that cannot carry the operation; [`ErrorKind::Nccl`] and
    /// [`ErrorKind::TimedOut`] when NCCL fails or does not launch in time, after which the communicator
    /// is aborted; [`ErrorKind::Aborted`] and [`ErrorKind::Closed`] when it is out of use.
    ///
    /// Wraps `ncclAllReduce`.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// # let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
    /// let x = stream.clone_htod(&[1.0f32, 2.0])?;
    /// let mut y = stream.alloc_zeros::<f32>(2)?;
    /// comm.all_reduce(&x, &mut y, nccl::ReduceOp::Sum)?.wait()?;
    /// assert_eq!(stream.clone_dtoh(&y)?, [1.0, 2.0]); // one rank only
    /// # Ok(())
    /// # }
    /// ```
    pub fn all_reduce<'a, S, R>(&self, x: S, y: R, op: ReduceOp) -> Result<Request>
    where
        S: SendBuffer<'a>,
        R: RecvBuffer<'a, Element = S::Element>,
    {
        let (x, y) = (x.erase(), y.erase_mut());
        let shape = shape(y.len(), y.data_type());
        let checked = same_type(&x, &y).and_then(|_| same_length(&x, &y));
        self.checked(OperationKind::AllReduce, shape, checked)?;
        self.all_reduce_pair(Pair::new(Some(x), y), shape, op)
    }

    /// Reduces the `y` of all ranks, element by element, into the `y` of every rank.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    ///
    /// Wraps `ncclAllReduce`.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// # let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
    /// let mut y = stream.clone_htod(&[1i64, 2])?;
    /// comm.all_reduce_in_place(&mut y, nccl::ReduceOp::Min)?.wait()?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn all_reduce_in_place<'a>(&self, y: impl RecvBuffer<'a>, op: ReduceOp) -> Result<Request> {
        let y = y.erase_mut();
        let shape = shape(y.len(), y.data_type());
        self.all_reduce_pair(Pair::new(None, y), shape, op)
    }

    fn all_reduce_pair(&self, pair: Pair<'_>, shape: Shape, op: ReduceOp) -> Result<Request> {
        let (Some(count), Some(data_type)) = (shape.count, shape.data_type) else {
            unreachable!("`shape` sets both")
        };
        self.checked(
            OperationKind::AllReduce,
            shape,
            self.library().admit(data_type),
        )?;
        let mut operation = AllReduce {
            pair,
            count,
            data_type,
            op,
        };
        self.0.issue(
            &self.0.stream,
            OperationKind::AllReduce,
            shape,
            &mut operation,
        )
    }

    /// Says in which operation a check failed.
    pub(crate) fn checked<T>(
        &self,
        kind: OperationKind,
        shape: Shape,
        checked: Result<T>,
    ) -> Result<T> {
        checked.map_err(|error| {
            error.during(|| {
                self.0
                    .operation(kind, shape, None, std::time::Instant::now())
            })
        })
    }
}

pub(crate) fn shape(count: usize, data_type: DataType) -> Shape {
    Shape {
        peer: None,
        count: Some(count),
        data_type: Some(data_type),
    }
}
