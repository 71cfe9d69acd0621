//! The recordings of all ranks are available, whatever call their threads hang in, and also after a fault.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use nccl::recorder::{CallState, ClockSource, Timeline};
use nccl::{Communicator, ReduceOp, World};
use nccl_tools::testing::is_child;
use rustix::process::{Pid, Signal, kill_process};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt as _};

use crate::programs;
use crate::support::{self, Ranks, ranks_as_processes, ranks_as_threads};

type Outcome<T = ()> = Result<T, Box<dyn std::error::Error>>;

const LONG: Duration = Duration::from_secs(20);

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

fn start(world: &World) -> Outcome<(Communicator, nccl::cudarc::driver::CudaSlice<f32>)> {
    let stream = support::device(world)?.new_stream()?;
    let comm = world.communicator("model/tp").stream(&stream).build()?;
    let y = stream.alloc_zeros::<f32>(64)?;
    Ok((comm, y))
}

fn calls_of(timeline: &Timeline, rank: usize) -> usize {
    let one = timeline.ranks.iter().find(|one| one.rank == rank);
    let communicators = one.map(|one| &one.snapshot.communicators);
    communicators.map_or(0, |all| all.iter().map(|one| one.calls.len()).sum())
}

/// Rank 1 does not enter the second all-reduce.
fn one_stays_away(world: World) -> Outcome {
    let (comm, mut y) = start(&world)?;
    comm.all_reduce_in_place(&mut y, ReduceOp::Sum)?.wait()?;
    if world.rank() == 0 {
        let request = comm.all_reduce_in_place(&mut y, ReduceOp::Sum)?;
        assert!(request.wait().is_err(), "the other aborts");
        return Ok(());
    }
    world.phase("somewhere <else>");
    // Rank 0 may be queried while NCCL has not returned from the call.
    let timeline = until(&world, |timeline| {
        let calls = timeline.ranks.iter().find(|one| one.rank == 0);
        let calls = calls.and_then(|one| Some(&one.snapshot.communicators.first()?.calls));
        calls.is_some_and(|calls| calls.len() == 2 && calls[1].state == CallState::Issued)
    })?;
    let standings = timeline.standings();
    assert_eq!(standings.len(), 1, "one key on both ranks: {standings:?}");
    assert_eq!(
        (&standings[0].communicator[..], &standings[0].behind[..]),
        ("model/tp", &[1][..])
    );
    let sentence = &standings[0].sentence;
    assert!(sentence.starts_with("rank 1 ("), "{sentence}");
    assert!(
        sentence.contains("is behind, at all_reduce #1 (done)"),
        "{sentence}"
    );
    assert!(
        sentence.contains("rank 0 is at all_reduce #2 (issued"),
        "{sentence}"
    );

    let other = &timeline.ranks[0];
    assert_eq!(other.clock.source, ClockSource::RoundTrip);
    let uncertainty = other.clock.uncertainty_ns.ok_or("it was measured")?;
    // One machine has one clock.
    assert!(
        other.clock.offset_ns.unsigned_abs() <= uncertainty + 5_000_000,
        "{:?}",
        other.clock
    );
    let calls = &other.snapshot.communicators[0].calls;
    assert_eq!(
        (calls[0].state, calls[1].state),
        (CallState::Done, CallState::Issued)
    );
    assert!(
        calls[0].done.is_some_and(|done| done > calls[0].since),
        "{calls:?}"
    );

    let page = timeline.to_html();
    assert!(
        page.contains("is behind, at all_reduce #1"),
        "the page says so"
    );
    assert!(page.contains("somewhere &lt;else&gt;") && !page.contains("<else>"));
    let trace = timeline.to_chrome_trace();
    assert!(trace.contains("all_reduce #2 (not done)"), "{trace}");
    comm.abort("seen enough")?;
    Ok(())
}

