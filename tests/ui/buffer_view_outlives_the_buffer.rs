// A view ends before its buffer does.
fn main() {}

fn example(comm: &nccl::Communicator) {
    let view = {
        let buffer = comm.buffer::<f32>(8).unwrap();
        buffer.view()
    };
    drop(view);
}
