//! Address reservations of `cuMemAddressReserve`, and the memory that `cuMemMap` maps there.
//!
//! A reservation is two ranges of this process's address space of the same length. The *window* has the addresses that
//! callers see. The *shadow* has the memory, mapped at the same offsets, for work on a device: one contiguous range,
//! even if it was mapped piece by piece. Memory of the host is mapped in the window as well, where the host may use it
//! once `cuMemSetAccess` permits.
//!
//! An unmapped piece stays in the shadow while some work still uses it; [`Pieces::still_valid`] then reports the
//! violation.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::address::AddressRange;
use super::physical::{GRANULARITY, HEAD, Location, Physical};
use super::span::DeviceOrdinal;
use crate::result::CUresult;
use crate::sync::{Mutex, RwLock, RwLockReadGuard, RwLockWriteGuard};
use crate::violations::{Violation, ViolationKind};

/// All reservations by their first address.
static RESERVATIONS: RwLock<BTreeMap<u64, Arc<Reservation>>> = RwLock::new(BTreeMap::new());

/// See the module.
#[derive(Debug)]
struct Reservation {
    window: AddressRange,
    shadow: AddressRange,
    /// By offset.
    pieces: RwLock<BTreeMap<u64, Arc<Piece>>>,
}

/// A mapping of memory in a reservation.
#[derive(Debug)]
pub struct Piece {
    reservation: Arc<Reservation>,
    offset: u64,
    len: u64,
    memory: Arc<Physical>,
    granted: Mutex<Grants>,
    mapped: AtomicBool,
}

/// The `CUmemAccess_flags` of a piece, for each device and the host.
#[derive(Debug, Default)]
struct Grants {
    devices: Vec<(DeviceOrdinal, u64)>,
    host: u64,
}

/// A former mapping, for messages.
struct Past {
    start: u64,
    len: u64,
    name: String,
}

/// The most recent former mappings, oldest first.
static PAST: Mutex<VecDeque<Past>> = Mutex::new(VecDeque::new());
const REMEMBERED: usize = 1024;

fn reservations() -> RwLockReadGuard<'static, BTreeMap<u64, Arc<Reservation>>> {
    RESERVATIONS.read()
}

fn at(address: u64) -> Option<(Arc<Reservation>, u64)> {
    let reservations = reservations();
    let (&start, reservation) = reservations.range(..=address).next_back()?;
    let offset = address - start;
    (offset < reservation.window.len()).then(|| (Arc::clone(reservation), offset))
}

/// Reserves addresses.
///
/// # Errors
/// `CUDA_ERROR_INVALID_VALUE` if the length is zero or no multiple of [`GRANULARITY`], or the alignment is no power of
/// two; `CUDA_ERROR_OUT_OF_MEMORY`.
pub fn reserve(len: u64, align: u64) -> Result<u64, CUresult> {
    let align = align.max(GRANULARITY);
    if len == 0 || !len.is_multiple_of(GRANULARITY) || !align.is_power_of_two() {
        return Err(CUresult::ERROR_INVALID_VALUE);
    }
    let range = |_| CUresult::ERROR_OUT_OF_MEMORY;
    let reservation = Reservation {
        window: AddressRange::reserve(len, align).map_err(range)?,
        shadow: AddressRange::reserve(len, GRANULARITY).map_err(range)?,
        pieces: RwLock::default(),
    };
    let address = reservation.window.address();
    RESERVATIONS.write().insert(address, Arc::new(reservation));
    Ok(address)
}

/// Ends a reservation without mappings.
///
/// # Errors
/// `CUDA_ERROR_INVALID_VALUE` if the range is not a whole reservation, or has mappings.
pub fn unreserve(address: u64, len: u64) -> Result<(), CUresult> {
    let mut reservations = RESERVATIONS.write();
    let whole = reservations
        .get(&address)
        .is_some_and(|found| found.window.len() == len && found.read().is_empty());
    if !whole {
        return Err(CUresult::ERROR_INVALID_VALUE);
    }
    let ended = reservations.remove(&address);
    drop(reservations);
    drop(ended);
    Ok(())
}

