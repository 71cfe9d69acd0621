//! The functions that stand for kernels, by the names of the kernels.

use std::collections::HashMap;
use std::sync::Arc;

use super::launch::Launch;
use crate::sync::RwLock;
use crate::violations::Violation;

/// What runs in the place of a kernel.
pub(crate) type Function = Arc<dyn Fn(&mut Launch<'_>) -> Result<(), Violation> + Send + Sync>;

static PROVIDED: RwLock<Option<HashMap<String, Function>>> = RwLock::new(None);

/// Has `kernel` run in the place of every kernel of that name, in all modules and on all devices of this
/// process, from the next launch on. The last one given for a name counts.
///
/// The function gets the launch, with the grid, the arguments and the device's memory. When it returns
/// an error, which comes from memory that is not there, the context fails as it would on a GPU
/// (`CUDA_ERROR_ILLEGAL_ADDRESS`, which stays); when it panics, as well (`CUDA_ERROR_LAUNCH_FAILED`).
/// It may not call the driver.
///
/// ```
/// use nccl_emulator::kernels;
///
/// kernels::provide("fill_with_ones", |launch| {
///     let (y, n) = (launch.argument::<u64>(0), launch.argument::<u64>(1));
///     launch.write(y, &vec![1.0f32; n as usize])
/// });
/// ```
pub fn provide(
    name: impl Into<String>,
    kernel: impl Fn(&mut Launch<'_>) -> Result<(), Violation> + Send + Sync + 'static,
) {
    let mut provided = PROVIDED.write();
    provided
        .get_or_insert_default()
        .insert(name.into(), Arc::new(kernel));
}

/// What runs in the place of a kernel, if that is known.
pub(crate) fn function(name: &str) -> Option<Function> {
    let provided = PROVIDED.read();
    provided.as_ref()?.get(name).cloned()
}
