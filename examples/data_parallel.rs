//! Data parallel training: gradients are reduced in buckets, on a second stream, while the next layer's are still computed.
//!
//! ```text
//! cargo run --release --example data_parallel
//! ```
//!
//! The model is a sum of linear layers that learns to add its inputs up; the arithmetic is on the host, so that the program
//! needs no kernels. What matters is where the streams wait for each other.

use std::error::Error;
use std::process::ExitCode;
use std::sync::Arc;

use nccl::cudarc::driver::{CudaSlice, CudaStream};
use nccl::{Communicator, ReduceOp, World};

const LAYERS: usize = 4;
const WIDTH: usize = 16;
const STEPS: usize = 300;
const RATE: f32 = 0.3;

fn main() -> ExitCode {
    nccl::launch::local_ranks(2, rank)
}

fn rank(world: &World) -> Result<(), Box<dyn Error>> {
    nccl_emulator::install_unless_gpu()?;
    let device = nccl::device(world.local_rank())?;
    let (compute, reduce) = (device.new_stream()?, device.new_stream()?);
    // Operations of this communicator go to the second stream.
    let comm = world.communicator("gradients").stream(&reduce).build()?;

    // All ranks start with the weights of rank 0.
    let mut weights = vec![vec![world.rank() as f32; WIDTH]; LAYERS];
    for layer in &mut weights {
        let mut on_device = reduce.clone_htod(layer)?;
        comm.broadcast_in_place(&mut on_device, 0)?;
        *layer = reduce.clone_dtoh(&on_device)?;
    }
    let mut buckets = Vec::new();
    for _ in 0..LAYERS {
        buckets.push(compute.alloc_zeros::<f32>(WIDTH)?);
    }
    let mut loss = f32::MAX;
    for step in 0..STEPS {
        let inputs = inputs(step, world.rank());
        let error = predict(&weights, &inputs) - inputs.iter().sum::<f32>();
        loss = error * error;
        // From the last layer to the first, as a backward pass computes them.
        for layer in (0..LAYERS).rev() {
            let gradient: Vec<f32> = inputs.iter().map(|input| 2.0 * error * input).collect();
            start_reduction(&comm, &compute, &mut buckets[layer], &gradient)?;
        }
        for (layer, bucket) in weights.iter_mut().zip(&buckets) {
            // On the communicator's stream, behind the reductions.
            let gradient = reduce.clone_dtoh(bucket)?;
            for (weight, gradient) in layer.iter_mut().zip(gradient) {
                *weight -= RATE * gradient;
            }
        }
    }
    println!(
        "loss {loss:.6} after {STEPS} steps, weight {:.3}",
        weights[0][0]
    );
    // The weights must be equal on all ranks, or the replicas would drift apart.
    let mine = weights[0][0].to_bits().to_le_bytes();
    let all = world.all_gather("weights", &mine)?;
    assert!(all.iter().all(|one| *one == mine), "{all:?}");
    assert!(loss < 1e-3, "{loss}");
    Ok(())
}

/// Puts a gradient on the compute stream, as a kernel would, and its reduction on the communicator's stream. The reduction
/// waits for the kernel, and the next kernel that writes to the bucket waits for the reduction: the crate orders streams by
/// buffer.
fn start_reduction(
    comm: &Communicator,
    compute: &Arc<CudaStream>,
    bucket: &mut CudaSlice<f32>,
    gradient: &[f32],
) -> Result<(), Box<dyn Error>> {
    compute.memcpy_htod(gradient, bucket)?;
    comm.all_reduce_in_place(bucket, ReduceOp::Avg)?;
    Ok(())
}

/// Returns different data on each rank.
fn inputs(step: usize, rank: usize) -> Vec<f32> {
    let number = |index: usize| {
        let mixed = ((step * 2 + rank) * WIDTH + index + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        (mixed >> 40) as f32 / (1u32 << 24) as f32 - 0.5
    };
    (0..WIDTH).map(number).collect()
}

fn predict(weights: &[Vec<f32>], inputs: &[f32]) -> f32 {
    let layer = |layer: &Vec<f32>| layer.iter().zip(inputs).map(|(w, x)| w * x).sum::<f32>();
    weights.iter().map(layer).sum::<f32>() / LAYERS as f32
}
