//! The driver, found by `dlopen` and `dlsym` as a foreign client finds it.
#![allow(dead_code)]

use std::ffi::{CStr, c_int, c_uint, c_void};
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

pub(crate) const SUCCESS: u32 = 0;
pub(crate) const INVALID_VALUE: u32 = 1;
pub(crate) const OUT_OF_MEMORY: u32 = 2;
pub(crate) const INVALID_CONTEXT: u32 = 201;
pub(crate) const NOT_READY: u32 = 600;
pub(crate) const ILLEGAL_ADDRESS: u32 = 700;
pub(crate) const NOT_SUPPORTED: u32 = 801;
pub(crate) const LAUNCH_FAILED: u32 = 719;

/// The address of a driver function.
pub(crate) fn symbol(name: &CStr) -> *mut c_void {
    static HANDLE: OnceLock<usize> = OnceLock::new();
    let handle = *HANDLE.get_or_init(|| {
        nccl_emulator::install().unwrap();
        // SAFETY: the emulator's stand-in, which has no code.
        let handle = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW) };
        assert!(!handle.is_null());
        handle.expose_provenance()
    });
    let handle = std::ptr::with_exposed_provenance_mut(handle);
    // SAFETY: a live handle and a C string.
    let address = unsafe { libc::dlsym(handle, name.as_ptr()) };
    assert!(!address.is_null(), "{name:?}");
    address
}

/// Calls a driver function by name, with the types that its arguments have here.
macro_rules! call {
    ($name:literal $(, $argument:expr => $type:ty)* $(,)?) => {{
        type Function = unsafe extern "C" fn($($type),*) -> u32;
        let address = $crate::common::symbol($name);
        // SAFETY: the types are those of the function in cuda.h.
        let function = unsafe { std::mem::transmute::<*mut std::ffi::c_void, Function>(address) };
        // SAFETY: the test keeps the function's contract, or breaks it where the emulator looks.
        unsafe { function($($argument),*) }
    }};
}
pub(crate) use call;

/// Asserts that a driver function succeeds.
macro_rules! done {
    ($($call:tt)*) => { assert_eq!(call!($($call)*), $crate::common::SUCCESS) };
}
pub(crate) use done;

/// Makes the primary context of a device current.
pub(crate) fn context(device: c_int) -> *mut c_void {
    let mut context = std::ptr::null_mut();
    done!(c"cuInit", 0 => c_uint);
    done!(c"cuDevicePrimaryCtxRetain", &raw mut context => *mut *mut c_void, device => c_int);
    done!(c"cuCtxSetCurrent", context => *mut c_void);
    context
}

pub(crate) fn allocate(size: usize) -> u64 {
    let mut address = 0;
    done!(c"cuMemAlloc_v2", &raw mut address => *mut u64, size => usize);
    address
}

/// A non-blocking stream.
pub(crate) fn stream() -> *mut c_void {
    let mut stream = std::ptr::null_mut();
    done!(c"cuStreamCreate", &raw mut stream => *mut *mut c_void, 1 => c_uint);
    stream
}

/// A number of this process's that devices use.
pub(crate) fn pinned() -> (&'static AtomicU64, u64) {
    let mut place = std::ptr::null_mut::<c_void>();
    done!(c"cuMemHostAlloc", &raw mut place => *mut *mut c_void, 64 => usize, 3 => c_uint);
    // SAFETY: new memory, aligned to a page, that is never freed.
    let number = unsafe { AtomicU64::from_ptr(place.cast()) };
    number.store(0, Ordering::Relaxed);
    let mut address = 0;
    done!(c"cuMemHostGetDevicePointer_v2", &raw mut address => *mut u64, place => *mut c_void, 0 => c_uint);
    assert_eq!(address, place.addr() as u64);
    (number, address)
}

/// Holds a stream up for a time. The number is not 0 any more when it is over.
pub(crate) fn hold(stream: *mut c_void, time: Duration) -> &'static AtomicU64 {
    let (number, address) = pinned();
    done!(c"cuStreamWaitValue32_v2", stream => *mut c_void, address => u64, 1 => u32, 0 => c_uint);
    std::thread::spawn(move || {
        std::thread::sleep(time);
        number.store(1, Ordering::Release);
    });
    number
}

pub(crate) fn write(address: u64, bytes: &[u8]) {
    done!(c"cuMemcpyHtoD_v2", address => u64, bytes.as_ptr().cast() => *const c_void, bytes.len() => usize);
}

pub(crate) fn read(address: u64, len: usize) -> Vec<u8> {
    let mut out = vec![0; len];
    done!(c"cuMemcpyDtoH_v2", out.as_mut_ptr().cast() => *mut c_void, address => u64, len => usize);
    out
}

/// A pointer attribute.
pub(crate) fn attribute<T: Default>(attribute: c_int, address: u64) -> Result<T, u32> {
    let mut value = T::default();
    match call!(c"cuPointerGetAttribute", (&raw mut value).cast() => *mut c_void, attribute => c_int, address => u64)
    {
        SUCCESS => Ok(value),
        error => Err(error),
    }
}

/// The environment variable with the job of a child process, which plays another process of a test.
pub(crate) const JOB: &str = "CUDA_EMULATOR_TEST_JOB";

/// Runs the test `name` of this file in a separate process, with a job and a standard input.
pub(crate) fn child(name: &str, job: &str, input: Stdio) -> Output {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name, "--nocapture"])
        .env(JOB, job)
        .stdin(input)
        .output()
        .unwrap()
}