/// Maps `len` bytes of `memory`, from offset `from` on, at an address. No device may use them before [`set_access`].
///
/// # Errors
/// `CUDA_ERROR_INVALID_VALUE` for a number that is no multiple of [`GRANULARITY`], and for a range beyond the memory or
/// the reservation or with mappings; `CUDA_ERROR_OUT_OF_MEMORY`.
pub fn map(address: u64, len: u64, memory: &Arc<Physical>, from: u64) -> Result<(), CUresult> {
    let (reservation, offset) = at(address).ok_or(CUresult::ERROR_INVALID_VALUE)?;
    let whole = [offset, len, from]
        .iter()
        .all(|number| number.is_multiple_of(GRANULARITY));
    let fits = |start: u64, all: u64| start.checked_add(len).is_some_and(|end| end <= all);
    if len == 0 || !whole || !fits(from, memory.size()) || !fits(offset, reservation.window.len()) {
        return Err(CUresult::ERROR_INVALID_VALUE);
    }
    let mut pieces = reservation.write();
    if overlapping(&pieces, offset, len) {
        return Err(CUresult::ERROR_INVALID_VALUE);
    }
    let (file, start) = (memory.file(), HEAD + from);
    let mapped = reservation.shadow.map(offset, len, file, start, true);
    let mapped = match memory.location().is_host() {
        true => mapped.and_then(|()| reservation.window.map(offset, len, file, start, false)),
        false => mapped,
    };
    mapped.map_err(|error| {
        eprintln!("nccl-emulator: cuMemMap returns CUDA_ERROR_OUT_OF_MEMORY: {error}");
        CUresult::ERROR_OUT_OF_MEMORY
    })?;
    let piece = Piece {
        reservation: Arc::clone(&reservation),
        offset,
        len,
        memory: Arc::clone(memory),
        granted: Mutex::default(),
        mapped: AtomicBool::new(true),
    };
    pieces.insert(offset, Arc::new(piece));
    Ok(())
}

/// Whether a range overlaps a piece.
fn overlapping(pieces: &BTreeMap<u64, Arc<Piece>>, offset: u64, len: u64) -> bool {
    let before = pieces.range(..offset + len).next_back();
    before.is_some_and(|(&start, piece)| start + piece.len > offset)
}

/// Returns the pieces of a range, if it consists of whole pieces.
fn whole(
    pieces: &BTreeMap<u64, Arc<Piece>>,
    offset: u64,
    len: u64,
) -> Result<Vec<Arc<Piece>>, CUresult> {
    let end = offset
        .checked_add(len)
        .ok_or(CUresult::ERROR_INVALID_VALUE)?;
    let mut next = offset;
    let mut found = Vec::new();
    for (&start, piece) in pieces.range(offset..end) {
        if start == next {
            next += piece.len;
            found.push(Arc::clone(piece));
        }
    }
    match next == end && len > 0 {
        true => Ok(found),
        false => Err(CUresult::ERROR_INVALID_VALUE),
    }
}

/// Ends the mappings of a range.
///
/// # Errors
/// `CUDA_ERROR_INVALID_VALUE` if the range does not consist of whole mappings.
pub fn unmap(address: u64, len: u64) -> Result<(), CUresult> {
    let (reservation, offset) = at(address).ok_or(CUresult::ERROR_INVALID_VALUE)?;
    let mut pieces = reservation.write();
    let ended = whole(&pieces, offset, len)?;
    for piece in &ended {
        piece.mapped.store(false, Ordering::Release);
        pieces.remove(&piece.offset);
    }
    drop(pieces);
    let mut past = PAST.lock();
    for piece in &ended {
        past.push_back(Past {
            start: piece.address(),
            len: piece.len,
            name: piece.memory.name(),
        });
    }
    while past.len() > REMEMBERED {
        past.pop_front();
    }
    Ok(())
}

