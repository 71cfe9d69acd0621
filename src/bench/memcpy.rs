//! Plain copies in host memory of the kind that the emulator's devices have: shared, and referenced by a file
//! descriptor. The kernel pages it differently from private memory.

use std::ffi::c_void;
use std::io;
use std::ptr;

use rustix::fs::MemfdFlags;

/// Two buffers, and copies from one to the other.
pub struct HostCopy {
    source: Mapping,
    target: Mapping,
}

impl HostCopy {
    /// Two buffers of `bytes` each, already paged in.
    ///
    /// # Errors
    /// When there is not enough memory.
    pub fn new(bytes: usize) -> io::Result<Self> {
        let mut copy = Self {
            source: Mapping::new(bytes)?,
            target: Mapping::new(bytes)?,
        };
        copy.source.bytes_mut().fill(0xA5);
        copy.target.bytes_mut().fill(0);
        Ok(copy)
    }

    /// Copies `bytes` from offset `shift` on; bytes outside of the buffers are left out.
    pub fn copy(&mut self, bytes: usize, shift: usize) {
        let end = shift.saturating_add(bytes).min(self.source.len);
        if let (Some(source), Some(target)) = (
            self.source.bytes().get(shift..end),
            self.target.bytes_mut().get_mut(shift..end),
        ) {
            target.copy_from_slice(source);
        }
        // Otherwise the compiler could see that the copy is never read, and remove it.
        std::hint::black_box(self.target.bytes());
    }

    /// The kernel's setting of huge pages for such memory: the choice in brackets.
    #[must_use]
    pub fn huge_pages() -> String {
        let setting = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";
        let text = std::fs::read_to_string(setting).unwrap_or_default();
        let chosen = text
            .split('[')
            .nth(1)
            .and_then(|rest| rest.split(']').next());
        chosen.unwrap_or("unknown").to_owned()
    }
}

/// Memory of an unnamed file, mapped until drop.
struct Mapping {
    address: *mut c_void,
    len: usize,
}

impl Mapping {
    fn new(len: usize) -> io::Result<Self> {
        let len = len.max(1);
        let file = rustix::fs::memfd_create("nccl-tools:memcpy", MemfdFlags::CLOEXEC)?;
        rustix::fs::ftruncate(&file, len as u64)?;
        // SAFETY: a new mapping at an address of the kernel's choice disturbs nothing; no other code has the file, and
        // it keeps its length.
        let address = unsafe {
            rustix::mm::mmap(
                ptr::null_mut(),
                len,
                rustix::mm::ProtFlags::READ | rustix::mm::ProtFlags::WRITE,
                rustix::mm::MapFlags::SHARED,
                &file,
                0,
            )
        }?;
        Ok(Self { address, len })
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: `len` bytes are mapped at `address` until drop, initialised (by the kernel, with zeros), and no other
        // code has the file.
        unsafe { std::slice::from_raw_parts(self.address.cast(), self.len) }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.address.cast(), self.len) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and no borrow of it outlives `self`.
        let _ = unsafe { rustix::mm::munmap(self.address, self.len) };
    }
}

// SAFETY: the mapping belongs to this value alone; an address means the same on every thread.
unsafe impl Send for Mapping {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_moves_exactly_the_bytes_asked_for() {
        let mut copy = HostCopy::new(10_000).unwrap();
        copy.copy(100, 5000);
        let target = copy.target.bytes();
        assert!(target[5000..5100].iter().all(|&byte| byte == 0xA5));
        assert_eq!(target.iter().filter(|&&byte| byte != 0).count(), 100);
        copy.copy(100, 9950);
        copy.copy(usize::MAX, 20_000);
        assert_eq!(
            copy.target
                .bytes()
                .iter()
                .filter(|&&byte| byte != 0)
                .count(),
            150
        );
    }
}
