//! Staging memory for the elements of tensors on the CPU: pinned memory and device memory, kept for the next
//! operation.
//!
//! An [`Area`] belongs to one operation at a time. It is taken from the pool, or made when all areas are in use, so
//! that a program of one thread has one area, and several threads never wait for each other here. Invariant: the stream
//! of an area is idle while the area is in the pool, and when it is dropped. The copies use plain slices, which cudarc
//! does not know to be pinned, so that nothing else waits for them. An area whose stream does not become idle (a device
//! that failed, a rank that does not release it) is leaked.
//!
//! Other threads of the program may capture meanwhile, and their errors may be stored in the context. So each call of
//! cudarc is made in `undisturbed`.

use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use nccl::cuda_driver::{self, undisturbed};
use nccl::cudarc::driver::{
    CudaContext, CudaEvent, CudaSlice, CudaStream, DriverError, PinnedHostSlice,
};
use nccl::{Communicator, DataType, Erased, ErasedMut, ErrorKind};
use parking_lot::Mutex;

use crate::collective::Collective;

/// Alignment of the staged data: the largest element, with room for NCCL's vector loads.
const ALIGNMENT: usize = 256;

/// Minimum size of an area in bytes.
const LEAST: usize = 1 << 12;

/// Timeout for copies behind an operation that is done; they have a stream of their own.
const COPY_LIMIT: Duration = Duration::from_secs(60);

/// How long an area waits for the stream of a failed operation before it is leaked.
const FAILED_LIMIT: Duration = Duration::from_secs(1);

/// The memory that a communicator keeps for tensors on the CPU:
/// [`TensorCommunicator::staged`](crate::TensorCommunicator::staged).
///
/// ```
/// use candle_core::{Device, Tensor};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # nccl_emulator::install_unless_gpu()?;
/// # let world = nccl::World::single();
/// # let comm = nccl_candle::TensorCommunicator::join(&world, "demo", &Device::Cpu)?;
/// let x = Tensor::ones(1000, candle_core::DType::F32, &Device::Cpu)?;
/// comm.all_to_all(&x)?;
/// let before = comm.staged();
/// comm.all_to_all(&x)?;
/// assert_eq!(comm.staged(), before);
/// assert_eq!((before.areas, before.bytes), (1, 8192)); // in and out, 4000 bytes each
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Staged {
    /// Number of areas: one, unless several threads used the communicator at the same time.
    pub areas: usize,
    /// Their bytes of pinned memory, and as many of device memory; each area's size is a power of two.
    pub bytes: usize,
    /// Number of areas that were ever made; does not grow while the areas are large enough.
    pub allocations: u64,
    /// Number of areas given up, because an operation in them failed and its stream did not become idle.
    pub leaked: u64,
}

/// The areas of a communicator.
#[derive(Debug, Default)]
pub(crate) struct Staging {
    idle: Mutex<Vec<Area>>,
    areas: AtomicUsize,
    bytes: AtomicUsize,
    allocations: AtomicU64,
    leaked: AtomicU64,
}

/// Pinned memory and device memory of the same size.
#[derive(Debug)]
struct Area {
    host: PinnedHostSlice<u8>,
    device: CudaSlice<u8>,
    stream: Arc<CudaStream>,
    /// Recorded behind an operation.
    end: CudaEvent,
}

impl Area {
    fn new(context: &Arc<CudaContext>, bytes: usize) -> Result<Self, DriverError> {
        undisturbed(context, || {
            context.bind_to_thread()?;
            let stream = context.new_stream()?;
            // Cached, because the host reads results from it.
            // SAFETY: every byte is written before it is read: by the caller, or by the device.
            let host = unsafe { context.alloc_pinned_with_flags::<u8>(bytes, 0)? };
            // SAFETY: as above.
            let device = unsafe { stream.alloc::<u8>(bytes)? };
            Ok(Self {
                host,
                device,
                stream,
                end: context.new_event(None)?,
            })
        })
    }

    /// Frees an area that rests.
    fn free(self) {
        let context = Arc::clone(self.stream.context());
        undisturbed(&context, || drop(self));
    }

    fn bytes(&self) -> usize {
        self.device.len()
    }

    /// Runs the operation, between the copies; returns when the operation is over, or has failed.
    fn run(
        &mut self,
        comm: &Communicator,
        (collective, data_type): (Collective, DataType),
        input: &[u8],
        output: usize,
    ) -> nccl::Result<()> {
        let comm = comm.on(&self.stream);
        let context = self.stream.context();
        let host = undisturbed(context, || self.host.as_mut_slice());
        let host = host.map_err(cuda("pinned memory"))?;
        let (host_in, host_out) = host.split_at_mut(place_of_output(input.len()));
        let (mut device_in, mut device_out) =
            self.device.split_at_mut(place_of_output(input.len()));
        if !input.is_empty() {
            let host_in = &mut host_in[..input.len()];
            host_in.copy_from_slice(input);
            let copy = || self.stream.memcpy_htod(host_in, &mut device_in);
            let copied = undisturbed(context, copy);
            copied.map_err(cuda("copying a tensor to the device (cuMemcpyHtoDAsync)"))?;
        }
        let request = {
            let x = Erased::from_bytes(device_in.slice(..input.len()), data_type)?;
            let y = ErasedMut::from_bytes(device_out.slice_mut(..output), data_type)?;
            collective.issue(&comm, x, y)?
        };
        if output != 0 {
            let device_out = device_out.slice(..output);
            let copy = || (self.stream).memcpy_dtoh(&device_out, &mut host_out[..output]);
            let copied = undisturbed(context, copy);
            copied.map_err(cuda("copying a tensor from the device (cuMemcpyDtoHAsync)"))?;
        }
        // The copy back is enqueued before the wait for the operation.
        request.wait()
    }

