//! Queued operations, and the C calls that they become.
//!
//! An operation is queued with the addresses of its buffers when it is called, and is issued from here: alone, or
//! several operations between one group start and one group end. No other code of this crate puts work on a stream
//! through NCCL.

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use nccl_sys as sys;

use crate::collective_config::RawCollectiveConfig;
use crate::communicator::Communicator;
use crate::error::NcclFailure;
use crate::ffi::{self, Progress};
use crate::library::Library;
use crate::op::{Descriptor, Function};
use crate::recorder::{OperationSlot, Writer};
use crate::stats::{Tally, Volume};
use nccl_base::data_type::DataType;

/// One operation; a message needs nothing else. Its addresses are valid as long as its [`IssueBuffers`] lives. Small,
/// because groups hold hundreds of them.
#[derive(Clone, Copy, Debug)]
#[doc(hidden)]
pub struct QueuedOp {
    /// The address of a message's buffer; for a collective, the address to read, or null if the rank reads nothing.
    pub(crate) address: u64,
    /// The rest of the operation.
    pub(crate) descriptor: Descriptor,
}

/// The further arguments of an operation that is not a message.
#[derive(Clone, Debug)]
pub(crate) struct CollectiveArgs {
    /// The address to write; null if the rank writes nothing.
    pub(crate) recv: u64,
    pub(crate) reduction_op: sys::ncclRedOp_t,
    pub(crate) extra: Extra,
}

/// Arguments that only some operations have.
#[derive(Clone, Debug)]
pub(crate) enum Extra {
    None,
    /// A collective's configuration.
    Config(Arc<RawCollectiveConfig>),
    OneSided(Arc<OneSidedArgs>),
}

impl Extra {
    /// Returns the arguments for a collective on `comm`.
    #[inline]
    pub(crate) fn of(comm: &Communicator) -> Self {
        match &comm.config {
            None => Self::None,
            Some(config) => Self::Config(Arc::clone(config)),
        }
    }

    pub(crate) fn has_event(&self) -> bool {
        matches!(self, Self::Config(config) if config.has_event())
    }
}

/// The further arguments of a one-sided operation.
#[derive(Debug)]
pub(crate) enum OneSidedArgs {
    Put {
        window: RawWindow,
        /// In bytes from the start of the window.
        offset: usize,
        signal: c_int,
        context: c_int,
    },
    Signal {
        signal: c_int,
        context: c_int,
    },
    Wait(Vec<sys::ncclWaitSignalDesc_t>),
}

/// NCCL's handle of a window.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RawWindow(pub(crate) sys::ncclWindow_t);

// SAFETY: a number for NCCL, never dereferenced here.
unsafe impl std::marker::Send for RawWindow {}
// SAFETY: likewise.
unsafe impl Sync for RawWindow {}

/// The context of an operation's C calls.
pub(crate) struct CallContext<'c> {
    pub(crate) library: &'c Library,
    pub(crate) comm: sys::ncclComm_t,
    pub(crate) stream: sys::cudaStream_t,
}

/// Operations that are issued together.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Batch<'f> {
    /// In the order in which they are issued.
    pub(crate) queued: &'f [QueuedOp],
    /// One for each collective among them, in the same order.
    pub(crate) collective_args: &'f [CollectiveArgs],
    /// Whether a single operation has to be wrapped in a group.
    pub(crate) grouped: bool,
}

impl QueuedOp {
    /// Returns a message to (`Function::Send`) or from (`Function::Recv`) the peer `rank`, or a collective with
    /// the root `rank`, which reads at `address`.
    #[inline]
    #[doc(hidden)]
    pub fn new(
        function: Function,
        address: u64,
        count: usize,
        data_type: DataType,
        rank: i32,
    ) -> Self {
        Self {
            address,
            descriptor: Descriptor::new(function, count, data_type, rank),
        }
    }

    /// Records the only operation of a call.
    #[inline]
    pub(crate) fn record(&self, writer: &mut Writer) {
        if let [slot] = writer.next_slots(1).slots {
            slot.write(&self.descriptor, 0);
        }
        writer.publish_operations(1);
    }

