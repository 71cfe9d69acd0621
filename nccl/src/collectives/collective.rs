//! One collective, from its buffers to what is recorded.

use nccl_sys as sys;

use super::rules::{Place, Rule};
use crate::buffer::{Erased, ErasedMut};
use crate::communicator::{Communicator, Frame};
use crate::dtype::DataType;
use crate::error::{Error, ErrorKind, Result};
use crate::operation::{OperationKind, Shape};
use crate::recorded::{Function, Recorded};
use crate::reduce::{self, Reduction, Resolved};
use crate::request::Request;

/// A collective that was asked for: its row of the table, and its buffers.
pub(crate) struct Collective<'a> {
    rule: Rule,
    root: Option<usize>,
    op: Resolved,
    buffers: Buffers<'a>,
    made_of_messages: bool,
}

enum Buffers<'a> {
    Apart(Option<Erased<'a>>, Option<ErasedMut<'a>>),
    InPlace(ErasedMut<'a>),
}

/// Where a collective reads and writes, and how much.
struct Taken {
    send: u64,
    recv: u64,
    count: usize,
    data_type: DataType,
}

impl<'a> Collective<'a> {
    pub(crate) fn apart(rule: Rule, x: Option<Erased<'a>>, y: Option<ErasedMut<'a>>) -> Self {
        Self::new(rule, Buffers::Apart(x, y))
    }

    pub(crate) fn in_place(rule: Rule, y: ErasedMut<'a>) -> Self {
        Self::new(rule, Buffers::InPlace(y))
    }

    fn new(rule: Rule, buffers: Buffers<'a>) -> Self {
        Self {
            rule,
            root: None,
            op: (sys::ncclRedOp_t::ncclSum, None),
            buffers,
            made_of_messages: false,
        }
    }

    pub(crate) fn root(mut self, root: usize) -> Self {
        self.root = Some(root);
        self
    }

    pub(crate) fn reducing(mut self, op: impl Reduction, comm: &Communicator) -> Result<Self> {
        if let Some(data_type) = self.data_type() {
            self.op = reduce::resolve(&op, comm, data_type)?;
        }
        Ok(self)
    }

    /// Makes it of messages, although the library may have it as one call.
    pub(crate) fn made_of_messages(mut self) -> Self {
        self.made_of_messages = true;
        self
    }

    fn data_type(&self) -> Option<DataType> {
        match &self.buffers {
            Buffers::InPlace(y) => Some(y.data_type()),
            Buffers::Apart(Some(x), _) => Some(x.data_type()),
            Buffers::Apart(None, y) => y.as_ref().map(ErasedMut::data_type),
        }
    }

    fn place(&self, comm: &Communicator) -> Place {
        Place {
            rank: comm.rank(),
            ranks: comm.world_size(),
            root: self.root,
        }
    }

    /// As a request and an error tell it; without a count where the lengths make none.
    fn shape(&self, comm: &Communicator) -> Shape {
        let place = self.place(comm);
        let count = match &self.buffers {
            Buffers::InPlace(y) => self.rule.in_place(place, y.len()).map(|at| at.count),
            Buffers::Apart(x, y) => {
                let lengths = (x.as_ref().map(Erased::len), y.as_ref().map(ErasedMut::len));
                self.rule.count(place, lengths.0, lengths.1)
            }
        };
        Shape {
            peer: None,
            root: self.root,
            count: count.ok(),
            data_type: self.data_type(),
        }
    }

    /// Checks everything that can be checked, and records the operation. Nothing is recorded for no
    /// elements.
    pub(crate) fn record(mut self, comm: &Communicator, frame: &mut Frame<'a>) -> Result<()> {
        let root = self.rule.root(self.place(comm))?;
        let function = self.rule.function;
        let (op, operator) = (self.op.0, self.op.1.take());
        let made_of_messages = self.made_of_messages || !comm.library().has_function(function);
        let taken = self.take(comm, frame)?;
        if taken.count == 0 {
            return Ok(());
        }
        frame.reduce_with(operator);
        let whole = Recorded {
            function,
            send: taken.send,
            recv: taken.recv,
            count: taken.count,
            data_type: taken.data_type,
            rank: root,
            op,
        };
        if made_of_messages {
            messages(&whole, comm, frame)
        } else {
            frame.push(whole, comm.rank());
            Ok(())
        }
    }

