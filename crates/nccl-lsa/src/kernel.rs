//! The kernel: compiled, loaded, launched and unloaded.

use std::collections::BTreeMap;
use std::ffi::{CString, c_void};
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use cudarc::driver::sys::{self as cuda, CUdeviceptr, CUfunction, CUmodule};
use cudarc::driver::{CudaContext, CudaEvent, CudaStream, DriverError, result};
use cudarc::nvrtc::{self, CompileError, CompileOptions};
use lsa_protocol::{BLOCK_THREADS, CUDA_SOURCE, KERNEL, Outcome, STAND_IN_PTX};
use nccl_base::sync::Mutex;

use crate::communicator::{PeerKernel, is_reached};
use crate::cuda_driver;
use crate::drop_queue::{self, DeferredDrop, DropPoll};
use crate::error::{Error, ErrorKind, ErrorProperty, Result};

/// The kernel of one rank, and the memory that host and device share.
pub(crate) struct Kernel {
    module: CUmodule,
    function: CUfunction,
    shared: Shared,
    /// Recorded behind each launch.
    last: ManuallyDrop<CudaEvent>,
    has_run: AtomicBool,
    /// Whether `last` could not be recorded: then the end of the kernel cannot be determined.
    is_lost: AtomicBool,
    /// For error texts.
    timeout: Duration,
    context: Arc<CudaContext>,
}

// SAFETY: driver handles, which any thread may use with the context bound; the memory is of atomics.
unsafe impl Send for Kernel {}
// SAFETY: as above.
unsafe impl Sync for Kernel {}

/// Three words of pinned memory, which the kernel reads and writes.
struct Shared {
    words: *mut AtomicU32,
    device: CUdeviceptr,
}

const ABORT: usize = 0;
const STATUS: usize = 1;
/// The epoch that was begun last.
const BEGUN: usize = 2;
const WORDS: usize = 3;

impl Shared {
    fn new() -> Result<Self> {
        let failed = Error::cuda("allocating memory for host and device (cuMemHostAlloc)");
        let flags = cuda::CU_MEMHOSTALLOC_DEVICEMAP | cuda::CU_MEMHOSTALLOC_PORTABLE;
        // SAFETY: the context is bound; freed once, by `free`.
        let words =
            unsafe { result::malloc_host(WORDS * size_of::<u32>(), flags) }.map_err(failed)?;
        let words: *mut AtomicU32 = words.cast();
        let mut device: CUdeviceptr = 0;
        // SAFETY: allocated above, as long, aligned for any word, and known here alone.
        let found = unsafe {
            (0..WORDS).for_each(|index| words.add(index).write(AtomicU32::new(0)));
            cuda::cuMemHostGetDevicePointer_v2(&mut device, words.cast(), 0).result()
        };
        let shared = Self { words, device };
        if let Err(error) = found {
            shared.free();
            return Err(Error::cuda(
                "asking where the device has memory of the host (cuMemHostGetDevicePointer)",
            )(error));
        }
        Ok(shared)
    }

    fn word(&self, index: usize) -> &AtomicU32 {
        // SAFETY: as many words, that live until `free`, which consumes this value.
        unsafe { &*self.words.add(index) }
    }

    fn free(self) {
        // SAFETY: allocated by `new`, freed once; the kernel that uses it is over.
        let _ = unsafe { result::free_host(self.words.cast()) };
    }
}

/// One exchange. The addresses are of as many bytes as the layout of the exchange needs.
pub(crate) struct Exchange {
    pub(crate) send: CUdeviceptr,
    pub(crate) recv: CUdeviceptr,
    pub(crate) bytes: u64,
    /// The addresses of all windows.
    pub(crate) windows: CUdeviceptr,
    pub(crate) rank: u32,
    pub(crate) ranks: u32,
    pub(crate) epoch: u32,
    pub(crate) capacity: u64,
    pub(crate) timeout_ns: u64,
}

