//! Communicators that take in more ranks.

use std::time::{Duration, Instant};

use nccl::{Communicator, CommunicatorState as State, ErrorKind, LaunchMode, ResizeWay, World};
use nccl_emulator::faults;
use nccl_tools::testing::{Role, name};

use crate::support;
use crate::support::sums::{start, sum};
use crate::support::{Ranks, apart, ranks_as_processes, ranks_as_threads};

type Outcome = Result<(), Box<dyn std::error::Error>>;

const TIMEOUT: Duration = Duration::from_secs(30);

/// The first `size` ranks have a communicator, which grows to all. `why`: the reason why NCCL does not do it itself.
fn grow_to_all(world: World, size: usize, why: Option<&str>) -> Outcome {
    let (stream, all) = start(&world, TIMEOUT)?;
    let part = all.split("part", (world.rank() < size).then_some(0), 0)?;
    let whole = match &part {
        Some(part) => {
            let grown = part.grow(&world, "whole")?;
            match (&grown.way, why) {
                (ResizeWay::Native, None) => {}
                (ResizeWay::Anew { why: said, .. }, Some(why)) if said.contains(why) => {}
                (way, why) => panic!("{way}, and not {why:?}"),
            }
            grown.communicator
        }
        None => world.communicator("whole").stream(&stream).build()?,
    };
    assert_eq!(
        (whole.rank(), whole.world_size()),
        (world.rank(), world.size())
    );
    let right: f32 = (0..world.size()).map(|rank| 10f32.powi(rank as i32)).sum();
    assert_eq!(sum(&whole, &stream)?, right);
    if let Some(part) = part {
        // It is not affected.
        assert_eq!(part.rank(), world.rank());
        sum(&part, &stream)?;
        part.finalize()?;
    }
    assert_eq!(sum(&whole, &stream)?, right);
    whole.finalize()?;
    all.finalize()?;
    Ok(())
}

#[test]
fn a_part_of_a_world_grows_to_all_of_it_and_the_old_one_stays() {
    for mode in MODES {
        let world = move |world: World| world.with_launch_mode(mode);
        ranks_as_processes(4, move |all| grow_to_all(world(all), 1, None));
        ranks_as_processes(3, move |all| grow_to_all(world(all), 2, None));
    }
}

#[test]
fn a_part_of_a_world_grows_among_threads() {
    for mode in MODES {
        ranks_as_threads(4, move |world| {
            grow_to_all(world.with_launch_mode(mode), 3, None)
        });
    }
}

const MODES: [LaunchMode; 2] = [LaunchMode::NonBlocking, LaunchMode::BlockingChild];

#[test]
fn on_an_old_library_a_new_communicator_is_made() {
    // Ranks cannot share a device before 2.30.3.
    if !support::needs_devices(3) || !support::needs_emulator("a library that is older than it is")
    {
        return;
    }
    Ranks::new(3)
        .variable("NCCL_EMULATOR_VERSION", "2.28.7")
        .processes(|world| grow_to_all(world, 2, Some("2.29.2")));
}

#[test]
fn a_communicator_whose_ranks_are_not_the_first_is_made_anew() {
    ranks_as_threads(3, |world| -> Outcome {
        let (stream, all) = start(&world, TIMEOUT)?;
        let part = all.split("part", (world.rank() > 0).then_some(0), 0)?;
        let whole = match &part {
            Some(part) => {
                let grown = part.grow(&world, "whole")?;
                assert!(
                    grown.way.to_string().contains("on rank 0: it brings"),
                    "{}",
                    grown.way
                );
                grown.communicator
            }
            None => world.communicator("whole").stream(&stream).build()?,
        };
        assert_eq!(sum(&whole, &stream)?, 111.0);
        // All of them are in the world: there is no rank to take in.
        let same = all.grow(&world, "same")?;
        assert!(
            same.way.to_string().contains("there is no new rank"),
            "{}",
            same.way
        );
        assert_eq!(sum(&same.communicator, &stream)?, 111.0);
        Ok(())
    });
}

