//! A plan: issued, or captured into a graph.

use std::fmt;

use cudarc::driver::{CudaSlice, CudaViewMut};

use super::explain::Explanation;
use super::payloads::{Addresses, Payloads, check_number, check_type};
use crate::active_calls::CallKind;
use crate::all_to_all::algorithm::Algorithm;
use crate::all_to_all::record::{Bases, enqueue};
use crate::all_to_all::schedule::{Payload, Schedule};
use crate::all_to_all::variable::Sides;
use crate::buffer::sealed_buffer::Lend;
use crate::buffer::{RecvBuffer, SendBuffer};
use crate::communicator::Communicator;
use crate::cuda_driver;
use crate::error::{Error, ErrorKind, Result};
use crate::forked::{self, ForkGuarded};
use crate::issuing::{IssueBuffers, failed_check, issue};
use crate::memory::OwnedBuffer;
use crate::operation::{OperationKind, Shape};
use crate::plan::CapturedPlan;
use crate::request::Request;

/// An all-to-all that is checked once and issued many times, for the hot path of a service.
///
/// Making a plan ([`plan`](Self::plan)) checks the counts, chooses the algorithm, compares with the other ranks and
/// allocates the scratch memory. After that, [`enqueue`](Self::enqueue) allocates nothing, whatever the algorithm.
///
/// An exchange of several steps is one operation: one number, one deadline, one [`Request`]. It runs on the stream of the
/// communicator from which the plan was made.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # nccl_emulator::install_unless_gpu()?;
/// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
/// # let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
/// use nccl::all_to_all::AllToAll;
///
/// let mut plan = AllToAll::plan(&comm).per_peer(nccl::DataType::Float32, 2).build()?;
/// println!("{}", plan.explain());
/// let (x, mut y) = (stream.clone_htod(&[1.0f32, 2.0])?, stream.alloc_zeros::<f32>(2)?);
/// for _ in 0..3 {
///     plan.enqueue(&x, &mut y)?.wait()?;
/// }
/// assert_eq!(stream.clone_dtoh(&y)?, [1.0, 2.0]);
/// # Ok(())
/// # }
/// ```
pub struct AllToAll {
    comm: Communicator,
    payloads: Vec<Payload>,
    schedule: Schedule,
    explanation: Explanation,
    in_place: bool,
    /// Belongs to the communicator's stream, whose order separates the exchanges that use it.
    scratch: Option<ForkGuarded<CudaSlice<u8>>>,
    kind: OperationKind,
    shape: Shape,
}

impl AllToAll {
    pub(super) fn new(
        comm: &Communicator,
        payloads: Vec<Payload>,
        schedule: Schedule,
        explanation: Explanation,
        in_place: bool,
    ) -> Result<Self> {
        let scratch = match schedule.scratch {
            0 => None,
            bytes => Some(scratch(comm, bytes)?),
        };
        let uniform = payloads.iter().all(|payload| payload.uniform.is_some());
        let kind = match uniform {
            true => OperationKind::AllToAll,
            false => OperationKind::AllToAllV,
        };
        let shape = match &payloads[..] {
            [only] => Shape {
                data_type: Some(only.data_type),
                count: only.uniform,
                ..Shape::default()
            },
            _ => Shape::default(),
        };
        Ok(Self {
            comm: comm.clone(),
            payloads,
            schedule,
            explanation,
            in_place,
            scratch: scratch.map(ForkGuarded::new),
            kind,
            shape,
        })
    }

    /// Explains the choice of the algorithm.
    ///
    /// ```
    /// # fn example(plan: &nccl::all_to_all::AllToAll) {
    /// println!("{}", plan.explain());
    /// # }
    /// ```
    #[must_use]
    pub fn explain(&self) -> &Explanation {
        &self.explanation
    }

    /// Returns the communicator of the plan.
    ///
    /// ```
    /// # fn example(plan: &nccl::all_to_all::AllToAll) {
    /// println!("{}", plan.communicator().name());
    /// # }
    /// ```
    #[must_use]
    pub fn communicator(&self) -> &Communicator {
        &self.comm
    }

    /// Exchanges the parts of `x` into `y`. Both must be at least as long as the plan needs, and of its type.
    ///
    /// # Errors
    /// [`ErrorKind::Length`] for a buffer that is too short, and for a plan with several payloads;
    /// [`ErrorKind::InvalidConfig`] for a buffer of another type, and for an in-place plan; otherwise as
    /// [`Communicator::all_to_all`](crate::Communicator::all_to_all).
    ///
    /// ```
    /// # fn example(plan: &mut nccl::all_to_all::AllToAll, x: &nccl::Buffer<f32>, y: &mut nccl::Buffer<f32>) -> nccl::Result<()> {
    /// let done = plan.enqueue(x, y)?;
    /// done.wait()?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn enqueue<'a, S, R>(&'a mut self, x: S, y: R) -> Result<Request>
    where
        S: SendBuffer<'a>,
        R: RecvBuffer<'a, Element = S::Element>,
    {
        self.enqueue_all(((x, y),))
    }

