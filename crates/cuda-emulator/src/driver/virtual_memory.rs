//! Virtual memory management: address reservations, memory, and mappings between them (`cuMemAddressReserve`, `cuMemCreate`,
//! `cuMemMap`). Memory is exported as a file descriptor.

use std::ffi::{c_int, c_uint, c_ulonglong, c_void};
use std::os::fd::{FromRawFd, IntoRawFd, OwnedFd};

use super::call::{enter, store};
use super::refused;
use crate::memory::{self, GRANULARITY, Location, Physical};
use crate::result::CUresult;
use crate::visible;
use stand_in_object::Symbol;

pub(super) fn symbols() -> Vec<Symbol> {
    vec![
        (c"cuMemAddressReserve", address_reserve as *const c_void),
        (c"cuMemAddressFree", address_free as *const c_void),
        (c"cuMemCreate", create as *const c_void),
        (c"cuMemRelease", release as *const c_void),
        (
            c"cuMemRetainAllocationHandle",
            retain_allocation_handle as *const c_void,
        ),
        (c"cuMemMap", map as *const c_void),
        (c"cuMemUnmap", unmap as *const c_void),
        (c"cuMemSetAccess", set_access as *const c_void),
        (c"cuMemGetAccess", get_access as *const c_void),
        (
            c"cuMemExportToShareableHandle",
            export_to_shareable_handle as *const c_void,
        ),
        (
            c"cuMemImportFromShareableHandle",
            import_from_shareable_handle as *const c_void,
        ),
        (
            c"cuMemGetAllocationGranularity",
            get_allocation_granularity as *const c_void,
        ),
        (
            c"cuMemGetAllocationPropertiesFromHandle",
            get_allocation_properties as *const c_void,
        ),
    ]
}

/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
pub(super) const DESCRIPTOR: u32 = 1;
const NO_HANDLES: &str = "memory is shared as a descriptor (CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR), and not as a fabric or \
    Windows handle";

/// `CUmemLocation`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct RawLocation {
    pub(super) kind: c_int,
    pub(super) id: c_int,
}

impl RawLocation {
    /// Returns the location, which must be a device of this process or the host.
    pub(super) fn known(self) -> Result<Location, CUresult> {
        match Location::from_raw(self.kind, self.id).ok_or(CUresult::ERROR_INVALID_VALUE)? {
            Location::Device(device)
                if !u32::try_from(device).is_ok_and(|device| device < visible::count()) =>
            {
                Err(CUresult::ERROR_INVALID_DEVICE)
            }
            Location::HostNuma(node) if node != 0 => Err(CUresult::ERROR_INVALID_VALUE),
            location => Ok(location),
        }
    }
}

/// `CUmemAllocationProp`.
#[derive(Clone, Copy)]
#[repr(C)]
struct Properties {
    kind: c_int,
    handle_types: c_uint,
    location: RawLocation,
    windows: *mut c_void,
    /// Compression, direct RDMA, usage, reserved: hints without effect.
    flags: [u8; 8],
}

/// `CU_MEM_ALLOCATION_TYPE_PINNED`, the only supported type.
pub(super) const PINNED: c_int = 1;

/// `CUmemAccessDesc`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct Grant {
    pub(super) location: RawLocation,
    pub(super) flags: c_uint,
}

impl Properties {
    /// # Safety
    /// `given` is null or points to properties.
    unsafe fn known(given: *const Self) -> Result<(Location, u32), CUresult> {
        // SAFETY: the caller promises it.
        let given = unsafe { given.as_ref() }.ok_or(CUresult::ERROR_INVALID_VALUE)?;
        if given.kind != PINNED {
            return Err(CUresult::ERROR_INVALID_VALUE);
        }
        if given.handle_types & !DESCRIPTOR != 0 {
            refused::say("cuMemCreate", NO_HANDLES);
            return Err(CUresult::ERROR_NOT_SUPPORTED);
        }
        Ok((given.location.known()?, given.handle_types))
    }
}

unsafe extern "C" fn address_reserve(
    place: *mut u64,
    len: usize,
    align: usize,
    _wish: u64,
    flags: c_ulonglong,
) -> CUresult {
    enter("cuMemAddressReserve", || {
        if place.is_null() || flags != 0 {
            return Err(CUresult::ERROR_INVALID_VALUE);
        }
        // SAFETY: not null, and the caller passes a place for the address.
        unsafe { store(place, memory::reserve(len as u64, align as u64)?) }
    })
}

unsafe extern "C" fn address_free(address: u64, len: usize) -> CUresult {
    enter("cuMemAddressFree", || {
        memory::unreserve(address, len as u64)
    })
}

unsafe extern "C" fn create(
    place: *mut u64,
    size: usize,
    properties: *const Properties,
    flags: c_ulonglong,
) -> CUresult {
    enter("cuMemCreate", || {
        if place.is_null() || flags != 0 {
            return Err(CUresult::ERROR_INVALID_VALUE);
        }
        // SAFETY: the caller passes null or properties.
        let (location, handle_types) = unsafe { Properties::known(properties) }?;
        let handle = Physical::create(size as u64, location, handle_types)?;
        // SAFETY: not null, and the caller passes a place for the handle.
        unsafe { store(place, handle) }
    })
}

unsafe extern "C" fn release(handle: u64) -> CUresult {
    enter("cuMemRelease", || Physical::release(handle))
}

unsafe extern "C" fn retain_allocation_handle(place: *mut u64, address: *mut c_void) -> CUresult {
    enter("cuMemRetainAllocationHandle", || {
        if place.is_null() {
            return Err(CUresult::ERROR_INVALID_VALUE);
        }
        let piece = memory::piece_at(address.addr() as u64).ok_or(CUresult::ERROR_INVALID_VALUE)?;
        // SAFETY: not null, and the caller passes a place for the handle.
        unsafe { store(place, piece.memory().retain()?) }
    })
}

