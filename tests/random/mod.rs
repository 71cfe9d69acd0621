//! Random programs: the same sequence of operations on every rank, generated from a seed, with every result known
//! beforehand.
//!
//! Data that is only moved is arbitrary bytes. Data that is reduced consists of 0, 1 and 2, so that every sum and
//! product of up to eight ranks is exact in every type.

// Each test binary uses a part of this.
#![allow(dead_code, unreachable_pub)]

mod several;
mod values;

use std::sync::Arc;

use nccl::cudarc::driver::{CudaSlice, CudaStream};
use nccl::{Communicator, DataType, Erased, ErasedMut, ReduceOp};

use values::{Reduction, moved, reduced};

pub type Outcome<T = ()> = Result<T, Box<dyn std::error::Error>>;

/// The operation of a step.
#[derive(Clone, Copy, Debug)]
enum Kind {
    AllReduce(Reduction),
    /// With an operator that is created for it.
    ScaledSum,
    Reduce(Reduction),
    ReduceScatter(Reduction),
    Broadcast,
    AllGather,
    AllToAll,
    AllToAllV,
    Gather,
    Scatter,
    /// A message to a random other rank, and messages from the ranks that chose this one.
    Messages,
    /// Operations of two communicators in one group.
    Together,
    /// A captured plan, launched once or several times.
    Replayed,
}

/// One operation, as all ranks see it.
#[derive(Clone, Debug)]
struct Step {
    number: u64,
    kind: Kind,
    in_place: bool,
    data_type: DataType,
    count: usize,
    root: usize,
    /// For messages: the target of each rank.
    targets: Vec<usize>,
    /// For all-to-all-v: how many elements each rank sends to each.
    counts: Vec<Vec<usize>>,
}

/// The choices that every rank makes for itself: streams, offsets, and how it waits.
#[derive(Clone, Copy, Debug)]
struct Place {
    operation: usize,
    memory: usize,
    offset: usize,
    wait: bool,
}

/// The streams of a step's operations and of its data, and whether it waits.
struct Streams<'a> {
    operation: &'a Arc<CudaStream>,
    memory: &'a Arc<CudaStream>,
    wait: bool,
}

/// Generates the same steps from the same seed.
struct Program {
    shared: fastrand::Rng,
    ranks: usize,
    number: u64,
}

impl Program {
    fn next(&mut self) -> Step {
        let Self { shared, ranks, .. } = self;
        let ranks = *ranks;
        let reduction = *shared.choice(&Reduction::ALL).expect("there are some");
        let kinds = [
            Kind::AllReduce(reduction),
            Kind::ScaledSum,
            Kind::Reduce(reduction),
            Kind::ReduceScatter(reduction),
            Kind::Broadcast,
            Kind::AllGather,
            Kind::AllToAll,
            Kind::AllToAllV,
            Kind::Gather,
            Kind::Scatter,
            Kind::Messages,
            Kind::Together,
            Kind::Replayed,
        ];
        let kind = *shared.choice(&kinds).expect("there are some");
        let mut targets: Vec<usize> = (0..ranks).collect();
        shared.shuffle(&mut targets);
        let counts = (0..ranks)
            .map(|_| (0..ranks).map(|_| count(shared) % 1000).collect())
            .collect();
        let mut data_type = *shared.choice(DataType::ALL).expect("there are some");
        if ranks == 1
            && matches!(kind, Kind::ScaledSum)
            && [DataType::Float8E4M3, DataType::Float8E5M2].contains(&data_type)
        {
            // NCCL has no kernel that scales these types on one rank.
            data_type = DataType::Float32;
        }
        self.number += 1;
        Step {
            number: self.number,
            kind,
            in_place: shared.bool()
                && !matches!(kind, Kind::AllToAll | Kind::AllToAllV | Kind::Messages),
            data_type,
            count: count(shared),
            root: shared.usize(..ranks),
            targets,
            counts,
        }
    }
}

/// Often nothing or one, mostly some, sometimes many.
fn count(random: &mut fastrand::Rng) -> usize {
    match random.u8(..16) {
        0 => 0,
        1 => 1,
        2 => random.usize(..200_000),
        _ => random.usize(..5000),
    }
}

/// A result that is still to be compared.
struct Pending {
    step: Step,
    buffer: CudaSlice<u8>,
    at: usize,
    expected: Vec<u8>,
}

