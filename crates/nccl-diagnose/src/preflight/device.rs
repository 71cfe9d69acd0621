//! The device of a communicator's stream, its state according to NVML, and the device of this thread's context.

use std::sync::Arc;

use cudarc::driver::{CudaStream, result, sys};
use serde::{Deserialize, Serialize};
use std::time::Duration;

use crate::host_evidence::{self, Devices};

/// How long to wait for NVML to report the state of the device.
const LIMIT: Duration = Duration::from_secs(2);

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Device {
    pub(super) ordinal: u64,
    /// As `nvidia-smi -L` writes it.
    pub(super) uuid: String,
    pub(super) name: String,
    /// The device of the thread's current context, if it has one.
    pub(super) bound_to: Option<u64>,
    /// The number of devices that CUDA shows.
    pub(super) count: u64,
    /// The driver's version as it is usually written: `12.4`.
    pub(super) driver: String,
    /// NVML's report on the device.
    pub(super) nvml: Devices,
}

/// `None` where CUDA does not answer: the first use of the stream reports that.
pub(super) fn gather(stream: &Arc<CudaStream>) -> Option<Device> {
    let context = stream.context();
    let uuid = context.uuid().ok()?;
    let version = driver_version();
    Some(Device {
        ordinal: context.ordinal() as u64,
        uuid: written(uuid.bytes.map(|byte| byte.to_ne_bytes()[0])),
        name: context.name().unwrap_or_default(),
        bound_to: bound_to(),
        count: cudarc::driver::CudaContext::device_count()
            .ok()
            .and_then(|count| u64::try_from(count).ok())
            .unwrap_or_default(),
        driver: version.unwrap_or_default(),
        nvml: host_evidence::bus_id(context).map_or_else(Devices::default, |bus_id| {
            host_evidence::of_device(&bus_id, LIMIT)
        }),
    })
}

fn driver_version() -> Option<String> {
    let mut version = 0;
    // SAFETY: the pointer is valid for the call, which needs no context.
    let code = unsafe { sys::cuDriverGetVersion(&raw mut version) };
    code.result().ok()?;
    Some(format!("{}.{}", version / 1000, version % 1000 / 10))
}

fn bound_to() -> Option<u64> {
    result::ctx::get_current().ok()??;
    let mut device = 0;
    // SAFETY: the pointer is valid for the call, and this thread has a context.
    let code = unsafe { sys::cuCtxGetDevice(&raw mut device) };
    code.result().ok()?;
    u64::try_from(device).ok()
}

fn written(bytes: [u8; 16]) -> String {
    let mut text = String::from("GPU-");
    for (place, byte) in bytes.iter().enumerate() {
        if [4, 6, 8, 10].contains(&place) {
            text.push('-');
        }
        text.push_str(&format!("{byte:02x}"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_written_as_nvidia_smi_writes_it() {
        let bytes = std::array::from_fn(|place| place as u8);
        assert_eq!(written(bytes), "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f");
    }
}
