// Memory is registered with the buffer that owns it, not with a view of it.

use nccl::Communicator;
use nccl::cudarc::driver::CudaView;

fn register(comm: &Communicator, view: CudaView<'static, f32>) {
    comm.register(view).expect("a registration");
}

fn main() {}
