//! The pools of the devices of this process, and their windows: the device addresses that callers see.

use std::sync::OnceLock;

use super::address::{AddressRange, HUGE};
use super::pool::Pool;
use super::span::DeviceOrdinal;
use crate::forks;
use crate::result::CUresult;
use crate::settings::settings;

/// The addresses of all devices: one reservation, an equal power of two for each.
struct Windows {
    base: u64,
    shift: u32,
    _range: AddressRange,
}

impl Windows {
    fn get() -> Result<&'static Self, CUresult> {
        static WINDOWS: OnceLock<Option<Windows>> = OnceLock::new();
        WINDOWS
            .get_or_init(Self::reserve)
            .as_ref()
            .ok_or(CUresult::ERROR_OUT_OF_MEMORY)
    }

    fn reserve() -> Option<Self> {
        let settings = settings();
        let stride = settings.memory.next_power_of_two();
        let total = stride * u64::from(settings.devices);
        let refused = |error: &std::io::Error| {
            eprintln!(
                "nccl-emulator: the host refuses {} GiB of address space for {} devices ({error}): set NCCL_EMULATOR_MEMORY \
                 or NCCL_EMULATOR_DEVICES lower",
                total >> 30,
                settings.devices,
            );
        };
        let range = AddressRange::reserve(total, HUGE)
            .inspect_err(refused)
            .ok()?;
        Some(Self {
            base: range.address(),
            shift: stride.trailing_zeros(),
            _range: range,
        })
    }

    /// Returns the device whose window an address lies in, and the offset in the window.
    fn locate(&self, ptr: u64) -> Option<(usize, u64)> {
        let offset = ptr.wrapping_sub(self.base);
        let device = offset >> self.shift;
        let inside = device < u64::from(settings().devices);
        inside.then_some((device as usize, offset & ((1 << self.shift) - 1)))
    }
}

fn pools() -> &'static [OnceLock<Result<Pool, CUresult>>] {
    static POOLS: OnceLock<Vec<OnceLock<Result<Pool, CUresult>>>> = OnceLock::new();
    POOLS.get_or_init(|| (0..settings().devices).map(|_| OnceLock::new()).collect())
}

/// Returns the pool of a device of this process, made at its first use.
///
/// # Errors
/// `CUDA_ERROR_INVALID_DEVICE`; `CUDA_ERROR_OUT_OF_MEMORY` when the host refuses the memory;
/// `CUDA_ERROR_NOT_INITIALIZED` in a child, whose allocations would overwrite its parent's.
pub fn pool(device: DeviceOrdinal) -> Result<&'static Pool, CUresult> {
    if forks::is_child() {
        return Err(CUresult::ERROR_NOT_INITIALIZED);
    }
    let slot = usize::try_from(device)
        .ok()
        .and_then(|device| pools().get(device))
        .ok_or(CUresult::ERROR_INVALID_DEVICE)?;
    slot.get_or_init(|| {
        forks::watch();
        let windows = Windows::get()?;
        let window = windows.base + ((device as u64) << windows.shift);
        Pool::create(device, window, settings().memory)
    })
    .as_ref()
    .map_err(|&error| error)
}

/// Returns the pool that an address lies in, and the offset in the pool.
pub(super) fn pool_at(ptr: u64) -> Option<(&'static Pool, u64)> {
    if forks::is_child() {
        return None;
    }
    let (device, offset) = Windows::get().ok()?.locate(ptr)?;
    let pool = pools()[device].get()?.as_ref().ok()?;
    Some((pool, offset))
}

/// Whether an address lies in the window of a device.
pub(super) fn is_in_window(ptr: u64) -> bool {
    Windows::get().is_ok_and(|windows| windows.locate(ptr).is_some())
}
