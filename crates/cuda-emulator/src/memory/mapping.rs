//! A pool as mapped in this process: its own, or an imported pool of a peer.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::{Arc, LazyLock, Weak};

use super::address::{AddressRange, HUGE};
use super::span::Span;
use super::table::{ENTRIES, Entry, HEAD, Head, LAYOUT, MAGIC, Snapshot, State, now_ms};
use super::watch::{self, Watch};
use crate::sync::Mutex;
use crate::violations::{Allocation, Violation, ViolationKind};

/// A mapped pool. The memory stays mapped while this lives.
#[derive(Debug)]
pub struct Mapping {
    /// The head, then the data, [`HEAD`] bytes behind the beginning.
    range: AddressRange,
    data_len: u64,
    device: i32,
    pid: u32,
    token: u128,
    /// Device address of the first byte; 0 for a peer's pool, which has no addresses here.
    window: u64,
}

/// Why a peer's pool could not be mapped.
#[derive(Debug, thiserror::Error)]
pub enum ImportError {
    /// The file belongs to another program or another version of the emulator.
    #[error("the descriptor is not a device memory pool of this version of the emulator: {0}")]
    NotAPool(&'static str),
    /// The kernel refused.
    #[error("a peer's device memory cannot be mapped: {0}")]
    Refused(#[from] io::Error),
}

/// Mapped pools by token.
static MAPPED: LazyLock<Mutex<HashMap<u128, Weak<Mapping>>>> = LazyLock::new(Mutex::default);

/// Maps a peer's pool, once per process: the same token gives the same mapping, and the token of a
/// pool of this process gives its shadow.
///
/// # Errors
/// The descriptor is not a pool of this version of the emulator, or the host refuses to map it.
pub fn import(fd: OwnedFd, token: u128) -> Result<Arc<Mapping>, ImportError> {
    let mut mapped = MAPPED.lock();
    if let Some(mapping) = mapped.get(&token).and_then(Weak::upgrade) {
        return Ok(mapping);
    }
    let file = File::from(fd);
    if !keeps_its_length(&file) {
        return Err(ImportError::NotAPool("it is not a sealed memfd"));
    }
    let mut fixed = [0_u8; std::mem::offset_of!(Head, entries)];
    file.read_exact_at(&mut fixed, 0)?;
    let u32_at =
        |at: usize| u32::from_ne_bytes([fixed[at], fixed[at + 1], fixed[at + 2], fixed[at + 3]]);
    let u64_at = |at: usize| u64::from(u32_at(at)) | u64::from(u32_at(at + 4)) << 32;
    if u64_at(std::mem::offset_of!(Head, magic)) != MAGIC {
        return Err(ImportError::NotAPool("it does not begin as one"));
    }
    if u32_at(std::mem::offset_of!(Head, layout)) != LAYOUT {
        return Err(ImportError::NotAPool("its table has another layout"));
    }
    let tokens = std::mem::offset_of!(Head, token);
    if u128::from(u64_at(tokens)) | u128::from(u64_at(tokens + 8)) << 64 != token {
        return Err(ImportError::NotAPool("it has another token"));
    }
    let data_len = u64_at(std::mem::offset_of!(Head, data_len));
    if data_len % HUGE != 0
        || HEAD
            .checked_add(data_len)
            .is_none_or(|len| file.metadata().is_ok_and(|m| m.len() < len))
    {
        return Err(ImportError::NotAPool("it is shorter than it says"));
    }
    let mapping = Arc::new(Mapping {
        range: map(&file, HEAD + data_len)?,
        data_len,
        device: u32_at(std::mem::offset_of!(Head, device)) as i32,
        pid: u32_at(std::mem::offset_of!(Head, pid)),
        token,
        window: 0,
    });
    mapped.retain(|_, weak| weak.strong_count() > 0);
    mapped.insert(token, Arc::downgrade(&mapping));
    Ok(mapping)
}

/// Returns the mapping of a token, if its pool is mapped.
pub(super) fn imported(token: u128) -> Option<Arc<Mapping>> {
    let mapped = MAPPED.lock();
    mapped.get(&token).and_then(Weak::upgrade)
}

/// Whether a file is sealed against shrinking. A file that shrinks would end this process with
/// SIGBUS.
pub(super) fn keeps_its_length(file: &File) -> bool {
    // SAFETY: a plain query of a descriptor that is open.
    let seals = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) };
    seals >= 0 && seals & libc::F_SEAL_SHRINK != 0
}

