//! Work on a stream that ends when a test opens it.

use std::error::Error;
use std::ffi::c_void;
use std::sync::mpsc::{self, Receiver, Sender};

use nccl::cudarc::driver::{CudaStream, sys};

/// Blocks a stream until it is opened, or dropped, also by a failing test.
pub struct Gate(Sender<()>);

impl Gate {
    pub fn closed_on(stream: &CudaStream) -> Result<Self, Box<dyn Error>> {
        unsafe extern "C" fn wait(opened: *mut c_void) {
            // SAFETY: made by `Box::into_raw` below, and called once.
            let opened = unsafe { Box::from_raw(opened.cast::<Receiver<()>>()) };
            // Returns when the other end is dropped.
            let _ = opened.recv();
        }
        let (open, opened) = mpsc::channel();
        let opened = Box::into_raw(Box::new(opened));
        stream.context().bind_to_thread()?;
        // SAFETY: the stream is alive, and `wait` takes what it is given.
        let code = unsafe { sys::cuLaunchHostFunc(stream.cu_stream(), Some(wait), opened.cast()) };
        code.result()?;
        Ok(Self(open))
    }

    pub fn open(self) {
        drop(self.0);
    }
}
