//! Gradients, compared with those of one process that has the tensors of all ranks in one graph.

use candle_core::{DType, Device, Result, Tensor, Var};
use nccl::{ReduceOp, World};
use nccl_candle::{Error, Gradient, TensorCommunicator};

use crate::support::ranks_as_threads;
use crate::{Outcome, assert_close, join, tensor};

const RANKS: usize = 3;
const SHAPE: [usize; 2] = [6, 2];

/// The results of all ranks, from the tensors of all ranks, in one process.
type Reference = fn(&[Tensor]) -> Result<Vec<Tensor>>;
type Operation = fn(&TensorCommunicator, &Tensor) -> Result<Tensor>;

fn total(all: &[Tensor]) -> Result<Tensor> {
    all[1..].iter().try_fold(all[0].clone(), |sum, x| sum + x)
}

fn parts(x: &Tensor, dim: usize) -> Result<Vec<Tensor>> {
    x.chunk(RANKS, dim)
}

/// Operations whose results every rank has.
const SHARED: &[(&str, Operation, Reference)] = &[
    (
        "sum",
        |comm, x| comm.all_reduce(x, ReduceOp::Sum),
        |all| Ok(vec![total(all)?; RANKS]),
    ),
    (
        "mean",
        |comm, x| comm.all_reduce(x, ReduceOp::Avg),
        |all| Ok(vec![(total(all)? / RANKS as f64)?; RANKS]),
    ),
    (
        "all_gather",
        |comm, x| comm.all_gather(x, 0),
        |all| Ok(vec![Tensor::cat(all, 0)?; RANKS]),
    ),
    (
        "all_gather of columns",
        |comm, x| comm.all_gather(x, 1),
        |all| Ok(vec![Tensor::cat(all, 1)?; RANKS]),
    ),
    (
        "all_gather of scalars",
        |comm, x| comm.all_gather(&x.sum_all()?, 0),
        |all| {
            let sums = all
                .iter()
                .map(Tensor::sum_all)
                .collect::<Result<Vec<_>>>()?;
            Ok(vec![Tensor::stack(&sums, 0)?; RANKS])
        },
    ),
    (
        "broadcast",
        |comm, x| comm.broadcast(x, 1),
        |all| Ok(vec![all[1].clone(); RANKS]),
    ),
    (
        "broadcast of a result",
        |comm, x| comm.broadcast(&(x * 2.0)?, 1),
        |all| Ok(vec![(&all[1] * 2.0)?; RANKS]),
    ),
];

/// The broadcast uses the sum on its root alone, which `Gradient::Replicated` excludes.
const SUMMED: &[(&str, Operation, Reference)] = &[(
    "broadcast of a sum of all ranks",
    |comm, x| comm.broadcast(&comm.all_reduce(x, ReduceOp::Sum)?.t()?, 1),
    |all| Ok(vec![total(all)?.t()?; RANKS]),
)];

/// Operations whose results differ between the ranks.
const DIVIDED: &[(&str, Operation, Reference)] = &[
    (
        "reduce_scatter",
        |comm, x| comm.reduce_scatter(x, 0, ReduceOp::Sum),
        |all| parts(&total(all)?, 0),
    ),
    (
        "mean, scattered",
        |comm, x| comm.reduce_scatter(x, 0, ReduceOp::Avg),
        |all| parts(&(total(all)? / RANKS as f64)?, 0),
    ),
    (
        "reduce_scatter of columns",
        |comm, x| comm.reduce_scatter(&x.t()?, 1, ReduceOp::Sum),
        |all| parts(&total(all)?.t()?, 1),
    ),
    (
        "all_to_all",
        |comm, x| comm.all_to_all(x),
        |all| {
            let to = |rank: usize| {
                let from = all.iter().map(|x| Ok(parts(x, 0)?[rank].clone()));
                Tensor::cat(&from.collect::<Result<Vec<_>>>()?, 0)
            };
            (0..RANKS).map(to).collect()
        },
    ),
];

