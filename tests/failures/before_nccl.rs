//! Failures before NCCL is asked for a communicator, during the exchanges of its ranks: all ranks have one fault, as
//! later.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use nccl::cudarc::driver::CudaStream;
use nccl::fault::FaultClass;
use nccl::{AbortSignal, Rendezvous, World};

use crate::support::{self, ranks_as_processes, ranks_as_threads};

type Outcome = Result<(), Box<dyn std::error::Error>>;

/// Long enough for a loaded machine, far below any of the timeouts.
const SOON: Duration = Duration::from_secs(15);

fn stream(world: &World) -> Result<Arc<CudaStream>, Box<dyn std::error::Error>> {
    Ok(support::device(world)?.new_stream()?)
}

/// The signal may arrive during any of the exchanges before NCCL's init, and other ranks may have completed that one.
#[test]
fn an_abort_signal_that_was_given_before_is_heard_of_on_all_ranks() {
    ranks_as_processes(3, |world| -> Outcome {
        let stream = stream(&world)?;
        let rank = world.rank();
        let place = std::env::temp_dir().join(format!("nccl-signal-{}", std::process::id()));
        let place = world.broadcast("place", 0, place.as_os_str().as_encoded_bytes())?;
        let place = String::from_utf8(place)?;
        for turn in 0..40 {
            let path = format!("{place}-{turn}");
            let other = World::join(Rendezvous::unix(path, rank, 3)?)?;
            let signal = AbortSignal::new();
            if rank == 1 + turn % 2 {
                // This rank arrives last, so that the exchange ends for all ranks with it.
                std::thread::sleep(Duration::from_millis(2));
                signal.abort();
            }
            let begun = Instant::now();
            let error = other
                .communicator("never")
                .stream(&stream)
                .with(|comm| {
                    comm.timeouts.init = Duration::from_secs(40);
                    comm.abort_signals.push(signal.clone());
                })
                .build()
                .unwrap_err();
            assert!(begun.elapsed() < SOON, "turn {turn}: {error:#}");
            same_fault(&world, &other, &error, FaultClass::Asked, 1 + turn % 2)?;
        }
        Ok(())
    });
}

/// Asserts that all ranks have a fault of this class, with rank `culprit` of `other`, in the same words, beside their
/// errors and in them.
fn same_fault(
    world: &World,
    other: &World,
    error: &nccl::Error,
    class: FaultClass,
    rank: usize,
) -> Outcome {
    let fault = error
        .fault()
        .ok_or_else(|| format!("no fault: {error:#}"))?;
    assert_eq!(
        (fault.class, fault.culprit()),
        (class, Some(rank)),
        "{error:#}"
    );
    assert_eq!(other.fault().as_ref(), Some(fault));
    assert_eq!(
        error.is_timeout(),
        class == FaultClass::TimedOut,
        "{error:#}"
    );
    let kind = error.report().kind;
    let says = format!("{kind}\n{fault}\n{:?}\n{:?}", fault.root, fault.evidence);
    for other in world.all_gather("fault", says.as_bytes())? {
        assert_eq!(String::from_utf8(other)?, says);
    }
    Ok(())
}

#[test]
fn ranks_that_are_threads_have_one_fault_before_nccl_is_asked_as_well() {
    // An independent channel for the comparison of the ranks' results.
    let beside: Arc<[_]> = World::threads(3).into_iter().map(Mutex::new).collect();
    for (class, culprit) in [
        (FaultClass::Gone, 2),
        (FaultClass::Asked, 1),
        (FaultClass::TimedOut, 0),
        (FaultClass::Failed, 1),
    ] {
        let beside = Arc::clone(&beside);
        ranks_as_threads(3, move |world| -> Outcome {
            let stream = stream(&world)?;
            let beside = beside[world.rank()].lock().unwrap();
            let is_culprit = world.rank() == culprit;
            let signal = AbortSignal::new();
            let mut timeout = Duration::from_secs(40);
            let mut most = 8;
            if is_culprit {
                std::thread::sleep(Duration::from_millis(5));
            }
            match class {
                FaultClass::Gone if is_culprit => {
                    world.fail(&std::io::Error::other("no weights"));
                    beside.all_gather("fault", b"")?;
                    return Ok(());
                }
                FaultClass::Asked if is_culprit => signal.abort(),
                FaultClass::TimedOut if is_culprit => {
                    std::thread::sleep(Duration::from_secs(5));
                }
                FaultClass::TimedOut => timeout = Duration::from_secs(2),
                FaultClass::Failed if is_culprit => most = 4,
                _ => {}
            }
            let error = world
                .communicator("never")
                .stream(&stream)
                .with(|comm| {
                    (comm.config.min_ctas, comm.config.max_ctas) = (Some(8), Some(most));
                    comm.timeouts.init = timeout;
                    comm.abort_signals.push(signal.clone());
                })
                .build()
                .unwrap_err();
            if class == FaultClass::Gone {
                let fault = error
                    .fault()
                    .ok_or_else(|| format!("no fault: {error:#}"))?;
                assert_eq!(
                    (fault.class, fault.culprit()),
                    (class, Some(culprit)),
                    "{error:#}"
                );
                assert!(fault.to_string().contains("no weights"), "{fault}");
                beside.all_gather("fault", b"")?;
                return Ok(());
            }
            same_fault(&beside, &world, &error, class, culprit)
        });
    }
}
