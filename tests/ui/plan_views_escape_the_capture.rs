// The views of a plan's buffers end with the closure; afterwards the plan lends its own.
fn main() {}

fn example(comm: &nccl::Communicator, buffer: nccl::Buffer<f32>) {
    let mut kept = None;
    let _ = comm.capture(buffer, |_, view| {
        kept = Some(view);
        Ok(())
    });
}
