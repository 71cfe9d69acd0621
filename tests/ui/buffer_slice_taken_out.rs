// NCCL's memory is no `CudaSlice`, which cudarc would free with its own allocator.
use nccl::cudarc::driver::CudaSlice;

fn main() {}

fn example(buffer: &mut nccl::Buffer<f32>) {
    let _slice: &mut CudaSlice<f32> = buffer.view_mut();
}
