//! A peer that dies where NCCL reports nothing: before the first operation with it, in the midst of connecting, and before a
//! destroy, on every transport. The other rank gets an error and goes on; nothing ends its process.

mod support;

use std::time::{Duration, Instant};

use nccl::World;
use nccl_tools::testing::name;
use support::apart;
use support::sums::sum;

const RANKS: usize = 2;
/// How long an operation and a finalize may take.
const LIMIT: Duration = Duration::from_secs(1);
/// Whatever takes as long was not ended.
const PATIENCE: Duration = Duration::from_secs(40);

/// NCCL's ways between two ranks of a host, and its longest sleep between two attempts to connect from the first one on.
const TRANSPORTS: [(&str, &[(&str, &str)]); 3] = [
    ("P2P", &[("NCCL_SOCKET_RETRY_SLEEP_MSEC", "3400")]),
    (
        "shared memory",
        &[
            ("NCCL_P2P_DISABLE", "1"),
            ("NCCL_SOCKET_RETRY_SLEEP_MSEC", "3400"),
        ],
    ),
    (
        "sockets",
        &[
            ("NCCL_P2P_DISABLE", "1"),
            ("NCCL_SHM_DISABLE", "1"),
            ("NCCL_SOCKET_RETRY_SLEEP_MSEC", "3400"),
        ],
    ),
];

/// At what the survivor is when it meets the dead rank.
const STAGES: [&str; 4] = ["first operation", "connecting", "finalize", "drop"];

/// The ranks do not tell each other what ends them: only NCCL could.
fn rank(world: &World, stage: &str) -> Result<(), Box<dyn std::error::Error>> {
    let stream = support::device(world)?.new_stream()?;
    let comm = support::strangers(world, "dead peer")?
        .stream(&stream)
        .timeout(LIMIT)
        .finalize_timeout(LIMIT)
        .build()?;
    if matches!(stage, "finalize" | "drop") {
        assert_eq!(sum(&comm.within(PATIENCE), &stream)?, 11.0);
    }
    println!("ready");
    if world.rank() == 1 {
        std::thread::sleep(PATIENCE);
    }
    if stage != "connecting" {
        // Until the other one is dead.
        std::io::stdin().read_line(&mut String::new())?;
    }
    let begun = Instant::now();
    match stage {
        "finalize" => {
            let finalized = comm.finalize();
            println!("finalize: {finalized:?}");
        }
        "drop" => drop(comm),
        _ => {
            let error = sum(&comm, &stream).expect_err("the other one is dead");
            println!("error: {}", error.to_string().replace('\n', " "));
        }
    }
    assert!(begun.elapsed() < PATIENCE / 2, "{:?}", begun.elapsed());
    // The process is as good as before.
    let alone = World::single()
        .communicator("alone")
        .stream(&stream)
        .build()?;
    sum(&alone, &stream)?;
    println!("survived after {:?}", begun.elapsed());
    Ok(())
}

#[test]
fn a_rank_survives_a_peer_that_died_before_the_first_operation_or_the_end() {
    let test = name(&|| ());
    if let Some((role, world)) = apart::rank(&test, RANKS) {
        rank(&world, &role).expect("it goes on");
        return;
    }
    if !support::needs_processes(RANKS) {
        return;
    }
    for (transport, variables) in TRANSPORTS {
        for stage in STAGES {
            let mut ranks = apart::start(&test, stage, RANKS, variables);
            apart::all_say(&mut ranks, "ready");
            if stage == "connecting" {
                // It dials the other one by now, or waits for it.
                std::thread::sleep(Duration::from_millis(200));
            }
            ranks.remove(1).kill();
            let mut survivor = ranks.remove(0);
            if stage != "connecting" {
                survivor.go_on();
            }
            let survived = survivor.says("survived after ");
            println!("{transport}, {stage}: {survived}");
            survivor.succeeds(PATIENCE);
        }
    }
}
