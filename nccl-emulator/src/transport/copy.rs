//! The copy itself.

/// The size of a chunk in bytes: what one end of a message takes at a time.
pub(crate) const CHUNK: u64 = 256 << 10;

/// Copies `len` bytes.
///
/// # Safety
/// Both ranges are mapped. They may overlap, and another process may write to them
/// meanwhile: then only the copied bytes are undefined, as on a GPU.
pub(crate) unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: the caller's promise. `memmove` through the C library, so that the compiler assumes
    // nothing about the bytes.
    unsafe { libc::memmove(to.cast(), from.cast(), len) };
}
