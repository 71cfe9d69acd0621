//! The amount of data of all ranks. Each rank initially knows only its own.

use std::fmt;

use super::payloads::MOST;
use crate::all_to_all::algorithm::Algorithm;
use crate::all_to_all::model::{CostModel, Nodes};
use crate::all_to_all::record;
use crate::all_to_all::schedule::{Part, Payload, Within, together};
use crate::communicator::Communicator;
use crate::cuda_driver;
use crate::error::{Error, Result};
use crate::issuing::read_back;
use crate::plan::Comparison;
use nccl_base::wire;
use serde::{Deserialize, Serialize};

/// The amount of data that is exchanged, the same on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Traffic {
    pub(super) parts: Layout,
    /// Bytes for each peer, all payloads together; for unequal parts, the average of the rank that sends or receives
    /// most.
    pub(super) bytes: u64,
}

/// The layout of the parts of all ranks; a later layout is less regular.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) enum Layout {
    /// All parts are equally long and contiguous.
    Equal,
    /// The received parts of each rank are contiguous.
    Together,
    Scattered,
}

impl Layout {
    fn of(payloads: &[Payload]) -> Self {
        if payloads.iter().all(|payload| payload.uniform.is_some()) {
            return Self::Equal;
        }
        match payloads
            .iter()
            .all(|payload| together(&payload.recv).is_some())
        {
            true => Self::Together,
            false => Self::Scattered,
        }
    }
}

impl Traffic {
    pub(super) fn is_uniform(&self) -> bool {
        self.parts == Layout::Equal
    }

    /// Returns the modelled time of an algorithm, µs.
    pub(super) fn microseconds(
        &self,
        model: &CostModel,
        algorithm: Algorithm,
        nodes: Nodes,
    ) -> Option<f64> {
        let bytes = self.bytes;
        match self.parts {
            Layout::Equal => model.microseconds(algorithm, nodes, bytes),
            parts => {
                let scattered = parts == Layout::Scattered;
                model.microseconds_of_parts(algorithm, nodes, bytes, scattered)
            }
        }
    }
}

impl fmt::Display for Traffic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = self.bytes;
        match self.is_uniform() {
            true => write!(f, "{bytes} bytes for each peer"),
            false => write!(
                f,
                "unequal parts, {bytes} bytes for each peer in the mean of the busiest rank"
            ),
        }
    }
}

impl Traffic {
    /// Returns the traffic of this rank.
    fn own(payloads: &[Payload], ranks: usize) -> Self {
        let blocks = payloads
            .iter()
            .map(|payload| payload.uniform.map(|count| count * payload.size));
        let parts = Layout::of(payloads);
        let bytes = match parts {
            Layout::Equal => blocks.flatten().fold(0, usize::saturating_add),
            _ => {
                let all = |parts: fn(&Payload) -> &[Part]| -> usize {
                    let bytes = |payload: &Payload| {
                        let counts = parts(payload).iter().map(|part| part.count);
                        let count = counts.fold(0, usize::saturating_add);
                        count.saturating_mul(payload.size)
                    };
                    payloads.iter().map(bytes).fold(0, usize::saturating_add)
                };
                all(|payload| &payload.send)
                    .max(all(|payload| &payload.recv))
                    .div_ceil(ranks)
            }
        };
        Self {
            parts,
            bytes: bytes as u64,
        }
    }

    /// Returns the traffic of all ranks, the same on all of them; `None` if this rank's parts are unequal and the ranks cannot
    /// exchange it. Ranks whose plan failed take part, with their valid payloads.
    pub(super) fn agreed(
        comparison: &Comparison<'_>,
        payloads: &[Payload],
    ) -> Result<Option<Self>> {
        let own = Self::own(payloads, comparison.comm.world_size());
        let Some(all) = comparison.gather_whole("traffic", &wire::encode(&own))? else {
            return Ok(own.is_uniform().then_some(own));
        };
        let all = all.iter().map(|told| wire::decode(told));
        let all: std::result::Result<Vec<Self>, _> = all.collect();
        let all = all.map_err(|broken| Error::rendezvous(broken.0))?;
        let both = |a: Self, b: Self| Self {
            parts: a.parts.max(b.parts),
            bytes: a.bytes.max(b.bytes),
        };
        Ok(Some(all.into_iter().fold(own, both)))
    }
}

/// Exchanges with the ranks of this node how much data each of them has for the ranks of the others' rails, with
/// messages of a few bytes. Waits for these messages.
pub(super) fn within(comm: &Communicator, nodes: Nodes, payloads: &[Payload]) -> Result<Within> {
    let local = nodes.ranks_per_node();
    let each = nodes.count() * payloads.len();
    let for_neighbour = |neighbour: usize| {
        payloads.iter().flat_map(move |payload| {
            let on_rail = (0..nodes.count()).map(move |node| node * local + neighbour);
            on_rail.map(move |peer| payload.send[peer].count as u64)
        })
    };
    let own: Vec<u64> = (0..local).flat_map(for_neighbour).collect();
    let stream = comm.stream();
    let copied = || Error::cuda("copying the counts of a plan");
    let context = stream.context();
    let x =
        cuda_driver::ignoring_stored_error(context, || stream.clone_htod(&own)).map_err(copied())?;
    let y = cuda_driver::ignoring_stored_error(context, || stream.alloc_zeros::<u64>(own.len()));
    let mut y = y.map_err(Error::cuda("allocating the counts of a plan"))?;
    let node = comm.rank() / local;
    let in_node = |peer: usize| if peer / local == node { each } else { 0 };
    let lengths: Vec<usize> = (0..comm.world_size()).map(in_node).collect();
    comm.all_to_all_v(&x, &lengths, &mut y, &lengths)?.wait()?;
    let told = read_back(comm, &y).map_err(copied())?;
    let mut counts = vec![Vec::with_capacity(local); payloads.len()];
    for told in told.chunks(each) {
        let payloads = payloads.iter().zip(&mut counts);
        for (told, (payload, counts)) in told.chunks(nodes.count()).zip(payloads) {
            // Limits the counts so that the sum of all parts of all payloads cannot overflow.
            let ranks = (comm.world_size() * MOST) as u64;
            let most = isize::MAX as u64 / payload.size as u64 / ranks;
            if let Some(count) = told.iter().find(|count| **count > most) {
                return Err(record::length(
                    "a part of another rank of the node",
                    usize::try_from(*count).unwrap_or(usize::MAX),
                    most as usize,
                    "at most what a device can address",
                ));
            }
            counts.push(told.iter().map(|count| *count as usize).collect());
        }
    }
    Ok(Within {
        ranks_per_node: local,
        counts,
    })
}
