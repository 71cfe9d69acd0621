//! The communicator for tensors.

use std::sync::Arc;
use std::time::Duration;

use candle_core::Device;
use nccl::cudarc::driver::{CudaContext, CudaStream};
use nccl::{Communicator, ErrorKind, World};
use parking_lot::Mutex;

use crate::error::Error;
use crate::gradient::Gradient;
use crate::staging::{Staged, Staging};

type Result<T, E = candle_core::Error> = std::result::Result<T, E>;

/// The ranks that work together on tensors, seen from one of them.
///
/// Cheap to clone; may be used from any thread. All ranks must call the same operations in the same order, with the
/// same shapes and element types. If a rank does not, the others wait for it, at most as long as an operation may take;
/// their error then names that rank.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use nccl::{ReduceOp, World};
/// use nccl_candle::TensorCommunicator;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # nccl_emulator::install_unless_gpu()?;
/// // Two ranks as threads of one process; as processes they would have `World::join`.
/// let ranks = World::threads(2).into_iter().map(|world| {
///     std::thread::spawn(move || -> candle_core::Result<Vec<f32>> {
///         let comm = TensorCommunicator::join(&world, "demo", &Device::Cpu)
///             .map_err(candle_core::Error::wrap)?;
///         let x = Tensor::new(&[1f32, 10.], &Device::Cpu)?;
///         comm.all_reduce(&x, ReduceOp::Sum)?.to_vec1()
///     })
/// });
/// for rank in ranks.collect::<Vec<_>>() {
///     assert_eq!(rank.join().unwrap()?, [2., 20.]);
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct TensorCommunicator {
    comm: Communicator,
    gradient: Option<Gradient>,
    shared: Arc<Shared>,
}

/// State that clones share.
#[derive(Debug, Default)]
struct Shared {
    staging: Staging,
    last_error: Mutex<Option<Arc<Error>>>,
}

/// The per-thread default stream.
const PER_THREAD: usize = 0x2;

/// Why candle's usual CUDA device is refused.
pub(crate) const PER_THREAD_REASON: &str = "its stream is the per-thread default stream, which is a different stream \
     on NCCL's threads: make the device with `Device::new_cuda_with_stream`";

/// Why a CUDA tensor is refused.
#[cfg(not(feature = "cuda"))]
pub(crate) const WITHOUT_CUDA: &str =
    "a tensor on a CUDA device needs the feature `cuda` of the crate nccl-candle";

/// Why a Metal tensor is refused.
pub(crate) const METAL: &str = "NCCL knows no Metal devices: move the tensor to the CPU before";

/// Returns whether a stream is the per-thread default stream.
pub(crate) fn is_per_thread(stream: &CudaStream) -> bool {
    stream.cu_stream() as usize == PER_THREAD
}

impl TensorCommunicator {
    /// Wraps a communicator.
    ///
    /// For tensors on a CUDA device the communicator has to use that device's own context: made with `device.cuda_stream()`.
    ///
    /// ```
    /// use nccl::cudarc::driver::CudaContext;
    /// use nccl_candle::TensorCommunicator;
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// let stream = CudaContext::new(0)?.new_stream()?;
    /// let world = nccl::World::single();
    /// let timeout = std::time::Duration::from_secs(20);
    /// let comm = world.communicator("tp").stream(&stream).with(|comm| comm.timeouts.operation = timeout).build()?;
    /// let comm = TensorCommunicator::new(comm);
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn new(comm: Communicator) -> Self {
        Self {
            comm,
            gradient: None,
            shared: Arc::default(),
        }
    }

    /// Makes the communicator called `name`, of all ranks of a world, for tensors on `device`.
    ///
    /// For [`Device::Cpu`] it uses the device with number [`World::local_rank`], a GPU or one of the emulator's, and
    /// a stream of its own there. For a CUDA device it uses that device's stream.
    ///
    /// # Errors
    /// As [`CommunicatorBuilder::build`](nccl::CommunicatorBuilder::build); [`Error::Device`] for candle's usual
    /// CUDA device, which has the per-thread default stream, for Metal, and for a CUDA device without the feature `cuda`.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// let world = nccl::World::single();
    /// let comm = nccl_candle::TensorCommunicator::join(&world, "tp", &candle_core::Device::Cpu)?;
    /// assert_eq!((comm.rank(), comm.world_size()), (0, 1));
    /// # Ok(())
    /// # }
    /// ```
    pub fn join(world: &World, name: &str, device: &Device) -> Result<Self, Error> {
        let refuse = |reason| {
            let (operation, comm) = ("join", name.to_owned());
            Err(Error::Device {
                operation,
                comm,
                reason,
            })
        };
        let stream = match device {
            Device::Cpu => {
                let cuda = |what| move |error| nccl::Error::from(ErrorKind::Cuda { what, error });
                let context = CudaContext::new(world.local_rank())
                    .map_err(cuda("opening the device of this rank"))?;
                context.new_stream().map_err(cuda("making a stream"))?
            }
            #[cfg(feature = "cuda")]
            Device::Cuda(device) => device.cuda_stream(),
            #[cfg(not(feature = "cuda"))]
            Device::Cuda(_) => return refuse(WITHOUT_CUDA),
            Device::Metal(_) => return refuse(METAL),
        };
        if is_per_thread(&stream) {
            return refuse(PER_THREAD_REASON);
        }
        let comm = world.communicator(name).stream(&stream).build()?;
        Ok(Self::new(comm))
    }

