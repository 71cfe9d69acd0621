//! PyTorch's own analyser reads the recordings, and names the rank that this crate names.
//!
//! `NCCL_TEST_PYTORCH` has the directories with its releases, as `cargo xtask flight-recorder` fetches them, with `:` between.

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nccl::cudarc::driver::CudaStream;
use nccl::recorder::{CallState, Timeline};
use nccl::{Communicator, ReduceOp, World};
use nccl_tools::gpu_check::{not_tested, tested};

use crate::support::{self, Ranks, ranks_as_processes};

type Outcome<T = ()> = Result<T, Box<dyn std::error::Error>>;

const LONG: Duration = Duration::from_secs(20);
const RANKS: usize = 3;

/// The directories in which Python finds a release of the analyser.
fn analysers() -> Vec<PathBuf> {
    let variable = std::env::var_os("NCCL_TEST_PYTORCH").unwrap_or_default();
    let directories = std::env::split_paths(&variable);
    directories.filter(|directory| directory.is_dir()).collect()
}

fn needs_analyser() -> bool {
    let found = !analysers().is_empty();
    if !found {
        not_tested("PyTorch's analyser is not here: cargo xtask flight-recorder fetches it");
    }
    found && support::needs_processes(RANKS)
}

/// What each release of the analyser reports about a timeline: nothing where nothing is wrong.
fn said_by_analysers(timeline: &Timeline) -> Outcome<Vec<String>> {
    let directory = tempfile::tempdir()?;
    for (rank, pickle) in timeline.to_pytorch_traces() {
        let file = directory.path().join(format!("nccl_trace_rank_{rank}"));
        std::fs::write(file, pickle)?;
    }
    let ask = |analyser: PathBuf| -> Outcome<String> {
        let mut command = Command::new("python3");
        command
            .args(["-B", "-m", "torch.distributed.flight_recorder.fr_trace"])
            .arg(directory.path())
            .env("PYTHONPATH", &analyser)
            .stdin(Stdio::null());
        let output = command.output()?;
        let text = String::from_utf8(output.stderr)?;
        if !output.status.success() {
            return Err(format!("{}: {text}", analyser.display()).into());
        }
        // The analyser misses a package that only its tables need.
        let lines = text
            .lines()
            .filter(|line| !line.starts_with("tabulate is not"));
        let text = lines.fold(String::new(), |all, line| all + line + "\n");
        println!("{}:\n{text}", analyser.display());
        Ok(text)
    };
    analysers().into_iter().map(ask).collect()
}

/// Fails unless each release of the analyser prints all of these lines, and reports one call alone.
fn expect_said(timeline: &Timeline, lines: &[&str]) -> Outcome {
    for text in said_by_analysers(timeline)? {
        for line in lines {
            assert!(text.lines().any(|said| said == *line), "{line:?} in {text}");
        }
        assert_eq!(text.matches("internal record id").count(), 1, "{text}");
    }
    Ok(())
}

