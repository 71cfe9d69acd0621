//! What NCCL itself has reported about the calls in which a rank waits: for the rank's report, and as a sentence.
//!
//! A rank looks when it announces that its operation timed out, before the abort, because the abort ends kernels and
//! transfers. NCCL's operations do not carry this crate's call numbers: operations enqueued between two calls of a
//! communicator belong to the first of the two.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

use crate::nccl_profiler;
use crate::sync::Mutex;
use nccl_base::roster::Roster;
use nccl_base::sanitize;
use nccl_core::CommunicatorState as State;
use nccl_core::recorder::{self, CallState, Track};
use nccl_plugin::profiler::{
    self, CommunicatorQuery, ObservedOperation, ObservedTransfer, WaitsFor,
};

/// Limits of the calls looked at, of the operations of each, and of the transfers in all.
const CALLS: usize = 4;
const OPERATIONS: usize = 32;
const TRANSFERS: usize = 96;

/// An upper bound of NCCL's number of channels.
const CHANNELS: u32 = 256;

/// See the module. Ranks are those of the communicator.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct InsideNccl {
    /// The calls that are not done, oldest first.
    pub(super) calls: Vec<CallInside>,
}

/// What NCCL does for one call.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct CallInside {
    /// The call's number in the communicator.
    pub(super) number: u64,
    pub(super) operations: Vec<OperationInside>,
    /// Number of operations left out.
    #[serde(default)]
    pub(super) omitted: usize,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct OperationInside {
    /// NCCL's name for it.
    pub(super) function: String,
    #[serde(default)]
    pub(super) algorithm: String,
    #[serde(default)]
    pub(super) protocol: String,
    #[serde(default)]
    pub(super) channels: u32,
    /// Channels on which its kernel has started, and ended; `None` where that was not observed.
    #[serde(default)]
    pub(super) kernel: Option<(u32, u32)>,
    /// Whether its transfers were observed.
    #[serde(default)]
    pub(super) has_transfers: bool,
    #[serde(default)]
    pub(super) transfers: Vec<TransferInside>,
    /// Whether some transfers are missing from the list.
    #[serde(default)]
    pub(super) is_incomplete: bool,
}

/// What the proxy thread does on one channel with one rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct TransferInside {
    pub(super) peer: usize,
    pub(super) channel: u8,
    pub(super) is_send: bool,
    pub(super) steps: u32,
    /// `None` where steps were not observed.
    pub(super) done: Option<u32>,
    pub(super) is_over: bool,
    pub(super) waits_for: Option<Wait>,
    /// Time since it last did a step.
    pub(super) still_ms: u64,
    /// Time for which the oldest step has waited for `waits_for`.
    #[serde(default)]
    pub(super) waits_ms: u64,
    /// Time since its first step began, and the part of that time in which the network had not yet taken data that it
    /// was given.
    #[serde(default)]
    pub(super) age_ms: u64,
    #[serde(default)]
    pub(super) network_ms: u64,
}

/// What the oldest step of a transfer waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Wait {
    /// Data from the peer.
    PeerData,
    /// The peer, to take what was sent before.
    PeerCredit,
    /// The network, to take what is sent.
    Network,
    /// This rank's own GPU, to have data to send.
    OwnGpu,
    /// This rank's own GPU, to take what was received.
    OwnGpuTakes,
    /// What was received, to be visible to the GPU.
    Flush,
    /// This rank's own GPU, or the peer: old releases do not tell which.
    OwnGpuOrPeer,
}

impl Wait {
    fn of(waits_for: WaitsFor) -> Self {
        match waits_for {
            WaitsFor::PeerData => Self::PeerData,
            WaitsFor::PeerCredit => Self::PeerCredit,
            WaitsFor::NetworkSend => Self::Network,
            WaitsFor::OwnGpu => Self::OwnGpu,
            WaitsFor::OwnGpuTakes => Self::OwnGpuTakes,
            WaitsFor::Flush => Self::Flush,
            WaitsFor::OwnGpuOrPeerCredit => Self::OwnGpuOrPeer,
        }
    }

