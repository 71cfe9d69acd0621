//! [`Collectives`](super::Collectives) over an NCCL communicator.
//!
//! The arithmetic runs on the host, the messages go from device to device: numbers are copied to the device before an operation
//! and back after it, on the communicator's stream, through buffers that are allocated once. The host waits for each operation,
//! with the communicator's timeout, before it copies the result. So a dead rank causes an error with its cause, and not a copy
//! that never ends.

use std::sync::Arc;

use nccl::Communicator;
use nccl::cudarc::driver::{CudaSlice, CudaStream};
use nccl::moe::{ExpertLayout, ExpertParallel, ExpertPlacement, Routing};

use super::collectives::{Arrived, Collectives, Shape};
use super::error::{Error, Result};

/// All ranks of a communicator. The heads are shared equally, and so are the experts unless there is a placement.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # nccl_emulator::install_unless_gpu()?;
/// # let stream = nccl::cudarc::driver::CudaContext::new(0)?.new_stream()?;
/// # let comm = nccl::World::single().communicator("model").stream(&stream).build()?;
/// use inference_server::model::{Collectives, Config, OverNccl, Shape};
/// let mut ranks = OverNccl::new(&comm, Shape::new(&Config::tiny(), 8))?;
/// let (x, mut y) = (vec![1.0; 8 * 128], vec![0.0; 8 * 128]);
/// ranks.all_gather(&x, &mut y)?;
/// assert_eq!(x, y);
/// # Ok(())
/// # }
/// ```
pub struct OverNccl {
    comm: Communicator,
    stream: Arc<CudaStream>,
    /// `[rows / ranks][hidden]`, or more if an all-gather needs it.
    own: CudaSlice<f32>,
    /// As long as `own`.
    other: CudaSlice<f32>,
    /// As long as `own`, times the number of ranks.
    all: CudaSlice<f32>,
    /// `None` for a model without experts.
    exchange: Option<Exchange>,
}

/// The buffers of the exchange with the experts.
struct Exchange {
    experts: ExpertParallel,
    routing: Routing,
    choices: CudaSlice<i32>,
    weights: CudaSlice<f32>,
    /// As [`Arrived::rows`].
    arrived: CudaSlice<f32>,
    made: CudaSlice<f32>,
}

impl OverNccl {
    /// Allocates the buffers and connects the ranks. All ranks call this at the same time, with the same shape.
    ///
    /// # Errors
    /// [`Error::Unusable`] for rows that the ranks cannot share; those of [`ExpertParallel`]'s builder.
    pub fn new(comm: &Communicator, shape: Shape) -> Result<Self> {
        Self::placed(comm, shape, None)
    }

    /// As [`new`](Self::new), with this placement of the experts.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn placed(
        comm: &Communicator,
        shape: Shape,
        placement: Option<ExpertPlacement>,
    ) -> Result<Self> {
        let ranks = comm.world_size();
        let Shape {
            rows,
            hidden,
            experts,
            top_k,
            gathers,
        } = shape;
        if rows == 0 || (experts > 0 && !rows.is_multiple_of(ranks)) {
            let text = format!("{ranks} ranks cannot share steps of {rows} rows: take a multiple");
            return Err(Error::Unusable(text));
        }
        let stream = Arc::clone(comm.stream());
        let own = rows.div_ceil(ranks);
        let exchange = match experts {
            0 => None,
            _ => {
                let exchange = ExpertParallel::builder(comm)
                    .with(|ep| {
                        ep.experts = experts;
                        ep.placement = placement;
                        ep.top_k = top_k;
                        // This is also the capacity: a row always has room, whatever the router chooses.
                        ep.max_tokens = own;
                        ep.layout = ExpertLayout::ExpertMajor;
                        ep.max_row_bytes = hidden * size_of::<f32>();
                    })
                    .build()?;
                let places = exchange.rows() * hidden;
                Some(Exchange {
                    routing: exchange.routing()?,
                    choices: stream.alloc_zeros(own * top_k)?,
                    weights: stream.alloc_zeros(own * top_k)?,
                    arrived: stream.alloc_zeros(places)?,
                    made: stream.alloc_zeros(places)?,
                    experts: exchange,
                })
            }
        };
        let most = gathers.max(own * hidden);
        Ok(Self {
            own: stream.alloc_zeros(most)?,
            other: stream.alloc_zeros(most)?,
            all: stream.alloc_zeros(ranks * most)?,
            exchange,
            comm: comm.clone(),
            stream,
        })
    }

    /// The communicator.
    #[must_use]
    pub fn communicator(&self) -> &Communicator {
        &self.comm
    }
}

