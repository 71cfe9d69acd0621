//! The functions that stand for kernels, by the names of the kernels.

use std::collections::HashMap;
use std::sync::Arc;

use super::launch::Launch;
use super::program::Progress;
use crate::sync::RwLock;
use crate::violations::Violation;

/// What runs in the place of one launch: called until it returns [`Progress::Done`].
pub(super) type Run = Box<dyn FnMut(&mut Launch<'_>) -> Result<Progress, Violation> + Send>;

/// What runs in the place of a kernel: makes a [`Run`] for each launch.
pub(crate) type Function = Arc<dyn Fn() -> Run + Send + Sync>;

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
    let kernel = Arc::new(kernel);
    provide_waiting(name, move || {
        let kernel = Arc::clone(&kernel);
        move |launch: &mut Launch<'_>| kernel(launch).map(|()| Progress::Done)
    });
}

/// [`provide`] for a kernel that waits for memory that others write: another device, another process, the host.
///
/// `start` is called when a launch begins, in stream order, and returns the function that runs in its place, with the state
/// that the launch keeps. That function is called until it returns [`Progress::Done`] or an error, and must not
/// block. After [`Progress::Moved`] it is called again at once. After [`Progress::Waiting`] other streams go on first; the
/// calls become rarer (up to 0.5 ms apart) as long as nothing moves, because nothing tells when the memory changes. A
/// launch that waits ends without another call when its context fails or is destroyed.
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

/// What runs in the place of a kernel, if that is known.
pub(crate) fn function(name: &str) -> Option<Function> {
    let provided = PROVIDED.read();
    provided.as_ref()?.get(name).cloned()
}