    /// Counts a collective.
    #[inline]
    fn count_in(&self, tally: &Tally) {
        let descriptor = &self.descriptor;
        tally.operation(
            descriptor.function(),
            descriptor.type_code(),
            descriptor.count,
        );
    }

    /// Adds the operation to the volume that each launch of a plan counts.
    pub(crate) fn add_to(&self, volume: &mut Volume) {
        let descriptor = &self.descriptor;
        volume.add(
            descriptor.function(),
            descriptor.type_code(),
            descriptor.count,
        );
    }

    /// Makes the C call.
    fn call(
        &self,
        collective_args: Option<&CollectiveArgs>,
        calls: &CallContext<'_>,
    ) -> Result<Progress, NcclFailure> {
        let api = calls.library.api();
        let (comm, stream) = (calls.comm, calls.stream);
        let recv = collective_args.map_or(self.address, |collective_args| collective_args.recv);
        let reduction_op = collective_args.map_or(sys::ncclRedOp_t::ncclSum, |collective_args| {
            collective_args.reduction_op
        });
        let (send, recv) = (self.address as *const c_void, recv as *mut c_void);
        let (count, rank): (usize, c_int) = (self.descriptor.count as usize, self.descriptor.rank);
        let data_type = self.descriptor.data_type().raw();
        match collective_args.map(|args| &args.extra) {
            None | Some(Extra::None) => {}
            Some(Extra::Config(config)) => {
                return self.call_with_config(config, (send, recv), reduction_op, calls);
            }
            Some(Extra::OneSided(args)) => return self.call_one_sided(args, calls),
        }
        // SAFETY: for each: the function is NCCL's of that name; the addresses are valid for what it
        // reads and writes (the length rules, checked when the operation was queued) until the work
        // on the stream is done, which the order of streams ensures, and no other code accesses what is
        // written; communicator and stream are alive.
        let code = unsafe {
            match self.descriptor.function() {
                Function::Send => api
                    .ncclSend
                    .map(|f| f(send, count, data_type, rank, comm, stream)),
                Function::Recv => api
                    .ncclRecv
                    .map(|f| f(recv, count, data_type, rank, comm, stream)),
                Function::AllReduce => api
                    .ncclAllReduce
                    .map(|f| f(send, recv, count, data_type, reduction_op, comm, stream)),
                Function::Broadcast => api
                    .ncclBroadcast
                    .map(|f| f(send, recv, count, data_type, rank, comm, stream)),
                Function::Reduce => api.ncclReduce.map(|f| {
                    f(
                        send,
                        recv,
                        count,
                        data_type,
                        reduction_op,
                        rank,
                        comm,
                        stream,
                    )
                }),
                Function::AllGather => api
                    .ncclAllGather
                    .map(|f| f(send, recv, count, data_type, comm, stream)),
                Function::ReduceScatter => api
                    .ncclReduceScatter
                    .map(|f| f(send, recv, count, data_type, reduction_op, comm, stream)),
                Function::AllToAll => api
                    .ncclAlltoAll
                    .map(|f| f(send, recv, count, data_type, comm, stream)),
                Function::Gather => api
                    .ncclGather
                    .map(|f| f(send, recv, count, data_type, rank, comm, stream)),
                Function::Scatter => api
                    .ncclScatter
                    .map(|f| f(send, recv, count, data_type, rank, comm, stream)),
                // These have further arguments, and are called with them above.
                Function::Put | Function::Signal | Function::WaitSignal => None,
            }
        };
        match code {
            Some(code) => ffi::check(calls.library, self.descriptor.function().name(), code),
            None => Err(ffi::missing(
                calls.library,
                self.descriptor.function().name(),
            )),
        }
    }
}