    /// Waits until the area's stream is idle, for at most `timeout`.
    fn rest(&self, timeout: Duration) -> nccl::Result<()> {
        const END: &str = "waiting for the end of staged copies (cuEventRecord, cuEventQuery)";
        cuda_driver::bind(self.stream.context()).map_err(cuda(END))?;
        cuda_driver::record(&self.end, &self.stream).map_err(cuda(END))?;
        let begun = Instant::now();
        let mut pause = Duration::from_micros(1);
        while !cuda_driver::is_reached(&self.end).map_err(cuda(END))? {
            if begun.elapsed() >= timeout {
                return Err(nccl::Error::from(ErrorKind::TimedOut {
                    what: String::from("copying a tensor from the device"),
                    timeout,
                }));
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(1));
        }
        Ok(())
    }
}

/// Returns where the result begins.
fn place_of_output(input: usize) -> usize {
    input.next_multiple_of(ALIGNMENT)
}

fn cuda(what: &'static str) -> impl FnOnce(DriverError) -> nccl::Error {
    move |error| nccl::Error::from(ErrorKind::Cuda { what, error })
}

impl Staging {
    /// Runs a collective on host memory, and returns when all of it is over.
    pub(crate) fn run(
        &self,
        comm: &Communicator,
        (collective, data_type): (Collective, DataType),
        input: &[u8],
        output: &mut [u8],
    ) -> nccl::Result<()> {
        let needed = place_of_output(input.len()).saturating_add(output.len());
        // A panic leaks the area instead of dropping it.
        let mut area = ManuallyDrop::new(self.take(comm, needed)?);
        let mut done = area.run(comm, (collective, data_type), input, output.len());
        let timeout = if done.is_ok() {
            COPY_LIMIT
        } else {
            FAILED_LIMIT
        };
        if let Err(error) = area.rest(timeout) {
            self.areas.fetch_sub(1, Ordering::Relaxed);
            self.bytes.fetch_sub(area.bytes(), Ordering::Relaxed);
            self.leaked.fetch_add(1, Ordering::Relaxed);
            return done.and(Err(error));
        }
        if done.is_ok() {
            let start = place_of_output(input.len());
            done = match undisturbed(area.stream.context(), || area.host.as_slice()) {
                Ok(host) => {
                    output.copy_from_slice(&host[start..start + output.len()]);
                    Ok(())
                }
                Err(error) => Err(cuda("pinned memory")(error)),
            };
        }
        self.idle().push(ManuallyDrop::into_inner(area));
        done
    }

    /// Makes an area of that size, unless there is one.
    pub(crate) fn reserve(&self, comm: &Communicator, bytes: usize) -> nccl::Result<()> {
        let area = self.take(comm, bytes)?;
        self.idle().push(area);
        Ok(())
    }

    pub(crate) fn staged(&self) -> Staged {
        Staged {
            areas: self.areas.load(Ordering::Relaxed),
            bytes: self.bytes.load(Ordering::Relaxed),
            allocations: self.allocations.load(Ordering::Relaxed),
            leaked: self.leaked.load(Ordering::Relaxed),
        }
    }

    fn idle(&self) -> parking_lot::MutexGuard<'_, Vec<Area>> {
        self.idle.lock()
    }

    /// Takes an area of at least `needed` bytes: the smallest that is large enough, or a new one that replaces one that
    /// is too small.
    fn take(&self, comm: &Communicator, needed: usize) -> nccl::Result<Area> {
        let small = {
            let mut idle = self.idle();
            let fits = (0..idle.len())
                .filter(|&index| idle[index].bytes() >= needed)
                .min_by_key(|&index| idle[index].bytes());
            match fits {
                Some(index) => return Ok(idle.swap_remove(index)),
                None => idle.pop(),
            }
        };
        if let Some(small) = small {
            self.areas.fetch_sub(1, Ordering::Relaxed);
            self.bytes.fetch_sub(small.bytes(), Ordering::Relaxed);
            small.free();
        }
        let bytes = needed.max(LEAST).checked_next_power_of_two();
        let bytes = bytes.ok_or_else(|| too_large(needed))?;
        let area = Area::new(comm.stream().context(), bytes).map_err(cuda(
            "memory to stage tensors in (cuMemHostAlloc, cuMemAlloc)",
        ))?;
        self.areas.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        self.allocations.fetch_add(1, Ordering::Relaxed);
        Ok(area)
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        self.idle.get_mut().drain(..).for_each(Area::free);
    }
}

#[cold]
fn too_large(bytes: usize) -> nccl::Error {
    nccl::Error::from(ErrorKind::Io {
        what: format!("staging {bytes} bytes"),
        error: std::io::Error::from(std::io::ErrorKind::OutOfMemory),
    })
}