    fn text(self, peer: &str) -> String {
        match self {
            Self::PeerData => format!("waits for data from {peer}"),
            Self::PeerCredit => format!("waits for {peer} to take what was sent before"),
            Self::Network => format!("waits for the network to take data for {peer}"),
            Self::OwnGpu => format!("waits for its own GPU to have data for {peer}"),
            Self::OwnGpuTakes => format!("waits for its own GPU to take data from {peer}"),
            Self::Flush => format!("waits for data from {peer} to be visible to its GPU"),
            Self::OwnGpuOrPeer => {
                format!("waits for its own GPU, or for {peer} to take what was sent before")
            }
        }
    }

    /// Returns whether this wait is, or may be, for another rank or the network.
    pub(super) fn is_for_others(self) -> bool {
        !matches!(self, Self::OwnGpu | Self::OwnGpuTakes | Self::Flush)
    }
}

impl TransferInside {
    fn of(transfer: &ObservedTransfer) -> Option<Self> {
        Some(Self {
            peer: usize::try_from(transfer.peer).ok()?,
            channel: transfer.channel,
            is_send: transfer.is_send,
            steps: transfer.steps,
            done: transfer.done,
            is_over: transfer.is_over || transfer.done.is_some_and(|done| done >= transfer.steps),
            waits_for: transfer.waits_for.map(Wait::of),
            still_ms: transfer.still_ms,
            waits_ms: transfer.waits_ms,
            age_ms: transfer.age_ms,
            network_ms: transfer.network_ms,
        })
    }

    fn text(&self, roster: &Roster) -> String {
        let peer = roster.who(&[self.peer]);
        let what = match (self.waits_for, self.done, self.is_send) {
            (Some(wait), ..) => wait.text(&peer),
            (None, Some(_), true) => format!("sends to {peer}"),
            (None, Some(_), false) => format!("receives from {peer}"),
            // Only network transfers report their direction.
            (None, None, _) => format!("moves data with {peer}"),
        };
        let channel = self.channel;
        let seconds = self.still_ms as f64 / 1e3;
        match self.done {
            Some(0) => format!(
                "{what} (channel {channel}, none of {} steps done in {seconds:.1} s)",
                self.steps
            ),
            Some(done) => format!(
                "{what} (channel {channel}, {done} of {} steps done, the last {seconds:.1} s ago)",
                self.steps
            ),
            None => format!("{what} (channel {channel})"),
        }
    }
}

impl OperationInside {
    /// Describes an operation of a call that was made at `begin` on the monotonic clock; `room` is the number of
    /// transfers that may still be kept.
    fn of(operation: &ObservedOperation, begin: u64, room: &mut usize) -> Self {
        let known = operation.transfers.iter();
        // Without steps it is unknown whether a transfer is over: only network transfers report steps.
        let has_steps = operation.transfers.iter().any(|one| one.done.is_some());
        let mut transfers: Vec<_> = known
            .filter(|one| !has_steps || one.done.is_some())
            .filter_map(TransferInside::of)
            .collect();
        // Transfers that wait for others are the most informative.
        let waits = |one: &TransferInside| one.waits_for.is_some_and(Wait::is_for_others);
        transfers.sort_by_key(|one| (one.is_over, !waits(one), one.channel));
        let is_cut = transfers.len() > *room;
        transfers.truncate(*room);
        *room -= transfers.len();
        let asked_since = operation.transfers_asked_since_ns;
        Self {
            function: operation.function.to_owned(),
            algorithm: operation.algorithm.to_owned(),
            protocol: operation.protocol.to_owned(),
            channels: operation.channels,
            kernel: operation
                .kernel
                .map(|kernel| (kernel.started, kernel.ended)),
            // NCCL reads the event mask before it reports the operation.
            has_transfers: asked_since.is_some_and(|since| since < begin),
            is_incomplete: operation.is_incomplete || is_cut,
            transfers,
        }
    }

    /// "AllReduce (RING, SIMPLE)".
    fn name(&self) -> String {
        match self.algorithm.is_empty() {
            true => self.function.clone(),
            false => format!("{} ({}, {})", self.function, self.algorithm, self.protocol),
        }
    }

