//! The all-to-all: windows, agreement, and one launch for each exchange.

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use cudarc::driver::CudaSlice;
use lsa_protocol::{Layout, SLOT_ALIGNMENT, next_epoch};
use nccl_base::operation::{OperationKind, Shape};
use nccl_core::device_api::Team;
use nccl_core::one_sided::Window;
use nccl_core::op::Function;
use nccl_core::queued_op::QueuedOp;

use crate::buffer::{RecvBuffer, SendBuffer};
use crate::communicator::Communicator;
use crate::cuda_driver;
use crate::error::{Error, ErrorKind, Result};
use crate::issuing::{IssueBuffers, failed_check};
use crate::kernel::{Exchange, Kernel, unavailable};
use crate::request::{Exchanged, LoadStoreRequest, SLACK, failed};

/// An all-to-all of small messages by a kernel of this crate, which stores each block into the memory of its receiver
/// and sets a flag there; made with [`LoadStoreAllToAll::new`]. An exchange does not call NCCL.
///
/// For ranks whose devices reach each other's memory ([`Team::load_store`]): ranks of a host with NVLink or peer
/// access. A block is copied twice, so this suits blocks of some kibibytes, where the latency of NCCL's kernels counts.
/// **It has not been measured on a GPU yet.** NVRTC compiles the kernel at run time for the device; its compilers of
/// CUDA 12.9 and 13.5 were tried for compute capabilities 8.0, 9.0 and 10.0. On the emulator a function in Rust runs in
/// the kernel's place.
///
/// All ranks make the same number of exchanges, of blocks of the same size; a block of another size is not received, and is an
/// error on its receiver. The kernel waits for the other ranks at
/// most as long as the communicator's timeout for operations; then the exchange fails on the rank that waited, and
/// later exchanges on its stream do nothing. The communicator is aborted, also if the program does not wait for the request, and
/// the error names the rank whose block did not arrive or differs. An abort of the communicator ends running kernels before
/// NCCL releases the windows.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # nccl_emulator::install_unless_gpu()?;
/// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
/// # let world = nccl::World::threads(1).remove(0);
/// # let comm = world.communicator("demo").stream(&stream).build()?;
/// use nccl::device_api::LoadStoreAllToAll;
///
/// let mut all_to_all = LoadStoreAllToAll::new(&comm, 4096)?; // blocks of at most 4 KiB
/// let x = stream.clone_htod(&vec![1.0f32; 16 * comm.world_size()])?;
/// let mut y = stream.alloc_zeros::<f32>(16 * comm.world_size())?;
/// for _token in 0..3 {
///     all_to_all.exchange(&x, &mut y)?.wait()?;
/// }
/// assert_eq!(stream.clone_dtoh(&y)?, stream.clone_dtoh(&x)?);
/// # Ok(())
/// # }
/// ```
pub struct LoadStoreAllToAll {
    comm: Communicator,
    kernel: Arc<Kernel>,
    layout: Layout,
    /// The addresses at which this rank's device reaches the window of each rank.
    addresses: CudaSlice<u64>,
    window: Window<u8>,
    epoch: u32,
}

