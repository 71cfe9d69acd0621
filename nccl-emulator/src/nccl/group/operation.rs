//! Checking and queueing of an operation: `ncclEnqueueCheck`.

use std::ffi::c_void;
use std::sync::Arc;

use nccl_sys::{cudaStream_t, ncclComm_t, ncclDataType_t, ncclRedOp_t};

use super::launch::record_event;
use super::open::{end, record, start, with_tasks};
use super::tasks::{Tasks, find, text};
use crate::code::{INTERNAL, INVALID_ARGUMENT, INVALID_USAGE, Result, UNHANDLED_CUDA};
use crate::faults;
use crate::nccl::communicator::{self, Communicator};
use crate::nccl::debug::{info, subsystem, warn};
use crate::nccl::operators::UserOperator;
use crate::nccl::profiler;
use crate::nccl::task::{CollectiveTask, Function, MessageTask, ProfileIndex};
use crate::nccl::work::LocalCopy;
use crate::numbers::datatype::{DataType, Operator, Reduction};
use crate::transport::Direction;

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
    /// `launchCompletionEvent`, or null.
    pub(crate) event: *mut c_void,
    /// `userProfilerTag`.
    pub(crate) tag: u64,
}

impl Call {
    /// Creates a call without arguments: every field has the value for functions that lack the
    /// argument.
    pub(crate) fn new(function: Function, communicator: ncclComm_t, stream: cudaStream_t) -> Self {
        Self {
            function,
            send: std::ptr::null(),
            receive: std::ptr::null_mut(),
            count: 0,
            data_type: ncclDataType_t::ncclInt8,
            operator: ncclRedOp_t::ncclSum,
            root: 0,
            communicator,
            stream: stream.cast(),
            event: std::ptr::null_mut(),
            tag: 0,
        }
    }
}

/// Checks the call and queues it; outside a group, also launches it.
pub(crate) fn enqueue(call: &Call) -> Result {
    let communicator = communicator::lookup(call.communicator, call.function.name()).recorded()?;
    if communicator.is_revoked() {
        warn!("{}: communicator was revoked", call.function.name());
        return record(Err(INVALID_USAGE));
    }
    profiler::operation_begins();
    start();
    let result = append(call, &communicator);
    if !communicator.config.blocking && result.is_err() {
        communicator.set_state(result);
    }
    let _ = record(result);
    match end() {
        Err(error) if error != crate::code::IN_PROGRESS => Err(error),
        // A later poll launches the group; the state is already `ncclInProgress`.
        _ if !communicator.config.blocking => communicator.state(),
        _ => result,
    }
}

/// Records errors as [`record`] does, for calls that return a value on success.
trait Recorded: Sized {
    fn recorded(self) -> Self;
}

impl Recorded for Result<Arc<Communicator>> {
    fn recorded(self) -> Self {
        if let Err(error) = &self {
            let _ = record(Err(*error));
        }
        self
    }
}

