// An operation cannot read and write one buffer; in place there is a method of its own.
fn main() {}

fn example(comm: &nccl::Communicator, mut y: nccl::cudarc::driver::CudaSlice<f32>) {
    let _ = comm.all_reduce(&y, &mut y, nccl::ReduceOp::Sum);
}
