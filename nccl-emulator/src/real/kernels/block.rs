//! The common state of the parts of one block: a block runs one channel's share of a launch.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cuda_emulator::sync::Mutex;
use nccl_sys::Version;

use super::arithmetic::BadArgument;
use super::executor::Meter;
use super::functions::Protocol;
use super::layout::Layout;
use super::memory::{self, Memory, View, Violation};

/// The number of steps that a connection's buffers hold.
pub(super) const STEPS: u64 = 8;

/// Why a part of a kernel ends early.
#[derive(Debug)]
pub(super) enum Stop {
    /// The communicator's abort flag is set.
    Aborted,
    Failed(Trouble),
}

/// Why a kernel cannot continue.
#[derive(Debug, Clone)]
pub(crate) enum Trouble {
    /// An access that the device is not allowed to make.
    Violation(Violation),
    /// An invalid argument of an operator.
    Argument {
        operator: super::functions::DeviceOperator,
        argument: u64,
    },
    /// A peer outside of the communicator.
    Peer { peer: i64, ranks: usize },
    /// A connection with a feature that the interpreter does not support.
    Connection { peer: usize, feature: &'static str },
    /// A chunk that does not fit into a step of its connection.
    Chunk {
        protocol: Protocol,
        bytes: usize,
        step: usize,
    },
    /// A copy or a reduction in which one end has no address.
    NoBuffer { peer: usize },
    /// A work with an invalid number of channels or chunks.
    Work { field: &'static str, value: u64 },
}

impl fmt::Display for Trouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Violation(violation) => write!(f, "it used {violation}"),
            Self::Argument { operator, argument } => {
                write!(f, "{operator:?} has no meaning for argument {argument:#x}")
            }
            Self::Peer { peer, ranks } => {
                write!(f, "it names rank {peer} of a communicator of {ranks}")
            }
            Self::Connection { peer, feature } => write!(
                f,
                "its connection with rank {peer} uses {feature}, which is not interpreted"
            ),
            Self::Chunk {
                protocol,
                bytes,
                step,
            } => write!(
                f,
                "a chunk of {bytes} bytes does not fit into a step of {step} of protocol {protocol:?}"
            ),
            Self::NoBuffer { peer } => {
                write!(f, "rank {peer} offered no buffer to read or write directly")
            }
            Self::Work { field, value } => write!(f, "its work has {field} {value}"),
        }
    }
}

impl From<Violation> for Stop {
    fn from(violation: Violation) -> Self {
        Self::Failed(Trouble::Violation(violation))
    }
}

impl From<Trouble> for Stop {
    fn from(trouble: Trouble) -> Self {
        Self::Failed(trouble)
    }
}

impl From<BadArgument> for Stop {
    fn from(BadArgument { operator, argument }: BadArgument) -> Self {
        Self::Failed(Trouble::Argument { operator, argument })
    }
}

/// The condition that a part of a block waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Wait {
    /// Data of a peer, up to this step.
    Data { peer: usize, step: u64 },
    /// Room in a connection's buffers for this step.
    Room { peer: usize, step: u64 },
    /// The address of a peer's registered buffer, or that the peer has read this rank's.
    Exchange { peer: usize },
    /// That the peer or the proxy no longer uses a registered buffer.
    Release { peer: usize },
    /// The arrival of a peer's block at a barrier over symmetric memory.
    Arrival { peer: usize },
    /// Lines of a peer in symmetric memory.
    Lines { peer: usize },
}

impl fmt::Display for Wait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Data { peer, step } => write!(f, "data of rank {peer} (step {step})"),
            Self::Room { peer, step } => write!(f, "room at rank {peer} (step {step})"),
            Self::Exchange { peer } => write!(f, "the exchange of buffers with rank {peer}"),
            Self::Release { peer } => write!(f, "rank {peer} to be done with a buffer"),
            Self::Arrival { peer } => write!(f, "rank {peer} at a barrier"),
            Self::Lines { peer } => write!(f, "lines of rank {peer}"),
        }
    }
}

