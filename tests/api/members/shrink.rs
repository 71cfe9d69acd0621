//! Communicators without some of their ranks.

use std::time::{Duration, Instant};

use nccl::fault::Fault;
use nccl::{CommunicatorState as State, ErrorKind, LaunchMode, ReduceOp, ResizeWay, World};
use nccl_emulator::faults;
use nccl_tools::testing::name;

use crate::support;
use crate::support::sums::{start, sum};
use crate::support::{Ranks, apart, ranks_as_processes, ranks_as_threads};

type Outcome = Result<(), Box<dyn std::error::Error>>;

const TIMEOUT: Duration = Duration::from_secs(30);

fn leave_out_a_rank_that_lives(world: World, native: bool) -> Outcome {
    let (stream, comm) = start(&world, TIMEOUT)?;
    assert_eq!(sum(&comm, &stream)?, 1111.0);
    if world.rank() != 1 {
        let shrunk = comm.shrink("three", &[1])?;
        println!("{}", shrunk.way);
        match &shrunk.way {
            ResizeWay::Native => assert!(native),
            ResizeWay::Anew { why, .. } => assert!(!native && why.contains("2.27.3"), "{why}"),
            other => panic!("{other:?}"),
        }
        let three = shrunk.communicator;
        assert_eq!(three.rank(), [0, 9, 1, 2][world.rank()]);
        assert_eq!(sum(&three, &stream)?, 111.0);
        // Once more, from the shrunk communicator.
        if three.rank() != 0 {
            let two = three.shrink("two", &[0])?.communicator;
            assert_eq!(sum(&two, &stream)?, 11.0);
            two.finalize()?;
        }
        three.finalize()?;
    }
    // The other communicators are not affected.
    assert_eq!(sum(&comm, &stream)?, 1111.0);
    comm.finalize()?;
    Ok(())
}

#[test]
fn a_rank_that_lives_is_left_out_and_the_parent_stays() {
    ranks_as_processes(4, |world| leave_out_a_rank_that_lives(world, true));
}

#[test]
fn a_thread_that_lives_is_left_out_and_the_parent_stays() {
    ranks_as_threads(4, |world| leave_out_a_rank_that_lives(world, true));
}

#[test]
fn nccl_shrinks_a_communicator_in_either_launch_mode_until_its_idle_parent_has_ended() {
    for mode in [LaunchMode::NonBlocking, LaunchMode::BlockingChild] {
        ranks_as_processes(3, move |world| -> Outcome {
            let stream = support::device(&world)?.new_stream()?;
            let comm = world.communicator("all").stream(&stream);
            let comm = comm.with(|comm| comm.launch_mode = Some(mode)).build()?;
            assert_eq!(sum(&comm, &stream)?, 111.0);
            if world.rank() > 0 {
                let shrunk = comm.shrink("both", &[0])?;
                assert_eq!(shrunk.way, ResizeWay::Native);
                let both = shrunk.communicator;
                assert_eq!(both.launch_mode(), Some(mode));
                assert_eq!(sum(&both, &stream)?, 11.0);
                both.finalize()?;
            }
            assert_eq!(sum(&comm, &stream)?, 111.0);
            world.barrier("the old one is of use")?;
            if let Err(error) = comm.revoke("enough") {
                assert!(
                    format!("{error:#}").contains("revoked it: enough"),
                    "{error:#}"
                );
            }
            if world.rank() > 0 {
                let shrunk = comm.shrink("both again", &[0])?;
                match mode {
                    LaunchMode::NonBlocking => assert_eq!(shrunk.way, ResizeWay::Native),
                    _ => assert!(shrunk.way.to_string().contains("aborted"), "{}", shrunk.way),
                }
                let both = shrunk.communicator;
                assert_eq!(both.launch_mode(), Some(mode));
                assert_eq!(sum(&both, &stream)?, 11.0);
                both.finalize()?;
            }
            world.barrier("over")?;
            Ok(())
        });
    }
}

