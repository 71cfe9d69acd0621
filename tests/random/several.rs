//! Steps of more than one call: an operator created by the user, two communicators in one group, a captured plan.

use nccl::{Communicator, DataType, Erased, ErasedMut, NcclType, ReduceOp, Request};

use super::values::{moved, reduced};
use super::{Outcome, Pending, Reduction, Step, Streams};

/// The factor of every rank's values.
pub const FACTOR: u32 = 2;

/// A sum of scaled values; the operator is dropped as soon as the operation is issued.
pub fn scaled_sum(
    comm: &Communicator,
    data_type: DataType,
    x: Option<Erased<'_>>,
    y: ErasedMut<'_>,
) -> nccl::Result<Request> {
    fn run<T: NcclType>(
        comm: &Communicator,
        factor: T,
        x: Option<Erased<'_>>,
        y: ErasedMut<'_>,
    ) -> nccl::Result<Request> {
        let op = comm.pre_mul_sum(factor)?;
        match x {
            Some(x) => comm.all_reduce(x, y, &op),
            None => comm.all_reduce_in_place(y, &op),
        }
    }
    let factor = FACTOR as u8;
    match data_type {
        DataType::Int8 => run(comm, factor as i8, x, y),
        DataType::UInt8 => run(comm, factor, x, y),
        DataType::Int32 => run(comm, i32::from(factor), x, y),
        DataType::UInt32 => run(comm, u32::from(factor), x, y),
        DataType::Int64 => run(comm, i64::from(factor), x, y),
        DataType::UInt64 => run(comm, u64::from(factor), x, y),
        DataType::Float16 => run(comm, half::f16::from(factor), x, y),
        DataType::BFloat16 => run(comm, half::bf16::from(factor), x, y),
        DataType::Float32 => run(comm, f32::from(factor), x, y),
        DataType::Float64 => run(comm, f64::from(factor), x, y),
        DataType::Float8E4M3 => run(comm, float8::F8E4M3::from_f32(factor.into()), x, y),
        DataType::Float8E5M2 => run(comm, float8::F8E5M2::from_f32(factor.into()), x, y),
        other => panic!("{other} is not known here"),
    }
}

/// A sum in one communicator and a ring of messages in another, issued together. `twin` has the same ranks in reverse
/// order.
pub fn together(
    comm: &Communicator,
    twin: &Communicator,
    step: &Step,
    streams: &Streams<'_>,
) -> Outcome<Vec<Pending>> {
    let size = step.data_type.size_in_bytes().ok_or("no size")?;
    let (rank, ranks, n) = (comm.rank(), comm.world_size(), step.count);
    let (next, previous) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
    let mut sum = streams
        .memory
        .clone_htod(&reduced(step.number, rank, 0, n, step.data_type))?;
    let from = streams
        .memory
        .clone_htod(&moved(step.number, rank, 1, n * size))?;
    let mut to = streams.operation.clone_htod(&vec![0xA5; n * size])?;
    let (comm, twin) = (comm.on(streams.operation), twin.on(streams.memory));
    let of_twin = |rank: usize| ranks - 1 - rank;
    let done = nccl::group(|group| {
        let y = ErasedMut::from_bytes(sum.as_view_mut(), step.data_type)?;
        group.on(&comm)?.all_reduce_in_place(y, ReduceOp::Sum)?;
        let messages = group.on(&twin)?;
        messages.isend(&from, of_twin(next))?;
        messages.irecv(&mut to, of_twin(previous))
    })?;
    // Although the message may be sent much later.
    drop(from);
    if streams.wait {
        done.wait()?;
    }
    let total = Reduction::Sum.of(step.number, ranks, 0, n, step.data_type);
    let message = moved(step.number, previous, 1, n * size);
    Ok(vec![
        Pending::whole(step, sum, total),
        Pending::whole(step, to, message),
    ])
}

/// The maximum of all ranks' values, captured once and launched as often as the step says.
pub fn replayed(comm: &Communicator, step: &Step, streams: &Streams<'_>) -> Outcome<Vec<Pending>> {
    let (rank, ranks, n) = (comm.rank(), comm.world_size(), step.count);
    let comm = comm.on(streams.operation);
    let y = streams
        .memory
        .clone_htod(&reduced(step.number, rank, 0, n, step.data_type))?;
    let mut plan = comm.capture(y, |capture, y| {
        let y = ErasedMut::from_bytes(y, step.data_type)?;
        capture.group(|group| group.all_reduce_in_place(y, ReduceOp::Max))
    })?;
    for _ in 0..=step.root {
        let done = plan.launch()?;
        if streams.wait {
            done.wait()?;
        }
    }
    let total = Reduction::Max.of(step.number, ranks, 0, n, step.data_type);
    Ok(vec![Pending::whole(step, plan.into_buffers()?, total)])
}
