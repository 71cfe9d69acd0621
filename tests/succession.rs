//! Rank 0's process dies, alone or with others: the ranks that are left hear one cause, and go on hearing of
//! each other.

mod support;

use std::sync::Arc;
use std::time::{Duration, Instant};

use nccl::cudarc::driver::CudaStream;
use nccl::{Communicator, World};
use nccl_tools::testing::name;
use support::apart::{self, Apart};
use support::sums::work_until_the_end;

/// An operation that runs into this limit was not ended by what another rank told.
const LIMIT: Duration = Duration::from_secs(60);
/// Within this, all ranks have to have heard: generous, for a loaded machine.
const SOON: Duration = Duration::from_secs(5);

fn start(world: &World, name: &str) -> (Arc<CudaStream>, Communicator) {
    let stream = support::device(world).and_then(|context| context.new_stream());
    let stream = stream.expect("a stream");
    let comm = world.communicator(name).stream(&stream).timeout(LIMIT);
    let comm = comm.build().expect("all come");
    (stream, comm)
}

/// Kills some of the ranks, and returns what the others say, and how late.
fn kill(ranks: Vec<Apart>, victims: &[usize]) -> Vec<(String, Duration)> {
    let mut ranks = ranks;
    for rank in &mut ranks {
        rank.says("working");
    }
    let (mut dying, ranks): (Vec<_>, Vec<_>) = ranks
        .into_iter()
        .enumerate()
        .partition(|(rank, _)| victims.contains(rank));
    let killed = Instant::now();
    for (_, victim) in &mut dying {
        victim.kill();
    }
    ranks
        .into_iter()
        .map(|(_, mut rank)| {
            let cause = rank.says("ended: ");
            let took = killed.elapsed();
            let error = rank.says("error: ");
            println!("after {took:?}: {error}");
            assert!(!error.contains("line"), "{error}");
            let (rest, status) = rank.end(SOON);
            assert!(status.success(), "{status}: {rest}");
            (cause, took)
        })
        .collect()
}

#[test]
fn a_killed_rank_0_is_the_one_cause_on_all_others() {
    const RANKS: usize = 4;
    let test = name(&|| ());
    if let Some((_, world)) = apart::rank(&test, RANKS) {
        let (stream, comm) = start(&world, "doomed");
        work_until_the_end(&comm, &stream);
        return;
    }
    if !support::needs_processes(RANKS) {
        return;
    }
    let ranks = apart::start(&test, "", RANKS, &[]);
    let pid = ranks[0].pid();
    let said = kill(ranks, &[0]);
    for (cause, took) in &said {
        assert!(cause.starts_with("ended: Gone rank 0 ("), "{cause}");
        assert!(cause.contains(&format!("pid {pid}) is gone")), "{cause}");
        assert_eq!(*cause, said[0].0);
        assert!(*took < SOON, "{took:?}");
    }
}

#[test]
fn when_rank_0_and_its_successor_are_killed_together_the_next_one_decides() {
    const RANKS: usize = 5;
    let test = name(&|| ());
    if let Some((_, world)) = apart::rank(&test, RANKS) {
        let (stream, comm) = start(&world, "doomed");
        work_until_the_end(&comm, &stream);
        return;
    }
    if !support::needs_processes(RANKS) {
        return;
    }
    for (role, victims) in [("01", &[0, 1][..]), ("10", &[1, 0]), ("012", &[0, 1, 2])] {
        let ranks = apart::start(&test, role, RANKS, &[]);
        let said = kill(ranks, victims);
        for (cause, took) in &said {
            assert!(cause.starts_with("ended: Gone rank "), "{cause}");
            assert_eq!(*cause, said[0].0);
            assert!(*took < SOON, "{took:?}");
        }
    }
}
