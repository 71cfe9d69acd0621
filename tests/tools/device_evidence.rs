//! The error of hanging ranks contains what NVML reports about their devices: on every rank, in the same words, and only what
//! has happened since the start of the ranks.

use std::error::Error;
use std::time::{Duration, Instant};

use nccl::host_evidence::{HostEvidence, LogAccess, NvmlAccess};
use nccl::{ReduceOp, World};
use nccl_tools::gpu_check::not_tested;

use crate::support::{self, Ranks};

type Outcome<T = ()> = Result<T, Box<dyn Error>>;

const TIMEOUT: Duration = Duration::from_millis(600);
const SOON: Duration = Duration::from_secs(30);

/// Whether the emulator's NVML can be queried here; prints the reason if not.
fn can_ask() -> bool {
    if !cfg!(feature = "nvml") {
        not_tested("what NVML says of devices: it was built without the feature `nvml`");
        return false;
    }
    support::needs_emulator("it injects states of devices")
}

/// Waits until NVML has reported the state of the devices: from then on, their counters count.
fn devices_are_healthy() {
    let begun = Instant::now();
    loop {
        let devices = HostEvidence::gather().devices;
        if devices.access == NvmlAccess::Answered && !devices.list.is_empty() {
            assert!(!devices.shows_trouble(), "{devices:?}");
            return;
        }
        assert!(begun.elapsed() < SOON, "{devices:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Rank 1 does not enter, after `before` has run on each rank. Returns what the hosts show, which is the same on all ranks.
fn one_hangs(world: &World, before: impl FnOnce(usize) -> Outcome) -> Outcome<String> {
    let stream = support::device(world)?.new_stream()?;
    let comm = world
        .communicator("work")
        .stream(&stream)
        .with(|comm| comm.timeouts.operation = SOON)
        .build()?;
    let mut y = stream.clone_htod(&[1.0f32; 100])?;
    comm.all_reduce_in_place(&mut y, ReduceOp::Sum)?.wait()?;
    devices_are_healthy();
    before(world.rank())?;
    world.barrier("the devices are as the test wants them")?;
    if world.rank() == 1 {
        // Returns when the others have given rank 1 up.
        world.barrier("they have")?;
    }
    let limited = comm.within(TIMEOUT);
    let begun = Instant::now();
    let done = limited.all_reduce_in_place(&mut y, ReduceOp::Sum);
    let error = done
        .and_then(|done| done.wait())
        .expect_err("rank 1 does not come");
    assert!(begun.elapsed() < SOON, "{:?}", begun.elapsed());
    let fault = error.fault().ok_or("there is no fault")?;
    let said = fault.host_evidence.join("; ");
    let text = format!("{error:#}");
    assert!(text.contains(&said), "{text}");
    if world.rank() != 1 {
        world.barrier("they have")?;
    }
    let all = world.all_gather("hosts", said.as_bytes())?;
    assert!(all.iter().all(|one| *one == said.as_bytes()), "{all:?}");
    world.barrier("end")?;
    Ok(said)
}

#[test]
fn errors_of_memory_and_a_lost_device_are_named_on_every_rank_when_one_hangs() {
    if !can_ask() {
        return;
    }
    Ranks::new(3).processes(|world| {
        let said = one_hangs(&world, |rank| {
            Ok(nccl_emulator::faults::nvml(match rank {
                1 => "device=1,ecc=2",
                2 => "device=2,lost",
                // Of a device that this rank does not use.
                _ => "device=1,ecc=9",
            })?)
        })?;
        for words in [
            "device 0000:02:00.0 of rank 1: 2 uncorrected ECC errors since the first communicator",
            "device 0000:03:00.0 of rank 2: the driver does not reach it any more (GPU is lost)",
        ] {
            assert!(said.contains(words), "{words} in {said}");
        }
        assert!(!said.contains("0000:01:00.0"), "{said}");
        Outcome::Ok(())
    });
}

#[test]
fn healthy_devices_and_errors_of_before_give_no_sentence() {
    if !can_ask() {
        return;
    }
    Ranks::new(3)
        .variable("NCCL_RUN_KMSG", "/dev/null")
        .variable(
            "NCCL_EMULATOR_NVML",
            "device=1,nvlink=3:crc:7,pcie-replays=9",
        )
        .processes(|world| {
            let said = one_hangs(&world, |_| Ok(()))?;
            assert!(!said.contains("device"), "{said}");
            assert!(!said.contains("NVML"), "{said}");
            Outcome::Ok(())
        });
}

#[test]
fn a_library_that_does_not_return_is_said_and_costs_no_more_than_the_limit() {
    if !can_ask() {
        return;
    }
    Ranks::new(3).processes(|world| {
        let said = one_hangs(&world, |_| {
            nccl_emulator::faults::nvml("hang")?;
            // What was gathered before is kept for a moment.
            std::thread::sleep(Duration::from_millis(200));
            let begun = Instant::now();
            let evidence = HostEvidence::gather();
            let took = begun.elapsed();
            // As the machine may be loaded, twice the limit.
            assert!(took < Duration::from_millis(500), "{took:?}");
            assert_eq!(evidence.devices.access, NvmlAccess::NoAnswer);
            assert_ne!(evidence.kernel_log.access, LogAccess::NotRead);
            Ok(())
        })?;
        assert!(said.contains("NVML did not answer (ranks 0-2)"), "{said}");
        Outcome::Ok(())
    });
}

#[test]
fn a_library_that_is_switched_off_is_not_asked() {
    if !can_ask() {
        return;
    }
    Ranks::new(1)
        .variable("NCCL_RUN_NVML", "0")
        .variable("NCCL_EMULATOR_NVML", "hang")
        .processes(|world| {
            let stream = support::device(&world)?.new_stream()?;
            let _comm = world.communicator("work").stream(&stream).build()?;
            assert_eq!(HostEvidence::gather().devices.access, NvmlAccess::NotAsked);
            assert_eq!(HostEvidence::of_host().devices.access, NvmlAccess::NotAsked);
            Outcome::Ok(())
        });
}
