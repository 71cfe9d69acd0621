//! Grid, blocks and arguments of a launch, and the limits of devices.

use std::ffi::c_void;
use std::sync::Arc;

use crate::result::CUresult;

/// The most shared memory of a block in bytes, with `cuFuncSetAttribute`: that of a Hopper.
pub(super) const SHARED_OPT_IN: u32 = 227 << 10;
/// The most threads of a block.
pub(super) const THREADS: u32 = 1024;

/// Grid, blocks and arguments of a launch.
pub(super) struct Shape {
    pub(super) grid: [u32; 3],
    pub(super) block: [u32; 3],
    pub(super) shared: u32,
    pub(super) arguments: *mut *mut c_void,
    pub(super) extra: *mut *mut c_void,
}

impl Shape {
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` if no device has room for it.
    pub(super) fn check(&self) -> Result<(), CUresult> {
        let threads = self
            .block
            .iter()
            .map(|&size| u64::from(size))
            .product::<u64>();
        let fits = |sizes: [u32; 3], most: [u32; 3]| {
            sizes
                .iter()
                .zip(most)
                .all(|(&size, most)| (1..=most).contains(&size))
        };
        if !fits(self.grid, [i32::MAX as u32, 65_535, 65_535])
            || !fits(self.block, [THREADS, THREADS, 64])
            || threads > u64::from(THREADS)
            || self.shared > SHARED_OPT_IN
        {
            return Err(CUresult::ERROR_INVALID_VALUE);
        }
        Ok(())
    }
}

/// Gathers arguments from a list of pointers, and puts each at its parameter's offset.
///
/// # Safety
/// `arguments` is null, or points to a pointer for each parameter, each null or readable for its size.
pub(super) unsafe fn gathered(
    parameters: &[(usize, usize)],
    arguments: *mut *mut c_void,
) -> Result<Arc<[u8]>, CUresult> {
    let bytes = parameters.last().map_or(0, |(offset, size)| offset + size);
    let mut bytes = vec![0u8; bytes];
    if arguments.is_null() && !parameters.is_empty() {
        return Err(CUresult::ERROR_INVALID_VALUE);
    }
    for (index, &(offset, size)) in parameters.iter().enumerate() {
        // SAFETY: there is a pointer for each parameter.
        let argument = unsafe { arguments.add(index).read() };
        if argument.is_null() {
            return Err(CUresult::ERROR_INVALID_VALUE);
        }
        let place = &mut bytes[offset..offset + size];
        // SAFETY: not null, so readable for the parameter's size.
        unsafe { std::ptr::copy_nonoverlapping(argument.cast(), place.as_mut_ptr(), size) };
    }
    Ok(bytes.into())
}