#[test]
fn a_rank_that_never_enters_is_shown_as_behind() {
    if support::needs_processes(2) {
        ranks_as_processes(2, one_stays_away);
    }
}

/// Every rank waits for a message that no rank sends, and has no free thread but those of this crate. The last rank
/// collects from another thread.
fn all_hang_while(world: World, look: impl FnOnce(&World) -> Outcome) -> Outcome {
    let (comm, mut y) = start(&world)?;
    let size = world.size();
    comm.all_reduce_in_place(&mut y, ReduceOp::Sum)?.wait()?;
    let asks = world.rank() == size - 1;
    let mut hang = {
        let comm = comm.clone();
        let from = (world.rank() + 1) % size;
        move || {
            let group = comm.group(|group| group.irecv(&mut y, from));
            group
                .and_then(|group| group.wait())
                .expect_err("nobody sends");
        }
    };
    if !asks {
        hang();
        return Ok(());
    }
    let hanging = std::thread::spawn(hang);
    let looked = look(&world);
    comm.abort("seen enough")?;
    hanging.join().map_err(|_| "it was told")?;
    looked
}

fn until_all_hang(world: &World) -> Outcome<Timeline> {
    let ranks = 0..world.size();
    // A call is recorded a moment before its operations.
    let has_receive = |timeline: &Timeline, number: usize| {
        let mut of_rank = timeline.ranks.iter().filter(|one| one.rank == number);
        of_rank.any(|one| {
            let calls = &one.snapshot.communicators[0].calls;
            calls.get(1).is_some_and(|call| !call.operations.is_empty())
        })
    };
    until(world, |timeline| {
        let hangs = |rank| calls_of(timeline, rank) == 2 && has_receive(timeline, rank);
        ranks.clone().all(hangs)
    })
}

fn all_are_asked(world: &World) -> Outcome {
    let size = world.size();
    let begun = Instant::now();
    let timeline = until_all_hang(world)?;
    println!("{size} ranks that hang: {:?}", begun.elapsed());
    assert_eq!((timeline.ranks.len(), timeline.missing.len()), (size, 0));
    for rank in &timeline.ranks {
        let call = &rank.snapshot.communicators[0].calls[1];
        assert_eq!(call.operations[0].peer, Some((rank.rank + 1) % size));
        assert_ne!(call.state, CallState::Done);
    }
    Ok(())
}

#[test]
fn ranks_that_all_hang_can_be_asked() {
    let all_hang = |world| all_hang_while(world, all_are_asked);
    if support::needs_processes(3) {
        ranks_as_processes(3, all_hang);
    }
    ranks_as_threads(3, all_hang);
}

