//! Memory that is registered with a communicator.

use std::ffi::c_void;
use std::fmt;
use std::mem::ManuallyDrop;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cudarc::driver::{CudaEvent, CudaStream, CudaView, CudaViewMut};
use nccl_sys as sys;

use super::owned::{OwnedBuffer, sealed};
use crate::buffer::{Erased, ErasedMut, RecvBuffer, SendBuffer, lend};
use crate::communicator::{Backoff, Communicator, Holds, KeepAlive, check_buffer_context};
use crate::cuda_driver;
use crate::detached_call::NoResult;
use crate::drop_queue::{self, DeferredDrop, DropPoll, StreamPoint};
use crate::dtype::NcclType;
use crate::error::{Error, ErrorKind, Result};
use crate::forked;
use crate::state::State;
use crate::sync::Mutex;
use crate::time::deadline_after;
use crate::{detached_call, ffi};

/// A buffer that is registered with a communicator, and owned by the registration.
///
/// Where the hardware and the kind of memory allow it ([`Buffer`](crate::Buffer) is best), NCCL then moves data from
/// and to the buffer without intermediate copies. When one rank uses a registered buffer in an operation, all ranks
/// must. Where NCCL cannot use the registration, nothing changes.
///
/// Operations take `&registered` and `&mut registered`, and its views. The value keeps the communicator alive; its drop
/// deregisters and frees the buffer in the background, when the work on the buffer's stream is over. If the communicator
/// is finalized or aborted first, its registrations end with it, and the memory stays usable.
///
/// A buffer in a symmetric window ([`Communicator::register_window`]) is also a `Registered`; all ranks make it together.
/// Memory into which other ranks write is a [`Window`](crate::one_sided::Window).
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # nccl_emulator::install_unless_gpu()?;
/// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
/// # let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
/// let mut y = comm.register(comm.buffer::<f32>(1024)?)?;
/// comm.all_reduce_in_place(&mut y, nccl::ReduceOp::Sum)?.wait()?;
/// let plain = y.into_inner()?;
/// # Ok(())
/// # }
/// ```
pub struct Registered<B: OwnedBuffer> {
    pub(super) buffer: ManuallyDrop<B>,
    pub(super) handle: Registration,
    /// Does not count as a user's handle of the communicator, because no operation can be issued through it.
    pub(super) comm: ManuallyDrop<KeepAlive>,
    /// Recorded on drop; created beforehand, because creating it in the drop could fail.
    pub(super) last: ManuallyDrop<CudaEvent>,
}

/// NCCL's handle; `None` if NCCL did not make one.
#[derive(Clone, Copy, Debug)]
pub(super) struct Registration {
    pub(super) handle: Option<NonNull<c_void>>,
    pub(super) kind: Kind,
}

/// The kind of a registration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Local,
    Window,
}

impl Kind {
    fn undone_by(self) -> &'static str {
        match self {
            Self::Local => "ncclCommDeregister",
            Self::Window => "ncclCommWindowDeregister",
        }
    }
}

impl Registration {
    pub(super) fn none(kind: Kind) -> Self {
        Self { handle: None, kind }
    }
}

// SAFETY: the handle is a number for NCCL, returned under the communicator's lock; never dereferenced.
unsafe impl Send for Registration {}
// SAFETY: likewise.
unsafe impl Sync for Registration {}

