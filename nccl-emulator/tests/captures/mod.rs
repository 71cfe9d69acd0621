//! Helpers for the tests of captures and graphs.

// Each test file uses its own part of this.
#![allow(dead_code)]

use std::ffi::c_void;
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use cudarc::driver::sys::CUresult as Code;
use cudarc::driver::sys::CUstreamCaptureMode as Mode;
use cudarc::driver::sys::CUstreamCaptureStatus as Status;
use cudarc::driver::{CudaContext, CudaEvent, CudaGraph, CudaStream, DriverError, result, sys};

pub(crate) const GLOBAL: Mode = Mode::CU_STREAM_CAPTURE_MODE_GLOBAL;
pub(crate) const THREAD_LOCAL: Mode = Mode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
pub(crate) const RELAXED: Mode = Mode::CU_STREAM_CAPTURE_MODE_RELAXED;
pub(crate) const NO_FLAGS: sys::CUgraphInstantiate_flags = sys::CUgraphInstantiate_flags(0);

/// Opens device 0 without cudarc's event tracking: the tests order accesses themselves.
pub(crate) fn device() -> Arc<CudaContext> {
    nccl_emulator::install().unwrap();
    let context = CudaContext::new(0).unwrap();
    // SAFETY: the tests order all accesses themselves, or leave them unordered on purpose.
    unsafe { context.disable_event_tracking() };
    context
}

pub(crate) fn code<T>(result: Result<T, DriverError>) -> Code {
    match result {
        Ok(_) => Code::CUDA_SUCCESS,
        Err(error) => error.0,
    }
}

pub(crate) fn event(context: &Arc<CudaContext>) -> CudaEvent {
    context.new_event(None).unwrap()
}

pub(crate) fn end(stream: &Arc<CudaStream>) -> CudaGraph {
    stream.end_capture(NO_FLAGS).unwrap().unwrap()
}

/// Asserts that the capture of `stream` is invalidated, and ends it.
pub(crate) fn assert_void(stream: &Arc<CudaStream>) {
    assert_eq!(
        stream.capture_status().unwrap(),
        Status::CU_STREAM_CAPTURE_STATUS_INVALIDATED
    );
    assert_eq!(
        code(stream.end_capture(NO_FLAGS)),
        Code::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
    );
    assert_eq!(
        stream.capture_status().unwrap(),
        Status::CU_STREAM_CAPTURE_STATUS_NONE
    );
}

pub(crate) fn nodes(graph: &CudaGraph) -> usize {
    let mut count = 0;
    // SAFETY: the graph lives, and the call only reads its number of nodes.
    unsafe { sys::cuGraphGetNodes(graph.cu_graph(), std::ptr::null_mut(), &raw mut count) }
        .result()
        .unwrap();
    count
}

/// Enqueues a host function that may run any number of times.
pub(crate) fn call(stream: &CudaStream, function: impl Fn() + Send + Sync + 'static) {
    type Function = Box<dyn Fn() + Send + Sync>;
    unsafe extern "C" fn run(argument: *mut c_void) {
        // SAFETY: the box is never freed.
        let function = unsafe { &*argument.cast::<Function>() };
        function();
    }
    let function: Function = Box::new(function);
    let argument = Box::into_raw(Box::new(function)).cast();
    // SAFETY: the argument is never freed, so it is valid for every call.
    unsafe { result::stream::launch_host_function(stream.cu_stream(), run, argument) }.unwrap();
}

pub(crate) fn fill(
    stream: &CudaStream,
    address: u64,
    value: u8,
    bytes: usize,
) -> Result<(), DriverError> {
    // SAFETY: the memory belongs to the test; otherwise the emulator reports it.
    unsafe { result::memset_d8_async(address, value, bytes, stream.cu_stream()) }
}

/// Allocates zeroed device memory that stays allocated until the test frees it.
pub(crate) fn memory(context: &CudaContext, bytes: usize) -> u64 {
    context.bind_to_thread().unwrap();
    // SAFETY: a new allocation, and a fill of all of it.
    let address = unsafe {
        let address = result::malloc_sync(bytes).unwrap();
        result::memset_d8_sync(address, 0, bytes).unwrap();
        address
    };
    // The streams of the tests do not wait for the default one.
    context.synchronize().unwrap();
    address
}

pub(crate) fn read(address: u64, bytes: usize) -> Vec<u8> {
    let mut values = vec![0; bytes];
    // SAFETY: the memory has at least that many bytes.
    unsafe { result::memcpy_dtoh_sync(&mut values, address) }.unwrap();
    values
}

/// Blocks a stream until the sender sends or is dropped, for at most 30 seconds.
pub(crate) fn hold(stream: &CudaStream) -> mpsc::Sender<()> {
    let (send, receive) = mpsc::channel();
    let receive = Mutex::new(receive);
    call(stream, move || {
        let _ = receive
            .lock()
            .unwrap()
            .recv_timeout(Duration::from_secs(30));
    });
    send
}
