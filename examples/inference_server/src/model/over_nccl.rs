//! Ranks of a communicator.
//!
//! The arithmetic is on the host, the messages go from device to device: numbers are copied to the device before an
//! operation and back after it, on the communicator's stream, through buffers that are made once. Every operation is
//! waited for with the communicator's deadline before its result is copied, so that a rank that has died is an error
//! with its cause, and not a copy that never ends.

use std::sync::Arc;

use nccl::cudarc::driver::{CudaSlice, CudaStream};
use nccl::{Communicator, ExpertLayout, ExpertParallel, Routing};

use super::collectives::{Arrived, Collectives, Shape};
use super::error::{Error, Result};

/// All ranks of a communicator, each of which has an equal part of the heads and the experts.
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
    experts: ExpertParallel,
    routing: Routing,
    /// `[rows / ranks][hidden]`.
    own: CudaSlice<f32>,
    /// As large.
    other: CudaSlice<f32>,
    /// `[rows][hidden]`.
    all: CudaSlice<f32>,
    choices: CudaSlice<i32>,
    weights: CudaSlice<f32>,
    /// As [`Arrived::rows`].
    arrived: CudaSlice<f32>,
    made: CudaSlice<f32>,
}

impl OverNccl {
    /// Allocates the buffers and connects the ranks; all have to do so at the same time, with the same shape.
    ///
    /// # Errors
    /// [`Error::Unusable`] for rows that the ranks cannot share; those of [`ExpertParallel`]'s builder.
    pub fn new(comm: &Communicator, shape: Shape) -> Result<Self> {
        let ranks = comm.world_size();
        let Shape {
            rows,
            hidden,
            experts,
            top_k,
        } = shape;
        if rows == 0 || !rows.is_multiple_of(ranks) {
            let text = format!("{ranks} ranks cannot share steps of {rows} rows: take a multiple");
            return Err(Error::Unusable(text));
        }
        let own = rows / ranks;
        let exchange = ExpertParallel::builder(comm)
            .experts(experts)
            .top_k(top_k)
            // The capacity as well: no row is ever without room, whatever the router does.
            .max_tokens(own)
            .layout(ExpertLayout::ExpertMajor)
            .max_row_bytes(hidden * size_of::<f32>())
            .build()?;
        let stream = Arc::clone(comm.stream());
        let places = experts * exchange.capacity() * hidden;
        Ok(Self {
            routing: exchange.routing()?,
            own: stream.alloc_zeros(own * hidden)?,
            other: stream.alloc_zeros(own * hidden)?,
            all: stream.alloc_zeros(rows * hidden)?,
            choices: stream.alloc_zeros(own * top_k)?,
            weights: stream.alloc_zeros(own * top_k)?,
            arrived: stream.alloc_zeros(places)?,
            made: stream.alloc_zeros(places)?,
            experts: exchange,
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

    fn all_to_all(&mut self, x: &[f32], y: &mut [f32]) -> Result<()> {
        self.stream.memcpy_htod(x, &mut self.own)?;
        self.comm.all_to_all(&self.own, &mut self.other)?.wait()?;
        Ok(self.stream.memcpy_dtoh(&self.other, y)?)
    }

    fn all_gather(&mut self, x: &[f32], y: &mut [f32]) -> Result<()> {
        self.stream.memcpy_htod(x, &mut self.own)?;
        self.comm.all_gather(&self.own, &mut self.all)?.wait()?;
        Ok(self.stream.memcpy_dtoh(&self.all, y)?)
    }

    fn dispatch(&mut self, choices: &[i32], x: &[f32], arrived: &mut Arrived) -> Result<()> {
        self.stream.memcpy_htod(choices, &mut self.choices)?;
        self.stream.memcpy_htod(x, &mut self.own)?;
        self.experts.route(&self.choices, &mut self.routing)?;
        let Self {
            experts, routing, ..
        } = self;
        experts
            .dispatch(routing, &self.own, &mut self.arrived)?
            .wait()?;
        let counts = self.routing.counts()?;
        arrived.counts.clear();
        arrived.counts.extend_from_slice(counts.received());
        arrived.rows.resize(self.arrived.len(), 0.0);
        Ok(self.stream.memcpy_dtoh(&self.arrived, &mut arrived.rows)?)
    }

    fn combine(&mut self, made: &[f32], weights: &[f32], out: &mut [f32]) -> Result<()> {
        self.stream.memcpy_htod(made, &mut self.made)?;
        self.stream.memcpy_htod(weights, &mut self.weights)?;
        let done =
            self.experts
                .combine(&self.routing, &self.made, &self.weights, &mut self.other)?;
        done.wait()?;
        Ok(self.stream.memcpy_dtoh(&self.other, out)?)
    }
}
