//! Ranks that die, or call something else: the other ranks get an error, and in time.

use std::time::{Duration, Instant};

use candle_core::{DType, Device, Tensor};
use nccl::fault::RootCause;
use nccl::{ReduceOp, World};
use nccl_candle::{Error, TensorCommunicator};
use nccl_tools::testing::name;

use crate::support::{self, apart, ranks_as_threads};
use crate::{Outcome, join, tensor};

const RANKS: usize = 3;

/// Longer than the test may take: the timeout is not what ends an operation.
const LONG: Duration = Duration::from_secs(120);

/// All-reduces without end, until the killed rank stops it.
fn survivor(world: &World) -> Outcome {
    let comm = join(world)?.within(LONG);
    let x = tensor(comm.rank(), &[1 << 14], DType::F32)?;
    let begun = Instant::now();
    for turn in 0.. {
        if turn == 10 {
            println!("working");
        }
        if let Err(error) = comm.all_reduce(&x, ReduceOp::Sum) {
            // Inside candle's error it is still this crate's error, with what all ranks report.
            let error = Error::of(&error)
                .and_then(Error::nccl)
                .expect("nccl's error");
            let fault = error.fault().expect("a fault");
            assert_eq!(fault.culprit(), Some(1), "{fault}");
            assert!(matches!(fault.root, RootCause::Died { .. }), "{fault}");
            // The communicator keeps it as well, for programs whose error types lose it.
            let last = comm.last_error().expect("the last error");
            assert_eq!(last.nccl().expect("nccl's").to_string(), error.to_string());
            assert!(world.fault().is_some());
            assert!(comm.all_reduce(&x, ReduceOp::Sum).is_err(), "it is ended");
            assert_eq!(comm.staged().leaked, 0);
            println!("error: {}", format!("{error:#}").replace('\n', " "));
            return Ok(());
        }
        assert!(
            begun.elapsed() < Duration::from_secs(40),
            "nobody was killed"
        );
    }
    Ok(())
}

#[test]
fn a_rank_that_is_killed_in_an_operation_is_named_on_every_other_rank() {
    let test = name(&|| ());
    if let Some((_, world)) = apart::rank(&test, RANKS) {
        survivor(&world).expect("this rank survives");
        return;
    }
    if !support::needs_processes(RANKS) {
        return;
    }
    let mut ranks = apart::start(&test, "", RANKS, &[]);
    let mut victim = ranks.remove(1);
    victim.says("working");
    victim.kill();
    for mut rank in ranks {
        let said = rank.says("error: ");
        assert!(
            said.contains("all_reduce #") && said.contains("rank 1"),
            "{said}"
        );
        rank.succeeds(Duration::from_secs(20));
    }
}

#[test]
fn a_rank_with_another_shape_ends_the_operation_on_all_within_its_limit() {
    ranks_as_threads(RANKS, |world| {
        let comm = join(&world)?.within(Duration::from_secs(1));
        let rows = if comm.rank() == 1 { 5 } else { 4 };
        let x = Tensor::zeros((rows, 2), DType::F32, &Device::Cpu)?;
        let error = comm.all_reduce(&x, ReduceOp::Sum).unwrap_err();
        let error = Error::of(&error)
            .and_then(Error::nccl)
            .expect("nccl's error");
        let fault = error.fault().expect("a fault").to_string();
        let differs = "ranks 0,2 have count 8, rank 1 has count 10";
        assert!(fault.contains(differs), "{fault}");
        Outcome::Ok(())
    });
}

#[test]
fn a_rank_that_does_not_come_ends_the_operation_at_its_limit() {
    ranks_as_threads(2, |world| {
        let comm = join(&world)?;
        comm.all_reduce(&tensor(0, &[4], DType::F32)?, ReduceOp::Sum)?;
        let hurried = comm.within(Duration::from_millis(300));
        if comm.rank() == 0 {
            let begun = Instant::now();
            let x = tensor(0, &[1000], DType::F32)?;
            let error = hurried.all_gather(&x, 0).unwrap_err();
            let error = Error::of(&error)
                .and_then(Error::nccl)
                .expect("nccl's error");
            assert!(format!("{error:#}").contains("all_gather #2"), "{error:#}");
            assert!(begun.elapsed() < Duration::from_secs(30));
            // The operation's memory is no longer in use, and was not given up.
            assert_eq!((comm.staged().areas, comm.staged().leaked), (1, 0));
        } else {
            // Waits until all ranks have ended the communicator.
            nccl_tools::testing::eventually("the communicator is ended", || {
                comm.communicator().fault().is_some()
            });
        }
        Outcome::Ok(())
    });
}

#[test]
fn a_communicator_of_ones_own_works_as_well() {
    ranks_as_threads(2, |world| {
        let stream = support::device(&world)?.new_stream()?;
        let comm = world
            .communicator("own")
            .stream(&stream)
            .with(|comm| comm.timeouts.operation = LONG)
            .build()?;
        let comm = TensorCommunicator::new(comm);
        let x = tensor(comm.rank(), &[3], DType::I64)?;
        assert_eq!(comm.all_gather(&x, 0)?.dims(), [6]);
        assert_eq!(comm.communicator().name(), "own");
        Outcome::Ok(())
    });
}
