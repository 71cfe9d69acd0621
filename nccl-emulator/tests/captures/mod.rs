//! What tests of captures and graphs share.

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

/// A device whose streams the test orders itself.
pub(crate) fn device() -> Arc<CudaContext> {
    nccl_emulator::install().unwrap();
    let context = CudaContext::new(0).unwrap();
    // SAFETY: the tests order all accesses themselves, or mean not to.
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

/// Ends a capture that is void.
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
    // SAFETY: the graph lives, and only its number of nodes is asked for.
    unsafe { sys::cuGraphGetNodes(graph.cu_graph(), std::ptr::null_mut(), &raw mut count) }
        .result()
        .unwrap();
    count
}

/// Puts a host function on a stream that may be called any number of times.
pub(crate) fn call(stream: &CudaStream, function: impl Fn() + Send + Sync + 'static) {
    type Function = Box<dyn Fn() + Send + Sync>;
    unsafe extern "C" fn run(argument: *mut c_void) {
        // SAFETY: the box is never freed.
        let function = unsafe { &*argument.cast::<Function>() };
        function();
    }
    let function: Function = Box::new(function);
    let argument = Box::into_raw(Box::new(function)).cast();
    // SAFETY: the argument is good for ever.
    unsafe { result::stream::launch_host_function(stream.cu_stream(), run, argument) }.unwrap();
}

pub(crate) fn fill(
    stream: &CudaStream,
    address: u64,
    value: u8,
    bytes: usize,
) -> Result<(), DriverError> {
    // SAFETY: the memory is the test's, or the emulator finds out.
    unsafe { result::memset_d8_async(address, value, bytes, stream.cu_stream()) }
}

/// Memory that nothing frees behind the test's back.
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
    // SAFETY: the memory has as many bytes.
    unsafe { result::memcpy_dtoh_sync(&mut values, address) }.unwrap();
    values
}

/// Holds a stream until it is told to go on.
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
