//! Memory without an address: made by `cuMemCreate`, or exported by another process.
//!
//! Each such memory is a memfd of its own: a head that describes it, then the data, a huge page behind its beginning.
//! The file is sealed to its length, so an importing process can trust the size in the head.
//!
//! A handle counts its holders (`cuMemRetainAllocationHandle`, `cuMemRelease`). The memory lives as long as its handle
//! or a mapping of it, in this process or another.

use std::ffi::c_void;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::address::HUGE;
use super::mapping::{keeps_its_length, sealed_file};
use super::pool::Pool;
use super::pools::pool;
use super::span::DeviceOrdinal;
use crate::registry::Registry;
use crate::result::CUresult;
use crate::sync::{Mutex, MutexGuard};
use crate::visible;

/// "ncclEmuV".
const MAGIC: u64 = u64::from_le_bytes(*b"ncclEmuV");
/// Changes with the layout of [`Head`].
const LAYOUT: u32 = 1;
/// Bytes before the data.
pub(super) const HEAD: u64 = HUGE;
/// The unit of sizes, offsets and addresses of such memory.
pub const GRANULARITY: u64 = HUGE;

/// The place of memory, or of its user: a `CUmemLocation`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Location {
    /// A device.
    Device(DeviceOrdinal),
    /// The host.
    Host,
    /// A NUMA node of the host.
    HostNuma(i32),
    /// The NUMA node of the calling thread.
    HostNumaCurrent,
}

impl Location {
    /// Returns the location of a `CUmemLocationType` and its number.
    pub fn from_raw(kind: i32, id: i32) -> Option<Self> {
        match kind {
            1 => Some(Self::Device(id)),
            2 => Some(Self::Host),
            3 => Some(Self::HostNuma(id)),
            4 => Some(Self::HostNumaCurrent),
            _ => None,
        }
    }

    /// Returns the `CUmemLocationType` and the number.
    pub fn raw(self) -> (i32, i32) {
        match self {
            Self::Device(id) => (1, id),
            Self::Host => (2, 0),
            Self::HostNuma(id) => (3, id),
            Self::HostNumaCurrent => (4, 0),
        }
    }

    /// Whether the location is on the host.
    pub fn is_host(self) -> bool {
        !matches!(self, Self::Device(_))
    }
}

/// The first bytes of the memfd, as numbers of 32 bits.
struct Head {
    pid: u32,
    /// The `CUmemLocationType`. `id` is the number of the device on its host, or of the NUMA node.
    kind: i32,
    id: i32,
    handle_types: u32,
    size: u64,
}

const HEAD_WORDS: usize = 9;

impl Head {
    fn words(&self) -> [u32; HEAD_WORDS] {
        [
            MAGIC as u32,
            (MAGIC >> 32) as u32,
            LAYOUT,
            self.pid,
            self.kind.cast_unsigned(),
            self.id.cast_unsigned(),
            self.handle_types,
            self.size as u32,
            (self.size >> 32) as u32,
        ]
    }

    fn write(&self, file: &File) -> io::Result<()> {
        let bytes: Vec<u8> = self.words().iter().flat_map(|w| w.to_ne_bytes()).collect();
        file.write_all_at(&bytes, 0)
    }

    /// Reads and checks the head of an untrusted file.
    fn read(file: &File) -> Result<Self, &'static str> {
        if !keeps_its_length(file) {
            return Err("it is not a sealed memfd");
        }
        let mut bytes = [0; HEAD_WORDS * 4];
        file.read_exact_at(&mut bytes, 0)
            .map_err(|_| "it cannot be read")?;
        let word = |at: usize| {
            let at = at * 4;
            u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        let wide = |at: usize| u64::from(word(at)) | u64::from(word(at + 1)) << 32;
        if wide(0) != MAGIC {
            return Err("it does not begin as one");
        }
        if word(2) != LAYOUT {
            return Err("its head has another layout");
        }
        let head = Self {
            pid: word(3),
            kind: word(4).cast_signed(),
            id: word(5).cast_signed(),
            handle_types: word(6),
            size: wide(7),
        };
        let whole = head.size.checked_add(HEAD);
        let len = file.metadata().map_err(|_| "its length is unknown")?.len();
        if head.size == 0 || !head.size.is_multiple_of(GRANULARITY) || whole != Some(len) {
            return Err("its length is not what its head says");
        }
        Ok(head)
    }
}

