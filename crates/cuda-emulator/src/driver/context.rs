//! The contexts of a thread, of which the topmost is current, and the primary context of each device.
//!
//! The primary context of a device is shared by all users that retain it, and destroyed when the last one releases it. The next
//! retain creates a new primary context, without the former one's error.

use std::cell::RefCell;
use std::ffi::c_void;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};

pub use crate::exec::context::Context;

use crate::forks;
use crate::result::CUresult;
use crate::sync::Mutex;

thread_local! {
    /// The calling thread's contexts; the last one is current.
    static STACK: RefCell<Vec<Option<Arc<Context>>>> = const { RefCell::new(Vec::new()) };
}

/// Returns the calling thread's current context, whatever its state.
///
/// # Errors
/// `CUDA_ERROR_INVALID_CONTEXT` when the thread has none.
pub fn current_in_any_state() -> Result<Arc<Context>, CUresult> {
    STACK
        .try_with(|stack| stack.borrow().last().cloned().flatten())
        .ok()
        .flatten()
        .ok_or(CUresult::ERROR_INVALID_CONTEXT)
}

/// Returns the calling thread's current context.
///
/// # Errors
/// `CUDA_ERROR_INVALID_CONTEXT` when the thread has none; the context's sticky error.
pub fn current() -> Result<Arc<Context>, CUresult> {
    let context = current_in_any_state()?;
    context.check()?;
    Ok(context)
}

/// Returns the handle of the current context, null if there is none.
pub(super) fn current_handle() -> *mut c_void {
    STACK
        .try_with(|stack| {
            stack
                .borrow()
                .last()
                .and_then(Option::as_ref)
                .map(|c| c.handle())
        })
        .ok()
        .flatten()
        .unwrap_or(std::ptr::null_mut())
}

/// Replaces the current context.
pub(super) fn set_current(context: Option<Arc<Context>>) {
    let _ = STACK.try_with(|stack| {
        let stack = &mut *stack.borrow_mut();
        stack.pop();
        if context.is_some() || !stack.is_empty() {
            stack.push(context);
        }
    });
}

/// Makes a context current until it is popped.
pub(super) fn push(context: Arc<Context>) {
    let _ = STACK.try_with(|stack| stack.borrow_mut().push(Some(context)));
}

/// Removes the current context from the thread's stack.
pub(super) fn pop() -> Result<Arc<Context>, CUresult> {
    STACK
        .try_with(|stack| stack.borrow_mut().pop())
        .ok()
        .flatten()
        .flatten()
        .ok_or(CUresult::ERROR_INVALID_CONTEXT)
}

/// The primary context of a device and its retain count.
#[derive(Default)]
struct Primary {
    count: u32,
    context: Option<Arc<Context>>,
    flags: u32,
}

fn primaries(device: i32) -> Result<&'static Mutex<Primary>, CUresult> {
    static PRIMARIES: OnceLock<Vec<Mutex<Primary>>> = OnceLock::new();
    if forks::is_child() {
        return Err(CUresult::ERROR_NOT_INITIALIZED);
    }
    let all = PRIMARIES.get_or_init(|| {
        (0..crate::visible::count())
            .map(|_| Mutex::default())
            .collect()
    });
    usize::try_from(device)
        .ok()
        .and_then(|device| all.get(device))
        .ok_or(CUresult::ERROR_INVALID_DEVICE)
}

impl Primary {
    fn get(&mut self, device: i32) -> Result<Arc<Context>, CUresult> {
        if let Some(context) = &self.context {
            return Ok(Arc::clone(context));
        }
        let context = Context::create(device, true, self.flags)?;
        self.context = Some(Arc::clone(&context));
        Ok(context)
    }
}

/// Returns the primary context of a device, and creates it if necessary (as the CUDA runtime inside NCCL does). Does not retain
/// it.
pub fn primary(device: i32) -> Result<Arc<Context>, CUresult> {
    primaries(device)?.lock().get(device)
}

/// Retains the primary context and returns it.
pub fn retain(device: i32) -> Result<Arc<Context>, CUresult> {
    let mut primary = primaries(device)?.lock();
    let context = primary.get(device)?;
    primary.count += 1;
    Ok(context)
}

/// Releases the primary context; the last release destroys it.
pub fn release(device: i32) -> Result<(), CUresult> {
    let mut primary = primaries(device)?.lock();
    primary.count = primary
        .count
        .checked_sub(1)
        .ok_or(CUresult::ERROR_INVALID_CONTEXT)?;
    let last = if primary.count == 0 {
        primary.context.take()
    } else {
        None
    };
    drop(primary);
    if let Some(context) = last {
        context.destroy();
    }
    Ok(())
}

/// Destroys the primary context whatever its count.
pub(super) fn reset(device: i32) -> Result<(), CUresult> {
    let context = primaries(device)?.lock().context.take();
    if let Some(context) = context {
        context.destroy();
    }
    Ok(())
}

/// Returns the flags of the primary context, and whether it is alive.
pub(super) fn primary_state(device: i32) -> Result<(u32, bool), CUresult> {
    let primary = primaries(device)?.lock();
    Ok((primary.flags, primary.context.is_some()))
}

/// Sets the flags of the primary context.
pub(super) fn set_primary_flags(device: i32, flags: u32) -> Result<(), CUresult> {
    let mut primary = primaries(device)?.lock();
    primary.flags = flags;
    if let Some(context) = &primary.context {
        context.flags().store(flags, Ordering::Relaxed);
    }
    Ok(())
}