impl Pending {
    fn whole(step: &Step, buffer: CudaSlice<u8>, expected: Vec<u8>) -> Self {
        Self {
            step: step.clone(),
            buffer,
            at: 0,
            expected,
        }
    }
}

/// Runs `steps` steps of the program of `seed` on this rank of `comm`.
///
/// # Errors
/// Those of the operations; and unexpected results.
pub fn run(comm: &Communicator, seed: u64, steps: usize) -> Outcome {
    let context = comm.stream().context();
    let streams = [
        Arc::clone(comm.stream()),
        context.new_stream()?,
        context.new_stream()?,
        context.default_stream(),
    ];
    let mut program = Program {
        shared: fastrand::Rng::with_seed(seed),
        ranks: comm.world_size(),
        number: 0,
    };
    let mut own =
        fastrand::Rng::with_seed(seed ^ (comm.rank() as u64 + 1).wrapping_mul(0x9E37_79B9));
    let mut results = Vec::new();
    let backwards = -(comm.rank() as i64);
    let twin = comm.split("twin", Some(0), backwards)?.ok_or("no twin")?;
    for _ in 0..steps {
        let step = program.next();
        let place = Place {
            operation: own.usize(..streams.len()),
            memory: own.usize(..streams.len()),
            offset: own.usize(..4),
            wait: own.u8(..4) == 0,
        };
        let described = format!(
            "seed {seed}, step {step:?}, rank {}, {place:?}",
            comm.rank()
        );
        let chosen = Streams {
            operation: &streams[place.operation],
            memory: &streams[place.memory],
            wait: place.wait,
        };
        let result = match step.kind {
            Kind::Together => several::together(comm, &twin, &step, &chosen),
            Kind::Replayed => several::replayed(comm, &step, &chosen),
            _ => perform(comm, &step, place.offset, &chosen),
        };
        let result = result.map_err(|error| format!("{described}: {error:#}"))?;
        results.extend(result);
        if results.len() >= 8 {
            compare(&mut results, seed, comm.rank())?;
        }
    }
    compare(&mut results, seed, comm.rank())
}

/// The read and written buffers of one step, before and after, in bytes; `None`: not used on this rank.
struct Data {
    send: Option<Vec<u8>>,
    /// The written buffer before the step, and its expected contents afterwards.
    recv: Option<(Vec<u8>, Vec<u8>)>,
}