/// The common state of the blocks of a launch.
pub(super) struct Context {
    pub(super) layout: Arc<Layout>,
    pub(super) release: Version,
    pub(super) memory: Arc<dyn Memory>,
    pub(super) meter: Meter,
    /// The present waits of parts, by block.
    waits: Mutex<BTreeMap<(usize, Wait), usize>>,
}

impl Context {
    pub(super) fn new(layout: Arc<Layout>, release: Version, memory: Arc<dyn Memory>) -> Self {
        Self {
            layout,
            release,
            memory,
            meter: Meter::default(),
            waits: Mutex::default(),
        }
    }

    pub(super) fn waits(&self) -> Vec<(usize, Wait)> {
        let waits = self.waits.lock();
        waits.keys().copied().collect()
    }

    fn waiting(&self, key: (usize, Wait), begins: bool) {
        let mut waits = self.waits.lock();
        let count = waits.entry(key).or_insert(0);
        if begins {
            *count += 1;
        } else {
            *count -= 1;
            if *count == 0 {
                waits.remove(&key);
            }
        }
    }

    /// Waits until `ready`, or until the abort flag is set.
    pub(super) async fn wait(
        &self,
        block: usize,
        wait: Wait,
        abort: Option<&View>,
        ready: impl Fn() -> Result<bool, Violation> + Send + Sync,
    ) -> Result<(), Stop> {
        if ready()? {
            return Ok(());
        }
        let aborted = || -> Result<bool, Violation> {
            match abort {
                Some(flag) => Ok(flag.half_word(0)?.load(Ordering::Acquire) != 0),
                None => Ok(false),
            }
        };
        let key = (block, wait);
        self.waiting(key, true);
        let result = loop {
            match aborted() {
                Ok(false) => {}
                Ok(true) => break Err(Stop::Aborted),
                Err(violation) => break Err(Stop::from(violation)),
            }
            self.meter.pause().await;
            match ready() {
                Ok(false) => {}
                Ok(true) => break Ok(()),
                Err(violation) => break Err(violation.into()),
            }
        };
        self.waiting(key, false);
        self.meter.progress();
        result
    }
}

/// The communicator of a launch.
pub(super) struct Comm {
    pub(super) rank: usize,
    pub(super) ranks: usize,
    /// The size of a connection's buffers in bytes, by protocol.
    pub(super) buffers: [usize; 3],
    pub(super) p2p_chunk: usize,
    pub(super) cross_clique: bool,
    pub(super) all_nvlink: bool,
    pub(super) rank_to_local: u64,
    pub(super) work_started: u64,
    pub(super) work_completed: u64,
    pub(super) progress: u64,
    abort: Option<View>,
}

impl Comm {
    /// Returns the size of one step's slot in a connection's buffers, in bytes.
    pub(super) fn slot(&self, protocol: Protocol) -> usize {
        self.buffers[protocol.index()] / STEPS as usize
    }
}

/// The ring and the tree of a channel.
pub(super) struct Channel {
    peers: u64,
    pub(super) prev: i64,
    pub(super) next: i64,
    /// The ranks in ring order, this rank first.
    pub(super) ring: Vec<i64>,
    pub(super) ring_index: usize,
    pub(super) up: i64,
    pub(super) down: [i64; 3],
}

/// One channel's share of a launch.
pub(super) struct Block {
    pub(super) context: Arc<Context>,
    pub(super) index: usize,
    pub(super) channel_id: usize,
    pub(super) comm: Comm,
    pub(super) channel: Channel,
    /// The channel's `workCounter`.
    counter: Option<View>,
}