impl QueuedOp {
    /// Makes the C call of a collective with a configuration.
    #[cold]
    fn call_with_config(
        &self,
        config: &RawCollectiveConfig,
        (send, recv): (*const c_void, *mut c_void),
        op: sys::ncclRedOp_t,
        calls: &CallContext<'_>,
    ) -> Result<Progress, NcclFailure> {
        let api = calls.library.api();
        let (comm, stream, config) = (calls.comm, calls.stream, config.as_ptr());
        let (count, root): (usize, c_int) = (self.descriptor.count as usize, self.descriptor.rank);
        let data_type = self.descriptor.data_type().raw();
        let name = self.descriptor.function().name_with_config();
        // SAFETY: for each as in `call`; the configuration is read during the call, and what it points to lives until the work
        // on the stream is done.
        let code = unsafe {
            match self.descriptor.function() {
                // These take no configuration.
                Function::Send
                | Function::Recv
                | Function::Put
                | Function::Signal
                | Function::WaitSignal => None,
                Function::AllReduce => api
                    .ncclAllReduceConfig
                    .map(|f| f(send, recv, count, data_type, op, comm, stream, config)),
                Function::Broadcast => api
                    .ncclBroadcastConfig
                    .map(|f| f(send, recv, count, data_type, root, comm, stream, config)),
                Function::Reduce => api
                    .ncclReduceConfig
                    .map(|f| f(send, recv, count, data_type, op, root, comm, stream, config)),
                Function::AllGather => api
                    .ncclAllGatherConfig
                    .map(|f| f(send, recv, count, data_type, comm, stream, config)),
                Function::ReduceScatter => api
                    .ncclReduceScatterConfig
                    .map(|f| f(send, recv, count, data_type, op, comm, stream, config)),
                Function::AllToAll => api
                    .ncclAlltoAllConfig
                    .map(|f| f(send, recv, count, data_type, comm, stream, config)),
                Function::Gather => api
                    .ncclGatherConfig
                    .map(|f| f(send, recv, count, data_type, root, comm, stream, config)),
                Function::Scatter => api
                    .ncclScatterConfig
                    .map(|f| f(send, recv, count, data_type, root, comm, stream, config)),
            }
        };
        match code {
            Some(code) => ffi::check(calls.library, name, code),
            None => Err(ffi::missing(calls.library, name)),
        }
    }

    /// Makes the C call of a one-sided operation.
    #[cold]
    fn call_one_sided(
        &self,
        args: &OneSidedArgs,
        calls: &CallContext<'_>,
    ) -> Result<Progress, NcclFailure> {
        let api = calls.library.api();
        let (comm, stream) = (calls.comm, calls.stream);
        let (count, peer): (usize, c_int) = (self.descriptor.count as usize, self.descriptor.rank);
        let name = self.descriptor.function().name();
        // SAFETY: for each: the function is NCCL's of that name; what is put lies in a window of this communicator and is not
        // written before the work on the stream is done, and it fits into the window of the other rank, which is as long as this
        // rank's; the descriptors are read during the call; communicator and stream are alive.
        let code = unsafe {
            match args {
                OneSidedArgs::Put {
                    window,
                    offset,
                    signal,
                    context,
                } => api.ncclPutSignal.map(|f| {
                    f(
                        self.address as *const c_void,
                        count,
                        self.descriptor.data_type().raw(),
                        peer,
                        window.0,
                        *offset,
                        *signal,
                        *context,
                        0,
                        comm,
                        stream,
                    )
                }),
                OneSidedArgs::Signal { signal, context } => api
                    .ncclSignal
                    .map(|f| f(peer, *signal, *context, 0, comm, stream)),
                OneSidedArgs::Wait(descriptors) => api.ncclWaitSignal.map(|f| {
                    f(
                        descriptors.len() as c_int,
                        descriptors.as_ptr().cast_mut(),
                        comm,
                        stream,
                    )
                }),
            }
        };
        match code {
            Some(code) => ffi::check(calls.library, name, code),
            None => Err(ffi::missing(calls.library, name)),
        }
    }
}

