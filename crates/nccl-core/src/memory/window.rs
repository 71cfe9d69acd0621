//! Memory that all ranks of a communicator have registered: symmetric windows.

use std::ffi::c_void;
use std::mem::ManuallyDrop;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Instant;

use nccl_sys as sys;

use super::registered::{Kind, Registered, Registration};
use super::{Buffer, OwnedBuffer};
use crate::buffer::{ErasedMut, RecvBuffer};
use crate::communicator::{Communicator, Inner, KeepAlive, check_buffer_context};
use crate::cuda_driver;
use crate::detached_call::NoResult;
use crate::dtype::NcclType;
use crate::error::{Error, ErrorKind, Result};
use crate::ffi::Progress;
use crate::time::deadline_after;
use crate::{detached_call, ffi};

const CALL: &str = "ncclCommWindowRegister";

/// A failed registration; the variants tell whether NCCL had been called.
enum WindowFailure {
    NotStarted(Error),
    PartlyIssued(Error),
}

/// The memory into which NCCL writes the handle, possibly from its own thread after the call has returned.
struct HandleOut(Box<*mut c_void>);

// SAFETY: only one thread owns the memory at a time; the pointer in it is only passed to NCCL.
unsafe impl Send for HandleOut {}

/// Registers with NCCL, on all ranks, buffers that operations of this communicator will use often.
pub(crate) fn register<T: NcclType>(
    comm: &Communicator,
    mut buffer: Buffer<T>,
) -> Result<Registered<Buffer<T>>> {
    let library = comm.library();
    let register = library.function(sys::Api::ncclCommWindowRegister)?;
    library.function(sys::Api::ncclCommWindowDeregister)?;
    let context = &comm.inner.context;
    check_buffer_context(Buffer::stream(&buffer), context)?;
    let last = cuda_driver::new_event(context, None)
        .map_err(Error::cuda("creating an event (cuEventCreate)"))
        // The other ranks wait for this one.
        .map_err(|error| comm.inner.fail_alone(error))?;
    let range = range_of(buffer.erase_mut());
    let (address, bytes) = (range.start, (range.end - range.start) as usize);
    let (inner, timeout) = (Arc::clone(&comm.inner), comm.timeout);
    inner.lends_beyond_kernels();
    let made = detached_call::run(
        // The waits for the lock, and for the other ranks, have deadlines of their own.
        deadline_after(timeout.saturating_add(detached_call::SLACK)),
        || false,
        move || {
            let before = |error| WindowFailure::NotStarted(error);
            let binding = Error::cuda("binding the context to this thread (cuCtxSetCurrent)");
            let bound = cuda_driver::bind(&inner.context).map_err(binding);
            bound.map_err(before)?;
            let started = Instant::now();
            let (guard, _) = inner.handle.lock_within(None, timeout).map_err(before)?;
            let raw = inner.ready(&guard).map_err(before)?;
            let mut place = ManuallyDrop::new(HandleOut(Box::new(std::ptr::null_mut())));
            let at: *mut *mut c_void = &raw mut *place.0;
            let remaining = timeout.saturating_sub(started.elapsed());
            let launched = inner.launch(raw, started, (timeout, remaining), || {
                // SAFETY: memory of that many bytes, which is neither moved nor freed until it is deregistered: the
                // resulting value owns it, and it is leaked when this call does not return. `at` stays valid until the
                // communicator has settled; if it never settles, `at` is leaked. The communicator is alive, under its
                // lock.
                let code = unsafe {
                    register(
                        raw.as_ptr(),
                        std::ptr::with_exposed_provenance_mut(address as usize),
                        bytes,
                        at.cast(),
                        sys::NCCL_WIN_COLL_SYMMETRIC,
                    )
                };
                // In a nonblocking communicator the call may return success before it is done.
                ffi::check(&inner.library, CALL, code).map(|_| Progress::Pending)
            });
            launched.map_err(WindowFailure::PartlyIssued)?;
            let place = ManuallyDrop::into_inner(place);
            Ok(Registration {
                handle: NonNull::new(*place.0),
                kind: Kind::Window,
            })
        },
        drop,
    );
    let failed = |error: Error, buffer: Buffer<T>| {
        // The other ranks may already have the window, or wait for this rank.
        std::mem::forget(buffer);
        comm.inner.abort(&error);
        Err(comm.inner.final_error(error))
    };
    let handle = match made {
        Ok(Ok(handle)) => handle,
        Ok(Err(WindowFailure::PartlyIssued(error))) => return failed(error, buffer),
        Ok(Err(WindowFailure::NotStarted(error))) => {
            // The program may try again when the communicator is busy, but not when CUDA fails: the other ranks wait in vain.
            return Err(match error.kind() {
                ErrorKind::Cuda { .. } => comm.inner.fail_alone(error),
                _ => comm.inner.final_error(error),
            });
        }
        Err(not_called @ NoResult::NoThread(_)) => {
            // The other ranks wait for this one.
            let error = not_called.into_error(CALL, comm.timeout);
            comm.inner.abort(&error);
            return Err(comm.inner.final_error(error));
        }
        Err(not_back) => return failed(not_back.into_error(CALL, comm.timeout), buffer),
    };
    if handle.handle.is_some() {
        comm.inner.windows.lock().push(range);
    }
    Ok(Registered {
        buffer: ManuallyDrop::new(buffer),
        handle,
        comm: ManuallyDrop::new(KeepAlive::new(comm.clone())),
        last: ManuallyDrop::new(last),
    })
}

fn range_of(buffer: ErasedMut<'_>) -> Range<u64> {
    buffer.range()
}

impl Inner {
    /// Removes a window from the list.
    pub(super) fn forget_window<B: OwnedBuffer>(&self, buffer: &B) {
        let view = buffer.view();
        let start = crate::buffer::SendBuffer::erase(view).range().start;
        self.windows.lock().retain(|window| window.start != start);
    }

    /// Whether `bytes` bytes from `start` on lie in one window.
    pub(crate) fn is_in_a_window(&self, start: u64, bytes: u64) -> bool {
        let contains = |window: &Range<u64>| window.start <= start && start + bytes <= window.end;
        self.windows.lock().iter().any(contains)
    }
}