impl Block {
    /// Reads the communicator at `comm` and its channel.
    pub(super) fn new(
        context: Arc<Context>,
        index: usize,
        comm: u64,
        channel_id: usize,
    ) -> Result<Self, Stop> {
        let layout = &context.layout;
        let memory = context.memory.as_ref();
        let bytes = memory::load(memory, comm, layout.comm.size)?;
        let fields = &layout.comm;
        let optional = |field: Option<super::asked::Field>| field.map_or(0, |f| f.get(&bytes));
        let ranks = fields.ranks.signed(&bytes);
        let rank = fields.rank.signed(&bytes);
        if rank < 0 || rank >= ranks {
            let (peer, ranks) = (rank, ranks.max(0) as usize);
            return Err(Trouble::Peer { peer, ranks }.into());
        }
        let abort = match fields.abort_flag.get(&bytes) {
            0 => None,
            address => Some(memory::view(memory, address, 4)?),
        };
        let size = |index| fields.buffer_sizes.element(index, 4).get(&bytes) as usize;
        let comm_info = Comm {
            rank: rank as usize,
            ranks: ranks as usize,
            buffers: [size(0), size(1), size(2)],
            p2p_chunk: fields.p2p_chunk.get(&bytes) as usize,
            cross_clique: optional(fields.cross_clique) != 0,
            all_nvlink: optional(fields.all_nvlink) != 0,
            rank_to_local: fields.rank_to_local.get(&bytes),
            work_started: optional(fields.work_started),
            work_completed: optional(fields.work_completed),
            progress: optional(fields.progress),
            abort,
        };
        let at = comm + (layout.channels.offset + channel_id * layout.channel.size) as u64;
        let bytes = memory::load(memory, at, layout.channel.size)?;
        let fields = &layout.channel;
        let ring = match fields.ring_ranks.get(&bytes) {
            0 => Vec::new(),
            address => memory::load(memory, address, 4 * comm_info.ranks)?
                .chunks_exact(4)
                .map(|rank| i64::from(i32::from_le_bytes([rank[0], rank[1], rank[2], rank[3]])))
                .collect(),
        };
        let down = |index| fields.tree_down.element(index, 4).signed(&bytes);
        let channel = Channel {
            peers: fields.peers.get(&bytes),
            prev: fields.ring_prev.signed(&bytes),
            next: fields.ring_next.signed(&bytes),
            ring,
            ring_index: fields.ring_index.get(&bytes) as usize,
            up: fields.tree_up.signed(&bytes),
            down: [down(0), down(1), down(2)],
        };
        let counter = match fields.work_counter {
            Some(field) => Some(memory::view(memory, at + field.offset as u64, 8)?),
            None => None,
        };
        Ok(Self {
            index,
            channel_id,
            comm: comm_info,
            channel,
            counter,
            context,
        })
    }

    pub(super) fn layout(&self) -> &Layout {
        &self.context.layout
    }

    pub(super) fn memory(&self) -> &dyn Memory {
        self.context.memory.as_ref()
    }

    pub(super) fn meter(&self) -> &Meter {
        &self.context.meter
    }

    /// Returns the counter of completed works of this channel.
    pub(super) fn counter(&self) -> Result<Option<&AtomicU64>, Violation> {
        self.counter.as_ref().map(|view| view.word(0)).transpose()
    }

    /// Waits until `ready`, or until the communicator is aborted.
    pub(super) async fn wait(
        &self,
        wait: Wait,
        ready: impl Fn() -> Result<bool, Violation> + Send + Sync,
    ) -> Result<(), Stop> {
        let abort = self.comm.abort.as_ref();
        self.context.wait(self.index, wait, abort, ready).await
    }

    /// Returns the address of one end of a connection; `index` is 0 for collectives, 1 for Send/Recv.
    pub(super) fn connection(&self, peer: i64, send: bool, index: usize) -> Result<u64, Stop> {
        let ranks = self.comm.ranks;
        if peer < 0 || peer as usize >= ranks {
            return Err(Trouble::Peer { peer, ranks }.into());
        }
        let layout = self.layout();
        let peers = memory::load_address(self.memory(), self.channel.peers + 8 * peer as u64)?;
        let side = if send {
            layout.peer.send
        } else {
            layout.peer.recv
        };
        Ok(peers + (side.offset + index * layout.connection.size) as u64)
    }

    /// Returns the rank at a position of the ring, counted from this rank.
    pub(super) fn ring_rank(&self, position: usize) -> Result<i64, Stop> {
        let ranks = self.comm.ranks;
        let rank = self.channel.ring.get(position).copied().unwrap_or(-1);
        if rank < 0 || rank as usize >= ranks {
            return Err(Trouble::Peer { peer: rank, ranks }.into());
        }
        Ok(rank)
    }
}
