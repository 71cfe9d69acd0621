//! The functions that replace kernels, by kernel name.

use std::collections::HashMap;
use std::sync::Arc;

use super::launch::Launch;
use super::program::Progress;
use crate::sync::RwLock;
use crate::violations::Violation;

/// The function that runs in place of one launch: called until it returns [`Progress::Done`].
pub(super) type Run = Box<dyn FnMut(&mut Launch<'_>) -> Result<Progress, Violation> + Send>;

/// Creates a [`Run`] for each launch of a kernel.
pub(crate) type Function = Arc<dyn Fn() -> Run + Send + Sync>;

static PROVIDED: RwLock<Option<HashMap<String, Function>>> = RwLock::new(None);

/// Runs `kernel` in place of every kernel with this name, in all modules and on all devices of this process, from the next
/// launch on. A later call for the same name replaces the function.
///
/// The function gets the launch, with the grid, the arguments and the device's memory. An error that it returns, which stems
/// from an invalid memory access, fails the context as on a GPU, with the sticky error `CUDA_ERROR_ILLEGAL_ADDRESS`; a panic
/// fails it with `CUDA_ERROR_LAUNCH_FAILED`. The function must not call the driver.
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
    let kernel = Arc::new(kernel);
    provide_waiting(name, move || {
        let kernel = Arc::clone(&kernel);
        move |launch: &mut Launch<'_>| kernel(launch).map(|()| Progress::Done)
    });
}

/// Like [`provide`], for a kernel that waits for memory written by another device, another process or the host.
///
/// `start` is called when a launch begins, in stream order. It returns the function that runs in place of the kernel, with the
/// state of the launch. That function is called until it returns [`Progress::Done`] or an error, and must not block. After
/// [`Progress::Moved`] it is called again at once. After [`Progress::Waiting`] other streams run first; while nothing moves,
/// the interval between the calls grows, up to 0.5 ms, because a change of the memory causes no notification. A waiting launch
/// ends without another call when its context fails or is destroyed.
///
/// ```
/// use nccl_emulator::kernels::{self, Progress};
/// use std::time::{Duration, Instant};
///
/// // Waits until a flag is set, a second at most.
/// kernels::provide_waiting("wait_for_flag", || {
///     let start = Instant::now();
///     move |launch| {
///         let is_set = launch.load_acquire(launch.argument(0))? != 0;
///         let is_late = start.elapsed() > Duration::from_secs(1);
///         Ok(if is_set || is_late { Progress::Done } else { Progress::Waiting })
///     }
/// });
/// ```
pub fn provide_waiting<R>(name: impl Into<String>, start: impl Fn() -> R + Send + Sync + 'static)
where
    R: FnMut(&mut Launch<'_>) -> Result<Progress, Violation> + Send + 'static,
{
    let function: Function = Arc::new(move || Box::new(start()));
    let mut provided = PROVIDED.write();
    provided
        .get_or_insert_default()
        .insert(name.into(), function);
}

/// Returns the function that runs in place of a kernel, if there is one.
pub(crate) fn function(name: &str) -> Option<Function> {
    let provided = PROVIDED.read();
    provided.as_ref()?.get(name).cloned()
}
