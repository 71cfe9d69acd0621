//! A rank that is killed in the middle of work: the others get an error at their limit, can abort, and end.
//!
//! The ranks are processes that this test starts itself, because the usual starter would end the
//! survivors as well.

mod support;

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use nccl::{ReduceOp, Rendezvous, World};
use nccl_tools::perf;
use nccl_tools::testing::{Role, again};

const NAME: &str = "a_killed_rank_ends_the_others_at_their_limit";
const RANKS: usize = 3;
/// How long an operation may take.
const LIMIT: Duration = Duration::from_secs(2);

/// One rank: all-reduces without end, which the killed rank stops.
fn rank() -> Result<(), Box<dyn std::error::Error>> {
    perf::install(RANKS).map_err(|failure| failure.to_string())?;
    let world = World::join(Rendezvous::from_env()?)?;
    let stream = support::device(&world)?.new_stream()?;
    let comm = world
        .communicator("doomed")
        .stream(&stream)
        .timeout(LIMIT)
        .build()?;
    let mut y = stream.alloc_zeros::<f32>(1 << 16)?;
    let begun = Instant::now();
    for turn in 0.. {
        if turn == 10 {
            println!("working");
        }
        let done = comm.all_reduce_in_place(&mut y, ReduceOp::Sum);
        if let Err(error) = done.and_then(|done| done.wait()) {
            assert!(error.is_timeout(), "{error}");
            println!("error: {error}");
            // Whether it had to be aborted or was already: it comes back.
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

/// Children that do not outlive the test.
struct Started(Child);

impl Drop for Started {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_killed_rank_ends_the_others_at_their_limit() {
    if let Role::Child(_) = Role::of(NAME) {
        rank().expect("this rank survives");
        return;
    }
    if !support::needs_processes(RANKS) {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let place = format!("unix:{}/meet", directory.path().display());
    let mut ranks: Vec<Started> = (0..RANKS)
        .map(|rank| {
            let child = again(NAME, &rank.to_string())
                .env("NCCL_RUN_RANK", rank.to_string())
                .env("NCCL_RUN_LOCAL_RANK", rank.to_string())
                .env("NCCL_RUN_WORLD_SIZE", RANKS.to_string())
                .env("NCCL_RUN_RENDEZVOUS", &place)
                .stdout(Stdio::piped())
                .stderr(Stdio::inherit())
                .spawn();
            Started(child.expect("a rank"))
        })
        .collect();
    let mut victim = ranks.remove(1);
    let lines = BufReader::new(victim.0.stdout.take().expect("a pipe")).lines();
    let working = lines
        .map_while(Result::ok)
        .any(|line| line.contains("working"));
    assert!(working, "the ranks never worked");
    victim.0.kill().expect("it runs");
    let killed = Instant::now();
    for rank in &mut ranks {
        let mut said = String::new();
        let stdout = rank.0.stdout.as_mut().expect("a pipe");
        stdout.read_to_string(&mut said).expect("text");
        let status = rank.0.wait().expect("it ends");
        assert!(status.success(), "{status}: {said}");
        assert!(said.contains("all_reduce #"), "{said}");
        assert!(said.contains("did not finish within 2s"), "{said}");
    }
    // The limit, the abort, and a loaded machine.
    assert!(killed.elapsed() < Duration::from_secs(30));
}
