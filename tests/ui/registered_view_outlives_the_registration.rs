// A view of registered memory ends before the buffer leaves its registration.
fn main() {}

fn example(registered: nccl::Registered<nccl::Buffer<f32>>) {
    let view = registered.view();
    let buffer = registered.into_inner();
    drop((view, buffer));
}
