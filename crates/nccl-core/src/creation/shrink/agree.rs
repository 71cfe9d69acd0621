//! The agreement of the remaining ranks on which ranks remain, and on the way in which the communicator is shrunk.

use std::sync::Arc;
use std::time::{Duration, Instant};

use nccl_sys as sys;
use serde::{Deserialize, Serialize};

use super::attempt::{Refusal, topic};
use super::native::is_not_launching;
use super::shrunk::ResizeWay;
use crate::communicator::Communicator;
use crate::creation::CommunicatorBuilder;
use crate::creation::init::PreparedInit;
use crate::error::{Error, Result};
use crate::peers::Supervisor;
use crate::state::State;
use crate::unique_id::UniqueId;
use nccl_base::departure::UnfinishedExchange;
use nccl_base::fault::Roster;
use nccl_base::wire::{self, clean};

/// The pause between two attempts to agree.
const PAUSE: Duration = Duration::from_millis(5);

/// Exchanges with the remaining ranks which ways each of them can take; `refused` is the refusal of an earlier attempt.
/// If a departure is noticed meanwhile, the exchange is repeated.
pub(super) fn agree(
    comm: &Communicator,
    supervisor: &dyn Supervisor,
    name: &str,
    without: &[usize],
    aborting: bool,
    refused: Option<Refusal>,
    deadline: Instant,
) -> Result<ShrinkAgreement> {
    let (peers, members) = (&**supervisor.peers(), supervisor.members());
    let topic = topic("shrink", supervisor.key());
    loop {
        let gone = peers.departed();
        let places: Vec<usize> = (0..comm.world_size())
            .filter(|place| !without.contains(place) && !gone.contains(&members[*place]))
            .collect();
        let own = places.iter().position(|&place| place == comm.rank());
        let own = own.ok_or_else(|| {
            Error::rendezvous("this rank counts as gone: the others have gone on without it")
        })?;
        let ranks: Arc<[usize]> = places.iter().map(|&place| members[place]).collect();
        let prepared = CommunicatorBuilder::of_split(name, own, comm, &places)
            .prepare_split(false)
            .map(|(prepared, _)| prepared.inherits(comm.inner.launch_mode()));
        let messages = ShrinkMessage {
            failed: prepared
                .as_ref()
                .err()
                .map(|error| error.kind().to_string()),
            not_native: match refused {
                Some(refusal) => Some(String::from(refusal.text())),
                None => native_obstacle(comm, &places, aborting),
            },
            aborting,
            token: token()?,
        };
        match peers.exchange(
            &topic,
            Some(&ranks),
            &wire::encode(&messages),
            deadline,
            None,
        ) {
            Ok(parts) => return ShrinkAgreement::new(prepared, places, ranks, aborting, &parts),
            // Some ranks may know of a departure that others do not know yet.
            Err(error) if Instant::now() < deadline && !is_cut_off(&error) => {
                let (rank, roster) = (comm.inner.rank, comm.inner.roster());
                let (world_rank, launcher_rank) =
                    (roster.world_rank(rank), roster.launcher_rank(rank));
                tracing::debug!(name: "nccl.comm.shrink_again", target: "nccl", comm = &*comm.inner.name, world_ranks = roster.world_ranks(), rank, world_rank, launcher_rank, %error, "agreeing on a shrink once more");
                std::thread::sleep(PAUSE);
            }
            Err(error) => {
                return Err(Error::rendezvous(format!(
                    "the ranks that are to be left do not agree on that: {}; this one leaves out \
                     {without:?} and those that are gone",
                    error.kind()
                )));
            }
        }
    }
}

/// Returns why this rank cannot use `ncclCommShrink`.
fn native_obstacle(comm: &Communicator, places: &[usize], aborting: bool) -> Option<String> {
    let inner = &comm.inner;
    let version = inner.library.version();
    if let Err(error) = inner.library.function(sys::Api::ncclCommShrink) {
        return Some(error.kind().to_string());
    }
    if inner.lifecycle.get() != State::Ready && !inner.is_revoked() {
        let state = inner.lifecycle.get().text();
        return Some(format!("the communicator is {state}"));
    }
    if inner.has_blocking_calls && inner.abort_flag_parent.is_none() {
        return Some(String::from("its calls block, and could not be ended"));
    }
    if places.len() == comm.world_size() {
        return Some(format!("NCCL {version} leaves out one rank at least"));
    }
    // A thread inside the child leaves it only when the parent is aborted.
    if inner.has_blocking_calls && aborting {
        return Some(String::from(
            "its idle parent ends with what is under way, and NCCL would have to shrink that",
        ));
    }
    if aborting && !is_not_launching(inner) {
        return Some(String::from(
            "a launch is under way, which NCCL would go on with after the shrink has freed it",
        ));
    }
    None
}

