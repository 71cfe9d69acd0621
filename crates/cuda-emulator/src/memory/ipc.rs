//! Memory of `cuMemAlloc` that another process opens: a handle to send, and an address in the opening process.
//!
//! A handle names the owner's pool, by process, descriptor and token, and an allocation in it by its number. The opening
//! process maps the owner's pool, once, and reads its table. The opened memory gets an address range of its own, which
//! can neither be read nor written.
//!
//! Open memory stays usable until it is closed, even if its owner frees it, which CUDA leaves undefined: NVIDIA's
//! library frees its buffers while kernels of its peers still write their last counters there. The owner counts the
//! memory as free, but allocates its pages again only once no process has it open.

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::address::{AddressRange, HUGE};
use super::mapping::{Mapping, import, imported};
use super::pools::pool_at;
use super::span::{DeviceOrdinal, Found, Span};
use crate::result::CUresult;
use crate::sync::RwLock;
use crate::violations::{self, Violation, ViolationKind};

/// "ncclEmuI".
const MAGIC: u64 = u64::from_le_bytes(*b"ncclEmuI");

/// A `CUipcMemHandle`: 64 bytes that a process may send to another.
pub type Handle = [u8; 64];

/// The contents of a handle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Named {
    pid: u32,
    /// The descriptor of the pool's memfd, in the owning process.
    fd: i32,
    token: u128,
    index: u32,
    generation: u32,
    offset: u64,
    size: u64,
}

impl Named {
    fn to_bytes(self) -> Handle {
        let words = [
            MAGIC,
            u64::from(self.pid) | u64::from(self.fd.cast_unsigned()) << 32,
            self.token as u64,
            (self.token >> 64) as u64,
            u64::from(self.index) | u64::from(self.generation) << 32,
            self.offset,
            self.size,
            0,
        ];
        let mut bytes = [0; 64];
        for (place, word) in bytes.chunks_exact_mut(8).zip(words) {
            place.copy_from_slice(&word.to_ne_bytes());
        }
        bytes
    }

    fn from_bytes(bytes: &Handle) -> Option<Self> {
        let mut words = [0; 8];
        for (word, place) in words.iter_mut().zip(bytes.chunks_exact(8)) {
            *word = u64::from_ne_bytes(place.try_into().ok()?);
        }
        let [magic, process, low, high, entry, offset, size, 0] = words else {
            return None;
        };
        (magic == MAGIC).then_some(Self {
            pid: process as u32,
            fd: ((process >> 32) as u32).cast_signed(),
            token: u128::from(low) | u128::from(high) << 64,
            index: entry as u32,
            generation: (entry >> 32) as u32,
            offset,
            size,
        })
    }

    fn span(&self) -> Span {
        Span {
            index: self.index,
            generation: self.generation,
            offset: self.offset,
            len: self.size,
        }
    }
}

/// Returns the handle of the allocation that an address lies in.
///
/// # Errors
/// `CUDA_ERROR_INVALID_VALUE` if the address does not lie in memory of `cuMemAlloc`.
pub fn handle_of(address: u64) -> Result<Handle, CUresult> {
    use std::os::fd::AsRawFd;
    let (pool, offset) = pool_at(address).ok_or(CUresult::ERROR_INVALID_VALUE)?;
    let found = pool
        .allocation_at(offset)
        .filter(|found| found.ipc)
        .ok_or(CUresult::ERROR_INVALID_VALUE)?;
    let start = offset - (address - found.start);
    let span = pool
        .span(start, found.size)
        .map_err(|_| CUresult::ERROR_INVALID_VALUE)?;
    let named = Named {
        pid: std::process::id(),
        fd: pool.fd().as_raw_fd(),
        token: pool.token(),
        index: span.index,
        generation: span.generation,
        offset: span.offset,
        size: span.len,
    };
    Ok(named.to_bytes())
}

/// An allocation of another process, opened here.
#[derive(Debug)]
pub(super) struct Opened {
    window: AddressRange,
    mapping: Arc<Mapping>,
    named: Named,
    device: DeviceOrdinal,
    /// The number of the context that opened it.
    context: u32,
    number: u64,
    closed: AtomicBool,
}

impl Drop for Opened {
    fn drop(&mut self) {
        if let Some(entry) = self.mapping.entry(self.named.index) {
            entry.closed();
        }
    }
}

