//! The end of a process whose memory NCCL does not release: the program is told, and chooses the exit.

use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use nccl::launch::{Fleet, Report};
use nccl::process::{FatalCause, FatalExit};
use nccl::{LaunchMode, World};
use nccl_emulator::faults;
use nccl_tools::testing::{Role, again, name};

use crate::support;

const TIMEOUT: Duration = Duration::from_millis(200);

/// The setup that a program makes before the fault.
type Program = fn(&PathBuf);

/// Runs a process in which an abort hangs while memory is lent to NCCL, after `program` was called; returns how it ended,
/// and the contents of its file. `None` in that process, which does not return, and without the emulator.
fn ends(test: &str, program: Program) -> Option<(Report, String)> {
    const FILE: &str = "NCCL_TEST_FATAL_FILE";
    if let Role::Child(_) = Role::of(test) {
        let file = std::env::var_os(FILE).expect("a file");
        program(&PathBuf::from(file));
        nccl_tools::perf::install(2).expect("the emulator");
        let mut worlds = World::threads(2);
        let one = worlds.pop().expect("a world");
        let begun = |world: &World| {
            let stream = support::device(world).and_then(|context| context.new_stream());
            let stream = stream.expect("a stream");
            let comm = world.communicator("held").stream(&stream);
            // Where calls block, the thread is inside NCCL, which the hook reports as well.
            let comm = comm.with(|comm| comm.launch_mode = Some(LaunchMode::NonBlocking));
            let comm = comm
                .with(|comm| {
                    comm.timeouts.operation = TIMEOUT;
                    comm.timeouts.abort = TIMEOUT;
                })
                .build();
            (comm.expect("a communicator"), stream)
        };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let _comm = begun(&one);
                std::thread::sleep(Duration::from_secs(60));
            });
            let (comm, stream) = begun(&worlds[0]);
            faults::at_call("ncclCommAbort").hang().keep();
            let mut y = stream.alloc_zeros::<f32>(1024).expect("memory");
            let _ = comm.group(|group| group.irecv(&mut y, 1));
        });
        unreachable!("the call must not come back");
    }
    if !support::needs_emulator("an abort that hangs on purpose") {
        return None;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("heard");
    let (owned, theirs) = (test.to_owned(), file.clone());
    let fleet = Fleet::builder(1).start(move |_| -> Command {
        let mut command = again(&owned, "ends");
        command.env(FILE, &theirs);
        command
    });
    let report = fleet
        .expect("a process")
        .wait_timeout(Duration::from_secs(40));
    let heard = std::fs::read_to_string(&file).unwrap_or_default();
    Some((report.expect("it ends by itself"), heard))
}

#[test]
fn a_hook_hears_why_the_process_ends_and_chooses_its_exit_code() {
    let test = &name(&|| ());
    let Some((report, heard)) = ends(test, |file| {
        let file = file.clone();
        nccl::process::on_fatal(|_| unreachable!("another hook takes its place"));
        nccl::process::on_fatal(move |report| {
            // More than the configured timeout: a launch is in progress, which may sleep as long.
            let timeout = Duration::from_secs(4);
            assert_eq!(report.cause, FatalCause::AbortTimedOut { timeout });
            let said = format!(
                "{} {} {}",
                report.communicator, report.rank, report.world_size
            );
            std::fs::write(&file, said).expect("a file");
            FatalExit::Code(75)
        });
    }) else {
        return;
    };
    assert_eq!(heard, "held 0 2");
    assert_eq!(report.exit_code(), 75, "{report}");
    let said = report.to_string();
    assert!(
        said.contains("exit code 75") && said.contains("; ending the process"),
        "{said}"
    );
}

#[test]
fn a_hook_that_panics_leaves_the_end_as_it_is_without_one() {
    let test = &name(&|| ());
    let Some((report, _)) = ends(test, |_| nccl::process::on_fatal(|_| panic!("on purpose")))
    else {
        return;
    };
    assert_eq!(report.exit_code(), 128 + 6, "{report}");
}

#[test]
fn a_hook_that_does_not_come_back_is_waited_for_a_while() {
    let test = &name(&|| ());
    let begun = Instant::now();
    let Some((report, heard)) = ends(test, |file| {
        let file = file.clone();
        nccl::process::on_fatal(move |_| {
            std::fs::write(&file, "begun").expect("a file");
            loop {
                std::thread::park();
            }
        });
    }) else {
        return;
    };
    assert_eq!(heard, "begun");
    assert_eq!(report.exit_code(), 128 + 6, "{report}");
    assert!(begun.elapsed() > Duration::from_secs(5));
}
