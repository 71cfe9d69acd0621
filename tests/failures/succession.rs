//! Rank 0's process dies, alone or with others, or its host is cut off: the surviving ranks get one cause, and stay
//! connected with each other; ranks without a majority report that they are cut off.
//!
//! Hosts are network namespaces, which need root; without, their tests report that they were skipped. The ranks' data
//! goes through shared memory, cut or not: their work ends by reports of the control plane.

use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nccl::cudarc::driver::CudaStream;
use nccl::{Communicator, World};
use nccl_tools::testing::{Role, name};

use crate::meeting::{ENDS, Hosts, ip};
use crate::support;
use crate::support::apart::{self, Apart};
use crate::support::sums::work_until_the_end;

/// Timeout of operations: reaching it means that no report of another rank ended the operation.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Time within which all ranks must have the fault: generous, for a loaded machine.
const SOON: Duration = Duration::from_secs(5);

fn start(world: &World, name: &str) -> (Arc<CudaStream>, Communicator) {
    let stream = support::device(world).and_then(|context| context.new_stream());
    let stream = stream.expect("a stream");
    let comm = world
        .communicator(name)
        .stream(&stream)
        .with(|comm| comm.timeouts.operation = TIMEOUT);
    let comm = comm.build().expect("all come");
    (stream, comm)
}

/// Kills some of the ranks, and returns the reports of the others, and how late these were.
fn kill(mut ranks: Vec<Apart>, victims: &[usize]) -> Vec<(String, Duration)> {
    apart::all_say(&mut ranks, "working");
    kill_working(ranks, victims)
}

