// Sent and received elements have one type.
fn main() {}

fn example(
    comm: &nccl::Communicator,
    x: &nccl::cudarc::driver::CudaSlice<f32>,
    y: &mut nccl::cudarc::driver::CudaSlice<i32>,
) {
    let _ = comm.all_to_all(x, y);
}