/// Registers with NCCL a buffer that operations of this communicator will use often.
pub(super) fn register<B: OwnedBuffer>(
    comm: &Communicator,
    mut buffer: B,
) -> Result<Registered<B>> {
    const CALL: &str = "ncclCommRegister";
    let library = comm.library();
    let register = library.function(sys::Api::ncclCommRegister)?;
    library.function(sys::Api::ncclCommDeregister)?;
    let context = &comm.inner.context;
    check_buffer_context(buffer.stream(), context)?;
    let last = cuda_driver::new_event(context, None)
        .map_err(Error::cuda("creating an event (cuEventCreate)"))?;
    let (address, bytes) = {
        let erased = buffer.view_mut().erase_mut();
        let range = erased.range();
        (range.start, (range.end - range.start) as usize)
    };
    let handle = match bytes {
        0 => Ok(Ok(Registration::none(Kind::Local))),
        bytes => {
            let (inner, timeout) = (Arc::clone(&comm.inner), comm.timeout);
            inner.lends_beyond_kernels();
            detached_call::run(
                // The wait for the lock has a deadline of its own.
                deadline_after(timeout.saturating_add(detached_call::SLACK)),
                || false,
                move || {
                    cuda_driver::bind(&inner.context).map_err(Error::cuda(
                        "binding the context to this thread (cuCtxSetCurrent)",
                    ))?;
                    let (guard, _) = inner.handle.lock_within(None, timeout)?;
                    let raw = inner.ready(&guard)?;
                    let mut handle: *mut c_void = std::ptr::null_mut();
                    // SAFETY: memory of that many bytes, which is neither moved nor freed until it is deregistered: the
                    // value below owns it, and it is leaked when this call does not return. `handle` is a valid
                    // location; the communicator is alive, under its lock.
                    let code = unsafe {
                        register(
                            raw.as_ptr(),
                            std::ptr::with_exposed_provenance_mut(address as usize),
                            bytes,
                            &mut handle,
                        )
                    };
                    ffi::check(&inner.library, CALL, code)?;
                    Ok::<_, Error>(Registration {
                        handle: NonNull::new(handle),
                        kind: Kind::Local,
                    })
                },
                drop,
            )
        }
    };
    let handle = match handle {
        Ok(handle) => handle?,
        Err(not_back) => {
            let error = not_back.into_error(CALL, comm.timeout);
            if error.is_timeout() {
                // NCCL may still access the buffer.
                std::mem::forget(buffer);
                comm.inner.abort(&error);
            }
            return Err(comm.inner.final_error(error));
        }
    };
    Ok(Registered {
        buffer: ManuallyDrop::new(buffer),
        handle,
        comm: ManuallyDrop::new(KeepAlive::new(comm.clone())),
        last: ManuallyDrop::new(last),
    })
}

impl<B: OwnedBuffer> Registered<B> {
    /// Returns a view of all elements, to read, for functions that take cudarc's memory.
    ///
    /// ```
    /// # fn example(x: &nccl::Registered<nccl::Buffer<f32>>) -> Result<(), nccl::cudarc::driver::DriverError> {
    /// let host: Vec<f32> = x.stream().clone_dtoh(&x.view())?;
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn view(&self) -> CudaView<'_, B::Element> {
        self.buffer.view()
    }

    /// Returns a view of all elements, to write, for functions that take cudarc's memory.
    ///
    /// ```
    /// # fn example(y: &mut nccl::Registered<nccl::Buffer<f32>>) -> Result<(), nccl::cudarc::driver::DriverError> {
    /// let stream = y.stream().clone();
    /// stream.memset_zeros(&mut y.view_mut())?;
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn view_mut(&mut self) -> CudaViewMut<'_, B::Element> {
        self.buffer.view_mut()
    }

    /// Returns the stream to which the memory belongs.
    ///
    /// ```
    /// # fn example(x: &nccl::Registered<nccl::Buffer<f32>>) {
    /// x.stream().synchronize().unwrap();
    /// # }
    /// ```
    #[must_use]
    pub fn stream(&self) -> &Arc<CudaStream> {
        self.buffer.stream()
    }

    /// Returns NCCL's handle of the window; null if the registration is not a window.
    pub(crate) fn window(&self) -> sys::ncclWindow_t {
        match self.handle.kind {
            Kind::Window => self
                .handle
                .handle
                .map_or(std::ptr::null_mut(), NonNull::as_ptr),
            Kind::Local => std::ptr::null_mut(),
        }
        .cast()
    }

    /// The number of elements.
    pub(crate) fn len(&self) -> usize {
        self.view().len()
    }

    /// Returns whether NCCL uses the registration. With `NCCL_LOCAL_REGISTER=0`, for instance, it does not.
    ///
    /// ```
    /// # fn example(x: &nccl::Registered<nccl::Buffer<f32>>) {
    /// if !x.is_effective() {
    ///     eprintln!("NCCL will copy");
    /// }
    /// # }
    /// ```
    #[must_use]
    pub fn is_effective(&self) -> bool {
        self.handle.handle.is_some()
    }

    /// Waits for the work on the buffer's stream, deregisters, and returns the buffer.
    ///
    /// # Errors
    /// [`ErrorKind::TimedOut`] when the work on the stream, or for a window also what
    /// [holds](Communicator::hold_windows) it, does not end within the communicator's timeout
    /// for operations. [`ErrorKind::Nccl`] when NCCL does not release the buffer, and [`ErrorKind::Aborted`] when the
    /// communicator was leaked and may still use the buffer. In these cases the buffer is not returned; it is freed
    /// once it is known to be unused, or leaked.
    ///
    /// Wraps `ncclCommDeregister` or `ncclCommWindowDeregister`.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// # let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
    /// let x = comm.register(stream.clone_htod(&[1u8, 2, 3])?)?;
    /// let x = x.into_inner()?;
    /// assert_eq!(stream.clone_dtoh(&x)?, [1, 2, 3]);
    /// # Ok(())
    /// # }
    /// ```
    pub fn into_inner(self) -> Result<B> {
        forked::check()?;
        let call = self.handle.kind.undone_by();
        let deferred = self.take_apart();
        let timeout = deferred.comm.timeout;
        let deadline = deadline_after(timeout);
        if deferred.handle.handle.is_none() {
            return deferred.wait_and_release(deadline, timeout);
        }
        let comm = (*deferred.comm).clone();
        let deferred = Arc::new(Mutex::new(Some(deferred)));
        let theirs = Arc::clone(&deferred);
        let let_go = detached_call::run(
            // The thread returns by itself shortly after the deadline.
            deadline_after(timeout.saturating_add(detached_call::SLACK)),
            || false,
            move || {
                let deferred = theirs.lock().take();
                deferred.map(|deferred| deferred.wait_and_release(deadline, timeout))
            },
            drop,
        );
        match let_go {
            Ok(Some(let_go)) => let_go,
            // Only this function takes it out otherwise, below.
            Ok(None) => Err(comm.inner.out_of_use()),
            Err(not_back) => {
                if let NoResult::NoThread(_) = not_back
                    && let Some(deferred) = deferred.lock().take()
                {
                    let patience = deferred.holds.patience();
                    drop_queue::defer(Box::new(deferred), patience);
                }
                let error = not_back.into_error(call, timeout);
                if error.is_timeout() {
                    comm.inner.abort(&error);
                }
                Err(comm.inner.final_error(error))
            }
        }
    }

    fn take_apart(mut self) -> DeferredRegistration<B> {
        let deferred = self.take_deferred();
        std::mem::forget(self);
        deferred
    }

    /// Takes the fields out. Called once, when this value ends.
    fn take_deferred(&mut self) -> DeferredRegistration<B> {
        // SAFETY: each is taken once, because the caller forgets `self` or is its drop.
        let (buffer, comm, last) = unsafe {
            (
                ManuallyDrop::take(&mut self.buffer),
                ManuallyDrop::take(&mut self.comm),
                ManuallyDrop::take(&mut self.last),
            )
        };
        let behind = StreamPoint::new(Arc::clone(buffer.stream()), last);
        let holds = match self.handle.kind {
            Kind::Local => Holds::default(),
            Kind::Window => comm.inner.peer_kernels.holds(),
        };
        DeferredRegistration {
            buffer: ManuallyDrop::new(buffer),
            handle: self.handle,
            comm,
            behind,
            holds,
        }
    }
}