/// See the module.
#[derive(Debug)]
pub struct Physical {
    number: u64,
    file: File,
    size: u64,
    location: Location,
    pid: u32,
    handle_types: u32,
    /// The pool of the device that the memory is charged to.
    charged: Option<&'static Pool>,
    handle: Mutex<Handle>,
}

/// The handle of the memory.
#[derive(Debug, Default)]
struct Handle {
    value: usize,
    holders: u32,
}

static HANDLES: Registry<Physical> = Registry::new(0x4D);

fn number() -> u64 {
    static NUMBER: AtomicU64 = AtomicU64::new(1);
    NUMBER.fetch_add(1, Ordering::Relaxed)
}

impl Physical {
    /// Creates memory, which reads as zero, and returns a handle with one holder.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` for a size that is no multiple of [`GRANULARITY`]; `CUDA_ERROR_INVALID_DEVICE`;
    /// `CUDA_ERROR_OUT_OF_MEMORY`.
    pub fn create(size: u64, location: Location, handle_types: u32) -> Result<u64, CUresult> {
        if size == 0 || !size.is_multiple_of(GRANULARITY) {
            return Err(CUresult::ERROR_INVALID_VALUE);
        }
        let charged = match location {
            Location::Device(device) => {
                let pool = pool(device)?;
                pool.charge(size)?;
                Some(pool)
            }
            _ => None,
        };
        let (kind, id) = location.raw();
        let head = Head {
            pid: std::process::id(),
            kind,
            id: match location {
                Location::Device(device) => visible::physical(device.cast_unsigned()).cast_signed(),
                _ => id,
            },
            handle_types,
            size,
        };
        let made = sealed_file(c"nccl-emulator:memory", HEAD + size)
            .and_then(|file| head.write(&file).map(|()| file));
        match made {
            Ok(file) => Self {
                number: number(),
                file,
                size,
                location,
                pid: head.pid,
                handle_types,
                charged,
                handle: Mutex::default(),
            }
            .publish(),
            Err(error) => {
                eprintln!(
                    "nccl-emulator: cuMemCreate returns CUDA_ERROR_OUT_OF_MEMORY: no file for {size} bytes of memory \
                     ({error}); each takes a descriptor: raise the limit with ulimit -n if there are none left"
                );
                if let Some(pool) = charged {
                    pool.discharge(size);
                }
                Err(CUresult::ERROR_OUT_OF_MEMORY)
            }
        }
    }

    /// Imports memory that this or another process exported, and returns a handle with one holder.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE`, and a line on stderr, for any other descriptor.
    pub fn import(fd: OwnedFd) -> Result<u64, CUresult> {
        let file = File::from(fd);
        let head = Head::read(&file).and_then(|head| {
            let location = Location::from_raw(head.kind, head.id).ok_or("its place is unknown")?;
            Ok((head, location))
        });
        let (head, location) = head.map_err(|reason| {
            eprintln!(
                "nccl-emulator: cuMemImportFromShareableHandle returns CUDA_ERROR_INVALID_VALUE: the descriptor is not \
                 of memory that this version of the emulator exported: {reason}"
            );
            CUresult::ERROR_INVALID_VALUE
        })?;
        let location = match location {
            // A device that is not visible to this process has no ordinal here.
            Location::Device(id) => {
                Location::Device(visible::ordinal(id.cast_unsigned()).unwrap_or(-1))
            }
            other => other,
        };
        Self {
            number: number(),
            file,
            size: head.size,
            location,
            pid: head.pid,
            handle_types: head.handle_types,
            charged: None,
            handle: Mutex::default(),
        }
        .publish()
    }

    fn publish(self) -> Result<u64, CUresult> {
        Arc::new(self).retain()
    }

