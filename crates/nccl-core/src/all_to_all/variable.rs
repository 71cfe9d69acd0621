//! All-to-all with parts of unequal length, as grouped messages.

use super::record;
use super::schedule::Part;
use crate::active_calls::CallKind;
use crate::buffer::{Erased, ErasedMut, RecvBuffer, SendBuffer};
use crate::collectives::same_type;
use crate::communicator::Communicator;
use crate::error::{Error, ErrorKind, Result};
use crate::group::Group;
use crate::issuing::{IssueBuffers, failed_check, issue};
use crate::op::Function;
use crate::operation::{OperationKind, Shape};
use crate::queued_op::QueuedOp;
use crate::request::Request;

/// The parts of a buffer, one for each rank. Made from a slice of counts, for parts that follow each other without
/// gaps, or with [`at`](Self::at).
///
/// ```
/// use nccl::all_to_all::Parts;
///
/// // Ranks 0 and 1 have 3 elements and 1, one behind the other.
/// let packed = Parts::from(&[3, 1]);
/// // The same, from the eighth element of the buffer on.
/// let parts = Parts::at(&[3, 1], &[8, 11]);
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Parts<'p> {
    counts: &'p [usize],
    displacements: Option<&'p [usize]>,
}

impl<'p> From<&'p [usize]> for Parts<'p> {
    fn from(counts: &'p [usize]) -> Self {
        Self::packed(counts)
    }
}

impl<'p, const N: usize> From<&'p [usize; N]> for Parts<'p> {
    fn from(counts: &'p [usize; N]) -> Self {
        Self::packed(counts)
    }
}

impl<'p> From<&'p Vec<usize>> for Parts<'p> {
    fn from(counts: &'p Vec<usize>) -> Self {
        Self::packed(counts)
    }
}

impl<'p> Parts<'p> {
    /// Returns parts of `counts` elements that begin at the elements `displacements` of the buffer.
    ///
    /// ```
    /// let parts = nccl::all_to_all::Parts::at(&[3, 1], &[0, 16]); // of 17 elements
    /// ```
    #[must_use]
    pub const fn at(counts: &'p [usize], displacements: &'p [usize]) -> Self {
        Self {
            counts,
            displacements: Some(displacements),
        }
    }

    pub(super) fn packed(counts: &'p [usize]) -> Self {
        Self {
            counts,
            displacements: None,
        }
    }

    /// Returns how many elements the buffer must have; `None` on overflow.
    pub(super) fn end(&self) -> Option<usize> {
        let Some(displacements) = self.displacements else {
            let mut counts = self.counts.iter();
            return counts.try_fold(0usize, |sum, &count| sum.checked_add(count));
        };
        let mut parts = self.counts.iter().zip(displacements);
        parts.try_fold(0, |end, (&count, &at)| match count {
            0 => Some(end),
            count => at.checked_add(count).map(|this| end.max(this)),
        })
    }

    /// Returns the parts with their offsets, for parts whose [`end`](Self::end) is known.
    pub(super) fn each(self) -> impl Iterator<Item = Part> {
        let mut next = 0;
        self.counts.iter().enumerate().map(move |(rank, &count)| {
            let offset = match self.displacements {
                Some(displacements) => displacements[rank],
                None => next,
            };
            next = next.wrapping_add(count);
            Part { offset, count }
        })
    }

    /// Refuses parts that overlap, so that two ranks would write the same element.
    pub(super) fn check_apart(self) -> Result<()> {
        if self.displacements.is_none() {
            return Ok(());
        }
        let overlap = |one: (usize, Part), other: (usize, Part)| {
            let (one, other) = (one.0.min(other.0), one.0.max(other.0));
            Err(Error::new(ErrorKind::InvalidConfig {
                field: "the receive displacements",
                reason: format!("what ranks {one} and {other} send would lie in the same place"),
            }))
        };
        let parts = || self.each().enumerate().filter(|(_, part)| part.count > 0);
        let ends_before = |one: Part, other: Part| one.offset + one.count <= other.offset;
        // Parts are usually in order, and checking that needs no memory for sorting.
        let mut pairs = parts().zip(parts().skip(1));
        if pairs.all(|(one, other)| ends_before(one.1, other.1)) {
            return Ok(());
        }
        let mut sorted: Vec<_> = parts().collect();
        sorted.sort_unstable_by_key(|(_, part)| part.offset);
        let mut pairs = sorted.windows(2);
        match pairs.find(|pair| !ends_before(pair[0].1, pair[1].1)) {
            Some(pair) => overlap(pair[0], pair[1]),
            None => Ok(()),
        }
    }
}

/// A side of an exchange.
#[derive(Clone, Copy, Debug)]
pub(super) enum Sides {
    Send,
    Recv,
}

