//! NCCL's RAS service, asked by the client of this crate and by `nccl-doctor ras`.

use std::error::Error;
use std::process::Command;
use std::time::{Duration, Instant};

use nccl::ras::{RasAnswer, RasClient, RasReport};
use nccl::{ReduceOp, Version, World};

use crate::programs;
use crate::support::{self, Ranks};

type Outcome<T = ()> = Result<T, Box<dyn Error>>;

const LONG: Duration = Duration::from_secs(30);

/// The address of this process's RAS service.
fn address() -> Outcome<String> {
    Ok(nccl::recorder::snapshot()
        .ras_address
        .ok_or("it is chosen")?)
}

/// Queries until the answer satisfies `wanted`: the counters of the ranks are not read at one moment.
fn ask(address: &str, wanted: impl Fn(&RasReport) -> bool) -> Outcome<RasReport> {
    let deadline = Instant::now() + LONG;
    loop {
        match RasClient::connect(address, LONG)?.status()? {
            RasAnswer::Report(report) if wanted(&report) => return Ok(report),
            other if Instant::now() > deadline => return Err(format!("{other:?}").into()),
            _ => std::thread::sleep(Duration::from_millis(100)),
        }
    }
}

fn one_lags(world: World) -> Outcome {
    let stream = support::device(&world)?.new_stream()?;
    let comm = world.communicator("work").stream(&stream).build()?;
    let mut y = stream.clone_htod(&[1.0f32; 100])?;
    for _ in 0..3 {
        comm.all_reduce_in_place(&mut y, ReduceOp::Sum)?.wait()?;
    }
    let is_old = nccl::Library::load()?.version() < Version::new(2, 28, 7);
    // All processes have an address of their own.
    let addresses = world.all_gather("addresses", address().unwrap_or_default().as_bytes())?;
    if is_old {
        return Ok(world.barrier("end")?);
    }
    let mut unique = addresses.clone();
    unique.sort();
    unique.dedup();
    assert_eq!(unique.len(), world.size());

    let request = match world.rank() {
        1 => None,
        _ => Some(comm.all_reduce_in_place(&mut y, ReduceOp::Sum)?),
    };
    world.barrier("two have called")?;
    if world.rank() == 0 {
        for address in &addresses {
            let address = std::str::from_utf8(address)?;
            let report = ask(address, |report| report.lagging().len() == 1)?;
            let lagging = &report.lagging()[0];
            assert_eq!((lagging.rank, lagging.function.as_str()), (1, "AllReduce"));
            assert_eq!((lagging.launched, lagging.most), (3, 4));
            let of = |one: &nccl::ras::RasCommunicator| one.hash == lagging.communicator;
            let communicator = report.communicators.iter().find(|one| of(one));
            let communicator = communicator.ok_or("it is there")?;
            assert_eq!((communicator.size, communicator.ranks.len()), (3, 3));
            assert_eq!(communicator.missing_ranks, []);
        }
        let doctor = |arguments: &[&str]| {
            let mut command = Command::new(programs::program("nccl-doctor"));
            command.args(["ras", "--address", &address().unwrap()]);
            command.args(arguments).output()
        };
        let output = doctor(&[])?;
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains("has launched 3 of 4 AllReduce"), "{said}");
        let said = String::from_utf8(doctor(&["--json"])?.stdout)?;
        let value: serde_json::Value = serde_json::from_str(&said)?;
        assert_eq!(value["findings"][0]["check"], "ras-lagging", "{said}");
        let mut command = Command::new(programs::program("nccl-doctor"));
        let output = command
            .args(["ras", "--pid", &std::process::id().to_string()])
            .output()?;
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(said.contains("has launched 3 of 4 AllReduce"), "{output:?}");
        let said = String::from_utf8(doctor(&["--verbose"])?.stdout)?;
        assert!(said.contains("Job summary"), "{said}");
    }
    world.barrier("asked")?;
    match request {
        Some(request) => request.wait()?,
        None => comm.all_reduce_in_place(&mut y, ReduceOp::Sum)?.wait()?,
    }
    Ok(world.barrier("end")?)
}

#[test]
fn the_rank_that_has_launched_fewer_collectives_is_named_by_each_process() {
    Ranks::new(3).processes(one_lags);
}

fn one_is_late_until_the_others_give_up(world: World) -> Outcome {
    let stream = support::device(&world)?.new_stream()?;
    let comm = world
        .communicator("work")
        .stream(&stream)
        .with(|comm| comm.timeouts.operation = Duration::from_secs(4))
        .build()?;
    let mut y = stream.clone_htod(&[1.0f32; 100])?;
    for _ in 0..3 {
        comm.all_reduce_in_place(&mut y, ReduceOp::Sum)?.wait()?;
    }
    if world.rank() == 1 {
        world.barrier("they have given up")?;
    }
    let done = comm.all_reduce_in_place(&mut y, ReduceOp::Sum);
    let error = done.and_then(|done| done.wait()).expect_err("it hangs");
    let fault = error.fault().ok_or_else(|| format!("{error:#}"))?;
    let said = fault.evidence.join("\n");
    let expected = ": rank 1 has launched 3 of 4 AllReduce";
    if nccl::Library::load()?.version() >= Version::new(2, 28, 7) {
        assert!(said.contains("NCCL's RAS service, asked "), "{said}");
        assert!(said.contains(expected), "{said}");
    } else {
        assert!(!said.contains("RAS"), "{said}");
    }
    if world.rank() != 1 {
        world.barrier("they have given up")?;
    }
    Ok(world.barrier("end")?)
}

#[test]
fn what_the_service_said_when_a_rank_was_late_is_evidence_when_the_others_give_up() {
    Ranks::new(3)
        .variable("NCCL_RUN_STRAGGLER_TIMEOUT", "0.5")
        .processes(one_is_late_until_the_others_give_up);
}

#[test]
fn where_no_service_listens_the_doctor_says_where_it_looked() {
    let mut command = Command::new(programs::program("nccl-doctor"));
    let output = command.args(["ras", "--address", "127.0.0.1:1"]).output();
    let output = output.unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(3), "{said}");
    for words in ["127.0.0.1:1", "Connection refused", "NCCL_RAS_ADDR"] {
        assert!(said.contains(words), "{said}");
    }
}
