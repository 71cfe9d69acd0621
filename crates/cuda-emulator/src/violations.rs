//! Detected misuse: a record for tests, and one plain line each on stderr.
//!
//! The memory checks, the driver functions and the NCCL side write the record; tests read it through [`violations()`]. A
//! violation names the allocation (or other object) that it is about.

use std::fmt;

use crate::sync::{Mutex, MutexGuard};

/// The kind of a [`Violation`].
///
/// ```
/// use nccl_emulator::{ViolationKind, violations};
///
/// let freed = |kind| kind == ViolationKind::UseAfterFree;
/// assert!(!violations().iter().any(|violation| freed(violation.kind())));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ViolationKind {
    /// Memory was accessed, or still in use, after it was freed.
    UseAfterFree,
    /// Memory was accessed before the stream reached its allocation.
    UseBeforeAllocation,
    /// An access began inside an allocation and ended outside of it.
    OutOfBounds,
    /// The address belongs to no allocation of any device.
    UnknownAddress,
    /// The address was freed twice, or is not the start of an allocation.
    InvalidFree,
    /// A host pointer was given where device memory is needed.
    HostMemory,
    /// A communicator, stream or event was used after it was destroyed.
    UseAfterDestroy,
    /// Memory of a window was used after a rank had put data there, and before the signal of that put was waited for.
    Race,
    /// Another rule of CUDA or NCCL was broken.
    Misuse,
}

/// A detected misuse. Its text names the allocation, its size, device, state and age, and the offset of the access.
///
/// ```
/// use cudarc::driver::{CudaContext, result};
/// use nccl_emulator::ViolationKind;
///
/// nccl_emulator::install()?;
/// let gpu = CudaContext::new(0)?;
/// let stream = gpu.new_stream()?;
/// // SAFETY: none; this is the misuse.
/// unsafe {
///     let memory = result::malloc_sync(1000)?;
///     result::free_sync(memory)?;
///     assert!(result::memset_d8_async(memory, 0, 1000, stream.cu_stream()).is_err());
/// }
/// let violation = &nccl_emulator::violations()[0];
/// assert_eq!(violation.kind(), ViolationKind::UseAfterFree);
/// assert_eq!(violation.device(), Some(0));
/// let allocation = violation.allocation().unwrap();
/// assert_eq!((allocation.size, allocation.freed), (Some(1000), true));
/// println!("{violation}");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct Violation(Box<Details>);

#[derive(Debug, Clone)]
struct Details {
    kind: ViolationKind,
    device: Option<i32>,
    allocation: Option<Allocation>,
    text: String,
}

/// The allocation of device memory that a violation is about; see [`Violation`].
///
/// ```
/// for violation in nccl_emulator::violations() {
///     if let Some(allocation) = violation.allocation() {
///         println!("allocation {} of device {}", allocation.number, allocation.device);
///     }
/// }
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Allocation {
    /// The allocation's number. Allocations of one device in one process are numbered from 1.
    pub number: u32,
    /// The ordinal of the device.
    pub device: i32,
    /// The process that allocated the memory.
    pub process: u32,
    /// The requested size in bytes; `None` if no longer known.
    pub size: Option<u64>,
    /// Whether the allocation was freed.
    pub freed: bool,
}

impl Violation {
    /// Creates a violation. `device` is the ordinal of the device on which it occurred, if any.
    pub fn new(kind: ViolationKind, device: Option<i32>, text: impl Into<String>) -> Self {
        Self(Box::new(Details {
            kind,
            device,
            allocation: None,
            text: text.into(),
        }))
    }

    /// Returns the same violation, about an allocation.
    pub fn about(mut self, allocation: Allocation) -> Self {
        self.0.allocation = Some(allocation);
        self
    }

    /// Returns the allocation that the violation is about.
    ///
    /// ```
    /// for violation in nccl_emulator::violations() {
    ///     println!("{violation}: about an allocation: {}", violation.allocation().is_some());
    /// }
    /// ```
    #[must_use]
    pub fn allocation(&self) -> Option<&Allocation> {
        self.0.allocation.as_ref()
    }

    /// Returns the kind of the misuse.
    ///
    /// ```
    /// for violation in nccl_emulator::violations() {
    ///     println!("{:?}: {violation}", violation.kind());
    /// }
    /// ```
    #[must_use]
    pub fn kind(&self) -> ViolationKind {
        self.0.kind
    }

    /// Returns the ordinal of the device of the misuse.
    ///
    /// ```
    /// let on_device_0 = nccl_emulator::violations().iter().filter(|v| v.device() == Some(0)).count();
    /// assert_eq!(on_device_0, 0);
    /// ```
    #[must_use]
    pub fn device(&self) -> Option<i32> {
        self.0.device
    }

    /// Returns the same violation with `operation` ("AllReduce on comm …") before its text.
    pub fn during(mut self, operation: &str) -> Self {
        self.0.text = format!("{operation}: {}", self.0.text);
        self
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.text)
    }
}

impl std::error::Error for Violation {}

static RECORD: Mutex<Vec<Violation>> = Mutex::new(Vec::new());

/// Returns the violations of this process so far, oldest first; ten thousand at most.
///
/// ```
/// nccl_emulator::install()?;
/// // … run the program under test …
/// assert!(nccl_emulator::violations().is_empty());
/// # Ok::<(), nccl_emulator::InstallError>(())
/// ```
#[must_use]
pub fn violations() -> Vec<Violation> {
    lock().clone()
}

/// Forgets the violations so far. Useful between tests that share a process.
///
/// ```
/// nccl_emulator::clear_violations();
/// assert!(nccl_emulator::violations().is_empty());
/// ```
pub fn clear_violations() {
    lock().clear();
}

/// The most violations that are kept.
const KEPT: usize = 10_000;

/// Prints and records a violation. Does not touch any context: `Context::fail` does both.
pub fn record(violation: Violation) {
    let mut record = lock();
    match record.len() {
        KEPT => return,
        few if few == KEPT - 1 => eprintln!(
            "nccl-emulator: violation: {violation} (the last of {KEPT} that are printed and kept)"
        ),
        _ => eprintln!("nccl-emulator: violation: {violation}"),
    }
    record.push(violation);
}

fn lock() -> MutexGuard<'static, Vec<Violation>> {
    RECORD.lock()
}