/// The rank that asked for a mode may be the excluded one.
#[test]
fn a_part_has_the_launch_mode_of_what_it_is_made_from() {
    for asks in 0..3 {
        Ranks::new(3)
            .variable(support::LAUNCH_MODE, "default")
            .processes(move |world| -> Outcome {
                let stream = support::device(&world)?.new_stream()?;
                let comm = world
                    .communicator("all")
                    .stream(&stream)
                    .with(|comm| comm.timeouts.operation = TIMEOUT);
                let comm = match asks == world.rank() {
                    true => comm.with(|comm| comm.launch_mode = Some(LaunchMode::NonBlocking)),
                    false => comm,
                };
                let comm = comm.with(|comm| comm.timeouts.init = TIMEOUT).build()?;
                let part = comm.split("part", Some(0), 0)?.expect("a color was given");
                assert_eq!(part.launch_mode(), Some(LaunchMode::NonBlocking));
                if world.rank() != 2 {
                    let two = comm.shrink("two", &[2])?.communicator;
                    assert_eq!(two.launch_mode(), Some(LaunchMode::NonBlocking));
                    assert_eq!(sum(&two, &stream)?, 11.0);
                    two.finalize()?;
                }
                // The new rank has no part in the choice.
                let pair = comm.split("pair", (world.rank() != 2).then_some(0), 0)?;
                let grown = match pair {
                    Some(pair) => {
                        let grown = pair.grow(&world, "grown")?;
                        assert_eq!(grown.way, ResizeWay::Native);
                        grown.communicator
                    }
                    None => world.communicator("grown").stream(&stream).build()?,
                };
                assert_eq!(grown.launch_mode(), Some(LaunchMode::NonBlocking));
                assert_eq!(sum(&grown, &stream)?, 111.0);
                world.barrier("over")?;
                Ok(())
            });
    }
}

#[test]
fn on_an_old_library_a_new_communicator_is_made() {
    // Ranks cannot share a device before 2.30.3.
    if !support::needs_devices(4) || !support::needs_emulator("a library that is older than it is")
    {
        return;
    }
    Ranks::new(4)
        .variable("NCCL_EMULATOR_VERSION", "2.26.2")
        .processes(|world| leave_out_a_rank_that_lives(world, false));
}

#[test]
fn a_shrink_that_aborts_ends_what_waits_for_the_rank_that_is_left_out() {
    ranks_as_threads(3, |world| -> Outcome {
        let (stream, comm) = start(&world, TIMEOUT)?;
        assert_eq!(sum(&comm, &stream)?, 111.0);
        let begun = Instant::now();
        if world.rank() == 2 {
            // It does not enter the operation, and gets the report that it is excluded.
            while comm.fault().is_none() {
                assert!(begun.elapsed() < TIMEOUT, "nobody told");
                std::thread::sleep(Duration::from_millis(1));
            }
            let fault = comm.fault().expect("just seen").to_string();
            assert!(fault.contains("rank 2 is left out"), "{fault}");
            return Ok(());
        }
        let mut y = stream.clone_htod(&[1f32; 100])?;
        let stuck = comm.all_reduce_in_place(&mut y, ReduceOp::Sum)?;
        std::thread::sleep(Duration::from_millis(100));
        assert!(!stuck.is_complete()?);
        let shrunk = comm.shrink_aborting("two", &[2])?;
        match support::launch_mode() {
            LaunchMode::NonBlocking => assert_eq!(shrunk.way, ResizeWay::Native),
            _ => assert!(
                shrunk.way.to_string().contains("its idle parent ends"),
                "{}",
                shrunk.way
            ),
        }
        assert_eq!(sum(&shrunk.communicator, &stream)?, 11.0);
        let error = stuck.wait().unwrap_err();
        assert!(
            matches!(error.kind(), ErrorKind::Aborted { .. }),
            "{error:#}"
        );
        assert!(sum(&comm, &stream).is_err());
        assert!(begun.elapsed() < TIMEOUT / 2);
        shrunk.communicator.finalize()?;
        Ok(())
    });
}

