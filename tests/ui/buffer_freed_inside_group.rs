// A buffer that is part of a group cannot be dropped before the group is issued.
fn main() {}

fn example(comm: &nccl::Communicator, x: nccl::cudarc::driver::CudaSlice<f32>) {
    let _ = comm.group(|group| {
        group.isend(&x, 1)?;
        drop(x);
        Ok(())
    });
}
