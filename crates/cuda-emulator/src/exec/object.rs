//! User objects: resources of a program that live as long as the graphs that need them.
//!
//! An object is a host function, its destructor, and a reference count. The program, graphs and executables hold
//! references ([`Share`]). A thread that does nothing else calls the destructor, once, after the last release:
//! the releasing thread may hold locks that the destructor takes. Like any host function, the destructor must not
//! call the driver.

use std::ffi::c_void;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, mpsc};

use super::host_call::HostCall;
use crate::registry::Registry;
use crate::result::CUresult;
use crate::sync::{Mutex, MutexGuard};

/// All user objects with references.
pub static OBJECTS: Registry<UserObject> = Registry::new(0x52);

/// See the module.
pub struct UserObject {
    destructor: HostCall,
    references: Mutex<u32>,
    handle: AtomicUsize,
}

impl UserObject {
    /// Creates an object whose `references` belong to the caller, and returns its handle.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` for no reference, or for more than an `int` counts.
    pub fn create(destructor: HostCall, references: u32) -> Result<*mut c_void, CUresult> {
        if !(1..=MOST).contains(&references) {
            return Err(CUresult::ERROR_INVALID_VALUE);
        }
        let object = Arc::new(Self {
            destructor,
            references: Mutex::new(references),
            handle: AtomicUsize::new(0),
        });
        let handle = OBJECTS
            .insert(Arc::clone(&object))
            .ok_or(CUresult::ERROR_OUT_OF_MEMORY)?;
        object.handle.store(handle.addr(), Ordering::Release);
        Ok(handle)
    }

    fn references(&self) -> MutexGuard<'_, u32> {
        self.references.lock()
    }

    /// Adds references.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` if `count` is 0, the sum exceeds an `int`, or the last reference is gone.
    pub fn retain(&self, count: u32) -> Result<(), CUresult> {
        let mut references = self.references();
        let sum = references.checked_add(count).filter(|&sum| sum <= MOST);
        match sum {
            Some(sum) if count > 0 && *references > 0 => {
                *references = sum;
                Ok(())
            }
            _ => Err(CUresult::ERROR_INVALID_VALUE),
        }
    }

    /// Releases references. The last release ends the handle and calls the destructor.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` if `count` is 0 or exceeds the references.
    pub fn release(&self, count: u32) -> Result<(), CUresult> {
        let mut references = self.references();
        match references.checked_sub(count) {
            Some(left) if count > 0 => *references = left,
            _ => return Err(CUresult::ERROR_INVALID_VALUE),
        }
        if *references == 0 {
            drop(references);
            let handle = self.handle.load(Ordering::Acquire);
            OBJECTS.remove(std::ptr::without_provenance_mut(handle));
            call_apart(self.destructor);
        }
        Ok(())
    }
}

/// The largest reference count that CUDA supports.
const MOST: u32 = i32::MAX as u32;

/// References of a graph or an executable to one object; released when it is dropped.
pub(super) struct Share {
    object: Arc<UserObject>,
    count: u32,
}

impl Share {
    /// Takes ownership of `count` existing references.
    pub(super) fn of(object: Arc<UserObject>, count: u32) -> Self {
        Self { object, count }
    }

    /// Adds a reference for an executable or another graph.
    pub(super) fn again(&self) -> Result<Self, CUresult> {
        self.object.retain(1)?;
        Ok(Self::of(Arc::clone(&self.object), 1))
    }

    /// Whether these are references to `object`.
    pub(super) fn is_of(&self, object: &Arc<UserObject>) -> bool {
        Arc::ptr_eq(&self.object, object)
    }

    /// Releases `count` of the references. Returns true if none are left.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` if `count` is 0 or exceeds these references.
    pub(super) fn release(&mut self, count: u32) -> Result<bool, CUresult> {
        let left = self.count.checked_sub(count);
        let left = left.ok_or(CUresult::ERROR_INVALID_VALUE)?;
        self.object.release(count)?;
        self.count = left;
        Ok(left == 0)
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        if self.count > 0 {
            // Cannot fail: only this share releases its references.
            let _ = self.object.release(self.count);
        }
    }
}

/// Calls a host function on the destructor thread, or on this thread if that one could not be started.
fn call_apart(call: HostCall) {
    static THREAD: OnceLock<Option<mpsc::Sender<HostCall>>> = OnceLock::new();
    let thread = THREAD.get_or_init(|| {
        let (send, receive) = mpsc::channel();
        std::thread::Builder::new()
            .name("cuda-emulator destructors".to_owned())
            .spawn(move || receive.iter().for_each(HostCall::make))
            .ok()
            .map(|_| send)
    });
    let sent = thread.as_ref().is_some_and(|send| send.send(call).is_ok());
    if !sent {
        call.make();
    }
}
