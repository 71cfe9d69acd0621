//! The operations that a group has queued for one communicator.

use std::cmp::Reverse;
use std::ffi::c_void;
use std::sync::Arc;

use super::Function;
use crate::code::{INVALID_USAGE, Result, UNHANDLED_CUDA};
use crate::nccl::communicator::Communicator;
use crate::nccl::debug::warn;
use crate::nccl::work::Lists;
use crate::numbers::datatype::{DataType, Reduction};
use crate::transport::Direction;
use cuda_emulator::driver::context;
use cuda_emulator::exec::{self, Capture, Standing, Stream};

/// One send or receive.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MessageTask {
    pub(crate) peer: u32,
    pub(crate) direction: Direction,
    /// Position among the messages of its group; keeps those of one peer in order.
    pub(crate) order: u32,
    pub(crate) address: u64,
    pub(crate) bytes: u64,
    /// The call it comes from.
    pub(crate) function: Function,
    /// The first message of its call.
    pub(crate) leads: bool,
}

/// One collective that all ranks work off together.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CollectiveTask {
    pub(crate) function: Function,
    pub(crate) data_type: DataType,
    /// Of those that reduce.
    pub(crate) reduction: Reduction,
    /// Elements, as the function counts them: of the smaller of the two buffers.
    pub(crate) count: u64,
    /// Of those that have one.
    pub(crate) root: u32,
    pub(crate) send: u64,
    pub(crate) receive: u64,
    /// Comes with an event for the launch.
    pub(crate) has_event: bool,
}

impl CollectiveTask {
    /// Bytes of `count` elements.
    pub(crate) fn bytes(&self) -> u64 {
        self.count * self.data_type.size()
    }

    /// What the count counts, for messages.
    pub(crate) fn unit(&self) -> &'static str {
        if self.function.reduces() {
            "elements"
        } else {
            "bytes"
        }
    }

    /// How many parts of `count` elements there are to work off: one, or one for each rank.
    pub(crate) fn parts(&self, ranks: u64) -> u64 {
        match self.function {
            Function::AllGather | Function::ReduceScatter => ranks,
            _ => 1,
        }
    }

    /// Bytes of `rank`'s input, 0 if it has none.
    pub(crate) fn send_bytes(&self, rank: usize, ranks: u64) -> u64 {
        match self.function {
            Function::ReduceScatter => self.bytes() * ranks,
            Function::Broadcast if rank != self.root as usize => 0,
            _ => self.bytes(),
        }
    }

    /// Bytes of `rank`'s output, 0 if it has none.
    pub(crate) fn receive_bytes(&self, rank: usize, ranks: u64) -> u64 {
        match self.function {
            Function::AllGather => self.bytes() * ranks,
            Function::Reduce if rank != self.root as usize => 0,
            _ => self.bytes(),
        }
    }

    /// What NCCL takes for its size when it sorts the collectives of a group.
    fn traffic(&self, ranks: u64) -> u64 {
        let per_byte = match self.function {
            Function::AllReduce => 2,
            Function::AllGather | Function::ReduceScatter => ranks,
            _ => 1,
        };
        self.bytes().saturating_mul(per_byte)
    }
}

/// Sorts the collectives of a group as NCCL does: roughly by size, largest first. Sizes that are
/// within a quarter of each other may count as equal, and equal ones keep their order, so ranks
/// that issue such collectives in different orders do not meet. Broadcasts from several roots are
/// one operation to NCCL, after all others, and meet root by root.
pub(crate) fn sort(tasks: &mut [CollectiveTask], ranks: u64) {
    let is_broadcast = |task: &CollectiveTask| task.function == Function::Broadcast;
    let mut roots = tasks
        .iter()
        .filter(|task| is_broadcast(task))
        .map(|task| task.root);
    let first = roots.next();
    let several = roots.any(|root| Some(root) != first);
    tasks.sort_by_key(|task| {
        if several && is_broadcast(task) {
            (true, Reverse(0), task.root)
        } else {
            (false, Reverse(size_class(task.traffic(ranks))), 0)
        }
    });
}

/// Four classes for each power of two, beginning with a kilobyte.
fn size_class(bytes: u64) -> u32 {
    const LARGEST: u64 = 1 << 30;
    let kilobytes = (bytes.min(LARGEST) >> 10) as u32;
    match kilobytes {
        0..4 => kilobytes,
        _ => {
            let log = kilobytes.ilog2();
            (log - 1) << 2 | (kilobytes >> (log - 2) & 3)
        }
    }
}

/// `cudaStreamPerThread`.
const PER_THREAD: usize = 2;