/// From a shell, as a user who logs in to a host where a job hangs.
fn a_doctor_asks(world: &World) -> Outcome {
    until_all_hang(world)?;
    let directory = tempfile::tempdir()?;
    let path = |name: &str| directory.path().join(name);
    let mut doctor = Command::new(programs::program("nccl-doctor"));
    doctor
        .args(["timeline", "--rendezvous"])
        .arg(std::env::var("NCCL_RUN_RENDEZVOUS")?)
        .arg("--out")
        .arg(path("page.html"))
        .arg("--json")
        .arg(path("all.json"));
    // No variables of a rank.
    for name in [
        "NCCL_RUN_RANK",
        "NCCL_RUN_WORLD_SIZE",
        "NCCL_RUN_LOCAL_RANK",
    ] {
        doctor.env_remove(name);
    }
    let output = doctor.stdin(Stdio::null()).output()?;
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{output:?}");
    assert!(said.contains("recordings of 3 of 3 ranks"), "{said}");
    let page = std::fs::read_to_string(path("page.html"))?;
    assert!(page.contains("group #2") && page.contains("Recordings of 3 of 3 ranks"));
    let timeline = Timeline::from_json(&std::fs::read_to_string(path("all.json"))?)?;
    let numbers: Vec<_> = timeline.ranks.iter().map(|one| one.rank).collect();
    assert_eq!(numbers, [0, 1, 2]);
    for rank in 0..3 {
        assert_eq!(calls_of(&timeline, rank), 2);
    }
    // By a process number alone, without any variable of the job in the environment.
    let by_process = |pid: &str| {
        let mut doctor = Command::new(programs::program("nccl-doctor"));
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("NCCL_RUN_") {
                doctor.env_remove(name);
            }
        }
        doctor.args(["timeline", "--pid", pid, "--out"]);
        doctor.arg(path("by-process.html")).stdin(Stdio::null());
        doctor.output()
    };
    let output = by_process(&std::process::id().to_string())?;
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{output:?}");
    assert!(said.contains("recordings of 3 of 3 ranks"), "{said}");
    let output = by_process("999999999")?;
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(3), "{output:?}");
    assert!(said.contains("there is no process 999999999"), "{said}");
    let output = by_process("1")?;
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(3), "{output:?}");
    assert!(said.contains("by process 1: "), "{said}");
    // There is no listener at this address.
    let nowhere = format!("unix:{}", path("nobody.sock").display());
    let mut doctor = Command::new(programs::program("nccl-doctor"));
    let arguments = ["timeline", "--rendezvous", &nowhere, "--timeout", "1"];
    let output = doctor.args(arguments).stdin(Stdio::null()).output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(
        !output.status.success() && said.contains("nobody.sock"),
        "{output:?}"
    );
    Ok(())
}

#[test]
fn a_doctor_asks_a_job_that_hangs() {
    if support::needs_processes(3) {
        ranks_as_processes(3, |world| all_hang_while(world, a_doctor_asks));
    }
}

/// Ranks, rank 0 as well, are stopped, queried in vain, and continue.
fn some_are_stopped(world: World) -> Outcome {
    if world.rank() == 1 {
        let all = world.recordings(LONG);
        for stopped in [0, 2] {
            let pid = all.ranks[stopped].snapshot.pid;
            let process = Pid::from_raw(pid.cast_signed()).ok_or("a process")?;
            kill_process(process, Signal::STOP)?;
            let begun = Instant::now();
            let timeline = world.recordings(Duration::from_millis(1500));
            let took = begun.elapsed();
            kill_process(process, Signal::CONT)?;
            println!("asked for {took:?} while rank {stopped} was stopped");
            assert!(took < LONG / 2, "{took:?}");
            assert_eq!(timeline.ranks.len(), 2, "{:?}", timeline.missing);
            let [missing] = &timeline.missing[..] else {
                return Err("one is missing".into());
            };
            assert_eq!((missing.rank, missing.pid), (stopped, Some(pid)));
            assert!(
                missing.why.contains("its process is stopped (SIGSTOP)"),
                "{missing:?}"
            );
            assert!(
                timeline
                    .to_html()
                    .contains("its process is stopped (SIGSTOP)")
            );
        }
        assert_eq!(world.recordings(LONG).ranks.len(), 3);
    }
    Ok(world.barrier("end")?)
}

#[test]
fn a_rank_that_is_stopped_is_named_as_missing_and_the_others_are_there() {
    if support::needs_processes(3) {
        ranks_as_processes(3, some_are_stopped);
    }
}

