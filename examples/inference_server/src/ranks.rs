//! Ranks that are threads of this process, for programs and tests that need no server.

use std::path::Path;

use nccl::World;
use nccl::cudarc::driver::CudaContext;

use crate::model::{Decoder, Error, OverNccl, Result, Settings, Shape, WeightsFile};

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
/// The first error of a rank; before any is started, [`Error::Ranks`] and those of the file.
///
/// # Panics
/// When a rank panics.
pub fn on_threads<T: Send>(
    ranks: usize,
    model: &Path,
    settings: Settings,
    work: impl Fn(&mut Decoder<OverNccl>) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    WeightsFile::open(model)?.config().shard(0, ranks)?;
    nccl_emulator::install_unless_gpu().map_err(|error| Error::Unusable(error.to_string()))?;
    let devices = usize::try_from(CudaContext::device_count()?)
        .unwrap_or(0)
        .max(1);
    let rank = |world: World| -> Result<T> {
        let file = WeightsFile::open(model)?;
        let stream = CudaContext::new(world.local_rank() % devices)?.new_stream()?;
        let comm = world.communicator("model").stream(&stream).build()?;
        let together = OverNccl::new(&comm, Shape::new(file.config(), settings.rows))?;
        let made = work(&mut Decoder::load(&file, together, settings)?)?;
        comm.finalize()?;
        Ok(made)
    };
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
        joined.collect::<Vec<_>>().into_iter().collect()
    })
}
