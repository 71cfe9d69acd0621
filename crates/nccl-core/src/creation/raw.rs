//! The doors for NCCL's own pointer.

use crate::communicator::{Communicator, Timeouts, timeouts};
use std::ptr::NonNull;
use std::sync::Arc;

use cudarc::driver::CudaStream;
use nccl_sys as sys;

use super::init::Plan;
use crate::abort::AbortSignal;
use crate::communicator::everybody::Birth;
use crate::communicator::handle::RawComm;
use crate::communicator::launch_mode::refuse_contradictions;
use crate::config::Config;
use crate::error::{Error, ErrorKind, Result};
use crate::forked;
use crate::library::Library;
use crate::state::State;
use crate::time::deadline_after;
use crate::{expendable, ffi};
use nccl_base::from_outside::FromOutside;
use nccl_base::launch_mode::LaunchMode;

impl Communicator {
    /// Takes over a communicator that was made elsewhere, for instance by another binding.
    ///
    /// It is finalized or aborted like one that was made here. Its rank and number of ranks are asked of
    /// NCCL; whether it blocks, NCCL does not tell. It has to have been made with `blocking = 0`; for
    /// others there is [`from_raw_blocking`](Self::from_raw_blocking). Its ranks do not tell each other
    /// what ends it.
    ///
    /// # Safety
    /// `raw` is a communicator of `library` that is ready, was made with `blocking = 0`, on the device of
    /// `stream`, and nothing else uses or frees it from now on.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidConfig`] for a null pointer or a stream of another device, [`ErrorKind::Nccl`]
    /// when NCCL refuses to tell about it, [`ErrorKind::TimedOut`] when it does not come back within 30 s;
    /// it is left as it was then.
    ///
    /// Wraps `ncclCommUserRank`, `ncclCommCount` and `ncclCommCuDevice`.
    ///
    /// ```no_run
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let foreign: nccl_sys::ncclComm_t = std::ptr::null_mut();
    /// let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// let library = nccl::Library::load()?;
    /// // SAFETY: `foreign` is given up by whoever made it, and lives on device 0.
    /// let comm = unsafe { nccl::Communicator::from_raw(&library, foreign, "foreign", &stream) }?;
    /// # Ok(())
    /// # }
    /// ```
    pub unsafe fn from_raw(
        library: &Library,
        raw: sys::ncclComm_t,
        name: &str,
        stream: &Arc<CudaStream>,
    ) -> Result<Self> {
        refuse_contradictions(LaunchMode::NonBlocking)?;
        // SAFETY: the caller's promise.
        unsafe { Self::take_over(library, raw, name, stream, false) }
    }

    /// As [`from_raw`](Self::from_raw), for a communicator that blocks (`blocking = 1`, NCCL's default).
    ///
    /// Its calls cannot be given a deadline: one that waits for ever is not ended by an abort, which is
    /// then reported as leaked, because NCCL would free the communicator under the thread inside. It cannot
    /// be in one [`group`](crate::group) with communicators that do not block.
    ///
    /// # Safety
    /// As [`from_raw`](Self::from_raw), but made with `blocking = 1`.
    ///
    /// # Errors
    /// As [`from_raw`](Self::from_raw).
    ///
    /// Wraps `ncclCommUserRank`, `ncclCommCount` and `ncclCommCuDevice`.
    ///
    /// ```no_run
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let foreign: nccl_sys::ncclComm_t = std::ptr::null_mut();
    /// let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// let library = nccl::Library::load()?;
    /// // SAFETY: `foreign` is of ncclCommInitRank, is given up by whoever made it, and lives on device 0.
    /// let comm = unsafe { nccl::Communicator::from_raw_blocking(&library, foreign, "foreign", &stream) }?;
    /// # Ok(())
    /// # }
    /// ```
    pub unsafe fn from_raw_blocking(
        library: &Library,
        raw: sys::ncclComm_t,
        name: &str,
        stream: &Arc<CudaStream>,
    ) -> Result<Self> {
        // SAFETY: the caller's promise.
        unsafe { Self::take_over(library, raw, name, stream, true) }
    }

    /// # Safety
    /// As [`from_raw`](Self::from_raw), and it blocks or not, as it is said.
    unsafe fn take_over(
        library: &Library,
        raw: sys::ncclComm_t,
        name: &str,
        stream: &Arc<CudaStream>,
        blocks: bool,
    ) -> Result<Self> {
        forked::begin()?;
        let timeouts = timeouts::over(FromOutside::of_process()?, Timeouts::default());
        let invalid =
            |field, reason: String| Error::new(ErrorKind::InvalidConfig { field, reason });
        let raw = NonNull::new(raw)
            .map(RawComm)
            .ok_or_else(|| invalid("raw", String::from("a null pointer is no communicator")))?;
        let ask = |call: &'static str, function: Option<Ask>| -> Result<i32> {
            let function = function.ok_or_else(|| ffi::missing(library, call))?;
            let theirs = library.clone();
            let limit = timeouts.operation;
            let asked = expendable::call(
                deadline_after(limit),
                || false,
                move || {
                    let raw = raw;
                    let mut answer = 0;
                    // SAFETY: the caller gives a communicator that is ready; `answer` is a valid place.
                    let code = unsafe { function(raw.as_ptr(), &mut answer) };
                    ffi::check(&theirs, call, code)?;
                    Ok::<_, Error>(answer)
                },
                drop,
            );
            asked.map_err(|not_back| not_back.into_error(call, limit))?
        };
        let api = library.api();
        let rank = ask("ncclCommUserRank", api.ncclCommUserRank)?;
        let world_size = ask("ncclCommCount", api.ncclCommCount)?;
        let device = ask("ncclCommCuDevice", api.ncclCommCuDevice)?;
        let ordinal = stream.context().ordinal();
        if usize::try_from(device) != Ok(ordinal) {
            return Err(invalid(
                "stream",
                format!("it is on device {ordinal}, the communicator on device {device}"),
            ));
        }
        let plan = Plan {
            library: library.clone(),
            name,
            rank: rank as usize,
            world_size: world_size as usize,
            stream: Arc::clone(stream),
            config: &Config::new(),
            wish: crate::communicator::launch_mode::Wish::Asked(LaunchMode::NonBlocking),
            timeouts,
            abort_signal: AbortSignal::new(),
            company: None,
            members: None,
            birth: Birth::begin(name, rank as usize, &timeouts),
        };
        let inner = plan.prepare()?.adopt(raw, blocks);
        // What else was registered with it, or captured, is not known here.
        inner.lends_to_proxies();
        Ok(Self::of(inner))
    }

    /// NCCL's pointer; `None` once the communicator has ended, or its end has begun. Never waits.
    ///
    /// NCCL serves one call on a communicator at a time: a call on the pointer must not overlap with an
    /// operation of this crate on any thread, and must not free it.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// # let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
    /// assert!(comm.as_raw().is_some());
    /// comm.finalize()?;
    /// assert!(comm.as_raw().is_none());
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn as_raw(&self) -> Option<sys::ncclComm_t> {
        forked::check().ok()?;
        let pointer = self.inner.handle.pointer();
        pointer.filter(|_| self.inner.phase.get() == State::Ready)
    }
}

type Ask = unsafe extern "C" fn(sys::ncclComm_t, *mut std::ffi::c_int) -> sys::ncclResult_t;
