//! A stream: a FIFO of jobs and the token of whoever runs it.

use std::sync::Arc;

use super::Work;
use crate::driver::CUresult;
use crate::driver::context::Context;

/// A stream. Jobs run one after the other, in the order of [`Stream::enqueue`].
#[derive(Debug)]
pub(crate) struct Stream {
    context: Arc<Context>,
}

impl Stream {
    /// Appends a job and returns its sequence number (the first of a stream is 1). Never runs anything.
    ///
    /// # Errors
    /// The context's sticky error; `CUDA_ERROR_NOT_SUPPORTED` while the stream captures.
    pub(crate) fn enqueue(&self, work: Box<dyn Work>) -> Result<u64, CUresult> {
        drop(work);
        todo!()
    }

    /// Sequence number of the last job given to the stream.
    pub(crate) fn submitted(&self) -> u64 {
        todo!()
    }

    /// Sequence number of the last job that finished.
    pub(crate) fn completed(&self) -> u64 {
        todo!()
    }

    /// Makes later jobs of this stream wait for job `sequence` of `other`.
    pub(crate) fn wait_for(&self, other: &Arc<Stream>, sequence: u64) -> Result<(), CUresult> {
        let _ = (other, sequence);
        todo!()
    }

    /// Returns when all that was enqueued before the call has finished; runs it in the calling thread if nobody else does.
    ///
    /// # Errors
    /// The context's sticky error.
    pub(crate) fn synchronize(&self) -> Result<(), CUresult> {
        todo!()
    }

    /// True when nothing is pending. Makes one bounded step if nobody else runs the stream.
    ///
    /// # Errors
    /// The context's sticky error.
    pub(crate) fn query(&self) -> Result<bool, CUresult> {
        todo!()
    }

    /// True between `cuStreamBeginCapture` and `cuStreamEndCapture`.
    pub(crate) fn capturing(&self) -> bool {
        todo!()
    }

    /// The context the stream belongs to.
    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// The ordinal of the device it runs on.
    pub(crate) fn device(&self) -> i32 {
        self.context.device()
    }
}
