//! An operation on its way into the group: `ncclEnqueueCheck`.

use std::ffi::c_void;
use std::sync::Arc;

use nccl_sys::{ncclComm_t, ncclDataType_t, ncclRedOp_t};

use super::tasks::{CollectiveTask, MessageTask, find};
use super::{end, record, start, with_tasks};
use crate::faults;
use crate::nccl::code::{INVALID_ARGUMENT, INVALID_USAGE, Result, UNHANDLED_CUDA};
use crate::nccl::communicator::{self, Communicator};
use crate::nccl::datatype::{DataType, Operator};
use crate::nccl::debug::{info, subsystem, warn};
use crate::nccl::work;
use crate::transport::Direction;

/// The operations that there are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Function {
    Send,
    Recv,
    AlltoAll,
    AllReduce,
}

impl Function {
    /// As NCCL spells it in its messages.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Send => "Send",
            Self::Recv => "Recv",
            Self::AlltoAll => "AlltoAll",
            Self::AllReduce => "AllReduce",
        }
    }

    /// The C function.
    fn symbol(self) -> &'static str {
        match self {
            Self::Send => "ncclSend",
            Self::Recv => "ncclRecv",
            Self::AlltoAll => "ncclAlltoAll",
            Self::AllReduce => "ncclAllReduce",
        }
    }
}

/// The arguments of an operation, as NCCL names them.
pub(crate) struct Call {
    pub(crate) function: Function,
    pub(crate) send: *const c_void,
    pub(crate) receive: *mut c_void,
    pub(crate) count: usize,
    pub(crate) data_type: ncclDataType_t,
    pub(crate) operator: ncclRedOp_t,
    /// Root or peer.
    pub(crate) root: i32,
    pub(crate) communicator: ncclComm_t,
    pub(crate) stream: *mut c_void,
}

/// Checks the call and queues it; outside a group, also launches it.
pub(crate) fn enqueue(call: &Call) -> Result {
    let communicator = communicator::lookup(call.communicator, call.function.name()).recorded()?;
    if communicator.is_revoked() {
        warn!("{}: communicator was revoked", call.function.name());
        return record(Err(INVALID_USAGE));
    }
    start();
    let result = append(call, &communicator);
    if !communicator.config.blocking && result.is_err() {
        communicator.set_state(result);
    }
    let _ = record(result);
    match end() {
        Err(error) if error != crate::nccl::code::IN_PROGRESS => Err(error),
        // Launching is left to whoever polls; the state says so already.
        _ if !communicator.config.blocking => communicator.state(),
        _ => result,
    }
}

/// As [`record`], for calls that return something on success.
trait Recorded: Sized {
    fn recorded(self) -> Self;
}

impl Recorded for Result<Arc<Communicator>> {
    fn recorded(self) -> Self {
        if let Err(error) = &self {
            let _ = super::record(Err(*error));
        }
        self
    }
}