/// Rank 0 collects while rank 1 is stopped, and records another call of its own before the collection gives up.
fn one_calls_while_it_waits_for_answers(world: World) -> Outcome {
    let (comm, mut y) = start(&world)?;
    let mut to_itself = || -> Outcome {
        let x = comm.stream().alloc_zeros::<f32>(64)?;
        let group = comm.group(|group| {
            group.isend(&x, comm.rank())?;
            group.irecv(&mut y, comm.rank())
        });
        Ok(group?.wait()?)
    };
    to_itself()?;
    world.barrier("connected")?;
    if world.rank() == 0 {
        let all = world.recordings(LONG);
        let pid = all.ranks[1].snapshot.pid;
        let process = Pid::from_raw(pid.cast_signed()).ok_or("a process")?;
        kill_process(process, Signal::STOP)?;
        let timeout = Duration::from_secs(3);
        let asked = std::thread::scope(|scope| -> Outcome<Timeline> {
            let asks = scope.spawn(|| world.recordings(timeout));
            std::thread::sleep(timeout / 3);
            assert!(!asks.is_finished(), "the other one is waited for");
            to_itself()?;
            Ok(asks.join().map_err(|_| "no panic")?)
        });
        kill_process(process, Signal::CONT)?;
        let asked = asked?;
        assert_eq!((asked.ranks.len(), asked.missing.len()), (1, 1));
        assert_eq!(calls_of(&asked, 0), 1, "as of when it asked");
        assert_eq!(calls_of(&world.recordings(LONG), 0), 2);
    }
    Ok(world.barrier("end")?)
}

#[test]
fn a_ranks_own_records_are_those_of_the_moment_at_which_it_asks() {
    if support::needs_processes(2) {
        ranks_as_processes(2, one_calls_while_it_waits_for_answers);
    }
}

/// Rank 0 gives up an all-reduce that rank 1 does not enter; rank 1 gets the fault.
fn a_fault(world: World) -> Outcome {
    let (comm, mut y) = start(&world)?;
    comm.all_reduce_in_place(&mut y, ReduceOp::Sum)?.wait()?;
    if world.rank() == 0 {
        let request = comm.all_reduce_in_place(&mut y, ReduceOp::Sum)?;
        assert!(request.wait_timeout(Duration::from_millis(200)).is_err());
        comm.abort("it took too long")?;
    }
    let deadline = Instant::now() + LONG;
    while comm.recording().life == "ready" && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_ne!(comm.recording().life, "ready");
    Ok(())
}

#[test]
fn after_a_fault_every_rank_has_left_a_file_and_they_make_one_timeline() {
    if !support::needs_processes(2) {
        return;
    }
    // The ranks run this code again, and have a directory of their own that stays empty.
    let directory = tempfile::tempdir().expect("a directory");
    let faults = directory.path().join("faults");
    Ranks::new(2)
        .variable("NCCL_RUN_RECORD_DIR", &faults)
        .processes(a_fault);
    let timeline = Timeline::read(&[&faults]).expect("recordings");
    assert_eq!(timeline.ranks.len(), 2, "{timeline:?}");
    assert_eq!((timeline.missing.len(), timeline.left_out.len()), (0, 0));
    for rank in &timeline.ranks {
        let name = format!("rank-{}.pid-{}.json", rank.rank, rank.snapshot.pid);
        assert!(faults.join(name).is_file());
        let reason = rank.snapshot.reason.as_deref().expect("a reason");
        assert!(reason.contains("it took too long"), "{reason}");
        assert!(rank.snapshot.clock.is_some(), "measured when they met");
    }
    assert_eq!(timeline.ranks[1].clock.source, ClockSource::SameMachine);
    let standings = timeline.standings();
    assert_eq!(standings[0].behind, [1]);
    let last = &timeline.ranks[0].snapshot.communicators[0].calls[1];
    assert_eq!(last.state, CallState::Aborted);
}

/// How often the log reported: a recording that could not be written, another such, and one that was written.
static FAILED: AtomicUsize = AtomicUsize::new(0);
static FAILED_AGAIN: AtomicUsize = AtomicUsize::new(0);
static WRITTEN: AtomicUsize = AtomicUsize::new(0);

struct Count;

impl<S: tracing::Subscriber> Layer<S> for Count {
    fn on_event(&self, event: &tracing::Event<'_>, _: Context<'_, S>) {
        let count = match event.metadata().name() {
            "nccl.recording.failed" if *event.metadata().level() == tracing::Level::WARN => &FAILED,
            "nccl.recording.failed" => &FAILED_AGAIN,
            "nccl.recording.written" => &WRITTEN,
            _ => return,
        };
        count.fetch_add(1, Ordering::Relaxed);
    }
}

