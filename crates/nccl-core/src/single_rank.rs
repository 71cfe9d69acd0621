//! A world of one rank, which needs no libnccl: every operation is a copy, or does nothing.
//!
//! [`World::single`](crate::World::single) uses this table in place of NCCL's, so that a program that
//! can run on one GPU runs without NCCL, through the same code. The functions behave as NCCL's do for
//! one rank, as far as this crate calls them; the CUDA driver puts the copies on the stream.

use std::cell::{Cell, RefCell};
use std::ffi::{c_char, c_int, c_void};

use cudarc::driver::{result, sys as cuda};
use nccl_sys as sys;
use once_cell::sync::OnceCell;

use crate::error::Result;
use crate::library::Library;
use nccl_base::data_type::DataType;

const SUCCESS: sys::ncclResult_t = sys::ncclResult_t::ncclSuccess;
const INVALID: sys::ncclResult_t = sys::ncclResult_t::ncclInvalidArgument;

/// Returns the table as a library.
pub(crate) fn library() -> Result<Library> {
    static LIBRARY: OnceCell<Library> = OnceCell::new();
    LIBRARY
        .get_or_try_init(|| {
            // SAFETY: the functions below do what NCCL's of the same names do for one rank, and are part
            // of the program.
            unsafe {
                Library::from_table(table(), sys::Version::HEADER, "(none: a world of one rank)")
            }
        })
        .cloned()
}

/// Whether `other` is this library.
pub(crate) fn is(other: &Library) -> bool {
    library().is_ok_and(|own| std::ptr::eq(own.api(), other.api()))
}

fn table() -> sys::Api {
    sys::Api {
        ncclGetErrorString: Some(error_string),
        ncclGetUniqueId: Some(unique_id),
        ncclCommInitRankConfig: Some(init),
        ncclCommGetAsyncError: Some(async_error),
        ncclCommSplit: Some(split),
        ncclCommFinalize: Some(end),
        ncclCommDestroy: Some(end),
        ncclCommAbort: Some(end),
        ncclGroupStart: Some(group_start),
        ncclGroupEnd: Some(group_end),
        ncclMemAlloc: Some(allocate),
        ncclMemFree: Some(free),
        ncclCommRegister: Some(register),
        ncclCommDeregister: Some(deregister),
        ncclCommWindowRegister: Some(register_window),
        ncclCommWindowDeregister: Some(deregister_window),
        ncclSend: Some(send),
        ncclRecv: Some(recv),
        ncclAllReduce: Some(reduce),
        ncclReduceScatter: Some(reduce),
        ncclReduce: Some(reduce_to_root),
        ncclBroadcast: Some(from_root),
        ncclGather: Some(from_root),
        ncclScatter: Some(from_root),
        ncclAllGather: Some(copy),
        ncclAlltoAll: Some(copy),
        ..sys::Api::default()
    }
}

/// The messages that a group of this thread has recorded. A rank's messages to itself are paired at the end of the
/// group.
#[derive(Default)]
struct GroupedMessages {
    sent: Vec<(*const c_void, usize)>,
    received: Vec<(*mut c_void, usize, Queue)>,
}

/// Where a copy goes: a stream, and the communicator on which it was called.
type Queue = (sys::ncclComm_t, sys::cudaStream_t);

thread_local! {
    static DEPTH: Cell<usize> = const { Cell::new(0) };
    static MESSAGES: RefCell<GroupedMessages> = RefCell::new(GroupedMessages::default());
}

unsafe extern "C" fn error_string(code: sys::ncclResult_t) -> *const c_char {
    match code {
        SUCCESS => c"no error",
        sys::ncclResult_t::ncclUnhandledCudaError => c"unhandled cuda error",
        sys::ncclResult_t::ncclInvalidUsage => c"invalid usage",
        _ => c"invalid argument",
    }
    .as_ptr()
}

unsafe extern "C" fn unique_id(_: *mut sys::ncclUniqueId) -> sys::ncclResult_t {
    // Any contents will do, because there is no other rank.
    SUCCESS
}

unsafe extern "C" fn init(
    comm: *mut sys::ncclComm_t,
    ranks: c_int,
    _: sys::ncclUniqueId,
    _: c_int,
    _: *mut sys::ncclConfig_t,
) -> sys::ncclResult_t {
    if ranks != 1 {
        return INVALID;
    }
    let Ok(Some(context)) = result::ctx::get_current() else {
        return sys::ncclResult_t::ncclUnhandledCudaError;
    };
    // The handle is the context: all that later calls need of a communicator.
    // SAFETY: the caller passes a location for the communicator. The handle is never dereferenced.
    unsafe { comm.write(context.cast()) };
    SUCCESS
}

unsafe extern "C" fn split(
    parent: sys::ncclComm_t,
    _: c_int,
    _: c_int,
    child: *mut sys::ncclComm_t,
    _: *mut sys::ncclConfig_t,
) -> sys::ncclResult_t {
    // SAFETY: the caller passes a location for the communicator. The handle is never dereferenced.
    unsafe { child.write(parent) };
    SUCCESS
}

