// A view made inside the closure of a group does not live until the group is issued.
fn main() {}

fn example(comm: &nccl::Communicator, stream: &std::sync::Arc<nccl::cudarc::driver::CudaStream>) {
    let _ = comm.group(|group| {
        let short = stream.alloc_zeros::<f32>(8).unwrap();
        group.isend(&short, 1)
    });
}
