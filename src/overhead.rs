//! Measures the cost of the safe crate: the same groups and collectives through the safe crate and through the bare
//! functions below it, over a library that only queues ([`queueing`]).
//!
//! Streams and memory are CUDA's or the emulator's. With [`Tracking::Off`] the safe crate queries the driver per
//! operation, not per message; with [`Tracking::On`] cudarc's own events are waited for and recorded for every buffer,
//! which is a cost of cudarc and of the driver.
//!
//! Both ways do what a program must: they check every result code, and poll once where the library returns that it is
//! still in progress. The functions are called through pointers of a table that the compiler cannot see through.

use std::error::Error;
use std::ffi::c_void;
use std::hint::black_box;
use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr};
use nccl::{Communicator, LaunchMode, Library, ReduceOp, UniqueId};
use nccl_sys::{Api, cudaStream_t, ncclComm_t, ncclDataType_t, ncclRedOp_t, ncclResult_t};

use crate::queueing::{self, Ending};

/// The largest number of messages of one group.
pub const MOST_MESSAGES: usize = 128;

/// Elements of every message.
const ELEMENTS: usize = 4;

/// Whether cudarc keeps an event per buffer and side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tracking {
    /// cudarc's default.
    On,
    /// `disable_event_tracking`, for programs that order their streams themselves.
    Off,
}

/// A communicator of 64 ranks and buffers to exchange with each.
pub struct Workload {
    comm: Communicator,
    stream: Arc<CudaStream>,
    sent: Vec<CudaSlice<f32>>,
    received: Vec<CudaSlice<f32>>,
    x: CudaSlice<f32>,
    y: CudaSlice<f32>,
    raw: Raw,
}

/// The arguments of the bare functions.
struct Raw {
    api: Box<Api>,
    comm: ncclComm_t,
    stream: cudaStream_t,
    sent: Vec<*const c_void>,
    received: Vec<*mut c_void>,
    x: *const c_void,
    y: *mut c_void,
}

impl Workload {
    /// Makes communicator and buffers, on device 0. A driver, or the emulator, is installed already.
    ///
    /// # Errors
    /// CUDA's, or the communicator's.
    pub fn new(ending: Ending, tracking: Tracking) -> Result<Self, Box<dyn Error>> {
        Self::in_mode(LaunchMode::NonBlocking, ending, tracking)
    }

