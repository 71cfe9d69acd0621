//! Launches: from a kernel's name and parameters to a state machine that runs it.

use std::fmt;
use std::sync::Arc;
use std::task::{Context as TaskContext, Poll, Waker};

use nccl_sys::Version;

use super::asked::{Mismatch, Types};
use super::block::{Block, Context, Stop, Trouble};
use super::counters::{self, Event};
use super::executor::Part;
use super::functions::{Collective as Kind, Coverage, Function, Functions, Reason, Row};
use super::layout::Layout;
use super::memory::{self, Memory, Violation};
use super::one_rank::OneRank;
use super::works::{Broadcast, Collective, P2p};
use super::{broadcasts, collective, diagnostics, point_to_point, symmetric};
use std::sync::atomic::Ordering;

/// The prefix of the names of kernels that run batches of functions.
const FUNCTIONS: &str = "ncclDevKernel";

/// Interprets the kernels of one loaded library.
pub(crate) struct Interpreter {
    layout: Arc<Layout>,
    functions: Arc<Functions>,
    release: Version,
}

/// A launch that the interpreter does not run, and the reason.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Refused {
    /// The kernel's mangled name.
    pub(crate) kernel: String,
    /// The function of the batch that caused the refusal.
    pub(crate) function: Option<Function>,
    pub(crate) reason: Reason,
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "kernel {} cannot be interpreted", plain(&self.kernel))?;
        if let Some(function) = self.function {
            write!(f, " for {function}")?;
        }
        write!(f, ": {}", self.reason)
    }
}

impl std::error::Error for Refused {}

/// A kernel that could not continue.
#[derive(Debug, Clone)]
pub(crate) struct Failure {
    pub(crate) kernel: String,
    pub(crate) channel: Option<usize>,
    pub(crate) trouble: Trouble,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "kernel {} failed", plain(&self.kernel))?;
        if let Some(channel) = self.channel {
            write!(f, " on channel {channel}")?;
        }
        write!(f, ": {}", self.trouble)
    }
}

impl std::error::Error for Failure {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match &self.trouble {
            Trouble::Violation(violation) => Some(violation),
            _ => None,
        }
    }
}

/// The result of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Progress {
    /// The kernel has ended: its work is done, or its communicator was aborted.
    Done,
    /// Something moved, and more may at once.
    Moved,
    /// Every part waits for a peer, a proxy or the host.
    Waiting,
}

/// The works of one batch of a block, with their location and their function.
#[derive(Debug, Clone)]
struct Batch {
    id: u64,
    function: Function,
    kind: WorkKind,
    /// The collective's number in progress counters.
    collective: Option<u64>,
    /// Offsets from the arguments, or into the work buffer.
    works: Vec<u64>,
    size: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum WorkKind {
    P2p,
    Collective,
    Broadcast,
}

/// The location of the works.
#[derive(Debug, Clone)]
enum Storage {
    /// Behind the arguments.
    Arguments(Arc<[u8]>),
    /// In a buffer of the device; offsets wrap around.
    Buffer { address: u64, mask: u64 },
}

/// A launch in its stream.
pub(crate) struct Running {
    kernel: String,
    context: Arc<Context>,
    /// The functions of the launch, for messages.
    functions: Vec<Function>,
    channels: Vec<Option<usize>>,
    blocks: Vec<Option<Part<'static, Stop>>>,
    /// The block that the next step begins with.
    turn: usize,
}

impl Interpreter {
    /// Reads layouts from the library's types and inverts its table `ncclDevFuncRowToId`.
    pub(crate) fn new(
        types: &dyn Types,
        row_to_id: &[i32],
        release: Version,
    ) -> Result<Self, Mismatch> {
        Ok(Self {
            layout: Arc::new(Layout::new(types)?),
            functions: Arc::new(Functions::new(row_to_id, release)?),
            release,
        })
    }

    /// Returns every row of the library's table of device functions, with its support and its number of runs.
    pub(crate) fn coverage(&self) -> Vec<Row> {
        self.functions.coverage()
    }

    /// Returns the kernel over symmetric memory with this mangled name, if it is one.
    pub(crate) fn symmetric(kernel: &str) -> Option<symmetric::Kernel> {
        symmetric::Kernel::parse(plain(kernel))
    }

