//! An NCCL that only records its calls, to measure the cost of the layers above.
//!
//! [`api`] is a table of functions that puts one entry of 56 bytes per operation into a vector of the calling thread,
//! as NCCL puts a task into a queue, and never touches the memory of buffers. A group start and a group end clear the
//! vector. `benches/overhead.rs`, `examples/overhead_instructions.rs` and `tests/no_allocation.rs` use it by way of
//! [`overhead`](crate::overhead).
//!
//! Requirements: no function allocates once the vector has its size, and each is cheap next to NCCL's own, so that it
//! hides no cost of the layers above.

use std::cell::RefCell;
use std::ffi::{c_int, c_void};
use std::ptr;

use nccl_sys::{
    Api, Version, cudaStream_t, ncclComm_t, ncclConfig_t, ncclDataType_t, ncclRedOp_t,
    ncclResult_t, ncclUniqueId,
};

/// The release that the table claims to be.
pub const VERSION: Version = Version::HEADER;

/// The return value of a group end, and of a collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// `ncclInProgress`, as of a non-blocking communicator; the caller then has to poll, and finds all operations
    /// complete.
    InProgress,
    /// `ncclSuccess`, as a blocking communicator does.
    Success,
}

/// One operation; as large as the smallest record that keeps all of it.
struct Task {
    _buffer: *const c_void,
    /// The second buffer of a collective.
    _other: *const c_void,
    _count: usize,
    _comm: ncclComm_t,
    _stream: cudaStream_t,
    _peer: c_int,
    _data_type: ncclDataType_t,
    _call: Call,
}

const _: () = assert!(size_of::<Task>() == 56);

enum Call {
    Send,
    Recv,
    AllToAll,
    AllReduce,
}

/// More than any group of this package has.
const CAPACITY: usize = 1024;

thread_local! {
    static QUEUE: RefCell<Vec<Task>> = RefCell::new(Vec::with_capacity(CAPACITY));
}

/// Its address is that of the communicator.
static COMMUNICATOR: u8 = 0;

/// The table.
///
/// ```
/// use nccl_tools::queueing::{self, Ending};
///
/// // SAFETY: nothing is ever done with the memory that operations name.
/// let library = unsafe { nccl::Library::from_api(queueing::api(Ending::Success), queueing::VERSION) }?;
/// assert!(library.has(nccl::Capability::NativeAllToAll));
/// # Ok::<(), nccl::Error>(())
/// ```
#[must_use]
pub fn api(ending: Ending) -> Api {
    let mut api = Api::empty();
    api.ncclCommInitRankConfig = Some(init);
    api.ncclCommGetAsyncError = Some(at_rest);
    api.ncclCommSplit = Some(split);
    api.ncclCommFinalize = Some(on_communicator);
    api.ncclCommDestroy = Some(on_communicator);
    api.ncclCommAbort = Some(on_communicator);
    api.ncclGroupStart = Some(forget);
    api.ncclSend = Some(send);
    api.ncclRecv = Some(recv);
    match ending {
        Ending::InProgress => {
            api.ncclGroupEnd = Some(forget_in_progress);
            api.ncclAlltoAll = Some(all_to_all_in_progress);
            api.ncclAllReduce = Some(all_reduce_in_progress);
        }
        Ending::Success => {
            api.ncclGroupEnd = Some(forget);
            api.ncclAlltoAll = Some(all_to_all);
            api.ncclAllReduce = Some(all_reduce);
        }
    }
    api
}

/// How many operations this thread has put into its queue since the last group start or end.
#[must_use]
pub fn queued() -> usize {
    QUEUE.with_borrow(Vec::len)
}

impl Task {
    /// An operation with one buffer and no peer.
    #[inline(always)]
    fn new(
        call: Call,
        buffer: *const c_void,
        count: usize,
        data_type: ncclDataType_t,
        comm: ncclComm_t,
        stream: cudaStream_t,
    ) -> Self {
        Self {
            _buffer: buffer,
            _other: ptr::null(),
            _count: count,
            _comm: comm,
            _stream: stream,
            _peer: 0,
            _data_type: data_type,
            _call: call,
        }
    }
}

