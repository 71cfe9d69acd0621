//! The store of a world, with ranks that are threads and ranks that are processes, of which the coordinator is killed.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use nccl::World;
use nccl::control::CompareSet;
use nccl_tools::testing::name;

use crate::support::{self, apart};

/// How many threads of each rank add.
const THREADS: usize = 4;
/// How many additions each thread makes at most.
const MOST: usize = 200_000;
/// Time within which all ranks end after the death of the coordinator.
const SOON: Duration = Duration::from_secs(20);

#[test]
fn ranks_that_are_threads_count_elect_and_wait() {
    const RANKS: usize = 4;
    let led: usize = std::thread::scope(|scope| {
        let ranks = World::threads(RANKS).into_iter().map(|world| {
            scope.spawn(move || {
                for _ in 0..100 {
                    world.add("steps", 1)?;
                }
                let own = world.rank().to_string();
                let leads = world.compare_set("leader", None, own.as_bytes())?.is_set();
                world.set(&format!("ready/{own}"), b"")?;
                let keys: Vec<_> = (0..RANKS).map(|rank| format!("ready/{rank}")).collect();
                let keys: Vec<_> = keys.iter().map(String::as_str).collect();
                world.wait(&keys)?;
                assert_eq!(world.get("steps")?, b"400");
                let current = world.try_get("leader")?;
                let unchanged = CompareSet::Unchanged { current };
                assert_eq!(world.compare_set("leader", Some(b"none"), b"x")?, unchanged);
                let ranks = world.all_gather_value("ranks", &(world.rank(), own.clone()))?;
                assert_eq!(ranks[world.rank()], (world.rank(), own));
                world.barrier("all have looked")?;
                world.add("deleted", world.delete("leader")?.into())?;
                world.barrier("all have deleted")?;
                assert_eq!(world.get("deleted")?, b"1");
                Ok::<_, nccl::Error>(usize::from(leads))
            })
        });
        let ranks: Vec<_> = ranks.collect();
        ranks
            .into_iter()
            .map(|rank| rank.join().unwrap().unwrap())
            .sum()
    });
    assert_eq!(led, 1);
}

/// The sums that the additions of all threads of a rank have returned until the first error of each.
fn add_until_an_error(world: &World, most: usize) -> (Vec<i64>, Vec<String>) {
    let add = || {
        let mut sums = Vec::new();
        for _ in 0..most {
            match world.add("counter", 1) {
                Ok(sum) => sums.push(sum),
                Err(error) => return (sums, Some(error.to_string())),
            }
        }
        (sums, None)
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(add)).collect();
        let (mut all, mut errors) = (Vec::new(), Vec::new());
        for thread in threads {
            let (sums, error) = thread.join().unwrap();
            assert!(sums.is_sorted(), "the sums of one thread: {sums:?}");
            all.extend(sums);
            errors.extend(error);
        }
        (all, errors)
    })
}

#[test]
fn additions_are_made_once_when_the_coordinator_is_killed_and_the_next_generation_counts_from_0() {
    const RANKS: usize = 4;
    const AFTER: usize = 50;
    let test = name(&|| ());
    if let Some((_, world)) = apart::rank(&test, RANKS) {
        println!("adding");
        let (sums, errors) = add_until_an_error(&world, MOST);
        assert_eq!(errors.len(), THREADS, "{errors:?}");
        for error in &errors {
            assert!(error.contains("rank 0"), "{error}");
        }
        // There is no store until the next generation.
        let error = world.add("counter", 1).unwrap_err().to_string();
        assert!(error.contains("rank 0"), "{error}");
        let world = world.next_generation(SOON).unwrap();
        let (again, errors) = add_until_an_error(&world, AFTER);
        assert!(errors.is_empty(), "{errors:?}");
        world.barrier("all have added").unwrap();
        let total = (world.size() * THREADS * AFTER).to_string();
        assert_eq!(world.get("counter").unwrap(), total.as_bytes());
        let all: BTreeSet<i64> = world
            .all_gather_value("sums", &again)
            .unwrap()
            .into_iter()
            .flatten()
            .collect();
        assert_eq!(all.len(), world.size() * THREADS * AFTER);
        // The earlier sums are compared here, where all survivors are. The missing sums went to threads of rank 0, or to
        // threads that got an error.
        let before: Vec<i64> = world
            .all_gather_value("sums before", &sums)
            .unwrap()
            .concat();
        let distinct: BTreeSet<_> = before.iter().copied().collect();
        assert_eq!(distinct.len(), before.len(), "a sum was returned twice");
        println!("counted {} {}", before.len(), distinct.last().unwrap());
        return;
    }
    if !support::needs_processes(RANKS) {
        return;
    }
    let mut ranks = apart::start(&test, "", RANKS, &[]);
    apart::all_say(&mut ranks, "adding");
    std::thread::sleep(Duration::from_millis(300));
    let begun = Instant::now();
    ranks[0].kill();
    let counted: Vec<_> = ranks[1..]
        .iter_mut()
        .map(|rank| rank.says("counted"))
        .collect();
    println!("after {:?}: {}", begun.elapsed(), counted[0]);
    for rank in ranks.into_iter().skip(1) {
        rank.succeeds(SOON);
    }
}