fn kill_working(ranks: Vec<Apart>, victims: &[usize]) -> Vec<(String, Duration)> {
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
            println!("after {took:?}: {error:#}");
            assert!(!error.contains("line"), "{error:#}");
            rank.succeeds(SOON);
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

/// The number of ranks on two hosts, and which of them are on the second.
struct Spread {
    ranks: usize,
    far: &'static [usize],
}

/// In a rank: works in a communicator until the end. The control connections are those of its host, and everything else
/// is as if the ranks shared one: the emulator's ranks meet on one host only.
fn work_on_its_host(test: &str, ranks: usize) -> bool {
    let own = std::fs::File::open("/proc/self/ns/net").expect("a namespace");
    let meeting = |role: Option<&str>| match role {
        Some(host) => {
            let path = format!("/run/netns/{host}");
            enter(&std::fs::File::open(path).expect("the host's namespace"));
        }
        None => enter(&own),
    };
    let Some((_, world)) = apart::rank_from(test, ranks, meeting) else {
        return false;
    };
    let (stream, comm) = start(&world, "doomed");
    work_until_the_end(&comm, &stream);
    true
}

/// Moves the thread, and threads that it starts, to another host.
fn enter(namespace: &std::fs::File) {
    // SAFETY: the descriptor is open, and the call concerns nothing but the calling thread's namespace.
    let entered = unsafe { libc::setns(namespace.as_raw_fd(), libc::CLONE_NEWNET) };
    assert_eq!(entered, 0, "{}", std::io::Error::last_os_error());
}

impl Spread {
    /// The ranks, at work, and their hosts.
    fn start(&self, test: &str) -> Option<(Hosts, Vec<Apart>)> {
        if !support::needs_processes(self.ranks) {
            return None;
        }
        let hosts = Hosts::new([&["10.77.0.1/24"], &["10.77.0.2/24"]])?;
        let host = |rank: usize| hosts.names[usize::from(self.far.contains(&rank))].clone();
        let variables = [
            ("NCCL_RUN_RENDEZVOUS", "tcp:10.77.0.1:29400"),
            ("NCCL_RUN_SECRET", "hush, and nobody hears it"),
            // The data of the ranks does not go through the cut network, and would be a reason to wait.
            ("NCCL_RUN_UNREACHABLE", "abort"),
        ];
        let mut ranks = apart::start_each(test, self.ranks, &variables, host);
        apart::all_say(&mut ranks, "working");
        Some((hosts, ranks))
    }

    /// Cuts the hosts off from each other. Returns the report of each rank, and prints when the last of each side came.
    fn cut(&self, test: &str) -> Option<Vec<String>> {
        let (hosts, ranks) = self.start(test)?;
        ip(&format!("-n {} link set {} down", hosts.names[1], ENDS[1]));
        let cut = Instant::now();
        let said = ranks.into_iter().enumerate().map(|(number, mut rank)| {
            let cause = rank.says("ended: ");
            let took = cut.elapsed();
            println!("{test}: rank {number} after {took:.1?}: {cause}");
            assert!(took < CUT, "{took:?}");
            let error = rank.says("error: ");
            println!("  {error:#}");
            rank.succeeds(SOON);
            cause
        });
        Some(said.collect())
    }
}

/// A side that is cut off looks for the others for twelve seconds after it has lost them.
const CUT: Duration = Duration::from_secs(22);

#[test]
fn when_the_host_of_rank_0_is_cut_off_the_others_lose_it_and_it_says_that_it_is_cut_off() {
    let test = name(&|| ());
    if work_on_its_host(&test, 4) {
        return;
    }
    let far = &[1, 2, 3];
    let Some(said) = (Spread { ranks: 4, far }).cut(&test) else {
        return;
    };
    assert!(said[0].starts_with("ended: CutOff "), "{said:#?}");
    assert!(said[0].contains("cut off from ranks 1-3"), "{said:#?}");
    for cause in &said[1..] {
        assert!(cause.starts_with("ended: Gone rank 0 ("), "{cause}");
        assert!(
            cause.contains("its connection broke without goodbye"),
            "{cause}"
        );
        assert_eq!(*cause, said[1]);
    }
}

#[test]
fn when_the_host_of_one_rank_is_cut_off_the_others_lose_it_and_it_says_that_it_is_cut_off() {
    let test = name(&|| ());
    if work_on_its_host(&test, 4) {
        return;
    }
    let Some(said) = (Spread {
        ranks: 4,
        far: &[3],
    })
    .cut(&test) else {
        return;
    };
    for cause in &said[..3] {
        assert!(cause.starts_with("ended: Gone rank 3 ("), "{cause}");
        assert!(
            cause.contains("its connection broke without goodbye"),
            "{cause}"
        );
        assert_eq!(*cause, said[0]);
    }
    assert!(said[3].starts_with("ended: CutOff "), "{said:#?}");
    assert!(said[3].contains("cut off from ranks 0-2"), "{said:#?}");
}

/// Neither side can tell which is at fault, and neither claims to.
#[test]
fn two_ranks_and_two_halves_that_are_cut_off_both_say_so() {
    let test = name(&|| ());
    let ranks = match std::env::var("NCCL_RUN_WORLD_SIZE") {
        Ok(ranks) => ranks.parse().expect("a number"),
        Err(_) => 0,
    };
    if work_on_its_host(&test, ranks) {
        return;
    }
    let two = Spread {
        ranks: 2,
        far: &[1],
    };
    let four = Spread {
        ranks: 4,
        far: &[2, 3],
    };
    for (spread, sides) in [
        (two, ["rank 1", "rank 0"]),
        (four, ["ranks 2-3", "ranks 0-1"]),
    ] {
        let Some(said) = spread.cut(&test) else {
            return;
        };
        for (rank, cause) in said.iter().enumerate() {
            assert!(cause.starts_with("ended: CutOff "), "{cause}");
            let other = sides[usize::from(spread.far.contains(&rank))];
            let word = format!("cut off from {other}: a partition of the network");
            assert!(cause.contains(&word), "{word:?} in {cause:?}");
        }
    }
}

#[test]
fn between_hosts_rank_0_and_its_successor_are_killed_together_and_the_next_one_decides() {
    let test = name(&|| ());
    if work_on_its_host(&test, 4) {
        return;
    }
    let far = &[1, 3];
    let Some((_hosts, ranks)) = (Spread { ranks: 4, far }).start(&test) else {
        return;
    };
    let said = kill_working(ranks, &[0, 1]);
    for (cause, took) in &said {
        assert!(cause.starts_with("ended: Gone rank "), "{cause}");
        assert_eq!(*cause, said[0].0);
        assert!(*took < SOON, "{took:?}");
    }
}

/// The slot of each rank, as `number:incarnation`, and the number of slots.
fn slots(world: &World) -> String {
    let ranks = 0..world.size();
    let slots: Vec<_> = ranks
        .map(|rank| {
            let slot = world.slot(rank).expect("a rank of this world");
            assert_eq!(world.rank_in_slot(slot.number), Some(rank));
            format!("{}:{:x}", slot.number, slot.incarnation)
        })
        .collect();
    assert_eq!(world.slot(world.size()), None);
    let own = world.slot(world.rank()).expect("its own").number;
    format!(
        "slots: {} own {own} of {}",
        slots.join(" "),
        world.slot_count()
    )
}

/// Goes to the next generation once `size` ranks are to be in it.
fn go_on_as(world: &World, size: usize) -> World {
    let begun = Instant::now();
    while world.size() - world.departed().len() + world.joiners() != size {
        assert!(begun.elapsed() < TIMEOUT, "not {size} ranks");
        std::thread::sleep(Duration::from_millis(1));
    }
    if world.departed().is_empty() {
        world.barrier("all know of it").expect("all are there");
    }
    world.next_generation(TIMEOUT).expect("the others go on")
}

#[test]
fn slots_stay_when_ranks_are_killed_and_newcomers_take_the_free_ones() {
    const RANKS: usize = 5;
    /// How many ranks there are in each generation.
    const SIZES: [usize; 4] = [5, 3, 4, 5];
    let test = name(&|| ());
    let generations = |mut world: World, sizes: &[usize]| {
        println!("{}", slots(&world));
        for size in sizes {
            world = go_on_as(&world, *size);
            println!("{}", slots(&world));
        }
        world.barrier("end").expect("all are there");
    };
    match Role::of(&test) {
        Role::Child(role) if role == "new" => {
            let world = apart::join_running(RANKS);
            let sizes = &SIZES[world.size() - 1..];
            return generations(world, sizes);
        }
        Role::Child(_) => {
            let (_, world) = apart::rank(&test, RANKS).expect("a rank");
            return generations(world, &SIZES[1..]);
        }
        Role::Test => {}
    }
    if !support::needs_processes(RANKS) {
        return;
    }
    let mut ranks = apart::start(&test, "", RANKS, &[]);
    let first = apart::all_say(&mut ranks, "slots: ");
    // Rank by rank: the number of the slot and the incarnation.
    let parse = |line: &str| -> Vec<(usize, String)> {
        let (_, table) = line.split_once("slots: ").expect("a table");
        let words = table.split(' ').filter_map(|word| word.split_once(':'));
        words
            .map(|(slot, incarnation)| (slot.parse().expect("a number"), incarnation.to_owned()))
            .collect()
    };
    let incarnations = |line: &str| -> Vec<String> {
        let slots = parse(line).into_iter();
        slots.map(|(_, incarnation)| incarnation).collect()
    };
    let numbers =
        |line: &str| -> Vec<usize> { parse(line).into_iter().map(|(number, _)| number).collect() };
    let before = incarnations(&first[0]);
    assert_eq!(numbers(&first[0]), [0, 1, 2, 3, 4]);
    // The coordinator is one of the victims.
    for victim in [3, 0] {
        ranks.remove(victim).kill();
    }
    let expect = |ranks: &mut [Apart], slots: &[usize]| {
        let lines = apart::all_say(ranks, "slots: ");
        for (line, own) in lines.iter().zip(slots) {
            assert_eq!(numbers(line), slots);
            assert!(line.ends_with(&format!("own {own} of {RANKS}")), "{line}");
            assert_eq!(incarnations(line), incarnations(&lines[0]));
        }
        incarnations(&lines[0])
    };
    let of = |slots: &[usize]| -> Vec<_> { slots.iter().map(|slot| &before[*slot]).collect() };
    let found = expect(&mut ranks, &[1, 2, 4]);
    assert_eq!(found.iter().collect::<Vec<_>>(), of(&[1, 2, 4]));
    // The first newcomer gets the slot of the number that it is started as; that of the second one has a rank.
    ranks.push(apart::start_newcomer(&test, "", "new", 3, &[]));
    let found = expect(&mut ranks, &[1, 2, 4, 3]);
    assert_eq!(found[..3].iter().collect::<Vec<_>>(), of(&[1, 2, 4]));
    assert_ne!(found[3], before[3]);
    ranks.push(apart::start_newcomer(&test, "", "new", 2, &[]));
    let again = expect(&mut ranks, &[1, 2, 4, 3, 0]);
    assert_eq!(again[..4], found);
    assert_ne!(again[4], before[0]);
    for rank in ranks {
        rank.succeeds(SOON);
    }
}
