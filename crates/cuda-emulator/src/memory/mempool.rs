//! Memory pools, from which `cuMemAllocAsync` allocates. Each device has a default pool, and programs make more with
//! `cuMemPoolCreate`. A pool caches no memory: freed memory returns to the device at once.

use std::ffi::c_void;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, OnceLock};

use super::pool::{Placement, Pool, Source};
use super::pools::pool;
use super::span::DeviceOrdinal;
use crate::registry::Registry;
use crate::result::CUresult;
use crate::settings::settings;
use crate::sync::{Mutex, MutexGuard};

/// A memory pool of a device.
#[derive(Debug)]
pub struct MemPool {
    device: DeviceOrdinal,
    /// The most bytes allocated from the pool at one time.
    limit: u64,
    /// Whether this is the device's default pool, which cannot be destroyed.
    default: bool,
    /// The handle; 0 until it is set.
    handle: OnceLock<usize>,
    /// `CU_MEMPOOL_ATTR_REUSE_*` and the release threshold: hints without effect, as there is no cache.
    hints: [AtomicU64; 4],
    /// Other devices that may use the pool's memory, with their `CUmemAccess_flags`.
    granted: Mutex<Vec<(DeviceOrdinal, u64)>>,
}

static POOLS: Registry<MemPool> = Registry::new(0x47);

/// Returns, for each device, its default pool and its current pool.
fn of_devices() -> &'static [Mutex<OfDevice>] {
    static ALL: OnceLock<Vec<Mutex<OfDevice>>> = OnceLock::new();
    ALL.get_or_init(|| (0..settings().devices).map(|_| Mutex::default()).collect())
}

#[derive(Default)]
struct OfDevice {
    default: Option<Arc<MemPool>>,
    current: Option<Arc<MemPool>>,
}

fn of_device(device: DeviceOrdinal) -> Result<MutexGuard<'static, OfDevice>, CUresult> {
    pool(device)?;
    usize::try_from(device)
        .ok()
        .and_then(|device| of_devices().get(device))
        .map(|mutex| mutex.lock())
        .ok_or(CUresult::ERROR_INVALID_DEVICE)
}

impl OfDevice {
    fn default(&mut self, device: DeviceOrdinal) -> Result<Arc<MemPool>, CUresult> {
        if let Some(pool) = &self.default {
            return Ok(Arc::clone(pool));
        }
        let made = MemPool::publish(device, u64::MAX, true)?;
        self.default = Some(Arc::clone(&made));
        Ok(made)
    }
}

impl MemPool {
    /// Creates a pool of a device, with at most `limit` bytes allocated at one time.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_DEVICE`; `CUDA_ERROR_OUT_OF_MEMORY` when there are no more handles.
    pub fn create(device: DeviceOrdinal, limit: u64) -> Result<Arc<Self>, CUresult> {
        pool(device)?;
        Self::publish(device, limit, false)
    }

    fn publish(device: DeviceOrdinal, limit: u64, default: bool) -> Result<Arc<Self>, CUresult> {
        let made = Arc::new(Self {
            device,
            limit,
            default,
            handle: OnceLock::new(),
            hints: [1, 1, 1, 0].map(AtomicU64::new),
            granted: Mutex::default(),
        });
        let handle = POOLS
            .insert(Arc::clone(&made))
            .ok_or(CUresult::ERROR_OUT_OF_MEMORY)?;
        let _ = made.handle.set(handle.addr());
        Ok(made)
    }

    /// Returns the pool of a handle.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE`.
    pub fn of(handle: *mut c_void) -> Result<Arc<Self>, CUresult> {
        POOLS.get(handle).ok_or(CUresult::ERROR_INVALID_VALUE)
    }

    /// Returns the default pool of a device.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_DEVICE`, `CUDA_ERROR_OUT_OF_MEMORY`.
    pub fn default_of(device: DeviceOrdinal) -> Result<Arc<Self>, CUresult> {
        of_device(device)?.default(device)
    }

