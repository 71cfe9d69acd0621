//! Reads the contents of the rings.

use std::sync::atomic::Ordering;

use super::abi::{
    KERNEL_CHANNEL, PROXY_OPERATION, PROXY_STEP, RECV_FLUSH_WAIT, RECV_GPU_WAIT, RECV_WAIT,
    SEND_GPU_WAIT, SEND_PEER_WAIT, SEND_WAIT,
};
use super::events::{
    ALL_COMMUNICATORS, ALL_OPERATIONS, ALL_TRANSFERS, Communicator, Operation, Transfer,
    UNKNOWN_NAME, monotonic_ns,
};
use super::names::{ALGORITHMS, FUNCTIONS, PROTOCOLS};

/// Identifies the communicator in question, as NCCL knows it.
#[derive(Clone, Copy, Debug)]
pub struct CommunicatorQuery<'a> {
    /// Its name (`commName`).
    pub name: &'a str,
    /// This process's rank in it.
    pub rank: usize,
    /// Number of its ranks.
    pub world_size: usize,
    /// Whether the process uses no other communicator of this name, rank and number of ranks. NCCL may still be freeing
    /// others, which were aborted.
    pub is_alone: bool,
}

/// What NCCL has reported about a communicator.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Observation {
    /// Its operations, oldest first.
    pub operations: Vec<ObservedOperation>,
    /// Operations that were enqueued before this time may be missing; in ns of the monotonic clock.
    pub complete_since_ns: u64,
}

/// An operation that NCCL has enqueued.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObservedOperation {
    /// NCCL's name for it: `AllReduce`, `Send`.
    pub function: &'static str,
    /// Elements.
    pub count: u64,
    /// Peer of a message, root of a collective operation.
    pub peer: i32,
    /// Empty for messages.
    pub algorithm: &'static str,
    /// Empty for messages.
    pub protocol: &'static str,
    /// When it was enqueued, in ns of the monotonic clock.
    pub since_ns: u64,
    /// The number of channels on which it runs; 0 if NCCL does not report it.
    pub channels: u32,
    /// Channels on which its kernel has started and ended; `None` where that was not observed.
    pub kernel: Option<KernelChannels>,
    /// Since when its transfers had been requested when it was enqueued, in ns of the monotonic clock; `None` if they
    /// were not.
    pub transfers_asked_since_ns: Option<u64>,
    /// Whether some of its transfers are lost.
    pub is_incomplete: bool,
    /// The transfers of the proxy thread, over the network or by copy engines.
    pub transfers: Vec<ObservedTransfer>,
}

/// On how many channels a kernel has started and ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelChannels {
    /// Number of channels on which it has started.
    pub started: u32,
    /// Number of channels on which it has ended.
    pub ended: u32,
}

/// A transfer of the proxy thread: one operation, one channel, one peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObservedTransfer {
    /// The other rank.
    pub peer: i32,
    /// The channel.
    pub channel: u8,
    /// Whether this rank sends.
    pub is_send: bool,
    /// Number of steps of the transfer.
    pub steps: u32,
    /// Number of steps that are done; `None` where steps were not observed.
    pub done: Option<u32>,
    /// Whether it is over.
    pub is_over: bool,
    /// What the oldest step under way waits for, where that was observed.
    pub waits_for: Option<WaitsFor>,
    /// Time since a step ended, or since the first one began.
    pub still_ms: u64,
    /// Time for which the oldest step under way has been in its current wait.
    pub waits_ms: u64,
    /// Time since the first step began.
    pub age_ms: u64,
    /// The part of that time in which the network had not yet taken data of this rank that it was given.
    pub network_ms: u64,
}

/// What a step of a transfer waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaitsFor {
    /// Data from this rank's own GPU, to send.
    OwnGpu,
    /// Room at the receiver.
    PeerCredit,
    /// The network, to take what is sent.
    NetworkSend,
    /// Data from the peer.
    PeerData,
    /// The network card, to write what was received into memory of the GPU.
    Flush,
    /// This rank's own GPU, to take what was received.
    OwnGpuTakes,
    /// This rank's own GPU, or room at the receiver: releases before 2.27 do not distinguish the two.
    OwnGpuOrPeerCredit,
}

impl WaitsFor {
    fn of_state(state: u8, has_credit_state: bool) -> Option<Self> {
        Some(match state.into() {
            SEND_GPU_WAIT if !has_credit_state => Self::OwnGpuOrPeerCredit,
            SEND_GPU_WAIT => Self::OwnGpu,
            SEND_PEER_WAIT => Self::PeerCredit,
            SEND_WAIT => Self::NetworkSend,
            RECV_WAIT => Self::PeerData,
            RECV_FLUSH_WAIT => Self::Flush,
            RECV_GPU_WAIT => Self::OwnGpuTakes,
            _ => return None,
        })
    }
}

