//! Ranges of memory of any kind that work on a device uses.
//!
//! | address of | comes from | usable by |
//! |---|---|---|
//! | device memory | `cuMemAlloc`, `cuMemAllocAsync` | its device, and devices with peer access to it |
//! | another process's | `cuIpcOpenMemHandle` | the device of the context that opened it |
//! | mapped memory | `cuMemMap` | the devices that `cuMemSetAccess` named |
//! | pinned host memory | `cuMemHostAlloc`, `cuMemHostRegister` | all devices |
//!
//! [`locate`] finds the memory when a call names it and fixes the allocation; [`Place::view`] checks it again when the
//! work runs, [`Place::still_valid`] when it has run. [`access`] does the first two at once, for work that learns an
//! address only while it runs, and checks that the device may use the memory.

use std::sync::Arc;

use super::host::HostRange;
use super::ipc::OpenedRange;
use super::mapping::Mapping;
use super::pools::{pool, pool_at};
use super::reservation::Pieces;
use super::span::{DeviceOrdinal, Span};
use super::{host, ipc, mempool, peers, reservation};
use crate::violations::{Violation, ViolationKind};

/// A range of memory that CUDA knows, fixed to its allocation. It keeps the memory mapped.
#[derive(Debug, Clone)]
pub struct Place(Kind);

#[derive(Debug, Clone)]
enum Kind {
    /// No bytes at all.
    Nothing,
    /// In a pool of this process.
    Pool { mapping: Arc<Mapping>, span: Span },
    /// In memory of another process, opened here.
    Opened(OpenedRange),
    /// In a reservation.
    Mapped(Pieces),
    /// Pinned.
    Host(HostRange),
}

/// Returns the memory that `len` bytes at `address` lie in: device memory, or pinned host memory. Checks that it is not freed,
/// and the bounds. Does not check which device may use it: see [`access`].
///
/// # Errors
/// The violation, naming the allocation.
pub fn locate(address: u64, len: u64) -> Result<Place, Violation> {
    if len == 0 {
        return Ok(Place(Kind::Nothing));
    }
    let kind = if let Some((pool, offset)) = pool_at(address) {
        Kind::Pool {
            mapping: Arc::clone(pool.mapping()),
            span: pool.span(offset, len)?,
        }
    } else if let Some(range) = ipc::find(address, len) {
        range.view()?;
        Kind::Opened(range)
    } else if let Some(pieces) = reservation::find(address, len) {
        Kind::Mapped(pieces?)
    } else if let Some(range) = host::find(address as usize, len as usize) {
        Kind::Host(range?)
    } else {
        return Err(unknown(address, len));
    };
    Ok(Place(kind))
}

#[cold]
fn unknown(address: u64, len: u64) -> Violation {
    if let Some(violation) = reservation::past(address, len) {
        return violation;
    }
    let text = format!(
        "{len} bytes at 0x{address:x} are neither device memory nor pinned host memory (is it a pageable host pointer?)"
    );
    Violation::new(ViolationKind::UnknownAddress, None, text)
}

impl Place {
    /// Returns the address of the bytes in this process, if they may be used now. For an empty range, the address must
    /// not be read.
    ///
    /// # Errors
    /// The violation, naming the allocation.
    pub fn view(&self) -> Result<*mut u8, Violation> {
        match &self.0 {
            Kind::Nothing => Ok(std::ptr::dangling_mut()),
            Kind::Pool { mapping, span } => mapping.view(span),
            Kind::Opened(range) => range.view(),
            Kind::Mapped(pieces) => pieces.view(),
            Kind::Host(range) => range.view(),
        }
    }

    /// Checks that the bytes may still be used. Call after the work.
    ///
    /// # Errors
    /// The violation, naming the allocation.
    pub fn still_valid(&self) -> Result<(), Violation> {
        match &self.0 {
            Kind::Nothing => Ok(()),
            Kind::Pool { mapping, span } => mapping.still_valid(span),
            Kind::Opened(range) => range.still_valid(),
            Kind::Mapped(pieces) => pieces.still_valid(),
            Kind::Host(range) => range.view().map(drop),
        }
    }

    /// Reports to [`Mapping::watch`] that work uses `len` of the bytes, from byte `from` on. Call when the work begins, and
    /// when it has used them.
    pub fn used(&self, from: usize, len: usize) {
        if let Kind::Pool { mapping, span } = &self.0 {
            mapping.used(&Span {
                offset: span.offset + from as u64,
                len: len as u64,
                ..*span
            });
        }
    }

    /// As [`Place::used`], of rows of `width` bytes that begin `pitch` apart.
    pub fn rows_used(&self, (width, pitch): (usize, usize), rows: usize) {
        if let Kind::Pool { mapping, span } = &self.0
            && mapping.is_watched(span)
        {
            (0..rows).for_each(|row| self.used(row * pitch, width));
        }
    }

    /// Whether the host may use the bytes at their own address.
    pub fn is_host(&self) -> bool {
        match &self.0 {
            Kind::Nothing | Kind::Pool { .. } | Kind::Opened(_) => false,
            Kind::Mapped(pieces) => pieces.is_host(),
            Kind::Host(_) => true,
        }
    }