    /// Exchanges several payloads together, as one operation: a pair of buffers for each, in the order of the
    /// plan's payloads.
    ///
    /// # Errors
    /// As [`enqueue`](Self::enqueue); [`ErrorKind::Length`] if the number of pairs is not the number of payloads.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// # let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
    /// use nccl::DataType;
    /// use nccl::all_to_all::AllToAll;
    ///
    /// let plan = AllToAll::plan(&comm).per_peer(DataType::UInt8, 256).per_peer(DataType::Float32, 2);
    /// let mut plan = plan.build()?;
    /// let (tokens, mut their_tokens) = (comm.buffer::<u8>(256)?, comm.buffer::<u8>(256)?);
    /// let (scales, mut their_scales) = (comm.buffer::<f32>(2)?, comm.buffer::<f32>(2)?);
    /// plan.enqueue_all(((&tokens, &mut their_tokens), (&scales, &mut their_scales)))?.wait()?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn enqueue_all<'a>(&'a mut self, payloads: impl Payloads<'a>) -> Result<Request> {
        self.issue(false, |plan, buffers| payloads.lend(plan, buffers))
    }

    /// Exchanges the blocks of `y` in place, in a plan that was made [`in_place`](crate::AllToAllBuilder::in_place).
    ///
    /// # Errors
    /// As [`enqueue`](Self::enqueue), and for a plan that was not made in place.
    ///
    /// ```
    /// # fn example(comm: &nccl::Communicator, y: &mut nccl::Buffer<f32>) -> nccl::Result<()> {
    /// let count = y.len() / comm.world_size();
    /// let plan = nccl::all_to_all::AllToAll::plan(comm).per_peer(nccl::DataType::Float32, count);
    /// let mut plan = plan.with(|plan| plan.in_place = true).build()?;
    /// plan.enqueue_in_place(y)?.wait()?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn enqueue_in_place<'a>(&'a mut self, y: impl RecvBuffer<'a>) -> Result<Request> {
        self.issue(true, |payloads, buffers| lend_one(y, payloads, buffers))
    }

    fn issue<'a>(
        &'a mut self,
        in_place: bool,
        lend: impl FnOnce(&[Payload], &mut IssueBuffers<'a>) -> Result<Addresses>,
    ) -> Result<Request> {
        let (kind, shape) = (self.kind, self.shape);
        let (comm, scratch) = (&self.comm, self.scratch.as_mut());
        let recorded = || {
            let _inside = comm.inner.enter(CallKind::Issue, comm.timeout);
            let mut buffers = IssueBuffers::new(&comm.stream)?;
            right_way(self.in_place, in_place)?;
            let addresses = lend(&self.payloads, &mut buffers)?;
            if self.explanation.algorithm == Algorithm::CopyEngine {
                in_windows(comm, &self.payloads, &addresses)?;
            }
            let scratch = match scratch {
                Some(scratch) => buffers.write(&mut **scratch)?,
                None => 0,
            };
            let bases = Bases {
                send: &addresses.send,
                recv: &addresses.recv,
                scratch,
            };
            enqueue(&self.schedule, &self.payloads, bases, comm, &mut buffers)?;
            Ok(buffers)
        };
        let buffers = recorded().map_err(|error| failed_check(comm, kind, shape, error))?;
        issue(comm, &buffers, kind, shape)
    }

    /// Captures the exchange into a graph that owns its buffers. A launch costs the host one call, whatever the algorithm.
    /// All ranks must capture at the same time.
    ///
    /// # Errors
    /// As [`Communicator::capture`](crate::Communicator::capture) and [`enqueue`](Self::enqueue).
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// # let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
    /// let plan = nccl::all_to_all::AllToAll::plan(&comm).per_peer(nccl::DataType::Float32, 2).build()?;
    /// let (x, y) = (stream.clone_htod(&[1.0f32, 2.0])?, stream.alloc_zeros::<f32>(2)?);
    /// let mut captured = plan.capture(x, y)?;
    /// captured.launch()?.wait()?;
    /// let (_, y) = captured.into_buffers()?;
    /// assert_eq!(stream.clone_dtoh(&y)?, [1.0, 2.0]);
    /// # Ok(())
    /// # }
    /// ```
    pub fn capture<X, Y>(&self, x: X, y: Y) -> Result<CapturedPlan<(X, Y)>>
    where
        X: OwnedBuffer,
        Y: OwnedBuffer<Element = X::Element>,
    {
        // The graph has its own scratch, because it may run while the plan is used.
        let scratch = scratch(&self.comm, self.schedule.scratch)?;
        let (payloads, schedule) = (&self.payloads, &self.schedule);
        let this = self.in_place;
        let scratch = vec![scratch];
        self.comm
            .capture_with_scratch((x, y), scratch, |capture, ((x, y), scratch)| {
                right_way(this, false)?;
                check_number(1, payloads)?;
                check_type(&payloads[0], x.element())?;
                Sides::Send.holds(x.count(), payloads[0].send_len())?;
                Sides::Recv.holds(y.count(), payloads[0].recv_len())?;
                let mut buffers = capture.buffers();
                let (send, recv) = (buffers.write(x)?, buffers.write(y)?);
                let bases = Bases {
                    send: &[send],
                    recv: &[recv],
                    scratch: lend_scratch(scratch, &mut buffers)?,
                };
                enqueue(schedule, payloads, bases, capture.comm(), &mut buffers)?;
                capture.add_steps(&buffers);
                Ok(())
            })
    }

    /// Like [`capture`](Self::capture), for an exchange [in place](Self::enqueue_in_place).
    ///
    /// # Errors
    /// As [`capture`](Self::capture).
    ///
    /// ```
    /// # fn example(comm: &nccl::Communicator, y: nccl::Buffer<f32>) -> nccl::Result<()> {
    /// let count = y.len() / comm.world_size();
    /// let plan = nccl::all_to_all::AllToAll::plan(comm).per_peer(nccl::DataType::Float32, count);
    /// let plan = plan.with(|plan| plan.in_place = true).build()?;
    /// let mut captured = plan.capture_in_place(y)?;
    /// captured.launch()?.wait()?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn capture_in_place<Y: OwnedBuffer>(&self, y: Y) -> Result<CapturedPlan<Y>> {
        let scratch = scratch(&self.comm, self.schedule.scratch)?;
        let (payloads, schedule) = (&self.payloads, &self.schedule);
        let this = self.in_place;
        let scratch = vec![scratch];
        self.comm
            .capture_with_scratch(y, scratch, |capture, (y, scratch)| {
                right_way(this, true)?;
                let mut buffers = capture.buffers();
                let addresses = lend_one(y, payloads, &mut buffers)?;
                let bases = Bases {
                    send: &addresses.send,
                    recv: &addresses.recv,
                    scratch: lend_scratch(scratch, &mut buffers)?,
                };
                enqueue(schedule, payloads, bases, capture.comm(), &mut buffers)?;
                capture.add_steps(&buffers);
                Ok(())
            })
    }
}

