//! One launch, as seen by the function that runs in place of the kernel.

use std::fmt;
use std::sync::atomic::{AtomicU32, Ordering};

use super::ptx::Parameter;
use crate::memory;
use crate::violations::{Violation, ViolationKind};

mod sealed {
    pub trait Sealed {}
}

/// A number that kernels take as an argument and keep in memory: integers of 8 to 64 bits, `f32`, `f64`.
///
/// ```
/// fn bytes<T: nccl_emulator::kernels::Plain>(values: &[T]) -> usize {
///     size_of_val(values)
/// }
/// assert_eq!(bytes(&[1u16, 2]), 4);
/// ```
pub trait Plain: sealed::Sealed + Copy + Default + 'static {}

macro_rules! plain {
    ($($type:ty)*) => {
        $(
            impl sealed::Sealed for $type {}
            impl Plain for $type {}
        )*
    };
}

plain!(u8 i8 u16 i16 u32 i32 u64 i64 f32 f64);

/// One launch of a kernel: its grid, its arguments, and the memory of its device; see [`provide`](super::provide).
///
/// Memory is accessed by device address. Each access is checked: the memory must be allocated, not freed, large enough, and
/// accessible to this device, and the address must be a multiple of the element's size, as a GPU requires
/// (`CUDA_ERROR_MISALIGNED_ADDRESS`). After an invalid access the context fails when the function returns, whatever it returns;
/// the error is that of the first invalid access.
pub struct Launch<'a> {
    pub(super) name: &'a str,
    pub(super) grid: [u32; 3],
    pub(super) block: [u32; 3],
    pub(super) shared: u32,
    pub(super) device: i32,
    pub(super) parameters: &'a [Parameter],
    pub(super) arguments: &'a [u8],
    /// The first invalid access.
    pub(super) failed: Option<Failed>,
}

/// An invalid access.
pub(super) struct Failed {
    pub(super) violation: Violation,
    pub(super) misaligned: bool,
}