    /// Checks that kernels of `device` may use the bytes.
    ///
    /// # Errors
    /// A violation that names `device` and the memory's device.
    pub fn reachable_from(&self, device: DeviceOrdinal) -> Result<(), Violation> {
        match &self.0 {
            Kind::Nothing | Kind::Host(_) => Ok(()),
            Kind::Opened(range) => range.reachable_from(device),
            Kind::Mapped(pieces) => pieces.reachable_from(Some(device)),
            Kind::Pool { mapping, .. } if peers::may_use(device, mapping.device()) => Ok(()),
            Kind::Pool { mapping, span } if granted(device, mapping.device(), span) => Ok(()),
            Kind::Pool { mapping, span } => Err(Violation::new(
                ViolationKind::Misuse,
                Some(device),
                format!(
                    "{} bytes of allocation #{} are memory of device {}, which device {device} has no access to: \
                     neither cuCtxEnablePeerAccess nor cuMemPoolSetAccess was called for it",
                    span.len,
                    span.generation,
                    mapping.device(),
                ),
            )),
        }
    }

    /// Checks that copies may use the bytes: they need access by any device, but, unlike kernels, no peer access.
    ///
    /// # Errors
    /// A violation that names the memory.
    pub fn copyable(&self) -> Result<(), Violation> {
        match &self.0 {
            Kind::Mapped(pieces) => pieces.reachable_from(None),
            _ => Ok(()),
        }
    }
}

/// Whether the memory pool of an allocation grants access to a device.
fn granted(device: DeviceOrdinal, owner: DeviceOrdinal, span: &Span) -> bool {
    pool(owner)
        .ok()
        .and_then(|pool| pool.mempool_of(span))
        .is_some_and(|handle| mempool::may_use(device, handle))
}

/// A range that work on a device uses now.
#[derive(Debug)]
pub struct Access {
    /// The address of the bytes in this process. They stay mapped while this lives.
    pub pointer: *mut u8,
    len: usize,
    place: Place,
}

// SAFETY: the pointer is an address of memory that any thread may use, and stays mapped with the place.
unsafe impl Send for Access {}
// SAFETY: as above.
unsafe impl Sync for Access {}

impl Access {
    /// Checks that the range may still be used. Call after reading or writing the bytes.
    ///
    /// # Errors
    /// The violation, naming the allocation.
    pub fn still_valid(&self) -> Result<(), Violation> {
        self.place.used(0, self.len);
        self.place.still_valid()
    }
}

/// Returns `len` bytes at `address` for immediate use by a kernel of `device`: device memory, or pinned host memory.
///
/// # Errors
/// The violation, naming the allocation; for memory that `device` has no access to, it names both devices.
pub fn access(device: DeviceOrdinal, address: u64, len: u64) -> Result<Access, Violation> {
    let place = locate(address, len)?;
    place.reachable_from(device)?;
    let (pointer, len) = (place.view()?, len as usize);
    place.used(0, len);
    Ok(Access {
        pointer,
        len,
        place,
    })
}

#[cfg(test)]
mod tests {
    use super::super::{allocate, allocate_host, allow_peer, forbid_peer, free, free_host};
    use super::*;

    #[test]
    fn an_access_reaches_the_bytes_and_tells_of_a_free() {
        let start = allocate(0, 5000).unwrap();
        let range = access(0, start + 8, 16).unwrap();
        // SAFETY: only this test knows the memory.
        unsafe { range.pointer.write_bytes(7, 16) };
        range.still_valid().unwrap();
        free(start).unwrap();
        let kind = |bad: Violation| bad.kind();
        assert_eq!(
            range.still_valid().map_err(kind),
            Err(ViolationKind::UseAfterFree)
        );
        // SAFETY: mapped while `range` lives, freed or not.
        assert_eq!(unsafe { *range.pointer }, 7);
        assert!(access(0, start, 1).is_err());
    }

    #[test]
    fn memory_of_another_device_needs_peer_access() {
        let start = allocate(2, 100).unwrap();
        let refused = access(3, start, 1).unwrap_err().to_string();
        assert!(refused.contains("memory of device 2"), "{refused}");
        assert!(refused.contains("device 3 has no access"), "{refused}");
        allow_peer(3, 2);
        access(3, start, 1).unwrap();
        forbid_peer(3, 2);
        access(3, start, 1).unwrap_err();
        free(start).unwrap();
    }

    #[test]
    fn pinned_host_memory_is_used_at_its_own_address_until_it_is_freed() {
        let memory = allocate_host(100, 0, 0).unwrap();
        let address = memory.addr() as u64;
        let range = access(5, address + 1, 99).unwrap();
        assert_eq!(range.pointer.addr(), memory.addr() + 1);
        let beyond = access(5, address + 1, 100).unwrap_err();
        assert_eq!(beyond.kind(), ViolationKind::OutOfBounds);
        free_host(memory.addr()).unwrap();
        let late = range.still_valid().unwrap_err();
        assert_eq!(late.kind(), ViolationKind::UseAfterFree);
        // SAFETY: the memory stays while `range` lives.
        unsafe { range.pointer.write(1) };
    }

    #[test]
    fn pageable_host_memory_is_out_of_reach() {
        let host = 7_u8;
        let refused = access(0, (&raw const host).addr() as u64, 1).unwrap_err();
        assert_eq!(refused.kind(), ViolationKind::UnknownAddress);
    }
}