/// Sets the access to a range: `CUmemAccess_flags` for each location.
///
/// # Errors
/// `CUDA_ERROR_INVALID_VALUE` if the range does not consist of whole mappings, or for invalid flags;
/// `CUDA_ERROR_NOT_SUPPORTED` for access of the host to memory of a device.
pub fn set_access(address: u64, len: u64, grants: &[(Location, u64)]) -> Result<(), CUresult> {
    let (reservation, offset) = at(address).ok_or(CUresult::ERROR_INVALID_VALUE)?;
    let pieces = whole(&reservation.read(), offset, len)?;
    for &(location, flags) in grants {
        if !matches!(flags, 0 | 1 | 3) {
            return Err(CUresult::ERROR_INVALID_VALUE);
        }
        let host_only = pieces.iter().all(|p| p.memory.location().is_host());
        if location.is_host() && !host_only {
            return Err(CUresult::ERROR_NOT_SUPPORTED);
        }
        for piece in &pieces {
            piece.grant(location, flags)?;
        }
    }
    Ok(())
}

/// Returns the mapping that an address lies in.
pub fn piece_at(address: u64) -> Option<Arc<Piece>> {
    let (reservation, offset) = at(address)?;
    let pieces = reservation.read();
    let (&start, piece) = pieces.range(..=offset).next_back()?;
    (offset - start < piece.len).then(|| Arc::clone(piece))
}

/// Whether an address lies in a reservation, and not in memory of the host.
pub(super) fn is_device_address(address: u64) -> bool {
    at(address).is_some()
        && !piece_at(address).is_some_and(|piece| piece.memory.location().is_host())
}

impl Reservation {
    fn read(&self) -> RwLockReadGuard<'_, BTreeMap<u64, Arc<Piece>>> {
        self.pieces.read()
    }

    fn write(&self) -> RwLockWriteGuard<'_, BTreeMap<u64, Arc<Piece>>> {
        self.pieces.write()
    }
}

impl Piece {
    fn grants(&self) -> crate::sync::MutexGuard<'_, Grants> {
        self.granted.lock()
    }

    fn grant(&self, location: Location, flags: u64) -> Result<(), CUresult> {
        let mut grants = self.grants();
        let Location::Device(device) = location else {
            let protection = match flags {
                0 => libc::PROT_NONE,
                1 => libc::PROT_READ,
                _ => libc::PROT_READ | libc::PROT_WRITE,
            };
            self.reservation
                .window
                .protect(self.offset, self.len, protection)
                .map_err(|_| CUresult::ERROR_OUT_OF_MEMORY)?;
            grants.host = flags;
            return Ok(());
        };
        grants.devices.retain(|&(other, _)| other != device);
        if flags != 0 {
            grants.devices.push((device, flags));
        }
        Ok(())
    }

    /// Returns the `CUmemAccess_flags` of a location.
    pub fn access_of(&self, location: Location) -> u64 {
        let grants = self.grants();
        match location {
            Location::Device(device) => grants
                .devices
                .iter()
                .find(|&&(other, _)| other == device)
                .map_or(0, |&(_, flags)| flags),
            _ => grants.host,
        }
    }

    /// Returns the first address.
    pub fn address(&self) -> u64 {
        self.reservation.window.address() + self.offset
    }

    /// Returns the size in bytes.
    pub fn size(&self) -> u64 {
        self.len
    }

    /// Returns the mapped memory.
    pub fn memory(&self) -> &Arc<Physical> {
        &self.memory
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        let pieces = self.reservation.write();
        // A newer mapping has replaced this one.
        if !overlapping(&pieces, self.offset, self.len) {
            // On failure the memory stays mapped, and unused.
            let _ = self.reservation.shadow.clear(self.offset, self.len);
            if self.memory.location().is_host() {
                let _ = self.reservation.window.clear(self.offset, self.len);
            }
        }
    }
}

/// A range of one or several adjacent mappings.
#[derive(Debug, Clone)]
pub(super) struct Pieces {
    first: Arc<Piece>,
    others: Vec<Arc<Piece>>,
    /// The offset from the start of the reservation.
    offset: u64,
    len: u64,
}

