//! Device memory as the interpreter sees it: addresses are resolved by [`Memory`], and every access goes through a checked
//! [`View`].
//!
//! The interpreter accesses the same memory as the kernels: buffers of the user, connection buffers, and the counters and flags
//! that other threads and processes poll. It accesses counters and flags atomically. It copies data without atomics, since the
//! protocol gives the data to one side at a time.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU32, AtomicU64};

/// The memory of one device, as its kernels may access it.
pub(crate) trait Memory: Send + Sync {
    /// Checks that this device may use `len` bytes at a device-visible address now, and returns their location in this process.
    fn view(&self, address: u64, len: usize) -> Result<View, Violation>;
}

/// Keeps a mapping alive, and knows whether the device may still use it.
pub(crate) trait Lease: Send + Sync {
    /// Returns an error if the memory was freed or unmapped since the view was taken.
    fn still_valid(&self) -> Result<(), Violation>;
}

/// An access that the device is not allowed to make.
#[derive(Debug, Clone)]
pub(crate) struct Violation {
    pub(crate) address: u64,
    pub(crate) length: usize,
    pub(crate) cause: Cause,
}

/// Why an access is a violation.
#[derive(Debug, Clone)]
pub(crate) enum Cause {
    /// A null pointer where the kernel dereferences one.
    Null,
    /// The address is not aligned for the loaded or stored word.
    Unaligned,
    /// An offset outside of the view: the kernel's own arithmetic left its buffer.
    OutsideView { covered: usize },
    /// The error of the memory's owner.
    Driver(Arc<dyn std::error::Error + Send + Sync>),
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            address,
            length,
            cause,
        } = self;
        write!(f, "{length} bytes at {address:#x}: ")?;
        match cause {
            Cause::Null => write!(f, "null pointer"),
            Cause::Unaligned => write!(f, "not aligned to {length} bytes"),
            Cause::OutsideView { covered } => {
                write!(
                    f,
                    "outside of the {covered} bytes that the kernel was given"
                )
            }
            Cause::Driver(error) => write!(f, "{error}"),
        }
    }
}

impl std::error::Error for Violation {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match &self.cause {
            Cause::Driver(error) => Some(error.as_ref()),
            _ => None,
        }
    }
}

/// A range of device memory that is mapped in this process.
pub(crate) struct View {
    address: u64,
    pointer: *mut u8,
    length: usize,
    lease: Box<dyn Lease>,
}

// SAFETY: the memory that `pointer` names belongs to no thread: it is mapped for the whole process while `lease` lives
// (promised to `View::new`), and every access is atomic or a raw copy.
unsafe impl Send for View {}
// SAFETY: as above.
unsafe impl Sync for View {}

impl View {
    /// # Safety
    /// `pointer` is valid for reads and writes of `length` bytes while `lease` lives, also after the device's right to use
    /// them ended.
    pub(crate) unsafe fn new(
        address: u64,
        pointer: *mut u8,
        length: usize,
        lease: Box<dyn Lease>,
    ) -> Self {
        Self {
            address,
            pointer,
            length,
            lease,
        }
    }

    /// Returns an error if the memory was freed since the view was taken.
    pub(crate) fn still_valid(&self) -> Result<(), Violation> {
        self.lease.still_valid()
    }

    /// Returns whether the view covers `length` bytes at a device address.
    pub(crate) fn covers(&self, address: u64, length: usize) -> bool {
        address >= self.address
            && (length as u64) <= self.length as u64
            && address - self.address <= (self.length - length) as u64
    }

    /// Returns the address of `length` bytes at `offset` in this process.
    pub(crate) fn at(&self, offset: usize, length: usize) -> Result<*mut u8, Violation> {
        if length > self.length || offset > self.length - length {
            return Err(Violation {
                address: self.address.wrapping_add(offset as u64),
                length,
                cause: Cause::OutsideView {
                    covered: self.length,
                },
            });
        }
        // SAFETY: `offset` is within the view's `length` bytes.
        Ok(unsafe { self.pointer.add(offset) })
    }

