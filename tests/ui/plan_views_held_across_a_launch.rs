// A replay writes the buffers: nobody may hold a view of them meanwhile.
fn main() {}

fn example(plan: &mut nccl::CapturedPlan<nccl::Buffer<f32>>) {
    let view = plan.views();
    let _ = plan.launch();
    drop(view);
}