/// The remains of a dropped registration. Dropping this value leaks the buffer.
struct DeferredRegistration<B: OwnedBuffer> {
    buffer: ManuallyDrop<B>,
    handle: Registration,
    comm: KeepAlive,
    behind: StreamPoint,
    /// Of a window: what may use it on other streams.
    holds: Holds,
}

enum ReleaseStep {
    Busy,
    Deregistered,
    Refused(Error),
}

impl<B: OwnedBuffer> DeferredRegistration<B> {
    /// Waits until the buffer is deregistered.
    fn wait_and_release(mut self, deadline: Instant, timeout: Duration) -> Result<B> {
        let mut backoff = Backoff::new();
        loop {
            match self.try_deregister() {
                ReleaseStep::Deregistered => return Ok(ManuallyDrop::into_inner(self.buffer)),
                ReleaseStep::Refused(error) => {
                    crate::events::leaked(&self.describe(), &error);
                    return Err(error);
                }
                ReleaseStep::Busy if Instant::now() < deadline => backoff.pause(),
                ReleaseStep::Busy => {
                    let patience = self.holds.patience();
                    drop_queue::defer(Box::new(self), patience);
                    return Err(Error::new(ErrorKind::TimedOut {
                        what: String::from("the work that uses a registered buffer"),
                        timeout,
                    }));
                }
            }
        }
    }