/// Maps a pool's file at an address where huge pages are possible.
fn map(file: &File, len: u64) -> io::Result<AddressRange> {
    let range = AddressRange::reserve(len, HUGE)?;
    range.map(0, len, file, 0, true)?;
    range.advise_huge(HEAD);
    Ok(range)
}

impl Mapping {
    /// Maps the shadow of a pool of this process and writes the head.
    pub(super) fn create(
        file: &File,
        device: i32,
        token: u128,
        window: u64,
        data_len: u64,
    ) -> io::Result<Arc<Self>> {
        let range = map(file, HEAD + data_len)?;
        let pid = std::process::id();
        let head = range.start().cast::<Head>();
        // SAFETY: the range is mapped for at least a `Head`, aligned to a page, and no other code
        // knows the file yet.
        unsafe {
            (&raw mut (*head).layout).write(LAYOUT);
            (&raw mut (*head).pid).write(pid);
            (&raw mut (*head).device).write(device);
            (&raw mut (*head).token).write([token as u64, (token >> 64) as u64]);
            (&raw mut (*head).data_len).write(data_len);
            (&raw mut (*head).magic).write(MAGIC);
        }
        let mapping = Arc::new(Self {
            range,
            data_len,
            device,
            pid,
            token,
            window,
        });
        MAPPED.lock().insert(token, Arc::downgrade(&mapping));
        Ok(mapping)
    }

    /// Returns the ordinal of the pool's device in the owning process.
    pub(super) fn device(&self) -> i32 {
        self.device
    }

    /// Returns the token of the pool.
    pub(super) fn token(&self) -> u128 {
        self.token
    }

    /// Returns an entry of the table; `None` for an index beyond it.
    pub(super) fn entry(&self, index: u32) -> Option<&Entry> {
        if index >= ENTRIES {
            return None;
        }
        let head = self.range.start().cast::<Head>();
        // SAFETY: the head is mapped while `self` lives, the index is in its table, and an entry is
        // all atomics, so that other processes may write it meanwhile.
        Some(unsafe { &(&(*head).entries)[index as usize] })
    }

    /// Returns the start of the data in this process.
    pub(super) fn data(&self) -> *mut u8 {
        // SAFETY: the mapping is `HEAD + data_len` bytes long.
        unsafe { self.range.start().add(HEAD as usize) }
    }

    /// Returns the address of the span in this process, if it may be used now: allocated, not freed,
    /// inside its allocation. For an empty span, the address must not be read.
    ///
    /// # Errors
    /// The violation, naming the allocation.
    pub fn view(&self, span: &Span) -> Result<*mut u8, Violation> {
        self.view_in(span, State::usable)
    }

    /// Does what [`Mapping::view`] does, for an allocation that this process has opened: its owner
    /// may have freed it.
    pub(super) fn view_opened(&self, span: &Span) -> Result<*mut u8, Violation> {
        self.view_in(span, |state| state.usable() || state == State::Freed)
    }

    fn view_in(&self, span: &Span, usable: impl Fn(State) -> bool) -> Result<*mut u8, Violation> {
        if span.len != 0 {
            let inside = |entry: &Entry| {
                let now = entry.snapshot();
                let start = span.offset.wrapping_sub(now.offset);
                now.generation == span.generation
                    && usable(now.state)
                    && span.len <= now.size
                    && start <= now.size - span.len
                    // The table lies in memory that a peer writes.
                    && now.offset.checked_add(now.size).is_some_and(|end| end <= self.data_len)
            };
            if !self.entry(span.index).is_some_and(inside) {
                return Err(self.complain(span));
            }
        }
        // SAFETY: the span was just found inside the data, or is empty and its address is never
        // used.
        Ok(self.data().wrapping_add(span.offset as usize))
    }

    /// Checks that the span may still be used. Call after the copy.
    ///
    /// # Errors
    /// The violation, naming the allocation.
    pub fn still_valid(&self, span: &Span) -> Result<(), Violation> {
        let valid = span.len == 0
            || self
                .entry(span.index)
                .is_some_and(|entry| entry.state_of(span.generation).usable());
        if valid {
            Ok(())
        } else {
            Err(self.complain(span))
        }
    }

    /// Calls `report` with the bytes that work of this process uses in a range, while the returned value lives: when the work
    /// begins, and when it has used them.
    pub fn watch(&self, span: Span, report: impl Fn(&Span) + Send + Sync + 'static) -> Watch {
        Watch::new(self.token, span, report)
    }