/// Polls the recordings until they satisfy `wanted`.
fn until(world: &World, wanted: impl Fn(&Timeline) -> bool) -> Outcome<Timeline> {
    let deadline = Instant::now() + LONG;
    loop {
        let timeline = world.recordings(LONG);
        if wanted(&timeline) {
            return Ok(timeline);
        }
        if Instant::now() > deadline {
            return Err(format!("{:#?}", timeline.standings()).into());
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Whether the last call of a rank on the communicator `name` is call `sequence`, and has been issued.
fn is_in(timeline: &Timeline, rank: usize, name: &str, sequence: u64) -> bool {
    let own = timeline.ranks.iter().filter(|one| one.rank == rank);
    let mut parts = own.flat_map(|one| &one.snapshot.communicators);
    parts.any(|part| {
        let last = part.calls.last().filter(|_| part.name == name);
        last.is_some_and(|call| call.sequence == sequence && call.state == CallState::Issued)
    })
}

fn start(world: &World) -> Outcome<(Communicator, Arc<CudaStream>)> {
    let stream = support::device(world)?.new_stream()?;
    let comm = world.communicator("model/tp").stream(&stream).build()?;
    Ok((comm, stream))
}

/// Each rank sends to the next one.
fn ring(comm: &Communicator) -> Outcome {
    let (own, size) = (comm.rank(), comm.world_size());
    let x = comm.stream().alloc_zeros::<f32>(8)?;
    let mut y = comm.stream().alloc_zeros::<f32>(8)?;
    let group = comm.group(|group| {
        group.isend(&x, (own + 1) % size)?;
        group.irecv(&mut y, (own + size - 1) % size)
    })?;
    Ok(group.wait()?)
}

/// Rank 1 does not enter the second all-reduce. Before that, ranks 0 and 2 exchange messages without rank 1.
fn one_stays_away(world: World) -> Outcome {
    let (comm, stream) = start(&world)?;
    let mut y = stream.alloc_zeros::<f32>(64)?;
    comm.all_reduce_in_place(&mut y, ReduceOp::Sum)?.wait()?;
    ring(&comm)?;
    if comm.rank() != 1 {
        let x = stream.alloc_zeros::<f32>(64)?;
        let group = comm.group(|group| {
            group.isend(&x, 2 - comm.rank())?;
            group.irecv(&mut y, 2 - comm.rank())
        })?;
        group.wait()?;
        let request = comm.all_reduce_in_place(&mut y, ReduceOp::Sum)?;
        assert!(request.wait().is_err(), "rank 1 aborts");
        return Ok(());
    }
    let timeline = until(&world, |timeline| {
        [0, 2]
            .into_iter()
            .all(|rank| is_in(timeline, rank, "model/tp", 4))
    })?;
    assert_eq!(timeline.standings()[0].behind, [1]);
    expect_said(
        &timeline,
        &[
            "Not all ranks joining collective, sequence number: 2",
            "missing ranks: {1}",
            "expected ranks: {0, 1, 2}",
            "group info: 0:model/tp",
            "collective: nccl:all_reduce",
            "collective state: scheduled",
        ],
    )?;
    Ok(comm.abort("seen enough")?)
}

#[test]
fn a_rank_that_never_enters_is_the_one_that_pytorchs_analyser_misses() {
    if needs_analyser() {
        ranks_as_processes(RANKS, one_stays_away);
    }
}

/// Rank 2 is alone in not entering a gathering of ranks 0 and 2.
fn one_of_some_stays_away(world: World) -> Outcome {
    let (comm, stream) = start(&world)?;
    let even = comm.split("model/even", (comm.rank() != 1).then_some(0), 0)?;
    let mut y = stream.alloc_zeros::<f32>(64)?;
    // The split is two calls.
    let Some(even) = even else {
        let request = comm.all_reduce_in_place(&mut y, ReduceOp::Sum)?;
        assert!(request.wait().is_err(), "rank 2 aborts");
        return Ok(());
    };
    even.all_reduce_in_place(&mut y, ReduceOp::Sum)?.wait()?;
    if world.rank() == 0 {
        let request = even.all_gather(&y, &mut stream.alloc_zeros::<f32>(128)?)?;
        assert!(request.wait().is_err(), "rank 2 aborts");
        return Ok(());
    }
    let timeline = until(&world, |timeline| {
        is_in(timeline, 0, "model/even", 2) && is_in(timeline, 1, "model/tp", 3)
    })?;
    let standings = timeline.standings();
    let standing = standings
        .iter()
        .find(|one| one.communicator == "model/even");
    // Rank 1 of two, which is rank 2 of the world.
    assert_eq!(standing.ok_or("it is there")?.behind, [1]);
    for text in said_by_analysers(&timeline)? {
        let own = text
            .split("Not all ranks")
            .find(|part| part.contains("model/even"));
        let own = own.ok_or_else(|| text.clone())?;
        for line in [
            "group info: 1:model/even",
            "collective: nccl:all_gather",
            "missing ranks: {2}",
            "expected ranks: {0, 2}",
            "output sizes: [[128]]",
        ] {
            assert!(own.lines().any(|said| said == line), "{line:?} in {text}");
        }
    }
    even.abort("seen enough")?;
    Ok(comm.abort("seen enough")?)
}

#[test]
fn in_a_communicator_of_some_ranks_the_missing_one_has_its_number_in_the_world() {
    if needs_analyser() {
        ranks_as_processes(RANKS, one_of_some_stays_away);
    }
}

/// Rank 2 does not receive the message of rank 1.
fn one_does_not_receive(world: World) -> Outcome {
    let (comm, stream) = start(&world)?;
    let mut y = stream.alloc_zeros::<f32>(64)?;
    ring(&comm)?;
    comm.all_reduce_in_place(&mut y, ReduceOp::Sum)?.wait()?;
    match world.rank() {
        1 => {
            let request = comm.group(|group| group.isend(&y, 2))?;
            assert!(request.wait().is_err(), "rank 2 aborts");
        }
        2 => {
            let timeline = until(&world, |timeline| is_in(timeline, 1, "model/tp", 3))?;
            expect_said(
                &timeline,
                &[
                    "Not all ranks joining collective, sequence number: 2",
                    "missing ranks: {2}",
                    "group info: 0/1->2:model/tp",
                    "collective: nccl:send 0->1",
                    "input sizes: [[64]]",
                ],
            )?;
            comm.abort("seen enough")?;
        }
        _ => {}
    }
    Ok(world.barrier("all have seen enough")?)
}

#[test]
fn a_message_that_is_not_received_is_missed_by_pytorchs_analyser_too() {
    if needs_analyser() {
        ranks_as_processes(RANKS, one_does_not_receive);
    }
}

/// Rank 1 has fewer elements than the others.
fn one_has_another_size(world: World) -> Outcome {
    let stream = support::device(&world)?.new_stream()?;
    let comm = world
        .communicator("model/tp")
        .stream(&stream)
        .with(|comm| comm.timeouts.operation = Duration::from_secs(1))
        .build()?;
    let mut y = stream.alloc_zeros::<f32>(64)?;
    comm.all_reduce_in_place(&mut y, ReduceOp::Sum)?.wait()?;
    let len = if world.rank() == 1 { 32 } else { 64 };
    let mut y = stream.alloc_zeros::<f32>(len)?;
    let request = comm.all_reduce_in_place(&mut y, ReduceOp::Sum);
    let error = request
        .and_then(|request| request.wait())
        .expect_err("the sizes differ");
    let fault = error.fault().ok_or("there is one cause")?;
    assert_eq!(fault.culprit(), Some(1), "{error:#}");
    Ok(())
}

#[test]
fn a_rank_with_another_size_is_the_culprit_for_both() {
    if !needs_analyser() {
        return;
    }
    // The ranks run this code again, and have a directory of their own that stays empty.
    let directory = tempfile::tempdir().expect("a directory");
    let faults = directory.path().join("faults");
    Ranks::new(RANKS)
        .variable("NCCL_RUN_RECORD_DIR", &faults)
        .processes(one_has_another_size);
    let timeline = Timeline::read(&[&faults]).expect("recordings");
    let lines = [
        "Collective sequence number: 2 has errors",
        "group info: 0:model/tp",
        "input sizes: [[64]]",
        "error msg: Culprit rank 1; Error type: SIZE_OR_SYNTAX_MISMATCH, Expected input sizes: '[[64]]' does not match \
         found input sizes: '[[32]]'",
    ];
    expect_said(&timeline, &lines).expect("the analyser runs");
}

/// More calls than are recorded, of every kind, also between some of the ranks.
fn all_goes_well(world: World) -> Outcome {
    let (comm, stream) = start(&world)?;
    let (own, size) = (comm.rank(), comm.world_size());
    let mut one = stream.alloc_zeros::<f32>(8)?;
    let mut all = stream.alloc_zeros::<f32>(8 * size)?;
    let mut more = stream.alloc_zeros::<f32>(8 * size)?;
    for step in 0..400 {
        comm.all_reduce_in_place(&mut one, ReduceOp::Sum)?.wait()?;
        if own != 2 && step % 2 == 0 {
            let group = comm.group(|group| {
                group.isend(&all, 1 - own)?;
                group.irecv(&mut more, 1 - own)
            })?;
            group.wait()?;
        }
    }
    let mut plan = comm.capture(stream.alloc_zeros::<f32>(8)?, |capture, y| {
        capture.group(|group| group.all_reduce_in_place(y, ReduceOp::Sum))
    })?;
    for _ in 0..10 {
        comm.broadcast_in_place(&mut one, 1)?.wait()?;
        comm.reduce_in_place(&mut one, ReduceOp::Max, 2)?.wait()?;
        comm.all_gather(&one, &mut all)?.wait()?;
        comm.reduce_scatter(&all, &mut one, ReduceOp::Sum)?.wait()?;
        comm.all_to_all(&all, &mut more)?.wait()?;
        comm.gather(&one, (own == 1).then_some(&mut all), 1)?
            .wait()?;
        comm.scatter((own == 1).then_some(&all), &mut one, 1)?
            .wait()?;
        // Rank r sends r + 1 elements to each, and receives 1, 2, 3.
        let (send, recv) = (vec![own + 1; size], (1..=size).collect::<Vec<_>>());
        comm.all_to_all_v(&all, &send, &mut more, &recv)?.wait()?;
        plan.launch()?.wait()?;
        ring(&comm)?;
    }
    world.barrier("all is done")?;
    if own == 0 {
        let timeline = world.recordings(LONG);
        let part = &timeline.ranks[0].snapshot.communicators[0];
        assert!(part.calls[0].sequence > 1, "some are not recorded any more");
        for (_, pickle) in timeline.to_pytorch_traces() {
            let text = String::from_utf8_lossy(&pickle);
            let times = |name: &str| text.matches(&format!("nccl:{name}")).count();
            assert!(times("all_reduce") > 200, "{}", times("all_reduce"));
            for name in [
                "broadcast",
                "reduce",
                "all_gather",
                "reduce_scatter",
                "all_to_all",
                "gather",
                "scatter",
                "all_reduce_barrier",
                "send ",
                "recv ",
            ] {
                assert!(times(name) >= 10, "{name}");
            }
        }
        assert_eq!(
            timeline.standings()[0].behind,
            [2],
            "it sent fewer messages"
        );
        for text in said_by_analysers(&timeline)? {
            assert_eq!(text, "");
        }
        tested("what is right is no error for PyTorch's analyser");
    }
    Ok(world.barrier("it was looked at")?)
}

#[test]
fn of_ranks_that_do_what_they_should_pytorchs_analyser_says_nothing() {
    if needs_analyser() {
        ranks_as_processes(RANKS, all_goes_well);
    }
}
