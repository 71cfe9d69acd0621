//! Ranks that are threads of this process, for programs and tests that need no server.

use std::path::Path;
use std::sync::Arc;

use nccl::cudarc::driver::CudaContext;
use nccl::{ErrorKind, World};

use crate::model::{AnyPart, Error, ModelFile, OverNccl, Result, Settings};

/// The device of a rank; where there are fewer devices than ranks, one that it shares.
///
/// # Errors
/// As [`nccl::device`], without a GPU and without the emulator for instance.
pub(crate) fn device(local_rank: usize) -> nccl::Result<Arc<CudaContext>> {
    nccl::device(local_rank).or_else(|error| match *error.kind() {
        ErrorKind::NoSuchDevice { devices, .. } if devices > 0 => {
            nccl::device(local_rank % devices)
        }
        _ => Err(error),
    })
}

/// Has each of so many ranks load its part of a model, and `work` with it. What they made, in the order of the ranks.
///
/// Without a GPU, the emulator is put in place. With fewer devices than ranks, ranks share them.
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
/// Of a rank that failed by itself, if there is one: the others fail then as well, with an error that names it; before any is started, [`Error::Ranks`] and those of the file.
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
    // Without the word, the others would wait for this one as long as an operation may take.
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
        // What only one rank can say comes first: the others say that it failed.
        errors.sort_by_key(|error| matches!(error, Error::Nccl(_)));
        match errors.into_iter().next() {
            Some(error) => Err(error),
            None => Ok(all),
        }
    })
}