/// The message of a rank before a shrink.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct ShrinkMessage {
    #[serde(deserialize_with = "clean")]
    failed: Option<String>,
    #[serde(deserialize_with = "clean")]
    not_native: Option<String>,
    aborting: bool,
    /// Identifies a communicator made by `ncclCommShrink`, which has no NCCL token.
    token: [u8; TOKEN],
}

const TOKEN: usize = 16;

/// The result of the agreement.
pub(super) struct ShrinkAgreement {
    pub(super) prepared: Result<PreparedInit>,
    /// The remaining ranks, as ranks of the parent.
    pub(super) places: Vec<usize>,
    /// The remaining ranks, as ranks of the peers.
    pub(super) ranks: Arc<[usize]>,
    /// The rank that cannot take part, and why.
    pub(super) failed: Option<(usize, String)>,
    /// The reason against `ncclCommShrink`, and the ranks that gave it.
    pub(super) not_native: Option<(Vec<usize>, String)>,
    pub(super) id: UniqueId,
}

impl ShrinkAgreement {
    fn new(
        prepared: Result<PreparedInit>,
        places: Vec<usize>,
        ranks: Arc<[usize]>,
        aborting: bool,
        parts: &[Vec<u8>],
    ) -> Result<Self> {
        let messages = parts.iter().map(|part| wire::decode(part));
        let messages = messages.collect::<std::result::Result<Vec<ShrinkMessage>, _>>();
        let messages =
            messages.map_err(|_| Error::rendezvous("a rank said something else to a shrink"))?;
        if let Some(other) = messages
            .iter()
            .position(|messages| messages.aborting != aborting)
        {
            return Err(Error::rendezvous(format!(
                "rank {} shrinks another way than this one: all have to call shrink, or all \
                 shrink_aborting",
                places[other]
            )));
        }
        let mut all = messages.iter().zip(&places);
        let failed = all.find_map(|(messages, &place)| Some((place, messages.failed.clone()?)));
        let mut id = [0; UniqueId::LEN];
        if let Some(first) = messages.first() {
            id[..TOKEN].copy_from_slice(&first.token);
        }
        Ok(Self {
            prepared,
            failed,
            not_native: not_native(&messages, &places),
            places,
            ranks,
            id: UniqueId::from_bytes(id),
        })
    }

    /// Returns how the shrink is to be done; `parent` is the roster of the parent.
    pub(super) fn way(&self, parent: &Roster) -> ResizeWay {
        match &self.not_native {
            None => ResizeWay::Native,
            Some((ranks, why)) if ranks.len() == self.places.len() => {
                ResizeWay::Anew { why: why.clone() }
            }
            Some((ranks, why)) => ResizeWay::Anew {
                why: format!("{why} (on {})", parent.who(ranks)),
            },
        }
    }
}

/// Returns the first reason against `ncclCommShrink`, and the ranks that gave it.
fn not_native(messages: &[ShrinkMessage], places: &[usize]) -> Option<(Vec<usize>, String)> {
    let why = messages
        .iter()
        .find_map(|messages| messages.not_native.as_ref())?;
    let all = messages.iter().zip(places);
    let of = all.filter(|(messages, _)| messages.not_native.as_ref() == Some(why));
    Some((of.map(|(_, &place)| place).collect(), why.clone()))
}

/// Whether this rank has been cut off, which another attempt would not change.
fn is_cut_off(error: &Error) -> bool {
    matches!(error.unfinished(), Some(UnfinishedExchange::CutOff { .. }))
}

fn token() -> Result<[u8; TOKEN]> {
    let mut token = [0; TOKEN];
    let flags = rustix::rand::GetRandomFlags::empty();
    rustix::rand::getrandom(&mut token[..], flags)
        .map_err(|error| Error::io("getting random numbers")(error.into()))?;
    Ok(token)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_rank_says_survives_the_way_through_bytes() {
        for failed in [None, Some(String::from("no memory"))] {
            let messages = ShrinkMessage {
                failed,
                not_native: Some(String::from("it is too old")),
                aborting: true,
                token: [7; TOKEN],
            };
            let bytes = wire::encode(&messages);
            assert_eq!(wire::decode(&bytes), Ok(messages));
            assert!(wire::decode::<ShrinkMessage>(&bytes[..bytes.len() - 1]).is_err());
        }
    }
}
