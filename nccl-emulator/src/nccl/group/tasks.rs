//! The operations that a group has queued for one communicator.

use std::ffi::c_void;
use std::sync::Arc;

use crate::code::{INVALID_USAGE, Result, UNHANDLED_CUDA};
use crate::nccl::communicator::Communicator;
use crate::nccl::debug::warn;
use crate::nccl::work::Lists;
use cuda_emulator::driver::context;
use cuda_emulator::exec::{self, Capture, Standing, Stream};

/// `cudaStreamPerThread`.
const PER_THREAD: usize = 2;

/// See the module.
pub(crate) struct Tasks {
    pub(crate) communicator: Arc<Communicator>,
    /// The stream of the first operation, and the streams of later ones.
    pub(crate) stream: Option<Arc<Stream>>,
    pub(crate) others: Vec<Arc<Stream>>,
    /// The handle of the first stream.
    pub(super) handle: usize,
    /// The capture that all these streams take part in.
    pub(crate) capture: Option<Arc<Capture>>,
    /// The depth of the thread's groups at the last operation, with that of its own call.
    pub(super) depth: u32,
    last_handle: Option<usize>,
    per_thread: bool,
    pub(crate) lists: Lists,
    /// `launchCompletionEvent`s.
    pub(super) events: Vec<usize>,
}

impl Tasks {
    pub(super) fn new(communicator: &Arc<Communicator>) -> Self {
        Self {
            communicator: Arc::clone(communicator),
            stream: None,
            others: Vec::new(),
            handle: 0,
            capture: None,
            depth: 0,
            last_handle: None,
            per_thread: false,
            lists: communicator.spare_lists(),
            events: Vec::new(),
        }
    }

    /// Adds the stream of an operation.
    pub(super) fn use_stream(&mut self, handle: *mut c_void) -> Result {
        if self.last_handle == Some(handle.addr()) {
            return Ok(());
        }
        if handle.addr() == PER_THREAD && !self.communicator.config.blocking {
            // The handle means the stream of the launching thread, which is a thread of NCCL.
            self.per_thread = true;
        } else {
            let stream = find(&self.communicator, handle)?;
            self.add_stream(stream)?;
        }
        if self.last_handle.is_none() {
            self.handle = handle.addr();
        }
        self.last_handle = Some(handle.addr());
        Ok(())
    }

    fn add_stream(&mut self, stream: Arc<Stream>) -> Result {
        let mut known = self.stream.iter().chain(&self.others);
        if known.any(|known| Arc::ptr_eq(known, &stream)) {
            return Ok(());
        }
        let capture = capture_of(&stream);
        match &self.stream {
            None => {
                self.capture = capture;
                self.stream = Some(stream);
            }
            Some(_) if self.capture.as_ref().map(|c| c.id) != capture.map(|c| c.id) => {
                warn!(
                    "Streams given to a communicator within a NCCL group must either be all uncaptured or all captured \
                     by the same graph."
                );
                return Err(INVALID_USAGE);
            }
            Some(_) => self.others.push(stream),
        }
        Ok(())
    }

    /// Whether an operation named the launching thread's own stream.
    pub(super) fn is_per_thread(&self) -> bool {
        self.per_thread
    }

    /// Adds the launching thread's own stream, if an operation named it.
    pub(super) fn resolve_per_thread(&mut self) -> Result {
        if std::mem::take(&mut self.per_thread) {
            let handle = std::ptr::without_provenance_mut(PER_THREAD);
            let stream = find(&self.communicator, handle)?;
            self.add_stream(stream)?;
        }
        Ok(())
    }
}

/// Returns the capture of a stream, unless the capture is invalid: NCCL then treats the stream as not captured, and the launch
/// fails.
fn capture_of(stream: &Stream) -> Option<Arc<Capture>> {
    stream
        .capture()
        .filter(|capture| capture.standing() == Standing::Active)
}

/// Returns the stream of a handle, if the communicator can run on it.
pub(super) fn find(communicator: &Communicator, handle: *mut c_void) -> Result<Arc<Stream>> {
    let refuse = |error: cuda_emulator::driver::CUresult| {
        warn!("Cuda failure {} '{}'", error.0, text(error));
        UNHANDLED_CUDA
    };
    let stream = match exec::named(handle) {
        Some(stream) => stream,
        // A default stream of a context.
        None => {
            let context = context::primary(communicator.device).map_err(refuse)?;
            exec::lookup(handle, &context).map_err(refuse)?
        }
    };
    if stream.device() != communicator.device {
        warn!(
            "Cuda failure 400 'invalid resource handle': the stream belongs to device {}, the communicator to device {}",
            stream.device(),
            communicator.device
        );
        return Err(UNHANDLED_CUDA);
    }
    Ok(stream)
}

/// Returns CUDA's text for an error.
pub(crate) fn text(error: cuda_emulator::driver::CUresult) -> &'static str {
    let names = cuda_emulator::driver::result::NAMES;
    let text = names
        .iter()
        .find(|(number, ..)| *number == error.0)
        .map(|(_, _, text)| *text);
    text.and_then(|text| text.to_str().ok())
        .unwrap_or("unknown error")
}
