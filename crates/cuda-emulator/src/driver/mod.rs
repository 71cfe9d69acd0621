//! The CUDA driver functions that cudarc uses, and those that other clients of NCCL need on the
//! way.
//!
//! One file for each kind of object. Every function is an `extern "C" fn` whose body runs inside
//! [`enter`], so that a panic becomes an error code; every one that is exported stands in its
//! file's `symbols()`. What the emulator cannot do is in [`refused`], by name.

mod capture;
pub mod context;
mod copy;
mod ctx;
pub mod device;
mod event;
mod graph;
mod host;
mod ipc;
mod launch;
mod lookup;
mod memory;
mod memory_pool;
mod module;
mod pointer;
mod refused;
pub mod result;
mod rows;
mod stream;
mod stream_memory;
mod virtual_memory;
pub mod visible;

use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

pub use result::CUresult;

use crate::elf::Symbol;
use crate::exec::{self, Stream};
use crate::hooks;
use crate::violations::{self, Violation, ViolationKind};
use context::Context;

/// The version of CUDA that the driver says it has.
pub(crate) const VERSION: i32 = 13_000;

/// `cuInit` was called in this process.
static STATE: AtomicU32 = AtomicU32::new(NEW);
const NEW: u32 = 0;
const READY: u32 = 1;
/// This process was forked from one where it was: threads and memory are not what they were.
const FORKED: u32 = 2;

/// The device of the calling thread's current context.
///
/// # Errors
/// `CUDA_ERROR_INVALID_CONTEXT` when the thread has none.
pub fn current_device() -> Result<i32, CUresult> {
    Ok(context::current_in_any_state()?.device())
}

/// Name and address of every driver function the emulator has.
pub fn symbols() -> Vec<Symbol> {
    let mut all = Vec::new();
    all.extend(lookup::symbols());
    all.extend(device::symbols());
    all.extend(ctx::symbols());
    all.extend(stream::symbols());
    all.extend(capture::symbols());
    all.extend(graph::symbols());
    all.extend(event::symbols());
    all.extend(memory::symbols());
    all.extend(memory_pool::symbols());
    all.extend(virtual_memory::symbols());
    all.extend(pointer::symbols());
    all.extend(host::symbols());
    all.extend(ipc::symbols());
    all.extend(stream_memory::symbols());
    all.extend(copy::symbols());
    all.extend(rows::symbols());
    all.extend(module::symbols());
    all.extend(launch::symbols());
    all.extend(refused::symbols());
    all.extend(refused::ignored());
    all
}

/// Whether faults can sit at this function: at those that do something on a driver that was started.
pub fn has_faults_at(function: &str) -> bool {
    let mut all = device::symbols();
    all.extend(ctx::symbols());
    all.extend(stream::symbols());
    all.extend(capture::symbols());
    all.extend(graph::symbols());
    all.extend(event::symbols());
    all.extend(memory::symbols());
    all.extend(memory_pool::symbols());
    all.extend(virtual_memory::symbols());
    all.extend(pointer::symbols());
    all.extend(host::symbols());
    all.extend(ipc::symbols());
    all.extend(stream_memory::symbols());
    all.extend(copy::symbols());
    all.extend(rows::symbols());
    all.extend(module::symbols());
    all.extend(launch::symbols());
    all.iter()
        .filter_map(|(name, _)| name.to_str().ok())
        .any(|name| without_version(name) == function)
}

/// The name as C programs write it: `cuMemAlloc` for `cuMemAlloc_v2`.
fn without_version(name: &str) -> &str {
    match name.rsplit_once("_v") {
        Some((plain, version)) if version.bytes().all(|byte| byte.is_ascii_digit()) => plain,
        _ => name,
    }
}

/// Runs the body of a driver function, on a driver that was started, after the faults at it.
fn enter(function: &'static str, body: impl FnOnce() -> Result<(), CUresult>) -> CUresult {
    if STATE.load(Ordering::Acquire) != READY {
        return CUresult::ERROR_NOT_INITIALIZED;
    }
    if exec::in_host_function() {
        return CUresult::ERROR_NOT_PERMITTED;
    }
    caught(|| {
        hooks::call(function)?;
        body()
    })
}

