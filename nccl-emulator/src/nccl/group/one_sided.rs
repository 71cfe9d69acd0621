//! Checking and queueing of one-sided operations: put with a signal, signal, wait for signals.

use std::ffi::c_void;
use std::sync::Arc;

use nccl_sys::{ncclComm_t, ncclDataType_t, ncclWaitSignalDesc_t, ncclWindow_t};

use super::open::{add_symmetric, end, record, start, with_tasks};
use crate::code::{IN_PROGRESS, INVALID_ARGUMENT, INVALID_USAGE, Result};
use crate::faults;
use crate::nccl::communicator::{self, Communicator, SymmetricTask};
use crate::nccl::debug::{info, subsystem, warn};
use crate::nccl::task::OneSidedTask;
use crate::numbers::datatype::DataType;
use crate::transport::SIGNALS;

/// The arguments of an operation.
pub(crate) enum OneSided {
    Put {
        from: *const c_void,
        count: usize,
        data_type: ncclDataType_t,
        peer: i32,
        window: ncclWindow_t,
        offset: usize,
        signal: i32,
        context: i32,
        flags: u32,
    },
    Signal {
        peer: i32,
        signal: i32,
        context: i32,
        flags: u32,
    },
    /// `None` for a null pointer.
    Wait(Option<Vec<ncclWaitSignalDesc_t>>),
}

impl OneSided {
    fn name(&self) -> &'static str {
        match self {
            Self::Put { .. } => "PutSignal",
            Self::Signal { .. } => "Signal",
            Self::Wait(_) => "WaitSignal",
        }
    }

    fn symbol(&self) -> &'static str {
        match self {
            Self::Put { .. } => "ncclPutSignal",
            Self::Signal { .. } => "ncclSignal",
            Self::Wait(_) => "ncclWaitSignal",
        }
    }
}

/// Checks the call and queues it; outside a group, also launches it.
pub(crate) fn enqueue_one_sided(call: &OneSided, comm: ncclComm_t, stream: *mut c_void) -> Result {
    let communicator = communicator::lookup(comm, call.name()).inspect_err(|error| {
        let _ = record(Err(*error));
    })?;
    if communicator.is_revoked() {
        warn!("{}: communicator was revoked", call.name());
        return record(Err(INVALID_USAGE));
    }
    start();
    let result = append(call, &communicator, stream);
    if !communicator.config.blocking && result.is_err() {
        communicator.set_state(result);
    }
    let _ = record(result);
    match end() {
        Err(error) if error != IN_PROGRESS => Err(error),
        _ if !communicator.config.blocking => communicator.state(),
        _ => result,
    }
}

fn append(call: &OneSided, communicator: &Arc<Communicator>, stream: *mut c_void) -> Result {
    communicator.ensure_ready()?;
    if faults::any() {
        let _inside = communicator.enter();
        let aborted = || communicator.abort.is_raised();
        faults::check_call(call.symbol(), &[communicator.subject()], &aborted)?;
    }
    let tasks = check(call, communicator)?;
    info!(
        subsystem::COLL,
        "{}: opCount {:x} comm {:#x} [nranks={}] stream {stream:p}",
        call.name(),
        communicator.operations(),
        communicator.handle(),
        communicator.ranks
    );
    communicator.check_not_suspended(call.name());
    if !communicator.is_one_sided() {
        add_symmetric(communicator, SymmetricTask::OneSided);
    }
    with_tasks(communicator, |queue| {
        queue.use_stream(stream)?;
        queue.lists.one_sided.extend(tasks);
        Ok(())
    })
}