unsafe extern "C" fn async_error(
    _: sys::ncclComm_t,
    state: *mut sys::ncclResult_t,
) -> sys::ncclResult_t {
    // SAFETY: the caller passes a location for the state.
    unsafe { state.write(SUCCESS) };
    SUCCESS
}

unsafe extern "C" fn end(_: sys::ncclComm_t) -> sys::ncclResult_t {
    SUCCESS
}

unsafe extern "C" fn allocate(place: *mut *mut c_void, bytes: usize) -> sys::ncclResult_t {
    let mut address: cuda::CUdeviceptr = 0;
    // SAFETY: `address` is a valid location; the caller made the context current.
    let code = unsafe { cuda::cuMemAlloc_v2(&mut address, bytes) };
    if code != cuda::CUresult::CUDA_SUCCESS {
        return sys::ncclResult_t::ncclUnhandledCudaError;
    }
    // SAFETY: the caller passes a location for the address.
    unsafe { place.write(std::ptr::with_exposed_provenance_mut(address as usize)) };
    SUCCESS
}

unsafe extern "C" fn free(memory: *mut c_void) -> sys::ncclResult_t {
    // SAFETY: the caller passes an address from `allocate`, unused, in the same context.
    match unsafe { cuda::cuMemFree_v2(memory as cuda::CUdeviceptr) } {
        cuda::CUresult::CUDA_SUCCESS => SUCCESS,
        _ => sys::ncclResult_t::ncclUnhandledCudaError,
    }
}

unsafe extern "C" fn register(
    _: sys::ncclComm_t,
    _: *mut c_void,
    _: usize,
    handle: *mut *mut c_void,
) -> sys::ncclResult_t {
    // SAFETY: the caller passes a location for the handle. It is null: there is no other rank to
    // register with.
    unsafe { handle.write(std::ptr::null_mut()) };
    SUCCESS
}

unsafe extern "C" fn deregister(_: sys::ncclComm_t, _: *mut c_void) -> sys::ncclResult_t {
    SUCCESS
}

unsafe extern "C" fn register_window(
    _: sys::ncclComm_t,
    _: *mut c_void,
    _: usize,
    window: *mut sys::ncclWindow_t,
    _: c_int,
) -> sys::ncclResult_t {
    // SAFETY: as above.
    unsafe { window.write(std::ptr::null_mut()) };
    SUCCESS
}

unsafe extern "C" fn deregister_window(
    _: sys::ncclComm_t,
    _: sys::ncclWindow_t,
) -> sys::ncclResult_t {
    SUCCESS
}

unsafe extern "C" fn group_start() -> sys::ncclResult_t {
    DEPTH.set(DEPTH.get() + 1);
    SUCCESS
}

unsafe extern "C" fn group_end() -> sys::ncclResult_t {
    DEPTH.set(DEPTH.get().saturating_sub(1));
    if DEPTH.get() > 0 {
        return SUCCESS;
    }
    let GroupedMessages { sent, received } = MESSAGES.take();
    if sent.len() != received.len() {
        return sys::ncclResult_t::ncclInvalidUsage;
    }
    for ((from, bytes), (to, room, queue)) in sent.into_iter().zip(received) {
        if bytes != room {
            return sys::ncclResult_t::ncclInvalidUsage;
        }
        let code = put_copy(from, to, bytes, queue);
        if code != SUCCESS {
            return code;
        }
    }
    SUCCESS
}

fn size(count: usize, data_type: sys::ncclDataType_t) -> Option<usize> {
    DataType::from_raw(data_type.0)
        .size_in_bytes()
        .map(|size| count * size)
}

unsafe extern "C" fn send(
    buffer: *const c_void,
    count: usize,
    data_type: sys::ncclDataType_t,
    _: c_int,
    comm: sys::ncclComm_t,
    _: sys::cudaStream_t,
) -> sys::ncclResult_t {
    match size(count, data_type) {
        Some(bytes) if !comm.is_null() => {
            MESSAGES.with_borrow_mut(|messages| messages.sent.push((buffer, bytes)));
            SUCCESS
        }
        _ => INVALID,
    }
}

unsafe extern "C" fn recv(
    buffer: *mut c_void,
    count: usize,
    data_type: sys::ncclDataType_t,
    _: c_int,
    comm: sys::ncclComm_t,
    stream: sys::cudaStream_t,
) -> sys::ncclResult_t {
    match size(count, data_type) {
        Some(bytes) => {
            let message = (buffer, bytes, (comm, stream));
            MESSAGES.with_borrow_mut(|messages| messages.received.push(message));
            SUCCESS
        }
        None => INVALID,
    }
}