/// Makes the calls for `batch`: a single operation without a group, several between group start and group end.
#[inline]
pub(crate) fn call(
    batch: Batch<'_>,
    calls: &CallContext<'_>,
    writer: &mut Writer,
) -> Result<Progress, NcclFailure> {
    match batch.queued {
        [] => Ok(Progress::Done),
        [alone] if !batch.grouped => {
            alone.record(writer);
            alone.count_in(writer.tally());
            alone.call(batch.collective_args.first(), calls)
        }
        _ => group(calls.library, || call_each(batch, calls, writer)),
    }
}

/// Makes the calls for `batch`, inside a group.
pub(crate) fn call_each(
    batch: Batch<'_>,
    calls: &CallContext<'_>,
    writer: &mut Writer,
) -> Result<(), NcclFailure> {
    let api = calls.library.api();
    // Looked up once: a group may hold hundreds of messages.
    let (Some(send), Some(recv)) = (api.ncclSend, api.ncclRecv) else {
        return Err(ffi::missing(calls.library, "ncclSend"));
    };
    let mut caller = Caller {
        calls,
        send,
        recv,
        collective_args: batch.collective_args.iter(),
    };
    let mut rest = batch.queued;
    while !rest.is_empty() {
        let next = writer.next_slots(rest.len());
        let (part, after) = rest.split_at(next.slots.len());
        match caller.call(part, next.slots, next.tally) {
            Ok(()) => writer.publish_operations(part.len()),
            Err((called, failure)) => {
                writer.publish_operations(called);
                return Err(failure);
            }
        }
        rest = after;
    }
    Ok(())
}

type Send = unsafe extern "C" fn(
    *const c_void,
    usize,
    sys::ncclDataType_t,
    c_int,
    sys::ncclComm_t,
    sys::cudaStream_t,
) -> sys::ncclResult_t;
type Recv = unsafe extern "C" fn(
    *mut c_void,
    usize,
    sys::ncclDataType_t,
    c_int,
    sys::ncclComm_t,
    sys::cudaStream_t,
) -> sys::ncclResult_t;

struct Caller<'c> {
    calls: &'c CallContext<'c>,
    send: Send,
    recv: Recv,
    collective_args: std::slice::Iter<'c, CollectiveArgs>,
}

impl Caller<'_> {
    /// Writes each operation into its slot and makes its call. A failure comes with the number of calls
    /// that were made, including the failed one.
    // Never inlined: together with the caller's values there would be too few registers.
    #[inline(never)]
    fn call(
        &mut self,
        queued: &[QueuedOp],
        slots: &[OperationSlot],
        tally: &Tally,
    ) -> Result<(), (usize, NcclFailure)> {
        let calls = self.calls;
        let (comm, stream) = (calls.comm, calls.stream);
        let failed = |queued_op: &QueuedOp, failure| (index_of(queued, queued_op) + 1, failure);
        let mut slots = slots.iter();
        for queued_op in queued {
            let Some(slot) = slots.next() else { break };
            let &QueuedOp {
                address,
                ref descriptor,
            } = queued_op;
            let (count, rank, type_code) = (
                descriptor.count as usize,
                descriptor.rank,
                descriptor.type_code(),
            );
            let data_type = sys::ncclDataType_t(type_code.into());
            let code = if descriptor.packed < Descriptor::AFTER_SEND {
                let number = tally.messages.next_sent(rank, type_code, descriptor.count);
                slot.write(descriptor, number);
                let address = address as *const c_void;
                // SAFETY: as in `QueuedOp::call`.
                unsafe { (self.send)(address, count, data_type, rank, comm, stream) }
            } else if descriptor.packed < Descriptor::AFTER_RECV {
                let number = tally
                    .messages
                    .next_received(rank, type_code, descriptor.count);
                slot.write(descriptor, number);
                let address = address as *mut c_void;
                // SAFETY: as in `QueuedOp::call`.
                unsafe { (self.recv)(address, count, data_type, rank, comm, stream) }
            } else {
                slot.write(descriptor, 0);
                queued_op.count_in(tally);
                queued_op
                    .call(self.collective_args.next(), calls)
                    .map_err(|failure| failed(queued_op, failure))?;
                continue;
            };
            if code != sys::ncclResult_t::ncclSuccess {
                check_code(calls, queued_op, code).map_err(|failure| failed(queued_op, failure))?;
            }
        }
        Ok(())
    }
}

