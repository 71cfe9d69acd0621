//! Functions that call one driver function with the same arguments, after initializing the driver or making a context current.

use std::ffi::{c_char, c_int, c_uint, c_void};

use super::error::{Code, run};
use super::{device, driver};
use stand_in_object::Symbol;

macro_rules! forwarded {
    ($($runtime:ident = $driver:ident($($argument:ident: $type:ty),*) after $before:ident;)*) => {
        pub(super) fn symbols() -> Vec<Symbol> {
            vec![$({
                unsafe extern "C" fn forward($($argument: $type),*) -> Code {
                    run(|| {
                        device::$before()?;
                        // SAFETY: both functions have the same requirements for their caller.
                        unsafe { driver::$driver($($argument),*) }
                    })
                }
                const NAME: &str = concat!(stringify!($runtime), "\0");
                let name = std::ffi::CStr::from_bytes_with_nul(NAME.as_bytes()).unwrap_or_default();
                (name, forward as *const c_void)
            },)*]
        }
    };
}

forwarded! {
    cudaDeviceGetAttribute = cuDeviceGetAttribute(place: *mut c_int, attribute: c_int, device: c_int) after start;
    cudaDeviceCanAccessPeer = cuDeviceCanAccessPeer(place: *mut c_int, device: c_int, peer: c_int) after start;
    cudaDeviceGetPCIBusId = cuDeviceGetPCIBusId(place: *mut c_char, length: c_int, device: c_int) after start;
    cudaDeviceGetByPCIBusId = cuDeviceGetByPCIBusId(place: *mut c_int, id: *const c_char) after start;
    cudaDeviceSetLimit = cuCtxSetLimit(limit: c_int, value: usize) after context;
    cudaDeviceSynchronize = cuCtxSynchronize() after context;

    cudaStreamCreateWithFlags = cuStreamCreate(place: *mut *mut c_void, flags: c_uint) after context;
    cudaStreamDestroy = cuStreamDestroy_v2(stream: *mut c_void) after context;
    cudaStreamSynchronize = cuStreamSynchronize(stream: *mut c_void) after context;
    cudaStreamWaitEvent = cuStreamWaitEvent(stream: *mut c_void, event: *mut c_void, flags: c_uint) after context;
    cudaStreamGetId = cuStreamGetId(stream: *mut c_void, place: *mut u64) after context;
    cudaLaunchHostFunc = cuLaunchHostFunc(
        stream: *mut c_void, function: Option<unsafe extern "C" fn(*mut c_void)>, argument: *mut c_void
    ) after context;

    cudaEventCreateWithFlags = cuEventCreate(place: *mut *mut c_void, flags: c_uint) after context;
    cudaEventDestroy = cuEventDestroy_v2(event: *mut c_void) after start;
    cudaEventElapsedTime = cuEventElapsedTime(
        milliseconds: *mut f32, start: *mut c_void, end: *mut c_void
    ) after start;
    cudaEventQuery = cuEventQuery(event: *mut c_void) after start;
    cudaEventRecord = cuEventRecord(event: *mut c_void, stream: *mut c_void) after context;
    cudaEventSynchronize = cuEventSynchronize(event: *mut c_void) after start;

    cudaStreamIsCapturing = cuStreamIsCapturing(stream: *mut c_void, place: *mut c_uint) after context;
    cudaThreadExchangeStreamCaptureMode = cuThreadExchangeStreamCaptureMode(mode: *mut c_uint) after start;
    cudaGraphAddEventRecordNode = cuGraphAddEventRecordNode(
        place: *mut *mut c_void, graph: *mut c_void, nodes: *const *mut c_void, count: usize, event: *mut c_void
    ) after context;
    cudaUserObjectCreate = cuUserObjectCreate(
        place: *mut *mut c_void, argument: *mut c_void,
        destructor: Option<unsafe extern "C" fn(*mut c_void)>, references: c_uint, flags: c_uint
    ) after start;
    cudaGraphRetainUserObject = cuGraphRetainUserObject(
        graph: *mut c_void, object: *mut c_void, count: c_uint, flags: c_uint
    ) after start;

    cudaMallocFromPoolAsync = cuMemAllocFromPoolAsync(
        place: *mut u64, size: usize, pool: *mut c_void, stream: *mut c_void
    ) after context;
    cudaMemPoolDestroy = cuMemPoolDestroy(pool: *mut c_void) after start;
    cudaMemPoolSetAttribute = cuMemPoolSetAttribute(
        pool: *mut c_void, attribute: c_int, value: *mut c_void
    ) after start;
    cudaHostRegister = cuMemHostRegister_v2(address: *mut c_void, size: usize, flags: c_uint) after context;
    cudaHostUnregister = cuMemHostUnregister(address: *mut c_void) after context;
    cudaHostGetDevicePointer = cuMemHostGetDevicePointer_v2(
        place: *mut u64, address: *mut c_void, flags: c_uint
    ) after context;
}