#[test]
fn with_a_launch_under_way_a_shrink_that_aborts_makes_a_new_one() {
    if !support::needs_emulator("calls that are counted") {
        return;
    }
    ranks_as_processes(3, |world: World| -> Outcome {
        let world = world.with_launch_mode(LaunchMode::NonBlocking);
        let (stream, comm) = start(&world, TIMEOUT)?;
        if world.rank() == 2 {
            // It does not enter the first message, for which the launch of rank 0 waits.
            world.barrier("shrunk")?;
            return Ok(());
        }
        let shrinks = faults::at_call("ncclCommShrink").delay(Duration::ZERO);
        let launched = faults::at_call("ncclCommGetAsyncError").delay(Duration::ZERO);
        let x = stream.alloc_zeros::<u8>(64)?;
        let shrunk = std::thread::scope(|scope| {
            let launches = (world.rank() == 0).then(|| {
                let launches = scope.spawn(|| comm.group(|group| group.isend(&x, 2)).map(drop));
                assert!(launched.wait_for_hits(1, TIMEOUT));
                std::thread::sleep(Duration::from_millis(100));
                assert!(!launches.is_finished());
                launches
            });
            let shrunk = comm.shrink_aborting("two", &[2]);
            if let Some(launches) = launches {
                let error = launches.join().expect("no panic").unwrap_err();
                assert!(format!("{error:#}").contains("left out"), "{error:#}");
            }
            shrunk
        })?;
        let way = shrunk.way.to_string();
        assert!(way.contains("a launch is under way"), "{way}");
        assert_eq!(shrinks.hits(), 0);
        assert_eq!(sum(&shrunk.communicator, &stream)?, 11.0);
        shrunk.communicator.finalize()?;
        world.barrier("shrunk")?;
        Ok(())
    });
}

#[test]
fn after_a_death_the_ranks_that_live_make_a_new_one() {
    const RANKS: usize = 3;
    let test = name(&|| ());
    if let Some((_, world)) = apart::rank(&test, RANKS) {
        let (stream, comm) = start(&world, TIMEOUT).expect("all are there");
        let error = loop {
            match sum(&comm, &stream) {
                Ok(sum) => assert_eq!(sum, 111.0),
                Err(error) => break error,
            }
            println!("working");
        };
        println!("ended: {}", format!("{error:#}").replace('\n', " "));
        let shrunk = comm.shrink("both", &[]).expect("two are left");
        println!("way: {}", shrunk.way);
        let right = sum(&shrunk.communicator, &stream).expect("both work");
        println!("right: {right}");
        return;
    }
    if !support::needs_processes(RANKS) {
        return;
    }
    let mut ranks = apart::start(&test, "", RANKS, &[]);
    apart::all_say(&mut ranks, "working");
    ranks.remove(1).kill();
    for mut rank in ranks {
        let way = rank.says("way: ");
        assert!(
            way.contains("new communicator") && way.contains("abort"),
            "{way}"
        );
        assert!(rank.says("right: ").contains("11"));
        rank.succeeds(TIMEOUT);
    }
}

#[test]
fn ranks_that_want_to_leave_out_others_are_told() {
    ranks_as_threads(3, |world| -> Outcome {
        let stream = support::device(&world)?.new_stream()?;
        let comm = world.communicator("all").stream(&stream);
        let comm = comm.with(|comm| comm.timeouts.init = Duration::from_millis(500));
        let comm = comm.build()?;
        let without = [[1], [2], [0]][world.rank()];
        let error = comm.shrink("torn", &without).unwrap_err();
        let text = format!("{error:#}");
        assert!(
            text.contains("do not agree") && text.contains("shrink on"),
            "{text}"
        );
        let error = comm.shrink("without me", &[world.rank()]).unwrap_err();
        assert!(format!("{error:#}").contains("left out"), "{error:#}");
        let error = comm.shrink("nobody", &[7]).unwrap_err();
        assert!(
            matches!(error.kind(), ErrorKind::NoSuchRank { .. }),
            "{error:#}"
        );
        world.barrier("done")?;
        Ok(())
    });
}