unsafe extern "C" fn copy(
    from: *const c_void,
    to: *mut c_void,
    count: usize,
    data_type: sys::ncclDataType_t,
    comm: sys::ncclComm_t,
    stream: sys::cudaStream_t,
) -> sys::ncclResult_t {
    match size(count, data_type) {
        Some(bytes) => put_copy(from, to, bytes, (comm, stream)),
        None => INVALID,
    }
}

unsafe extern "C" fn reduce(
    from: *const c_void,
    to: *mut c_void,
    count: usize,
    data_type: sys::ncclDataType_t,
    _: sys::ncclRedOp_t,
    comm: sys::ncclComm_t,
    stream: sys::cudaStream_t,
) -> sys::ncclResult_t {
    // SAFETY: the caller's promises are the same for both.
    unsafe { copy(from, to, count, data_type, comm, stream) }
}

unsafe extern "C" fn reduce_to_root(
    from: *const c_void,
    to: *mut c_void,
    count: usize,
    data_type: sys::ncclDataType_t,
    _: sys::ncclRedOp_t,
    _: c_int,
    comm: sys::ncclComm_t,
    stream: sys::cudaStream_t,
) -> sys::ncclResult_t {
    // SAFETY: the caller's promises are the same for both.
    unsafe { copy(from, to, count, data_type, comm, stream) }
}

unsafe extern "C" fn from_root(
    from: *const c_void,
    to: *mut c_void,
    count: usize,
    data_type: sys::ncclDataType_t,
    _: c_int,
    comm: sys::ncclComm_t,
    stream: sys::cudaStream_t,
) -> sys::ncclResult_t {
    // SAFETY: the caller's promises are the same for both.
    unsafe { copy(from, to, count, data_type, comm, stream) }
}

/// The largest handle of CUDA that names a default stream of whichever context is current (`CU_STREAM_PER_THREAD`).
const LAST_DEFAULT_STREAM: usize = 2;

/// Puts a copy on the stream; does nothing in place.
fn put_copy(
    from: *const c_void,
    to: *mut c_void,
    bytes: usize,
    (comm, stream): Queue,
) -> sys::ncclResult_t {
    if from == to.cast_const() || bytes == 0 {
        return SUCCESS;
    }
    // In a group over several devices, the context of another one may be current.
    if stream.addr() <= LAST_DEFAULT_STREAM {
        // SAFETY: the context in which the communicator was made, which keeps it alive.
        let bound = unsafe { result::ctx::set_current(comm.cast()) };
        if bound.is_err() {
            return sys::ncclResult_t::ncclUnhandledCudaError;
        }
    }
    // SAFETY: the callers of the functions above pass device memory of that many bytes, valid until the
    // work on the stream is done.
    let code = unsafe {
        cuda::cuMemcpyDtoDAsync_v2(
            to as cuda::CUdeviceptr,
            from as cuda::CUdeviceptr,
            bytes,
            stream.cast(),
        )
    };
    match code {
        cuda::CUresult::CUDA_SUCCESS => SUCCESS,
        _ => sys::ncclResult_t::ncclUnhandledCudaError,
    }
}

/// Returns a communicator of one rank.
#[cfg(test)]
pub(crate) fn communicator(
    stream: &std::sync::Arc<cudarc::driver::CudaStream>,
) -> crate::Communicator {
    let library = library().expect("the table");
    let id = crate::UniqueId::new(&library).expect("a token");
    crate::Communicator::builder("alone", id, 0, 1)
        .stream(stream)
        .with(|comm| comm.library = Some(library.clone()))
        .build()
        .expect("a communicator")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gate::Gate;

    #[test]
    fn copies_of_a_group_over_default_streams_of_two_devices_go_to_the_stream_of_their_communicator()
     {
        nccl_emulator::install_unless_gpu().expect("an emulator or a GPU");
        let streams =
            [0, 1].map(|device| crate::device(device).expect("a device").default_stream());
        let [a, b] = streams.each_ref().map(communicator);
        let memory = |at: usize, value: u8| streams[at].clone_htod(&[value; 4]).expect("memory");
        let (mut x, mut y, mut z) = (memory(0, 1), memory(0, 2), memory(0, 2));
        let (other, mut copied) = (memory(1, 3), memory(1, 4));
        // What is to be copied is written later.
        let work = Gate::closed_on(&streams[0]).expect("work");
        streams[0].memset_zeros(&mut x).expect("it is enqueued");
        crate::group(|group| {
            let on_a = group.on(&a)?;
            on_a.all_gather(&x, &mut y)?;
            on_a.isend(&x, 0)?;
            on_a.irecv(&mut z, 0)?;
            group.on(&b)?.all_gather(&other, &mut copied)
        })
        .expect("a group");
        work.open();
        for copy in [y, z] {
            let copy = streams[0].clone_dtoh(&copy).expect("a copy");
            assert_eq!(copy, [0; 4]);
        }
        assert_eq!(streams[1].clone_dtoh(&copied).expect("a copy"), [3; 4]);
    }
}