impl Kernel {
    /// Compiles and loads the kernel.
    ///
    /// # Errors
    /// [`ErrorKind::Unavailable`] without NVRTC; [`ErrorKind::Cuda`] when the driver fails.
    pub(crate) fn load(context: &Arc<CudaContext>, timeout: Duration) -> Result<Self> {
        cuda_driver::bind(context).map_err(Error::cuda(
            "binding the context to this thread (cuCtxSetCurrent)",
        ))?;
        let last = cuda_driver::new_event(context, None)
            .map_err(Error::cuda("creating an event (cuEventCreate)"))?;
        let shared = Shared::new()?;
        let loaded = || {
            // The emulator alone takes this text, and only its own.
            let module = match load(STAND_IN_PTX) {
                Ok(module) => module,
                Err(_) => load(&compiled(context)?).map_err(not_loaded)?,
            };
            let name = CString::new(KERNEL).unwrap_or_default();
            // This also loads the function onto the device, for which a driver that loads lazily may wait: not at the first
            // launch, when one rank of a process may wait for another.
            // SAFETY: the module is loaded.
            match unsafe { result::module::get_function(module, name) } {
                Ok(function) => Ok((module, function)),
                Err(error) => {
                    // SAFETY: loaded above, unloaded once.
                    let _ = unsafe { result::module::unload(module) };
                    Err(Error::cuda("looking up a kernel (cuModuleGetFunction)")(
                        error,
                    ))
                }
            }
        };
        match loaded() {
            Ok((module, function)) => Ok(Self {
                module,
                function,
                shared,
                last: ManuallyDrop::new(last),
                has_run: AtomicBool::new(false),
                is_lost: AtomicBool::new(false),
                timeout,
                context: Arc::clone(context),
            }),
            Err(error) => {
                shared.free();
                Err(error)
            }
        }
    }

    /// Launches one exchange, and records `last` behind it.
    ///
    /// # Safety
    /// The addresses are valid for the exchange until the stream has run the kernel, and the context is bound.
    pub(crate) unsafe fn launch(&self, exchange: &Exchange, stream: &CudaStream) -> Result<()> {
        fn argument<T>(value: &T) -> *mut c_void {
            std::ptr::from_ref(value).cast_mut().cast()
        }
        let abort = self.shared.device + (ABORT * size_of::<u32>()) as u64;
        let status = self.shared.device + (STATUS * size_of::<u32>()) as u64;
        let arguments = &mut [
            argument(&exchange.send),
            argument(&exchange.recv),
            argument(&exchange.bytes),
            argument(&exchange.windows),
            argument(&exchange.rank),
            argument(&exchange.ranks),
            argument(&exchange.epoch),
            argument(&exchange.capacity),
            argument(&abort),
            argument(&exchange.timeout_ns),
            argument(&status),
        ];
        let (grid, block) = ((exchange.ranks, 1, 1), (BLOCK_THREADS, 1, 1));
        // Set first: after the launch the kernel may run.
        self.has_run.store(true, Ordering::Release);
        // SAFETY: as the kernel takes them; the caller promises that the addresses are valid.
        unsafe {
            result::launch_kernel(self.function, grid, block, 0, stream.cu_stream(), arguments)
        }
        .map_err(Error::cuda("launching a kernel (cuLaunchKernel)"))?;
        cuda_driver::record(&self.last, stream).map_err(|error| {
            self.is_lost.store(true, Ordering::Release);
            Error::cuda("recording an event (cuEventRecord)")(error)
        })
    }

    /// The result of the exchanges so far: the first failure, if any.
    pub(crate) fn outcome(&self) -> Outcome {
        Outcome::from_status(self.shared.word(STATUS).load(Ordering::Acquire))
    }

    /// The epoch that was begun last; 0 before the first.
    pub(crate) fn begun(&self) -> u32 {
        self.shared.word(BEGUN).load(Ordering::Acquire)
    }

    /// The error of exchanges that have failed.
    pub(crate) fn error(&self) -> Option<Error> {
        match self.outcome() {
            Outcome::Done => None,
            Outcome::Missing(rank) => Some(Error::new(ErrorKind::TimedOut {
                what: format!("the block of rank {rank} in an all-to-all by loads and stores"),
                timeout: self.timeout,
            })),
            Outcome::Differs(rank) => {
                let error = Error::new(ErrorKind::InvalidConfig {
                    field: "x",
                    reason: format!(
                        "in an all-to-all by loads and stores, the blocks of rank {rank} are larger or smaller than those of this \
                         rank; all ranks have to exchange blocks of the same size"
                    ),
                });
                Some(error.with_property(ErrorProperty::BetweenRanks))
            }
            Outcome::Aborted => Some(aborted()),
        }
    }
}

/// The error of an exchange whose communicator was aborted.
pub(crate) fn aborted() -> Error {
    Error::new(ErrorKind::Aborted {
        reason: String::from(
            "its communicator was aborted during an all-to-all by loads and stores",
        ),
    })
}

impl PeerKernel for Kernel {
    fn leave(&self) {
        self.shared.word(ABORT).store(1, Ordering::Release);
    }

    fn is_over(&self) -> bool {
        !self.has_run.load(Ordering::Acquire)
            || !self.is_lost.load(Ordering::Acquire) && is_reached(&self.context, &self.last)
    }

    fn failure(&self) -> Option<Error> {
        self.error()
    }
}

