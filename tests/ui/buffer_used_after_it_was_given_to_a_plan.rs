// A buffer that a plan owns is reached through the plan alone.
fn main() {}

fn example(comm: &nccl::Communicator, buffer: nccl::Buffer<f32>) {
    let _plan = comm.capture(buffer, |_, _| Ok(()));
    let _ = buffer.view();
}