fn push(task: Task) -> ncclResult_t {
    QUEUE.with_borrow_mut(|queue| {
        // Collectives outside of a group never end one.
        if queue.len() == CAPACITY {
            queue.clear();
        }
        queue.push(task);
    });
    ncclResult_t::ncclSuccess
}

unsafe extern "C" fn init(
    comm: *mut ncclComm_t,
    _ranks: c_int,
    _id: ncclUniqueId,
    _rank: c_int,
    _config: *mut ncclConfig_t,
) -> ncclResult_t {
    // SAFETY: NCCL's contract: `comm` is valid for a write.
    unsafe { comm.write((&raw const COMMUNICATOR).cast_mut().cast()) };
    ncclResult_t::ncclSuccess
}

unsafe extern "C" fn split(
    _parent: ncclComm_t,
    _color: c_int,
    _key: c_int,
    child: *mut ncclComm_t,
    _config: *mut ncclConfig_t,
) -> ncclResult_t {
    // SAFETY: NCCL's contract: `child` is valid for a write.
    unsafe { child.write((&raw const COMMUNICATOR).cast_mut().cast()) };
    ncclResult_t::ncclSuccess
}

unsafe extern "C" fn at_rest(_comm: ncclComm_t, state: *mut ncclResult_t) -> ncclResult_t {
    // SAFETY: NCCL's contract: `state` is valid for a write.
    unsafe { state.write(ncclResult_t::ncclSuccess) };
    ncclResult_t::ncclSuccess
}

unsafe extern "C" fn on_communicator(_comm: ncclComm_t) -> ncclResult_t {
    ncclResult_t::ncclSuccess
}

unsafe extern "C" fn forget() -> ncclResult_t {
    QUEUE.with_borrow_mut(Vec::clear);
    ncclResult_t::ncclSuccess
}

unsafe extern "C" fn forget_in_progress() -> ncclResult_t {
    QUEUE.with_borrow_mut(Vec::clear);
    ncclResult_t::ncclInProgress
}

unsafe extern "C" fn send(
    buffer: *const c_void,
    count: usize,
    data_type: ncclDataType_t,
    peer: c_int,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    push(Task {
        _peer: peer,
        ..Task::new(Call::Send, buffer, count, data_type, comm, stream)
    })
}

unsafe extern "C" fn recv(
    buffer: *mut c_void,
    count: usize,
    data_type: ncclDataType_t,
    peer: c_int,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    push(Task {
        _peer: peer,
        ..Task::new(Call::Recv, buffer, count, data_type, comm, stream)
    })
}

unsafe extern "C" fn all_to_all(
    from: *const c_void,
    to: *mut c_void,
    count: usize,
    data_type: ncclDataType_t,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    push(Task {
        _other: to,
        ..Task::new(Call::AllToAll, from, count, data_type, comm, stream)
    })
}

unsafe extern "C" fn all_to_all_in_progress(
    from: *const c_void,
    to: *mut c_void,
    count: usize,
    data_type: ncclDataType_t,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    // SAFETY: looks at nothing that it is given.
    unsafe { all_to_all(from, to, count, data_type, comm, stream) };
    ncclResult_t::ncclInProgress
}

unsafe extern "C" fn all_reduce(
    from: *const c_void,
    to: *mut c_void,
    count: usize,
    data_type: ncclDataType_t,
    _op: ncclRedOp_t,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    push(Task {
        _other: to,
        ..Task::new(Call::AllReduce, from, count, data_type, comm, stream)
    })
}

unsafe extern "C" fn all_reduce_in_progress(
    from: *const c_void,
    to: *mut c_void,
    count: usize,
    data_type: ncclDataType_t,
    op: ncclRedOp_t,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    // SAFETY: looks at nothing that it is given.
    unsafe { all_reduce(from, to, count, data_type, op, comm, stream) };
    ncclResult_t::ncclInProgress
}