    /// As [`new`](Self::new), in another launch mode. [`LaunchMode::BlockingChild`] goes with [`Ending::Success`],
    /// which a blocking communicator returns.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn in_mode(
        mode: LaunchMode,
        ending: Ending,
        tracking: Tracking,
    ) -> Result<Self, Box<dyn Error>> {
        let peers = MOST_MESSAGES / 2;
        let context = CudaContext::new(0)?;
        if tracking == Tracking::Off {
            // SAFETY: everything here is allocated, used and freed on one stream.
            unsafe { context.disable_event_tracking() };
        }
        let stream = context.new_stream()?;
        let api = queueing::api(ending);
        // SAFETY: the table never touches its arguments, so it cannot misuse them.
        let library = unsafe { Library::from_api(api, queueing::VERSION) }?;
        let id = UniqueId::from_bytes([0; UniqueId::LEN]);
        let comm = Communicator::builder("overhead", id, 0, peers)
            .stream(&stream)
            .with(|comm| {
                comm.library = Some(library.clone());
                comm.launch_mode = Some(mode);
            })
            .build()?;
        let buffers = || -> Result<Vec<_>, _> {
            (0..peers)
                .map(|_| stream.alloc_zeros::<f32>(ELEMENTS))
                .collect()
        };
        let (sent, received) = (buffers()?, buffers()?);
        let x = stream.alloc_zeros::<f32>(ELEMENTS * peers)?;
        let y = stream.alloc_zeros::<f32>(ELEMENTS * peers)?;
        stream.synchronize()?;
        let address = |slice: &CudaSlice<f32>| slice.device_ptr(&stream).0 as *mut c_void;
        let raw = Raw {
            // Behind a pointer that is opaque to the compiler.
            api: black_box(Box::new(api)),
            comm: raw_communicator(&api)?,
            stream: stream.cu_stream().cast(),
            sent: sent
                .iter()
                .map(|slice| address(slice).cast_const())
                .collect(),
            received: received.iter().map(address).collect(),
            x: address(&x),
            y: address(&y),
        };
        Ok(Self {
            comm,
            stream,
            sent,
            received,
            x,
            y,
            raw,
        })
    }

    /// One group of the safe crate with `messages` messages: half of them to as many ranks, half from the same ranks.
    ///
    /// # Errors
    /// The communicator's.
    pub fn safe_group(&mut self, messages: usize) -> nccl::Result<()> {
        let peers = messages / 2;
        let (sent, received) = (&self.sent[..peers], &mut self.received[..peers]);
        self.comm.group(|group| {
            for (peer, (x, y)) in sent.iter().zip(received).enumerate() {
                group.isend(x, peer)?;
                group.irecv(y, peer)?;
            }
            Ok(())
        })?;
        Ok(())
    }

    /// As [`safe_group`](Self::safe_group), by the bare functions.
    ///
    /// # Errors
    /// The first error code.
    pub fn raw_group(&self, messages: usize) -> Result<(), ncclResult_t> {
        let peers = messages / 2;
        let raw = &self.raw;
        let (Some(start), Some(end), Some(send), Some(recv)) = (
            raw.api.ncclGroupStart,
            raw.api.ncclGroupEnd,
            raw.api.ncclSend,
            raw.api.ncclRecv,
        ) else {
            return Err(ncclResult_t::ncclInternalError);
        };
        // SAFETY: takes no arguments; the group is ended below, or the process ends.
        check(unsafe { start() })?;
        let addresses = raw.sent[..peers].iter().zip(&raw.received[..peers]);
        for (peer, (&x, &y)) in addresses.enumerate() {
            // Fits: there are 64 ranks.
            let peer = peer as i32;
            let (kind, comm, stream) = (ncclDataType_t::ncclFloat32, raw.comm, raw.stream);
            // SAFETY: both buffers have that many elements and live as long as `self`.
            check(unsafe { send(x, ELEMENTS, kind, peer, comm, stream) })?;
            // SAFETY: as above; the function does not write.
            check(unsafe { recv(y, ELEMENTS, kind, peer, comm, stream) })?;
        }
        // SAFETY: takes no arguments; ends the group started above.
        raw.settle(unsafe { end() })
    }

    /// One all-to-all of the safe crate, which takes `ncclAlltoAll`.
    ///
    /// # Errors
    /// The communicator's.
    pub fn safe_all_to_all(&mut self) -> nccl::Result<()> {
        self.comm.all_to_all(&self.x, &mut self.y)?;
        Ok(())
    }

    /// As [`safe_all_to_all`](Self::safe_all_to_all), by the bare function.
    ///
    /// # Errors
    /// The error code.
    pub fn raw_all_to_all(&self) -> Result<(), ncclResult_t> {
        let raw = &self.raw;
        let Some(all_to_all) = raw.api.ncclAlltoAll else {
            return Err(ncclResult_t::ncclInternalError);
        };
        let kind = ncclDataType_t::ncclFloat32;
        // SAFETY: both buffers have a block per rank and live as long as `self`; nothing is written.
        let code = unsafe { all_to_all(raw.x, raw.y, ELEMENTS, kind, raw.comm, raw.stream) };
        raw.settle(code)
    }

    /// One all-reduce of the safe crate.
    ///
    /// # Errors
    /// The communicator's.
    pub fn safe_all_reduce(&mut self) -> nccl::Result<()> {
        self.comm.all_reduce(&self.x, &mut self.y, ReduceOp::Sum)?;
        Ok(())
    }

    /// As [`safe_all_reduce`](Self::safe_all_reduce), on an explicit stream.
    ///
    /// # Errors
    /// The communicator's.
    pub fn safe_all_reduce_on(&mut self) -> nccl::Result<()> {
        let on = self.comm.on(&self.stream);
        on.all_reduce(&self.x, &mut self.y, ReduceOp::Sum)?;
        Ok(())
    }

    /// The communicator, for other measurements.
    #[must_use]
    pub fn communicator(&self) -> &Communicator {
        &self.comm
    }

    /// As [`safe_all_reduce`](Self::safe_all_reduce), by the bare function.
    ///
    /// # Errors
    /// The error code.
    pub fn raw_all_reduce(&self) -> Result<(), ncclResult_t> {
        let raw = &self.raw;
        let Some(all_reduce) = raw.api.ncclAllReduce else {
            return Err(ncclResult_t::ncclInternalError);
        };
        let (count, kind) = (self.x.len(), ncclDataType_t::ncclFloat32);
        let sum = ncclRedOp_t::ncclSum;
        // SAFETY: both buffers have that many elements and live as long as `self`; nothing is written.
        let code = unsafe { all_reduce(raw.x, raw.y, count, kind, sum, raw.comm, raw.stream) };
        raw.settle(code)
    }

    /// Makes the driver calls of the safe crate for one operation, when all buffers are of the communicator's stream
    /// and events are not tracked: the current context, and whether the stream is capturing. Their time is not a cost
    /// of the safe crate.
    ///
    /// # Errors
    /// CUDA's.
    pub fn driver_calls(&self) -> Result<(), cudarc::driver::DriverError> {
        black_box(self.stream.capture_status()?);
        Ok(())
    }

    /// Waits until the driver has completed the event tracking on the stream.
    ///
    /// # Errors
    /// CUDA's.
    pub fn synchronize(&self) -> Result<(), cudarc::driver::DriverError> {
        self.stream.synchronize()
    }
}

impl Raw {
    /// Polls, as a program must that uses a non-blocking communicator without the safe crate.
    #[inline]
    fn settle(&self, mut code: ncclResult_t) -> Result<(), ncclResult_t> {
        while code == ncclResult_t::ncclInProgress {
            let Some(state) = self.api.ncclCommGetAsyncError else {
                return Err(ncclResult_t::ncclInternalError);
            };
            // SAFETY: `code` outlives the call; the communicator is never given back.
            check(unsafe { state(self.comm, &mut code) })?;
        }
        check(code)
    }
}

#[inline]
fn check(code: ncclResult_t) -> Result<(), ncclResult_t> {
    if code == ncclResult_t::ncclSuccess {
        Ok(())
    } else {
        Err(code)
    }
}

/// A communicator for the bare functions, which is never destroyed.
fn raw_communicator(api: &Api) -> Result<ncclComm_t, Box<dyn Error>> {
    let mut comm = std::ptr::null_mut();
    let mut config = nccl_sys::ncclConfig_t::default();
    let init = api.ncclCommInitRankConfig()?;
    // SAFETY: both pointers are valid for the call.
    let code = unsafe {
        init(
            &mut comm,
            64,
            nccl_sys::ncclUniqueId::default(),
            0,
            &mut config,
        )
    };
    check(code).map_err(|code| format!("ncclCommInitRankConfig returned {code:?}"))?;
    Ok(comm)
}