    /// Returns whether the interpreter runs a kernel; for `ncclDevKernel_*` this depends on the functions.
    pub(crate) fn kernel_coverage(&self, kernel: &str) -> Coverage {
        let name = plain(kernel);
        if let Some(symmetric) = Self::symmetric(kernel) {
            let state = match self.layout.symmetric {
                Some(_) => symmetric.interpreted(),
                None => Err(Reason::UnknownKernel),
            };
            return state.map_or_else(Coverage::Refused, |()| Coverage::Interpreted);
        }
        let known = OneRank::element(kernel).is_some()
            || name == counters::CLOCK
            || self.layout.diagnostics.is_some() && diagnostics::Kernel::parse(name).is_some()
            || name.starts_with(FUNCTIONS);
        if known {
            Coverage::Interpreted
        } else {
            Coverage::Refused(Reason::UnknownKernel)
        }
    }

    /// Starts a kernel; nothing runs before the first step. `kernel` is its mangled name, `parameters` are the bytes of its
    /// parameters.
    pub(crate) fn launch(
        &self,
        kernel: &str,
        grid: [u32; 3],
        _block: [u32; 3],
        parameters: Vec<u8>,
        memory: Arc<dyn Memory>,
    ) -> Result<Running, Refused> {
        let refuse = |function, reason| Refused {
            kernel: kernel.to_owned(),
            function,
            reason,
        };
        let context = Arc::new(Context::new(self.layout.clone(), self.release, memory));
        let mut running = Running {
            kernel: kernel.to_owned(),
            context: context.clone(),
            functions: Vec::new(),
            channels: Vec::new(),
            blocks: Vec::new(),
            turn: 0,
        };
        if let Some(ty) = OneRank::element(kernel) {
            let one = OneRank::decode(ty, &parameters).map_err(|reason| refuse(None, reason))?;
            running.channels.push(None);
            running
                .blocks
                .push(Some(Box::pin(async move { one.run(&context).await })));
            return Ok(running);
        }
        let name = plain(kernel);
        if name == counters::CLOCK {
            let needed = 8;
            let found = parameters.len();
            let to = parameters
                .first_chunk()
                .ok_or_else(|| refuse(None, Reason::Parameters { needed, found }))?;
            let to = u64::from_le_bytes(*to);
            running.channels.push(None);
            running.blocks.push(Some(Box::pin(async move {
                counters::store_clock(&context, to).await
            })));
            return Ok(running);
        }
        if let (Some(kernel), Some(layout)) =
            (diagnostics::Kernel::parse(name), &self.layout.diagnostics)
        {
            let launch = diagnostics::Launch::decode(layout, kernel, parameters)
                .map_err(|reason| refuse(None, reason))?;
            running.channels.push(None);
            running
                .blocks
                .push(Some(Box::pin(async move { launch.run(&context).await })));
            return Ok(running);
        }
        if let Some(symmetric) = symmetric::Kernel::parse(name) {
            let layout = self.layout.symmetric.as_ref();
            let layout = layout.ok_or_else(|| refuse(None, Reason::UnknownKernel))?;
            let blocks = grid.iter().product::<u32>() as usize;
            let launch = symmetric::Launch::decode(layout, symmetric, blocks, &parameters);
            let launch = Arc::new(launch.map_err(|reason| refuse(None, reason))?);
            for index in 0..blocks {
                running.channels.push(Some(index));
                let run = launch.clone().run(context.clone(), index);
                running.blocks.push(Some(Box::pin(run)));
            }
            return Ok(running);
        }
        if !name.starts_with(FUNCTIONS) {
            return Err(refuse(None, Reason::UnknownKernel));
        }
        let fields = &self.layout.arguments;
        if parameters.len() < fields.size {
            let (needed, found) = (fields.size, parameters.len());
            return Err(refuse(None, Reason::Parameters { needed, found }));
        }
        let comm = fields.comm.get(&parameters);
        let mask = fields.channel_mask.get(&parameters);
        let parameters: Arc<[u8]> = parameters.into();
        let storage = match fields.storage.get(&parameters) as i64 {
            kind if kind == self.layout.storage_arguments => Storage::Arguments(parameters.clone()),
            _ => Storage::Buffer {
                address: fields.work_buffer.get(&parameters),
                mask: fields.work_mask.get(&parameters),
            },
        };
        let (channels, blocks) = (mask.count_ones(), grid.iter().product());
        if channels != blocks {
            return Err(refuse(None, Reason::Grid { channels, blocks }));
        }
        let set = (0..64).filter(|channel| mask >> channel & 1 == 1);
        for (index, channel) in set.enumerate() {
            let batches = self
                .batches(&parameters, index)
                .map_err(|(function, reason)| refuse(function, reason))?;
            for batch in &batches {
                if !running.functions.contains(&batch.function) {
                    running.functions.push(batch.function);
                }
            }
            running.channels.push(Some(channel));
            let (context, storage) = (context.clone(), storage.clone());
            let functions = self.functions.clone();
            running.blocks.push(Some(Box::pin(async move {
                let block = Block::new(context, index, comm, channel)?;
                run(block, batches, storage, &functions).await
            })));
        }
        Ok(running)
    }

