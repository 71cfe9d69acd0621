// Two messages of a group cannot be received into one buffer.
fn main() {}

fn example(comm: &nccl::Communicator, mut y: nccl::cudarc::driver::CudaSlice<f32>) {
    let _ = comm.group(|group| {
        group.irecv(&mut y, 0)?;
        group.irecv(&mut y, 1)
    });
}
