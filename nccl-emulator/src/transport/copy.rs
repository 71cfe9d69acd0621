//! The copy itself.

/// Bytes that one of the two ends of a message takes at a time.
pub(crate) const CHUNK: u64 = 256 << 10;

/// Copies `len` bytes.
///
/// # Safety
/// Both ranges are mapped. They may overlap with each other, and another process may write to them
/// meanwhile: the bytes are then anybody's guess, as on a GPU, but nothing else is.
pub(crate) unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: the caller's promise. `memmove` through the C library, so that the compiler assumes
    // nothing about the bytes.
    unsafe { libc::memmove(to.cast(), from.cast(), len) };
}