impl LoadStoreAllToAll {
    /// Makes an all-to-all of blocks of at most `capacity` bytes. All ranks of the communicator call it, with the same capacity.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidConfig`] for a capacity of 0, or one that differs between ranks; [`ErrorKind::Unavailable`]
    /// where ranks do not reach each other's memory, or a rank has no NVRTC (that rank's error says so, the other
    /// errors name the rank). These are returned on all ranks, and the communicator stays usable. Otherwise as
    /// [`Communicator::window`].
    ///
    /// Wraps `ncclCommWindowRegister` and `ncclGetPeerDevicePointer`.
    ///
    /// ```
    /// # fn example(comm: &nccl::Communicator) -> nccl::Result<()> {
    /// let all_to_all = nccl::device_api::LoadStoreAllToAll::new(comm, 16 << 10)?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn new(comm: &Communicator, capacity: usize) -> Result<Self> {
        let prepared = prepare(comm, capacity);
        // All ranks compare their values before any of them has a window, so that all of them fail alike.
        let (word, bytes) = match &prepared {
            Ok((layout, _)) => (capacity as u64, layout.window_bytes() as usize),
            Err(_) => (REFUSED, 0),
        };
        let window = comm.window_for_kernels(bytes, |has_memory| {
            let word = if has_memory { word } else { REFUSED };
            compare(&comm.gather_from_all(word)?)
        });
        let (layout, kernel) = prepared?;
        // The window is all zeros: no flag is set.
        let window = window?;
        // A failure from here on is a failure of this rank alone.
        let addresses = addresses(comm, &window).map_err(|error| comm.inner.fail_alone(error))?;
        let kernel = Arc::new(kernel);
        comm.inner.add_peer_kernel(Arc::<Kernel>::clone(&kernel));
        // The flags of all ranks are zero, and their windows exist, before any rank stores.
        comm.barrier()?;
        Ok(Self {
            comm: comm.clone(),
            kernel,
            layout,
            addresses,
            window,
            epoch: 0,
        })
    }

    /// Sends a block of `x` to each rank, and receives a block from each into `y`, in the order of the ranks. `x` and
    /// `y` have the same length, a multiple of the number of ranks. Both are lent until the communicator's stream has
    /// run the kernel; the streams of the buffers wait for it.
    ///
    /// # Errors
    /// [`ErrorKind::Length`] and [`ErrorKind::DataTypeMismatch`] for buffers that do not fit together, or blocks larger
    /// than the capacity: no kernel was launched. [`ErrorKind::TimedOut`], [`ErrorKind::InvalidConfig`] and
    /// [`ErrorKind::Aborted`] after an exchange that failed.
    ///
    /// ```
    /// # fn example(all_to_all: &mut nccl::device_api::LoadStoreAllToAll, x: &nccl::Buffer<u8>, y: &mut nccl::Buffer<u8>) -> nccl::Result<()> {
    /// let done = all_to_all.exchange(x, y)?;
    /// // … other work …
    /// done.wait()?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn exchange<'a, S, R>(&'a mut self, x: S, y: R) -> Result<LoadStoreRequest>
    where
        S: SendBuffer<'a>,
        R: RecvBuffer<'a, Element = S::Element>,
    {
        nccl_base::forked::check()?;
        if let Some(error) = self.kernel.error() {
            return Err(failed(&self.comm, error));
        }
        let (x, y) = (x.erase(), y.erase_mut());
        let ranks = self.comm.world_size();
        let data_type = x.data_type();
        if y.data_type() != data_type {
            return Err(Error::new(ErrorKind::DataTypeMismatch {
                send: data_type,
                receive: y.data_type(),
            }));
        }
        let length = |buffer, given, needed, rule| {
            Err(Error::new(ErrorKind::Length {
                buffer,
                given,
                needed,
                rule,
            }))
        };
        if !x.len().is_multiple_of(ranks) {
            let needed = x.len().next_multiple_of(ranks);
            return length("x", x.len(), needed, "a multiple of the number of ranks");
        }
        if y.len() != x.len() {
            return length("y", y.len(), x.len(), "as long as `x`");
        }
        let block = x.len() / ranks;
        let size = data_type.size_in_bytes().unwrap_or_default();
        let bytes = (block * size) as u64;
        if bytes > self.layout.capacity() {
            let fits = self.layout.capacity() as usize / size.max(1) * ranks;
            return length("x", x.len(), fits, "blocks of at most the capacity");
        }
        let epoch = next_epoch(self.epoch);
        let comm = &self.comm;
        let started = Instant::now();
        let shape = Shape {
            count: Some(block),
            data_type: Some(data_type),
            ..Shape::default()
        };
        let describe = |number| {
            comm.inner
                .operation(OperationKind::AllToAll, shape, number, started)
        };
        let done = cuda_driver::new_event(comm.stream().context(), None)
            .map_err(Error::cuda("creating an event (cuEventCreate)"))?;
        let mut buffers = IssueBuffers::new(comm.stream())?;
        let taken = (|| {
            let exchange = Exchange {
                send: buffers.read(x)?,
                recv: buffers.write(y)?,
                bytes,
                windows: buffers.read(&self.addresses)?,
                rank: comm.rank() as u32,
                ranks: ranks as u32,
                epoch,
                capacity: self.layout.capacity(),
                // 0 means no timeout.
                timeout_ns: u64::try_from(comm.timeout.as_nanos())
                    .map_or(0, |timeout| timeout.max(1)),
            };
            // Its stream waits as well.
            buffers.read(self.window.view())?;
            Ok(exchange)
        })();
        let exchange = match taken {
            Ok(exchange) => exchange,
            Err(error) => {
                return Err(failed_check(comm, OperationKind::AllToAll, shape, error));
            }
        };
        let kernel = &self.kernel;
        let stream = comm.stream();
        let operation = QueuedOp::new(Function::AllToAll, 0, block, data_type, 0);
        // The kernel ends by itself at its timeout, and knows whose block is missing: before the watchdog.
        let patience = comm.timeout.saturating_add(SLACK);
        let number = comm.inner.operate(
            &buffers,
            &operation,
            (comm.timeout, patience),
            describe,
            || {
                // SAFETY: the buffers are lent to the stream, as long as the exchange needs: checked above. The windows of the
                // peers are there until the communicator ends, which waits for the kernel.
                unsafe { kernel.launch(&exchange, stream) }?;
                cuda_driver::record(&done, stream)
                    .map_err(Error::cuda("recording an event (cuEventRecord)"))
            },
        )?;
        drop(buffers);
        self.epoch = epoch;
        Ok(LoadStoreRequest::new(
            self.comm.clone(),
            Arc::clone(&self.kernel),
            done,
            epoch,
            Exchanged {
                number,
                shape,
                started,
            },
        ))
    }

    /// Returns the maximum number of bytes of a block: the requested capacity, rounded up.
    ///
    /// ```
    /// # fn example(all_to_all: &nccl::device_api::LoadStoreAllToAll) {
    /// assert!(all_to_all.capacity() > 0);
    /// # }
    /// ```
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.layout.capacity() as usize
    }

    /// Returns the communicator whose ranks exchange.
    ///
    /// ```
    /// # fn example(all_to_all: &nccl::device_api::LoadStoreAllToAll) {
    /// let ranks = all_to_all.communicator().world_size();
    /// # }
    /// ```
    #[must_use]
    pub fn communicator(&self) -> &Communicator {
        &self.comm
    }
}

