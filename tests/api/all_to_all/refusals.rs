//! The errors of a plan that would exchange wrong data.

use std::time::Duration;

use nccl::all_to_all::{AllToAll, AllToAllAlgorithm as By, AllToAllBuilder, Parts};
use nccl::{DataType, ErrorKind, World};

use nccl_emulator::faults;

use super::Outcome;
use super::matrix::few;
use crate::support::{self, ranks_as_threads};

fn refused(world: &World) -> Outcome {
    let stream = support::device(world)?.new_stream()?;
    let comm = world.communicator("refused").stream(&stream).build()?;
    let rank = world.rank();
    let plan = || AllToAll::plan(&comm);
    let text = |builder: AllToAllBuilder<'_>| match builder.build() {
        Ok(plan) => panic!("{}", plan.explain()),
        Err(error) => (format!("{error:#}"), error),
    };
    // The ranks ask for different algorithms: the same error on all.
    let by = if rank == 2 {
        By::Pairwise { width: few(1) }
    } else {
        By::Grouped
    };
    let (said, error) = text(
        plan()
            .per_peer(DataType::Float32, 4)
            .with(|plan| plan.algorithm = by),
    );
    assert!(
        matches!(error.kind(), ErrorKind::PlansDiffer { plan: 1, .. }),
        "{said}"
    );
    assert!(
        said.contains("wants pairwise:1; the others grouped"),
        "{said}"
    );
    assert!(said.contains("rank 2 ("), "{said}");
    // One rank expects more than it is sent.
    let mut counts = vec![3; 3];
    let send = counts.clone();
    if rank == 1 {
        counts[0] = 5;
    }
    let (said, error) =
        text(plan().parts(DataType::Float32, Parts::from(&send), Parts::from(&counts)));
    assert!(
        matches!(error.kind(), ErrorKind::PlansDiffer { plan: 2, .. }),
        "{said}"
    );
    assert!(
        said.contains("rank 1") && said.contains('5') && said.contains('3'),
        "{said}"
    );
    // One rank sets no payload: its own error there, and its reason on the others.
    let empty = if rank == 0 {
        plan()
    } else {
        plan().per_peer(DataType::UInt8, 1)
    };
    let (said, error) = text(empty);
    match rank {
        0 => assert!(matches!(error.kind(), ErrorKind::Length { .. }), "{said}"),
        _ => assert!(
            said.contains("made none, because the payloads of the plan"),
            "{said}"
        ),
    }
    // Algorithms that this communicator does not support, with the reason.
    let cannot = |by| {
        text(
            plan()
                .per_peer(DataType::Float32, 4)
                .with(|plan| plan.algorithm = by),
        )
        .0
    };
    assert!(cannot(By::TwoLevel).contains("all ranks are on one node"));
    assert!(cannot(By::CopyEngine).contains("cta_policy = Some(CtaPolicy::Zero)"));
    let (said, _) = text(
        plan()
            .per_peer(DataType::Float32, 4)
            .with(|plan| plan.ranks_per_node = Some(2)),
    );
    assert!(
        said.contains("3 ranks cannot be divided into nodes of 2"),
        "{said}"
    );
    let parts = Parts::from(&send);
    let (said, _) = text(
        plan()
            .parts(DataType::Float32, parts, parts)
            .with(|plan| plan.algorithm = By::Native),
    );
    assert!(said.contains("it is for equal parts"), "{said}");
    // None of these errors has affected the communicator.
    let mut good = plan().per_peer(DataType::Float32, 4).build()?;
    let said = good.explain().to_string();
    assert!(
        said.contains("two-level: no, all ranks are on one node"),
        "{said}"
    );
    assert!(
        said.starts_with("native: the fastest by the model"),
        "{said}"
    );
    let (x, mut y) = (
        stream.alloc_zeros::<f32>(12)?,
        stream.alloc_zeros::<f32>(12)?,
    );
    good.enqueue(&x, &mut y)?.wait()?;
    // Nor do later errors about buffers.
    let short = stream.alloc_zeros::<f32>(11)?;
    let error = good.enqueue(&short, &mut y).unwrap_err();
    assert!(
        format!("{error:#}").contains("the send buffer"),
        "{error:#}"
    );
    let (of_u8, mut to_u8) = (stream.alloc_zeros::<u8>(12)?, stream.alloc_zeros::<u8>(12)?);
    let error = good.enqueue(&of_u8, &mut to_u8).unwrap_err();
    assert!(format!("{error:#}").contains("made for"), "{error:#}");
    let error = good.enqueue_in_place(&mut y).unwrap_err();
    assert!(
        format!("{error:#}").contains("was not made in_place"),
        "{error:#}"
    );
    let two = ((&x, &mut y), (&of_u8, &mut to_u8));
    let error = good.enqueue_all(two).unwrap_err();
    assert!(
        format!("{error:#}").contains("a pair for each payload"),
        "{error:#}"
    );
    good.enqueue(&x, &mut y)?.wait()?;
    comm.finalize()?;
    Ok(())
}