impl Collectives for OverNccl {
    fn rank(&self) -> usize {
        self.comm.rank()
    }

    fn ranks(&self) -> usize {
        self.comm.world_size()
    }

    fn placement(&self) -> Option<&ExpertPlacement> {
        let exchange = self.exchange.as_ref()?;
        Some(exchange.experts.placement())
    }

    fn exchange(
        &mut self,
        sent: &[(usize, &[f32])],
        received: &mut [(usize, Vec<f32>)],
    ) -> Result<()> {
        let copy = |(to, numbers): &(usize, &[f32])| Ok((*to, self.stream.clone_htod(*numbers)?));
        let sent = sent.iter().map(copy).collect::<Result<Vec<_>>>()?;
        let room = |(from, numbers): &(usize, Vec<f32>)| {
            Ok((*from, self.stream.alloc_zeros::<f32>(numbers.len())?))
        };
        let mut arrived = received.iter().map(room).collect::<Result<Vec<_>>>()?;
        self.comm
            .group(|group| {
                for (to, numbers) in &sent {
                    group.isend(numbers, *to)?;
                }
                for (from, numbers) in &mut arrived {
                    group.irecv(numbers, *from)?;
                }
                Ok(())
            })?
            .wait()?;
        for ((_, arrived), (_, numbers)) in arrived.iter().zip(received) {
            self.stream.memcpy_dtoh(arrived, numbers)?;
        }
        Ok(())
    }

    fn all_to_all(&mut self, x: &[f32], y: &mut [f32]) -> Result<()> {
        let mut own = self.own.slice_mut(..x.len());
        self.stream.memcpy_htod(x, &mut own)?;
        let (own, other) = (self.own.slice(..x.len()), self.other.slice_mut(..y.len()));
        self.comm.all_to_all(own, other)?.wait()?;
        Ok(self.stream.memcpy_dtoh(&self.other.slice(..y.len()), y)?)
    }

    fn all_gather(&mut self, x: &[f32], y: &mut [f32]) -> Result<()> {
        let mut own = self.own.slice_mut(..x.len());
        self.stream.memcpy_htod(x, &mut own)?;
        let (own, all) = (self.own.slice(..x.len()), self.all.slice_mut(..y.len()));
        self.comm.all_gather(own, all)?.wait()?;
        Ok(self.stream.memcpy_dtoh(&self.all.slice(..y.len()), y)?)
    }

    fn dispatch(&mut self, choices: &[i32], x: &[f32], arrived: &mut Arrived) -> Result<()> {
        let exchange = self.exchange.as_mut().ok_or_else(no_experts)?;
        self.stream.memcpy_htod(choices, &mut exchange.choices)?;
        self.stream.memcpy_htod(x, &mut self.own)?;
        exchange
            .experts
            .route(&exchange.choices, &mut exchange.routing)?;
        exchange
            .experts
            .dispatch(&exchange.routing, &self.own, &mut exchange.arrived)?
            .wait()?;
        let counts = exchange.routing.counts()?;
        arrived.counts.clear();
        arrived.counts.extend_from_slice(&counts.received);
        arrived.rows.resize(exchange.arrived.len(), 0.0);
        Ok(self
            .stream
            .memcpy_dtoh(&exchange.arrived, &mut arrived.rows)?)
    }

    fn combine(&mut self, made: &[f32], weights: &[f32], out: &mut [f32]) -> Result<()> {
        let exchange = self.exchange.as_mut().ok_or_else(no_experts)?;
        self.stream.memcpy_htod(made, &mut exchange.made)?;
        self.stream.memcpy_htod(weights, &mut exchange.weights)?;
        let done = exchange.experts.combine(
            &exchange.routing,
            &exchange.made,
            &exchange.weights,
            &mut self.other,
        )?;
        done.wait()?;
        Ok(self.stream.memcpy_dtoh(&self.other, out)?)
    }
}

fn no_experts() -> Error {
    Error::Unusable(String::from(
        "a model without experts was made for these ranks",
    ))
}
