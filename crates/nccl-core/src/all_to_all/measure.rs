//! Measures the constants of the model with the communicator.
//!
//! All ranks do the same exchanges at the same time and use the longest of their times, so that all get the same
//! constants:
//!
//! - short messages with one neighbour, and with all neighbours: the cost of a launch, and of a message;
//! - long messages with all neighbours: the bandwidth inside a node;
//! - the same with the ranks of the same rail on the other nodes, and with all ranks there;
//! - short and long copies of rows on the device.
//!
//! A series repeats an exchange, doubling the number of repetitions until the series is long enough; the result is the median
//! of several such series. A slow exchange is measured in fewer series, so that the measurement does not take longer.

use std::time::{Duration, Instant};

use cudarc::driver::CudaSlice;

use super::model::{CostModel, Nodes};
use crate::active_calls::CallKind;
use crate::communicator::Communicator;
use crate::cuda_driver;
use crate::error::{Error, Result};
use crate::forked;
use crate::issuing::{DeviceCopy, IssueBuffers, issue, read_back};
use crate::operation::{OperationKind, Shape};
use crate::request::Request;
use nccl_base::reduce_op::ReduceOp;

/// Bytes of a short message, which costs only overhead.
const SHORT: usize = 8;
/// Total bytes of long messages.
const LONG: usize = 32 << 20;
/// The maximum number of series of which the median is taken.
const SERIES: usize = 5;
/// The total time after which no further series is measured.
const ENOUGH: Duration = Duration::from_millis(20);
/// The minimum duration of a series, and the maximum number of exchanges in it.
const WHILE: Duration = Duration::from_millis(2);
const MOST: usize = 1024;

impl CostModel {
    /// Measures the constants on `comm`, whose ranks are divided into `nodes`. All ranks have to call this at the same time,
    /// and get the same constants. It takes about 50 ms and 64 MiB of device memory on each rank; nothing else should run
    /// meanwhile.
    ///
    /// Constants that a communicator of one node, or of one rank, cannot measure are those of [`published`](Self::published).
    ///
    /// # Errors
    /// As [`Communicator::group`], and [`ErrorKind::Cuda`](crate::ErrorKind::Cuda) if there is not enough memory.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// # let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
    /// use nccl::all_to_all::{CostModel, Nodes};
    ///
    /// let model = CostModel::measure(&comm, Nodes::new(comm.world_size(), comm.world_size())?)?;
    /// std::fs::write(std::env::temp_dir().join("all_to_all.json"), serde_json::to_string_pretty(&model)?)?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn measure(comm: &Communicator, nodes: Nodes) -> Result<Self> {
        forked::check()?;
        let mut bench = Bench::new(comm)?;
        let mut model = Self::published();
        let (rank, local) = (comm.rank(), nodes.ranks_per_node());
        let first = rank / local * local;
        let inside: Vec<usize> = (first..first + local)
            .filter(|peer| *peer != rank)
            .collect();
        let beside = first + (rank + 1) % local;
        let before = first + (rank + local - 1) % local;
        // An exchange with this rank itself costs at least the launch.
        let launch = bench.exchange(&[(rank, rank)], SHORT)?;
        model.launch_us = launch;
        if !inside.is_empty() {
            let pairs =
                |peers: &[usize]| peers.iter().map(|peer| (*peer, *peer)).collect::<Vec<_>>();
            let (one, all) = (
                bench.exchange(&[(beside, before)], SHORT)?,
                bench.exchange(&pairs(&inside), SHORT)?,
            );
            let long = LONG / inside.len();
            let most = bench.exchange(&pairs(&inside), long)?;
            let messages = inside.len() as f64;
            let message = match inside.len() {
                1 => one - launch,
                _ => (all - one) / (messages - 1.0),
            };
            model.inside.message_us = message.max(LEAST);
            let bytes = most - launch - messages * model.inside.message_us;
            model.inside.bandwidth_gbps = (inside.len() * long) as f64 / bytes.max(LEAST) / 1e3;
        }
        if nodes.count() > 1 {
            let outside = |peer: &usize| !(first..first + local).contains(peer);
            let outside: Vec<usize> = (0..nodes.ranks()).filter(outside).collect();
            let rail: Vec<usize> = outside
                .iter()
                .copied()
                .filter(|peer| peer % local == rank % local)
                .collect();
            let pairs =
                |peers: &[usize]| peers.iter().map(|peer| (*peer, *peer)).collect::<Vec<_>>();
            let next = (rank + local) % nodes.ranks();
            let last = (rank + nodes.ranks() - local) % nodes.ranks();
            let one = bench.exchange(&[(next, last)], SHORT)?;
            let all = bench.exchange(&pairs(&outside), SHORT)?;
            let long = LONG / rail.len();
            let most = bench.exchange(&pairs(&rail), long)?;
            let message = (all - one) / (outside.len() - 1).max(1) as f64;
            model.between.message_us = message.max(LEAST);
            model.wire_us = (one - launch - model.between.message_us).max(LEAST);
            let bytes = most - launch - model.wire_us;
            model.between.bandwidth_gbps = (rail.len() * long) as f64 / bytes.max(LEAST) / 1e3;
        }
        let (short, long) = (bench.copies(SHORT)?, bench.copies(LONG / ROWS)?);
        model.copy_us = short.max(LEAST);
        model.copied_gbps = (LONG / 2) as f64 / (long - short).max(LEAST) / 1e3;
        Ok(model)
    }
}

