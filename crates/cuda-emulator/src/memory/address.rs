//! Ranges of this process's address space: reserved first, mapped piece by piece.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

/// A huge page.
pub(super) const HUGE: u64 = 2 << 20;

/// An exclusively owned range of addresses. Its unmapped parts can neither be read nor written.
#[derive(Debug)]
pub(super) struct AddressRange {
    start: *mut u8,
    len: usize,
}

// SAFETY: an address and a length; the memory there is accessed through raw pointers alone.
unsafe impl Send for AddressRange {}
// SAFETY: as above.
unsafe impl Sync for AddressRange {}

impl AddressRange {
    /// Reserves `len` bytes that begin at a multiple of `align`, a power of two and no less than a page.
    pub(super) fn reserve(len: u64, align: u64) -> io::Result<Self> {
        let too_long = || io::Error::from_raw_os_error(libc::ENOMEM);
        let (len, align) = (len as usize, align as usize);
        let all = len.checked_add(align).ok_or_else(too_long)?;
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
        let reserved = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                all,
                libc::PROT_NONE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if reserved == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let before = reserved.addr().next_multiple_of(align) - reserved.addr();
        // SAFETY: `before` is below `align`, so all of this stays inside the reservation; its two ends are given back.
        let start = unsafe {
            let start = reserved.byte_add(before);
            if before > 0 {
                libc::munmap(reserved, before);
            }
            if before < align {
                libc::munmap(start.byte_add(len), align - before);
            }
            start.cast()
        };
        Ok(Self { start, len })
    }

    /// The first byte.
    pub(super) fn start(&self) -> *mut u8 {
        self.start
    }

    /// The first byte as a number.
    pub(super) fn address(&self) -> u64 {
        self.start.expose_provenance() as u64
    }

    /// Bytes.
    pub(super) fn len(&self) -> u64 {
        self.len as u64
    }

    fn inside(&self, offset: u64, len: u64) -> io::Result<()> {
        match offset.checked_add(len) {
            Some(end) if end <= self.len() => Ok(()),
            _ => Err(io::Error::from_raw_os_error(libc::EINVAL)),
        }
    }

    /// Maps `len` bytes of a file, from `at` on, at `offset`, and replaces the former contents there.
    pub(super) fn map(
        &self,
        offset: u64,
        len: u64,
        file: &File,
        at: u64,
        readable: bool,
    ) -> io::Result<()> {
        let protection = match readable {
            true => libc::PROT_READ | libc::PROT_WRITE,
            false => libc::PROT_NONE,
        };
        let flags = libc::MAP_SHARED | libc::MAP_NORESERVE;
        self.replace(offset, len, protection, flags, (file.as_raw_fd(), at))
    }

    /// Makes a part unreadable again.
    pub(super) fn clear(&self, offset: u64, len: u64) -> io::Result<()> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        self.replace(offset, len, libc::PROT_NONE, flags, (-1, 0))
    }

    fn replace(
        &self,
        offset: u64,
        len: u64,
        protection: i32,
        flags: i32,
        (fd, at): (i32, u64),
    ) -> io::Result<()> {
        self.inside(offset, len)?;
        // SAFETY: replaces pages of this range, as was just checked; users of a mapping keep it from being
        // replaced.
        let mapped = unsafe {
            libc::mmap(
                self.start.add(offset as usize).cast(),
                len as usize,
                protection,
                flags | libc::MAP_FIXED,
                fd,
                at as libc::off_t,
            )
        };
        if mapped == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }

    /// Sets the host's access to a mapped part.
    pub(super) fn protect(&self, offset: u64, len: u64, protection: i32) -> io::Result<()> {
        self.inside(offset, len)?;
        // SAFETY: pages of this range, as was just checked.
        let refused = unsafe {
            libc::mprotect(
                self.start.add(offset as usize).cast(),
                len as usize,
                protection,
            )
        };
        if refused != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }

    /// Advises the kernel to use huge pages. Without them only the first touch is slower.
    pub(super) fn advise_huge(&self, offset: u64) {
        if let Some(len) = self.len().checked_sub(offset) {
            // SAFETY: advice about pages of this range changes no contents.
            unsafe {
                libc::madvise(
                    self.start.add(offset as usize).cast(),
                    len as usize,
                    libc::MADV_HUGEPAGE,
                );
            }
        }
    }
}

impl Drop for AddressRange {
    fn drop(&mut self) {
        // SAFETY: exactly the reserved range; users of a part of it hold the range.
        unsafe { libc::munmap(self.start.cast(), self.len) };
    }
}