    /// Returns the chain of batches that begins at `index`. Batches that extend each other are merged.
    fn batches(
        &self,
        parameters: &[u8],
        mut index: usize,
    ) -> Result<Vec<Batch>, (Option<Function>, Reason)> {
        let (fields, types) = (&self.layout.batch, &self.layout.work_types);
        let first = self.layout.arguments.size;
        let mut batches = Vec::new();
        let mut works = Vec::new();
        // Each batch is visited at most once.
        for _ in 0..=parameters.len() / fields.size {
            let at = first + index * fields.size;
            let needed = at + fields.size;
            let found = parameters.len();
            let bytes = parameters
                .get(at..needed)
                .ok_or((None, Reason::Parameters { needed, found }))?;
            let id = fields.function.get(bytes);
            let function = self.functions.get(id).map_err(|reason| (None, reason))?;
            let refuse = |reason| (Some(function), reason);
            let work_type = fields.work_type.get(bytes);
            let (kind, size) = match work_type as i64 {
                ty if ty == types.p2p => (WorkKind::P2p, self.layout.p2p.size),
                ty if ty == types.coll => (WorkKind::Collective, self.layout.coll.size),
                ty if ty == types.coll_registered => {
                    (WorkKind::Collective, self.layout.coll_registered)
                }
                ty => match &self.layout.bcast {
                    Some(work) if types.bcast == Some(ty) => (WorkKind::Broadcast, work.size),
                    _ => return Err(refuse(Reason::UnknownWork { work_type })),
                },
            };
            let base = fields.offset_base.get(bytes);
            let bits = fields.offset_bits.get(bytes);
            let set = (0..64u64).filter(|bit| bits >> bit & 1 == 1);
            works.extend(set.map(|bit| base + bit * size as u64));
            let jump = fields.next_jump.get(bytes) as usize;
            index += jump;
            if fields.next_extends.get(bytes) != 0 {
                continue;
            }
            function.interpreted().map_err(refuse)?;
            let expected = match function.collective {
                Kind::SendRecv => WorkKind::P2p,
                Kind::AllGatherV => WorkKind::Broadcast,
                _ => WorkKind::Collective,
            };
            if kind != expected {
                return Err(refuse(Reason::WrongWork { work_type }));
            }
            batches.push(Batch {
                id,
                function,
                kind,
                collective: fields.collective.map(|field| field.get(bytes)),
                works: std::mem::take(&mut works),
                size,
            });
            if jump == 0 {
                return Ok(batches);
            }
        }
        Err((None, Reason::Endless))
    }
}

impl Storage {
    /// Returns the bytes of a work.
    fn load(&self, memory: &dyn Memory, offset: u64, size: usize) -> Result<Vec<u8>, Violation> {
        match self {
            Self::Arguments(parameters) => {
                let at = offset as usize;
                let bytes = parameters.get(at..at + size).ok_or(Violation {
                    address: offset,
                    length: size,
                    cause: memory::Cause::OutsideView {
                        covered: parameters.len(),
                    },
                })?;
                Ok(bytes.to_vec())
            }
            Self::Buffer { address, mask } => {
                let mut bytes = Vec::with_capacity(size);
                // A work may wrap around, in units of 16 bytes.
                for unit in (0..size as u64).step_by(16) {
                    let at = address + ((offset + unit) & mask);
                    bytes.extend(memory::load(memory, at, 16)?);
                }
                Ok(bytes)
            }
        }
    }
}

/// Runs the batches of a block.
async fn run(
    block: Block,
    batches: Vec<Batch>,
    storage: Storage,
    functions: &Functions,
) -> Result<(), Stop> {
    let mut done = match block.counter()? {
        Some(counter) => counter.load(Ordering::Relaxed),
        None => 0,
    };
    let mut result = Ok(());
    for batch in batches {
        let count = batch.works.len() as u64;
        let works = batch
            .works
            .iter()
            .map(|&offset| storage.load(block.memory(), offset, batch.size))
            .collect::<Result<Vec<_>, _>>()?;
        result = run_batch(&block, &batch, &works, done + 1).await;
        if matches!(result, Err(Stop::Failed(_))) {
            return result;
        }
        done += count;
        if result.is_err() {
            break;
        }
        functions.count(batch.id);
    }
    // As in NCCL, an aborted kernel also counts its works.
    if let Some(counter) = block.counter()? {
        counter.store(done, Ordering::Release);
    }
    result
}

async fn run_batch(
    block: &Block,
    batch: &Batch,
    works: &[Vec<u8>],
    first: u64,
) -> Result<(), Stop> {
    let layout = block.layout();
    let progress = match works.is_empty() {
        true => None,
        false => counters::Progress::begin(block, batch.collective)?,
    };
    // Of each work, whether it is profiled and whether it begins at this channel.
    let channel = block.channel_id as u64;
    let (result, begun) = match batch.kind {
        WorkKind::P2p => {
            let works: Vec<_> = works.iter().map(|work| P2p::decode(layout, work)).collect();
            let profiled: Vec<_> = works.iter().map(|work| work.profiled).collect();
            counters::record(block, Event::Started, first, &profiled)?;
            let result = point_to_point::run(block, &works).await;
            counters::record(block, Event::Completed, first, &profiled)?;
            let begun = works.iter().filter(|work| work.channel_base == channel);
            (result, begun.count())
        }
        WorkKind::Collective => {
            let works: Vec<_> = works
                .iter()
                .map(|work| Collective::decode(layout, work))
                .collect();
            let profiled: Vec<_> = works.iter().map(|work| work.profiled).collect();
            counters::record(block, Event::Started, first, &profiled)?;
            let mut result = Ok(());
            for work in &works {
                result = collective::run(block, batch.function, work).await;
                if result.is_err() {
                    break;
                }
            }
            counters::record(block, Event::Completed, first, &profiled)?;
            let begun = works.iter().filter(|work| work.channel_low == channel);
            (result, begun.count())
        }
        WorkKind::Broadcast => {
            let begun = if channel == 0 { works.len() } else { 0 };
            let works = works
                .iter()
                .filter_map(|work| Broadcast::decode(layout, work))
                .collect();
            let protocol = batch.function.protocol;
            (broadcasts::run(block, protocol, works).await, begun)
        }
    };
    result?;
    match progress {
        Some(progress) => progress.end(begun as u64),
        None => Ok(()),
    }
}

impl Running {
    /// Runs the kernel until it ends, waits, or has copied about `budget` bytes. Does not block.
    pub(crate) fn step(&mut self, budget: usize) -> Result<Progress, Failure> {
        self.context.meter.begin(budget);
        let mut context = TaskContext::from_waker(Waker::noop());
        let count = self.blocks.len();
        let begin = self.turn;
        for turn in 0..count {
            let index = (begin + turn) % count;
            if self.context.meter.exhausted() {
                self.turn = index;
                break;
            }
            let Some(block) = &mut self.blocks[index] else {
                continue;
            };
            match block.as_mut().poll(&mut context) {
                Poll::Pending => {}
                Poll::Ready(Ok(()) | Err(Stop::Aborted)) => {
                    self.blocks[index] = None;
                    self.context.meter.progress();
                }
                Poll::Ready(Err(Stop::Failed(trouble))) => {
                    let channel = self.channels[index];
                    self.blocks.iter_mut().for_each(|block| *block = None);
                    return Err(Failure {
                        kernel: self.kernel.clone(),
                        channel,
                        trouble,
                    });
                }
            }
        }
        Ok(if self.blocks.iter().all(Option::is_none) {
            Progress::Done
        } else if self.context.meter.moved() {
            Progress::Moved
        } else {
            Progress::Waiting
        })
    }

    /// Describes the kernel, its functions, and the present wait of each channel.
    pub(crate) fn describe(&self) -> String {
        let mut text = plain(&self.kernel).to_owned();
        for (index, function) in self.functions.iter().enumerate() {
            let before = if index == 0 { ": " } else { ", " };
            text.push_str(&format!("{before}{function}"));
        }
        for (block, wait) in self.context.waits() {
            if let Some(Some(channel)) = self.channels.get(block) {
                text.push_str(&format!("; channel {channel} waits for {wait}"));
            }
        }
        text
    }
}

/// Returns a kernel's unmangled name, if it is a plain function.
pub(crate) fn plain(kernel: &str) -> &str {
    let Some(rest) = kernel.strip_prefix("_Z") else {
        return kernel;
    };
    let digits = rest.len() - rest.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    let name = rest[..digits]
        .parse()
        .ok()
        .and_then(|length: usize| rest.get(digits..digits + length));
    name.unwrap_or(kernel)
}