/// The value that a rank sends to the others if it cannot take part.
const REFUSED: u64 = u64::MAX;

/// Prepares everything that this rank needs and can determine without the others.
fn prepare(comm: &Communicator, capacity: usize) -> Result<(Layout, Kernel)> {
    let ranks = comm.world_size();
    if capacity == 0 {
        return Err(invalid(String::from("a block has at least one byte")));
    }
    let too_large = || {
        invalid(format!(
            "blocks of {capacity} bytes are more than memory can be"
        ))
    };
    let slot = (capacity as u64)
        .checked_next_multiple_of(SLOT_ALIGNMENT)
        .ok_or_else(too_large)?;
    // Fits: the number of ranks was checked when the communicator was made.
    let layout = Layout::new(ranks as u32, slot).map_err(|_| too_large())?;
    if usize::try_from(layout.window_bytes()).is_err() {
        return Err(too_large());
    }
    if !comm.properties()?.device_api {
        return Err(unavailable(String::from(
            "the devices of these ranks do not reach each other's memory by NCCL's windows; that needs peer access and memory \
             from cuMem (NCCL_CUMEM_ENABLE)",
        )));
    }
    let team = Team::load_store(comm)?;
    if team.size != ranks {
        return Err(unavailable(format!(
            "the devices of {} of the {ranks} ranks reach the memory of this one",
            team.size
        )));
    }
    Ok((layout, Kernel::load(comm.stream().context(), comm.timeout)?))
}

/// Compares the values that the ranks have sent.
fn compare(all: &[u64]) -> Result<()> {
    if let Some(rank) = all.iter().position(|&one| one == REFUSED) {
        return Err(unavailable(format!(
            "rank {rank} cannot take part; its error says why"
        )));
    }
    match all.iter().position(|&one| one != all[0]) {
        None => Ok(()),
        Some(other) => Err(invalid(format!(
            "rank 0 asks for blocks of {} bytes, rank {other} for blocks of {}; all ranks have to ask for the same",
            all[0], all[other]
        ))),
    }
}

fn invalid(reason: String) -> Error {
    Error::new(ErrorKind::InvalidConfig {
        field: "capacity",
        reason,
    })
}

/// The addresses of all windows, in device memory.
fn addresses(comm: &Communicator, window: &Window<u8>) -> Result<CudaSlice<u64>> {
    let address = |rank: usize| {
        window.peer_address(rank)?.ok_or_else(|| {
            Error::new(ErrorKind::Unavailable {
                what: "an all-to-all by loads and stores",
                reason: format!("NCCL has no address for the memory of rank {rank}"),
            })
        })
    };
    let addresses = (0..comm.world_size())
        .map(address)
        .collect::<Result<Vec<_>>>()?;
    let stream = comm.stream();
    let copied =
        cuda_driver::ignoring_stored_error(stream.context(), || stream.clone_htod(&addresses));
    copied.map_err(Error::cuda("copying addresses to the device"))
}

impl fmt::Debug for LoadStoreAllToAll {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LoadStoreAllToAll")
            .field("communicator", &self.comm.name())
            .field("capacity", &self.capacity())
            .field("exchanges", &self.epoch)
            .finish()
    }
}