    fn handle(&self) -> MutexGuard<'_, Handle> {
        self.handle.lock()
    }

    /// Returns the memory of a handle.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` for a handle without holders.
    pub fn of(handle: u64) -> Result<Arc<Self>, CUresult> {
        let handle: *mut c_void = std::ptr::without_provenance_mut(handle as usize);
        HANDLES.get(handle).ok_or(CUresult::ERROR_INVALID_VALUE)
    }

    /// Adds a holder and returns the handle: a new handle if all holders had released the former one.
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY` when there are no more handles.
    pub fn retain(self: &Arc<Self>) -> Result<u64, CUresult> {
        let mut handle = self.handle();
        if handle.holders == 0 {
            let value = HANDLES.insert(Arc::clone(self));
            handle.value = value.ok_or(CUresult::ERROR_OUT_OF_MEMORY)?.addr();
        }
        handle.holders += 1;
        Ok(handle.value as u64)
    }

    /// Removes a holder of the handle. The handle ends with its last holder.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` for a handle without holders.
    pub fn release(handle: u64) -> Result<(), CUresult> {
        let memory = Self::of(handle)?;
        let mut state = memory.handle();
        // Another thread may have released the handle meanwhile.
        if state.value as u64 != handle || state.holders == 0 {
            return Err(CUresult::ERROR_INVALID_VALUE);
        }
        state.holders -= 1;
        let ended = (state.holders == 0)
            .then(|| HANDLES.remove(std::ptr::without_provenance_mut(state.value)));
        drop(state);
        drop(ended);
        Ok(())
    }

    /// Returns the descriptor for another process to import.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    pub(super) fn file(&self) -> &File {
        &self.file
    }

    /// Returns the size in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Returns the location. A device that is not visible to this process is number -1.
    pub fn location(&self) -> Location {
        self.location
    }

    /// Returns the `CUmemAllocationHandleType`s requested at the creation.
    pub fn handle_types(&self) -> u32 {
        self.handle_types
    }

    /// Returns the number of the memory, unique in this process.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Names the memory for messages: "memory #3 of cuMemCreate (2097152 bytes on GPU 0)".
    pub(super) fn name(&self) -> String {
        let place = match self.location {
            Location::Device(device) => format!("on GPU {device}"),
            _ => "of the host".to_owned(),
        };
        let from = match self.pid == std::process::id() {
            true => String::new(),
            false => format!(" of process {}", self.pid),
        };
        format!(
            "memory #{} of cuMemCreate ({} bytes {place}{from})",
            self.number, self.size
        )
    }
}

impl Drop for Physical {
    fn drop(&mut self) {
        if let Some(pool) = self.charged {
            pool.discharge(self.size);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_counts_against_its_device_while_a_holder_is_left() {
        let pool = pool(7).unwrap();
        let before = pool.usage().0;
        let handle = Physical::create(4 << 20, Location::Device(7), 1).unwrap();
        assert_eq!(pool.usage().0, before - (4 << 20));
        let again = Physical::of(handle).unwrap().retain().unwrap();
        assert_eq!(again, handle, "one handle, two holders");
        Physical::release(handle).unwrap();
        assert_eq!(pool.usage().0, before - (4 << 20));
        Physical::release(handle).unwrap();
        assert_eq!(pool.usage().0, before);
        assert_eq!(
            Physical::release(handle),
            Err(CUresult::ERROR_INVALID_VALUE)
        );
        let all = Physical::create(pool.usage().1 + GRANULARITY, Location::Device(7), 0);
        assert_eq!(all, Err(CUresult::ERROR_OUT_OF_MEMORY));
    }

    #[test]
    fn only_what_was_exported_is_imported() {
        let handle = Physical::create(GRANULARITY, Location::HostNuma(0), 1).unwrap();
        let memory = Physical::of(handle).unwrap();
        let copy = Physical::import(memory.fd().try_clone_to_owned().unwrap()).unwrap();
        let imported = Physical::of(copy).unwrap();
        assert_eq!(imported.location(), Location::HostNuma(0));
        assert_eq!((imported.size(), imported.handle_types()), (GRANULARITY, 1));
        Physical::release(copy).unwrap();
        Physical::release(handle).unwrap();
        let null = OwnedFd::from(File::open("/dev/null").unwrap());
        assert_eq!(Physical::import(null), Err(CUresult::ERROR_INVALID_VALUE));
        let pool = pool(0).unwrap().fd().try_clone_to_owned().unwrap();
        assert_eq!(Physical::import(pool), Err(CUresult::ERROR_INVALID_VALUE));
        let other = sealed_file(c"other", HEAD + GRANULARITY).unwrap();
        assert_eq!(
            Physical::import(other.into()),
            Err(CUresult::ERROR_INVALID_VALUE)
        );
    }
}