    /// Returns the pool that `cuMemAllocAsync` takes memory of a device from.
    ///
    /// # Errors
    /// As [`MemPool::default_of`].
    pub fn current_of(device: DeviceOrdinal) -> Result<Arc<Self>, CUresult> {
        let mut of_device = of_device(device)?;
        match &of_device.current {
            Some(pool) => Ok(Arc::clone(pool)),
            None => of_device.default(device),
        }
    }

    /// Makes this the pool that `cuMemAllocAsync` takes memory of its device from.
    ///
    /// # Errors
    /// As [`MemPool::default_of`].
    pub fn make_current(self: &Arc<Self>) -> Result<(), CUresult> {
        of_device(self.device)?.current = Some(Arc::clone(self));
        Ok(())
    }

    /// Ends the handle. Memory allocated from the pool stays until it is freed.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` for a default pool.
    pub fn destroy(self: &Arc<Self>) -> Result<(), CUresult> {
        if self.default {
            return Err(CUresult::ERROR_INVALID_VALUE);
        }
        let mut of_device = of_device(self.device)?;
        if of_device
            .current
            .as_ref()
            .is_some_and(|current| Arc::ptr_eq(current, self))
        {
            of_device.current = None;
        }
        drop(of_device);
        drop(POOLS.remove(self.handle()));
        Ok(())
    }

    /// Returns the handle.
    pub fn handle(&self) -> *mut c_void {
        std::ptr::without_provenance_mut(self.handle.get().copied().unwrap_or(0))
    }

    /// Returns the ordinal of the pool's device.
    pub fn device(&self) -> DeviceOrdinal {
        self.device
    }

    /// Allocates memory of the pool for a context, as [`Pool::allocate`](Pool::allocate).
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY`, also beyond the pool's limit; `CUDA_ERROR_INVALID_VALUE` for size 0.
    pub fn allocate(&self, size: u64, owner: u32, pending: bool) -> Result<Placement, CUresult> {
        let source = Source {
            mempool: self.handle().addr(),
            limit: self.limit,
        };
        pool(self.device)?.allocate_from(size, owner, pending, source)
    }

    /// Returns the bytes allocated from the pool: now, and the peak.
    pub fn usage(&self) -> (u64, u64) {
        let usage = |pool: &Pool| pool.usage_of(self.handle().addr());
        pool(self.device).map_or((0, 0), usage)
    }

    /// Resets the peak usage to the present usage.
    pub fn reset_peak(&self) {
        if let Ok(pool) = pool(self.device) {
            pool.reset_peak_of(self.handle().addr());
        }
    }

    /// The hints.
    pub fn hints(&self) -> &[AtomicU64; 4] {
        &self.hints
    }

    /// Lets a device use memory of the pool.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_DEVICE` if the pool's own device is to lose access.
    pub fn grant(&self, device: DeviceOrdinal, flags: u64) -> Result<(), CUresult> {
        if device == self.device {
            return match flags {
                0 => Err(CUresult::ERROR_INVALID_DEVICE),
                _ => Ok(()),
            };
        }
        let mut granted = self.granted.lock();
        granted.retain(|&(other, _)| other != device);
        if flags != 0 {
            granted.push((device, flags));
        }
        Ok(())
    }

    /// Returns the `CUmemAccess_flags` of a device.
    pub fn access_of(&self, device: DeviceOrdinal) -> u64 {
        if device == self.device {
            return 3;
        }
        self.granted
            .lock()
            .iter()
            .find(|&&(other, _)| other == device)
            .map_or(0, |&(_, flags)| flags)
    }
}

/// Whether a device may use memory of the pool of `handle`.
pub(super) fn may_use(device: DeviceOrdinal, handle: usize) -> bool {
    MemPool::of(std::ptr::without_provenance_mut(handle))
        .is_ok_and(|pool| pool.access_of(device) != 0)
}