/// A rank works, goes to the next generation with all others when `joiners` want to join, and grows its communicator.
fn take_in(world: World, comm: Option<Communicator>) -> Outcome {
    let stream = support::device(&world)?.new_stream()?;
    let comm = match comm {
        Some(comm) => comm,
        None => world.communicator("work").stream(&stream).build()?,
    };
    println!("right: {}", sum(&comm, &stream)?);
    let begun = Instant::now();
    while world.joiners() == 0 {
        assert!(begun.elapsed() < TIMEOUT, "nobody comes");
        std::thread::sleep(Duration::from_millis(1));
    }
    // Each rank gets the report at its own time.
    world.barrier("somebody comes")?;
    let next = world.next_generation_keeping(&[&comm], TIMEOUT)?;
    drop(world);
    println!("old: {}", sum(&comm, &stream)?);
    let grown = comm.grow(&next, "more")?;
    println!("way: {}", grown.way);
    comm.finalize()?;
    println!("right: {}", sum(&grown.communicator, &stream)?);
    Ok(grown.communicator.finalize()?)
}

#[test]
fn a_new_process_comes_into_a_communicator_that_runs() {
    const RANKS: usize = 3;
    let test = name(&|| ());
    match Role::of(&test) {
        Role::Child(role) if role == "new" => {
            let world = apart::join_running(RANKS + 1);
            let (stream, comm) = (|| -> Result<_, Box<dyn std::error::Error>> {
                let stream = support::device(&world)?.new_stream()?;
                let comm = world.communicator("more").stream(&stream).build()?;
                Ok((stream, comm))
            })()
            .expect("it is taken in");
            println!("right: {}", sum(&comm, &stream).expect("all are there"));
            comm.finalize().expect("all are there");
            return;
        }
        Role::Child(_) => {
            let (_, world) = apart::rank(&test, RANKS + 1).expect("a rank");
            take_in(world, None).expect("they grow");
            return;
        }
        Role::Test => {}
    }
    if !support::needs_processes(RANKS + 1) {
        return;
    }
    let mut ranks = apart::start(&test, "", RANKS, &[]);
    for rank in &mut ranks {
        assert!(rank.says("right: ").contains("111"));
    }
    let mut new = apart::start_newcomer(&test, "", "new", RANKS, &[]);
    for rank in &mut ranks {
        assert!(rank.says("old: ").contains("111"));
        let way = rank.says("way: ");
        assert!(way.contains("by NCCL's own call"), "{way}");
    }
    ranks.push({
        assert!(new.says("right: ").contains("1111"));
        new
    });
    for rank in ranks {
        rank.succeeds(TIMEOUT);
    }
}

/// Two of three ranks grow to all, and `call` fails on rank `on`.
fn failing_grow(world: World, call: &'static str, on: usize) -> Outcome {
    let stream = support::device(&world)?.new_stream()?;
    let all = world.communicator("all").stream(&stream).build()?;
    let part = all.split("part", (world.rank() < 2).then_some(0), 0)?;
    if world.rank() == on {
        faults::at_call(call).nth(1).fail(3).keep();
    }
    world.barrier("it fails now")?;
    let begun = Instant::now();
    let error = match &part {
        Some(part) => part.grow(&world, "whole").map(drop),
        None => world
            .communicator("whole")
            .stream(&stream)
            .build()
            .map(drop),
    };
    let error = error.expect_err("it fails").to_string();
    println!("{} {:?}: {error:#}", world.rank(), begun.elapsed());
    assert!(
        begun.elapsed() < Duration::from_secs(15),
        "{:?}",
        begun.elapsed()
    );
    // Every rank knows where it failed.
    assert!(
        world.rank() == on || error.contains(&format!("rank {on}")),
        "{error:#}"
    );
    if let Some(part) = &part {
        while !matches!(part.state(), State::Aborted | State::Leaked) {
            assert!(
                begun.elapsed() < Duration::from_secs(15),
                "{}",
                part.state()
            );
            std::thread::sleep(Duration::from_millis(1));
        }
        let fault = part.fault().expect("its ranks know why");
        let told = world.all_gather("cause", fault.to_string().as_bytes())?;
        assert_eq!(told[0], told[1], "one cause");
        if on < 2 {
            assert_eq!(fault.culprit(), Some(on), "{fault}");
        } else {
            assert!(fault.to_string().contains("rank 2"), "{fault}");
        }
    } else {
        world.all_gather("cause", b"")?;
    }
    assert_eq!(nccl::stats().leaked_communicators, 0);
    // The other communicators still work, and the ranks can try again.
    assert_eq!(sum(&all, &stream)?, 111.0);
    let again = world.communicator("again").stream(&stream).build()?;
    assert_eq!(sum(&again, &stream)?, 111.0);
    Ok(())
}

