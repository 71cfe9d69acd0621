//! State of this process's devices, from NVIDIA's management library (NVML): lost devices, errors of memory and links,
//! slow clocks.
//!
//! - `state`: the states as data;
//! - `reading`: NVML's data about one device at one time, and the trouble that it shows;
//! - `nvml`, with the feature of that name: the calls;
//! - `worker`: the one thread that makes them, and the waits for its answers.
//!
//! NVML is optional, and loaded at run time when a communicator of a world is made. Its calls may hang, as those of a
//! driver in trouble do: no caller waits for them beyond its own deadline. Counters are trouble only as far as they
//! have grown since the first communicator on the device; states, such as a lost device, always are.

#[cfg(feature = "nvml")]
mod nvml;
#[cfg(any(feature = "nvml", test))]
mod reading;
mod state;
#[cfg(any(feature = "nvml", test))]
mod worker;

use std::sync::Arc;
use std::time::{Duration, Instant};

use cudarc::driver::{CudaContext, result, sys};
pub(super) use state::Which;
#[doc(hidden)]
pub use state::bound;
pub use state::{DeviceState, DeviceTrouble, Devices, NvlinkError, NvmlAccess, ThrottleReason};

/// A question that NVML has not answered yet.
#[cfg(feature = "nvml")]
pub(super) type Question = worker::Question<'static>;

/// A question, in a build without NVML.
#[cfg(not(feature = "nvml"))]
pub(super) struct Question;

#[cfg(not(feature = "nvml"))]
impl Question {
    pub(super) fn ask(_: Which) -> Self {
        Self
    }

    pub(super) fn wait(self, _: Instant) -> Devices {
        Devices::default()
    }
}

/// Returns the PCI address of a context's device: `0000:3b:00.0`; `None` where CUDA does not report it.
#[doc(hidden)]
#[must_use]
pub fn bus_id(context: &CudaContext) -> Option<String> {
    use sys::CUdevice_attribute_enum as Attribute;
    let attribute = |attribute| {
        // SAFETY: the device is that of a context, which lives; the call reads a number.
        let value = unsafe { result::device::get_attribute(context.cu_device(), attribute) };
        u32::try_from(value.ok()?).ok()
    };
    Some(format!(
        "{:04x}:{:02x}:{:02x}.0",
        attribute(Attribute::CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID)?,
        attribute(Attribute::CU_DEVICE_ATTRIBUTE_PCI_BUS_ID)?,
        attribute(Attribute::CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID)?,
    ))
}

/// Watches the device of a context from now on. Called before a communicator is made on it; does not wait for NVML.
#[doc(hidden)]
pub fn watch(context: &Arc<CudaContext>) {
    #[cfg(feature = "nvml")]
    if let Some(bus_id) = bus_id(context) {
        worker::watch(bus_id);
    }
    #[cfg(not(feature = "nvml"))]
    let _ = context;
}

/// Returns what NVML reports about one device within `limit`, without the growth of counters.
#[doc(hidden)]
#[must_use]
pub fn of_device(bus_id: &str, limit: Duration) -> Devices {
    Question::ask(Which::One(bus_id.to_owned())).wait(Instant::now() + limit)
}