unsafe extern "C" fn map(
    address: u64,
    len: usize,
    from: usize,
    handle: u64,
    flags: c_ulonglong,
) -> CUresult {
    enter("cuMemMap", || {
        if flags != 0 {
            return Err(CUresult::ERROR_INVALID_VALUE);
        }
        memory::map(address, len as u64, &Physical::of(handle)?, from as u64)
    })
}

unsafe extern "C" fn unmap(address: u64, len: usize) -> CUresult {
    enter("cuMemUnmap", || memory::unmap(address, len as u64))
}

/// Reads the access flags for each location.
///
/// # Safety
/// `grants` is null or points to `count` descriptions.
pub(super) unsafe fn known_grants(
    grants: *const Grant,
    count: usize,
) -> Result<Vec<(Location, u64)>, CUresult> {
    if grants.is_null() || count == 0 {
        return Err(CUresult::ERROR_INVALID_VALUE);
    }
    // SAFETY: not null, so the caller promises as many.
    let grants = unsafe { std::slice::from_raw_parts(grants, count) };
    grants
        .iter()
        .map(|grant| Ok((grant.location.known()?, u64::from(grant.flags))))
        .collect()
}

unsafe extern "C" fn set_access(
    address: u64,
    len: usize,
    grants: *const Grant,
    count: usize,
) -> CUresult {
    enter("cuMemSetAccess", || {
        // SAFETY: the caller passes null or `count` descriptions.
        let grants = unsafe { known_grants(grants, count) }?;
        memory::set_access(address, len as u64, &grants)
    })
}

unsafe extern "C" fn get_access(
    place: *mut c_ulonglong,
    location: *const RawLocation,
    address: u64,
) -> CUresult {
    enter("cuMemGetAccess", || {
        // SAFETY: the caller passes null or a location.
        let location = unsafe { location.as_ref() }.ok_or(CUresult::ERROR_INVALID_VALUE)?;
        let piece = memory::piece_at(address).ok_or(CUresult::ERROR_INVALID_VALUE)?;
        // SAFETY: the caller passes null or a place for the flags.
        unsafe { store(place, piece.access_of(location.known()?)) }
    })
}

unsafe extern "C" fn export_to_shareable_handle(
    place: *mut c_int,
    handle: u64,
    kind: c_uint,
    flags: c_ulonglong,
) -> CUresult {
    enter("cuMemExportToShareableHandle", || {
        if kind != DESCRIPTOR {
            refused::say("cuMemExportToShareableHandle", NO_HANDLES);
            return Err(CUresult::ERROR_NOT_SUPPORTED);
        }
        let memory = Physical::of(handle)?;
        if place.is_null() || flags != 0 || memory.handle_types() & DESCRIPTOR == 0 {
            return Err(CUresult::ERROR_INVALID_VALUE);
        }
        let fd = memory
            .fd()
            .try_clone_to_owned()
            .map_err(|_| CUresult::ERROR_OPERATING_SYSTEM)?;
        // SAFETY: not null, and the caller passes a place for the descriptor, which is then its own.
        unsafe { store(place, fd.into_raw_fd()) }
    })
}

unsafe extern "C" fn import_from_shareable_handle(
    place: *mut u64,
    descriptor: *mut c_void,
    kind: c_uint,
) -> CUresult {
    enter("cuMemImportFromShareableHandle", || {
        if kind != DESCRIPTOR {
            refused::say("cuMemImportFromShareableHandle", NO_HANDLES);
            return Err(CUresult::ERROR_NOT_SUPPORTED);
        }
        let given =
            c_int::try_from(descriptor.addr()).map_err(|_| CUresult::ERROR_INVALID_VALUE)?;
        if place.is_null() {
            return Err(CUresult::ERROR_INVALID_VALUE);
        }
        // SAFETY: a plain request, also valid for a number that is not a descriptor.
        let own = unsafe { libc::fcntl(given, libc::F_DUPFD_CLOEXEC, 0) };
        if own < 0 {
            return Err(CUresult::ERROR_INVALID_VALUE);
        }
        // SAFETY: the descriptor was just made and has no other owner.
        let own = unsafe { OwnedFd::from_raw_fd(own) };
        // SAFETY: not null, and the caller passes a place for the handle.
        unsafe { store(place, Physical::import(own)?) }
    })
}

unsafe extern "C" fn get_allocation_granularity(
    place: *mut usize,
    properties: *const Properties,
    option: c_uint,
) -> CUresult {
    enter("cuMemGetAllocationGranularity", || {
        // SAFETY: the caller passes null or properties.
        unsafe { Properties::known(properties) }?;
        // The minimum and the recommended granularity are the same.
        if option > 1 {
            return Err(CUresult::ERROR_INVALID_VALUE);
        }
        // SAFETY: the caller passes null or a place for the number.
        unsafe { store(place, GRANULARITY as usize) }
    })
}

unsafe extern "C" fn get_allocation_properties(place: *mut Properties, handle: u64) -> CUresult {
    enter("cuMemGetAllocationPropertiesFromHandle", || {
        let memory = Physical::of(handle)?;
        let (kind, id) = memory.location().raw();
        let properties = Properties {
            kind: PINNED,
            handle_types: memory.handle_types(),
            location: RawLocation { kind, id },
            windows: std::ptr::null_mut(),
            flags: [0; 8],
        };
        // SAFETY: the caller passes null or a place for properties.
        unsafe { store(place, properties) }
    })
}