#[test]
fn a_grow_that_fails_ends_what_was_to_grow_for_one_cause() {
    if !support::needs_emulator("calls that fail on purpose") {
        return;
    }
    for (call, on) in [
        ("ncclCommGetUniqueId", 0),
        ("ncclCommGrow", 1),
        ("ncclCommGrow", 2),
    ] {
        ranks_as_processes(3, move |world| failing_grow(world, call, on));
    }
}

#[test]
fn a_rank_that_does_not_come_is_named_and_nothing_has_happened() {
    ranks_as_processes(3, |world| -> Outcome {
        let (stream, all) = start(&world, TIMEOUT)?;
        let part = all.split_with("part", (world.rank() < 2).then_some(0), 0, |builder| {
            builder.with(|comm| comm.timeouts.init = Duration::from_secs(3))
        })?;
        if let Some(part) = &part {
            let error = part.grow(&world, "whole").expect_err("one does not come");
            assert!(
                matches!(error.kind(), ErrorKind::TimedOut { .. }),
                "{error:#}"
            );
            let text = format!("{error:#}");
            assert!(
                text.contains("rank 2") && text.contains("grow on"),
                "{text}"
            );
            assert_eq!(sum(part, &stream)?, 11.0);
        }
        world.barrier("nobody came")?;
        Ok(())
    });
}

/// The surviving ranks when rank `victim` of three is killed in the middle of a grow.
fn survive_a_grow(world: World, victim: usize) -> Outcome {
    let stream = support::device(&world)?.new_stream()?;
    let all = world.communicator("all").stream(&stream).build()?;
    let part = all.split("part", (world.rank() < 2).then_some(0), 0)?;
    if world.rank() == victim {
        faults::at_call("ncclCommGrow").kill().keep();
    }
    world.barrier("one dies now")?;
    let error = match &part {
        Some(part) => part.grow(&world, "whole").map(drop),
        None => world
            .communicator("whole")
            .stream(&stream)
            .build()
            .map(drop),
    };
    let error = error.expect_err("one is dead");
    let fault = error.fault().map(ToString::to_string).unwrap_or_default();
    println!("ended: {}", fault.replace('\n', " "));
    let next = world.next_generation(TIMEOUT)?;
    let rest = next.communicator("rest").stream(&stream).build()?;
    println!("right: {}", sum(&rest, &stream)?);
    if let Some(part) = part {
        println!("part: {}", part.state());
    }
    println!("leaked: {}", nccl::stats().leaked_communicators);
    Ok(())
}

#[test]
fn a_rank_that_dies_while_a_communicator_grows_is_the_cause_and_the_others_go_on() {
    const RANKS: usize = 3;
    let test = name(&|| ());
    if let Some((role, world)) = apart::rank(&test, RANKS) {
        survive_a_grow(world, role.parse().expect("a rank")).expect("two are left");
        return;
    }
    if !support::needs_emulator("a rank that dies in a chosen call") {
        return;
    }
    // An old rank, and a new one.
    for victim in [1, 2] {
        let mut ranks = apart::start(&test, &victim.to_string(), RANKS, &[]);
        let dead = ranks.remove(victim);
        for mut rank in ranks {
            let cause = rank.says("ended: ");
            assert!(cause.contains(&format!("pid {}", dead.pid())), "{cause}");
            assert!(rank.says("right: ").contains("11"));
            let (rest, status) = rank.end(TIMEOUT);
            assert!(
                status.success() && rest.contains("leaked: 0"),
                "{status}: {rest}"
            );
        }
    }
}