/// A loss that weights every element differently; `number` varies the weights.
fn loss(y: &Tensor, number: usize) -> Result<Tensor> {
    let weights = (0..y.elem_count()).map(|index| (index * 3 + number * 5) as f64 / 4.0 + 1.0);
    let weights = Tensor::from_iter(weights, &Device::Cpu)?.reshape(y.shape())?;
    (y.sqr()? * weights)?.sum_all()
}

fn compare(
    world: &World,
    gradient: Option<Gradient>,
    cases: &[(&str, Operation, Reference)],
) -> Outcome {
    let mut comm = join(world)?;
    if let Some(gradient) = gradient {
        comm = comm.with_gradient(gradient);
    }
    let rank = comm.rank();
    for (name, operation, reference) in cases {
        let vars = (0..RANKS).map(|rank| Var::from_tensor(&tensor(rank, &SHAPE, DType::F64)?));
        let vars = vars.collect::<Result<Vec<_>>>()?;
        let all: Vec<Tensor> = vars.iter().map(|var| var.as_tensor().clone()).collect();
        let results = reference(&all)?;
        let is_one_loss = gradient == Some(Gradient::Replicated);
        let expected = match is_one_loss {
            true => loss(&results[0], 0)?,
            false => {
                let losses = results.iter().enumerate().map(|(rank, y)| loss(y, rank));
                total(&losses.collect::<Result<Vec<_>>>()?)?
            }
        };
        let expected = expected.backward()?;

        let x = Var::from_tensor(&all[rank])?;
        let y = operation(&comm, &x)?;
        let found = loss(&y, if is_one_loss { 0 } else { rank })?.backward()?;
        println!("{name}, {gradient:?}");
        match expected.get(&all[rank]) {
            Some(expected) => assert_close(found.get(&x).expect(name), expected, 1e-9),
            None => assert!(found.get(&x).is_none_or(|found| {
                let sum = found.abs().and_then(|found| found.sum_all());
                sum.and_then(|sum| sum.to_scalar::<f64>())
                    .is_ok_and(|sum| sum == 0.0)
            })),
        }
    }
    Ok(())
}

#[test]
fn gradients_of_what_every_rank_has_are_those_of_one_loss_or_of_the_sum_of_all() {
    ranks_as_threads(RANKS, |world| {
        compare(&world, Some(Gradient::Replicated), SHARED)?;
        compare(&world, Some(Gradient::Summed), SHARED)?;
        compare(&world, Some(Gradient::Summed), SUMMED)
    });
}

#[test]
fn gradients_of_what_the_ranks_share_need_no_choice() {
    ranks_as_threads(RANKS, |world| {
        compare(&world, None, DIVIDED)?;
        compare(&world, Some(Gradient::Summed), DIVIDED)
    });
}

#[test]
fn a_gradient_that_could_mean_two_things_is_refused_and_so_is_one_that_is_not_known() {
    ranks_as_threads(RANKS, |world| {
        let comm = join(&world)?;
        let x = Var::from_tensor(&tensor(comm.rank(), &SHAPE, DType::F32)?)?;
        for (_, operation, _) in SHARED {
            let error = operation(&comm, &x)?.sum_all()?.backward().unwrap_err();
            assert!(
                matches!(Error::of(&error), Some(Error::NoGradient { .. })),
                "{error:#}"
            );
            assert!(
                format!("{error:#}").contains("Gradient::Replicated"),
                "{error:#}"
            );
        }
        let comm = comm.with_gradient(Gradient::Replicated);
        for op in [ReduceOp::Max, ReduceOp::Min, ReduceOp::Prod] {
            let error = comm.all_reduce(&x, op)?.sum_all()?.backward().unwrap_err();
            assert!(format!("{error:#}").contains("maxima"), "{error:#}");
            let error = comm
                .reduce_scatter(&x, 0, op)?
                .sum_all()?
                .backward()
                .unwrap_err();
            assert!(format!("{error:#}").contains("reduce_scatter"), "{error:#}");
        }
        Outcome::Ok(())
    });
}
