//! A memfd mapped read-write and shared. The segment of a communicator lies in one.
//!
//! A process maps a memfd once, however many of its ranks use it. That is cheaper, and tools that watch
//! memory, such as a thread sanitizer, identify an atomic by its address.

use std::collections::HashMap;
use std::ffi::CStr;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::{Arc, LazyLock, Weak};

use cuda_emulator::sync::Mutex;

/// A shared mapping of a whole memfd; unmapped on drop.
#[derive(Debug)]
pub(crate) struct SharedMemory {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping belongs to the process, not to a thread; all access goes through atomics or
// raw pointers.
unsafe impl Send for SharedMemory {}
// SAFETY: as above.
unsafe impl Sync for SharedMemory {}

/// Creates a memfd of `len` zero bytes that can neither grow nor shrink, so that no peer can make a
/// mapping of it fault.
pub(crate) fn create(name: &CStr, len: usize) -> io::Result<OwnedFd> {
    // SAFETY: `name` is NUL-terminated.
    let fd =
        unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor was just made and has no other owner.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    let size = libc::off_t::try_from(len).map_err(io::Error::other)?;
    // SAFETY: plain call on a descriptor we own.
    if unsafe { libc::ftruncate(fd.as_raw_fd(), size) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let seals = libc::F_SEAL_GROW | libc::F_SEAL_SHRINK | libc::F_SEAL_SEAL;
    // SAFETY: plain call on a descriptor we own.
    if unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_ADD_SEALS, seals) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(fd)
}

/// Device and inode of a memfd, unique while it is mapped.
type Key = (libc::dev_t, libc::ino_t);

/// The mappings of this process.
static MAPPED: LazyLock<Mutex<HashMap<Key, Weak<SharedMemory>>>> = LazyLock::new(Mutex::default);

impl SharedMemory {
    /// Maps all of `fd`, which must be sealed against shrinking. Returns the existing mapping if this
    /// process has one.
    pub(crate) fn map(fd: BorrowedFd<'_>) -> io::Result<Arc<Self>> {
        // SAFETY: plain call on a borrowed descriptor.
        let seals = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GET_SEALS) };
        if seals < 0 || seals & libc::F_SEAL_SHRINK == 0 {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "not a sealed memfd",
            ));
        }
        // SAFETY: all-zero is a valid `stat`.
        let mut stat: libc::stat = unsafe { std::mem::zeroed() };
        // SAFETY: `stat` is ours to write to.
        if unsafe { libc::fstat(fd.as_raw_fd(), &mut stat) } != 0 {
            return Err(io::Error::last_os_error());
        }
        let mut mapped = MAPPED.lock();
        let key = (stat.st_dev, stat.st_ino);
        if let Some(memory) = mapped.get(&key).and_then(Weak::upgrade) {
            return Ok(memory);
        }
        let len = usize::try_from(stat.st_size).map_err(io::Error::other)?;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let base = unsafe {
            libc::mmap(
                ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_NORESERVE,
                fd.as_raw_fd(),
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base = NonNull::new(base.cast()).expect("mmap does not map address 0");
        let memory = Arc::new(Self { base, len });
        mapped.retain(|_, memory| memory.strong_count() > 0);
        mapped.insert(key, Arc::downgrade(&memory));
        Ok(memory)
    }

    /// Returns the address of the first byte.
    pub(crate) fn base(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// Returns the length in bytes.
    pub(crate) fn len(&self) -> usize {
        self.len
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // SAFETY: `base` and `len` are what `mmap` gave us, and nothing borrowed from `self` is
        // left.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn a_process_maps_a_segment_once_and_again_when_nobody_uses_it_any_more() {
        let fd = create(c"once", 4096).unwrap();
        let first = SharedMemory::map(fd.as_fd()).unwrap();
        let other = fd.try_clone().unwrap();
        let second = SharedMemory::map(other.as_fd()).unwrap();
        assert!(Arc::ptr_eq(&first, &second));
        let another = create(c"once", 4096).unwrap();
        let another = SharedMemory::map(another.as_fd()).unwrap();
        assert!(!Arc::ptr_eq(&first, &another));
        // SAFETY: mapped and writable; no other code uses it.
        unsafe { first.base().write(7) };
        drop((first, second));
        let again = SharedMemory::map(fd.as_fd()).unwrap();
        // SAFETY: mapped and readable; no code writes to it.
        assert_eq!(unsafe { again.base().read() }, 7);
    }
}
