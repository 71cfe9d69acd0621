// A registration owns its buffer: a value that borrows one could be forgotten while it is registered.
fn main() {}

fn example(comm: &nccl::Communicator, buffer: &mut nccl::Buffer<f32>) {
    let _ = comm.register(buffer);
}
