//! Makes the communicators of all ranks, when one process drives all GPUs.

use std::sync::Arc;

use cudarc::driver::CudaStream;

use super::CommunicatorBuilder;
use crate::abort::AbortSignal;
use crate::communicator::Communicator;
use crate::error::{Error, ErrorKind, Result};
use crate::library::Library;
use crate::peers;
use crate::threads;
use crate::unique_id::UniqueId;

/// Makes the communicators of a world whose ranks are all in this process, one per stream; `set` configures the builder of
/// each rank.
pub(super) fn init_all(
    name: &str,
    streams: &[Arc<CudaStream>],
    set: impl Fn(CommunicatorBuilder<'_>) -> CommunicatorBuilder<'_> + Sync,
) -> Result<Vec<Communicator>> {
    if streams.is_empty() {
        return Err(Error::new(ErrorKind::InvalidConfig {
            field: "streams",
            reason: String::from("a world has at least one rank, and each needs a stream"),
        }));
    }
    let id = UniqueId::new(&Library::load()?)?;
    // With peers, the fault of one communicator ends all.
    let all_ranks: Arc<[usize]> = (0..streams.len()).collect();
    let mut peers = peers::connect_threads(streams.len()).map(Vec::into_iter);
    // If a rank failed, the other ranks would wait for it.
    let failed = AbortSignal::new();
    let made: Vec<Result<Communicator>> = std::thread::scope(|scope| {
        let ranks: Vec<_> = streams
            .iter()
            .enumerate()
            .map(|(rank, stream)| {
                let (set, failed) = (&set, &failed);
                let peers = peers.as_mut().and_then(Iterator::next);
                let world_members = peers.map(|peers| (peers, Arc::clone(&all_ranks)));
                let make = move || {
                    let _guard = AbortOnPanic(failed);
                    let builder = CommunicatorBuilder::with_id(name, id, rank, streams.len())
                        .stream(stream)
                        .with_world_members(world_members)
                        .with(|comm| comm.abort_signals.push(failed.clone()));
                    set(builder).build().inspect_err(|_| failed.abort())
                };
                threads::scoped(scope, "nccl-init", make)
                    .map_err(threads::not_started("for a rank of init_all"))
                    .inspect_err(|_| failed.abort())
            })
            .collect();
        ranks
            .into_iter()
            .map(|rank| match rank?.join() {
                Ok(made) => made,
                Err(panic) => std::panic::resume_unwind(panic),
            })
            .collect()
    });
    let mut errors = Vec::new();
    let mut comms = Vec::with_capacity(streams.len());
    for made in made {
        match made {
            Ok(comm) => comms.push(comm),
            Err(error) => errors.push(error),
        }
    }
    // The rank that failed first has its own error; the others gave up because of that rank.
    let told = |error: &Error| {
        error.kind_is_of_fault() || matches!(error.kind(), ErrorKind::Aborted { .. })
    };
    errors.sort_by_key(told);
    match errors.into_iter().next() {
        None => Ok(comms),
        Some(error) => {
            for comm in comms {
                // Its peers are gone, so it could not be finalized.
                let _ = comm.abort("another rank of init_all failed");
            }
            Err(error)
        }
    }
}

/// Makes the other ranks give up when this one panics, which may happen in the program's `set`.
struct AbortOnPanic<'a>(&'a AbortSignal);

impl Drop for AbortOnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.abort();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use cudarc::driver::CudaContext;

    use super::*;
    use crate::error::ErrorProperty;
    use crate::threads::scarcity;

    #[test]
    fn ranks_that_have_begun_do_not_wait_for_one_that_has_no_thread() {
        nccl_emulator::install_unless_gpu().expect("an emulator or a GPU");
        let streams: Vec<_> = (0..2)
            .filter_map(|device| CudaContext::new(device).ok()?.new_stream().ok())
            .collect();
        if streams.len() < 2 {
            println!("not tested here: it needs two devices");
            return;
        }
        let begun = Instant::now();
        scarcity::set(Some(1));
        let made = Communicator::init_all_with("scarce", &streams, |builder| {
            builder.with(|comm| comm.timeouts.operation = Duration::from_secs(60))
        });
        scarcity::set(None);
        let error = made.expect_err("rank 1 has no thread");
        assert!(error.is(ErrorProperty::NoThread), "{error}");
        assert!(
            error.to_string().contains("for a rank of init_all"),
            "{error}"
        );
        assert!(
            begun.elapsed() < Duration::from_secs(30),
            "{:?}",
            begun.elapsed()
        );
        // With enough threads, they are made.
        let comms = Communicator::init_all("enough", &streams).unwrap();
        assert_eq!(comms.len(), 2);
        for comm in comms {
            comm.abort("done").unwrap();
        }
    }
}