impl Sides {
    /// Returns the names of its counts, its displacements and its buffer in errors.
    fn names(self) -> [&'static str; 3] {
        match self {
            Self::Send => [
                "the send counts",
                "the send displacements",
                "the send buffer",
            ],
            Self::Recv => [
                "the receive counts",
                "the receive displacements",
                "the receive buffer",
            ],
        }
    }

    /// Refuses a buffer with fewer than `needed` elements.
    pub(super) fn holds(self, given: usize, needed: usize) -> Result<()> {
        let [.., buffer] = self.names();
        match given >= needed {
            true => Ok(()),
            false => Err(record::length(
                buffer,
                given,
                needed,
                "at least to the end of its parts",
            )),
        }
    }

    /// Checks that there is one count, and one displacement if any, for each rank, and that a buffer of `length` holds all parts.
    fn check(self, parts: Parts<'_>, length: usize, ranks: usize) -> Result<()> {
        let [counts, displacements, _] = self.names();
        let wrong = |what, given| Err(record::length(what, given, ranks, "one for each rank"));
        if parts.counts.len() != ranks {
            return wrong(counts, parts.counts.len());
        }
        match parts.displacements {
            Some(given) if given.len() != ranks => wrong(displacements, given.len()),
            _ => self.holds(length, parts.end().unwrap_or(usize::MAX)),
        }
    }

    /// Checks that both sides fit their buffers, and that a rank receives from itself what it sends.
    pub(super) fn check_both(
        (send, send_len): (Parts<'_>, usize),
        (recv, recv_len): (Parts<'_>, usize),
        comm: &Communicator,
    ) -> Result<()> {
        let (own, ranks) = (comm.rank(), comm.world_size());
        Self::Send.check(send, send_len, ranks)?;
        Self::Recv.check(recv, recv_len, ranks)?;
        if send.counts[own] != recv.counts[own] {
            return Err(record::length(
                "what this rank receives from itself",
                recv.counts[own],
                send.counts[own],
                "as many as it sends to itself",
            ));
        }
        recv.check_apart()
    }
}

/// Sends each rank its part of `x`, and receives the part of each rank into `y`.
pub(super) fn exchange<'a>(
    comm: &'a Communicator,
    x: Erased<'a>,
    send: Parts<'_>,
    y: ErasedMut<'a>,
    recv: Parts<'_>,
) -> Result<Request> {
    const KIND: OperationKind = OperationKind::AllToAllV;
    let shape = Shape {
        data_type: Some(x.data_type()),
        ..Shape::default()
    };
    let recorded = || {
        let _inside = comm.inner.enter(CallKind::Issue, comm.timeout);
        let mut buffers = IssueBuffers::new(&comm.stream)?;
        record_parts(comm, &mut buffers, x, send, y, recv)?;
        Ok(buffers)
    };
    let buffers = recorded().map_err(|error| failed_check(comm, KIND, shape, error))?;
    issue(comm, &buffers, KIND, shape)
}

impl<'a> Group<'a> {
    /// Records [`Communicator::all_to_all_v`].
    ///
    /// # Errors
    /// As [`Communicator::all_to_all_v`]; after an error nothing is recorded.
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
    pub fn all_to_all_v<'p, S, R>(
        &mut self,
        x: S,
        send: impl Into<Parts<'p>>,
        y: R,
        recv: impl Into<Parts<'p>>,
    ) -> Result<()>
    where
        S: SendBuffer<'a>,
        R: RecvBuffer<'a, Element = S::Element>,
    {
        let (x, y) = (x.erase(), y.erase_mut());
        record_parts(self.comm, &mut self.buffers, x, send.into(), y, recv.into())
    }
}

fn record_parts<'a>(
    comm: &Communicator,
    buffers: &mut IssueBuffers<'a>,
    x: Erased<'a>,
    send: Parts<'_>,
    y: ErasedMut<'a>,
    recv: Parts<'_>,
) -> Result<()> {
    let data_type = same_type(x.data_type(), y.data_type())?;
    let size = record::element_size(comm, data_type)?;
    Sides::check_both((send, x.len()), (recv, y.len()), comm)?;
    let own = comm.rank();
    let empty = |parts: Parts<'_>| parts.counts.iter().all(|&count| count == 0);
    if empty(send) && empty(recv) {
        return Ok(());
    }
    let (send_at, recv_at) = (buffers.read(x)?, buffers.write(y)?);
    let mut messages = |function, start: u64, parts: Parts<'_>| {
        for (peer, part) in parts.each().enumerate() {
            if part.count > 0 {
                let address = start + (part.offset * size) as u64;
                // Fits: the number of ranks was checked when the communicator was made.
                let message = QueuedOp::new(function, address, part.count, data_type, peer as i32);
                buffers.push_message(message, peer == own);
            }
        }
    };
    messages(Function::Send, send_at, send);
    messages(Function::Recv, recv_at, recv);
    buffers.grouped = true;
    Ok(())
}
