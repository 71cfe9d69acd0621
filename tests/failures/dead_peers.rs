//! A peer that dies where NCCL reports nothing: before the first operation with it, during the connection, and before a
//! destroy, on every transport. The other rank gets an error and continues; its process is not ended.

use std::time::{Duration, Instant};

use nccl::World;
use nccl_tools::testing::name;

use crate::support;
use crate::support::apart;
use crate::support::sums::sum;

const RANKS: usize = 2;
/// How long an operation, a finalize and an abort may take: less than NCCL sleeps.
const TIMEOUT: Duration = Duration::from_secs(1);
/// An operation that takes this long was not ended.
const PATIENCE: Duration = Duration::from_secs(40);

/// NCCL's longest sleep between two attempts to connect, from the first one on.
const SLEEP: (&str, &str) = ("NCCL_SOCKET_RETRY_SLEEP_MSEC", "3400");

/// What the survivor does when it meets the dead rank.
const STAGES: [&str; 5] = [
    "first operation",
    "connecting",
    "aborted",
    "finalize",
    "drop",
];

/// Whether the other rank dies while the survivor is in its operation.
fn dies_meanwhile(stage: &str) -> bool {
    matches!(stage, "connecting" | "aborted")
}

/// The ranks share no faults: only NCCL could report the death.
fn rank(world: &World, stage: &str) -> Result<(), Box<dyn std::error::Error>> {
    let stream = support::device(world)?.new_stream()?;
    let comm = support::strangers(world, "dead peer")?
        .stream(&stream)
        .with(|comm| {
            comm.timeouts.operation = TIMEOUT;
            comm.timeouts.finalize = TIMEOUT;
            comm.timeouts.abort = TIMEOUT;
        })
        .build()?;
    if matches!(stage, "finalize" | "drop") {
        assert_eq!(sum(&comm.within(PATIENCE), &stream)?, 11.0);
    }
    println!("ready");
    if world.rank() == 1 {
        std::thread::sleep(PATIENCE);
    }
    if !dies_meanwhile(stage) {
        // Until the other rank is dead.
        std::io::stdin().read_line(&mut String::new())?;
    }
    let begun = Instant::now();
    match stage {
        "finalize" => {
            let finalized = comm.finalize();
            println!("finalize: {finalized:?}");
        }
        "drop" => drop(comm),
        // By another thread, while NCCL sleeps.
        "aborted" => std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(TIMEOUT);
                let aborted = comm.abort("enough");
                println!("abort: {aborted:?}");
            });
            let error = sum(&comm.within(PATIENCE), &stream).expect_err("it is aborted");
            println!("error: {}", format!("{error:#}").replace('\n', " "));
        }),
        _ => {
            let error = sum(&comm, &stream).expect_err("the other one is dead");
            println!("error: {}", format!("{error:#}").replace('\n', " "));
        }
    }
    assert!(begun.elapsed() < PATIENCE / 2, "{:?}", begun.elapsed());
    // The process still works.
    let alone = World::single()
        .communicator("alone")
        .stream(&stream)
        .build()?;
    sum(&alone, &stream)?;
    println!("survived after {:?}", begun.elapsed());
    Ok(())
}

/// Runs the ranks in processes of `test`; `variables` leave one transport between them.
fn survives(test: &str, variables: &[(&str, &str)]) {
    if let Some((role, world)) = apart::rank(test, RANKS) {
        rank(&world, &role).expect("it goes on");
        return;
    }
    if !support::needs_processes(RANKS) {
        return;
    }
    let mut all = vec![SLEEP];
    all.extend(variables);
    for stage in STAGES {
        let mut ranks = apart::start(test, stage, RANKS, &all);
        apart::all_say(&mut ranks, "ready");
        if dies_meanwhile(stage) {
            // By then it connects to the other rank, or waits for it.
            std::thread::sleep(Duration::from_millis(200));
        }
        ranks.remove(1).kill();
        let mut survivor = ranks.remove(0);
        if !dies_meanwhile(stage) {
            survivor.go_on();
        }
        let survived = survivor.says("survived after ");
        println!("{stage}: {survived}");
        survivor.succeeds(PATIENCE);
    }
}

#[test]
fn a_rank_survives_a_peer_that_died_before_the_first_operation_or_the_end() {
    survives(&name(&|| ()), &[]);
}

#[test]
fn over_shared_memory_a_rank_survives_a_peer_that_died() {
    survives(&name(&|| ()), &[("NCCL_P2P_DISABLE", "1")]);
}

#[test]
fn over_sockets_a_rank_survives_a_peer_that_died() {
    let sockets = [("NCCL_P2P_DISABLE", "1"), ("NCCL_SHM_DISABLE", "1")];
    survives(&name(&|| ()), &sockets);
}