fn perform(
    comm: &Communicator,
    step: &Step,
    offset: usize,
    streams: &Streams<'_>,
) -> Outcome<Vec<Pending>> {
    let size = step
        .data_type
        .size_in_bytes()
        .ok_or("a type without a size")?;
    let at = offset * size;
    let memory = streams.memory;
    let comm = &comm.on(streams.operation);
    let Data { send, recv } = data(comm, step);
    let upload = |bytes: &[u8]| {
        // One element more than needed, so that an offset is never the end.
        let padded = [&vec![0; at][..], bytes, &vec![0; size][..]].concat();
        memory.clone_htod(&padded)
    };
    let x = send.as_deref().map(upload).transpose()?;
    let mut y = recv
        .as_ref()
        .map(|(before, _)| upload(before))
        .transpose()?;
    let send_len = send.as_ref().map_or(0, Vec::len);
    let recv_len = recv.as_ref().map_or(0, |(before, _)| before.len());
    let x_view = x
        .as_ref()
        .map(|x| Erased::from_bytes(x.slice(at..at + send_len), step.data_type))
        .transpose()?;
    let y_view = y
        .as_mut()
        .map(|y| ErasedMut::from_bytes(y.slice_mut(at..at + recv_len), step.data_type))
        .transpose()?;
    let missing = "a buffer that this rank needs";
    let root = step.root;
    let done = match (step.kind, step.in_place) {
        (Kind::AllReduce(op), true) => comm.all_reduce_in_place(y_view.ok_or(missing)?, op.op()),
        (Kind::AllReduce(op), false) => {
            comm.all_reduce(x_view.ok_or(missing)?, y_view.ok_or(missing)?, op.op())
        }
        (Kind::ScaledSum, _) => {
            several::scaled_sum(comm, step.data_type, x_view, y_view.ok_or(missing)?)
        }
        (Kind::Reduce(op), true) => comm.reduce_in_place(y_view.ok_or(missing)?, op.op(), root),
        (Kind::Reduce(op), false) => comm.reduce(x_view.ok_or(missing)?, y_view, op.op(), root),
        (Kind::ReduceScatter(op), true) => {
            comm.reduce_scatter_in_place(y_view.ok_or(missing)?, op.op())
        }
        (Kind::ReduceScatter(op), false) => {
            comm.reduce_scatter(x_view.ok_or(missing)?, y_view.ok_or(missing)?, op.op())
        }
        (Kind::Broadcast, true) => comm.broadcast_in_place(y_view.ok_or(missing)?, root),
        (Kind::Broadcast, false) => comm.broadcast(x_view, y_view.ok_or(missing)?, root),
        (Kind::AllGather, true) => comm.all_gather_in_place(y_view.ok_or(missing)?),
        (Kind::AllGather, false) => comm.all_gather(x_view.ok_or(missing)?, y_view.ok_or(missing)?),
        (Kind::AllToAll, _) => comm.all_to_all(x_view.ok_or(missing)?, y_view.ok_or(missing)?),
        (Kind::AllToAllV, _) => {
            let rank = comm.rank();
            let received: Vec<usize> = step.counts.iter().map(|counts| counts[rank]).collect();
            comm.all_to_all_v(
                x_view.ok_or(missing)?,
                &step.counts[rank],
                y_view.ok_or(missing)?,
                &received,
            )
        }
        (Kind::Gather, true) => comm.gather_in_place(y_view.ok_or(missing)?, root),
        (Kind::Gather, false) => comm.gather(x_view.ok_or(missing)?, y_view, root),
        (Kind::Scatter, true) => comm.scatter_in_place(y_view.ok_or(missing)?, root),
        (Kind::Scatter, false) => comm.scatter(x_view, y_view.ok_or(missing)?, root),
        (Kind::Messages, _) => comm.group(|group| {
            let rank = comm.rank();
            let source = step.targets.iter().position(|&target| target == rank);
            if let Some(x) = x_view {
                group.isend(x, step.targets[rank])?;
            }
            match (y_view, source) {
                (Some(y), Some(source)) => group.irecv(y, source),
                _ => Ok(()),
            }
        }),
        (Kind::Together | Kind::Replayed, _) => return Err("it is made of several".into()),
    }?;
    // Dropped although the operation may run much later.
    drop(x);
    if streams.wait {
        done.wait()?;
    }
    let result = y.zip(recv).map(|(buffer, (_, expected))| Pending {
        step: step.clone(),
        buffer,
        at,
        expected,
    });
    Ok(result.into_iter().collect())
}