/// The opened allocations by address, each with the number of times it was opened.
static OPENED: RwLock<All> = RwLock::new(BTreeMap::new());

type All = BTreeMap<u64, (Arc<Opened>, u32)>;

/// Opens the allocation of a handle, for work of a device. A second open by the same context returns the same address.
///
/// # Errors
/// `CUDA_ERROR_INVALID_VALUE` for an invalid handle, for freed memory, and, with a line on stderr, if the owning process
/// cannot be reached; `CUDA_ERROR_INVALID_CONTEXT` for memory of this process; `CUDA_ERROR_OUT_OF_MEMORY`.
pub fn open(handle: &Handle, device: DeviceOrdinal, context: u32) -> Result<u64, CUresult> {
    let named = Named::from_bytes(handle).ok_or(CUresult::ERROR_INVALID_VALUE)?;
    if named.pid == std::process::id() {
        return Err(CUresult::ERROR_INVALID_CONTEXT);
    }
    let mut all = OPENED.write();
    for (&address, (opened, count)) in all.iter_mut() {
        if opened.context == context && opened.named == named {
            *count += 1;
            return Ok(address);
        }
    }
    let opened = Opened::new(pool_of(&named)?, named, device, context)?;
    opened.keep(&mut all, "cuIpcOpenMemHandle")
}

/// A part of a rank's device memory that another rank has opened; closed when it is dropped.
#[derive(Debug)]
pub struct OpenPart {
    address: u64,
}

impl OpenPart {
    /// Returns its address in this process.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.address
    }
}

impl Drop for OpenPart {
    fn drop(&mut self) {
        let ended = OPENED.write().remove(&self.address);
        if let Some((opened, _)) = ended {
            opened.closed.store(true, Ordering::Release);
        }
    }
}

/// Opens a part of the mapped pool of process `owner`, which may be this one, for work of a device. It belongs to no
/// context.
///
/// # Errors
/// `CUDA_ERROR_INVALID_VALUE` for memory that is not there; `CUDA_ERROR_OUT_OF_MEMORY`.
pub fn open_part(
    (owner, mapping): (u32, &Arc<Mapping>),
    span: Span,
    device: DeviceOrdinal,
) -> Result<OpenPart, CUresult> {
    let named = Named {
        pid: owner,
        fd: -1,
        token: 0,
        index: span.index,
        generation: span.generation,
        offset: span.offset,
        size: span.len,
    };
    let opened = Opened::new(Arc::clone(mapping), named, device, NO_CONTEXT)?;
    let address = opened.keep(&mut OPENED.write(), "opening a part of a window")?;
    Ok(OpenPart { address })
}

/// The number of no context.
const NO_CONTEXT: u32 = u32::MAX;

impl Opened {
    fn new(
        mapping: Arc<Mapping>,
        named: Named,
        device: DeviceOrdinal,
        context: u32,
    ) -> Result<Self, CUresult> {
        static NUMBER: AtomicU64 = AtomicU64::new(1);
        // The same alignment as in the owner.
        let len = named.size.next_multiple_of(4096);
        let align = if len >= HUGE { HUGE } else { 4096 };
        let window =
            AddressRange::reserve(len, align).map_err(|_| CUresult::ERROR_OUT_OF_MEMORY)?;
        let entry = mapping.entry(named.index);
        entry.ok_or(CUresult::ERROR_INVALID_VALUE)?.opened();
        Ok(Self {
            window,
            mapping,
            named,
            device,
            context,
            number: NUMBER.fetch_add(1, Ordering::Relaxed),
            closed: AtomicBool::new(false),
        })
    }

    /// Adds it to all that are open, and returns its address.
    fn keep(self, all: &mut All, function: &'static str) -> Result<u64, CUresult> {
        let address = self.window.address();
        // From here on the owner keeps the pages, unless it freed them before.
        self.mapping.view(&self.named.span()).map_err(|violation| {
            violations::record(violation.during(function));
            CUresult::ERROR_INVALID_VALUE
        })?;
        all.insert(address, (Arc::new(self), 1));
        Ok(address)
    }
}

