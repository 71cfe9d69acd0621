//! Ranks that are threads of this process, for programs and tests that need no server.

use std::path::Path;
use std::sync::Arc;

use nccl::cudarc::driver::CudaContext;
use nccl::{ErrorKind, World};

use crate::model::{AnyPart, Error, ModelFile, OverNccl, Result, Settings};

/// Returns the device of a rank. With fewer devices than ranks, ranks share devices.
///
/// # Errors
/// Those of [`nccl::device`], for instance without a GPU and without the emulator.
pub(crate) fn device(local_rank: usize) -> nccl::Result<Arc<CudaContext>> {
    nccl::device(local_rank).or_else(|error| match *error.kind() {
        ErrorKind::NoSuchDevice { devices, .. } if devices > 0 => {
            nccl::device(local_rank % devices)
        }
        _ => Err(error),
    })
}

/// Runs `work` on `ranks` ranks, each with its part of the model, and returns the results in the order of the ranks.
///
/// Without a GPU, the ranks run on the emulator. With fewer devices than ranks, ranks share devices.
///
/// ```
/// use inference_server::model::{self, Collectives, Settings};
/// let ranks = inference_server::ranks::on_threads(2, &model::tiny(), Settings::default(), |decoder| {
///     Ok(decoder.ranks().rank())
/// })?;
/// assert_eq!(ranks, [0, 1]);
/// # Ok::<(), model::Error>(())
/// ```
///
/// # Errors
/// [`Error::Ranks`], and those of the file, before any rank is started. If a rank fails by itself, the error of that rank: the
/// other ranks then fail with errors that name it.
///
/// # Panics
/// When a rank panics.
pub fn on_threads<T: Send>(
    ranks: usize,
    model: &Path,
    settings: Settings,
    work: impl Fn(&mut AnyPart<OverNccl>) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    ModelFile::open(model)?.check_ranks(ranks)?;
    nccl_emulator::install_unless_gpu().map_err(|error| Error::Unusable(error.to_string()))?;
    let part = |world: &World| -> Result<T> {
        let file = ModelFile::open(model)?;
        let stream = device(world.local_rank())?.new_stream()?;
        let comm = world.communicator("model").stream(&stream).build()?;
        let together = OverNccl::new(&comm, file.shape(settings.rows))?;
        let made = work(&mut *file.load(together, settings)?)?;
        comm.finalize()?;
        Ok(made)
    };
    // Without this report, the other ranks would wait for this one until the timeout of their operation.
    let rank = |world: World| part(&world).inspect_err(|error| world.fail(error));
    std::thread::scope(|scope| {
        let threads: Vec<_> = World::threads(ranks)
            .into_iter()
            .map(|world| scope.spawn(|| rank(world)))
            .collect();
        let joined = threads.into_iter().map(|thread| {
            thread
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        });
        let (mut all, mut errors) = (Vec::new(), Vec::new());
        for outcome in joined {
            match outcome {
                Ok(made) => all.push(made),
                Err(error) => errors.push(error),
            }
        }
        // Errors of the rank itself come first: NCCL errors of the others only report that it failed.
        errors.sort_by_key(|error| matches!(error, Error::Nccl(_)));
        match errors.into_iter().next() {
            Some(error) => Err(error),
            None => Ok(all),
        }
    })
}
