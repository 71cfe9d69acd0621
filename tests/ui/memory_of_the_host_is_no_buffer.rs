// Memory of the host is no buffer: it has to be copied to the device first.

use nccl::{Communicator, ReduceOp};

fn sum(comm: &Communicator, x: &Vec<f32>) {
    let mut y = comm.stream().alloc_zeros::<f32>(4).expect("memory");
    comm.all_reduce(x, &mut y, ReduceOp::Sum).expect("a sum");
}

fn main() {}