fn append(call: &Call, communicator: &Arc<Communicator>) -> Result {
    communicator.ensure_ready()?;
    if faults::any() {
        // The thread counts as inside a call while a fault holds it.
        let _inside = communicator.enter();
        let aborted = || communicator.abort.is_raised();
        faults::check_call(call.function.symbol(), &[communicator.subject()], &aborted)?;
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
        .filter(|bytes| bytes.checked_mul(communicator.ranks as u64).is_some())
        .ok_or_else(|| {
            warn!("{name} : count {} is larger than any memory", call.count);
            INVALID_ARGUMENT
        })?;
    if let Function::Send | Function::Recv = call.function {
        return with_tasks(communicator, |tasks| {
            tasks.use_stream(call.stream)?;
            let (direction, address) = match call.function {
                Function::Send => (Direction::Send, call.send.addr()),
                _ => (Direction::Receive, call.receive.addr()),
            };
            Messages::of(call, tasks, data_type, bytes).push(call.root, direction, address as u64);
            Ok(())
        });
    }
    // An empty collective is dropped silently, even if it is not empty on other ranks.
    if call.count == 0 {
        return Ok(());
    }
    let reduction = reduction(call, communicator, data_type, operator)?;
    if communicator.ranks == 1 {
        return alone(call, communicator, data_type, reduction, bytes);
    }
    with_tasks(communicator, |tasks| {
        tasks.use_stream(call.stream)?;
        if !call.event.is_null() {
            tasks.events.push(call.event.addr());
        }
        match call.function {
            Function::AlltoAll | Function::Gather | Function::Scatter => {
                exchange(call, communicator, tasks, data_type, bytes);
            }
            _ => {
                let mut task = collective(call, data_type, reduction);
                let root = Some(call.root);
                task.profile = profile(call, tasks, call.function, data_type, root);
                tasks.lists.collectives.push(task);
            }
        }
        Ok(())
    })
}

/// Returns the reduction of a call's operator: `hostToDevRedOp`.
fn reduction(
    call: &Call,
    communicator: &Communicator,
    data_type: DataType,
    operator: Option<UserOperator>,
) -> Result<Reduction> {
    let Some(operator) = operator else {
        // The check has passed only valid built-in operators.
        return Reduction::built_in(call.operator, data_type, communicator.ranks).ok_or(INTERNAL);
    };
    if operator.data_type != call.data_type {
        warn!(
            "Data type supplied to user-created ncclRedOp_t does not match type given to reduction operation"
        );
        return Err(INVALID_ARGUMENT);
    }
    Ok(Reduction::scaled(operator.scalar))
}

/// Returns the task of a collective that the ranks process together.
fn collective(call: &Call, data_type: DataType, reduction: Reduction) -> CollectiveTask {
    let size = data_type.size();
    // A function that only moves bytes becomes a collective of bytes: ranks may name different
    // types.
    let (data_type, count) = if call.function.reduces() {
        (data_type, call.count as u64)
    } else {
        (DataType::I8, call.count as u64 * size)
    };
    CollectiveTask {
        function: call.function,
        data_type,
        reduction,
        count,
        root: call.root as u32,
        send: call.send.addr() as u64,
        receive: call.receive.addr() as u64,
        has_event: !call.event.is_null(),
        profile: None,
    }
}

/// Reports an operation to the profiler before it is queued. Returns the data that the launch needs for its events.
#[inline]
fn profile(
    call: &Call,
    tasks: &mut Tasks,
    function: Function,
    data_type: DataType,
    root: Option<i32>,
) -> Option<ProfileIndex> {
    match profiler::is_wanted() {
        true => tell_of(call, tasks, function, data_type, root),
        false => None,
    }
}

#[cold]
fn tell_of(
    call: &Call,
    tasks: &mut Tasks,
    function: Function,
    data_type: DataType,
    root: Option<i32>,
) -> Option<ProfileIndex> {
    let called = profiler::Call {
        function,
        count: call.count,
        data_type,
        root,
        stream: call.stream.addr(),
        is_captured: tasks.capture.is_some(),
        tag: call.tag,
        depth: tasks.depth,
    };
    profiler::call(tasks.communicator.profiler()?, &called)?.keep(&mut tasks.lists.profiles)
}

/// Queues the messages of a collective that consists of messages.
fn exchange(
    call: &Call,
    communicator: &Communicator,
    tasks: &mut Tasks,
    data_type: DataType,
    bytes: u64,
) {
    let (send, receive) = (call.send.addr() as u64, call.receive.addr() as u64);
    let part = |base: u64, rank: i32| base.wrapping_add(rank as u64 * bytes);
    let ranks = 0..communicator.ranks;
    let is_root = communicator.rank == call.root;
    let mut messages = Messages::of(call, tasks, data_type, bytes);
    match call.function {
        Function::Gather => {
            messages.push(call.root, Direction::Send, send);
            for rank in ranks.filter(|_| is_root) {
                messages.push(rank, Direction::Receive, part(receive, rank));
            }
        }
        Function::Scatter => {
            for rank in ranks.filter(|_| is_root) {
                messages.push(rank, Direction::Send, part(send, rank));
            }
            messages.push(call.root, Direction::Receive, receive);
        }
        _ => {
            for rank in ranks {
                messages.push(rank, Direction::Send, part(send, rank));
                messages.push(rank, Direction::Receive, part(receive, rank));
            }
        }
    }
}

/// The messages of one call, all of one size.
struct Messages<'a> {
    call: &'a Call,
    tasks: &'a mut Tasks,
    data_type: DataType,
    bytes: u64,
    leads: bool,
}

impl<'a> Messages<'a> {
    fn of(call: &'a Call, tasks: &'a mut Tasks, data_type: DataType, bytes: u64) -> Self {
        Self {
            call,
            tasks,
            data_type,
            bytes,
            leads: true,
        }
    }

    fn push(&mut self, peer: i32, direction: Direction, address: u64) {
        let function = match direction {
            Direction::Send => Function::Send,
            Direction::Receive => Function::Recv,
        };
        let profile = profile(self.call, self.tasks, function, self.data_type, None);
        let list = &mut self.tasks.lists.messages;
        let order = list.len() as u32;
        list.push(MessageTask {
            peer: peer as u32,
            direction,
            order,
            address,
            bytes: self.bytes,
            function: self.call.function,
            leads: std::mem::take(&mut self.leads),
            profile,
        });
    }
}

/// `ArgsCheck`. Returns the type, and the operator if the user created it.
fn check(call: &Call, communicator: &Communicator) -> Result<(DataType, Option<UserOperator>)> {
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
    if call.operator.0 < ncclRedOp_t::ncclNumOps.0 {
        return Ok((data_type, None));
    }
    if call.operator.0 > ncclRedOp_t::ncclMaxRedOp.0 {
        warn!(
            "{name} : invalid reduction operation {}",
            call.operator.0 as i32
        );
        return Err(INVALID_ARGUMENT);
    }
    let operator = communicator
        .operators()
        .get(communicator.handle(), call.operator);
    if operator.is_none() {
        warn!(
            "{name} : reduction operation {} unknown to this communicator",
            call.operator.0
        );
        return Err(INVALID_ARGUMENT);
    }
    Ok((data_type, operator))
}

/// Enqueues a collective of a single rank on the stream at once, in a group or not: a copy, or,
/// with an operator that scales, a product.
fn alone(
    call: &Call,
    communicator: &Arc<Communicator>,
    data_type: DataType,
    reduction: Reduction,
    bytes: u64,
) -> Result {
    let scaled = reduction.operator == Operator::PreMulSum;
    if scaled && data_type.is_float8() {
        // NCCL has no kernel for it, and logs nothing.
        return Err(INVALID_ARGUMENT);
    }
    let stream = find(communicator, call.stream)?;
    if !call.event.is_null() {
        record_event(call.event.addr(), &stream)?;
    }
    if call.send.addr() == call.receive.addr() && !scaled {
        return Ok(());
    }
    let copy = LocalCopy {
        communicator: Arc::clone(communicator),
        function: call.function,
        from: call.send.addr() as u64,
        to: call.receive.addr() as u64,
        bytes,
        scale: scaled.then_some((data_type, reduction.scalar)),
    };
    stream.submit(copy).map(drop).map_err(|error| {
        warn!("Cuda failure {} '{}'", error.0, text(error));
        UNHANDLED_CUDA
    })
}
