//! The driver's functions, with their types, looked up by name: the runtime calls the driver like any program, so that injected
//! faults also affect the runtime.

// Named as in cuda.h.
#![allow(non_snake_case)]

use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

use super::error::Code;
use crate::driver::{self, CUresult};

/// `CUipcMemHandle`, which travels by value.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct IpcMemHandle(pub(super) [u8; 64]);

/// `CUlaunchConfig`.
#[repr(C)]
pub(super) struct LaunchConfig {
    pub(super) grid: [c_uint; 3],
    pub(super) block: [c_uint; 3],
    pub(super) shared: c_uint,
    pub(super) stream: *mut c_void,
    pub(super) attributes: *mut c_void,
    pub(super) attribute_count: c_uint,
}

fn address_of(name: &CStr) -> Result<*const c_void, Code> {
    static ALL: OnceLock<HashMap<&'static CStr, usize>> = OnceLock::new();
    let all = ALL.get_or_init(|| {
        driver::symbols()
            .into_iter()
            .map(|(name, address)| (name, address.expose_provenance()))
            .collect()
    });
    match all.get(name) {
        Some(&address) => Ok(std::ptr::with_exposed_provenance(address)),
        None => {
            eprintln!(
                "cuda-emulator: the driver has no {}: a function of the CUDA runtime that needs it returns \
                 cudaErrorNotSupported",
                name.to_string_lossy()
            );
            Err(CUresult::ERROR_NOT_SUPPORTED.into())
        }
    }
}

macro_rules! functions {
    ($($name:ident($($argument:ident: $type:ty),*);)*) => {
        $(
            /// # Safety
            /// As the function of this name in cuda.h.
            // The number of arguments is that of the C function.
            #[allow(clippy::too_many_arguments)]
            pub(super) unsafe fn $name($($argument: $type),*) -> Result<(), Code> {
                const NAME: &CStr = match CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                    Ok(name) => name,
                    Err(_) => c"",
                };
                static ADDRESS: OnceLock<usize> = OnceLock::new();
                let address = match ADDRESS.get() {
                    Some(&address) => std::ptr::with_exposed_provenance(address),
                    None => {
                        let address = address_of(NAME)?;
                        let _ = ADDRESS.set(address.expose_provenance());
                        address
                    }
                };
                type Function = unsafe extern "C" fn($($type),*) -> CUresult;
                // SAFETY: the driver's function of this name, and its types in cuda.h.
                let function = unsafe { std::mem::transmute::<*const c_void, Function>(address) };
                // SAFETY: the caller keeps the function's contract.
                match unsafe { function($($argument),*) } {
                    CUresult::SUCCESS => Ok(()),
                    error => Err(error.into()),
                }
            }
        )*

        #[cfg(test)]
        const NAMES: &[&str] = &[$(stringify!($name)),*];
    };
}