/// Returns the pool of a handle, mapped in this process.
fn pool_of(named: &Named) -> Result<Arc<Mapping>, CUresult> {
    if let Some(mapping) = imported(named.token) {
        return Ok(mapping);
    }
    let refused = |reason: &dyn std::fmt::Display| {
        eprintln!(
            "nccl-emulator: cuIpcOpenMemHandle returns CUDA_ERROR_INVALID_VALUE: the device memory of process {} cannot \
             be reached: {reason}. It has to be alive, in the same PID namespace, and of the same user",
            named.pid
        );
        CUresult::ERROR_INVALID_VALUE
    };
    let path = format!("/proc/{}/fd/{}", named.pid, named.fd);
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .open(path)
        .map_err(|error| refused(&error))?;
    import(file.into(), named.token).map_err(|error| refused(&error))
}

/// Closes opened memory; it takes as many calls as there were opens. First calls `settle` with the device that used the
/// memory, so that the caller can wait for its work.
///
/// # Errors
/// `CUDA_ERROR_INVALID_VALUE` if [`open`] did not return the address.
pub fn close(address: u64, settle: impl FnOnce(DeviceOrdinal)) -> Result<(), CUresult> {
    let device = {
        let all = OPENED.read();
        let (opened, _) = all.get(&address).ok_or(CUresult::ERROR_INVALID_VALUE)?;
        opened.device
    };
    settle(device);
    let mut all = OPENED.write();
    let (opened, count) = all.get_mut(&address).ok_or(CUresult::ERROR_INVALID_VALUE)?;
    *count -= 1;
    if *count == 0 {
        opened.closed.store(true, Ordering::Release);
        let ended = all.remove(&address);
        drop(all);
        drop(ended);
    }
    Ok(())
}

/// Closes all memory that a context opened.
pub fn close_all_of(context: u32) {
    let mut all = OPENED.write();
    all.retain(|_, (opened, _)| {
        let keep = opened.context != context;
        opened.closed.fetch_or(!keep, Ordering::AcqRel);
        keep
    });
}

fn opened_at(address: u64) -> Option<(Arc<Opened>, u64)> {
    let all = OPENED.read();
    let (&start, (opened, _)) = all.range(..=address).next_back()?;
    let offset = address - start;
    (offset < opened.window.len()).then(|| (Arc::clone(opened), offset))
}

/// Whether an address lies in opened memory.
pub(super) fn is_opened(address: u64) -> bool {
    opened_at(address).is_some()
}

/// Returns the opened allocation that an address lies in.
pub(super) fn allocation_at(address: u64) -> Option<Found> {
    let (opened, offset) = opened_at(address)?;
    (offset < opened.named.size).then(|| Found {
        device: opened.device,
        start: opened.window.address(),
        size: opened.named.size,
        id: 1 << 60 | opened.number,
        ipc: false,
        mempool: 0,
    })
}

/// A range of opened memory.
#[derive(Debug, Clone)]
pub(super) struct OpenedRange {
    opened: Arc<Opened>,
    span: Span,
}

/// Returns the range at an address, if it lies in opened memory. A later view checks the bounds with the owner's table.
pub(super) fn find(address: u64, len: u64) -> Option<OpenedRange> {
    let (opened, offset) = opened_at(address)?;
    let span = Span {
        offset: opened.named.offset + offset,
        len,
        ..opened.named.span()
    };
    Some(OpenedRange { opened, span })
}

impl OpenedRange {
    pub(super) fn view(&self) -> Result<*mut u8, Violation> {
        self.check_open()?;
        self.opened.mapping.view_opened(&self.span)
    }

    pub(super) fn still_valid(&self) -> Result<(), Violation> {
        self.check_open()
    }

    fn check_open(&self) -> Result<(), Violation> {
        if !self.opened.closed.load(Ordering::Acquire) {
            return Ok(());
        }
        let text = format!(
            "{} bytes of allocation #{} of process {} were used, but it was closed with cuIpcCloseMemHandle",
            self.span.len, self.span.generation, self.opened.named.pid
        );
        let device = Some(self.opened.device);
        Err(Violation::new(ViolationKind::UseAfterFree, device, text))
    }

    pub(super) fn reachable_from(&self, device: DeviceOrdinal) -> Result<(), Violation> {
        if device == self.opened.device {
            return Ok(());
        }
        let text = format!(
            "{} bytes of allocation #{} of process {} were opened on device {}, and device {device} has no access to them",
            self.span.len, self.span.generation, self.opened.named.pid, self.opened.device
        );
        Err(Violation::new(ViolationKind::Misuse, Some(device), text))
    }
}