/// Returns what NCCL has reported about the operations of a communicator that were enqueued since `since_ns` of the
/// monotonic clock. `None` if NCCL has reported no matching communicator, or several, unless the communicator
/// [is alone](CommunicatorQuery::is_alone) and only one of them has such an operation.
#[must_use]
pub fn observe(query: CommunicatorQuery<'_>, since_ns: u64) -> Option<Observation> {
    let mut fitting = ALL_COMMUNICATORS.read_all(|slot| fits(slot, query).then(|| mask_of(slot)));
    if fitting.len() > 1 && query.is_alone {
        let used = ALL_OPERATIONS.read_all(|slot| {
            let is_asked = slot.since_ns.load(Ordering::Relaxed) >= since_ns;
            is_asked.then(|| slot.communicator.load(Ordering::Relaxed))
        });
        fitting.retain(|(turn, _)| used.iter().any(|(_, communicator)| communicator == turn));
    }
    let [(communicator, mask_at_init)] = fitting[..] else {
        return None;
    };
    let has_wrapped = ALL_OPERATIONS.has_wrapped();
    let mut oldest = u64::MAX;
    let mut operations: Vec<_> = ALL_OPERATIONS
        .read_all(|slot| {
            let since = slot.since_ns.load(Ordering::Relaxed);
            let is_of = slot.communicator.load(Ordering::Relaxed) == communicator;
            let is_asked = is_of && since >= since_ns;
            Some((since, is_asked.then(|| read_operation(slot, mask_at_init))))
        })
        .into_iter()
        .filter_map(|(turn, (since, operation))| {
            oldest = oldest.min(since);
            Some((turn, operation?))
        })
        .collect();
    let now = monotonic_ns();
    let transfers = ALL_TRANSFERS.read_all(|slot| {
        let owner = slot.operation.load(Ordering::Relaxed);
        let is_asked = operations.binary_search_by_key(&owner, |(turn, _)| *turn);
        is_asked.ok().map(|place| (place, read_transfer(slot, now)))
    });
    for (_, (place, transfer)) in transfers {
        operations[place].1.1.transfers.push(transfer);
    }
    let operations = operations.into_iter().map(|(_, (begun, operation))| {
        let is_incomplete = operation.transfers.len() < begun as usize;
        ObservedOperation {
            is_incomplete,
            ..operation
        }
    });
    Some(Observation {
        operations: operations.collect(),
        complete_since_ns: if has_wrapped { oldest } else { 0 },
    })
}

/// An operation whose kernel has ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FinishedOperation {
    /// Name of its communicator (`commName`); empty where it has none.
    pub communicator: String,
    /// Number of ranks of the communicator.
    pub world_size: usize,
    /// NCCL's name for it.
    pub function: &'static str,
    /// The other rank of a message, in the communicator.
    pub peer: Option<usize>,
    /// Empty for messages.
    pub algorithm: &'static str,
    /// Empty for messages.
    pub protocol: &'static str,
    /// Bytes of its data on this rank: NCCL's count, times the bytes of an element.
    pub bytes: u64,
    /// From the first start of its kernel on a channel to the last end, in ns of the GPU's clock.
    pub kernel_ns: u64,
}

/// Returns the operations whose kernels have ended and that were not returned before, oldest first. Operations whose
/// places in the ring were reused before this call are missing.
#[must_use]
pub fn take_finished() -> Vec<FinishedOperation> {
    let all = ALL_OPERATIONS.read_all(|slot| {
        let channels = u32::from(slot.channels.load(Ordering::Relaxed));
        let ended = slot.ended.load(Ordering::Acquire).count_ones();
        let begin = slot.kernel_begin_ns.load(Ordering::Relaxed);
        let end = slot.kernel_end_ns.load(Ordering::Relaxed);
        let element_size = u64::from(slot.element_size.load(Ordering::Relaxed));
        let is_finished = ended > 0 && ended >= channels && begin > 0 && end > begin;
        if !is_finished || element_size == 0 || slot.is_counted.swap(1, Ordering::Relaxed) != 0 {
            return None;
        }
        let owner = ALL_COMMUNICATORS.get(slot.communicator.load(Ordering::Relaxed))?;
        let (_, operation) = read_operation(slot, 0);
        let peer = usize::try_from(slot.peer.load(Ordering::Relaxed)).ok();
        Some(FinishedOperation {
            communicator: name_of(owner),
            world_size: usize::try_from(owner.world_size.load(Ordering::Relaxed)).unwrap_or(0),
            function: operation.function,
            peer: peer.filter(|_| operation.algorithm.is_empty()),
            algorithm: operation.algorithm,
            protocol: operation.protocol,
            bytes: operation.count.saturating_mul(element_size),
            kernel_ns: end - begin,
        })
    });
    all.into_iter().map(|(_, operation)| operation).collect()
}