    fn kernel_text(&self) -> Option<String> {
        let (started, ended) = self.kernel?;
        let channels = self.channels.max(started);
        Some(match (started, ended) {
            (0, _) => format!("its kernel has not started on any of {channels} channels"),
            (started, ended) if ended >= started => {
                format!("its kernel has ended on {ended} of {channels} channels")
            }
            (started, ended) => format!(
                "its kernel runs on {} of {channels} channels",
                started - ended
            ),
        })
    }
}

impl CallInside {
    /// Returns the transfers that are not over.
    pub(super) fn open_transfers(&self) -> impl Iterator<Item = &TransferInside> {
        let all = self.operations.iter().flat_map(|one| &one.transfers);
        all.filter(|one| !one.is_over)
    }

    /// Returns the sentence about this call, behind the name of the rank.
    pub(super) fn text(&self, roster: &Roster) -> String {
        const MOST: usize = 3;
        let mut names: Vec<(String, usize)> = Vec::new();
        for operation in &self.operations {
            let name = operation.name();
            match names.iter_mut().find(|(known, _)| *known == name) {
                Some((_, count)) => *count += 1,
                None => names.push((name, 1)),
            }
        }
        let named = names.iter().map(|(name, count)| match count {
            1 => name.clone(),
            count => format!("{count} × {name}"),
        });
        let mut text = named.collect::<Vec<_>>().join(" and ");
        if self.omitted > 0 {
            text += &format!(" and {} more operations", self.omitted);
        }
        let mut parts: Vec<String> = Vec::new();
        // Of several operations, describes the first that is not over.
        let is_over = |one: &&OperationInside| {
            one.kernel
                .is_none_or(|(started, ended)| started > 0 && ended >= started)
        };
        let first = self.operations.iter().find(|one| !is_over(one));
        let first = first.or(self.operations.last());
        parts.extend(first.and_then(OperationInside::kernel_text).map(|text| {
            match self.operations.len() {
                1 => text,
                _ => format!(
                    "of {}, {text}",
                    first.map(OperationInside::name).unwrap_or_default()
                ),
            }
        }));
        let has_kernels = !parts.is_empty();
        let has_transfers = self.operations.iter().any(|one| one.has_transfers);
        let is_incomplete = self.operations.iter().any(|one| one.is_incomplete);
        let mut open: Vec<_> = self.open_transfers().collect();
        open.sort_by_key(|one| (one.waits_for.is_none(), one.waits_for, one.channel));
        let more = open.len().saturating_sub(MOST);
        parts.extend(open.iter().take(MOST).map(|one| one.text(roster)));
        if more > 0 {
            parts.push(format!("and {more} more transfers are under way"));
        }
        if is_incomplete {
            parts.push(String::from("not all of its transfers are known"));
        } else if open.is_empty() && has_transfers && self.omitted == 0 {
            parts.push(String::from("no transfer over the network is under way"));
        } else if parts.is_empty() || (open.is_empty() && !has_kernels) {
            parts.push(String::from(
                "it is enqueued, and no more of it was observed",
            ));
        }
        format!("{text}: {}", parts.join(", "))
    }
}

impl InsideNccl {
    /// Reads what NCCL has reported about the calls of a communicator that are not done. `None` where it has reported
    /// nothing.
    fn of(track: &Track) -> Option<Self> {
        let recording = recorder::read_one(track);
        let is_open = |state| !matches!(state, CallState::Done | CallState::Failed);
        let open = |call: &&recorder::Call| is_open(call.state);
        let since = recording.calls.iter().find(open)?.since;
        // The recorder uses the same clock with another zero.
        let zero =
            profiler::monotonic_ns().saturating_sub(nanos(recorder::origin().monotonic.elapsed()));
        let query = CommunicatorQuery {
            name: &track.identity.name,
            rank: track.identity.rank,
            world_size: track.identity.world_size,
            is_alone: is_alone(track),
        };
        let observed = profiler::observe(query, zero + nanos(since))?;
        let mut calls = Vec::new();
        let mut room = TRANSFERS;
        for (place, call) in recording.calls.iter().enumerate() {
            if !is_open(call.state) {
                continue;
            }
            let begin = zero + nanos(call.since);
            let next = recording.calls.get(place + 1);
            let end = next.map_or(u64::MAX, |next| zero + nanos(next.since));
            if begin < observed.complete_since_ns {
                continue;
            }
            let of_call: Vec<_> = (observed.operations.iter())
                .filter(|one| (begin..end).contains(&one.since_ns))
                .collect();
            if !of_call.is_empty() {
                let kept = of_call.iter().take(OPERATIONS);
                calls.push(CallInside {
                    number: call.sequence,
                    operations: kept
                        .map(|one| OperationInside::of(one, begin, &mut room))
                        .collect(),
                    omitted: of_call.len().saturating_sub(OPERATIONS),
                });
            }
            if calls.len() == CALLS {
                break;
            }
        }
        (!calls.is_empty()).then_some(Self { calls })
    }