/// Rank 3 of four is to be excluded, and `ncclCommShrink` fails on rank 1.
fn failing_shrink(world: World, aborting: bool) -> Outcome {
    /// How long a wait takes that no abort and no end of another rank completes.
    const IN_VAIN: Duration = Duration::from_secs(120);
    /// Far below that, and far above the duration of this test.
    const DEADLINE: Duration = Duration::from_secs(40);
    let stream = support::device(&world)?.new_stream()?;
    let comm = world
        .communicator("all")
        .stream(&stream)
        .with(|comm| (comm.timeouts.abort, comm.timeouts.confirm) = (IN_VAIN, IN_VAIN))
        .build()?;
    assert_eq!(sum(&comm, &stream)?, 1111.0);
    let untouched = world.communicator("untouched").stream(&stream).build()?;
    if world.rank() == 1 {
        faults::at_call("ncclCommShrink").nth(1).fail(3).keep();
    }
    world.barrier("it fails now")?;
    let begun = Instant::now();
    if world.rank() < 3 {
        let shrunk = match aborting {
            true => comm.shrink_aborting("three", &[3]),
            false => comm.shrink("three", &[3]),
        };
        let error = shrunk.map(drop).expect_err("it fails on one").to_string();
        assert!(error.contains("rank 1"), "{error:#}");
        assert!(!error.contains("did not confirm"), "{error:#}");
        assert!(begun.elapsed() < DEADLINE, "{:?}", begun.elapsed());
    }
    // On the excluded rank as well: its communicator has ended.
    while comm.state() != State::Aborted {
        assert!(begun.elapsed() < DEADLINE, "{}", comm.state());
        std::thread::sleep(Duration::from_millis(1));
    }
    let fault = comm.fault().expect("all ranks know why");
    assert_eq!(fault.culprit(), Some(1), "{fault}");
    let told = world.all_gather("cause", fault.to_string().as_bytes())?;
    assert!(
        told.iter().all(|told| *told == told_by(&fault)),
        "one cause"
    );
    assert_eq!(nccl::stats().leaked_communicators, 0);
    // Other communicators are not affected, and the ranks create another one.
    assert_eq!(sum(&untouched, &stream)?, 1111.0);
    if world.rank() < 3 {
        let shrunk = comm.shrink("again", &[3])?;
        assert!(shrunk.way.to_string().contains("aborted"), "{}", shrunk.way);
        assert_eq!(sum(&shrunk.communicator, &stream)?, 111.0);
    }
    world.barrier("done")?;
    Ok(())
}

fn told_by(fault: &Fault) -> Vec<u8> {
    fault.to_string().into_bytes()
}

#[test]
fn a_shrink_that_fails_ends_what_was_to_shrink_for_one_cause() {
    if !support::needs_emulator("calls that fail on purpose") {
        return;
    }
    ranks_as_processes(4, |world| failing_shrink(world, false));
    // Where calls block, an aborting shrink does not use `ncclCommShrink`.
    ranks_as_processes(4, |world| {
        failing_shrink(world.with_launch_mode(LaunchMode::NonBlocking), true)
    });
}