/// Takes the buffer of an exchange in place.
fn lend_one<'a>(
    y: impl RecvBuffer<'a>,
    payloads: &[Payload],
    buffers: &mut IssueBuffers<'a>,
) -> Result<Addresses> {
    check_number(1, payloads)?;
    let payload = &payloads[0];
    check_type(payload, y.element())?;
    Sides::Recv.holds(y.count(), payload.recv_len())?;
    let mut addresses = Addresses::default();
    addresses.recv[0] = buffers.write(y)?;
    Ok(addresses)
}

/// Takes the scratch memory of a captured plan, and returns its address.
fn lend_scratch<'a>(
    scratch: Vec<CudaViewMut<'a, u8>>,
    buffers: &mut IssueBuffers<'a>,
) -> Result<u64> {
    let only = scratch.into_iter().next();
    only.map_or(Ok(0), |scratch| buffers.write(scratch))
}

/// Allocates the scratch memory of a plan.
fn scratch(comm: &Communicator, bytes: usize) -> Result<CudaSlice<u8>> {
    forked::check()?;
    // CUDA does not allocate zero bytes.
    let stream = comm.stream();
    cuda_driver::ignoring_stored_error(stream.context(), || stream.alloc_zeros::<u8>(bytes.max(1)))
        .map_err(Error::cuda("allocating the memory of a plan"))
}

/// Checks that the buffers lie in windows: for other buffers, NCCL silently uses multiprocessors.
fn in_windows(comm: &Communicator, payloads: &[Payload], addresses: &Addresses) -> Result<()> {
    for (number, payload) in payloads.iter().enumerate() {
        for (which, start, elements) in [
            (
                "the send buffer",
                addresses.send[number],
                payload.send_len(),
            ),
            (
                "the receive buffer",
                addresses.recv[number],
                payload.recv_len(),
            ),
        ] {
            let bytes = (elements * payload.size) as u64;
            if !comm.inner.is_in_a_window(start, bytes) {
                return Err(Error::new(ErrorKind::InvalidConfig {
                    field: which,
                    reason: String::from(
                        "copy engines move data between symmetric windows, and it lies in none: give \
                         Communicator::register_window the buffer, and see whether that is effective",
                    ),
                }));
            }
        }
    }
    Ok(())
}

fn right_way(plan: bool, call: bool) -> Result<()> {
    match (plan, call) {
        (true, true) | (false, false) => Ok(()),
        (true, false) => Err(Error::new(ErrorKind::InvalidConfig {
            field: "plan",
            reason: String::from("it was made in_place: give it one buffer (enqueue_in_place)"),
        })),
        (false, true) => Err(Error::new(ErrorKind::InvalidConfig {
            field: "plan",
            reason: String::from("it was not made in_place: give it two buffers (enqueue)"),
        })),
    }
}

impl fmt::Debug for AllToAll {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AllToAll")
            .field("communicator", &self.comm.name())
            .field("algorithm", &self.explanation.algorithm)
            .field("in_place", &self.in_place)
            .finish_non_exhaustive()
    }
}
