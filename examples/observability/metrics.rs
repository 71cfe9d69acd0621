//! The metrics of two ranks, as a server for Prometheus would show them.
//!
//! ```text
//! cargo run -p observability --bin metrics
//! ```
//!
//! The ranks are threads, on the emulator where there is no GPU. One of them does not enter its last operation, so the
//! other one times out, and the metrics show that.

use std::error::Error;
use std::time::Duration;

use metrics_exporter_prometheus::PrometheusBuilder;
use nccl::{ReduceOp, World};
use nccl_tools::spawn::threads;

type Outcome<T = ()> = Result<T, Box<dyn Error + Send + Sync>>;

fn main() -> Outcome {
    nccl_emulator::install_unless_gpu()?;
    // A server would have `install()` listen instead.
    let recorder = PrometheusBuilder::new().build_recorder();
    let handle = recorder.handle();
    metrics::set_global_recorder(recorder).map_err(|_| "there is a recorder already")?;
    let sampler = nccl::metrics::Sampler::start(Duration::from_secs(1))?;

    threads::run(World::threads(2), None, |_, world| rank(&world))
        .map_err(|failure| failure.to_string())?;

    // Takes a last sample.
    drop(sampler);
    print!("{}", handle.render());
    Ok(())
}

fn rank(world: &World) -> Outcome {
    let stream = nccl::device(world.local_rank())?.new_stream()?;
    let comm = world.communicator("model/tp").stream(&stream).build()?;
    let x = stream.clone_htod(&vec![1.0f32; 1 << 16])?;
    let mut y = stream.alloc_zeros::<f32>(1 << 16)?;
    let other = 1 - world.rank();
    for _ in 0..100 {
        comm.all_reduce(&x, &mut y, ReduceOp::Sum)?.wait()?;
        comm.group(|group| {
            group.isend(&x, other)?;
            group.irecv(&mut y, other)
        })?
        .wait()?;
    }
    if world.rank() == 0 {
        let hasty = comm.within(Duration::from_millis(200));
        let late = hasty.all_reduce(&x, &mut y, ReduceOp::Sum)?.wait();
        eprintln!("as it has to be: {}", late.err().ok_or("nobody else came")?);
    } else {
        while comm.fault().is_none() {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
    Ok(())
}
