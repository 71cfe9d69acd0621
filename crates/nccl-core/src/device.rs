//! Opens a device by its number, without cudarc's panic on a machine that has no driver.

use std::ffi::CStr;
use std::sync::Arc;

use cudarc::driver::CudaContext;

use crate::cuda_driver;
use crate::error::{Error, ErrorKind, Result};

/// Returns the primary context of the device with this number, to create streams in. The number counts the devices that
/// the process sees; usually it is `World::local_rank`.
///
/// Like `CudaContext::new`, but returns an error where that function panics because there is no driver.
///
/// # Errors
/// [`ErrorKind::NoDriver`] where there is no libcuda, [`ErrorKind::NoSuchDevice`] for a number that is too large,
/// [`ErrorKind::Cuda`] when the driver does not start.
///
/// Wraps `cuInit` and `cuDevicePrimaryCtxRetain`.
///
/// ```
/// # nccl_emulator::install_unless_gpu()?;
/// let world = nccl::World::single();
/// let stream = nccl::device(world.local_rank())?.new_stream()?;
/// let error = nccl::device(1000).unwrap_err();
/// assert!(matches!(error.kind(), nccl::ErrorKind::NoSuchDevice { ordinal: 1000, .. }));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn device(ordinal: usize) -> Result<Arc<CudaContext>> {
    if !cuda_driver::is_present() {
        return Err(Error::new(ErrorKind::NoDriver {
            looked_for: cuda_driver::LIBRARY.to_str().unwrap_or_default(),
            reason: why_not_loaded(),
        }));
    }
    let devices = CudaContext::device_count().map_err(Error::cuda("counting the devices"))?;
    let devices = usize::try_from(devices).unwrap_or_default();
    if ordinal >= devices {
        return Err(Error::new(ErrorKind::NoSuchDevice { ordinal, devices }));
    }
    CudaContext::new(ordinal).map_err(Error::cuda("making a device's context"))
}

/// Returns the dynamic linker's reason for not loading the driver.
fn why_not_loaded() -> String {
    // SAFETY: loads the CUDA driver if it exists by now, as every call into the driver does.
    let handle = unsafe {
        libc::dlopen(
            cuda_driver::LIBRARY.as_ptr(),
            libc::RTLD_NOW | libc::RTLD_LOCAL,
        )
    };
    if !handle.is_null() {
        return String::from("it has been there for a moment only");
    }
    // SAFETY: reads this thread's error text of the failed `dlopen` above.
    let text = unsafe { libc::dlerror() };
    match text.is_null() {
        true => String::from("the dynamic linker says nothing"),
        // SAFETY: a C string, valid until the next call of the linker on this thread.
        false => unsafe { CStr::from_ptr(text) }
            .to_string_lossy()
            .into_owned(),
    }
}
