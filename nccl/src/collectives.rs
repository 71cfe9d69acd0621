//! Collectives: the length rules, and the calls.

use std::ffi::c_void;

use crate::buffer::{Erased, ErasedMut, RecvBuffer, SendBuffer};
use crate::communicator::{Calls, Communicator, Frame};
use crate::dtype::DataType;
use crate::error::{Error, ErrorKind, NcclFailure, Result};
use crate::ffi::{self, Progress};
use crate::operation::{OperationKind, Shape};
use crate::reduce::ReduceOp;
use crate::request::Request;

/// The addresses of a collective that reads one buffer and writes one; in place, they are the same.
pub(crate) struct Pair {
    pub(crate) send: *const c_void,
    pub(crate) recv: *mut c_void,
}

impl Pair {
    /// Takes the buffers of an operation into its frame; in place, there is only the second.
    pub(crate) fn take<'a>(
        frame: &mut Frame<'a>,
        send: Option<Erased<'a>>,
        recv: ErasedMut<'a>,
    ) -> Result<Self> {
        let recv = frame.write(recv)? as *mut c_void;
        let send = match send {
            Some(send) => frame.read(send)? as *const c_void,
            None => recv.cast_const(),
        };
        Ok(Self { send, recv })
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

fn all_reduce(
    pair: &Pair,
    count: usize,
    data_type: DataType,
    op: ReduceOp,
    calls: &Calls<'_>,
) -> Result<Progress, NcclFailure> {
    const CALL: &str = "ncclAllReduce";
    if count == 0 {
        return Ok(Progress::Done);
    }
    let Some(all_reduce) = calls.library.api().ncclAllReduce else {
        return Err(ffi::missing(calls.library, CALL));
    };
    // SAFETY: both addresses are valid for `count` elements until the work is done on the stream, which
    // the order of streams sees to; communicator and stream are alive.
    let code = unsafe {
        all_reduce(
            pair.send,
            pair.recv,
            count,
            data_type.raw(),
            op.raw(),
            calls.comm,
            calls.stream,
        )
    };
    ffi::check(calls.library, CALL, code)
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
    pub fn all_reduce<'a, S, R>(&'a self, x: S, y: R, op: ReduceOp) -> Result<Request>
    where
        S: SendBuffer<'a>,
        R: RecvBuffer<'a, Element = S::Element>,
    {
        let (x, y) = (x.erase(), y.erase_mut());
        let shape = shape(y.len(), y.data_type());
        let checked = same_type(&x, &y).and_then(|_| same_length(&x, &y));
        self.checked(OperationKind::AllReduce, shape, checked)?;
        self.all_reduce_pair(Some(x), y, shape, op)
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
    pub fn all_reduce_in_place<'a>(
        &'a self,
        y: impl RecvBuffer<'a>,
        op: ReduceOp,
    ) -> Result<Request> {
        let y = y.erase_mut();
        let shape = shape(y.len(), y.data_type());
        self.all_reduce_pair(None, y, shape, op)
    }

    fn all_reduce_pair<'a>(
        &'a self,
        x: Option<Erased<'a>>,
        y: ErasedMut<'a>,
        shape: Shape,
        op: ReduceOp,
    ) -> Result<Request> {
        const KIND: OperationKind = OperationKind::AllReduce;
        let (count, data_type) = (y.len(), y.data_type());
        let (frame, pair) = self.take(KIND, shape, x, y)?;
        self.0.issue(frame, KIND, shape, |calls, _| {
            all_reduce(&pair, count, data_type, op, calls)
        })
    }

    /// Takes the buffers of an operation.
    pub(crate) fn take<'a>(
        &'a self,
        kind: OperationKind,
        shape: Shape,
        x: Option<Erased<'a>>,
        y: ErasedMut<'a>,
    ) -> Result<(Frame<'a>, Pair)> {
        let taken = self.library().admit(y.data_type()).and_then(|()| {
            let mut frame = Frame::new(&self.0.stream)?;
            let pair = Pair::take(&mut frame, x, y)?;
            Ok((frame, pair))
        });
        self.checked(kind, shape, taken)
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