/// NCCL has an asynchronous error on rank 1 of four, and has not yet noticed it on the others.
fn refused_shrink(world: World, aborting: bool, revoked: bool) -> Outcome {
    const REFUSED: &str = "NCCL refused: remote error";
    let (stream, comm) = start(&world, TIMEOUT)?;
    assert_eq!(sum(&comm, &stream)?, 1111.0);
    let untouched = world.communicator("untouched").stream(&stream).build()?;
    if revoked {
        world.barrier("it is of use")?;
        if let Err(error) = comm.revoke("enough") {
            assert!(
                format!("{error:#}").contains("revoked it: enough"),
                "{error:#}"
            );
        }
    }
    if world.rank() == 1 {
        let remote_error = 6;
        let refusal = faults::at_call("ncclCommShrink").nth(1).fail(remote_error);
        refusal.keep();
    }
    world.barrier("it refuses now")?;
    let begun = Instant::now();
    if world.rank() < 3 {
        let shrunk = match aborting {
            true => comm.shrink_aborting("three", &[3])?,
            false => comm.shrink("three", &[3])?,
        };
        let ResizeWay::Anew { why, .. } = &shrunk.way else {
            panic!("{}", shrunk.way);
        };
        assert_eq!(why, REFUSED);
        assert_eq!(shrunk.communicator.launch_mode(), comm.launch_mode());
        assert_eq!(sum(&shrunk.communicator, &stream)?, 111.0);
        assert!(begun.elapsed() < TIMEOUT / 2, "{:?}", begun.elapsed());
        shrunk.communicator.finalize()?;
    }
    // On the excluded rank as well, which gets the reason.
    while comm.state() != State::Aborted {
        assert!(begun.elapsed() < TIMEOUT / 2, "{}", comm.state());
        std::thread::sleep(Duration::from_millis(1));
    }
    let fault = comm.fault().expect("all ranks know why").to_string();
    let expected = match (revoked, aborting) {
        (true, _) => "enough",
        (_, true) => "rank 3 is left out",
        _ => REFUSED,
    };
    assert!(fault.contains(expected), "{fault}");
    world.barrier("over")?;
    assert_eq!(nccl::stats().leaked_communicators, 0);
    assert_eq!(sum(&untouched, &stream)?, 1111.0);
    Ok(())
}

#[test]
fn where_nccl_refuses_on_one_rank_all_leave_its_call_and_make_a_new_communicator() {
    use LaunchMode::{BlockingChild, NonBlocking};
    if !support::needs_emulator("calls that fail on purpose") {
        return;
    }
    let in_mode = |mode, aborting, revoked| {
        ranks_as_processes(4, move |world| {
            refused_shrink(world.with_launch_mode(mode), aborting, revoked)
        });
    };
    in_mode(NonBlocking, false, false);
    in_mode(BlockingChild, false, false);
    // Where calls block, these do not use `ncclCommShrink`.
    in_mode(NonBlocking, true, false);
    in_mode(NonBlocking, false, true);
}

/// A rank of three is killed that shares only sockets with the others; what they do after it depends on `role`.
fn go_on_over_sockets(role: &str, world: World) -> Outcome {
    let (stream, comm) = start(&world, TIMEOUT)?;
    assert_eq!(sum(&comm, &stream)?, 111.0);
    if role.contains("revoke") {
        world.barrier("it is of use")?;
        if let Err(error) = comm.revoke("enough") {
            assert!(
                format!("{error:#}").contains("revoked it: enough"),
                "{error:#}"
            );
        }
        println!("working");
        while world.departed().is_empty() {
            std::thread::sleep(Duration::from_millis(1));
        }
    } else {
        println!("working");
        while sum(&comm, &stream).is_ok() {}
    }
    let shrunk = match role.contains("aborting") {
        true => comm.shrink_aborting("both", &[1])?,
        false => comm.shrink("both", &[1])?,
    };
    println!("way: {}", shrunk.way);
    println!("right: {}", sum(&shrunk.communicator, &stream)?);
    let next = world.next_generation(TIMEOUT)?;
    let both = next.communicator("both").stream(&stream).build()?;
    println!("right: {}", sum(&both, &stream)?);
    assert_eq!(nccl::stats().leaked_communicators, 0);
    Ok(())
}

