// A reduction is a value, not its name.

use nccl::Communicator;
use nccl::cudarc::driver::CudaSlice;

fn sum(comm: &Communicator, y: &mut CudaSlice<f32>) {
    comm.all_reduce_in_place(y, "sum").expect("a sum");
}

fn main() {}
