//! When the error of an aborted communicator is returned: once NCCL cannot touch lent memory any more, which is before
//! the abort has returned where only kernels used it.

use std::time::{Duration, Instant};

use nccl::{CommunicatorState as State, World};
use nccl_emulator::faults;
use nccl_tools::testing::name;

use crate::support::sums::{start, sum};
use crate::support::{self, Ranks, apart};

type Outcome<T = ()> = Result<T, Box<dyn std::error::Error>>;

const TIMEOUT: Duration = Duration::from_secs(30);
const SOON: Duration = Duration::from_millis(200);

/// The duration of an emulated abort in ms, longer than the ranks have to confirm that their kernels have ended.
const POLL: &str = "4000";

/// Rank 1 does not enter the second sum; returns the communicator's state at the error on each rank.
fn state_at_the_error(world: &World, registers: Option<usize>) -> Outcome<State> {
    let (stream, comm) = start(world, TIMEOUT)?;
    let registered = (registers == Some(world.rank()))
        .then(|| comm.register(comm.buffer::<u8>(1 << 20)?))
        .transpose()?;
    sum(&comm, &stream)?;
    world.barrier("connected")?;
    let (state, error) = if world.rank() == 0 {
        let error = sum(&comm.within(SOON), &stream).expect_err("nobody else comes");
        (comm.state(), error)
    } else {
        let begun = Instant::now();
        while comm.fault().is_none() {
            assert!(begun.elapsed() < TIMEOUT, "nothing was heard");
            std::thread::sleep(Duration::from_millis(1));
        }
        let error = sum(&comm, &stream).expect_err("it has ended");
        (comm.state(), error)
    };
    let error = format!("{error:#}");
    assert!(!error.contains("did not confirm"), "{error:#}");
    world.barrier("both have their error")?;
    let begun = Instant::now();
    while comm.state() != State::Aborted {
        assert!(begun.elapsed() < TIMEOUT, "it is {}", comm.state());
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(nccl::stats().leaked_communicators, 0);
    drop(registered);
    Ok(state)
}

#[test]
fn an_error_is_handed_out_before_the_abort_has_come_back() {
    if !support::needs_emulator("an abort that takes long on purpose") {
        return;
    }
    Ranks::new(2)
        .variable("NCCL_EMULATOR_PROXY_POLL_MS", POLL)
        .processes(|world| -> Outcome {
            assert_eq!(state_at_the_error(&world, None)?, State::Aborting);
            Ok(())
        });
}

#[test]
fn where_memory_is_registered_on_one_rank_the_end_of_all_aborts_counts() {
    if !support::needs_emulator("an abort that takes long on purpose") {
        return;
    }
    for registers in [0, 1] {
        Ranks::new(2)
            .variable("NCCL_EMULATOR_PROXY_POLL_MS", POLL)
            .processes(move |world| -> Outcome {
                assert_eq!(state_at_the_error(&world, Some(registers))?, State::Aborted);
                Ok(())
            });
    }
}

/// The stopped rank's pending write happens when it is continued, long after the error was returned.
#[test]
fn an_error_waits_for_a_rank_that_is_stopped_while_it_writes_and_names_it() {
    const RANKS: usize = 2;
    const BOUND: Duration = Duration::from_millis(1500);
    const WORDS: usize = 1 << 10;
    let test = name(&|| ());
    if let Some((_, world)) = apart::rank(&test, RANKS) {
        let stream = support::device(&world).expect("a device");
        let stream = stream.new_stream().expect("a stream");
        let comm = world
            .communicator("writing")
            .stream(&stream)
            .with(|comm| comm.timeouts.operation = TIMEOUT);
        let comm = comm
            .with(|comm| comm.timeouts.confirm = BOUND)
            .build()
            .expect("both are there");
        let peer = 1 - world.rank();
        let x = stream.clone_htod(&[7u32; WORDS]).expect("memory");
        let mut y = stream.alloc_zeros::<u32>(WORDS).expect("memory");
        let exchanged = comm.group(|group| {
            group.isend(&x, peer)?;
            group.irecv(&mut y, peer)
        });
        exchanged
            .and_then(|both| both.wait())
            .expect("they exchange");
        if world.rank() == 1 {
            // Its message is in transit when the process is stopped, and arrives when it is continued.
            faults::at_operation("Send")
                .delay(Duration::from_millis(1000))
                .keep();
            // When it continues, it writes before it aborts.
            faults::at_call("ncclCommAbort")
                .delay(Duration::from_secs(2))
                .keep();
            let sent = comm.group(|group| group.isend(&x, 0)).expect("issued");
            println!("writing");
            let _ = sent.wait();
            println!("violations: {:?}", nccl_emulator::violations());
            return;
        }
        println!("ready");
        std::io::stdin()
            .read_line(&mut String::new())
            .expect("a line");
        let begun = Instant::now();
        let waiting = comm.within(SOON).group(|group| group.irecv(&mut y, 1));
        let error = waiting
            .and_then(|waiting| waiting.wait())
            .expect_err("it is stopped");
        assert!(begun.elapsed() >= BOUND, "{:?}", begun.elapsed());
        println!("error: {}", format!("{error:#}").replace('\n', " "));
        // The memory belongs to the program again, and is reused.
        stream.memset_zeros(&mut y).expect("zeros");
        let read = || stream.clone_dtoh(&y).expect("words");
        assert_eq!(
            read(),
            [0; WORDS],
            "a process that is stopped writes nothing"
        );
        println!("zeros");
        let begun = Instant::now();
        while read() == [0; WORDS] {
            assert!(begun.elapsed() < TIMEOUT, "nothing was written");
            std::thread::sleep(Duration::from_millis(1));
        }
        println!("violations: {:?}", nccl_emulator::violations());
        return;
    }
    if !support::needs_processes(RANKS) || !support::needs_emulator("a peer that writes late") {
        return;
    }
    let late = ("NCCL_EMULATOR_LATE_WRITES", "1");
    let mut ranks = apart::start(&test, "", RANKS, &[late]);
    ranks[0].says("ready");
    ranks[1].says("writing");
    ranks[1].stop();
    ranks[0].go_on();
    let error = ranks[0].says("error: ");
    let pid = ranks[1].pid();
    assert!(
        error.contains(&format!("pid {pid}) did not confirm")) && error.contains("may still write"),
        "{error:#}"
    );
    ranks[0].says("zeros");
    ranks[1].resume();
    // The write lands at its target, in memory that still exists.
    for rank in &mut ranks {
        let violations = rank.says("violations: ");
        assert!(violations.contains("violations: []"), "{violations}");
    }
    for rank in ranks {
        rank.succeeds(TIMEOUT);
    }
}

/// Rank 1 is stopped before it could report anything.
#[test]
fn where_memory_is_registered_its_own_abort_is_waited_for_when_another_rank_is_silent() {
    const RANKS: usize = 2;
    let test = name(&|| ());
    if let Some((_, world)) = apart::rank(&test, RANKS) {
        let stream = support::device(&world).expect("a device");
        let stream = stream.new_stream().expect("a stream");
        let comm = world
            .communicator("lent")
            .stream(&stream)
            .with(|comm| comm.timeouts.operation = TIMEOUT);
        let comm = comm
            .with(|comm| comm.timeouts.confirm = SOON)
            .build()
            .expect("both are there");
        let memory = comm.buffer::<u8>(1 << 20).expect("memory");
        let registered = comm.register(memory).expect("registered");
        sum(&comm, &stream).expect("both are there");
        println!("ready");
        std::io::stdin()
            .read_line(&mut String::new())
            .expect("a line");
        let error = sum(&comm.within(SOON), &stream).expect_err("the other one is stopped");
        assert_eq!(comm.state(), State::Aborted);
        println!("error: {}", format!("{error:#}").replace('\n', " "));
        drop(registered);
        return;
    }
    if !support::needs_processes(RANKS)
        || !support::needs_emulator("an abort that takes long on purpose")
    {
        return;
    }
    let slow = ("NCCL_EMULATOR_PROXY_POLL_MS", POLL);
    let mut ranks = apart::start(&test, "", RANKS, &[slow]);
    for rank in &mut ranks {
        rank.says("ready");
    }
    ranks[1].stop();
    ranks[0].go_on();
    let error = ranks[0].says("error: ");
    assert!(error.contains("did not confirm"), "{error:#}");
    ranks.remove(0).succeeds(TIMEOUT);
    ranks.remove(0).kill();
}

/// The stopped rank belongs to the world, and not to the communicator.
#[test]
fn a_rank_that_coordinates_and_stands_still_is_named_by_its_own_number() {
    const RANKS: usize = 3;
    let test = name(&|| ());
    if let Some((_, world)) = apart::rank(&test, RANKS) {
        let stream = support::device(&world).expect("a device");
        let stream = stream.new_stream().expect("a stream");
        let comm = world
            .communicator("all")
            .stream(&stream)
            .with(|comm| comm.timeouts.operation = TIMEOUT);
        let comm = comm
            .with(|comm| comm.timeouts.confirm = SOON)
            .build()
            .expect("all are there");
        let color = (world.rank() != 0).then_some(0);
        let part = comm.split("part", color, 0).expect("all are there");
        println!("ready");
        std::io::stdin()
            .read_line(&mut String::new())
            .expect("a line");
        let Some(part) = part else { return };
        let error = part.abort("a test").map(|()| sum(&part, &stream));
        let error = error.expect("an end").expect_err("it has ended");
        println!("error: {}", format!("{error:#}").replace('\n', " "));
        println!("fault: {:?}", part.fault().map(|fault| fault.to_string()));
        return;
    }
    if !support::needs_processes(RANKS) {
        return;
    }
    let mut ranks = apart::start(&test, "", RANKS, &[]);
    for rank in &mut ranks {
        rank.says("ready");
    }
    ranks[0].stop();
    let pid = ranks[0].pid();
    for rank in &mut ranks[1..] {
        rank.go_on();
        let error = rank.says("error: ");
        let says = format!("pid {pid}) did not confirm");
        assert!(
            error.contains(&says) && error.contains("rank 0 ("),
            "{error:#}"
        );
    }
    for rank in ranks.drain(1..) {
        rank.succeeds(TIMEOUT);
    }
    ranks.remove(0).kill();
}

/// Its dropped communicator ends without a fault, long before the others time out.
#[test]
fn a_rank_that_drops_what_does_not_end_keeps_no_other_from_saying_that_it_has_let_go() {
    if !support::needs_processes(3) {
        return;
    }
    Ranks::new(3).processes(|world| -> Outcome {
        let stream = support::device(&world)?.new_stream()?;
        let comm = world
            .communicator("all")
            .stream(&stream)
            .with(|comm| comm.timeouts.operation = TIMEOUT);
        let comm = comm.with(|comm| {
            comm.timeouts.confirm = 5 * SOON;
            comm.timeouts.finalize = SOON;
        });
        let comm = comm.build()?;
        let registered = (world.rank() == 0)
            .then(|| comm.register(comm.buffer::<f32>(100)?))
            .transpose()?;
        sum(&comm, &stream)?;
        world.barrier("connected")?;
        if world.rank() == 0 {
            let mut y = stream.clone_htod(&[1f32; 100])?;
            drop(comm.all_reduce_in_place(&mut y, nccl::ReduceOp::Sum)?);
            drop((comm, registered));
            // Its abort, and the end of a confirmation that no other rank takes part in.
            std::thread::sleep(15 * SOON);
            world.barrier("dropped")?;
        } else {
            world.barrier("dropped")?;
            let error = sum(&comm.within(SOON), &stream).expect_err("rank 0 does not come");
            let error = format!("{error:#}");
            assert!(!error.contains("did not confirm"), "{error:#}");
        }
        world.barrier("over")?;
        Ok(())
    });
}