    /// Deregisters the buffer, if that is possible now.
    fn try_deregister(&mut self) -> ReleaseStep {
        if !self.behind.is_over() || !self.holds.are_over() {
            return ReleaseStep::Busy;
        }
        let inner = &self.comm.inner;
        let Some(handle) = self.handle.handle else {
            return ReleaseStep::Deregistered;
        };
        let Some(guard) = inner.handle.try_lock() else {
            return ReleaseStep::Busy;
        };
        let own = guard.raw.filter(|_| inner.may_free_objects());
        // NCCL keeps the registrations of a revoked communicator.
        let Some(raw) = own.or_else(|| inner.revoked()) else {
            return match inner.lifecycle.get() {
                State::Finalized | State::Aborted => ReleaseStep::Deregistered,
                State::Leaked => ReleaseStep::Refused(inner.out_of_use()),
                State::Making | State::Ready | State::Finalizing | State::Aborting => {
                    ReleaseStep::Busy
                }
            };
        };
        let api = inner.library.api();
        let (raw, handle) = (raw.as_ptr(), handle.as_ptr());
        // SAFETY: for both functions, the handle was made for this communicator, which is alive, under its lock. The
        // handle is returned once: `handle` is cleared below. No work uses the buffer any more.
        let code = unsafe {
            match self.handle.kind {
                Kind::Local => api.ncclCommDeregister.map(|f| f(raw, handle)),
                Kind::Window => {
                    inner.forget_window(&*self.buffer);
                    api.ncclCommWindowDeregister.map(|f| f(raw, handle.cast()))
                }
            }
        };
        let Some(code) = code else {
            return ReleaseStep::Deregistered;
        };
        self.handle.handle = None;
        match ffi::check(&inner.library, self.handle.kind.undone_by(), code) {
            Ok(_) => ReleaseStep::Deregistered,
            Err(failure) => ReleaseStep::Refused(failure.into()),
        }
    }
}

impl<B: OwnedBuffer> DeferredDrop for DeferredRegistration<B> {
    fn poll(&mut self) -> DropPoll {
        match self.try_deregister() {
            ReleaseStep::Busy => {
                self.comm.abort_if_overdue();
                DropPoll::Wait
            }
            ReleaseStep::Deregistered => DropPoll::Over,
            ReleaseStep::Refused(_) => DropPoll::Never,
        }
    }

    fn release(self: Box<Self>) {
        drop(ManuallyDrop::into_inner(self.buffer));
    }

    fn describe(&self) -> String {
        format!(
            "a buffer of {} bytes, registered with communicator {:?}",
            self.buffer.view().len() * size_of::<B::Element>(),
            self.comm.name()
        )
    }
}

impl<B: OwnedBuffer> Drop for Registered<B> {
    /// Never waits; see the type.
    fn drop(&mut self) {
        if !drop_queue::is_closed() {
            let deferred = self.take_deferred();
            let patience = deferred.holds.patience();
            drop_queue::defer(Box::new(deferred), patience);
        }
    }
}

lend!((, B: OwnedBuffer) &'a Registered<B>, |_| B::Element::DATA_TYPE, |registered, on| {
    registered.view().view_ptr(on)
});
impl<'a, B: OwnedBuffer> SendBuffer<'a> for &'a Registered<B> {
    type Element = B::Element;
    fn erase(self) -> Erased<'a> {
        self.view().erase()
    }
}

lend!((, B: OwnedBuffer) &'a mut Registered<B>, |_| B::Element::DATA_TYPE, |registered, on| {
    registered.view_mut().view_ptr_mut(on)
});
impl<'a, B: OwnedBuffer> RecvBuffer<'a> for &'a mut Registered<B> {
    type Element = B::Element;
    fn erase_mut(self) -> ErasedMut<'a> {
        self.view_mut().erase_mut()
    }
}

// SAFETY: as its buffer, which only `into_inner` takes out.
unsafe impl<B: OwnedBuffer> sealed::Visit for Registered<B> {
    fn visit<'a>(&'a mut self, each: sealed::Each<'_, 'a>) -> Result<()> {
        each(self.erase_mut())
    }
}

impl<B: OwnedBuffer> OwnedBuffer for Registered<B> {
    type Element = B::Element;

    fn view(&self) -> CudaView<'_, B::Element> {
        Registered::view(self)
    }

    fn view_mut(&mut self) -> CudaViewMut<'_, B::Element> {
        Registered::view_mut(self)
    }

    fn stream(&self) -> &Arc<CudaStream> {
        Registered::stream(self)
    }
}

impl<B: OwnedBuffer> fmt::Debug for Registered<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registered")
            .field("communicator", &self.comm.name())
            .field("len", &self.len())
            .field("effective", &self.is_effective())
            .finish()
    }
}