    /// Returns the call of this number.
    pub(super) fn call(&self, number: u64) -> Option<&CallInside> {
        self.calls.iter().find(|call| call.number == number)
    }

    /// Bounds values that another rank has sent.
    pub(super) fn bounded(mut self, world_size: usize) -> Self {
        self.calls.truncate(CALLS);
        let mut room = TRANSFERS;
        for call in &mut self.calls {
            call.operations.truncate(OPERATIONS);
            for operation in &mut call.operations {
                operation.transfers.retain(|one| one.peer < world_size);
                operation.transfers.truncate(room);
                room -= operation.transfers.len();
                operation.channels = operation.channels.min(CHANNELS);
                operation.kernel = operation
                    .kernel
                    .map(|(started, ended)| (started.min(CHANNELS), ended.min(CHANNELS)));
                for text in [
                    &mut operation.function,
                    &mut operation.algorithm,
                    &mut operation.protocol,
                ] {
                    *text = sanitize::name(&text.chars().take(32).collect::<String>());
                }
            }
        }
        self
    }
}

/// Returns whether the process uses no other communicator that NCCL knows by the same name, rank and number of ranks.
fn is_alone(track: &Track) -> bool {
    let own = &track.identity;
    !recorder::tracks().iter().any(|other| {
        let of = &other.identity;
        let is_used = matches!(
            other.lifecycle.get(),
            State::Making | State::Ready | State::Finalizing
        );
        is_used
            && other.communicator_number != track.communicator_number
            && (&of.name, of.rank, of.world_size) == (&own.name, own.rank, own.world_size)
    })
}

fn nanos(time: std::time::Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// What ranks of this process observed before their abort, by the communicator's key and the rank.
static SEEN: Mutex<VecDeque<(String, usize, Option<InsideNccl>)>> = Mutex::new(VecDeque::new());

/// How many observations are kept.
const KEPT: usize = 64;

fn look(key: &str, rank: usize) -> Option<InsideNccl> {
    let tracks = recorder::tracks();
    let track = (tracks.iter())
        .find(|track| track.identity.key.as_deref() == Some(key) && track.identity.rank == rank)?;
    InsideNccl::of(track)
}

/// Keeps the current observation of a communicator, for [`of`].
pub(super) fn keep(key: &str, rank: usize) {
    let seen = look(key, rank);
    if seen.is_none() {
        nccl_profiler::check_taken();
    }
    let mut all = SEEN.lock();
    if all.iter().any(|(known, of, _)| known == key && *of == rank) {
        return;
    }
    if all.len() >= KEPT {
        all.pop_front();
    }
    all.push_back((key.to_owned(), rank, seen));
}

/// Returns the sentences about the calls of a communicator that are not done, for its recording.
pub(super) fn sentences(track: &Track) -> Vec<(u64, String)> {
    let seen = match track.identity.key.as_deref() {
        Some(key) => of(key, track.identity.rank),
        None => InsideNccl::of(track),
    };
    let calls = seen.map_or_else(Vec::new, |seen| seen.calls);
    let roster = &track.identity.roster;
    let sentence = |call: &CallInside| (call.number, call.text(roster));
    calls.iter().map(sentence).collect()
}

/// Returns the kept observation of a communicator, or a current one.
pub(super) fn of(key: &str, rank: usize) -> Option<InsideNccl> {
    let kept = {
        let all = SEEN.lock();
        let kept = all
            .iter()
            .find(|(known, of, _)| known == key && *of == rank);
        kept.map(|(_, _, seen)| seen.clone())
    };
    kept.unwrap_or_else(|| look(key, rank))
}