/// Loads a module into the context that is bound.
fn load(ptx: &str) -> std::result::Result<CUmodule, DriverError> {
    let ptx = CString::new(ptx).unwrap_or_default();
    // SAFETY: a NUL-terminated string.
    unsafe { result::module::load_data(ptx.as_ptr().cast()) }
}

/// The error of a compiled kernel that the driver does not load.
fn not_loaded(error: DriverError) -> Error {
    match error.0 {
        cuda::CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION => unavailable(String::from(
            "its kernel was compiled by a NVRTC that is newer than the driver: install the NVRTC of the driver's CUDA, or a newer driver",
        )),
        _ => Error::cuda("loading a kernel (cuModuleLoadData)")(error),
    }
}

pub(crate) fn unavailable(reason: String) -> Error {
    Error::new(ErrorKind::Unavailable {
        what: "an all-to-all by loads and stores",
        reason,
    })
}

/// The kernel for the context's device, as PTX.
fn compiled(context: &CudaContext) -> Result<String> {
    /// Compiled kernels, by compute capability: a program may make an all-to-all for each of its layers.
    static COMPILED: Mutex<BTreeMap<(i32, i32), String>> = Mutex::new(BTreeMap::new());
    // SAFETY: only looks whether the library can be loaded.
    if !unsafe { nvrtc::sys::is_culib_present() } {
        return Err(unavailable(String::from(
            "its kernel is compiled by NVRTC, and the dynamic linker finds no libnvrtc.so: install CUDA's runtime compiler, or \
             put the directory of the wheel nvidia-cuda-nvrtc into LD_LIBRARY_PATH",
        )));
    }
    let (major, minor) = context
        .compute_capability()
        .map_err(Error::cuda("asking for the compute capability"))?;
    let mut all = COMPILED.lock();
    if let Some(ptx) = all.get(&(major, minor)) {
        return Ok(ptx.clone());
    }
    let options = CompileOptions {
        options: vec![
            format!("--gpu-architecture=compute_{major}{minor}"),
            String::from("--std=c++17"),
        ],
        name: Some(format!("{KERNEL}.cu")),
        ..CompileOptions::default()
    };
    match nvrtc::compile_ptx_with_opts(CUDA_SOURCE, options) {
        Ok(ptx) => {
            let ptx = ptx.to_src();
            all.insert((major, minor), ptx.clone());
            Ok(ptx)
        }
        Err(CompileError::CompileError { log, .. }) => Err(unavailable(format!(
            "NVRTC does not compile its kernel for compute capability {major}.{minor}: {}",
            log.to_string_lossy().trim()
        ))),
        Err(error) => Err(unavailable(format!("NVRTC failed: {error}"))),
    }
}

/// The rest of a dropped kernel. Unloading waits for the device, so the drop queue does it.
struct Ending {
    module: CUmodule,
    shared: Option<Shared>,
    last: CudaEvent,
    /// Whether the end of the kernel cannot be determined, so that it may run for ever.
    is_lost: bool,
    has_run: bool,
    context: Arc<CudaContext>,
}

// SAFETY: as for `Kernel`.
unsafe impl Send for Ending {}

impl DeferredDrop for Ending {
    fn poll(&mut self) -> DropPoll {
        match !self.has_run || is_reached(&self.context, &self.last) {
            _ if self.is_lost => DropPoll::Never,
            true => DropPoll::Over,
            false => DropPoll::Wait,
        }
    }

    fn release(mut self: Box<Self>) {
        if cuda_driver::bind(&self.context).is_err() {
            return;
        }
        // SAFETY: loaded, and unloaded once; its last launch is over.
        let _ = unsafe { result::module::unload(self.module) };
        if let Some(shared) = self.shared.take() {
            shared.free();
        }
    }

    fn describe(&self) -> String {
        String::from(
            "the kernel of an all-to-all by loads and stores, which did not come to its end",
        )
    }
}

impl Drop for Kernel {
    /// Never waits.
    fn drop(&mut self) {
        // SAFETY: taken once, here.
        let last = unsafe { ManuallyDrop::take(&mut self.last) };
        if drop_queue::is_closed() {
            std::mem::forget(last);
            return;
        }
        let shared = Shared {
            words: self.shared.words,
            device: self.shared.device,
        };
        let ending = Ending {
            module: self.module,
            shared: Some(shared),
            last,
            is_lost: self.is_lost.load(Ordering::Acquire),
            has_run: self.has_run.load(Ordering::Acquire),
            context: Arc::clone(&self.context),
        };
        drop_queue::defer(Box::new(ending), drop_queue::TIMEOUT);
    }
}