/// Runs the body of a driver function that needs no started driver.
pub(crate) fn caught(body: impl FnOnce() -> Result<(), CUresult>) -> CUresult {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => CUresult::SUCCESS,
        Ok(Err(error)) => error,
        Err(_) => {
            eprintln!(
                "nccl-emulator: internal error: a driver function panicked (above); it returns CUDA_ERROR_UNKNOWN"
            );
            CUresult::ERROR_UNKNOWN
        }
    }
}

/// Stores a result where the caller wants it.
///
/// # Safety
/// `place` is null or may be written.
unsafe fn store<T>(place: *mut T, value: T) -> Result<(), CUresult> {
    if place.is_null() {
        return Err(CUresult::ERROR_INVALID_VALUE);
    }
    // SAFETY: not null, and the caller promises the rest.
    unsafe { place.write(value) };
    Ok(())
}

/// The stream of a handle, in the current context if it is an implicit one.
fn stream_of(handle: *mut c_void) -> Result<Arc<Stream>, CUresult> {
    if handle.addr() > 2 {
        match exec::named(handle) {
            Some(stream) => Ok(stream),
            None => Err(bad_handle("stream", handle)),
        }
    } else {
        exec::lookup(handle, &context::current()?)
    }
}

/// Tells of a handle that belongs to nothing that lives.
#[cold]
fn bad_handle(what: &str, handle: *mut c_void) -> CUresult {
    if !handle.is_null() {
        let text = format!("{handle:p} is no {what}: it was destroyed, or never was one");
        violations::record(Violation::new(ViolationKind::UseAfterDestroy, None, text));
    }
    CUresult::ERROR_INVALID_HANDLE
}

/// What a call returns that was given a bad range of device memory. An address that is none is
/// refused; memory that is not there any more, or not there at that length, is lost to the device,
/// and the context with it.
#[cold]
fn refuse(violation: Violation, context: &Context) -> CUresult {
    match violation.kind() {
        ViolationKind::UseAfterFree
        | ViolationKind::OutOfBounds
        | ViolationKind::UseBeforeAllocation => {
            context.fail(violation);
            CUresult::ERROR_ILLEGAL_ADDRESS
        }
        _ => {
            violations::record(violation);
            CUresult::ERROR_INVALID_VALUE
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_symbol_is_listed_twice() {
        let mut names: Vec<_> = symbols().into_iter().map(|(name, _)| name).collect();
        let count = names.len();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), count);
    }

    #[test]
    fn every_function_at_which_a_fault_can_sit_looks_for_it() {
        let files = [
            (include_str!("device.rs"), device::symbols()),
            (include_str!("ctx.rs"), ctx::symbols()),
            (include_str!("stream.rs"), stream::symbols()),
            (include_str!("capture.rs"), capture::symbols()),
            (include_str!("graph.rs"), graph::symbols()),
            (include_str!("event.rs"), event::symbols()),
            (include_str!("memory.rs"), memory::symbols()),
            (include_str!("memory_pool.rs"), memory_pool::symbols()),
            (include_str!("virtual_memory.rs"), virtual_memory::symbols()),
            (include_str!("pointer.rs"), pointer::symbols()),
            (include_str!("host.rs"), host::symbols()),
            (include_str!("ipc.rs"), ipc::symbols()),
            (include_str!("stream_memory.rs"), stream_memory::symbols()),
            (include_str!("copy.rs"), copy::symbols()),
            (include_str!("rows.rs"), rows::symbols()),
            (include_str!("module.rs"), module::symbols()),
            (include_str!("launch.rs"), launch::symbols()),
        ];
        for (text, symbols) in files {
            for (name, _) in symbols {
                let name = without_version(name.to_str().unwrap());
                assert!(has_faults_at(name), "{name}");
                let looks = ["enter", "make", "block"]
                    .iter()
                    .any(|function| text.contains(&format!("{function}(\"{name}\"")));
                assert!(looks, "{name}");
            }
        }
        assert!(!has_faults_at("cuLaunchCooperativeKernel"));
    }

    #[test]
    fn a_panic_becomes_an_error_code() {
        assert_eq!(caught(|| panic!("on purpose")), CUresult::ERROR_UNKNOWN);
    }
}
