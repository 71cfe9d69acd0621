//! The data of an exchange: random counts and bytes, their buffers, and the plans for them.

use std::num::NonZeroUsize;
use std::sync::Arc;

use nccl::all_to_all::{
    AllToAll, AllToAllAlgorithm as By, AllToAllBuilder, CostModel, LinkCost, Parts,
};
use nccl::cudarc::driver::{CudaSlice, CudaStream};
use nccl::{Communicator, DataType, Erased, ErasedMut, Request};

use super::Outcome;

pub(crate) fn few(number: usize) -> NonZeroUsize {
    NonZeroUsize::new(number).expect("more than 0")
}

const TYPES: [DataType; 6] = [
    DataType::UInt8,
    DataType::Float16,
    DataType::BFloat16,
    DataType::Float32,
    DataType::Int64,
    DataType::Float64,
];

/// The elements that every rank sends to every rank: the same matrix on all ranks.
pub(crate) struct Matrix {
    pub(crate) data_type: DataType,
    pub(crate) size: usize,
    /// By sender and receiver, in elements.
    pub(crate) counts: Vec<Vec<usize>>,
    /// Elements between two parts.
    gap: usize,
    salt: usize,
}

impl Matrix {
    pub(crate) fn random(random: &mut fastrand::Rng, ranks: usize, uniform: bool) -> Self {
        let data_type = TYPES[random.usize(..TYPES.len())];
        let most = [1, 3, 40, 5000][random.usize(..4)];
        let mut count = || match random.u8(..4) {
            0 => 0,
            _ => random.usize(..most),
        };
        let counts = if uniform {
            vec![vec![count(); ranks]; ranks]
        } else {
            let mut row = || (0..ranks).map(|_| count()).collect();
            (0..ranks).map(|_| row()).collect()
        };
        Self {
            data_type,
            size: data_type.size_in_bytes().expect("a type with a size"),
            counts,
            gap: if uniform { 0 } else { random.usize(..3) },
            salt: random.usize(..256),
        }
    }

    pub(crate) fn byte(&self, from: usize, to: usize, at: usize) -> u8 {
        (self.salt + from * 89 + to * 31 + at * 7 + at / 251) as u8
    }

    pub(crate) fn part(&self, from: usize, to: usize) -> impl Iterator<Item = u8> {
        let bytes = self.counts[from][to] * self.size;
        (0..bytes).map(move |at| self.byte(from, to, at))
    }

    pub(crate) fn sent(&self, rank: usize) -> Vec<usize> {
        self.counts[rank].clone()
    }

    pub(crate) fn received(&self, rank: usize) -> Vec<usize> {
        self.counts.iter().map(|row| row[rank]).collect()
    }

    pub(crate) fn displacements(&self, counts: &[usize]) -> Vec<usize> {
        let mut next = 0;
        let at = |count: &usize| {
            let at = next;
            next += count + self.gap;
            at
        };
        counts.iter().map(at).collect()
    }

    /// The send buffer of rank `rank`, and its expected receive buffer; `rest` fills bytes that no part covers.
    pub(crate) fn buffers(&self, rank: usize, rest: u8) -> (Vec<u8>, Vec<u8>) {
        let lay = |counts: Vec<usize>, part: &dyn Fn(usize) -> Vec<u8>| {
            let displacements = self.displacements(&counts);
            let elements: usize = counts.iter().map(|count| count + self.gap).sum();
            // Allocators refuse to allocate 0 bytes.
            let mut bytes = vec![rest; elements.max(1) * self.size];
            for (peer, at) in displacements.iter().enumerate() {
                let part = part(peer);
                bytes[at * self.size..at * self.size + part.len()].copy_from_slice(&part);
            }
            bytes
        };
        let sent = lay(self.sent(rank), &|to| self.part(rank, to).collect());
        let expected = lay(self.received(rank), &|from| self.part(from, rank).collect());
        (sent, expected)
    }

    pub(crate) fn is_uniform(&self) -> bool {
        let first = self.counts[0][0];
        self.gap == 0 && self.counts.iter().flatten().all(|count| *count == first)
    }

