//! A rank that is killed in the middle of work: ranks that no report reaches get an error at their timeout, can abort,
//! and end.
//!
//! Without a world there are no reports; `tests/failures/abort_together.rs` has the ranks of one.

use std::time::{Duration, Instant};

use nccl::{ReduceOp, World};
use nccl_tools::testing::name;

use crate::support::{self, apart};

const RANKS: usize = 3;
/// How long an operation may take.
const TIMEOUT: Duration = Duration::from_secs(2);
const SOON: Duration = Duration::from_secs(20);

/// One rank: all-reduces without end, which the killed rank stops.
fn rank(world: World) -> Result<(), Box<dyn std::error::Error>> {
    let stream = support::device(&world)?.new_stream()?;
    let comm = support::strangers(&world, "doomed")?
        .stream(&stream)
        .with(|comm| comm.timeouts.operation = TIMEOUT)
        .build()?;
    let mut y = stream.alloc_zeros::<f32>(1 << 16)?;
    let begun = Instant::now();
    for turn in 0.. {
        if turn == 10 {
            println!("working");
        }
        // The first operation connects the ranks.
        let limited = comm.within(if turn == 0 { SOON } else { TIMEOUT });
        let done = limited.all_reduce_in_place(&mut y, ReduceOp::Sum);
        if let Err(error) = done.and_then(|done| done.wait()) {
            assert!(error.is_timeout(), "{error:#}");
            assert!(error.fault().is_none(), "{error:#}");
            println!("error: {}", format!("{error:#}").replace('\n', " "));
            // Whether it had to be aborted or was already: the call returns.
            comm.abort("a rank is gone")?;
            drop(y);
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
fn a_killed_rank_ends_the_others_at_their_limit() {
    let test = name(&|| ());
    if let Some((_, world)) = apart::rank(&test, RANKS) {
        rank(world).expect("this rank survives");
        return;
    }
    if !support::needs_processes(RANKS) {
        return;
    }
    let mut ranks = apart::start(&test, "", RANKS, &[]);
    let mut victim = ranks.remove(1);
    victim.says("working");
    victim.kill();
    let killed = Instant::now();
    for mut rank in ranks {
        let said = rank.says("error: ");
        assert!(said.contains("all_reduce #"), "{said}");
        assert!(said.contains("did not finish within 2s"), "{said}");
        rank.succeeds(Duration::from_secs(20));
    }
    // The timeout, the abort, and a loaded machine.
    assert!(killed.elapsed() < Duration::from_secs(30));
}

/// One rank: rank 0 sends a message, and the others wait for another one.
fn wait_for_messages(world: &World) -> Result<(), Box<dyn std::error::Error>> {
    let steps = world.channel("steps");
    if world.rank() == 0 {
        steps.send(b"first")?;
        println!("sent");
        std::thread::sleep(SOON);
        return Err("nobody killed this rank".into());
    }
    assert!(steps.recv(SOON)?.is_some());
    println!("waits");
    let error = steps.recv(SOON).expect_err("the coordinator is killed");
    println!("error: {}", format!("{error:#}").replace('\n', " "));
    let again = steps.recv(SOON).expect_err("the channel is closed");
    assert_eq!(again.to_string(), error.to_string());
    // The other rank may have left meanwhile.
    steps.send(b"x").expect_err("the channel is closed");
    Ok(())
}

#[test]
fn a_killed_coordinator_is_the_cause_for_all_ranks_that_wait_for_a_message() {
    let test = name(&|| ());
    if let Some((_, world)) = apart::rank(&test, RANKS) {
        wait_for_messages(&world).expect("this rank survives");
        return;
    }
    let mut ranks = apart::start(&test, "", RANKS, &[]);
    for rank in &mut ranks[1..] {
        rank.says("waits");
    }
    let mut coordinator = ranks.remove(0);
    coordinator.says("sent");
    coordinator.kill();
    for mut rank in ranks {
        let said = rank.says("error: ");
        assert!(
            said.contains("rank 0 (") && said.contains("it died"),
            "{said}"
        );
        assert!(!said.contains("may be lost"), "{said}");
        rank.succeeds(Duration::from_secs(20));
    }
}
