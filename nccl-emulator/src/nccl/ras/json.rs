//! The answer to `STATUS` in JSON.

use std::fmt::Write as _;

use super::peers::Peer;
use super::place::{CUDA, timestamp};
use super::report::{FUNCTIONS, Gathered, RankState, Whole};
use crate::version;

/// Returns the answer.
pub(super) fn answer(gathered: &Gathered) -> String {
    let mut text = String::new();
    let communicators: Vec<String> = gathered
        .communicators
        .iter()
        .map(|whole| communicator(whole, gathered))
        .collect();
    // Writing to a string does not fail.
    let _ = write!(
        text,
        "{{\n  \"nccl_version\": \"{}\",\n  \"cuda_runtime_version\": {CUDA},\n  \"cuda_driver_version\": {CUDA},\n  \
         \"timestamp\": \"{}\",\n  \"communicators_count\": {},\n  \"communicators\": [\n{}\n  ],\n  \"ras\": {{\n    \
         \"collection_time_sec\": {:.3},\n    \"timeouts_count\": {}\n  }}\n}}\n",
        version::release(),
        timestamp(),
        communicators.len(),
        communicators.join(",\n"),
        gathered.seconds,
        gathered.timeouts
    );
    text
}

fn communicator(whole: &Whole, gathered: &Gathered) -> String {
    let ranks: Vec<String> = whole
        .ranks
        .iter()
        .map(|state| rank(state, whole, gathered))
        .collect();
    let missing: Vec<String> = whole
        .missing()
        .map(|rank| missing_rank(rank, whole, gathered))
        .collect();
    let (hash, host, process) = whole.id;
    format!(
        "    {{\n      \"hash\": \"{hash:#x}\",\n      \"secondary_hash\": \"{host:#x}:{process:#x}\",\n      \"size\": {},\n      \
         \"ranks_count\": {},\n      \"missing_ranks_count\": {},\n      \"ranks\": [\n{}\n      ],\n      \"missing_ranks\": \
         [\n{}\n      ]\n    }}",
        whole.members.len(),
        ranks.len(),
        missing.len(),
        ranks.join(",\n"),
        missing.join(",\n")
    )
}

/// The beginning of a rank's entry: where it runs.
fn place(rank: u32, whole: &Whole, gathered: &Gathered) -> String {
    let member = whole.member(rank);
    let peer = gathered.peers.all.get(&member.process);
    let host = peer.map_or_else(|| "unknown".to_owned(), |peer| peer.address.to_string());
    let pid = peer.map_or(-1, |peer| i64::from(peer.pid));
    format!(
        "        {{\n          \"rank\": {rank},\n          \"host\": \"{host}\",\n          \"pid\": {pid},\n          \
         \"cuda_dev\": {},\n          \"nvml_dev\": {},\n          \"status\": {{\n",
        member.device, member.nvml
    )
}

fn rank(state: &RankState, whole: &Whole, gathered: &Gathered) -> String {
    let counts = FUNCTIONS
        .iter()
        .zip(state.counts)
        .map(|(function, count)| format!("            \"{}\": {count}", function.name()));
    let counts: Vec<String> = counts.collect();
    format!(
        "{}            \"init_state\": {},\n            \"async_error\": {},\n            \"finalize_called\": {},\n            \
         \"destroy_flag\": {},\n            \"abort_flag\": {}\n          }},\n          \"collective_counts\": {{\n{}\n          \
         }}\n        }}",
        place(state.rank, whole, gathered),
        state.init,
        state.error,
        state.is_finalized,
        state.is_destroyed,
        state.is_aborted,
        counts.join(",\n")
    )
}

fn missing_rank(rank: u32, whole: &Whole, gathered: &Gathered) -> String {
    let process = whole.member(rank).process;
    format!(
        "{}            \"unresponsive\": {},\n            \"considered_dead\": {}\n          }}\n        }}",
        place(rank, whole, gathered),
        !gathered.answered.contains(&process),
        gathered.peers.dead.contains(&process)
    )
}

/// Returns an event as an entry of its own.
pub(super) fn event(group: &str, name: &str, peer: &Peer, details: &str) -> String {
    let list = |devices: super::peers::Devices| format!("[{devices}]");
    format!(
        "{{\n  \"timestamp\": \"{}\",\n  \"group\": \"{group}\",\n  \"event\": \"{name}\",\n  \"peer\": {{\n    \"host\": \
         \"{}\",\n    \"pid\": {},\n    \"cuda_devs\": {},\n    \"nvml_devs\": {}\n  }},\n  \"details\": \"{details}\"\n}}\n",
        timestamp(),
        peer.address,
        peer.pid,
        list(peer.cuda),
        list(peer.nvml)
    )
}
