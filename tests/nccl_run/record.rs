//! `--record`: what the ranks of a job did last, when one of them is killed.

use nccl::{ReduceOp, Rendezvous, World};
use nccl_tools::perf;

use super::running::{Running, options_only};

/// Not a test of its own: what the ranks of the others run.
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
                // The others have called theirs.
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
    eprintln!("{error}");
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
            .args(["--exact", "record::a_recorded_rank", "--nocapture"])
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
    // Another run into the same directory replaces nothing, and is not mixed with the first.
    run(["timeline.2.html", "trace.2.json"]);
}
