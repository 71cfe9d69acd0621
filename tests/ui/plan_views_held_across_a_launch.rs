// A replay writes the buffers: no view of them may exist meanwhile.
fn main() {}

fn example(plan: &mut nccl::plan::CapturedPlan<nccl::Buffer<f32>>) {
    let view = plan.views();
    let _ = plan.launch();
    drop(view);
}