/// Checks the arguments in NCCL's order and returns the tasks.
fn check(call: &OneSided, communicator: &Communicator) -> Result<Vec<OneSidedTask>> {
    let name = call.name();
    if !communicator.is_initialized() {
        warn!("{name} : the communicator's init did not succeed");
        return Err(INVALID_ARGUMENT);
    }
    let peer = match *call {
        OneSided::Put { peer, .. } | OneSided::Signal { peer, .. } => peer,
        OneSided::Wait(_) => 0,
    };
    if peer < 0 || peer >= communicator.ranks {
        warn!(
            "{name} : invalid root {peer} (root should be in the 0..{} range)",
            communicator.ranks
        );
        return Err(INVALID_ARGUMENT);
    }
    let size = match *call {
        OneSided::Put { data_type, .. } => DataType::from_c(data_type).ok_or_else(|| {
            warn!("{name} : invalid type {}", data_type.0);
            INVALID_ARGUMENT
        })?,
        _ => DataType::I8,
    }
    .size();
    let config = &communicator.config;
    if config.contexts == 0 || !communicator.supports_windows() {
        warn!("One sided RMA: host RMA is not supported in this communicator.");
        return Err(INVALID_ARGUMENT);
    }
    if config.signals.saturating_mul(config.contexts) > SIGNALS {
        warn!(
            "nccl-emulator has {SIGNALS} signals for each pair of ranks, not {} in each of {} contexts",
            config.signals, config.contexts
        );
        return Err(INVALID_USAGE);
    }
    match call {
        OneSided::Put {
            from,
            count,
            window,
            offset,
            signal,
            context,
            flags,
            ..
        } => {
            let signal = slot(communicator, *signal, *context, *flags)?;
            if window.is_null() {
                warn!("ncclPutSignal: peerWin is NULL");
                return Err(INVALID_ARGUMENT);
            }
            let window = communicator::find_window(communicator, *window, "ncclPutSignal")?;
            if from.is_null() {
                warn!("ncclPutSignal: srcBuff is NULL");
                return Err(INVALID_ARGUMENT);
            }
            let from = from.addr() as u64;
            if communicator.window_at(from).is_none() {
                warn!("ncclPutSignal: srcWinHost is not in a valid symmetric window");
                return Err(INVALID_ARGUMENT);
            }
            let bytes = (*count as u64).checked_mul(size).ok_or(INVALID_ARGUMENT)?;
            let peer = peer as usize;
            Ok(vec![
                OneSidedTask::Put {
                    peer,
                    from,
                    bytes,
                    window,
                    offset: *offset as u64,
                    signal,
                },
                OneSidedTask::Signal { peer, signal },
            ])
        }
        OneSided::Signal {
            signal,
            context,
            flags,
            ..
        } => {
            let signal = slot(communicator, *signal, *context, *flags)?;
            let peer = peer as usize;
            Ok(vec![OneSidedTask::Signal { peer, signal }])
        }
        OneSided::Wait(descriptors) => {
            let descriptors = descriptors.as_deref().unwrap_or_default();
            if descriptors.is_empty() {
                warn!("ncclWaitSignal: invalid arguments");
                return Err(INVALID_ARGUMENT);
            }
            wait(communicator, descriptors)
        }
    }
}

fn wait(
    communicator: &Communicator,
    descriptors: &[ncclWaitSignalDesc_t],
) -> Result<Vec<OneSidedTask>> {
    let mut wanted: Vec<(usize, usize, u64)> = Vec::new();
    for (at, descriptor) in descriptors.iter().enumerate() {
        if descriptor.opCnt <= 0 {
            warn!(
                "ncclWaitSignal: descriptor {at} has invalid opCnt {}",
                descriptor.opCnt
            );
            return Err(INVALID_ARGUMENT);
        }
        let signal = slot(communicator, descriptor.sigIdx, descriptor.ctx, 0)?;
        // NCCL does not check the peer, and uses it as an index.
        if descriptor.peer < 0 || descriptor.peer >= communicator.ranks {
            warn!(
                "ncclWaitSignal: descriptor {at} has invalid peer {}",
                descriptor.peer
            );
            return Err(INVALID_ARGUMENT);
        }
        let (peer, count) = (descriptor.peer as usize, descriptor.opCnt as u64);
        match wanted.iter_mut().find(|w| (w.0, w.1) == (peer, signal)) {
            Some(other) => other.2 += count,
            None => wanted.push((peer, signal, count)),
        }
    }
    Ok(vec![OneSidedTask::Wait(wanted)])
}

/// Returns the index of a signal among the signals between two ranks.
fn slot(communicator: &Communicator, signal: i32, context: i32, flags: u32) -> Result<usize> {
    let config = &communicator.config;
    let within = |value: i32, count: usize| usize::try_from(value).is_ok_and(|v| v < count);
    if !within(context, config.contexts) {
        warn!(
            "Context {context} is invalid (must be in the range 0..{})",
            config.contexts
        );
        return Err(INVALID_ARGUMENT);
    }
    if !within(signal, config.signals) {
        warn!(
            "Signal index {signal} is invalid (must be in the range 0..{})",
            config.signals
        );
        return Err(INVALID_ARGUMENT);
    }
    if flags != 0 {
        warn!("Flags {flags} is invalid (must be 0)");
        return Err(INVALID_ARGUMENT);
    }
    Ok(context as usize * config.signals + signal as usize)
}
