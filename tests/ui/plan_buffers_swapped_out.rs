// The memory of a plan cannot be swapped for other memory: it is lent as views, not as a slice.
use nccl::cudarc::driver::CudaSlice;

fn main() {}

fn example(plan: &mut nccl::CapturedPlan<CudaSlice<f32>>, mut other: CudaSlice<f32>) {
    std::mem::swap(plan.views_mut(), &mut other);
}