    /// Returns the same communicator, with the given meaning of gradients for results that every rank has. See
    /// [`Gradient`].
    ///
    /// ```
    /// # fn example(comm: nccl_candle::TensorCommunicator) {
    /// let tp = comm.with_gradient(nccl_candle::Gradient::Replicated);
    /// # }
    /// ```
    #[must_use]
    pub fn with_gradient(self, gradient: Gradient) -> Self {
        Self {
            gradient: Some(gradient),
            ..self
        }
    }

    /// Returns the same communicator with another timeout for its operations, as [`Communicator::within`].
    ///
    /// ```
    /// # fn example(comm: &nccl_candle::TensorCommunicator, x: &candle_core::Tensor) -> candle_core::Result<()> {
    /// let patient = comm.within(std::time::Duration::from_secs(300));
    /// patient.all_reduce(x, nccl::ReduceOp::Sum)?;
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn within(&self, timeout: Duration) -> Self {
        Self {
            comm: self.comm.within(timeout),
            ..self.clone()
        }
    }

    /// Returns the underlying communicator.
    ///
    /// ```
    /// # fn example(comm: &nccl_candle::TensorCommunicator) {
    /// if let Some(fault) = comm.communicator().fault() {
    ///     eprintln!("{fault}");
    /// }
    /// # }
    /// ```
    #[must_use]
    pub fn communicator(&self) -> &Communicator {
        &self.comm
    }

    /// Returns this rank, from 0.
    ///
    /// ```
    /// # fn example(comm: &nccl_candle::TensorCommunicator) {
    /// assert!(comm.rank() < comm.world_size());
    /// # }
    /// ```
    #[must_use]
    pub fn rank(&self) -> usize {
        self.comm.rank()
    }

    /// Returns the number of ranks.
    ///
    /// ```
    /// # fn example(comm: &nccl_candle::TensorCommunicator, w: &candle_core::Tensor) -> candle_core::Result<()> {
    /// // This rank's columns of a weight.
    /// let part = w.chunk(comm.world_size(), 1)?[comm.rank()].contiguous()?;
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn world_size(&self) -> usize {
        self.comm.world_size()
    }

    /// Returns the last error of an operation on this communicator or a clone, even if candle's own error has lost it.
    ///
    /// [`Communicator::fault`] and [`World::fault`] also have the fault that ended the communicator on all of its
    /// ranks.
    ///
    /// ```
    /// # fn example(comm: &nccl_candle::TensorCommunicator, x: &candle_core::Tensor) {
    /// // As layers do that have errors of their own:
    /// let y = comm.all_reduce(x, nccl::ReduceOp::Sum).map_err(|error| error.to_string());
    /// if y.is_err() {
    ///     let error = comm.last_error().unwrap();
    ///     println!("timeout: {}", error.nccl().is_some_and(|error| error.is_timeout()));
    /// }
    /// # }
    /// ```
    #[must_use]
    pub fn last_error(&self) -> Option<Arc<Error>> {
        self.shared.last_error.lock().clone()
    }

    /// Returns what is kept for tensors on the CPU: the memory areas, and their size.
    ///
    /// ```
    /// # fn example(comm: &nccl_candle::TensorCommunicator) {
    /// println!("{} bytes are pinned", comm.staged().bytes);
    /// # }
    /// ```
    #[must_use]
    pub fn staged(&self) -> Staged {
        self.staging().staged()
    }

    /// Allocates room beforehand for operations on CPU tensors that read and write `bytes` together.
    ///
    /// Allocating pinned memory can wait for a whole GPU. Where several ranks are in one process, call this before any of
    /// them is in an operation that waits for the others.
    ///
    /// # Errors
    /// Those of CUDA.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let world = nccl::World::single();
    /// # let comm = nccl_candle::TensorCommunicator::join(&world, "demo", &candle_core::Device::Cpu)?;
    /// comm.reserve(1 << 20)?;
    /// assert_eq!(comm.staged().bytes, 1 << 20);
    /// # Ok(())
    /// # }
    /// ```
    pub fn reserve(&self, bytes: usize) -> Result<(), Error> {
        Ok(self.staging().reserve(&self.comm, bytes)?)
    }

    pub(crate) fn staging(&self) -> &Staging {
        &self.shared.staging
    }

    pub(crate) fn gradient(&self) -> Option<Gradient> {
        self.gradient
    }

    /// Keeps an error for [`last_error`](Self::last_error), and wraps it in an error of candle's.
    pub(crate) fn fail(&self, error: Error) -> candle_core::Error {
        let error = Arc::new(error);
        let wrapped = Error::wrap(&error);
        *self.shared.last_error.lock() = Some(error);
        wrapped
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn candles_usual_stream_is_told_from_one_that_nccl_can_use() {
        nccl_emulator::install_unless_gpu().unwrap();
        let context = CudaContext::new(0).unwrap();
        assert!(is_per_thread(&context.per_thread_stream()));
        assert!(!is_per_thread(&context.new_stream().unwrap()));
        assert!(!is_per_thread(&context.default_stream()));
        assert!(PER_THREAD_REASON.contains("new_cuda_with_stream"));
    }
}