fn append(call: &Call, communicator: &Arc<Communicator>) -> Result {
    communicator.ensure_ready()?;
    if faults::any() {
        // While a fault holds the call, the thread is inside of it.
        let _inside = communicator.enter();
        let abort = Some(&*communicator.abort);
        faults::check_call(call.function.symbol(), &[communicator.rank], abort)?;
    }
    communicator.check_not_suspended(call.function.name());
    let name = call.function.name();
    let (data_type, operator) = check(call, communicator)?;
    info!(
        subsystem::COLL,
        "{name}: opCount {:x} sendbuff {:p} recvbuff {:p} count {} datatype {} op {} root {} comm {:#x} [nranks={}] \
         stream {:p}",
        communicator.operations(),
        call.send,
        call.receive,
        call.count,
        call.data_type.0,
        call.operator.0,
        call.root,
        communicator.handle(),
        communicator.ranks,
        call.stream
    );
    let bytes = (call.count as u64)
        .checked_mul(data_type.size())
        .ok_or_else(|| {
            warn!("{name} : count {} is larger than any memory", call.count);
            INVALID_ARGUMENT
        })?;
    match call.function {
        Function::Send | Function::Recv => with_tasks(communicator, |tasks| {
            tasks.use_stream(call.stream)?;
            let (direction, address) = match call.function {
                Function::Send => (Direction::Send, call.send.addr()),
                _ => (Direction::Receive, call.receive.addr()),
            };
            push(
                &mut tasks.lists.messages,
                call.function,
                true,
                (call.root as u32, direction),
                address as u64,
                bytes,
            );
            Ok(())
        }),
        // An empty collective is dropped without a word, also when other ranks do not think it
        // empty.
        _ if call.count == 0 => Ok(()),
        _ if communicator.ranks == 1 => alone(call, communicator, bytes),
        Function::AlltoAll => with_tasks(communicator, |tasks| {
            tasks.use_stream(call.stream)?;
            for peer in 0..communicator.ranks as u32 {
                let offset = u64::from(peer) * bytes;
                let (send, receive) = (call.send.addr() as u64, call.receive.addr() as u64);
                let messages = &mut tasks.lists.messages;
                push(
                    messages,
                    call.function,
                    peer == 0,
                    (peer, Direction::Send),
                    send.wrapping_add(offset),
                    bytes,
                );
                push(
                    messages,
                    call.function,
                    false,
                    (peer, Direction::Receive),
                    receive.wrapping_add(offset),
                    bytes,
                );
            }
            Ok(())
        }),
        Function::AllReduce => {
            if data_type.is_f8() {
                warn!(
                    "nccl-emulator cannot reduce 8-bit floats yet (AllReduce with datatype {})",
                    call.data_type.0
                );
                return Err(crate::nccl::code::INVALID_USAGE);
            }
            with_tasks(communicator, |tasks| {
                tasks.use_stream(call.stream)?;
                tasks.lists.collectives.push(CollectiveTask {
                    function: call.function,
                    data_type,
                    operator,
                    count: call.count as u64,
                    send: call.send.addr() as u64,
                    receive: call.receive.addr() as u64,
                });
                Ok(())
            })
        }
    }
}

fn push(
    messages: &mut Vec<MessageTask>,
    function: Function,
    leads: bool,
    (peer, direction): (u32, Direction),
    address: u64,
    bytes: u64,
) {
    let order = messages.len() as u32;
    messages.push(MessageTask {
        peer,
        direction,
        order,
        address,
        bytes,
        function,
        leads,
    });
}

/// `ArgsCheck`.
fn check(call: &Call, communicator: &Communicator) -> Result<(DataType, Operator)> {
    let name = call.function.name();
    if !communicator.is_initialized() {
        warn!("{name} : the communicator's init did not succeed");
        return Err(INVALID_ARGUMENT);
    }
    if call.root < 0 || call.root >= communicator.ranks {
        warn!(
            "{name} : invalid root {} (root should be in the 0..{} range)",
            call.root, communicator.ranks
        );
        return Err(INVALID_ARGUMENT);
    }
    let Some(data_type) = DataType::from_c(call.data_type) else {
        warn!("{name} : invalid type {}", call.data_type.0);
        return Err(INVALID_ARGUMENT);
    };
    let Some(operator) = Operator::from_c(call.operator) else {
        if call.operator.0 > i32::MAX as u32 {
            warn!(
                "{name} : invalid reduction operation {}",
                call.operator.0 as i32
            );
        } else {
            warn!(
                "{name} : reduction operation {} unknown to this communicator",
                call.operator.0
            );
        }
        return Err(INVALID_ARGUMENT);
    };
    Ok((data_type, operator))
}

/// A collective of a single rank is a copy, on the stream at once, group or not.
fn alone(call: &Call, communicator: &Arc<Communicator>, bytes: u64) -> Result {
    let stream = find(communicator, call.stream)?;
    if call.send.addr() == call.receive.addr() {
        return Ok(());
    }
    let copy = work::LocalCopy {
        communicator: Arc::clone(communicator),
        function: call.function,
        from: call.send.addr() as u64,
        to: call.receive.addr() as u64,
        bytes,
    };
    stream.submit(copy).map(drop).map_err(|error| {
        warn!("Cuda failure {} '{}'", error.0, super::tasks::text(error));
        UNHANDLED_CUDA
    })
}