/// The minimum of a constant, µs: differences of noisy times may be negative.
const LEAST: f64 = 1e-3;

/// The number of rows of a copy.
const ROWS: usize = 8;

struct Bench<'c> {
    comm: &'c Communicator,
    x: CudaSlice<u8>,
    y: CudaSlice<u8>,
}

impl<'c> Bench<'c> {
    fn new(comm: &'c Communicator) -> Result<Self> {
        let memory = || {
            let stream = comm.stream();
            let memory = cuda_driver::ignoring_stored_error(stream.context(), || {
                stream.alloc_zeros::<u8>(LONG)
            });
            memory.map_err(Error::cuda("allocating memory to measure with"))
        };
        Ok(Self {
            comm,
            x: memory()?,
            y: memory()?,
        })
    }

    /// Returns the time of one group with a message to and from each of these peers, µs.
    fn exchange(&mut self, peers: &[(usize, usize)], bytes: usize) -> Result<f64> {
        let Self { comm, x, y } = self;
        series(comm, || {
            comm.group(|group| {
                let parts = y.slice_mut(..peers.len() * bytes).chunks_exact_mut(bytes);
                for (index, ((to, from), part)) in peers.iter().zip(parts).enumerate() {
                    group.isend(x.slice(index * bytes..(index + 1) * bytes), *to)?;
                    group.irecv(part, *from)?;
                }
                Ok(())
            })
        })
    }

    /// Returns the time of a copy of separate rows into contiguous memory, µs.
    fn copies(&mut self, width: usize) -> Result<f64> {
        let Self { comm, x, y } = self;
        series(comm, || {
            let inside = comm.inner.enter(CallKind::Issue, comm.timeout);
            let mut buffers = IssueBuffers::new(&comm.stream)?;
            let (from, to) = (buffers.read(&*x)?, buffers.write(&mut *y)?);
            drop(inside);
            buffers.copy(DeviceCopy {
                to,
                from,
                width: width / 2,
                rows: ROWS,
                to_pitch: width / 2,
                from_pitch: width,
            });
            buffers.next_step();
            issue(comm, &buffers, OperationKind::Group, Shape::default())
        })
    }
}

/// Returns the median of several series of `work`, per repetition, µs; the longest of all ranks.
fn series(comm: &Communicator, mut work: impl FnMut() -> Result<Request>) -> Result<f64> {
    let mut time = |times: usize| {
        let begun = Instant::now();
        let mut last = None;
        for _ in 0..times {
            last = Some(work()?);
        }
        last.map_or(Ok(()), |last: Request| last.wait())?;
        Ok::<_, Error>(begun.elapsed())
    };
    // The first exchange with a peer connects the ranks.
    time(1)?;
    // All ranks use the longest time, so that all repeat equally often.
    let mut times = 1;
    let mut series: Vec<f64> = Vec::with_capacity(SERIES);
    let mut spent = 0.0;
    while series.len() < SERIES && (series.is_empty() || spent < ENOUGH.as_secs_f64()) {
        let took = longest(comm, time(times)?.as_secs_f64())?;
        spent += took;
        if took < WHILE.as_secs_f64() && times < MOST && series.is_empty() {
            times *= 2;
        } else {
            series.push(took / times as f64);
        }
    }
    series.sort_by(f64::total_cmp);
    Ok(series[series.len() / 2] * 1e6)
}

/// Returns the maximum over all ranks.
fn longest(comm: &Communicator, own: f64) -> Result<f64> {
    let stream = comm.stream();
    let cuda = Error::cuda("comparing times");
    let mut all =
        cuda_driver::ignoring_stored_error(stream.context(), || stream.clone_htod(&[own]))
            .map_err(cuda)?;
    comm.all_reduce_in_place(&mut all, ReduceOp::Max)?.wait()?;
    let cuda = Error::cuda("comparing times");
    let all = read_back(comm, &all).map_err(cuda)?;
    Ok(all.first().copied().unwrap_or(own))
}
