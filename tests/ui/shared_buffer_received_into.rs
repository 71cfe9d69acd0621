// What is received into has to be borrowed exclusively.

use nccl::cudarc::driver::CudaSlice;
use nccl::{Communicator, ReduceOp};

fn sum(comm: &Communicator, x: &CudaSlice<f32>, y: &CudaSlice<f32>) {
    comm.all_reduce(x, y, ReduceOp::Sum).expect("a sum");
}

fn main() {}