functions! {
    cuInit(flags: c_uint);
    cuDriverGetVersion(place: *mut c_int);
    cuGetProcAddress_v2(name: *const c_char, place: *mut *mut c_void, version: c_int, flags: u64, status: *mut c_uint);

    cuDeviceGetCount(place: *mut c_int);
    cuDeviceGetName(place: *mut c_char, length: c_int, device: c_int);
    cuDeviceGetUuid_v2(place: *mut c_void, device: c_int);
    cuDeviceTotalMem_v2(place: *mut usize, device: c_int);
    cuDeviceGetAttribute(place: *mut c_int, attribute: c_int, device: c_int);
    cuDeviceCanAccessPeer(place: *mut c_int, device: c_int, peer: c_int);
    cuDeviceGetPCIBusId(place: *mut c_char, length: c_int, device: c_int);
    cuDeviceGetByPCIBusId(place: *mut c_int, id: *const c_char);
    cuDevicePrimaryCtxRetain(place: *mut *mut c_void, device: c_int);
    cuDevicePrimaryCtxRelease_v2(device: c_int);

    cuCtxSetCurrent(context: *mut c_void);
    cuCtxSetLimit(limit: c_int, value: usize);
    cuCtxSynchronize();
    cuCtxEnablePeerAccess(context: *mut c_void, flags: c_uint);
    cuCtxDisablePeerAccess(context: *mut c_void);

    cuStreamCreate(place: *mut *mut c_void, flags: c_uint);
    cuStreamDestroy_v2(stream: *mut c_void);
    cuStreamSynchronize(stream: *mut c_void);
    cuStreamWaitEvent(stream: *mut c_void, event: *mut c_void, flags: c_uint);
    cuStreamGetId(stream: *mut c_void, place: *mut u64);
    cuLaunchHostFunc(stream: *mut c_void, function: Option<unsafe extern "C" fn(*mut c_void)>, argument: *mut c_void);

    cuEventCreate(place: *mut *mut c_void, flags: c_uint);
    cuEventDestroy_v2(event: *mut c_void);
    cuEventElapsedTime(milliseconds: *mut f32, start: *mut c_void, end: *mut c_void);
    cuEventQuery(event: *mut c_void);
    cuEventRecord(event: *mut c_void, stream: *mut c_void);
    cuEventSynchronize(event: *mut c_void);

    cuStreamIsCapturing(stream: *mut c_void, place: *mut c_uint);
    cuThreadExchangeStreamCaptureMode(mode: *mut c_uint);
    cuStreamGetCaptureInfo_v3(
        stream: *mut c_void, status: *mut c_uint, id: *mut u64, graph: *mut *mut c_void,
        nodes: *mut *const c_void, edges: *mut *const c_void, count: *mut usize
    );
    cuStreamUpdateCaptureDependencies_v2(
        stream: *mut c_void, nodes: *const *mut c_void, edges: *const c_void, count: usize, flags: c_uint
    );
    cuGraphAddDependencies_v2(
        graph: *mut c_void, from: *const *mut c_void, to: *const *mut c_void, edges: *const c_void, count: usize
    );
    cuGraphAddEventRecordNode(
        place: *mut *mut c_void, graph: *mut c_void, nodes: *const *mut c_void, count: usize, event: *mut c_void
    );
    cuUserObjectCreate(
        place: *mut *mut c_void, argument: *mut c_void,
        destructor: Option<unsafe extern "C" fn(*mut c_void)>, references: c_uint, flags: c_uint
    );
    cuGraphRetainUserObject(graph: *mut c_void, object: *mut c_void, count: c_uint, flags: c_uint);

    cuMemAlloc_v2(place: *mut u64, size: usize);
    cuMemFree_v2(address: u64);
    cuMemFreeAsync(address: u64, stream: *mut c_void);
    cuMemAllocFromPoolAsync(place: *mut u64, size: usize, pool: *mut c_void, stream: *mut c_void);
    cuMemPoolCreate(place: *mut *mut c_void, properties: *const c_void);
    cuMemPoolDestroy(pool: *mut c_void);
    cuMemPoolSetAttribute(pool: *mut c_void, attribute: c_int, value: *mut c_void);
    cuMemHostAlloc(place: *mut *mut c_void, size: usize, flags: c_uint);
    cuMemFreeHost(address: *mut c_void);
    cuMemHostRegister_v2(address: *mut c_void, size: usize, flags: c_uint);
    cuMemHostUnregister(address: *mut c_void);
    cuMemHostGetDevicePointer_v2(place: *mut u64, address: *mut c_void, flags: c_uint);
    cuIpcGetMemHandle(place: *mut IpcMemHandle, address: u64);
    cuIpcOpenMemHandle_v2(place: *mut u64, handle: IpcMemHandle, flags: c_uint);
    cuIpcCloseMemHandle(address: u64);
    cuMemcpy(to: u64, from: u64, size: usize);
    cuMemcpyAsync(to: u64, from: u64, size: usize, stream: *mut c_void);
    cuMemsetD8_v2(to: u64, value: u8, size: usize);
    cuMemsetD8Async(to: u64, value: u8, size: usize, stream: *mut c_void);
    cuMemcpyBatchAsync_v2(
        to: *const u64, from: *const u64, sizes: *const usize, count: usize,
        attributes: *const c_void, first: *const usize, attribute_count: usize, stream: *mut c_void
    );
    cuPointerGetAttributes(count: c_uint, attributes: *const c_int, places: *const *mut c_void, address: u64);

    cuFuncGetAttribute(place: *mut c_int, attribute: c_int, function: *mut c_void);
    cuFuncSetAttribute(function: *mut c_void, attribute: c_int, value: c_int);
    cuLaunchKernel(
        function: *mut c_void, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint,
        block_x: c_uint, block_y: c_uint, block_z: c_uint, shared: c_uint, stream: *mut c_void,
        arguments: *mut *mut c_void, extra: *mut *mut c_void
    );
    cuLaunchKernelEx(
        config: *const LaunchConfig, function: *mut c_void, arguments: *mut *mut c_void, extra: *mut *mut c_void
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_driver_has_every_function_that_the_runtime_needs() {
        let have: Vec<_> = driver::symbols()
            .into_iter()
            .map(|(name, _)| name)
            .collect();
        let lacking: Vec<_> = NAMES
            .iter()
            .filter(|name| !have.iter().any(|have| have.to_bytes() == name.as_bytes()))
            .collect();
        // The batches of copies are the driver's business.
        assert!(
            lacking.iter().all(|name| **name == "cuMemcpyBatchAsync_v2"),
            "{lacking:?}"
        );
    }
}