    /// Whether any of these bytes are watched.
    pub(super) fn is_watched(&self, span: &Span) -> bool {
        watch::is_watched(self.token, span)
    }

    /// Returns the allocation of a span.
    pub fn allocation(&self, span: &Span) -> Allocation {
        let now = self.entry(span.index).map(Entry::snapshot);
        let now = now.filter(|now| now.generation == span.generation);
        Allocation {
            number: span.generation,
            device: self.device,
            process: self.pid,
            size: now.as_ref().map(|now| now.size),
            freed: now.is_none_or(|now| now.state == State::Freed),
        }
    }

    /// Reports to [`Mapping::watch`] that work of this process uses a range.
    pub fn used(&self, span: &Span) {
        watch::used(self.token, span);
    }

    /// Returns the violation of a span that may not be used.
    #[cold]
    fn complain(&self, span: &Span) -> Violation {
        let Some(entry) = self.entry(span.index) else {
            return Violation::new(
                ViolationKind::UnknownAddress,
                Some(self.device),
                format!("allocation {} is in no table", span.index),
            );
        };
        let now = entry.snapshot();
        if now.generation == span.generation {
            return self.violation(&now, span.offset, span.len);
        }
        let allocation = Allocation {
            number: span.generation,
            device: self.device,
            process: self.pid,
            size: None,
            freed: true,
        };
        let text = format!(
            "{} bytes of allocation #{} of GPU {}{} were used, but it was freed, and its place in the table belongs \
             to allocation #{} by now",
            span.len,
            span.generation,
            self.device,
            self.whose(),
            now.generation,
        );
        Violation::new(ViolationKind::UseAfterFree, Some(self.device), text).about(allocation)
    }

    /// Returns the violation of `len` bytes at `offset`, given their intended allocation.
    #[cold]
    pub(super) fn violation(&self, now: &Snapshot, offset: u64, len: u64) -> Violation {
        let allocation = Allocation {
            number: now.generation,
            device: self.device,
            process: self.pid,
            size: Some(now.size),
            freed: now.state == State::Freed,
        };
        let from = offset.wrapping_sub(now.offset);
        let at = if self.window == 0 {
            String::new()
        } else {
            format!(" at 0x{:x}", self.window + now.offset)
        };
        let name = format!(
            "allocation #{} ({} bytes{at} on GPU {}{})",
            now.generation,
            now.size,
            self.device,
            self.whose()
        );
        let age = |since: u32| now_ms().wrapping_sub(since);
        let (kind, text) = match now.state {
            State::Freed => (
                ViolationKind::UseAfterFree,
                format!(
                    "{len} bytes at offset {from} of {name} were used, but it was freed {} ms ago",
                    age(now.freed_at)
                ),
            ),
            State::Pending => (
                ViolationKind::UseBeforeAllocation,
                format!(
                    "{len} bytes at offset {from} of {name} were used, but the stream that allocates it has not got \
                     there, {} ms after the call",
                    age(now.allocated_at)
                ),
            ),
            State::Live | State::Freeing | State::Never => (
                ViolationKind::OutOfBounds,
                format!(
                    "{len} bytes at offset {from} of {name} were used: {} bytes past its end",
                    from.wrapping_add(len).saturating_sub(now.size)
                ),
            ),
        };
        Violation::new(kind, Some(self.device), text).about(allocation)
    }

    fn whose(&self) -> String {
        if self.window == 0 {
            format!(" of process {}", self.pid)
        } else {
            String::new()
        }
    }
}

/// Creates a file for a pool, sealed to its length.
pub(super) fn sealed_file(name: &std::ffi::CStr, len: u64) -> io::Result<File> {
    use std::os::fd::FromRawFd;
    // SAFETY: `name` is a C string; the call makes a new descriptor.
    let fd =
        unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor was just made and has no other owner.
    let file = unsafe { File::from_raw_fd(fd) };
    file.set_len(len)?;
    let seals = libc::F_SEAL_GROW | libc::F_SEAL_SHRINK | libc::F_SEAL_SEAL;
    // SAFETY: a plain request on an open descriptor.
    if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(file)
}

/// Returns the memory behind a range of the data to the host. The range reads as zero afterwards.
pub(super) fn punch(file: BorrowedFd<'_>, offset: u64, len: u64) {
    // Best effort: without it the memory stays in use.
    // SAFETY: a plain request on an open descriptor; the range is of freed memory.
    unsafe {
        libc::fallocate(
            file.as_raw_fd(),
            libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE,
            (HEAD + offset) as libc::off_t,
            len as libc::off_t,
        );
    }
}
