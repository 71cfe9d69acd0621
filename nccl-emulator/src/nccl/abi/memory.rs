//! Memory: allocation, registration, windows, and the memory of a communicator itself.
//!
//! Registration only makes NCCL faster on a GPU. Registrations are counted, so that calls that NCCL refuses are refused here.

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use nccl_sys::{NCCL_SUSPEND_MEM, ncclComm_t, ncclCommMemStat_t, ncclResult_t, ncclWindow_t};

use super::guard::{call, not_null};
use crate::code::{IN_PROGRESS, INVALID_ARGUMENT, INVALID_USAGE, Result, UNHANDLED_CUDA};
use crate::nccl::communicator::{self, Communicator, SymmetricTask, WindowRequest, WindowSlot};
use crate::nccl::debug::{info, subsystem, warn};
use crate::nccl::environment;
use crate::nccl::group;
use crate::version;
use cuda_emulator::driver;
use cuda_emulator::memory;
use cuda_emulator::violations;

pub(super) unsafe extern "C" fn ncclMemAlloc(ptr: *mut *mut c_void, size: usize) -> ncclResult_t {
    call("ncclMemAlloc", std::ptr::null_mut(), || {
        if ptr.is_null() {
            warn!("Cuda failure 1 'invalid argument'");
            return Err(UNHANDLED_CUDA);
        }
        if size == 0 {
            // SAFETY: not null, and by the function's contract the caller's to write to.
            unsafe { ptr.write(std::ptr::null_mut()) };
            return Ok(());
        }
        let device = driver::current_device().unwrap_or(0);
        let address = memory::allocate(device, size as u64).map_err(|error| {
            warn!(
                "Cuda failure {} in ncclMemAlloc of {size} bytes on device {device}",
                error.0
            );
            UNHANDLED_CUDA
        })?;
        communicator::remember_allocation(address, size as u64);
        // SAFETY: not null, and by the function's contract the caller's to write to.
        unsafe { ptr.write(std::ptr::without_provenance_mut(address as usize)) };
        Ok(())
    })
}

/// First waits for the whole device, as freeing does on CUDA.
pub(super) unsafe extern "C" fn ncclMemFree(ptr: *mut c_void) -> ncclResult_t {
    call("ncclMemFree", std::ptr::null_mut(), || {
        if ptr.is_null() {
            return Ok(());
        }
        let address = ptr.addr() as u64;
        let free = || -> std::result::Result<(), violations::Violation> {
            let (device, _) = memory::resolve(address, 1)?;
            if let Ok(context) = driver::context::primary(device) {
                // A failed context has no running work.
                let _ = context.synchronize();
            }
            memory::free(address)?;
            communicator::forget_allocation(address);
            Ok(())
        };
        free().map_err(|violation| {
            warn!("Cuda failure 1 'invalid argument' in ncclMemFree of {ptr:p}");
            violations::record(violation.during("ncclMemFree"));
            UNHANDLED_CUDA
        })
    })
}

/// Queues a suspend or a resume; refuses it if the memory is not managed, or is shared with other communicators.
fn queue(communicator: &Arc<Communicator>, verb: &str, task: SymmetricTask) -> Result {
    if environment::switch("NCCL_DISABLE_MEM_MANAGER") {
        warn!("MemManager: {verb} not supported, memory manager is disabled");
        return Err(INVALID_USAGE);
    }
    let members = communicator.family.members();
    if members > 1 {
        warn!(
            "Memory {} not supported with split_share communicators (refCount={members})",
            verb.to_lowercase()
        );
        return Err(INVALID_USAGE);
    }
    group::add_symmetric(communicator, task);
    Ok(())
}

/// Ends the group of a suspend or a resume.
fn finish(communicator: &Communicator, result: Result) -> Result {
    let _ = group::record(result);
    match group::end() {
        Err(error) if error != IN_PROGRESS => Err(error),
        _ if !communicator.config.blocking => communicator.state(),
        _ => result,
    }
}

pub(super) unsafe extern "C" fn ncclCommSuspend(comm: ncclComm_t, flags: c_int) -> ncclResult_t {
    call("ncclCommSuspend", comm, || {
        let communicator = communicator::lookup(comm, "ncclCommSuspend")?;
        communicator.ensure_ready()?;
        group::start();
        let result = if flags & NCCL_SUSPEND_MEM != 0 {
            queue(&communicator, "Suspend", SymmetricTask::Suspend)
        } else {
            Ok(())
        };
        finish(&communicator, result)
    })
}

pub(super) unsafe extern "C" fn ncclCommResume(comm: ncclComm_t) -> ncclResult_t {
    call("ncclCommResume", comm, || {
        let communicator = communicator::lookup(comm, "ncclCommResume")?;
        communicator.ensure_ready()?;
        group::start();
        let result = queue(&communicator, "Resume", SymmetricTask::Resume);
        finish(&communicator, result)
    })
}