/// See the module.
pub(crate) struct Tasks {
    pub(crate) communicator: Arc<Communicator>,
    /// The stream of the first operation, and others that were named after it.
    pub(crate) stream: Option<Arc<Stream>>,
    pub(crate) others: Vec<Arc<Stream>>,
    /// The capture that all these streams take part in.
    pub(crate) capture: Option<Arc<Capture>>,
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
            capture: None,
            last_handle: None,
            per_thread: false,
            lists: communicator.spare_lists(),
            events: Vec::new(),
        }
    }

    /// The operation is issued on this stream.
    pub(super) fn use_stream(&mut self, handle: *mut c_void) -> Result {
        if self.last_handle == Some(handle.addr()) {
            return Ok(());
        }
        if handle.addr() == PER_THREAD && !self.communicator.config.blocking {
            // Means the stream of the thread that launches: one of NCCL's own.
            self.per_thread = true;
        } else {
            let stream = find(&self.communicator, handle)?;
            self.add_stream(stream)?;
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

    /// Whether the launching thread's own stream is meant.
    pub(super) fn is_per_thread(&self) -> bool {
        self.per_thread
    }

    /// Finds the launching thread's own stream, if it is meant.
    pub(super) fn resolve_per_thread(&mut self) -> Result {
        if std::mem::take(&mut self.per_thread) {
            let handle = std::ptr::without_provenance_mut(PER_THREAD);
            let stream = find(&self.communicator, handle)?;
            self.add_stream(stream)?;
        }
        Ok(())
    }
}

/// The capture of a stream, unless it is void: then NCCL takes the stream for one that is not
/// captured, and fails when it launches.
fn capture_of(stream: &Stream) -> Option<Arc<Capture>> {
    stream
        .capture()
        .filter(|capture| capture.standing() == Standing::Active)
}

/// The stream of a handle, if the communicator can run on it.
pub(super) fn find(communicator: &Communicator, handle: *mut c_void) -> Result<Arc<Stream>> {
    let refuse = |error: cuda_emulator::driver::CUresult| {
        warn!("Cuda failure {} '{}'", error.0, text(error));
        UNHANDLED_CUDA
    };
    let stream = match exec::named(handle) {
        Some(stream) => stream,
        // One of those that every context has.
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

/// CUDA's text of an error.
pub(crate) fn text(error: cuda_emulator::driver::CUresult) -> &'static str {
    let names = cuda_emulator::driver::result::NAMES;
    let text = names
        .iter()
        .find(|(number, ..)| *number == error.0)
        .map(|(_, _, text)| *text);
    text.and_then(|text| text.to_str().ok())
        .unwrap_or("unknown error")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::numbers::datatype::{Operator, Scalar};

    fn task(function: Function, count: u64, root: u32) -> CollectiveTask {
        CollectiveTask {
            function,
            data_type: DataType::I8,
            reduction: Reduction {
                operator: Operator::Sum,
                scalar: Scalar::Value(0),
            },
            count,
            root,
            send: 0,
            receive: 0,
            has_event: false,
        }
    }

    fn sorted(tasks: &[(Function, u64, u32)]) -> Vec<(Function, u64, u32)> {
        let mut tasks: Vec<_> = tasks.iter().map(|&(f, c, r)| task(f, c, r)).collect();
        sort(&mut tasks, 8);
        tasks
            .iter()
            .map(|t| (t.function, t.count, t.root))
            .collect()
    }

    #[test]
    fn larger_classes_come_first_and_a_class_keeps_its_order() {
        use Function::{AllGather, AllReduce, Broadcast, Reduce};
        assert_eq!(
            sorted(&[
                (Reduce, 100, 0),
                (AllGather, 1 << 20, 0),
                (AllReduce, 1 << 21, 0),
                (Reduce, 900, 0)
            ]),
            [
                (AllGather, 1 << 20, 0),
                (AllReduce, 1 << 21, 0),
                (Reduce, 100, 0),
                (Reduce, 900, 0)
            ]
        );
        assert_eq!(
            sorted(&[(Broadcast, 10, 3), (Reduce, 5000, 0), (Broadcast, 99999, 3)]),
            [(Broadcast, 99999, 3), (Reduce, 5000, 0), (Broadcast, 10, 3)]
        );
        assert_eq!(
            sorted(&[(Broadcast, 99999, 3), (Broadcast, 10, 1), (Reduce, 5, 0)]),
            [(Reduce, 5, 0), (Broadcast, 10, 1), (Broadcast, 99999, 3)]
        );
    }

    #[test]
    fn size_classes_grow_with_the_size() {
        let classes: Vec<u32> = (0..1 << 14)
            .map(|kilobytes| size_class(kilobytes << 10))
            .collect();
        assert!(classes.is_sorted() && classes.windows(2).all(|two| two[1] - two[0] <= 1));
        assert_eq!(size_class(u64::MAX), size_class(1 << 30));
        assert_eq!(size_class(8 << 10) + 4, size_class(16 << 10));
    }
}
