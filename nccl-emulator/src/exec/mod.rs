//! Streams, events and who runs their work.

mod bell;
mod stream;
mod work;

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

pub(crate) use bell::Bell;
pub(crate) use stream::Stream;
pub(crate) use work::{Step, Work};

use crate::driver::CUresult;
use crate::driver::context::Context;

/// The stream that a `CUstream` means for the calling thread. 0x0 and 0x1 are the legacy stream of `context`, 0x2 the
/// calling thread's own stream in `context`; any other handle is looked up, never dereferenced, and may belong to
/// another context (compare [`Stream::context`]).
///
/// # Errors
/// `CUDA_ERROR_INVALID_HANDLE` for a handle that no live stream has.
pub(crate) fn lookup(handle: *mut c_void, context: &Arc<Context>) -> Result<Arc<Stream>, CUresult> {
    let _ = (handle, context);
    todo!()
}

/// Spinning executors of this process; the default for [`Work::spinners`].
pub(crate) fn local_spinners() -> &'static AtomicU32 {
    static SPINNERS: AtomicU32 = AtomicU32::new(0);
    &SPINNERS
}

/// Cores this process may use.
pub(crate) fn cores() -> u32 {
    todo!()
}
