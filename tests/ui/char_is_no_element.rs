// Bytes that arrive need not be valid characters, so `char` is no element type.
fn main() {}

fn example(comm: &nccl::Communicator, y: &mut nccl::cudarc::driver::CudaSlice<char>) {
    let _ = comm.all_reduce_in_place(y, nccl::ReduceOp::Sum);
}