impl Launch<'_> {
    /// Returns the name of the kernel.
    ///
    /// ```
    /// nccl_emulator::kernels::provide("hello", |launch| {
    ///     println!("{} was launched", launch.name());
    ///     Ok(())
    /// });
    /// ```
    #[must_use]
    pub fn name(&self) -> &str {
        self.name
    }

    /// Returns the number of blocks, in x, y and z.
    ///
    /// ```
    /// nccl_emulator::kernels::provide("one_block_per_row", |launch| {
    ///     let [rows, ..] = launch.grid();
    ///     launch.write(launch.argument::<u64>(0), &vec![0u32; rows as usize])
    /// });
    /// ```
    #[must_use]
    pub fn grid(&self) -> [u32; 3] {
        self.grid
    }

    /// Returns the number of threads of a block, in x, y and z.
    ///
    /// ```
    /// nccl_emulator::kernels::provide("one_warp", |launch| {
    ///     assert_eq!(launch.block(), [32, 1, 1]);
    ///     Ok(())
    /// });
    /// ```
    #[must_use]
    pub fn block(&self) -> [u32; 3] {
        self.block
    }

    /// Returns the dynamic shared memory of the launch in bytes, without the kernel's static shared memory.
    ///
    /// ```
    /// nccl_emulator::kernels::provide("in_shared_memory", |launch| {
    ///     assert!(launch.shared_bytes() >= 4 * launch.block()[0]);
    ///     Ok(())
    /// });
    /// ```
    #[must_use]
    pub fn shared_bytes(&self) -> u32 {
        self.shared
    }

    /// Returns the number of arguments.
    ///
    /// ```
    /// nccl_emulator::kernels::provide("of_three", |launch| {
    ///     assert_eq!(launch.arguments(), 3);
    ///     Ok(())
    /// });
    /// ```
    #[must_use]
    pub fn arguments(&self) -> usize {
        self.parameters.len()
    }

    /// Returns an argument, as it was at the launch. A pointer is a `u64`.
    ///
    /// # Panics
    /// If there is no such argument, or its size differs from that of `T`. The panic fails the context, as a kernel that traps
    /// does on a GPU.
    ///
    /// ```
    /// nccl_emulator::kernels::provide("axpy", |launch| {
    ///     let (a, n) = (launch.argument::<f32>(0), launch.argument::<u32>(1) as usize);
    ///     let (x, y) = (launch.argument::<u64>(2), launch.argument::<u64>(3));
    ///     let (x, before): (Vec<f32>, Vec<f32>) = (launch.read(x, n)?, launch.read(y, n)?);
    ///     let after: Vec<f32> = x.iter().zip(&before).map(|(x, y)| a * x + y).collect();
    ///     launch.write(y, &after)
    /// });
    /// ```
    #[must_use]
    pub fn argument<T: Plain>(&self, index: usize) -> T {
        let bytes = self.argument_bytes(index);
        assert!(
            bytes.len() == size_of::<T>(),
            "argument {index} of the kernel {} has {} bytes, not {}",
            self.name,
            bytes.len(),
            size_of::<T>()
        );
        // SAFETY: there are as many bytes, and any are a value of a plain number.
        unsafe { bytes.as_ptr().cast::<T>().read_unaligned() }
    }

    /// Returns the bytes of an argument, for arguments that are structs.
    ///
    /// # Panics
    /// If there is no such argument.
    ///
    /// ```
    /// nccl_emulator::kernels::provide("of_a_struct", |launch| {
    ///     assert_eq!(launch.argument_bytes(0).len(), 24);
    ///     Ok(())
    /// });
    /// ```
    #[must_use]
    pub fn argument_bytes(&self, index: usize) -> &[u8] {
        let Some(&Parameter { offset, size }) = self.parameters.get(index) else {
            panic!(
                "the kernel {} has {} arguments, and none of number {index}",
                self.name,
                self.parameters.len()
            )
        };
        &self.arguments[offset..offset + size]
    }

    /// Copies `len` elements from device memory.
    ///
    /// # Errors
    /// The violation, if the memory or the address is invalid.
    ///
    /// ```
    /// nccl_emulator::kernels::provide("look", |launch| {
    ///     let values: Vec<i32> = launch.read(launch.argument(0), 8)?;
    ///     println!("{values:?}");
    ///     Ok(())
    /// });
    /// ```
    pub fn read<T: Plain>(&mut self, address: u64, len: usize) -> Result<Vec<T>, Violation> {
        let mut values = vec![T::default(); len];
        let bytes = size_of_val(values.as_slice());
        self.aligned(address, size_of::<T>())?;
        self.access(address, bytes, |memory| {
            // SAFETY: `memory` has `bytes` readable bytes, the vector has as many writable ones, and only
            // this function has the vector.
            unsafe { std::ptr::copy_nonoverlapping(memory, values.as_mut_ptr().cast(), bytes) };
        })?;
        Ok(values)
    }

    /// Copies elements to device memory.
    ///
    /// # Errors
    /// The violation, if the memory or the address is invalid.
    ///
    /// ```
    /// nccl_emulator::kernels::provide("zeros", |launch| {
    ///     launch.write(launch.argument(0), &[0.0f32; 16])
    /// });
    /// ```
    pub fn write<T: Plain>(&mut self, address: u64, values: &[T]) -> Result<(), Violation> {
        let bytes = size_of_val(values);
        self.aligned(address, size_of::<T>())?;
        self.access(address, bytes, |memory| {
            // SAFETY: as many bytes are readable at one and writable at the other.
            unsafe { std::ptr::copy_nonoverlapping(values.as_ptr().cast(), memory, bytes) };
        })
    }

    /// Copies bytes from device memory to device memory; the two may overlap.
    ///
    /// # Errors
    /// The violation, if the memory is invalid.
    ///
    /// ```
    /// nccl_emulator::kernels::provide("copy", |launch| {
    ///     let (to, from) = (launch.argument(0), launch.argument(1));
    ///     launch.copy(to, from, launch.argument::<u64>(2) as usize)
    /// });
    /// ```
    pub fn copy(&mut self, to: u64, from: u64, bytes: usize) -> Result<(), Violation> {
        let bytes_of: Vec<u8> = self.read(from, bytes)?;
        self.write(to, &bytes_of)
    }

    /// Loads a word with acquire ordering, as `ld.acquire.sys` does: after it returns the value of a
    /// [`store_release`](Self::store_release), the writes before that store are visible. The word may also be in host memory
    /// that the device can access and that the host writes atomically.
    ///
    /// # Errors
    /// The violation, if the memory or the address is invalid.
    ///
    /// ```
    /// use nccl_emulator::kernels::{self, Progress};
    ///
    /// kernels::provide_waiting("wait_for", || {
    ///     |launch| {
    ///         let (flag, value) = (launch.argument::<u64>(0), launch.argument::<u32>(1));
    ///         Ok(match launch.load_acquire(flag)? == value {
    ///             true => Progress::Done,
    ///             false => Progress::Waiting,
    ///         })
    ///     }
    /// });
    /// ```
    pub fn load_acquire(&mut self, address: u64) -> Result<u32, Violation> {
        self.atomic(address, |word| word.load(Ordering::Acquire))
    }

    /// Stores a word with release ordering, as `st.release.sys` does: a kernel that loads the value with
    /// [`load_acquire`](Self::load_acquire) sees all earlier writes of this launch.
    ///
    /// # Errors
    /// The violation, if the memory or the address is invalid.
    ///
    /// ```
    /// nccl_emulator::kernels::provide("set_flag", |launch| {
    ///     launch.write(launch.argument(0), &[1.0f32; 4])?;
    ///     launch.store_release(launch.argument(1), 1)
    /// });
    /// ```
    pub fn store_release(&mut self, address: u64, value: u32) -> Result<(), Violation> {
        self.atomic(address, |word| word.store(value, Ordering::Release))
    }

    fn atomic<T>(
        &mut self,
        address: u64,
        touch: impl FnOnce(&AtomicU32) -> T,
    ) -> Result<T, Violation> {
        self.aligned(address, size_of::<u32>())?;
        self.access_with(address, size_of::<u32>() as u64, |memory| {
            // Mappings begin at page boundaries, so an aligned device address is aligned here as well.
            debug_assert!(memory.cast::<u32>().is_aligned());
            // SAFETY: four aligned bytes that stay mapped during the access; a program that accesses them otherwise than
            // atomically at the same time has a race on a GPU as well.
            touch(unsafe { AtomicU32::from_ptr(memory.cast()) })
        })
    }

    fn aligned(&mut self, address: u64, size: usize) -> Result<(), Violation> {
        if address.is_multiple_of(size as u64) {
            return Ok(());
        }
        let text = format!("{address:#x} is no multiple of the {size} bytes of an element");
        let violation = Violation::new(ViolationKind::Misuse, Some(self.device), text);
        Err(self.fail(violation, true))
    }

    fn access(
        &mut self,
        address: u64,
        bytes: usize,
        touch: impl FnOnce(*mut u8),
    ) -> Result<(), Violation> {
        if bytes == 0 {
            return Ok(());
        }
        self.access_with(address, bytes as u64, touch)
    }

    fn access_with<T>(
        &mut self,
        address: u64,
        bytes: u64,
        touch: impl FnOnce(*mut u8) -> T,
    ) -> Result<T, Violation> {
        self.try_access(address, bytes, touch)
            .map_err(|violation| self.fail(violation, false))
    }

    fn try_access<T>(
        &self,
        address: u64,
        bytes: u64,
        touch: impl FnOnce(*mut u8) -> T,
    ) -> Result<T, Violation> {
        let access = memory::access(self.device, address, bytes)?;
        let value = touch(access.pointer);
        access.still_valid()?;
        Ok(value)
    }

    fn fail(&mut self, violation: Violation, misaligned: bool) -> Violation {
        self.failed.get_or_insert_with(|| Failed {
            violation: violation.clone(),
            misaligned,
        });
        violation
    }
}

impl fmt::Debug for Launch<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Launch")
            .field("name", &self.name)
            .field("grid", &self.grid)
            .field("block", &self.block)
            .finish_non_exhaustive()
    }
}
