// A plan owns its buffers: a borrowed buffer could be freed before a replay.
use nccl::cudarc::driver::CudaSlice;

fn main() {}

fn example(comm: &nccl::Communicator, buffer: &mut CudaSlice<f32>) {
    let _ = comm.capture(buffer, |_, _| Ok(()));
}