/// The input of this rank in a step, and its expected result.
fn data(comm: &Communicator, step: &Step) -> Data {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let n = step.count;
    let size = step.data_type.size_in_bytes().unwrap_or(1);
    let is_root = rank == step.root;
    let bytes = |rank, block, count| moved(step.number, rank, block, count * size);
    let block_of = |rank, block| bytes(rank, block, n);
    let blocks_of =
        |rank| -> Vec<u8> { (0..ranks).flat_map(|block| block_of(rank, block)).collect() };
    let summand = |rank, block| reduced(step.number, rank, block, n, step.data_type);
    let summands =
        |rank| -> Vec<u8> { (0..ranks).flat_map(|block| summand(rank, block)).collect() };
    let total = |op: Reduction, block| op.of(step.number, ranks, block, n, step.data_type);
    let scaled = |block| {
        Reduction::Sum.scaled(
            step.number,
            ranks,
            block,
            n,
            several::FACTOR,
            step.data_type,
        )
    };
    let zeros = |count: usize| vec![0xA5; count * size];
    let gathered = || -> Vec<u8> { (0..ranks).flat_map(|from| block_of(from, 0)).collect() };
    // A buffer of blocks in which only this rank's is not zero.
    let own_of = |block: Vec<u8>| {
        let mut all = zeros(n * ranks);
        all[rank * n * size..(rank + 1) * n * size].copy_from_slice(&block);
        all
    };
    let (send, recv) = match (step.kind, step.in_place) {
        (Kind::AllReduce(op), true) => (None, Some((summand(rank, 0), total(op, 0)))),
        (Kind::AllReduce(op), false) => (Some(summand(rank, 0)), Some((zeros(n), total(op, 0)))),
        (Kind::ScaledSum, true) => (None, Some((summand(rank, 0), scaled(0)))),
        (Kind::ScaledSum, false) => (Some(summand(rank, 0)), Some((zeros(n), scaled(0)))),
        (Kind::Reduce(op), true) => {
            let before = summand(rank, 0);
            let after = if is_root {
                total(op, 0)
            } else {
                before.clone()
            };
            (None, Some((before, after)))
        }
        (Kind::Reduce(op), false) => (
            Some(summand(rank, 0)),
            is_root.then(|| (zeros(n), total(op, 0))),
        ),
        (Kind::ReduceScatter(op), true) => {
            // The other blocks may hold anything: only this rank's block is compared, see `compare`.
            (None, Some((summands(rank), total(op, rank))))
        }
        (Kind::ReduceScatter(op), false) => {
            (Some(summands(rank)), Some((zeros(n), total(op, rank))))
        }
        (Kind::Broadcast, true) => (None, Some((block_of(rank, 0), block_of(step.root, 0)))),
        (Kind::Broadcast, false) => (
            is_root.then(|| block_of(rank, 0)),
            Some((zeros(n), block_of(step.root, 0))),
        ),
        (Kind::AllGather, true) => (None, Some((own_of(block_of(rank, 0)), gathered()))),
        (Kind::AllGather, false) => (
            Some(block_of(rank, 0)),
            Some((zeros(n * ranks), gathered())),
        ),
        (Kind::AllToAll, _) => {
            let expected = (0..ranks).flat_map(|from| block_of(from, rank)).collect();
            (Some(blocks_of(rank)), Some((zeros(n * ranks), expected)))
        }
        (Kind::AllToAllV, _) => {
            let sent = (0..ranks).flat_map(|to| bytes(rank, to, step.counts[rank][to]));
            let expected: Vec<u8> = (0..ranks)
                .flat_map(|from| bytes(from, rank, step.counts[from][rank]))
                .collect();
            (
                Some(sent.collect()),
                Some((vec![0xA5; expected.len()], expected)),
            )
        }
        (Kind::Gather, true) if is_root => (None, Some((own_of(block_of(rank, 0)), gathered()))),
        (Kind::Gather, true) => (None, Some((block_of(rank, 0), block_of(rank, 0)))),
        (Kind::Gather, false) => (
            Some(block_of(rank, 0)),
            is_root.then(|| (zeros(n * ranks), gathered())),
        ),
        (Kind::Scatter, true) if is_root => (None, Some((blocks_of(rank), blocks_of(rank)))),
        (Kind::Scatter, true) => (None, Some((zeros(n), block_of(step.root, rank)))),
        (Kind::Scatter, false) => (
            is_root.then(|| blocks_of(rank)),
            Some((zeros(n), block_of(step.root, rank))),
        ),
        (Kind::Messages, _) => {
            let source = step.targets.iter().position(|&target| target == rank);
            let expected = source.map(|from| block_of(from, 0)).unwrap_or_default();
            (Some(block_of(rank, 0)), Some((zeros(n), expected)))
        }
        (Kind::Together | Kind::Replayed, _) => (None, None),
    };
    Data { send, recv }
}

fn compare(results: &mut Vec<Pending>, seed: u64, rank: usize) -> Outcome {
    for Pending {
        step,
        buffer,
        at,
        expected,
    } in results.drain(..)
    {
        let found = buffer.stream().clone_dtoh(&buffer)?;
        let own_block = matches!(step.kind, Kind::ReduceScatter(_)) && step.in_place;
        let start = if own_block {
            at + rank * expected.len()
        } else {
            at
        };
        let found = &found[start..start + expected.len()];
        if found != expected {
            let first = found.iter().zip(&expected).position(|(a, b)| a != b);
            return Err(format!(
                "seed {seed}, {step:?}: rank {rank} has something else from byte {first:?} of {}",
                expected.len()
            )
            .into());
        }
    }
    Ok(())
}

impl Reduction {
    fn op(self) -> ReduceOp {
        match self {
            Self::Sum => ReduceOp::Sum,
            Self::Prod => ReduceOp::Prod,
            Self::Max => ReduceOp::Max,
            Self::Min => ReduceOp::Min,
        }
    }
}
