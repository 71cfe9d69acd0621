//! Messages between two ranks, as a group records and issues them.

use std::sync::Arc;

use cudarc::driver::CudaStream;
use nccl_sys as sys;

use crate::buffer::{Erased, ErasedMut};
use crate::communicator::{Calls, Issue, Leased};
use crate::dtype::DataType;
use crate::error::{NcclFailure, Result};
use crate::ffi::{self, Progress};
use crate::library::Library;

/// The allocation of a past group.
pub(crate) type Scratch = Vec<Message<'static>>;

/// One recorded message.
#[derive(Debug)]
pub(crate) struct Message<'a> {
    side: Side<'a>,
    peer: i32,
    count: usize,
    data_type: DataType,
}

#[derive(Debug)]
enum Side<'a> {
    Send(Erased<'a>),
    Recv(ErasedMut<'a>),
    /// Already an address.
    Sending,
    /// Already an address.
    Receiving,
}

impl<'a> Message<'a> {
    #[inline]
    pub(crate) fn send(buffer: Erased<'a>) -> Self {
        let (count, data_type) = (buffer.len(), buffer.data_type());
        Self {
            side: Side::Send(buffer),
            peer: 0,
            count,
            data_type,
        }
    }

    #[inline]
    pub(crate) fn recv(buffer: ErasedMut<'a>) -> Self {
        let (count, data_type) = (buffer.len(), buffer.data_type());
        Self {
            side: Side::Recv(buffer),
            peer: 0,
            count,
            data_type,
        }
    }

    #[inline]
    pub(crate) fn with(self, peer: i32) -> Self {
        Self { peer, ..self }
    }

    pub(crate) fn data_type(&self) -> DataType {
        self.data_type
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.count == 0
    }

    pub(crate) fn is_send(&self) -> bool {
        matches!(self.side, Side::Send(_) | Side::Sending)
    }

    pub(crate) fn is_with(&self, rank: usize) -> bool {
        usize::try_from(self.peer) == Ok(rank)
    }

    pub(crate) fn num_bytes(&self) -> usize {
        self.count * self.data_type.size_in_bytes().unwrap_or_default()
    }
}

/// The messages of one group, issued between one group start and one group end.
pub(crate) struct Messages<'m, 'a>(pub(crate) &'m mut Vec<Message<'a>>);

impl<'s, 'a: 's> Issue<'s> for Messages<'_, 'a> {
    fn streams(&self, mut visit: impl FnMut(&Arc<CudaStream>) -> Result<()>) -> Result<()> {
        self.0.iter().try_for_each(|message| match &message.side {
            Side::Send(buffer) => visit(buffer.stream()),
            Side::Recv(buffer) => visit(buffer.stream()),
            Side::Sending | Side::Receiving => Ok(()),
        })
    }

    fn lease(&mut self, on: &'s CudaStream, leases: &mut Vec<Leased<'s>>) {
        for message in self.0.iter_mut() {
            let sent = message.is_send();
            let taken = if sent { Side::Sending } else { Side::Receiving };
            match std::mem::replace(&mut message.side, taken) {
                Side::Send(buffer) => leases.push(buffer.lease(on)),
                Side::Recv(buffer) => leases.push(buffer.lease(on)),
                Side::Sending | Side::Receiving => {}
            }
        }
    }

    fn call(&self, calls: &Calls<'_>) -> Result<Progress, NcclFailure> {
        if self.0.is_empty() {
            return Ok(Progress::Done);
        }
        grouped(calls.library, |functions| {
            for (index, message) in self.0.iter().enumerate() {
                let address = calls.address(index);
                let (call, code) = if message.is_send() {
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

/// An empty vector with the allocation of `used`, for buffers of another lifetime.
pub(crate) fn reuse<'a, 'b>(mut used: Vec<Message<'a>>) -> Vec<Message<'b>> {
    used.clear();
    // Collecting in place: the elements have one layout, so the allocation stays.
    used.into_iter()
        .map(|_| unreachable!("the vector is empty"))
        .collect()
}