/// Reports no memory: the emulator's communicators have no device memory of their own.
pub(super) unsafe extern "C" fn ncclCommMemStats(
    comm: ncclComm_t,
    stat: ncclCommMemStat_t,
    value: *mut u64,
) -> ncclResult_t {
    call("ncclCommMemStats", comm, || {
        let communicator = communicator::lookup(comm, "ncclCommMemStats")?;
        communicator.ensure_ready()?;
        if value.is_null() {
            return Err(INVALID_ARGUMENT);
        }
        if environment::switch("NCCL_DISABLE_MEM_MANAGER") {
            warn!("MemManager: MemStats not supported, memory manager is disabled");
            return Err(INVALID_USAGE);
        }
        let answer = match stat {
            ncclCommMemStat_t::ncclStatGpuMemTotal
            | ncclCommMemStat_t::ncclStatGpuMemPersist
            | ncclCommMemStat_t::ncclStatGpuMemSuspend => 0,
            ncclCommMemStat_t::ncclStatGpuMemSuspended => {
                u64::from(communicator.family.is_suspended())
            }
            _ => return Err(INVALID_ARGUMENT),
        };
        // SAFETY: not null, and by the function's contract the caller's to write to.
        unsafe { value.write(answer) };
        Ok(())
    })
}

pub(super) unsafe extern "C" fn ncclCommRegister(
    comm: ncclComm_t,
    buff: *mut c_void,
    size: usize,
    handle: *mut *mut c_void,
) -> ncclResult_t {
    call("ncclCommRegister", comm, || {
        let disabled = environment::integer("NCCL_LOCAL_REGISTER") == Some(0);
        let value = if disabled {
            std::ptr::null_mut()
        } else {
            let communicator = communicator::lookup(comm, "ncclCommRegister")?;
            not_null(handle, "ncclCommRegister", "handle")?;
            communicator.ensure_ready()?;
            std::ptr::without_provenance_mut(communicator.register(buff.addr(), size))
        };
        not_null(handle, "ncclCommRegister", "handle")?;
        // SAFETY: not null, and by the function's contract the caller's to write to.
        unsafe { handle.write(value) };
        Ok(())
    })
}

pub(super) unsafe extern "C" fn ncclCommDeregister(
    comm: ncclComm_t,
    handle: *mut c_void,
) -> ncclResult_t {
    call("ncclCommDeregister", comm, || {
        let communicator = communicator::lookup(comm, "ncclCommRegister")?;
        if handle.is_null() || communicator.deregister(handle.addr()) {
            return Ok(());
        }
        warn!("Deregister: Could not find handle");
        Err(INVALID_USAGE)
    })
}

pub(super) unsafe extern "C" fn ncclCommWindowRegister(
    comm: ncclComm_t,
    buff: *mut c_void,
    size: usize,
    win: *mut ncclWindow_t,
    winFlags: c_int,
) -> ncclResult_t {
    call("ncclCommWindowRegister", comm, || {
        let communicator = communicator::lookup(comm, "ncclCommWindowRegister")?;
        not_null(win, "ncclCommWindowRegister", "win")?;
        // SAFETY: not null, and by the function's contract the caller's to write to.
        unsafe { win.write_unaligned(std::ptr::null_mut()) };
        let supported = communicator.supports_windows();
        // 2.27 does not check the memory if windows are not supported.
        let looks = supported || version::is_at_least(2, 28, 3);
        if looks && (buff.is_null() || size == 0) {
            warn!("invalid pointer {buff:p} / size {size}");
            return Err(INVALID_ARGUMENT);
        }
        if !supported {
            info!(
                subsystem::INIT,
                "Symmetric memory is not supported. cuMemEnable 0, globalGinSupport 0, cuMemGdrSupport 0"
            );
            return Ok(());
        }
        group::start();
        let result = communicator.ensure_ready();
        if result.is_ok() {
            let request = WindowRequest {
                address: buff.addr() as u64,
                size: size as u64,
                flags: winFlags,
                // SAFETY: the function's contract.
                out: unsafe { WindowSlot::new(win) },
            };
            group::add_symmetric(&communicator, SymmetricTask::Window(request));
        }
        let _ = group::record(result);
        match group::end() {
            // The state of the communicator shows that it is busy.
            Err(error) if error != IN_PROGRESS => Err(error),
            _ => result,
        }
    })
}

pub(super) unsafe extern "C" fn ncclCommWindowDeregister(
    comm: ncclComm_t,
    win: ncclWindow_t,
) -> ncclResult_t {
    call("ncclCommWindowDeregister", comm, || {
        let communicator = communicator::lookup(comm, "ncclCommWindowDeregister")?;
        if win.is_null() {
            return Ok(());
        }
        communicator::deregister_window(&communicator, win)
    })
}

pub(super) unsafe extern "C" fn ncclWinGetUserPtr(
    comm: ncclComm_t,
    win: ncclWindow_t,
    outUserPtr: *mut *mut c_void,
) -> ncclResult_t {
    call("ncclWinGetUserPtr", comm, || {
        let communicator = communicator::lookup(comm, "ncclWinGetUserPtr")?;
        not_null(outUserPtr, "ncclWinGetUserPtr", "outUserPtr")?;
        let address = if communicator.supports_windows() {
            not_null(win, "ncclWinGetUserPtr", "win")?;
            communicator::find_window(&communicator, win, "ncclWinGetUserPtr")?.address
        } else {
            0
        };
        let pointer = std::ptr::without_provenance_mut(address as usize);
        // SAFETY: not null, and by the function's contract the caller's to write to.
        unsafe { outUserPtr.write(pointer) };
        Ok(())
    })
}