#[test]
fn after_a_death_over_sockets_new_communicators_are_made() {
    use LaunchMode::{BlockingChild, NonBlocking};
    const RANKS: usize = 3;
    const SOCKETS: [(&str, &str); 2] = [("NCCL_P2P_DISABLE", "1"), ("NCCL_SHM_DISABLE", "1")];
    let test = name(&|| ());
    if let Some((role, world)) = apart::rank(&test, RANKS) {
        let mode = match role.contains("NonBlocking") {
            true => NonBlocking,
            false => BlockingChild,
        };
        go_on_over_sockets(&role, world.with_launch_mode(mode)).expect("two are left");
        return;
    }
    if !support::needs_processes(RANKS) {
        return;
    }
    for mode in [NonBlocking, BlockingChild] {
        for what in ["shrink", "aborting", "revoke"] {
            let role = format!("{mode} {what}");
            let mut ranks = apart::start(&test, &role, RANKS, &SOCKETS);
            apart::all_say(&mut ranks, "working");
            ranks.remove(1).kill();
            for mut rank in ranks {
                let way = rank.says("way: ");
                println!("{role}: {way}");
                let why = match (mode, what) {
                    // A revoked communicator has no connections whose end NCCL could notice.
                    (NonBlocking, "revoke") => "by NCCL's own call",
                    _ => "aborted",
                };
                assert!(way.contains(why), "{role}: {way}");
                for _ in 0..2 {
                    assert!(rank.says("right: ").contains("11"), "{role}");
                }
                rank.succeeds(TIMEOUT);
            }
        }
    }
}

#[test]
fn a_rank_that_does_not_come_to_a_shrink_is_named_and_nothing_has_happened() {
    ranks_as_processes(4, |world| -> Outcome {
        let stream = support::device(&world)?.new_stream()?;
        let comm = world.communicator("all").stream(&stream);
        let comm = comm
            .with(|comm| comm.timeouts.init = Duration::from_secs(3))
            .build()?;
        if world.rank() < 2 {
            let begun = Instant::now();
            let error = comm.shrink("three", &[3]).expect_err("one does not come");
            let text = format!("{error:#}");
            assert!(
                text.contains("rank 2") && text.contains("shrink on"),
                "{text}"
            );
            assert!(begun.elapsed() < TIMEOUT / 2, "{:?}", begun.elapsed());
        }
        world.barrier("nobody came")?;
        assert_eq!(sum(&comm, &stream)?, 1111.0);
        comm.finalize()?;
        Ok(())
    });
}

#[test]
fn a_rank_that_dies_while_a_communicator_shrinks_is_the_cause_and_the_others_go_on() {
    const RANKS: usize = 4;
    let test = name(&|| ());
    if let Some((_, world)) = apart::rank(&test, RANKS) {
        let (stream, comm) = start(&world, TIMEOUT).expect("all are there");
        if world.rank() == 2 {
            faults::at_call("ncclCommShrink").kill().keep();
        }
        world.barrier("one dies now").expect("all are there");
        if world.rank() < 3 {
            let error = comm.shrink("three", &[3]).map(drop).expect_err("one dies");
            let fault = error.fault().map(ToString::to_string).unwrap_or_default();
            println!("ended: {}", fault.replace('\n', " "));
        }
        let next = world.next_generation(TIMEOUT).expect("three are left");
        let rest = next.communicator("rest").stream(&stream).build();
        println!(
            "right: {}",
            sum(&rest.expect("they live"), &stream).expect("they work")
        );
        while !matches!(comm.state(), State::Aborted | State::Leaked) {
            std::thread::sleep(Duration::from_millis(1));
        }
        println!("leaked: {}", nccl::stats().leaked_communicators);
        return;
    }
    if !support::needs_emulator("a rank that dies in a chosen call") {
        return;
    }
    let mut ranks = apart::start(&test, "", RANKS, &[]);
    let dead = ranks.remove(2);
    for (place, mut rank) in ranks.into_iter().enumerate() {
        // The last of them was to be excluded.
        if place < 2 {
            let cause = rank.says("ended: ");
            assert!(cause.contains(&format!("pid {}", dead.pid())), "{cause}");
        }
        assert!(rank.says("right: ").contains("111"));
        let (rest, status) = rank.end(TIMEOUT);
        assert!(
            status.success() && rest.contains("leaked: 0"),
            "{status}: {rest}"
        );
    }
}