fn name_of(slot: &Communicator) -> String {
    let length = slot.name_length.load(Ordering::Relaxed) as usize;
    let kept = slot.name.get(..length).unwrap_or_default();
    let bytes: Vec<u8> = kept
        .iter()
        .map(|byte| byte.load(Ordering::Relaxed))
        .collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Returns NCCL's number of a communicator (`commId` in its log, `hash` in answers of its RAS service). `None` if NCCL
/// has reported no matching communicator, or several.
#[must_use]
pub fn hash_of(query: CommunicatorQuery<'_>) -> Option<u64> {
    let hash = |slot: &Communicator| slot.hash.load(Ordering::Relaxed);
    let fitting = ALL_COMMUNICATORS.read_all(|slot| fits(slot, query).then(|| hash(slot)));
    match fitting[..] {
        [(_, hash)] if hash != 0 => Some(hash),
        _ => None,
    }
}

fn mask_of(slot: &Communicator) -> u64 {
    slot.mask.load(Ordering::Relaxed)
}

fn fits(slot: &Communicator, query: CommunicatorQuery<'_>) -> bool {
    let same = |value: i32, asked: usize| value == -1 || usize::try_from(value) == Ok(asked);
    slot.is_over.load(Ordering::Acquire) == 0
        && same(slot.rank.load(Ordering::Relaxed), query.rank)
        && same(slot.world_size.load(Ordering::Relaxed), query.world_size)
        && has_name(slot, query.name)
}

fn has_name(slot: &Communicator, name: &str) -> bool {
    let length = slot.name_length.load(Ordering::Relaxed);
    if length == UNKNOWN_NAME {
        return true;
    }
    let name = name.as_bytes();
    let kept = &name[..name.len().min(slot.name.len())];
    let same =
        |(place, byte): (&std::sync::atomic::AtomicU8, &u8)| place.load(Ordering::Relaxed) == *byte;
    length as usize == kept.len() && slot.name.iter().zip(kept).all(same)
}

/// Returns the number of transfers that were begun for an operation, and the operation without its transfers.
fn read_operation(slot: &Operation, mask_at_init: u64) -> (u32, ObservedOperation) {
    let named = |names: &[&'static str], index: u8| names.get(usize::from(index)).copied();
    let mask = slot.mask.load(Ordering::Relaxed);
    // Read first, so that a kernel that has ended is also seen to have started.
    let ended = slot.ended.load(Ordering::Acquire);
    let started = slot.started.load(Ordering::Acquire);
    // NCCL reports kernels incorrectly on a communicator that was made before they were requested.
    let has_kernels = mask & mask_at_init & KERNEL_CHANNEL != 0;
    let has_transfers = mask & (PROXY_OPERATION | PROXY_STEP) != 0;
    let asked_since = slot.mask_since_ns.load(Ordering::Relaxed);
    let operation = ObservedOperation {
        function: named(&FUNCTIONS, slot.function.load(Ordering::Relaxed)).unwrap_or(FUNCTIONS[0]),
        count: slot.count.load(Ordering::Relaxed),
        peer: slot.peer.load(Ordering::Relaxed),
        algorithm: named(&ALGORITHMS, slot.algorithm.load(Ordering::Relaxed)).unwrap_or_default(),
        protocol: named(&PROTOCOLS, slot.protocol.load(Ordering::Relaxed)).unwrap_or_default(),
        since_ns: slot.since_ns.load(Ordering::Relaxed),
        channels: slot.channels.load(Ordering::Relaxed).into(),
        kernel: has_kernels.then(|| KernelChannels {
            started: started.count_ones(),
            ended: ended.count_ones(),
        }),
        transfers_asked_since_ns: has_transfers.then_some(asked_since),
        is_incomplete: false,
        transfers: Vec::new(),
    };
    (slot.transfers.load(Ordering::Relaxed), operation)
}

fn read_transfer(slot: &Transfer, now: u64) -> ObservedTransfer {
    let is_over = slot.is_over.load(Ordering::Acquire) != 0;
    let done = slot.done.load(Ordering::Acquire);
    let under_way = slot.under_way.iter().zip(&slot.state_since_ns);
    let oldest = under_way
        .map(|(step, since)| (step.load(Ordering::Acquire), since.load(Ordering::Relaxed)))
        .filter(|(step, _)| *step != 0)
        .min_by_key(|(step, _)| step >> 8);
    let has_steps = slot.has_steps.load(Ordering::Relaxed) != 0;
    let has_credit_state = slot.has_credit_state.load(Ordering::Relaxed) != 0;
    let ms = |since: u64| now.saturating_sub(since) / 1_000_000;
    ObservedTransfer {
        peer: slot.peer.load(Ordering::Relaxed),
        channel: slot.channel.load(Ordering::Relaxed),
        is_send: slot.is_send.load(Ordering::Relaxed) != 0,
        steps: slot.steps.load(Ordering::Relaxed).unsigned_abs(),
        done: has_steps.then_some(done),
        is_over,
        waits_for: oldest
            .and_then(|(step, _)| WaitsFor::of_state((step & 0xff) as u8, has_credit_state)),
        still_ms: ms(slot.moved_ns.load(Ordering::Relaxed)),
        waits_ms: oldest.map_or(0, |(_, since)| ms(since)),
        age_ms: ms(slot.since_ns.load(Ordering::Relaxed)),
        network_ms: slot.network_ns(now) / 1_000_000,
    }
}
