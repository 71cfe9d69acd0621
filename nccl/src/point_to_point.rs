//! Messages between two ranks, as a group records and issues them.

use nccl_sys as sys;

use crate::communicator::Calls;
use crate::dtype::DataType;
use crate::error::NcclFailure;
use crate::ffi::{self, Progress};
use crate::library::Library;

/// One recorded message. Its address is valid as long as the frame in which it lies.
#[derive(Debug)]
pub(crate) struct Message {
    pub(crate) address: u64,
    pub(crate) count: usize,
    pub(crate) data_type: DataType,
    pub(crate) peer: i32,
    pub(crate) sent: bool,
}

/// Makes the calls for `messages` between one group start and one group end.
pub(crate) fn call(messages: &[Message], calls: &Calls<'_>) -> Result<Progress, NcclFailure> {
    if messages.is_empty() {
        return Ok(Progress::Done);
    }
    grouped(calls.library, |functions| {
        for message in messages {
            let address = message.address as *mut std::ffi::c_void;
            let (call, code) = if message.sent {
                // SAFETY: the address is valid for `count` elements until the work is done on the
                // stream, which the order of streams sees to; communicator and stream are alive.
                let code = unsafe {
                    (functions.send)(
                        address,
                        message.count,
                        message.data_type.raw(),
                        message.peer,
                        calls.comm,
                        calls.stream,
                    )
                };
                ("ncclSend", code)
            } else {
                // SAFETY: as above, and nothing else reads or writes the memory meanwhile.
                let code = unsafe {
                    (functions.recv)(
                        address,
                        message.count,
                        message.data_type.raw(),
                        message.peer,
                        calls.comm,
                        calls.stream,
                    )
                };
                ("ncclRecv", code)
            };
            ffi::check(calls.library, call, code)?;
        }
        Ok(())
    })
}

type Send = unsafe extern "C" fn(
    *const std::ffi::c_void,
    usize,
    sys::ncclDataType_t,
    std::ffi::c_int,
    sys::ncclComm_t,
    sys::cudaStream_t,
) -> sys::ncclResult_t;
type Recv = unsafe extern "C" fn(
    *mut std::ffi::c_void,
    usize,
    sys::ncclDataType_t,
    std::ffi::c_int,
    sys::ncclComm_t,
    sys::cudaStream_t,
) -> sys::ncclResult_t;

/// The functions of a group of messages; every supported release has them.
pub(crate) struct Functions {
    start: unsafe extern "C" fn() -> sys::ncclResult_t,
    end: unsafe extern "C" fn() -> sys::ncclResult_t,
    pub(crate) send: Send,
    pub(crate) recv: Recv,
}

impl Functions {
    #[inline]
    fn of(library: &Library) -> Result<Self, NcclFailure> {
        let api = library.api();
        match (
            api.ncclGroupStart,
            api.ncclGroupEnd,
            api.ncclSend,
            api.ncclRecv,
        ) {
            (Some(start), Some(end), Some(send), Some(recv)) => Ok(Self {
                start,
                end,
                send,
                recv,
            }),
            _ => Err(ffi::failure(
                library,
                "ncclSend",
                sys::ncclResult_t::ncclInternalError,
            )),
        }
    }
}

/// Makes `calls` between group start and group end. When one of them fails, the group is ended without
/// launching what was queued before it.
pub(crate) fn grouped(
    library: &Library,
    calls: impl FnOnce(&Functions) -> Result<(), NcclFailure>,
) -> Result<Progress, NcclFailure> {
    let functions = Functions::of(library)?;
    // SAFETY: takes no arguments; this thread is in no group, because groups are opened only here.
    let code = unsafe { (functions.start)() };
    ffi::check(library, "ncclGroupStart", code)?;
    let called = calls(&functions);
    if called.is_err() {
        poison(&functions);
    }
    // SAFETY: takes no arguments; closes the group opened above.
    let code = unsafe { (functions.end)() };
    let ended = ffi::check(library, "ncclGroupEnd", code);
    called.and(ended)
}

/// A failed call does not always make the end of its group drop what was queued; a call on no
/// communicator does, and is refused by every release.
#[cold]
fn poison(functions: &Functions) {
    let nothing = std::ptr::null();
    // SAFETY: a null communicator is refused before any other argument is looked at.
    let _ = unsafe {
        (functions.send)(
            nothing,
            0,
            sys::ncclDataType_t::ncclInt8,
            0,
            std::ptr::null_mut(),
            std::ptr::null_mut(),
        )
    };
}
