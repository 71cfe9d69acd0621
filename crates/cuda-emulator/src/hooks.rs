//! Faults on purpose: what a library above the driver decides about the driver's calls and kernels.
//!
//! The driver asks at each call and at each launch. Without hooks it goes on.

use std::sync::OnceLock;
use std::time::Duration;

use crate::result::CUresult;

/// What the driver asks.
#[derive(Debug, Clone, Copy)]
pub struct Hooks {
    /// Called at the beginning of each driver function that can fail on purpose, with its name without a version
    /// (`cuMemAlloc`); may take its time. An error is what the function returns.
    pub call: fn(&str) -> Result<(), CUresult>,
    /// By how much kernels begin later than they could.
    pub lateness: fn() -> Option<Duration>,
}

static HOOKS: OnceLock<Hooks> = OnceLock::new();

/// Sets the hooks of this process. The first ones stay.
pub fn set(hooks: Hooks) {
    let _ = HOOKS.set(hooks);
}

/// A driver function is called.
pub fn call(function: &str) -> Result<(), CUresult> {
    match HOOKS.get() {
        Some(hooks) => (hooks.call)(function),
        None => Ok(()),
    }
}

/// By how much kernels begin later than they could.
pub fn lateness() -> Option<Duration> {
    HOOKS.get().and_then(|hooks| (hooks.lateness)())
}
