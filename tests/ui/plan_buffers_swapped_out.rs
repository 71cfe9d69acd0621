// The memory of a plan cannot be swapped for other memory: it is lent as views, not as a slice.
use nccl::cudarc::driver::CudaSlice;

fn main() {}

fn example(plan: &mut nccl::plan::CapturedPlan<CudaSlice<f32>>, other: &mut CudaSlice<f32>) {
    // As `std::mem::swap`, of whose declaration the compiler shows more where Rust's sources are installed.
    fn swap<T>(_: &mut T, _: &mut T) {}
    swap(plan.views_mut(), other);
}
