//! The report of a process about its communicators, and the combination of all reports.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use cuda_emulator::sync::Mutex;

use super::peers::{Peers, ProcessId};
use crate::code;
use crate::nccl::communicator::Communicator;
use crate::nccl::task::Function;

/// The functions whose collectives are counted, in NCCL's order.
pub(super) const FUNCTIONS: [Function; 5] = [
    Function::Broadcast,
    Function::Reduce,
    Function::AllGather,
    Function::ReduceScatter,
    Function::AllReduce,
];

/// The report of a process about all of its communicators.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Report {
    pub(super) process: ProcessId,
    pub(super) communicators: Vec<OfCommunicator>,
}

/// The report of a process about one communicator.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct OfCommunicator {
    pub(super) hash: u64,
    /// The host of the first rank.
    pub(super) host: u64,
    /// All ranks.
    pub(super) members: Vec<Member>,
    /// The ranks of the process.
    pub(super) ranks: Vec<RankState>,
}

/// A rank, as all others know it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Member {
    pub(super) process: ProcessId,
    pub(super) device: i32,
    pub(super) nvml: i32,
}

/// The state of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RankState {
    pub(super) rank: u32,
    /// The number of launched collectives of each of [`FUNCTIONS`].
    pub(super) counts: [u64; FUNCTIONS.len()],
    /// `ncclResult_t` of the init and of the background.
    pub(super) init: u8,
    pub(super) error: u8,
    pub(super) is_finalized: bool,
    pub(super) is_destroyed: bool,
    pub(super) is_aborted: bool,
}

static COMMUNICATORS: Mutex<Vec<Weak<Communicator>>> = Mutex::new(Vec::new());

/// Adds a communicator of this process.
pub(super) fn add(communicator: &Arc<Communicator>) {
    COMMUNICATORS.lock().push(Arc::downgrade(communicator));
}

/// Removes a communicator that is destroyed.
pub(super) fn remove(communicator: &Communicator) {
    COMMUNICATORS
        .lock()
        .retain(|other| !std::ptr::eq(other.as_ptr(), communicator));
}

/// Returns the report of this process.
pub(super) fn own(process: ProcessId) -> Report {
    let all: Vec<_> = {
        let mut all = COMMUNICATORS.lock();
        all.retain(|communicator| communicator.strong_count() > 0);
        all.iter().filter_map(Weak::upgrade).collect()
    };
    let mut communicators: BTreeMap<Id, OfCommunicator> = BTreeMap::new();
    for communicator in all {
        let Some(session) = communicator.session() else {
            continue;
        };
        let member = |info: &crate::transport::RankInfo| Member {
            process: info.process,
            device: info.device,
            nvml: (info.bus_id >> 12) as i32 - 1,
        };
        let (hash, first) = (communicator.hash, session.info(0));
        let entry = communicators
            .entry((hash, first.host_hash, first.process))
            .or_insert_with(|| OfCommunicator {
                hash,
                host: first.host_hash,
                members: session.infos().iter().map(member).collect(),
                ranks: Vec::new(),
            });
        entry.ranks.push(state_of(&communicator));
    }
    Report {
        process,
        communicators: communicators.into_values().collect(),
    }
}

fn state_of(communicator: &Communicator) -> RankState {
    let count = |function| communicator.sequence(function).load(Ordering::Relaxed);
    RankState {
        rank: communicator.rank as u32,
        counts: FUNCTIONS.map(count),
        init: match communicator.is_initialized() {
            true => 0,
            false => code::IN_PROGRESS.number() as u8,
        },
        error: code::number(communicator.state()) as u8,
        is_finalized: communicator.is_finalized(),
        is_destroyed: communicator.is_destroyed(),
        is_aborted: communicator.abort.is_raised(),
    }
}

/// The identity of a communicator: the hash, and the host and the process of the first rank.
type Id = (u64, u64, ProcessId);

/// The gathered reports.
#[derive(Debug, Default)]
pub(super) struct Gathered {
    pub(super) peers: Peers,
    /// The processes that answered.
    pub(super) answered: BTreeSet<ProcessId>,
    /// The number of processes that did not answer in time.
    pub(super) timeouts: usize,
    pub(super) seconds: f64,
    pub(super) communicators: Vec<Whole>,
}

/// A communicator, combined from the reports of all its processes.
#[derive(Debug)]
pub(super) struct Whole {
    pub(super) id: Id,
    pub(super) members: Vec<Member>,
    /// The ranks whose state is known, in order.
    pub(super) ranks: Vec<RankState>,
}

impl Gathered {
    /// Combines the reports of several processes.
    pub(super) fn of(reports: Vec<Report>, peers: Peers, timeouts: usize, seconds: f64) -> Self {
        let mut wholes: BTreeMap<Id, Whole> = BTreeMap::new();
        let mut answered = BTreeSet::new();
        for report in reports {
            answered.insert(report.process);
            for communicator in report.communicators {
                let Some(first) = communicator.members.first() else {
                    continue;
                };
                let id = (communicator.hash, communicator.host, first.process);
                let whole = wholes.entry(id).or_insert_with(|| Whole {
                    id,
                    members: communicator.members.clone(),
                    ranks: Vec::new(),
                });
                let size = whole.members.len();
                let ranks = communicator.ranks.into_iter();
                whole
                    .ranks
                    .extend(ranks.filter(|rank| (rank.rank as usize) < size));
            }
        }
        for whole in wholes.values_mut() {
            whole.ranks.sort_by_key(|rank| rank.rank);
            whole.ranks.dedup_by_key(|rank| rank.rank);
        }
        Self {
            peers,
            answered,
            timeouts,
            seconds,
            communicators: wholes.into_values().collect(),
        }
    }
}

impl Whole {
    /// Returns the process and the devices of a rank.
    pub(super) fn member(&self, rank: u32) -> Member {
        self.members[rank as usize]
    }

    /// Returns the ranks whose state is not known.
    pub(super) fn missing(&self) -> impl Iterator<Item = u32> + '_ {
        let mut known = self.ranks.iter().map(|rank| rank.rank).peekable();
        (0..self.members.len() as u32).filter(move |&rank| known.next_if_eq(&rank).is_none())
    }
}
