//! Pipeline, data and tensor parallel groups of eight ranks: communicators along the axes of a mesh.
//!
//! ```text
//! cargo run --release --example subgroups
//! ```

use std::error::Error;
use std::process::ExitCode;

use nccl::{ReduceOp, World};

fn main() -> ExitCode {
    nccl::launch::local_ranks(8, rank)
}

fn rank(world: &World) -> Result<(), Box<dyn Error>> {
    nccl_emulator::install_unless_gpu()?;
    let stream = nccl::device(world.local_rank())?.new_stream()?;
    let all = world.communicator("model").stream(&stream).build()?;

    // The last axis varies fastest: ranks 0 and 1 share the layers of a stage.
    let mesh = world.mesh(&[("pp", 2), ("dp", 2), ("tp", 2)])?;
    let tensor = mesh.communicator(&all, &["tp"])?;
    let data = mesh.communicator(&all, &["dp"])?;
    let pipeline = mesh.communicator(&all, &["pp"])?;

    // A layer's halves are summed in the tensor parallel group …
    let mut activation = stream.clone_htod(&[1.0f32; 256])?;
    tensor.all_reduce_in_place(&mut activation, ReduceOp::Sum)?;
    // … go to the next stage …
    match mesh.coordinate("pp") {
        0 => pipeline.send(&activation, 1)?,
        _ => pipeline.recv(&mut activation, 0)?,
    };
    // … and gradients are averaged between the replicas.
    let mut gradient = stream.clone_htod(&[mesh.coordinate("dp") as f32; 256])?;
    data.all_reduce_in_place(&mut gradient, ReduceOp::Avg)?;

    assert_eq!(stream.clone_dtoh(&activation)?, [2.0; 256]);
    assert_eq!(stream.clone_dtoh(&gradient)?, [0.5; 256]);
    println!(
        "stage {}, with {:?} in the tensor parallel group and {:?} in the data parallel one",
        mesh.coordinate("pp"),
        mesh.ranks(&["tp"]),
        mesh.ranks(&["dp"])
    );
    Ok(())
}
