//! `--record`: the last calls of the ranks of a job, when one of them is killed.

use std::process::Command;

use nccl::{ReduceOp, Rendezvous, World};
use nccl_tools::perf;

use super::running::{Running, options_only};

/// The name of the test below.
const A_RECORDED_RANK: &str = "nccl_run::record::a_recorded_rank";

/// Not a test of its own: the code of the other tests' ranks.
#[test]
fn a_recorded_rank() {
    if std::env::var_os("NCCL_TEST_RECORDED").is_none() {
        return;
    }
    let run = || -> Result<(), Box<dyn std::error::Error>> {
        perf::install(3)?;
        let world = World::join(Rendezvous::from_env()?)?;
        let device = nccl::cudarc::driver::CudaContext::new(world.local_rank())?;
        let stream = device.new_stream()?;
        let comm = world.communicator("model/tp").stream(&stream).build()?;
        let other = device.new_stream()?;
        let ring = world.communicator("model/pp").stream(&other).build()?;
        let mut y = stream.alloc_zeros::<f32>(1024)?;
        let (x, mut z) = (other.alloc_zeros::<u8>(64)?, other.alloc_zeros::<u8>(64)?);
        let (next, before) = ((world.rank() + 1) % 3, (world.rank() + 2) % 3);
        world.phase("decode");
        for step in 0.. {
            nccl::recorder::note(&format!("step {step}"));
            if (world.rank(), step) == (1, 3) {
                // The others have made their calls.
                std::thread::sleep(std::time::Duration::from_millis(200));
                let own = rustix::process::getpid();
                rustix::process::kill_process(own, rustix::process::Signal::KILL)?;
            }
            comm.all_reduce_in_place(&mut y, ReduceOp::Sum)?.wait()?;
            std::thread::sleep(std::time::Duration::from_millis(2 + world.rank() as u64));
            let group = ring.group(|group| {
                group.isend(&x, next)?;
                group.irecv(&mut z, before)
            })?;
            group.wait()?;
        }
        Ok(())
    };
    let error = run().expect_err("rank 1 is killed");
    eprintln!("{error:#}");
    std::process::exit(4);
}

#[test]
fn when_a_rank_is_killed_the_others_leave_recordings_and_one_page_shows_who_is_behind() {
    let directory = tempfile::tempdir().expect("a directory");
    let faults = directory.path().join("faults");
    let run = |expected: [&str; 2]| {
        let mut command = options_only(&format!("-n 3 --record {}", faults.display()));
        command
            .arg("--")
            .arg(std::env::current_exe().expect("this test"))
            .args(["--exact", A_RECORDED_RANK, "--nocapture"])
            .env("NCCL_TEST_RECORDED", "1");
        let run = Running::start(command).finish();
        assert_eq!(run.code, 137, "{run:?}");
        let said = run.report();
        assert!(said.starts_with("what 2 of 3 ranks did last: "), "{run:?}");
        let [page, trace] = expected.map(|name| faults.join(name));
        assert!(said.contains(&page.display().to_string()), "{said}");
        let page = std::fs::read_to_string(page).expect("a page");
        for word in [
            "No recording of <b>rank 1 (",
            "killed by SIGKILL, and left none",
            "all_reduce #4",
            "nothing is known of rank 1",
            "step 3",
        ] {
            assert!(page.contains(word), "{word:?} is not in the page");
        }
        let trace = std::fs::read_to_string(trace).expect("a trace");
        let trace: serde_json::Value = serde_json::from_str(&trace).expect("JSON");
        let events = trace["traceEvents"].as_array().expect("events");
        let count = |phase: &str| events.iter().filter(|event| event["ph"] == phase).count();
        // Four all-reduces and three groups of each rank; of the messages, those from rank 2 to rank 0 have both ends.
        assert_eq!((count("X"), count("s"), count("f")), (14, 7, 7));
    };
    run(["timeline.html", "trace.json"]);
    // Another run into the same directory overwrites nothing, and is not mixed with the first.
    run(["timeline.2.html", "trace.2.json"]);
}

#[test]
fn recordings_that_a_full_disk_does_not_take_are_told_and_no_piece_of_one_is_left() {
    let directory = tempfile::tempdir().expect("a directory");
    let full = directory.path().join("full");
    std::fs::create_dir(&full).expect("a directory");
    // A small file system, which only these processes see, and a file that fills it.
    let script = "mount -t tmpfs -o size=16k full $0 || exit 99
        head -c $TAKEN /dev/zero > $0/other
        \"$@\"; code=$?; echo left: $(ls -A $0); exit $code";
    let nccl_run = options_only(&format!("-n 3 --record {}", full.display()));
    let none = format!(
        "no rank has left a recording, and none can be written to {}: No space left",
        full.display()
    );
    let some = format!(
        "the timeline cannot be written to {}: No space left",
        full.display()
    );
    // Either no recording fits, or the timeline does not fit beside them.
    for (taken, told, left) in [
        ("16384", none, "left: other\n"),
        ("0", some, "left: other rank-"),
    ] {
        let mut command = in_the_environment_of(&nccl_run, "unshare");
        command
            .args(["--mount", "sh", "-c", script])
            .arg(&full)
            .arg(nccl_run.get_program())
            .args(nccl_run.get_args())
            .arg("--")
            .arg(std::env::current_exe().expect("this test"))
            .args(["--exact", A_RECORDED_RANK, "--nocapture"])
            .env("NCCL_TEST_RECORDED", "1")
            .env("TAKEN", taken);
        let run = Running::start(command).finish();
        if run.code == 99 || run.stderr.starts_with("unshare:") {
            let why = run.stderr;
            nccl_tools::gpu_check::not_tested(format_args!(
                "no file system can be mounted here: {why}"
            ));
            return;
        }
        assert_eq!(run.code, 137, "{run:?}");
        assert_eq!(run.stderr.matches(&told).count(), 1, "{told}: {run:?}");
        assert_eq!(run.stderr.matches("No space").count(), 1, "{run:?}");
        assert!(run.stdout().contains(left), "{run:?}");
        assert!(!run.stdout().contains(".part"), "{run:?}");
    }
}

/// Another program with the environment of `command`.
fn in_the_environment_of(command: &Command, program: &str) -> Command {
    let mut other = Command::new(program);
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => other.env(name, value),
            None => other.env_remove(name),
        };
    }
    other
}
