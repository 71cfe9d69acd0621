//! Steps on which the ranks agree before they enter them.

use std::time::{Duration, Instant};

use nccl::{ErrorKind, ReduceOp, World};

use crate::support::{self, ranks_as_processes, ranks_as_threads};

type Outcome = Result<(), Box<dyn std::error::Error>>;

const KIND: &str = "decode";
/// Longer than a rank is late.
const LONG: Duration = Duration::from_secs(20);

/// Each step is proposed while the one before is running.
fn goes_ahead(world: &World) -> Outcome {
    let stream = support::device(world)?.new_stream()?;
    let comm = world.communicator("steps").stream(&stream).build()?;
    let mut sum = stream.clone_htod(&[1.0f32])?;
    let mut proposed = world.propose_step(KIND, "step 0", LONG)?;
    for step in 1..=20 {
        proposed.agree()?;
        let done = comm.all_reduce_in_place(&mut sum, ReduceOp::Avg)?;
        proposed = world.propose_step(KIND, &format!("step {step}"), LONG)?;
        done.wait()?;
    }
    proposed.agree()?;
    assert_eq!(stream.clone_dtoh(&sum)?, [1.0]);
    comm.finalize()?;
    Ok(())
}

#[test]
fn ranks_agree_on_a_step_while_the_one_before_is_running() {
    ranks_as_threads(3, |world| goes_ahead(&world));
    ranks_as_processes(3, |world| goes_ahead(&world));
}

#[test]
fn a_rank_that_would_enter_another_step_is_named_on_all_and_stays() {
    ranks_as_processes(3, |world| {
        let own = match world.rank() {
            1 => "step 8",
            _ => "step 7",
        };
        let error = world.propose_step(KIND, own, LONG)?.agree().unwrap_err();
        assert!(
            matches!(error.kind(), ErrorKind::StepsDiffer { .. }),
            "{error}"
        );
        let text = error.to_string();
        assert!(
            text.contains("rank 1 (") && text.contains(", pid "),
            "{text}"
        );
        assert!(
            text.ends_with("would enter \"step 8\"; the others would enter \"step 7\""),
            "{text}"
        );
        assert!(world.departed().is_empty());
        goes_ahead(&world)
    });
}

#[test]
fn a_rank_that_proposes_nothing_is_named_and_stays() {
    ranks_as_processes(3, |world| {
        let short = Duration::from_millis(300);
        if world.rank() == 2 {
            world.barrier("late")?;
            let late = world.propose_step(KIND, "step 0", LONG)?.agree();
            assert!(late.is_err(), "the others have given that step up");
        } else {
            let error = world.propose_step(KIND, "step 0", short)?.agree();
            let text = error.unwrap_err().to_string();
            assert!(text.contains("rank 2"), "{text}");
            world.barrier("late")?;
        }
        goes_ahead(&world)
    });
}

/// A proposal that is dropped does not keep the others from agreeing.
#[test]
fn a_proposal_that_is_dropped_counts() {
    ranks_as_processes(2, |world| -> Outcome {
        let proposed = world.propose_step(KIND, "step 0", LONG)?;
        match world.rank() {
            0 => drop(proposed),
            _ => proposed.agree()?,
        }
        goes_ahead(&world)
    });
}

#[test]
fn a_proposal_that_outlives_its_world_is_an_error_at_once_and_holds_nothing() {
    ranks_as_processes(2, |world| -> Outcome {
        let begun = Instant::now();
        if world.rank() == 1 {
            let stream = support::device(&world)?.new_stream()?;
            let proposed = world.propose_step(KIND, "step 0", LONG)?;
            // Also while a communicator of the world lives on.
            let comm = world.communicator("one").stream(&stream).build()?;
            drop(world);
            assert!(proposed.agree().is_err());
            comm.barrier()?;
        } else {
            let stream = support::device(&world)?.new_stream()?;
            let comm = world.communicator("one").stream(&stream).build()?;
            // The other has left the world, and has no outcome yet.
            comm.barrier()?;
            drop(comm);
            assert!(world.propose_step(KIND, "step 0", LONG)?.agree().is_ok());
        }
        assert!(begun.elapsed() < LONG / 2, "{:?}", begun.elapsed());
        Ok(())
    });
}