    /// Checks types and lengths, and takes the buffers.
    fn take(self, comm: &Communicator, frame: &mut Frame<'a>) -> Result<Taken> {
        let (rule, place) = (self.rule, self.place(comm));
        match self.buffers {
            Buffers::InPlace(y) => {
                let data_type = y.data_type();
                comm.library().admit(data_type)?;
                let at = rule.in_place(place, y.len())?;
                let size = size_of(data_type)?;
                let address = frame.write(y)?;
                Ok(Taken {
                    send: address + (at.send * size) as u64,
                    recv: address + (at.recv * size) as u64,
                    count: at.count,
                    data_type,
                })
            }
            Buffers::Apart(x, y) => {
                let data_type = match (&x, &y) {
                    (Some(x), Some(y)) => same_type(x, y)?,
                    (Some(x), None) => x.data_type(),
                    (None, Some(y)) => y.data_type(),
                    // `count` refuses it below, or has nothing to do.
                    (None, None) => DataType::UINT8,
                };
                comm.library().admit(data_type)?;
                let lengths = (x.as_ref().map(Erased::len), y.as_ref().map(ErasedMut::len));
                let count = rule.count(place, lengths.0, lengths.1)?;
                let x = x.filter(|_| rule.reads(place));
                let y = y.filter(|_| rule.writes(place));
                Ok(Taken {
                    send: x.map_or(Ok(0), |x| frame.read(x))?,
                    recv: y.map_or(Ok(0), |y| frame.write(y))?,
                    count,
                    data_type,
                })
            }
        }
    }
}

/// Records the messages that do what one call does in newer releases.
///
/// Their order does not matter: NCCL serves the peers of a group in an order of its own.
fn messages(whole: &Recorded, comm: &Communicator, frame: &mut Frame<'_>) -> Result<()> {
    let Recorded {
        send, recv, count, ..
    } = *whole;
    let (data_type, root) = (whole.data_type, whole.rank);
    // Both fit: the number of ranks was checked when the communicator was made.
    let (ranks, own) = (comm.world_size() as i32, comm.rank() as i32);
    let size = (count * size_of(data_type)?) as u64;
    let block = |start: u64, rank: i32| start + rank as u64 * size;
    let mut push = |function, address, peer| {
        let message = Recorded::message(function, address, count, data_type, peer);
        frame.push(message, comm.rank());
    };
    match whole.function {
        Function::AllToAll => {
            for peer in 0..ranks {
                push(Function::Send, block(send, peer), peer);
                push(Function::Recv, block(recv, peer), peer);
            }
        }
        Function::Gather => {
            // In place, the root's own block is where it belongs.
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
    frame.grouped = true;
    Ok(())
}

fn size_of(data_type: DataType) -> Result<usize> {
    data_type
        .size_in_bytes()
        .ok_or_else(|| Error::new(ErrorKind::UnknownDataType(data_type)))
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

impl Communicator {
    /// Issues one collective by itself.
    pub(crate) fn issue_collective<'a>(
        &'a self,
        kind: OperationKind,
        collective: Result<Collective<'a>>,
    ) -> Result<Request> {
        let (shape, frame) = match collective {
            Ok(collective) => {
                let shape = collective.shape(self);
                let frame = Frame::new(&self.stream).and_then(|mut frame| {
                    collective.record(self, &mut frame)?;
                    Ok(frame)
                });
                (shape, frame)
            }
            Err(error) => (Shape::default(), Err(error)),
        };
        let frame = self.checked(kind, shape, frame)?;
        self.issue(&frame, kind, shape)
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
                self.inner
                    .operation(kind, shape, None, std::time::Instant::now())
            })
        })
    }
}