/// The index of `queued_op` in `queued`. Computed afterwards, because it is needed only when a call failed.
#[cold]
fn index_of(queued: &[QueuedOp], queued_op: &QueuedOp) -> usize {
    (std::ptr::from_ref(queued_op).addr() - queued.as_ptr().addr()) / size_of::<QueuedOp>()
}

/// The meaning of a code other than success.
#[cold]
fn check_code(
    calls: &CallContext<'_>,
    queued_op: &QueuedOp,
    code: sys::ncclResult_t,
) -> Result<Progress, NcclFailure> {
    ffi::check(calls.library, queued_op.descriptor.function().name(), code)
}

/// Makes `calls` between group start and group end. When one of them fails, the group is ended without
/// launching what was queued before it.
pub(crate) fn group(
    library: &Library,
    calls: impl FnOnce() -> Result<(), NcclFailure>,
) -> Result<Progress, NcclFailure> {
    let api = library.api();
    let (Some(start), Some(end)) = (api.ncclGroupStart, api.ncclGroupEnd) else {
        return Err(ffi::missing(library, "ncclGroupStart"));
    };
    // SAFETY: takes no arguments. If the program has opened a group on this thread with cudarc's `group_start`, this one is nested
    // in it, which NCCL allows; docs/streams-and-memory.md describes what then stays queued until the program closes its group.
    let code = unsafe { start() };
    ffi::check(library, "ncclGroupStart", code)?;
    let called = calls();
    if called.is_err() {
        discard_queued_calls(library);
    }
    // SAFETY: takes no arguments; closes the group opened above.
    let code = unsafe { end() };
    let ended = ffi::check(library, "ncclGroupEnd", code);
    called.and(ended)
}

/// Asks NCCL how long the operations of `batch` would take, in microseconds, without launching them. All of them must be
/// collectives whose tasks NCCL drops afterwards; it would keep the addresses of messages.
pub(crate) fn simulate(batch: Batch<'_>, calls: &CallContext<'_>) -> Result<f32, NcclFailure> {
    const END: &str = "ncclGroupSimulateEnd";
    let (library, api) = (calls.library, calls.library.api());
    let (Some(start), Some(end)) = (api.ncclGroupStart, api.ncclGroupSimulateEnd) else {
        return Err(ffi::missing(library, END));
    };
    // SAFETY: takes no arguments.
    ffi::check(library, "ncclGroupStart", unsafe { start() })?;
    let mut with_args = batch.queued.iter().zip(batch.collective_args);
    let called =
        with_args.try_for_each(|(queued_op, args)| queued_op.call(Some(args), calls).map(drop));
    if called.is_err() {
        discard_queued_calls(library);
    }
    let mut estimate = sys::ncclSimInfo_t {
        version: library
            .version()
            .min(sys::Version::HEADER)
            .code()
            .unsigned_abs(),
        ..sys::NCCL_SIM_INFO_INITIALIZER
    };
    // SAFETY: closes the group opened above; the place is valid for the call.
    let ended = ffi::check(library, END, unsafe { end(&mut estimate) });
    called.and(ended).map(|_| estimate.estimatedTime)
}

/// Makes the end of the group drop the queued operations. A failed call does not always do that; a call with a null
/// communicator does, and every release refuses it.
#[cold]
fn discard_queued_calls(library: &Library) {
    let Some(send) = library.api().ncclSend else {
        return;
    };
    // SAFETY: a null communicator is refused before any other argument is read.
    let _ = unsafe {
        send(
            std::ptr::null(),
            0,
            sys::ncclDataType_t::ncclInt8,
            0,
            std::ptr::null_mut(),
            std::ptr::null_mut(),
        )
    };
}
