//! Fault injection by a library above the driver, in the driver's calls and kernels.
//!
//! The driver calls the hooks at each call and at each launch. Without hooks no fault occurs.

use std::sync::OnceLock;
use std::time::Duration;

use crate::result::CUresult;

/// The hooks of the driver.
#[derive(Debug, Clone, Copy)]
pub struct Hooks {
    /// Called at the beginning of each driver function with fault injection, with its name without a version
    /// (`cuMemAlloc`). The hook may block. The driver function returns the hook's error.
    pub call: fn(&str) -> Result<(), CUresult>,
    /// The delay of the beginning of kernels.
    pub lateness: fn() -> Option<Duration>,
}

static HOOKS: OnceLock<Hooks> = OnceLock::new();

/// Sets the hooks of this process. The first ones stay.
pub fn set(hooks: Hooks) {
    let _ = HOOKS.set(hooks);
}

/// Calls the hook for a driver function.
pub fn call(function: &str) -> Result<(), CUresult> {
    match HOOKS.get() {
        Some(hooks) => (hooks.call)(function),
        None => Ok(()),
    }
}

/// Returns the delay of the beginning of kernels.
pub fn lateness() -> Option<Duration> {
    HOOKS.get().and_then(|hooks| (hooks.lateness)())
}
