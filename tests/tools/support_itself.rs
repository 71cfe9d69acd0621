//! Tests of the helpers of the other tests: ranks are what they claim to be, and no failure or hang goes unnoticed.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use nccl::World;
use nccl_tools::spawn::Outcome;

use crate::support::{Ranks, ranks_as_processes, ranks_as_threads};

/// The process numbers of all ranks, from an exchange.
fn pids(world: &World) -> nccl::Result<Vec<u32>> {
    let gathered = world.all_gather("pids", &std::process::id().to_le_bytes())?;
    Ok(gathered
        .iter()
        .map(|pid| u32::from_le_bytes(pid[..].try_into().unwrap()))
        .collect())
}

#[test]
fn ranks_as_threads_share_a_process() {
    ranks_as_threads(3, |world| {
        assert_eq!(world.size(), 3);
        let thread = std::thread::current();
        assert_eq!(thread.name(), Some(&*format!("rank {}", world.rank())));
        let pids = pids(&world)?;
        assert!(pids.iter().all(|&pid| pid == pids[0]), "{pids:?}");
        Ok::<(), nccl::Error>(())
    });
}

#[test]
fn ranks_as_processes_have_one_each() {
    ranks_as_processes(3, |world| {
        assert_eq!((world.size(), world.local_rank()), (3, world.rank()));
        let mut pids = pids(&world)?;
        pids.sort_unstable();
        pids.dedup();
        assert_eq!(pids.len(), 3);
        Ok::<(), nccl::Error>(())
    });
}

#[test]
fn there_is_a_device_for_every_rank() {
    ranks_as_threads(9, |world| {
        let context = nccl::cudarc::driver::CudaContext::new(world.local_rank());
        context.map(drop)
    });
}

/// The message with which `body` panics.
fn panic_of(body: impl FnOnce()) -> String {
    let panic = catch_unwind(AssertUnwindSafe(body)).expect_err("this had to panic");
    match panic.downcast::<String>() {
        Ok(message) => *message,
        Err(other) => panic!(
            "the panic has no message: {:?}",
            other.downcast_ref::<&str>()
        ),
    }
}

#[test]
fn a_rank_that_panics_fails_the_test_with_its_words() {
    let message = panic_of(|| {
        ranks_as_processes(2, |world| {
            assert_eq!(world.rank(), 0, "rank one is out of order")
        });
    });
    for part in ["rank 1 (pid ", "exit code 101", "rank one is out of order"] {
        assert!(message.contains(part), "{message:?} lacks {part:?}");
    }
}

#[test]
fn a_thread_that_returns_an_error_fails_the_test_although_another_waits() {
    let begun = Instant::now();
    let message = panic_of(|| {
        ranks_as_threads(2, |world| {
            if world.rank() == 1 {
                return Err("rank one gives up");
            }
            loop {
                std::thread::park();
            }
        });
    });
    assert!(message.contains("rank one gives up"), "{message}");
    assert!(
        begun.elapsed() < Duration::from_secs(20),
        "{:?}",
        begun.elapsed()
    );
}

#[test]
fn a_process_that_hangs_is_killed_at_the_deadline_and_described() {
    let message = panic_of(|| {
        Ranks::new(2)
            .deadline(Duration::from_secs(5))
            .processes(|world| {
                println!("rank {} is here", world.rank());
                while world.rank() == 1 {
                    std::thread::park();
                }
            });
    });
    for part in [
        "deadline",
        "rank 1",
        "was running",
        "thread",
        "rank 1 is here",
    ] {
        assert!(message.contains(part), "{message:?} lacks {part:?}");
    }
}

#[test]
fn a_thread_that_hangs_is_killed_at_the_deadline_and_described() {
    let message = panic_of(|| {
        Ranks::new(2)
            .deadline(Duration::from_secs(1))
            .threads(|world| {
                while world.rank() == 1 {
                    std::thread::park();
                }
            });
    });
    for part in [
        "not all ranks ended within 1s",
        "still running: ranks [1]",
        "thread rank 1",
    ] {
        assert!(message.contains(part), "{message:?} lacks {part:?}");
    }
}

#[test]
fn a_test_may_run_ranks_several_times() {
    for size in [1, 3] {
        ranks_as_threads(size, move |world| assert_eq!(world.size(), size));
        ranks_as_processes(size, |world| assert_eq!(world.size(), size));
    }
    let ended = Ranks::new(2).outcome(|world| assert_eq!(world.size(), 2));
    assert_eq!(ended.ranks.len(), 2);
}

#[test]
fn ranks_see_the_variables_they_are_given() {
    let ended = Ranks::new(2)
        .variable("NCCL_TOOLS_EXAMPLE", "seen")
        .outcome(|_| {
            assert_eq!(std::env::var("NCCL_TOOLS_EXAMPLE").as_deref(), Ok("seen"));
        });
    assert!(matches!(ended.outcome, Outcome::Succeeded), "{ended:?}");
}