    pub(crate) fn add_to<'c>(&self, plan: AllToAllBuilder<'c>, rank: usize) -> AllToAllBuilder<'c> {
        if self.is_uniform() {
            return plan.per_peer(self.data_type, self.counts[0][0]);
        }
        let (sent, received) = (self.sent(rank), self.received(rank));
        let (send_at, recv_at) = (self.displacements(&sent), self.displacements(&received));
        plan.parts(
            self.data_type,
            Parts::at(&sent, &send_at),
            Parts::at(&received, &recv_at),
        )
    }
}

/// One exchange on the device of one rank.
pub(crate) struct Device {
    pub(crate) x: CudaSlice<u8>,
    pub(crate) y: CudaSlice<u8>,
    pub(crate) expected: Vec<u8>,
}

pub(crate) const REST: u8 = 0xA5;

impl Device {
    pub(crate) fn new(
        matrix: &Matrix,
        rank: usize,
        streams: [&Arc<CudaStream>; 2],
    ) -> Outcome<Self> {
        let (sent, expected) = matrix.buffers(rank, REST);
        Ok(Self {
            x: streams[0].clone_htod(&sent)?,
            y: streams[1].clone_htod(&vec![REST; expected.len()])?,
            expected,
        })
    }

    pub(crate) fn check(&self, what: &str) -> Outcome {
        let found = self.y.stream().clone_dtoh(&self.y)?;
        assert!(found == self.expected, "{what}");
        Ok(())
    }
}

/// The algorithms that a plan supports for `ranks` ranks, with nodes of equal size, if that is possible.
pub(crate) fn algorithms(ranks: usize, uniform: bool) -> Vec<(By, Option<usize>)> {
    let mut all = vec![
        (By::Auto, None),
        (By::Grouped, None),
        (By::Chunked { pieces: few(1) }, None),
        (By::Chunked { pieces: few(5) }, None),
        (By::Pairwise { width: few(1) }, None),
        (By::Pairwise { width: few(2) }, None),
    ];
    if uniform {
        all.push((By::Native, None));
    }
    let divides = |local: &usize| ranks.is_multiple_of(*local) && *local < ranks;
    for local in (2..ranks).filter(divides) {
        all.push((By::TwoLevel, Some(local)));
        all.push((By::Auto, Some(local)));
    }
    all
}

/// Models in which copies are cheap, or expensive: the plan packs or not.
pub(crate) fn model(packs: bool) -> CostModel {
    CostModel {
        copy_us: if packs { 1e-6 } else { 1e6 },
        copied_gbps: if packs { 1e9 } else { 1e-6 },
        wire_us: 1e-3,
        between: LinkCost {
            message_us: 100.0,
            bandwidth_gbps: 1e6,
        },
        ..CostModel::published()
    }
}

pub(crate) fn plan<'c>(
    comm: &'c Communicator,
    matrices: &[Matrix],
    (algorithm, nodes): (By, Option<usize>),
    packs: bool,
) -> AllToAllBuilder<'c> {
    let mut plan = AllToAll::plan(comm).with(|plan| {
        plan.algorithm = algorithm;
        plan.cost_model = Some(model(packs));
    });
    if let Some(ranks) = nodes {
        plan = plan.with(|plan| plan.ranks_per_node = Some(ranks));
    }
    for matrix in matrices {
        plan = matrix.add_to(plan, comm.rank());
    }
    plan
}

pub(crate) fn erased<'a>(
    device: &'a mut Device,
    matrix: &Matrix,
) -> nccl::Result<(Erased<'a>, ErasedMut<'a>)> {
    Ok((
        Erased::from_bytes(device.x.as_view(), matrix.data_type)?,
        ErasedMut::from_bytes(device.y.as_view_mut(), matrix.data_type)?,
    ))
}

pub(crate) fn enqueue(
    plan: &mut AllToAll,
    devices: &mut [Device],
    matrices: &[Matrix],
) -> nccl::Result<Request> {
    match (devices, matrices) {
        ([a], [m]) => {
            let (x, y) = erased(a, m)?;
            plan.enqueue(x, y)
        }
        ([a, b], [m, n]) => plan.enqueue_all((erased(a, m)?, erased(b, n)?)),
        ([a, b, c], [m, n, o]) => plan.enqueue_all((erased(a, m)?, erased(b, n)?, erased(c, o)?)),
        _ => unreachable!("at most three"),
    }
}