fn await_count(count: &AtomicUsize, what: &str) {
    let deadline = Instant::now() + LONG;
    while count.load(Ordering::Relaxed) == 0 {
        assert!(Instant::now() < deadline, "nothing was {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn said() -> (usize, usize) {
    let read = |count: &AtomicUsize| count.load(Ordering::Relaxed);
    (read(&FAILED), read(&WRITTEN))
}

/// Rank 0 aborts a communicator, and both ranks have its reason.
fn one_is_aborted(world: &World) -> Outcome {
    let (comm, mut y) = start(world)?;
    comm.all_reduce_in_place(&mut y, ReduceOp::Sum)?.wait()?;
    world.barrier("both are done")?;
    if world.rank() == 0 {
        comm.abort("it took too long")?;
    }
    let deadline = Instant::now() + LONG;
    while comm.fault().is_none() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(5));
    }
    let fault = comm.fault().ok_or("it was aborted")?;
    assert_eq!(fault.cause, "it took too long");
    Ok(world.barrier("both have heard")?)
}

fn the_disk_is_full(world: World) -> Outcome {
    let subscriber = tracing_subscriber::registry().with(Count);
    tracing::subscriber::set_global_default(subscriber)?;
    let faults = PathBuf::from(std::env::var_os("NCCL_RUN_RECORD_DIR").ok_or("it is set")?);
    let filler = faults.join("filler");
    if world.rank() == 0 {
        let mut file = std::fs::File::create(&filler)?;
        while file.write_all(&[0; 1024]).is_ok() {}
    }
    world.barrier("full")?;
    one_is_aborted(&world)?;
    await_count(&FAILED, "refused");
    one_is_aborted(&world)?;
    await_count(&FAILED_AGAIN, "refused again");
    assert_eq!(said(), (1, 0), "one warning for two");
    world.barrier("nothing is left")?;
    if world.rank() == 0 {
        let left = faults.read_dir()?.map(|entry| Ok(entry?.file_name()));
        let left: Vec<_> = left.collect::<Outcome<_>>()?;
        assert_eq!(left, ["filler"]);
        std::fs::remove_file(&filler)?;
    }
    world.barrier("room again")?;
    one_is_aborted(&world)?;
    await_count(&WRITTEN, "written");
    assert_eq!(said(), (1, 1));
    Ok(world.barrier("end")?)
}

/// A file system of 64 KiB, until it is dropped.
struct Small(PathBuf);

impl Small {
    fn mount(at: &Path) -> Option<Self> {
        let mut mount = Command::new("mount");
        let mounted = mount
            .args(["-t", "tmpfs", "-o", "size=64k", "small"])
            .arg(at)
            .output();
        match mounted {
            Ok(output) if output.status.success() => Some(Self(at.to_owned())),
            other => {
                eprintln!(
                    "skipped: a full disk needs a small file system, and root to mount it: {other:?}"
                );
                None
            }
        }
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let unmounted = Command::new("umount").arg("--lazy").arg(&self.0).status();
        assert!(unmounted.is_ok_and(|status| status.success()) || std::thread::panicking());
    }
}

#[test]
fn a_full_disk_is_one_warning_and_costs_nothing_but_the_recordings() {
    if !support::needs_processes(2) {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let small = match is_child() {
        // The ranks use the test's file system.
        true => None,
        false => match Small::mount(directory.path()) {
            None => return,
            small => small,
        },
    };
    Ranks::new(2)
        .variable("NCCL_RUN_RECORD_DIR", directory.path())
        .processes(the_disk_is_full);
    let timeline = Timeline::read(&[directory.path()]).expect("recordings");
    assert_eq!(timeline.ranks.len(), 2, "{timeline:?}");
    drop(small);
}