    /// Returns the address of `length` bytes at a device address in this process.
    pub(crate) fn at_address(&self, address: u64, length: usize) -> Result<*mut u8, Violation> {
        self.at(address.wrapping_sub(self.address) as usize, length)
    }

    fn aligned(&self, offset: usize, size: usize) -> Result<*mut u8, Violation> {
        let pointer = self.at(offset, size)?;
        if pointer.addr() % size != 0 {
            return Err(Violation {
                address: self.address.wrapping_add(offset as u64),
                length: size,
                cause: Cause::Unaligned,
            });
        }
        Ok(pointer)
    }

    /// Returns a shared word of 8 bytes.
    pub(crate) fn word(&self, offset: usize) -> Result<&AtomicU64, Violation> {
        let pointer = self.aligned(offset, 8)?;
        // SAFETY: aligned, inside the view, and mapped while `self` lives.
        Ok(unsafe { AtomicU64::from_ptr(pointer.cast()) })
    }

    /// Returns a shared signed word of 8 bytes.
    pub(crate) fn signed(&self, offset: usize) -> Result<&AtomicI64, Violation> {
        let pointer = self.aligned(offset, 8)?;
        // SAFETY: aligned, inside the view, and mapped while `self` lives.
        Ok(unsafe { AtomicI64::from_ptr(pointer.cast()) })
    }

    /// Returns a shared word of 4 bytes.
    pub(crate) fn half_word(&self, offset: usize) -> Result<&AtomicU32, Violation> {
        let pointer = self.aligned(offset, 4)?;
        // SAFETY: aligned, inside the view, and mapped while `self` lives.
        Ok(unsafe { AtomicU32::from_ptr(pointer.cast()) })
    }

    /// Copies bytes out of the view.
    pub(crate) fn read(&self, offset: usize, into: &mut [u8]) -> Result<(), Violation> {
        let from = self.at(offset, into.len())?;
        // SAFETY: `from` is valid for `into.len()` bytes, and `into` is this process's own memory, which no view names.
        unsafe { std::ptr::copy(from, into.as_mut_ptr(), into.len()) };
        Ok(())
    }

    /// Copies bytes at a device address out of the view.
    pub(crate) fn read_address(&self, address: u64, into: &mut [u8]) -> Result<(), Violation> {
        self.read(address.wrapping_sub(self.address) as usize, into)
    }

    /// Copies bytes to a device address in the view.
    pub(crate) fn write_address(&self, address: u64, from: &[u8]) -> Result<(), Violation> {
        self.write(address.wrapping_sub(self.address) as usize, from)
    }

    /// Copies bytes into the view.
    pub(crate) fn write(&self, offset: usize, from: &[u8]) -> Result<(), Violation> {
        let to = self.at(offset, from.len())?;
        // SAFETY: as in `read`.
        unsafe { std::ptr::copy(from.as_ptr(), to, from.len()) };
        Ok(())
    }
}

/// Takes a view of memory that the kernel dereferences.
pub(crate) fn view(memory: &dyn Memory, address: u64, length: usize) -> Result<View, Violation> {
    if address == 0 {
        return Err(Violation {
            address,
            length,
            cause: Cause::Null,
        });
    }
    memory.view(address, length)
}

/// Copies `length` bytes of device memory.
pub(crate) fn load(memory: &dyn Memory, address: u64, length: usize) -> Result<Vec<u8>, Violation> {
    let mut bytes = vec![0; length];
    view(memory, address, length)?.read(0, &mut bytes)?;
    Ok(bytes)
}

/// Loads a device pointer.
pub(crate) fn load_address(memory: &dyn Memory, address: u64) -> Result<u64, Violation> {
    let mut bytes = [0; 8];
    view(memory, address, 8)?.read(0, &mut bytes)?;
    Ok(u64::from_le_bytes(bytes))
}