/// Returns the mapped range at an address, if the address lies in a reservation.
pub(super) fn find(address: u64, len: u64) -> Option<Result<Pieces, Violation>> {
    let (reservation, offset) = at(address)?;
    let pieces = reservation.read();
    let covering = |offset: u64| {
        let (&start, piece) = pieces.range(..=offset).next_back()?;
        (offset - start < piece.len).then_some((start + piece.len, piece))
    };
    let Some((mut end, first)) = covering(offset) else {
        drop(pieces);
        return Some(Err(
            past(address, len).unwrap_or_else(|| unmapped(address, len))
        ));
    };
    let mut others = Vec::new();
    // An overflow is beyond the last piece, too.
    let wanted = offset.saturating_add(len);
    while end < wanted {
        let Some((next, piece)) = covering(end) else {
            return Some(Err(Violation::new(
                ViolationKind::OutOfBounds,
                device_of(first),
                format!(
                    "{len} bytes at offset {} of a mapping of {} were used: {} bytes past what is mapped",
                    offset - first.offset,
                    first.memory.name(),
                    wanted - end
                ),
            )));
        };
        others.push(Arc::clone(piece));
        end = next;
    }
    Some(Ok(Pieces {
        first: Arc::clone(first),
        others,
        offset,
        len,
    }))
}

fn device_of(piece: &Piece) -> Option<i32> {
    match piece.memory.location() {
        Location::Device(device) => Some(device),
        _ => None,
    }
}

#[cold]
fn unmapped(address: u64, len: u64) -> Violation {
    let text = format!(
        "{len} bytes at 0x{address:x} were used, which cuMemAddressReserve gave out: nothing is mapped there"
    );
    Violation::new(ViolationKind::UnknownAddress, None, text)
}

/// Returns the violation of an access to a former mapping, if the address lies in one.
#[cold]
pub(super) fn past(address: u64, len: u64) -> Option<Violation> {
    let past = PAST.lock();
    let latest = past
        .iter()
        .rev()
        .find(|past| address.wrapping_sub(past.start) < past.len)?;
    let text = format!(
        "{len} bytes at offset {} of a mapping of {} were used, but it was unmapped",
        address - latest.start,
        latest.name
    );
    Some(Violation::new(ViolationKind::UseAfterFree, None, text))
}

impl Pieces {
    fn all(&self) -> impl Iterator<Item = &Arc<Piece>> {
        std::iter::once(&self.first).chain(&self.others)
    }

    /// Returns the address of the bytes in this process, if they are still mapped.
    pub(super) fn view(&self) -> Result<*mut u8, Violation> {
        self.still_valid()?;
        let shadow = self.first.reservation.shadow.start();
        Ok(shadow.wrapping_add(self.offset as usize))
    }

    /// Checks that all pieces are still mapped.
    pub(super) fn still_valid(&self) -> Result<(), Violation> {
        match self.all().find(|p| !p.mapped.load(Ordering::Acquire)) {
            None => Ok(()),
            Some(piece) => Err(self.unmapped(piece)),
        }
    }

    #[cold]
    fn unmapped(&self, piece: &Piece) -> Violation {
        let text = format!(
            "{} bytes at 0x{:x} were used, but the mapping of {} there was unmapped",
            self.len,
            self.first.reservation.window.address() + self.offset,
            piece.memory.name(),
        );
        Violation::new(ViolationKind::UseAfterFree, device_of(piece), text)
    }

    /// Whether the host may use the bytes at their own address.
    pub(super) fn is_host(&self) -> bool {
        self.all().all(|piece| piece.memory.location().is_host())
    }

    /// Checks that kernels of a device, or with `None` of any device, may use the bytes.
    pub(super) fn reachable_from(&self, device: Option<DeviceOrdinal>) -> Result<(), Violation> {
        let granted = |piece: &&Arc<Piece>| match device {
            Some(device) => piece.access_of(Location::Device(device)) != 0,
            None => {
                let grants = piece.grants();
                grants.host != 0 || !grants.devices.is_empty()
            }
        };
        let Some(piece) = self.all().find(|piece| !granted(piece)) else {
            return Ok(());
        };
        let who = match device {
            Some(device) => format!("device {device} has no access to them"),
            None => "no device has access to them".to_owned(),
        };
        Err(Violation::new(
            ViolationKind::Misuse,
            device.or(device_of(piece)),
            format!(
                "{} bytes of a mapping of {} were used, but {who}: cuMemSetAccess was not called for it",
                self.len,
                piece.memory.name()
            ),
        ))
    }
}