/// Rank 1 cannot allocate the plan's memory, after all ranks have agreed.
fn without_memory(world: &World) -> Outcome {
    let stream = support::device(world)?.new_stream()?;
    let comm = world.communicator("memory").stream(&stream).build()?;
    let plan = || {
        let plan = AllToAll::plan(&comm).per_peer(DataType::Float32, 4);
        plan.with(|plan| {
            plan.algorithm = By::TwoLevel;
            plan.ranks_per_node = Some(2);
        })
        .build()
    };
    let error = {
        let call = faults::at_call("cuMemAllocAsync").on_this_thread();
        let _fault = (world.rank() == 1).then(|| call.fail(OUT_OF_MEMORY));
        plan().err().ok_or("rank 1 has no memory")?
    };
    let said = format!("{error:#}");
    match world.rank() {
        1 => assert!(matches!(error.kind(), ErrorKind::Cuda { .. }), "{said}"),
        _ => {
            assert!(
                matches!(error.kind(), ErrorKind::PlansDiffer { .. }),
                "{said}"
            );
            assert!(said.contains("rank 1 ("), "{said}");
            assert!(
                said.contains("made none, because CUDA: allocating the memory of a plan"),
                "{said}"
            );
        }
    }
    let memory = || stream.alloc_zeros::<f32>(16);
    plan()?.enqueue(&memory()?, &mut memory()?)?.wait()?;
    comm.finalize()?;
    Ok(())
}

const OUT_OF_MEMORY: u32 = 2;

#[test]
fn a_rank_without_memory_for_a_plan_is_named_before_the_first_exchange() {
    if support::needs_emulator("memory that runs out at once") {
        ranks_as_threads(4, |world| without_memory(&world));
    }
}

/// One rank asks for an impossible plan, and another one does not take part.
#[test]
fn what_is_wrong_here_is_said_here_whoever_does_not_come() {
    ranks_as_threads(3, |world| -> Outcome {
        let stream = support::device(&world)?.new_stream()?;
        let comm = world.communicator("absent").stream(&stream).build()?;
        let brief = comm.within(Duration::from_secs(2));
        let plan = AllToAll::plan(&brief);
        match world.rank() {
            0 => {
                let error = plan
                    .with(|plan| plan.cost_model_file = Some("/no/such/file".into()))
                    .build()
                    .unwrap_err();
                assert!(format!("{error:#}").contains("/no/such/file"), "{error:#}");
            }
            1 => {
                let error = plan.per_peer(DataType::Float32, 4).build().unwrap_err();
                let said = format!("{error:#}");
                assert!(matches!(error.kind(), ErrorKind::TimedOut { .. }), "{said}");
                assert!(
                    said.contains("rank 2 (") && !said.contains("rank 0 ("),
                    "{said}"
                );
            }
            _ => {}
        }
        world.barrier("over")?;
        Ok(())
    });
}

#[test]
fn plans_that_do_not_belong_together_are_told_on_all_ranks_before_anything_is_exchanged() {
    ranks_as_threads(3, |world| refused(&world));
}
