//! Which rank is meant: a rank has the numbers of its communicator, of its world and of its launcher.

use std::collections::BTreeSet;
use std::time::Duration;

use nccl::{Communicator, ReduceOp, World};

use crate::Outcome;
use crate::recovering::await_fault;
use crate::seen::{await_which, seen, subscribe};
use crate::support::{self, ranks_as_processes, ranks_as_threads};

/// The error of a rank that waits for the last rank of the communicator, which does not enter.
fn wait_in_vain(comm: &Communicator) -> Outcome<Option<nccl::Error>> {
    let mut y = comm.stream().alloc_zeros::<f32>(4)?;
    comm.all_reduce_in_place(&mut y, ReduceOp::Sum)?.wait()?;
    if comm.rank() + 1 == comm.world_size() {
        await_fault(comm)?;
        return Ok(None);
    }
    let comm = comm.within(Duration::from_millis(300));
    let late = comm.all_reduce_in_place(&mut y, ReduceOp::Sum);
    Ok(late.and_then(|late| late.wait()).err())
}

/// Two communicators are called "tp", as in a mesh of 2 × 2, and rank 3 of the world hangs.
fn one_of_two_hangs(world: World) -> Outcome {
    const NAME: &str = "mesh/tp";
    let stream = support::device(&world)?.new_stream()?;
    let whole = world.communicator("mesh").stream(&stream).build()?;
    assert_eq!(whole.world_ranks(), [0, 1, 2, 3]);
    let color = world.rank() / 2;
    let tp = whole
        .split(NAME, Some(color as u32), 0)?
        .ok_or("its part")?;
    assert_eq!(tp.world_ranks(), [[0, 1], [2, 3]][color]);
    // The ranks of the other communicator in another order.
    let key = 3 - world.rank();
    let turned = whole.split("mesh/turned", Some(0), key as i64)?;
    assert_eq!(turned.ok_or("its part")?.world_ranks(), [3, 2, 1, 0]);
    world.barrier("all are there")?;
    if color == 0 {
        assert!(tp.fault().is_none());
        return Ok(world.barrier("it has ended")?);
    }
    let error = wait_in_vain(&tp)?;
    let fault = tp.fault().ok_or("it has ended")?;
    assert_eq!((fault.culprit(), fault.world_rank()), (Some(1), Some(3)));
    assert_eq!(fault.launcher_rank(), None, "{fault}");
    let (host, pid) = (&fault.host, fault.pid);
    let named = format!("rank 1 of {NAME:?} (world rank 3, {host}, pid {pid}) has not entered");
    assert!(fault.to_string().starts_with(&named), "{fault}");
    assert!(
        fault.cause.contains("; rank 0 (world rank 2) waited: "),
        "{fault}"
    );
    let text = fault.explain();
    let legend = format!("\n  ranks:      {NAME:?} has world ranks 2-3 in order\n");
    assert!(text.contains(&legend), "{text}");
    assert!(
        text.contains("also:       rank 0 (world rank 2) was waiting in"),
        "{text}"
    );
    if let Some(error) = error {
        let operation = error.operation().ok_or("it was in one")?;
        assert_eq!((operation.rank, operation.world_rank()), (0, 2));
        let text = format!("{error:#}");
        let first = text.lines().next().unwrap_or_default();
        let on = format!("all_reduce #2 on {NAME:?} (world ranks 2-3) (");
        assert!(first.contains(&on), "{first}");
        let on = format!("failed on rank 0 (world rank 2, {host}, pid ");
        assert!(first.contains(&on), "{first}");
        let report = error.report().operation.ok_or("it was in one")?;
        assert_eq!((report.rank, report.world_rank), (0, Some(2)));
        let told = await_which("nccl.fault", NAME, 2, |seen| {
            seen.fields
                .get("world_ranks")
                .is_some_and(|ranks| ranks == "2-3")
        });
        for seen in told {
            assert_eq!(seen.fields["rank"], "1");
            assert_eq!(seen.fields["world_rank"], "3");
            assert!(!seen.fields.contains_key("launcher_rank"));
        }
        let ready = seen("nccl.comm.ready", NAME);
        let of = |rank: &str, world: Option<&str>, ranks: &str| {
            let found = ready.iter().find(|seen| {
                let field = |name: &str| seen.fields.get(name).map(String::as_str);
                field("rank") == Some(rank)
                    && field("world_rank") == world
                    && field("world_ranks") == Some(ranks)
            });
            assert!(found.is_some(), "rank {rank} of {ranks}: {ready:?}");
        };
        of("0", Some("0"), "0-1");
        of("1", Some("1"), "0-1");
        of("0", Some("2"), "2-3");
        of("1", Some("3"), "2-3");
        // One key for each communicator.
        let keys: BTreeSet<_> = ready.iter().map(|seen| &seen.fields["comm_key"]).collect();
        assert_eq!(keys.len(), 2, "{ready:?}");
        // The world rank is logged also where it equals the rank in the communicator.
        for seen in seen("nccl.comm.ready", "mesh") {
            assert!(!seen.fields.contains_key("world_ranks"), "{seen:?}");
            assert_eq!(seen.fields["world_rank"], seen.fields["rank"], "{seen:?}");
        }
    }
    Ok(world.barrier("it has ended")?)
}

#[test]
fn two_communicators_of_one_name_are_told_apart_and_their_ranks_are_found_in_the_world() {
    subscribe();
    ranks_as_threads(4, one_of_two_hangs);
}

/// The launcher's rank 1 leaves, and its rank 2 is rank 1 from then on.
fn after_a_recovery(world: World) -> Outcome {
    let launched = world.rank();
    if launched == 1 {
        return Ok(());
    }
    subscribe();
    let next = world.next_generation(Duration::from_secs(20))?;
    assert_eq!((next.size(), next.rank()), (2, launched / 2));
    let stream = support::device(&next)?.new_stream()?;
    let comm = next.communicator("again").stream(&stream).build()?;
    let error = wait_in_vain(&comm)?;
    let fault = comm.fault().ok_or("it has ended")?;
    assert_eq!(fault.culprit(), Some(1), "{fault}");
    assert_eq!(fault.world_rank(), Some(1), "{fault}");
    assert_eq!(fault.launcher_rank(), Some(2), "{fault}");
    let (host, pid) = (&fault.host, fault.pid);
    let named =
        format!("rank 1 (launcher rank 2, {host}, pid {pid}, generation 1) has not entered");
    assert!(fault.to_string().starts_with(&named), "{fault}");
    let text = fault.explain();
    assert!(
        text.contains("ranks:      \"again\" has launcher ranks 0,2 in order"),
        "{text}"
    );
    let [told] = &await_which("nccl.fault", "again", 1, |_| true)[..] else {
        return Err("one event".into());
    };
    assert_eq!(told.fields["rank"], "1");
    assert_eq!(told.fields["launcher_rank"], "2");
    assert_eq!(told.fields["world_rank"], "1");
    let launched = [0, 1, 2].map(|rank| next.launcher_rank(rank));
    assert_eq!(launched, [Some(0), Some(2), None]);
    if let Some(error) = error {
        let operation = error.operation().ok_or("it was in one")?;
        assert_eq!(
            operation.launcher_rank(),
            None,
            "the first keeps its number"
        );
    }
    Ok(next.barrier("it has ended")?)
}

#[test]
fn after_a_recovery_the_number_that_the_launcher_gave_is_said_as_well() {
    ranks_as_processes(3, after_a_recovery);
}
